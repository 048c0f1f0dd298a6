//! The input and output types of the scheduler.

use std::{ops::Range, sync::Arc};

/// Options of a [`Scheduler`](super::Scheduler).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SchedulerOptions {
    /// Maximum running requests.
    pub sequences: usize,
    /// Maximum tokens of a step; more than `sequences`.
    pub step_tokens: usize,
}

impl SchedulerOptions {
    /// Creates options. `step_tokens` is raised to at least `sequences + 1`, so that prompts always make progress.
    pub fn new(sequences: usize, step_tokens: usize) -> SchedulerOptions {
        let sequences = sequences.max(1);
        SchedulerOptions { sequences, step_tokens: step_tokens.max(sequences.saturating_add(1)) }
    }
}

/// A new request.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NewTask {
    /// Its unique id.
    pub id: u64,
    /// The prompt; at least one token.
    pub prompt: Vec<u32>,
    /// Maximum tokens to generate.
    pub max_tokens: usize,
    /// Requests of higher priority run first. One level counts like [`NewTask::PATIENCE`] steps of waiting.
    pub priority: i8,
    /// The scope in which pages are shared; `None` shares none.
    pub salt: Option<Arc<[u8]>>,
    /// The tokens of the prompt whose results are needed, in addition to the ones needed for sampling.
    pub wanted: Range<usize>,
}

impl NewTask {
    /// The number of steps of waiting that one level of priority is worth.
    pub const PATIENCE: i64 = 1000;

    /// Creates a request of priority 0 that shares pages with all others of an equal salt.
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

    /// Sets [`NewTask::wanted`], clipped to the prompt.
    #[must_use]
    pub fn wanted(self, wanted: Range<usize>) -> NewTask {
        let end = wanted.end.min(self.prompt.len());
        NewTask { wanted: wanted.start.min(end)..end, ..self }
    }
}

/// One step: a batch of tokens, and the rows whose logits are needed.
#[derive(Clone, Debug)]
pub struct StepPlan<S> {
    /// The step of the storage.
    pub step: S,
    /// The ids of all tokens, row by row. [`StepPlan::SAMPLED`] is a placeholder for the token that the previous step
    /// samples for the request of its row.
    pub tokens: Vec<u32>,
    /// One row per request of the batch, in the order of service.
    pub rows: Vec<PlanRow>,
}

impl<S> StepPlan<S> {
    /// Placeholder for a token that the previous step samples.
    pub const SAMPLED: u32 = u32::MAX;
}

/// The tokens of one request in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanRow {
    /// The request.
    pub id: u64,
    /// The position of the first token.
    pub position: usize,
    /// The tokens, as a range of [`StepPlan::tokens`].
    pub tokens: Range<usize>,
    /// The tokens whose results are needed, logits or hidden states: a part of `tokens`, possibly empty.
    pub logits: Range<usize>,
    /// The number of last tokens after which a token is sampled: 0 within a prompt, 1 at its end and in decoding, and
    /// one more per draft token.
    pub draws: usize,
}

impl PlanRow {
    /// The tokens after which a token is sampled.
    pub fn drawn(&self) -> Range<usize> {
        self.tokens.end - self.draws..self.tokens.end
    }
}

/// The result of a [`PlanRow`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowResult {
    /// The request.
    pub id: u64,
    /// The sampled tokens: none if `draws` is 0. With drafts, the accepted ones and one more.
    pub tokens: Vec<u32>,
    /// Whether the request ends with the last of these tokens.
    pub is_last: bool,
}

/// A request that has ended in the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedTask {
    /// The request.
    pub id: u64,
    /// The end reason.
    pub reason: EndReason,
}

/// The reason why a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// A result ended it.
    Last,
    /// It has generated `max_tokens` tokens.
    Length,
    /// It needs more pages than the pool has, although no other request runs.
    OutOfPages,
}

/// Counters of a scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SchedulerCounts {
    /// Running requests.
    pub running: usize,
    /// Waiting requests.
    pub waiting: usize,
    /// Memory reserved by running requests, in the unit of the storage.
    pub committed: usize,
    /// Tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Tokens found in the prefix cache.
    pub prefix_hits: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Steps.
    pub steps: u64,
}
