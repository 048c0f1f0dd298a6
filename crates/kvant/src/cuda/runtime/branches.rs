//! Finds launches of a graph that can run at the same time as others.
//!
//! A layer with experts and a dense feed-forward has two chains of small kernels that do not depend on each other. In
//! a captured graph the second one becomes a branch, so that their latencies overlap.

use std::ops::Range;

use crate::gpu::Launch;

/// Maximum launches on each side of a branch.
const MAX_LAUNCHES: usize = 12;
/// Minimum launches on each side. A branch costs two dependencies between streams.
const MIN_LAUNCHES: usize = 2;

/// Launches `side` run at the same time as launches `main`, which directly precede them. `side` launches depend only on
/// launches before `main`, and on each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Branch {
    pub main: Range<usize>,
    pub side: Range<usize>,
}

/// The branches of launches, in order; none overlap. `usable`: whether a launch may be in a branch.
pub(super) fn branches(launches: &[&Launch], usable: impl Fn(usize) -> bool) -> Vec<Branch> {
    let meets = |at: usize, range: Range<usize>| range.into_iter().any(|other| launches[at].conflicts(launches[other]));
    let (mut found, mut at, mut floor) = (Vec::new(), 0, 0);
    while at < launches.len() {
        // The launches before this one on which it does not depend. The fork comes after at least one launch before
        // them.
        let lowest = (floor + 1).max(at.saturating_sub(MAX_LAUNCHES));
        let is_independent = |first: usize| usable(first) && !meets(at, first..first + 1);
        let first = (lowest..at).rev().take_while(|&first| is_independent(first)).last().unwrap_or(at);
        let main = first..at;
        let mut end = at;
        while end < launches.len().min(at + MAX_LAUNCHES)
            && usable(end)
            && !meets(end, main.clone())
            && (end == at || meets(end, at..end))
        {
            end += 1;
        }
        if main.len() < MIN_LAUNCHES || end - at < MIN_LAUNCHES {
            at += 1;
            continue;
        }
        found.push(Branch { main, side: at..end });
        (at, floor) = (end, end);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType, Device, Tensor,
        gpu::{Source, Use},
    };

    static SOURCE: Source = Source { name: "none", text: "", headers: &[], layouts: &[] };

    /// The branches of launches that read some tensors and write one, by number.
    fn found(launches: &[(&[usize], usize)]) -> Vec<Branch> {
        let tensors: Vec<Tensor> =
            (0..10).map(|_| Tensor::zeros(&Device::reference(), DType::U8, &[4]).unwrap()).collect();
        let launches: Vec<Launch> = launches
            .iter()
            .map(|&(read, written)| {
                let launch = Launch::new("test", &SOURCE, "kernel").tensor(0, &tensors[written], Use::Write);
                read.iter()
                    .zip(1..)
                    .fold(launch, |launch, (&from, index)| launch.tensor(index, &tensors[from], Use::Read))
            })
            .collect();
        branches(&launches.iter().collect::<Vec<_>>(), |_| true)
    }

    #[test]
    fn a_chain_has_no_branch() {
        assert!(found(&[(&[0], 1), (&[1], 2), (&[2], 3), (&[3], 4), (&[4], 5)]).is_empty());
        // A side with one launch is too short for a branch.
        assert!(found(&[(&[0], 1), (&[1], 2), (&[1], 3), (&[3], 4), (&[2, 4], 5)]).is_empty());
        assert!(found(&[(&[0], 1), (&[1], 2), (&[2], 3), (&[1], 4), (&[3, 4], 5)]).is_empty());
    }

    #[test]
    fn two_chains_from_one_launch_run_concurrently() {
        let layer: [(&[usize], usize); 6] = [(&[0], 1), (&[1], 2), (&[2], 3), (&[1], 4), (&[4], 5), (&[3, 5], 6)];
        assert_eq!(found(&layer), [Branch { main: 1..3, side: 3..5 }]);
        // Two layers as above: the second begins where the first ends.
        let second: [(&[usize], usize); 6] = [(&[6], 1), (&[1], 2), (&[2], 3), (&[1], 4), (&[4], 5), (&[3, 5], 6)];
        let both = [layer, second].concat();
        assert_eq!(found(&both), [Branch { main: 1..3, side: 3..5 }, Branch { main: 7..9, side: 9..11 }]);
    }

    #[test]
    fn a_side_ends_where_it_meets_the_other() {
        // The last launch of the second chain overwrites what the first chain reads.
        let launches: [(&[usize], usize); 7] =
            [(&[0], 1), (&[1], 2), (&[2], 3), (&[1], 4), (&[4], 5), (&[5], 2), (&[3, 5], 6)];
        assert_eq!(found(&launches), [Branch { main: 1..3, side: 3..5 }]);
        // Nothing comes before the first chain.
        assert!(found(&launches[1..]).is_empty());
    }
}
