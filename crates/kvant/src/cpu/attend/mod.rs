//! Attention over a cache layer: q `[T, H, D]` → out `[T, H, D]`; decode, verification and prefill are one kernel.
//!
//! A task is a (block of query tokens, KV head, split of the context): its G · tokens query rows read each key and
//! value once. Consecutive tokens of a sequence form a block. With few query rows what all of them see is taken in tiles
//! of 64 keys ([`tile`]), what only some see, at the diagonal and at a window's edge, token by token; with many ([`many`])
//! everything is, and what a row does not see is masked there. Nothing is read that no row of the block sees. When there
//! is one split, a task writes its rows of `out`; otherwise it leaves partial states, which are merged in order once all
//! tasks are done ([`state`]).
//!
//! Over quantised keys the queries are rotated once a task; over quantised values the sums stay rotated until the
//! task's end. Codecs that pack two coordinates into a byte are read as even and odd coordinates, so queries and sums
//! stand in that order meanwhile; fixed point ([`fixed`]) has orders of its own.
//!
//! A result does not depend on timing. It may depend on the number of threads, which decides about the splits, to the
//! extent that the order of f32 sums matters: splits end where tiles do, so what is rounded relative to a tile is the same.
//! A prompt's tokens share tiles that begin elsewhere than in decode: there the same token agrees within the error that
//! [`Attend`](crate::ops::Attend) states.

use std::{cell::RefCell, ops::Range};

use super::{
    Cpu, convert, hadamard, scratch,
    simd::{Kernel, Simd, SimdLevel},
};
use crate::{codec::BLOCK, ops::attend::Call};

mod ahead;
#[cfg_attr(not(target_arch = "x86_64"), path = "no_fixed.rs")]
mod fixed;
mod many;
mod plan;
mod rows;
mod score;
mod state;
#[cfg(test)]
mod tests;
mod tile;
mod values;

use many::{MANY, Many};
use plan::{Block, Origin, Plan, Shape};
use rows::{Side, Source};
use state::State;
use tile::{Queries, Room, TILE};

thread_local! {
    /// Kept, so that a step allocates nothing once it has warmed up.
    static PLAN: RefCell<Plan> = RefCell::default();
}

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let spec = call.layer.spec();
    // SAFETY: the device's lock is held while a call runs, and the call writes none of these.
    let (positions, sequence, lens) =
        unsafe { (call.step.positions.host_slice(), call.step.sequence.host_slice(), call.cached_lens().host_slice()) };
    let fixed = cpu.level == SimdLevel::Avx512Vnni;
    let shape = Shape {
        positions,
        sequence,
        lens,
        capacity: spec.capacity,
        window: call.window,
        fresh: call.fresh.is_some(),
        kv_heads: spec.kv_heads,
        group: call.heads / spec.kv_heads,
        head_dim: call.head_dim,
        many: !fixed || !spec.k.is_quantised() && !spec.v.is_quantised(),
        threads: cpu.pool.threads(),
        splits: call.splits,
    };
    let mut plan = PLAN.take();
    plan.make(&shape);
    // A partial state is o, then m and l.
    let partial_len = call.head_dim + 2;
    let partials = &mut *scratch::take(plan.partial_rows * partial_len);
    let partials = Partials(partials.as_mut_ptr());
    let job = Job { call, shape: &shape, plan: &plan, partials, fixed };
    // The last tokens of a prompt see the most: the largest tasks come first.
    cpu.pool.run(plan.tasks, |task| run_task(cpu.level, &job, plan.tasks - 1 - task));
    if plan.partial_rows > 0 {
        let heads = plan.blocks.len() * spec.kv_heads;
        cpu.pool.run(heads, |i| {
            let (block, head) = (&plan.blocks[i / spec.kv_heads], i % spec.kv_heads);
            cpu.level.dispatch(Merge { job: &job, block, head });
        });
    }
    PLAN.set(plan);
}

/// What the tasks of one call share.
struct Job<'a> {
    call: &'a Call,
    shape: &'a Shape<'a>,
    plan: &'a Plan,
    partials: Partials,
    /// What is quantised is taken in fixed point.
    fixed: bool,
}

#[derive(Clone, Copy)]
struct Partials(*mut f32);

// SAFETY: every task writes its own rows, which are read only once all tasks are done.
unsafe impl Sync for Partials {}

