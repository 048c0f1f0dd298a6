//! Weights in the block formats of GGUF files and in floats with a scale per group, as the files store them.

use super::check;
use crate::{DType, Result, Tensor};

/// A block format of GGUF files. A row is a whole number of blocks; a block holds the codes and the scales of
/// consecutive inputs.
///
/// The names and the bytes are ggml's; [`reference::dequantise_blocks`](crate::reference::dequantise_blocks()) defines
/// them. Q4_0, Q4_1 and Q8_0 are not listed: they convert to [`Affine`](super::Affine) matrices without loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "the formats' own names")]
#[non_exhaustive]
pub enum BlockFormat {
    /// 32 codes of 5 bits with a scale.
    Q5_0,
    /// 32 codes of 5 bits with a scale and a minimum.
    Q5_1,
    /// 256 codes of 2 bits; groups of 16 with a scale and a minimum of 4 bits.
    Q2_K,
    /// 256 codes of 3 bits; groups of 16 with a scale of 6 bits.
    Q3_K,
    /// 256 codes of 4 bits; groups of 32 with a scale and a minimum of 6 bits.
    Q4_K,
    /// 256 codes of 5 bits; groups of 32 with a scale and a minimum of 6 bits.
    Q5_K,
    /// 256 codes of 6 bits; groups of 16 with a scale of 8 bits.
    Q6_K,
    /// 32 codes of 4 bits, which index a table of 16 values, with a scale.
    IQ4_NL,
    /// 256 codes of 4 bits, which index the table of IQ4_NL; groups of 32 with a scale of 6 bits.
    IQ4_XS,
    /// 32 numbers of 4 bits (E2M1) with a power of two as scale.
    MXFP4,
}

impl BlockFormat {
    /// Every format.
    pub const ALL: [BlockFormat; 10] = [
        BlockFormat::Q5_0,
        BlockFormat::Q5_1,
        BlockFormat::Q2_K,
        BlockFormat::Q3_K,
        BlockFormat::Q4_K,
        BlockFormat::Q5_K,
        BlockFormat::Q6_K,
        BlockFormat::IQ4_NL,
        BlockFormat::IQ4_XS,
        BlockFormat::MXFP4,
    ];

    /// Inputs of a block: 32 or 256.
    pub const fn block_inputs(self) -> usize {
        match self {
            BlockFormat::Q5_0 | BlockFormat::Q5_1 | BlockFormat::IQ4_NL | BlockFormat::MXFP4 => 32,
            _ => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            BlockFormat::Q5_0 => 22,
            BlockFormat::Q5_1 => 24,
            BlockFormat::Q2_K => 84,
            BlockFormat::Q3_K => 110,
            BlockFormat::Q4_K => 144,
            BlockFormat::Q5_K => 176,
            BlockFormat::Q6_K => 210,
            BlockFormat::IQ4_NL => 18,
            BlockFormat::IQ4_XS => 136,
            BlockFormat::MXFP4 => 17,
        }
    }

    /// Bytes of a row of `inputs`; `None` if it is not a whole number of blocks or the size overflows.
    pub const fn row_bytes(self, inputs: usize) -> Option<usize> {
        if inputs.is_multiple_of(self.block_inputs()) {
            (inputs / self.block_inputs()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }

    /// Consecutive inputs that share a scale: 16 or 32.
    pub const fn group(self) -> usize {
        match self {
            BlockFormat::Q2_K | BlockFormat::Q3_K | BlockFormat::Q6_K => 16,
            _ => 32,
        }
    }
}

impl std::fmt::Display for BlockFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self, f)
    }
}

/// A matrix in a [`BlockFormat`].
///
/// The number of inputs follows from the bytes of a row: K = bytes / [`block_bytes`](BlockFormat::block_bytes) ·
/// [`block_inputs`](BlockFormat::block_inputs).
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// u8 `[N, bytes]`, or `[E, N, bytes]` with experts: the blocks of a row follow one another. Any byte offset.
    pub data: &'a Tensor,
    /// The format of every block.
    pub format: BlockFormat,
}

impl<'a> Blocks<'a> {
    /// The matrix of `data`.
    pub fn new(data: &'a Tensor, format: BlockFormat) -> Self {
        Blocks { data, format }
    }
}

