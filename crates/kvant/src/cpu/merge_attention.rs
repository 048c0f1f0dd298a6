//! out = Σ wᵣ · xᵣ / Σ wᵣ: the attention results of all ranks, weighted by their ends. A rank merges its own heads, and
//! reads the memory of all ranks. Its threads share the rows.

use super::{
    Cpu,
    elements::{Elements, PIECE, Padded},
    simd::{Simd, SimdKernel},
};
use crate::{Result, group::Peers, ops::merge_attention::Call};

/// Minimum elements of a task.
const TASK: usize = 4 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) -> Result<()> {
    let wait = || call.peers.as_ref().map_or(Ok(()), Peers::wait_for_all);
    wait()?;
    merge(cpu, call);
    // The other ranks must have read this rank's result before it changes.
    wait()
}

fn merge(cpu: &Cpu, call: &Call) {
    // SAFETY: the locks of all ranks' devices are held while a call runs, and the call writes only to `out`.
    let parts = call.parts().map(|(x, ends)| (Elements::of(x), unsafe { ends.host_slice::<f32>() }));
    let (parts, out): (Vec<_>, _) = (parts.collect(), Elements::of(&call.out));
    // SAFETY: as above.
    let sinks: Option<&[f32]> = call.sinks.as_ref().map(|sinks| unsafe { sinks.host_slice() });
    let (rows, of_task) = (call.tokens * call.own_heads, (TASK / call.head_dim.max(1)).max(1));
    cpu.threads.run(rows.div_ceil(of_task), |task| {
        for row in task * of_task..rows.min((task + 1) * of_task) {
            let sink = sinks.map(|sinks| sinks[row % call.own_heads] * std::f32::consts::LOG2_E);
            cpu.level.dispatch(Row { parts: &parts, at: call.part_row(row), dim: call.head_dim, sink, out, row });
        }
    });
}

struct Row<'a> {
    /// The results and ends of all ranks.
    parts: &'a [(Elements, &'a [f32])],
    /// The index of the row in each part.
    at: usize,
    dim: usize,
    /// The sink of the row's head, in base 2.
    sink: Option<f32>,
    out: Elements,
    row: usize,
}

impl Row<'_> {
    /// The highest end, and the inverse of the sum of all weights relative to it.
    #[inline(always)]
    fn highest_and_inverse(&self) -> (f32, f32) {
        let ends = || self.parts.iter().map(|(_, ends)| ends[self.at]).chain(self.sink);
        let highest = ends().fold(f32::NEG_INFINITY, f32::max);
        (highest, ends().map(|end| (end - highest).exp2()).sum::<f32>().recip())
    }
}

impl SimdKernel for Row<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let (highest, inverse) = self.highest_and_inverse();
        for first in (0..self.dim).step_by(PIECE) {
            let len = PIECE.min(self.dim - first);
            let (mut x, mut sum) = (Padded::new(len), Padded::new(len));
            // Without any key, the inverse is NaN and no part is added.
            for (part, ends) in self.parts.iter().filter(|(_, ends)| ends[self.at] > f32::NEG_INFINITY) {
                // SAFETY: `dispatch` enables the instructions; the elements are within the part, which no rank writes.
                unsafe {
                    part.load::<S>(self.at * self.dim + first, &mut x);
                    let weight = S::splat((ends[self.at] - highest).exp2() * inverse);
                    for (sum, x) in sum.vectors::<S>().zip(x.vectors::<S>()) {
                        S::store(sum, S::fma(S::load(x), weight, S::load(sum)));
                    }
                }
            }
            // SAFETY: as above; the elements are within `out`, and this task alone writes the row.
            unsafe { self.out.store::<S>(self.row * self.dim + first, &sum) };
        }
    }
}
