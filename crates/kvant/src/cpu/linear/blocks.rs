//! Matrices in the block formats of GGUF files and in MXFP4.
//!
//! Every format is affine within groups of 16 or 32 inputs: w = scale · code + bias, with unsigned codes of a byte or
//! less. [`BlockMatrix::codes`] unpacks the codes of a row to bytes, [`BlockMatrix::factors`] computes the scales and
//! biases. The kernels of 8-bit affine weights do the rest. The loops over bytes are plain code, which the compiler
//! vectorises for every level.

use super::{
    super::simd::{Simd, SimdKernel},
    matrix::CodePointer,
};
use crate::{Tensor, ops::BlockFormat};

/// A matrix in blocks.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct BlockMatrix {
    format: Packing,
    codes: CodePointer,
    /// Where the scales are; the codes' blocks unless they are separate.
    scales: CodePointer,
}

/// How codes and scales are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Packing {
    Blocks(BlockFormat),
    /// MXFP4 with separate scales.
    Mxfp4,
}

/// The values of the codes of IQ4_NL and IQ4_XS, plus 128.
const IQ4: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];
/// Twice the numbers of E2M1 codes, plus 12.
const E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
/// The code of zero.
const E2M1_ZERO: f32 = 12.0;

impl BlockMatrix {
    pub(super) fn new(data: &Tensor, format: BlockFormat) -> BlockMatrix {
        let codes = CodePointer(data.host_ptr());
        BlockMatrix { format: Packing::Blocks(format), codes, scales: codes }
    }

    pub(super) fn of_mxfp4(codes: &Tensor, scales: &Tensor) -> BlockMatrix {
        let (codes, scales) = (CodePointer(codes.host_ptr()), CodePointer(scales.host_ptr()));
        BlockMatrix { format: Packing::Mxfp4, codes, scales }
    }

    /// Inputs that share a scale: 16 or 32.
    pub(super) fn group(&self) -> usize {
        match self.format {
            Packing::Blocks(format) => format.group(),
            Packing::Mxfp4 => 32,
        }
    }

    /// Whether codes have more than 6 bits.
    pub(super) fn wide(&self) -> bool {
        matches!(self.format, Packing::Blocks(BlockFormat::IQ4_NL | BlockFormat::IQ4_XS))
    }

    /// A code in the middle of the range.
    pub(super) fn middle(&self) -> i16 {
        match self.format {
            Packing::Blocks(format) => match format {
                BlockFormat::Q5_0 | BlockFormat::Q5_1 | BlockFormat::Q5_K => 16,
                BlockFormat::Q2_K => 2,
                BlockFormat::Q3_K => 4,
                BlockFormat::Q4_K => 8,
                BlockFormat::Q6_K => 32,
                BlockFormat::IQ4_NL | BlockFormat::IQ4_XS => 128,
                BlockFormat::MXFP4 => 12,
            },
            Packing::Mxfp4 => 12,
        }
    }

    /// Bytes of a row, without separate scales.
    pub(super) fn row_bytes(&self, inputs: usize) -> usize {
        match self.format {
            Packing::Blocks(format) => inputs / format.block_inputs() * format.block_bytes(),
            Packing::Mxfp4 => inputs / 2,
        }
    }