/// A format of weights that are small floats with a scale per group of consecutive inputs: w = scale · v.
///
/// | format | element v | scale | inputs of a group |
/// |---|---|---|---|
/// | `Mxfp4` | E2M1, 4 bits | E8M0 | 32 |
/// | `Mxfp8` | E4M3, 8 bits | E8M0 | 32 |
/// | `Nvfp4` | E2M1, 4 bits | E4M3 | 16 |
///
/// Special codes:
/// - E4M3 has no infinities; 0x7F and 0xFF are NaN.
/// - An E8M0 byte e is 2^(e − 127). 255 is 2^128, as in transformers, ggml and MLX, and products with it may be
///   infinite. By the OCP specification it would be NaN; quantisers do not write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FloatFormat {
    /// gpt-oss' safetensors (`_blocks` and `_scales`) and MLX's mode `mxfp4`. GGUF's MXFP4 orders codes differently:
    /// see [`BlockFormat::MXFP4`].
    Mxfp4,
    /// MLX's mode `mxfp8`.
    Mxfp8,
    /// MLX's mode `nvfp4`, without a global scale.
    Nvfp4,
}

impl FloatFormat {
    /// Every format.
    pub const ALL: [FloatFormat; 3] = [FloatFormat::Mxfp4, FloatFormat::Mxfp8, FloatFormat::Nvfp4];

    /// Bits of an element: 4 or 8.
    pub const fn bits(self) -> usize {
        match self {
            FloatFormat::Mxfp4 | FloatFormat::Nvfp4 => 4,
            FloatFormat::Mxfp8 => 8,
        }
    }

    /// Consecutive inputs that share a scale: 16 or 32.
    pub const fn group(self) -> usize {
        match self {
            FloatFormat::Mxfp4 | FloatFormat::Mxfp8 => 32,
            FloatFormat::Nvfp4 => 16,
        }
    }
}

/// The name in lower case, as MLX writes it.
impl std::fmt::Display for FloatFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FloatFormat::Mxfp4 => "mxfp4",
            FloatFormat::Mxfp8 => "mxfp8",
            FloatFormat::Nvfp4 => "nvfp4",
        })
    }
}

/// A matrix in a [`FloatFormat`], with codes and scales in separate tensors.
///
/// Codes of 8 bits are the bytes of a row in order. Of 4 bits, code i of a row is the low half of byte i / 2 for even
/// i, else the high half. K is a multiple of 32, also for groups of 16.
#[derive(Clone, Copy, Debug)]
pub struct ScaledFloats<'a> {
    /// u8 `[N, K·bits/8]` or u32 `[N, K·bits/32]`, or with a leading dimension E.
    pub codes: &'a Tensor,
    /// u8 `[N, K/group]`, or `[E, N, K/group]`.
    pub scales: &'a Tensor,
    /// The format of every group.
    pub format: FloatFormat,
}

impl<'a> ScaledFloats<'a> {
    /// The matrix of `codes` and `scales`.
    pub fn new(codes: &'a Tensor, scales: &'a Tensor, format: FloatFormat) -> Self {
        ScaledFloats { codes, scales, format }
    }
}

impl Blocks<'_> {
    /// K, of rows of `bytes`.
    pub(super) fn inputs(&self, op: &'static str, arg: &'static str, bytes: usize) -> Result<usize> {
        let size = self.format.block_bytes();
        let expected = format_args!("rows of whole {} blocks of {size} bytes", self.format);
        check::value_is(op, arg, bytes.is_multiple_of(size), expected, bytes)?;
        let inputs = (bytes / size).checked_mul(self.format.block_inputs());
        inputs.ok_or(crate::Error::Overflow { op, arg })
    }
}

impl ScaledFloats<'_> {
    /// K, of rows of `columns` elements of `codes` and `groups` scales.
    pub(super) fn inputs(&self, op: &'static str, columns: usize, groups: usize) -> Result<usize> {
        let inputs = groups.checked_mul(self.format.group()).ok_or(crate::Error::Overflow { op, arg: "scales" })?;
        check::value_is(op, "K", inputs.is_multiple_of(32), "a multiple of 32", inputs)?;
        let per_element = 8 / self.format.bits() * self.codes.dtype().size();
        let fits = columns.checked_mul(per_element) == Some(inputs);
        check::value_is(op, "codes", fits, format_args!("K/{per_element} elements a row for K = {inputs}"), columns)?;
        Ok(inputs)
    }

    pub(super) fn check_dtypes(&self, op: &'static str) -> Result<()> {
        let dtype = self.codes.dtype();
        check::value_is(op, "codes", matches!(dtype, DType::U8 | DType::U32), "u8 or u32", dtype)?;
        check::dtype(op, "scales", self.scales, DType::U8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_rows() {
        assert_eq!(BlockFormat::Q4_K.row_bytes(512), Some(288));
        assert_eq!(BlockFormat::Q4_K.row_bytes(288), None);
        assert_eq!(BlockFormat::Q5_0.row_bytes(96), Some(66));
        for format in BlockFormat::ALL {
            assert_eq!(format.row_bytes(0), Some(0));
            assert!(format.block_inputs().is_multiple_of(format.group()));
            // Eight bits would be an affine matrix.
            assert!(format.block_bytes() < format.block_inputs());
        }
    }
}
