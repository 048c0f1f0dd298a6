//! Looks up centroids of codes of 2 to 6 bits. Codes of 4, 5 and 6 bits are unpacked to words of four nibbles, plus
//! further bits. `pair_codes` unpacks codes of 2 and 3 bits.

use std::arch::x86_64::*;

use super::{FixedCodes, pair_codes, rounding::table, vector};
use crate::cpu::attend::kv_rows::PackedRows;

/// Looks up the low bits of each word in 32 centroids, or in 64 from two vectors.
#[inline(always)]
unsafe fn look_up<const BITS: u32>(table: [__m512i; 2], index: __m512i) -> __m512i {
    // SAFETY: AVX-512 BW is enabled.
    unsafe {
        if BITS == 6 {
            _mm512_permutex2var_epi16(table[0], index, table[1])
        } else {
            _mm512_permutexvar_epi16(index, table[0])
        }
    }
}

/// The low four bits of each word from `low`, the other bits from `high`.
#[inline(always)]
unsafe fn join(low: __m512i, high: __m512i) -> __m512i {
    // SAFETY: AVX-512 is enabled. 0xCA selects the second operand's bit if the first's is one, otherwise the third's.
    unsafe { _mm512_ternarylogic_epi32::<0xCA>(_mm512_set1_epi16(15), low, high) }
}

impl<const BITS: u32> FixedCodes for PackedRows<BITS> {
    const BITS: u32 = BITS;
    const HALVES: bool = false;
    type Table = [__m512i; 2];

    #[inline(always)]
    unsafe fn table() -> [__m512i; 2] {
        let centroids = table(BITS).centroids.as_ptr();
        // SAFETY: the table has 256 entries.
        unsafe { [_mm512_loadu_si512(centroids.cast()), _mm512_loadu_si512(centroids.add(32).cast())] }
    }

    #[inline(always)]
    unsafe fn key(&self, table: [__m512i; 2], row: usize, chunk: usize) -> [__m512i; 2] {
        // SAFETY: passed on to the caller.
        unsafe {
            if BITS <= 3 {
                let index = pair_codes::key(self, row, chunk);
                let second = _mm512_srli_epi16::<8>(index);
                return [_mm512_permutexvar_epi16(index, table[0]), _mm512_permutexvar_epi16(second, table[0])];
            }
            let low = _mm512_broadcast_i64x4(_mm256_loadu_si256(self.low(row).add(chunk * 32).cast()));
            let high = self.high(row).wrapping_add(chunk * 8 * Self::PLANE_BITS.1);
            // The further bits of a word's four coordinates, from bit 4 on.
            let high = match BITS {
                4 => _mm512_setzero_si512(),
                5 => {
                    // Nibble i of 64 bits: byte i/2 goes to word i; for odd i, the upper half is used.
                    let bytes = _mm512_set1_epi64(high.cast::<i64>().read_unaligned());
                    _mm512_slli_epi16::<4>(_mm512_shuffle_epi8(bytes, vector(&const { nibbles(false) })))
                }
                _ => {
                    let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(high.cast()));
                    _mm512_slli_epi16::<4>(_mm512_broadcast_i64x4(bytes))
                }
            };
            let mut keys = [_mm512_setzero_si512(); 2];
            for (i, key) in keys.iter_mut().enumerate() {
                let low = _mm512_srlv_epi16(low, vector(&const { shifts(4, 0) }[i]));
                let index = match BITS {
                    4 => low,
                    5 => join(low, _mm512_srlv_epi16(high, vector(&const { shifts(1, 4) }[i]))),
                    _ => join(low, _mm512_srlv_epi16(high, vector(&const { shifts(2, 0) }[i]))),
                };
                *key = look_up::<BITS>(table, index);
            }
            keys
        }
    }

    #[inline(always)]
    unsafe fn pair<const SETS: usize, const FIRST: usize>(
        &self,
        table: [__m512i; 2],
        [a, b]: [usize; 2],
        chunk: usize,
    ) -> [__m512i; SETS] {
        if BITS <= 3 {
            // SAFETY: passed on to the caller.
            unsafe {
                let mut values = [_mm512_setzero_si512(); SETS];
                let words = pair_codes::two_values(self, [a, b], chunk);
                for (i, two) in values.chunks_exact_mut(2).enumerate() {
                    let index = pair_codes::two_sets::<BITS>(words, FIRST / 2 + i);
                    two[0] = _mm512_permutexvar_epi16(index, table[0]);
                    two[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(index), table[0]);
                }
                return values;
            }
        }
        let at = chunk * 8 * Self::PLANE_BITS.1;
        // SAFETY: passed on to the caller.
        unsafe {
            let low_a = _mm256_loadu_si256(self.low(a).add(chunk * 32).cast());
            let low_b = _mm256_loadu_si256(self.low(b).add(chunk * 32).cast());
            let (low_a, low_b) = (_mm512_castsi256_si512(low_a), _mm512_castsi256_si512(low_b));
            let low = _mm512_permutex2var_epi16(low_a, vector(&const { in_turn() }), low_b);
            let (a, b) = (self.high(a).wrapping_add(at), self.high(b).wrapping_add(at));
            let high = match BITS {
                4 => _mm512_setzero_si512(),
                5 => {
                    let (a, b) = (a.cast::<i64>().read_unaligned(), b.cast::<i64>().read_unaligned());
                    let bytes = _mm512_broadcast_i32x4(_mm_set_epi64x(b, a));
                    let bytes = _mm512_shuffle_epi8(bytes, vector(&const { nibbles(true) }));
                    _mm512_srlv_epi16(_mm512_slli_epi16::<4>(bytes), vector(&const { odd_fours() }))
                }
                _ => {
                    let a = _mm512_cvtepu8_epi32(_mm_loadu_si128(a.cast()));
                    let b = _mm512_cvtepu8_epi32(_mm_loadu_si128(b.cast()));
                    _mm512_slli_epi16::<4>(_mm512_or_si512(a, _mm512_slli_epi32::<16>(b)))
                }
            };
            let mut values = [_mm512_setzero_si512(); SETS];
            for (i, value) in values.iter_mut().enumerate() {
                let low = by_fours(low, FIRST + i);
                let index = match BITS {
                    4 => low,
                    5 => join(low, by_ones(high, FIRST + i)),
                    _ => join(low, by_twos(high, FIRST + i)),
                };
                *value = look_up::<BITS>(table, index);
            }
            values
        }
    }
}

