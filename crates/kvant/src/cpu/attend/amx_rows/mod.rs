//! Attention of many query rows with AMX tiles of bf16: prompts, and groups of many heads.
//!
//! As in [`many_rows`](super::many_rows), there are two matrix products per tile of keys, and a column is a query row.
//! Each factor is split into hi + lo bf16, which keeps 16 bits or more. A product is hi·hi + hi·lo + lo·hi, summed in
//! f32.
//!
//! | product | rows | columns | summed over |
//! |---|---|---|---|
//! | scores | keys | query rows | coordinates |
//! | sums, transposed | coordinates | query rows | keys |
//!
//! Queries and weights have the same layout, so that scores, weights and sums are never transposed. Keys are only
//! rounded; values are transposed, once for all query rows of a block. Numbers that are exact in bf16, such as those of
//! a bf16 cache, have no lo: two products instead of three.
//!
//! hi + lo of an infinity would be NaN. Queries that are not finite are therefore processed by `many_rows`, and tiles
//! of such keys or values by `few_rows` ([`AmxRows::absorb`] reports it). The processor flushes subnormals: numbers
//! below 2⁻¹¹⁰ keep fewer than 16 bits.

use std::{arch::x86_64::*, ops::Range};

use super::{
    kv_rows::{KvSource, RowLoader},
    lane_softmax::{LANES, MIN_LOG2, ScoreLanes, StoreWeights},
    prefetch::{PrefetchRuns, Prefetcher},
    stage::{RowMeans, StagedSide, key_means},
    tile::{AbsorbTiles, KeyTile, MAX_TILE as TILE, Queries},
};
use crate::cpu::{
    amx_product::{AmxProduct, BLOCK, PAIR, digits},
    scratch,
    simd::{Avx512, Simd, SimdLevel, amx::AmxRegisters},
};

mod stage;

use stage::{CHUNK, KEYS, StagedTile};

/// The amount by which a score may exceed m, in base 2: weights are at most 2⁸.
const RAISE: f32 = 8.0;
/// A polynomial for 2ˣ from 0 to 1 with a relative error of 2⁻²³, exactly 1 at 0: the best of its degree.
const EXP2: [f32; 6] = [1.0, 0.693_151_3, 0.240_164_44, 0.055_799_913, 0.009_017_031, 0.001_867_13];

/// Query rows, their states, and scratch memory for a tile of keys. A group is [`BLOCK`] rows.
pub(super) struct AmxRows {
    queries: Queries,
    /// The number of rows, padded to whole groups.
    rows: usize,
    /// `[rows / 16, D / 32]` pairs of AMX tiles.
    q: *mut u8,
    /// `[rows / BLOCK, D, BLOCK]`.
    o: *mut f32,
    /// `[rows]` each.
    m: *mut f32,
    l: *mut f32,
    /// `[TILE / 16, D / 32]` pairs of AMX tiles.
    k: *mut u8,
    /// `[D / 16, TILE / 32]` pairs of AMX tiles.
    v: *mut u8,
    /// For one group: scores `[TILE, BLOCK]`, and weights as `[BLOCK / 16, TILE / 32]` pairs of AMX tiles.
    scores: *mut f32,
    weights: *mut u8,
    /// `[2, D]`: the means of a page's keys and values.
    means: *mut f32,
    _registers: AmxRegisters,
}

impl AmxRows {
    /// Floats of scratch memory for `rows` query rows.
    pub fn len(rows: usize, head_dim: usize) -> usize {
        let rows = rows.next_multiple_of(BLOCK);
        rows * (2 * head_dim + 2) + 2 * TILE * head_dim + 2 * TILE * BLOCK + 2 * head_dim
    }

