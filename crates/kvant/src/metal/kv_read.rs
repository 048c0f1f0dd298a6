use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        kv_read::{LAYOUTS, launch},
        planes::row_threads,
    },
    ops::kv_read::Call,
};

static SOURCE: Source =
    Source { name: "kv_read.metal", text: include_str!("kv_read.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let spec = call.layer.spec();
    b.push(launch(call, &SOURCE)?.grid([spec.kv_heads, call.tokens, 1], [row_threads(spec.head_dim), 1, 1]))
}
