//! Attention over a cache layer.

use std::borrow::Cow;

use super::{check, kv_write::SourceOrder};
use crate::{
    DType, Device, Encoder, Error, KvLayer, Result, Step, Tensor,
    encoder::{Access::*, Touch},
};

pub(crate) const NAME: &str = "attend";

/// The head sizes that [`attend`](attend()) supports.
pub const HEAD_DIMS: [usize; 4] = [64, 128, 256, 512];

/// Arguments of [`attend`](attend()): out = softmax(scale · q·Kᵀ \[softcap\] + mask) · V over a cache layer.
///
/// The same operation serves decode (one token per sequence), verification of drafts (a few) and prefill (many).
///
/// # Which positions a token sees
///
/// A token at position p of sequence s sees the cached positions j of s for which
///
/// - j ≤ p,
/// - j < lens\[s\],
/// - the layer holds j: a ring holds the last `capacity` positions, a pool those that the step's page table has pages
///   for, and
/// - j > p − window, with the narrower of the layer's and the call's window.
///
/// On a ring, the position of a slot is the largest position below lens\[s\] that maps to the slot. Slots that are
/// not seen have no effect, whatever they hold.
///
/// A token that sees nothing, or whose row is [`Step::INACTIVE`], gets zeros. A score of −∞ has weight zero if another score is larger (on the CPU 2⁻¹²⁶,
/// like every score that is far below the largest). If all scores are −∞, the result is NaN.
///
/// # Heads
///
/// Query heads h·G .. (h+1)·G share KV head h, with G = H / Hk.
///
/// # Determinism and accuracy
///
/// Scores, softmax and sums are f32; the [table](crate::ops#accuracy) lists the cases in which factors are rounded.
/// On the CPU, results do not depend on timing; their last digits may depend on the number of threads. A token gets
/// the same result in a prompt and in decode, up to the errors in the table.
pub struct Attend<'a> {
    /// `[T, H, D]`, f32, f16 or bf16. H is a multiple of the layer's KV heads; D is one of [`HEAD_DIMS`].
    pub q: &'a Tensor,
    /// The keys and values.
    pub layer: &'a KvLayer,
    /// The positions, sequences and lengths of the query tokens.
    pub step: &'a Step,
    /// Keys and values of this step's tokens that are not in the cache yet.
    pub fresh: Option<Fresh<'a>>,
    /// Multiplies the scores (often 1/√D; Gemma 4 uses 1). At most 2.3e38 in magnitude.
    pub scale: f32,
    /// s ← c·tanh(s/c), applied after the scale and before the mask. c is between 1.2e-38 and 1e30, and scale / c
    /// must be finite.
    pub softcap: Option<f32>,
    /// How many positions a token sees, itself included. `None` uses [`LayerSpec::window`](crate::LayerSpec::window);
    /// a wider window than the layer's is an error.
    pub window: Option<usize>,
    /// Whether the queries are already rotated ([`NormRope::rotate`](super::NormRope::rotate)). Requires quantised
    /// keys, and no `fresh` keys, which are not rotated.
    pub q_rotated: bool,
    /// A plan made by [`plan`], reused for all layers of a step with the same shape, codecs and window. `None` makes
    /// one for this call.
    pub plan: Option<&'a Plan>,
    /// `[T, H, D]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> Attend<'a> {
    /// Attention with scale 1/√D and the layer's window.
    pub fn new(q: &'a Tensor, layer: &'a KvLayer, step: &'a Step, out: &'a Tensor) -> Attend<'a> {
        let scale = (layer.spec().head_dim as f32).sqrt().recip();
        let (fresh, softcap, window, q_rotated, plan) = (None, None, None, false, None);
        Attend { q, layer, step, fresh, scale, softcap, window, q_rotated, plan, out }
    }

    /// Sets [`Attend::scale`].
    #[must_use]
    pub fn scale(self, scale: f32) -> Self {
        Attend { scale, ..self }
    }

    /// Sets [`Attend::softcap`].
    #[must_use]
    pub fn softcap(self, softcap: f32) -> Self {
        Attend { softcap: Some(softcap), ..self }
    }

    /// Sets [`Attend::window`].
    #[must_use]
    pub fn window(self, window: usize) -> Self {
        Attend { window: Some(window), ..self }
    }
}

