//! Attention over a cache layer: q `[T, H, D]` → out `[T, H, D]`; decode, verification and prefill are one kernel.
//!
//! A task is a (block of query tokens, KV head, split of the context). Over long contexts in pages it has several KV
//! heads, so that it reads whole pages. Consecutive tokens of a sequence form a block; its G · tokens query rows read
//! each key and value once. [`route`] selects the kernel:
//!
//! - [`few_rows`]: keys that all rows see are processed in tiles of 64. Keys that only some rows see, at the diagonal
//!   and at a window's edge, are processed token by token.
//! - [`fixed_point`]: as `few_rows`, with quantised keys or values as 16-bit integers.
//! - [`many_rows`]: all keys are processed in tiles, with a mask.
//! - [`amx_rows`]: as `many_rows`, with bf16 products on AMX.
//!
//! Keys that no row of the block sees are not read. With one split, a task writes its rows of `out`. With more, it
//! writes partial states, which are merged in order after all tasks ([`state`]).
//!
//! Over quantised keys, the queries are rotated once per task; over quantised values, the sums stay rotated until the
//! end of the task. Codecs that pack two coordinates into a byte are read as even and odd coordinates, so queries and
//! sums are kept in that order. [`fixed_point`] uses other orders.
//!
//! A result does not depend on timing. The number of threads determines the splits, and thereby the order of f32 sums.
//! Splits end where tiles end, so rounding relative to a tile does not depend on the number of threads. Tiles of a
//! prompt and of decode begin at different positions, so a token's results in both agree only within the error that
//! [`Attend`](crate::ops::Attend) states.
//!
//! On a batch-invariant device, a token's result depends only on its own keys. They are added in a fixed order: by
//! tiles, which end at multiples of 64 positions, within parts of [`PART`](plan::PART) positions, whose states are
//! merged in order. The number of threads decides only whether tasks share the parts. Kernels for few rows process
//! every block.

use std::cell::RefCell;

use super::{
    Cpu, convert, scratch,
    simd::{Simd, SimdKernel, SimdLevel},
};
use crate::{
    layer::PageTable,
    ops::attend::{Call, Results},
};

#[cfg(test)]
pub(super) mod accuracy;
#[cfg_attr(not(target_arch = "x86_64"), path = "amx_rows_stub.rs")]
mod amx_rows;
mod few_rows;
#[cfg_attr(not(target_arch = "x86_64"), path = "fixed_point_stub.rs")]
mod fixed_point;
mod kv_rows;
mod lane_softmax;
mod many_rows;
mod plan;
mod prefetch;
mod route;
mod stage;
mod state;
mod task;
#[cfg(test)]
mod tests;
mod tile;

use plan::{BatchShape, QueryBlock, WorkPlan};
pub(super) use route::explain;
use route::{is_quantised, level_of};
use state::SoftmaxState;
use task::run_task;

thread_local! {
    /// Kept between calls, so that a step allocates nothing after warm-up.
    static PLAN: RefCell<WorkPlan> = RefCell::default();
}

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let spec = call.layer.spec();
    // SAFETY: the device's lock is held while a call runs, and the call writes to none of these.
    let (positions, sequence, lens) =
        unsafe { (call.step.positions.host_slice(), call.step.sequence.host_slice(), call.step.lens.host_slice()) };
    let quantised = is_quantised(call);
    let level = level_of(cpu.level, call.head_dim);
    let shape = BatchShape {
        positions,
        sequence,
        lens,
        capacity: spec.capacity,
        window: call.window,
        span: call.span,
        page_tokens: call.layer.page_tokens(),
        kv_heads: spec.kv_heads,
        group: call.heads / spec.kv_heads,
        head_dim: call.head_dim,
        level,
        quantised,
        batch_invariant: cpu.batch_invariant,
        paged: call.layer.is_paged(),
        threads: cpu.threads.threads(),
        splits: call.splits,
    };
    let mut plan = PLAN.take();
    plan.make(&shape);
    // A partial state is o, then m and l.
    let partial_len = call.head_dim + 2;
    let partials = &mut *scratch::take(plan.partial_rows * partial_len);
    let partials = Partials(partials.as_mut_ptr());
    // SAFETY: as above.
    let table = unsafe { call.step.page_table(&call.layer) };
    let job = AttendJob { call, table, shape: &shape, plan: &plan, partials, level };
    // Later tokens of a prompt see more positions: run the largest tasks first.
    cpu.threads.run(plan.tasks, |task| run_task(&job, plan.tasks - 1 - task));
    if plan.partial_rows > 0 {
        let heads = plan.blocks.len() * spec.kv_heads;
        cpu.threads.run(heads, |i| {
            let (block, head) = (&plan.blocks[i / spec.kv_heads], i % spec.kv_heads);
            level.dispatch(MergeSplits { job: &job, block, head });
        });
    }
    PLAN.set(plan);
}

/// The data that all tasks of one call share.
struct AttendJob<'a> {
    call: &'a Call,
    table: PageTable<'a>,
    shape: &'a BatchShape<'a>,
    plan: &'a WorkPlan,
    partials: Partials,
    level: SimdLevel,
}

#[derive(Clone, Copy)]
struct Partials(*mut f32);

