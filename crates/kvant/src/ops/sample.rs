use super::check;
use crate::{
    DType, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
};

pub(crate) const NAME: &str = "sample";

/// Arguments of [`sample`](sample()): draws one token per row of logits.
///
/// The candidates are the entries in falling order of logit, with the lower id first among equals and without NaN.
/// Their probabilities are p = softmax(logit / temperature). Three cuts follow, in this order:
///
/// 1. keep the first `top_k` candidates;
/// 2. keep the shortest prefix whose share of the remaining probability reaches `top_p`;
/// 3. keep the candidates with p ≥ `min_p` · the largest p.
///
/// A uniform number u in [0, 1) selects the first candidate at which the running sum of p exceeds u times the sum
/// over the remaining candidates. Temperature 0 selects the largest logit.
///
/// u depends only on `seed` and the row's counter ([`Sample::uniform`]). A captured step therefore draws a new number
/// at each position, and a run can be repeated.
///
/// A row that holds only NaN draws `u32::MAX`, which is not a valid id. Activations that overflow their dtype produce
/// such logits.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Sample<'a> {
    /// `[T, V]`, f32, f16 or bf16; V is at least 1.
    pub logits: &'a Tensor,
    /// 0 or more; 0 is greedy.
    pub temperature: f32,
    /// The number of candidates to keep; 0 for all.
    pub top_k: usize,
    /// 0 < top_p ≤ 1; 1 for all.
    pub top_p: f32,
    /// 0 ≤ min_p < 1; 0 for all.
    pub min_p: f32,
    /// Selects the stream of random numbers.
    pub seed: u64,
    /// u32 `[T]`: the index of each row in the stream. Rows with equal counters draw with the same number. For one
    /// sequence, its position is a suitable counter. Sequences that are sampled together need different counters, for
    /// example `position * sequences + sequence`, or separate calls with different seeds.
    pub counter: &'a Tensor,
    /// u32 `[T]`.
    pub out: &'a Tensor,
}

impl<'a> Sample<'a> {
    /// Greedy: the largest logit of each row.
    pub fn new(logits: &'a Tensor, counter: &'a Tensor, out: &'a Tensor) -> Self {
        Sample { logits, counter, out, temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

setters! { Sample<'a> {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    seed: u64,
} }

impl Sample<'_> {
    /// The uniform number in [0, 1) of a seed and a counter: 24 bits of a SplitMix64 step (Steele et al. 2014).
    pub fn uniform(seed: u64, counter: u32) -> f32 {
        let mut z = seed.wrapping_add((u64::from(counter) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 40) as f32 / (1u32 << 24) as f32
    }
}

/// Runs [`Sample`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors).
pub fn sample(enc: &mut Encoder, args: &Sample) -> Result<()> {
    check::float(NAME, "logits", args.logits)?;
    let [rows, vocab] = check::rank(NAME, "logits", args.logits, ["T", "V"])?;
    check::positive(NAME, "V", vocab)?;
    let t = args.temperature;
    check::value_is(NAME, "temperature", t.is_finite() && t >= 0.0, "finite and not negative", t)?;
    check::value_is(NAME, "top_p", args.top_p > 0.0 && args.top_p <= 1.0, "above 0, at most 1", args.top_p)?;
    check::value_is(NAME, "min_p", (0.0..1.0).contains(&args.min_p), "at least 0, below 1", args.min_p)?;
    for (arg, tensor) in [("counter", args.counter), ("out", args.out)] {
        check::dtype(NAME, arg, tensor, DType::U32)?;
        check::shape(NAME, arg, tensor, &[("T", rows)])?;
    }
    enc.submit(super::Call::Sample(Call {
        logits: args.logits.clone(),
        temperature: args.temperature,
        top_k: if args.top_k == 0 { vocab } else { args.top_k.min(vocab) },
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
        counter: args.counter.clone(),
        out: args.out.clone(),
        vocab,
    }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub logits: Tensor,
    pub temperature: f32,
    /// 1 to vocab.
    pub top_k: usize,
    pub top_p: f32,
    pub min_p: f32,
    pub seed: u64,
    pub counter: Tensor,
    pub out: Tensor,
    pub vocab: usize,
}

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "logits", tensor: &self.logits, access: Read });
        visit(Touch { arg: "counter", tensor: &self.counter, access: Read });
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
