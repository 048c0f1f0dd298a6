//! Cancels grammar operations that take too long.

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use llguidance::CancellationHandle;

use crate::lock::lock;

/// Maximum time to compute the mask of a token. Masks of common grammars take less than a millisecond; the margin
/// allows for busy machines.
pub const MAX_TIME: Duration = Duration::from_secs(1);

/// A thread that watches operations. It ends when the last owner of this type is dropped.
pub struct Watchdog {
    shared: Arc<Watched>,
    next: AtomicU64,
}

#[derive(Default)]
struct Watched {
    work: Mutex<Work>,
    changed: Condvar,
}

#[derive(Default)]
struct Work {
    running: Vec<(u64, Instant, CancellationHandle)>,
    /// Wakes the thread when work begins.
    is_waiting: bool,
    has_ended: bool,
}

impl Watchdog {
    pub fn start() -> io::Result<Watchdog> {
        let shared = Arc::new(Watched::default());
        let watched = Arc::clone(&shared);
        thread::Builder::new().name("kvant-watchdog".to_string()).spawn(move || watched.watch())?;
        Ok(Watchdog { shared, next: AtomicU64::new(0) })
    }

    /// Runs `work`, which ends early when `handle` is cancelled.
    pub fn run<T>(&self, handle: Option<CancellationHandle>, work: impl FnOnce() -> T) -> T {
        let Some(handle) = handle else { return work() };
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        {
            let mut works = lock(&self.shared.work);
            works.running.push((id, Instant::now(), handle));
            if works.is_waiting {
                self.shared.changed.notify_one();
            }
        }
        // `work` catches its panics.
        let result = work();
        lock(&self.shared.work).running.retain(|(other, ..)| *other != id);
        result
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        lock(&self.shared.work).has_ended = true;
        self.shared.changed.notify_one();
    }
}

impl Watched {
    /// Checks running work periodically.
    fn watch(&self) {
        loop {
            {
                let mut work = lock(&self.work);
                while work.running.is_empty() && !work.has_ended {
                    work.is_waiting = true;
                    work = self.changed.wait(work).unwrap_or_else(std::sync::PoisonError::into_inner);
                }
                work.is_waiting = false;
                if work.has_ended {
                    return;
                }
                let late = work.running.iter().filter(|(_, started, _)| started.elapsed() > MAX_TIME);
                late.for_each(|(.., handle)| handle.cancel());
            }
            thread::sleep(MAX_TIME / 20);
        }
    }
}