// SAFETY: every task writes its own rows, which are read only after all tasks.
unsafe impl Sync for Partials {}

impl AttendJob<'_> {
    /// The partial states of a (block, KV head, split).
    ///
    /// # Safety
    /// The block has more than one split; nobody else accesses these rows.
    unsafe fn partial<'a>(&self, block: &QueryBlock, head: usize, split: usize) -> SoftmaxStates<'a> {
        let (rows, head_dim) = (block.segment.tokens * self.shape.group, self.shape.head_dim);
        let first = block.first_partial + (head * block.splits + split) * rows;
        // SAFETY: the plan allocated these rows, of head_dim + 2 floats each.
        let floats = unsafe {
            std::slice::from_raw_parts_mut(self.partials.0.add(first * (head_dim + 2)), rows * (head_dim + 2))
        };
        SoftmaxStates::new(floats, rows, head_dim)
    }

    /// Merges the states with earlier results, normalises them and writes them to `out`. Writes their ends, too, if a
    /// later call merges them.
    ///
    /// # Safety
    /// The level's instructions are enabled; the states belong to the block's rows, which nobody else writes.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, states: &mut SoftmaxStates, block: &QueryBlock, head: usize) {
        let (out, group) = (&self.call.out, self.shape.group);
        // SAFETY: the device's lock is held while a call runs, and the call writes only to `out`.
        let sinks: Option<&[f32]> = self.call.sinks.as_ref().map(|sinks| unsafe { sinks.host_slice() });
        for row in 0..states.rows() {
            let mut state = states.row(row);
            // SAFETY: passed on to the caller. Results of a row are read before they are overwritten.
            unsafe {
                let at = self.offset(block, head, row) / self.shape.head_dim;
                if let Some(Results { out, ends }) = &self.call.earlier {
                    let end = ends.host_ptr().cast::<f32>().add(at);
                    let o = out.host_ptr().cast::<f32>().add(at * self.shape.head_dim);
                    let o = std::slice::from_raw_parts_mut(o, self.shape.head_dim);
                    if *end != f32::NEG_INFINITY {
                        state.merge::<S>(&SoftmaxState { o, m: &mut { *end }, l: &mut 1.0 });
                    }
                }
                if let Some(sinks) = sinks {
                    state.add_sink::<S>(sinks[head * group + row % group] * std::f32::consts::LOG2_E);
                }
                if let Some(ends) = &self.call.ends {
                    let end = state.end();
                    *ends.host_ptr().cast::<f32>().add(at) = end;
                    if end == f32::NEG_INFINITY {
                        state.clear();
                    }
                }
                state.finish::<S>();
                let to = out.host_ptr().add(self.offset(block, head, row) * out.dtype().size());
                convert::store_row::<S>(state.o, to, out.dtype());
            }
        }
    }

    /// The index in q and out of the first element of a query row.
    fn offset(&self, block: &QueryBlock, head: usize, row: usize) -> usize {
        let group = self.shape.group;
        let token = block.segment.token + row / group;
        (token * self.call.heads + head * group + row % group) * self.shape.head_dim
    }
}

/// States of consecutive query rows: `o` of all, then `m`, then `l`.
struct SoftmaxStates<'a> {
    o: &'a mut [f32],
    m: &'a mut [f32],
    l: &'a mut [f32],
}

impl<'a> SoftmaxStates<'a> {
    fn new(floats: &'a mut [f32], rows: usize, head_dim: usize) -> Self {
        let (o, rest) = floats.split_at_mut(rows * head_dim);
        let (m, l) = rest.split_at_mut(rows);
        SoftmaxStates { o, m, l: &mut l[..rows] }
    }

    fn rows(&self) -> usize {
        self.m.len()
    }

    fn row(&mut self, row: usize) -> SoftmaxState<'_> {
        let head_dim = self.o.len() / self.m.len();
        SoftmaxState { o: &mut self.o[row * head_dim..][..head_dim], m: &mut self.m[row], l: &mut self.l[row] }
    }

    /// Merges row by row.
    ///
    /// # Safety
    /// As for [`SoftmaxState::merge`].
    #[inline(always)]
    unsafe fn merge<S: Simd>(&mut self, other: &mut SoftmaxStates) {
        for row in 0..self.rows() {
            // SAFETY: passed on to the caller.
            unsafe { self.row(row).merge::<S>(&other.row(row)) };
        }
    }

    fn clear(&mut self) {
        (0..self.rows()).for_each(|row| self.row(row).clear());
    }
}

/// Merges the partial states of a (block, KV head) in order.
struct MergeSplits<'a> {
    job: &'a AttendJob<'a>,
    block: &'a QueryBlock,
    head: usize,
}

impl SimdKernel for MergeSplits<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        if self.block.splits == 1 {
            return;
        }
        // SAFETY: `dispatch` enables the instructions; all tasks are done, and only this task reads their states and
        // writes these rows.
        unsafe {
            let mut first = self.job.partial(self.block, self.head, 0);
            for split in 1..self.block.splits {
                let mut other = self.job.partial(self.block, self.head, split);
                first.merge::<S>(&mut other);
            }
            self.job.write::<S>(&mut first, self.block, self.head);
        }
    }
}