macro_rules! shift_right {
    ($($name:ident: $bits:literal),*) => { $(
        /// Shifts words right by multiples of a number of bits that is known at compile time.
        #[inline(always)]
        unsafe fn $name(x: __m512i, times: usize) -> __m512i {
            // SAFETY: AVX-512 BW is enabled.
            unsafe {
                match times {
                    0 => x,
                    1 => _mm512_srli_epi16::<$bits>(x),
                    2 => _mm512_srli_epi16::<{ 2 * $bits }>(x),
                    _ => _mm512_srli_epi16::<{ 3 * $bits }>(x),
                }
            }
        }
    )* };
}
shift_right!(by_ones: 1, by_twos: 2, by_fours: 4);

/// For keys: the shifts that align each coordinate's `bits` bits with those of coordinate 4i. Words of odd i begin
/// `odd` bits higher.
const fn shifts(bits: u16, odd: u16) -> [[u16; 32]; 2] {
    let mut shifts = [[0; 32]; 2];
    let mut at = 0;
    while at < 64 {
        let (vector, lane) = (at / 32, at % 32);
        shifts[vector][lane] = bits * (2 * vector + lane / 16) as u16 + odd * (lane % 2) as u16;
        at += 1;
    }
    shifts
}

/// For values: words of odd coordinates begin four bits higher.
const fn odd_fours() -> [u16; 32] {
    let mut shifts = [0; 32];
    let mut lane = 0;
    while lane < 32 {
        shifts[lane] = 4 * (lane / 2 % 2) as u16;
        lane += 1;
    }
    shifts
}

/// Interleaves the words of two vectors.
const fn in_turn() -> [u16; 32] {
    let mut order = [0; 32];
    let mut lane = 0;
    while lane < 32 {
        order[lane] = (lane / 2 + lane % 2 * 32) as u16;
        lane += 1;
    }
    order
}

/// Permute indices: word i gets byte i/2, with zero (0x80) in its upper half. `pairs`: words alternate between two
/// strings of 8 bytes.
const fn nibbles(pairs: bool) -> [u8; 64] {
    let mut order = [0x80; 64];
    let mut lane = 0;
    while lane < 32 {
        order[2 * lane] = if pairs { lane / 4 + lane % 2 * 8 } else { lane % 16 / 2 } as u8;
        lane += 1;
    }
    order
}
