//! Sampling parameters, adjustments of logits on the host, and log probabilities.
//!
//! [`kvant::ops::sample`] samples. For rows that request it, penalties, biases and masks adjust the logits on the host
//! before sampling.

use std::{cmp::Ordering, collections::HashMap};

use kvant::{DType, Device, Submission, Tensor, ops};

use crate::{Error, Result};

/// Sampling parameters.
///
/// The steps, in order: repetition penalty, presence and frequency penalty, bias, suppressed tokens and masks. Then
/// [`kvant::ops::Sample`] truncates by `top_k`, `top_p` and `min_p`, and samples. The random number depends only on the
/// seed and the position.
///
/// ```
/// use kvant_models::Sampling;
/// let sampling = Sampling::default().temperature(0.7).top_p(0.9).seed(3);
/// assert_eq!(sampling.top_k, 0);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Sampling {
    /// 0 or more; 0 selects the most probable token.
    pub temperature: f32,
    /// Keeps the most probable tokens that together reach this probability; above 0 and at most 1; 1 for all.
    pub top_p: f32,
    /// Keeps this many of the most probable tokens; 0 for all.
    pub top_k: usize,
    /// Keeps tokens with at least this probability relative to the most probable one; at least 0 and below 1; 0 for
    /// all.
    pub min_p: f32,
    /// Selects the stream of random numbers: equal seeds and logits give equal tokens.
    pub seed: u64,
    /// Divides positive logits, and multiplies negative ones, of tokens in the prompt and the text; above 0; 1 for
    /// none.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of generated tokens; 0 for none.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it was generated; 0 for none.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens. −∞ forbids a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that must not be sampled.
    pub suppressed: Vec<u32>,
}

impl Default for Sampling {
    /// Greedy.
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            suppressed: Vec::new(),
        }
    }
}

/// A setter for each field.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => {
        impl Sampling {
            $($(#[$doc])*
            #[must_use]
            pub fn $name(self, $name: $type) -> Sampling {
                Sampling { $name, ..self }
            })*
        }
    };
}

setters! {
    /// Sets [`Sampling::temperature`].
    temperature: f32;
    /// Sets [`Sampling::top_p`].
    top_p: f32;
    /// Sets [`Sampling::top_k`].
    top_k: usize;
    /// Sets [`Sampling::min_p`].
    min_p: f32;
    /// Sets [`Sampling::seed`].
    seed: u64;
    /// Sets [`Sampling::repetition_penalty`].
    repetition_penalty: f32;
    /// Sets [`Sampling::presence_penalty`].
    presence_penalty: f32;
    /// Sets [`Sampling::frequency_penalty`].
    frequency_penalty: f32;
    /// Sets [`Sampling::logit_bias`].
    logit_bias: Vec<(u32, f32)>;
    /// Sets [`Sampling::suppressed`].
    suppressed: Vec<u32>;
}

impl Sampling {
    /// Defaults for chats and servers if a model recommends nothing: temperature 0.7, top_p 0.95, min_p 0.05.
    pub fn usual() -> Sampling {
        Sampling::default().temperature(0.7).top_p(0.95).min_p(0.05)
    }

    /// Checks the parameters for a model of `vocab` tokens.
    ///
    /// # Errors
    /// `Argument` with the name of the parameter.
    pub fn validate(&self, vocab: usize) -> Result<()> {
        let check = |holds: bool, arg, expected: &str, got: f32| {
            if holds { Ok(()) } else { Err(Error::argument(arg, expected, got)) }
        };
        let t = self.temperature;
        check(t.is_finite() && t >= 0.0, "temperature", "finite and not negative", t)?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", "above 0, at most 1", self.top_p)?;
        check((0.0..1.0).contains(&self.min_p), "min_p", "at least 0, below 1", self.min_p)?;
        let repetition = self.repetition_penalty;
        check(repetition.is_finite() && repetition > 0.0, "repetition_penalty", "finite and above 0", repetition)?;
        for (arg, penalty) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            check(penalty.is_finite(), arg, "finite", penalty)?;
        }
        for &(id, bias) in &self.logit_bias {
            check(!bias.is_nan() && bias < f32::INFINITY, "logit_bias", "numbers below infinity", bias)?;
            check_id("logit_bias", id, vocab)?;
        }
        self.suppressed.iter().try_for_each(|&id| check_id("suppressed", id, vocab))
    }

    /// Whether logits are not adjusted, so that the device can sample without the host.
    pub fn is_plain(&self) -> bool {
        !self.has_penalties() && self.logit_bias.is_empty() && self.suppressed.is_empty()
    }

    /// Whether sampling selects the most probable token.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// The parameters of the device, for logits that need no further adjustment.
    pub(crate) fn row(&self) -> ops::SampleRow {
        let Sampling { temperature, top_k, top_p, min_p, seed, .. } = *self;
        ops::SampleRow::default().temperature(temperature).top_k(top_k).top_p(top_p).min_p(min_p).seed(seed)
    }

    /// Whether the logits depend on previous tokens.
    fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

