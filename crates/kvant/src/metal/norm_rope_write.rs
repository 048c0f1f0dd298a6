use super::{headers::HEADERS, kv_write};
use crate::{
    Result,
    gpu::{
        Builder, Source,
        kv_write::takes_passes,
        norm_rope_write::{LAYOUTS, launch, rows, rows_of_call},
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
    // Passes over all vectors follow.
    let rows = if takes_passes(&call.layer, &call.step) { Some(rows(call, b)?) } else { None };
    b.push(
        launch(call, rows.as_ref(), &SOURCE, b)?
            .threadgroup_memory(dim * size_of::<f32>())
            .grid([all_heads, call.tokens, 1], [row_threads(dim), 1, 1]),
    )?;
    rows.map_or(Ok(()), |rows| kv_write::push(&rows_of_call(call, &rows), b))
}
