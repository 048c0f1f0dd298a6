use super::check;
use crate::{
    Encoder, Error, HeadOrder, KeyBias, KvLayer, Planes, Result, Step, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
    position_share::check_undivided,
};

pub(crate) const NAME: &str = "kv_read";

/// Arguments of [`kv_read`](kv_read()): copies a range of positions of a layer, in order, to a dense tensor. It is
/// the inverse of [`kv_write`](super::kv_write()).
///
/// Reading a dense layer into its own dtype gives the stored bits.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct KvRead<'a> {
    /// The layer to read.
    pub layer: &'a KvLayer,
    /// Keys or values.
    pub side: KvSide,
    /// The sequence, below S.
    pub sequence: usize,
    /// The step whose page table has the sequence's pages, for a layer of a [`KvPool`](crate::KvPool). `None` for other
    /// layers.
    pub step: Option<&'a Step>,
    /// The first position. On a ring, the caller must know which positions are held: the slots of other positions
    /// contain later positions, or positions that were truncated. Positions without a page read as zero. In a layer
    /// that seals pages, positions with a dense page are read from it.
    pub start: usize,
    /// Whether to leave TurboQuant vectors rotated. No effect on dense vectors.
    pub keep_rotated: bool,
    /// The layout of `out`.
    pub order: HeadOrder,
    /// `[n, Hk, D]` or `[Hk, n, D]`, f32, f16 or bf16: positions `start .. start + n`, with n at most the capacity.
    pub out: &'a Tensor,
}

impl<'a> KvRead<'a> {
    /// Reads from position 0 of sequence 0 on.
    pub fn new(layer: &'a KvLayer, side: KvSide, out: &'a Tensor) -> Self {
        KvRead {
            layer,
            side,
            out,
            sequence: 0,
            step: None,
            start: 0,
            keep_rotated: false,
            order: HeadOrder::TokenMajor,
        }
    }
}

setters! { KvRead<'a> {
    sequence: usize,
    step: Option<&'a Step>,
    start: usize,
    keep_rotated: bool,
    order: HeadOrder,
} }

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSide {
    /// Keys.
    K,
    /// Values.
    V,
}

/// Runs [`KvRead`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors); `Value` for a range that does not fit the layer.
pub fn kv_read(enc: &mut Encoder, args: &KvRead) -> Result<()> {
    let spec = args.layer.spec();
    check_undivided(NAME, args.layer)?;
    check::float(NAME, "out", args.out)?;
    let [tokens, ..] = args.order.dims(NAME, "out", args.out)?;
    args.order.check(NAME, "out", args.out, [tokens, spec.kv_heads, spec.head_dim])?;
    let end = args.start.checked_add(tokens).ok_or(Error::Overflow { op: NAME, arg: "start" })?;
    let sequences = match args.step {
        Some(step) if args.layer.is_paged() => {
            step.validate(NAME, step.tokens(), args.layer)?;
            step.sequences()
        }
        None if !args.layer.is_paged() => spec.sequences,
        step => {
            let words = |some: bool| if some { "a step" } else { "none" };
            return check::value_is(NAME, "step", false, words(args.layer.is_paged()), words(step.is_some()));
        }
    };
    check::value_is(NAME, "sequence", args.sequence < sequences, format_args!("below {sequences}"), args.sequence)?;
    // Positions are u32 on the device.
    let max_slots = if args.layer.is_paged() { u32::MAX as usize } else { spec.capacity };
    let fits = tokens <= max_slots && (spec.ring || end <= max_slots);
    check::value_is(
        NAME,
        "start",
        fits,
        format_args!("a range within {max_slots} slots"),
        format_args!("{}..{end}", args.start),
    )?;
    if args.layer.dense().is_some() {
        let raw = format_args!("not set for a layer that seals pages");
        check::value_is(NAME, "keep_rotated", !args.keep_rotated, raw, args.keep_rotated)?;
    }
    let call = |layer: &KvLayer, fills| Call {
        layer: layer.clone(),
        side: args.side,
        sequence: args.sequence,
        step: args.step.cloned(),
        start: args.start,
        tokens,
        keep_rotated: args.keep_rotated,
        order: args.order,
        fills,
        out: args.out.clone(),
    };
    enc.submit(super::Call::KvRead(call(&args.layer.sealed(), true)))?;
    args.layer.dense().map_or(Ok(()), |dense| enc.submit(super::Call::KvRead(call(dense, false))))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub layer: KvLayer,
    pub side: KvSide,
    pub sequence: usize,
    pub step: Option<Step>,
    pub start: usize,
    pub tokens: usize,
    pub keep_rotated: bool,
    pub order: HeadOrder,
    /// Whether positions without a page are written as zeros, or left unchanged.
    pub fills: bool,
    pub out: Tensor,
}

rank_tensors! { Call { layer, step, out } }

impl Call {
    pub(crate) fn planes(&self) -> &Planes {
        match self.side {
            KvSide::K => &self.layer.k,
            KvSide::V => &self.layer.v,
        }
    }

    /// The key bias, which stored vectors of the side do not include.
    pub(crate) fn key_bias(&self) -> Option<&KeyBias> {
        self.layer.key_bias().filter(|_| self.side == KvSide::K)
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        self.layer.touches(Read, visit);
        if let Some(step) = &self.step {
            step.touches(visit);
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
