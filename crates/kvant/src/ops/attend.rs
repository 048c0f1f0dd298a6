//! Attention over a cache layer.

use std::borrow::Cow;

use super::check;
use crate::{
    DType, Device, DeviceKind, Encoder, KvLayer, Result, Step, Tensor,
    encoder::{Access::*, Touch},
    group::{Rank, RankTensors, rank_tensors},
    position_share::PositionUse,
};

pub(crate) const NAME: &str = "attend";

/// The head sizes that [`attend`](attend()) supports. Head sizes that are not a power of two need dense keys and
/// values. On CUDA, `attend_generic` runs them: they have no specialised kernel.
pub const HEAD_DIMS: [usize; 8] = [64, 80, 96, 112, 128, 192, 256, 512];

/// Arguments of [`attend`](attend()): out = softmax(scale · q·Kᵀ \[softcap\] + mask) · V over a cache layer.
///
/// One operation serves decode (one token per sequence), verification of drafts (a few) and prefill (many).
///
/// # Which positions a token sees
///
/// A token at position p of sequence s sees the cached positions j of s for which
///
/// - j ≤ p,
/// - j < lens\[s\],
/// - the layer holds j: a ring holds the last `capacity` positions, a pool the positions with a page in the step's page
///   table, and
/// - j > p − window, with the narrower of the layer's and the call's window.
///
/// On a ring, the position of a slot is the largest position below lens\[s\] that maps to the slot. The contents of
/// unseen slots have no effect.
///
/// A token that sees no position, or whose row is [`Step::INACTIVE`], gets zeros. A score of −∞ has weight zero if
/// another score is larger (on the CPU 2⁻¹²⁶, like every score that is far below the largest). If all scores are −∞ and
/// the head has no sink, the result is NaN, or zeros with `ends`.
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
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Attend<'a> {
    /// `[T, H, D]`, f32, f16 or bf16. H is a multiple of the layer's KV heads; D is one of [`HEAD_DIMS`].
    pub q: Query<'a>,
    /// The keys and values.
    pub layer: &'a KvLayer,
    /// The positions, sequences and lengths of the query tokens.
    pub step: &'a Step,
    /// Multiplies the scores. 1/√D unless set; Gemma 4 uses 1. At most 2.3e38 in magnitude.
    pub scale: f32,
    /// s ← c·tanh(s/c), applied after the scale and before the mask. c is between 1.2e-38 and 1e30, and scale / c
    /// must be finite.
    pub softcap: Option<f32>,
    /// The number of positions that a token sees, itself included. `None` uses
    /// [`LayerSpec::window`](crate::LayerSpec::window); a window wider than the layer's is an error.
    pub window: Option<usize>,
    /// f32 `[H]`: the sink of each query head (gpt-oss), a learned score in the denominator of the softmax that has no
    /// value: out = Σⱼ exp(sⱼ)·vⱼ / (exp(sink) + Σⱼ exp(sⱼ)). Finite. The scale and the softcap do not apply to it.
    pub sinks: Option<&'a Tensor>,
    /// The number of parts into which the context of each (sequence, KV head) is split; `None` lets the kernel choose.
    /// Results differ by rounding only. For tests and measurements.
    pub splits: Option<usize>,
    /// f32 `[T, H]`: receives the ends of the result, with which [`merge_attention`](super::merge_attention()) merges
    /// results over disjoint keys. An end is log2 Σⱼ exp(sⱼ) of the scores s; −∞ if a token saw no position, or only
    /// scores of −∞. The output is then f32. Not with sinks, which the merge adds.
    pub ends: Option<&'a Tensor>,
    /// `[T, H, D]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> Attend<'a> {
    /// Attention with scale 1/√D and the layer's window.
    pub fn new(q: impl Into<Query<'a>>, layer: &'a KvLayer, step: &'a Step, out: &'a Tensor) -> Attend<'a> {
        let scale = (layer.spec().head_dim as f32).sqrt().recip();
        let q = q.into();
        let (softcap, window, sinks, splits, ends) = (None, None, None, None, None);
        Attend { q, layer, step, scale, softcap, window, sinks, splits, ends, out }
    }
}

setters! { Attend<'a> {
    scale: f32,
    softcap: Option<f32>,
    window: Option<usize>,
    sinks: Option<&'a Tensor>,
    splits: Option<usize>,
    ends: Option<&'a Tensor>,
} }

