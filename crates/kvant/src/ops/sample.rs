use super::check;
use crate::{
    DType, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
};

pub(crate) const NAME: &str = "sample";

/// Draws one token per row of logits.
///
/// The candidates are the entries in falling order of logit (the lower id first among equals; NaN left out), with
/// p = softmax(logit / temperature). They are cut down to the first `top_k`; then to the shortest prefix whose share
/// of what is left reaches `top_p`; then to those with p ≥ `min_p` · the largest p. A uniform number u in [0, 1)
/// picks the first candidate at which the running sum of p exceeds u times the sum of what is left.
///
/// A row of nothing but NaN draws `u32::MAX`, which is no id: logits are like that when activations have left the range of
/// their dtype, and a token made of them would look like any other.
///
/// u depends on `seed` and the row's counter alone ([`Sample::uniform`]), so that a captured step draws anew at each
/// position and a run can be repeated. Temperature 0 takes the largest.
pub struct Sample<'a> {
    /// `[T, V]`, f32, f16 or bf16, V at least 1.
    pub logits: &'a Tensor,
    /// 0 or more; 0 is greedy.
    pub temperature: f32,
    /// How many candidates; 0 for all.
    pub top_k: usize,
    /// 0 < top_p ≤ 1; 1 for all.
    pub top_p: f32,
    /// 0 ≤ min_p < 1; 0 for all.
    pub min_p: f32,
    /// The stream of random numbers.
    pub seed: u64,
    /// u32 `[T]`: the place of each row in the stream. Rows with equal counters draw with the same number: for one sequence its
    /// position will do; sequences that are sampled together need counters that differ, `position * sequences + sequence`, say, or
    /// calls with seeds of their own.
    pub counter: &'a Tensor,
    /// u32 `[T]`.
    pub out: &'a Tensor,
}

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