    /// Stores the queries as AMX tiles in `memory`, which has [`AmxRows::len`] floats and is aligned to a cache line.
    /// Returns `None` if some are not finite.
    ///
    /// # Safety
    /// The level has AMX, and this thread has no other `AmxRegisters`; `queries` are valid, and nobody else accesses
    /// their states.
    pub unsafe fn new(queries: Queries, memory: &mut [f32]) -> Option<AmxRows> {
        let (rows, dim) = (queries.rows.next_multiple_of(BLOCK), queries.head_dim);
        assert!(memory.len() >= AmxRows::len(queries.rows, dim) && dim.is_multiple_of(CHUNK));
        let mut rest = memory;
        let mut part = |floats: usize| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(floats);
            rest = after;
            part.as_mut_ptr()
        };
        let [q, o] = [part(rows * dim), part(rows * dim)];
        let [k, v] = [part(TILE * dim), part(TILE * dim)];
        let [scores, weights] = [part(TILE * BLOCK), part(TILE * BLOCK)];
        let [m, l, means] = [part(rows), part(rows), part(2 * dim)];
        // SAFETY: the caller's promise; a pair of AMX tiles has as many bytes as its numbers as f32.
        unsafe {
            if !stage::stage_queries(&queries, rows, q.cast()) {
                return None;
            }
            let [q, k, v, weights] = [q, k, v, weights].map(<*mut f32>::cast);
            let _registers = AmxRegisters::new();
            Some(AmxRows { queries, rows, q, o, m, l, k, v, scores, weights, means, _registers })
        }
    }

    /// The first row and coordinate of each square of 16 rows and 16 coordinates.
    fn squares(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let dim = self.queries.head_dim;
        (0..self.rows).step_by(LANES).flat_map(move |row| (0..dim).step_by(LANES).map(move |i| (row, i)))
    }

    /// Coordinate `i` of the sums of the 16 rows from `row` on.
    #[inline(always)]
    fn sum(&self, row: usize, i: usize) -> *mut f32 {
        self.o.wrapping_add((row / BLOCK * self.queries.head_dim + i) * BLOCK + row % BLOCK)
    }

    /// The keys that any row of a group sees, extended to whole blocks of [`KEYS`]; the last block may exceed the tile.
    #[inline(always)]
    fn seen(&self, tile: &KeyTile, group: usize) -> Range<usize> {
        let keys = match tile.seen {
            None => 0..tile.keys,
            Some(seen) => {
                let rows = group * BLOCK..self.queries.rows.min((group + 1) * BLOCK);
                let sees = |key: &usize| seen[*key].start < rows.end && seen[*key].end > rows.start;
                let first = (0..tile.keys).find(sees).unwrap_or(0);
                first..(first..tile.keys).rev().find(sees).map_or(first, |last| last + 1)
            }
        };
        if keys.is_empty() { 0..0 } else { keys.start / KEYS * KEYS..keys.end.next_multiple_of(KEYS) }
    }

    /// Computes the scores of a group.
    #[inline(always)]
    unsafe fn score(&self, group: usize, keys: Range<usize>, is_exact: bool, next: &mut NextLines) {
        const AMX_ROWS: usize = BLOCK / 2;
        let pairs = self.queries.head_dim / CHUNK;
        for key in keys.step_by(BLOCK) {
            // SAFETY: passed on to the caller.
            unsafe {
                next.fetch();
                let (k, q) = (self.k.add(key / AMX_ROWS * pairs * PAIR), self.q.add(2 * group * pairs * PAIR));
                AmxProduct {
                    sums: self.scores.add(key * BLOCK),
                    apart: BLOCK * size_of::<f32>(),
                    clears: true,
                    a: [k, k.add(pairs * PAIR)],
                    both: true,
                    b: [q, q.add(pairs * PAIR)],
                    digits: [2 - usize::from(is_exact), 2],
                    step_bytes: [PAIR; 2],
                    steps: pairs,
                }
                .add();
            }
        }
    }

    /// Turns scores into weights, as AMX tiles; rescales sums if a row's m is raised.
    #[inline(always)]
    unsafe fn weigh(&self, group: usize, keys: Range<usize>, tile: &KeyTile) {
        let dim = self.queries.head_dim;
        let o = self.o.wrapping_add(group * BLOCK * dim);
        for vector in 0..BLOCK / LANES {
            let row = group * BLOCK + vector * LANES;
            if row >= self.queries.rows {
                break;
            }
            // SAFETY: passed on to the caller.
            unsafe {
                let lanes = ScoreLanes {
                    scores: self.scores.add(vector * LANES),
                    stride: BLOCK,
                    keys: keys.start..keys.end.min(tile.keys),
                    seen: tile.seen,
                    row,
                    softcap: self.queries.softcap,
                };
                let (m, l) = (self.m.add(row), self.l.add(row));
                let before = Avx512::load(m);
                // m is raised only if a score exceeds it by more than `RAISE`: rescaling sums takes as long as
                // computing weights.
                let largest = lanes.largest::<Avx512>(before);
                let limit = Avx512::add(before, Avx512::splat(RAISE));
                let raised = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(largest, limit);
                let largest = _mm512_mask_blend_ps(raised, before, largest);
                Avx512::store(m, largest);
                // Sums without keys are zero.
                let none = Avx512::splat(f32::NEG_INFINITY);
                let rescaled = _mm512_mask_cmp_ps_mask::<_CMP_NEQ_OQ>(raised, before, none);
                if rescaled != 0 {
                    let less = Avx512::max(Avx512::sub(before, largest), Avx512::splat(MIN_LOG2));
                    let factor = Avx512::exp2(less);
                    let factor = _mm512_mask_blend_ps(rescaled, Avx512::splat(1.0), factor);
                    Avx512::store(l, Avx512::mul(Avx512::load(l), factor));
                    let o = o.add(vector * LANES);
                    for i in 0..dim {
                        Avx512::store(o.add(i * BLOCK), Avx512::mul(Avx512::load(o.add(i * BLOCK)), factor));
                    }
                }
                let to = AmxWeights(self.weights.add(vector * (TILE / KEYS) * PAIR));
                Avx512::store(l, Avx512::add(Avx512::load(l), lanes.weigh(largest, to)));
                // Absent values are zero, and so are their weights.
                for key in (lanes.keys.end.next_multiple_of(2)..keys.end).step_by(2) {
                    to.store(key, [Avx512::zero(); 2]);
                }
            }
        }
    }

    /// Adds the values of the keys, times the weights, to the sums of a group.
    #[inline(always)]
    unsafe fn add_values(&self, group: usize, keys: Range<usize>, is_exact: bool, next: &mut NextLines) {
        const TILE_PAIRS: usize = TILE / KEYS * PAIR;
        let dim = self.queries.head_dim;
        let (first, pairs) = (keys.start / KEYS * PAIR, keys.len() / KEYS);
        for i in (0..dim).step_by(BLOCK) {
            // SAFETY: passed on to the caller.
            unsafe {
                next.fetch();
                let (v, weights) = (self.v.add(2 * i / BLOCK * TILE_PAIRS + first), self.weights.add(first));
                AmxProduct {
                    sums: self.o.add((group * dim + i) * BLOCK),
                    apart: BLOCK * size_of::<f32>(),
                    clears: false,
                    a: [v, v.add(TILE_PAIRS)],
                    both: true,
                    b: [weights, weights.add(TILE_PAIRS)],
                    digits: [2 - usize::from(is_exact), 2],
                    step_bytes: [PAIR; 2],
                    steps: pairs,
                }
                .add();
            }
        }
    }
}

