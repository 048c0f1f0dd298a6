//! Grids of kernels that process four elements at a time: see `vectors.h`.

use crate::gpu::{LANES, THREADS};

/// A grid with one thread per four elements of each row: x counts the fours of a row, y the rows.
pub(super) fn grid(rows: usize, dim: usize) -> ([usize; 3], [usize; 3]) {
    let fours = dim.div_ceil(4);
    let across = fours.next_multiple_of(LANES).clamp(LANES, THREADS);
    let down = THREADS / across;
    ([fours.div_ceil(across), rows.div_ceil(down), 1], [across, down, 1])
}
