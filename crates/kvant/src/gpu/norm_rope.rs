//! The launch of `norm_rope`, without its grid and its threadgroup memory; `norm_rope_write` shares parts of it.

use std::f64::consts::TAU;

use super::{Builder, Launch, Layout, Params, Source, params, rows_aligned4};
use crate::{
    DType, HeadOrder, Result, Tensor,
    ops::{
        PairLayout,
        norm_rope::{AnglesCall, Call, NAME, NormCall, RopeCall},
    },
};

params! {
    /// The source of angles.
    pub(crate) struct RopeParams {
        /// Pair i makes `coarse[i / 64] · fine[i % 64]` turns per position. Metal, which has no doubles, reads the
        /// bits.
        pub coarse: [f64; 64],
        pub fine: [f64; 64],
        pub pairs: u32,
        pub table_rows: u32,
    }

    pub(crate) struct NormRopeParams {
        pub rope: RopeParams,
        pub tokens: u32,
        pub heads: u32,
        pub head_dim: u32,
        pub eps: f32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[NormRopeParams::layout, RopeParams::layout];

pub(crate) fn launch(call: &Call, source: &'static Source, b: &Builder) -> Result<Launch> {
    let dim = call.head_dim;
    let params = NormRopeParams {
        rope: RopeParams::new(NAME, call.rope.as_ref(), dim, b)?,
        tokens: Launch::uint(NAME, "x", call.tokens)?,
        heads: Launch::uint(NAME, "x", call.heads)?,
        head_dim: Launch::uint(NAME, "D", dim)?,
        eps: eps(call.norm.as_ref()),
    };
    let (norm, weight, weight_dtype) = norm_constants(call.norm.as_ref());
    let launch = Launch::new(NAME, source, "norm_rope")
        .constant("X_DTYPE", call.x.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("NORM", norm)
        .constant("WEIGHT_DTYPE", weight_dtype)
        .constant("ROTATE", call.rotate)
        .constant("HEAD_MAJOR", call.out_order == HeadOrder::HeadMajor)
        .constant("ALIGNED", rows_aligned4(dim, [&call.x, &call.out]))
        .read(0, &call.x)
        .read(1, &call.positions)
        .read_if(2, weight)
        .write(6, &call.out)
        .params(7, &params);
    Ok(bind_rope(launch, 3, call.rope.as_ref()))
}

/// The epsilon of a norm; 0 without a norm.
pub(crate) fn eps(norm: Option<&NormCall>) -> f32 {
    norm.map_or(0.0, |norm| norm.eps)
}

/// The arguments of kernels for a norm: its number in `norm_rope.h`, its weight and the weight's dtype.
pub(crate) fn norm_constants(norm: Option<&NormCall>) -> (u32, Option<&Tensor>, DType) {
    let weight = norm.and_then(|norm| norm.weight.as_ref());
    let kind = match (norm, weight) {
        (None, _) => 0,
        (Some(_), None) => 1,
        (Some(_), Some(_)) => 2,
    };
    (kind, weight, weight.map_or(DType::F32, Tensor::dtype))
}

/// Sets the constants ANGLES and LAYOUT, and binds cosines, sines and factors, if present, at three indices from
/// `first` on.
pub(crate) fn bind_rope(launch: Launch, first: u32, rope: Option<&RopeCall>) -> Launch {
    let (angles, tables) = match rope.map(|rope| (&rope.angles, &rope.freq_factors)) {
        None => (0, None),
        Some((AnglesCall::Theta(_), None)) => (1, None),
        Some((AnglesCall::Theta(_), Some(_))) => (2, None),
        Some((AnglesCall::Tables { cos, sin, .. }, _)) => (3, Some((cos, sin))),
    };
    let layout = match rope.map_or(PairLayout::Halves, |rope| rope.layout) {
        PairLayout::Halves => 0u32,
        PairLayout::LeadingHalves => 1,
        PairLayout::Interleaved => 2,
    };
    launch
        .constant("ANGLES", angles)
        .constant("LAYOUT", layout)
        .read_if(first, tables.map(|t| t.0))
        .read_if(first + 1, tables.map(|t| t.1))
        .read_if(first + 2, rope.and_then(|rope| rope.freq_factors.as_ref()))
}

impl RopeParams {
    pub(crate) fn new(op: &'static str, rope: Option<&RopeCall>, head_dim: usize, b: &Builder) -> Result<RopeParams> {
        let mut params = RopeParams { coarse: [0.0; 64], fine: [0.0; 64], pairs: 0, table_rows: 0 };
        let Some(rope) = rope else { return Ok(params) };
        params.pairs = Launch::uint(op, "rope.rotated_pairs", rope.rotated_pairs)?;
        match rope.angles {
            // Positions have 32 bits.
            AnglesCall::Tables { rows, .. } => params.table_rows = u32::try_from(rows).unwrap_or(u32::MAX),
            AnglesCall::Theta(theta) => {
                let base = rope.layout.frequency_base(head_dim, rope.rotated_pairs) as f64;
                let power = |i: usize| theta.powf(-2.0 * i as f64 / base);
                let step = power(1);
                let mut frequency = 1.0;
                for (i, fine) in params.fine.iter_mut().enumerate() {
                    // Powers are slow; a few products are nearly as precise.
                    frequency = if i.is_multiple_of(16) { power(i) } else { frequency * step };
                    *fine = frequency;
                }
                let used = rope.rotated_pairs.div_ceil(64);
                if used > params.coarse.len() {
                    return Err(b.unsupported(op, format!("{} rotated pairs; 4096 at most", rope.rotated_pairs)));
                }
                for (i, coarse) in params.coarse[..used].iter_mut().enumerate() {
                    *coarse = power(64 * i) / TAU;
                }
            }
        }
        Ok(params)
    }
}
