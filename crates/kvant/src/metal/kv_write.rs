use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        kv_write::{LAYOUTS, launch},
        planes::row_threads,
    },
    ops::kv_write::Call,
};

static SOURCE: Source =
    Source { name: "kv_write.metal", text: include_str!("kv_write.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let spec = call.layer.spec();
    let quantised = spec.k.is_quantised() || spec.v.is_quantised();
    // A dense row is copied without threadgroup memory.
    let row_bytes = if quantised { spec.head_dim * size_of::<f32>() } else { 16 };
    let grid = [spec.kv_heads, call.tokens, 2];
    let launch = launch(call, &SOURCE)?.threadgroup_memory(row_bytes);
    b.push(launch.grid(grid, [row_threads(spec.head_dim), 1, 1]))
}
