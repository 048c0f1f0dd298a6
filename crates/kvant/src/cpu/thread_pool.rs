//! Threads that share the tasks of one operation.
//!
//! A decode step is hundreds of operations of a few microseconds each, so the time to distribute work matters:
//!
//! - Workers spin briefly between operations, then sleep. An operation never waits for a worker that is still asleep:
//!   it closes its job when all tasks are claimed, and waits only for workers that have joined.
//! - An operation with few tasks uses few workers, always the same ones. The other workers neither join nor wake.
//! - The caller wakes at most two sleepers. Each of these wakes two more while tasks are unclaimed, because waking a
//!   thread takes as long as a small operation.
//! - Data that different threads write is in different cache lines.

use std::{
    cell::UnsafeCell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    thread::{JoinHandle, Thread},
    time::{Duration, Instant},
};

/// Time that a worker spins for the next job before it sleeps.
const SPIN: Duration = Duration::from_micros(60);
/// Pauses of a spinning worker between two checks. Fewer pauses slow down working threads; more pauses delay the start
/// of a job.
const PAUSES: u32 = 4;
/// Checks whether the workers have left before the caller yields its core: one of them may need it.
const LOOKS: u32 = 200;
/// The number of sleepers that a thread wakes.
const WAKES: usize = 2;

/// The parts of [`PoolShared::ticket`]: whether the job is open, the number of workers it needs, and its number.
const OPEN: u64 = 1;
const WANTED: u64 = 2;
const NUMBER: u64 = 1 << 16;

pub(crate) struct ThreadPool {
    shared: Arc<PoolShared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller of the current job: one job runs at a time.
    turn: Mutex<()>,
}

/// A value in separate cache lines, in pairs because some processors fetch two lines together.
#[repr(align(128))]
#[derive(Default)]
struct Apart<T>(T);

struct PoolShared {
    /// Written by the caller twice per job.
    ticket: Apart<AtomicU64>,
    job: UnsafeCell<PoolJob>,
    /// The next task to claim.
    next: Apart<AtomicUsize>,
    /// The number of workers that may use the job. A worker increments it before it checks whether the job is open.
    joined: Apart<AtomicUsize>,
    sleepers: Box<[Apart<Sleeper>]>,
    /// Whether the pool has more threads than cores, so that waiting threads must yield.
    is_crowded: bool,
    panicked: AtomicBool,
    stop: AtomicBool,
}

