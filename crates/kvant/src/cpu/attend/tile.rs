//! One tile: up to 64 keys and values, and some query rows that all see them.
//!
//! Scores are made for a block of keys × queries in registers, one softmax step follows for the whole tile, then the
//! values are added to a block of queries × coordinates in registers. While scores are made the values are on their
//! way from memory, and the next keys while values are added. A tile has no mask: whoever calls it passes only keys
//! that every query row sees.

use std::ops::Range;

use super::{
    ahead::{Ahead, Wanted},
    fixed,
    rows::{Loader, Rows, Source, with_loader},
    score::score,
    values::add_values,
};
use crate::codec::BLOCK;
use crate::cpu::simd::{Kernel, Simd, SimdLevel};

/// Keys of a tile.
pub(super) const TILE: usize = 64;
/// Keys that are widened at a time: what fits into the first-level cache beside the queries.
pub(super) const STAGED_KEYS: usize = 8;
/// Coordinates of all the tile's values that are widened at a time.
pub(super) const STAGED_COORDINATES: usize = 64;

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
    /// `q` in fixed point, `[rows, head_dim]`, and its units, `[rows, blocks]`, where keys are.
    pub rounded: *const i16,
    pub units: *const f32,
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
                rounded: self.rounded.wrapping_add(rows.start * self.head_dim),
                units: self.units.wrapping_add(rows.start * self.head_dim.div_ceil(BLOCK)),
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
    /// `[STAGED_KEYS, head_dim]`, `[TILE, STAGED_COORDINATES]`, or `[rows, TILE]` of i16.
    staged: *mut f32,
}

impl Room {
    fn parts(rows: usize, head_dim: usize) -> [usize; 3] {
        let staged = (STAGED_KEYS * head_dim).max(TILE * STAGED_COORDINATES).max(rows * TILE / 2);
        [rows * TILE * head_dim.div_ceil(BLOCK), TILE, staged]
    }

    pub fn len(rows: usize, head_dim: usize) -> usize {
        Room::parts(rows, head_dim).iter().sum()
    }

    /// In `room`, of [`Room::len`] floats.
    pub fn new(room: &mut [f32], rows: usize, head_dim: usize) -> Room {
        assert!(room.len() >= Room::len(rows, head_dim));
        let [scores, norms, _] = Room::parts(rows, head_dim);
        let (scores, rest) = room.split_at_mut(scores);
        let (norms, staged) = rest.split_at_mut(norms);
        Room { scores: scores.as_mut_ptr(), norms: norms.as_mut_ptr(), staged: staged.as_mut_ptr() }
    }
}

/// Whether 16 sums fit into registers beside their operands, rather than 8.
#[inline(always)]
pub(super) fn many_registers<S: Simd>() -> bool {
    matches!(S::LEVEL, SimdLevel::Avx512 | SimdLevel::Neon)
}

/// More query rows than this read keys and values from a copy that has been widened to f32 once.
#[inline(always)]
pub(super) fn direct_rows<S: Simd>() -> usize {
    if many_registers::<S>() { 8 } else { 4 }
}

/// The tiles of `positions`, in order, as (first row, number of keys).
pub(super) fn tiles(source: &Source, positions: &Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    let [first, second] = source.runs(positions.start, positions.len());
    let of = |(row, len): (usize, usize)| (0..len).step_by(TILE).map(move |i| (row + i, TILE.min(len - i)));
    of(first).chain(of(second))
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
    let mut tiles = tiles(source, &positions).peekable();
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
        let (blocks, wanted) = (queries.head_dim / k.block, Wanted::new(&v.planes, row, keys));
        let mut ahead = Ahead::new(&wanted);
        for block in 0..blocks {
            let chunks = block * k.block / chunk..(block + 1) * k.block / chunk;
            let scores = room.scores.add(block * plane);
            let lines = ahead.left().div_ceil(blocks - block);
            if k.fixed {
                let part = FixedPart { row, keys, block, queries, lines };
                fixed::score(k, part, scores, &mut ahead);
                continue;
            }
            let part = Part { row, keys, first_chunk: chunks.start, chunks, queries, lines };
            with_loader!(k.loader, rows => score::<S, _>(rows, part, scores, room.staged, &mut ahead));
        }
        softmax::<S>(source, (row, keys), queries, room);
        let (blocks, wanted) = (queries.head_dim / v.block, Wanted::new(&k.planes, next.0, next.1));
        let mut ahead = Ahead::new(&wanted);
        for block in 0..blocks {
            let chunks = block * v.block / chunk..(block + 1) * v.block / chunk;
            let weights = room.scores.add(block * plane).cast_const();
            let lines = ahead.left().div_ceil(blocks - block);
            if v.fixed {
                let part = FixedPart { row, keys, block, queries, lines };
                fixed::add_values(v, part, weights, room.staged.cast(), &mut ahead);
                continue;
            }
            let part = Part { row, keys, first_chunk: chunks.start, chunks, queries, lines };
            with_loader!(v.loader, rows => add_values::<S, _>(rows, part, weights, room.staged, &mut ahead));
        }
    }
}

/// Rows of a loader, the chunks of them that are worked on, and the queries.
#[derive(Clone)]
pub(super) struct Part {
    pub row: usize,
    pub keys: usize,
    /// The queries' chunks, and which chunk of the loader the first of them meets.
    pub chunks: Range<usize>,
    pub first_chunk: usize,
    pub queries: Queries,
    /// Lines to ask for meanwhile.
    pub lines: usize,
}

/// What is worked on in fixed point: keys of a tile, and a block of coordinates that share a norm.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no side is in fixed point"))]
pub(super) struct FixedPart {
    pub row: usize,
    pub keys: usize,
    pub block: usize,
    pub queries: Queries,
    /// Lines to ask for meanwhile.
    pub lines: usize,
}

/// Widens a part's rows to f32, each to `stride` floats.
pub(super) struct Stage<R> {
    pub rows: R,
    pub part: Part,
    pub to: *mut f32,
    pub stride: usize,
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
            // A NaN score is passed over here and shows in its weight. Not from −∞: see `State`.
            let mut largest = S::splat(f32::MIN);
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
