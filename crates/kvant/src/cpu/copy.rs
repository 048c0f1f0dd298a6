//! Copies bytes from one tensor to another. Bound by memory: one thread copies small tensors, all threads share large
//! ones.

use super::Cpu;
use crate::ops::copy::Call;

/// Minimum bytes of a task.
const TASK: usize = 1 << 20;

#[derive(Clone, Copy)]
struct Span {
    from: *const u8,
    to: *mut u8,
}

// SAFETY: tasks copy disjoint pieces, and the device's lock excludes everyone else.
unsafe impl Sync for Span {}

impl Span {
    /// # Safety
    /// The piece is within both tensors.
    unsafe fn copy(&self, start: usize, bytes: usize) {
        // SAFETY: the caller's promise; the encoder rejects tensors that overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.from.add(start), self.to.add(start), bytes) }
    }
}

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let bytes = call.from.bytes();
    let span = Span { from: call.from.host_ptr(), to: call.to.host_ptr() };
    cpu.threads.run(bytes.div_ceil(TASK), |task| {
        let start = task * TASK;
        // SAFETY: start < bytes, and the piece ends at `bytes` at the latest.
        unsafe { span.copy(start, TASK.min(bytes - start)) }
    });
}
