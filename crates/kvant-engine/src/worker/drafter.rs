//! The calls of the model's drafter.
//!
//! A drafter with keys and values of its own must see every token that the model computes. After each step it therefore
//! *catches up*: it computes its keys and values at the step's positions. If drafts are wanted, it goes on from there,
//! and the next step waits for them. Otherwise the next step may start before the result of this one is known; the
//! drafter then catches up when the step starts, with the sampled tokens on the device.
//!
//! A draft is a guess. Whatever happens here, texts are those of the model.

use std::{collections::HashMap, ops::Range};

use kvant::Tensor;
use kvant_models::{Draft, Result, Sampling, Taps};

use super::state::Worker;
use crate::{
    Failure,
    scheduler::{PlanRow, PoolStep, StepPlan},
};

/// The rows of a request that the drafter reads.
struct DraftRows {
    position: usize,
    /// Rows of the hidden states.
    rows: Range<usize>,
    /// The token after each row.
    next: Vec<u32>,
    /// The index of the last token of `next` among the step's draws, if it is not known.
    fed: Option<usize>,
    drafts: usize,
    sampling: Sampling,
}

impl Worker {
    /// Lets the drafter catch up with an applied step, unless it has when the step started, and returns its drafts.
    /// `wanted` has the maximum drafts of the requests with draws. Requests for which the drafter fails are ended.
    pub(super) fn draft_with_model(
        &mut self,
        plan: &StepPlan<PoolStep>,
        wanted: &[(u64, usize)],
    ) -> HashMap<u64, Vec<u32>> {
        if self.drafter.is_none() {
            return HashMap::new();
        }
        if !wanted.is_empty() {
            self.drafter_rests = wanted.iter().all(|(_, drafts)| *drafts == 0);
        }
        if self.has_caught_up {
            return HashMap::new();
        }
        let rows = self.known_rows(plan, &wanted.iter().copied().collect());
        self.run_drafter(rows, None)
    }

    /// Lets the drafter catch up with a step that has been started. `draws` has the indices of the tokens of each row
    /// in `drawn`. Steps with drafts are left to [`Worker::draft_with_model`], because the accepted ones are not known
    /// yet.
    pub(super) fn catch_up(&mut self, plan: &StepPlan<PoolStep>, draws: &[Range<usize>], drawn: &Tensor) {
        if self.drafter.is_some() && plan.rows.iter().all(|row| row.draws <= 1) {
            let rows = self.started_rows(plan, draws);
            self.run_drafter(rows, Some(drawn));
        }
    }

    /// The rows of a step whose tokens are known.
    fn known_rows(&self, plan: &StepPlan<PoolStep>, wanted: &HashMap<u64, usize>) -> HashMap<u64, DraftRows> {
        let mut found = HashMap::new();
        for (index, row) in plan.rows.iter().enumerate() {
            let known = self.scheduler.tokens(row.id).unwrap_or(&[]);
            // The token after the last row must be known. Rejected drafts have no such token.
            let count = row.tokens.len().min(known.len().saturating_sub(row.position + 1));
            let next = known.iter().skip(row.position + 1).take(count).copied().collect();
            let drafts = wanted.get(&row.id).copied().unwrap_or(0).min(self.scheduler.draft_room(row.id));
            // Tokens that are computed again, because states were rolled back, must be kept by a step without drafts.
            let is_behind = self.scheduler.remaining(row.id) > 1 + self.drafts;
            let drafts = if row.draws > 0 && !is_behind { drafts } else { 0 };
            if let Some(rows) = self.draft_rows(plan, index, next, drafts) {
                found.insert(row.id, rows);
            }
        }
        found
    }

