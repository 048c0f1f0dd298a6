//! Overlaps steps with the host's work: a step starts before the result of the previous one is known.
//!
//! Sampled tokens stay on the device, where the next step reads them. They are copied to the host while that step runs,
//! so that stop ids and lengths are checked one step late. A request that has ended by then has one superfluous token
//! in the next step, whose result is dropped.
//!
//! A step can overlap if the device samples all its tokens: no grammar, penalties or log probabilities. Any other step
//! waits for the previous result. Drafts follow the last known token. The step in flight samples the token at the
//! first draft's position, so that draft is skipped. No step starts before the result of a step with drafts is known,
//! because the next positions depend on the number of accepted drafts.

use kvant::{DType, Tensor};
use kvant_models::{DeviceTokens, DraftDecoder, Error, Result, Sampling};

use super::{
    draw::{DrawnToken, not_numbers},
    running::Running,
    state::{InFlightStep, Worker, no_decoder},
};
use crate::{
    lock::lock,
    scheduler::{PoolStep, StepPlan, StorageError},
};

impl Worker {
    /// Whether the device samples all tokens of a step.
    pub(super) fn can_overlap(&self, plan: &StepPlan<PoolStep>) -> bool {
        let is_plain = |running: &Running| running.logprobs.is_none() && running.plain_sampling().is_some();
        self.overlap
            && !self.waits_for_drafter(&plan.rows)
            && plan.rows.iter().all(|row| {
                row.logits.len() == row.draws && (row.draws == 0 || self.running.get(&row.id).is_none_or(is_plain))
            })
    }

    /// Starts a step. `before` is the step whose result is not known yet.
    pub(super) fn launch(&mut self, plan: StepPlan<PoolStep>, before: Option<&InFlightStep>) -> Result<InFlightStep> {
        let places = places(&plan, before)?;
        let fed = before.map(|before| DeviceTokens { drawn: &before.drawn, places: &places });
        // A recorded pass draws a token after each token of the batch. Draws for which no request asks are ignored, and
        // have default sampling. A request may also have ended since the step was planned.
        let nobody = Sampling::default();
        let is_recorded = matches!(plan.step, PoolStep::Recorded);
        let (mut draws, mut samplings) = (Vec::with_capacity(plan.rows.len()), Vec::with_capacity(plan.tokens.len()));
        for row in &plan.rows {
            let sampling = self.running.get(&row.id).map_or(&nobody, |running| running.sampling());
            let before = if is_recorded { row.tokens.len() - row.draws } else { 0 };
            samplings.extend(std::iter::repeat_n(&nobody, before).chain(std::iter::repeat_n(sampling, row.draws)));
            draws.push(samplings.len() - row.draws..samplings.len());
        }
        let (drawn, submissions) = match (&plan.step, self.scheduler.storage_mut().decoder()) {
            (PoolStep::Recorded, Some(decoder)) => {
                let submission = decoder.run_fed(&plan.tokens, fed, &samplings)?;
                lock(&self.shared.stats).recorded_steps += 1;
                (decoder.drawn()?, vec![submission])
            }
            (PoolStep::Mixed(step), _) => {
                let rows: Vec<usize> = plan.rows.iter().flat_map(|row| row.logits.clone()).collect();
                let logits = Tensor::zeros(self.model.device(), DType::F32, &[rows.len(), self.model.vocab_size()])?;
                let pool = self.scheduler.storage().pool();
                let states = self.drafter.as_ref().map(DraftDecoder::states);
                let pass = self.model.start_with(pool, step, &plan.tokens, fed, (&rows, &logits), states)?;
                // The counter of a draw is the position of the sampled token.
                let ends = plan.rows.iter().map(|row| row.position + row.tokens.len());
                let positions = ends.zip(&plan.rows).flat_map(|(end, row)| end + 1 - row.draws..end + 1);
                let counters = positions.map(|position| u32::try_from(position).unwrap_or(u32::MAX));
                let how: Vec<(&Sampling, u32)> = samplings.into_iter().zip(counters).collect();
                let (draw, drawn) = self.device_sampler.start(&logits, &how)?;
                (drawn, vec![pass, draw])
            }
            (PoolStep::Recorded, _) => return Err(no_decoder()),
        };
        lock(&self.shared.stats).overlapped_steps += u64::from(before.is_some());
        self.catch_up(&plan, &draws, &drawn);
        Ok(InFlightStep { plan, draws, readback: drawn.read_back()?, drawn, submissions })
    }

    /// Waits for the result of a step and reports it to the scheduler.
    pub(super) fn finish(&mut self, step: InFlightStep) -> std::result::Result<(), StorageError> {
        let InFlightStep { plan, draws, readback, submissions, .. } = step;
        for submission in submissions {
            submission.wait()?;
        }
        let tokens = readback.to_vec::<u32>()?;
        let drawn = draws.into_iter().map(|draws| {
            let tokens = tokens.get(draws).unwrap_or(&[]).iter();
            let tokens = tokens.map(|&token| if token == u32::MAX { Err(not_numbers()) } else { Ok(token) });
            tokens.map(|token| DrawnToken { token, logprobs: None }).collect()
        });
        let results = self.take_all(&plan, drawn.collect());
        self.has_caught_up = plan.rows.iter().all(|row| row.draws <= 1);
        self.record_time(&plan, &results);
        self.scheduler.apply(results)?;
        self.propose(&plan);
        self.end_scheduled();
        Ok(())
    }

    /// Replaces the placeholders of a plan by tokens that are known now.
    pub(super) fn fill_in(&self, plan: &mut StepPlan<PoolStep>) {
        let StepPlan { tokens, rows, .. } = plan;
        for row in rows.iter() {
            let known = self.scheduler.tokens(row.id).unwrap_or(&[]);
            for (position, token) in (row.position..).zip(&mut tokens[row.tokens.clone()]) {
                if *token == StepPlan::<PoolStep>::SAMPLED {
                    // The request has ended: any token is valid.
                    *token = known.get(position).copied().unwrap_or(0);
                }
            }
        }
    }
}

/// The placeholders of a plan, each with the index of its token among the tokens sampled by the previous step.
fn places(plan: &StepPlan<PoolStep>, before: Option<&InFlightStep>) -> Result<Vec<(usize, usize)>> {
    let rows = before.map_or(&[][..], |before| &before.plan.rows);
    let (mut places, mut next) = (Vec::new(), 0);
    for row in &plan.rows {
        for index in row.tokens.clone().filter(|&index| plan.tokens[index] == StepPlan::<PoolStep>::SAMPLED) {
            // Both steps are in the order of the scheduler, unless a request of higher priority arrived in between.
            let after = rows.iter().skip(next).position(|of| of.id == row.id).map(|at| next + at);
            let at = after.or_else(|| rows.iter().position(|of| of.id == row.id));
            let drawn = at.and_then(|at| before?.draws.get(at).cloned()).filter(|draws| draws.len() == 1);
            let (Some(at), Some(drawn)) = (at, drawn) else {
                let (expected, got) = ("a token that the step before draws".to_string(), format!("{row:?}"));
                return Err(Error::Argument { arg: "plan", expected, got });
            };
            places.push((index, drawn.start));
            next = at + 1;
        }
    }
    Ok(places)
}