/// New keys and values that attention reads raw, before they are stored.
///
/// Use it for a prompt that is longer than a ring can hold at once. Store the tokens afterwards with
/// [`kv_write`](super::kv_write()).
///
/// In addition to the cached positions, a token sees the fresh tokens of its own sequence at positions up to its own,
/// within the window.
#[derive(Clone, Copy)]
pub struct Fresh<'a> {
    /// `[T, Hk, D]` or `[Hk, T, D]`, f32, f16 or bf16.
    pub k: &'a Tensor,
    /// As `k`; the dtype may differ.
    pub v: &'a Tensor,
    /// The layout of `k` and `v`.
    pub order: SourceOrder,
    /// u32 `[S]`: the lengths before this step. Each must be at most the position of every fresh token of its
    /// sequence. Do not pass `step.lens`, which counts the fresh tokens. For cached positions, `past` replaces
    /// `step.lens`.
    pub past: &'a Tensor,
}

/// The kernel that an attention call will use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Why this kernel was chosen.
    pub reason: Cow<'static, str>,
    /// The number of parts into which the context of each (sequence, KV head) is split; 0 leaves the choice to the
    /// kernel.
    pub splits: usize,
}

/// Returns the kernel that a device would run, and why. Make a plan once per step and pass it to every layer of the
/// same shape.
///
/// # Errors
/// Those of [`attend`](attend()) when it is recorded.
pub fn plan(args: &Attend, device: &Device) -> Result<Plan> {
    let plan = device.backend().plan_attend(&validate(args)?);
    tracing::debug!(device = %device, kernel = plan.kernel, reason = %plan.reason, splits = plan.splits, "attend");
    Ok(plan)
}

/// Runs [`Attend`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors). On the CPU, the commit returns `OutOfRange`
///
/// - for a sequence that does not exist, or a position that is not below its sequence's length;
/// - for a length beyond the capacity of a linear layer;
/// - for a `fresh.past` beyond the position of a token of its sequence.
///
/// A GPU does not check these values; see [`Step`].
pub fn attend(enc: &mut Encoder, args: &Attend) -> Result<()> {
    let call = validate(args)?;
    enc.submit(super::Call::Attend(call))
}

fn validate(args: &Attend) -> Result<Call> {
    let spec = args.layer.spec();
    let [tokens, heads, head_dim] = check::rank(NAME, "q", args.q, ["T", "H", "D"])?;
    check::float(NAME, "q", args.q)?;
    check::value_is(NAME, "D", HEAD_DIMS.contains(&head_dim), "64, 128, 256 or 512", head_dim)?;
    check::value_is(
        NAME,
        "D",
        head_dim == spec.head_dim,
        format_args!("the layer's head_dim {}", spec.head_dim),
        head_dim,
    )?;
    let multiple = heads > 0 && heads.is_multiple_of(spec.kv_heads);
    check::value_is(NAME, "H", multiple, format_args!("a multiple of the layer's {} KV heads", spec.kv_heads), heads)?;
    check::float(NAME, "out", args.out)?;
    check::shape(NAME, "out", args.out, &[("T", tokens), ("H", heads), ("D", head_dim)])?;
    args.step.validate(NAME, tokens, args.layer)?;
    check::finite(NAME, "scale", args.scale)?;
    // Kernels compute scores in units of log 2.
    let in_units = (args.scale * std::f32::consts::LOG2_E).is_finite();
    check::value_is(NAME, "scale", in_units, "at most 2.3e38 in magnitude", args.scale)?;
    if let Some(cap) = args.softcap {
        check::cap(NAME, "softcap", cap)?;
        let finite = (args.scale / cap).is_finite();
        check::value_is(NAME, "softcap", finite, "so large that scale / softcap is finite", cap)?;
    }
    let window = args.window.or(spec.window);
    if let Some(window) = window {
        check::positive(NAME, "window", window)?;
        let most = spec.window.unwrap_or(usize::MAX);
        check::value_is(NAME, "window", window <= most, format_args!("at most the layer's {most}"), window)?;
    }
    let rotated_ok = !args.q_rotated || spec.k.is_quantised();
    check::value_is(NAME, "q_rotated", rotated_ok, "false over dense keys", "true")?;
    let fresh = args.fresh.map(|fresh| {
        check::value_is(NAME, "fresh", !args.layer.is_paged(), "none over the pages of a pool", "some")?;
        for (arg, tensor) in [("fresh.k", fresh.k), ("fresh.v", fresh.v)] {
            check::float(NAME, arg, tensor)?;
            fresh.order.check(NAME, arg, tensor, [tokens, spec.kv_heads, head_dim])?;
        }
        check::value_is(NAME, "q_rotated", !args.q_rotated, "false with fresh keys, which are not rotated", "true")?;
        check::dtype(NAME, "fresh.past", fresh.past, DType::U32)?;
        check::shape(NAME, "fresh.past", fresh.past, &[("S", spec.sequences)])?;
        let (k, v, past) = (fresh.k.clone(), fresh.v.clone(), fresh.past.clone());
        Ok(FreshCall { k, v, order: fresh.order, past })
    });
    Ok(Call {
        q: args.q.clone(),
        layer: args.layer.clone(),
        step: args.step.clone(),
        fresh: fresh.transpose()?,
        scale: args.scale,
        softcap: args.softcap,
        window: window.unwrap_or(usize::MAX),
        q_rotated: args.q_rotated,
        splits: args.plan.map_or(0, |plan| plan.splits),
        out: args.out.clone(),
        tokens,
        heads,
        head_dim,
    })
}

