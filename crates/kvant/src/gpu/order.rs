//! Which launches must wait for which: derived from what they declare.

use std::ops::Range;

use super::Launch;

/// Follows the launches of a pass and says where a barrier belongs.
///
/// Launches between two barriers may run in any order and at the same time. A launch needs a barrier before it when
/// it reads bytes that one since the last barrier writes, or writes bytes that one since then reads or writes.
#[derive(Default)]
pub struct Order {
    /// (allocation, bytes, written) of the launches since the last barrier.
    open: Vec<(usize, Range<usize>, bool)>,
}

impl Order {
    /// No launch yet.
    pub fn new() -> Order {
        Order::default()
    }

    /// Takes the next launch; true when a barrier belongs before it.
    pub fn needs_barrier(&mut self, launch: &Launch) -> bool {
        let conflict = launch.bindings.iter().any(|b| {
            let (allocation, range) = (b.allocation(), b.range());
            self.open.iter().any(|(other, bytes, written)| {
                *other == allocation
                    && (*written || b.access.writes())
                    && bytes.start < range.end
                    && range.start < bytes.end
            })
        });
        if conflict {
            self.open.clear();
        }
        self.open.extend(launch.bindings.iter().map(|b| (b.allocation(), b.range(), b.access.writes())));
        conflict
    }
}
