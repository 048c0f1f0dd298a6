//! Weights as the kernels see them: see `affine.h` of either backend.

use super::Launch;
use crate::{
    DType, Tensor,
    ops::linear::{Call, OwnedWeight},
};

/// A weight taken apart.
pub(crate) struct Parts<'a> {
    /// The dense weight, or the codes.
    pub weight: &'a Tensor,
    pub scales: Option<&'a Tensor>,
    pub biases: Option<&'a Tensor>,
    /// Of the dense weight, or of scales and biases.
    pub dtype: DType,
    /// 0 for a dense weight.
    pub bits: u32,
    pub group: u32,
    /// Whether all rows begin where vector loads may: the codes at 16 bytes, a dense weight where the backend says.
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
                aligned: aligned(weight),
            },
            // 32 codes of 4 or 8 bits are 16 or 32 bytes; those of 6 bits are read word by word.
            OwnedWeight::Affine { codes, scales, biases, bits, group } => Parts {
                weight: codes,
                scales: Some(scales),
                biases: Some(biases),
                dtype: scales.dtype(),
                bits: *bits,
                group: u32::try_from(*group).expect("a group is 128 at most"),
                aligned: codes.byte_offset().is_multiple_of(16),
            },
        }
    }
    /// Binds what every kernel of `linear` needs of a call with this weight: types and codes, and the buffers 0 to 5.
    pub(crate) fn bind(&self, launch: Launch, call: &Call) -> Launch {
        let Call { x, experts: ids, out, .. } = call;
        launch
            .constant("X_DTYPE", x.dtype())
            .constant("OUT_DTYPE", out.dtype())
            .constant("W_DTYPE", self.dtype)
            .constant("BITS", self.bits)
            .constant("GROUP", self.group)
            .constant("EXPERTS", ids.is_some())
            .read(0, x)
            .read(1, self.weight)
            .read_if(2, self.scales)
            .read_if(3, self.biases)
            .read_if(4, ids.as_ref())
            .write(5, out)
    }
}