#[derive(Clone, Debug)]
pub(crate) struct FreshCall {
    pub k: Tensor,
    pub v: Tensor,
    pub order: SourceOrder,
    pub past: Tensor,
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub q: Tensor,
    pub layer: KvLayer,
    pub step: Step,
    pub fresh: Option<FreshCall>,
    pub scale: f32,
    pub softcap: Option<f32>,
    /// `usize::MAX` without a window.
    pub window: usize,
    pub q_rotated: bool,
    /// 0 leaves the choice to the kernel.
    pub splits: usize,
    pub out: Tensor,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl Call {
    /// The lengths of the cached part: those before the step if its tokens are fresh.
    pub(crate) fn cached_lens(&self) -> &Tensor {
        self.fresh.as_ref().map_or(&self.step.lens, |fresh| &fresh.past)
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "q", tensor: &self.q, access: Read });
        self.layer.touches(Read, visit);
        self.step.touches(visit);
        if let Some(fresh) = &self.fresh {
            visit(Touch { arg: "fresh.k", tensor: &fresh.k, access: Read });
            visit(Touch { arg: "fresh.v", tensor: &fresh.v, access: Read });
            visit(Touch { arg: "fresh.past", tensor: &fresh.past, access: Read });
        }
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        let linear_capacity = self.layer.limit();
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe {
            match &self.fresh {
                None => self.step.check_indices(NAME, linear_capacity),
                Some(fresh) => {
                    self.step.check_indices(NAME, None)?;
                    let limit = linear_capacity.map_or(usize::MAX, |capacity| capacity.saturating_add(1));
                    check::indices_below(NAME, "fresh.past", &fresh.past, limit)?;
                    // A cached token at or after a fresh token's position would be counted twice.
                    let past = fresh.past.host_slice::<u32>();
                    let (positions, sequence) =
                        (self.step.positions.host_slice::<u32>(), self.step.sequence.host_slice::<u32>());
                    let tokens = positions.iter().zip(sequence).filter(|(_, sequence)| **sequence != Step::INACTIVE);
                    for (&position, &sequence) in tokens {
                        let (index, limit) = (sequence as usize, u64::from(position) + 1);
                        if u64::from(past[index]) >= limit {
                            let got = past[index].into();
                            return Err(Error::OutOfRange { op: NAME, arg: "fresh.past", index, got, limit });
                        }
                    }
                    Ok(())
                }
            }
        }
    }
}

/// The cached positions `first..end` that a token at `position` sees, given the cached length of its sequence.
#[inline]
pub(crate) fn visible(position: usize, len: usize, capacity: usize, window: usize) -> std::ops::Range<usize> {
    let end = len.min(position + 1);
    let held = len.saturating_sub(capacity);
    let first = held.max((position + 1).saturating_sub(window));
    first.min(end)..end
}
