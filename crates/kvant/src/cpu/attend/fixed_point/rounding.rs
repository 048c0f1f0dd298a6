//! Rounds centroids (once), queries and weights to integers.

use std::{arch::x86_64::*, sync::OnceLock};

use super::CHUNK;
use crate::{
    codec,
    cpu::attend::{kv_rows::KvRows, tile::TILE},
};

/// The outermost centroid.
const LARGEST: f32 = 16383.0;
/// Maximum sum of the rounded magnitudes that contribute to one 32-bit sum: i32::MAX / (LARGEST + 1) = 131 071, minus
/// one half for each of up to 64 rounded numbers. A multiple of a tile's keys, so that equal weights are exact.
const SUM: f32 = 64.0 * 2047.0;
/// The factor by which units of rounded numbers are multiplied and units of centroids divided. Without it, the units of
/// small numbers would be subnormal.
pub(super) const UNIT: f32 = 1024.0;

/// The centroids of a number of bits as integers, and their unit.
pub(super) struct CentroidTable {
    pub centroids: [i16; 256],
    /// The first 128 of 256 centroids, minus half a unit each: the lower bytes, the upper bytes; then 64 times 255.
    pub bytes: [u8; 5 * 64],
    /// The unit of a centroid, divided by [`UNIT`].
    pub unit: f32,
}

pub(super) fn table(bits: u32) -> &'static CentroidTable {
    static TABLES: [OnceLock<CentroidTable>; 9] = [const { OnceLock::new() }; 9];
    TABLES[bits as usize].get_or_init(|| {
        let all = codec::centroids(bits).expect("a layer's codec has been checked");
        let half = if bits == 8 { 0.5 } else { 0.0 };
        let unit = all[all.len() - 1] / (LARGEST + half);
        // Shorter tables repeat, because permutes use as many index bits as their tables have.
        let centroids: [i16; 256] = std::array::from_fn(|i| (all[i % all.len()] / unit - half).round() as i16);
        let bytes = std::array::from_fn(|i| centroids[i % 128].to_le_bytes().get(i / 128).copied().unwrap_or(255));
        CentroidTable { centroids, bytes, unit: unit / UNIT }
    })
}

/// Rounds a query: blocks of `side.block` coordinates to `to`, and the unit of each block, times [`UNIT`], to `units`.
pub(in super::super) fn round_query(side: &KvRows, q: &[f32], to: &mut [i16], units: &mut [f32]) {
    let blocks = q.chunks_exact(side.block).zip(to.chunks_exact_mut(side.block));
    for ((q, to), to_unit) in blocks.zip(units) {
        // SAFETY: a side is in fixed point only if the processor has the instructions.
        *to_unit = unsafe { round_block(q, side.interleaved, to) };
    }
}

/// Rounds a block of a query, and returns its unit, times [`UNIT`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn round_block(q: &[f32], interleaved: bool, to: &mut [i16]) -> f32 {
    let mut vectors = [_mm512_setzero_ps(); codec::BLOCK / 16];
    let count = q.len() / 16;
    let fours = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
    let mut largest = _mm512_setzero_ps();
    // SAFETY: vectors of whole chunks of q, and of equally many elements of `to`.
    unsafe {
        for (i, x) in vectors[..count].iter_mut().enumerate() {
            let chunk = q.as_ptr().add(i / 4 * CHUNK);
            *x = if interleaved {
                _mm512_i32gather_ps::<4>(fours, chunk.add(i % 4))
            } else {
                let from = chunk.add(i % 2 * 32 + i % 4 / 2 * 8);
                _mm512_insertf32x8::<1>(_mm512_castps256_ps512(_mm256_loadu_ps(from)), _mm256_loadu_ps(from.add(16)))
            };
            // `max` may drop NaN; the sum propagates it.
            largest = _mm512_max_ps(_mm512_abs_ps(*x), largest);
        }
        let largest = _mm512_reduce_max_ps(largest);
        let power = power(largest);
        if power != 1.0 {
            for x in &mut vectors[..count] {
                *x = _mm512_mul_ps(*x, _mm512_set1_ps(power));
            }
        }
        let mut sums = [_mm512_setzero_ps(); 2];
        for (i, &x) in vectors[..count].iter().enumerate() {
            sums[i % 2] = _mm512_add_ps(_mm512_abs_ps(x), sums[i % 2]);
        }
        // Two neighbours are added into one sum.
        let [a, b] = sums;
        let a = _mm512_add_ps(a, _mm512_permute_ps::<0b10_11_00_01>(a));
        let b = _mm512_add_ps(b, _mm512_permute_ps::<0b10_11_00_01>(b));
        let finite = _mm512_reduce_add_ps(_mm512_add_ps(a, b)).is_finite();
        let (factor, unit) = factor(largest * power, _mm512_reduce_max_ps(_mm512_max_ps(a, b)), finite);
        for (i, &x) in vectors[..count].iter().enumerate() {
            let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(factor)));
            _mm256_storeu_si256(to.as_mut_ptr().add(16 * i).cast(), _mm512_cvtepi32_epi16(rounded));
        }
        unit * UNIT * power.recip()
    }
}