impl Job<'_> {
    /// The partial states of a (block, KV head, split).
    ///
    /// # Safety
    /// The block has more than one split; nobody else holds these rows.
    unsafe fn partial<'a>(&self, block: &Block, head: usize, split: usize) -> States<'a> {
        let (rows, head_dim) = (block.segment.tokens * self.shape.group, self.shape.head_dim);
        let first = block.first_partial + (head * block.splits + split) * rows;
        // SAFETY: the plan counted these rows, of head_dim + 2 floats each.
        let floats = unsafe {
            std::slice::from_raw_parts_mut(self.partials.0.add(first * (head_dim + 2)), rows * (head_dim + 2))
        };
        States::new(floats, rows, head_dim)
    }

    /// Normalises the states and writes them to `out`.
    ///
    /// # Safety
    /// The level's instructions are enabled; the states are those of the block's rows, which nobody else writes.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, states: &mut States, block: &Block, head: usize) {
        let out = &self.call.out;
        for row in 0..states.rows() {
            let mut state = states.row(row);
            // SAFETY: passed on to the caller.
            unsafe {
                state.finish::<S>();
                let to = out.host_ptr().add(self.offset(block, head, row) * out.dtype().size());
                convert::store_row::<S>(state.o, to, out.dtype());
            }
        }
    }

    /// The element of q and out at which a query row begins.
    fn offset(&self, block: &Block, head: usize, row: usize) -> usize {
        let group = self.shape.group;
        let token = block.segment.token + row / group;
        (token * self.call.heads + head * group + row % group) * self.shape.head_dim
    }
}

/// States of consecutive query rows: `o` of all, then `m`, then `l`.
struct States<'a> {
    o: &'a mut [f32],
    m: &'a mut [f32],
    l: &'a mut [f32],
}

impl<'a> States<'a> {
    fn new(floats: &'a mut [f32], rows: usize, head_dim: usize) -> Self {
        let (o, rest) = floats.split_at_mut(rows * head_dim);
        let (m, l) = rest.split_at_mut(rows);
        States { o, m, l: &mut l[..rows] }
    }

    fn rows(&self) -> usize {
        self.m.len()
    }

    fn row(&mut self, row: usize) -> State<'_> {
        let head_dim = self.o.len() / self.m.len();
        State { o: &mut self.o[row * head_dim..][..head_dim], m: &mut self.m[row], l: &mut self.l[row] }
    }

    /// Merges row by row.
    ///
    /// # Safety
    /// As for [`State::merge`].
    #[inline(always)]
    unsafe fn merge<S: Simd>(&mut self, other: &mut States) {
        for row in 0..self.rows() {
            // SAFETY: passed on to the caller.
            unsafe { self.row(row).merge::<S>(&other.row(row)) };
        }
    }

    fn clear(&mut self) {
        (0..self.rows()).for_each(|row| self.row(row).clear());
    }
}

/// One task, with its scratch memory: made outside of the kernel, because a closure inside would be compiled without
/// the level's instructions.
struct Task<'a> {
    job: &'a Job<'a>,
    block: &'a Block,
    head: usize,
    split: usize,
    q: &'a mut [f32],
    rounded: &'a mut [f32],
    states: &'a mut [f32],
    fresh: &'a mut [f32],
    room: &'a mut [f32],
    many: &'a mut [f32],
}

/// Runs a task.
fn run_task(level: SimdLevel, job: &Job, task: usize) {
    let (block, head, split) = job.plan.task(task);
    let (rows, head_dim) = (block.segment.tokens * job.shape.group, job.shape.head_dim);
    let len = rows * (head_dim + 2);
    let rounded = if job.fixed { rows * (head_dim / 2 + head_dim.div_ceil(BLOCK)) } else { 0 };
    let fresh = if job.shape.fresh { len } else { 0 };
    let many = if rows >= MANY { Many::len(rows, head_dim) } else { 0 };
    let sizes = [rows * head_dim, rounded, len, fresh, Room::len(rows, head_dim), many];
    with_aligned(sizes, |[q, rounded, states, fresh, room, many]| {
        level.dispatch(Task { job, block, head, split, q, rounded, states, fresh, room, many });
    });
}

impl Kernel for Task<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Task { job, block, head, split, .. } = self;
        let (rows, head_dim) = (block.segment.tokens * job.shape.group, job.shape.head_dim);
        let keys = block.part(split);
        let room = Room::new(self.room, rows, head_dim);
        let mut work = Work { job, block, head, keys, q: self.q, rounded: self.rounded, room, many: self.many };
        let mut states = States::new(self.states, rows, head_dim);
        // SAFETY: `dispatch` enables the instructions; the plan gives every task its own rows.
        unsafe {
            work.absorb_cached::<S>(&mut states);
            if job.shape.fresh {
                let mut fresh = States::new(self.fresh, rows, head_dim);
                work.absorb_fresh::<S>(&mut fresh);
                states.merge::<S>(&mut fresh);
            }
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

/// Merges the partial states of a (block, KV head) in order.
struct Merge<'a> {
    job: &'a Job<'a>,
    block: &'a Block,
    head: usize,
}

