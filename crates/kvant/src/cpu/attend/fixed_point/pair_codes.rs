//! Unpacks indices of codes of 2 and 3 bits, which are stored as pairs of bits and single bits.
//!
//! Byte i of a chunk's low plane holds the pairs of coordinates 4i to 4i + 3, and nibble i of its high plane their
//! single bits. One permute gathers the bits of four words in each 64 bits. A multishift then extracts a window of 8
//! bits for every byte. The result holds the indices of two vectors of centroids: one in even bytes, the other in odd
//! ones. Bits above an index are arbitrary, because the tables repeat.

use std::arch::x86_64::*;

use super::vector;
use crate::cpu::attend::kv_rows::PackedRows;

/// The offset of a chunk's single bits in 64 bits.
const SINGLES_AT: u8 = 32;

/// The indices of a chunk of a key, in the order of `FixedCodes::key`: the second vector's in odd bytes.
///
/// # Safety
/// The instructions of `Avx512Vbmi` are enabled; the row and the chunk exist.
#[inline(always)]
pub(super) unsafe fn key<const BITS: u32>(rows: &PackedRows<BITS>, row: usize, chunk: usize) -> __m512i {
    // SAFETY: passed on to the caller: 16 bytes of the low plane, 8 of the high one.
    unsafe {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(rows.low(row).add(16 * chunk).cast()));
        let bytes = if BITS == 3 {
            let high = _mm_loadl_epi64(rows.high(row).add(8 * chunk).cast());
            _mm256_inserti128_si256::<1>(low, high)
        } else {
            low
        };
        let words = _mm512_permutexvar_epi8(vector(&const { key_bytes() }), _mm512_castsi256_si512(bytes));
        indices::<BITS>(words, &const { key_windows(0, 2) }, &const { key_windows(SINGLES_AT - 2, 1) })
    }
}

/// The bits of a chunk of two values, for [`two_sets`].
///
/// # Safety
/// As for [`key`].
#[inline(always)]
pub(super) unsafe fn two_values<const BITS: u32>(rows: &PackedRows<BITS>, [a, b]: [usize; 2], chunk: usize) -> __m512i {
    // SAFETY: as in `key`.
    unsafe {
        let low_a = _mm256_castsi128_si256(_mm_loadu_si128(rows.low(a).add(16 * chunk).cast()));
        let low_b = _mm_loadu_si128(rows.low(b).add(16 * chunk).cast());
        let low = _mm512_castsi256_si512(_mm256_inserti128_si256::<1>(low_a, low_b));
        let bytes = if BITS == 3 {
            let a = rows.high(a).add(8 * chunk).cast::<i64>().read_unaligned();
            let b = rows.high(b).add(8 * chunk).cast::<i64>().read_unaligned();
            _mm512_inserti32x4::<2>(low, _mm_set_epi64x(b, a))
        } else {
            low
        };
        _mm512_permutexvar_epi8(vector(&const { value_bytes() }), bytes)
    }
}

/// The indices of sets `2 · HALF` (in even bytes) and `2 · HALF + 1` (in odd bytes) of two values interleaved.
///
/// # Safety
/// The instructions are enabled.
#[inline(always)]
pub(super) unsafe fn two_sets<const BITS: u32>(words: __m512i, half: usize) -> __m512i {
    // SAFETY: passed on to the caller.
    unsafe {
        if half == 0 {
            indices::<BITS>(words, &const { value_windows(0, 2, 0) }, &const { value_windows(SINGLES_AT - 2, 1, 0) })
        } else {
            indices::<BITS>(words, &const { value_windows(0, 2, 2) }, &const { value_windows(SINGLES_AT - 2, 1, 2) })
        }
    }
}

/// Extracts the pairs with `pairs`; bit 2, the single bit, is extracted with `singles`.
#[inline(always)]
unsafe fn indices<const BITS: u32>(words: __m512i, pairs: &[u8; 64], singles: &[u8; 64]) -> __m512i {
    // SAFETY: AVX-512 VBMI is enabled. 0xCA selects the second operand's bit if the first's is one, otherwise the
    // third's.
    unsafe {
        let index = _mm512_multishift_epi64_epi8(vector(pairs), words);
        if BITS == 2 {
            return index;
        }
        let single = _mm512_multishift_epi64_epi8(vector(singles), words);
        _mm512_ternarylogic_epi32::<0xCA>(_mm512_set1_epi8(4), single, index)
    }
}

/// The bytes of each 64 bits: four of pairs, two of single bits. Single bits follow 16 bytes of pairs.
const fn key_bytes() -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut at = 0;
    while at < 64 {
        let (quarter, i) = (at / 8 % 4, at % 8);
        bytes[at] = if i < 4 { 4 * quarter + i } else { 16 + 2 * quarter + i % 2 } as u8;
        at += 1;
    }
    bytes
}

/// The offset of the window of each byte: word i of four of a set begins at bit `first` plus a multiple of `width`.
const fn key_windows(first: u8, width: u8) -> [u8; 64] {
    let mut windows = [0; 64];
    let mut at = 0;
    while at < 64 {
        let (word, set) = (at / 2 % 4, at % 2 * 2 + at / 32);
        windows[at] = first + width * (4 * word + set) as u8;
        at += 1;
    }
    windows
}

/// As [`key_bytes`], for two values: two bytes of pairs of each, then a byte of single bits of each. 16 bytes of pairs
/// of both precede 8 bytes of single bits of both.
const fn value_bytes() -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut at = 0;
    while at < 64 {
        let (eighth, i) = (at / 8, at % 8);
        bytes[at] = if i < 4 { 2 * eighth + i % 2 + i / 2 * 16 } else { 32 + eighth + i % 2 * 8 } as u8;
        at += 1;
    }
    bytes
}

/// As [`key_windows`], for two values: interleaved words of both, of two sets from `set` on.
const fn value_windows(first: u8, width: u8, set: usize) -> [u8; 64] {
    let mut windows = [0; 64];
    let mut at = 0;
    while at < 64 {
        let (word, set) = (at / 2 % 4, set + at % 2);
        let (value, of_value) = (word % 2, word / 2);
        windows[at] = first + width * (8 * value + 4 * of_value + set) as u8;
        at += 1;
    }
    windows
}
