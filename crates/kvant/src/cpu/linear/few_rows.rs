//! A few rows of activations times a matrix: decode and verification.
//!
//! out\[t\]\[n\] = alpha · Σₖ x\[t\]\[k\] · w\[n\]\[k\] for the outputs n of one task. The kernel is bound by reading
//! the weights: each is read from memory once for all rows, and its codes are unpacked in registers. The product with
//! an affine row is Σ over groups of (scale · Σ q·x + bias · Σ x). Prepared activations include the sums of x per
//! group, one per lane, so that everything is added lane by lane, and across lanes once at the end. `block` defines the
//! order of reading.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use super::{
    super::{
        elements::Elements,
        scratch,
        simd::{Simd, SimdKernel, SimdLevel},
    },
    block::{self, OUTPUTS, OutputBlock, Together},
    block_rows::{BlockByteProducts, BlockWeights, FactorRows},
    blocks::packing,
    floats::FloatWeights,
    integers::{
        IntegerLayout,
        byte_products::{self, PackedCodes},
        panel_products::{self, PanelLayout},
    },
    matrix::{self, AffineMatrix, Matrix, MatrixKind, UNIT},
};
use crate::DType;

/// Maximum rows of activations that are processed together.
const ROWS: usize = 8;

/// Floats between the sums of two groups: the widest vector.
pub(super) const LANES: usize = 16;

/// Prepared rows of activations: widened, in the matrix's order of inputs, padded with zeros, each followed by its sums
/// by group.
#[derive(Clone, Copy)]
pub(super) struct Prepared<'a> {
    pub floats: &'a [f32],
    inputs: usize,
    stride: usize,
}

/// Floats per prepared row.
pub(super) fn stride(matrix: &Matrix) -> usize {
    let sums = matrix.group().map_or(0, |group| matrix.inputs / group * LANES);
    matrix.inputs.next_multiple_of(UNIT) + sums
}

impl<'a> Prepared<'a> {
    pub(super) fn new(matrix: &Matrix, floats: &'a [f32]) -> Self {
        Prepared { floats, inputs: matrix.inputs.next_multiple_of(UNIT), stride: stride(matrix) }
    }

    /// Rows prepared by [`byte_products::prepare`], which are one part.
    pub(super) fn bytes(layout: IntegerLayout, floats: &'a [f32]) -> Self {
        Prepared { floats, inputs: byte_products::stride(layout), stride: byte_products::stride(layout) }
    }

    /// A row, and its sums by group.
    #[inline(always)]
    fn row(&self, row: usize) -> (&'a [f32], &'a [f32]) {
        self.floats[row * self.stride..][..self.stride].split_at(self.inputs)
    }
}

/// The integer form of activations.
#[derive(Clone, Copy)]
pub(super) enum Integers {
    /// For few rows: three bytes each.
    Bytes(IntegerLayout),
    /// For many rows: one or two bytes each.
    Panels(PanelLayout),
}

impl Integers {
    fn inputs(&self) -> usize {
        match self {
            Integers::Bytes(layout) => layout.inputs(),
            Integers::Panels(layout) => layout.rows.inputs(),
        }
    }

    /// Floats per prepared row.
    pub(super) fn stride(&self) -> usize {
        match self {
            Integers::Bytes(layout) => byte_products::stride(*layout),
            Integers::Panels(layout) => layout.stride(),
        }
    }
}

/// Prepares the rows of activations from `first` on that fit `to`.
pub(super) struct Prepare<'a> {
    pub matrix: Matrix,
    pub x: Elements,
    pub first: usize,
    pub to: &'a mut [f32],
}

impl SimdKernel for Prepare<'_> {
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
            for (sum, group) in sums.chunks_exact_mut(LANES).zip(row.chunks_exact(group)) {
                // SAFETY: a group is a whole number of vectors, and no vector is longer than LANES.
                unsafe {
                    let mut total = S::zero();
                    for x in group.chunks_exact(S::LANES) {
                        total = S::add(total, S::load(x.as_ptr()));
                    }
                    S::store(sum.as_mut_ptr(), total);
                }
            }
        }
    }
}

