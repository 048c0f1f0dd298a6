//! Computes embeddings: pooled hidden states of prompts.

use kvant::Tensor;
use kvant_models::{DraftDecoder, Result};

use super::state::{Worker, no_decoder};
use crate::{
    Failure,
    scheduler::{PlanRow, PoolStep, StepPlan},
    text::Output,
};

impl Worker {
    /// Whether hidden states of the row's tokens are needed.
    pub(super) fn embeds(&self, row: &PlanRow) -> bool {
        !row.logits.is_empty() && self.running.get(&row.id).is_some_and(|running| running.pooled.is_some())
    }

    /// Runs a step in which some rows need hidden states and others logits. Returns the tokens that have logits, and
    /// their logits.
    pub(super) fn pass_with_hidden(&mut self, plan: &StepPlan<PoolStep>) -> Result<(Vec<usize>, Tensor)> {
        let PoolStep::Mixed(step) = &plan.step else { return Err(no_decoder()) };
        let rows: Vec<usize> = plan.rows.iter().flat_map(|row| row.logits.clone()).collect();
        let (pool, states) = (self.scheduler.storage().pool(), self.drafter.as_ref().map(DraftDecoder::states));
        let hidden = self.model.hidden_with(pool, step, &plan.tokens, &rows, states)?;
        let (mut of_logits, mut parts, mut at) = (Vec::new(), Vec::new(), 0);
        for row in &plan.rows {
            let part = at..at + row.logits.len();
            at = part.end;
            if self.embeds(row) {
                self.pool_hidden(row, &hidden.rows(part)?)?;
            } else {
                of_logits.extend(row.logits.clone());
                parts.push(hidden.rows(part)?);
            }
        }
        let out = Tensor::zeros(hidden.device(), hidden.dtype(), &[of_logits.len(), hidden.shape()[1]])?;
        let mut enc = hidden.device().encoder()?;
        let mut at = 0;
        for part in parts.iter().filter(|part| part.shape()[0] > 0) {
            kvant::ops::copy(&mut enc, part, &out.rows(at..at + part.shape()[0])?)?;
            at += part.shape()[0];
        }
        enc.commit()?.wait()?;
        Ok((of_logits, self.model.logits_of(&out)?))
    }

    /// Adds the hidden states of a row's tokens. The last token of the prompt completes the embedding.
    pub(super) fn pool_hidden(&mut self, row: &PlanRow, hidden: &Tensor) -> Result<()> {
        let width = hidden.shape()[1];
        let numbers = hidden.to_f32()?;
        let Some(running) = self.running.get_mut(&row.id) else { return Ok(()) };
        let Some(pooled) = running.pooled.as_mut() else { return Ok(()) };
        numbers.chunks(width.max(1)).for_each(|hidden| pooled.add(hidden));
        if row.position + row.tokens.len() < running.prompt_len {
            return Ok(());
        }
        let embedding = pooled.mean();
        if embedding.iter().all(|number| number.is_finite()) {
            self.pending_outputs.push((row.id, Output::Embedding(embedding)));
        } else {
            let reason = "the hidden states are not numbers: activations may overflow their dtype";
            self.fail(row.id, Failure::Request(reason.to_string()));
        }
        Ok(())
    }
}
