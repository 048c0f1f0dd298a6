//! What goes into the scheduler, and what comes out.

use std::{ops::Range, sync::Arc};

/// Options of a [`Scheduler`](super::Scheduler).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SchedulerOptions {
    /// Requests that run at once.
    pub sequences: usize,
    /// Tokens of a step; more than `sequences`.
    pub step_tokens: usize,
}

impl SchedulerOptions {
    /// `step_tokens` is raised to one more than `sequences`, so that prompts always make progress.
    pub fn new(sequences: usize, step_tokens: usize) -> SchedulerOptions {
        let sequences = sequences.max(1);
        SchedulerOptions { sequences, step_tokens: step_tokens.max(sequences.saturating_add(1)) }
    }
}

/// A request, as the scheduler sees it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NewTask {
    /// Its number. No two requests have the same.
    pub id: u64,
    /// The prompt; at least one token.
    pub prompt: Vec<u32>,
    /// The most tokens to generate.
    pub max_tokens: usize,
    /// Requests of a higher priority run first. Each step of it counts like [`NewTask::PATIENCE`] steps of waiting.
    pub priority: i8,
    /// Who shares pages with it; `None` for nobody.
    pub salt: Option<Arc<[u8]>>,
    /// The tokens of the prompt whose results are needed, in addition to those that draws need.
    pub wanted: Range<usize>,
}

impl NewTask {
    /// The steps by which a request must have arrived later to be served before one whose priority is lower by one.
    pub const PATIENCE: i64 = 1000;

    /// A request of priority 0 that shares pages with all others of its kind.
    pub fn new(id: u64, prompt: Vec<u32>, max_tokens: usize) -> NewTask {
        NewTask { id, prompt, max_tokens, priority: 0, salt: Some(Arc::default()), wanted: 0..0 }
    }

    /// Sets [`NewTask::priority`].
    #[must_use]
    pub fn priority(self, priority: i8) -> NewTask {
        NewTask { priority, ..self }
    }

    /// Sets [`NewTask::salt`].
    #[must_use]
    pub fn salt(self, salt: Option<Arc<[u8]>>) -> NewTask {
        NewTask { salt, ..self }
    }

    /// Sets [`NewTask::wanted`], as far as the prompt goes.
    #[must_use]
    pub fn wanted(self, wanted: Range<usize>) -> NewTask {
        let end = wanted.end.min(self.prompt.len());
        NewTask { wanted: wanted.start.min(end)..end, ..self }
    }
}

/// One step: a batch of tokens, and the rows whose logits are needed.
#[derive(Clone, Debug)]
pub struct StepPlan<S> {
    /// The storage's part.
    pub step: S,
    /// The ids of all tokens, row by row. [`StepPlan::SAMPLED`] is the token that the previous step draws for the
    /// request of its row.
    pub tokens: Vec<u32>,
    /// One for each request of the batch, in its order.
    pub rows: Vec<PlanRow>,
}

impl<S> StepPlan<S> {
    /// Stands for the token that the previous step draws.
    pub const SAMPLED: u32 = u32::MAX;
}

/// The tokens of one request in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanRow {
    /// The request.
    pub id: u64,
    /// The position of the first token.
    pub position: usize,
    /// The tokens: a part of [`StepPlan::tokens`].
    pub tokens: Range<usize>,
    /// The tokens whose results are needed, logits or hidden states: a part of `tokens`, possibly empty.
    pub logits: Range<usize>,
    /// How many of the last tokens a token is drawn from: 0 within a prompt, 1 at its end and in decoding, and one more
    /// for each draft token.
    pub draws: usize,
}

impl PlanRow {
    /// The tokens that a draw follows.
    pub fn drawn(&self) -> Range<usize> {
        self.tokens.end - self.draws..self.tokens.end
    }
}

/// The result of a [`PlanRow`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowResult {
    /// The request.
    pub id: u64,
    /// The tokens drawn: none if `draws` is 0. With drafts, those that were right and one more.
    pub tokens: Vec<u32>,
    /// Whether the request ends with the last of them.
    pub is_last: bool,
}

/// A request that has ended in the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedTask {
    /// The request.
    pub id: u64,
    /// Why.
    pub reason: EndReason,
}

/// Why a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// A result says so.
    Last,
    /// It has as many tokens as it asked for.
    Length,
    /// It needs more pages than there are, although nothing else runs.
    OutOfPages,
}

/// What a scheduler counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SchedulerCounts {
    /// Requests that run.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Memory that running requests may take, in the unit of the storage.
    pub committed: usize,
    /// Tokens that were looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Tokens that the prefix cache had.
    pub prefix_hits: u64,
    /// Requests that gave their pages back before they ended.
    pub preemptions: u64,
    /// Steps.
    pub steps: u64,
}
