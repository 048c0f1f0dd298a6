//! Centroids of codes of 2 to 6 bits, which come as words of four nibbles, or of four pairs of bits, and further bits.

use std::arch::x86_64::*;

use super::{FixedCodes, rounding::table, vector};
use crate::cpu::attend::kv_rows::PackedRows;

/// The centroids by the low bits of each word: 32, or 64 from two vectors.
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

/// The low bits of each word from `low`, four or two of them, the others from `high`.
#[inline(always)]
unsafe fn join<const BITS: u32>(low: __m512i, high: __m512i) -> __m512i {
    let low_bits = if BITS == 3 { 3 } else { 15 };
    // SAFETY: AVX-512 is enabled. 0xCA: where the first operand has a one, the second, elsewhere the third.
    unsafe { _mm512_ternarylogic_epi32::<0xCA>(_mm512_set1_epi16(low_bits), low, high) }
}

/// Pairs of bits: a byte in each word.
#[inline(always)]
unsafe fn pairs(from: *const u8) -> __m512i {
    // SAFETY: AVX-512 BW is enabled; 16 bytes are there. They are loaded twice over, for both halves.
    unsafe { _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128(from.cast()))) }
}

/// The same of two strings of bytes, words in turn.
#[inline(always)]
unsafe fn pairs_in_turn(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: AVX-512 is enabled; 16 bytes are there of each.
    unsafe {
        let a = _mm512_cvtepu8_epi32(_mm_loadu_si128(a.cast()));
        let b = _mm512_cvtepu8_epi32(_mm_loadu_si128(b.cast()));
        _mm512_or_si512(a, _mm512_slli_epi32::<16>(b))
    }
}

/// Single bits of 64 coordinates: word i has those of four, from bit `BITS` − 1 on if i is even, and four bits higher if
/// it is odd.
#[inline(always)]
unsafe fn singles<const BITS: u32>(bytes: __m512i, order: &[u8; 64]) -> __m512i {
    // SAFETY: AVX-512 BW is enabled.
    unsafe {
        // Nibble i of 64 bits: byte i/2 in word i, whose upper half is taken where i is odd.
        let bytes = _mm512_shuffle_epi8(bytes, vector(order));
        if BITS == 3 { _mm512_slli_epi16::<2>(bytes) } else { _mm512_slli_epi16::<4>(bytes) }
    }
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
            let (low_bits, high_bits) = Self::PLANE_BITS;
            let (low, high) =
                (self.low(row).add(chunk * 8 * low_bits), self.high(row).wrapping_add(chunk * 8 * high_bits));
            let low = match BITS {
                2 | 3 => pairs(low),
                _ => _mm512_broadcast_i64x4(_mm256_loadu_si256(low.cast())),
            };
            // The further bits of a word's four coordinates, from bit 4 on (at 3 bits: from bit 2 on).
            let high = match BITS {
                3 | 5 => {
                    let bytes = _mm512_set1_epi64(high.cast::<i64>().read_unaligned());
                    singles::<BITS>(bytes, &const { nibbles(false) })
                }
                6 => _mm512_slli_epi16::<4>(pairs(high)),
                _ => _mm512_setzero_si512(),
            };
            let mut keys = [_mm512_setzero_si512(); 2];
            for (i, key) in keys.iter_mut().enumerate() {
                let low = match BITS {
                    2 | 3 => _mm512_srlv_epi16(low, vector(&const { shifts(2, 0) }[i])),
                    _ => _mm512_srlv_epi16(low, vector(&const { shifts(4, 0) }[i])),
                };
                let index = match BITS {
                    3 | 5 => join::<BITS>(low, _mm512_srlv_epi16(high, vector(&const { shifts(1, 4) }[i]))),
                    6 => join::<BITS>(low, _mm512_srlv_epi16(high, vector(&const { shifts(2, 0) }[i]))),
                    _ => low,
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
        let (low_bits, high_bits) = Self::PLANE_BITS;
        let (low_at, high_at) = (chunk * 8 * low_bits, chunk * 8 * high_bits);
        // SAFETY: passed on to the caller.
        unsafe {
            let (low_a, low_b) = (self.low(a).add(low_at), self.low(b).add(low_at));
            let low = match BITS {
                2 | 3 => pairs_in_turn(low_a, low_b),
                _ => {
                    let low_a = _mm512_castsi256_si512(_mm256_loadu_si256(low_a.cast()));
                    let low_b = _mm512_castsi256_si512(_mm256_loadu_si256(low_b.cast()));
                    _mm512_permutex2var_epi16(low_a, vector(&const { in_turn() }), low_b)
                }
            };
            let (a, b) = (self.high(a).wrapping_add(high_at), self.high(b).wrapping_add(high_at));
            let high = match BITS {
                3 | 5 => {
                    let (a, b) = (a.cast::<i64>().read_unaligned(), b.cast::<i64>().read_unaligned());
                    let bytes = _mm512_broadcast_i32x4(_mm_set_epi64x(b, a));
                    let bits = singles::<BITS>(bytes, &const { nibbles(true) });
                    _mm512_srlv_epi16(bits, vector(&const { odd_fours() }))
                }
                6 => _mm512_slli_epi16::<4>(pairs_in_turn(a, b)),
                _ => _mm512_setzero_si512(),
            };
            let mut values = [_mm512_setzero_si512(); SETS];
            for (i, value) in values.iter_mut().enumerate() {
                let low = if BITS <= 3 { by_twos(low, FIRST + i) } else { by_fours(low, FIRST + i) };
                let index = match BITS {
                    3 | 5 => join::<BITS>(low, by_ones(high, FIRST + i)),
                    6 => join::<BITS>(low, by_twos(high, FIRST + i)),
                    _ => low,
                };
                *value = look_up::<BITS>(table, index);
            }
            values
        }
    }
}

macro_rules! shift_right {
    ($($name:ident: $bits:literal),*) => { $(
        /// Moves words right by so many times a number of bits, which the compiler knows.
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

/// For keys: what moves each coordinate's `bits` bits to where word 4i's are; words of odd i begin `odd` bits higher.
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

/// Words of two vectors in turn.
const fn in_turn() -> [u16; 32] {
    let mut order = [0; 32];
    let mut lane = 0;
    while lane < 32 {
        order[lane] = (lane / 2 + lane % 2 * 32) as u16;
        lane += 1;
    }
    order
}

/// Byte i/2 for word i, 0x80 (zero) above it; `pairs`: of two strings of 8 bytes in turn.
const fn nibbles(pairs: bool) -> [u8; 64] {
    let mut order = [0x80; 64];
    let mut lane = 0;
    while lane < 32 {
        order[2 * lane] = if pairs { lane / 4 + lane % 2 * 8 } else { lane % 16 / 2 } as u8;
        lane += 1;
    }
    order
}
