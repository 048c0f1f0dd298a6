//! A few rows of activations times a matrix: decode and verification.
//!
//! out\[t\]\[n\] = alpha · Σₖ x\[t\]\[k\] · w\[n\]\[k\] for the outputs n of one task. Bound by reading the weights, so each is
//! read from memory once, whatever the number of rows, and its codes are unpacked in registers. An affine row is
//! Σ over groups of scale · Σ q·x + bias · Σ x: the sums of x per group come with the prepared activations.

use std::ops::Range;

use super::{
    super::{elements::Elements, simd::Kernel, simd::Simd},
    matrix::{self, Affine, Kind, Matrix, UNIT},
};
use crate::DType;

/// Outputs that are collected before they are rounded and stored, and rows of activations taken together.
const OUTPUTS: usize = 32;
const ROWS: usize = 8;

/// Rows of activations, ready for the kernels: widened, in the matrix's order, padded with zeros, and behind each its
/// sums by group, padded with zeros too.
#[derive(Clone, Copy)]
pub(super) struct Prepared<'a> {
    pub floats: &'a [f32],
    inputs: usize,
    stride: usize,
}

/// Floats per prepared row.
pub(super) fn stride(matrix: &Matrix) -> usize {
    let sums = matrix.group().map_or(0, |group| (matrix.inputs / group).next_multiple_of(16));
    matrix.inputs.next_multiple_of(UNIT) + sums
}

impl<'a> Prepared<'a> {
    pub(super) fn new(matrix: &Matrix, floats: &'a [f32]) -> Self {
        Prepared { floats, inputs: matrix.inputs.next_multiple_of(UNIT), stride: stride(matrix) }
    }

    /// A row, and its sums by group.
    #[inline(always)]
    fn row(&self, row: usize) -> (&'a [f32], &'a [f32]) {
        self.floats[row * self.stride..][..self.stride].split_at(self.inputs)
    }
}

/// Prepares rows `first ..` of the activations, as many as fit `to`.
pub(super) struct Prepare<'a> {
    pub matrix: Matrix,
    pub x: Elements,
    pub first: usize,
    pub to: &'a mut [f32],
}

impl Kernel for Prepare<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let inputs = self.matrix.inputs;
        let padded = inputs.next_multiple_of(UNIT);
        for (i, row) in self.to.chunks_exact_mut(stride(&self.matrix)).enumerate() {
            let (row, sums) = row.split_at_mut(padded);
            // SAFETY: `dispatch` enables the instructions; the activations have these rows.
            unsafe { self.x.load::<S>((self.first + i) * inputs, &mut row[..inputs]) };
            row[inputs..].fill(0.0);
            if self.matrix.splits_pairs() {
                matrix::split_pairs::<S>(row);
            }
            let Some(group) = self.matrix.group() else { continue };
            sums.fill(0.0);
            for (sum, group) in sums.iter_mut().zip(row.chunks_exact(group)) {
                // SAFETY: a group is a whole number of vectors.
                unsafe {
                    let mut total = S::zero();
                    for x in group.chunks_exact(S::LANES) {
                        total = S::add(total, S::load(x.as_ptr()));
                    }
                    *sum = S::sum(total);
                }
            }
        }
    }
}

/// Computes `outputs` of the rows of activations listed in `rows`.
pub(super) struct FewRows<'a> {
    pub matrix: Matrix,
    /// The first row of the expert's matrix.
    pub base: usize,
    pub outputs: Range<usize>,
    pub x: Prepared<'a>,
    /// (row of `x`, row of `out`) of each product.
    pub rows: &'a [[u32; 2]],
    pub alpha: f32,
    pub out: Elements,
    /// Columns of `out`.
    pub width: usize,
}

