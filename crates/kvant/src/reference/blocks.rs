//! Dequantises GGUF's block formats and floats with a scale per group, block by block in f64.
//!
//! Every weight is scale · (value of its code) + bias. Products of f16 scales, integer scales and codes are exact in
//! f64. K-quants have blocks of 256 inputs. 32 consecutive inputs are a unit; a plane of their codes is stored in 32
//! consecutive bytes, at the same bits of each byte.

use half::f16;

use super::check_len;
use crate::{
    Result,
    ops::{BlockFormat, FloatFormat},
};

/// The values of the codes of IQ4_NL and IQ4_XS.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// The values of E2M1 codes, doubled.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The weights of whole blocks of a format.
///
/// # Errors
/// `Shape` if `bytes` is not a whole number of blocks.
pub fn dequantise_blocks(format: BlockFormat, bytes: &[u8]) -> Result<Vec<f64>> {
    let size = format.block_bytes();
    check_len("dequantise_blocks", "bytes", bytes.len().next_multiple_of(size), bytes.len())?;
    Ok(bytes.chunks_exact(size).flat_map(|block| dequantise_block(format, block)).collect())
}

/// The weights of a row of small floats with separate scales. With 4-bit codes, even inputs are in the low halves.
///
/// # Errors
/// `Shape` if the number of codes is not that of `scales.len()` groups.
pub fn dequantise_floats(format: FloatFormat, codes: &[u8], scales: &[u8]) -> Result<Vec<f64>> {
    let (group, bits) = (format.group(), format.bits());
    check_len("dequantise_floats", "codes", scales.len().saturating_mul(group * bits / 8), codes.len())?;
    let weight = |i: usize| {
        let (four, scale) = (codes[i * bits / 8] >> (i % 2 * 4) & 15, scales[i / group]);
        match format {
            FloatFormat::Mxfp4 => e8m0(scale) * e2m1(four),
            FloatFormat::Mxfp8 => e8m0(scale) * e4m3(codes[i]),
            FloatFormat::Nvfp4 => e4m3(scale) * e2m1(four),
        }
    };
    Ok((0..scales.len() * group).map(weight).collect())
}

/// 2^(e − 127), also for 255, as in ggml and transformers; the OCP specification reserves 255 for NaN.
fn e8m0(e: u8) -> f64 {
    f64::from(i16::from(e) - 127).exp2()
}

/// A sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinities, one NaN of either sign.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
    let magnitude = match (exponent, code & 0x7F) {
        (_, 0x7F) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-6),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

fn e2m1(code: u8) -> f64 {
    f64::from(E2M1[usize::from(code)]) / 2.0
}

/// The f16 at byte offset `at`.
fn half(block: &[u8], at: usize) -> f64 {
    f64::from(f16::from_le_bytes([block[at], block[at + 1]]))
}

/// Bit `i % 8` of byte `i / 8`.
fn bit(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 8] >> (i % 8) & 1
}

/// The 4-bit code of input i of 32: the first half is in the low halves of 16 bytes, the second in the high ones.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i % 16] >> (i / 16 * 4) & 15
}

/// The 6-bit scale and minimum of group g of Q4_K and Q5_K, in 12 bytes.
fn scale_and_min(packed: &[u8], g: usize) -> (f64, f64) {
    let (scale, min) = if g < 4 {
        (packed[g] & 63, packed[g + 4] & 63)
    } else {
        (packed[g + 4] & 15 | packed[g - 4] >> 6 << 4, packed[g + 4] >> 4 | packed[g] >> 6 << 4)
    };
    (scale.into(), min.into())
}

/// The 6-bit scale of group g of Q3_K, in 12 bytes.
fn scale_of_q3(packed: &[u8], g: usize) -> f64 {
    let (low, high) = (packed[g % 8] >> (g / 8 * 4) & 15, packed[8 + g % 4] >> (g / 4 * 2) & 3);
    f64::from(low | high << 4) - 32.0
}

