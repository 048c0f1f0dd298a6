//! The launch of `kv_read`, without its grid.

use super::{
    Launch, Layout, Params, Source, Use, key_bias, params,
    planes::{self, LayerParams, codec_code, page_shift},
    rows_aligned4,
};
use crate::{
    HeadOrder, Result,
    ops::kv_read::{Call, NAME},
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

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[KvReadParams::layout, LayerParams::layout];

pub(crate) fn launch(call: &Call, source: &'static Source) -> Result<Launch> {
    let spec = call.layer.spec();
    let codec = call.planes().codec();
    let params = KvReadParams {
        start: call.start as u64,
        tokens: Launch::uint(NAME, "out", call.tokens)?,
        sequence: Launch::uint(NAME, "sequence", call.sequence)?,
        head_dim: Launch::uint(NAME, "D", spec.head_dim)?,
        layer: LayerParams::new(NAME, &call.layer, call.step.as_ref())?,
    };
    let launch = Launch::new(NAME, source, "kv_read")
        .constant("CODEC", codec_code(codec))
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("HEAD_MAJOR", call.order == HeadOrder::HeadMajor)
        .constant("KEEP_ROTATED", call.keep_rotated)
        .constant("PAGE_SHIFT", page_shift(&call.layer))
        .constant("FILLS", call.fills)
        .constant("ALIGNED", rows_aligned4(spec.head_dim, [&call.planes().low, &call.out]));
    let launch = key_bias::bind(launch, 7, call.key_bias());
    Ok(planes::bind(launch, 0, call.planes(), Use::Read)
        .write(3, &call.out)
        .read_if(6, call.planes().means.as_ref())
        .read_if(5, call.step.as_ref().and_then(|step| step.table_of(&call.layer)))
        .params(4, &params)
        .threadgroup_memory(if codec.is_quantised() { spec.head_dim * size_of::<f32>() } else { 16 }))
}
