//! Looks up centroids of 8-bit codes.

use std::arch::x86_64::*;

use super::{CHUNK, FixedCodes, rounding::table};
use crate::cpu::attend::kv_rows::ByteRows;

impl ByteRows {
    /// The centroids of 64 codes, as words: first the lower eight of every 16 codes, then the upper eight.
    #[inline(always)]
    unsafe fn look_up([low, next_low, high, next_high, ones]: [__m512i; 5], codes: __m512i) -> [__m512i; 2] {
        // SAFETY: AVX-512 BW and VBMI are enabled.
        unsafe {
            // The table has only half of the codes: for a centroid, code 255 − i has the inverted bits of code i.
            let upper = _mm512_movepi8_mask(codes);
            let codes = _mm512_mask_sub_epi8(codes, upper, ones, codes);
            let low = _mm512_permutex2var_epi8(low, codes, next_low);
            let high = _mm512_permutex2var_epi8(high, codes, next_high);
            let low = _mm512_mask_sub_epi8(low, upper, ones, low);
            let high = _mm512_mask_sub_epi8(high, upper, ones, high);
            [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
        }
    }
}

impl FixedCodes for ByteRows {
    const BITS: u32 = 8;
    const HALVES: bool = true;
    /// The lower bytes of 128 centroids, the upper ones, and a vector of ones. The ones are loaded from memory: if the
    /// compiler knew them, it would turn each masked subtraction into two instructions.
    type Table = [__m512i; 5];

    #[inline(always)]
    unsafe fn table() -> [__m512i; 5] {
        let bytes = table(8).bytes.as_ptr();
        // SAFETY: the level's instructions are enabled; the table has these bytes.
        unsafe {
            let mut vectors = [_mm512_setzero_si512(); 5];
            for (i, vector) in vectors.iter_mut().enumerate() {
                *vector = _mm512_loadu_si512(bytes.add(64 * i).cast());
            }
            vectors
        }
    }

    #[inline(always)]
    unsafe fn key(&self, table: [__m512i; 5], row: usize, chunk: usize) -> [__m512i; 2] {
        // SAFETY: passed on to the caller.
        unsafe { Self::look_up(table, _mm512_loadu_si512(self.row(row).add(chunk * CHUNK).cast())) }
    }

    #[inline(always)]
    unsafe fn pair<const SETS: usize, const FIRST: usize>(
        &self,
        table: [__m512i; 5],
        [a, b]: [usize; 2],
        chunk: usize,
    ) -> [__m512i; SETS] {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut values = [_mm512_setzero_si512(); SETS];
            let a = _mm512_loadu_si512(self.row(a).add(chunk * CHUNK).cast());
            let b = _mm512_loadu_si512(self.row(b).add(chunk * CHUNK).cast());
            for (i, two) in values.chunks_exact_mut(2).enumerate() {
                // Interleave the codes of both values before the lookup, so that their words are interleaved, too.
                let codes = if FIRST / 2 + i == 0 { _mm512_unpacklo_epi8(a, b) } else { _mm512_unpackhi_epi8(a, b) };
                two.copy_from_slice(&Self::look_up(table, codes));
            }
            values
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{codec, cpu::SimdLevel};

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni")]
    unsafe fn words(codes: &[u8; 64]) -> [i16; 64] {
        let mut words = [0; 64];
        // SAFETY: the caller enables the instructions; both arrays have whole vectors.
        unsafe {
            let [a, b] = ByteRows::look_up(ByteRows::table(), _mm512_loadu_si512(codes.as_ptr().cast()));
            _mm512_storeu_si512(words.as_mut_ptr().cast(), a);
            _mm512_storeu_si512(words.as_mut_ptr().add(32).cast(), b);
        }
        words
    }

    #[test]
    fn every_code_is_its_centroid_less_half_a_unit() {
        if !SimdLevel::Avx512Vbmi.is_supported() {
            return;
        }
        let centroids = codec::centroids(8).unwrap();
        let unit = f64::from(centroids[255]) / 16383.5;
        for first in (0..256).step_by(64) {
            let codes = std::array::from_fn(|i| (first + i) as u8);
            // SAFETY: the processor has the instructions.
            let words = unsafe { words(&codes) };
            for (at, word) in words.into_iter().enumerate() {
                let code = first + at % 32 / 8 * 16 + at / 32 * 8 + at % 8;
                let off = f64::from(centroids[code]) / unit - (f64::from(word) + 0.5);
                assert!(off.abs() < 0.501, "code {code}: {word} is off by {off}");
            }
        }
    }
}
