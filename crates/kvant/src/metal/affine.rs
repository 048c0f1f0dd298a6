//! The arguments of weights for kernels: see `affine.h`.

use crate::{
    gpu::{affine::Parts, rows_aligned4},
    ops::linear::OwnedWeight,
};

/// The parts of a weight whose rows have `inputs` elements. Elements of dense weights are read four at a time.
pub(super) fn parts(weight: &OwnedWeight, inputs: usize) -> Parts<'_> {
    Parts::of(weight, |dense| rows_aligned4(inputs, [dense]))
}
