//! Attention of many query rows: prompts, and groups of many heads. Two matrix products per tile of keys, in f32.
//!
//! A lane is a query row, so no sum or maximum is taken across lanes. Scores are keys × query rows: queries are
//! transposed once per task, keys are widened 12 at a time. The softmax processes a vector of rows at once. Values are
//! widened 64 coordinates at a time and multiplied by the weights in place.
//!
//! At the diagonal and at a window's edge, some rows do not see some keys. Their scores are masked before the softmax.
//! Products of rows, or vectors of rows, that see no key are skipped. A weight of zero does not hide a value that is
//! not finite. A tile with such a value at an edge is therefore processed token by token ([`QueryLanes::absorb_at`]
//! reports it).

use std::ops::Range;

use super::{
    kv_rows::KvSource,
    lane_softmax::{LANES, MIN_LOG2, ScoreLanes, StoreWeights},
    prefetch::{PrefetchRuns, Prefetcher},
    stage::{RowMeans, StagedPart, StagedSide, key_means, stage},
    tile::{AbsorbTiles, KeyTile, Queries, TILE},
};
use crate::cpu::{
    scratch,
    simd::{Simd, SimdKernel, SimdLevel},
};

/// Keys that are widened at a time; their sums fit in registers.
const KEYS: usize = 12;
/// Floats from a widened key to the next: a compile-time constant, chosen so that keys do not share a few sets of the
/// caches.
const STRIDE: usize = 512 + 16;
/// Coordinates of the tile's values that are widened at a time.
const COORDINATES: usize = 64;

/// Query rows, and scratch memory for a tile.
#[derive(Clone, Copy)]
pub(super) struct QueryLanes {
    queries: Queries,
    /// The number of rows, padded.
    rows: usize,
    /// `[rows / LANES, head_dim, LANES]`.
    q: *mut f32,
    /// `[TILE, rows]`: scores, then weights.
    scores: *mut f32,
    /// `[KEYS, STRIDE]` or `[TILE, COORDINATES]`.
    staged: *mut f32,
    /// `[rows]` each.
    m: *mut f32,
    l: *mut f32,
    /// `[2, head_dim]`: the means of a page's keys and values.
    means: *mut f32,
}

/// Makes [`QueryLanes`] of queries, in [`QueryLanes::len`] floats of memory.
pub(super) struct TransposeQueries<'a> {
    pub queries: Queries,
    pub memory: &'a mut [f32],
}

impl SimdKernel for TransposeQueries<'_> {
    type Output = QueryLanes;
    #[inline(always)]
    fn run<S: Simd>(self) -> QueryLanes {
        // SAFETY: `dispatch` enables the instructions; the queries are valid.
        unsafe { QueryLanes::new::<S>(self.queries, self.memory) }
    }
}

/// Calls [`QueryLanes::absorb_at`].
struct AbsorbTile<'a> {
    many: QueryLanes,
    source: &'a KvSource<'a>,
    tile: &'a KeyTile<'a>,
}

impl SimdKernel for AbsorbTile<'_> {
    type Output = bool;
    #[inline(always)]
    fn run<S: Simd>(self) -> bool {
        // SAFETY: `dispatch` enables the instructions; the source has the keys.
        unsafe { self.many.absorb_at::<S>(self.source, self.tile) }
    }
}

/// Only m and l of the states are copied.
impl AbsorbTiles for QueryLanes {
    const TILE: usize = TILE;

    unsafe fn load_states(&self) {
        // SAFETY: the caller's promise; both have the same number of rows.
        unsafe {
            self.m.copy_from_nonoverlapping(self.queries.m, self.queries.rows);
            self.l.copy_from_nonoverlapping(self.queries.l, self.queries.rows);
        }
    }

    unsafe fn store_states(&self) {
        // SAFETY: as above.
        unsafe {
            self.queries.m.copy_from_nonoverlapping(self.m, self.queries.rows);
            self.queries.l.copy_from_nonoverlapping(self.l, self.queries.rows);
        }
    }

    unsafe fn absorb(&self, level: SimdLevel, source: &KvSource, tile: &KeyTile) -> bool {
        level.dispatch(AbsorbTile { many: *self, source, tile })
    }
}

impl QueryLanes {
    /// Floats of scratch memory for `rows` query rows.
    pub fn len(rows: usize, head_dim: usize) -> usize {
        let rows = rows.next_multiple_of(LANES);
        rows * (head_dim + TILE + 2) + 2 * head_dim + (KEYS * STRIDE).max(TILE * COORDINATES)
    }

