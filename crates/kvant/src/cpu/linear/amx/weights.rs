//! Converts rows of activations, and the weights of a panel, to hi + lo bf16.

use std::arch::x86_64::*;

use super::{OUTPUTS, STEP, WORDS};
use crate::{
    DType,
    cpu::{
        amx_product::digits,
        linear::matrix::{Matrix, MatrixKind, UNIT, widen_unit},
        scratch::{self, ScratchFloats},
        simd::{Avx512, Simd, TransposedRows},
    },
};

const _: () = assert!(STEP == UNIT);

/// Splits a row of whole steps into hi and lo. `to` is `[step, digits, 16 rows, 16 words]`, offset to one of the 16
/// rows. Returns whether all numbers are finite, also after rounding.
///
/// # Safety
/// The instructions of `Avx512Amx` are enabled.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn split_row(row: &[f32], digits: usize, to: &mut [f32]) -> bool {
    let mut odd = 0;
    for (step, numbers) in row.chunks_exact(STEP).enumerate() {
        let to = &mut to[step * digits * WORDS..];
        // SAFETY: a step is two vectors of numbers, and one vector of hi or lo.
        unsafe {
            let numbers = [_mm512_loadu_ps(numbers.as_ptr()), _mm512_loadu_ps(numbers.as_ptr().add(16))];
            let high = round(numbers);
            odd |= not_finite(high);
            _mm512_storeu_si512(to[..OUTPUTS].as_mut_ptr().cast(), high);
            if digits == 2 {
                let halves = [_mm512_castsi512_si256(high), _mm512_extracti64x4_epi64::<1>(high)];
                let rest = [0, 1].map(|i| {
                    let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves[i]));
                    _mm512_sub_ps(numbers[i], _mm512_castsi512_ps(high))
                });
                _mm512_storeu_si512(to[WORDS..][..OUTPUTS].as_mut_ptr().cast(), round(rest));
            }
        }
    }
    odd == 0
}

/// Rounds 32 numbers to bf16.
#[target_feature(enable = "avx512f,avx512bf16")]
fn round(numbers: [__m512; 2]) -> __m512i {
    // SAFETY: both types are 512 bits, for which any bits are valid.
    unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(numbers[1], numbers[0])) }
}

/// A mask of the bf16 that are not finite.
#[target_feature(enable = "avx512f,avx512bw")]
fn not_finite(bfloats: __m512i) -> __mmask32 {
    _mm512_cmpge_epu16_mask(_mm512_and_si512(bfloats, _mm512_set1_epi16(0x7FFF)), _mm512_set1_epi16(0x7F80))
}

/// The weights of a panel of outputs.
pub(super) struct PanelWeights<'a> {
    matrix: &'a Matrix,
    /// The first row of the matrix, and the number of rows.
    first: usize,
    count: usize,
    /// Terms (hi, lo) of a weight.
    pub(super) digits: usize,
    /// `[outputs / 16, 2, groups, 16]`: scales, then biases.
    factors: ScratchFloats,
    group: usize,
    /// The codes of blocks, one byte each.
    bytes: ScratchFloats,
    /// Whether all weights are finite; for dense weights, [`PanelWeights::unpack`] checks.
    are_finite: bool,
}

