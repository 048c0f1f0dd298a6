//! Stops drafting where it does not pay, whatever the reason.
//!
//! [`DraftLengths`](super::draft_length::DraftLengths) predicts what drafts gain. A prediction may miss costs:
//! attention, states, passes of the drafter that wait. So the time that steps with drafts take is compared with the
//! time that their tokens would have taken without any. Gains and losses add up to a balance: one unlucky step says
//! nothing. After a loss, requests rest without drafts until it is a small share of the time.

/// Loss, in steps without drafts, after which drafts rest.
const MAX_LOSS: f64 = 4.0;
/// Maximum gain that is kept for later losses: drafts that stop to pay must be noticed.
const MAX_GAIN: f64 = 16.0;
/// Maximum time of a step that counts, in steps without drafts: its proposals may have been interrupted.
const MAX_SECONDS: f64 = 8.0;
/// Steps without drafts before the first ones with them, and the weight of each further one in their time.
const FIRST_STEPS: u32 = 4;
const RATE: f64 = 0.1;
/// Share of the time for drafts that do not pay.
const LOSS_SHARE: f64 = 0.015;

/// Gain and loss by drafts, for each number of requests.
#[derive(Debug, Default)]
pub(super) struct DraftRates(Vec<Balance>);

/// Gain minus loss of batches of one size, in steps without drafts.
#[derive(Clone, Debug, Default)]
struct Balance {
    gain: f64,
    is_resting: bool,
    /// The time of a step without drafts, and how many have been seen, up to [`FIRST_STEPS`].
    plain_seconds: f64,
    plain_steps: u32,
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
}

impl DraftRates {
    /// Counts a step.
    pub fn record(&mut self, step: &StepRate) {
        let StepRate { batch, tokens, rows, seconds } = *step;
        if batch == 0 || seconds <= 0.0 {
            return;
        }
        self.0.resize(self.0.len().max(batch + 1), Balance::default());
        let of = &mut self.0[batch];
        if rows <= batch {
            of.see_plain(seconds);
            if of.is_resting {
                of.gain += LOSS_SHARE;
                of.is_resting = of.gain < 0.0;
            }
        } else if of.plain_steps > 0 && !of.is_resting {
            let gain = tokens as f64 / batch as f64 - (seconds / of.plain_seconds).min(MAX_SECONDS);
            of.gain = (of.gain + gain).min(MAX_GAIN);
            if of.gain < -MAX_LOSS {
                of.is_resting = true;
                tracing::debug!(batch, loss = -of.gain, "drafts do not pay: requests rest without them");
            }
        }
    }

    /// Whether a batch has no drafts for now.
    pub fn rests(&self, batch: usize) -> bool {
        self.0.get(batch).is_none_or(|of| of.is_resting || of.plain_steps < FIRST_STEPS)
    }
}

impl Balance {
    /// Counts a step without drafts. The first ones may compile kernels: the shortest counts.
    fn see_plain(&mut self, seconds: f64) {
        match self.plain_steps {
            0 => self.plain_seconds = seconds,
            FIRST_STEPS => self.plain_seconds += RATE * (seconds.min(2.0 * self.plain_seconds) - self.plain_seconds),
            _ => self.plain_seconds = self.plain_seconds.min(seconds),
        }
        self.plain_steps = FIRST_STEPS.min(self.plain_steps + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::draft_length::tests::Random, *};

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
            rates.record(&StepRate { batch, tokens, rows, seconds });
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

    /// One sequence whose drafts gain a quarter on average: steps without an accepted draft must not end them.
    #[test]
    fn luck_does_not_end_drafts() {
        let mut random = Random(1);
        let (mut rests, runs, steps) = (0, 50, 300);
        for _ in 0..runs {
            let mut rates = after_plain_steps(1);
            for _ in 0..steps {
                let (is_resting, tokens) = (rates.rests(1), 1 + (0..3).take_while(|_| random.share() < 0.6).count());
                rests += usize::from(is_resting);
                rates.record(&match is_resting {
                    true => StepRate { batch: 1, tokens: 1, rows: 1, seconds: 1.0 },
                    false => StepRate { batch: 1, tokens, rows: 4, seconds: 1.75 },
                });
            }
        }
        let share = rests as f64 / (runs * steps) as f64;
        assert!(share < 0.08, "{share}");
    }

    #[test]
    fn an_interruption_ends_drafts_for_a_while() {
        let mut rates = after_plain_steps(1);
        let mut record = |rows, seconds| {
            rates.record(&StepRate { batch: 1, tokens: 2, rows, seconds });
            rates.rests(1)
        };
        assert!(!record(3, 1.2));
        assert!(record(3, 1000.0));
        let rested = (0..4000).take_while(|_| record(1, 1.0)).count();
        assert!((300..600).contains(&rested), "{rested}");
    }

    /// Steps that take longer than they were measured before any text do not look like steps with drafts.
    #[test]
    fn the_first_steps_have_no_drafts() {
        let mut rates = DraftRates::default();
        for step in 0..1000 {
            assert_eq!(rates.rests(4), step < FIRST_STEPS, "{step}");
            rates.record(&StepRate { batch: 4, tokens: 4, rows: 4, seconds: if step == 0 { 90.0 } else { 1.5 } });
        }
        assert!((rates.0[4].plain_seconds - 1.5).abs() < 1e-9);
        rates.record(&StepRate { batch: 0, tokens: 0, rows: 4, seconds: 1.5 });
        assert!(rates.rests(5));
    }

    fn after_plain_steps(batch: usize) -> DraftRates {
        let mut rates = DraftRates::default();
        (0..FIRST_STEPS).for_each(|_| rates.record(&StepRate { batch, tokens: batch, rows: batch, seconds: 1.0 }));
        rates
    }
}