    /// Transposes the queries into `memory`, of [`QueryLanes::len`] floats.
    ///
    /// # Safety
    /// The level's instructions are enabled; `queries` are valid, and nobody else accesses their states.
    #[inline(always)]
    unsafe fn new<S: Simd>(queries: Queries, memory: &mut [f32]) -> QueryLanes {
        let (rows, dim) = (queries.rows.next_multiple_of(LANES), queries.head_dim);
        assert!(memory.len() >= QueryLanes::len(queries.rows, dim));
        let (q, memory) = memory.split_at_mut(rows * dim);
        let (scores, memory) = memory.split_at_mut(rows * TILE);
        let (m, memory) = memory.split_at_mut(rows);
        let (l, memory) = memory.split_at_mut(rows);
        let (means, staged) = memory.split_at_mut(2 * dim);
        let whole = queries.rows / LANES;
        for (vector, to) in q.chunks_exact_mut(LANES * dim).enumerate() {
            // SAFETY: the rows belong to the queries, and a square of LANES × LANES is written to as many floats.
            unsafe {
                if vector < whole {
                    let from = queries.q.add(vector * LANES * dim);
                    for i in (0..dim).step_by(LANES) {
                        S::transpose16(from.add(i), dim, to.as_mut_ptr().add(i * LANES));
                    }
                    continue;
                }
                to.fill(0.0);
                for row in whole * LANES..queries.rows {
                    for (i, to) in to.iter_mut().skip(row % LANES).step_by(LANES).enumerate() {
                        *to = *queries.q.add(row * dim + i);
                    }
                }
            }
        }
        m.fill(f32::NEG_INFINITY);
        l.fill(0.0);
        QueryLanes {
            queries,
            rows,
            q: q.as_mut_ptr(),
            scores: scores.as_mut_ptr(),
            staged: staged.as_mut_ptr(),
            m: m.as_mut_ptr(),
            l: l.as_mut_ptr(),
            means: means.as_mut_ptr(),
        }
    }

    /// Adds the keys and values of a tile to the states. Returns false, and does nothing, if a value that is not seen
    /// by all rows is not finite.
    ///
    /// # Safety
    /// The level's instructions are enabled; the source has the keys, and no side of it is in fixed point.
    #[inline(always)]
    unsafe fn absorb_at<S: Simd>(&self, source: &KvSource, tile: &KeyTile) -> bool {
        let (KvSource { k, v, .. }, level, dim) = (source, S::LEVEL, self.queries.head_dim);
        // SAFETY: passed on to the caller; the staged part fits.
        unsafe {
            let [k_mean, v_mean] = [self.means, self.means.add(dim)];
            let biased = &mut *scratch::take(if source.bias.is_some() { tile.keys * dim } else { 0 });
            let k_means = key_means::<S>(source, tile, std::slice::from_raw_parts_mut(k_mean, dim), biased);
            let v_centred = v.mean::<S>(true, std::slice::from_raw_parts_mut(v_mean, dim));
            let v_means = v_centred.then(|| RowMeans::shared(v_mean));
            let [k, v] = [(k, k_means), (v, v_means)].map(|(side, means)| StagedSide { side, means });
            // All coordinates of some rows.
            let whole = |from, row, keys| StagedPart {
                from,
                row,
                keys,
                first: 0,
                coordinates: dim,
                to: self.staged,
                stride: STRIDE,
            };
            if let Some(seen) = tile.seen {
                let hidden = |key: &usize| seen[*key].len() < self.queries.rows;
                for key in (0..tile.keys).filter(hidden) {
                    if !stage(level, whole(v, tile.row + key, 1)) {
                        return false;
                    }
                }
            }
            // Values are prefetched while scores are computed, and the next keys while values are accumulated.
            let wanted = PrefetchRuns::new(&v.side.planes, 0, tile.row, tile.keys);
            let mut prefetch = Prefetcher::new(&wanted);
            let share = prefetch.left().div_ceil(tile.keys.div_ceil(KEYS).max(1));
            for key in (0..tile.keys).step_by(KEYS) {
                let keys = KEYS.min(tile.keys - key);
                stage(level, whole(k, tile.row + key, keys));
                prefetch.fetch::<S>(share);
                level.dispatch(LaneScores { many: *self, tile, key, keys });
            }
            level.dispatch(LaneSoftmax { many: *self, tile });
            let wanted = PrefetchRuns::new(&tile.next_from.k.planes, tile.next.bytes, tile.next.row, tile.next.keys);
            let mut prefetch = Prefetcher::new(&wanted);
            let share = prefetch.left().div_ceil(dim.div_ceil(COORDINATES));
            for first in (0..dim).step_by(COORDINATES) {
                let coordinates = COORDINATES.min(dim - first);
                let part = whole(v, tile.row, tile.keys);
                stage(level, StagedPart { first, coordinates, stride: COORDINATES, ..part });
                prefetch.fetch::<S>(share);
                level.dispatch(LaneSums { many: *self, tile, first, coordinates });
            }
        }
        true
    }
}

