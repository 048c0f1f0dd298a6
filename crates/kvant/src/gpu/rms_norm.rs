//! The launch of `rms_norm`.

use super::{LANES, Launch, Layout, Params, Source, params, rows_aligned4};
use crate::{
    DType, Result, Tensor,
    ops::rms_norm::{Call, NAME},
};

params! {
    pub(crate) struct RmsNormParams {
        pub rows: u32,
        pub dim: u32,
        pub eps: f32,
        pub scale: f32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[RmsNormParams::layout];

/// Elements of a row from which on a whole threadgroup takes it.
const LONG: usize = 512;
/// SIMD-groups (CUDA: warps) of a threadgroup where each has a row of its own.
const ROWS: usize = 4;
/// The same of a threadgroup that has a row at most: 4096 elements are read at once.
const MOST: usize = 32;

pub(crate) fn launch(call: &Call, source: &'static Source) -> Result<Launch> {
    let params = RmsNormParams {
        rows: Launch::uint(NAME, "x", call.rows)?,
        dim: Launch::uint(NAME, "x", call.dim)?,
        eps: call.eps,
        scale: call.scale,
    };
    let optional = [&call.weight, &call.residual, &call.sum].map(Option::as_ref);
    let tensors = [&call.x, &call.out].into_iter().chain(optional.into_iter().flatten());
    let aligned = rows_aligned4(call.dim, tensors);
    let [weight, residual, sum] = optional;
    let dtype = |tensor: Option<&Tensor>| tensor.map_or(DType::F32, Tensor::dtype);
    let whole = call.dim >= LONG;
    let (groups, warps) =
        if whole { (call.rows, (call.dim / (8 * LANES)).min(MOST)) } else { (call.rows.div_ceil(ROWS), ROWS) };
    Ok(Launch::new(NAME, source, "rms_norm")
        .constant("X_DTYPE", call.x.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("WEIGHT_DTYPE", dtype(weight))
        .constant("RESIDUAL_DTYPE", dtype(residual))
        .constant("SUM_DTYPE", dtype(sum))
        .constant("HAS_WEIGHT", weight.is_some())
        .constant("AFTER", residual.is_some() && sum.is_none())
        .constant("BEFORE", sum.is_some())
        .constant("WHOLE", whole)
        .constant("ALIGNED", aligned)
        .read(0, &call.x)
        .read_if(1, weight)
        .read_if(2, residual)
        .write_if(3, sum)
        .write(4, &call.out)
        .params(5, &params)
        .grid([groups, 1, 1], [warps * LANES, 1, 1]))
}
