//! Products of affine rows with many rows of activations, in integers of 16 or 8 bits.
//!
//! Activations become multiples of a unit per group. The sum of a group is exact, then scaled.
//!
//! | activations | error, relative to the largest of a group | codes | products of an instruction |
//! |---|---|---|---|
//! | signed words | at most 2⁻¹⁶ | words, relative to the middle of their range | 32, added in pairs |
//! | signed bytes | at most 1/254 | unsigned bytes | 64, added in groups of four |
//!
//! Bytes hold codes from 0. Their sums start from −middle · Σ x, over the rounded activations of a group, which makes
//! them equal to sums of codes relative to the middle.
//!
//! A word of 32 bits holds two or four neighbouring inputs.
//!
//! A panel holds the codes of [`OUTPUTS`] outputs, unpacked once for all rows of activations ([`panel_codes`]). A lane
//! is an output, and a vector holds one word of 8 or 16 outputs, so no sum is taken across lanes. The innermost loop
//! processes one word of two vectors of outputs and up to [`ROWS`] rows of activations: 12 sums and their operands, and
//! with AVX-512 also 12 totals, are in registers. AVX-VNNI's vectors have half of a panel's outputs.
//!
//! [`panel_codes`]: super::panel_codes

use super::{IntegerLayout, measure};
use crate::cpu::simd::Simd;

/// Outputs of a panel: two of the longest vectors.
pub const OUTPUTS: usize = 32;
/// Vectors of outputs that are processed together.
const VECTORS: usize = 2;
/// Maximum rows of activations that are processed together.
pub const ROWS: usize = 6;
/// Integers in a word of 32 bits: with 16 bits, with 8.
pub const WORDS: usize = 2;
pub const BYTES: usize = 4;
/// Words between two prepared rows, so that rows do not share a few sets of the caches.
const APART: usize = 16;

/// The layout of prepared activations and of a panel.
#[derive(Clone, Copy)]
pub struct PanelLayout {
    /// The layout of the weights.
    pub rows: IntegerLayout,
    /// [`WORDS`] or [`BYTES`].
    pub per_word: usize,
}

impl PanelLayout {
    /// The integers of a row, in words of 32 bits.
    pub fn words(&self) -> usize {
        self.rows.inputs() / self.per_word
    }

    /// Words of a prepared row: its integers, then the unit of each group, then the sum of each group, and for bytes
    /// also the start value of each group's sum of products.
    pub fn stride(&self) -> usize {
        (self.words() + 3 * self.rows.groups()).next_multiple_of(16) + APART
    }

    /// Floats of a panel: the codes of its outputs for each word of inputs, then for each group their scales, then
    /// their biases.
    pub fn panel(&self) -> usize {
        OUTPUTS * (self.words() + 2 * self.rows.groups())
    }
}

/// Prepares a row of activations, `PER_WORD` of them in a word. Returns false if integers cannot represent it: an
/// activation is not finite, or all activations of a group are tiny.
///
/// # Safety
/// The level's instructions are enabled; `x` has the length of a row of the matrix, `to` the length
/// [`PanelLayout::stride`].
#[inline(always)]
pub unsafe fn prepare<S: Simd, const PER_WORD: usize>(layout: PanelLayout, x: &[f32], to: &mut [f32]) -> bool {
    let (groups, middle) = (layout.rows.groups(), layout.rows.middle());
    let (words, rest) = to.split_at_mut(layout.words());
    let (units, rest) = rest.split_at_mut(groups);
    let (sums, starts) = rest.split_at_mut(groups);
    let starts: &mut [i32] = bytemuck::cast_slice_mut(starts);
    let group = layout.rows.inputs() / groups.max(1);
    // The maximum of 16 bits, minus a margin for rounding the quotient; the maximum of a byte.
    let max = if PER_WORD == WORDS { 32766.0 } else { 127.0 };
    for (g, x) in x.chunks_exact(group).enumerate() {
        // SAFETY: a group is a whole number of vectors and of words.
        unsafe {
            let Some((largest, sum)) = measure::<S>(x) else { return false };
            (units[g], sums[g]) = (largest / max, sum);
            let inverse = S::splat(if largest == 0.0 { 0.0 } else { max / largest });
            let to = words.as_mut_ptr().add(g * group / PER_WORD);
            for i in (0..group).step_by(S::LANES) {
                let x = S::mul(S::load(x.as_ptr().add(i)), inverse);
                if PER_WORD == WORDS {
                    S::store_words(to.cast::<i16>().add(i), x);
                } else {
                    S::store_bytes(to.cast::<i8>().add(i), x);
                }
            }
            if PER_WORD == BYTES {
                let bytes = std::slice::from_raw_parts(to.cast::<i8>(), group);
                starts[g] = -i32::from(middle) * bytes.iter().map(|&x| i32::from(x)).sum::<i32>();
            }
        }
    }
    true
}