impl Kernel for FewRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: `dispatch` enables the instructions, validation made the shapes agree, and no other task writes
        // these outputs.
        unsafe {
            match self.matrix.kind {
                Kind::Dense(weights) => match weights.dtype {
                    DType::F32 => self.blocks::<S, _>(Dense::<0> { weights, inputs: self.matrix.inputs }),
                    DType::F16 => self.blocks::<S, _>(Dense::<1> { weights, inputs: self.matrix.inputs }),
                    _ => self.blocks::<S, _>(Dense::<2> { weights, inputs: self.matrix.inputs }),
                },
                Kind::Affine(affine) => match affine.bits {
                    4 => self.blocks::<S, _>(Grouped::<4> { affine, inputs: self.matrix.inputs }),
                    6 => self.blocks::<S, _>(Grouped::<6> { affine, inputs: self.matrix.inputs }),
                    _ => self.blocks::<S, _>(Grouped::<8> { affine, inputs: self.matrix.inputs }),
                },
            }
        }
    }
}

impl FewRows<'_> {
    #[inline(always)]
    unsafe fn blocks<S: Simd, W: Rows>(&self, weights: W) {
        let mut result = [[0.0; OUTPUTS]; ROWS];
        for first in self.outputs.clone().step_by(OUTPUTS) {
            let count = (self.outputs.end - first).min(OUTPUTS);
            for rows in self.rows.chunks(ROWS) {
                let mut at = 0;
                while at < rows.len() {
                    let result = &mut result[at..];
                    // SAFETY: the caller's promise.
                    at += unsafe {
                        match rows.len() - at {
                            1 => self.tile::<S, W, 4, 1>(weights, first, count, &rows[at..], result),
                            2 | 3 => self.tile::<S, W, 4, 2>(weights, first, count, &rows[at..], result),
                            _ => self.tile::<S, W, 2, 4>(weights, first, count, &rows[at..], result),
                        }
                    };
                }
                for (&[_, out], result) in rows.iter().zip(&result) {
                    // SAFETY: the caller's promise.
                    unsafe { self.out.store::<S>(out as usize * self.width + first, &result[..count]) };
                }
            }
        }
    }

    /// `count` outputs from `first` on of the first T rows, R at a time; returns T.
    #[inline(always)]
    unsafe fn tile<S: Simd, W: Rows, const R: usize, const T: usize>(
        &self,
        weights: W,
        first: usize,
        count: usize,
        rows: &[[u32; 2]],
        result: &mut [[f32; OUTPUTS]],
    ) -> usize {
        let x: [_; T] = std::array::from_fn(|t| self.x.row(rows[t][0] as usize));
        for n in (0..count).step_by(R) {
            // At the end the last output is computed more than once.
            let outputs: [usize; R] = std::array::from_fn(|r| (n + r).min(count - 1));
            // SAFETY: the caller's promise.
            let dots = unsafe { weights.dots::<S, R, T>(outputs.map(|n| self.base + first + n), &x) };
            for (n, dots) in outputs.into_iter().zip(dots) {
                for (t, dot) in dots.into_iter().enumerate() {
                    result[t][n] = self.alpha * dot;
                }
            }
        }
        T
    }
}

/// R rows of weights, each times T prepared rows of activations.
trait Rows: Copy {
    /// # Safety
    /// The rows exist, the activations are as long as they are, and the level's instructions are enabled.
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        rows: [usize; R],
        x: &[(&[f32], &[f32]); T],
    ) -> [[f32; T]; R];
}

/// Dense rows; f32, f16 or bf16 as DTYPE is 0, 1 or 2.
#[derive(Clone, Copy)]
struct Dense<const DTYPE: usize> {
    weights: Elements,
    inputs: usize,
}

impl<const DTYPE: usize> Dense<DTYPE> {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller's promise.
        unsafe {
            match DTYPE {
                0 => S::load(from.cast()),
                1 => S::load_f16(from.cast()),
                _ => S::load_bf16(from.cast()),
            }
        }
    }
}