fn check_id(arg: &'static str, id: u32, vocab: usize) -> Result<()> {
    if (id as usize) < vocab { Ok(()) } else { Err(Error::argument(arg, format_args!("ids below {vocab}"), id)) }
}

/// The sampling state of one text: its parameters, and the number of occurrences of each token.
///
/// ```
/// use kvant_models::{Sampler, Sampling};
/// let mut sampler = Sampler::new(Sampling::default().presence_penalty(0.5), 4)?;
/// sampler.accept_prompt(&[0]);
/// sampler.accept(2);
/// let mut logits = [1.0, 2.0, 3.0, 4.0];
/// assert!(sampler.adjust(&mut logits, None));
/// assert_eq!(logits, [1.0, 2.0, 2.5, 4.0]);
/// # Ok::<(), kvant_models::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    /// For each token of the prompt and the text, its number of occurrences in the text. Empty without penalties.
    counts: HashMap<u32, u32>,
}

impl Sampler {
    /// Creates a sampler for a model of `vocab` tokens.
    ///
    /// # Errors
    /// As [`Sampling::validate`].
    pub fn new(sampling: Sampling, vocab: usize) -> Result<Sampler> {
        sampling.validate(vocab)?;
        Ok(Sampler { sampling, counts: HashMap::new() })
    }

    /// The parameters.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Counts tokens of the prompt, which affect only the repetition penalty.
    pub fn accept_prompt(&mut self, tokens: &[u32]) {
        if self.sampling.repetition_penalty != 1.0 {
            for &id in tokens {
                self.counts.entry(id).or_default();
            }
        }
    }

    /// Counts a generated token.
    pub fn accept(&mut self, id: u32) {
        if self.sampling.has_penalties() {
            let count = self.counts.entry(id).or_default();
            *count = count.saturating_add(1);
        }
    }

    /// Undoes the count of a generated token.
    pub fn retract(&mut self, id: u32) {
        if let Some(count) = self.counts.get_mut(&id) {
            *count = count.saturating_sub(1);
        }
    }

    /// Adjusts logits before sampling. `allowed` has one bit per token, starting with the lowest bit of the first word;
    /// tokens without a bit are forbidden. NaN stays NaN.
    ///
    /// Returns whether any token is allowed.
    #[must_use = "a draw from forbidden tokens returns one of them"]
    pub fn adjust(&self, logits: &mut [f32], allowed: Option<&[u32]>) -> bool {
        let forbid = |logit: &mut f32| *logit = if logit.is_nan() { f32::NAN } else { f32::NEG_INFINITY };
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.sampling;
        for (&id, &count) in &self.counts {
            let Some(logit) = logits.get_mut(id as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            if count > 0 {
                *logit -= presence_penalty + frequency_penalty * count as f32;
            }
        }
        for &(id, bias) in &self.sampling.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        for &id in &self.sampling.suppressed {
            if let Some(logit) = logits.get_mut(id as usize) {
                forbid(logit);
            }
        }
        if let Some(allowed) = allowed {
            for (word, logits) in logits.chunks_mut(32).enumerate() {
                let bits = allowed.get(word).copied().unwrap_or(0);
                let forbidden = logits.iter_mut().enumerate().filter(|(bit, _)| bits >> bit & 1 == 0);
                forbidden.for_each(|(_, logit)| forbid(logit));
            }
        }
        logits.iter().any(|&logit| logit != f32::NEG_INFINITY)
    }
}

/// The log probability of a token, and the most probable tokens at its position.
///
/// Probabilities are the model's: softmax of the logits, before temperature, penalties and truncation.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub id: u32,
    /// Its log probability; −∞ if its logit is NaN.
    pub logprob: f32,
    /// The number of tokens with a larger logit.
    pub rank: usize,
    /// The most probable tokens, descending; among equal ones, the lower id comes first.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// The log probability of token `id`, and the `top` most probable tokens. `logits` are one row before
    /// [`Sampler::adjust`].
    pub fn of(logits: &[f32], id: u32, top: usize) -> TokenLogprobs {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exp = |x: f32| if x.is_nan() { 0.0 } else { f64::from(x - max).exp() };
        let log_sum = f64::from(max) + logits.iter().map(|&x| exp(x)).sum::<f64>().ln();
        let logprob = |x: f32| if x.is_nan() { f32::NEG_INFINITY } else { (f64::from(x) - log_sum) as f32 };
        let own = logits.get(id as usize).copied().unwrap_or(f32::NAN);
        let rank = logits.iter().filter(|&&x| x > own).count();
        let mut ids: Vec<u32> = (0..logits.len() as u32).filter(|&id| !logits[id as usize].is_nan()).collect();
        let order = |a: &u32, b: &u32| {
            let (x, y) = (logits[*a as usize], logits[*b as usize]);
            y.partial_cmp(&x).unwrap_or(Ordering::Equal).then(a.cmp(b))
        };
        let top = top.min(ids.len());
        if top < ids.len() && top > 0 {
            ids.select_nth_unstable_by(top - 1, order);
        }
        ids.truncate(top);
        ids.sort_unstable_by(order);
        let top = ids.into_iter().map(|id| (id, logprob(logits[id as usize]))).collect();
        TokenLogprobs { id, logprob: logprob(own), rank, top }
    }
}

