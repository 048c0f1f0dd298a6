//! Quantised keys and values in fixed point, for processors that multiply pairs of 16-bit integers and permute bytes
//! (AVX-512 VNNI and VBMI).
//!
//! One or two permutes turn 32 codes into signed 14-bit centroids; f32 needs twice as many. One instruction adds 32
//! products to 16 sums, twice as many as in f32, and the sums are exact. The operands are rounded: a query relative to
//! the largest lane sum of its block, the weights of a tile relative to their sum. Therefore no 32-bit sum overflows,
//! and the sum of the weights is preserved. [`Attend`](crate::ops::Attend) and docs/notes/cpu-attention.md state the
//! error; relative to a vector stored in 8 bits it is 6·10⁻³.
//!
//! Packed codes are processed 64 coordinates at a time, as 16 words of four nibbles (or of four pairs of bits): word i
//! holds coordinates 4i to 4i + 3. Queries and sums have the order of these words: the 16 coordinates 4i first, then
//! the 16 coordinates 4i + 1, and so on: four sets. A vector of keys holds two sets, one after the other; a vector of
//! values holds one set of two values, interleaved. Instructions that interleave two vectors of bytes determine the
//! order of 8-bit codes: in sums, a set has four of every 16 coordinates, always at equal places.

use std::arch::x86_64::*;

use super::{
    kv_rows::{KvRows, RowLoader},
    prefetch::Prefetcher,
    tile::FixedPart,
};
use crate::cpu::seal::StoredMean;

mod byte_codes;
mod packed_codes;
mod pair_codes;
mod rounding;
mod scores;
mod values;

pub(super) use rounding::round_query;
use scores::score_all;
use values::add_all;

/// Coordinates that are processed at a time.
const CHUNK: usize = 64;

/// Rearranges a sum in the order of coordinates.
pub(super) fn order_sum(side: &KvRows, o: &mut [f32]) {
    for chunk in o.chunks_exact_mut(CHUNK) {
        let mut copy = [0.0; CHUNK];
        copy.copy_from_slice(chunk);
        let order = if side.interleaved { &const { chunk_order(true) } } else { &const { chunk_order(false) } };
        for (&x, &at) in copy.iter().zip(order) {
            chunk[usize::from(at)] = x;
        }
    }
}

/// The order of a chunk's coordinates in sums: entry i is the coordinate at place i.
const fn chunk_order(interleaved: bool) -> [u8; CHUNK] {
    let mut order = [0; CHUNK];
    let mut at = 0;
    while at < CHUNK {
        let (set, lane) = (at / 16, at % 16);
        order[at] = if interleaved { 4 * lane + set } else { lane / 4 * 16 + set * 4 + lane % 4 } as u8;
        at += 1;
    }
    order
}

/// Decodes the mean of a page, in the order of coordinates or, with `in_sums`, in the order of sums.
///
/// # Safety
/// The processor has the instructions of `Avx512Vbmi`; the page has the mean; the length of `to` is the mean's, a
/// multiple of [`CHUNK`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")]
pub(super) unsafe fn load_mean(side: &KvRows, mean: StoredMean, in_sums: bool, to: &mut [f32]) {
    const NATURAL: [u8; CHUNK] = {
        let mut order = [0; CHUNK];
        let mut at = 0;
        while at < CHUNK {
            order[at] = at as u8;
            at += 1;
        }
        order
    };
    let order = match (in_sums, side.interleaved) {
        (false, _) => &NATURAL,
        (true, true) => &const { chunk_order(true) },
        (true, false) => &const { chunk_order(false) },
    };
    // SAFETY: passed on to the caller.
    unsafe {
        let (order, scale) = (vector(order), _mm512_set1_ps(mean.scale(to.len())));
        for at in (0..to.len()).step_by(CHUNK) {
            let codes = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(mean.start.add(at).cast()));
            let quarters = [
                _mm512_castsi512_si128(codes),
                _mm512_extracti32x4_epi32::<1>(codes),
                _mm512_extracti32x4_epi32::<2>(codes),
                _mm512_extracti32x4_epi32::<3>(codes),
            ];
            for (i, quarter) in quarters.into_iter().enumerate() {
                let x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(quarter));
                _mm512_storeu_ps(to.as_mut_ptr().add(at + 16 * i), _mm512_mul_ps(x, scale));
            }
        }
    }
}

