//! Products of affine rows with many rows of activations, in 16-bit integers.
//!
//! Activations become multiples of a unit per group: an error of at most 2⁻¹⁶ of the largest of the group. Codes become
//! signed words, relative to the middle of their range. An instruction multiplies 32 of each and adds the products in
//! pairs, twice as many as in f32. The sum of a group is exact, then scaled.
//!
//! A panel holds the codes of [`OUTPUTS`] outputs, unpacked once for all rows of activations. A lane is an output, and
//! a vector holds two neighbouring inputs of 16 outputs, so no sum runs across lanes. The innermost loop does one such
//! step for [`ROWS`] rows of activations: 12 sums, 12 totals, and their operands.

use std::arch::x86_64::*;

use super::{IntegerLayout, measure};
use crate::cpu::simd::dot_pairs;

/// Outputs of a panel: two vectors.
pub const OUTPUTS: usize = 32;
/// Rows of activations that are processed together.
pub const ROWS: usize = 6;
/// What 16 bits reach, less what rounding the quotient may add.
const LARGEST: f32 = 32766.0;
/// Words between two prepared rows, lest rows fall into the same few sets of the caches.
const APART: usize = 16;

/// Words of a prepared row: its integers, then for each group its unit, then its sum.
pub fn stride(layout: IntegerLayout) -> usize {
    (layout.inputs() / 2 + 2 * layout.groups()).next_multiple_of(16) + APART
}

/// Floats of a panel: for each pair of inputs its outputs' codes, then for each group their scales, then their biases.
pub fn panel(layout: IntegerLayout) -> usize {
    OUTPUTS * (layout.inputs() / 2 + 2 * layout.groups())
}

/// Prepares a row of activations. False if it cannot be: where one is not finite, or all of a group are tiny.
///
/// # Safety
/// The instructions of `Avx512Vnni` are there; `x` is as long as a row of the matrix, `to` as [`stride`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni")]
pub unsafe fn prepare(layout: IntegerLayout, x: &[f32], to: &mut [f32]) -> bool {
    let (words, rest) = to.split_at_mut(layout.inputs() / 2);
    let (units, sums) = rest.split_at_mut(layout.groups());
    let group = layout.inputs() / layout.groups().max(1);
    for (g, x) in x.chunks_exact(group).enumerate() {
        // SAFETY: a group is a whole number of vectors, and two of its numbers take a word.
        unsafe {
            let Some((largest, sum)) = measure(x) else { return false };
            (units[g], sums[g]) = (largest / LARGEST, sum);
            let inverse = _mm512_set1_ps(if largest == 0.0 { 0.0 } else { LARGEST / largest });
            let to = words.as_mut_ptr().add(g * group / 2).cast::<i16>();
            for i in (0..group).step_by(16) {
                let n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x.as_ptr().add(i)), inverse));
                _mm256_storeu_si256(to.add(i).cast(), _mm512_cvtepi32_epi16(n));
            }
        }
    }
    true
}

/// Unpacks the codes of a panel's outputs, the scales and biases of which are there, and counts them from `middle`,
/// that of their range: scale · code + bias = scale · (code − middle) + (bias + middle · scale).
///
/// # Safety
/// The instructions of `Avx512Vnni` are there, the rows exist, and the panel is as long as [`panel`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni")]
pub unsafe fn unpack<const BITS: usize>(
    layout: IntegerLayout,
    middle: i16,
    codes: [*const u8; OUTPUTS],
    panel: &mut [f32],
) {
    let (words, factors) = panel.split_at_mut(OUTPUTS * layout.inputs() / 2);
    let (scales, biases) = factors.split_at_mut(OUTPUTS * layout.groups());
    for (bias, scale) in biases.iter_mut().zip(scales) {
        *bias = f32::from(middle).mul_add(*scale, *bias);
    }
    let mask = _mm512_set1_epi32((1 << BITS) - 1);
    let middles = _mm512_set1_epi16(middle);
    // Eight codes are as many bytes as one has bits.
    for (step, to) in words.chunks_exact_mut(4 * OUTPUTS).enumerate() {
        for (half, codes) in codes.chunks_exact(16).enumerate() {
            // SAFETY: a row is a whole number of groups, and they of eights; `to` holds four pairs of each output.
            unsafe {
                let mut eights = [0u64; 16];
                for (eight, codes) in eights.iter_mut().zip(codes) {
                    let from = codes.add(step * BITS);
                    std::ptr::copy_nonoverlapping(from, std::ptr::from_mut(eight).cast::<u8>(), BITS);
                }
                let low = _mm512_loadu_si512(eights.as_ptr().cast());
                let high = _mm512_loadu_si512(eights.as_ptr().add(8).cast());
                for pair in 0..4 {
                    let by = _mm_cvtsi32_si128((2 * BITS * pair) as i32);
                    let low = _mm512_cvtepi64_epi32(_mm512_srl_epi64(low, by));
                    let high = _mm512_cvtepi64_epi32(_mm512_srl_epi64(high, by));
                    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                    let first = _mm512_and_si512(both, mask);
                    let by = _mm_cvtsi32_si128(16 - BITS as i32);
                    let second = _mm512_andnot_si512(_mm512_set1_epi32(0xFFFF), _mm512_sll_epi32(both, by));
                    let second = _mm512_and_si512(second, _mm512_slli_epi32::<16>(mask));
                    let pairs = _mm512_sub_epi16(_mm512_or_si512(first, second), middles);
                    _mm512_storeu_si512(to.as_mut_ptr().add(pair * OUTPUTS + half * 16).cast(), pairs);
                }
            }
        }
    }
}

