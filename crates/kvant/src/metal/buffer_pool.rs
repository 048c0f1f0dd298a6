//! Keeps released memory, and decides when it may be reused.
//!
//! This is bookkeeping without a GPU: memory can be of any type, and passes are numbers. It is therefore tested on
//! every system.

use std::collections::{BTreeMap, VecDeque};

/// Keeps released memory for later allocations of its size class.
///
/// Memory is handed out again when every pass that was committed before its release has completed. Later passes do not
/// use it.
pub(super) struct BufferPool<M> {
    committed: u64,
    completed: u64,
    /// Released memory, with the pass that must complete first, in the order of passes.
    retired: VecDeque<(u64, usize, M)>,
    /// Memory that is ready for reuse, by size class.
    ready: BTreeMap<usize, Vec<M>>,
    ready_bytes: usize,
    /// Ready memory beyond this many bytes is returned to the system.
    max_ready_bytes: usize,
}

/// The unit of allocations, which is the page size of Apple's processors.
const PAGE: usize = 16 << 10;
/// Maximum bytes of small allocations, which have one of a few sizes so that they can be reused for each other.
const SMALL: usize = 1 << 20;

/// The bytes that an allocation of `bytes` takes. `None` if the size overflows.
///
/// Small allocations are rounded up by at most an eighth, to whole pages, so that similar sizes share a class. Large
/// ones (weights, caches) are only rounded up to whole pages, because an eighth would be a significant loss.
pub(super) fn size_class(bytes: usize) -> Option<usize> {
    let step = if bytes > SMALL { PAGE } else { (bytes.next_power_of_two() / 16).max(PAGE) };
    bytes.max(1).checked_next_multiple_of(step)
}

impl<M> BufferPool<M> {
    pub(super) fn new(max_ready_bytes: usize) -> BufferPool<M> {
        let (retired, ready) = (VecDeque::new(), BTreeMap::new());
        BufferPool { committed: 0, completed: 0, retired, ready, ready_bytes: 0, max_ready_bytes }
    }

    /// Registers a pass that is about to be committed, and returns its number.
    pub(super) fn commit(&mut self) -> u64 {
        self.committed += 1;
        self.committed
    }

    /// Records that every pass up to and including this one has completed. Returns memory to give back to the system.
    #[must_use]
    pub(super) fn complete(&mut self, pass: u64) -> Vec<M> {
        self.completed = self.completed.max(pass);
        let mut surplus = Vec::new();
        while self.retired.front().is_some_and(|(pass, ..)| *pass <= self.completed) {
            let (_, size, memory) = self.retired.pop_front().expect("the queue has a front");
            surplus.extend(self.keep(size, memory));
        }
        surplus
    }

    /// Takes memory of a size class that no unfinished pass uses; `None` if there is none.
    pub(super) fn take(&mut self, size: usize) -> Option<M> {
        let memory = self.ready.get_mut(&size)?.pop()?;
        self.ready_bytes -= size;
        Some(memory)
    }

    /// Accepts memory that nobody holds any more. Returns it if it must be given back to the system.
    #[must_use]
    pub(super) fn give(&mut self, size: usize, memory: M) -> Option<M> {
        if self.completed >= self.committed {
            return self.keep(size, memory);
        }
        self.retired.push_back((self.committed, size, memory));
        None
    }

    /// Removes all ready memory, for the system. Memory that may still be in use stays.
    #[must_use]
    pub(super) fn trim(&mut self) -> Vec<M> {
        self.ready_bytes = 0;
        std::mem::take(&mut self.ready).into_values().flatten().collect()
    }

    /// Bytes that [`BufferPool::trim`] gives back.
    pub(super) fn ready_bytes(&self) -> usize {
        self.ready_bytes
    }