impl AbsorbTiles for AmxRows {
    const TILE: usize = TILE;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn load_states(&self) {
        let Queries { rows, head_dim: dim, o, m, l, .. } = self.queries;
        // SAFETY: the caller's promise; padding rows have no keys.
        unsafe {
            std::slice::from_raw_parts_mut(self.m, self.rows).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(self.l, self.rows).fill(0.0);
            self.m.copy_from_nonoverlapping(m, rows);
            self.l.copy_from_nonoverlapping(l, rows);
            // Before the first tile, all states are without keys.
            if std::slice::from_raw_parts(m, rows).iter().all(|&m| m == f32::NEG_INFINITY) {
                std::slice::from_raw_parts_mut(self.o, self.rows * dim).fill(0.0);
                return;
            }
            let (mut square, mut turned) = (Square([0.0; LANES * LANES]), Square([0.0; LANES * LANES]));
            for (first, i) in self.squares() {
                square.0.fill(0.0);
                for row in first..rows.min(first + LANES) {
                    Avx512::store(square.row(row - first), Avx512::load(o.add(row * dim + i)));
                }
                Avx512::transpose16(square.row(0), LANES, turned.row(0));
                for j in 0..LANES {
                    Avx512::store(self.sum(first, i + j), Avx512::load(turned.row(j)));
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn store_states(&self) {
        let Queries { rows, head_dim: dim, o, m, l, .. } = self.queries;
        // SAFETY: as above.
        unsafe {
            m.copy_from_nonoverlapping(self.m, rows);
            l.copy_from_nonoverlapping(self.l, rows);
            let mut square = Square([0.0; LANES * LANES]);
            for (first, i) in self.squares() {
                Avx512::transpose16(self.sum(first, i), BLOCK, square.row(0));
                for row in first..rows.min(first + LANES) {
                    Avx512::store(o.add(row * dim + i), Avx512::load(square.row(row - first)));
                }
            }
        }
    }

    /// Returns false if a number is not finite.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn absorb(&self, _: SimdLevel, source: &KvSource, tile: &KeyTile) -> bool {
        let (KvSource { k, v, .. }, dim) = (source, self.queries.head_dim);
        // SAFETY: passed on to the caller.
        unsafe {
            let means = [self.means, self.means.add(dim)];
            let slices = means.map(|mean| std::slice::from_raw_parts_mut(mean, dim));
            let [k_slice, v_slice] = slices;
            let biased = &mut *scratch::take(if source.bias.is_some() { tile.keys * dim } else { 0 });
            let v_centred = v.mean::<Avx512>(true, v_slice);
            let means =
                [key_means::<Avx512>(source, tile, k_slice, biased), v_centred.then(|| RowMeans::shared(means[1]))];
            let [is_exact_k, is_exact_v] = [k, v].map(|side| matches!(side.loader, RowLoader::Bf16(_)));
            let part = |side, i: usize, is_exact, to| StagedTile {
                from: StagedSide { side, means: means[i] },
                row: tile.row,
                keys: tile.keys,
                head_dim: dim,
                is_exact,
                to,
            };
            if !stage::stage_keys(part(k, 0, is_exact_k, self.k))
                || !stage::stage_values(part(v, 1, is_exact_v, self.v))
            {
                return false;
            }
            let wanted = [tile.next_from.k.planes, tile.next_from.v.planes]
                .map(|planes| PrefetchRuns::new(&planes, tile.next.bytes, tile.next.row, tile.next.keys));
            let mut next = NextLines { sides: wanted.each_ref().map(Prefetcher::new), lines: 0 };
            // Lines to prefetch for each product of a group: all at once would delay the loads of AMX tiles.
            let groups = self.rows / BLOCK;
            let products = groups * (dim / BLOCK + tile.keys.div_ceil(BLOCK));
            next.lines = next.sides.each_ref().map(Prefetcher::left).into_iter().max().unwrap_or(0).div_ceil(products);
            for group in 0..groups {
                let keys = self.seen(tile, group);
                if !keys.is_empty() {
                    self.score(group, keys.clone(), is_exact_k, &mut next);
                    self.weigh(group, keys.clone(), tile);
                    self.add_values(group, keys, is_exact_v, &mut next);
                }
            }
        }
        true
    }
}

/// The lines of the next keys and values, to be prefetched.
struct NextLines<'a> {
    sides: [Prefetcher<'a>; 2],
    /// Lines of each side that are prefetched at a time.
    lines: usize,
}

impl NextLines<'_> {
    /// # Safety
    /// The instructions of `Avx512` are enabled.
    #[inline(always)]
    unsafe fn fetch(&mut self) {
        for side in &mut self.sides {
            // SAFETY: passed on to the caller.
            unsafe { side.fetch::<Avx512>(self.lines) };
        }
    }
}

/// The weights of 16 rows, `[TILE / 32]` pairs of AMX tiles: a row of an AMX tile has words of two keys.
#[derive(Clone, Copy)]
struct AmxWeights(*mut u8);

impl StoreWeights<Avx512> for AmxWeights {
    /// 2ⁿ·2ᶠ with n = ⌊x⌋.
    #[inline(always)]
    unsafe fn exp2(x: __m512) -> __m512 {
        // SAFETY: passed on to the caller.
        unsafe {
            // x is the second operand, because `max` returns its second operand if one is NaN.
            let x = Avx512::max(Avx512::splat(-126.0), x);
            let f = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
            let mut power = Avx512::splat(EXP2[EXP2.len() - 1]);
            for c in EXP2[..EXP2.len() - 1].iter().rev() {
                power = Avx512::fma(power, f, Avx512::splat(*c));
            }
            _mm512_scalef_ps(power, x)
        }
    }

    #[inline(always)]
    unsafe fn store(&self, key: usize, weights: [__m512; 2]) {
        // SAFETY: passed on to the caller.
        unsafe {
            let to = self.0.add(key / KEYS * PAIR + key % KEYS / 2 * size_of::<__m512i>());
            let [upper, lower] = digits(weights);
            _mm512_storeu_si512(to.cast(), upper);
            _mm512_storeu_si512(to.add(PAIR / 2).cast(), lower);
        }
    }
}

/// 16 rows of 16 numbers.
#[repr(align(64))]
struct Square([f32; LANES * LANES]);

impl Square {
    #[inline(always)]
    fn row(&mut self, row: usize) -> *mut f32 {
        self.0[row * LANES..].as_mut_ptr()
    }
}

const _: () = assert!(PAIR == 16 * CHUNK * size_of::<f32>() && TILE.is_multiple_of(KEYS) && KEYS == BLOCK);
