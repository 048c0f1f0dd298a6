//! The state that all threads of an engine share.

use std::{
    sync::{
        Condvar, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{EngineStats, SubmitError, lock::lock};

/// State shared by all threads of an engine.
pub(crate) struct Shared {
    /// Number of requests that have not ended.
    live: Mutex<usize>,
    none_live: Condvar,
    is_draining: AtomicBool,
    failure: Mutex<Option<String>>,
    pub stats: Mutex<EngineStats>,
    /// Number of requests that the engine's thread has not received. It changes only while `stats` is locked.
    pub unseen: AtomicUsize,
    /// Maximum running and waiting requests.
    limit: usize,
}

impl Shared {
    /// `stats`: the numbers that do not change. `limit`: maximum running and waiting requests.
    pub fn new(stats: EngineStats, limit: usize) -> Shared {
        Shared {
            live: Mutex::new(0),
            none_live: Condvar::new(),
            is_draining: AtomicBool::new(false),
            failure: Mutex::default(),
            stats: Mutex::new(stats),
            unseen: AtomicUsize::new(0),
            limit,
        }
    }

    /// Number of requests that have not ended.
    pub fn live(&self) -> usize {
        *lock(&self.live)
    }

    /// The reason why the engine has failed.
    pub fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }

    /// Records that the engine has failed.
    pub fn fail(&self, reason: String) {
        lock(&self.failure).get_or_insert(reason);
    }

    /// Counts an ended request.
    pub fn ended(&self) {
        let mut live = lock(&self.live);
        *live = live.saturating_sub(1);
        if *live == 0 {
            self.none_live.notify_all();
        }
    }

    /// Refuses requests from now on.
    pub fn close(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    /// Whether requests are refused.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// Counts a new request.
    ///
    /// # Errors
    /// `Unhealthy`, `Draining`, `Busy`.
    pub fn admit(&self) -> Result<(), SubmitError> {
        if let Some(reason) = self.failure() {
            return Err(SubmitError::Unhealthy { reason });
        }
        if self.is_draining() {
            return Err(SubmitError::Draining);
        }
        let mut live = lock(&self.live);
        if *live >= self.limit {
            return Err(SubmitError::Busy { limit: self.limit });
        }
        *live += 1;
        Ok(())
    }

    /// Waits until all requests have ended. Returns whether they have.
    pub fn wait(&self, limit: Duration) -> bool {
        let live = lock(&self.live);
        let waited = self.none_live.wait_timeout_while(live, limit, |live| *live > 0);
        waited.map_or_else(|poisoned| *poisoned.into_inner().0 == 0, |(live, _)| *live == 0)
    }
}
