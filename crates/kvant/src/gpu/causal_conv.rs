//! The launch of `causal_conv`.

use super::{Launch, Layout, Params, Source, THREADS, Use, params};
use crate::{
    Result,
    ops::causal_conv::{Call, NAME},
};

params! {
    pub(crate) struct CausalConvParams {
        pub rows: u32,
        pub channels: u32,
        pub runs: u32,
        pub states: u32,
        pub stride: u32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[CausalConvParams::layout];

/// Rows of a run that one thread computes in turn: the kernels' ROWS.
const ROWS: usize = 32;
/// Maximum parts of a run, which limits the grid; the threads of a part continue with later rows.
const MAX_PARTS: usize = 1024;

pub(crate) fn launch(call: &Call, source: &'static Source) -> Result<Launch> {
    let uint = |arg, value| Launch::uint(NAME, arg, value);
    let runs = call.runs.count();
    let params = CausalConvParams {
        rows: uint("x", call.runs.rows(call.rows))?,
        channels: uint("x", call.channels)?,
        runs: uint("runs", runs)?,
        states: uint("state", call.state.count())?,
        stride: uint("state", call.state.stride())?,
    };
    let parts = call.runs.max_rows().min(call.rows).div_ceil(ROWS).clamp(1, MAX_PARTS);
    Ok(Launch::new(NAME, source, "causal_conv")
        .constant("X_DTYPE", call.x.dtype())
        .constant("WEIGHT_DTYPE", call.weight.dtype())
        .constant("BIAS_DTYPE", call.bias.as_ref().unwrap_or(&call.weight).dtype())
        .constant("STATE_DTYPE", call.state.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("TAPS", uint("weight", call.taps)?)
        .constant("HAS_BIAS", call.bias.is_some())
        .constant("SILU", call.silu)
        .read(0, &call.x)
        .read(1, &call.weight)
        .read_if(2, call.bias.as_ref())
        .read(3, call.runs.starts())
        .read(4, call.runs.slots())
        .read(5, call.runs.past())
        .read(6, call.runs.after())
        .tensor(7, call.state.memory(), Use::ReadWrite)
        .write(8, &call.out)
        .params(9, &params)
        .grid([call.channels.div_ceil(THREADS), parts, runs], [THREADS, 1, 1]))
}