/// Prepares rows as [`Prepare`] does, in another form: as [`Integers`] for VNNI, or as tiles for [`amx`](super::amx).
/// Lists rows that the form cannot represent.
pub(super) struct PrepareAs<'a, F> {
    pub form: F,
    pub x: Elements,
    pub first: usize,
    /// The number of rows from the first one on; a tile may have room for more.
    pub rows: usize,
    pub to: &'a mut [f32],
    /// Receives the numbers of rows that the form cannot represent; the first row is number `number`.
    pub odd: &'a Mutex<Vec<u32>>,
    pub number: usize,
}

impl SimdKernel for PrepareAs<'_, Integers> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let inputs = self.form.inputs();
        let buffer = &mut *scratch::take(inputs);
        for (i, to) in self.to.chunks_exact_mut(self.form.stride()).take(self.rows).enumerate() {
            // SAFETY: the caller's promise; the activations have these rows, which nobody writes.
            let is_prepared = unsafe {
                let row = self.x.at((self.first + i) * inputs).cast::<f32>();
                let row = if self.x.dtype == DType::F32 && row.is_aligned() {
                    std::slice::from_raw_parts(row, inputs)
                } else {
                    self.x.load::<S>((self.first + i) * inputs, buffer);
                    &*buffer
                };
                match self.form {
                    Integers::Bytes(layout) => byte_products::prepare(layout, row, to),
                    Integers::Panels(layout) if layout.per_word == panel_products::BYTES => {
                        panel_products::prepare::<S, { panel_products::BYTES }>(layout, row, to)
                    }
                    Integers::Panels(layout) => {
                        panel_products::prepare::<S, { panel_products::WORDS }>(layout, row, to)
                    }
                }
            };
            if !is_prepared {
                self.odd.lock().unwrap_or_else(PoisonError::into_inner).push((self.number + i) as u32);
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

impl SimdKernel for FewRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let inputs = self.matrix.inputs;
        // SAFETY: `dispatch` enables the instructions.
        unsafe {
            match self.matrix.kind {
                MatrixKind::Dense(weights) => match weights.dtype {
                    DType::F32 => self.by::<S, _>(DenseWeights::<0> { weights, inputs }),
                    DType::F16 => self.by::<S, _>(DenseWeights::<1> { weights, inputs }),
                    _ => self.by::<S, _>(DenseWeights::<2> { weights, inputs }),
                },
                MatrixKind::Blocks(blocks) => {
                    let room = &mut *scratch::take(BlockWeights::room(blocks, inputs));
                    self.by::<S, _>(BlockWeights::new(blocks, inputs, room));
                }
                MatrixKind::Mxfp8(floats) => self.by::<S, _>(FloatWeights { floats, inputs }),
                MatrixKind::Affine(affine) => match affine.bits {
                    2 => self.by::<S, _>(AffineWeights::<2> { affine, inputs }),
                    3 => self.by::<S, _>(AffineWeights::<3> { affine, inputs }),
                    4 => self.by::<S, _>(AffineWeights::<4> { affine, inputs }),
                    5 => self.by::<S, _>(AffineWeights::<5> { affine, inputs }),
                    6 => self.by::<S, _>(AffineWeights::<6> { affine, inputs }),
                    _ => self.by::<S, _>(AffineWeights::<8> { affine, inputs }),
                },
            }
        }
    }
}

/// As [`FewRows`], for quantised weights and activations prepared by [`byte_products::prepare`]. Only on `Avx512Vbmi`
/// and above.
pub(super) struct FewRowsByBytes<'a> {
    pub rows: FewRows<'a>,
    pub layout: IntegerLayout,
}

