//! Blocks as kvant's affine matrices, without loss: w = scale · code + bias in groups of 32, with f16 scales.
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

/// Elements that share a scale and a bias: those of a block.
pub(super) const GROUP: usize = 32;

/// Bits of a code; `None` for a type that is not affine.
pub(super) fn bits(kind: GgufType) -> Option<u32> {
    match kind {
        GgufType::Q4_0 | GgufType::Q4_1 => Some(4),
        GgufType::Q8_0 => Some(8),
        _ => None,
    }
}

/// Parts of an affine matrix as bytes of their tensors.
#[derive(Debug, Default)]
pub(super) struct AffineBytes {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub biases: Vec<u8>,
}

/// A bias does not fit the dtype of biases.
#[derive(Debug, PartialEq)]
pub(super) struct Overflow;

impl AffineBytes {
    /// Converts whole blocks of an affine type and replaces the contents.
    pub(super) fn convert(&mut self, kind: GgufType, blocks: &[u8], scales: DType) -> Result<(), Overflow> {
        self.codes.clear();
        self.scales.clear();
        self.biases.clear();
        let mut codes = [0u8; GROUP];
        for block in blocks.chunks_exact(kind.block_bytes() as usize) {
            let (scale, bias) = read_block(kind, block, &mut codes);
            self.push_scale(scales, scale, bias)?;
            if bits(kind) == Some(8) {
                self.codes.extend(codes);
            } else {
                self.codes.extend(codes.as_chunks::<2>().0.iter().map(|[a, b]| a | b << 4));
            }
        }
        Ok(())
    }

    fn push_scale(&mut self, dtype: DType, scale: f32, bias: f32) -> Result<(), Overflow> {
        if dtype == DType::F32 {
            self.scales.extend(scale.to_le_bytes());
            self.biases.extend(bias.to_le_bytes());
            return Ok(());
        }
        let narrow = f16::from_f32(bias);
        if narrow.is_infinite() && bias.is_finite() {
            return Err(Overflow);
        }
        self.scales.extend(f16::from_f32(scale).to_le_bytes());
        self.biases.extend(narrow.to_le_bytes());
        Ok(())
    }
}

/// The scale, bias and codes of a block of an affine type. Each product of the scale and a power of two is exact.
pub(super) fn read_block(kind: GgufType, block: &[u8], codes: &mut [u8; GROUP]) -> (f32, f32) {
    let d = half(block, 0);
    match kind {
        GgufType::Q4_0 => {
            nibbles(&block[2..], codes);
            (d, -8.0 * d)
        }
        GgufType::Q4_1 => {
            nibbles(&block[4..], codes);
            (d, half(block, 2))
        }
        _ => {
            // Adding 128 to a signed byte flips its highest bit.
            codes.iter_mut().zip(&block[2..]).for_each(|(to, from)| *to = from ^ 0x80);
            (d, -128.0 * d)
        }
    }
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The 32 codes of 16 bytes: byte j has code j in its low half and code j + 16 in its high half.
fn nibbles(bytes: &[u8], codes: &mut [u8; GROUP]) {
    for (j, byte) in bytes[..16].iter().enumerate() {
        codes[j] = byte & 15;
        codes[j + 16] = byte >> 4;
    }
}
