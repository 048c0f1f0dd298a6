//! The sum over ranks. Each rank adds a part of the elements and stores the sums on all ranks.

use std::ops::Range;

use super::{
    Cpu,
    elements::{Elements, PIECE, Padded},
    simd::{Simd, SimdKernel},
};
use crate::{Result, ops::all_reduce::Call};

/// Minimum elements of a task.
const TASK: usize = 4 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) -> Result<()> {
    let Some(peers) = &call.peers else {
        sum(cpu, &[Elements::of(&call.x)], &[Elements::of(&call.out)], 0..call.elements);
        return Ok(());
    };
    let x: Vec<Elements> = peers.x.iter().map(Elements::of).collect();
    let out: Vec<Elements> = peers.out.iter().map(Elements::of).collect();
    // A rank's part is a multiple of 64 elements, so that ranks write different cache lines.
    let part = call.elements.div_ceil(x.len()).next_multiple_of(64);
    let limit = |rank: usize| (rank * part).min(call.elements);
    peers.wait_for_all()?;
    sum(cpu, &x, &out, limit(peers.rank)..limit(peers.rank + 1));
    // The other ranks store their sums in this rank's `out`.
    peers.wait_for_all()
}

/// Adds elements of all ranks and stores the sums on all ranks. Ranks do this at the same time for disjoint elements.
fn sum(cpu: &Cpu, x: &[Elements], out: &[Elements], range: Range<usize>) {
    cpu.threads.run(range.len().div_ceil(TASK), |task| {
        let start = range.start + task * TASK;
        cpu.level.dispatch(Sum { x, out, range: start..range.end.min(start + TASK) });
    });
}

struct Sum<'a> {
    x: &'a [Elements],
    out: &'a [Elements],
    range: Range<usize>,
}

impl SimdKernel for Sum<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let [first, others @ ..] = self.x else { return };
        let (mut sums, mut piece) = (Padded::new(PIECE), Padded::new(PIECE));
        for start in self.range.clone().step_by(PIECE) {
            let len = PIECE.min(self.range.end - start);
            sums.set_len(len);
            piece.set_len(len);
            // SAFETY: `dispatch` enables the instructions. The elements are within the tensors, whose numbers of
            // elements are equal on all ranks. All ranks meet before and after; in between, only this task accesses
            // these elements. It reads all of them before it writes, so `out` may be `x`.
            unsafe {
                first.load::<S>(start, &mut sums);
                for x in others {
                    x.load::<S>(start, &mut piece);
                    for (sum, x) in sums.vectors::<S>().zip(piece.vectors::<S>()) {
                        S::store(sum, S::add(S::load(sum), S::load(x)));
                    }
                }
                self.out.iter().for_each(|out| out.store::<S>(start, &sums));
            }
        }
    }
}
