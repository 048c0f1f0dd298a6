//! When kernels may take four elements at a time: see `vectors.h`.

use crate::{
    Tensor,
    cuda::{THREADS, WARP},
};

/// Whether groups of four elements of the tensor, counted from its first, lie at multiples of their size.
pub(super) fn aligned4(tensor: &Tensor) -> bool {
    tensor.byte_offset().is_multiple_of(4 * tensor.dtype().size())
}

/// Whether that holds for every row of `dim` elements of every tensor.
pub(super) fn rows_aligned4<'a>(dim: usize, tensors: impl IntoIterator<Item = &'a Tensor>) -> bool {
    dim.is_multiple_of(4) && tensors.into_iter().all(aligned4)
}

/// A grid with one thread per four elements of a row and per row: blocks count rows by x and elements by y, threads
/// of a block elements by x and rows by y. `row_and_four` of `vectors.h` goes with it.
pub(super) fn grid(rows: usize, dim: usize) -> ([usize; 3], [usize; 3]) {
    let fours = dim.div_ceil(4);
    let across = fours.next_multiple_of(WARP).clamp(WARP, THREADS);
    let down = THREADS / across;
    ([rows.div_ceil(down), fours.div_ceil(across), 1], [across, down, 1])
}