    /// Unpacks the codes of a row, in natural order; `to` is as long as the row. Prefetches what is `ahead` bytes
    /// further.
    ///
    /// # Safety
    /// The row exists, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn codes<S: Simd>(&self, row: usize, ahead: usize, to: &mut [u8]) {
        let bytes = self.row_bytes(to.len());
        // SAFETY: the caller's promise: `bytes` bytes a row.
        let row = unsafe { std::slice::from_raw_parts(self.codes.0.add(row * bytes), bytes) };
        // SAFETY: the level's instructions are enabled.
        unsafe { S::call(UnpackRow { format: self.format, row, ahead, to }) };
    }

    /// Computes the scales and the biases of rows from `first` on, as many as there is room for.
    ///
    /// # Safety
    /// The rows exist, both slices have the same length, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn factors<S: Simd>(&self, first: usize, inputs: usize, scales: &mut [f32], biases: &mut [f32]) {
        let blocks = match self.format {
            // SAFETY: the caller's promise: one byte for each scale.
            Packing::Mxfp4 => unsafe {
                std::slice::from_raw_parts(self.scales.0.add(first * (inputs / 32)), scales.len())
            },
            Packing::Blocks(format) => {
                let bytes = scales.len() * format.group() / format.block_inputs() * format.block_bytes();
                // SAFETY: the caller's promise: these blocks exist.
                unsafe { std::slice::from_raw_parts(self.codes.0.add(first * self.row_bytes(inputs)), bytes) }
            }
        };
        // SAFETY: the level's instructions are enabled.
        unsafe { S::call(UnpackFactors { format: self.format, blocks, scales, biases }) };
    }
}

/// Computes the scales and biases of whole rows.
struct UnpackFactors<'a> {
    format: Packing,
    blocks: &'a [u8],
    scales: &'a mut [f32],
    biases: &'a mut [f32],
}

impl SimdKernel for UnpackFactors<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let UnpackFactors { format, blocks, scales, biases } = self;
        let Packing::Blocks(format) = format else {
            for ((&e, scale), bias) in blocks.iter().zip(scales).zip(biases) {
                (*scale, *bias) = mxfp4_factors(e);
            }
            return;
        };
        match format {
            BlockFormat::Q5_0 => each::<22, 1>(blocks, scales, biases, q5_0_factors),
            BlockFormat::Q5_1 => each::<24, 1>(blocks, scales, biases, q5_1_factors),
            BlockFormat::IQ4_NL => each::<18, 1>(blocks, scales, biases, iq4_nl_factors),
            BlockFormat::MXFP4 => each::<17, 1>(blocks, scales, biases, mxfp4_block_factors),
            BlockFormat::Q2_K => each::<84, 16>(blocks, scales, biases, q2_factors),
            BlockFormat::Q3_K => each::<110, 16>(blocks, scales, biases, q3_factors),
            BlockFormat::Q4_K => each::<144, 8>(blocks, scales, biases, q4_factors),
            BlockFormat::Q5_K => each::<176, 8>(blocks, scales, biases, q4_factors),
            BlockFormat::Q6_K => each::<210, 16>(blocks, scales, biases, q6_factors),
            BlockFormat::IQ4_XS => each::<136, 8>(blocks, scales, biases, iq4_xs_factors),
        }
    }
}

/// Unpacks a row; compiled once for a level, not inside each of the kernels that read rows.
struct UnpackRow<'a> {
    format: Packing,
    row: &'a [u8],
    ahead: usize,
    to: &'a mut [u8],
}

impl SimdKernel for UnpackRow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let UnpackRow { format, row, ahead, to } = self;
        let Packing::Blocks(format) = format else {
            // SAFETY: the level's instructions are enabled.
            return unsafe { unpack::<S, 16, 32>(row, ahead, to, pairs, Some(&E2M1)) };
        };
        // SAFETY: as above.
        unsafe {
            match format {
                BlockFormat::Q5_0 => unpack::<S, 22, 32>(row, ahead, to, q5_0, None),
                BlockFormat::Q5_1 => unpack::<S, 24, 32>(row, ahead, to, q5_1, None),
                BlockFormat::IQ4_NL => unpack::<S, 18, 32>(row, ahead, to, iq4_nl, Some(&IQ4)),
                BlockFormat::MXFP4 => unpack::<S, 17, 32>(row, ahead, to, mxfp4, Some(&E2M1)),
                BlockFormat::Q2_K => unpack::<S, 84, 256>(row, ahead, to, q2, None),
                BlockFormat::Q3_K => unpack::<S, 110, 256>(row, ahead, to, q3, None),
                BlockFormat::Q4_K => unpack::<S, 144, 256>(row, ahead, to, q4, None),
                BlockFormat::Q5_K => unpack::<S, 176, 256>(row, ahead, to, q5, None),
                BlockFormat::Q6_K => unpack::<S, 210, 256>(row, ahead, to, q6, None),
                BlockFormat::IQ4_XS => unpack::<S, 136, 256>(row, ahead, to, iq4_xs, Some(&IQ4)),
            }
        }
    }
}

