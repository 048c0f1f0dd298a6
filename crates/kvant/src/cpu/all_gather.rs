//! The columns of all ranks. A rank copies them to its own memory.

use super::Cpu;
use crate::{Result, Tensor, ops::all_gather::Call};

/// Minimum bytes of a task.
const TASK: usize = 1 << 20;

pub(crate) fn run(cpu: &Cpu, call: &Call) -> Result<()> {
    let Some(peers) = &call.peers else {
        gather(cpu, std::slice::from_ref(&call.x), call);
        return Ok(());
    };
    peers.wait_for_all()?;
    gather(cpu, &peers.x, call);
    // Later calls may write `x`.
    peers.wait_for_all()
}

/// The addresses of the rows of all ranks, and of `out`.
struct Rows<'a> {
    x: &'a [*const u8],
    out: *mut u8,
    /// Bytes of a row of one rank.
    bytes: usize,
}

// SAFETY: tasks write different rows of `out`, and nobody writes the rows that they read.
unsafe impl Sync for Rows<'_> {}

impl Rows<'_> {
    /// # Safety
    /// The row exists on every rank and in `out`.
    unsafe fn copy(&self, row: usize) {
        for (rank, x) in self.x.iter().enumerate() {
            let to = (row * self.x.len() + rank) * self.bytes;
            // SAFETY: the caller's promise; `out` is another tensor than `x`.
            unsafe { std::ptr::copy_nonoverlapping(x.add(row * self.bytes), self.out.add(to), self.bytes) }
        }
    }
}

fn gather(cpu: &Cpu, ranks: &[Tensor], call: &Call) {
    let x: Vec<*const u8> = ranks.iter().map(|x| x.host_ptr().cast_const()).collect();
    let rows = Rows { x: &x, out: call.out.host_ptr(), bytes: call.columns * call.x.dtype().size() };
    let per_task = (TASK / (rows.bytes * x.len()).max(1)).max(1);
    cpu.threads.run(call.rows.div_ceil(per_task), |task| {
        let first = task * per_task;
        // SAFETY: each row below `call.rows` is one task's; all ranks wait for each other before and after, so
        // nobody writes `x`.
        (first..call.rows.min(first + per_task)).for_each(|row| unsafe { rows.copy(row) });
    });
}