impl SimdKernel for FewRowsByBytes<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let FewRowsByBytes { rows, layout } = self;
        match rows.matrix.kind {
            MatrixKind::Dense(_) | MatrixKind::Mxfp8(_) => {}
            MatrixKind::Blocks(blocks) => {
                let room = &mut *scratch::take(FactorRows::room(layout.groups()));
                let factors = FactorRows::new(blocks, rows.matrix.inputs, room);
                macro_rules! by_bytes {
                    ($($packing:ident)*) => {
                        match blocks.packing() {
                            $(packing::$packing => {
                                rows.by_bytes(BlockByteProducts::<{ packing::$packing }> { rows: factors, layout })
                            })*
                            _ => rows.by_bytes(BlockByteProducts::<{ packing::SEPARATE }> { rows: factors, layout }),
                        }
                    };
                }
                by_bytes!(Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4)
            }
            MatrixKind::Affine(affine) => match affine.bits {
                2 => rows.by_bytes(ByteProducts::<2> { affine, layout }),
                3 => rows.by_bytes(ByteProducts::<3> { affine, layout }),
                4 => rows.by_bytes(ByteProducts::<4> { affine, layout }),
                5 => rows.by_bytes(ByteProducts::<5> { affine, layout }),
                6 => rows.by_bytes(ByteProducts::<6> { affine, layout }),
                _ => rows.by_bytes(ByteProducts::<8> { affine, layout }),
            },
        }
    }
}

/// [`FewRows`] for one kind of weights: a separate function for each, so that compilers can work in parallel.
struct FewRowsOf<'a, W> {
    rows: FewRows<'a>,
    weights: W,
}

impl<W: WeightRows> SimdKernel for FewRowsOf<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: `dispatch` enables the instructions, validation made the shapes agree, and no other task writes
        // these outputs.
        unsafe { self.rows.blocks::<S, _>(self.weights) };
    }
}

impl FewRows<'_> {
    #[inline(always)]
    unsafe fn by<S: Simd, W: WeightRows>(self, weights: W) {
        // SAFETY: the caller's promise.
        unsafe { S::call(FewRowsOf { rows: self, weights }) };
    }

    #[inline(always)]
    fn by_bytes<W: WeightRows>(self, weights: W) {
        SimdLevel::Avx512Vbmi.dispatch_vbmi(FewRowsOf { rows: self, weights });
    }

    #[inline(always)]
    unsafe fn blocks<S: Simd, W: WeightRows>(&self, weights: W) {
        let mut result = [[0.0; OUTPUTS]; ROWS];
        let groups = weights.groups();
        let scales = &mut *scratch::take(2 * OUTPUTS * groups);
        for mut block in OutputBlock::all(self.outputs.clone(), weights.row_bytes()) {
            let (scales_of, biases_of) = scales.split_at_mut(block.count * groups);
            for (first, run) in block.runs() {
                let (first, run) = (self.base + first, run.start * groups..run.end * groups);
                // SAFETY: the caller's promise.
                unsafe { weights.scales::<S>(first, &mut scales_of[run.clone()], &mut biases_of[run]) };
            }
            block.scales = scales;
            for rows in self.rows.chunks(ROWS) {
                let mut at = 0;
                while at < rows.len() {
                    let result = &mut result[at..];
                    // SAFETY: the caller's promise.
                    at += unsafe {
                        match rows.len() - at {
                            // Portable code runs as a last resort and in tests: one tile size suffices.
                            _ if S::PORTABLE => self.tile::<S, W, 4, 1>(weights, &block, &rows[at..], result),
                            1 if W::EIGHT && !block.streams() => {
                                self.tile::<S, W, 8, 1>(weights, &block, &rows[at..], result)
                            }
                            1 => self.tile::<S, W, 4, 1>(weights, &block, &rows[at..], result),
                            2 | 3 => self.tile::<S, W, 4, 2>(weights, &block, &rows[at..], result),
                            _ => self.tile::<S, W, 2, 4>(weights, &block, &rows[at..], result),
                        }
                    };
                }
                for (&[_, out], result) in rows.iter().zip(&result) {
                    for (first, run) in block.runs() {
                        // SAFETY: the caller's promise.
                        unsafe { self.out.store::<S>(out as usize * self.width + first, &result[run]) };
                    }
                }
            }
        }
    }

    /// Computes the block's outputs of the first T rows, R at a time; returns T.
    #[inline(always)]
    unsafe fn tile<S: Simd, W: WeightRows, const R: usize, const T: usize>(
        &self,
        weights: W,
        block: &OutputBlock,
        rows: &[[u32; 2]],
        result: &mut [[f32; OUTPUTS]],
    ) -> usize {
        let x: [_; T] = std::array::from_fn(|t| self.x.row(rows[t][0] as usize));
        let mut n = 0;
        while n < block.count {
            let (mut together, done) = block.next::<R>(n);
            n = done;
            let Together { place, places_apart, .. } = together;
            together.output += self.base;
            // SAFETY: the caller's promise.
            let dots = unsafe { weights.dots::<S, R, T>(block, together, &x) };
            for (r, dots) in dots.into_iter().enumerate() {
                for (t, dot) in dots.into_iter().enumerate() {
                    result[t][place + r * places_apart] = self.alpha * dot;
                }
            }
        }
        T
    }
}

