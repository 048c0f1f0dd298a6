//! Matrices in the block formats of GGUF files, in MXFP4 and in NVFP4.
//!
//! Every format is affine within groups of 16 or 32 inputs: w = scale · code + bias, with unsigned codes of a byte or
//! less. [`BlockMatrix::codes`] unpacks the codes of a row to bytes, [`BlockMatrix::factors`] computes the scales and
//! biases. The kernels of 8-bit affine weights then multiply. The loops over bytes are plain code, which the compiler
//! vectorises for every level.

use super::{
    super::simd::{Simd, SimdKernel},
    floats::e4m3,
    matrix::CodePointer,
};
use crate::{
    Tensor,
    ops::{BlockFormat, FloatFormat},
};

/// A matrix in blocks.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct BlockMatrix {
    format: Packing,
    codes: CodePointer,
    /// The scales, which are in the codes' blocks unless they are separate.
    scales: CodePointer,
}

/// The storage of codes and scales.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Packing {
    Blocks(BlockFormat),
    /// E2M1 codes, with separate scales.
    Floats(FloatScale),
}

/// The format of the scales of E2M1 codes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FloatScale {
    /// MXFP4: powers of two, for 32 inputs each.
    Power,
    /// NVFP4: E4M3, for 16 inputs each.
    E4m3,
}

impl FloatScale {
    fn group(self) -> usize {
        match self {
            FloatScale::Power => FloatFormat::Mxfp4.group(),
            FloatScale::E4m3 => FloatFormat::Nvfp4.group(),
        }
    }
}

/// Numbers of the packings, as const parameters of kernels.
pub(super) mod packing {
    use crate::ops::BlockFormat;

    pub const Q5_0: usize = BlockFormat::Q5_0 as usize;
    pub const Q5_1: usize = BlockFormat::Q5_1 as usize;
    pub const Q2_K: usize = BlockFormat::Q2_K as usize;
    pub const Q3_K: usize = BlockFormat::Q3_K as usize;
    pub const Q4_K: usize = BlockFormat::Q4_K as usize;
    pub const Q5_K: usize = BlockFormat::Q5_K as usize;
    pub const Q6_K: usize = BlockFormat::Q6_K as usize;
    pub const IQ4_NL: usize = BlockFormat::IQ4_NL as usize;
    pub const IQ4_XS: usize = BlockFormat::IQ4_XS as usize;
    pub const MXFP4: usize = BlockFormat::MXFP4 as usize;
    /// E2M1 codes, with separate scales.
    pub const SEPARATE: usize = BlockFormat::ALL.len();
}

/// The values of the codes of IQ4_NL and IQ4_XS, plus 128.
pub(super) const IQ4: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];
/// Twice the values of E2M1 codes, plus 12.
pub(super) const E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
/// The code of zero.
const E2M1_ZERO: f32 = 12.0;

impl BlockMatrix {
    pub(super) fn new(data: &Tensor, format: BlockFormat) -> BlockMatrix {
        let codes = CodePointer(data.host_ptr());
        BlockMatrix { format: Packing::Blocks(format), codes, scales: codes }
    }

    /// A matrix of E2M1 codes with powers of two as scales.
    pub(super) fn of_mxfp4(codes: &Tensor, scales: &Tensor) -> BlockMatrix {
        Self::of_floats(codes, scales, FloatScale::Power)
    }

    /// A matrix of E2M1 codes with E4M3 scales.
    pub(super) fn of_nvfp4(codes: &Tensor, scales: &Tensor) -> BlockMatrix {
        Self::of_floats(codes, scales, FloatScale::E4m3)
    }

    fn of_floats(codes: &Tensor, scales: &Tensor, scale: FloatScale) -> BlockMatrix {
        let (codes, scales) = (CodePointer(codes.host_ptr()), CodePointer(scales.host_ptr()));
        BlockMatrix { format: Packing::Floats(scale), codes, scales }
    }

    /// Inputs that share a scale: 16 or 32.
    pub(super) fn group(&self) -> usize {
        match self.format {
            Packing::Blocks(format) => format.group(),
            Packing::Floats(scale) => scale.group(),
        }
    }

