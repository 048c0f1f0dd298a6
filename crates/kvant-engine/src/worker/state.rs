//! The worker's state, and the life of a request in it.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use flume::Sender;
use kvant::{DeviceKind, KvPool, Readback, Submission, Tensor};
use kvant_models::{BatchDecoder, DeviceSampler, DraftDecoder, Error, Model, Result, TokenLogprobs, Tokenizer};

use super::{draft_length::DraftLengths, draft_rates::DraftRates, drafting::DraftingTime, running::Running};
use crate::{
    EngineOptions, Failure, FinishReason, PageFiles,
    lock::lock,
    scheduler::{EndReason, PlanRow, PoolStep, PoolStorage, Scheduler, SchedulerOptions, StepPlan, Storage},
    shared::Shared,
    text::Output,
};

/// Maximum tokens of a recorded pass with drafts. Each token has logits, and each number of tokens has its own pass.
const MAX_RECORDED: usize = 128;

pub(crate) struct Worker {
    pub(super) model: Model,
    pub(super) scheduler: Scheduler<PoolStorage>,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) shared: Arc<Shared>,
    pub(super) outputs: Sender<Vec<(u64, Output)>>,
    pub(super) device_sampler: DeviceSampler,
    /// Maximum tokens of a text.
    pub(super) context: usize,
    /// Maximum running requests, and maximum tokens of a step.
    pub(super) sequences: usize,
    pub(super) step_tokens: usize,
    /// Maximum unread events of a request.
    pub(super) unread: usize,
    /// Maximum drafts of a request in a step.
    pub(super) drafts: usize,
    /// The model's drafter, if requests may have drafts.
    pub(super) drafter: Option<DraftDecoder>,
    /// Whether no drafts of the drafter are wanted at the moment.
    pub(super) drafter_rests: bool,
    /// Whether the drafter has seen the tokens of the step whose result is taken.
    pub(super) has_caught_up: bool,
    /// Whether drafts are found in the text.
    pub(super) prompt_lookup: bool,
    /// Whether the number of drafts depends on `lengths`.
    pub(super) adaptive_drafts: bool,
    pub(super) lengths: DraftLengths,
    /// Whether drafts pay.
    pub(super) draft_rates: DraftRates,
    /// The probability that a draft is accepted, for benchmarks.
    pub(super) planted_acceptance: Option<f32>,
    /// Drafts of the drafter that are wanted after the next step, because the latest one overlaps with it.
    pub(super) deferred_drafts: HashMap<u64, usize>,
    /// The drafter's time since the latest result.
    pub(super) drafting: Option<DraftingTime>,
    /// The time of the latest result, unless the engine has been idle since.
    pub(super) latest_result: Option<Instant>,
    /// Where pages of prefixes are stored.
    pub(super) page_files: Option<PageFiles>,
    /// Whether a step may start before the result of the previous one is known.
    pub(super) overlap: bool,
    /// The step whose result is not known yet.
    pub(super) in_flight: Option<InFlightStep>,
    pub(super) running: HashMap<u64, Running>,
    /// Messages to the text thread, sent at the end of a step.
    pub(super) pending_outputs: Vec<(u64, Output)>,
    /// The rank that fails within the next step with a prompt.
    #[cfg(feature = "internals")]
    pub(super) failing_rank: Option<usize>,
    /// Whether the drafter fails after the next step.
    #[cfg(feature = "internals")]
    pub(super) is_drafter_failing: bool,
}

/// A step whose result is not known yet.
pub(super) struct InFlightStep {
    pub(super) plan: StepPlan<PoolStep>,
    /// The index in `drawn` of the tokens of each row of the plan.
    pub(super) draws: Vec<Range<usize>>,
    /// The tokens on the device.
    pub(super) drawn: Tensor,
    pub(super) readback: Readback,
    pub(super) submissions: Vec<Submission>,
}

impl InFlightStep {
    /// Whether some requests cannot be planned before the result is known.
    pub(super) fn has_drafts(&self) -> bool {
        self.plan.rows.iter().any(|row| row.draws > 1)
    }
}

