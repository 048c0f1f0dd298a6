use super::{
    headers,
    planes::{self, LayerParams, codec_code, row_threads},
    vectors::rows_aligned4,
};
use crate::{
    Result,
    gpu::{Builder, Launch, Params, Source, Use, params},
    ops::{
        kv_read::{Call, NAME},
        kv_write::SourceOrder,
    },
};

params! {
    pub(crate) struct KvReadParams {
        pub start: u64,
        pub tokens: u32,
        pub sequence: u32,
        pub head_dim: u32,
        pub layer: LayerParams,
    }
}

static SOURCE: Source = Source {
    name: "kv_read.cu",
    text: include_str!("kv_read.cu"),
    headers: headers::READ,
    layouts: &[KvReadParams::layout, LayerParams::layout],
};

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let spec = call.layer.spec();
    let codec = call.planes().codec();
    let params = KvReadParams {
        start: call.start as u64,
        tokens: Launch::uint(NAME, "out", call.tokens)?,
        sequence: Launch::uint(NAME, "sequence", call.sequence)?,
        head_dim: Launch::uint(NAME, "D", spec.head_dim)?,
        layer: LayerParams::new(NAME, &call.layer)?,
    };
    let launch = Launch::new(NAME, &SOURCE, "kv_read")
        .constant("CODEC", codec_code(codec))
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("HEAD_MAJOR", call.order == SourceOrder::HeadMajor)
        .constant("KEEP_ROTATED", call.keep_rotated)
        .constant("ALIGNED", rows_aligned4(spec.head_dim, [&call.planes().low, &call.out]));
    b.push(
        planes::bind(launch, 0, call.planes(), Use::Read)
            .write(3, &call.out)
            .params(4, &params)
            .threadgroup_memory(if codec.is_quantised() { spec.head_dim * size_of::<f32>() } else { 16 })
            .grid([call.tokens, spec.kv_heads, 1], [row_threads(spec.head_dim), 1, 1]),
    )
}
