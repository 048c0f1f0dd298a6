//! Predicts the next tokens of requests, and offers some of them to the scheduler as drafts.
//!
//! Predictions come from [`Lookup`], or from the model's drafter ([`Worker::draft_with_model`]): for each request and
//! step, from the source whose first prediction is more probable. Lookup predicts before the number of drafts is
//! chosen, the drafter after it, because its predictions take time.

use std::{collections::HashMap, mem, time::Instant};

use super::{
    draft_length::{Acceptance, Class, DraftLengths, Offer},
    draft_rates::StepRate,
    lookup::Lookup,
    state::Worker,
};
use crate::scheduler::{PoolStep, RowResult, StepPlan};

/// Maximum time of a step, and of a drafter's passes, that counts as a cost of drafts, over the expected time of their
/// size: longer ones were interrupted, or recorded passes.
const MAX_INTERRUPTED: f64 = 1.5;

/// The time of the drafter's passes between two steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftingTime {
    seconds: f64,
    /// Of earlier passes of this depth; `None` for the first ones, which may compile kernels.
    expected: Option<f64>,
}

impl DraftingTime {
    /// The time that counts as a cost of drafts; `None` if it is not known.
    fn judged(self) -> Option<f64> {
        self.expected.map(|expected| self.seconds.min(MAX_INTERRUPTED * expected))
    }
}

/// The predictions of a request.
#[derive(Debug, Default)]
pub(super) struct Drafting {
    lookup: Lookup,
    acceptance: Acceptance,
    /// The latest predictions, at most one of each source.
    latest: Vec<Prediction>,
}

/// Tokens that may follow a text.
#[derive(Debug)]
struct Prediction {
    /// The position of the first one.
    start: usize,
    tokens: Vec<u32>,
    class: Class,
}

/// A request that may have drafts in the next step.
struct Candidate {
    id: u64,
    drafting: Box<Drafting>,
    /// Tokens that are already being sampled. Predictions of them are no drafts.
    skipped: usize,
    uses_drafter: bool,
}

impl Drafting {
    /// Counts which predictions have come true.
    fn observe(&mut self, known: &[u32], lengths: &mut DraftLengths) {
        for Prediction { start, tokens, class } in mem::take(&mut self.latest) {
            let actual = known.get(start..).unwrap_or(&[]);
            for (index, (token, actual)) in tokens.iter().zip(actual).enumerate() {
                lengths.observe(&mut self.acceptance, class.after(index), token == actual);
                if token != actual {
                    break;
                }
            }
        }
    }

    /// Looks up at most `max` tokens after the known ones.
    fn look_up(&mut self, known: &[u32], max: usize) {
        self.latest.extend(self.lookup.find(known).map(|found| {
            let end = (found.end + max).min(known.len());
            Prediction {
                start: known.len(),
                tokens: known[found.end..end].to_vec(),
                class: Class::lookup(found.length),
            }
        }));
    }
}

impl Candidate {
    /// The prediction of lookup.
    fn found(&self) -> Option<&Prediction> {
        self.drafting.latest.first()
    }

    /// The drafts that the request offers, of a maximum of `max`.
    fn offer(&mut self, max: usize) -> Offer<'_> {
        let (mut class, mut skipped, mut available) = (Class::drafter(), 0, max);
        if !self.uses_drafter {
            skipped = self.skipped;
            available = self.found().map_or(0, |found| found.tokens.len().saturating_sub(skipped)).min(max);
            class = self.found().map_or(Class::lookup(0), |found| found.class);
        }
        Offer { acceptance: &mut self.drafting.acceptance, class, skipped, available }
    }
}

impl Worker {
    /// Proposes drafts for the rows of an applied step.
    pub(super) fn propose(&mut self, plan: &StepPlan<PoolStep>) {
        if self.drafts == 0 {
            return;
        }
        let (mut candidates, rows) = self.candidates(plan);
        let mut offers: Vec<Offer> = candidates.iter_mut().map(|candidate| candidate.offer(self.drafts)).collect();
        let mut counts = match self.adaptive_drafts {
            true if self.draft_rates.rests(offers.len()) => vec![0; offers.len()],
            true => self.lengths.choose(rows, offers.len(), &mut offers),
            false => offers.iter().map(|offer| offer.available).collect(),
        };
        tracing::trace!(?counts, rows, "drafts of the next step");
        self.draft(plan, &mut candidates, &mut counts);
        for (Candidate { id, drafting, skipped, uses_drafter }, count) in candidates.into_iter().zip(counts) {
            let Some(running) = self.running.get_mut(&id) else { continue };
            let used = if uses_drafter { drafting.latest.last() } else { drafting.latest.first() };
            let drafts = used.filter(|used| count > 0 && (used.class == Class::drafter()) == uses_drafter);
            let drafts = drafts.map_or(&[][..], |used| &used.tokens[..used.tokens.len().min(skipped + count)]);
            self.scheduler.propose(id, drafts);
            running.drafting = Some(drafting);
        }
    }