/// Computes scores without norms into `scores`, `[rows, TILE]`.
///
/// # Safety
/// The processor has the instructions of `Avx512Vbmi`; everything that `part` names exists.
pub(super) unsafe fn score(side: &KvRows, part: FixedPart, scores: *mut f32, prefetch: &mut Prefetcher) {
    // SAFETY: passed on to the caller.
    unsafe {
        match side.loader {
            RowLoader::Tq2(rows) => score_all(rows, side.block, part, scores, prefetch),
            RowLoader::Tq3(rows) => score_all(rows, side.block, part, scores, prefetch),
            RowLoader::Tq4(rows) => score_all(rows, side.block, part, scores, prefetch),
            RowLoader::Tq5(rows) => score_all(rows, side.block, part, scores, prefetch),
            RowLoader::Tq6(rows) => score_all(rows, side.block, part, scores, prefetch),
            RowLoader::Tq8(rows) => score_all(rows, side.block, part, scores, prefetch),
            _ => unreachable!("only quantised sides are in fixed point"),
        }
    }
}

/// Adds the values, times `weights` (`[rows, TILE]`), to the queries' sums. `rounded` has room for the weights as i16.
///
/// # Safety
/// As for [`score`].
pub(super) unsafe fn add_values(
    side: &KvRows,
    part: FixedPart,
    weights: *const f32,
    rounded: *mut i16,
    prefetch: &mut Prefetcher,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        match side.loader {
            RowLoader::Tq2(rows) => add_all(rows, side.block, part, weights, rounded, prefetch),
            RowLoader::Tq3(rows) => add_all(rows, side.block, part, weights, rounded, prefetch),
            RowLoader::Tq4(rows) => add_all(rows, side.block, part, weights, rounded, prefetch),
            RowLoader::Tq5(rows) => add_all(rows, side.block, part, weights, rounded, prefetch),
            RowLoader::Tq6(rows) => add_all(rows, side.block, part, weights, rounded, prefetch),
            RowLoader::Tq8(rows) => add_all(rows, side.block, part, weights, rounded, prefetch),
            _ => unreachable!("only quantised sides are in fixed point"),
        }
    }
}

/// Loads rows as 16-bit centroids.
///
/// # Safety
/// For all functions: the instructions are enabled, the rows and coordinates exist.
trait FixedCodes: Copy {
    const BITS: u32;
    /// Whether looked-up centroids are half a unit too small, so that inverting the bits of a centroid negates it.
    const HALVES: bool;
    /// The centroids, in registers.
    type Table: Copy;
    unsafe fn table() -> Self::Table;
    /// Coordinates `64 · chunk ..` of a key.
    unsafe fn key(&self, table: Self::Table, row: usize, chunk: usize) -> [__m512i; 2];
    /// `SETS` sets of 16 coordinates of a chunk, from set `FIRST` on, with the words of two values interleaved.
    unsafe fn pair<const SETS: usize, const FIRST: usize>(
        &self,
        table: Self::Table,
        rows: [usize; 2],
        chunk: usize,
    ) -> [__m512i; SETS];
}

#[inline(always)]
unsafe fn vector<T, const N: usize>(of: &[T; N]) -> __m512i {
    const { assert!(N * size_of::<T>() == 64) };
    // SAFETY: the array is a vector long; AVX-512 is enabled.
    unsafe { _mm512_loadu_si512(of.as_ptr().cast()) }
}