/// Unpacks blocks of BYTES bytes to INPUTS codes each, then replaces the codes by the entries of a table.
#[inline(always)]
unsafe fn unpack<S: Simd, const BYTES: usize, const INPUTS: usize>(
    row: &[u8],
    ahead: usize,
    to: &mut [u8],
    block: impl Fn(&[u8; BYTES], &mut [u8; INPUTS]) + Copy,
    table: Option<&[u8; 16]>,
) {
    for (from, to) in row.chunks_exact(BYTES).zip(to.chunks_exact_mut(INPUTS)) {
        for line in (0..BYTES).step_by(64) {
            // SAFETY: the level's instructions are enabled.
            unsafe { S::prefetch(from.as_ptr().wrapping_add(ahead + line)) };
        }
        let (Ok(from), Ok(to)) = (from.try_into(), <&mut [u8; INPUTS]>::try_from(to)) else { return };
        block(from, to);
        if let Some(table) = table {
            for to in to.chunks_exact_mut(32) {
                // SAFETY: 32 bytes; the level's instructions are enabled.
                unsafe { S::map16(table, to.as_mut_ptr()) };
            }
        }
    }
}

/// N bytes from `at` on.
#[inline(always)]
fn part<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    bytes[at..at + N].try_into().expect("N bytes")
}

/// 32 codes from the unit `u` on.
#[inline(always)]
fn unit(codes: &mut [u8; 256], u: usize) -> &mut [u8; 32] {
    (&mut codes[u * 32..u * 32 + 32]).try_into().expect("32 bytes")
}

/// 32 codes: the low halves of 16 bytes, then the high ones.
#[inline(always)]
fn halves(bytes: &[u8; 16], to: &mut [u8; 32]) {
    for j in 0..16 {
        to[j] = bytes[j] & 15;
        to[j + 16] = bytes[j] >> 4;
    }
}

/// 32 codes: the low half, then the high half of each byte.
#[inline(always)]
fn pairs(bytes: &[u8; 16], to: &mut [u8; 32]) {
    for j in 0..16 {
        to[2 * j] = bytes[j] & 15;
        to[2 * j + 1] = bytes[j] >> 4;
    }
}

/// As [`halves`], with a fifth bit each.
#[inline(always)]
fn fives(bytes: &[u8; 16], high: &[u8; 4], to: &mut [u8; 32]) {
    halves(bytes, to);
    for (to, &high) in to.chunks_exact_mut(8).zip(high) {
        // Bit j alone in byte j, then 16 wherever one is.
        let bits = (u64::from(high) * 0x0101_0101_0101_0101) & 0x8040_2010_0804_0201;
        let fifths = ((bits + 0x7F7F_7F7F_7F7F_7F7F) & 0x8080_8080_8080_8080) >> 3;
        let codes = u64::from_le_bytes(*part(to, 0)) | fifths;
        to.copy_from_slice(&codes.to_le_bytes());
    }
}

#[inline(always)]
fn q5_0(block: &[u8; 22], to: &mut [u8; 32]) {
    fives(part(block, 6), part(block, 2), to);
}

#[inline(always)]
fn q5_1(block: &[u8; 24], to: &mut [u8; 32]) {
    fives(part(block, 8), part(block, 4), to);
}

#[inline(always)]
fn iq4_nl(block: &[u8; 18], to: &mut [u8; 32]) {
    halves(part(block, 2), to);
}

#[inline(always)]
fn mxfp4(block: &[u8; 17], to: &mut [u8; 32]) {
    halves(part(block, 1), to);
}