/// The queries of an attention call: raw, or with the Hadamard rotation of quantised keys.
///
/// [`norm_rope_write`](super::norm_rope_write()) and [`norm_rope`](super::norm_rope()) return the kind that they wrote.
/// A tensor converts to raw queries; attention over quantised keys then rotates them itself.
#[derive(Clone, Copy, Debug)]
pub enum Query<'a> {
    /// Not rotated.
    Raw(&'a Tensor),
    /// Rotated, as by [`hadamard`](super::hadamard()). Only for quantised keys.
    Rotated(&'a Tensor),
}

impl<'a> Query<'a> {
    /// The tensor of either kind.
    pub fn tensor(self) -> &'a Tensor {
        match self {
            Query::Raw(tensor) | Query::Rotated(tensor) => tensor,
        }
    }

    /// Whether the queries are rotated.
    pub fn is_rotated(self) -> bool {
        matches!(self, Query::Rotated(_))
    }

    /// Wraps `tensor`, as rotated queries if `rotated`.
    pub(crate) fn of(tensor: &'a Tensor, rotated: bool) -> Query<'a> {
        if rotated { Query::Rotated(tensor) } else { Query::Raw(tensor) }
    }
}

impl<'a> From<&'a Tensor> for Query<'a> {
    fn from(tensor: &'a Tensor) -> Query<'a> {
        Query::Raw(tensor)
    }
}

/// The kernel that an attention call runs, and the reason: [`explain`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Why this kernel was selected, and how it divides the work.
    pub reason: Cow<'static, str>,
}

/// Returns the kernel that a device would run for a call, and the reason. For diagnostics and tests.
///
/// # Errors
/// The errors of recording [`attend`](attend()).
pub fn explain(args: &Attend, device: &Device) -> Result<Explanation> {
    let calls = validate(args)?.spans()?;
    let mut explained = calls.iter().flatten().map(|call| (call.span, device.backend().explain_attend(call)));
    let (_, last) = explained.next_back().expect("a call attends to some positions");
    let before: Vec<String> =
        explained.map(|(span, of)| format!("; {}: {} ({})", span.text(), of.kernel, of.reason)).collect();
    Ok(Explanation { reason: format!("{}{}", last.reason, before.concat()).into(), ..last })
}

/// Runs [`Attend`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors). On the CPU, the commit returns `OutOfRange`
///
/// - for a sequence that does not exist, or a position that is not below its sequence's length;
/// - for a length beyond the capacity of a linear layer.
///
/// A GPU does not check these values; see [`Step`].
pub fn attend(enc: &mut Encoder, args: &Attend) -> Result<()> {
    let mut calls = validate(args)?.spans()?.into_iter().flatten();
    calls.try_for_each(|call| enc.submit(super::Call::Attend(call)))
}

fn validate(args: &Attend) -> Result<Call> {
    let (spec, q) = (args.layer.spec(), args.q.tensor());
    let [tokens, heads, head_dim] = check::rank(NAME, "q", q, ["T", "H", "D"])?;
    check::float(NAME, "q", q)?;
    check::value_is(NAME, "D", HEAD_DIMS.contains(&head_dim), format_args!("one of {HEAD_DIMS:?}"), head_dim)?;
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
    // Kernels compute scores in base 2: scale · log2 e must not overflow.
    let is_finite_in_base_2 = (args.scale * std::f32::consts::LOG2_E).is_finite();
    check::value_is(NAME, "scale", is_finite_in_base_2, "at most 2.3e38 in magnitude", args.scale)?;
    if let Some(cap) = args.softcap {
        check::cap(NAME, "softcap", cap)?;
        let finite = (args.scale / cap).is_finite();
        check::value_is(NAME, "softcap", finite, "so large that scale / softcap is finite", cap)?;
    }
    let window = args.window.or(spec.window);
    if let Some(window) = window {
        check::positive(NAME, "window", window)?;
        let max_window = spec.window.unwrap_or(usize::MAX);
        check::value_is(
            NAME,
            "window",
            window <= max_window,
            format_args!("at most the layer's {max_window}"),
            window,
        )?;
    }
    let rotated_ok = !args.q.is_rotated() || args.layer.rotates_queries();
    check::value_is(NAME, "q", rotated_ok, "raw queries, because some keys are dense", "rotated ones")?;
    if let Some(sinks) = args.sinks {
        check::dtype(NAME, "sinks", sinks, DType::F32)?;
        check::shape(NAME, "sinks", sinks, &[("H", heads)])?;
    }
    if let Some(splits) = args.splits {
        check::positive(NAME, "splits", splits)?;
    }
    check_ends(args, tokens, heads)?;
    Ok(Call {
        q: q.clone(),
        layer: args.layer.clone(),
        step: args.step.clone(),
        scale: args.scale,
        softcap: args.softcap,
        window: window.unwrap_or(usize::MAX),
        q_rotated: args.q.is_rotated(),
        sinks: args.sinks.cloned(),
        splits: args.splits.unwrap_or(0),
        span: PageSpan::All,
        earlier: None,
        out: args.out.clone(),
        ends: args.ends.cloned(),
        tokens,
        heads,
        head_dim,
    })
}

