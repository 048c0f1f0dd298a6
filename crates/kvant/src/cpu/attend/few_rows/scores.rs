//! Scores: a block of keys × queries at a time, in registers.

use super::{
    super::{
        kv_rows::{DenseRows, LoadRows},
        prefetch::Prefetcher,
        tile::TILE,
    },
    STAGED_KEYS, TilePart, WidenRows, direct_rows,
};
use crate::cpu::simd::{Simd, SimdKernel};

/// Computes the scores of a part's keys into `scores`, `[rows, TILE]`.
///
/// # Safety
/// The level's instructions are enabled; everything that `part` names exists; `staged` has the size in `TileMemory`.
#[inline(always)]
pub(super) unsafe fn score<S: Simd, R: LoadRows>(
    rows: R,
    part: TilePart,
    scores: *mut f32,
    staged: *mut f32,
    prefetch: &mut Prefetcher,
) {
    if S::READS_DIRECTLY && part.queries.rows <= direct_rows::<S>() {
        // SAFETY: the caller's promise.
        return unsafe { S::call(ScoreKernel { rows, part, scores, prefetch }) };
    }
    let stride = part.queries.head_dim;
    for key in (0..part.keys).step_by(STAGED_KEYS) {
        let keys = STAGED_KEYS.min(part.keys - key);
        let piece = TilePart { row: part.row + key, keys, ..part.clone() };
        // SAFETY: the caller's promise.
        unsafe { S::call(WidenRows { rows, part: piece, to: staged, stride }) };
        let lines = (part.lines * keys).div_ceil(part.keys);
        let piece = TilePart { row: 0, keys, first_chunk: 0, lines, ..part.clone() };
        let rows = DenseRows::<f32> { start: staged, stride };
        // SAFETY: the caller's promise; keys are less than TILE.
        unsafe { S::call(ScoreKernel { rows, part: piece, scores: scores.add(key), prefetch }) };
    }
}

struct ScoreKernel<'a, 'b, R> {
    rows: R,
    part: TilePart,
    scores: *mut f32,
    prefetch: &'a mut Prefetcher<'b>,
}

impl<R: LoadRows> SimdKernel for ScoreKernel<'_, '_, R> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let block = ScoreBlocks { rows: self.rows, part: self.part, scores: self.scores };
        let mut prefetch = *self.prefetch;
        // SAFETY: `dispatch` enables the instructions; the caller of `score` guarantees the rest.
        unsafe { block.queries::<S>(&mut prefetch) };
        *self.prefetch = prefetch;
    }
}

struct ScoreBlocks<R> {
    rows: R,
    part: TilePart,
    scores: *mut f32,
}

impl<R: LoadRows> ScoreBlocks<R> {
    /// Computes scores of all keys with all queries, in blocks whose sums fit in the registers.
    #[inline(always)]
    unsafe fn queries<S: Simd>(&self, prefetch: &mut Prefetcher) {
        let rows = self.part.queries.rows;
        let mut query = 0;
        // SAFETY: passed on to the caller.
        unsafe {
            if S::MANY_REGISTERS {
                while query + 8 <= rows {
                    self.keys::<S, 2, 8>(query, prefetch);
                    query += 8;
                }
                if query + 4 <= rows {
                    self.keys::<S, 4, 4>(query, prefetch);
                    query += 4;
                }
                if query + 3 <= rows {
                    self.keys::<S, 4, 3>(query, prefetch);
                    query += 3;
                }
                if query + 2 <= rows {
                    self.keys::<S, 8, 2>(query, prefetch);
                    query += 2;
                }
            }
            while query + 2 <= rows {
                self.keys::<S, 4, 2>(query, prefetch);
                query += 2;
            }
            if query < rows {
                self.keys::<S, 4, 1>(query, prefetch);
            }
        }
    }

    /// Computes scores of all keys with `Q` queries, in blocks of `K` keys, then the rest.
    #[inline(always)]
    unsafe fn keys<S: Simd, const K: usize, const Q: usize>(&self, query: usize, prefetch: &mut Prefetcher) {
        let TilePart { keys, .. } = self.part;
        let whole = keys - keys % K;
        // SAFETY: passed on to the caller.
        unsafe {
            // The blocks of the first queries prefetch every line once.
            let steps = (keys / K).max(1) * self.part.chunks.len();
            let pace = if query == 0 { self.part.lines.div_ceil(steps) } else { 0 };
            for key in (0..whole).step_by(K) {
                self.block::<S, K, Q>(key, query, pace, prefetch);
            }
            for key in whole..keys {
                self.block::<S, 1, Q>(key, query, 0, prefetch);
            }
        }
    }

    /// Computes scores of `K` keys with `Q` queries. K is 1, 2, 4 or 8; if K is 2, Q is even.
    #[inline(always)]
    unsafe fn block<S: Simd, const K: usize, const Q: usize>(
        &self,
        key: usize,
        query: usize,
        pace: usize,
        prefetch: &mut Prefetcher,
    ) {
        let TilePart { row, first_chunk, ref chunks, queries, .. } = self.part;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[S::zero(); K]; Q];
            let mut q = queries.q.add(query * queries.head_dim + chunks.start * 2 * S::LANES);
            for chunk in first_chunk..first_chunk + chunks.len() {
                prefetch.fetch::<S>(pace);
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
            let to = self.scores.add(query * TILE + key);
            store_sums::<S, K, Q>(&sums, to);
        }
    }
}

/// Sums each vector: the sum of `sums[q][k]` is stored at `to[q · TILE + k]`.
///
/// # Safety
/// The level's instructions are enabled; `to` has these elements.
#[inline(always)]
pub(in super::super) unsafe fn store_sums<S: Simd, const K: usize, const Q: usize>(
    sums: &[[S::F; K]; Q],
    to: *mut f32,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        match K {
            1 => {
                for (q, sums) in sums.iter().enumerate() {
                    *to.add(q * TILE) = S::sum(sums[0]);
                }
            }
            2 => {
                for (q, two) in sums.chunks_exact(2).enumerate() {
                    let mut four = [0.0; 4];
                    S::store_sums(four.as_mut_ptr(), [two[0][0], two[0][1 % K], two[1][0], two[1][1 % K]]);
                    let to = to.add(2 * q * TILE);
                    to.copy_from_nonoverlapping(four.as_ptr(), 2);
                    to.add(TILE).copy_from_nonoverlapping(four.as_ptr().add(2), 2);
                }
            }
            _ => {
                for (q, sums) in sums.iter().enumerate() {
                    for (i, four) in sums.chunks_exact(4).enumerate() {
                        S::store_sums(to.add(q * TILE + 4 * i), [four[0], four[1], four[2], four[3]]);
                    }
                }
            }
        }
    }
}
