use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{Builder, Launch, Params, Source, THREADS, params},
    ops::all_reduce::{Call, NAME},
};

params! {
    pub(crate) struct AllReduceParams {
        pub elements: u32,
    }
}

static SOURCE: Source = Source {
    name: "all_reduce.metal",
    text: include_str!("all_reduce.metal"),
    headers: HEADERS,
    layouts: &[AllReduceParams::layout],
};

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let elements = Launch::uint(NAME, "x", call.elements)?;
    b.push(
        Launch::new(NAME, &SOURCE, "all_reduce")
            .constant("X_DTYPE", call.x.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
            .read(0, &call.x)
            .write(1, &call.out)
            .params(2, &AllReduceParams { elements })
            .grid([call.elements.div_ceil(THREADS), 1, 1], [THREADS, 1, 1]),
    )
}
