//! One tile: up to 64 keys and values, and some query rows that all see them.
//!
//! Scores are made for a block of keys × queries in registers, one softmax step follows for the whole tile, then the
//! values are added to a block of queries × coordinates in registers. While scores are made the values are on their
//! way from memory, and the next keys while values are added. A tile has no mask: whoever calls it passes only keys
//! that every query row sees.

use std::ops::Range;

use super::rows::{Dense, Lines, Loader, Rows, Source, with_loader};
use crate::cpu::simd::{Kernel, Simd, SimdLevel};

/// Keys of a tile.
pub(super) const TILE: usize = 64;
/// More query rows than this read keys and values from a copy that has been widened to f32 once.
const DIRECT_ROWS: usize = 4;
/// Keys that are widened at a time: what fits into the first-level cache beside the queries.
const STAGED_KEYS: usize = 8;
/// Coordinates of all the tile's values that are widened at a time.
const STAGED_COORDINATES: usize = 64;

/// Query rows and their states.
#[derive(Clone, Copy)]
pub(super) struct Queries {
    /// `[rows, head_dim]`, times scale · log2 e, coordinates in the order of the keys' chunks.
    pub q: *const f32,
    /// `[rows, head_dim]`, coordinates in the order of the values' chunks.
    pub o: *mut f32,
    /// `[rows]` each.
    pub m: *mut f32,
    pub l: *mut f32,
    pub rows: usize,
    pub head_dim: usize,
    /// In units of log 2.
    pub softcap: Option<f32>,
}

impl Queries {
    /// # Safety
    /// `rows` are among these.
    pub unsafe fn rows(&self, rows: Range<usize>) -> Queries {
        // SAFETY: passed on to the caller.
        unsafe {
            Queries {
                q: self.q.add(rows.start * self.head_dim),
                o: self.o.add(rows.start * self.head_dim),
                m: self.m.add(rows.start),
                l: self.l.add(rows.start),
                rows: rows.len(),
                ..*self
            }
        }
    }
}

/// Memory for what happens within a tile.
#[derive(Clone, Copy)]
pub(super) struct Room {
    /// `[blocks, rows, TILE]`: scores, then weights; `blocks` is the larger number of norms of a key or value.
    scores: *mut f32,
    /// `[TILE]`.
    norms: *mut f32,
    /// `[STAGED_KEYS, head_dim]` or `[TILE, STAGED_COORDINATES]`.
    staged: *mut f32,
}

impl Room {
    pub fn len(rows: usize, head_dim: usize) -> usize {
        rows * TILE * head_dim.div_ceil(crate::codec::BLOCK)
            + TILE
            + (STAGED_KEYS * head_dim).max(TILE * STAGED_COORDINATES)
    }

    /// In `room`, of [`Room::len`] floats.
    pub fn new(room: &mut [f32], rows: usize, head_dim: usize) -> Room {
        assert!(room.len() >= Room::len(rows, head_dim));
        let (scores, rest) = room.split_at_mut(rows * TILE * head_dim.div_ceil(crate::codec::BLOCK));
        let (norms, staged) = rest.split_at_mut(TILE);
        Room { scores: scores.as_mut_ptr(), norms: norms.as_mut_ptr(), staged: staged.as_mut_ptr() }
    }
}

/// Whether 16 sums fit into registers beside their operands, rather than 8.
#[inline(always)]
fn many_registers<S: Simd>() -> bool {
    matches!(S::LEVEL, SimdLevel::Avx512 | SimdLevel::Neon)
}

