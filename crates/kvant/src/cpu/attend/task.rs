//! One task: the keys of a split for the queries of a block.

use std::ops::Range;

use super::{
    AttendJob, SoftmaxStates, few_rows,
    few_rows::TileMemory,
    fixed_point,
    kv_rows::{KvRows, KvRun, KvSource},
    many_rows::{AbsorbTile, KeyTile, QueryLanes, TransposeQueries},
    plan::QueryBlock,
    route::{AttendKernel, MANY_ROWS, select},
    tile::{self, Queries, TILE},
};
use crate::{
    codec::BLOCK,
    cpu::{
        convert, hadamard, scratch,
        simd::{Simd, SimdKernel},
    },
};

/// Runs a task of the plan. Only what computes is compiled for a SIMD level: the kernels that are dispatched.
pub(super) fn run_task(job: &AttendJob, task: usize) {
    let (block, head, split) = job.plan.task(task);
    let (rows, head_dim) = (block.segment.tokens * job.shape.group, job.shape.head_dim);
    let len = rows * (head_dim + 2);
    let rounded = if job.fixed { rows * (head_dim / 2 + head_dim.div_ceil(BLOCK)) } else { 0 };
    let many = if rows >= MANY_ROWS { QueryLanes::len(rows, head_dim) } else { 0 };
    let sizes = [rows * head_dim, rounded, len, TileMemory::len(rows, head_dim), many];
    with_aligned(sizes, |[q, rounded, states, room, many]| {
        let room = TileMemory::new(room, rows, head_dim);
        let mut work = BlockWork { job, block, head, keys: block.part(split), q, rounded, room, many };
        let mut states = SoftmaxStates::new(states, rows, head_dim);
        // SAFETY: the plan gives every task its own rows.
        unsafe { work.run(&mut states) };
        job.level.dispatch(FinishTask { job, block, head, split, states });
    });
}

/// Writes the result of a task, or its partial states if there are more splits.
struct FinishTask<'a> {
    job: &'a AttendJob<'a>,
    block: &'a QueryBlock,
    head: usize,
    split: usize,
    states: SoftmaxStates<'a>,
}

impl SimdKernel for FinishTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let FinishTask { job, block, head, split, mut states } = self;
        // SAFETY: `dispatch` enables the instructions; the plan gives every task its own rows.
        unsafe {
            if block.splits == 1 {
                job.write::<S>(&mut states, block, head);
            } else {
                let partial = job.partial(block, head, split);
                partial.o.copy_from_slice(states.o);
                partial.m.copy_from_slice(states.m);
                partial.l.copy_from_slice(states.l);
            }
        }
    }
}

/// A task at work: its queries and scratch memory.
struct BlockWork<'a> {
    job: &'a AttendJob<'a>,
    block: &'a QueryBlock,
    head: usize,
    /// Its part of the block's keys, counted from the first that any of its tokens sees.
    keys: Range<usize>,
    /// `[rows, head_dim]`.
    q: &'a mut [f32],
    /// The same in fixed point, and its units, where that is wanted.
    rounded: &'a mut [f32],
    room: TileMemory,
    /// For [`QueryLanes`] query rows.
    many: &'a mut [f32],
}