fn dequantise_block(format: BlockFormat, block: &[u8]) -> Vec<f64> {
    // For input i: its byte in a plane, its unit, and its two bits in the 32 bytes that hold the planes of four units.
    let (byte, unit) = (|i: usize| i % 32, |i: usize| i / 32);
    let two_bits = |bytes: &[u8], i: usize| bytes[i / 128 * 32 + byte(i)] >> (unit(i) % 4 * 2) & 3;
    let four_bits = |bytes: &[u8], i: usize| bytes[i / 64 * 32 + byte(i)] >> (unit(i) % 2 * 4) & 15;
    let weight = |i: usize| -> f64 {
        match format {
            BlockFormat::Q5_0 => {
                let code = nibble(&block[6..], i) | bit(&block[2..6], i) << 4;
                half(block, 0) * (f64::from(code) - 16.0)
            }
            BlockFormat::Q5_1 => {
                let code = nibble(&block[8..], i) | bit(&block[4..8], i) << 4;
                half(block, 0) * f64::from(code) + half(block, 2)
            }
            BlockFormat::IQ4_NL => half(block, 0) * f64::from(IQ4[usize::from(nibble(&block[2..], i))]),
            BlockFormat::MXFP4 => e8m0(block[0]) * e2m1(nibble(&block[1..], i)),
            BlockFormat::Q2_K => {
                let factors = block[i / 16];
                let code = two_bits(&block[16..80], i);
                half(block, 80) * f64::from(factors & 15) * f64::from(code) - half(block, 82) * f64::from(factors >> 4)
            }
            BlockFormat::Q3_K => {
                let code = two_bits(&block[32..96], i) | (block[byte(i)] >> unit(i) & 1) << 2;
                half(block, 108) * scale_of_q3(&block[96..108], i / 16) * (f64::from(code) - 4.0)
            }
            BlockFormat::Q4_K => {
                let (scale, min) = scale_and_min(&block[4..16], unit(i));
                half(block, 0) * scale * f64::from(four_bits(&block[16..], i)) - half(block, 2) * min
            }
            BlockFormat::Q5_K => {
                let (scale, min) = scale_and_min(&block[4..16], unit(i));
                let code = four_bits(&block[48..], i) | (block[16 + byte(i)] >> unit(i) & 1) << 4;
                half(block, 0) * scale * f64::from(code) - half(block, 2) * min
            }
            BlockFormat::Q6_K => {
                // Of 128 inputs, the first 64 are in the low halves of 64 bytes, the others in the high halves.
                let low = block[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
                let code = low | two_bits(&block[128..192], i) << 4;
                half(block, 208) * f64::from(block[192 + i / 16] as i8) * (f64::from(code) - 32.0)
            }
            BlockFormat::IQ4_XS => {
                let high = u16::from_le_bytes([block[2], block[3]]) >> (unit(i) * 2) & 3;
                let low = block[4 + unit(i) / 2] >> (unit(i) % 2 * 4) & 15;
                let scale = f64::from(u16::from(low) | high << 4) - 32.0;
                half(block, 0) * scale * f64::from(IQ4[usize::from(nibble(&block[8 + unit(i) * 16..], i % 32))])
            }
        }
    };
    (0..format.block_inputs()).map(weight).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a block by hand; `tests/suite/golden.rs` compares random blocks of every format with ggml's definition.
    #[test]
    fn a_block_of_mxfp4_and_its_twin_with_separate_scales() {
        let codes: [u8; 16] = std::array::from_fn(|i| (i as u8) << 4 | (15 - i as u8));
        let block = [&[128], &codes[..]].concat();
        let weights = dequantise_blocks(BlockFormat::MXFP4, &block).unwrap();
        assert_eq!(weights[..3], [-12.0, -8.0, -6.0]);
        assert_eq!(weights[16..20], [0.0, 1.0, 2.0, 3.0]);
        let twin = dequantise_floats(FloatFormat::Mxfp4, &codes, &[128]).unwrap();
        assert_eq!((twin[0], twin[1], twin[3]), (weights[0], weights[16], weights[17]));
        assert!(dequantise_blocks(BlockFormat::MXFP4, &block[1..]).is_err());
        for format in FloatFormat::ALL {
            assert!(dequantise_floats(format, &codes, &[]).is_err());
        }
    }

    #[test]
    fn weights_of_mxfp8_and_nvfp4() {
        let mut codes = [0u8; 32];
        codes[..8].copy_from_slice(&[0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE, 0x80]);
        let weights = dequantise_floats(FloatFormat::Mxfp8, &codes, &[128]).unwrap();
        let tiny = 2f64.powi(-8);
        assert_eq!(weights[..8], [0.0, tiny, 7.0 * tiny, 8.0 * tiny, 2.0, 896.0, -896.0, 0.0]);
        assert!(dequantise_floats(FloatFormat::Mxfp8, &[0x7F; 32], &[0]).unwrap()[0].is_nan());

        let weights = dequantise_floats(FloatFormat::Nvfp4, &[0x72; 16], &[0x40, 0xB9]).unwrap();
        assert_eq!((weights.len(), &weights[..2], &weights[16..18]), (32, &[2.0, 12.0][..], &[-1.125, -6.75][..]));
    }
}