impl<const DTYPE: usize> Rows for Dense<DTYPE> {
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        rows: [usize; R],
        x: &[(&[f32], &[f32]); T],
    ) -> [[f32; T]; R] {
        let size = if DTYPE == 0 { 4 } else { 2 };
        let whole = self.inputs - self.inputs % S::LANES;
        // SAFETY: the caller's promise; the rest of a row is first copied to where a whole vector can be read.
        unsafe {
            let rows = rows.map(|row| self.weights.at(row * self.inputs).cast_const());
            let mut total = [[S::zero(); T]; R];
            for k in (0..whole).step_by(S::LANES) {
                for r in 0..R {
                    let w = Self::load::<S>(rows[r].add(k * size));
                    for t in 0..T {
                        total[r][t] = S::fma(w, S::load(x[t].0.as_ptr().add(k)), total[r][t]);
                    }
                }
            }
            if whole < self.inputs {
                for r in 0..R {
                    let mut rest = [0u8; 64];
                    let from = rows[r].add(whole * size);
                    std::ptr::copy_nonoverlapping(from, rest.as_mut_ptr(), (self.inputs - whole) * size);
                    let w = Self::load::<S>(rest.as_ptr());
                    for t in 0..T {
                        total[r][t] = S::fma(w, S::load(x[t].0.as_ptr().add(whole)), total[r][t]);
                    }
                }
            }
            sums::<S, R, T>(total)
        }
    }
}

/// Affine rows.
#[derive(Clone, Copy)]
struct Grouped<const BITS: usize> {
    affine: Affine,
    inputs: usize,
}

impl<const BITS: usize> Rows for Grouped<BITS> {
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        rows: [usize; R],
        x: &[(&[f32], &[f32]); T],
    ) -> [[f32; T]; R] {
        // SAFETY: the caller's promise.
        unsafe {
            // Where it counts most, the number of units in a group is a constant: the loop over them unrolls.
            match self.affine.group {
                32 if T == 1 => self.dots_by::<S, R, T>(rows, x, 1),
                64 if T == 1 => self.dots_by::<S, R, T>(rows, x, 2),
                group => self.dots_by::<S, R, T>(rows, x, group / UNIT),
            }
        }
    }
}

impl<const BITS: usize> Grouped<BITS> {
    #[inline(always)]
    unsafe fn dots_by<S: Simd, const R: usize, const T: usize>(
        &self,
        rows: [usize; R],
        x: &[(&[f32], &[f32]); T],
        units: usize,
    ) -> [[f32; T]; R] {
        let groups = self.inputs / (units * UNIT);
        // SAFETY: the caller's promise; the sums are padded to 16.
        unsafe {
            let codes = rows.map(|row| self.affine.codes(row, self.inputs));
            let mut total = [[S::zero(); T]; R];
            for start in (0..groups).step_by(16) {
                let count = (groups - start).min(16);
                let mut scales = [[0.0; 16]; R];
                for r in 0..R {
                    let biases;
                    (scales[r], biases) = self.affine.scales::<S>(rows[r] * groups + start, count);
                    for i in (0..16).step_by(S::LANES) {
                        let bias = S::load(biases.as_ptr().add(i));
                        for t in 0..T {
                            total[r][t] = S::fma(bias, S::load(x[t].1.as_ptr().add(start + i)), total[r][t]);
                        }
                    }
                }
                #[allow(clippy::needless_range_loop, reason = "of several arrays at once")]
                for i in 0..count {
                    let mut dot = [[S::zero(); T]; R];
                    for unit in 0..units {
                        let at = ((start + i) * units + unit) * UNIT;
                        for r in 0..R {
                            let q = matrix::unit::<S, BITS>(codes[r].add(at / 8 * BITS));
                            for (j, &q) in q[..UNIT / S::LANES].iter().enumerate() {
                                for t in 0..T {
                                    let x = S::load(x[t].0.as_ptr().add(at + j * S::LANES));
                                    dot[r][t] = S::fma(q, x, dot[r][t]);
                                }
                            }
                        }
                    }
                    for r in 0..R {
                        let scale = S::splat(scales[r][i]);
                        for t in 0..T {
                            total[r][t] = S::fma(scale, dot[r][t], total[r][t]);
                        }
                    }
                }
            }
            sums::<S, R, T>(total)
        }
    }
}

#[inline(always)]
unsafe fn sums<S: Simd, const R: usize, const T: usize>(total: [[S::F; T]; R]) -> [[f32; T]; R] {
    let mut sums = [[0.0; T]; R];
    for r in 0..R {
        for t in 0..T {
            // SAFETY: the caller's promise.
            sums[r][t] = unsafe { S::sum(total[r][t]) };
        }
    }
    sums
}
