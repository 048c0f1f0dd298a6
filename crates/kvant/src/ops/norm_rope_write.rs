use super::{
    Query, check,
    norm_rope::{HeadNorm, NormCall, Rope, RopeCall},
};
use crate::{
    Encoder, KvLayer, Result, Step, Tensor,
    encoder::{Access::*, Touch},
    group::{Rank, RankTensors},
    position_share::PositionUse,
};

pub(crate) const NAME: &str = "norm_rope_write";

/// Arguments of [`norm_rope_write`](norm_rope_write()): [`norm_rope`](super::norm_rope()) of Q, K and V and
/// [`kv_write`](super::kv_write()) of the new K and V, in one launch unless `kv_write` needs several. This is all the
/// work between a layer's projections and its attention.
///
/// Queries and keys get norm and RoPE; values get only their norm. K and V are encoded from f32, without rounding to
/// the activation dtype in between. Queries get the Hadamard rotation if the layer's keys are quantised.
///
/// `q_out` may be `q`. `v` may be the tensor `k` (Gemma 4's full-attention layers).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NormRopeWrite<'a> {
    /// `[T, H, D]`, f32, f16 or bf16.
    pub q: &'a Tensor,
    /// `[T, Hk, D]`, f32, f16 or bf16.
    pub k: &'a Tensor,
    /// `[T, Hk, D]`, f32, f16 or bf16.
    pub v: &'a Tensor,
    /// The norm of the queries; `None` skips it.
    pub q_norm: Option<HeadNorm<'a>>,
    /// The norm of the keys; `None` skips it.
    pub k_norm: Option<HeadNorm<'a>>,
    /// The norm of the values; `None` skips it.
    pub v_norm: Option<HeadNorm<'a>>,
    /// The rotary embedding of queries and keys.
    pub rope: Option<Rope<'a>>,
    /// Positions, sequences and lengths of all T tokens.
    pub step: &'a Step,
    /// The layer that stores K and V.
    pub layer: &'a KvLayer,
    /// `[T, H, D]`, f32, f16 or bf16.
    pub q_out: &'a Tensor,
}

impl<'a> NormRopeWrite<'a> {
    /// Writes queries to `q_out`, and `k` and `v` to the layer, without norms or embedding.
    pub fn new(
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        step: &'a Step,
        layer: &'a KvLayer,
        q_out: &'a Tensor,
    ) -> Self {
        NormRopeWrite { q, k, v, step, layer, q_out, q_norm: None, k_norm: None, v_norm: None, rope: None }
    }
}

setters! { NormRopeWrite<'a> {
    q_norm: Option<HeadNorm<'a>>,
    k_norm: Option<HeadNorm<'a>>,
    v_norm: Option<HeadNorm<'a>>,
    rope: Option<Rope<'a>>,
} }

/// Runs [`NormRopeWrite`], and returns the queries for [`attend`](super::attend()).
///
/// # Errors
/// Those of [`norm_rope`](super::norm_rope()) and [`kv_write`](super::kv_write()).
pub fn norm_rope_write<'a>(enc: &mut Encoder, args: &NormRopeWrite<'a>) -> Result<Query<'a>> {
    let spec = args.layer.spec();
    let rotate_q = args.layer.rotates_queries();
    let [tokens, heads, head_dim] = check::rank(NAME, "q", args.q, ["T", "H", "D"])?;
    for (arg, tensor, h) in
        [("q", args.q, heads), ("q_out", args.q_out, heads), ("k", args.k, spec.kv_heads), ("v", args.v, spec.kv_heads)]
    {
        check::float(NAME, arg, tensor)?;
        check::shape(NAME, arg, tensor, &[("T", tokens), ("heads", h), ("head_dim", spec.head_dim)])?;
    }
    args.step.validate(NAME, tokens, args.layer)?;
    let norm = |arg, norm: Option<HeadNorm>| norm.map(|norm| norm.validate(NAME, arg, head_dim)).transpose();
    let rope = args.rope.map(|rope| rope.validate(NAME, head_dim)).transpose()?;
    enc.submit(super::Call::NormRopeWrite(Call {
        q: args.q.clone(),
        k: args.k.clone(),
        v: args.v.clone(),
        q_norm: norm("q_norm.weight", args.q_norm)?,
        k_norm: norm("k_norm.weight", args.k_norm)?,
        v_norm: norm("v_norm.weight", args.v_norm)?,
        rope,
        rotate_q,
        positions: args.step.positions().clone(),
        step: args.step.clone(),
        layer: args.layer.written().clone(),
        q_out: args.q_out.clone(),
        tokens,
        heads,
        head_dim,
    }))?;
    args.step.seal(enc, args.layer)?;
    Ok(Query::of(args.q_out, rotate_q))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub q_norm: Option<NormCall>,
    pub k_norm: Option<NormCall>,
    pub v_norm: Option<NormCall>,
    pub rope: Option<RopeCall>,
    pub rotate_q: bool,
    /// Positions of the rotary embedding. The positions of the step locate the slots.
    pub positions: Tensor,
    pub step: Step,
    pub layer: KvLayer,
    pub q_out: Tensor,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl RankTensors for Call {
    fn move_to(&mut self, rank: &Rank) {
        self.step.move_share_to(rank, &self.layer, PositionUse::Store);
        self.layer.move_to(rank);
        self.rope.move_to(rank);
        [&mut self.q_norm, &mut self.k_norm, &mut self.v_norm].into_iter().for_each(|norm| norm.move_to(rank));
        let tensors = [&mut self.q, &mut self.k, &mut self.v, &mut self.positions, &mut self.q_out];
        tensors.into_iter().for_each(|tensor| tensor.move_to(rank));
    }
}

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        for (arg, tensor) in [("q", &self.q), ("k", &self.k), ("v", &self.v)] {
            visit(Touch { arg, tensor, access: Read });
        }
        for (arg, norm) in
            [("q_norm.weight", &self.q_norm), ("k_norm.weight", &self.k_norm), ("v_norm.weight", &self.v_norm)]
        {
            if let Some(norm) = norm {
                norm.touches(arg, visit);
            }
        }
        if let Some(rope) = &self.rope {
            rope.touches(visit);
        }
        visit(Touch { arg: "step.positions", tensor: &self.positions, access: Read });
        self.step.touches(visit);
        self.layer.touches(Write, visit);
        visit(Touch { arg: "q_out", tensor: &self.q_out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("q_out", "q")]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe {
            self.step.check_indices(NAME, self.layer.limit())?;
            self.rope.as_ref().map_or(Ok(()), |rope| rope.check_positions(NAME, "step.positions", &self.positions))
        }
    }
}