    /// The length of the alternating runs that are cheap to unpack. Two runs fit in a group.
    pub(super) fn run(&self) -> usize {
        match self.format {
            Packing::Blocks(_) => self.group() / 2,
            Packing::Floats(_) => 1,
        }
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
            Packing::Floats(_) => 12,
        }
    }

    /// The number of the packing in [`packing`].
    pub(super) fn packing(&self) -> usize {
        match self.format {
            Packing::Blocks(format) => format as usize,
            Packing::Floats(_) => packing::SEPARATE,
        }
    }

    /// Bytes of a row, without separate scales.
    pub(super) fn row_bytes(&self, inputs: usize) -> usize {
        match self.format {
            Packing::Blocks(format) => inputs / format.block_inputs() * format.block_bytes(),
            Packing::Floats(_) => inputs / 2,
        }
    }

    /// The first byte of a row, without separate scales.
    ///
    /// # Safety
    /// The row exists.
    pub(super) unsafe fn row(&self, row: usize, inputs: usize) -> *const u8 {
        // SAFETY: the caller's promise.
        unsafe { self.codes.0.add(row * self.row_bytes(inputs)) }
    }

    /// Unpacks the codes of a row, in natural order; `to` has the length of the row. Prefetches `ahead` bytes ahead.
    ///
    /// # Safety
    /// The row exists, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn codes<S: Simd>(&self, row: usize, ahead: usize, to: &mut [u8]) {
        let bytes = self.row_bytes(to.len());
        // SAFETY: the caller's promise: a row has `bytes` bytes.
        let row = unsafe { std::slice::from_raw_parts(self.row(row, to.len()), bytes) };
        // SAFETY: the level's instructions are enabled.
        unsafe { S::call(UnpackRow { format: self.format, row, ahead, to }) };
    }

    /// Computes the scales and biases of rows from `first` on, and fills both slices. Prefetches blocks `ahead` bytes
    /// ahead.
    ///
    /// # Safety
    /// The rows exist, both slices have the same length, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn factors<S: Simd>(
        &self,
        first: usize,
        inputs: usize,
        ahead: usize,
        scales: &mut [f32],
        biases: &mut [f32],
    ) {
        let blocks = match self.format {
            // SAFETY: the caller's promise: each scale is one byte.
            Packing::Floats(scale) => unsafe {
                std::slice::from_raw_parts(self.scales.0.add(first * (inputs / scale.group())), scales.len())
            },
            Packing::Blocks(format) => {
                let bytes = scales.len() * format.group() / format.block_inputs() * format.block_bytes();
                // SAFETY: the caller's promise: these blocks exist.
                unsafe { std::slice::from_raw_parts(self.row(first, inputs), bytes) }
            }
        };
        // SAFETY: the level's instructions are enabled.
        unsafe { S::call(UnpackFactors { format: self.format, blocks, ahead, scales, biases }) };
    }
}

/// Computes the scales and biases of whole rows.
struct UnpackFactors<'a> {
    format: Packing,
    blocks: &'a [u8],
    ahead: usize,
    scales: &'a mut [f32],
    biases: &'a mut [f32],
}

impl SimdKernel for UnpackFactors<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let UnpackFactors { format, blocks, ahead, scales, biases } = self;
        let format = match format {
            Packing::Blocks(format) => format,
            Packing::Floats(kind) => {
                for ((&byte, scale), bias) in blocks.iter().zip(scales).zip(biases) {
                    (*scale, *bias) = match kind {
                        FloatScale::Power => mxfp4_factors(byte),
                        FloatScale::E4m3 => nvfp4_factors(byte),
                    };
                }
                return;
            }
        };
        // SAFETY: the level's instructions are enabled.
        unsafe {
            match format {
                BlockFormat::Q5_0 => ones::<S, 22, _>(blocks, [0], ahead, scales, biases, |_, [d]| (d, -16.0 * d)),
                BlockFormat::Q5_1 => ones::<S, 24, _>(blocks, [0, 2], ahead, scales, biases, |_, [d, min]| (d, min)),
                BlockFormat::IQ4_NL => ones::<S, 18, _>(blocks, [0], ahead, scales, biases, |_, [d]| (d, -128.0 * d)),
                BlockFormat::MXFP4 => {
                    ones::<S, 17, _>(blocks, [0], ahead, scales, biases, |e, _| mxfp4_factors(e as u8))
                }
                BlockFormat::Q2_K => each::<S, 84, 16, _>(blocks, [80, 82], ahead, scales, biases, q2_factors),
                BlockFormat::Q3_K => each::<S, 110, 16, _>(blocks, [108], ahead, scales, biases, q3_factors),
                BlockFormat::Q4_K => each::<S, 144, 8, _>(blocks, [0, 2], ahead, scales, biases, q4_factors),
                BlockFormat::Q5_K => each::<S, 176, 8, _>(blocks, [0, 2], ahead, scales, biases, q4_factors),
                BlockFormat::Q6_K => each::<S, 210, 16, _>(blocks, [208], ahead, scales, biases, q6_factors),
                BlockFormat::IQ4_XS => each::<S, 136, 8, _>(blocks, [0], ahead, scales, biases, iq4_xs_factors),
            }
        }
    }
}

