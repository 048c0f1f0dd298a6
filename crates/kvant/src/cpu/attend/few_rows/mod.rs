//! Attention of a few query rows: decode and verification, in tiles of up to 64 keys and values.
//!
//! Scores are computed for a block of keys × queries in registers. One softmax step follows for the whole tile. Then
//! the values are accumulated into a block of queries × coordinates in registers. The values are prefetched while
//! scores are computed, and the next keys while values are accumulated. A tile has no mask: callers pass only keys that
//! every query row sees.

use std::ops::Range;

use super::{
    fixed_point,
    kv_rows::{DenseRows, KvRun, KvSource, LoadRows, RowLoader, with_loader},
    prefetch::{PLANES, Plane, PrefetchRuns, Prefetcher},
    tile::{FixedPart, Queries, TILE, tiles},
};
use crate::{
    codec::BLOCK,
    cpu::{
        key_bias::HeadBias,
        scratch,
        simd::{Simd, SimdKernel, SimdLevel},
    },
};

pub(super) mod scores;
mod values;

use scores::score;
use values::add_values;

/// Keys that are widened at a time: together with the queries, they fit into the first-level cache.
const STAGED_KEYS: usize = 8;
/// Coordinates of the tile's values that are widened at a time.
const STAGED_COORDINATES: usize = 64;

/// Scratch memory of a tile.
#[derive(Clone, Copy)]
pub(super) struct TileMemory {
    /// `[blocks, rows, TILE]`: scores, then weights; `blocks` is the larger of the numbers of norms of a key and a
    /// value.
    scores: *mut f32,
    /// `[TILE]`.
    norms: *mut f32,
    /// `[2, head_dim]`: the means of a page's keys and values.
    means: *mut f32,
    /// `[STAGED_KEYS, head_dim]`, `[TILE, STAGED_COORDINATES]`, or `[rows, TILE]` of i16.
    staged: *mut f32,
}

impl TileMemory {
    fn parts(rows: usize, head_dim: usize) -> [usize; 4] {
        let staged = (STAGED_KEYS * head_dim).max(TILE * STAGED_COORDINATES).max(rows * TILE / 2);
        [rows * TILE * head_dim.div_ceil(BLOCK), TILE, 2 * head_dim, staged]
    }

    pub fn len(rows: usize, head_dim: usize) -> usize {
        TileMemory::parts(rows, head_dim).iter().sum()
    }

    /// Divides `room`, of [`TileMemory::len`] floats.
    pub fn new(room: &mut [f32], rows: usize, head_dim: usize) -> TileMemory {
        assert!(room.len() >= TileMemory::len(rows, head_dim));
        let [scores, norms, means, _] = TileMemory::parts(rows, head_dim);
        let (scores, rest) = room.split_at_mut(scores);
        let (norms, rest) = rest.split_at_mut(norms);
        let (means, staged) = rest.split_at_mut(means);
        let [scores, norms, means, staged] = [scores, norms, means, staged].map(<[f32]>::as_mut_ptr);
        TileMemory { scores, norms, means, staged }
    }
}

/// Maximum query rows that read keys and values in place; more rows use a copy widened to f32 once.
#[inline(always)]
fn direct_rows<S: Simd>() -> usize {
    if S::MANY_REGISTERS { 8 } else { 4 }
}

/// Keys to prefetch: a run, and the source that it is counted from.
#[derive(Clone, Copy)]
pub(super) struct NextKeys<'a> {
    pub source: &'a KvSource<'a>,
    pub run: KvRun,
}

impl<'a> NextKeys<'a> {
    pub fn none(source: &'a KvSource<'a>) -> NextKeys<'a> {
        NextKeys { source, run: KvRun::NONE }
    }
}

/// Adds the keys and values of `positions` to the states of `queries`. `after`: the keys that are processed next.
///
/// # Safety
/// The level is supported; the source has the positions; `queries` and `room` are valid.
pub(super) unsafe fn absorb(
    level: SimdLevel,
    source: &KvSource,
    positions: Range<usize>,
    queries: Queries,
    room: TileMemory,
    after: NextKeys,
) {
    if positions.is_empty() {
        return;
    }
    let mut tiles = tiles(source, positions, TILE).peekable();
    while let Some(tile) = tiles.next() {
        let next = tiles.peek().map_or(after, |&run| NextKeys { source, run });
        level.dispatch(FewRowsTile { source: &source.shifted(tile.bytes), tile, next, queries, room });
    }
}

/// A tile whose keys all rows see.
struct FewRowsTile<'a> {
    /// The source of the tile's rows.
    source: &'a KvSource<'a>,
    /// At most [`TILE`] keys, and the next ones.
    tile: KvRun,
    next: NextKeys<'a>,
    queries: Queries,
    room: TileMemory,
}