/// A power of two that scales numbers with a very large or small maximum, so that their sums and the inverse of a unit
/// are finite.
fn power(largest: f32) -> f32 {
    const FAR: f32 = (1u128 << 96) as f32;
    const LIMIT: f32 = (1u128 << 64) as f32;
    match () {
        () if largest > LIMIT => FAR.recip(),
        () if largest < LIMIT.recip() => FAR,
        () => 1.0,
    }
}

/// The factor that numbers are multiplied by before rounding, and their unit, given the largest magnitude and the
/// largest sum of magnitudes in one lane. If a number is not finite, the unit is NaN, which propagates to the result.
fn factor(largest: f32, sum: f32, finite: bool) -> (f32, f32) {
    let factor = (32767.0 / largest).min(SUM / sum);
    match () {
        () if !finite => (0.0, f32::NAN),
        // All numbers are zero.
        () if !factor.is_finite() => (0.0, 0.0),
        () => (factor, factor.recip()),
    }
}

/// Rounds the weights of a tile's keys, `[TILE]`. Returns their unit, times [`UNIT`], and the sum of the rounded
/// weights.
///
/// The unit is chosen so that the rounded weights have the same sum as the weights. The softmax divides by the sum of
/// the weights: with another sum, the tile would weigh too much or too little.
#[inline(always)]
pub(super) unsafe fn round_weights(keys: usize, weights: *const f32, to: *mut i16) -> (f32, f32) {
    // SAFETY: AVX-512 is enabled; the caller guarantees both rows of TILE elements.
    unsafe {
        let mut w = [_mm512_setzero_ps(); TILE / 16];
        let mut largest = _mm512_setzero_ps();
        for (i, w) in w.iter_mut().enumerate() {
            let there = ((1u64 << (keys - 1) << 1).wrapping_sub(1) >> (16 * i)) as u16;
            *w = _mm512_maskz_loadu_ps(there, weights.add(16 * i));
            // `max` may drop NaN; the sum propagates it.
            largest = _mm512_max_ps(_mm512_abs_ps(*w), largest);
        }
        let largest = _mm512_reduce_max_ps(largest);
        let power = power(largest);
        if power != 1.0 {
            for w in &mut w {
                *w = _mm512_mul_ps(*w, _mm512_set1_ps(power));
            }
        }
        let mut sum = _mm512_setzero_ps();
        for &w in &w {
            sum = _mm512_add_ps(_mm512_abs_ps(w), sum);
        }
        let sum = _mm512_reduce_add_ps(sum);
        let (factor, unit) = factor(largest * power, sum, sum.is_finite());
        let (mut total, mut signed) = (_mm512_setzero_si512(), _mm512_setzero_si512());
        for (i, &w) in w.iter().enumerate() {
            let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(w, _mm512_set1_ps(factor)));
            total = _mm512_add_epi32(_mm512_abs_epi32(rounded), total);
            signed = _mm512_add_epi32(rounded, signed);
            _mm256_storeu_si256(to.add(16 * i).cast(), _mm512_cvtepi32_epi16(rounded));
        }
        // If the unit is not zero, the largest weight is at least 2047 units, and the sum below 2^17.
        let unit = if unit > 0.0 { sum / _mm512_reduce_add_epi32(total) as f32 } else { unit };
        (unit * UNIT * power.recip(), _mm512_reduce_add_epi32(signed) as f32)
    }
}
