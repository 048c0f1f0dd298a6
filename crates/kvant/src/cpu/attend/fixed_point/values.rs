//! Sums of values: a block of queries × coordinates at a time, in registers, over the keys of a tile in pairs.

use std::arch::x86_64::*;

use super::{
    CHUNK, FixedCodes, FixedPart,
    rounding::{self, round_weights},
};
use crate::cpu::{
    attend::{prefetch::Prefetcher, tile::TILE},
    simd::{Avx512, dot_pairs},
};

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn add_all<R: FixedCodes>(
    codes: R,
    block: usize,
    part: FixedPart,
    weights: *const f32,
    rounded: *mut i16,
    prefetch: &mut Prefetcher,
) {
    let mut local = *prefetch;
    let rows = part.queries.rows;
    let mut query = 0;
    // SAFETY: passed on to the caller of `add_values`.
    unsafe {
        for first in (0..rows).step_by(8) {
            let mut units = [(0.0, 0.0); 8];
            for (i, to) in units.iter_mut().enumerate().take(rows - first) {
                let row = (first + i) * TILE;
                *to = round_weights(part.keys, weights.add(row), rounded.add(row));
            }
            let work = FixedSums { codes, block, part, weights: rounded, units };
            let end = rows.min(first + 8);
            if query + 8 <= end {
                work.coordinates::<8, 1, 2>(query, &mut local);
                query += 8;
            }
            if query + 4 <= end {
                work.coordinates::<4, 1, 4>(query, &mut local);
                query += 4;
            }
            if query + 2 <= end {
                work.coordinates::<2, 2, 4>(query, &mut local);
                query += 2;
            }
            if query < end {
                work.coordinates::<1, 2, 4>(query, &mut local);
                query += 1;
            }
        }
    }
    *prefetch = local;
}

struct FixedSums<R> {
    codes: R,
    /// Coordinates that share a norm.
    block: usize,
    part: FixedPart,
    /// `[rows, TILE]`.
    weights: *const i16,
    /// The units of the weights of eight queries, times [`UNIT`](rounding::UNIT), and the sums of the rounded weights.
    units: [(f32, f32); 8],
}

impl<R: FixedCodes> FixedSums<R> {
    /// Processes all coordinates of `Q` queries: `SETS` sets of each chunk, in blocks of `C` chunks, then the rest.
    #[inline(always)]
    unsafe fn coordinates<const Q: usize, const C: usize, const SETS: usize>(
        &self,
        query: usize,
        prefetch: &mut Prefetcher,
    ) {
        let FixedPart { keys, block, lines, .. } = self.part;
        let chunks = self.block / CHUNK;
        let first = block * chunks;
        // The first queries prefetch every line once.
        let steps = (chunks / C).max(1) * (4 / SETS) * keys.div_ceil(2);
        let pace = if query == 0 { lines.div_ceil(steps) } else { 0 };
        // SAFETY: passed on to the caller.
        unsafe {
            let table = R::table();
            let whole = chunks - chunks % C;
            for chunk in (first..first + whole).step_by(C) {
                self.few::<Q, C, SETS, 0>(table, query, chunk, pace, prefetch);
                if SETS == 2 {
                    self.few::<Q, C, SETS, 2>(table, query, chunk, pace, prefetch);
                }
            }
            for chunk in first + whole..first + chunks {
                self.few::<Q, 1, SETS, 0>(table, query, chunk, pace, prefetch);
                if SETS == 2 {
                    self.few::<Q, 1, SETS, 2>(table, query, chunk, pace, prefetch);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn few<const Q: usize, const C: usize, const SETS: usize, const FIRST: usize>(
        &self,
        table: R::Table,
        query: usize,
        chunk: usize,
        pace: usize,
        prefetch: &mut Prefetcher,
    ) {
        let FixedPart { row, keys, queries, .. } = self.part;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[[_mm512_setzero_si512(); SETS]; C]; Q];
            let weights = self.weights.add(query * TILE).cast::<i32>();
            for pair in 0..keys.div_ceil(2) {
                prefetch.fetch::<Avx512>(pace);
                // If the last key has no partner, it is paired with itself with a weight of zero.
                let rows = [row + 2 * pair, row + (2 * pair + 1).min(keys - 1)];
                let mut v = [[_mm512_setzero_si512(); SETS]; C];
                for (i, v) in v.iter_mut().enumerate() {
                    *v = self.codes.pair::<SETS, FIRST>(table, rows, chunk + i);
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let weight = _mm512_set1_epi32(weights.add(i * TILE / 2 + pair).read_unaligned());
                    for (sums, v) in sums.iter_mut().zip(&v) {
                        for (sum, &v) in sums.iter_mut().zip(v) {
                            *sum = dot_pairs(*sum, v, weight);
                        }
                    }
                }
            }
            let centroid = _mm512_set1_ps(rounding::table(R::BITS).unit);
            for (i, sums) in sums.iter().enumerate() {
                let (unit, sum) = self.units[(query + i) % 8];
                let (unit, halves) = (_mm512_set1_ps(unit), _mm512_set1_ps(0.5 * sum));
                let o = queries.o.add((query + i) * queries.head_dim + chunk * CHUNK + FIRST * 16);
                for (j, sums) in sums.iter().enumerate() {
                    for (set, &sum) in sums.iter().enumerate() {
                        let o = o.add(j * CHUNK + set * 16);
                        let sum = _mm512_cvtepi32_ps(sum);
                        let sum = if R::HALVES { _mm512_add_ps(sum, halves) } else { sum };
                        let sum = _mm512_mul_ps(sum, centroid);
                        _mm512_storeu_ps(o, _mm512_fmadd_ps(sum, unit, _mm512_loadu_ps(o)));
                    }
                }
            }
        }
    }
}
