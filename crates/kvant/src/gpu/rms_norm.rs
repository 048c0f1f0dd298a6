//! The launch of `rms_norm`.

use super::{LANES, Launch, Layout, Params, Source, dtype_code, params, rows_aligned4};
use crate::{
    DType, Result, Tensor,
    ops::rms_norm::{Addition, Call, MAX_NEXT, NAME},
};

params! {
    pub(crate) struct RmsNormParams {
        pub rows: u32,
        pub dim: u32,
        pub terms: u32,
        pub eps: f32,
        pub next_eps: f32,
        pub scale: f32,
        pub next_scales: [f32; MAX_NEXT],
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[RmsNormParams::layout];

/// Minimum elements of a row that a whole threadgroup takes.
const LONG: usize = 512;
/// SIMD-groups (CUDA: warps) of a threadgroup if each has its own row.
const ROWS: usize = 4;
/// In place of a dtype: there is no tensor.
const ABSENT: u32 = 15;

/// SIMD-groups that share a row of `dim`, at most `most`.
pub(crate) fn warps_of_row(dim: usize, most: usize) -> usize {
    if dim >= LONG { (dim / (8 * LANES)).min(most) } else { 1 }
}

/// A threadgroup that shares a row has at most `most` SIMD-groups.
pub(crate) fn launch(call: &Call, source: &'static Source, most: usize) -> Result<Launch> {
    let params = RmsNormParams {
        rows: Launch::uint(NAME, "x", call.rows)?,
        dim: Launch::uint(NAME, "x", call.dim)?,
        terms: Launch::uint(NAME, "combine", call.terms())?,
        eps: call.eps,
        next_eps: call.next_eps,
        scale: call.scale,
        next_scales: call.next.each_ref().map(|next| next.as_ref().map_or(1.0, |next| next.scale)),
    };
    let (weight, residual) = (call.weight.as_ref(), call.residual.as_ref());
    let (sum, residual_weight, gate) = (call.sum(), call.residual_weight(), call.gate.as_ref());
    let next = call.nexts().flat_map(|next| [next.weight.as_ref(), Some(&next.out)]);
    let tensors =
        [Some(&call.x), Some(&call.out), weight, residual, sum, residual_weight, gate].into_iter().chain(next);
    let aligned = rows_aligned4(call.dim, tensors.flatten());
    let dtype = |tensor: Option<&Tensor>| tensor.map_or(DType::F32, Tensor::dtype);
    let is_normed = matches!(call.add, Addition::Normed { .. });
    let whole = call.dim >= LONG;
    let (groups, warps) =
        if whole { (call.rows, warps_of_row(call.dim, most)) } else { (call.rows.div_ceil(ROWS), ROWS) };
    let launch = Launch::new(NAME, source, "rms_norm")
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
        .constant("NORMED", is_normed)
        .constant("RESIDUAL_WEIGHT_DTYPE", dtype(residual_weight))
        .constant("HAS_RESIDUAL_WEIGHT", residual_weight.is_some())
        .constant("COMBINE", call.combine.is_some())
        .constant("GATED", gate.is_some())
        .constant("GATE_DTYPE", dtype(gate))
        .constant("NEXTS", call.nexts().count() as u32)
        .constant("NEXT_WEIGHT_DTYPES", four_bits_each(call.nexts().map(|next| next.weight.as_ref())))
        .constant("NEXT_OUT_DTYPES", four_bits_each(call.nexts().map(|next| Some(&next.out))))
        .read(0, &call.x)
        .read_if(1, weight)
        .read_if(2, residual)
        .write_if(3, sum)
        .write(4, &call.out)
        .read_if(5, residual_weight);
    let launch = call.nexts().zip(6..).fold(launch, |launch, (next, index)| {
        launch.read_if(index, next.weight.as_ref()).write(index + MAX_NEXT as u32, &next.out)
    });
    Ok(launch
        .read_if(12, call.combine.as_ref())
        .read_if(13, gate)
        .params(14, &params)
        .grid([groups, 1, 1], [warps * LANES, 1, 1]))
}

/// The dtypes in one number, the first in the lowest bits.
fn four_bits_each<'a>(tensors: impl DoubleEndedIterator<Item = Option<&'a Tensor>>) -> u32 {
    tensors.rev().fold(0, |codes, tensor| codes << 4 | tensor.map_or(ABSENT, |tensor| dtype_code(tensor.dtype())))
}
