//! When kernels may process four elements at a time: see `vectors.h` of either backend.

use crate::Tensor;

/// Whether groups of four elements of the tensor, counted from its first, begin at multiples of their size.
pub(crate) fn aligned4(tensor: &Tensor) -> bool {
    tensor.byte_offset().is_multiple_of(4 * tensor.dtype().size())
}

/// Whether every row of `dim` elements of every tensor begins at a multiple of the size of four elements.
pub(crate) fn rows_aligned4<'a>(dim: usize, tensors: impl IntoIterator<Item = &'a Tensor>) -> bool {
    dim.is_multiple_of(4) && tensors.into_iter().all(aligned4)
}
