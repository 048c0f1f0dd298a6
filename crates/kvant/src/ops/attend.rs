//! Attention over a cache layer.

use std::borrow::Cow;

use super::{check, kv_write::SourceOrder};
use crate::{
    DType, Device, Encoder, Error, KvLayer, Result, Step, Tensor,
    encoder::{Access::*, Touch},
};

pub(crate) const NAME: &str = "attend";

/// Head sizes that attention has kernels for.
pub const HEAD_DIMS: [usize; 4] = [64, 128, 256, 512];

/// out = softmax(scale · q·Kᵀ \[softcap\] + mask) · V over a cache layer: decode (one token a sequence), verification (a
/// few) and prefill (many) alike.
///
/// A token at position p of sequence s sees the cached positions j of s with j ≤ p, j < lens\[s\], j still held by the
/// layer, and j > p − window, the narrower one of the layer's and the call's. On a ring, a slot's position is the largest one below lens\[s\] that maps to it.
/// A token that sees nothing gets zeros. Slots that are not seen do not matter, whatever they hold. Scores of minus infinity weigh nothing
/// beside others (on the CPU 2⁻¹²⁶, as all scores that are so far below the largest); one that has no others gets NaN.
///
/// Query heads h·G .. (h+1)·G share KV head h, G = H / Hk. Scores and sums are f32, as is the softmax. What is multiplied
/// is rounded before in two cases:
///
/// - Over a quantised layer, the centroids and what they are multiplied by: CUDA, with an f16 or bf16 `out`, rounds them to
///   f16 (a relative error of at most 2⁻¹² each); the CPU at
///   [`SimdLevel::Avx512Vnni`](crate::SimdLevel::Avx512Vnni), the default where the processor has it, takes them in fixed
///   point. With normal keys and queries, the root mean square error is 1.5·10⁻⁴ of a result at scale 1/√D; at scale 1, where
///   scores are larger, up to 4.4·10⁻⁴ at D = 256 and 6.1·10⁻⁴ at 512 (measured).
///   [`CpuOptions`](crate::CpuOptions)` { simd: Some(SimdLevel::Avx512), .. }` computes in f32 instead.
/// - Elsewhere on CUDA, weights, centroids, and queries, keys and values in f32 are taken as sums of f16 or bf16 numbers,
///   which hold 16 bits at least with an f16 or bf16 `out`, and 22 with an f32 one.
///
/// Over quantised values CUDA counts weights relative to the largest norm among the values that a block of neighbouring tokens sees: one
/// whose norm is less than 2⁻²⁸ of that loses bits of its weight, below some 2⁻³⁸ it counts as nothing. Values of a model do not differ by so much.
///
/// On the CPU a result does not depend on timing; its last digits may depend on the number of threads. A token gives the same in
/// a prompt and in decode, up to the errors above.
pub struct Attend<'a> {
    /// `[T, H, D]`, f32, f16 or bf16; H a multiple of the layer's KV heads, D one of [`HEAD_DIMS`].
    pub q: &'a Tensor,
    /// The keys and values.
    pub layer: &'a KvLayer,
    /// Where the query tokens stand.
    pub step: &'a Step,
    /// Keys and values of this step's own tokens, when they are not in the cache yet.
    pub fresh: Option<Fresh<'a>>,
    /// Multiplies the scores (often 1/√D; Gemma 4 uses 1); at most 2.3e38 in magnitude.
    pub scale: f32,
    /// s ← c·tanh(s/c), after the scale and before the mask; c from 1.2e-38 to 1e30,
    /// and scale / c finite.
    pub softcap: Option<f32>,
    /// How many positions a token sees, itself included; `None` for as many as [`LayerSpec::window`](crate::LayerSpec::window)
    /// says, which it must not exceed.
    pub window: Option<usize>,
    /// The queries are already rotated ([`NormRope::rotate`](super::NormRope::rotate)); needs quantised keys.
    pub q_rotated: bool,
    /// A plan made by [`plan`], to be used for all layers of a step that have the same shape, codecs and window; made here when
    /// absent.
    pub plan: Option<&'a Plan>,
    /// `[T, H, D]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

/// New keys and values that attention reads raw, before they are stored: for a prompt longer than what a ring could
/// hold at once. Write them with [`kv_write`](super::kv_write()) afterwards.
///
/// A token sees, besides what the cache holds, the fresh tokens of its own sequence at positions up to its own,
/// within the window.
#[derive(Clone, Copy)]
pub struct Fresh<'a> {
    /// `[T, Hk, D]` or `[Hk, T, D]`, f32, f16 or bf16.
    pub k: &'a Tensor,
    /// As `k`.
    pub v: &'a Tensor,
    /// The layout of both.
    pub order: SourceOrder,
    /// u32 `[S]`: the lengths before this step, no more than the position of any of its tokens; never `step.lens`, which counts
    /// these tokens. They stand for `step.lens` in what is said of cached positions.
    pub past: &'a Tensor,
}

/// How an attention will be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The kernel.
    pub kernel: &'static str,
    /// Why this one.
    pub reason: Cow<'static, str>,
    /// Into how many parts the context of each (sequence, KV head) is to be split; 0 leaves it to the kernel.
    pub splits: usize,
}

/// Which kernel a device would run, and why. Make it once a step and pass it to every layer of the same shape.
pub fn plan(args: &Attend, device: &Device) -> Result<Plan> {
    let plan = device.backend().plan_attend(&validate(args)?);
    tracing::debug!(device = %device, kernel = plan.kernel, reason = %plan.reason, splits = plan.splits, "attend");
    Ok(plan)
}

/// Runs [`Attend`].
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
    args.step.validate(NAME, tokens, spec.sequences)?;
    check::finite(NAME, "scale", args.scale)?;
    // Scores are in units of log 2.
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
    /// `usize::MAX` when there is none.
    pub window: usize,
    pub q_rotated: bool,
    /// 0: the kernel's choice.
    pub splits: usize,
    pub out: Tensor,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl Call {
    /// The lengths that say what the cache holds: those before the step when its tokens are fresh.
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
        let spec = self.layer.spec();
        let linear_capacity = (!spec.ring).then_some(spec.capacity);
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe {
            match &self.fresh {
                None => self.step.check_indices(NAME, linear_capacity),
                Some(fresh) => {
                    self.step.check_indices(NAME, None)?;
                    let limit = linear_capacity.map_or(usize::MAX, |capacity| capacity.saturating_add(1));
                    check::indices_below(NAME, "fresh.past", &fresh.past, limit)?;
                    // What is cached at a token's own position, or after it, would be attended to beside the fresh keys.
                    let past = fresh.past.host_slice::<u32>();
                    let (positions, sequence) =
                        (self.step.positions.host_slice::<u32>(), self.step.sequence.host_slice::<u32>());
                    for (&position, &sequence) in positions.iter().zip(sequence) {
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

/// The cached positions `first..end` that a token at `position` sees, given its sequence's cached length.
#[inline]
pub(crate) fn visible(position: usize, len: usize, capacity: usize, window: usize) -> std::ops::Range<usize> {
    let end = len.min(position + 1);
    let held = len.saturating_sub(capacity);
    let first = held.max((position + 1).saturating_sub(window));
    first.min(end)..end
}
