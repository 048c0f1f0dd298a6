//! Runs the model over a batch, samples tokens, and verifies drafts.
//!
//! A row with drafts samples after its last known token and after each draft. Each of these draws equals the draw of a
//! step with a single token: it has the same logits, the same adjustments, and the same random number, which depends
//! only on seed and position. A draw counts if all drafts before it match the sampled tokens. Texts with and without
//! drafts are therefore equal, except for rounding.

use kvant::{DType, Tensor, ops};
use kvant_models::{DeviceSampler, DraftDecoder, Result, Sampling};

use super::{
    running::{NoToken, Running},
    state::{Worker, no_decoder},
};
use crate::{
    Failure, FinishReason,
    lock::lock,
    scheduler::{PlanRow, PoolStep, RowResult, StepPlan},
    text::Output,
};

/// The result of a pass over a batch.
struct Passed {
    /// The tokens that have logits, in order.
    rows: Vec<usize>,
    logits: Tensor,
    /// The tokens sampled after each of `rows`, if the pass samples for all requests.
    drawn: Option<Vec<u32>>,
}

/// A sampled token.
pub(super) struct DrawnToken {
    /// The token, or the reason why none can be sampled.
    pub token: std::result::Result<u32, NoToken>,
    /// The logits before any adjustment, and the number of alternatives, if log probabilities are requested.
    pub logprobs: Option<(Vec<f32>, usize)>,
}

/// The draws of a step.
struct Draws<'a> {
    logits: &'a Tensor,
    of_pass: Option<&'a [u32]>,
    /// The draws that the device still has to make.
    queue: Vec<Draw>,
    /// The tokens of each row of the plan.
    rows: Vec<Vec<DrawnToken>>,
}

/// A draw on the device.
struct Draw {
    /// The index of the row in the plan, and of the draw in the row.
    of: (usize, usize),
    /// The row of the logits.
    row: usize,
    sampling: Sampling,
    counter: u32,
}

impl Worker {
    /// Runs the model over a batch and samples tokens.
    pub(super) fn compute(&mut self, plan: &StepPlan<PoolStep>) -> Result<Vec<RowResult>> {
        let passed = self.pass(plan)?;
        let drawn = self.draw(plan, &passed)?;
        Ok(self.take_all(plan, drawn))
    }

    /// Takes the tokens of a step, with the draws of each row.
    pub(super) fn take_all(&mut self, plan: &StepPlan<PoolStep>, drawn: Vec<Vec<DrawnToken>>) -> Vec<RowResult> {
        let mut results = Vec::with_capacity(plan.rows.len());
        let mut computed = 0;
        for (row, mut drawn) in plan.rows.iter().zip(drawn) {
            if let Some(share) = self.planted_acceptance {
                plant(share, row, &mut drawn, drafts(plan, row));
            }
            computed += row.tokens.len() - row.draws;
            // The token of a request that has ended in the meantime is dropped.
            if self.running.contains_key(&row.id) {
                results.extend(self.take(row, drawn, drafts(plan, row)));
            }
        }
        let generated: usize = results.iter().map(|result| result.tokens.len()).sum();
        let mut stats = lock(&self.shared.stats);
        stats.prompt_tokens += computed as u64;
        stats.generated_tokens += generated as u64;
        results
    }

