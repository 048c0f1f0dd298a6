//! Scores: a block of keys × queries at a time, in registers.

use std::arch::x86_64::*;

use super::{CHUNK, FixedCodes, FixedPart, rounding};
use crate::cpu::{
    attend::{few_rows::scores::store_sums, prefetch::Prefetcher, tile::TILE},
    simd::{Avx512, dot_pairs},
};

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn score_all<R: FixedCodes>(
    codes: R,
    block: usize,
    part: FixedPart,
    scores: *mut f32,
    prefetch: &mut Prefetcher,
) {
    let mut local = *prefetch;
    let rows = part.queries.rows;
    let mut query = 0;
    // SAFETY: passed on to the caller of `score`.
    unsafe {
        let work = FixedScores { codes, block, part, scores };
        while query + 8 <= rows {
            work.keys::<2, 8>(query, &mut local);
            query += 8;
        }
        if query + 4 <= rows {
            work.keys::<4, 4>(query, &mut local);
            query += 4;
        }
        if query + 2 <= rows {
            work.keys::<8, 2>(query, &mut local);
            query += 2;
        }
        if query < rows {
            work.keys::<8, 1>(query, &mut local);
        }
    }
    *prefetch = local;
}

struct FixedScores<R> {
    codes: R,
    /// Coordinates that share a norm.
    block: usize,
    part: FixedPart,
    scores: *mut f32,
}

impl<R: FixedCodes> FixedScores<R> {
    /// Computes scores of all keys with `Q` queries, in blocks of `K` keys, then the rest.
    #[inline(always)]
    unsafe fn keys<const K: usize, const Q: usize>(&self, query: usize, prefetch: &mut Prefetcher) {
        let keys = self.part.keys;
        let whole = keys - keys % K;
        // The first queries prefetch every line once: in the blocks of `K` keys or, without one, in the rest.
        let pace = |steps: usize| if query == 0 { self.part.lines.div_ceil(steps * self.block / CHUNK) } else { 0 };
        let paces = (pace((keys / K).max(1)), if whole == 0 { pace(keys) } else { 0 });
        // SAFETY: passed on to the caller.
        unsafe {
            let table = R::table();
            for key in (0..whole).step_by(K) {
                self.few::<K, Q>(table, key, query, paces.0, prefetch);
            }
            for key in whole..keys {
                self.few::<1, Q>(table, key, query, paces.1, prefetch);
            }
            let blocks = self.part.queries.head_dim / self.block;
            for query in query..query + Q {
                let unit = _mm512_set1_ps(*self.part.queries.units.add(query * blocks + self.part.block));
                let centroid = _mm512_set1_ps(rounding::table(R::BITS).unit);
                let halves = _mm512_set1_ps(if R::HALVES { 0.5 * self.sum(query) } else { 0.0 });
                for key in (0..TILE).step_by(16) {
                    let score = self.scores.add(query * TILE + key);
                    let sum = _mm512_loadu_ps(score);
                    let sum = if R::HALVES { _mm512_add_ps(sum, halves) } else { sum };
                    let product = _mm512_mul_ps(sum, centroid);
                    _mm512_storeu_ps(score, _mm512_mul_ps(product, unit));
                }
            }
        }
    }

    /// The sum of a rounded query's coordinates.
    #[inline(always)]
    unsafe fn sum(&self, query: usize) -> f32 {
        let FixedPart { block, queries, .. } = self.part;
        // SAFETY: passed on to the caller.
        unsafe {
            let q = queries.rounded.add(query * queries.head_dim + block * self.block);
            let mut sum = _mm512_setzero_si512();
            for i in (0..self.block).step_by(32) {
                sum = dot_pairs(sum, _mm512_loadu_si512(q.add(i).cast()), _mm512_set1_epi16(1));
            }
            _mm512_reduce_add_epi32(sum) as f32
        }
    }

    #[inline(always)]
    unsafe fn few<const K: usize, const Q: usize>(
        &self,
        table: R::Table,
        key: usize,
        query: usize,
        pace: usize,
        prefetch: &mut Prefetcher,
    ) {
        let FixedPart { row, block, queries, .. } = self.part;
        let dim = queries.head_dim;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); K]; Q];
            for chunk in block * self.block / CHUNK..(block + 1) * self.block / CHUNK {
                prefetch.fetch::<Avx512>(pace);
                let q = queries.rounded.add(query * dim + chunk * CHUNK);
                if Q > K {
                    let mut k = [[_mm512_setzero_si512(); 2]; K];
                    for (i, k) in k.iter_mut().enumerate() {
                        *k = self.codes.key(table, row + key + i, chunk);
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        for half in 0..2 {
                            let q = _mm512_loadu_si512(q.add(i * dim + half * 32).cast());
                            for (sum, k) in sums.iter_mut().zip(&k) {
                                *sum = dot_pairs(*sum, k[half], q);
                            }
                        }
                    }
                } else {
                    for j in 0..K {
                        let k = self.codes.key(table, row + key + j, chunk);
                        for (i, sums) in sums.iter_mut().enumerate() {
                            for (half, &k) in k.iter().enumerate() {
                                let q = _mm512_loadu_si512(q.add(i * dim + half * 32).cast());
                                sums[j] = dot_pairs(sums[j], k, q);
                            }
                        }
                    }
                }
            }
            let mut products = [[_mm512_setzero_ps(); K]; Q];
            for (products, sums) in products.iter_mut().zip(&sums) {
                for (product, &sum) in products.iter_mut().zip(sums) {
                    *product = _mm512_cvtepi32_ps(sum);
                }
            }
            store_sums::<Avx512, K, Q>(&products, self.scores.add(query * TILE + key));
        }
    }
}