impl SimdKernel for FewRowsTile<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let FewRowsTile { source, tile: KvRun { position, row, keys, .. }, next, queries, room } = self;
        let KvSource { k, v, .. } = source;
        let chunk = 2 * S::LANES;
        let plane = queries.rows * TILE;
        // SAFETY: `dispatch` enables the instructions; the caller of `absorb` guarantees the rest. Blocks divide
        // head_dim, and chunks divide blocks.
        unsafe {
            let (blocks, wanted) = (queries.head_dim / k.block, PrefetchRuns::new(&v.planes, 0, row, keys));
            let mut prefetch = Prefetcher::new(&wanted);
            for block in 0..blocks {
                let chunks = block * k.block / chunk..(block + 1) * k.block / chunk;
                let scores = room.scores.add(block * plane);
                let lines = prefetch.left().div_ceil(blocks - block);
                if k.fixed {
                    let part = FixedPart { row, keys, block, queries, lines };
                    fixed_point::score(k, part, scores, &mut prefetch);
                    continue;
                }
                let part = TilePart { row, keys, first_chunk: chunks.start, chunks, queries, lines };
                with_loader!(k.loader, rows => score::<S, _>(rows, part, scores, room.staged, &mut prefetch));
            }
            let of_bias = &mut *scratch::take(if source.bias.is_some() { plane } else { 0 });
            if let Some(bias) = source.bias {
                score_bias::<S>(bias, position, keys, queries, of_bias, room.staged);
            }
            softmax::<S>(source, (row, keys), of_bias, queries, room);
            let NextKeys { source: KvSource { k: next, .. }, run } = next;
            let wanted = PrefetchRuns::new(&next.planes, run.bytes, run.row, run.keys);
            let blocks = queries.head_dim / v.block;
            let mut prefetch = Prefetcher::new(&wanted);
            for block in 0..blocks {
                let chunks = block * v.block / chunk..(block + 1) * v.block / chunk;
                let weights = room.scores.add(block * plane).cast_const();
                let lines = prefetch.left().div_ceil(blocks - block);
                if v.fixed {
                    let part = FixedPart { row, keys, block, queries, lines };
                    fixed_point::add_values(v, part, weights, room.staged.cast(), &mut prefetch);
                    continue;
                }
                let part = TilePart { row, keys, first_chunk: chunks.start, chunks, queries, lines };
                with_loader!(v.loader, rows => add_values::<S, _>(rows, part, weights, room.staged, &mut prefetch));
            }
        }
    }
}

/// Rows of a loader, the range of their chunks to process, and the queries.
#[derive(Clone)]
struct TilePart {
    pub row: usize,
    pub keys: usize,
    /// The queries' chunks, and the loader's chunk that the first of them is multiplied by.
    pub chunks: Range<usize>,
    pub first_chunk: usize,
    pub queries: Queries,
    /// Cache lines to prefetch during the work.
    pub lines: usize,
}

/// Widens a part's rows to f32, `stride` floats apart.
struct WidenRows<R> {
    pub rows: R,
    pub part: TilePart,
    pub to: *mut f32,
    pub stride: usize,
}

