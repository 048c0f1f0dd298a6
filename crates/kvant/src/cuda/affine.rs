//! Weights as kernels are told of them: see `affine.h`.

pub(super) use crate::gpu::affine::Parts;
use crate::ops::linear::OwnedWeight;

/// A weight whose rows have `inputs` elements; dense ones are read in 16 bytes.
pub(super) fn parts(weight: &OwnedWeight, inputs: usize) -> Parts<'_> {
    Parts::of(weight, |dense| {
        (inputs * dense.dtype().size()).is_multiple_of(16) && dense.byte_offset().is_multiple_of(16)
    })
}
