//! The thread that owns the model and its pages, and runs steps.
//!
//! A step takes commands, schedules, runs the model over the batch, samples a token for each row that is completely
//! computed, passes the tokens to the text thread, and reports the result to the scheduler. If the device runs
//! concurrently with the host, the next step starts before the result of the current one is known (`overlap.rs`).

mod draw;
mod embed;
mod lookup;
mod overlap;
mod running;
mod warm_up;

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use flume::{Receiver, Sender};
use kvant::{DeviceKind, KvPool, Tensor};
use kvant_models::{BatchDecoder, DeviceSampler, Model, Result, TokenLogprobs, Tokenizer};

use crate::{
    EngineOptions, Event, Failure, FinishReason,
    engine::{Command, Shared, lock},
    scheduler::{EndReason, PlanRow, PoolStep, PoolStorage, Scheduler, SchedulerOptions, StepPlan, StorageError},
    text::{NewText, Output},
};
use overlap::InFlightStep;
pub(crate) use running::Job;
use running::Running;

/// Maximum tokens of a recorded pass with drafts. Each token has logits, and each number of tokens has its own pass.
const MAX_RECORDED: usize = 128;

pub(crate) struct Worker {
    model: Model,
    scheduler: Scheduler<PoolStorage>,
    tokenizer: Arc<Tokenizer>,
    shared: Arc<Shared>,
    outputs: Sender<Vec<(u64, Output)>>,
    device_sampler: DeviceSampler,
    /// Maximum tokens of a text.
    context: usize,
    /// Maximum running requests, and maximum tokens of a step.
    sequences: usize,
    step_tokens: usize,
    /// Maximum unread events of a request.
    unread: usize,
    /// Maximum drafts of a request in a step.
    drafts: usize,
    /// Whether a step may start before the result of the previous one is known.
    overlap: bool,
    /// The step whose result is not known yet.
    in_flight: Option<InFlightStep>,
    running: HashMap<u64, Running>,
    /// Messages to the text thread, sent at the end of a step.
    pending_outputs: Vec<(u64, Output)>,
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
        let draws = options.sequences.saturating_mul(1 + options.drafts).min(options.step_tokens);
        let device_sampler = DeviceSampler::new(model.device(), draws)?;
        let rows = options.sequences.max(draws.min(MAX_RECORDED)).min(options.step_tokens);
        let decoder = BatchDecoder::new(&model, &pool, rows)?;
        let storage = PoolStorage::new(pool, options.step_tokens, options.prefix_cache);
        let storage = storage.with_decoder(decoder, 1 + options.drafts);
        let scheduler = Scheduler::new(storage, SchedulerOptions::new(options.sequences, options.step_tokens));
        let EngineOptions { sequences, step_tokens, unread, drafts, .. } = *options;
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
            overlap,
            in_flight: None,
            running: HashMap::new(),
            pending_outputs: Vec::new(),
        })
    }

    /// Serves requests until all handles of the engine are dropped, or it fails.
    pub fn run(mut self, commands: &Receiver<Command>) {
        let shared = Arc::clone(&self.shared);
        let served = catch_unwind(AssertUnwindSafe(|| self.serve(commands)));
        let reason = match served {
            Ok(Ok(())) => return,
            Ok(Err(reason)) => reason,
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
                format!("a panic: {}", text.unwrap_or_default())
            }
        };
        tracing::error!(reason, "the engine has failed");
        shared.fail(reason.clone());
        // The text thread notifies all requests that it knows. Requests it does not know were submitted before the
        // failure was recorded.
        // recorded.
        self.send();
        drop(self);
        for command in commands.iter() {
            if let Command::Submit(job) = command {
                shared.unseen.fetch_sub(1, Ordering::Relaxed);
                job.reader.send(Event::Failed(Failure::Engine(reason.clone())));
                shared.ended();
            }
        }
    }

    fn serve(&mut self, commands: &Receiver<Command>) -> std::result::Result<(), String> {
        let mut is_idle = true;
        loop {
            // Without work, the thread waits for a command.
            if is_idle {
                let Ok(command) = commands.recv() else { return Ok(()) };
                self.handle(command);
            }
            while let Ok(command) = commands.try_recv() {
                self.handle(command);
            }
            self.pause_unread();
            let has_run = self.step().map_err(|error| error.to_string())?;
            self.send();
            self.count();
            is_idle = !has_run;
            if is_idle && commands.is_disconnected() && commands.is_empty() {
                return Ok(());
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Submit(job) => self.submit(*job),
            Command::Cancel(id) => {
                if self.remove(id).is_some() {
                    lock(&self.shared.stats).finished_cancelled += 1;
                    self.pending_outputs.push((id, Output::Gone));
                }
            }
            Command::End { id, is_complete } => {
                if self.remove(id).is_some() {
                    let mut stats = lock(&self.shared.stats);
                    if is_complete {
                        stats.finished_stop += 1;
                    } else {
                        stats.finished_failed += 1;
                    }
                }
            }
            Command::Resume => {}
            Command::EndAll => {
                let ids: Vec<u64> = self.running.keys().copied().collect();
                for id in ids {
                    self.remove(id);
                    lock(&self.shared.stats).finished_cancelled += 1;
                    self.pending_outputs.push((id, Output::End(FinishReason::Drained)));
                }
            }
            Command::Panic => panic!("a test has asked for this"),
        }
    }

    fn submit(&mut self, job: Job) {
        let id = job.id;
        self.pending_outputs.push((id, Output::Start(Box::new(NewText::new(&job.request, job.reader.clone())))));
        let eos = self.tokenizer.eos();
        match Running::new(job, self.model.vocab_size(), self.context, eos, self.drafts) {
            Ok((running, task)) => {
                self.running.insert(id, running);
                self.scheduler.add(task);
            }
            Err(error) => self.fail(id, Failure::Request(error.to_string())),
        }
        self.count_requests(1);
    }

    /// Removes a request from the scheduler.
    fn remove(&mut self, id: u64) -> Option<Running> {
        self.scheduler.cancel(id);
        let running = self.running.remove(&id)?;
        let mut stats = lock(&self.shared.stats);
        stats.request_time.add(running.submitted.elapsed());
        stats.text_lengths.add_tokens(running.generated);
        if let (Some(first), Some(latest)) = (running.first, running.latest) {
            stats.decode_time.add(latest - first);
        }
        drop(stats);
        Some(running)
    }

    /// Ends a request with its own error.
    fn fail(&mut self, id: u64, failure: Failure) {
        self.remove(id);
        lock(&self.shared.stats).finished_failed += 1;
        self.pending_outputs.push((id, Output::Failed(failure)));
    }

    /// Pauses requests with too many unread events, and resumes others.
    fn pause_unread(&mut self) {
        for (&id, running) in &mut self.running {
            let is_paused = running.unread.load(Ordering::Acquire) >= self.unread;
            if is_paused != running.is_paused {
                running.is_paused = is_paused;
                self.scheduler.pause(id, is_paused);
            }
        }
    }

    /// Plans and runs or starts a step, and takes the result of the previous one. Returns whether there was any work.
    fn step(&mut self) -> std::result::Result<bool, StorageError> {
        let with_drafts = self.in_flight.take_if(|step| step.has_drafts());
        let mut has_landed = with_drafts.is_some();
        with_drafts.map_or(Ok(()), |step| self.finish(step))?;
        let plan = self.scheduler.schedule()?;
        self.end_scheduled();
        // A step can take long.
        self.count_requests(0);
        let before = self.in_flight.take();
        let Some(plan) = plan else {
            has_landed |= before.is_some();
            before.map_or(Ok(()), |before| self.finish(before))?;
            return Ok(has_landed);
        };
        for row in &plan.rows {
            self.begin(row.id);
        }
        if self.can_overlap(&plan) {
            let ids = ids(&plan);
            let started = self.launch(plan, before.as_ref());
            before.map_or(Ok(()), |before| self.finish(before))?;
            match started {
                Ok(step) => self.in_flight = Some(step),
                Err(error) => self.fail_step(ids, error)?,
            }
        } else {
            before.map_or(Ok(()), |before| self.finish(before))?;
            self.run_step(plan)?;
        }
        self.end_scheduled();
        Ok(true)
    }

    /// Runs a step and waits for its result.
    fn run_step(&mut self, mut plan: StepPlan<PoolStep>) -> std::result::Result<(), StorageError> {
        self.fill_in(&mut plan);
        match self.compute(&plan) {
            Ok(results) => {
                self.scheduler.apply(results)?;
                self.propose(&plan);
                Ok(())
            }
            Err(error) => self.fail_step(ids(&plan), error),
        }
    }

    /// Ends the requests of a step that cannot run. An argument error of a batch is a bug of the engine.
    fn fail_step(&mut self, ids: Vec<u64>, error: kvant_models::Error) -> std::result::Result<(), StorageError> {
        match error {
            kvant_models::Error::Kvant(error) => Err(error.into()),
            other => {
                ids.into_iter().for_each(|id| self.fail(id, Failure::Request(other.to_string())));
                Ok(())
            }
        }
    }

    /// Begins the first step of a request.
    fn begin(&mut self, id: u64) {
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
    fn score_prompt(&mut self, row: &PlanRow, first: usize, logits: &Tensor) -> Result<()> {
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
    fn accept(&mut self, id: u64, token: u32, logits: Option<(Vec<f32>, usize)>) -> bool {
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
    fn end_scheduled(&mut self) {
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
    fn send(&mut self) {
        if !self.pending_outputs.is_empty() {
            let _ = self.outputs.send(std::mem::take(&mut self.pending_outputs));
        }
    }

    /// Updates the counts of running and waiting requests. `seen`: number of new ones among them.
    fn count_requests(&self, seen: usize) {
        let counts = self.scheduler.counts();
        let mut stats = lock(&self.shared.stats);
        self.shared.unseen.fetch_sub(seen, Ordering::Relaxed);
        (stats.running, stats.waiting) = (counts.running, counts.waiting);
    }

    fn count(&self) {
        let (counts, usage) = (self.scheduler.counts(), self.scheduler.storage().pool().usage());
        let mut stats = lock(&self.shared.stats);
        (stats.running, stats.waiting) = (counts.running, counts.waiting);
        stats.paused = self.running.values().filter(|running| running.is_paused).count();
        (stats.pages_bytes, stats.pages_used, stats.host_used) = (usage.bytes, usage.used, usage.host);
        stats.requests_used = counts.committed.min(usage.used);
        (stats.prefix_queries, stats.prefix_hits) = (counts.prefix_queries, counts.prefix_hits);
        (stats.preemptions, stats.steps) = (counts.preemptions, counts.steps);
    }
}

/// The ids of the requests of a step.
fn ids(plan: &StepPlan<PoolStep>) -> Vec<u64> {
    plan.rows.iter().map(|row| row.id).collect()
}
