//! Barriers between launches, derived from their declared accesses.

use std::ops::Range;

use super::Launch;

/// Follows the launches of a pass and returns the places of barriers.
///
/// Launches between two barriers may run in any order and at the same time. A launch needs a barrier before it if it
/// reads bytes that a launch since the last barrier writes, or writes bytes that such a launch reads or writes.
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

    /// Takes the next launch. Returns whether it needs a barrier before it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType, Device, Tensor,
        gpu::{Source, Use},
    };

    static SOURCE: Source = Source { name: "none", text: "", headers: &[], layouts: &[] };

    fn tensor() -> Tensor {
        Tensor::zeros(&Device::cpu(), DType::U8, &[16, 4]).unwrap()
    }

    fn rows(tensor: &Tensor, range: Range<usize>) -> Tensor {
        tensor.rows(range).unwrap()
    }

    fn launch(bindings: &[(&Tensor, Use)]) -> Launch {
        let launch = Launch::new("test", &SOURCE, "kernel");
        (0..).zip(bindings).fold(launch, |launch, (index, (tensor, access))| launch.tensor(index, tensor, *access))
    }

    /// Whether the second of two launches gets a barrier.
    fn second_waits(first: &[(&Tensor, Use)], second: &[(&Tensor, Use)]) -> bool {
        let mut order = Order::new();
        assert!(!order.needs_barrier(&launch(first)), "there is nothing to wait for");
        order.needs_barrier(&launch(second))
    }

    #[test]
    fn who_touches_what_another_writes_waits() {
        let t = &tensor();
        for (first, second) in [
            (Use::Write, Use::Read),
            (Use::Read, Use::Write),
            (Use::Write, Use::Write),
            (Use::ReadWrite, Use::Read),
            (Use::Read, Use::ReadWrite),
            (Use::ReadWrite, Use::ReadWrite),
        ] {
            assert!(second_waits(&[(t, first)], &[(t, second)]), "{first:?}, {second:?}");
            let (other, clone) = (&tensor(), &t.clone());
            let behind = [(other, Use::Read), (clone, second)];
            assert!(second_waits(&[(t, first)], &behind), "{first:?}, {second:?}, as a second binding");
        }
    }

    /// The previous launch must not write a buffer that a kernel reads early; other buffers are read in order.
    #[test]
    fn only_what_is_read_ahead_keeps_launches_apart() {
        let (t, other) = (&tensor(), &tensor());
        let may = |first: &[(&Tensor, Use)], second: &[(&Tensor, Use)]| {
            launch(second).reads_ahead(&[0]).may_read_beside(&launch(first))
        };
        let second = [(&rows(t, 4..8), Use::Read), (other, Use::Read)];
        for access in [Use::Write, Use::ReadWrite] {
            assert!(!may(&[(t, access)], &second), "{access:?}");
            assert!(!may(&[(other, Use::Read), (&rows(t, 7..9), access)], &second), "{access:?}, a row in common");
            assert!(may(&[(&rows(t, 0..4), access), (&rows(t, 8..16), access)], &second), "{access:?}, neighbours");
            assert!(may(&[(other, access)], &second), "{access:?}, in its turn");
        }
        assert!(may(&[(t, Use::Read)], &second));
    }

    #[test]
    fn readers_do_not_wait_for_one_another() {
        let t = &tensor();
        assert!(!second_waits(&[(t, Use::Read)], &[(t, Use::Read)]));
        assert!(!second_waits(&[(t, Use::Read)], &[(&rows(t, 3..5), Use::Read)]));
    }

    #[test]
    fn only_common_bytes_of_one_allocation_count() {
        let (t, other) = (&tensor(), &tensor());
        assert!(!second_waits(&[(t, Use::Write)], &[(other, Use::Write)]), "two allocations");
        let (low, high) = (&rows(t, 0..8), &rows(t, 8..16));
        assert!(!second_waits(&[(low, Use::Write)], &[(high, Use::ReadWrite)]), "neighbours");
        assert!(!second_waits(&[(high, Use::Write)], &[(low, Use::Read)]), "neighbours");
        assert!(second_waits(&[(low, Use::Write)], &[(&rows(t, 7..9), Use::Read)]), "a row in common");
        assert!(second_waits(&[(&rows(t, 7..9), Use::Read)], &[(high, Use::Write)]), "a row in common");
        assert!(second_waits(&[(t, Use::Write)], &[(&rows(t, 5..6), Use::Read)]), "within");
        assert!(second_waits(&[(&rows(t, 5..6), Use::Read)], &[(t, Use::Write)]), "around");
    }

    #[test]
    fn in_place_does_not_wait_for_itself() {
        let t = &tensor();
        assert!(!Order::new().needs_barrier(&launch(&[(t, Use::Read), (t, Use::Write)])));
    }

    #[test]
    fn a_barrier_settles_all_before_it_and_nothing_after() {
        let [a, b, c] = &[tensor(), tensor(), tensor()];
        let mut order = Order::new();
        let mut next = |bindings: &[(&Tensor, Use)]| order.needs_barrier(&launch(bindings));
        assert!(!next(&[(a, Use::Write)]));
        assert!(!next(&[(b, Use::Write)]), "independent");
        assert!(next(&[(a, Use::Read), (c, Use::Write)]));
        assert!(!next(&[(b, Use::Read)]), "the barrier was for b, too");
        assert!(next(&[(c, Use::Read)]), "written since the barrier");
        assert!(!next(&[(a, Use::Write)]), "read before the last barrier only");
        assert!(next(&[(a, Use::Read)]));
    }
}
