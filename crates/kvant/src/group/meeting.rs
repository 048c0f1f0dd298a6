//! The barrier of the ranks of a pass in host memory. A failed rank opens it for all.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};

use crate::{Error, Result};

/// Checks of a waiting rank before it yields its core, which another rank may need.
const LOOKS: u32 = 200;

/// The barrier of a group's ranks.
pub(crate) struct Meeting {
    ranks: usize,
    /// Arrivals since the pass began.
    arrived: AtomicUsize,
    /// Whether a rank has failed in this pass.
    aborted: AtomicBool,
    /// Whether a rank is at the end of the pass.
    ended: AtomicBool,
}

impl Meeting {
    pub(super) fn new(ranks: usize) -> Meeting {
        let (aborted, ended) = (AtomicBool::new(false), AtomicBool::new(false));
        Meeting { ranks, arrived: AtomicUsize::new(0), aborted, ended }
    }

    /// Begins a pass. No rank runs yet.
    pub(super) fn start(&self) {
        self.arrived.store(0, Relaxed);
        self.aborted.store(false, Relaxed);
        self.ended.store(false, Relaxed);
    }

    /// A rank is at the end of its pass, and will not arrive again.
    pub(super) fn leave(&self) {
        self.ended.store(true, Release);
    }

    /// Lets all ranks leave, now and later in this pass. Returns whether this is the first call of the pass.
    pub(super) fn abort(&self) -> bool {
        !self.aborted.swap(true, AcqRel)
    }

    /// Returns when all ranks have arrived. The writes of each rank before its arrival are then visible to all.
    ///
    /// # Errors
    /// `DeviceFault` if a rank has failed, or has ended.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        let before = self.arrived.fetch_add(1, AcqRel);
        let wanted = (before / self.ranks + 1) * self.ranks;
        let mut looks = 0;
        while self.arrived.load(Acquire) < wanted {
            // A rank that has ended has arrived at all barriers of its pass. If arrivals are missing, they will not
            // come.
            let ended = self.ended.load(Acquire) && self.arrived.load(Acquire) < wanted;
            if ended || self.aborted.load(Acquire) {
                let (device, reason) = ("group".to_string(), "another rank has failed".to_string());
                return Err(Error::DeviceFault { device, reason });
            }
            looks += 1;
            if looks < LOOKS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        Ok(())
    }
}
