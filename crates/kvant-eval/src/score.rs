//! Compares a cache's predictions with the text, and with the predictions of an f32 cache.

use std::borrow::Cow;

use super::exponential::{argmax, excess, exp, sum};

/// The distribution of the next token with an f32 cache, the reference of comparisons.
pub struct Exact<'a> {
    logits: &'a [f32],
    /// exp(logit − max).
    weights: Cow<'a, [f32]>,
    max: f64,
    /// The sum of `weights`.
    total: f64,
    top: usize,
}

/// The comparison of another cache's distribution with the text and with the f32 cache.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// −ln of the probability of the text's token.
    nats: f64,
    /// KL(f32 ‖ other), in nats.
    divergence: f64,
    /// Whether both have one most probable token. NaN agrees with nothing, including NaN.
    pub agrees: bool,
}

impl<'a> Exact<'a> {
    pub fn new(logits: &'a [f32]) -> Exact<'a> {
        let mut weights = vec![0.0; logits.len()];
        let Exact { max, total, top, .. } = Exact::within(logits, &mut weights);
        Exact { logits, weights: Cow::Owned(weights), max, total, top }
    }

    /// Like [`Exact::new`], in a buffer of equal length.
    pub fn within(logits: &'a [f32], weights: &'a mut [f32]) -> Exact<'a> {
        let top = argmax(logits);
        let max = logits[top];
        weights.iter_mut().zip(logits).for_each(|(weight, x)| *weight = exp(x - max));
        let total = sum([weights; 3], |weight, _, _| weight);
        Exact { logits, weights: Cow::Borrowed(weights), max: max.into(), total, top }
    }

    /// The most probable token.
    pub fn top(&self) -> u32 {
        self.top as u32
    }

    /// ln Σ exp(logit).
    fn ln_sum(&self) -> f64 {
        self.max + self.total.ln()
    }

    /// The probability of a token.
    pub fn probability(&self, token: u32) -> f64 {
        (f64::from(self.logits[token as usize]) - self.ln_sum()).exp()
    }

    /// Compares with other logits; the text continues with `token`.
    ///
    /// With differences d = exact − other and any number c, KL = E\[d\] + ln E\[exp(−d)\]. For e = d − c, E\[exp(−e)\]
    /// = 1 − E\[e\] + E\[exp(−e) − 1 + e\]. All terms of the last expectation are positive, and for c near E\[d\],
    /// E\[e\] is nearly 0. Rounding of c and of the f32 sums therefore changes a small divergence only slightly.
    pub fn compare(&self, other: &[f32], token: u32) -> Comparison {
        let slices = [self.logits, other, &self.weights];
        let mean = sum(slices, |x, y, weight| weight * (x - y)) / self.total;
        let centre = mean as f32;
        let rest = mean - f64::from(centre);
        let excess = sum(slices, |x, y, weight| weight * excess(x - y - centre)) / self.total;
        let (ln_sum, divergence) = if excess.is_finite() {
            let ln = (excess - rest).ln_1p();
            (self.ln_sum() - f64::from(centre) + ln, rest + ln)
        } else {
            self.compare_far(other)
        };
        Comparison {
            nats: ln_sum - f64::from(other[token as usize]),
            // Negative only by rounding. NaN is kept.
            divergence: if divergence < 0.0 { 0.0 } else { divergence },
            agrees: argmax(other) == self.top && !divergence.is_nan(),
        }
    }

    /// ln Σ exp(logit) of the other logits, and the divergence, if f32 overflows or a value is not finite.
    fn compare_far(&self, other: &[f32]) -> (f64, f64) {
        let max = f64::from(other[argmax(other)]);
        let ln_sum = max + other.iter().map(|&y| (f64::from(y) - max).exp()).sum::<f64>().ln();
        let (ln_p, ln_q) = (|x: f32| f64::from(x) - self.ln_sum(), |y: f32| f64::from(y) - ln_sum);
        let terms = self.logits.iter().zip(other).map(|(&x, &y)| ln_p(x).exp() * (ln_p(x) - ln_q(y)));
        (ln_sum, terms.sum())
    }
}

/// Sums over predictions.
#[derive(Default)]
pub struct Score {
    nats: f64,
    /// KL divergence of each prediction from the f32 cache, in nats.
    divergences: Vec<f64>,
    agreements: usize,
}

impl Score {
    /// Adds a prediction.
    pub fn add(&mut self, of: Comparison) {
        self.nats += of.nats;
        self.divergences.push(of.divergence);
        self.agreements += usize::from(of.agrees);
    }

    /// Number of predictions.
    pub fn tokens(&self) -> usize {
        self.divergences.len()
    }

    /// The divergences, in the order of the predictions.
    pub fn divergences(&self) -> &[f64] {
        &self.divergences
    }

    pub fn nats_per_token(&self) -> f64 {
        self.nats / self.tokens() as f64
    }

    /// Mean KL(f32 ‖ this), in nats.
    pub fn kl_mean(&self) -> f64 {
        self.divergences.iter().sum::<f64>() / self.tokens() as f64
    }