impl Kernel for Merge<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        if self.block.splits == 1 {
            return;
        }
        // SAFETY: `dispatch` enables the instructions; all tasks are done, and only this one reads their states and
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

/// What a task works with.
struct Work<'a> {
    job: &'a Job<'a>,
    block: &'a Block,
    head: usize,
    /// Its part of the block's keys, counted over all origins.
    keys: Range<usize>,
    /// `[rows, head_dim]`.
    q: &'a mut [f32],
    /// The same in fixed point, and its units, where that is wanted.
    rounded: &'a mut [f32],
    room: Room,
    /// For [`Many`] query rows.
    many: &'a mut [f32],
}

// The task's kernel enables the instructions for all of these.
impl<'a> Work<'a> {
    /// The states of the block's queries over the cached keys.
    #[inline(always)]
    unsafe fn absorb_cached<S: Simd>(&mut self, states: &mut States) {
        states.clear();
        let (job, sequence) = (self.job, self.block.segment.sequence);
        for (origin, positions) in self.parts() {
            if !matches!(origin, Origin::Cached { .. }) || positions.is_empty() {
                continue;
            }
            let source = Source::cached(&job.call.layer, sequence, self.head, job.fixed);
            let chunk = 2 * S::LANES;
            // SAFETY: passed on to the caller.
            unsafe {
                self.load_queries::<S>(source.k.quantised && !job.call.q_rotated);
                if source.k.fixed {
                    self.round_queries(&source.k);
                } else if source.k.interleaved {
                    self.q.chunks_exact_mut(chunk).for_each(deinterleave);
                }
                self.absorb::<S>(&source, origin, positions, states);
                if source.v.fixed {
                    fixed::order_sum(&source.v, states.o);
                } else if source.v.interleaved {
                    states.o.chunks_exact_mut(chunk).for_each(interleave);
                }
                if source.v.quantised {
                    let signs = hadamard::signs(job.shape.head_dim);
                    for row in states.o.chunks_exact_mut(signs.len()) {
                        hadamard::unrotate::<S>(row, signs);
                    }
                }
            }
        }
    }

    /// The states of the block's queries over the step's own keys.
    #[inline(always)]
    unsafe fn absorb_fresh<S: Simd>(&mut self, states: &mut States) {
        states.clear();
        let (job, head) = (self.job, self.head);
        let Some(fresh) = &job.call.fresh else { return };
        // SAFETY: passed on to the caller.
        unsafe { self.load_queries::<S>(false) };
        let (tokens, heads, head_dim) = (job.call.tokens, job.shape.kv_heads, job.shape.head_dim);
        for (origin, positions) in self.parts() {
            let Origin::Fresh(segment) = origin else { continue };
            let first = fresh.order.row(segment.token, head, tokens, heads);
            let stride = fresh.order.row(1, 0, tokens, heads);
            let side = |t: &crate::Tensor| Side::dense(t.host_ptr(), t.dtype(), first, stride, head_dim);
            let source = Source::fresh(side(&fresh.k), side(&fresh.v), &segment);
            // SAFETY: passed on to the caller.
            unsafe { self.absorb::<S>(&source, origin, positions, states) };
        }
    }