#[inline(always)]
fn q2(block: &[u8; 84], to: &mut [u8; 256]) {
    for u in 0..8 {
        let plane: &[u8; 32] = part(block, 16 + u / 4 * 32);
        let to = unit(to, u);
        for j in 0..32 {
            to[j] = plane[j] >> (u % 4 * 2) & 3;
        }
    }
}

#[inline(always)]
fn q3(block: &[u8; 110], to: &mut [u8; 256]) {
    let high: &[u8; 32] = part(block, 0);
    for u in 0..8 {
        let plane: &[u8; 32] = part(block, 32 + u / 4 * 32);
        let to = unit(to, u);
        for j in 0..32 {
            to[j] = plane[j] >> (u % 4 * 2) & 3 | (high[j] >> u & 1) << 2;
        }
    }
}

#[inline(always)]
fn q4(block: &[u8; 144], to: &mut [u8; 256]) {
    for u in 0..8 {
        let plane: &[u8; 32] = part(block, 16 + u / 2 * 32);
        let to = unit(to, u);
        for j in 0..32 {
            to[j] = plane[j] >> (u % 2 * 4) & 15;
        }
    }
}

#[inline(always)]
fn q5(block: &[u8; 176], to: &mut [u8; 256]) {
    let high: &[u8; 32] = part(block, 16);
    for u in 0..8 {
        let plane: &[u8; 32] = part(block, 48 + u / 2 * 32);
        let to = unit(to, u);
        for j in 0..32 {
            to[j] = plane[j] >> (u % 2 * 4) & 15 | (high[j] >> u & 1) << 4;
        }
    }
}

#[inline(always)]
fn q6(block: &[u8; 210], to: &mut [u8; 256]) {
    for u in 0..8 {
        let low: &[u8; 32] = part(block, u / 4 * 64 + u % 2 * 32);
        let high: &[u8; 32] = part(block, 128 + u / 4 * 32);
        let to = unit(to, u);
        for j in 0..32 {
            to[j] = low[j] >> (u % 4 / 2 * 4) & 15 | (high[j] >> (u % 4 * 2) & 3) << 4;
        }
    }
}

#[inline(always)]
fn iq4_xs(block: &[u8; 136], to: &mut [u8; 256]) {
    for u in 0..8 {
        halves(part(block, 8 + u * 16), unit(to, u));
    }
}

/// Calls `factors` for each block, with room for its GROUPS scales and biases.
#[inline(always)]
fn each<const BYTES: usize, const GROUPS: usize>(
    blocks: &[u8],
    scales: &mut [f32],
    biases: &mut [f32],
    factors: impl Fn(&[u8; BYTES], &mut [f32; GROUPS], &mut [f32; GROUPS]),
) {
    let blocks = blocks.chunks_exact(BYTES);
    for ((block, s), b) in blocks.zip(scales.chunks_exact_mut(GROUPS)).zip(biases.chunks_exact_mut(GROUPS)) {
        let (Ok(block), Ok(s), Ok(b)) = (block.try_into(), s.try_into(), b.try_into()) else { return };
        factors(block, s, b);
    }
}

/// The f16 at a byte; without the call of a function that looks for instructions.
#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    let bits = u32::from(u16::from_le_bytes([block[at], block[at + 1]]));
    // The exponents differ by 112. Numbers of the largest exponent are infinite or NaN.
    let magnitude = f32::from_bits((bits & 0x7FFF) << 13) * f32::from_bits((127 + 112) << 23);
    let special = if bits & 0x7C00 == 0x7C00 { 0x7F80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | (bits & 0x8000) << 16)
}

#[inline(always)]
fn q5_0_factors(block: &[u8; 22], s: &mut [f32; 1], b: &mut [f32; 1]) {
    s[0] = half(block, 0);
    b[0] = -16.0 * s[0];
}

#[inline(always)]
fn q5_1_factors(block: &[u8; 24], s: &mut [f32; 1], b: &mut [f32; 1]) {
    (s[0], b[0]) = (half(block, 0), half(block, 2));
}

