//! New keys and values into a cache layer: dense to dense as bytes or converted, dense to TurboQuant encoded.
//!
//! Sources are `[T, Hk, D]` or `[Hk, T, D]`, the layer `[S, Hk, cap, D]` or `[S, cap, Hk, D]`. Threads share the
//! tokens. Within a task, tokens that stand one after another in a sequence form a run; where source and layer have
//! the same order, a run is contiguous in both and moves as one piece.

use super::{
    Cpu, convert,
    planes::{PlaneRows, Tokens},
    scratch,
    simd::{Kernel, Simd},
};
use crate::{
    DType, KvLayer, SlotOrder, Tensor,
    ops::kv_write::{Call, SourceOrder, is_kept},
};

/// Elements of K (and as many of V) that make a task worth a thread.
const TASK: usize = 16 * 1024;

/// Elements converted at once.
const CHUNK: usize = 4096;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let spec = call.layer.spec();
    // SAFETY: kernels run under the device's lock, and this one does not write to the step.
    let tokens = unsafe { Tokens::new(&call.step) };
    let sides = [
        Side { source: Source::new(&call.k), planes: PlaneRows::new(&call.layer.k, spec.head_dim) },
        Side { source: Source::new(&call.v), planes: PlaneRows::new(&call.layer.v, spec.head_dim) },
    ];
    let mut per_task = (TASK / (spec.kv_heads * spec.head_dim)).max(1);
    if per_task < call.tokens && !tokens.are_distinct() {
        per_task = call.tokens;
    }
    cpu.pool.run(call.tokens.div_ceil(per_task), |task| {
        let range = task * per_task..((task + 1) * per_task).min(call.tokens);
        cpu.level.dispatch(Task { call, tokens, sides: &sides, range });
    });
}

struct Side {
    source: Source,
    planes: PlaneRows,
}

#[derive(Clone, Copy)]
struct Source {
    start: *const u8,
    dtype: DType,
}

// SAFETY: sources are only read.
unsafe impl Sync for Source {}

impl Source {
    fn new(tensor: &Tensor) -> Source {
        Source { start: tensor.host_ptr(), dtype: tensor.dtype() }
    }
}

struct Task<'a> {
    call: &'a Call,
    tokens: Tokens<'a>,
    sides: &'a [Side; 2],
    range: std::ops::Range<usize>,
}

impl Kernel for Task<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let mut token = self.range.start;
        while token < self.range.end {
            let run = run_length(&self.tokens, &self.call.layer, token..self.range.end);
            if run > 0 {
                for side in self.sides {
                    // SAFETY: `dispatch` enables the instructions; the run's tokens exist and are kept.
                    unsafe { self.write::<S>(side, token, run) }
                }
            }
            token += run.max(1);
        }
    }
}

/// How many tokens from the first of `tokens` on go to consecutive slots of one sequence; 0 when it is not kept.
#[inline(always)]
fn run_length(step: &Tokens, layer: &KvLayer, tokens: std::ops::Range<usize>) -> usize {
    let first = tokens.start;
    let (sequence, position) = (step.sequence[first], step.positions[first] as usize);
    let (len, capacity) = (step.lens[sequence as usize] as usize, layer.spec().capacity);
    if !is_kept(position, len, capacity) {
        return 0;
    }
    let longest = tokens.len().min(capacity - layer.slot(position));
    let follows = |&i: &usize| {
        step.sequence[first + i] == sequence
            && step.positions[first + i] as usize == position + i
            && is_kept(position + i, len, capacity)
    };
    1 + (1..longest).take_while(follows).count()
}

impl Task<'_> {
    /// Writes one side of a run.
    ///
    /// # Safety
    /// The level's instructions are enabled; the tokens exist and go to consecutive slots.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, side: &Side, token: usize, run: usize) {
        let (call, layer) = (self.call, &self.call.layer);
        let spec = layer.spec();
        let sequence = self.tokens.sequence[token] as usize;
        let slot = layer.slot(self.tokens.positions[token] as usize);
        let from = |token, head| {
            let row = call.order.row(call.first_token + token, head, call.source_tokens, spec.kv_heads);
            side.source.start.wrapping_add(row * spec.head_dim * side.source.dtype.size())
        };
        // SAFETY: the rows exist in the source and in the layer (validated, or checked by `is_kept`), and no other
        // task writes to those slots.
        unsafe {
            match (call.order, spec.order, side.planes.dense()) {
                (SourceOrder::HeadMajor, SlotOrder::HeadMajor, Some(dtype)) => {
                    for head in 0..spec.kv_heads {
                        let to = side.planes.dense_row(layer.row(sequence, head, slot), dtype);
                        move_elements::<S>(from(token, head), side.source.dtype, to, dtype, run * spec.head_dim);
                    }
                }
                (SourceOrder::TokenMajor, SlotOrder::TokenMajor, Some(dtype)) => {
                    let to = side.planes.dense_row(layer.row(sequence, 0, slot), dtype);
                    let elements = run * spec.kv_heads * spec.head_dim;
                    move_elements::<S>(from(token, 0), side.source.dtype, to, dtype, elements);
                }
                (_, _, Some(dtype)) => {
                    for head in 0..spec.kv_heads {
                        for i in 0..run {
                            let to = side.planes.dense_row(layer.row(sequence, head, slot + i), dtype);
                            move_elements::<S>(from(token + i, head), side.source.dtype, to, dtype, spec.head_dim);
                        }
                    }
                }
                (_, _, None) => scratch::with(spec.head_dim, |x| {
                    for head in 0..spec.kv_heads {
                        for i in 0..run {
                            convert::load_row::<S>(from(token + i, head), side.source.dtype, x);
                            side.planes.store::<S>(layer.row(sequence, head, slot + i), x);
                        }
                    }
                }),
            }
        }
    }
}

/// Copies elements, converting them where the dtypes differ.
///
/// # Safety
/// The level's instructions are enabled; both are valid for `n` elements and do not overlap.
#[inline(always)]
pub(super) unsafe fn move_elements<S: Simd>(
    from: *const u8,
    from_dtype: DType,
    to: *mut u8,
    to_dtype: DType,
    n: usize,
) {
    // SAFETY: the caller's promise; chunks end at n.
    unsafe {
        if from_dtype == to_dtype {
            return std::ptr::copy_nonoverlapping(from, to, n * to_dtype.size());
        }
        scratch::with(n.min(CHUNK), |chunk| {
            for start in (0..n).step_by(CHUNK) {
                let chunk = &mut chunk[..CHUNK.min(n - start)];
                convert::load_row::<S>(from.add(start * from_dtype.size()), from_dtype, chunk);
                convert::store_row::<S>(chunk, to.add(start * to_dtype.size()), to_dtype);
            }
        });
    }
}
