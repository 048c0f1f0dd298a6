use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        norm_rope::{LAYOUTS, launch},
        planes::row_threads,
    },
    ops::norm_rope::Call,
};

static SOURCE: Source =
    Source { name: "norm_rope.metal", text: include_str!("norm_rope.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let dim = call.head_dim;
    b.push(
        launch(call, &SOURCE, b)?
            .threadgroup_memory(dim * size_of::<f32>())
            .grid([call.heads, call.tokens, 1], [row_threads(dim), 1, 1]),
    )
}
