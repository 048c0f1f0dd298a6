//! Sums of values: a block of queries × coordinates at a time, in registers, over all keys of a tile.

use super::{
    super::{
        kv_rows::{DenseRows, LoadRows},
        prefetch::Prefetcher,
        tile::TILE,
    },
    STAGED_COORDINATES, TilePart, WidenRows, direct_rows,
};
use crate::cpu::simd::{Simd, SimdKernel};

/// Adds a part's values, times `weights` (`[rows, TILE]`), to the queries' sums.
///
/// # Safety
/// The level's instructions are enabled; everything that `part` names exists; `staged` has the size in `TileMemory`.
#[inline(always)]
pub(super) unsafe fn add_values<S: Simd, R: LoadRows>(
    rows: R,
    part: TilePart,
    weights: *const f32,
    staged: *mut f32,
    prefetch: &mut Prefetcher,
) {
    if S::READS_DIRECTLY && part.queries.rows <= direct_rows::<S>() {
        // SAFETY: the caller's promise.
        return unsafe { S::call(SumKernel { rows, part, weights, prefetch }) };
    }
    let at_a_time = STAGED_COORDINATES / (2 * S::LANES);
    for first in part.chunks.clone().step_by(at_a_time) {
        let chunks = first..part.chunks.end.min(first + at_a_time);
        let first_chunk = part.first_chunk + first - part.chunks.start;
        let piece = TilePart { chunks: chunks.clone(), first_chunk, ..part.clone() };
        // SAFETY: the caller's promise.
        unsafe { S::call(WidenRows { rows, part: piece, to: staged, stride: STAGED_COORDINATES }) };
        let rows = DenseRows::<f32> { start: staged, stride: STAGED_COORDINATES };
        let lines = (part.lines * chunks.len()).div_ceil(part.chunks.len());
        let piece = TilePart { row: 0, chunks, first_chunk: 0, lines, ..part.clone() };
        // SAFETY: the caller's promise.
        unsafe { S::call(SumKernel { rows, part: piece, weights, prefetch }) };
    }
}

struct SumKernel<'a, 'b, R> {
    rows: R,
    part: TilePart,
    weights: *const f32,
    prefetch: &'a mut Prefetcher<'b>,
}

impl<R: LoadRows> SimdKernel for SumKernel<'_, '_, R> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let block = SumBlocks { rows: self.rows, part: self.part, weights: self.weights };
        let mut prefetch = *self.prefetch;
        // SAFETY: `dispatch` enables the instructions; the caller of `add_values` guarantees the rest.
        unsafe { block.queries::<S>(&mut prefetch) };
        *self.prefetch = prefetch;
    }
}

struct SumBlocks<R> {
    rows: R,
    part: TilePart,
    weights: *const f32,
}

impl<R: LoadRows> SumBlocks<R> {
    /// Adds values to the sums of all queries, in blocks of queries and coordinates that fit in the registers.
    #[inline(always)]
    unsafe fn queries<S: Simd>(&self, prefetch: &mut Prefetcher) {
        let rows = self.part.queries.rows;
        let mut query = 0;
        // SAFETY: passed on to the caller.
        unsafe {
            if S::MANY_REGISTERS {
                while query + 8 <= rows {
                    self.rows::<S, 8, 1>(query, prefetch);
                    query += 8;
                }
                if query + 4 <= rows {
                    self.rows::<S, 4, 2>(query, prefetch);
                    query += 4;
                }
                match rows - query {
                    3 => self.rows::<S, 3, 2>(query, prefetch),
                    2 => self.rows::<S, 2, 4>(query, prefetch),
                    1 => self.rows::<S, 1, 4>(query, prefetch),
                    _ => {}
                }
            } else {
                while query + 4 <= rows {
                    self.rows::<S, 4, 1>(query, prefetch);
                    query += 4;
                }
                match rows - query {
                    3 => self.rows::<S, 3, 1>(query, prefetch),
                    2 => self.rows::<S, 2, 2>(query, prefetch),
                    1 => self.rows::<S, 1, 4>(query, prefetch),
                    _ => {}
                }
            }
        }
    }

    /// Processes all chunks of `Q` queries, in blocks of `C` chunks, then the rest.
    #[inline(always)]
    unsafe fn rows<S: Simd, const Q: usize, const C: usize>(&self, query: usize, prefetch: &mut Prefetcher) {
        let TilePart { keys, ref chunks, lines, .. } = self.part;
        let whole = chunks.len() - chunks.len() % C;
        // The blocks of the first queries prefetch every line once.
        let pace = |blocks: usize| if query == 0 { lines.div_ceil(blocks * keys) } else { 0 };
        let paces = (pace((chunks.len() / C).max(1)), if whole == 0 { pace(chunks.len()) } else { 0 });
        // SAFETY: passed on to the caller.
        unsafe {
            for chunk in (0..whole).step_by(C) {
                self.block::<S, Q, C>(query, chunk, paces.0, prefetch);
            }
            for chunk in whole..chunks.len() {
                self.block::<S, Q, 1>(query, chunk, paces.1, prefetch);
            }
        }
    }

    /// Processes `C` chunks of `Q` queries, over all keys.
    #[inline(always)]
    unsafe fn block<S: Simd, const Q: usize, const C: usize>(
        &self,
        query: usize,
        chunk: usize,
        pace: usize,
        prefetch: &mut Prefetcher,
    ) {
        let TilePart { row, keys, first_chunk, ref chunks, queries, .. } = self.part;
        let width = 2 * S::LANES;
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
                prefetch.fetch::<S>(pace);
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
