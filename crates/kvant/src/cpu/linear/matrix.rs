//! A weight matrix, and the order in which kernels process its inputs.
//!
//! A byte holds two affine 4-bit codes. LANES bytes give LANES even inputs and LANES odd ones without interleaving; the
//! activations and dequantised rows are permuted to the same order once. All other weights keep the natural order.

use super::{
    super::{elements::Elements, scratch, simd::Simd},
    blocks::BlockMatrix,
    floats::Mxfp8Matrix,
    integers::IntegerLayout,
};
use crate::ops::{FloatFormat, linear::OwnedWeight};

/// Inputs that the affine kernels process at a time: the smallest group.
pub(in crate::cpu) const UNIT: usize = 32;

/// A matrix of `outputs` rows of `inputs` each; with experts, the matrices of all experts follow each other.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Matrix {
    pub kind: MatrixKind,
    pub inputs: usize,
}

#[derive(Clone, Copy)]
pub(in crate::cpu) enum MatrixKind {
    Dense(Elements),
    Affine(AffineMatrix),
    Blocks(BlockMatrix),
    Mxfp8(Mxfp8Matrix),
}

#[derive(Clone, Copy)]
pub(in crate::cpu) struct AffineMatrix {
    codes: CodePointer,
    scales: Elements,
    biases: Elements,
    pub bits: usize,
    pub group: usize,
}

/// Packed codes; only read.
#[derive(Clone, Copy)]
pub(super) struct CodePointer(pub *const u8);

// SAFETY: nothing writes to a weight while a call reads it: the device's lock is held.
unsafe impl Send for CodePointer {}
// SAFETY: as above.
unsafe impl Sync for CodePointer {}

impl Matrix {
    pub(in crate::cpu) fn new(weight: &OwnedWeight, inputs: usize) -> Matrix {
        let kind = match weight {
            OwnedWeight::Dense(tensor) => MatrixKind::Dense(Elements::of(tensor)),
            OwnedWeight::Affine { codes, scales, biases, bits, group } => MatrixKind::Affine(AffineMatrix {
                codes: CodePointer(codes.host_ptr()),
                scales: Elements::of(scales),
                biases: Elements::of(biases),
                bits: *bits as usize,
                group: *group,
            }),
            OwnedWeight::Blocks { data, format } => MatrixKind::Blocks(BlockMatrix::new(data, *format)),
            OwnedWeight::Floats { codes, scales, format } => match format {
                FloatFormat::Mxfp4 => MatrixKind::Blocks(BlockMatrix::of_mxfp4(codes, scales)),
                FloatFormat::Nvfp4 => MatrixKind::Blocks(BlockMatrix::of_nvfp4(codes, scales)),
                FloatFormat::Mxfp8 => MatrixKind::Mxfp8(Mxfp8Matrix::new(codes, scales)),
            },
        };
        Matrix { kind, inputs }
    }

    /// Whether kernels process the inputs as even and odd ones, in two halves.
    pub(super) fn splits_pairs(&self) -> bool {
        matches!(self.kind, MatrixKind::Affine(AffineMatrix { bits: 4, .. }))
    }

    /// Inputs per scale, if the matrix is affine in groups.
    pub(super) fn group(&self) -> Option<usize> {
        match self.kind {
            MatrixKind::Dense(_) | MatrixKind::Mxfp8(_) => None,
            MatrixKind::Affine(affine) => Some(affine.group),
            MatrixKind::Blocks(blocks) => Some(blocks.group()),
        }
    }

    /// The integer layout, if the matrix is affine in groups.
    pub(super) fn layout(&self) -> Option<IntegerLayout> {
        match self.kind {
            MatrixKind::Dense(_) | MatrixKind::Mxfp8(_) => None,
            MatrixKind::Affine(AffineMatrix { bits, group, .. }) => {
                Some(IntegerLayout::new(self.inputs, usize::from(bits == 4), group, 1 << (bits - 1)))
            }
            MatrixKind::Blocks(blocks) => {
                Some(IntegerLayout::new(self.inputs, blocks.run(), blocks.group(), blocks.middle()))
            }
        }
    }