/// Computes scores of the staged keys, `key ..` of the tile.
struct LaneScores<'a> {
    many: QueryLanes,
    tile: &'a KeyTile<'a>,
    key: usize,
    keys: usize,
}

impl SimdKernel for LaneScores<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let vectors = self.many.rows / S::LANES;
        // The vectors of rows that see any of these keys.
        let seen = self.tile.seen.map_or(0..vectors, |seen| {
            let seen = &seen[self.key..self.key + self.keys];
            let first = seen.iter().filter(|rows| !rows.is_empty()).map(|rows| rows.start).min().unwrap_or(0);
            let end = seen.iter().map(|rows| rows.end).max().unwrap_or(0);
            first / S::LANES..end.div_ceil(S::LANES)
        });
        let mut vector = seen.start;
        // SAFETY: `dispatch` enables the instructions; the vectors are within the rows, and the keys are staged.
        unsafe {
            while vector < seen.end {
                if vector + 2 <= seen.end {
                    self.vectors::<S, 2>(vector);
                } else {
                    self.vectors::<S, 1>(vector);
                }
                vector += 2;
            }
        }
    }
}

impl LaneScores<'_> {
    /// Scores of all keys with `V` vectors of rows.
    #[inline(always)]
    unsafe fn vectors<S: Simd, const V: usize>(&self, vector: usize) {
        let mut key = 0;
        // SAFETY: passed on to the caller.
        unsafe {
            if S::MANY_REGISTERS {
                while key + 12 <= self.keys {
                    self.block::<S, V, 12>(vector, key);
                    key += 12;
                }
            } else {
                while key + 6 <= self.keys {
                    self.block::<S, V, 6>(vector, key);
                    key += 6;
                }
            }
            while key + 4 <= self.keys {
                self.block::<S, V, 4>(vector, key);
                key += 4;
            }
            while key < self.keys {
                self.block::<S, V, 1>(vector, key);
                key += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd, const V: usize, const K: usize>(&self, vector: usize, key: usize) {
        let QueryLanes { queries, rows, q, scores, staged, .. } = self.many;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[S::zero(); V]; K];
            // A vector is a part of LANES rows, which are contiguous.
            let q: [*const f32; V] = std::array::from_fn(|v| {
                let row = (vector + v) * S::LANES;
                q.add(row / LANES * LANES * queries.head_dim + row % LANES).cast_const()
            });
            let keys = staged.add(key * STRIDE);
            for i in 0..queries.head_dim {
                let mut x = [S::zero(); V];
                for (x, q) in x.iter_mut().zip(q) {
                    *x = S::load(q.add(i * LANES));
                }
                for (k, sums) in sums.iter_mut().enumerate() {
                    let key = S::splat(*keys.add(k * STRIDE + i));
                    for (sum, &x) in sums.iter_mut().zip(&x) {
                        *sum = S::fma(x, key, *sum);
                    }
                }
            }
            for (k, sums) in sums.iter().enumerate() {
                for (v, &sum) in sums.iter().enumerate() {
                    S::store(scores.add((self.key + key + k) * rows + (vector + v) * S::LANES), sum);
                }
            }
        }
    }
}

/// Turns scores into weights 2^(s − m), with m raised to each row's largest score; l and o are rescaled accordingly.
struct LaneSoftmax<'a> {
    many: QueryLanes,
    tile: &'a KeyTile<'a>,
}

