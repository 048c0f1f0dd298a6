//! Committed passes that are still running, and the faults of those that nobody waited for.
//!
//! Plain bookkeeping, as in `buffer_pool.rs`, tested without a GPU.

use std::collections::VecDeque;

use crate::Error;

/// What was committed for a pass.
pub(super) trait CommittedWork {
    fn is_done(&self) -> bool;
    /// Returns when it is done.
    fn wait(&self);
    /// What went wrong, once it is done.
    fn fault(&self) -> Option<Error>;
}

/// Passes, by number.
pub(super) struct InFlight<W> {
    /// Committed, not known to be done; in order.
    flights: VecDeque<(u64, W)>,
    /// Of passes that nobody waited for yet.
    faults: Vec<(u64, Error)>,
    failed: bool,
}

impl<W: CommittedWork> InFlight<W> {
    pub(super) fn new() -> InFlight<W> {
        InFlight { flights: VecDeque::new(), faults: Vec::new(), failed: false }
    }

    /// A pass with a higher number than those before it has been committed.
    pub(super) fn add(&mut self, pass: u64, work: W) {
        self.flights.push_back((pass, work));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// Returns when all passes are done.
    pub(super) fn wait(&self) {
        self.flights.iter().for_each(|(_, work)| work.wait());
    }

    /// Returns when the last pass that `uses` something is done, and with it all before.
    pub(super) fn wait_for(&self, uses: impl Fn(&W) -> bool) {
        let last = self.flights.iter().rposition(|(_, work)| uses(work));
        self.flights.iter().take(last.map_or(0, |last| last + 1)).for_each(|(_, work)| work.wait());
    }

    /// Removes the passes that are done and have no unfinished one before them.
    #[must_use]
    pub(super) fn land(&mut self) -> Vec<(u64, W)> {
        let count = self.flights.iter().take_while(|(_, work)| work.is_done()).count();
        let landed: Vec<(u64, W)> = self.flights.drain(..count).collect();
        for (pass, work) in &landed {
            if let Some(error) = work.fault() {
                tracing::error!("{error}");
                self.faults.push((*pass, error));
                self.failed = true;
            }
        }
        landed
    }

    /// The fault of the pass has been reported to its waiter.
    pub(super) fn reported(&mut self, pass: u64) {
        self.faults.retain(|(faulty, _)| *faulty != pass);
    }

    /// The first unreported fault. Drops the others: one failure may fail every pass after it, and passes committed
    /// after this report are independent of them.
    pub(super) fn take_fault(&mut self) -> Option<Error> {
        std::mem::take(&mut self.faults).into_iter().next().map(|(_, error)| error)
    }

    /// Whether a pass has failed, reported or not, since [`InFlight::forgive`].
    pub(super) fn have_failed(&self) -> bool {
        self.failed
    }

    /// Later passes are independent of the failures so far.
    pub(super) fn forgive(&mut self) {
        self.failed = false;
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use super::*;

    /// A pass that is done when it is said to be, or waited for.
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

    /// Passes 1, 2, … that fail as said.
    fn committed(fails: &[Option<&'static str>]) -> (InFlight<FakePass>, Vec<FakePass>) {
        let mut flights = InFlight::new();
        let passes: Vec<FakePass> = fails.iter().map(|&fails| FakePass { done: Rc::default(), fails }).collect();
        passes.iter().zip(1..).for_each(|(pass, number)| flights.add(number, pass.clone()));
        (flights, passes)
    }

    fn numbers(landed: Vec<(u64, FakePass)>) -> Vec<u64> {
        landed.into_iter().map(|(number, _)| number).collect()
    }

    #[test]
    fn passes_land_in_order() {
        let (mut flights, passes) = committed(&[None; 3]);
        passes[1].wait();
        assert!(numbers(flights.land()).is_empty(), "the first is not done");
        passes[0].wait();
        assert_eq!(numbers(flights.land()), [1, 2]);
        assert!(!flights.is_empty());
        flights.wait();
        assert_eq!(numbers(flights.land()), [3]);
        assert!(flights.is_empty() && flights.take_fault().is_none() && !flights.have_failed());
    }

    #[test]
    fn a_failure_is_reported_once_with_all_that_it_caused() {
        let (mut flights, _) = committed(&[None, Some("took too long"), Some("ignored"), Some("ignored, too")]);
        flights.wait();
        assert_eq!(numbers(flights.land()), [1, 2, 3, 4]);
        let told = flights.take_fault();
        assert!(matches!(&told, Some(Error::DeviceFault { reason, .. }) if reason == "took too long"), "{told:?}");
        assert!(flights.take_fault().is_none(), "the next transfer has nothing to do with it");
    }

    #[test]
    fn only_what_uses_something_is_waited_for() {
        let (mut flights, passes) = committed(&[None; 4]);
        let is = |which: usize| {
            let done = passes[which].done.clone();
            move |work: &FakePass| Rc::ptr_eq(&work.done, &done)
        };
        let landed = |flights: &mut InFlight<FakePass>| numbers(flights.land());
        flights.wait_for(|_| false);
        assert!(landed(&mut flights).is_empty());
        flights.wait_for(is(1));
        assert_eq!(landed(&mut flights), [1, 2]);
        flights.wait_for(is(0));
        assert!(landed(&mut flights).is_empty() && !flights.is_empty());
    }

    #[test]
    fn waiting_reports_the_fault() {
        let (mut flights, _) = committed(&[Some("one"), Some("two")]);
        flights.wait();
        let _ = flights.land();
        flights.reported(1);
        assert!(matches!(flights.take_fault(), Some(Error::DeviceFault { reason, .. }) if reason == "two"));
        assert!(flights.have_failed(), "reported or not");
        flights.forgive();
        assert!(!flights.have_failed());
    }
}