#[inline(always)]
fn iq4_nl_factors(block: &[u8; 18], s: &mut [f32; 1], b: &mut [f32; 1]) {
    s[0] = half(block, 0);
    b[0] = -128.0 * s[0];
}

#[inline(always)]
fn mxfp4_block_factors(block: &[u8; 17], s: &mut [f32; 1], b: &mut [f32; 1]) {
    (s[0], b[0]) = mxfp4_factors(block[0]);
}

/// The scale of doubled numbers, 2^(e − 128), of which the smallest two are subnormal; the bias.
#[inline(always)]
fn mxfp4_factors(e: u8) -> (f32, f32) {
    let scale = f32::from_bits(if e < 2 { 0x20_0000 << e } else { (u32::from(e) - 1) << 23 });
    (scale, -E2M1_ZERO * scale)
}

#[inline(always)]
fn q2_factors(block: &[u8; 84], s: &mut [f32; 16], b: &mut [f32; 16]) {
    let (d, min) = (half(block, 80), half(block, 82));
    for g in 0..16 {
        s[g] = d * f32::from(block[g] & 15);
        b[g] = -min * f32::from(block[g] >> 4);
    }
}

/// The word at a byte.
#[inline(always)]
fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*part(block, at))
}

#[inline(always)]
fn q3_factors(block: &[u8; 110], s: &mut [f32; 16], b: &mut [f32; 16]) {
    let d = half(block, 108);
    // Four scales a word: their low halves are in two words, their two high bits in the third.
    let words = [word(block, 96), word(block, 100), word(block, 104)];
    let mut bytes = [0u8; 16];
    for i in 0..4 {
        let low = words[i % 2] >> (i / 2 * 4) & 0x0F0F_0F0F;
        let high = words[2] >> (i * 2) & 0x0303_0303;
        bytes[i * 4..i * 4 + 4].copy_from_slice(&(low | high << 4).to_le_bytes());
    }
    for g in 0..16 {
        s[g] = d * (f32::from(bytes[g]) - 32.0);
        b[g] = -4.0 * s[g];
    }
}

/// Of Q4_K and Q5_K.
#[inline(always)]
fn q4_factors<const BYTES: usize>(block: &[u8; BYTES], s: &mut [f32; 8], b: &mut [f32; 8]) {
    let (d, min) = (half(block, 0), half(block, 2));
    // Four scales or minima a word: the first four of each whole, of the others the low halves together.
    let (first, mins, rest) = (word(block, 4), word(block, 8), word(block, 12));
    let words = [
        first & 0x3F3F_3F3F,
        rest & 0x0F0F_0F0F | first >> 2 & 0x3030_3030,
        mins & 0x3F3F_3F3F,
        rest >> 4 & 0x0F0F_0F0F | mins >> 2 & 0x3030_3030,
    ];
    let mut bytes = [0u8; 16];
    for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    for g in 0..8 {
        s[g] = d * f32::from(bytes[g]);
        b[g] = -min * f32::from(bytes[g + 8]);
    }
}

#[inline(always)]
fn q6_factors(block: &[u8; 210], s: &mut [f32; 16], b: &mut [f32; 16]) {
    let d = half(block, 208);
    for g in 0..16 {
        s[g] = d * f32::from(block[192 + g] as i8);
        b[g] = -32.0 * s[g];
    }
}

#[inline(always)]
fn iq4_xs_factors(block: &[u8; 136], s: &mut [f32; 8], b: &mut [f32; 8]) {
    let (d, high) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for g in 0..8 {
        let low = block[4 + g / 2] >> (g % 2 * 4) & 15;
        let top = (high >> (g * 2) & 3) as u8;
        s[g] = d * (f32::from(low | top << 4) - 32.0);
        b[g] = -128.0 * s[g];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_widen_as_in_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (got, want) = (half(&bits.to_le_bytes(), 0), half::f16::from_bits(bits).to_f32());
            assert!(got == want || (got.is_nan() && want.is_nan()), "{bits:x}");
        }
    }
}