/// Where the products of a panel go.
pub struct PanelOutputs {
    /// The first output of each row; rows may be the same.
    pub rows: [*mut f32; ROWS],
    /// How many outputs there are.
    pub outputs: usize,
    /// What they are multiplied by.
    pub alpha: f32,
}

/// The products of a panel's outputs with prepared rows of activations.
///
/// # Safety
/// The instructions of `Avx512Vnni` are there; the rows and the panel were prepared for the layout; `to` has these
/// places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni")]
pub unsafe fn products(layout: IntegerLayout, panel: &[f32], x: [*const f32; ROWS], to: &PanelOutputs) {
    let groups = layout.groups();
    let (outputs, whole) = (to.outputs, to.outputs == OUTPUTS);
    let pairs = layout.inputs() / 2 / groups.max(1);
    let scales = panel[OUTPUTS * layout.inputs() / 2..].as_ptr();
    let mut total = [[_mm512_setzero_ps(); 2]; ROWS];
    // SAFETY: the caller's promise.
    unsafe {
        // The output lines are far apart and mostly in no near cache: they are prefetched first.
        for to in to.rows {
            _mm_prefetch::<_MM_HINT_ET0>(to.cast());
            _mm_prefetch::<_MM_HINT_ET0>(to.wrapping_add(16).cast());
        }
        for g in 0..groups {
            let mut sum = [[_mm512_setzero_si512(); 2]; ROWS];
            for pair in g * pairs..(g + 1) * pairs {
                let codes = panel.as_ptr().add(pair * OUTPUTS);
                let codes = [_mm512_loadu_si512(codes.cast()), _mm512_loadu_si512(codes.add(16).cast())];
                for (sum, x) in sum.iter_mut().zip(x) {
                    let x = _mm512_set1_epi32(x.add(pair).cast::<i32>().read());
                    for (sum, codes) in sum.iter_mut().zip(codes) {
                        *sum = dot_pairs(*sum, codes, x);
                    }
                }
            }
            for half in 0..2 {
                let scale = _mm512_loadu_ps(scales.add(g * OUTPUTS + half * 16));
                let bias = _mm512_loadu_ps(scales.add((groups + g) * OUTPUTS + half * 16));
                for t in 0..ROWS {
                    let unit = _mm512_set1_ps(x[t].add(layout.inputs() / 2 + g).read());
                    let all = _mm512_set1_ps(x[t].add(layout.inputs() / 2 + groups + g).read());
                    let dot = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[t][half]), unit);
                    total[t][half] = _mm512_fmadd_ps(dot, scale, _mm512_fmadd_ps(bias, all, total[t][half]));
                }
            }
        }
        let alpha = _mm512_set1_ps(to.alpha);
        for (to, total) in to.rows.iter().zip(total) {
            let [a, b] = [_mm512_mul_ps(total[0], alpha), _mm512_mul_ps(total[1], alpha)];
            if whole {
                _mm512_storeu_ps(*to, a);
                _mm512_storeu_ps(to.add(16), b);
            } else {
                let there = (1u32 << outputs) - 1;
                _mm512_mask_storeu_ps(*to, there as u16, a);
                _mm512_mask_storeu_ps(to.wrapping_add(16), (there >> 16) as u16, b);
            }
        }
    }
}
