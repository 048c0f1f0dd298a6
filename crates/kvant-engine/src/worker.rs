//! The thread that owns the model and its pages, and runs steps.
//!
//! A step takes commands, schedules, runs the model over the batch, samples a token for each row that is completely
//! computed, passes the tokens to the text thread, and reports the result to the scheduler. If the device runs
//! concurrently with the host, the next step starts before the result of the current one is known (`overlap.rs`).

mod draft_length;
mod draft_rates;
mod drafter;
mod drafting;
mod draw;
mod embed;
mod lookup;
mod overlap;
mod running;
mod state;
mod step_times;
mod warm_up;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
};

use flume::Receiver;
use kvant::PrefixCache;

use crate::{
    Event, Failure, FinishReason,
    commands::{Command, Job},
    lock::lock,
    scheduler::{PoolStep, StepPlan, StorageError},
    text::{NewText, Output},
};
use running::Running;
pub(crate) use state::Worker;

/// Maximum pages of prefixes that are stored between two steps.
const MAX_STORED: usize = 2;

impl Worker {
    /// Serves requests until all handles of the engine are dropped, or it fails.
    pub fn run(mut self, commands: &Receiver<Command>) {
        let shared = Arc::clone(&self.shared);
        let served = catch_unwind(AssertUnwindSafe(|| self.serve(commands)));
        let reason = match served {
            Ok(Ok(())) => return self.scheduler.storage().pool().store_all_pages(),
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
                self.latest_result = None;
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
            self.store_prefixes(is_idle, commands);
            if is_idle && commands.is_disconnected() && commands.is_empty() {
                return Ok(());
            }
        }
    }

    /// Stores pages of prefixes that outlive the engine: between two steps a few, without work all, until there is a
    /// command. A step in flight would delay the copies.
    fn store_prefixes(&self, is_idle: bool, commands: &Receiver<Command>) {
        let pool = self.scheduler.storage().pool();
        if is_idle {
            while commands.is_empty() && !commands.is_disconnected() && pool.store_next_page() {}
        } else if self.in_flight.is_none() {
            pool.store_pages(MAX_STORED);
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
            // The receiver of a reply may have gone.
            Command::Export { salt, tokens, from, may_grow, max_bytes, reply } => {
                // Also the pages that the latest step has filled. The next step reports an error.
                let _ = self.scheduler.keep_prefixes();
                let cache = PrefixCache::new(self.scheduler.storage().pool(), &salt);
                let _ = reply.send(cache.export_pages(&tokens, &from, may_grow, max_bytes));
            }
            Command::Held { salt, tokens, reply } => {
                let cache = PrefixCache::new(self.scheduler.storage().pool(), &salt);
                let _ = reply.send(Ok(cache.held_pages(&tokens)));
            }
            Command::Import { salt, tokens, pages, reply } => {
                let cache = PrefixCache::new(self.scheduler.storage().pool(), &salt);
                let _ = reply.send(cache.import_pages(&tokens, &pages));
            }
            Command::EndAll => {
                let ids: Vec<u64> = self.running.keys().copied().collect();
                for id in ids {
                    self.remove(id);
                    lock(&self.shared.stats).finished_cancelled += 1;
                    self.pending_outputs.push((id, Output::End(FinishReason::Drained)));
                }
            }
            #[cfg(feature = "internals")]
            Command::Panic => panic!("a test has asked for this"),
            #[cfg(feature = "internals")]
            Command::FailRank(rank) => self.failing_rank = Some(rank),
            #[cfg(feature = "internals")]
            Command::FailDrafter => self.is_drafter_failing = true,
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
                self.has_caught_up = false;
                self.record_time(&plan, &results);
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
}

/// The ids of the requests of a step.
fn ids(plan: &StepPlan<PoolStep>) -> Vec<u64> {
    plan.rows.iter().map(|row| row.id).collect()
}
