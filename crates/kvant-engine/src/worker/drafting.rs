//! Predicts the next tokens of requests, and offers some of them to the scheduler as drafts.

use super::{
    draft_length::{Acceptance, Class, DraftLengths, Offer},
    lookup::Lookup,
    state::Worker,
};
use crate::scheduler::{PoolStep, StepPlan};

/// The predictions of a request.
#[derive(Debug, Default)]
pub(super) struct Drafting {
    lookup: Lookup,
    acceptance: Acceptance,
    latest: Option<Prediction>,
}

/// Tokens that may follow a text.
#[derive(Debug)]
struct Prediction {
    /// The position of the first one.
    start: usize,
    tokens: Vec<u32>,
    class: Class,
}

impl Drafting {
    /// Counts which predictions have come true.
    fn observe(&mut self, known: &[u32], lengths: &mut DraftLengths) {
        let Some(Prediction { start, tokens, class }) = &self.latest else { return };
        let actual = known.get(*start..).unwrap_or(&[]);
        for (index, (token, actual)) in tokens.iter().zip(actual).enumerate() {
            lengths.observe(&mut self.acceptance, class.after(index), token == actual);
            if token != actual {
                return;
            }
        }
    }

    /// Predicts at most `max` tokens after the known ones.
    fn predict(&mut self, known: &[u32], max: usize) {
        self.latest = self.lookup.find(known).map(|found| {
            let end = (found.end + max).min(known.len());
            Prediction {
                start: known.len(),
                tokens: known[found.end..end].to_vec(),
                class: Class::lookup(found.length),
            }
        });
    }

    /// The predicted tokens.
    fn tokens(&self) -> &[u32] {
        self.latest.as_ref().map_or(&[], |prediction| &prediction.tokens)
    }
}

impl Worker {
    /// Proposes drafts for the rows of an applied step.
    pub(super) fn propose(&mut self, plan: &StepPlan<PoolStep>) {
        if self.drafts == 0 {
            return;
        }
        let Worker { running, scheduler, lengths, .. } = self;
        let (mut predicted, mut rows, mut tokens) = (Vec::new(), 0, 0);
        for row in plan.rows.iter().filter(|row| row.draws > 0) {
            let Some(running) = running.get_mut(&row.id) else { continue };
            let Some(known) = scheduler.tokens(row.id) else { continue };
            rows += scheduler.remaining(row.id).max(1);
            tokens += 1;
            let Some(mut drafting) = running.drafting.take() else { continue };
            drafting.observe(known, lengths);
            let skipped = scheduler.pending(row.id);
            drafting.predict(known, skipped + self.drafts);
            if let Some(prediction) = &mut drafting.latest {
                let valid = running.count_valid(&prediction.tokens);
                prediction.tokens.truncate(valid);
            }
            predicted.push((row.id, drafting, skipped));
        }
        let mut offers: Vec<Offer> = Vec::with_capacity(predicted.len());
        for (_, drafting, skipped) in &mut predicted {
            let Drafting { acceptance, latest, .. } = &mut **drafting;
            let (class, count) = latest.as_ref().map_or((Class::lookup(0), 0), |p| (p.class, p.tokens.len()));
            offers.push(Offer { acceptance, class, skipped: *skipped, available: count.saturating_sub(*skipped) });
        }
        let chosen = match self.adaptive_drafts {
            true => lengths.choose(rows, tokens, &mut offers),
            false => offers.iter().map(|offer| offer.available).collect(),
        };
        for ((id, drafting, skipped), count) in predicted.into_iter().zip(chosen) {
            let drafts = if count > 0 { &drafting.tokens()[..skipped + count] } else { &[] };
            scheduler.propose(id, drafts);
            if let Some(running) = running.get_mut(&id) {
                running.drafting = Some(drafting);
            }
        }
    }

    /// Records the time since the previous result, if no prompt was computed in it.
    pub(super) fn record_time(&mut self, plan: &StepPlan<PoolStep>) {
        let now = std::time::Instant::now();
        let before = self.latest_result.replace(now);
        let is_decoding = matches!(plan.step, PoolStep::Recorded) && plan.rows.iter().all(|row| row.draws > 0);
        if let (Some(before), true, true) = (before, is_decoding, self.drafts > 0) {
            self.lengths.steps.record(plan.tokens.len(), (now - before).as_secs_f64());
        }
    }
}