/// Unpacks a row. Compiled once per level, not inside each kernel that reads rows.
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

/// Unpacks blocks of BYTES bytes to INPUTS codes each, then looks the codes up in the table, if given.
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

/// 32 codes from unit `u` on.
#[inline(always)]
fn unit(codes: &mut [u8; 256], u: usize) -> &mut [u8; 32] {
    (&mut codes[u * 32..u * 32 + 32]).try_into().expect("32 bytes")
}

/// 32 codes: the low halves of 16 bytes, then the high halves.
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
    // The bit of each byte of `spread`, which repeats each byte of `high` eight times. Compilers vectorise these loops.
    const BITS: [u8; 32] = {
        let mut bits = [0; 32];
        let mut j = 0;
        while j < 32 {
            bits[j] = 1 << (j % 8);
            j += 1;
        }
        bits
    };
    let mut spread = [0u8; 32];
    for (spread, &high) in spread.chunks_exact_mut(8).zip(high) {
        spread.copy_from_slice(&(u64::from(high) * 0x0101_0101_0101_0101).to_le_bytes());
    }
    halves(bytes, to);
    for j in 0..32 {
        to[j] |= if spread[j] & BITS[j] == 0 { 0 } else { 16 };
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

/// Blocks whose halves are widened together.
const HALVES: usize = 16;

/// The bits of the f16 at offsets `halves` of each block, and their values.
#[inline(always)]
unsafe fn widened<S: Simd, const BYTES: usize, const N: usize>(
    blocks: &[u8],
    halves: [usize; N],
) -> ([[u16; HALVES]; N], [[f32; HALVES]; N]) {
    let (mut bits, mut floats) = ([[0; HALVES]; N], [[0.0; HALVES]; N]);
    for (i, block) in blocks.chunks_exact(BYTES).take(HALVES).enumerate() {
        for (bits, at) in bits.iter_mut().zip(halves) {
            bits[i] = u16::from_le_bytes([block[at], block[at + 1]]);
        }
    }
    for (bits, floats) in bits.iter().zip(&mut floats) {
        for at in (0..HALVES).step_by(S::LANES) {
            // SAFETY: the level's instructions are enabled; whole vectors of both arrays.
            unsafe { S::store(floats.as_mut_ptr().add(at), S::load_f16(bits.as_ptr().add(at))) };
        }
    }
    (bits, floats)
}

/// The bits and floats of block `i`. Without `map`, which would remain a call in functions with target features.
#[inline(always)]
fn of_block<const N: usize>(floats: &[[f32; HALVES]; N], i: usize) -> [f32; N] {
    let mut of_block = [0.0; N];
    for (to, from) in of_block.iter_mut().zip(floats) {
        *to = from[i];
    }
    of_block
}

/// Scales and biases of blocks that have one of each, computed from the bits of their first f16 and all their f16.
#[inline(always)]
unsafe fn ones<S: Simd, const BYTES: usize, const N: usize>(
    blocks: &[u8],
    halves: [usize; N],
    ahead: usize,
    scales: &mut [f32],
    biases: &mut [f32],
    factors: impl Fn(u16, [f32; N]) -> (f32, f32),
) {
    let factors_of = scales.chunks_mut(HALVES).zip(biases.chunks_mut(HALVES));
    for (blocks, (s, b)) in blocks.chunks(HALVES * BYTES).zip(factors_of) {
        // SAFETY: the level's instructions are enabled.
        let (bits, floats) = unsafe {
            for at in (0..HALVES * BYTES).step_by(64) {
                S::prefetch(blocks.as_ptr().wrapping_add(ahead + at));
            }
            widened::<S, BYTES, N>(blocks, halves)
        };
        for (i, (s, b)) in s.iter_mut().zip(b).enumerate().take(HALVES) {
            (*s, *b) = factors(bits[0][i], of_block(&floats, i));
        }
    }
}

/// Calls `factors` for each block with its f16 at `halves`, and with the slices for its GROUPS scales and biases. The
/// prefetch also keeps compilers from computing several blocks interleaved, which is slower.
#[inline(always)]
unsafe fn each<S: Simd, const BYTES: usize, const GROUPS: usize, const N: usize>(
    blocks: &[u8],
    halves: [usize; N],
    ahead: usize,
    scales: &mut [f32],
    biases: &mut [f32],
    factors: impl Fn(&[u8; BYTES], [f32; N], &mut [f32; GROUPS], &mut [f32; GROUPS]),
) {
    let factors_of = scales.chunks_mut(HALVES * GROUPS).zip(biases.chunks_mut(HALVES * GROUPS));
    for (blocks, (s, b)) in blocks.chunks(HALVES * BYTES).zip(factors_of) {
        // SAFETY: the level's instructions are enabled.
        let (_, floats) = unsafe { widened::<S, BYTES, N>(blocks, halves) };
        let groups = s.chunks_exact_mut(GROUPS).zip(b.chunks_exact_mut(GROUPS));
        for (i, (block, (s, b))) in blocks.chunks_exact(BYTES).zip(groups).enumerate().take(HALVES) {
            // SAFETY: as above.
            unsafe { S::prefetch(block.as_ptr().wrapping_add(ahead)) };
            let (Ok(block), Ok(s), Ok(b)) = (block.try_into(), s.try_into(), b.try_into()) else { return };
            factors(block, of_block(&floats, i), s, b);
        }
    }
}

/// The scale of doubled values, 2^(e − 128), and the bias. The two smallest scales are subnormal.
#[inline(always)]
fn mxfp4_factors(e: u8) -> (f32, f32) {
    let scale = f32::from_bits(if e < 2 { 0x20_0000 << e } else { (u32::from(e) - 1) << 23 });
    (scale, -E2M1_ZERO * scale)
}

/// The scale of doubled values, from E4M3, and the bias.
#[inline(always)]
fn nvfp4_factors(code: u8) -> (f32, f32) {
    let scale = 0.5 * e4m3(code);
    (scale, -E2M1_ZERO * scale)
}

#[inline(always)]
fn q2_factors(block: &[u8; 84], [d, min]: [f32; 2], s: &mut [f32; 16], b: &mut [f32; 16]) {
    for g in 0..16 {
        s[g] = d * f32::from(block[g] & 15);
        b[g] = -min * f32::from(block[g] >> 4);
    }
}

/// The 32-bit word at a byte offset.
#[inline(always)]
fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*part(block, at))
}

