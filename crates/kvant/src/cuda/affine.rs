//! Weights as arguments of kernels: see `device/affine.h`.

pub(super) use crate::gpu::affine::Parts;
use crate::ops::linear::OwnedWeight;

/// A weight whose rows have `inputs` elements; dense ones are read 16 bytes at a time.
pub(super) fn parts(weight: &OwnedWeight, inputs: usize) -> Parts<'_> {
    Parts::of(weight, |dense| {
        (inputs * dense.dtype().size()).is_multiple_of(16) && dense.byte_offset().is_multiple_of(16)
    })
}
