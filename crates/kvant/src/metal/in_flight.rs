//! Committed passes that are still running, and the unreported faults of finished ones.
//!
//! This is bookkeeping, as in `buffer_pool.rs`, tested without a GPU.

use std::collections::VecDeque;

use crate::Error;

/// The committed work of a pass.
pub(super) trait CommittedWork {
    fn is_done(&self) -> bool;
    /// Waits until the work is done.
    fn wait(&self);
    /// The error of finished work, if it failed.
    fn fault(&self) -> Option<Error>;
}

/// Passes, by number.
pub(super) struct InFlight<W> {
    /// Passes that are committed and not known to be done, in order.
    running: VecDeque<(u64, W)>,
    /// Faults of passes that nobody waited for yet.
    faults: Vec<(u64, Error)>,
    failed: bool,
}

impl<W: CommittedWork> InFlight<W> {
    pub(super) fn new() -> InFlight<W> {
        InFlight { running: VecDeque::new(), faults: Vec::new(), failed: false }
    }

    /// Adds a committed pass, whose number must be higher than all before.
    pub(super) fn add(&mut self, pass: u64, work: W) {
        self.running.push_back((pass, work));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Waits until all passes are done.
    pub(super) fn wait(&self) {
        self.running.iter().for_each(|(_, work)| work.wait());
    }

    /// Waits until the last pass that `uses` something is done, and with it all earlier ones.
    pub(super) fn wait_for(&self, uses: impl Fn(&W) -> bool) {
        let last = self.running.iter().rposition(|(_, work)| uses(work));
        self.running.iter().take(last.map_or(0, |last| last + 1)).for_each(|(_, work)| work.wait());
    }

    /// Removes and returns the passes that are done and have no unfinished pass before them.
    #[must_use]
    pub(super) fn take_finished(&mut self) -> Vec<(u64, W)> {
        let count = self.running.iter().take_while(|(_, work)| work.is_done()).count();
        let finished: Vec<(u64, W)> = self.running.drain(..count).collect();
        for (pass, work) in &finished {
            if let Some(error) = work.fault() {
                tracing::error!("{error}");
                self.faults.push((*pass, error));
                self.failed = true;
            }
        }
        finished
    }

    /// Records that the fault of the pass has been reported to its waiter.
    pub(super) fn reported(&mut self, pass: u64) {
        self.faults.retain(|(faulty, _)| *faulty != pass);
    }

    /// Takes the first unreported fault. Drops the others: one failure may make every later pass fail, and passes
    /// committed after this report are independent of them.
    pub(super) fn take_fault(&mut self) -> Option<Error> {
        std::mem::take(&mut self.faults).into_iter().next().map(|(_, error)| error)
    }

    /// Whether a pass has failed, reported or not, since [`InFlight::clear_failure`].
    pub(super) fn have_failed(&self) -> bool {
        self.failed
    }

    /// Declares later passes independent of the failures so far.
    pub(super) fn clear_failure(&mut self) {
        self.failed = false;
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use super::*;

    /// A pass that is done when a test sets it, or when it is waited for.
    #[derive(Clone)]
    struct FakePass {
        done: Rc<Cell<bool>>,
        fails: Option<&'static str>,
    }

    impl CommittedWork for FakePass {
        fn is_done(&self) -> bool {
            self.done.get()
        }

        fn wait(&self) {
            self.done.set(true);
        }

        fn fault(&self) -> Option<Error> {
            assert!(self.is_done());
            self.fails.map(|why| Error::DeviceFault { device: "test".to_string(), reason: why.to_string() })
        }
    }

    /// Commits passes 1, 2, … which fail as given.
    fn committed(fails: &[Option<&'static str>]) -> (InFlight<FakePass>, Vec<FakePass>) {
        let mut running = InFlight::new();
        let passes: Vec<FakePass> = fails.iter().map(|&fails| FakePass { done: Rc::default(), fails }).collect();
        passes.iter().zip(1..).for_each(|(pass, number)| running.add(number, pass.clone()));
        (running, passes)
    }

    fn numbers(finished: Vec<(u64, FakePass)>) -> Vec<u64> {
        finished.into_iter().map(|(number, _)| number).collect()
    }

    #[test]
    fn passes_finish_in_order() {
        let (mut running, passes) = committed(&[None; 3]);
        passes[1].wait();
        assert!(numbers(running.take_finished()).is_empty(), "the first is not done");
        passes[0].wait();
        assert_eq!(numbers(running.take_finished()), [1, 2]);
        assert!(!running.is_empty());
        running.wait();
        assert_eq!(numbers(running.take_finished()), [3]);
        assert!(running.is_empty() && running.take_fault().is_none() && !running.have_failed());
    }

    #[test]
    fn a_failure_is_reported_once_with_its_consequences() {
        let (mut running, _) = committed(&[None, Some("took too long"), Some("ignored"), Some("ignored, too")]);
        running.wait();
        assert_eq!(numbers(running.take_finished()), [1, 2, 3, 4]);
        let fault = running.take_fault();
        assert!(matches!(&fault, Some(Error::DeviceFault { reason, .. }) if reason == "took too long"), "{fault:?}");
        assert!(running.take_fault().is_none(), "the next transfer has nothing to do with it");
    }

    #[test]
    fn only_passes_that_use_something_are_waited_for() {
        let (mut running, passes) = committed(&[None; 4]);
        let is = |which: usize| {
            let done = passes[which].done.clone();
            move |work: &FakePass| Rc::ptr_eq(&work.done, &done)
        };
        let finished = |running: &mut InFlight<FakePass>| numbers(running.take_finished());
        running.wait_for(|_| false);
        assert!(finished(&mut running).is_empty());
        running.wait_for(is(1));
        assert_eq!(finished(&mut running), [1, 2]);
        running.wait_for(is(0));
        assert!(finished(&mut running).is_empty() && !running.is_empty());
    }

    #[test]
    fn waiting_reports_the_fault() {
        let (mut running, _) = committed(&[Some("one"), Some("two")]);
        running.wait();
        let _ = running.take_finished();
        running.reported(1);
        assert!(matches!(running.take_fault(), Some(Error::DeviceFault { reason, .. }) if reason == "two"));
        assert!(running.have_failed(), "reported or not");
        running.clear_failure();
        assert!(!running.have_failed());
    }
}
