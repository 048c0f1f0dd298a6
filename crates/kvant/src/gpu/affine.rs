//! Weights as kernels see them: see `affine.h` of each backend.

use super::Launch;
use crate::{
    DType, Tensor,
    ops::{
        BlockFormat, FloatFormat,
        linear::{Call, OwnedWeight},
    },
};

/// The number of a format with separate scales in `blocks.h` of each backend.
fn number_of_floats(format: FloatFormat) -> u32 {
    match format {
        FloatFormat::Mxfp4 => 11,
        FloatFormat::Mxfp8 => 12,
        FloatFormat::Nvfp4 => 13,
    }
}

/// The number of a format in `blocks.h` of each backend.
fn number(format: BlockFormat) -> u32 {
    match format {
        BlockFormat::Q5_0 => 1,
        BlockFormat::Q5_1 => 2,
        BlockFormat::IQ4_NL => 3,
        BlockFormat::MXFP4 => 4,
        BlockFormat::Q2_K => 5,
        BlockFormat::Q3_K => 6,
        BlockFormat::Q4_K => 7,
        BlockFormat::Q5_K => 8,
        BlockFormat::Q6_K => 9,
        BlockFormat::IQ4_XS => 10,
    }
}

/// The parts of a weight.
pub(crate) struct Parts<'a> {
    /// The dense weight, or the codes.
    pub weight: &'a Tensor,
    pub scales: Option<&'a Tensor>,
    pub biases: Option<&'a Tensor>,
    /// The dtype of the dense weight, or of scales and biases.
    pub dtype: DType,
    /// 0 unless the weight is affine.
    pub bits: u32,
    pub group: u32,
    /// The number of a block format in `blocks.h`; 0 for other weights.
    pub format: u32,
    /// For blocks: every block begins at a multiple of this number of bytes, 1, 2 or 4.
    pub block_alignment: u32,
    /// Whether all rows are aligned for vector loads: to 16 bytes for codes, to the backend's alignment for a dense
    /// weight.
    pub aligned: bool,
}

impl Parts<'_> {
    /// `aligned` says whether vector loads may read the rows of a dense weight.
    pub(crate) fn of(weight: &OwnedWeight, aligned: impl Fn(&Tensor) -> bool) -> Parts<'_> {
        match weight {
            OwnedWeight::Dense(weight) => Parts {
                weight,
                scales: None,
                biases: None,
                dtype: weight.dtype(),
                bits: 0,
                group: 1,
                format: 0,
                block_alignment: 1,
                aligned: aligned(weight),
            },
            OwnedWeight::Blocks { data, format } => {
                let alignment = 1 << (data.byte_offset() | format.block_bytes() | 4).trailing_zeros();
                Parts::blocks(data, None, number(*format), alignment)
            }
            OwnedWeight::Floats { codes, scales, format } => {
                let alignment = 1 << (codes.byte_offset() | 4).trailing_zeros();
                Parts::blocks(codes, Some(scales), number_of_floats(*format), alignment)
            }
            // 32 codes of 4 or 8 bits are 16 or 32 bytes. Codes of 6 bits are read word by word.
            OwnedWeight::Affine { codes, scales, biases, bits, group } => Parts {
                weight: codes,
                scales: Some(scales),
                biases: Some(biases),
                dtype: scales.dtype(),
                bits: *bits,
                group: u32::try_from(*group).expect("a group is 128 at most"),
                format: 0,
                block_alignment: 1,
                aligned: codes.byte_offset().is_multiple_of(16),
            },
        }
    }

    /// Whether the weight is dense.
    pub(crate) fn is_dense(&self) -> bool {
        self.bits == 0 && self.format == 0
    }

    fn blocks<'a>(data: &'a Tensor, scales: Option<&'a Tensor>, format: u32, alignment: u32) -> Parts<'a> {
        Parts {
            weight: data,
            scales,
            biases: None,
            dtype: DType::F32,
            bits: 0,
            group: 1,
            format,
            block_alignment: alignment,
            aligned: false,
        }
    }

    /// Binds this weight for every kernel of `linear`: types and codes, and the buffers 0 to 5.
    pub(crate) fn bind(&self, launch: Launch, call: &Call) -> Launch {
        let Call { x, experts: ids, out, .. } = call;
        launch
            .constant("X_DTYPE", x.dtype())
            .constant("OUT_DTYPE", out.dtype())
            .constant("W_DTYPE", self.dtype)
            .constant("BITS", self.bits)
            .constant("GROUP", self.group)
            .constant("FORMAT", self.format)
            .constant("BLOCK_ALIGNMENT", self.block_alignment)
            .constant("EXPERTS", ids.is_some())
            .read(0, x)
            .read(1, self.weight)
            .read_if(2, self.scales)
            .read_if(3, self.biases)
            .read_if(4, ids.as_ref())
            .write(5, out)
    }
}
