//! The launch of `hadamard`.

use super::{LANES, Launch, Layout, Params, Source, THREADS, params, rows_aligned4};
use crate::ops::hadamard::{Call, NAME};

params! {
    pub(crate) struct HadamardParams {
        pub rows: u64,
        pub dim: u32,
        pub group_rows: u32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[HadamardParams::layout];

/// Elements that a threadgroup rotates, if its rows are not longer.
const TILE: usize = 1024;

pub(crate) fn launch(call: &Call, source: &'static Source) -> Launch {
    let (rows, dim) = (call.rows, call.dim);
    let group_rows = (TILE / dim).clamp(1, rows.max(1));
    let elements = group_rows * dim;
    // A thread takes four elements at a time.
    let threads = (elements / 4).next_multiple_of(LANES).clamp(LANES, THREADS);
    // Both are at most 4096.
    let params = HadamardParams { rows: rows as u64, dim: dim as u32, group_rows: group_rows as u32 };
    Launch::new(NAME, source, "hadamard")
        .constant("X_DTYPE", call.x.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("INVERSE", call.inverse)
        .constant("ALIGNED", rows_aligned4(dim, [&call.x, &call.out]))
        .read(0, &call.x)
        .write(1, &call.out)
        .params(2, &params)
        .threadgroup_memory(elements * size_of::<f32>())
        .grid([rows.div_ceil(group_rows), 1, 1], [threads, 1, 1])
}