impl BlockWork<'_> {
    /// The states of the block's queries over the task's keys.
    unsafe fn run(&mut self, states: &mut SoftmaxStates) {
        states.clear();
        let (job, segment) = (self.job, &self.block.segment);
        let first = job.shape.seen_by_any(segment).start;
        let positions = first + self.keys.start..first + self.keys.end;
        if positions.is_empty() {
            return;
        }
        let source = KvSource::new(&job.call.layer, job.table, segment.sequence, self.head, job.fixed);
        let (k, v) = (&source.k, &source.v);
        self.load_queries(k.quantised && !job.call.q_rotated, k.interleaved && !k.fixed);
        if k.fixed {
            self.round_queries(k);
        }
        // SAFETY: passed on to the caller.
        unsafe { self.absorb(&source, positions, states) };
        if v.quantised {
            if v.fixed {
                fixed_point::order_sum(v, states.o);
            }
            let interleaved = v.interleaved && !v.fixed;
            job.level.dispatch(UnrotateSums { interleaved, o: states.o, head_dim: job.shape.head_dim });
        }
    }

    /// The block's queries in f32, times scale · log2 e.
    fn load_queries(&mut self, rotate: bool, interleaved: bool) {
        let BlockWork { job, block, head, ref mut q, .. } = *self;
        job.level.dispatch(LoadQueries { job, block, head, rotate, interleaved, q });
    }

    /// The block's queries in fixed point, for keys of `side`.
    fn round_queries(&mut self, side: &KvRows) {
        let head_dim = self.job.shape.head_dim;
        let (rounded, units) = self.rounded.split_at_mut(self.q.len() / 2);
        let rounded: &mut [i16] = bytemuck::cast_slice_mut(rounded);
        let rows = self.q.chunks_exact(head_dim).zip(rounded.chunks_exact_mut(head_dim));
        for ((q, to), units) in rows.zip(units.chunks_exact_mut(head_dim / side.block)) {
            fixed_point::round_query(side, q, to, units);
        }
    }

    /// Adds `positions` of a source to the states of the rows that see them.
    unsafe fn absorb(&mut self, source: &KvSource, positions: Range<usize>, states: &mut SoftmaxStates) {
        let (level, shape, segment) = (self.job.level, self.job.shape, &self.block.segment);
        let len = shape.len(segment.sequence);
        let queries = Queries {
            q: self.q.as_ptr(),
            o: states.o.as_mut_ptr(),
            m: states.m.as_mut_ptr(),
            l: states.l.as_mut_ptr(),
            rounded: self.rounded.as_ptr().cast(),
            units: self.rounded.as_ptr().wrapping_add(self.q.len() / 2),
            rows: states.m.len(),
            head_dim: shape.head_dim,
            softcap: self.job.call.softcap.map(|cap| cap * std::f32::consts::LOG2_E),
        };
        let within = |seen: Range<usize>| seen.start.max(positions.start)..seen.end.min(positions.end);
        let all = within(shape.seen_by_all(segment));
        if select(self.job.level, source.k.quantised || source.v.quantised, queries.rows) == AttendKernel::ManyRows {
            // SAFETY: passed on to the caller.
            return unsafe { self.absorb_many(source, positions, queries) };
        }
        // SAFETY: only rows that exist, and positions that the source holds: a token sees no others.
        unsafe {
            few_rows::absorb(level, source, all.clone(), queries, self.room);
            for token in 0..segment.tokens {
                let seen = within(shape.seen(len, segment.position + token));
                let queries = queries.rows(token * shape.group..(token + 1) * shape.group);
                if all.is_empty() {
                    few_rows::absorb(level, source, seen, queries, self.room);
                } else {
                    few_rows::absorb(level, source, seen.start..all.start, queries, self.room);
                    few_rows::absorb(level, source, all.end..seen.end, queries, self.room);
                }
            }
        }
    }
}

impl BlockWork<'_> {
    /// As [`BlockWork::absorb`], for [`MANY_ROWS`] query rows.
    unsafe fn absorb_many(&mut self, source: &KvSource, positions: Range<usize>, queries: Queries) {
        let (level, shape, segment) = (self.job.level, self.job.shape, &self.block.segment);
        let len = shape.len(segment.sequence);
        let all = shape.seen_by_all(segment);
        // In a batch longer than a ring the first tokens see nothing: their slots have been overwritten.
        let seen = (0..segment.tokens).map(|token| shape.seen(len, segment.position + token));
        let Some(first) = seen.filter(|seen| !seen.is_empty()).map(|seen| seen.start).min() else { return };
        let positions = positions.start.max(first)..positions.end;
        if positions.is_empty() {
            return;
        }
        // SAFETY: only rows that exist, and positions that the source holds: a token sees no others.
        unsafe {
            let many = level.dispatch(TransposeQueries { queries, memory: self.many });
            many.load_states();
            let mut tiles = tile::tiles(source, positions).peekable();
            while let Some(KvRun { position, bytes, row, keys }) = tiles.next() {
                let (next, next_from) = (tiles.peek().copied().unwrap_or(KvRun::NONE), source);
                let held = position..position + keys;
                let page = &source.shifted(bytes);
                if all.start <= held.start && held.end <= all.end {
                    let tile = &KeyTile { row, keys, next, next_from, seen: None };
                    level.dispatch(AbsorbTile { many, source: page, tile });
                    continue;
                }
                let mut seen = [const { 0..0 }; TILE];
                for token in 0..segment.tokens {
                    let rows = token * shape.group..(token + 1) * shape.group;
                    let by = shape.seen(len, segment.position + token);
                    for key in by.start.max(held.start)..by.end.min(held.end) {
                        let seen = &mut seen[key - held.start];
                        let start = if seen.start == seen.end { rows.start } else { seen.start };
                        *seen = start..rows.end;
                    }
                }
                let tile = &KeyTile { row, keys, next, next_from, seen: Some(&seen) };
                if level.dispatch(AbsorbTile { many, source: page, tile }) {
                    continue;
                }
                many.store_states();
                for token in 0..segment.tokens {
                    let by = shape.seen(len, segment.position + token);
                    let queries = queries.rows(token * shape.group..(token + 1) * shape.group);
                    let seen = by.start.max(held.start)..by.end.min(held.end);
                    if !seen.is_empty() {
                        few_rows::absorb(level, source, seen, queries, self.room);
                    }
                }
                many.load_states();
            }
            many.store_states();
        }
    }
}