/// Checks the tensor of ends.
fn check_ends(args: &Attend, tokens: usize, heads: usize) -> Result<()> {
    let is_divided = args.layer.position_ranks() > 1;
    if is_divided {
        let expected = "none for a layer whose positions the ranks divide";
        check::value_is(NAME, "window", args.window.is_none(), expected, args.window.unwrap_or_default())?;
    }
    let Some(ends) = args.ends else {
        let expected = "a tensor for a layer whose positions the ranks divide";
        return check::value_is(NAME, "ends", !is_divided, expected, "none");
    };
    check::value_is(NAME, "ends", args.sinks.is_none(), "none with sinks", "some")?;
    check::dtype(NAME, "ends", ends, DType::F32)?;
    check::shape(NAME, "ends", ends, &[("T", tokens), ("H", heads)])?;
    check::dtype(NAME, "out", args.out, DType::F32)
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub q: Tensor,
    pub layer: KvLayer,
    pub step: Step,
    pub scale: f32,
    pub softcap: Option<f32>,
    /// `usize::MAX` without a window.
    pub window: usize,
    pub q_rotated: bool,
    /// f32 `[H]`.
    pub sinks: Option<Tensor>,
    /// 0 lets the kernel choose.
    pub splits: usize,
    /// The part of the seen positions that this call attends to.
    pub span: PageSpan,
    /// The results over other positions, which the call merges with its own.
    pub earlier: Option<Results>,
    /// With `ends`, the f32 result over this call's and the earlier positions.
    pub out: Tensor,
    /// f32 `[T, H]`: receives the log-sums of the result (`Results::ends`), if a later call or the caller merges it.
    pub ends: Option<Tensor>,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl RankTensors for Call {
    fn move_to(&mut self, rank: &Rank) {
        self.step.move_share_to(rank, &self.layer, PositionUse::See);
        self.layer.move_to(rank);
        self.earlier.move_to(rank);
        [&mut self.q, &mut self.out].into_iter().for_each(|tensor| tensor.move_to(rank));
        [&mut self.sinks, &mut self.ends].into_iter().for_each(|tensor| tensor.move_to(rank));
    }
}

/// The part of the positions seen by a token at p that a call attends to. P is the page size, and r = max(⌊p/P⌋ − 1,
/// 0)·P the start of the token's recent pages. If ranks divide the positions of the layer, p and P count a rank's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageSpan {
    /// All positions.
    All,
    /// Positions below min(P, r): the first page, unless it is recent.
    First,
    /// Positions from P to r: sealed pages.
    Sealed,
    /// Positions from r on.
    Recent,
    /// Positions of the first and of the recent pages, for sequences with one token each. CUDA only.
    Exact,
}

impl PageSpan {
    /// The range of positions in the span, given the range `seen` of a token at `position` and the layer's
    /// `page_tokens`.
    #[inline]
    pub fn of(self, seen: std::ops::Range<usize>, position: usize, page_tokens: usize) -> std::ops::Range<usize> {
        let recent = (position / page_tokens).saturating_sub(1) * page_tokens;
        let (start, end) = match self {
            PageSpan::All => return seen,
            PageSpan::First => (0, page_tokens.min(recent)),
            PageSpan::Sealed => (page_tokens, recent),
            PageSpan::Recent => (recent, usize::MAX),
            PageSpan::Exact => {
                unreachable!("host devices attend to the first and the recent pages one after the other")
            }
        };
        let end = seen.end.min(end);
        seen.start.max(start).min(end)..end
    }

