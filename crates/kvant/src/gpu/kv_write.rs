//! The launch of `kv_write`, without its grid.

use super::{
    Launch, Layout, Params, Source, Use, params,
    planes::{self, LayerParams, codec_code, norm_code, page_shift},
    rows_aligned4,
};
use crate::{
    HeadOrder, Result,
    ops::kv_write::{Call, NAME},
};

params! {
    pub(crate) struct KvWriteParams {
        pub first_token: u64,
        pub source_tokens: u64,
        pub tokens: u64,
        pub layer: LayerParams,
        pub k_scale: f32,
        pub v_scale: f32,
        pub head_dim: u32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[KvWriteParams::layout, LayerParams::layout];

/// The launch. It has no threadgroup memory yet.
pub(crate) fn launch(call: &Call, source: &'static Source) -> Result<Launch> {
    let (spec, layer) = (call.layer.spec(), &call.layer);
    let ((k_norm, k_scale), (v_norm, v_scale)) = (norm_code(spec.k), norm_code(spec.v));
    let params = KvWriteParams {
        first_token: call.first_token as u64,
        source_tokens: call.source_tokens as u64,
        tokens: call.tokens as u64,
        layer: LayerParams::new(NAME, layer, Some(&call.step))?,
        k_scale,
        v_scale,
        head_dim: Launch::uint(NAME, "D", spec.head_dim)?,
    };
    let aligned = rows_aligned4(spec.head_dim, [&call.k, &call.v, &layer.k.low, &layer.v.low]);
    let launch = Launch::new(NAME, source, "kv_write")
        .constant("K_DTYPE", call.k.dtype())
        .constant("V_DTYPE", call.v.dtype())
        .constant("K_CODEC", codec_code(spec.k))
        .constant("V_CODEC", codec_code(spec.v))
        .constant("K_NORM", k_norm)
        .constant("V_NORM", v_norm)
        .constant("HEAD_MAJOR", call.order == HeadOrder::HeadMajor)
        .constant("PAGE_SHIFT", page_shift(layer))
        .constant("ALIGNED", aligned)
        .read(0, &call.k)
        .read(1, &call.v)
        .read(2, &call.step.positions)
        .read(3, &call.step.sequence)
        .read(4, &call.step.lens)
        .read_if(12, call.step.table_of(layer));
    let launch = planes::bind(launch, 5, layer.k(), Use::Write);
    Ok(planes::bind(launch, 8, layer.v(), Use::Write).params(11, &params))
}
