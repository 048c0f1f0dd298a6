//! Many rows of activations times a matrix: prefill.
//!
//! A task computes some outputs of one matrix. It widens their weights to f32 in scratch memory, once for all rows, and
//! multiplies with the `gemm-f32` crate, which packs and blocks for the caches. [`ManyRowsBy`] unpacks affine
//! weights to integers of 16 or 8 bits instead.

use std::ops::Range;

use super::{
    super::{
        elements::Elements,
        scratch,
        simd::{Simd, SimdKernel},
    },
    integers::{
        panel_codes,
        panel_products::{self, PanelLayout},
    },
    matrix::{Matrix, MatrixKind},
};
use crate::DType;

/// Computes `outputs` of the rows of activations listed in `rows`.
pub(super) struct ManyRows<'a> {
    pub matrix: Matrix,
    /// The first row of the expert's matrix.
    pub base: usize,
    pub outputs: Range<usize>,
    /// Prepared activations, `stride` floats per row.
    pub x: &'a [f32],
    pub stride: usize,
    /// (row of `x`, row of `out`) of each product.
    pub rows: &'a [[u32; 2]],
    /// Whether both columns of `rows` are consecutive, so that nothing must be gathered or scattered.
    pub in_order: bool,
    pub alpha: f32,
    pub out: Elements,
    /// Columns of `out`.
    pub width: usize,
}

/// A matrix of f32: its start, and the distance between rows.
#[derive(Clone, Copy)]
struct View {
    start: *const f32,
    stride: usize,
}

impl SimdKernel for ManyRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let inputs = self.matrix.inputs;
        match self.matrix.kind {
            MatrixKind::Dense(elements) if elements.dtype == DType::F32 => {
                // SAFETY: the row exists.
                let start = unsafe { elements.at((self.base + self.outputs.start) * inputs) };
                self.gather::<S>(View { start: start.cast(), stride: inputs });
            }
            _ => {
                // Rows a multiple of 2 KiB apart would share a few sets of the caches.
                let stride = if inputs.is_multiple_of(512) { inputs + 16 } else { inputs };
                let weights = &mut *scratch::take(self.outputs.len() * stride);
                let first = self.base + self.outputs.start;
                // SAFETY: the rows exist; `dispatch` enables the instructions.
                unsafe {
                    // All rows at once if they are contiguous.
                    let at_once = if stride == inputs { self.outputs.len().max(1) } else { 1 };
                    for (n, rows) in weights.chunks_exact_mut(at_once * stride).enumerate() {
                        self.matrix.rows::<S>(first + n, at_once, rows);
                    }
                }
                self.gather::<S>(View { start: weights.as_ptr(), stride });
            }
        }
    }
}

impl ManyRows<'_> {
    /// Returns the rows of activations as one matrix; gathers them if necessary.
    #[inline(always)]
    fn gather<S: Simd>(&self, weights: View) {
        if self.in_order {
            let start = self.x[self.rows[0][0] as usize * self.stride..].as_ptr();
            return self.scatter::<S>(weights, View { start, stride: self.stride });
        }
        let inputs = self.matrix.inputs;
        let gathered = &mut *scratch::take(self.rows.len() * inputs);
        for (to, &[x, _]) in gathered.chunks_exact_mut(inputs).zip(self.rows) {
            to.copy_from_slice(&self.x[x as usize * self.stride..][..inputs]);
        }
        self.scatter::<S>(weights, View { start: gathered.as_ptr(), stride: inputs });
    }

    /// Multiplies into the output if it is f32 and in order, otherwise into scratch memory, which is then rounded.
    #[inline(always)]
    fn scatter<S: Simd>(&self, weights: View, x: View) {
        let count = self.outputs.len();
        if self.in_order && self.out.dtype == DType::F32 {
            // SAFETY: the first row's outputs exist, and the other rows follow `width` apart.
            let to = unsafe { self.out.at(self.rows[0][1] as usize * self.width + self.outputs.start) };
            return self.multiply(weights, x, to.cast(), self.width);
        }
        let product = &mut *scratch::take(self.rows.len() * count);
        self.multiply(weights, x, product.as_mut_ptr(), count);
        for (row, &[_, out]) in product.chunks_exact(count).zip(self.rows) {
            // SAFETY: no other task writes these outputs; `dispatch` enables the instructions.
            unsafe { self.out.store::<S>(out as usize * self.width + self.outputs.start, row) };
        }
    }

    fn multiply(&self, weights: View, x: View, to: *mut f32, to_stride: usize) {
        let (x, weights) = ((self.rows.len(), x), (self.outputs.len(), weights));
        // gemm_f32 expects the larger stride between columns. The product is stored by rows, so compute its transpose.
        let (left, right, column_step, row_step) =
            if to_stride > 1 { (weights, x, to_stride, 1) } else { (x, weights, 1, to_stride) };
        // SAFETY: `x` has `rows` rows and `weights` has `outputs` rows of `inputs` floats each; `to` has room for
        // `rows` rows of `outputs`, `to_stride` apart, and overlaps neither.
        unsafe {
            gemm_f32::gemm::f32::get_gemm_fn()(
                left.0,
                right.0,
                self.matrix.inputs,
                to,
                column_step as isize,
                row_step as isize,
                false,
                left.1.start,
                1,
                left.1.stride as isize,
                right.1.start,
                right.1.stride as isize,
                1,
                0.0,
                self.alpha,
                false,
                false,
                false,
                gemm_common::Parallelism::None,
            );
        }
    }
}