    /// The origins, and the positions of each that are this task's.
    fn parts(&self) -> impl Iterator<Item = (Origin, Range<usize>)> + use<'a> {
        let Job { shape, plan, .. } = *self.job;
        let (keys, segment) = (self.keys.clone(), self.block.segment);
        let mut before = 0;
        shape.origins(&plan.segments, segment.sequence).map(move |origin| {
            let seen = shape.seen_by_any(origin, &segment);
            let end = before + seen.len();
            let part = keys.start.clamp(before, end)..keys.end.clamp(before, end);
            let part = part.start - before + seen.start..part.end - before + seen.start;
            before = end;
            (origin, part)
        })
    }

    /// The block's queries in f32, times scale · log2 e.
    #[inline(always)]
    unsafe fn load_queries<S: Simd>(&mut self, rotate: bool) {
        let Job { call, shape, .. } = *self.job;
        let factor = call.scale * std::f32::consts::LOG2_E;
        for (row, to) in self.q.chunks_exact_mut(shape.head_dim).enumerate() {
            let from = self.job.offset(self.block, self.head, row) * call.q.dtype().size();
            // SAFETY: the row lies within q; the rest is the caller's promise.
            unsafe {
                convert::load_row::<S>(call.q.host_ptr().add(from), call.q.dtype(), to);
                if rotate {
                    hadamard::rotate::<S>(to, hadamard::signs(shape.head_dim));
                }
            }
            to.iter_mut().for_each(|x| *x *= factor);
        }
    }

    /// The block's queries in fixed point, for keys of `side`.
    fn round_queries(&mut self, side: &Side) {
        let head_dim = self.job.shape.head_dim;
        let (rounded, units) = self.rounded.split_at_mut(self.q.len() / 2);
        let rounded: &mut [i16] = bytemuck::cast_slice_mut(rounded);
        let rows = self.q.chunks_exact(head_dim).zip(rounded.chunks_exact_mut(head_dim));
        for ((q, to), units) in rows.zip(units.chunks_exact_mut(head_dim / side.block)) {
            fixed::round_query(side, q, to, units);
        }
    }

    /// Takes `positions` of a source into the states of those who see them: what all tokens see together, what is
    /// before and after token by token.
    #[inline(always)]
    unsafe fn absorb<S: Simd>(
        &mut self,
        source: &Source,
        origin: Origin,
        positions: Range<usize>,
        states: &mut States,
    ) {
        let (shape, segment) = (self.job.shape, &self.block.segment);
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
        let all = within(shape.seen_by_all(origin, segment));
        if queries.rows >= MANY && !source.k.fixed && !source.v.fixed {
            // SAFETY: passed on to the caller.
            return unsafe { self.absorb_many::<S>(source, origin, positions, queries) };
        }
        // SAFETY: only rows that exist, and positions that the source holds: a token sees no others.
        unsafe {
            tile::absorb::<S>(source, all.clone(), queries, self.room);
            for token in 0..segment.tokens {
                let seen = within(shape.seen(origin, segment.position + token));
                let queries = queries.rows(token * shape.group..(token + 1) * shape.group);
                if all.is_empty() {
                    tile::absorb::<S>(source, seen, queries, self.room);
                } else {
                    tile::absorb::<S>(source, seen.start..all.start, queries, self.room);
                    tile::absorb::<S>(source, all.end..seen.end, queries, self.room);
                }
            }
        }
    }
}

impl Work<'_> {
    /// As [`Work::absorb`], for [`MANY`] query rows.
    #[inline(always)]
    unsafe fn absorb_many<S: Simd>(
        &mut self,
        source: &Source,
        origin: Origin,
        positions: Range<usize>,
        queries: Queries,
    ) {
        let (shape, segment) = (self.job.shape, &self.block.segment);
        let all = shape.seen_by_all(origin, segment);
        // Of a batch longer than a ring the first tokens see nothing: what lies between them and the others is no longer
        // held.
        let seen = (0..segment.tokens).map(|token| shape.seen(origin, segment.position + token));
        let Some(first) = seen.filter(|seen| !seen.is_empty()).map(|seen| seen.start).min() else { return };
        let positions = positions.start.max(first)..positions.end;
        if positions.is_empty() {
            return;
        }
        // SAFETY: only rows that exist, and positions that the source holds: a token sees no others.
        unsafe {
            let many = Many::new::<S>(queries, self.many);
            many.load_states();
            let mut position = positions.start;
            let mut tiles = tile::tiles(source, &positions).peekable();
            while let Some((row, keys)) = tiles.next() {
                let next = tiles.peek().copied().unwrap_or((0, 0));
                let held = position..position + keys;
                position = held.end;
                if all.start <= held.start && held.end <= all.end {
                    many.absorb::<S>(source, &many::Tile { row, keys, next, seen: None });
                    continue;
                }
                let mut seen = [const { 0..0 }; TILE];
                for token in 0..segment.tokens {
                    let rows = token * shape.group..(token + 1) * shape.group;
                    let by = shape.seen(origin, segment.position + token);
                    for key in by.start.max(held.start)..by.end.min(held.end) {
                        let seen = &mut seen[key - held.start];
                        let start = if seen.start == seen.end { rows.start } else { seen.start };
                        *seen = start..rows.end;
                    }
                }
                if many.absorb::<S>(source, &many::Tile { row, keys, next, seen: Some(&seen) }) {
                    continue;
                }
                many.store_states();
                for token in 0..segment.tokens {
                    let by = shape.seen(origin, segment.position + token);
                    let queries = queries.rows(token * shape.group..(token + 1) * shape.group);
                    let seen = by.start.max(held.start)..by.end.min(held.end);
                    if !seen.is_empty() {
                        tile::absorb::<S>(source, seen, queries, self.room);
                    }
                }
                many.load_states();
            }
            many.store_states();
        }
    }
}

/// Even coordinates, then odd ones; a chunk has at most 32.
#[inline(always)]
fn deinterleave(chunk: &mut [f32]) {
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
