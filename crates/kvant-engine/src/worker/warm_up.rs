//! Compiles kernels and records passes before the first request.
//!
//! A GPU's kernels depend on the number of rows and the lengths of sequences, and a recorded pass has a fixed number of
//! rows. Without the warm-up, the first batch of each size waits for the compiler.

use std::time::{Duration, Instant};

use super::state::Worker;

/// Minimum free memory of the device to record more passes.
const MIN_FREE: usize = 512 << 20;
/// Rows of measured steps, and how often each is measured.
const MEASURED_ROWS: [usize; 15] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 128];
const ROUNDS: usize = 5;
/// Maximum time to measure steps.
const MAX_MEASURING: Duration = Duration::from_secs(2);
/// Interval of progress messages.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Progress of the warm-up.
struct Progress {
    started: Instant,
    limit: Duration,
    logged: Instant,
    done: usize,
    all: usize,
}

impl Worker {
    /// Records the passes of all batch sizes and compiles the kernels of steps with prompts, within the limits of time
    /// and memory. The rest is compiled when a step needs it. If compilation fails here, the request that needs the
    /// kernel gets the error.
    pub fn warm_up(&mut self, limit: Duration) {
        self.prepare(limit);
        if self.drafts > 0 && self.adaptive_drafts && !limit.is_zero() {
            self.measure_steps();
        }
    }

    /// Measures steps by their rows, for the choice of the number of drafts. All sizes are measured in turns, because a
    /// busy machine disturbs measurements that follow one another.
    fn measure_steps(&mut self) {
        let started = Instant::now();
        let Some(decoder) = self.scheduler.storage_mut().decoder() else { return };
        let max = decoder.rows();
        let mut times: Vec<(usize, Duration)> =
            MEASURED_ROWS.into_iter().filter(|&rows| rows <= max).map(|rows| (rows, Duration::MAX)).collect();
        for _ in 0..ROUNDS {
            let mut last = Duration::ZERO;
            for (rows, time) in &mut times {
                // A measurement has two passes, and the next size may take twice as long.
                if started.elapsed() + 4 * last > MAX_MEASURING {
                    break;
                }
                last = match decoder.measure(*rows, 1) {
                    Ok(time) => time,
                    Err(error) => return tracing::warn!(%error, rows, "a step cannot be measured"),
                };
                *time = last.min(*time);
            }
        }
        let mut shortest = Duration::MAX;
        for (rows, time) in times.into_iter().rev().filter(|(_, time)| *time < Duration::MAX) {
            // A step that takes longer than a larger one was disturbed.
            shortest = time.min(shortest);
            self.lengths.steps.set(rows, shortest.as_secs_f64());
        }
    }

    fn prepare(&mut self, limit: Duration) {
        let now = Instant::now();
        let (step_tokens, sequences) = (self.step_tokens, self.sequences);
        let recorded = self.scheduler.storage_mut().decoder().map(|decoder| decoder.sizes(self.context));
        let recorded = recorded.unwrap_or_default();
        let mixed = self.model.mixed_sizes(sequences, step_tokens, self.context);
        let drafting = self.drafter.as_ref().map_or_else(Vec::new, |drafter| drafter.sizes(self.context));
        let all = recorded.len() + mixed.len() + drafting.len();
        let mut progress = Progress { started: now, limit, logged: now, done: 0, all };
        if all == 0 || limit.is_zero() {
            return;
        }
        tracing::info!(passes = all, "compiling and recording passes");
        let pool = self.scheduler.storage().pool().clone();
        for size in recorded {
            let Some(decoder) = self.scheduler.storage_mut().decoder() else { break };
            if !progress.goes_on(&self.model, decoder.record_size(size)) {
                return;
            }
        }
        for size in drafting {
            let Some(drafter) = &mut self.drafter else { break };
            if !progress.goes_on(&self.model, drafter.record_size(size)) {
                return;
            }
        }
        for size in mixed {
            if !progress.goes_on(&self.model, self.model.prepare(&pool, size)) {
                return;
            }
        }
        tracing::info!(passes = all, seconds = progress.started.elapsed().as_secs_f32(), "all passes are ready");
    }
}

impl Progress {
    /// Counts a pass, and decides whether time and memory allow the next one.
    fn goes_on(&mut self, model: &kvant_models::Model, made: kvant_models::Result<()>) -> bool {
        let Progress { done, all, .. } = *self;
        if let Err(error) = made {
            tracing::warn!(%error, done, all, "a pass cannot be recorded: the rest is compiled on demand");
            return false;
        }
        self.done += 1;
        let why = if self.started.elapsed() >= self.limit {
            "the time limit is over"
        } else if model.device().memory().is_ok_and(|memory| memory.free.saturating_add(memory.held) < MIN_FREE) {
            "the device has little free memory"
        } else {
            if self.logged.elapsed() >= LOG_INTERVAL {
                self.logged = Instant::now();
                tracing::info!(done = self.done, all, "compiling and recording passes");
            }
            return true;
        };
        if self.done < all {
            tracing::warn!(done = self.done, all, "{why}: the rest is compiled on demand");
        }
        self.done == all
    }
}