/// Computes `outputs` of the rows of activations listed in `rows`, which were prepared for a layout: panels of integers
/// (VNNI), or tiles of [`amx`](super::amx).
pub(super) struct ManyRowsBy<'a, L> {
    pub matrix: Matrix,
    pub layout: L,
    /// The first row of the expert's matrix.
    pub base: usize,
    pub outputs: Range<usize>,
    pub x: &'a [f32],
    /// (row of `x`, row of `out`) of each product.
    pub rows: &'a [[u32; 2]],
    pub alpha: f32,
    pub out: Elements,
    /// Columns of `out`.
    pub width: usize,
}

impl SimdKernel for ManyRowsBy<'_, PanelLayout> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        if self.layout.per_word == panel_products::BYTES {
            self.panels::<S, { panel_products::BYTES }>();
        } else {
            self.panels::<S, { panel_products::WORDS }>();
        }
    }
}

impl ManyRowsBy<'_, PanelLayout> {
    #[inline(always)]
    fn panels<S: Simd, const PER_WORD: usize>(&self) {
        const OUTPUTS: usize = panel_products::OUTPUTS;
        let (layout, inputs) = (self.layout, self.layout.rows.inputs());
        let panel = &mut *scratch::take_lines(layout.panel());
        // Block codes are first unpacked to bytes.
        let blocks = match self.matrix.kind {
            MatrixKind::Blocks(blocks) => Some(blocks),
            _ => None,
        };
        let unpacked = &mut *scratch::take(if blocks.is_some() { OUTPUTS * inputs / 4 } else { 0 });
        // Divides the rows into pieces that differ by one row at most.
        let (len, pieces) = (self.rows.len(), self.rows.len().div_ceil(panel_products::ROWS));
        for first in self.outputs.clone().step_by(OUTPUTS) {
            let count = (self.outputs.end - first).min(OUTPUTS);
            // SAFETY: the rows exist; `dispatch_vnni` enables the instructions. No other task writes these outputs.
            unsafe {
                // Missing outputs repeat the last one.
                let row = |n: usize| n.min(count - 1);
                let factors = &mut panel[OUTPUTS * layout.words()..];
                self.matrix.factors_by_group::<S>(self.base + first, count, OUTPUTS, factors);
                let (mut codes, mut bits) = ([std::ptr::null(); OUTPUTS], 8);
                match (self.matrix.kind, blocks) {
                    (MatrixKind::Affine(affine), _) => {
                        for (n, codes) in codes.iter_mut().enumerate() {
                            *codes = affine.codes(self.base + first + row(n), inputs);
                        }
                        bits = affine.bits;
                    }
                    (_, Some(blocks)) => {
                        let bytes: &mut [u8] = bytemuck::cast_slice_mut(unpacked);
                        for (n, to) in bytes.chunks_exact_mut(inputs).take(count).enumerate() {
                            blocks.codes::<S>(self.base + first + n, blocks.row_bytes(inputs), to);
                        }
                        for (n, codes) in codes.iter_mut().enumerate() {
                            *codes = bytes[row(n) * inputs..].as_ptr();
                        }
                    }
                    _ => unreachable!("only quantised weights have a layout"),
                }
                panel_codes::unpack::<S, PER_WORD>(layout, bits, codes, panel);
                for piece in 0..pieces {
                    let rows = &self.rows[len * piece / pieces..len * (piece + 1) / pieces];
                    match rows.len() {
                        0..=4 => self.products::<S, PER_WORD, 4>(panel, rows, first, count),
                        5 => self.products::<S, PER_WORD, 5>(panel, rows, first, count),
                        _ => self.products::<S, PER_WORD, { panel_products::ROWS }>(panel, rows, first, count),
                    }
                }
            }
        }
    }

    /// Multiplies a panel of `count` outputs from `first` on by 1 to `R` rows.
    ///
    /// # Safety
    /// The level's instructions are enabled; the rows and outputs exist, and no other task writes them.
    #[inline(always)]
    unsafe fn products<S: Simd, const PER_WORD: usize, const R: usize>(
        &self,
        panel: &[f32],
        rows: &[[u32; 2]],
        first: usize,
        count: usize,
    ) {
        let (start, stride) = (self.x.as_ptr(), self.layout.stride());
        // Outputs other than f32 are first stored in scratch, then rounded.
        let direct = self.out.dtype == DType::F32;
        let mut products = [[0.0; panel_products::OUTPUTS]; R];
        // SAFETY: the caller's promise.
        unsafe {
            let (mut x, mut places) = ([std::ptr::null(); R], [std::ptr::null_mut(); R]);
            for (t, (x, place)) in x.iter_mut().zip(&mut places).enumerate() {
                // Missing rows repeat the last one.
                let [from, to] = rows[t.min(rows.len() - 1)];
                *x = start.add(from as usize * stride);
                *place = if direct {
                    self.out.at(to as usize * self.width + first).cast()
                } else {
                    products[t].as_mut_ptr()
                };
            }
            let to = panel_products::PanelOutputs { rows: places, outputs: count, alpha: self.alpha };
            panel_products::products::<S, PER_WORD, R>(self.layout, panel, x, &to);
            if !direct {
                for (row, &[_, out]) in products.iter().zip(rows) {
                    self.out.store::<S>(out as usize * self.width + first, &row[..count]);
                }
            }
        }
    }
}