/// A prepared row of activations and its sums by group.
pub(super) type PreparedRow<'a> = (&'a [f32], &'a [f32]);

/// R rows of a block of weights, each multiplied by T rows of activations.
pub(super) trait WeightRows: Copy {
    /// Whether eight rows at a time are faster than four for one row of activations.
    const EIGHT: bool = false;

    fn row_bytes(&self) -> usize;

    /// Scales per row that [`WeightRows::scales`] prepares.
    fn groups(&self) -> usize {
        0
    }

    /// Prepares a part of [`OutputBlock::scales`], from row `first` on.
    ///
    /// # Safety
    /// The rows exist, and the level's instructions are enabled.
    #[inline(always)]
    unsafe fn scales<S: Simd>(&self, first: usize, scales: &mut [f32], biases: &mut [f32]) {
        let _ = (first, scales, biases);
    }

    /// Multiplies R rows of a block by T rows of activations.
    ///
    /// # Safety
    /// The rows exist, the activations have their length, and the level's instructions are enabled.
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        block: &OutputBlock,
        rows: Together,
        x: &[PreparedRow; T],
    ) -> [[f32; T]; R];
}

/// Dense rows. DTYPE 0 is f32, 1 is f16, 2 is bf16.
#[derive(Clone, Copy)]
struct DenseWeights<const DTYPE: usize> {
    weights: Elements,
    inputs: usize,
}