/// Takes the keys and values of `positions` into the states of `queries`.
///
/// # Safety
/// The level's instructions are enabled; the source has the positions; `queries` and `room` are as their types say.
#[inline(always)]
pub(super) unsafe fn absorb<S: Simd>(source: &Source, positions: Range<usize>, queries: Queries, room: Room) {
    if positions.is_empty() {
        return;
    }
    let [first, second] = source.runs(positions.start, positions.len());
    let tiles_of = |(row, len): (usize, usize)| (0..len).step_by(TILE).map(move |i| (row + i, TILE.min(len - i)));
    let mut tiles = tiles_of(first).chain(tiles_of(second)).peekable();
    while let Some((row, keys)) = tiles.next() {
        let next = tiles.peek().copied().unwrap_or((0, 0));
        // SAFETY: passed on to the caller.
        unsafe { tile::<S>(source, (row, keys), next, queries, room) }
    }
}

/// # Safety
/// As for [`absorb`]; the source has `keys` rows from `row` on, at most [`TILE`], and `next` rows likewise.
#[inline(always)]
unsafe fn tile<S: Simd>(
    source: &Source,
    (row, keys): (usize, usize),
    next: (usize, usize),
    queries: Queries,
    room: Room,
) {
    let Source { k, v, .. } = source;
    let chunk = 2 * S::LANES;
    let plane = queries.rows * TILE;
    // SAFETY: passed on to the caller; blocks divide head_dim, chunks divide blocks.
    unsafe {
        for block in 0..queries.head_dim / k.block {
            let chunks = block * k.block / chunk..(block + 1) * k.block / chunk;
            let scores = room.scores.add(block * plane);
            // The values' lines are asked for once.
            let ahead = Ahead { lines: v.lines(row), rows: if block == 0 { keys } else { 0 } };
            let part = Part { row, keys, first_chunk: chunks.start, chunks, queries, ahead };
            with_loader!(k.loader, rows => score::<S, _>(rows, part, scores, room.staged));
        }
        softmax::<S>(source, (row, keys), queries, room);
        for block in 0..queries.head_dim / v.block {
            let chunks = block * v.block / chunk..(block + 1) * v.block / chunk;
            let weights = room.scores.add(block * plane).cast_const();
            let ahead = Ahead { lines: k.lines(next.0), rows: next.1 };
            let part = Part { row, keys, first_chunk: chunks.start, chunks, queries, ahead };
            with_loader!(v.loader, rows => add_values::<S, _>(rows, part, weights, room.staged));
        }
    }
}

/// What to prefetch meanwhile.
#[derive(Clone, Copy)]
struct Ahead {
    lines: Lines,
    rows: usize,
}

/// Rows of a loader, the chunks of them that are worked on, and the queries.
#[derive(Clone)]
struct Part {
    row: usize,
    keys: usize,
    /// The queries' chunks, and which chunk of the loader the first of them meets.
    chunks: Range<usize>,
    first_chunk: usize,
    queries: Queries,
    ahead: Ahead,
}

/// Scores of a part's keys into `scores`, `[rows, TILE]`.
///
/// # Safety
/// The level's instructions are enabled; everything that `part` names exists; `staged` is as [`Room`] says.
#[inline(always)]
unsafe fn score<S: Simd, R: Rows>(rows: R, part: Part, scores: *mut f32, staged: *mut f32) {
    if part.queries.rows <= DIRECT_ROWS {
        return S::LEVEL.dispatch(Score { rows, part, scores });
    }
    let stride = part.queries.head_dim;
    for key in (0..part.keys).step_by(STAGED_KEYS) {
        let keys = STAGED_KEYS.min(part.keys - key);
        let piece = Part { row: part.row + key, keys, ..part.clone() };
        S::LEVEL.dispatch(Stage { rows, part: piece, to: staged, stride });
        let ahead = Ahead { lines: part.ahead.lines.skip(key), rows: part.ahead.rows.saturating_sub(key) };
        let piece = Part { row: 0, keys, first_chunk: 0, ahead, ..part.clone() };
        let rows = Dense::<f32> { start: staged, stride };
        // SAFETY: keys are less than TILE.
        S::LEVEL.dispatch(Score { rows, part: piece, scores: unsafe { scores.add(key) } });
    }
}