#[inline(always)]
fn q3_factors(block: &[u8; 110], [d]: [f32; 1], s: &mut [f32; 16], b: &mut [f32; 16]) {
    // A word holds four scales: their low halves are in two words, their two high bits in the third.
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

/// The scales and minima of Q4_K and Q5_K.
#[inline(always)]
fn q4_factors<const BYTES: usize>(block: &[u8; BYTES], [d, min]: [f32; 2], s: &mut [f32; 8], b: &mut [f32; 8]) {
    // A word holds four scales or minima. The first four are whole numbers of six bits; the low halves of the last four
    // are in a third word.
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
fn q6_factors(block: &[u8; 210], [d]: [f32; 1], s: &mut [f32; 16], b: &mut [f32; 16]) {
    for g in 0..16 {
        s[g] = d * f32::from(block[192 + g] as i8);
        b[g] = -32.0 * s[g];
    }
}

#[inline(always)]
fn iq4_xs_factors(block: &[u8; 136], [d]: [f32; 1], s: &mut [f32; 8], b: &mut [f32; 8]) {
    let high = u16::from_le_bytes([block[2], block[3]]);
    for g in 0..8 {
        let low = block[4 + g / 2] >> (g % 2 * 4) & 15;
        let top = (high >> (g * 2) & 3) as u8;
        s[g] = d * (f32::from(low | top << 4) - 32.0);
        b[g] = -128.0 * s[g];
    }
}