impl Worker {
    pub fn new(
        model: Model,
        pool: KvPool,
        tokenizer: Arc<Tokenizer>,
        options: &EngineOptions,
        context: usize,
        shared: Arc<Shared>,
        outputs: Sender<Vec<(u64, Output)>>,
    ) -> Result<Worker> {
        let storage = PoolStorage::new(pool.clone(), options.step_tokens, options.prefix_cache);
        let drafts = options.drafts.min(storage.max_drafts());
        let draws = options.sequences.saturating_mul(1 + drafts).min(options.step_tokens);
        let device_sampler = DeviceSampler::new(model.device(), draws)?;
        let rows = options.sequences.max(draws.min(MAX_RECORDED)).min(options.step_tokens);
        let mut decoder = BatchDecoder::new(&model, &pool, rows)?;
        let drafter = match model.drafter() {
            Some(_) if drafts > 0 => {
                let rows = options.step_tokens.max(decoder.rows());
                Some(DraftDecoder::new(&model, &pool, options.sequences, drafts, rows)?)
            }
            _ => None,
        };
        if let Some(drafter) = &drafter {
            decoder.leave_states(drafter.states())?;
        }
        let rows = decoder.rows();
        let storage = storage.for_sequences(options.sequences).with_state_interval(options.state_interval);
        let storage = storage.with_decoder(decoder, 1 + drafts);
        let scheduler = Scheduler::new(storage, SchedulerOptions::new(options.sequences, options.step_tokens));
        let EngineOptions { sequences, step_tokens, unread, adaptive_drafts, .. } = *options;
        let overlap = options.overlap.unwrap_or(model.device().kind() == DeviceKind::Cuda);
        Ok(Worker {
            model,
            scheduler,
            tokenizer,
            shared,
            outputs,
            device_sampler,
            context,
            sequences,
            step_tokens,
            unread,
            drafts,
            drafter,
            drafter_rests: false,
            has_caught_up: false,
            adaptive_drafts,
            lengths: DraftLengths::new(rows),
            draft_rates: DraftRates::default(),
            prompt_lookup: options.prompt_lookup,
            planted_acceptance: options.planted_acceptance,
            deferred_drafts: HashMap::new(),
            drafting: None,
            latest_result: None,
            page_files: options.page_files.clone(),
            overlap,
            in_flight: None,
            running: HashMap::new(),
            pending_outputs: Vec::new(),
            #[cfg(feature = "internals")]
            failing_rank: None,
            #[cfg(feature = "internals")]
            is_drafter_failing: false,
        })
    }

    /// Removes a request from the scheduler.
    pub(super) fn remove(&mut self, id: u64) -> Option<Running> {
        self.scheduler.cancel(id);
        let running = self.running.remove(&id)?;
        let mut stats = lock(&self.shared.stats);
        stats.request_time.add(running.submitted.elapsed());
        stats.text_lengths.add_tokens(running.generated());
        if let (Some(first), Some(latest)) = (running.first, running.latest) {
            stats.decode_time.add(latest - first);
        }
        drop(stats);
        Some(running)
    }

    /// Ends a request with its own error.
    pub(super) fn fail(&mut self, id: u64, failure: Failure) {
        self.remove(id);
        lock(&self.shared.stats).finished_failed += 1;
        self.pending_outputs.push((id, Output::Failed(failure)));
    }

    /// Begins the first step of a request.
    pub(super) fn begin(&mut self, id: u64) {
        let cached_tokens = self.scheduler.cached(id).unwrap_or(0);
        if let Some(running) = self.running.get_mut(&id)
            && !std::mem::replace(&mut running.has_begun, true)
        {
            running.begun = Instant::now();
            let mut stats = lock(&self.shared.stats);
            stats.queue_time.add(running.begun - running.submitted);
            stats.prompt_lengths.add_tokens(running.prompt_len);
            drop(stats);
            self.pending_outputs.push((id, Output::Began { cached_tokens }));
        }
    }

