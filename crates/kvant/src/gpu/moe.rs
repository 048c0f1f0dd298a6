//! The launches of `moe_route`, and of `moe_combine` except its grid.

use super::{LANES, Launch, Layout, Params, Source, params, rows_aligned4};
use crate::{
    Result,
    ops::moe::{combine, route},
};

params! {
    pub(crate) struct MoeRouteParams {
        pub tokens: u32,
        pub experts: u32,
        pub top_k: u32,
    }

    pub(crate) struct MoeCombineParams {
        pub tokens: u32,
        pub top_k: u32,
        pub dim: u32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[MoeRouteParams::layout, MoeCombineParams::layout];

/// Tokens of a threadgroup: each of its SIMD-groups (CUDA: warps) has one.
const TOKENS: usize = 4;

pub(crate) fn route(call: &route::Call, source: &'static Source) -> Result<Launch> {
    let params = MoeRouteParams {
        tokens: Launch::uint(route::NAME, "logits", call.tokens)?,
        experts: Launch::uint(route::NAME, "logits", call.experts)?,
        top_k: Launch::uint(route::NAME, "ids", call.top_k)?,
    };
    Ok(Launch::new(route::NAME, source, "moe_route")
        .constant("X_DTYPE", call.logits.dtype())
        .constant("HAS_SCALE", call.expert_scale.is_some())
        .constant("NORMALISE", call.normalise)
        .read(0, &call.logits)
        .read_if(1, call.expert_scale.as_ref())
        .write(2, &call.ids)
        .write(3, &call.weights)
        .params(4, &params)
        .grid([call.tokens.div_ceil(TOKENS), 1, 1], [TOKENS * LANES, 1, 1]))
}

pub(crate) fn combine(call: &combine::Call, source: &'static Source) -> Result<Launch> {
    let combine::Call { x, weights, out, tokens, top_k, dim } = call;
    let params = MoeCombineParams {
        tokens: Launch::uint(combine::NAME, "out", *tokens)?,
        top_k: Launch::uint(combine::NAME, "weights", *top_k)?,
        dim: Launch::uint(combine::NAME, "out", *dim)?,
    };
    Ok(Launch::new(combine::NAME, source, "moe_combine")
        .constant("X_DTYPE", x.dtype())
        .constant("OUT_DTYPE", out.dtype())
        .constant("ALIGNED", rows_aligned4(*dim, [x, out]))
        .read(0, x)
        .read(1, weights)
        .write(2, out)
        .params(3, &params))
}
