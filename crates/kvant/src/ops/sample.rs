use super::check;
use crate::{
    DType, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "sample";

/// Arguments of [`sample`](sample()): draws one token per row of logits.
///
/// The candidates are the entries in descending order of logit; among equals the lower id is first, and NaN is
/// excluded. Their probabilities are p = softmax(logit / temperature). Three cuts follow, in this order:
///
/// 1. keep the first `top_k` candidates;
/// 2. keep the shortest prefix whose share of the remaining probability reaches `top_p`;
/// 3. keep the candidates with p ≥ `min_p` · the largest p.
///
/// The candidate with the largest rate p / e is drawn; among equals, the lower id wins. e is an exponentially
/// distributed random number, one for each id ([`Sample::noise`]). A candidate is therefore drawn with probability p
/// divided by the sum over the remaining candidates. Temperature 0 selects the largest logit.
///
/// e depends only on `seed`, the row's counter and the id. A captured step therefore draws with new numbers at each
/// position, and a run can be repeated. If logits differ by rounding, another token is drawn only if the two largest
/// rates are equal up to that rounding.
///
/// A row that holds only NaN, which overflowing activations produce, draws `u32::MAX`, which is not a valid id.
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
    /// u32 `[T]`: the index of each row in the stream. Rows with equal counters draw with equal numbers. For one
    /// sequence, its position is a suitable counter. Sequences that are sampled together need different counters, for
    /// example `position * sequences + sequence`, or separate calls with different seeds.
    pub counter: &'a Tensor,
    /// u32 `[T, 8]`: the parameters of each row ([`SampleRow::words`]), which replace the fields above. A captured step
    /// reads them at each replay.
    pub rows: Option<&'a Tensor>,
    /// u32 `[T]`.
    pub out: &'a Tensor,
}

impl<'a> Sample<'a> {
    /// Greedy: the largest logit of each row.
    pub fn new(logits: &'a Tensor, counter: &'a Tensor, out: &'a Tensor) -> Self {
        Sample { logits, counter, out, temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, rows: None }
    }
}

setters! { Sample<'a> {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    seed: u64,
    rows: Option<&'a Tensor>,
} }

/// The parameters of one row, for [`Sample::rows`]. The fields are those of [`Sample`].
///
/// ```
/// use kvant::{DType, Device, Tensor, ops::{self, Sample, SampleRow}};
/// let device = Device::cpu();
/// let logits = Tensor::from_slice(&device, &[1f32, 3., 2., 1., 3., 2.], &[2, 3])?;
/// let rows = [SampleRow::default(), SampleRow::default().temperature(0.7).top_k(2).seed(1)];
/// let words = rows.map(SampleRow::words).concat();
/// let rows = Tensor::from_slice(&device, &words, &[2, SampleRow::WORDS])?;
/// let (counter, out) = (Tensor::zeros(&device, DType::U32, &[2])?, Tensor::zeros(&device, DType::U32, &[2])?);
/// let mut enc = device.encoder()?;
/// ops::sample(&mut enc, &Sample::new(&logits, &counter, &out).rows(Some(&rows)))?;
/// enc.commit()?.wait()?;
/// assert_eq!(out.to_vec::<u32>()?[0], 1);
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SampleRow {
    /// As [`Sample::temperature`].
    pub temperature: f32,
    /// As [`Sample::top_k`].
    pub top_k: usize,
    /// As [`Sample::top_p`].
    pub top_p: f32,
    /// As [`Sample::min_p`].
    pub min_p: f32,
    /// As [`Sample::seed`].
    pub seed: u64,
}