/// Adds a part's values, by `weights` (`[rows, TILE]`), to the queries' sums.
///
/// # Safety
/// As for [`score`].
#[inline(always)]
unsafe fn add_values<S: Simd, R: Rows>(rows: R, part: Part, weights: *const f32, staged: *mut f32) {
    if part.queries.rows <= DIRECT_ROWS {
        return S::LEVEL.dispatch(AddValues { rows, part, weights });
    }
    let at_a_time = STAGED_COORDINATES / (2 * S::LANES);
    for first in part.chunks.clone().step_by(at_a_time) {
        let chunks = first..part.chunks.end.min(first + at_a_time);
        let first_chunk = part.first_chunk + first - part.chunks.start;
        let piece = Part { chunks: chunks.clone(), first_chunk, ..part.clone() };
        S::LEVEL.dispatch(Stage { rows, part: piece, to: staged, stride: STAGED_COORDINATES });
        let rows = Dense::<f32> { start: staged, stride: STAGED_COORDINATES };
        let piece = Part { row: 0, chunks, first_chunk: 0, ..part.clone() };
        S::LEVEL.dispatch(AddValues { rows, part: piece, weights });
    }
}

/// Widens a part's rows to f32, each to `stride` floats.
struct Stage<R> {
    rows: R,
    part: Part,
    to: *mut f32,
    stride: usize,
}

impl<R: Rows> Kernel for Stage<R> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Part { row, keys, first_chunk, ref chunks, .. } = self.part;
        for key in 0..keys {
            for chunk in 0..chunks.len() {
                // SAFETY: `dispatch` enables the instructions; the caller of `score` and `add_values` vouches for the
                // rows and the room.
                unsafe {
                    let (a, b) = self.rows.chunk::<S>(row + key, first_chunk + chunk);
                    let to = self.to.add(key * self.stride + chunk * 2 * S::LANES);
                    S::store(to, a);
                    S::store(to.add(S::LANES), b);
                }
            }
        }
    }
}

struct Score<R> {
    rows: R,
    part: Part,
    scores: *mut f32,
}

impl<R: Rows> Kernel for Score<R> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let keys = self.part.keys;
        let whole = keys - keys % 4;
        // SAFETY: `dispatch` enables the instructions; the caller of `score` vouches for the rest.
        unsafe {
            for key in (0..whole).step_by(4) {
                for row in key..(key + 4).min(self.part.ahead.rows) {
                    self.part.ahead.lines.prefetch::<S>(row, 0..1, 1);
                }
                self.keys::<S, 4>(key);
            }
            for key in whole..keys {
                self.keys::<S, 1>(key);
            }
        }
    }
}

impl<R: Rows> Score<R> {
    /// Scores of `K` keys with all queries.
    #[inline(always)]
    unsafe fn keys<S: Simd, const K: usize>(&self, key: usize) {
        let rows = self.part.queries.rows;
        let mut query = 0;
        // SAFETY: passed on to the caller.
        unsafe {
            if many_registers::<S>() {
                while query + 4 <= rows {
                    self.block::<S, K, 4>(key, query);
                    query += 4;
                }
                if query + 3 <= rows {
                    self.block::<S, K, 3>(key, query);
                    query += 3;
                }
            }
            while query + 2 <= rows {
                self.block::<S, K, 2>(key, query);
                query += 2;
            }
            if query < rows {
                self.block::<S, K, 1>(key, query);
            }
        }
    }

