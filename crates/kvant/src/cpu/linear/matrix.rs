//! One weight matrix as the kernels see it, and the order in which they take its inputs.
//!
//! Affine 4-bit codes lie two in a byte. Taking LANES bytes at a time gives LANES even inputs, then LANES odd ones, with
//! no interleaving; the activations (and dequantised rows) are put into the same order instead, once. Everything else
//! keeps the natural order.

use super::super::{elements::Elements, simd::Simd};
use crate::{DType, ops::linear::OwnedWeight};

/// Inputs that the affine kernels take at a time: the smallest group.
pub(in crate::cpu) const UNIT: usize = 32;

/// A matrix of `outputs` rows of `inputs` each; with experts, all of them below one another.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Matrix {
    pub kind: Kind,
    pub inputs: usize,
}

#[derive(Clone, Copy)]
pub(in crate::cpu) enum Kind {
    Dense(Elements),
    Affine(Affine),
}

#[derive(Clone, Copy)]
pub(in crate::cpu) struct Affine {
    codes: Codes,
    scales: Elements,
    biases: Elements,
    pub bits: usize,
    pub group: usize,
}

/// Packed codes; only read.
#[derive(Clone, Copy)]
struct Codes(*const u8);

// SAFETY: nothing writes to a weight while a call reads it: the device's lock is held.
unsafe impl Send for Codes {}
// SAFETY: as above.
unsafe impl Sync for Codes {}

impl Matrix {
    pub(in crate::cpu) fn new(weight: &OwnedWeight, inputs: usize) -> Matrix {
        let kind = match weight {
            OwnedWeight::Dense(tensor) => Kind::Dense(Elements::of(tensor)),
            OwnedWeight::Affine { codes, scales, biases, bits, group } => Kind::Affine(Affine {
                codes: Codes(codes.host_ptr()),
                scales: Elements::of(scales),
                biases: Elements::of(biases),
                bits: *bits as usize,
                group: *group,
            }),
        };
        Matrix { kind, inputs }
    }

    /// Whether the kernels take the inputs in halves of even and odd ones.
    pub(super) fn splits_pairs(&self) -> bool {
        matches!(self.kind, Kind::Affine(Affine { bits: 4, .. }))
    }

    /// Inputs per scale, of an affine matrix.
    pub(super) fn group(&self) -> Option<usize> {
        match self.kind {
            Kind::Dense(_) => None,
            Kind::Affine(affine) => Some(affine.group),
        }
    }

    /// A row as f32 in natural order, times `scale`.
    ///
    /// # Safety
    /// The row exists, and the level's instructions are enabled.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn natural_row<S: Simd>(&self, row: usize, scale: f32, out: &mut [f32]) {
        // SAFETY: the caller's promise; the scratch row is as long as `out`.
        unsafe {
            self.row::<S>(row, out);
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
    }

    /// A row as f32, in the kernels' order.
    ///
    /// # Safety
    /// The row exists, `out` has room for `inputs`, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn row<S: Simd>(&self, row: usize, out: &mut [f32]) {
        let out = &mut out[..self.inputs];
        // SAFETY: the caller's promise.
        unsafe {
            match self.kind {
                Kind::Dense(elements) => elements.load::<S>(row * self.inputs, out),
                Kind::Affine(affine) => match affine.bits {
                    4 => affine.row::<S, 4>(row, out),
                    6 => affine.row::<S, 6>(row, out),
                    _ => affine.row::<S, 8>(row, out),
                },
            }
        }
    }
}

impl Affine {
    /// The codes of a row.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub(super) unsafe fn codes(&self, row: usize, inputs: usize) -> *const u8 {
        // SAFETY: `inputs · bits / 8` bytes a row.
        unsafe { self.codes.0.add(row * (inputs / 8 * self.bits)) }
    }

    /// Widens `count` scales and biases, at most 16, of groups `first ..`; the rest of the arrays becomes 0.
    ///
    /// # Safety
    /// The groups exist (counted through all rows), and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn scales<S: Simd>(&self, first: usize, count: usize) -> ([f32; 16], [f32; 16]) {
        // SAFETY: the caller's promise.
        unsafe { (load16::<S>(self.scales, first, count), load16::<S>(self.biases, first, count)) }
    }

    #[inline(always)]
    unsafe fn row<S: Simd, const BITS: usize>(&self, row: usize, out: &mut [f32]) {
        let groups = out.len() / self.group;
        // SAFETY: the caller's promise; a group is a whole number of units.
        unsafe {
            let codes = self.codes(row, out.len());
            for first in (0..groups).step_by(16) {
                let count = (groups - first).min(16);
                let (scales, biases) = self.scales::<S>(row * groups + first, count);
                for i in 0..count {
                    let (scale, bias) = (S::splat(scales[i]), S::splat(biases[i]));
                    let start = (first + i) * self.group;
                    for at in (start..start + self.group).step_by(UNIT) {
                        let q = unit::<S, BITS>(codes.add(at / 8 * BITS));
                        let to = out.as_mut_ptr().add(at);
                        for (j, &q) in q[..UNIT / S::LANES].iter().enumerate() {
                            S::store(to.add(j * S::LANES), S::fma(q, scale, bias));
                        }
                    }
                }
            }
        }
    }
}

/// Up to 16 numbers, and zeros behind them.
///
/// # Safety
/// They exist, and the level's instructions are enabled.
#[inline(always)]
unsafe fn load16<S: Simd>(from: Elements, first: usize, count: usize) -> [f32; 16] {
    let mut wide = [0.0; 16];
    // SAFETY: the caller's promise; fewer than 16 are first copied to where all 16 can be read.
    unsafe {
        let at = from.at(first);
        if from.dtype == DType::F32 {
            std::ptr::copy_nonoverlapping(at.cast::<f32>(), wide.as_mut_ptr(), count);
            return wide;
        }
        let mut narrow = [0u16; 16];
        let mut at = at.cast::<u16>().cast_const();
        if count < 16 {
            for (i, to) in narrow[..count].iter_mut().enumerate() {
                *to = at.add(i).read();
            }
            at = narrow.as_ptr();
        }
        for i in (0..16).step_by(S::LANES) {
            let x = if from.dtype == DType::F16 { S::load_f16(at.add(i)) } else { S::load_bf16(at.add(i)) };
            S::store(wide.as_mut_ptr().add(i), x);
        }
    }
    wide
}

/// The codes of [`UNIT`] inputs as f32, in the kernels' order, in the first `UNIT / LANES` vectors.
///
/// # Safety
/// `UNIT · BITS / 8` bytes are readable, and the level's instructions are enabled.
#[inline(always)]
pub(super) unsafe fn unit<S: Simd, const BITS: usize>(codes: *const u8) -> [S::F; 8] {
    // SAFETY: the caller's promise: the steps below read just those bytes.
    unsafe {
        let mut q = [S::zero(); 8];
        match BITS {
            4 => {
                for i in 0..UNIT / S::LANES / 2 {
                    (q[2 * i], q[2 * i + 1]) = S::load_u4(codes.add(i * S::LANES));
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

/// Puts a row of f32 into the kernels' order.
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