impl SimdKernel for LaneSoftmax<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let QueryLanes { queries, rows, scores, m, l, .. } = self.many;
        for first in (0..rows).step_by(S::LANES) {
            // SAFETY: `dispatch` enables the instructions; rows are padded to whole vectors.
            unsafe {
                let (m, l) = (m.add(first), l.add(first));
                let lanes = ScoreLanes {
                    scores: scores.add(first),
                    stride: rows,
                    keys: 0..self.tile.keys,
                    seen: self.tile.seen,
                    row: first,
                    softcap: queries.softcap,
                };
                let largest = lanes.largest::<S>(S::load(m));
                let mut raised = [0.0; LANES];
                S::store(raised.as_mut_ptr(), largest);
                for (lane, &raised) in raised[..S::LANES].iter().enumerate() {
                    let before = *m.add(lane);
                    if raised > before && first + lane < queries.rows {
                        let factor = (before - raised).max(MIN_LOG2).exp2();
                        *l.add(lane) *= factor;
                        let o = queries.o.add((first + lane) * queries.head_dim);
                        for i in (0..queries.head_dim).step_by(S::LANES) {
                            S::store(o.add(i), S::mul(S::load(o.add(i)), S::splat(factor)));
                        }
                    }
                }
                S::store(m, largest);
                let sum = lanes.weigh::<S, _>(largest, InPlace { scores: lanes.scores, stride: rows });
                S::store(l, S::add(S::load(l), sum));
            }
        }
    }
}

/// Writes weights over scores, which have [`TILE`] rows.
struct InPlace {
    scores: *mut f32,
    stride: usize,
}

impl<S: Simd> StoreWeights<S> for InPlace {
    #[inline(always)]
    unsafe fn store(&self, key: usize, weights: [S::F; 2]) {
        for (i, weight) in weights.into_iter().enumerate() {
            // SAFETY: passed on to the caller; the tile's size is even.
            unsafe { S::store(self.scores.add((key + i) * self.stride), weight) }
        }
    }
}

/// Adds the staged values, `coordinates` from `first` on, times the weights to the sums.
struct LaneSums<'a> {
    many: QueryLanes,
    tile: &'a KeyTile<'a>,
    first: usize,
    /// A whole number of chunks, at most [`COORDINATES`].
    coordinates: usize,
}

impl SimdKernel for LaneSums<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let rows = self.many.queries.rows;
        let mut row = 0;
        // SAFETY: `dispatch` enables the instructions; the rows exist and the values are staged.
        unsafe {
            while row + 4 <= rows {
                self.rows::<S, 4>(row);
                row += 4;
            }
            while row < rows {
                self.rows::<S, 1>(row);
                row += 1;
            }
        }
    }
}

impl LaneSums<'_> {
    /// Adds all values that any of `R` rows sees.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize>(&self, row: usize) {
        let keys = self.tile.seen.map_or(0..self.tile.keys, |seen| {
            let sees = |key: &usize| seen[*key].start < row + R && seen[*key].end > row;
            let first = (0..self.tile.keys).find(sees).unwrap_or(0);
            first..(first..self.tile.keys).rev().find(sees).map_or(first, |last| last + 1)
        });
        // SAFETY: passed on to the caller; the coordinates after whole columns are whole chunks of two vectors.
        unsafe {
            let mut column = 0;
            if S::MANY_REGISTERS {
                while column + 4 * S::LANES <= self.coordinates {
                    self.column::<S, R, 4>(row, column, keys.clone());
                    column += 4 * S::LANES;
                }
            }
            while column < self.coordinates {
                self.column::<S, R, 2>(row, column, keys.clone());
                column += 2 * S::LANES;
            }
        }
    }

    /// Adds `C` vectors of coordinates from `column` on.
    #[inline(always)]
    unsafe fn column<S: Simd, const R: usize, const C: usize>(&self, row: usize, column: usize, keys: Range<usize>) {
        let QueryLanes { queries, rows, scores, staged, .. } = self.many;
        // SAFETY: passed on to the caller.
        unsafe {
            let o = queries.o.add(row * queries.head_dim + self.first + column);
            let mut sums = [[S::zero(); C]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = S::load(o.add(r * queries.head_dim + c * S::LANES));
                }
            }
            for key in keys {
                let values = staged.add(key * COORDINATES + column);
                let weights = scores.add(key * rows + row);
                let mut v = [S::zero(); C];
                for (c, v) in v.iter_mut().enumerate() {
                    *v = S::load(values.add(c * S::LANES));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let weight = S::splat(*weights.add(r));
                    for (sum, &v) in sums.iter_mut().zip(&v) {
                        *sum = S::fma(v, weight, *sum);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (c, &sum) in sums.iter().enumerate() {
                    S::store(o.add(r * queries.head_dim + c * S::LANES), sum);
                }
            }
        }
    }
}
