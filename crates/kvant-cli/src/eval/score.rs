//! The distance of a cache's predictions from the text, and from the predictions with an f32 cache.

/// Logarithms of the probabilities, and the most probable token.
pub struct Prediction {
    pub ln_p: Vec<f64>,
    pub top: usize,
}

impl Prediction {
    pub fn new(logits: &[f32]) -> Prediction {
        let top = argmax(logits);
        let max = f64::from(logits[top]);
        let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
        let ln_sum = max + sum.ln();
        Prediction { ln_p: logits.iter().map(|&x| f64::from(x) - ln_sum).collect(), top }
    }
}

/// The index of the first largest value. NaN counts as larger than all numbers, so that it is visible.
fn argmax(values: &[f32]) -> usize {
    let beats = |a: f32, b: f32| a > b || (a.is_nan() && !b.is_nan());
    (0..values.len()).fold(0, |best, i| if beats(values[i], values[best]) { i } else { best })
}

/// Sums over predictions.
#[derive(Default)]
pub struct Score {
    nats: f64,
    /// KL divergence of each prediction from that of the f32 cache, in nats.
    divergences: Vec<f64>,
    agreements: usize,
}

impl Score {
    /// Adds the prediction of `token` by `exact`, with an f32 cache, and `other`, with the cache type under test.
    pub fn add(&mut self, exact: &Prediction, other: &Prediction, token: u32) {
        self.nats -= other.ln_p[token as usize];
        let terms = exact.ln_p.iter().zip(&other.ln_p).map(|(&p, &q)| p.exp() * (p - q));
        // Negative only by rounding. A NaN is kept.
        let divergence: f64 = terms.sum();
        self.divergences.push(if divergence < 0.0 { 0.0 } else { divergence });
        // NaN agrees with nothing, including NaN.
        let numbers = !(exact.ln_p[exact.top] + other.ln_p[other.top]).is_nan();
        self.agreements += usize::from(numbers && exact.top == other.top);
    }

    /// The number of predictions.
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

    /// The value that 99 % of the divergences do not exceed (nearest rank).
    pub fn kl_p99(&self) -> f64 {
        let mut sorted = self.divergences.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * 99).div_ceil(100);
        sorted.get(rank.wrapping_sub(1)).copied().unwrap_or(f64::NAN)
    }

    /// The share of predictions in which both caches have the same most probable token, 0 to 1.
    pub fn top1_agreement(&self) -> f64 {
        self.agreements as f64 / self.tokens() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prediction_is_a_distribution() {
        let prediction = Prediction::new(&[1000.0, 1001.0, 999.0]);
        assert_eq!(prediction.top, 1);
        assert!((prediction.ln_p.iter().map(|p| p.exp()).sum::<f64>() - 1.0).abs() < 1e-12);
        assert!((prediction.ln_p[1] - prediction.ln_p[0] - 1.0).abs() < 1e-12);
    }

    #[test]
    fn divergence_of_known_distributions() {
        // p = (1/2, 1/2), q = (1/4, 3/4): KL = ½ ln 2 + ½ ln ⅔.
        let (p, q) = (Prediction::new(&[0.0, 0.0]), Prediction::new(&[0.0, 3f32.ln()]));
        let mut score = Score::default();
        score.add(&p, &q, 1);
        assert!((score.kl_mean() - 0.5 * (2f64 * 2.0 / 3.0).ln()).abs() < 1e-7);
        assert!((score.nats_per_token() + 0.75f64.ln()).abs() < 1e-7);
        assert_eq!((score.top1_agreement(), score.tokens()), (0.0, 1));
        score.add(&q, &q, 0);
        assert_eq!(score.top1_agreement(), 0.5);
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
        let (p, q) = (Prediction::new(&[0.0, 1.0]), Prediction::new(&[f32::NAN, 1.0]));
        let mut score = Score::default();
        score.add(&p, &q, 1);
        assert!(score.kl_mean().is_nan() && score.kl_p99().is_nan() && score.nats_per_token().is_nan());
        assert_eq!(score.top1_agreement(), 0.0);
        let nan = Prediction::new(&[f32::NAN; 2]);
        score.add(&nan, &nan, 1);
        assert_eq!(score.top1_agreement(), 0.0);
    }
}