    /// Sends log probabilities of the prompt tokens that the row's logits predict. `first` is the index of the first
    /// one.
    pub(super) fn score_prompt(&mut self, row: &PlanRow, first: usize, logits: &Tensor) -> Result<()> {
        let Some(top) = self.running.get(&row.id).and_then(|running| running.prompt_logprobs) else { return Ok(()) };
        let prompt_len = self.running[&row.id].prompt_len;
        let mut scores = Vec::new();
        for (index, at) in row.logits.clone().zip(first..) {
            let next = row.position + index - row.tokens.start + 1;
            let token = self.scheduler.tokens(row.id).and_then(|tokens| tokens.get(next)).copied();
            let Some(token) = token.filter(|_| next < prompt_len) else { continue };
            scores.push(TokenLogprobs::of(&logits.rows(at..at + 1)?.to_f32()?, token, top));
        }
        if !scores.is_empty() {
            self.pending_outputs.push((row.id, Output::Prompt(scores)));
        }
        Ok(())
    }

    /// Accepts a sampled token. Returns whether it is the last one.
    pub(super) fn accept(&mut self, id: u64, token: u32, logits: Option<(Vec<f32>, usize)>) -> bool {
        let Some(running) = self.running.get_mut(&id) else { return true };
        if running.stop_ids.contains(&token) {
            running.end = Some(FinishReason::StopId(token));
            if let Some((logits, top)) = logits {
                self.pending_outputs.push((id, Output::Stop(TokenLogprobs::of(&logits, token, top))));
            }
            return true;
        }
        if let Err(failure) = running.accept(token) {
            self.fail(id, failure);
            return true;
        }
        let is_last = running.end.is_some();
        let now = Instant::now();
        {
            let mut stats = lock(&self.shared.stats);
            match running.latest.replace(now) {
                None => {
                    running.first = Some(now);
                    stats.time_to_first_token.add(now - running.submitted);
                    stats.prefill_time.add(now - running.begun);
                }
                Some(before) => stats.inter_token.add(now - before),
            }
        }
        let logprobs = logits.map(|(logits, top)| TokenLogprobs::of(&logits, token, top));
        self.pending_outputs.push((id, Output::Token { id: token, logprobs }));
        is_last
    }

    /// Reports requests that the scheduler has ended.
    pub(super) fn end_scheduled(&mut self) {
        for ended in self.scheduler.take_ended() {
            let Some(running) = self.remove(ended.id) else { continue };
            let reason = match ended.reason {
                EndReason::Last => running.end.unwrap_or(FinishReason::Grammar),
                EndReason::Length => FinishReason::Length,
                EndReason::OutOfPages => FinishReason::OutOfPages,
            };
            let mut stats = lock(&self.shared.stats);
            match ended.reason {
                EndReason::Last => stats.finished_stop += 1,
                EndReason::Length | EndReason::OutOfPages => stats.finished_length += 1,
            }
            self.pending_outputs.push((ended.id, Output::End(reason)));
        }
    }

    /// Sends the collected messages to the text thread.
    pub(super) fn send(&mut self) {
        if !self.pending_outputs.is_empty() {
            let _ = self.outputs.send(std::mem::take(&mut self.pending_outputs));
        }
    }

    /// Updates the counts of running and waiting requests. `seen`: number of new ones among them.
    pub(super) fn count_requests(&self, seen: usize) {
        let counts = self.scheduler.counts();
        let mut stats = lock(&self.shared.stats);
        self.shared.unseen.fetch_sub(seen, Ordering::Relaxed);
        (stats.running, stats.waiting) = (counts.running, counts.waiting);
    }

    pub(super) fn count(&self) {
        let (counts, usage) = (self.scheduler.counts(), self.scheduler.storage().pool().usage());
        let mut stats = lock(&self.shared.stats);
        (stats.running, stats.waiting) = (counts.running, counts.waiting);
        stats.paused = self.running.values().filter(|running| running.is_paused).count();
        (stats.pages_bytes, stats.pages_used, stats.host_used) = (usage.bytes, usage.used, usage.host);
        stats.states_used = usage.states;
        stats.stored = self.page_files.as_ref().map_or(0, PageFiles::bytes);
        stats.requests_used = counts.committed.min(usage.used);
        (stats.prefix_queries, stats.prefix_hits) = (counts.prefix_queries, counts.prefix_hits);
        (stats.preemptions, stats.steps) = (counts.preemptions, counts.steps);
    }
}

/// The error of a recorded step that no decoder has recorded.
pub(super) fn no_decoder() -> Error {
    let (expected, got) = ("a step of the decoder".to_string(), "another".to_string());
    Error::Argument { arg: "step", expected, got }
}
