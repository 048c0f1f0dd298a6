//! Stops drafting where it does not pay, whatever the reason.
//!
//! [`DraftLengths`](super::draft_length::DraftLengths) predicts what drafts gain. A prediction may miss costs: states
//! that are copied, tokens that are computed again after a wrong draft, attention. So the time that steps with drafts
//! take is compared with the time that their tokens would have taken without any. After a loss, requests rest without
//! drafts until the loss is a small share of the time.

/// Steps with drafts after which gain and loss are judged.
const WINDOW: usize = 16;
/// Loss in steps after which they are judged at once.
const MAX_LOSS: f64 = 4.0;
/// Maximum time of a step that counts, in steps without drafts: its proposals may have been interrupted.
const MAX_SECONDS: f64 = 8.0;
/// Loss per step that may be an error of measurement.
const TOLERANCE: f64 = 0.01;
/// Share of the time for drafts that do not pay.
const LOSS_SHARE: f64 = 0.015;
/// Maximum steps of a rest.
const MAX_REST: usize = 4096;

/// Gain and loss by drafts, for each number of requests.
#[derive(Debug, Default)]
pub(super) struct DraftRates(Vec<BatchRates>);

/// Gain and loss of batches of one size.
#[derive(Clone, Debug, Default)]
struct BatchRates {
    /// Steps with drafts in the current window.
    steps: usize,
    /// The time that the window took longer than its tokens without drafts, in steps without drafts.
    loss: f64,
    /// Steps until drafts are tried again.
    rest: usize,
}

/// A step whose result is known.
pub(super) struct StepRate {
    /// Requests that sampled.
    pub batch: usize,
    /// Tokens that they got.
    pub tokens: usize,
    /// Rows of the step: more than `batch` with drafts, or with tokens that are computed again.
    pub rows: usize,
    /// The time of the step and of the proposals for it.
    pub seconds: f64,
    /// The time of a step of `batch` rows.
    pub plain_seconds: f64,
}

impl DraftRates {
    /// Counts a step.
    pub fn record(&mut self, step: &StepRate) {
        let StepRate { batch, tokens, rows, seconds, plain_seconds } = *step;
        if batch == 0 || plain_seconds <= 0.0 {
            return;
        }
        self.0.resize(self.0.len().max(batch + 1), BatchRates::default());
        let of = &mut self.0[batch];
        if of.rest > 0 {
            of.rest -= 1;
            return;
        }
        if rows <= batch {
            return;
        }
        of.steps += 1;
        of.loss += (seconds / plain_seconds).min(MAX_SECONDS) - tokens as f64 / batch as f64;
        let is_over = of.steps >= WINDOW || of.loss > MAX_LOSS;
        if !is_over {
            return;
        }
        let BatchRates { steps, loss, .. } = std::mem::take(of);
        if loss > TOLERANCE * steps as f64 {
            self.0[batch].rest = ((loss / LOSS_SHARE) as usize).min(MAX_REST);
        }
    }

    /// Whether a batch has no drafts for now.
    pub fn rests(&self, batch: usize) -> bool {
        self.0.get(batch).is_some_and(|of| of.rest > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time of 4000 tokens, over their time without drafts. A step with drafts takes `seconds` instead of 1 and
    /// gives `tokens`, on average over two steps.
    fn cost(batch: usize, seconds: f64, tokens: [usize; 2]) -> f64 {
        let (mut rates, mut time, mut done) = (DraftRates::default(), 0.0, 0);
        for index in 0.. {
            let (rows, seconds, tokens) = match rates.rests(batch) {
                true => (batch, 1.0, batch),
                false => (3 * batch, seconds, tokens[index % 2] * batch),
            };
            time += seconds;
            done += tokens / batch;
            rates.record(&StepRate { batch, tokens, rows, seconds, plain_seconds: 1.0 });
            if done >= 4000 {
                break;
            }
        }
        time / done as f64
    }

    #[test]
    fn drafts_that_do_not_pay_cost_little() {
        for batch in [1, 16, 64] {
            for (seconds, tokens) in [(1.1, [1, 1]), (1.6, [1, 2]), (3.0, [1, 2]), (6.0, [2, 2]), (8.0, [1, 1])] {
                let cost = cost(batch, seconds, tokens);
                assert!(cost < 1.03, "{batch} requests, {seconds}: {cost}");
            }
        }
    }

    #[test]
    fn drafts_that_pay_go_on() {
        for (seconds, tokens) in [(1.2, [1, 2]), (1.5, [1, 3]), (2.0, [2, 3])] {
            let expected = 2.0 * seconds / (tokens[0] + tokens[1]) as f64;
            assert!(cost(16, seconds, tokens) < expected + 0.01, "{seconds}");
        }
    }

    #[test]
    fn an_interruption_ends_drafts_for_a_while() {
        let mut rates = DraftRates::default();
        let mut record = |seconds| {
            rates.record(&StepRate { batch: 1, tokens: 2, rows: 3, seconds, plain_seconds: 1.0 });
            rates.rests(1)
        };
        assert!(!record(1.2));
        assert!(record(1000.0));
        let rested = (0..MAX_REST).take_while(|_| record(1.0)).count();
        assert!((300..600).contains(&rested), "{rested}");
    }

    #[test]
    fn steps_without_drafts_are_not_judged() {
        let mut rates = DraftRates::default();
        for _ in 0..1000 {
            rates.record(&StepRate { batch: 4, tokens: 4, rows: 4, seconds: 1.5, plain_seconds: 1.0 });
            assert!(!rates.rests(4));
        }
        rates.record(&StepRate { batch: 0, tokens: 0, rows: 4, seconds: 1.5, plain_seconds: 0.0 });
    }
}