impl<const DTYPE: usize> DenseWeights<DTYPE> {
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

impl<const DTYPE: usize> WeightRows for DenseWeights<DTYPE> {
    fn row_bytes(&self) -> usize {
        self.inputs * if DTYPE == 0 { 4 } else { 2 }
    }

    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        _: &OutputBlock,
        rows: Together,
        x: &[PreparedRow; T],
    ) -> [[f32; T]; R] {
        let size = if DTYPE == 0 { 4 } else { 2 };
        let whole = self.inputs - self.inputs % S::LANES;
        // SAFETY: the caller's promise; the rest of a row is copied to a buffer from which a whole vector can be read.
        unsafe {
            let rows: [_; R] =
                std::array::from_fn(|r| self.weights.at((rows.output + r * rows.apart) * self.inputs).cast_const());
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
struct AffineWeights<const BITS: usize> {
    affine: AffineMatrix,
    inputs: usize,
}

impl<const BITS: usize> WeightRows for AffineWeights<BITS> {
    fn row_bytes(&self) -> usize {
        self.inputs / 8 * BITS
    }

    fn groups(&self) -> usize {
        self.inputs / self.affine.group
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(&self, first: usize, scales: &mut [f32], biases: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.affine.scales::<S>(first, self.inputs, scales, biases) };
    }

    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        block: &OutputBlock,
        rows: Together,
        x: &[PreparedRow; T],
    ) -> [[f32; T]; R] {
        // SAFETY: the caller's promise.
        unsafe {
            // For the most common group sizes, the number of units is a constant, so that the loop over units is
            // unrolled. For short rows, the distance of prefetching is a constant, too.
            match (self.affine.group, block.streams()) {
                (group, _) if S::PORTABLE || matches!(BITS, 2 | 3 | 5) => {
                    self.dots_by::<S, R, T, false>(block, rows, x, group / UNIT)
                }
                (32, false) if T == 1 => self.dots_by::<S, R, T, false>(block, rows, x, 1),
                (64, false) if T == 1 => self.dots_by::<S, R, T, false>(block, rows, x, 2),
                (group, false) => self.dots_by::<S, R, T, false>(block, rows, x, group / UNIT),
                (64, true) if T == 1 => self.dots_by::<S, R, T, true>(block, rows, x, 2),
                (group, true) => self.dots_by::<S, R, T, true>(block, rows, x, group / UNIT),
            }
        }
    }
}

impl<const BITS: usize> AffineWeights<BITS> {
    #[inline(always)]
    unsafe fn dots_by<S: Simd, const R: usize, const T: usize, const STREAMS: bool>(
        &self,
        block: &OutputBlock,
        rows: Together,
        x: &[PreparedRow; T],
        units: usize,
    ) -> [[f32; T]; R] {
        let groups = self.inputs / (units * UNIT);
        // SAFETY: the caller's promise; the rows are within the block.
        unsafe {
            let codes: [_; R] = std::array::from_fn(|r| self.affine.codes(rows.output + r * rows.apart, self.inputs));
            let scales: [_; R] =
                std::array::from_fn(|r| block.scales.as_ptr().add((rows.place + r * rows.places_apart) * groups));
            let prefetch = block.prefetch(codes[0], self.row_bytes());
            let biases = block.count * groups;
            let mut total = [[S::zero(); T]; R];
            let bytes = units * UNIT / 8 * BITS;
            for group in 0..groups {
                let mut dot = [[S::zero(); T]; R];
                prefetch.fetch::<S, R, STREAMS>(group, bytes);
                for unit in 0..units {
                    let at = (group * units + unit) * UNIT;
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
                    let scale = S::splat(scales[r].add(group).read());
                    let bias = S::splat(scales[r].add(biases + group).read());
                    for t in 0..T {
                        let sum = S::load(x[t].1.as_ptr().add(group * LANES));
                        total[r][t] = S::fma(scale, dot[r][t], S::fma(bias, sum, total[r][t]));
                    }
                }
            }
            sums::<S, R, T>(total)
        }
    }
}

/// Affine rows, by byte products.
#[derive(Clone, Copy)]
struct ByteProducts<const BITS: usize> {
    affine: AffineMatrix,
    layout: IntegerLayout,
}

impl<const BITS: usize> WeightRows for ByteProducts<BITS> {
    /// Registers suffice for eight rows; they share work, which matters for short rows.
    const EIGHT: bool = true;

    fn row_bytes(&self) -> usize {
        self.layout.inputs() / 8 * BITS
    }

    fn groups(&self) -> usize {
        self.layout.groups()
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(&self, first: usize, scales: &mut [f32], biases: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.affine.scales::<S>(first, self.layout.inputs(), scales, biases) };
    }

    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        block: &OutputBlock,
        rows: Together,
        x: &[PreparedRow; T],
    ) -> [[f32; T]; R] {
        let (groups, scales) = (self.groups(), block.scales.as_ptr());
        // SAFETY: the caller's promise; the rows are within the block.
        unsafe {
            let codes = self.affine.codes(rows.output, self.layout.inputs());
            let factors = block::RowFactors {
                scales: scales.add(rows.place * groups),
                biases: scales.add((block.count + rows.place) * groups),
                apart: rows.places_apart * groups,
            };
            let prefetch = block.prefetch(codes, self.row_bytes());
            let codes = PackedCodes::<BITS> { codes, apart: rows.apart * self.row_bytes(), prefetch };
            byte_products::dots::<_, R, T>(self.layout, codes, &factors, x.map(|x| x.0.as_ptr()))
        }
    }
}

/// The sum of the lanes of each vector; R·T is a multiple of 4.
#[inline(always)]
pub(super) unsafe fn sums<S: Simd, const R: usize, const T: usize>(total: [[S::F; T]; R]) -> [[f32; T]; R] {
    let mut sums = [[0.0; T]; R];
    for i in (0..R * T).step_by(4) {
        let mut four = [total[0][0]; 4];
        for (j, x) in four.iter_mut().enumerate() {
            *x = total[(i + j) / T][(i + j) % T];
        }
        // SAFETY: the caller's promise; four of the R·T floats remain.
        unsafe { S::store_sums(sums.as_mut_ptr().cast::<f32>().add(i), four) };
    }
    sums
}
