//! Runs one task: the keys of a split for the queries of a block.

use std::ops::Range;

use super::{
    AttendJob, SoftmaxStates,
    amx_rows::AmxRows,
    few_rows,
    few_rows::{NextKeys, TileMemory},
    fixed_point,
    kv_rows::{KvRows, KvRun, KvSource},
    many_rows::{QueryLanes, TransposeQueries},
    plan::{QueryBlock, TASK_HEADS},
    route::AttendKernel,
    tile::{self, AbsorbTiles, KeyTile, MAX_TILE, Queries, TILE},
};
use crate::{
    LayerSpec,
    codec::BLOCK,
    cpu::{
        convert, hadamard,
        key_bias::HeadBias,
        scratch::{self, LINE},
        simd::{Simd, SimdKernel},
    },
};

/// A task with several heads processes the keys in spans of whole pages, for one head after the other: bytes of a span.
/// A shorter span jumps between pages more often; with a longer one, the pages' address translations are evicted before
/// the next head.
const SPAN_BYTES: usize = 1 << 20;

fn span(spec: &LayerSpec) -> usize {
    let bytes =
        [spec.k, spec.v].map(|codec| codec.bytes_per_vector(spec.head_dim)).iter().sum::<usize>() * spec.kv_heads;
    1 << (SPAN_BYTES / bytes).clamp(256, 1024).ilog2()
}

/// Runs a task of the plan. Only the kernels, which are dispatched, are compiled for a SIMD level.
pub(super) fn run_task(job: &AttendJob, task: usize) {
    let (block, heads, split) = job.plan.task(task, job.shape.kv_heads);
    match heads.len() {
        1 => run_heads::<1>(job, block, heads, split),
        _ => run_heads::<TASK_HEADS>(job, block, heads, split),
    }
}

/// Runs a task of at most `N` heads. `HeadWork` is moved, so a short task uses `N` = 1.
fn run_heads<const N: usize>(job: &AttendJob, block: &QueryBlock, heads: Range<usize>, split: usize) {
    let (rows, head_dim) = (block.segment.tokens * job.shape.group, job.shape.head_dim);
    let len = rows * (head_dim + 2);
    let kernel = job.shape.kernel(rows);
    let fixed = kernel == AttendKernel::FixedPoint;
    let rounded = if fixed { rows * (head_dim / 2 + head_dim.div_ceil(BLOCK)) } else { 0 };
    let many = match kernel {
        AttendKernel::FewRows | AttendKernel::FixedPoint => 0,
        AttendKernel::ManyRows => QueryLanes::len(rows, head_dim),
        // Queries that are not finite are processed by `ManyRows`.
        AttendKernel::AmxRows => AmxRows::len(rows, head_dim).max(QueryLanes::len(rows, head_dim)),
    };
    let positions = block.of_split(job.shape, split);
    let parts = job.shape.parts(positions.clone()).count();
    let totals = if parts > 1 { len } else { 0 };
    let biased = if job.call.layer.key_bias().is_some() { rows * head_dim } else { 0 };
    let sizes = [rows * head_dim, rounded, biased, len, totals].map(|size| size * heads.len());
    let sizes = [sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], TileMemory::len(rows, head_dim), many];
    with_aligned(sizes, |[mut q, mut rounded_q, mut all_biased, mut states, mut all_totals, room, many]| {
        let mut heads: [Option<HeadWork>; N] = std::array::from_fn(|i| {
            let head = heads.clone().nth(i)?;
            // An inactive row has no sequence, and sees no key.
            let sequence = if block.keys > 0 { block.segment.sequence } else { 0 };
            let source = KvSource::new(&job.call.layer, job.table, sequence, head, fixed);
            let q = take_floats(&mut q, rows * head_dim);
            let rounded = take_floats(&mut rounded_q, rounded);
            let biased = take_floats(&mut all_biased, biased);
            let states = SoftmaxStates::new(take_floats(&mut states, len), rows, head_dim);
            let totals = take_floats(&mut all_totals, totals);
            let totals = (parts > 1).then(|| SoftmaxStates::new(totals, rows, head_dim));
            Some(HeadWork { job, block, head, source, q, rounded, biased, states, totals })
        });
        let room = TileMemory::new(room, rows, head_dim);
        let mut work = BlockWork { job, block, kernel, positions, room, many };
        // SAFETY: the plan gives every task its own rows.
        unsafe { work.run(&mut heads) };
        for HeadWork { head, states, .. } in heads.iter_mut().flatten() {
            job.level.dispatch(FinishTask { job, block, head: *head, split, states });
        }
    });
}

