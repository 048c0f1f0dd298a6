//! The launch of `norm_rope_write`, without its grid and its threadgroup memory.

use super::{
    Builder, Launch, Layout, Params, Source, Use,
    norm_rope::{RopeParams, bind_rope, eps, norm_constants},
    params,
    planes::{self, LayerParams, codec_code, norm_code, page_shift},
    rows_aligned4,
};
use crate::{
    Result,
    ops::norm_rope_write::{Call, NAME},
};

params! {
    pub(crate) struct NormRopeWriteParams {
        pub rope: RopeParams,
        pub layer: LayerParams,
        pub heads: u32,
        pub head_dim: u32,
        pub q_eps: f32,
        pub k_eps: f32,
        pub v_eps: f32,
        pub k_scale: f32,
        pub v_scale: f32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[NormRopeWriteParams::layout, RopeParams::layout, LayerParams::layout];

/// The launch.
pub(crate) fn launch(call: &Call, source: &'static Source, b: &Builder) -> Result<Launch> {
    let (spec, layer, dim) = (call.layer.spec(), &call.layer, call.head_dim);
    let ((k_stored, k_scale), (v_stored, v_scale)) = (norm_code(spec.k), norm_code(spec.v));
    let params = NormRopeWriteParams {
        rope: RopeParams::new(NAME, call.rope.as_ref(), dim, b)?,
        layer: LayerParams::new(NAME, layer, Some(&call.step))?,
        heads: Launch::uint(NAME, "q", call.heads)?,
        head_dim: Launch::uint(NAME, "D", dim)?,
        q_eps: eps(call.q_norm.as_ref()),
        k_eps: eps(call.k_norm.as_ref()),
        v_eps: eps(call.v_norm.as_ref()),
        k_scale,
        v_scale,
    };
    let (q_norm, q_weight, q_weight_dtype) = norm_constants(call.q_norm.as_ref());
    let (k_norm, k_weight, k_weight_dtype) = norm_constants(call.k_norm.as_ref());
    let (v_norm, v_weight, v_weight_dtype) = norm_constants(call.v_norm.as_ref());
    let aligned = rows_aligned4(dim, [&call.q, &call.k, &call.v, &call.q_out, &layer.k.low, &layer.v.low]);
    let launch = Launch::new(NAME, source, "norm_rope_write")
        .constant("Q_DTYPE", call.q.dtype())
        .constant("K_DTYPE", call.k.dtype())
        .constant("V_DTYPE", call.v.dtype())
        .constant("OUT_DTYPE", call.q_out.dtype())
        .constant("Q_NORM", q_norm)
        .constant("K_NORM", k_norm)
        .constant("V_NORM", v_norm)
        .constant("Q_WEIGHT_DTYPE", q_weight_dtype)
        .constant("K_WEIGHT_DTYPE", k_weight_dtype)
        .constant("V_WEIGHT_DTYPE", v_weight_dtype)
        .constant("ROTATE_Q", call.rotate_q)
        .constant("K_CODEC", codec_code(spec.k))
        .constant("V_CODEC", codec_code(spec.v))
        .constant("K_STORED_NORM", k_stored)
        .constant("V_STORED_NORM", v_stored)
        .constant("PAGE_SHIFT", page_shift(layer))
        .constant("ALIGNED", aligned)
        .read(0, &call.q)
        .read(1, &call.k)
        .read(2, &call.v)
        .read_if(3, q_weight)
        .read_if(4, k_weight)
        .read_if(5, v_weight);
    let launch = bind_rope(launch, 6, call.rope.as_ref())
        .read(9, &call.positions)
        .read(10, &call.step.sequence)
        .read(11, &call.step.lens)
        .write(12, &call.q_out)
        .read_if(20, call.step.table_of(layer));
    let launch = planes::bind(launch, 13, layer.k(), Use::Write);
    Ok(planes::bind(launch, 16, layer.v(), Use::Write).params(19, &params))
}