    /// Runs the model. Replays a recorded pass if each request has few tokens.
    fn pass(&mut self, plan: &StepPlan<PoolStep>) -> Result<Passed> {
        let has_hidden = plan.rows.iter().any(|row| self.embeds(row));
        if has_hidden && matches!(plan.step, PoolStep::Mixed(_)) {
            let (rows, logits) = self.pass_with_hidden(plan)?;
            return Ok(Passed { rows, logits, drawn: None });
        }
        let step = match (&plan.step, self.scheduler.storage_mut().decoder()) {
            (PoolStep::Mixed(step), _) => step,
            (PoolStep::Recorded, Some(decoder)) => {
                // The pass samples after all tokens, or after none if the host adjusts the logits of any request.
                let nobody = Sampling::default();
                let plain = |row: &PlanRow| self.running.get(&row.id).map_or(Some(&nobody), Running::plain_sampling);
                let plain = plan.rows.iter().flat_map(|row| row.tokens.clone().map(move |_| plain(row)));
                let draws: Option<Vec<&Sampling>> = plain.collect();
                let submission = decoder.run(&plan.tokens, draws.as_deref().unwrap_or(&[]))?;
                let drawn = if draws.is_some() { Some(decoder.drawn()?.to_vec()) } else { None };
                // Includes a failure that another thread has received.
                submission.wait()?;
                lock(&self.shared.stats).recorded_steps += 1;
                let rows = (0..plan.tokens.len()).collect();
                let hidden = if has_hidden { Some(decoder.hidden()?) } else { None };
                let logits = decoder.logits()?;
                let drawn = drawn.transpose()?;
                if let Some(hidden) = hidden {
                    for row in &plan.rows {
                        if self.embeds(row) {
                            self.pool_hidden(row, &hidden.rows(row.logits.clone())?)?;
                        }
                    }
                }
                return Ok(Passed { rows, logits, drawn });
            }
            (PoolStep::Recorded, None) => return Err(no_decoder()),
        };
        #[cfg(feature = "internals")]
        if let Some(rank) = self.failing_rank {
            // The rank's kernels report invalid positions.
            let positions = step.positions().on_rank(rank)?;
            positions.write(&vec![u32::MAX; positions.elements()])?;
        }
        let rows: Vec<usize> = plan.rows.iter().flat_map(|row| row.logits.clone()).collect();
        let logits = Tensor::zeros(self.model.device(), DType::F32, &[rows.len(), self.model.vocab_size()])?;
        let (pool, states) = (self.scheduler.storage().pool(), self.drafter.as_ref().map(DraftDecoder::states));
        self.model.start_with(pool, step, &plan.tokens, None, (&rows, &logits), states)?.wait()?;
        Ok(Passed { rows, logits, drawn: None })
    }

    /// Accepts the tokens of a row up to the first one that differs from its draft. Returns `None` if the request has
    /// failed.
    fn take(&mut self, row: &PlanRow, drawn: Vec<DrawnToken>, drafts: &[u32]) -> Option<RowResult> {
        let mut result = RowResult { id: row.id, tokens: Vec::new(), is_last: false };
        let before = self.pending_outputs.len();
        for (index, DrawnToken { token, logprobs }) in drawn.into_iter().enumerate() {
            match token {
                Ok(token) => {
                    result.tokens.push(token);
                    result.is_last = self.accept(row.id, token, logprobs);
                    if result.is_last || drafts.get(index) != Some(&token) {
                        break;
                    }
                }
                Err(NoToken::End) => {
                    if let Some(running) = self.running.get_mut(&row.id) {
                        running.end = Some(FinishReason::Grammar);
                    }
                    result.is_last = true;
                }
                Err(NoToken::Failed(failure)) => {
                    self.fail(row.id, failure);
                    return None;
                }
            }
        }
        if !drafts.is_empty() {
            let accepted = result.tokens.iter().zip(drafts).take_while(|(token, draft)| token == draft).count();
            lock(&self.shared.stats).drafts.add(drafts.len(), accepted);
            // Before the tokens: the last one ends the text.
            let (accepted, rejected) = (accepted, drafts.len() - accepted);
            self.pending_outputs.insert(before, (row.id, Output::Drafts { accepted, rejected }));
        }
        Some(result)
    }

    /// Samples tokens for each row whose tokens are all computed.
    fn draw(&mut self, plan: &StepPlan<PoolStep>, passed: &Passed) -> Result<Vec<Vec<DrawnToken>>> {
        let Passed { rows, logits, drawn } = passed;
        let mut draws = Draws::new(logits, drawn.as_deref());
        for row in &plan.rows {
            let first = rows.partition_point(|&token| token < row.logits.start);
            let end = first + row.logits.len();
            self.score_prompt(row, first, logits)?;
            let tokens = match self.running.get_mut(&row.id) {
                Some(running) if row.draws > 0 => {
                    let position = row.position + row.tokens.len() - row.draws + 1;
                    draws.add(running, drafts(plan, row), end - row.draws, position)?
                }
                _ => Vec::new(),
            };
            draws.rows.push(tokens);
        }
        draws.finish(&self.device_sampler)
    }
}

