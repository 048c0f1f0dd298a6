//! Centroids of codes of 8 bits.

use std::arch::x86_64::*;

use super::{CHUNK, Codes, rounding::table};
use crate::cpu::attend::rows::Bytes;

impl Bytes {
    /// The centroids of 64 codes, as words: first the lower eight of every 16 codes, then the upper eight.
    #[inline(always)]
    unsafe fn look_up(table: [__m512i; 8], codes: __m512i) -> [__m512i; 2] {
        // SAFETY: AVX-512 BW and VBMI are enabled.
        unsafe {
            let upper = _mm512_movepi8_mask(codes);
            // By the low seven bits of each code; the table's quarters are lower bytes, then upper bytes.
            let low = _mm512_permutex2var_epi8(table[0], codes, table[1]);
            let low = _mm512_mask_blend_epi8(upper, low, _mm512_permutex2var_epi8(table[2], codes, table[3]));
            let high = _mm512_permutex2var_epi8(table[4], codes, table[5]);
            let high = _mm512_mask_blend_epi8(upper, high, _mm512_permutex2var_epi8(table[6], codes, table[7]));
            [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
        }
    }
}

impl Codes for Bytes {
    const BITS: u32 = 8;
    type Table = [__m512i; 8];

    #[inline(always)]
    unsafe fn table() -> [__m512i; 8] {
        let bytes = &table(8).bytes;
        // SAFETY: the level's instructions are enabled.
        let mut vectors = [unsafe { _mm512_setzero_si512() }; 8];
        for (i, vector) in vectors.iter_mut().enumerate() {
            // SAFETY: four vectors of each.
            *vector = unsafe { _mm512_loadu_si512(bytes[i / 4].as_ptr().add(i % 4 * 64).cast()) };
        }
        vectors
    }

    #[inline(always)]
    unsafe fn key(&self, table: [__m512i; 8], row: usize, chunk: usize) -> [__m512i; 2] {
        // SAFETY: passed on to the caller.
        unsafe { Self::look_up(table, _mm512_loadu_si512(self.row(row).add(chunk * CHUNK).cast())) }
    }

    #[inline(always)]
    unsafe fn pair<const SETS: usize, const FIRST: usize>(
        &self,
        table: [__m512i; 8],
        [a, b]: [usize; 2],
        chunk: usize,
    ) -> [__m512i; SETS] {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut values = [_mm512_setzero_si512(); SETS];
            let a = _mm512_loadu_si512(self.row(a).add(chunk * CHUNK).cast());
            let b = _mm512_loadu_si512(self.row(b).add(chunk * CHUNK).cast());
            for (i, two) in values.chunks_exact_mut(2).enumerate() {
                // The codes of both in turn before they are looked up: then their words are, too.
                let codes = if FIRST / 2 + i == 0 { _mm512_unpacklo_epi8(a, b) } else { _mm512_unpackhi_epi8(a, b) };
                two.copy_from_slice(&Self::look_up(table, codes));
            }
            values
        }
    }
}