/// Buffers to sample several rows with different parameters in one submission.
pub struct DeviceSampler {
    device: Device,
    counters: Tensor,
    /// The parameters of each row.
    how: Tensor,
    drawn: Tensor,
}

impl DeviceSampler {
    /// Creates buffers for up to `rows` rows.
    ///
    /// # Errors
    /// `Kvant` with `OutOfMemory`.
    pub fn new(device: &Device, rows: usize) -> Result<DeviceSampler> {
        let zeros = |shape: &[usize]| Tensor::zeros(device, DType::U32, shape);
        let how = zeros(&[rows, ops::SampleRow::WORDS])?;
        Ok(DeviceSampler { device: device.clone(), counters: zeros(&[rows])?, how, drawn: zeros(&[rows])? })
    }

    /// Samples a token for each row of `logits`, `[rows, vocab]`. `rows` has the parameters and the counter of each
    /// row; [`Decoder`](crate::Decoder) uses the position of the sampled token as the counter. Returns `None` for a row
    /// of only NaN.
    ///
    /// # Errors
    /// `Argument` if the number of rows differs from `logits` or exceeds the buffers; `Kvant`.
    pub fn draw(&self, logits: &Tensor, rows: &[(&Sampling, u32)]) -> Result<Vec<Option<u32>>> {
        let (submission, drawn) = self.start(logits, rows)?;
        submission.wait()?;
        let drawn = drawn.to_vec::<u32>()?;
        Ok(drawn.into_iter().map(|id| (id != u32::MAX).then_some(id)).collect())
    }

