//! Merging of the attention results of several ranks.

use super::check;
use crate::{
    DType, Encoder, Error, Result, Tensor,
    encoder::{Access::*, Touch},
    group::{Peers, Rank, RankTensors},
};

pub(crate) const NAME: &str = "merge_attention";

/// Arguments of [`merge_attention`](merge_attention()): merges the ranks' results of attention over disjoint keys to
/// the result over all of these keys.
///
/// out = Σᵣ wᵣ · xᵣ / (Σᵣ wᵣ + exp(sink)), with wᵣ = 2^endᵣ of rank r, in the order of ranks; exp(sink) is 0 without
/// `sinks`. A result over no keys has the end −∞ and no effect. If all ends of a head are −∞, its result is zero.
///
/// Each rank gets its heads: rank r of R gets heads r·H/R to (r + 1)·H/R. A device that is no group merges one result.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MergeAttention<'a> {
    /// f32 `[T, H, D]`: the rank's result.
    pub x: &'a Tensor,
    /// f32 `[T, H]`: its [ends](super::Attend::ends).
    pub ends: &'a Tensor,
    /// f32 `[H / ranks]`: the sink of each of the rank's heads, as in [`Attend::sinks`](super::Attend::sinks).
    pub sinks: Option<&'a Tensor>,
    /// `[T, H / ranks, D]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> MergeAttention<'a> {
    /// Merges results without sinks.
    pub fn new(x: &'a Tensor, ends: &'a Tensor, out: &'a Tensor) -> Self {
        MergeAttention { x, ends, sinks: None, out }
    }
}

setters! { MergeAttention<'a> {
    sinks: Option<&'a Tensor>,
} }

/// Runs [`MergeAttention`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors). If a rank fails, the pass of all ranks fails with its error. Metal
/// returns `Unsupported`.
pub fn merge_attention(enc: &mut Encoder, args: &MergeAttention) -> Result<()> {
    check::dtype(NAME, "x", args.x, DType::F32)?;
    check::dtype(NAME, "ends", args.ends, DType::F32)?;
    check::float(NAME, "out", args.out)?;
    let [tokens, own_heads, head_dim] = check::rank(NAME, "out", args.out, ["T", "H / ranks", "D"])?;
    let overflow = Error::Overflow { op: NAME, arg: "out" };
    let heads = own_heads.checked_mul(args.out.device().ranks()).ok_or(overflow)?;
    let dims = [("T", tokens), ("H", heads), ("D", head_dim)];
    check::shape(NAME, "x", args.x, &dims)?;
    check::shape(NAME, "ends", args.ends, &dims[..2])?;
    if let Some(sinks) = args.sinks {
        check::dtype(NAME, "sinks", sinks, DType::F32)?;
        check::shape(NAME, "sinks", sinks, &[("H / ranks", own_heads)])?;
    }
    let (x, ends, sinks, out) = (args.x.clone(), args.ends.clone(), args.sinks.cloned(), args.out.clone());
    let (first_head, peers, all_ends) = (0, None, Vec::new());
    let call = Call { x, ends, sinks, out, tokens, heads, own_heads, first_head, head_dim, peers, all_ends };
    enc.submit(super::Call::MergeAttention(call))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub ends: Tensor,
    pub sinks: Option<Tensor>,
    pub out: Tensor,
    pub tokens: usize,
    /// H.
    pub heads: usize,
    /// Heads of the output.
    pub own_heads: usize,
    /// The first of them, among all heads.
    pub first_head: usize,
    pub head_dim: usize,
    /// None on a plain device.
    pub peers: Option<Peers>,
    /// The ends of all ranks; empty on a plain device.
    all_ends: Vec<Tensor>,
}

impl RankTensors for Call {
    fn move_to(&mut self, rank: &Rank) {
        self.first_head = rank.index() * self.own_heads;
        self.peers = Some(Peers::new(rank, &self.x, &self.out));
        self.all_ends = Peers::of_all(&self.ends);
        self.x.move_to(rank);
        self.ends.move_to(rank);
        self.sinks.move_to(rank);
        self.out.move_to(rank);
    }
}

impl Call {
    /// The results and ends that are merged, in the order of ranks.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&Tensor, &Tensor)> {
        let x = self.peers.as_ref().map_or(std::slice::from_ref(&self.x), |peers| &peers.x);
        let ends = if self.peers.is_some() { &self.all_ends } else { std::slice::from_ref(&self.ends) };
        x.iter().zip(ends)
    }

    /// The row of an output row in `x` and `ends`.
    #[inline]
    pub(crate) fn part_row(&self, row: usize) -> usize {
        row / self.own_heads * self.heads + self.first_head + row % self.own_heads
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        visit(Touch { arg: "ends", tensor: &self.ends, access: Read });
        if let Some(tensor) = &self.sinks {
            visit(Touch { arg: "sinks", tensor, access: Read });
        }
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