impl PanelWeights<'_> {
    /// Loads the scales and biases of a panel. `digits`: terms of a weight that is not bf16.
    ///
    /// # Safety
    /// The level's instructions are enabled, and the matrix has `count` rows from `first` on, at least one.
    #[inline(always)]
    pub(super) unsafe fn new<S: Simd>(matrix: &Matrix, first: usize, count: usize, digits: usize) -> PanelWeights<'_> {
        let dense = matches!(matrix.kind, MatrixKind::Dense(weights) if weights.dtype == DType::BF16);
        let group = matrix.group().unwrap_or(matrix.inputs.max(1));
        let groups = if matrix.group().is_some() { matrix.inputs / group } else { 0 };
        let mut factors = scratch::take(count.div_ceil(OUTPUTS) * 2 * groups * OUTPUTS);
        let blocks = if let MatrixKind::Blocks(blocks) = matrix.kind { Some(blocks) } else { None };
        let mut bytes = scratch::take(if blocks.is_some() { count * matrix.inputs / 4 } else { 0 });
        // SAFETY: the caller's promise.
        let are_finite = unsafe { load_factors::<S>(matrix, first, count, &mut factors) };
        if let Some(blocks) = blocks {
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut bytes);
            for (n, to) in bytes.chunks_exact_mut(matrix.inputs).enumerate() {
                // SAFETY: as above.
                unsafe { blocks.codes::<S>(first + n, blocks.row_bytes(matrix.inputs), to) };
            }
        }
        let digits = if dense { 1 } else { digits };
        PanelWeights { matrix, first, count, digits, factors, group, bytes, are_finite }
    }

    /// Unpacks `steps` steps of 32 inputs from `input` on, for the tile of outputs that begins at `output` of the
    /// panel. Returns whether all are finite. Outputs beyond the end are unspecified; inputs beyond the end are zero.
    ///
    /// # Safety
    /// The level's instructions are enabled, and `to` has room for the steps.
    #[inline(always)]
    pub(super) unsafe fn unpack<S: Simd>(&self, output: usize, input: usize, steps: usize, to: &mut [f32]) -> bool {
        if output >= self.count {
            return true;
        }
        let inputs = self.matrix.inputs;
        let row = |n: usize| self.first + (output + n).min(self.count - 1);
        let floats = self.factors.len() / self.count.next_multiple_of(OUTPUTS) * OUTPUTS;
        let (scales, biases) = self.factors[output / OUTPUTS * floats..][..floats].split_at(floats / 2);
        let factors = Factors { scales, biases, group: self.group };
        let mut rows = [std::ptr::null(); OUTPUTS];
        // SAFETY: the caller's promise; the rows belong to the matrix.
        unsafe {
            match self.matrix.kind {
                MatrixKind::Blocks(_) => {
                    for (n, start) in rows.iter_mut().enumerate() {
                        *start = self.bytes.as_ptr().cast::<u8>().add((row(n) - self.first) * inputs);
                    }
                    self.unpack_codes::<8>(&rows, factors, input, steps, to);
                }
                MatrixKind::Affine(affine) if matches!(affine.bits, 4 | 8) => {
                    for (n, start) in rows.iter_mut().enumerate() {
                        *start = affine.codes(row(n), inputs);
                        prefetch_next::<S>(*start, input, steps, affine.bits);
                    }
                    match affine.bits {
                        4 => self.unpack_codes::<4>(&rows, factors, input, steps, to),
                        _ => self.unpack_codes::<8>(&rows, factors, input, steps, to),
                    }
                }
                MatrixKind::Dense(weights) if weights.dtype == DType::BF16 => {
                    for (n, start) in rows.iter_mut().enumerate() {
                        *start = weights.at(row(n) * inputs + input).cast_const();
                        prefetch_next::<S>(*start, 0, steps, 16);
                    }
                    return copy_bfloats(&rows, inputs - input, steps, to);
                }
                MatrixKind::Affine(_) | MatrixKind::Dense(_) => {
                    return self.unpack_rows::<S>(output, input, steps, factors, to);
                }
                MatrixKind::Mxfp8(_) => unreachable!("it stays in f32"),
            }
        }
        self.are_finite
    }

    /// Unpacks codes of 4 or 8 bits.
    ///
    /// # Safety
    /// As for [`PanelWeights::unpack`].
    #[inline(always)]
    unsafe fn unpack_codes<const BITS: usize>(
        &self,
        rows: &[*const u8; OUTPUTS],
        factors: Factors,
        input: usize,
        steps: usize,
        to: &mut [f32],
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.digits {
                1 => unpack_codes::<BITS, 1>(rows, factors, input, steps, to),
                _ => unpack_codes::<BITS, 2>(rows, factors, input, steps, to),
            }
        }
    }

    /// Unpacks codes of other widths, and f16 weights, row by row in f32.
    ///
    /// # Safety
    /// As for [`PanelWeights::unpack`].
    #[inline(always)]
    unsafe fn unpack_rows<S: Simd>(
        &self,
        output: usize,
        input: usize,
        steps: usize,
        factors: Factors,
        to: &mut [f32],
    ) -> bool {
        let inputs = self.matrix.inputs;
        let mut are_finite = self.are_finite;
        for (step, to) in to.chunks_exact_mut(self.digits * WORDS).take(steps).enumerate() {
            let input = input + step * STEP;
            let mut digits = [0.0; 2 * WORDS];
            for n in 0..OUTPUTS.min(self.count - output) {
                let row = self.first + output + n;
                let mut weights = [0.0; STEP];
                // SAFETY: the caller's promise.
                unsafe {
                    match self.matrix.kind {
                        MatrixKind::Affine(affine) => {
                            let at = input / factors.group * OUTPUTS + n;
                            let (scale, bias) = (factors.scales[at], factors.biases[at]);
                            let codes = affine.codes(row, inputs).add(input / 8 * affine.bits);
                            match affine.bits {
                                2 => widen_unit::<S, 2>(codes, scale, bias, &mut weights),
                                3 => widen_unit::<S, 3>(codes, scale, bias, &mut weights),
                                5 => widen_unit::<S, 5>(codes, scale, bias, &mut weights),
                                _ => widen_unit::<S, 6>(codes, scale, bias, &mut weights),
                            }
                        }
                        MatrixKind::Dense(dense) => {
                            dense.load::<S>(row * inputs + input, &mut weights[..STEP.min(inputs - input)]);
                        }
                        _ => unreachable!("their codes have 8 bits"),
                    }
                    are_finite &= split_row(&weights, self.digits, &mut digits[n * OUTPUTS..]);
                }
            }
            for (to, digit) in to.chunks_exact_mut(WORDS).zip(digits.chunks_exact(WORDS)) {
                // SAFETY: as above; these are squares of 16 by 16.
                unsafe { Avx512::transpose16(digit.as_ptr(), OUTPUTS, to.as_mut_ptr()) };
            }
        }
        are_finite
    }
}

