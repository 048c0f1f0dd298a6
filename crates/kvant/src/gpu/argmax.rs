//! The launch of `argmax`.

use super::{LANES, Launch, Layout, Limits, Params, Source, params, rows_aligned4};
use crate::{Result, ops::argmax::Call};

params! {
    pub(crate) struct ArgmaxParams {
        pub dim: u32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[ArgmaxParams::layout];

/// `op`: the operation that calls it; `sample` does, too.
pub(crate) fn launch(op: &'static str, call: &Call, source: &'static Source, limits: &Limits) -> Result<Launch> {
    let Call { x, out, dim } = call;
    let params = ArgmaxParams { dim: Launch::uint(op, "N", *dim)? };
    let threads = (dim / 16).next_multiple_of(LANES).clamp(LANES, limits.threads.min(1024));
    Ok(Launch::new(op, source, "argmax")
        .constant("X_DTYPE", x.dtype())
        .constant("ALIGNED", rows_aligned4(*dim, [x]))
        .read(0, x)
        .write(1, out)
        .params(2, &params)
        .grid([out.elements(), 1, 1], [threads, 1, 1]))
}
