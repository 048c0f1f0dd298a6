//! Converts blocks to kvant's affine matrices without loss: w = scale · code + bias in groups of 32, with f16 scales.
//!
//! | type | bits | scale | bias |
//! |---|---|---|---|
//! | Q4_0 | 4 | d | −8 d |
//! | Q4_1 | 4 | d | m |
//! | Q8_0 | 8 | d | −128 d |
//!
//! A bias that overflows f16 requires scales and biases in f32.

use kvant::{DType, f16};

use super::GgufType;

/// Elements that share a scale and a bias: one block.
pub(super) const GROUP: usize = 32;

/// Bits per code; `None` if the type is not affine.
pub(super) fn bits(kind: GgufType) -> Option<u32> {
    match kind {
        GgufType::Q4_0 | GgufType::Q4_1 => Some(4),
        GgufType::Q8_0 => Some(8),
        _ => None,
    }
}

/// Bytes of the tensors of an affine matrix.
#[derive(Debug, Default)]
pub(super) struct AffineBytes {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub biases: Vec<u8>,
}

/// A bias overflows the dtype of biases.
#[derive(Debug, PartialEq)]
pub(super) struct Overflow;

impl AffineBytes {
    /// Converts whole blocks of an affine type and replaces the contents.
    pub(super) fn convert(&mut self, kind: GgufType, blocks: &[u8], dtype: DType) -> Result<(), Overflow> {
        let AffineBytes { codes, scales, biases } = self;
        let blocks = blocks.chunks_exact(kind.block_bytes() as usize);
        let code_bytes = GROUP / 8 * bits(kind).unwrap_or(8) as usize;
        codes.resize(blocks.len() * code_bytes, 0);
        scales.clear();
        biases.clear();
        for (block, codes) in blocks.zip(codes.chunks_exact_mut(code_bytes)) {
            let (scale, bias, stored) = parts(kind, block);
            match <&[u8; GROUP / 2]>::try_from(stored) {
                Ok(halves) => codes.copy_from_slice(&in_order(halves)),
                Err(_) => codes.iter_mut().zip(stored).for_each(|(to, from)| *to = unsigned(*from)),
            }
            if dtype == DType::F32 {
                scales.extend(scale.to_le_bytes());
                biases.extend(bias.to_le_bytes());
                continue;
            }
            let narrow = f16::from_f32(bias);
            if narrow.is_infinite() && bias.is_finite() {
                return Err(Overflow);
            }
            scales.extend(f16::from_f32(scale).to_le_bytes());
            biases.extend(narrow.to_le_bytes());
        }
        Ok(())
    }
}

/// The scale, bias and codes of a block of an affine type.
pub(super) fn read_block(kind: GgufType, block: &[u8], codes: &mut [u8; GROUP]) -> (f32, f32) {
    let (scale, bias, stored) = parts(kind, block);
    match <&[u8; GROUP / 2]>::try_from(stored) {
        Ok(halves) => {
            for (pair, byte) in codes.chunks_exact_mut(2).zip(in_order(halves)) {
                pair.copy_from_slice(&[byte & 15, byte >> 4]);
            }
        }
        Err(_) => codes.iter_mut().zip(stored).for_each(|(to, from)| *to = unsigned(*from)),
    }
    (scale, bias)
}

/// The scale, the bias and the bytes of the codes. Each product of the scale and a power of two is exact.
fn parts(kind: GgufType, block: &[u8]) -> (f32, f32, &[u8]) {
    let d = half(block, 0);
    match kind {
        GgufType::Q4_0 => (d, -8.0 * d, &block[2..]),
        GgufType::Q4_1 => (d, half(block, 2), &block[4..]),
        _ => (d, -128.0 * d, &block[2..]),
    }
}

/// Adds 128 to a signed code by flipping its highest bit.
fn unsigned(code: u8) -> u8 {
    code ^ 0x80
}

/// Reorders 32 4-bit codes. Input bytes contain code j in the low and code j + 16 in the high half; output bytes
/// contain consecutive codes, the first in the low half.
fn in_order(halves: &[u8; GROUP / 2]) -> [u8; GROUP / 2] {
    let mut ordered = [0; GROUP / 2];
    let (first, second) = ordered.split_at_mut(GROUP / 4);
    for ((first, second), &[a, b]) in first.iter_mut().zip(second).zip(halves.as_chunks::<2>().0) {
        *first = a & 15 | b << 4;
        *second = a >> 4 | b & 0xF0;
    }
    ordered
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
