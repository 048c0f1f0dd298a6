use crate::{
    Result,
    cuda::{
        WARP, headers,
        vectors::{aligned4, grid},
    },
    gpu::{Builder, Launch, Params, Source, params},
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

static SOURCE: Source = Source {
    name: "moe.cu",
    text: include_str!("moe.cu"),
    headers: headers::ROWS,
    layouts: &[MoeRouteParams::layout, MoeCombineParams::layout],
};

/// Tokens of a block: a warp has one each.
const TOKENS: usize = 4;

pub(crate) fn build_route(call: &route::Call, b: &mut Builder) -> Result<()> {
    let params = MoeRouteParams {
        tokens: Launch::uint(route::NAME, "logits", call.tokens)?,
        experts: Launch::uint(route::NAME, "logits", call.experts)?,
        top_k: Launch::uint(route::NAME, "ids", call.top_k)?,
    };
    b.push(
        Launch::new(route::NAME, &SOURCE, "moe_route")
            .constant("X_DTYPE", call.logits.dtype())
            .constant("HAS_SCALE", call.expert_scale.is_some())
            .read(0, &call.logits)
            .read_if(1, call.expert_scale.as_ref())
            .write(2, &call.ids)
            .write(3, &call.weights)
            .params(4, &params)
            .grid([call.tokens.div_ceil(TOKENS), 1, 1], [TOKENS * WARP, 1, 1]),
    )
}

pub(crate) fn build_combine(call: &combine::Call, b: &mut Builder) -> Result<()> {
    let combine::Call { x, weights, out, tokens, top_k, dim } = call;
    let params = MoeCombineParams {
        tokens: Launch::uint(combine::NAME, "out", *tokens)?,
        top_k: Launch::uint(combine::NAME, "weights", *top_k)?,
        dim: Launch::uint(combine::NAME, "out", *dim)?,
    };
    let (groups, threads) = grid(*tokens, *dim);
    b.push(
        Launch::new(combine::NAME, &SOURCE, "moe_combine")
            .constant("X_DTYPE", x.dtype())
            .constant("OUT_DTYPE", out.dtype())
            .constant("ALIGNED", dim.is_multiple_of(4) && aligned4(x) && aligned4(out))
            .read(0, x)
            .read(1, weights)
            .write(2, out)
            .params(3, &params)
            .grid(groups, threads),
    )
}
