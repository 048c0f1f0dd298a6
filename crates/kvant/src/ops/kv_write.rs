use super::check;
use crate::{
    Encoder, HeadOrder, KvLayer, Result, Step, Tensor,
    encoder::{Access::*, Touch},
    group::{Rank, RankTensors},
    position_share::PositionUse,
};

pub(crate) const NAME: &str = "kv_write";

/// Arguments of [`kv_write`](kv_write()): stores keys and values of new tokens in a cache layer, encoded with the
/// layer's codecs.
///
/// Entry i of the step describes source token `first_token + i`. Its slot is its position (linear layer) or its
/// position mod the capacity (ring).
///
/// A token is stored if its position is among the last `capacity` positions below its sequence's length. A batch that
/// is longer than a ring therefore writes each slot once, with the latest token. Later tokens overwrite slots that
/// earlier tokens of the batch may need. To attend within a batch, feed at most `capacity − window + 1` tokens at once,
/// or use pages ([`KvPool`](crate::KvPool)), which do not have this limit.
///
/// If the ranks of a group divide the layer's positions ([`CacheLayer::position_ranks`](crate::CacheLayer)), each rank
/// stores its own positions.
///
/// In a layer of a pool that seals pages, the rows are written dense. Pages that later tokens of the same step see as
/// sealed are then sealed ([`CacheLayer`](crate::CacheLayer)).
///
/// A dense destination with the source's dtype gets the source's bits, NaN payloads included. Conversion from f32 to
/// f16 or bf16 rounds to nearest, ties to even, and overflows to infinity.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct KvWrite<'a> {
    /// `[T, Hk, D]` or `[Hk, T, D]`, f32, f16 or bf16.
    pub k: &'a Tensor,
    /// As `k`; the dtype may differ.
    pub v: &'a Tensor,
    /// The layout of `k` and `v`.
    pub order: HeadOrder,
    /// The source token that the step's first entry describes.
    pub first_token: usize,
    /// Positions, sequences and lengths of the tokens; `step.tokens()` tokens are written.
    pub step: &'a Step,
    /// The destination.
    pub layer: &'a KvLayer,
}

impl<'a> KvWrite<'a> {
    /// Stores all tokens of a step, whose keys and values are `[T, Hk, D]`.
    pub fn new(k: &'a Tensor, v: &'a Tensor, step: &'a Step, layer: &'a KvLayer) -> Self {
        KvWrite { k, v, order: HeadOrder::TokenMajor, first_token: 0, step, layer }
    }
}

setters! { KvWrite<'a> {
    order: HeadOrder,
    first_token: usize,
} }

/// Runs [`KvWrite`], in one launch for any number of tokens, plus one if pages are sealed.
///
/// # Errors
/// Those of [every operation](crate::ops#errors). On the CPU, the commit returns `OutOfRange` for a sequence that
/// does not exist, a position that is not below its sequence's length, or a length beyond the capacity of a linear
/// layer. A GPU skips a token that is out of range; see [`Step`].
pub fn kv_write(enc: &mut Encoder, args: &KvWrite) -> Result<()> {
    let spec = args.layer.spec();
    let [source_tokens, ..] = args.order.dims(NAME, "k", args.k)?;
    for (arg, source) in [("k", args.k), ("v", args.v)] {
        check::float(NAME, arg, source)?;
        args.order.check(NAME, arg, source, [source_tokens, spec.kv_heads, spec.head_dim])?;
    }
    let tokens = args.step.tokens();
    args.step.validate(NAME, tokens, args.layer)?;
    let fits = args.first_token.checked_add(tokens).is_some_and(|end| end <= source_tokens);
    let got = format_args!("{} tokens from token {} on", tokens, args.first_token);
    check::value_is(
        NAME,
        "first_token",
        fits,
        format_args!("a range within the source's {source_tokens} tokens"),
        got,
    )?;
    enc.submit(super::Call::KvWrite(Call {
        k: args.k.clone(),
        v: args.v.clone(),
        order: args.order,
        source_tokens,
        first_token: args.first_token,
        tokens,
        step: args.step.clone(),
        layer: args.layer.written().clone(),
    }))?;
    args.step.seal(enc, args.layer)
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub k: Tensor,
    pub v: Tensor,
    pub order: HeadOrder,
    pub source_tokens: usize,
    pub first_token: usize,
    pub tokens: usize,
    pub step: Step,
    pub layer: KvLayer,
}

impl RankTensors for Call {
    fn move_to(&mut self, rank: &Rank) {
        self.step.move_share_to(rank, &self.layer, PositionUse::Store);
        self.layer.move_to(rank);
        self.k.move_to(rank);
        self.v.move_to(rank);
    }
}

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "k", tensor: &self.k, access: Read });
        visit(Touch { arg: "v", tensor: &self.v, access: Read });
        self.step.touches(visit);
        self.layer.touches(Write, visit);
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe { self.step.check_indices(NAME, self.layer.limit()) }
    }
}

/// Whether a layer still holds `position` after the step is written, if the sequence then has `len` tokens.
#[inline]
pub(crate) fn is_kept(position: usize, len: usize, capacity: usize) -> bool {
    position < len && len - position <= capacity
}