/// The destination of the products of a panel.
pub struct PanelOutputs<const R: usize> {
    /// The first output of each row; rows may be repeated.
    pub rows: [*mut f32; R],
    /// The number of outputs.
    pub outputs: usize,
    /// Multiplies the products.
    pub alpha: f32,
}

/// Multiplies a panel's outputs by prepared rows of activations.
///
/// # Safety
/// The level's instructions are enabled; the rows and the panel were prepared for the layout; `to` has these rows.
#[inline(always)]
pub unsafe fn products<S: Simd, const PER_WORD: usize, const R: usize>(
    layout: PanelLayout,
    panel: &[f32],
    x: [*const f32; R],
    to: &PanelOutputs<R>,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        // The output's cache lines are far apart and usually not in a near cache, so prefetch them first.
        for to in to.rows {
            S::prefetch_to_write(to.cast());
            S::prefetch_to_write(to.wrapping_add(16).cast());
        }
        for first in (0..to.outputs).step_by(VECTORS * S::LANES) {
            products_from::<S, PER_WORD, R>(layout, panel, x, to, first);
        }
    }
}

/// As [`products`], for two vectors of outputs from output `first` on.
///
/// # Safety
/// As for [`products`].
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "a number counts through several arrays at once")]
unsafe fn products_from<S: Simd, const PER_WORD: usize, const R: usize>(
    layout: PanelLayout,
    panel: &[f32],
    x: [*const f32; R],
    to: &PanelOutputs<R>,
    first: usize,
) {
    let groups = layout.rows.groups();
    let words = layout.rows.inputs() / PER_WORD;
    let of_group = words / groups.max(1);
    let (codes, factors) = panel.split_at(OUTPUTS * words);
    // SAFETY: the caller's promise; two vectors from the first output on are within the panel's.
    unsafe {
        let (codes_from, scales) = (codes.as_ptr().add(first), factors.as_ptr().add(first));
        let mut total = [[S::zero(); VECTORS]; R];
        for g in 0..groups {
            let mut sum = [[S::splat_words(0); VECTORS]; R];
            if PER_WORD == BYTES {
                for t in 0..R {
                    sum[t] = [S::splat_words(x[t].add(words + 2 * groups + g).cast::<i32>().read()); VECTORS];
                }
            }
            for word in g * of_group..(g + 1) * of_group {
                let codes = codes_from.add(word * OUTPUTS);
                let codes = [S::load_words(codes), S::load_words(codes.add(S::LANES))];
                for t in 0..R {
                    let x = S::splat_words(x[t].add(word).cast::<i32>().read());
                    for v in 0..VECTORS {
                        sum[t][v] = if PER_WORD == WORDS {
                            S::dot_words(sum[t][v], codes[v], x)
                        } else {
                            S::dot_bytes(sum[t][v], codes[v], x)
                        };
                    }
                }
            }
            for v in 0..VECTORS {
                let scale = S::load(scales.add(g * OUTPUTS + v * S::LANES));
                let bias = S::load(scales.add((groups + g) * OUTPUTS + v * S::LANES));
                for t in 0..R {
                    let unit = S::splat(x[t].add(words + g).read());
                    let all = S::splat(x[t].add(words + groups + g).read());
                    let dot = S::mul(S::widen_sums(sum[t][v]), unit);
                    total[t][v] = S::fma(dot, scale, S::fma(bias, all, total[t][v]));
                }
            }
        }
        let alpha = S::splat(to.alpha);
        let count = (to.outputs - first).min(VECTORS * S::LANES);
        for t in 0..R {
            let (mut row, place) = ([0f32; OUTPUTS], to.rows[t].wrapping_add(first));
            let whole = count == VECTORS * S::LANES;
            let products = if whole { place } else { row.as_mut_ptr() };
            for v in 0..VECTORS {
                S::store(products.add(v * S::LANES), S::mul(total[t][v], alpha));
            }
            if !whole {
                std::ptr::copy_nonoverlapping(row.as_ptr(), place, count);
            }
        }
    }
}