    /// Like [`DeviceSampler::draw`], without waiting. The returned tensor, u32 `[rows]`, contains the tokens until the
    /// next draw; `u32::MAX` for a row of only NaN.
    ///
    /// # Errors
    /// As [`DeviceSampler::draw`].
    pub fn start(&self, logits: &Tensor, rows: &[(&Sampling, u32)]) -> Result<(Submission, Tensor)> {
        let room = self.drawn.elements();
        if rows.len() > room || logits.shape().first() != Some(&rows.len()) {
            let expected = format!("at most {room}, and as many as `logits` has");
            return Err(Error::argument("rows", expected, rows.len()));
        }
        let mut enc = self.device.encoder()?;
        if rows.is_empty() {
            return Ok((enc.commit()?, self.drawn.rows(0..0)?));
        }
        let (counters, drawn) = (self.counters.rows(0..rows.len())?, self.drawn.rows(0..rows.len())?);
        counters.write(&rows.iter().map(|(_, counter)| *counter).collect::<Vec<u32>>())?;
        let how = self.how.rows(0..rows.len())?;
        let is_greedy = rows.iter().all(|(sampling, _)| sampling.is_greedy());
        if !is_greedy {
            how.write(&rows.iter().flat_map(|(sampling, _)| sampling.row().words()).collect::<Vec<u32>>())?;
        }
        ops::sample(&mut enc, &ops::Sample::new(logits, &counters, &drawn).rows((!is_greedy).then_some(&how)))?;
        Ok((enc.commit()?, drawn))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_apply_in_order() {
        let sampling = Sampling::default()
            .repetition_penalty(2.0)
            .presence_penalty(1.0)
            .frequency_penalty(0.5)
            .logit_bias(vec![(1, 10.0), (3, f32::NEG_INFINITY)])
            .suppressed(vec![4]);
        let mut sampler = Sampler::new(sampling, 6).unwrap();
        sampler.accept_prompt(&[0, 1]);
        [1, 1, 2].into_iter().for_each(|id| sampler.accept(id));
        let mut logits = [4.0, -4.0, 4.0, 1.0, 1.0, 1.0];
        assert!(sampler.adjust(&mut logits, None));
        let none = f32::NEG_INFINITY;
        // Token 1: −4 · 2 − 1 − 2 · 0.5 + 10. Token 2: 4 / 2 − 1 − 0.5.
        assert_eq!(logits, [2.0, 0.0, 0.5, none, none, 1.0]);
        assert!(sampler.adjust(&mut logits, Some(&[0b10_0001])));
        assert_eq!(logits[1..5], [none; 4]);
        assert_eq!(logits[5], 1.0);
        assert!(!sampler.adjust(&mut logits, Some(&[0b1110])));
    }

    #[test]
    fn a_mask_that_is_too_short_forbids() {
        let sampler = Sampler::new(Sampling::default(), 40).unwrap();
        let mut logits = [0.0; 40];
        assert!(sampler.adjust(&mut logits, Some(&[u32::MAX])));
        assert!(logits[..32].iter().all(|&x| x == 0.0) && logits[32..].iter().all(|&x| x == f32::NEG_INFINITY));
    }

    #[test]
    fn parameters_out_of_range() {
        let invalid = [
            ("temperature", Sampling::default().temperature(-1.0)),
            ("temperature", Sampling::default().temperature(f32::NAN)),
            ("top_p", Sampling::default().top_p(0.0)),
            ("min_p", Sampling::default().min_p(1.0)),
            ("repetition_penalty", Sampling::default().repetition_penalty(0.0)),
            ("presence_penalty", Sampling::default().presence_penalty(f32::INFINITY)),
            ("frequency_penalty", Sampling::default().frequency_penalty(f32::NAN)),
            ("logit_bias", Sampling::default().logit_bias(vec![(10, 0.0)])),
            ("logit_bias", Sampling::default().logit_bias(vec![(9, f32::INFINITY)])),
            ("suppressed", Sampling::default().suppressed(vec![10])),
        ];
        for (name, sampling) in invalid {
            assert!(matches!(sampling.validate(10), Err(Error::Argument { arg, .. }) if arg == name), "{name}");
        }
    }

    #[test]
    fn log_probabilities() {
        let logits = [0.25f32.ln(), 0.5f32.ln(), f32::NAN, 0.25f32.ln()];
        let got = TokenLogprobs::of(&logits, 3, 2);
        assert!((got.logprob - 0.25f32.ln()).abs() < 1e-6);
        assert_eq!((got.rank, got.top[0].0, got.top[1].0), (1, 1, 0));
        assert!((got.top[0].1 - 0.5f32.ln()).abs() < 1e-6);
        assert_eq!(TokenLogprobs::of(&logits, 2, 0).logprob, f32::NEG_INFINITY);
        assert_eq!(TokenLogprobs::of(&logits, 1, 9).top.len(), 3);
    }

    #[test]
    fn rows_draw_as_they_do_alone() {
        let device = Device::cpu();
        let logits: Vec<f32> = (0..300).map(|i| ((i * 37 % 101) as f32).sin() * 4.0).collect();
        let all = Tensor::from_slice(&device, &logits, &[6, 50]).unwrap();
        let sampler = DeviceSampler::new(&device, 8).unwrap();
        let warm = |seed| Sampling::default().temperature(1.5).seed(seed);
        let (greedy, cut) = (Sampling::default(), warm(1).top_k(3));
        let (one, two) = (warm(1), warm(2));
        let rows = [(&greedy, 0), (&greedy, 5), (&one, 3), (&one, 4), (&two, 3), (&cut, 9)];
        let together = sampler.draw(&all, &rows).unwrap();
        for (index, row) in rows.iter().enumerate() {
            let alone = sampler.draw(&all.rows(index..index + 1).unwrap(), &[*row]).unwrap();
            assert_eq!(together[index], alone[0], "row {index}");
        }
        assert!(sampler.draw(&all, &rows[..5]).is_err());
        let nan = Tensor::from_slice(&device, &[f32::NAN; 50], &[1, 50]).unwrap();
        assert_eq!(sampler.draw(&nan, &[(&one, 0)]).unwrap(), [None]);
    }
}