impl<R: LoadRows> SimdKernel for WidenRows<R> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let TilePart { row, keys, first_chunk, ref chunks, .. } = self.part;
        for key in 0..keys {
            for chunk in 0..chunks.len() {
                // SAFETY: `dispatch` enables the instructions; the callers of `score` and `add_values` guarantee the
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

/// The products of queries and key biases, which are added to the scores of a tile, `[rows, TILE]`. They are computed
/// from `HeadBias::product` of the queries, turned to the start of the page, and the turns within a page.
///
/// # Safety
/// As for [`absorb`]; the keys are in one page.
#[inline(always)]
unsafe fn score_bias<S: Simd>(
    bias: HeadBias,
    position: usize,
    keys: usize,
    queries: Queries,
    scores: &mut [f32],
    staged: *mut f32,
) {
    let dim = queries.head_dim;
    let turned = &mut *scratch::take(queries.rows * dim);
    for (row, to) in turned.chunks_exact_mut(dim).enumerate() {
        // SAFETY: `biased` has a product for each query.
        let product = unsafe { std::slice::from_raw_parts(queries.biased.add(row * dim), dim) };
        bias.product_at_page(product, position / bias.page_tokens, to);
    }
    let nothing = PrefetchRuns::new(&[Plane::NONE; PLANES], 0, 0, 0);
    let queries = Queries { q: turned.as_ptr(), ..queries };
    let part = TilePart {
        row: position % bias.page_tokens,
        keys,
        chunks: 0..dim / (2 * S::LANES),
        first_chunk: 0,
        queries,
        lines: 0,
    };
    let turns = DenseRows::<f32> { start: bias.steps.as_ptr(), stride: dim };
    // SAFETY: passed on to the caller; a page has a turn for each position.
    unsafe { score::<S, _>(turns, part, scores.as_mut_ptr(), staged, &mut Prefetcher::new(&nothing)) }
}

/// ⟨a, b⟩ of `n` floats, a multiple of two vectors.
#[inline(always)]
unsafe fn product<S: Simd>(a: *const f32, b: *const f32, n: usize) -> f32 {
    // SAFETY: the caller guarantees both and the level's instructions; n is a multiple of a chunk.
    unsafe {
        let mut sums = [S::zero(); 2];
        for i in (0..n).step_by(2 * S::LANES) {
            let j = i + S::LANES;
            sums[0] = S::fma(S::load(a.add(i)), S::load(b.add(i)), sums[0]);
            sums[1] = S::fma(S::load(a.add(j)), S::load(b.add(j)), sums[1]);
        }
        S::sum(S::add(sums[0], sums[1]))
    }
}

/// Turns scores into weights 2^(s − m), with m raised to the tile's largest score; l and o are rescaled accordingly.
/// The mean of a page's keys adds its product with the query to the scores; the mean of its values, times the sum of
/// the weights, is added to the sums. `of_bias` is added to the scores, `[rows, TILE]`; it may be empty.
///
/// # Safety
/// As for [`absorb`].
#[inline(always)]
unsafe fn softmax<S: Simd>(
    source: &KvSource,
    (row, keys): (usize, usize),
    of_bias: &[f32],
    queries: Queries,
    room: TileMemory,
) {
    let KvSource { k, v, .. } = source;
    let (plane, head_dim) = (queries.rows * TILE, queries.head_dim);
    let padded = keys.next_multiple_of(S::LANES);
    // SAFETY: passed on to the caller; `padded` is at most TILE, a multiple of every level's lanes.
    unsafe {
        let [k_mean, v_mean] = [room.means, room.means.add(head_dim)];
        let k_centred = k.mean::<S>(false, std::slice::from_raw_parts_mut(k_mean, head_dim));
        let v_centred = v.mean::<S>(true, std::slice::from_raw_parts_mut(v_mean, head_dim));
        if k.quantised {
            for block in 0..head_dim / k.block {
                k.norms::<S>(row, block, std::slice::from_raw_parts_mut(room.norms, keys));
                for query in 0..queries.rows {
                    let total = room.scores.add(query * TILE);
                    let part = total.add(block * plane);
                    if block > 0 {
                        for i in (0..padded).step_by(S::LANES) {
                            let product = S::mul(S::load(part.add(i)), S::load(room.norms.add(i)));
                            S::store(total.add(i), S::add(S::load(total.add(i)), product));
                        }
                        continue;
                    }
                    let of_mean =
                        if k_centred { product::<S>(queries.q.add(query * head_dim), k_mean, head_dim) } else { 0.0 };
                    let of_mean = S::splat(of_mean);
                    for i in (0..padded).step_by(S::LANES) {
                        S::store(total.add(i), S::fma(S::load(part.add(i)), S::load(room.norms.add(i)), of_mean));
                    }
                }
            }
        }
        for query in 0..queries.rows {
            let scores = room.scores.add(query * TILE);
            if let Some(of_bias) = of_bias.get(query * TILE..(query + 1) * TILE) {
                for i in (0..padded).step_by(S::LANES) {
                    let sum = S::add(S::load(scores.add(i)), S::load(of_bias.as_ptr().add(i)));
                    S::store(scores.add(i), sum);
                }
            }
            if let Some(cap) = queries.softcap {
                for i in (0..padded).step_by(S::LANES) {
                    let t = S::tanh(S::mul(S::load(scores.add(i)), S::splat(1.0 / cap)));
                    S::store(scores.add(i), S::mul(t, S::splat(cap)));
                }
            }
            for i in keys..padded {
                *scores.add(i) = f32::NEG_INFINITY;
            }
            // `max` ignores a NaN score, which shows in its weight instead. Starts at `f32::MIN` instead of −∞: see
            // `SoftmaxState`.
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
            let sum = S::sum(sum);
            *l += sum;
            if v_centred {
                let (o, sum) = (queries.o.add(query * head_dim), S::splat(sum));
                for i in (0..head_dim).step_by(S::LANES) {
                    S::store(o.add(i), S::fma(S::load(v_mean.add(i)), sum, S::load(o.add(i))));
                }
            }
        }
        if v.quantised {
            // The last block first: the planes of all blocks are computed from the first one's, in place.
            for block in (0..head_dim / v.block).rev() {
                v.norms::<S>(row, block, std::slice::from_raw_parts_mut(room.norms, keys));
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
