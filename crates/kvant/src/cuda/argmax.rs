use crate::{
    Result, Tensor,
    cuda::{WARP, headers, vectors::aligned4},
    gpu::{Builder, Launch, Params, Source, params},
    ops::argmax::{Call, NAME},
};

params! {
    pub(crate) struct ArgmaxParams {
        pub dim: u32,
    }
}

static SOURCE: Source = Source {
    name: "argmax.cu",
    text: include_str!("argmax.cu"),
    headers: headers::ROWS,
    layouts: &[ArgmaxParams::layout],
};

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    rows(NAME, &call.x, call.dim, &call.out, b)
}

/// The index of the largest element of each row of `x`.
pub(super) fn rows(op: &'static str, x: &Tensor, dim: usize, out: &Tensor, b: &mut Builder) -> Result<()> {
    let params = ArgmaxParams { dim: Launch::uint(op, "N", dim)? };
    let threads = (dim / 16).next_multiple_of(WARP).clamp(WARP, b.limits.threads.min(1024));
    b.push(
        Launch::new(op, &SOURCE, "argmax")
            .constant("X_DTYPE", x.dtype())
            .constant("ALIGNED", dim.is_multiple_of(4) && aligned4(x))
            .read(0, x)
            .write(1, out)
            .params(2, &params)
            .grid([out.elements(), 1, 1], [threads, 1, 1]),
    )
}