    /// Fills both slices with the scales and biases of rows from `first` on, for a matrix that is affine in groups.
    ///
    /// # Safety
    /// The rows exist, both slices have the same length, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn factors<S: Simd>(&self, first: usize, scales: &mut [f32], biases: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.kind {
                MatrixKind::Dense(_) | MatrixKind::Mxfp8(_) => {}
                MatrixKind::Affine(affine) => affine.scales::<S>(first, self.inputs, scales, biases),
                MatrixKind::Blocks(blocks) => blocks.factors::<S>(first, self.inputs, 0, scales, biases),
            }
        }
    }

    /// The scales of `count` rows from `first` on for each group, then their biases: `[2, groups, columns]`. Columns
    /// beyond `count` repeat the last row.
    ///
    /// # Safety
    /// The rows exist; `count` is from 1 to `columns`; the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn factors_by_group<S: Simd>(&self, first: usize, count: usize, columns: usize, to: &mut [f32]) {
        let groups = to.len() / (2 * columns);
        let factors = &mut *scratch::take(2 * count * groups);
        let (scales, biases) = factors.split_at_mut(count * groups);
        // SAFETY: the caller's promise.
        unsafe { self.factors::<S>(first, scales, biases) };
        for (to, from) in to.chunks_exact_mut((groups * columns).max(1)).zip([&*scales, &*biases]) {
            for n in 0..columns {
                let of_row = &from[n.min(count - 1) * groups..][..groups];
                to[n..].iter_mut().step_by(columns).zip(of_row).for_each(|(to, from)| *to = *from);
            }
        }
    }

    /// A row as f32 in natural order, times `scale`.
    ///
    /// # Safety
    /// The row exists, `out` has its length, and the level's instructions are enabled.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn natural_row<S: Simd>(&self, row: usize, scale: f32, out: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.rows::<S>(row, 1, out) };
        if self.splits_pairs() {
            for pairs in out.chunks_exact_mut(2 * S::LANES) {
                let mut natural = [0.0; UNIT];
                for i in 0..S::LANES {
                    natural[2 * i] = pairs[i];
                    natural[2 * i + 1] = pairs[S::LANES + i];
                }
                pairs.copy_from_slice(&natural[..2 * S::LANES]);
            }
        }
        if scale != 1.0 {
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// Rows `first .. first + count` as f32, in the kernels' order.
    ///
    /// # Safety
    /// The rows exist, `out` has their length, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn rows<S: Simd>(&self, first: usize, count: usize, out: &mut [f32]) {
        let out = &mut out[..count * self.inputs];
        // SAFETY: the caller's promise.
        unsafe {
            match self.kind {
                MatrixKind::Dense(elements) => elements.load::<S>(first * self.inputs, out),
                MatrixKind::Mxfp8(floats) => floats.rows::<S>(first, self.inputs, out),
                MatrixKind::Affine(affine) => match affine.bits {
                    2 => affine.rows::<S, 2>(first, count, out),
                    3 => affine.rows::<S, 3>(first, count, out),
                    4 => affine.rows::<S, 4>(first, count, out),
                    5 => affine.rows::<S, 5>(first, count, out),
                    6 => affine.rows::<S, 6>(first, count, out),
                    _ => affine.rows::<S, 8>(first, count, out),
                },
                MatrixKind::Blocks(blocks) => {
                    let (groups, codes) = (out.len() / blocks.group(), &mut *scratch::take(self.inputs.div_ceil(4)));
                    let codes = &mut bytemuck::cast_slice_mut(codes)[..self.inputs];
                    let factors = &mut *scratch::take(2 * groups);
                    let (scales, biases) = factors.split_at_mut(groups);
                    blocks.factors::<S>(first, self.inputs, 0, scales, biases);
                    let per_row = groups / count.max(1);
                    for (i, row) in out.chunks_exact_mut(self.inputs.max(1)).enumerate() {
                        blocks.codes::<S>(first + i, 0, codes);
                        let factors = scales[i * per_row..].iter().zip(&biases[i * per_row..]);
                        let groups = row.chunks_exact_mut(blocks.group()).zip(codes.chunks_exact(blocks.group()));
                        for ((to, codes), (&scale, &bias)) in groups.zip(factors) {
                            let (scale, bias) = (S::splat(scale), S::splat(bias));
                            for at in (0..to.len()).step_by(S::LANES) {
                                let w = S::fma(S::load_u8(codes.as_ptr().add(at)), scale, bias);
                                S::store(to.as_mut_ptr().add(at), w);
                            }
                        }
                    }
                }
            }
        }
    }
}