    /// The 99th percentile of the divergences (nearest rank).
    pub fn kl_p99(&self) -> f64 {
        let mut sorted = self.divergences.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * 99).div_ceil(100);
        sorted.get(rank.wrapping_sub(1)).copied().unwrap_or(f64::NAN)
    }

    /// The fraction of predictions in which both caches have one most probable token, 0 to 1.
    pub fn top1_agreement(&self) -> f64 {
        self.agreements as f64 / self.tokens() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The divergence and the nats of a token, in f64 and term by term.
    fn naive(exact: &[f32], other: &[f32], token: usize) -> (f64, f64) {
        let ln_p = |logits: &[f32]| -> Vec<f64> {
            let max = logits.iter().fold(f64::NEG_INFINITY, |max, &x| max.max(x.into()));
            let ln_sum = max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
            logits.iter().map(|&x| f64::from(x) - ln_sum).collect()
        };
        let (p, q) = (ln_p(exact), ln_p(other));
        (p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum(), -q[token])
    }

    fn score(exact: &[f32], other: &[f32], token: u32) -> Score {
        let mut score = Score::default();
        score.add(Exact::new(exact).compare(other, token));
        score
    }

    #[test]
    fn probabilities_are_a_softmax() {
        let exact = Exact::new(&[1000.0, 1001.0, 999.0]);
        assert!(((0..3).map(|token| exact.probability(token)).sum::<f64>() - 1.0).abs() < 1e-6);
        assert!(((exact.probability(1) / exact.probability(0)).ln() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn divergence_of_known_distributions() {
        // p = (1/2, 1/2), q = (1/4, 3/4): KL = ½ ln 2 + ½ ln ⅔.
        let (p, q) = ([0.0, 0.0], [0.0, 3f32.ln()]);
        let mut score = score(&p, &q, 1);
        assert!((score.kl_mean() - 0.5 * (2f64 * 2.0 / 3.0).ln()).abs() < 1e-7);
        assert!((score.nats_per_token() + 0.75f64.ln()).abs() < 1e-7);
        assert_eq!((score.top1_agreement(), score.tokens()), (0.0, 1));
        score.add(Exact::new(&q).compare(&q, 0));
        assert_eq!(score.top1_agreement(), 0.5);
        assert_eq!(score.divergences()[1], 0.0);
    }

    /// From 16-bit rounding to unrelated logits, with and without a common offset.
    #[test]
    fn divergences_equal_f64_divergences() {
        let mut state = 1u64;
        let mut noise = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        for size in [1e-4f32, 1e-3, 1e-2, 0.1, 1.0, 10.0, 60.0] {
            for offset in [0.0, 7.0] {
                let exact: Vec<f32> = (0..5000).map(|_| 12.0 * noise()).collect();
                let other: Vec<f32> = exact.iter().map(|x| x + size * noise() + offset).collect();
                let ((divergence, nats), got) = (naive(&exact, &other, 17), score(&exact, &other, 17));
                let error = (got.kl_mean() / divergence - 1.0).abs();
                assert!(error < 1e-3, "noise of {size}, offset {offset}: {} is not {divergence}", got.kl_mean());
                assert!((got.nats_per_token() - nats).abs() < 1e-5, "noise of {size}, offset {offset}");
            }
        }
    }

    /// A token that an f32 cache excludes and another cache prefers.
    #[test]
    fn distributions_far_from_each_other_have_a_finite_divergence() {
        // In the second and third case, e⁻ˣ of the token is finite in f32.
        for (excluded, preferred) in [(-300.0, 300.0), (-150.0, -70.0), (-88.0, -1.0)] {
            let (exact, other) = ([0.0, excluded, 1.0], [0.0, preferred, 1.0]);
            let (divergence, nats) = naive(&exact, &other, 0);
            let got = score(&exact, &other, 0);
            assert!((got.kl_mean() - divergence).abs() < 1e-6 * divergence.max(1.0), "{excluded}, {preferred}");
            assert!((got.nats_per_token() - nats).abs() < 1e-6 * nats.max(1.0), "{excluded}, {preferred}");
        }
    }

    #[test]
    fn the_99th_percentile_is_a_value_that_occurred() {
        let divergences = (1..=200).rev().map(f64::from).collect();
        let mut score = Score { divergences, ..Score::default() };
        assert_eq!(score.kl_p99(), 198.0);
        score.divergences = vec![3.0];
        assert_eq!(score.kl_p99(), 3.0);
    }

    #[test]
    fn nan_shows() {
        let mut score = score(&[0.0, 1.0], &[f32::NAN, 1.0], 1);
        assert!(score.kl_mean().is_nan() && score.kl_p99().is_nan() && score.nats_per_token().is_nan());
        assert_eq!(score.top1_agreement(), 0.0);
        let nan = [f32::NAN; 2];
        score.add(Exact::new(&nan).compare(&nan, 1));
        assert_eq!(score.top1_agreement(), 0.0);
    }
}