    fn keep(&mut self, size: usize, memory: M) -> Option<M> {
        match self.ready_bytes.checked_add(size) {
            Some(total) if total <= self.max_ready_bytes => {
                self.ready_bytes = total;
                self.ready.entry(size).or_default().push(memory);
                None
            }
            _ => Some(memory),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn size_classes_suffice_and_waste_little() {
        for bytes in (0..3 * SMALL).step_by(777).chain([1, PAGE, PAGE + 1, SMALL, SMALL + 1, 5_000_000_000]) {
            let size = size_class(bytes).unwrap();
            assert!(size >= bytes.max(1) && size.is_multiple_of(PAGE), "{bytes}: {size}");
            assert!(size - bytes <= PAGE.max(bytes / 8), "{bytes}: {size}");
            assert_eq!(size_class(size), Some(size), "{bytes}");
        }
        assert_eq!(size_class(usize::MAX), None);
    }

    #[test]
    fn memory_waits_for_the_passes_before_its_release() {
        let mut pool = BufferPool::new(usize::MAX);
        let (first, second) = (pool.commit(), pool.commit());
        assert!(pool.give(PAGE, "a").is_none());
        let third = pool.commit();
        assert!(pool.complete(first).is_empty());
        assert_eq!(pool.take(PAGE), None, "the second pass may use it");
        assert!(pool.complete(second).is_empty());
        assert_eq!(pool.take(2 * PAGE), None, "of another size");
        assert_eq!(pool.take(PAGE), Some("a"), "the third pass does not use it");
        assert_eq!(pool.take(PAGE), None, "handed out twice");
        assert!(pool.give(PAGE, "a").is_none());
        assert_eq!(pool.take(PAGE), None, "released again while the third pass runs");
        assert!(pool.complete(third).is_empty());
        assert_eq!(pool.take(PAGE), Some("a"));
    }

    #[test]
    fn surplus_is_returned_to_the_system_only_when_unused() {
        let mut pool = BufferPool::new(2 * PAGE);
        assert_eq!(pool.give(PAGE, 1), None);
        let pass = pool.commit();
        assert_eq!((pool.give(PAGE, 2), pool.give(PAGE, 3)), (None, None));
        assert_eq!(pool.trim(), [1], "2 and 3 may be in use");
        assert_eq!(pool.give(4 * PAGE, 4), None);
        assert_eq!(pool.complete(pass), [4], "beyond the limit");
        assert_eq!(pool.give(PAGE, 5), Some(5), "beyond the limit, with nothing in flight");
        let mut rest = pool.trim();
        rest.sort_unstable();
        assert_eq!(rest, [2, 3]);
        assert_eq!(pool.give(PAGE, 6), None, "the pool has room again");
    }

    #[derive(Clone, Debug)]
    enum PoolAction {
        Allocate(usize),
        Release(usize),
        Commit,
        Complete,
        Trim,
    }

    fn steps() -> impl Strategy<Value = Vec<PoolAction>> {
        let step = prop_oneof![
            4 => (1usize..4).prop_map(PoolAction::Allocate),
            4 => any::<prop::sample::Index>().prop_map(|i| PoolAction::Release(i.index(1000))),
            2 => Just(PoolAction::Commit),
            2 => Just(PoolAction::Complete),
            1 => Just(PoolAction::Trim),
        ];
        prop::collection::vec(step, 1..200)
    }

    proptest! {
        /// Compares the pool with a model in which every pass uses all memory that is alive when it is committed.
        #[test]
        fn never_hands_out_or_drops_memory_of_unfinished_passes(steps in steps()) {
            let mut pool = BufferPool::new(3 * PAGE);
            let mut alive: Vec<(usize, u32)> = Vec::new();
            let mut last_use: HashMap<u32, u64> = HashMap::new();
            let (mut fresh, mut committed, mut completed) = (0u32, 0, 0);
            for step in steps {
                let mut dropped = Vec::new();
                match step {
                    PoolAction::Allocate(pages) => {
                        let memory = pool.take(pages * PAGE).unwrap_or_else(|| { fresh += 1; fresh });
                        prop_assert!(last_use.get(&memory).is_none_or(|pass| *pass <= completed), "handed out in use");
                        prop_assert!(alive.iter().all(|(_, other)| *other != memory), "handed out twice");
                        alive.push((pages * PAGE, memory));
                    }
                    PoolAction::Release(i) if !alive.is_empty() => {
                        let (size, memory) = alive.swap_remove(i % alive.len());
                        dropped.extend(pool.give(size, memory));
                    }
                    PoolAction::Release(_) => {}
                    PoolAction::Commit => {
                        committed = pool.commit();
                        last_use.extend(alive.iter().map(|(_, memory)| (*memory, committed)));
                    }
                    PoolAction::Complete if completed < committed => {
                        completed += 1;
                        dropped = pool.complete(completed);
                    }
                    PoolAction::Complete => {}
                    PoolAction::Trim => {
                        let ready = pool.ready_bytes();
                        dropped = pool.trim();
                        prop_assert_eq!((dropped.is_empty(), pool.ready_bytes()), (ready == 0, 0));
                    }
                }
                for memory in dropped {
                    prop_assert!(last_use.get(&memory).is_none_or(|pass| *pass <= completed), "dropped in use");
                }
            }
        }
    }
}
