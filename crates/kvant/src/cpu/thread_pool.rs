//! Threads that share the tasks of one operation.
//!
//! A decode step is hundreds of operations of a few microseconds each, so the time to distribute work matters. Workers
//! spin briefly between operations, then sleep. An operation never waits for a worker that is still asleep: it closes
//! its job when all tasks are claimed, and waits only for the workers that have joined.

use std::{
    cell::UnsafeCell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    time::{Duration, Instant},
};

/// How long a worker spins for the next job before it sleeps.
const SPIN: Duration = Duration::from_micros(60);

/// The open bit of [`PoolShared::state`]; the count of joined workers is above it, the job's number above that.
const OPEN: u64 = 1;
const JOINED: u64 = 2;
const NUMBER: u64 = 1 << 16;

pub(crate) struct ThreadPool {
    shared: Arc<PoolShared>,
    workers: Vec<std::thread::JoinHandle<()>>,
    /// One job at a time.
    turn: Mutex<()>,
}

struct PoolShared {
    state: AtomicU64,
    job: UnsafeCell<PoolJob>,
    /// The next task to claim.
    next: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

#[derive(Clone, Copy)]
struct PoolJob {
    run: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

// SAFETY: `job` is written only while no job is open and nobody has joined; it is read only by those who joined.
unsafe impl Sync for PoolShared {}
// SAFETY: the pointer in `job` is followed only while `ThreadPool::run` keeps its closure alive.
unsafe impl Send for PoolShared {}

impl ThreadPool {
    /// A pool of `threads` threads, of which the caller of [`ThreadPool::run`] is one.
    pub(crate) fn new(threads: usize) -> ThreadPool {
        let nothing: *const (dyn Fn(usize) + Sync) = &|_| {};
        let shared = Arc::new(PoolShared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(PoolJob { run: nothing, tasks: 0 }),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        // A machine that refuses a thread leaves the pool smaller, not broken.
        let workers = (1..threads)
            .map_while(|i| {
                let shared = shared.clone();
                std::thread::Builder::new().name(format!("kvant-{i}")).spawn(move || shared.work()).ok()
            })
            .collect();
        ThreadPool { shared, workers, turn: Mutex::new(()) }
    }

    /// Threads that share the work, the caller's included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `run(0)` .. `run(tasks - 1)`, each once, on the pool's threads and this one; returns when all are done.
    pub(crate) fn run(&self, tasks: usize, run: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.workers.is_empty() {
            return (0..tasks).for_each(run);
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        let run: &(dyn Fn(usize) + Sync) = &run;
        // SAFETY: only the lifetime changes. The pointer is followed by those who joined, and this function returns
        // (or unwinds) only after the job is closed and all of them have left.
        let run: *const (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(run) };
        // SAFETY: no job is open and nobody has joined: the previous `run` saw to it.
        unsafe { *shared.job.get() = PoolJob { run, tasks } };
        shared.next.store(0, Relaxed);
        let number = (shared.state.load(Relaxed) / NUMBER + 1).wrapping_mul(NUMBER);
        shared.state.store(number | OPEN, SeqCst);
        if shared.sleepers.load(SeqCst) > 0 {
            // Taking the lock orders this after a worker's last look before it sleeps.
            drop(shared.sleep.lock().unwrap_or_else(PoisonError::into_inner));
            shared.wake.notify_all();
        }
        shared.claim_tasks();
        shared.state.fetch_and(!OPEN, AcqRel);
        let mut spins = 0u32;
        while shared.state.load(Acquire) != number {
            spins = spins.wrapping_add(1);
            // On a crowded machine the worker may have lost its core: let it have ours.
            if spins.is_multiple_of(4096) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        assert!(!shared.panicked.swap(false, Relaxed), "a kernel panicked on a worker thread");
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        drop(self.shared.sleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl PoolShared {
    /// Runs tasks until none is left. A panic is kept for the caller of `ThreadPool::run`.
    fn claim_tasks(&self) {
        // SAFETY: the caller has joined (or opened) the job, so it does not change until it leaves.
        let job = unsafe { *self.job.get() };
        // SAFETY: as above, the closure lives until then.
        let run = unsafe { &*job.run };
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, Relaxed);
                if task >= job.tasks {
                    break;
                }
                run(task);
            }
        }));
        if result.is_err() {
            self.panicked.store(true, Relaxed);
        }
    }

    fn work(&self) {
        let mut done = 0;
        while let Some(state) = self.next_job(done) {
            let joined = self.state.compare_exchange(state, state + JOINED, AcqRel, Relaxed);
            if joined.is_ok() {
                done = state / NUMBER;
                self.claim_tasks();
                self.state.fetch_sub(JOINED, AcqRel);
            }
        }
    }

    /// Waits for an open job other than number `done`; `None` when the pool ends.
    fn next_job(&self, done: u64) -> Option<u64> {
        let ready = |state: u64| state & OPEN != 0 && state / NUMBER != done;
        loop {
            let start = Instant::now();
            loop {
                let state = self.state.load(Acquire);
                if ready(state) {
                    return Some(state);
                }
                if self.stop.load(Relaxed) {
                    return None;
                }
                if start.elapsed() > SPIN {
                    break;
                }
                (0..16).for_each(|_| std::hint::spin_loop());
            }
            let guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
            self.sleepers.fetch_add(1, SeqCst);
            let idle = |_: &mut ()| !ready(self.state.load(SeqCst)) && !self.stop.load(SeqCst);
            let _guard = self.wake.wait_while(guard, idle).unwrap_or_else(PoisonError::into_inner);
            self.sleepers.fetch_sub(1, SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = ThreadPool::new(threads);
            for tasks in (0..200).chain([5000]) {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, |task| {
                    counts[task].fetch_add(1, Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Relaxed) == 1), "{threads} threads, {tasks} tasks");
            }
        }
    }

    #[test]
    fn sleeping_workers_wake() {
        let pool = ThreadPool::new(3);
        for _ in 0..20 {
            std::thread::sleep(SPIN * 4);
            let sum = AtomicUsize::new(0);
            pool.run(10, |task| {
                std::thread::sleep(Duration::from_micros(200));
                sum.fetch_add(task, Relaxed);
            });
            assert_eq!(sum.into_inner(), 45);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(64, |task| assert!(task != 50))));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(64, |task| {
            sum.fetch_add(task, Relaxed);
        });
        assert_eq!(sum.into_inner(), 2016);
    }
}