impl<'a> Draws<'a> {
    /// `logits`: of all draws and perhaps more rows. `of_pass`: the tokens sampled after each row of logits, if they
    /// are known.
    fn new(logits: &'a Tensor, of_pass: Option<&'a [u32]>) -> Draws<'a> {
        Draws { logits, of_pass, queue: Vec::new(), rows: Vec::new() }
    }

    /// Prepares the draws of a request: after its last known token, and after each draft that its grammar allows.
    /// `first`: the first row of logits. `position`: of the first sampled token.
    fn add(&mut self, running: &mut Running, drafts: &[u32], first: usize, position: usize) -> Result<Vec<DrawnToken>> {
        let mut tokens = Vec::with_capacity(1 + drafts.len());
        let mut ahead = None;
        for index in 0..=drafts.len() {
            let row = first + index;
            let mut logprobs = None;
            if running.changes_logits() || running.logprobs.is_some() {
                let of_draw = self.logits.rows(row..row + 1)?;
                let mut numbers = of_draw.to_f32()?;
                logprobs = running.logprobs.map(|top| (numbers.clone(), top));
                if running.changes_logits() {
                    let adjusted = match index.checked_sub(1) {
                        None => running.adjust(&mut numbers),
                        Some(before) => {
                            let state = ahead.get_or_insert_with(|| running.state());
                            running.adjust_after(state, drafts[before], &mut numbers)
                        }
                    };
                    match adjusted {
                        Ok(()) => of_draw.write(&numbers)?,
                        Err(reason) if index == 0 => {
                            tokens.push(DrawnToken { token: Err(reason), logprobs: None });
                            break;
                        }
                        // If the text gets here, the next step finds the reason.
                        Err(_) => break,
                    }
                }
            }
            let token = match self.of_pass.and_then(|drawn| drawn.get(row)) {
                Some(&token) if token != u32::MAX => Ok(token),
                Some(_) => Err(not_numbers()),
                None => {
                    let counter = u32::try_from(position + index).unwrap_or(u32::MAX);
                    let of = (self.rows.len(), index);
                    self.queue.push(Draw { of, row, sampling: running.sampling().clone(), counter });
                    Err(not_numbers())
                }
            };
            tokens.push(DrawnToken { token, logprobs });
        }
        Ok(tokens)
    }

    /// Samples the tokens that are not known yet.
    fn finish(self, sampler: &DeviceSampler) -> Result<Vec<Vec<DrawnToken>>> {
        let Draws { logits, queue, mut rows, .. } = self;
        let queued = queue.iter().map(|draw| draw.row);
        let [all, vocab] = logits.shape()[..] else { return Err(no_decoder()) };
        let only = match queued.clone().eq(0..all) {
            true => logits.clone(),
            false => gathered(logits, queued, vocab)?,
        };
        let how: Vec<(&Sampling, u32)> = queue.iter().map(|draw| (&draw.sampling, draw.counter)).collect();
        for (Draw { of: (row, index), .. }, token) in queue.iter().zip(sampler.draw(&only, &how)?) {
            rows[*row][*index].token = token.ok_or_else(not_numbers);
        }
        Ok(rows)
    }
}

/// The drafts of a row, which are its last tokens.
fn drafts<'p>(plan: &'p StepPlan<PoolStep>, row: &PlanRow) -> &'p [u32] {
    &plan.tokens[row.tokens.end - row.draws.saturating_sub(1)..row.tokens.end]
}

/// Replaces sampled tokens, so that each draft is accepted with probability `share` after accepted ones.
fn plant(share: f32, row: &PlanRow, drawn: &mut [DrawnToken], drafts: &[u32]) {
    for (position, (drawn, &draft)) in (row.position..).zip(drawn.iter_mut().zip(drafts)) {
        let bits = ops::Sample::noise(row.id, u32::try_from(position).unwrap_or(u32::MAX), 0);
        let is_accepted = f64::from(bits) < f64::from(share) * 2f64.powi(32);
        // Another small id.
        drawn.token = Ok(if is_accepted { draft } else { u32::from(draft == 0) });
    }
}

pub(super) fn not_numbers() -> NoToken {
    let reason = "the logits are not numbers: activations may overflow their dtype";
    NoToken::Failed(Failure::Request(reason.to_string()))
}

/// Gathers rows of logits.
fn gathered(logits: &Tensor, rows: impl Iterator<Item = usize>, vocab: usize) -> Result<Tensor> {
    let mut numbers = Vec::new();
    for row in rows {
        numbers.extend(logits.rows(row..row + 1)?.to_f32()?);
    }
    Ok(Tensor::from_slice(logits.device(), &numbers, &[numbers.len() / vocab.max(1), vocab])?)
}

#[cfg(test)]
mod tests;