/// Splits the first `count` floats off `from`.
fn take_floats<'a>(from: &mut &'a mut [f32], count: usize) -> &'a mut [f32] {
    let (taken, rest) = std::mem::take(from).split_at_mut(count);
    *from = rest;
    taken
}

/// Writes the result of a task, or its partial state if the block has several splits.
struct FinishTask<'a, 'b> {
    job: &'a AttendJob<'a>,
    block: &'a QueryBlock,
    head: usize,
    split: usize,
    states: &'a mut SoftmaxStates<'b>,
}

impl SimdKernel for FinishTask<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let FinishTask { job, block, head, split, states } = self;
        // SAFETY: `dispatch` enables the instructions; the plan gives every task its own rows.
        unsafe {
            if block.splits == 1 {
                job.write::<S>(states, block, head);
            } else {
                let partial = job.partial(block, head, split);
                partial.o.copy_from_slice(states.o);
                partial.m.copy_from_slice(states.m);
                partial.l.copy_from_slice(states.l);
            }
        }
    }
}

/// A KV head of a task: its queries, and its states.
struct HeadWork<'a> {
    job: &'a AttendJob<'a>,
    block: &'a QueryBlock,
    head: usize,
    source: KvSource<'a>,
    /// `[rows, head_dim]`.
    q: &'a mut [f32],
    /// The queries in fixed point, and their units, if the kernel needs them.
    rounded: &'a mut [f32],
    /// The queries' products with the key bias, if keys are stored without one.
    biased: &'a mut [f32],
    /// The states of the part of the keys that is being processed.
    states: SoftmaxStates<'a>,
    /// The states of the earlier parts, if the task has several parts.
    totals: Option<SoftmaxStates<'a>>,
}

/// A running task, with its scratch memory.
struct BlockWork<'a> {
    job: &'a AttendJob<'a>,
    block: &'a QueryBlock,
    kernel: AttendKernel,
    /// The positions of the task's keys.
    positions: Range<usize>,
    room: TileMemory,
    /// Scratch memory for [`QueryLanes`] or [`AmxRows`].
    many: &'a mut [f32],
}

impl BlockWork<'_> {
    /// Computes the states of the block's queries over the task's keys, for each head. Present heads come first.
    unsafe fn run(&mut self, heads: &mut [Option<HeadWork>]) {
        heads.iter_mut().flatten().for_each(|head| head.states.clear());
        if self.positions.is_empty() {
            return;
        }
        heads.iter_mut().flatten().for_each(HeadWork::load);
        for (index, part) in self.job.shape.parts(self.positions.clone()).enumerate() {
            // SAFETY: passed on to the caller.
            unsafe { self.absorb_heads(heads, part) };
            heads.iter_mut().flatten().for_each(|head| {
                head.finish();
                head.add_to_totals(index == 0);
            });
        }
        heads.iter_mut().flatten().for_each(HeadWork::take_totals);
    }

    /// Adds `positions` to the states of each head. Present heads come first.
    unsafe fn absorb_heads(&mut self, heads: &mut [Option<HeadWork>], positions: Range<usize>) {
        if let [Some(head)] = heads {
            // SAFETY: passed on to the caller.
            return unsafe { self.absorb(head, positions, None) };
        }
        let count = heads.iter().flatten().count();
        let (span, mut start) = (span(self.job.call.layer.spec()), positions.start);
        while start < positions.end {
            let end = ((start / span + 1) * span).min(positions.end);
            for head in 0..count {
                let (next, seen) = if head + 1 < count { (head + 1, start..end) } else { (0, end..positions.end) };
                let source = heads[next].as_ref().map(|next| next.source);
                if let Some((head, source)) = heads[head].as_mut().zip(source) {
                    let after = tile::tiles(&source, seen, TILE).next().map(|run| NextKeys { source: &source, run });
                    // SAFETY: passed on to the caller.
                    unsafe { self.absorb(head, start..end, after) };
                }
            }
            start = end;
        }
    }
}

