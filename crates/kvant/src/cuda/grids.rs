//! Grids of kernels whose threads have four elements: see `device/vectors.h`.

use crate::gpu::{LANES, THREADS};

/// A grid with one thread per four elements of each row. Blocks count rows in x and elements in y; threads of a block
/// count elements in x and rows in y. `row_and_four` of `vectors.h` is its inverse.
pub(super) fn grid(rows: usize, dim: usize) -> ([usize; 3], [usize; 3]) {
    let fours = dim.div_ceil(4);
    let across = fours.next_multiple_of(LANES).clamp(LANES, THREADS);
    let down = THREADS / across;
    ([rows.div_ceil(down), fours.div_ceil(across), 1], [across, down, 1])
}
