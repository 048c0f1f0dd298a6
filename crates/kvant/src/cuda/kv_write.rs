use super::{THREADS, headers};
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
    Source { name: "kv_write.cu", text: include_str!("kv_write.cu"), headers: headers::WRITE, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let spec = call.layer.spec();
    let quantised = spec.k.is_quantised() || spec.v.is_quantised();
    // Without codes to make, a block has several heads of its token.
    let across = row_threads(spec.head_dim);
    let (blocks, heads) = if quantised { (spec.kv_heads, 1) } else { (1, (THREADS / across).min(spec.kv_heads)) };
    b.push(launch(call, &SOURCE)?.grid([call.tokens, blocks, 2], [across, heads, 1]))
}