impl HeadWork<'_> {
    /// Prepares the queries.
    fn load(&mut self) {
        let KvRows { quantised, interleaved, fixed, .. } = self.source.k;
        self.load_queries(quantised && !self.job.call.q_rotated, interleaved && !fixed);
        if fixed {
            self.round_queries();
        }
    }

    /// Rearranges the sums in the order of coordinates.
    fn finish(&mut self) {
        let v = &self.source.v;
        if v.quantised {
            if v.fixed {
                fixed_point::order_sum(v, self.states.o);
            }
            let (interleaved, head_dim) = (v.interleaved && !v.fixed, self.job.shape.head_dim);
            self.job.level.dispatch(UnrotateSums { interleaved, o: self.states.o, head_dim });
        }
    }

    /// Adds the states of a part to the totals, and clears them for the next part.
    fn add_to_totals(&mut self, is_first: bool) {
        let Some(totals) = &mut self.totals else { return };
        if is_first {
            std::mem::swap(totals, &mut self.states);
        } else {
            self.job.level.dispatch(AddStates { to: totals, states: &mut self.states });
        }
        self.states.clear();
    }

    /// Moves the totals of all parts into the head's states.
    fn take_totals(&mut self) {
        if let Some(totals) = self.totals.take() {
            self.states = totals;
        }
    }

    /// The block's queries in f32, times scale · log2 e.
    fn load_queries(&mut self, rotate: bool, interleaved: bool) {
        let HeadWork { job, block, head, ref mut q, ref mut biased, .. } = *self;
        let bias = self.source.bias;
        job.level.dispatch(LoadQueries { job, block, head, rotate, interleaved, q, bias, biased });
    }

    /// The block's queries in fixed point.
    fn round_queries(&mut self) {
        let side = &self.source.k;
        let head_dim = self.job.shape.head_dim;
        let (rounded, units) = self.rounded.split_at_mut(self.q.len() / 2);
        let rounded: &mut [i16] = bytemuck::cast_slice_mut(rounded);
        let rows = self.q.chunks_exact(head_dim).zip(rounded.chunks_exact_mut(head_dim));
        for ((q, to), units) in rows.zip(units.chunks_exact_mut(head_dim / side.block)) {
            fixed_point::round_query(side, q, to, units);
        }
    }

    /// The queries and states as arguments of kernels.
    fn queries(&mut self) -> Queries {
        let HeadWork { job, q, rounded, biased, states, .. } = self;
        Queries {
            q: q.as_ptr(),
            o: states.o.as_mut_ptr(),
            m: states.m.as_mut_ptr(),
            l: states.l.as_mut_ptr(),
            rounded: rounded.as_ptr().cast(),
            units: rounded.as_ptr().wrapping_add(q.len() / 2),
            biased: biased.as_ptr(),
            rows: states.m.len(),
            head_dim: job.shape.head_dim,
            softcap: job.call.softcap.map(|cap| cap * std::f32::consts::LOG2_E),
        }
    }
}

impl BlockWork<'_> {
    /// Adds `positions` to the states of the rows that see them. `after`: the keys that are processed next.
    unsafe fn absorb(&mut self, head: &mut HeadWork, positions: Range<usize>, after: Option<NextKeys>) {
        let (level, shape, segment) = (self.job.level, self.job.shape, &self.block.segment);
        let len = shape.len(segment.sequence);
        let (queries, source) = (head.queries(), &head.source);
        let within = |seen: Range<usize>| seen.start.max(positions.start)..seen.end.min(positions.end);
        let mut all = within(shape.seen_by_all(segment));
        if shape.batch_invariant && segment.tokens > 1 {
            // Tiles must not depend on the tokens that share them.
            all = all.start.next_multiple_of(TILE)..all.end / TILE * TILE;
        }
        // SAFETY: passed on to the caller; only a level with AMX selects its kernel.
        unsafe {
            match self.kernel {
                AttendKernel::FewRows | AttendKernel::FixedPoint => {}
                AttendKernel::ManyRows => return self.absorb_lanes(source, positions, queries),
                AttendKernel::AmxRows => match AmxRows::new(queries, self.many) {
                    Some(rows) => return self.absorb_many(source, positions, queries, &rows),
                    None => return self.absorb_lanes(source, positions, queries),
                },
            }
        }
        let absorb = |token: usize, positions| {
            let rows = token * shape.group..(token + 1) * shape.group;
            // SAFETY: only existing rows, and positions that the source holds: a token sees no others.
            unsafe { few_rows::absorb(level, source, positions, queries.rows(rows), self.room, NextKeys::none(source)) }
        };
        let seen = |token| within(shape.seen(len, segment.position + token));
        if all.is_empty() {
            return (0..segment.tokens).for_each(|token| absorb(token, seen(token)));
        }
        (0..segment.tokens).for_each(|token| absorb(token, seen(token).start..all.start));
        let after = after.unwrap_or(NextKeys::none(source));
        // SAFETY: as above.
        unsafe { few_rows::absorb(level, source, all.clone(), queries, self.room, after) };
        (0..segment.tokens).for_each(|token| absorb(token, all.end..seen(token).end));
    }
}

