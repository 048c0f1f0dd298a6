use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        norm_rope_write::{LAYOUTS, launch},
        planes::row_threads,
    },
    ops::norm_rope_write::Call,
};

static SOURCE: Source = Source {
    name: "norm_rope_write.metal",
    text: include_str!("norm_rope_write.metal"),
    headers: HEADERS,
    layouts: LAYOUTS,
};

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (dim, all_heads) = (call.head_dim, call.heads + 2 * call.layer.spec().kv_heads);
    b.push(
        launch(call, &SOURCE, b)?
            .threadgroup_memory(dim * size_of::<f32>())
            .grid([all_heads, call.tokens, 1], [row_threads(dim), 1, 1]),
    )
}