/// Prefetches the inputs of a row after `steps` steps from `input` on, which are needed after these steps.
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
unsafe fn prefetch_next<S: Simd>(row: *const u8, input: usize, steps: usize, bits: usize) {
    let bytes = steps * STEP * bits / 8;
    for at in (0..bytes).step_by(64) {
        // SAFETY: the caller's promise.
        unsafe { S::prefetch(row.wrapping_add((input + steps * STEP) * bits / 8 + at)) };
    }
}

/// Scales and biases of the groups of a tile of outputs, `[groups, 16]` each.
#[derive(Clone, Copy)]
struct Factors<'a> {
    scales: &'a [f32],
    biases: &'a [f32],
    group: usize,
}

/// Loads scales and biases in the layout of [`PanelWeights::factors`]. Returns whether all weights are finite and below
/// 1e38, so that none rounds to infinity.
///
/// # Safety
/// The level's instructions are enabled; the rows exist.
#[inline(always)]
unsafe fn load_factors<S: Simd>(matrix: &Matrix, first: usize, count: usize, to: &mut [f32]) -> bool {
    let (mut largest, mut sum) = (0f32, 0f32);
    let of_tile = to.len() / count.div_ceil(OUTPUTS);
    for (tile, to) in to.chunks_exact_mut(of_tile.max(1)).enumerate() {
        let start = tile * OUTPUTS;
        // SAFETY: the caller's promise.
        unsafe { matrix.factors_by_group::<S>(first + start, OUTPUTS.min(count - start), OUTPUTS, to) };
        let (scales, biases) = to.split_at(of_tile / 2);
        for (scale, bias) in scales.iter().zip(biases) {
            let max = scale.abs().mul_add(255.0, bias.abs());
            // `max` may drop NaN; the sum propagates it.
            (largest, sum) = (largest.max(max), sum + max * 0.0);
        }
    }
    largest < 1e38 && sum == 0.0
}