impl BlockWork<'_> {
    /// As [`BlockWork::absorb`], with a lane for each query row.
    unsafe fn absorb_lanes(&mut self, source: &KvSource, positions: Range<usize>, queries: Queries) {
        let many = self.job.level.dispatch(TransposeQueries { queries, memory: self.many });
        // SAFETY: passed on to the caller.
        unsafe { self.absorb_many(source, positions, queries, &many) }
    }

    /// As [`BlockWork::absorb`], for the many query rows in `many`.
    unsafe fn absorb_many<A: AbsorbTiles>(
        &self,
        source: &KvSource,
        positions: Range<usize>,
        queries: Queries,
        many: &A,
    ) {
        let (level, shape, segment) = (self.job.level, self.job.shape, &self.block.segment);
        let len = shape.len(segment.sequence);
        let all = shape.seen_by_all(segment);
        // In a batch longer than a ring, the first tokens see nothing: their slots have been overwritten.
        let seen = (0..segment.tokens).map(|token| shape.seen(len, segment.position + token));
        let Some(first) = seen.filter(|seen| !seen.is_empty()).map(|seen| seen.start).min() else { return };
        let positions = positions.start.max(first)..positions.end;
        if positions.is_empty() {
            return;
        }
        // SAFETY: only existing rows, and positions that the source holds: a token sees no others.
        unsafe {
            many.load_states();
            let mut tiles = tile::tiles(source, positions, A::TILE).peekable();
            while let Some(KvRun { position, bytes, row, keys }) = tiles.next() {
                let (next, next_from) = (tiles.peek().copied().unwrap_or(KvRun::NONE), source);
                let held = position..position + keys;
                let page = &source.shifted(bytes);
                let mut rows = [const { 0..0 }; MAX_TILE];
                let is_seen_by_all = all.start <= held.start && held.end <= all.end;
                if !is_seen_by_all {
                    // Later tokens see later positions, so the tokens that see a key are consecutive.
                    let seen = |token| shape.seen(len, segment.position + token);
                    let (mut first, mut end) = (0, 0);
                    for (position, rows) in held.clone().zip(&mut rows) {
                        while first < segment.tokens && seen(first).end <= position {
                            first += 1;
                        }
                        while end < segment.tokens && seen(end).start <= position {
                            end += 1;
                        }
                        if first < end {
                            *rows = first * shape.group..end * shape.group;
                        }
                    }
                }
                let seen = if is_seen_by_all { None } else { Some(&rows[..keys]) };
                if many.absorb(level, page, &KeyTile { position, row, keys, next, next_from, seen }) {
                    continue;
                }
                many.store_states();
                for token in 0..segment.tokens {
                    let by = shape.seen(len, segment.position + token);
                    let queries = queries.rows(token * shape.group..(token + 1) * shape.group);
                    let seen = by.start.max(held.start)..by.end.min(held.end);
                    if !seen.is_empty() {
                        few_rows::absorb(level, source, seen, queries, self.room, NextKeys::none(source));
                    }
                }
                many.load_states();
            }
            many.store_states();
        }
    }
}

/// Loads the queries of a block: rotates them, multiplies by scale · log2 e, and splits even and odd coordinates.
struct LoadQueries<'a> {
    job: &'a AttendJob<'a>,
    block: &'a QueryBlock,
    head: usize,
    rotate: bool,
    interleaved: bool,
    q: &'a mut [f32],
    bias: Option<HeadBias<'a>>,
    biased: &'a mut [f32],
}

impl SimdKernel for LoadQueries<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let AttendJob { call, shape, .. } = *self.job;
        let factor = call.scale * std::f32::consts::LOG2_E;
        for (row, to) in self.q.chunks_exact_mut(shape.head_dim).enumerate() {
            let from = self.job.offset(self.block, self.head, row) * call.q.dtype().size();
            // SAFETY: the row is within q; `dispatch` enables the instructions.
            unsafe {
                convert::load_row::<S>(call.q.host_ptr().add(from), call.q.dtype(), to);
                if let Some(bias) = self.bias {
                    let biased = &mut self.biased[row * shape.head_dim..][..shape.head_dim];
                    bias.product(to, biased);
                    biased.iter_mut().for_each(|x| *x *= factor);
                }
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

/// Merges states into others.
struct AddStates<'a, 'b> {
    to: &'a mut SoftmaxStates<'b>,
    states: &'a mut SoftmaxStates<'b>,
}

impl SimdKernel for AddStates<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        // SAFETY: `dispatch` enables the instructions; both have the same rows of whole vectors.
        unsafe { self.to.merge::<S>(self.states) }
    }
}

/// Undoes the rotation of sums of quantised values, and orders their coordinates.
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

/// Moves even coordinates before odd ones within each chunk; a chunk has at most 32.
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
    let mut rest = &mut *scratch::take_lines(sizes.iter().map(|size| size.next_multiple_of(LINE)).sum());
    f(sizes.map(|size| {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(size.next_multiple_of(LINE));
        rest = after;
        &mut part[..size]
    }))
}
