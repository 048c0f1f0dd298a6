//! The launches of `moe_route`, and of `moe_combine` without its grid.

use super::{LANES, Launch, Layout, Params, Source, params, rows_aligned4};
use crate::{
    Result,
    ops::{
        ExpertGroups, ExpertScores,
        moe::{combine, route},
    },
};

params! {
    pub(crate) struct MoeRouteParams {
        pub tokens: u32,
        pub experts: u32,
        pub top_k: u32,
        pub group_size: u32,
        pub groups: u32,
        pub chosen_groups: u32,
        pub min_sum: f32,
        pub epsilon: f32,
        pub scale: f32,
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

/// The index of the bias. It follows the parameters, whose index does not depend on options.
pub(crate) const BIAS: u32 = 5;

pub(crate) fn route(call: &route::Call, source: &'static Source) -> Result<Launch> {
    let rule = &call.rule;
    let ExpertGroups { count, chosen } = rule.groups.unwrap_or(ExpertGroups { count: 1, chosen: 1 });
    let params = MoeRouteParams {
        tokens: Launch::uint(route::NAME, "logits", call.tokens)?,
        experts: Launch::uint(route::NAME, "logits", call.experts)?,
        top_k: Launch::uint(route::NAME, "ids", call.top_k)?,
        group_size: Launch::uint(route::NAME, "logits", call.experts / count)?,
        groups: Launch::uint(route::NAME, "groups.count", count)?,
        chosen_groups: Launch::uint(route::NAME, "groups.chosen", chosen)?,
        min_sum: rule.min_sum,
        epsilon: rule.epsilon,
        scale: rule.scale,
    };
    let scores = match rule.scores {
        _ if call.is_plain() => 0,
        ExpertScores::Softmax => 1,
        ExpertScores::Sigmoid => 2,
    };
    Ok(Launch::new(route::NAME, source, "moe_route")
        .constant("X_DTYPE", call.logits.dtype())
        .constant("HAS_SCALE", call.expert_scale.is_some())
        .constant("NORMALISE", rule.normalise)
        .constant("SCORES", scores)
        .constant("HAS_BIAS", call.bias.is_some())
        .constant("GROUPED", rule.groups.is_some())
        .read(0, &call.logits)
        .read_if(1, call.expert_scale.as_ref())
        .write(2, &call.ids)
        .write(3, &call.weights)
        .params(4, &params)
        .read_if(BIAS, call.bias.as_ref())
        .grid([call.tokens.div_ceil(TOKENS), 1, 1], [TOKENS * LANES, 1, 1]))
}

pub(crate) fn combine(call: &combine::Call, source: &'static Source) -> Result<Launch> {
    let combine::Call { x, weights, added, added_weights, out, tokens, top_k, dim } = call;
    let params = MoeCombineParams {
        tokens: Launch::uint(combine::NAME, "out", *tokens)?,
        top_k: Launch::uint(combine::NAME, "weights", *top_k)?,
        dim: Launch::uint(combine::NAME, "out", *dim)?,
    };
    Ok(Launch::new(combine::NAME, source, "moe_combine")
        .constant("X_DTYPE", x.dtype())
        .constant("OUT_DTYPE", out.dtype())
        .constant("ALIGNED", rows_aligned4(*dim, [x, out].into_iter().chain(added)))
        .constant("HAS_ADDED", added.is_some())
        .constant("HAS_ADDED_WEIGHTS", added_weights.is_some())
        .constant("ADDED_DTYPE", added.as_ref().unwrap_or(out).dtype())
        .read(0, x)
        .read(1, weights)
        .write(2, out)
        .params(3, &params)
        .read_if(4, added.as_ref())
        .read_if(5, added_weights.as_ref()))
}
