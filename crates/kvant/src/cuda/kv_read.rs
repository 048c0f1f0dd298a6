use super::headers;
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
    Source { name: "kv_read.cu", text: include_str!("kv_read.cu"), headers: headers::ALL, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let spec = call.layer.spec();
    b.push(launch(call, &SOURCE)?.grid([call.tokens, spec.kv_heads, 1], [row_threads(spec.head_dim), 1, 1]))
}