/// Loads the queries of a block: rotated, then times scale · log2 e, then as even and odd coordinates.
struct LoadQueries<'a> {
    job: &'a AttendJob<'a>,
    block: &'a QueryBlock,
    head: usize,
    rotate: bool,
    interleaved: bool,
    q: &'a mut [f32],
}

impl SimdKernel for LoadQueries<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let AttendJob { call, shape, .. } = *self.job;
        let factor = call.scale * std::f32::consts::LOG2_E;
        for (row, to) in self.q.chunks_exact_mut(shape.head_dim).enumerate() {
            let from = self.job.offset(self.block, self.head, row) * call.q.dtype().size();
            // SAFETY: the row lies within q; `dispatch` enables the instructions.
            unsafe {
                convert::load_row::<S>(call.q.host_ptr().add(from), call.q.dtype(), to);
                if self.rotate {
                    hadamard::rotate::<S>(to, hadamard::signs(shape.head_dim));
                }
            }
            to.iter_mut().for_each(|x| *x *= factor);
            if self.interleaved {
                to.chunks_exact_mut(2 * S::LANES).for_each(deinterleave);
            }
        }
    }
}

/// Rotates the sums of quantised values back, in the order of coordinates.
struct UnrotateSums<'a> {
    interleaved: bool,
    o: &'a mut [f32],
    head_dim: usize,
}

impl SimdKernel for UnrotateSums<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let signs = hadamard::signs(self.head_dim);
        for row in self.o.chunks_exact_mut(signs.len()) {
            if self.interleaved {
                row.chunks_exact_mut(2 * S::LANES).for_each(interleave);
            }
            // SAFETY: `dispatch` enables the instructions.
            unsafe { hadamard::unrotate::<S>(row, signs) };
        }
    }
}

/// Even coordinates, then odd ones; a chunk has at most 32.
#[inline(always)]
pub(super) fn deinterleave(chunk: &mut [f32]) {
    let (mut copy, half) = ([0.0; 32], chunk.len() / 2);
    copy[..chunk.len()].copy_from_slice(chunk);
    for i in 0..half {
        (chunk[i], chunk[half + i]) = (copy[2 * i], copy[2 * i + 1]);
    }
}

/// The inverse of [`deinterleave`].
#[inline(always)]
fn interleave(chunk: &mut [f32]) {
    let (mut copy, half) = ([0.0; 32], chunk.len() / 2);
    copy[..chunk.len()].copy_from_slice(chunk);
    for i in 0..half {
        (chunk[2 * i], chunk[2 * i + 1]) = (copy[i], copy[half + i]);
    }
}

/// Calls `f` with scratch memory of the given lengths, each part aligned to a cache line.
fn with_aligned<const N: usize>(sizes: [usize; N], f: impl FnOnce([&mut [f32]; N])) {
    const LINE: usize = 16;
    let total: usize = sizes.iter().map(|size| size.next_multiple_of(LINE)).sum();
    let floats = &mut *scratch::take(total + LINE);
    let skip = floats.as_ptr().align_offset(4 * LINE).min(LINE);
    let mut rest = &mut floats[skip..];
    f(sizes.map(|size| {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(size.next_multiple_of(LINE));
        rest = after;
        &mut part[..size]
    }))
}
