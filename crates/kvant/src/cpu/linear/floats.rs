//! Matrices in MXFP8: E4M3 codes and a power of two per group of 32 inputs.
//!
//! The codes are floats, so kernels for affine weights cannot read them. They are widened through f16, which has more
//! bits of exponent and mantissa: the bits of an E4M3 number, moved to the positions of f16's, represent 2⁻⁸ of it,
//! also if it is subnormal.

use super::{
    super::simd::Simd,
    block::{OutputBlock, Together},
    few_rows::{PreparedRow, WeightRows, sums},
    matrix::CodePointer,
};
use crate::Tensor;

/// Inputs that share a scale.
const GROUP: usize = 32;
/// The factor from the f16 with an E4M3 number's bits to the number.
const OF_HALF: f32 = 256.0;

/// A matrix in MXFP8.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Mxfp8Matrix {
    codes: CodePointer,
    scales: CodePointer,
}

/// The bits of the f16 that is 2⁻⁸ of an E4M3 number. 0x7F and 0xFF are NaN.
#[inline(always)]
fn half_bits(code: u8) -> u16 {
    let magnitude = u16::from(code & 0x7F) << 7;
    let nan = if code & 0x7F == 0x7F { 0x7C00 } else { 0 };
    u16::from(code & 0x80) << 8 | magnitude | nan
}

/// The value of an E4M3 number.
#[inline(always)]
pub(super) fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(code >> 3 & 15), u32::from(code & 7));
    let magnitude = match (exponent, code & 0x7F) {
        (_, 0x7F) => f32::NAN,
        (0, _) => mantissa as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// 2^(e − 127).
#[inline(always)]
fn power(e: u8) -> f32 {
    f32::from_bits(if e == 0 { 0x40_0000 } else { u32::from(e) << 23 })
}

impl Mxfp8Matrix {
    pub(super) fn new(codes: &Tensor, scales: &Tensor) -> Mxfp8Matrix {
        Mxfp8Matrix { codes: CodePointer(codes.host_ptr()), scales: CodePointer(scales.host_ptr()) }
    }

    /// Loads group `group` of the matrix into the first `GROUP / LANES` vectors, without its scale.
    ///
    /// # Safety
    /// The group exists, and the level's instructions are enabled.
    #[inline(always)]
    unsafe fn group<S: Simd>(&self, group: usize) -> [S::F; 8] {
        // SAFETY: the caller's promise: a group has GROUP bytes.
        unsafe {
            let codes = self.codes.0.add(group * GROUP).cast::<[u8; GROUP]>().read();
            let mut halves = [0; GROUP];
            for (half, code) in halves.iter_mut().zip(codes) {
                *half = half_bits(code);
            }
            let mut numbers = [S::zero(); 8];
            for (i, to) in numbers[..GROUP / S::LANES].iter_mut().enumerate() {
                *to = S::mul(S::load_f16(halves.as_ptr().add(i * S::LANES)), S::splat(OF_HALF));
            }
            numbers
        }
    }

    /// The scale of a group of the matrix.
    ///
    /// # Safety
    /// The group exists.
    #[inline(always)]
    unsafe fn scale(&self, group: usize) -> f32 {
        // SAFETY: the caller's promise: a group has one scale byte.
        power(unsafe { self.scales.0.add(group).read() })
    }

    /// Fills `out` with rows from `first` on as f32.
    ///
    /// # Safety
    /// The rows exist, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn rows<S: Simd>(&self, first: usize, inputs: usize, out: &mut [f32]) {
        let groups = first * inputs / GROUP..;
        for (group, to) in groups.zip(out.chunks_exact_mut(GROUP)) {
            // SAFETY: the caller's promise; `to` has the length of a group.
            unsafe {
                let (numbers, scale) = (self.group::<S>(group), S::splat(self.scale(group)));
                for (i, &number) in numbers[..GROUP / S::LANES].iter().enumerate() {
                    S::store(to.as_mut_ptr().add(i * S::LANES), S::mul(number, scale));
                }
            }
        }
    }
}

/// Rows in MXFP8.
#[derive(Clone, Copy)]
pub(super) struct FloatWeights {
    pub floats: Mxfp8Matrix,
    pub inputs: usize,
}

impl WeightRows for FloatWeights {
    fn row_bytes(&self) -> usize {
        self.inputs
    }

    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const T: usize>(
        &self,
        block: &OutputBlock,
        rows: Together,
        x: &[PreparedRow; T],
    ) -> [[f32; T]; R] {
        let groups = self.inputs / GROUP;
        let ahead = block.prefetch_distance(self.row_bytes());
        // SAFETY: the caller's promise.
        unsafe {
            let mut total = [[S::zero(); T]; R];
            for g in 0..groups {
                for (r, total) in total.iter_mut().enumerate() {
                    let group = (rows.output + r * rows.apart) * groups + g;
                    if g % 2 == 0 {
                        S::prefetch(self.floats.codes.0.add(group * GROUP).wrapping_add(ahead));
                    }
                    let (numbers, scale) = (self.floats.group::<S>(group), S::splat(self.floats.scale(group)));
                    for (total, x) in total.iter_mut().zip(x) {
                        let mut dot = S::zero();
                        for (i, &number) in numbers[..GROUP / S::LANES].iter().enumerate() {
                            dot = S::fma(number, S::load(x.0.as_ptr().add(g * GROUP + i * S::LANES)), dot);
                        }
                        *total = S::fma(scale, dot, *total);
                    }
                }
            }
            sums::<S, R, T>(total)
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn both_ways_to_widen_e4m3_agree() {
        for code in 0..=u8::MAX {
            let (float, half) = (e4m3(code), OF_HALF * f16::from_bits(half_bits(code)).to_f32());
            assert!(float.to_bits() == half.to_bits() || float.is_nan() && half.is_nan(), "{code:#x}: {float}, {half}");
            assert_eq!(float.is_nan(), code & 0x7F == 0x7F);
        }
        assert_eq!([0x01, 0x07, 0x08, 0x38, 0xFE].map(e4m3), [2f32.powi(-9), 7.0 / 512.0, 0.015625, 1.0, -448.0]);
    }
}