impl Default for SampleRow {
    /// Greedy.
    fn default() -> Self {
        SampleRow { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

setters! { SampleRow {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    seed: u64,
} }

impl SampleRow {
    /// Words of a row.
    pub const WORDS: usize = 8;

    /// The row of [`Sample::rows`], in the layout that GPUs read: seed, top_p times 2^64, 0, top_k, temperature, min_p.
    /// Parameters out of range are clamped. A greedy row keeps one candidate.
    pub fn words(self) -> [u32; SampleRow::WORDS] {
        let is_greedy = self.temperature <= 0.0 || self.temperature.is_nan();
        let (temperature, top_k) =
            if is_greedy { (1.0, 1) } else { (self.temperature.max(f32::MIN_POSITIVE), self.top_k) };
        let top_k = if top_k == 0 { u32::MAX } else { u32::try_from(top_k).unwrap_or(u32::MAX) };
        let (seed, top_p) = (self.seed, scaled(self.top_p));
        let min_p = self.min_p.clamp(0.0, 1.0);
        [
            seed as u32,
            (seed >> 32) as u32,
            top_p as u32,
            (top_p >> 32) as u32,
            0,
            top_k,
            temperature.to_bits(),
            min_p.to_bits(),
        ]
    }

    /// The parameters that words encode, clamped to their ranges.
    pub(crate) fn of_words(words: &[u32]) -> SampleRow {
        let word = |index: usize| words.get(index).copied().unwrap_or(0);
        let long = |index: usize| u64::from(word(index)) | u64::from(word(index + 1)) << 32;
        SampleRow {
            // `max` returns the other operand for NaN.
            temperature: f32::from_bits(word(6)).max(f32::MIN_POSITIVE),
            top_k: word(5).max(1) as usize,
            top_p: (long(2).max(1) as f64 / 2f64.powi(64)) as f32,
            min_p: f32::from_bits(word(7)).min(1.0),
            seed: long(0),
        }
    }
}

/// A share times 2^64. It is at least 1, which keeps the first candidate.
pub(crate) fn scaled(share: f32) -> u64 {
    ((f64::from(share) * 2f64.powi(64)) as u64).max(1)
}

impl Sample<'_> {
    /// The random bits of an id. They encode a uniform number v = (bits + ½) / 2³², and e = −ln(1 − v).
    pub fn noise(seed: u64, counter: u32, id: u32) -> u32 {
        noise(stream(seed, counter), id)
    }
}

/// The random bits that all ids of a row share: a SplitMix64 step (Steele et al. 2014).
pub(crate) fn stream(seed: u64, counter: u32) -> u64 {
    let mut z = seed.wrapping_add((u64::from(counter) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The random bits of an id of a row.
#[inline(always)]
pub(crate) fn noise(stream: u64, id: u32) -> u32 {
    mixed(mixed(id.wrapping_add(stream as u32)) ^ (stream >> 32) as u32)
}

/// A bijection of 32 bits in which every bit depends on all (lowbias32 of C. Wellons' hash-prospector).
#[inline(always)]
fn mixed(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
    x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
    x ^ (x >> 16)
}

/// e from random bits: a polynomial for small v, where 1 − v would lose low bits.
pub(crate) fn exponential_of(bits: u32) -> f32 {
    let v = (bits as f32 + 0.5) * 2f32.powi(-32);
    if v < 1.0 / 64.0 {
        return v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)));
    }
    // The largest v round to 1.
    -(1.0 - v).max(2f32.powi(-24)).ln()
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
    if let Some(tensor) = args.rows {
        check::dtype(NAME, "rows", tensor, DType::U32)?;
        check::shape(NAME, "rows", tensor, &[("T", rows), ("", SampleRow::WORDS)])?;
    }
    let Sample { temperature, top_k, top_p, min_p, seed, .. } = *args;
    let top_k = if top_k == 0 { vocab } else { top_k.min(vocab) };
    enc.submit(super::Call::Sample(Call {
        logits: args.logits.clone(),
        how: SampleRow { temperature, top_k, top_p, min_p, seed },
        counter: args.counter.clone(),
        rows: args.rows.cloned(),
        out: args.out.clone(),
        vocab,
    }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub logits: Tensor,
    /// The parameters of all rows, unless each row has its own. `top_k` is from 1 to V.
    pub how: SampleRow,
    pub counter: Tensor,
    pub rows: Option<Tensor>,
    pub out: Tensor,
    pub vocab: usize,
}

rank_tensors! { Call { logits, counter, rows, out } }

impl Call {
    /// The parameters of a row. `words` are the contents of `rows`.
    pub(crate) fn how(&self, row: usize, words: Option<&[u32]>) -> SampleRow {
        let Some(words) = words else { return self.how };
        let own = SampleRow::of_words(words.get(row * SampleRow::WORDS..).unwrap_or(&[]));
        SampleRow { top_k: own.top_k.min(self.vocab), ..own }
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "logits", tensor: &self.logits, access: Read });
        visit(Touch { arg: "counter", tensor: &self.counter, access: Read });
        if let Some(rows) = &self.rows {
            visit(Touch { arg: "rows", tensor: rows, access: Read });
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
