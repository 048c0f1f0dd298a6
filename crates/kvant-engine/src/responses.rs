//! The events of a request, as its submitter reads them.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use flume::{Receiver, Sender};

use crate::{Event, Failure, commands::Command};

/// The events of a request, in order. Dropping it cancels the request and releases its pages after the current step.
///
/// [`Responses::recv`] and the iterator block; [`Responses::recv_async`] is for async code, with any runtime.
pub struct Responses {
    id: u64,
    events: Receiver<Event>,
    commands: Sender<Command>,
    unread: Arc<AtomicUsize>,
    limit: usize,
    has_ended: bool,
}

impl Responses {
    /// `limit` unread events pause the request, until `commands` gets `Resume`.
    pub(crate) fn new(
        id: u64,
        events: Receiver<Event>,
        commands: Sender<Command>,
        unread: Arc<AtomicUsize>,
        limit: usize,
    ) -> Responses {
        Responses { id, events, commands, unread, limit, has_ended: false }
    }

    /// The id of the request, for logs.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Waits for the next event. Returns `None` after the last one.
    pub fn recv(&mut self) -> Option<Event> {
        if self.has_ended {
            return None;
        }
        let event = self.events.recv().ok();
        self.count(event)
    }

    /// Like [`Responses::recv`], for async code.
    pub async fn recv_async(&mut self) -> Option<Event> {
        if self.has_ended {
            return None;
        }
        let event = self.events.recv_async().await.ok();
        self.count(event)
    }

    /// Like [`Responses::recv`], with a time limit.
    ///
    /// # Errors
    /// [`NoEvent`] if no event arrives in time.
    pub fn recv_timeout(&mut self, limit: Duration) -> Result<Option<Event>, NoEvent> {
        if self.has_ended {
            return Ok(None);
        }
        match self.events.recv_timeout(limit) {
            Err(flume::RecvTimeoutError::Timeout) => Err(NoEvent),
            event => Ok(self.count(event.ok())),
        }
    }

    /// Counts an event as read. If the channel ends before the last event, both threads of the engine have failed.
    fn count(&mut self, event: Option<Event>) -> Option<Event> {
        let event = event.unwrap_or_else(|| Event::Failed(Failure::Engine("its threads have ended".to_string())));
        if self.unread.fetch_sub(1, Ordering::AcqRel) == self.limit {
            let _ = self.commands.send(Command::Resume);
        }
        self.has_ended = matches!(event, Event::Finished(_) | Event::Failed(_));
        Some(event)
    }
}

/// No event arrived in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no event arrived in time")]
pub struct NoEvent;

impl Iterator for Responses {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.recv()
    }
}

impl Drop for Responses {
    fn drop(&mut self) {
        if !self.has_ended {
            let _ = self.commands.send(Command::Cancel(self.id));
        }
    }
}

impl fmt::Debug for Responses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Responses(request {})", self.id)
    }
}