    /// The rows of a step whose draws are still on the device.
    fn started_rows(&self, plan: &StepPlan<PoolStep>, draws: &[Range<usize>]) -> HashMap<u64, DraftRows> {
        let mut found = HashMap::new();
        for (index, (row, draws)) in plan.rows.iter().zip(draws).enumerate() {
            let (fed, last) = match draws.is_empty() {
                true => {
                    (None, self.scheduler.tokens(row.id).and_then(|known| known.get(row.position + row.tokens.len())))
                }
                false => (Some(draws.start), Some(&0)),
            };
            let within = row.tokens.start + 1..row.tokens.end.max(row.tokens.start + 1);
            let next: Vec<u32> = plan.tokens[within].iter().chain(last).copied().collect();
            let are_known = !next.contains(&StepPlan::<PoolStep>::SAMPLED);
            if let Some(rows) = self.draft_rows(plan, index, next, 0).filter(|_| are_known) {
                found.insert(row.id, DraftRows { fed, ..rows });
            }
        }
        found
    }

    /// The first rows of a row of the plan, as many as tokens follow them.
    fn draft_rows(&self, plan: &StepPlan<PoolStep>, index: usize, next: Vec<u32>, drafts: usize) -> Option<DraftRows> {
        let row = &plan.rows[index];
        let sampling = self.running.get(&row.id)?.sampling().clone();
        let (position, fed) = (row.position, None);
        let tokens = row.tokens.start..row.tokens.start + next.len();
        if self.model.drafter()?.taps() != Taps::Final {
            return (!next.is_empty()).then_some(DraftRows { position, rows: tokens, next, fed, drafts, sampling });
        }
        // Only the last row, whose place is that of its logits.
        let last = tokens.end.checked_sub(1).filter(|last| drafts > 0 && row.logits.contains(last))?;
        let at = match plan.step {
            PoolStep::Recorded => last,
            PoolStep::Mixed(_) => {
                plan.rows[..index].iter().map(|row| row.logits.len()).sum::<usize>() + last - row.logits.start
            }
        };
        let (position, next) = (position + next.len() - 1, next[next.len() - 1..].to_vec());
        Some(DraftRows { position, rows: at..at + 1, next, fed, drafts, sampling })
    }

    /// Runs the drafter over rows of requests. Returns the drafts of those for which there are any.
    fn run_drafter(&mut self, rows: HashMap<u64, DraftRows>, drawn: Option<&Tensor>) -> HashMap<u64, Vec<u32>> {
        match self.try_drafter(&rows, drawn) {
            Ok(drafts) => drafts,
            Err(error) => {
                let reason = format!("the drafter has failed: {error}");
                tracing::error!(%error, requests = rows.len(), "the drafter has failed");
                rows.into_keys().for_each(|id| self.fail(id, Failure::Request(reason.clone())));
                HashMap::new()
            }
        }
    }

    fn try_drafter(
        &mut self,
        rows: &HashMap<u64, DraftRows>,
        drawn: Option<&Tensor>,
    ) -> Result<HashMap<u64, Vec<u32>>> {
        #[cfg(feature = "internals")]
        if std::mem::take(&mut self.is_drafter_failing) {
            return Err(super::state::no_decoder());
        }
        let Worker { drafter: Some(drafter), scheduler, .. } = self else { return Ok(HashMap::new()) };
        let (mut ids, mut batch) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for (id, sequence) in scheduler.sequences_mut() {
            let Some(of) = rows.get(&id) else { continue };
            let DraftRows { position, rows, next, fed, drafts, sampling } = of;
            let (position, rows, fed, drafts) = (*position, rows.clone(), *fed, *drafts);
            batch.push(Draft { sequence, position, rows, next, fed, drafts, sampling });
            ids.push(id);
        }
        let drafts = drafter.propose(&mut batch, drawn)?;
        Ok(ids.into_iter().zip(drafts).filter(|(_, drafts)| !drafts.is_empty()).collect())
    }

    /// Whether the drafter is to propose drafts after a step, so that the next one waits for them.
    pub(super) fn waits_for_drafter(&self, rows: &[PlanRow]) -> bool {
        self.drafter.is_some() && !self.drafter_rests && rows.iter().any(|row| row.draws > 0)
    }
}
