//! Committed passes: which of them are on their way, and what went wrong in those that nobody waited for.
//!
//! Plain bookkeeping, as `pool.rs` is, and tested without a GPU.

use std::collections::VecDeque;

use crate::Error;

/// What was committed for a pass.
pub(super) trait Work {
    fn is_done(&self) -> bool;
    /// Returns when it is done.
    fn wait(&self);
    /// What went wrong, once it is done.
    fn fault(&self) -> Option<Error>;
}

/// Passes, by number.
pub(super) struct Flights<W> {
    /// Committed, not known to be done; in order.
    flights: VecDeque<(u64, W)>,
    /// Of passes that nobody waited for yet.
    faults: Vec<(u64, Error)>,
    failed: bool,
}

impl<W: Work> Flights<W> {
    pub(super) fn new() -> Flights<W> {
        Flights { flights: VecDeque::new(), faults: Vec::new(), failed: false }
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

    /// Takes those off the list that are done and have none before them that is not.
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

    /// Whoever waited for the pass has been told of its fault.
    pub(super) fn told(&mut self, pass: u64) {
        self.faults.retain(|(faulty, _)| *faulty != pass);
    }

    /// The first of the faults that nobody has been told of. The others go with it: one failure may bring down every pass
    /// behind it, and what comes after this answer has nothing to do with them.
    pub(super) fn take_fault(&mut self) -> Option<Error> {
        std::mem::take(&mut self.faults).into_iter().next().map(|(_, error)| error)
    }

    /// Whether a pass has failed, told or not, since [`Flights::forgive`].
    pub(super) fn have_failed(&self) -> bool {
        self.failed
    }

    /// What comes has nothing to do with the failures so far.
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
    struct Pass {
        done: Rc<Cell<bool>>,
        fails: Option<&'static str>,
    }

    impl Work for Pass {
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
    fn committed(fails: &[Option<&'static str>]) -> (Flights<Pass>, Vec<Pass>) {
        let mut flights = Flights::new();
        let passes: Vec<Pass> = fails.iter().map(|&fails| Pass { done: Rc::default(), fails }).collect();
        passes.iter().zip(1..).for_each(|(pass, number)| flights.add(number, pass.clone()));
        (flights, passes)
    }

    fn numbers(landed: Vec<(u64, Pass)>) -> Vec<u64> {
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
    fn a_failure_is_told_once_whatever_it_brought_down() {
        let (mut flights, _) = committed(&[None, Some("took too long"), Some("ignored"), Some("ignored, too")]);
        flights.wait();
        assert_eq!(numbers(flights.land()), [1, 2, 3, 4]);
        let told = flights.take_fault();
        assert!(matches!(&told, Some(Error::DeviceFault { reason, .. }) if reason == "took too long"), "{told:?}");
        assert!(flights.take_fault().is_none(), "the next transfer has nothing to do with it");
    }

    #[test]
    fn who_waited_has_been_told() {
        let (mut flights, _) = committed(&[Some("one"), Some("two")]);
        flights.wait();
        let _ = flights.land();
        flights.told(1);
        assert!(matches!(flights.take_fault(), Some(Error::DeviceFault { reason, .. }) if reason == "two"));
        assert!(flights.have_failed(), "told or not");
        flights.forgive();
        assert!(!flights.have_failed());
    }
}