    /// Scores of `K` keys with `Q` queries; K is 4 or 1.
    #[inline(always)]
    unsafe fn block<S: Simd, const K: usize, const Q: usize>(&self, key: usize, query: usize) {
        let Part { row, first_chunk, ref chunks, queries, .. } = self.part;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[S::zero(); K]; Q];
            let mut q = queries.q.add(query * queries.head_dim + chunks.start * 2 * S::LANES);
            for chunk in first_chunk..first_chunk + chunks.len() {
                let mut k = [(S::zero(), S::zero()); K];
                for (i, k) in k.iter_mut().enumerate() {
                    *k = self.rows.chunk::<S>(row + key + i, chunk);
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let q = q.add(i * queries.head_dim);
                    let (a, b) = (S::load(q), S::load(q.add(S::LANES)));
                    for (sum, k) in sums.iter_mut().zip(&k) {
                        *sum = S::fma(k.0, a, *sum);
                    }
                    for (sum, k) in sums.iter_mut().zip(&k) {
                        *sum = S::fma(k.1, b, *sum);
                    }
                }
                q = q.add(2 * S::LANES);
            }
            for (i, sums) in sums.iter().enumerate() {
                let to = self.scores.add((query + i) * TILE + key);
                if K == 4 {
                    S::store_sums(to, [sums[0], sums[1 % K], sums[2 % K], sums[3 % K]]);
                } else {
                    *to = S::sum(sums[0]);
                }
            }
        }
    }
}

/// Scores to weights 2^(s − m), with m raised to the tile's largest score; l and o are rescaled to it.
///
/// # Safety
/// As for [`absorb`].
#[inline(always)]
unsafe fn softmax<S: Simd>(source: &Source, (row, keys): (usize, usize), queries: Queries, room: Room) {
    let Source { k, v, .. } = source;
    let (plane, head_dim) = (queries.rows * TILE, queries.head_dim);
    let padded = keys.next_multiple_of(S::LANES);
    // SAFETY: passed on to the caller; `padded` is at most TILE, a multiple of every level's lanes.
    unsafe {
        if k.quantised {
            for block in 0..head_dim / k.block {
                k.norms(row, block, std::slice::from_raw_parts_mut(room.norms, keys));
                for query in 0..queries.rows {
                    let total = room.scores.add(query * TILE);
                    let part = total.add(block * plane);
                    for i in (0..padded).step_by(S::LANES) {
                        let product = S::mul(S::load(part.add(i)), S::load(room.norms.add(i)));
                        let sum = if block == 0 { product } else { S::add(S::load(total.add(i)), product) };
                        S::store(total.add(i), sum);
                    }
                }
            }
        }
        for query in 0..queries.rows {
            let scores = room.scores.add(query * TILE);
            if let Some(cap) = queries.softcap {
                for i in (0..padded).step_by(S::LANES) {
                    let t = S::tanh(S::mul(S::load(scores.add(i)), S::splat(1.0 / cap)));
                    S::store(scores.add(i), S::mul(t, S::splat(cap)));
                }
            }
            for i in keys..padded {
                *scores.add(i) = f32::NEG_INFINITY;
            }
            // A NaN score is passed over here and shows in its weight.
            let mut largest = S::splat(f32::NEG_INFINITY);
            for i in (0..padded).step_by(S::LANES) {
                largest = S::max(S::load(scores.add(i)), largest);
            }
            let (before, l) = (*queries.m.add(query), &mut *queries.l.add(query));
            let m = before.max(S::max_lane(largest));
            if m > before {
                let factor = (before - m).exp2();
                *l *= factor;
                let o = queries.o.add(query * head_dim);
                for i in (0..head_dim).step_by(S::LANES) {
                    S::store(o.add(i), S::mul(S::load(o.add(i)), S::splat(factor)));
                }
                *queries.m.add(query) = m;
            }
            let mut sum = S::zero();
            for i in (0..padded).step_by(S::LANES) {
                let weight = S::exp2(S::sub(S::load(scores.add(i)), S::splat(m)));
                S::store(scores.add(i), weight);
                sum = S::add(sum, weight);
            }
            *l += S::sum(sum);
        }
        if v.quantised {
            // The last block first: the first one's plane is what all are made from.
            for block in (0..head_dim / v.block).rev() {
                v.norms(row, block, std::slice::from_raw_parts_mut(room.norms, keys));
                for query in 0..queries.rows {
                    let weights = room.scores.add(query * TILE);
                    let part = weights.add(block * plane);
                    for i in (0..padded).step_by(S::LANES) {
                        S::store(part.add(i), S::mul(S::load(weights.add(i)), S::load(room.norms.add(i))));
                    }
                }
            }
        }
    }
}