impl AffineMatrix {
    /// The codes of a row.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub(super) unsafe fn codes(&self, row: usize, inputs: usize) -> *const u8 {
        // SAFETY: a row has `inputs · bits / 8` bytes.
        unsafe { self.codes.0.add(row * (inputs / 8 * self.bits)) }
    }

    /// Widens scales and biases of rows from `first` on, and fills both slices.
    ///
    /// # Safety
    /// The rows exist, both have the same length, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn scales<S: Simd>(&self, first: usize, inputs: usize, scales: &mut [f32], biases: &mut [f32]) {
        let groups = inputs / self.group;
        // SAFETY: the caller's promise.
        unsafe {
            self.scales.load::<S>(first * groups, scales);
            self.biases.load::<S>(first * groups, biases);
            // Prefetches the scales and biases of equally many following rows.
            for parts in [self.scales, self.biases] {
                let (start, bytes) = (parts.at(first * groups), scales.len() * parts.dtype.size());
                (bytes..2 * bytes).step_by(64).for_each(|at| S::prefetch(start.wrapping_add(at)));
            }
        }
    }

    #[inline(always)]
    unsafe fn rows<S: Simd, const BITS: usize>(&self, first: usize, count: usize, out: &mut [f32]) {
        // A group is a whole number of bytes, and rows follow each other, so groups can be read across rows.
        let groups = out.len() / self.group;
        let factors = &mut *scratch::take(2 * groups);
        // SAFETY: the caller's promise; a group is a whole number of units.
        unsafe {
            let (scales, biases) = factors.split_at_mut(groups);
            self.scales::<S>(first, out.len() / count.max(1), scales, biases);
            let codes = self.codes(first, out.len() / count.max(1));
            for (i, (&scale, &bias)) in scales.iter().zip(&*biases).enumerate() {
                for at in (i * self.group..(i + 1) * self.group).step_by(UNIT) {
                    widen_unit::<S, BITS>(codes.add(at / 8 * BITS), scale, bias, &mut out[at..]);
                }
            }
        }
    }
}

/// Dequantises the codes of [`UNIT`] inputs: `code · scale + bias`, in the order of [`unit`]. Only 4-bit codes have an
/// order other than that of the inputs.
///
/// # Safety
/// As for [`unit`].
#[inline(always)]
pub(super) unsafe fn widen_unit<S: Simd, const BITS: usize>(codes: *const u8, scale: f32, bias: f32, to: &mut [f32]) {
    let to = &mut to[..UNIT];
    // SAFETY: the caller's promise; a unit is a whole number of vectors.
    unsafe {
        let (scale, bias) = (S::splat(scale), S::splat(bias));
        for (i, &q) in unit::<S, BITS>(codes)[..UNIT / S::LANES].iter().enumerate() {
            S::store(to.as_mut_ptr().add(i * S::LANES), S::fma(q, scale, bias));
        }
    }
}

/// The codes of [`UNIT`] inputs as f32, in the kernels' order, in the first `UNIT / LANES` vectors.
///
/// # Safety
/// `UNIT · BITS / 8` bytes are readable, and the level's instructions are enabled.
#[inline(always)]
pub(super) unsafe fn unit<S: Simd, const BITS: usize>(codes: *const u8) -> [S::F; 8] {
    // SAFETY: the caller's promise: the steps below read exactly these bytes.
    unsafe {
        let mut q = [S::zero(); 8];
        match BITS {
            4 => {
                for i in 0..UNIT / S::LANES / 2 {
                    (q[2 * i], q[2 * i + 1]) = S::load_u4(codes.add(i * S::LANES));
                }
            }
            2 | 3 | 5 => {
                let mut bytes = [0u8; UNIT];
                for (i, to) in bytes.chunks_exact_mut(8).enumerate() {
                    let mut eight = [0u8; 8];
                    std::ptr::copy_nonoverlapping(codes.add(i * BITS), eight.as_mut_ptr(), BITS);
                    let eight = u64::from_le_bytes(eight);
                    for (j, to) in to.iter_mut().enumerate() {
                        *to = (eight >> (j * BITS)) as u8 & ((1 << BITS) - 1);
                    }
                }
                for (i, q) in q[..UNIT / S::LANES].iter_mut().enumerate() {
                    *q = S::load_u8(bytes.as_ptr().add(i * S::LANES));
                }
            }
            6 => {
                for half in 0..2 {
                    let from = S::load_u6(codes.add(half * 12));
                    let count = 16 / S::LANES;
                    q[half * count..][..count].copy_from_slice(&from[..count]);
                }
            }
            _ => {
                for (i, q) in q[..UNIT / S::LANES].iter_mut().enumerate() {
                    *q = S::load_u8(codes.add(i * S::LANES));
                }
            }
        }
        q
    }
}

/// Rearranges a row of f32 in the kernels' order.
#[inline(always)]
pub(super) fn split_pairs<S: Simd>(row: &mut [f32]) {
    for pairs in row.chunks_exact_mut(2 * S::LANES) {
        let mut split = [0.0; UNIT];
        for i in 0..S::LANES {
            split[i] = pairs[2 * i];
            split[S::LANES + i] = pairs[2 * i + 1];
        }
        pairs.copy_from_slice(&split[..2 * S::LANES]);
    }
}
