//! The order between the device's own stream and streams of other libraries.
//!
//! A pass that is ordered with a stream of another library runs in that stream. Successive passes there need no events
//! between the two streams. The own stream waits for them before its next work. The other stream waits for the own
//! stream only if that has got work since.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A stream's number, which is never used again.
pub(super) type StreamId = u64;

/// Which of the streams must wait for others. `E` is an event.
pub(super) struct StreamOrder<E>(Mutex<Waits<E>>);

struct Waits<E> {
    /// An event after the latest pass in another stream, until the own stream waits for it.
    pass: Option<Arc<E>>,
    /// The other stream that has all work of the own stream and all passes before its later work.
    follower: Option<StreamId>,
}

impl<E> Default for StreamOrder<E> {
    fn default() -> StreamOrder<E> {
        StreamOrder(Mutex::new(Waits { pass: None, follower: None }))
    }
}

impl<E> StreamOrder<E> {
    /// Before work in the own stream, which sees the results of all passes. `wait` makes the own stream wait for an
    /// event.
    pub fn before_work<F>(&self, wait: impl FnOnce(&E) -> Result<(), F>) -> Result<(), F> {
        let mut waits = self.lock();
        waits.catch_up(wait)?;
        waits.follower = None;
        Ok(())
    }

    /// As [`StreamOrder::before_work`], for frees, events and waits of the host, whose end no other stream must await.
    pub fn before_end<F>(&self, wait: impl FnOnce(&E) -> Result<(), F>) -> Result<(), F> {
        self.lock().catch_up(wait)
    }

    /// Before a pass in another stream. `join` makes that stream wait for the own one.
    pub fn before_pass<F>(
        &self,
        stream: StreamId,
        wait: impl FnOnce(&E) -> Result<(), F>,
        join: impl FnOnce() -> Result<(), F>,
    ) -> Result<(), F> {
        let mut waits = self.lock();
        if waits.follower == Some(stream) {
            return Ok(());
        }
        waits.catch_up(wait)?;
        join()?;
        waits.follower = Some(stream);
        Ok(())
    }

    /// After a pass in another stream, which has finished before the event.
    pub fn after_pass(&self, pass: Arc<E>) {
        self.lock().pass = Some(pass);
    }

    fn lock(&self) -> MutexGuard<'_, Waits<E>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<E> Waits<E> {
    fn catch_up<F>(&mut self, wait: impl FnOnce(&E) -> Result<(), F>) -> Result<(), F> {
        if let Some(pass) = &self.pass {
            wait(pass)?;
            self.pass = None;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, collections::HashMap, convert::Infallible};

    use super::*;

    const OWN: StreamId = 0;

    /// The work that a stream, or an event, is after: a bit for each piece.
    type Seen = u128;

    /// Streams that record the work before their next one.
    #[derive(Default)]
    struct Streams {
        order: StreamOrder<Seen>,
        seen: RefCell<HashMap<StreamId, Seen>>,
        pieces: RefCell<Seen>,
        events: RefCell<usize>,
    }

    impl Streams {
        fn seen(&self, stream: StreamId) -> Seen {
            self.seen.borrow().get(&stream).copied().unwrap_or(0)
        }

        fn wait(&self, stream: StreamId, event: Seen) -> Result<(), Infallible> {
            *self.events.borrow_mut() += 1;
            *self.seen.borrow_mut().entry(stream).or_default() |= event;
            Ok(())
        }

        /// New work in a stream, which must be after all earlier work.
        fn add(&self, stream: StreamId) {
            let mut pieces = self.pieces.borrow_mut();
            assert_eq!(self.seen(stream), *pieces, "stream {stream} has not seen all work");
            *pieces = *pieces << 1 | 1;
            self.seen.borrow_mut().insert(stream, *pieces);
        }

        fn work(&self) {
            let Ok(()) = self.order.before_work(|&pass| self.wait(OWN, pass));
            self.add(OWN);
        }

        fn end(&self) {
            let Ok(()) = self.order.before_end(|&pass| self.wait(OWN, pass));
            assert_eq!(self.seen(OWN), *self.pieces.borrow());
        }

        fn pass(&self, stream: StreamId) {
            let join = || self.wait(stream, self.seen(OWN));
            let Ok(()) = self.order.before_pass(stream, |&pass| self.wait(OWN, pass), join);
            self.add(stream);
            self.order.after_pass(Arc::new(self.seen(stream)));
        }
    }

    /// Every sequence of seven pieces of work in three streams is in one order.
    #[test]
    fn all_work_is_in_one_order() {
        for number in 0..4usize.pow(7) {
            let streams = Streams::default();
            for at in 0..7 {
                match number / 4usize.pow(at) % 4 {
                    0 => streams.work(),
                    1 => streams.end(),
                    other => streams.pass(other as StreamId),
                }
            }
            streams.end();
        }
    }

    #[test]
    fn successive_passes_need_no_events() {
        let streams = Streams::default();
        streams.work();
        streams.pass(1);
        assert_eq!(*streams.events.borrow(), 1);
        (0..50).for_each(|_| streams.pass(1));
        assert_eq!(*streams.events.borrow(), 1);
        streams.end();
        streams.pass(1);
        assert_eq!(*streams.events.borrow(), 2, "an end is no work");
        streams.work();
        streams.pass(1);
        assert_eq!(*streams.events.borrow(), 4);
    }

    /// Work that the own stream gets while a pass is enqueued is before the next pass.
    #[test]
    fn work_beside_a_pass_is_before_the_next_one() {
        let streams = Streams::default();
        let wait = |&pass: &Seen| streams.wait(OWN, pass);
        let Ok(()) = streams.order.before_pass(1, wait, || streams.wait(1, streams.seen(OWN)));
        let Ok(()) = streams.order.before_work(wait);
        streams.seen.borrow_mut().insert(OWN, 1 << 100);
        streams.seen.borrow_mut().insert(1, 1);
        streams.order.after_pass(Arc::new(1));
        let Ok(()) = streams.order.before_pass(1, wait, || streams.wait(1, streams.seen(OWN)));
        assert_eq!(streams.seen(1), 1 << 100 | 1);
    }
}
