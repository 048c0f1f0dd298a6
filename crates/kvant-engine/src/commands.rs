//! Messages to the engine's thread.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use flume::Sender;

use crate::{EngineRequest, Event, grammar::GrammarState};

/// A message to the engine's thread.
pub(crate) enum Command {
    Submit(Box<Job>),
    /// The reader of a request's events has disconnected.
    Cancel(u64),
    /// The text of a request is complete or has failed.
    End {
        id: u64,
        is_complete: bool,
    },
    /// A request with too many unread events has fewer now.
    Resume,
    /// Ends all requests.
    EndAll,
    /// Panics, to test failures.
    #[cfg(feature = "internals")]
    Panic,
    /// Lets a rank of a group fail within the next step with a prompt, to test failures.
    #[cfg(feature = "internals")]
    FailRank(usize),
}

/// A submitted request.
pub(crate) struct Job {
    pub id: u64,
    pub request: EngineRequest,
    /// The state of its grammar.
    pub grammar: Option<GrammarState>,
    pub reader: Reader,
    pub submitted: Instant,
}

/// The channel to the reader of a request, and the number of unread events. The engine does not run a request with too
/// many of them, so the channel itself can be unbounded.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    pub events: Sender<Event>,
    pub unread: Arc<AtomicUsize>,
}

impl Reader {
    pub fn send(&self, event: Event) {
        self.unread.fetch_add(1, Ordering::AcqRel);
        // A disconnected reader has cancelled its request.
        let _ = self.events.send(event);
    }
}
