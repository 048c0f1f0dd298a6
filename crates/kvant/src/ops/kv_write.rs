use super::check;
use crate::{
    Encoder, KvLayer, Result, Step, Tensor,
    encoder::{Access::*, Touch},
};

pub(crate) const NAME: &str = "kv_write";

/// Puts K and V of new tokens into a cache layer, encoding them as the layer's codecs say.
///
/// Entry i of the step describes source token `first_token + i`. Its slot is its position (linear layer) or its
/// position mod the capacity (ring). A token is stored when its position is among the last `capacity` ones below its
/// sequence's length, so a batch longer than a ring writes each slot once: the last tokens win. What a later token has taken the
/// place of cannot be attended to: [`Fresh`](super::Fresh) is for such batches.
///
/// A dense destination of the source's dtype gets the source's bits, NaN payloads included; f32 to f16 or bf16 rounds
/// to nearest, ties to even, and overflows to infinity.
pub struct KvWrite<'a> {
    /// `[T, Hk, D]` or `[Hk, T, D]`, f32, f16 or bf16.
    pub k: &'a Tensor,
    /// As `k`; its dtype may differ.
    pub v: &'a Tensor,
    /// How the sources are laid out.
    pub order: SourceOrder,
    /// The source token that the step's first entry describes.
    pub first_token: usize,
    /// Where the tokens stand: `step.tokens()` of them are written.
    pub step: &'a Step,
    /// Where they go.
    pub layer: &'a KvLayer,
}

/// The layout of new keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SourceOrder {
    /// `[T, Hk, D]`.
    #[default]
    TokenMajor,
    /// `[Hk, T, D]`.
    HeadMajor,
}

impl SourceOrder {
    /// (tokens, heads, head_dim) of a source.
    pub(crate) fn dims(self, op: &'static str, arg: &'static str, tensor: &Tensor) -> Result<[usize; 3]> {
        Ok(match self {
            SourceOrder::TokenMajor => check::rank(op, arg, tensor, ["T", "heads", "D"])?,
            SourceOrder::HeadMajor => {
                let [heads, tokens, dim] = check::rank(op, arg, tensor, ["heads", "T", "D"])?;
                [tokens, heads, dim]
            }
        })
    }

    /// The row of (token, head) in a source.
    #[inline]
    pub(crate) fn row(self, token: usize, head: usize, tokens: usize, heads: usize) -> usize {
        match self {
            SourceOrder::TokenMajor => token * heads + head,
            SourceOrder::HeadMajor => head * tokens + token,
        }
    }

    /// Checks that a source is `[T, heads, D]` in this order.
    pub(crate) fn check(self, op: &'static str, arg: &'static str, t: &Tensor, dims: [usize; 3]) -> Result<()> {
        let [tokens, heads, dim] = dims;
        match self {
            SourceOrder::TokenMajor => check::shape(op, arg, t, &[("T", tokens), ("heads", heads), ("head_dim", dim)]),
            SourceOrder::HeadMajor => check::shape(op, arg, t, &[("heads", heads), ("T", tokens), ("head_dim", dim)]),
        }
    }
}

/// Runs [`KvWrite`]: one launch however many tokens.
///
/// # Errors
/// `Shape`, `DType`, `Value` for arguments that do not fit together; at the commit, `OutOfRange` for a position beyond a linear
/// layer or its sequence's length, where the host sees the positions (elsewhere the kernel skips the token).
pub fn kv_write(enc: &mut Encoder, args: &KvWrite) -> Result<()> {
    let spec = args.layer.spec();
    let [source_tokens, ..] = args.order.dims(NAME, "k", args.k)?;
    for (arg, source) in [("k", args.k), ("v", args.v)] {
        check::float(NAME, arg, source)?;
        args.order.check(NAME, arg, source, [source_tokens, spec.kv_heads, spec.head_dim])?;
    }
    let tokens = args.step.tokens();
    args.step.validate(NAME, tokens, spec.sequences)?;
    let fits = args.first_token.checked_add(tokens).is_some_and(|end| end <= source_tokens);
    let got = format_args!("{} tokens from {} on", tokens, args.first_token);
    check::value_is(NAME, "first_token", fits, format_args!("within the source's {source_tokens} tokens"), got)?;
    enc.submit(super::Call::KvWrite(Call {
        k: args.k.clone(),
        v: args.v.clone(),
        order: args.order,
        source_tokens,
        first_token: args.first_token,
        tokens,
        step: args.step.clone(),
        layer: args.layer.clone(),
    }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub k: Tensor,
    pub v: Tensor,
    pub order: SourceOrder,
    pub source_tokens: usize,
    pub first_token: usize,
    pub tokens: usize,
    pub step: Step,
    pub layer: KvLayer,
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
        let spec = self.layer.spec();
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe { self.step.check_indices(NAME, (!spec.ring).then_some(spec.capacity)) }
    }
}

/// Whether the token at `position` of a sequence of `len` tokens is still held by the layer once the step is written.
#[inline]
pub(crate) fn is_kept(position: usize, len: usize, capacity: usize) -> bool {
    position < len && len - position <= capacity
}
