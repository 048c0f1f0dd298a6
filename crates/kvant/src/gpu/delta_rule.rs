//! The launch of `delta_rule`.

use super::{LANES, Launch, Layout, Params, Source, Use, params};
use crate::{
    Result,
    ops::delta_rule::{Call, NAME},
};

params! {
    pub(crate) struct DeltaRuleParams {
        pub rows: u32,
        pub states: u32,
        pub stride: u32,
        pub heads: u32,
        pub key_heads: u32,
        pub key_repeats: u32,
        pub value_dim: u32,
        pub max_rows: u32,
    }
}

params! {
    pub(crate) struct DeltaRuleChunksParams {
        pub rule: DeltaRuleParams,
        pub runs: u32,
        pub first: u32,
        pub slots: u32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[DeltaRuleParams::layout];
/// Of the kernels that compute chunks.
pub(crate) const CHUNK_LAYOUTS: &[fn() -> Layout] = &[DeltaRuleParams::layout, DeltaRuleChunksParams::layout];

/// Warps of a threadgroup: the kernels' WARPS.
const WARPS: usize = 4;
/// Columns of the state that a threadgroup has, in every kernel.
const COLUMNS: usize = 32;

impl DeltaRuleParams {
    /// `max_rows`: longer runs are skipped.
    pub(crate) fn of(call: &Call, max_rows: u32) -> Result<DeltaRuleParams> {
        let uint = |arg, value| Launch::uint(NAME, arg, value);
        Ok(DeltaRuleParams {
            rows: uint("qkv", call.runs.rows(call.rows))?,
            states: uint("state", call.state.count())?,
            stride: uint("state", call.state.stride())?,
            heads: uint("state", call.heads)?,
            key_heads: uint("qkv", call.key_heads)?,
            key_repeats: uint("qkv", call.key_repeats)?,
            value_dim: uint("state", call.value_dim)?,
            max_rows,
        })
    }
}

impl DeltaRuleChunksParams {
    /// A pass of `slots` chunks, starting at number `first`. Runs of at most `max_rows` rows have none.
    pub(crate) fn of(call: &Call, max_rows: u32, [first, slots]: [usize; 2]) -> Result<DeltaRuleChunksParams> {
        Ok(DeltaRuleChunksParams {
            rule: DeltaRuleParams::of(call, max_rows)?,
            runs: Launch::uint(NAME, "runs", call.runs.count())?,
            first: Launch::uint(NAME, "qkv", first)?,
            slots: Launch::uint(NAME, "qkv", slots)?,
        })
    }
}

/// The maximum chunks of `chunk` tokens that the rows can have: each run may end with a chunk that is not full.
pub(crate) fn max_chunks(call: &Call, chunk: usize) -> usize {
    (call.rows + (chunk - 1) * call.runs.count()) / chunk
}

/// The launch of a kernel that computes runs of at most `max_rows` rows token by token.
pub(crate) fn launch(call: &Call, source: &'static Source, kernel: &'static str, max_rows: u32) -> Result<Launch> {
    let params = DeltaRuleParams::of(call, max_rows)?;
    let slices = call.value_dim.div_ceil(COLUMNS);
    Ok(read_inputs(call, Launch::new(NAME, source, kernel))?
        .constant("QKV_DTYPE", call.qkv.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .read(7, call.runs.past())
        .read(8, call.runs.after())
        .tensor(9, call.state.memory(), Use::ReadWrite)
        .write(10, &call.out)
        .params(11, &params)
        .grid([slices, call.heads, call.runs.count()], [WARPS * LANES, 1, 1]))
}

/// Binds the inputs and the runs, as arguments 0 to 6 of every kernel that reads the gates.
pub(crate) fn read_inputs(call: &Call, launch: Launch) -> Result<Launch> {
    Ok(launch
        .constant("A_DTYPE", call.a.dtype())
        .constant("B_DTYPE", call.b.dtype())
        .constant("KEY_DIM", Launch::uint(NAME, "state", call.key_dim)?)
        .read(0, &call.qkv)
        .read(1, &call.a)
        .read(2, &call.b)
        .read(3, &call.rate)
        .read(4, &call.a_bias)
        .read(5, call.runs.starts())
        .read(6, call.runs.slots()))
}