    /// The requests that sample in a step, with the predictions of lookup, and the number of tokens that the next step
    /// computes for them.
    fn candidates(&mut self, plan: &StepPlan<PoolStep>) -> (Vec<Candidate>, usize) {
        let Worker { running, scheduler, lengths, drafts, drafter, prompt_lookup, planted_acceptance, .. } = self;
        let (mut candidates, mut rows) = (Vec::with_capacity(plan.rows.len()), 0);
        for row in plan.rows.iter().filter(|row| row.draws > 0) {
            let (Some(running), Some(known)) = (running.get_mut(&row.id), scheduler.tokens(row.id)) else { continue };
            rows += scheduler.remaining(row.id).max(1);
            let Some(mut drafting) = running.drafting.take() else { continue };
            drafting.observe(known, lengths);
            let skipped = scheduler.pending(row.id);
            match planted_acceptance {
                None if !*prompt_lookup => {}
                None => drafting.look_up(known, skipped + *drafts),
                Some(_) if drafter.is_some() => {}
                Some(_) => {
                    let (start, tokens) = (known.len(), known[known.len() - 1..].repeat(skipped + *drafts));
                    drafting.latest.push(Prediction { start, tokens, class: Class::lookup(0) });
                }
            }
            if let Some(found) = drafting.latest.first_mut() {
                found.tokens.truncate(running.count_valid(&found.tokens));
            }
            let found = drafting.latest.first().filter(|found| found.tokens.len() > skipped);
            let uses_drafter = drafter.is_some()
                && found.is_none_or(|found| lengths.is_better(&drafting.acceptance, Class::drafter(), found.class));
            candidates.push(Candidate { id: row.id, drafting, skipped, uses_drafter });
        }
        (candidates, rows)
    }

    /// Runs the drafter for the chosen numbers of drafts.
    fn draft(&mut self, plan: &StepPlan<PoolStep>, candidates: &mut [Candidate], counts: &mut [usize]) {
        if self.drafter.is_none() {
            return;
        }
        // After a step that overlaps, there are no drafts: the next step waits for its result, and has them.
        let deferred = mem::take(&mut self.deferred_drafts);
        let mut wanted = Vec::with_capacity(counts.len());
        for (candidate, count) in candidates.iter().zip(&mut *counts) {
            *count =
                (*count).max(deferred.get(&candidate.id).copied().unwrap_or(0) * usize::from(candidate.uses_drafter));
            wanted.push((candidate.id, *count * usize::from(candidate.uses_drafter)));
        }
        let depth = wanted.iter().map(|(_, count)| *count).max().unwrap_or(0);
        if self.has_caught_up && depth > 0 {
            self.deferred_drafts = wanted.iter().copied().filter(|(_, count)| *count > 0).collect();
        }
        let started = Instant::now();
        let mut drafted: HashMap<u64, Vec<u32>> = self.draft_with_model(plan, &wanted);
        if depth > 0 && !self.has_caught_up {
            let (proposals, seconds) = (&mut self.lengths.proposals, started.elapsed().as_secs_f64());
            let expected = if proposals.is_known(depth) { proposals.estimate(depth) } else { None };
            proposals.record(depth, seconds);
            self.drafting = Some(DraftingTime { seconds, expected });
        }
        for candidate in candidates.iter_mut() {
            let (Some(tokens), Some(running)) = (drafted.remove(&candidate.id), self.running.get(&candidate.id)) else {
                continue;
            };
            let Some(start) = self.scheduler.tokens(candidate.id).map(<[u32]>::len) else { continue };
            let mut tokens = tokens;
            tokens.truncate(running.count_valid(&tokens));
            candidate.drafting.latest.push(Prediction { start, tokens, class: Class::drafter() });
        }
    }

    /// Records the time since the previous result, if no prompt was computed in it. `results`: of the step.
    pub(super) fn record_time(&mut self, plan: &StepPlan<PoolStep>, results: &[RowResult]) {
        let now = Instant::now();
        let before = self.latest_result.replace(now);
        let drafting = mem::take(&mut self.drafting);
        let is_decoding = matches!(plan.step, PoolStep::Recorded) && plan.rows.iter().all(|row| row.draws > 0);
        if let (Some(before), true, true) = (before, is_decoding, self.drafts > 0) {
            let (steps, rows, batch) = (&mut self.lengths.steps, plan.tokens.len(), plan.rows.len());
            let seconds = ((now - before).as_secs_f64() - drafting.map_or(0.0, |drafting| drafting.seconds)).max(0.0);
            // The first step of a size may compile kernels or allocate memory, and so may a drafter's passes.
            let expected = if steps.is_known(rows) { steps.estimate(rows) } else { None };
            steps.record(rows, seconds);
            let drafting = drafting.map_or(Some(0.0), |drafting| drafting.judged());
            if let (Some(expected), Some(drafting)) = (expected, drafting) {
                let seconds = seconds.min(MAX_INTERRUPTED * expected) + drafting;
                let tokens = results.iter().map(|result| result.tokens.len()).sum();
                tracing::trace!(batch, rows, tokens, seconds, drafting, "a step is judged");
                self.draft_rates.record(&StepRate { batch, tokens, rows, seconds });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes that are recorded or compiled on demand do not end drafts.
    #[test]
    fn slow_passes_are_judged_by_their_usual_time() {
        let judged = |seconds, expected| DraftingTime { seconds, expected }.judged();
        assert_eq!(judged(9.0, None), None);
        assert_eq!(judged(0.002, Some(0.003)), Some(0.002));
        assert_eq!(judged(0.2, Some(0.002)), Some(MAX_INTERRUPTED * 0.002));
    }
}