/// Unpacks codes of 4 or 8 bits: a lane is an output.
///
/// # Safety
/// The instructions of `Avx512Amx` are enabled; the rows have these inputs, and `to` has room for `DIGITS` terms of
/// each.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn unpack_codes<const BITS: usize, const DIGITS: usize>(
    rows: &[*const u8; OUTPUTS],
    factors: Factors,
    input: usize,
    steps: usize,
    to: &mut [f32],
) {
    const NUMBERS: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
    let of_word = 32 / BITS;
    let to = &mut to[..steps * DIGITS * WORDS];
    // SAFETY: the caller's promise; a group is a whole number of words.
    unsafe {
        let numbers = _mm512_loadu_ps(NUMBERS.as_ptr());
        for first in (0..steps * STEP).step_by(16 * of_word) {
            let words = (steps * STEP - first).div_ceil(of_word).min(16);
            let codes = TransposedRows::new(rows, (input + first) / 8 * BITS, 4 * words);
            for (word, codes) in codes.0.chunks_exact(OUTPUTS).take(words).enumerate() {
                let at = first + word * of_word;
                let group = (input + at) / factors.group * OUTPUTS;
                let scale = _mm512_loadu_ps(factors.scales[group..][..OUTPUTS].as_ptr());
                let bias = _mm512_loadu_ps(factors.biases[group..][..OUTPUTS].as_ptr());
                let codes = _mm512_load_si512(codes.as_ptr().cast());
                let to = to[(at / STEP * DIGITS * OUTPUTS + at % STEP / 2) * OUTPUTS..].as_mut_ptr();
                for pair in 0..of_word / 2 {
                    let mut weights = [scale; 2];
                    for (i, weight) in weights.iter_mut().enumerate() {
                        let by = _mm_cvtsi32_si128(((2 * pair + i) * BITS) as i32);
                        let code = _mm512_srl_epi32(codes, by);
                        let code = if BITS == 4 {
                            // The permute uses only the lowest four bits.
                            _mm512_permutexvar_ps(code, numbers)
                        } else {
                            _mm512_cvtepi32_ps(_mm512_and_si512(code, _mm512_set1_epi32(255)))
                        };
                        *weight = _mm512_fmadd_ps(code, scale, bias);
                    }
                    // Without lo, the compiler removes its computation.
                    let [high, low] = digits(weights);
                    _mm512_storeu_si512(to.add(pair * OUTPUTS).cast(), high);
                    if DIGITS == 2 {
                        _mm512_storeu_si512(to.add(WORDS + pair * OUTPUTS).cast(), low);
                    }
                }
            }
        }
    }
}

/// Copies bf16 weights, and returns whether all are finite. `left`: the remaining inputs of a row.
///
/// # Safety
/// As for [`unpack_codes`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn copy_bfloats(rows: &[*const u8; OUTPUTS], left: usize, steps: usize, to: &mut [f32]) -> bool {
    let mut odd = 0;
    for (step, to) in to.chunks_exact_mut(WORDS).take(steps).enumerate() {
        let bytes = 2 * (left - step * STEP).min(STEP);
        // SAFETY: the caller's promise.
        let words = unsafe { TransposedRows::new(rows, step * STEP * 2, bytes) };
        for (to, words) in to.chunks_exact_mut(OUTPUTS).zip(words.0.chunks_exact(OUTPUTS)) {
            // SAFETY: each is a vector.
            unsafe {
                let words = _mm512_load_si512(words.as_ptr().cast());
                odd |= not_finite(words);
                _mm512_storeu_si512(to.as_mut_ptr().cast(), words);
            }
        }
    }
    odd == 0
}
