//! Weights as the kernels see them: see `affine.h`.

use crate::{
    gpu::{affine::Parts, rows_aligned4},
    ops::linear::OwnedWeight,
};

/// A weight whose rows have `inputs` elements; dense ones are read four at a time.
pub(super) fn parts(weight: &OwnedWeight, inputs: usize) -> Parts<'_> {
    Parts::of(weight, |dense| rows_aligned4(inputs, [dense]))
}
