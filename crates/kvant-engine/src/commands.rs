//! Messages to the engine's thread.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use flume::Sender;
use kvant::PrefixPage;

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
    /// A request with too many unread events has fewer now, or a stored page was read.
    Resume,
    /// Copies pages of a prefix, from these indices on.
    Export {
        salt: Arc<[u8]>,
        tokens: Vec<u32>,
        from: Vec<usize>,
        may_grow: bool,
        max_bytes: usize,
        reply: Sender<kvant::Result<Vec<PrefixPage>>>,
    },
    /// Counts the pages of a prefix.
    Held {
        salt: Arc<[u8]>,
        tokens: Vec<u32>,
        reply: Sender<kvant::Result<Vec<usize>>>,
    },
    /// Keeps pages of a prefix.
    Import {
        salt: Arc<[u8]>,
        tokens: Vec<u32>,
        pages: Vec<PrefixPage>,
        reply: Sender<kvant::Result<usize>>,
    },
    /// Ends all requests.
    EndAll,
    /// Panics, to test failures.
    #[cfg(feature = "internals")]
    Panic,
    /// Lets a rank of a group fail within the next step with a prompt, to test failures.
    #[cfg(feature = "internals")]
    FailRank(usize),
    /// Lets the drafter fail after the next step, to test failures.
    #[cfg(feature = "internals")]
    FailDrafter,
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