    /// The number of a span in kernels. Must match Metal's `params.h` and CUDA's `work.h`.
    pub(crate) fn code(self) -> u32 {
        match self {
            PageSpan::All => 0,
            PageSpan::First => 1,
            PageSpan::Sealed => 2,
            PageSpan::Recent => 3,
            PageSpan::Exact => 4,
        }
    }

    fn text(self) -> &'static str {
        match self {
            PageSpan::All => "all positions",
            PageSpan::First => "the first page",
            PageSpan::Sealed => "sealed pages",
            PageSpan::Recent => "recent pages",
            PageSpan::Exact => "the first and the recent pages",
        }
    }
}

/// Partial results of attention over some positions, which can be merged with results over others.
#[derive(Clone, Debug)]
pub(crate) struct Results {
    /// f32 `[T, H, D]`: the results; zero if a token saw no position.
    pub out: Tensor,
    /// f32 `[T, H]`: log2 Σⱼ 2^sⱼ, with scores s in base 2; −∞ if a token saw no position, or only scores of −∞.
    pub ends: Tensor,
}

rank_tensors! { Results { out, ends } }

impl Call {
    /// Splits the call into the calls that it consists of, in order. Over a layer that seals pages, one call for each
    /// span in which a token of the step may see a position. The last one writes `out`.
    fn spans(self) -> Result<[Option<Call>; 3]> {
        let Some(dense) = self.layer.dense().cloned() else { return Ok([Some(self), None, None]) };
        let (pages, longest) = (self.layer.page_tokens(), self.layer.max_rows(self.step.batch().longest));
        // A token sees two recent pages and the first one. A sequence of at most three pages has no others.
        let at_once = self.q.device().kind() == DeviceKind::Cuda && self.step.batch().max_new <= 1;
        let spans: &[PageSpan] = match longest {
            _ if longest <= 2 * pages => &[PageSpan::Recent],
            _ if longest <= 3 * pages && at_once => &[PageSpan::Exact],
            _ if longest <= 3 * pages => &[PageSpan::First, PageSpan::Recent],
            // The kernel over sealed pages takes longer, so it starts first and the other one overlaps it.
            _ if at_once => &[PageSpan::Sealed, PageSpan::Exact],
            _ => &[PageSpan::First, PageSpan::Sealed, PageSpan::Recent],
        };
        let results = (spans.len() > 1).then(|| self.layer.results(self.tokens, self.heads)).transpose()?;
        let call = |index: usize| {
            let (span, is_last) = (*spans.get(index)?, index + 1 == spans.len());
            let later = results.clone().filter(|_| !is_last);
            Some(Call {
                layer: if span == PageSpan::Sealed { self.layer.sealed() } else { dense.clone() },
                span,
                earlier: results.clone().filter(|_| index > 0),
                sinks: self.sinks.clone().filter(|_| is_last),
                out: later.as_ref().map_or(&self.out, |results| &results.out).clone(),
                ends: later.map(|results| results.ends).or_else(|| self.ends.clone()),
                ..self.clone()
            })
        };
        Ok(std::array::from_fn(call))
    }

    /// The positions of `layer` that a token at `position` of a sequence of `len` tokens attends to.
    #[inline]
    pub(crate) fn seen(&self, position: usize, len: usize) -> std::ops::Range<usize> {
        let seen = visible(position, len, self.layer.spec().capacity, self.window);
        self.span.of(seen, position, self.layer.page_tokens())
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "q", tensor: &self.q, access: Read });
        self.layer.touches(Read, visit);
        self.step.touches(visit);
        if let Some(tensor) = &self.sinks {
            visit(Touch { arg: "sinks", tensor, access: Read });
        }
        if let Some(Results { out, ends }) = &self.earlier {
            visit(Touch { arg: "earlier.out", tensor: out, access: Read });
            visit(Touch { arg: "earlier.ends", tensor: ends, access: Read });
        }
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
        if let Some(tensor) = &self.ends {
            visit(Touch { arg: "ends", tensor, access: Write });
        }
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "earlier.out"), ("ends", "earlier.ends")]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe { self.step.check_indices(NAME, self.layer.limit()) }
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