#[derive(Default)]
struct Sleeper {
    is_asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

#[derive(Clone, Copy)]
struct PoolJob {
    run: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

// SAFETY: `job` is written only while no job is open and no worker that saw one open is joined. Only joined workers
// read it.
unsafe impl Sync for PoolShared {}
// SAFETY: the pointer in `job` is dereferenced only while `ThreadPool::run` keeps its closure alive.
unsafe impl Send for PoolShared {}

impl ThreadPool {
    /// Makes a pool of `threads` threads, including the caller of [`ThreadPool::run`]; at most 32767.
    pub(crate) fn new(threads: usize) -> ThreadPool {
        let nothing: *const (dyn Fn(usize) + Sync) = &|_| {};
        let shared = Arc::new(PoolShared {
            ticket: Apart::default(),
            job: UnsafeCell::new(PoolJob { run: nothing, tasks: 0 }),
            next: Apart::default(),
            joined: Apart::default(),
            sleepers: (1..threads).map(|_| Apart::default()).collect(),
            is_crowded: std::thread::available_parallelism().is_ok_and(|cores| threads > cores.get()),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        // If the machine refuses a thread, the pool is smaller, not broken.
        let workers = (1..threads)
            .map_while(|i| {
                let shared = shared.clone();
                std::thread::Builder::new().name(format!("kvant-{i}")).spawn(move || shared.work(i - 1)).ok()
            })
            .collect();
        ThreadPool { shared, workers, turn: Mutex::new(()) }
    }

    /// The number of threads that share the work, including the caller's.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `run(0)` .. `run(tasks - 1)`, each once, on the pool's threads and this one. Returns when all are done.
    pub(crate) fn run(&self, tasks: usize, run: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.workers.is_empty() {
            return (0..tasks).for_each(run);
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        let run: &(dyn Fn(usize) + Sync) = &run;
        // SAFETY: only the lifetime changes. Only joined workers dereference the pointer, and this function returns (or
        // unwinds) only after the job is closed and all of them have left.
        let run: *const (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(run) };
        // SAFETY: no job is open, and no worker that saw one open is joined: the previous `run` waited for them.
        unsafe { *shared.job.get() = PoolJob { run, tasks } };
        shared.next.0.store(0, Relaxed);
        let wanted = (tasks - 1).min(self.workers.len());
        let number = (shared.ticket.0.load(Relaxed) / NUMBER).wrapping_add(1).wrapping_mul(NUMBER);
        shared.ticket.0.store(number | (wanted as u64 * WANTED) | OPEN, SeqCst);
        shared.wake(wanted);
        shared.claim_tasks();
        shared.ticket.0.store(number, SeqCst);
        let mut looks = 0;
        // A worker joins before it reads the ticket. Therefore either this load sees the worker, or the worker sees a
        // closed job.
        while shared.joined.0.load(SeqCst) != 0 {
            looks += 1;
            if looks < LOOKS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        assert!(!shared.panicked.swap(false, Relaxed), "a kernel panicked on a worker thread");
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            let _ = worker.join();
        }
    }
}

impl PoolShared {
    /// Runs tasks until all are claimed. A panic is recorded for the caller of `ThreadPool::run`.
    fn claim_tasks(&self) {
        // SAFETY: this thread has joined (or opened) the job, which does not change until it leaves.
        let job = unsafe { *self.job.get() };
        // SAFETY: the closure lives until this thread leaves the job.
        let run = unsafe { &*job.run };
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next.0.fetch_add(1, Relaxed);
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

    fn work(&self, index: usize) {
        let mut done = 0;
        while let Some(has_slept) = self.wait(index, done) {
            self.joined.0.fetch_add(1, SeqCst);
            let ticket = self.ticket.0.load(SeqCst);
            if is_for(ticket, index, done) {
                done = ticket / NUMBER;
                if has_slept {
                    self.wake((ticket % NUMBER / WANTED) as usize);
                }
                self.claim_tasks();
            }
            self.joined.0.fetch_sub(1, SeqCst);
        }
    }

    /// Waits for an open job other than number `done` that needs this worker. Returns whether the worker has slept;
    /// `None` if the pool is being dropped.
    fn wait(&self, index: usize, done: u64) -> Option<bool> {
        let mut has_slept = false;
        loop {
            let start = Instant::now();
            loop {
                if is_for(self.ticket.0.load(Acquire), index, done) {
                    return Some(has_slept);
                }
                if self.stop.load(Relaxed) {
                    return None;
                }
                if start.elapsed() > SPIN {
                    break;
                }
                if self.is_crowded {
                    std::thread::yield_now()
                } else {
                    (0..PAUSES).for_each(|_| std::hint::spin_loop())
                }
            }
            self.sleep(index, done);
            has_slept = true;
        }
    }

    /// Sleeps until another thread wakes this worker, unless a job needs it.
    fn sleep(&self, index: usize, done: u64) {
        let Sleeper { is_asleep, thread } = &self.sleepers[index].0;
        thread.get_or_init(std::thread::current);
        is_asleep.store(true, SeqCst);
        // The caller of `run` opens a job before it looks for sleepers. Therefore either it sees this sleeper, or this
        // thread sees the job.
        while is_asleep.load(SeqCst) && !self.stop.load(SeqCst) && !is_for(self.ticket.0.load(SeqCst), index, done) {
            std::thread::park();
        }
        is_asleep.store(false, SeqCst);
    }

    /// Wakes a few of the first `wanted` workers.
    fn wake(&self, wanted: usize) {
        let asleep = self.sleepers[..wanted].iter().filter(|sleeper| sleeper.0.is_asleep.load(SeqCst));
        for Apart(Sleeper { is_asleep, thread }) in asleep.take(WAKES) {
            if is_asleep.swap(false, SeqCst)
                && let Some(thread) = thread.get()
            {
                thread.unpark();
            }
        }
    }
}

/// Whether a ticket belongs to an open job, other than number `done`, that needs worker `index`.
fn is_for(ticket: u64, index: usize, done: u64) -> bool {
    ticket & OPEN != 0 && ticket / NUMBER != done && (index as u64) < ticket % NUMBER / WANTED
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

    /// Waits until the pool's threads reach a state.
    fn wait_until(state: &str, is_reached: impl Fn() -> bool) {
        let start = Instant::now();
        while !is_reached() {
            assert!(start.elapsed() < Duration::from_secs(60), "{state}");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn asleep(pool: &ThreadPool) -> Vec<bool> {
        pool.shared.sleepers.iter().map(|sleeper| sleeper.0.is_asleep.load(SeqCst)).collect()
    }

    #[test]
    fn few_tasks_wake_few_workers_and_many_wake_all() {
        let pool = ThreadPool::new(8);
        for _ in 0..20 {
            wait_until("all sleep", || asleep(&pool).iter().all(|&is_asleep| is_asleep));
            pool.run(3, |_| std::thread::sleep(Duration::from_micros(200)));
            assert!(asleep(&pool)[2..].iter().all(|&is_asleep| is_asleep), "{:?}", asleep(&pool));
            // Each task waits for all others, so all workers must be woken.
            let started = AtomicUsize::new(0);
            pool.run(8, |_| {
                started.fetch_add(1, SeqCst);
                wait_until("all have begun", || started.load(SeqCst) == 8);
            });
        }
    }

    /// Runs operations of all sizes from several callers, with pauses in which workers fall asleep, panics, and more
    /// threads than cores.
    #[test]
    fn operations_of_many_callers_run_once() {
        for threads in [2, 3, 16] {
            let pool = &ThreadPool::new(threads);
            std::thread::scope(|scope| {
                for caller in 0..3usize {
                    scope.spawn(move || {
                        for round in 0..400usize {
                            let tasks = (caller * 31 + round * 17) % 40;
                            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                            let fails = round % 50 == 49 && tasks > 1;
                            let result = catch_unwind(AssertUnwindSafe(|| {
                                pool.run(tasks, |task| {
                                    counts[task].fetch_add(1, Relaxed);
                                    if (task + round).is_multiple_of(64) {
                                        std::thread::sleep(Duration::from_micros(150));
                                    }
                                    assert!(!fails || task + 1 != tasks, "wanted");
                                });
                            }));
                            assert_eq!(result.is_err(), fails);
                            let once = counts.iter().all(|count| count.load(Relaxed) == 1);
                            assert!(once || fails, "{threads} threads, {tasks} tasks");
                        }
                    });
                }
            });
            assert_eq!(pool.shared.joined.0.load(SeqCst), 0);
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