struct AddValues<R> {
    rows: R,
    part: Part,
    weights: *const f32,
}

impl<R: Rows> Kernel for AddValues<R> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let rows = self.part.queries.rows;
        let mut query = 0;
        // SAFETY: `dispatch` enables the instructions; the caller of `add_values` vouches for the rest.
        unsafe {
            if many_registers::<S>() {
                while query + 4 <= rows {
                    self.rows::<S, 4, 2>(query);
                    query += 4;
                }
                match rows - query {
                    3 => self.rows::<S, 3, 2>(query),
                    2 => self.rows::<S, 2, 4>(query),
                    1 => self.rows::<S, 1, 4>(query),
                    _ => {}
                }
            } else {
                while query + 4 <= rows {
                    self.rows::<S, 4, 1>(query);
                    query += 4;
                }
                match rows - query {
                    3 => self.rows::<S, 3, 1>(query),
                    2 => self.rows::<S, 2, 2>(query),
                    1 => self.rows::<S, 1, 4>(query),
                    _ => {}
                }
            }
        }
    }
}

impl<R: Rows> AddValues<R> {
    /// All chunks of `Q` queries, `C` at a time while as many are left.
    #[inline(always)]
    unsafe fn rows<S: Simd, const Q: usize, const C: usize>(&self, query: usize) {
        let chunks = self.part.chunks.len();
        let whole = chunks - chunks % C;
        // SAFETY: passed on to the caller.
        unsafe {
            for chunk in (0..whole).step_by(C) {
                self.block::<S, Q, C>(query, chunk);
            }
            for chunk in whole..chunks {
                self.block::<S, Q, 1>(query, chunk);
            }
        }
    }

    /// `C` chunks of `Q` queries, over all keys.
    #[inline(always)]
    unsafe fn block<S: Simd, const Q: usize, const C: usize>(&self, query: usize, chunk: usize) {
        let Part { row, keys, first_chunk, ref chunks, queries, ahead } = self.part;
        let width = 2 * S::LANES;
        // The first queries' blocks together ask for every line once.
        let (part, parts) = (chunks.start + chunk..chunks.start + chunk + C, queries.head_dim / width);
        let ahead_rows = if query == 0 { ahead.rows } else { 0 };
        // SAFETY: passed on to the caller.
        unsafe {
            let o = queries.o.add(query * queries.head_dim + (chunks.start + chunk) * width);
            let weights = self.weights.add(query * TILE);
            let mut sums = [[(S::zero(), S::zero()); C]; Q];
            for (i, sums) in sums.iter_mut().enumerate() {
                for (j, sum) in sums.iter_mut().enumerate() {
                    let o = o.add(i * queries.head_dim + j * width);
                    *sum = (S::load(o), S::load(o.add(S::LANES)));
                }
            }
            for key in 0..keys {
                if key < ahead_rows {
                    ahead.lines.prefetch::<S>(key, part.clone(), parts);
                }
                let mut v = [(S::zero(), S::zero()); C];
                for (j, v) in v.iter_mut().enumerate() {
                    *v = self.rows.chunk::<S>(row + key, first_chunk + chunk + j);
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let weight = S::splat(*weights.add(i * TILE + key));
                    for (sum, v) in sums.iter_mut().zip(&v) {
                        *sum = (S::fma(v.0, weight, sum.0), S::fma(v.1, weight, sum.1));
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                for (j, sum) in sums.iter().enumerate() {
                    let o = o.add(i * queries.head_dim + j * width);
                    S::store(o, sum.0);
                    S::store(o.add(S::LANES), sum.1);
                }
            }
        }
    }
}
