//! Quantised keys and values in fixed point, where the processor multiplies pairs of 16-bit integers (AVX-512 VNNI).
//!
//! Codes become centroids of 14 bits and a sign by one or two permutes of 32, half of what f32 needs, and an instruction
//! adds 32 products to 16 sums, twice what f32 does; the sums are exact. What is multiplied is rounded: a query relative
//! to its block's largest lane sum, the weights of a tile relative to their sum, such that no sum of 32 bits overflows
//! and the weights' own sum stays what it is. What that costs is in [`Attend`](crate::ops::Attend) and docs/kernels.md; the
//! relative error of a vector stored in 8 bits is 6·10⁻³.
//!
//! Packed codes come 64 coordinates at a time as 16 words of four nibbles: word i holds coordinates 4i, 4i + 1, 4i + 2 and
//! 4i + 3. Queries and sums meanwhile have the sixteen coordinates 4i first, then the sixteen 4i + 1, and so on. A vector of
//! keys holds two of these four sets, one after the other, a vector of values one set of two keys in turn. Bytes have
//! orders of their own, those of the instructions that put two vectors of bytes together: in sums a set is the same four of
//! every sixteen coordinates.

use std::arch::x86_64::*;

use super::{
    ahead::Ahead,
    rows::{Loader, Side},
    tile::FixedPart as Part,
};

mod bytes;
mod packed;
mod rounding;
mod score;
mod values;

pub(super) use rounding::round_query;
use score::score_all;
use values::add_all;

/// Coordinates that are taken at a time.
const CHUNK: usize = 64;

/// Brings a sum into the order of coordinates.
pub(super) fn order_sum(side: &Side, o: &mut [f32]) {
    for chunk in o.chunks_exact_mut(CHUNK) {
        let mut copy = [0.0; CHUNK];
        copy.copy_from_slice(chunk);
        for (at, &x) in copy.iter().enumerate() {
            let (set, lane) = (at / 16, at % 16);
            chunk[if side.interleaved { 4 * lane + set } else { lane / 4 * 16 + set * 4 + lane % 4 }] = x;
        }
    }
}

/// Scores without norms into `scores`, `[rows, TILE]`.
///
/// # Safety
/// The processor has the instructions of `Avx512Vnni`; everything that `part` names exists.
pub(super) unsafe fn score(side: &Side, part: Part, scores: *mut f32, ahead: &mut Ahead) {
    // SAFETY: passed on to the caller.
    unsafe {
        match side.loader {
            Loader::Tq4(rows) => score_all(rows, side.block, part, scores, ahead),
            Loader::Tq5(rows) => score_all(rows, side.block, part, scores, ahead),
            Loader::Tq6(rows) => score_all(rows, side.block, part, scores, ahead),
            Loader::Tq8(rows) => score_all(rows, side.block, part, scores, ahead),
            _ => unreachable!("only quantised sides are in fixed point"),
        }
    }
}

/// Adds the values, by `weights` (`[rows, TILE]`), to the queries' sums. `rounded` has room for as many i16.
///
/// # Safety
/// As for [`score`].
pub(super) unsafe fn add_values(side: &Side, part: Part, weights: *const f32, rounded: *mut i16, ahead: &mut Ahead) {
    // SAFETY: passed on to the caller.
    unsafe {
        match side.loader {
            Loader::Tq4(rows) => add_all(rows, side.block, part, weights, rounded, ahead),
            Loader::Tq5(rows) => add_all(rows, side.block, part, weights, rounded, ahead),
            Loader::Tq6(rows) => add_all(rows, side.block, part, weights, rounded, ahead),
            Loader::Tq8(rows) => add_all(rows, side.block, part, weights, rounded, ahead),
            _ => unreachable!("only quantised sides are in fixed point"),
        }
    }
}

/// Rows as centroids of 16 bits.
///
/// # Safety
/// Of all functions: the instructions are enabled, the rows and coordinates exist.
trait Codes: Copy {
    const BITS: u32;
    /// Whether centroids come as integers less than they are by half a unit: what is looked up for one half of the codes is
    /// then inverted, bit by bit, for the other.
    const HALVES: bool;
    /// The centroids, in registers.
    type Table: Copy;
    unsafe fn table() -> Self::Table;
    /// Coordinates `64 · chunk ..` of a key.
    unsafe fn key(&self, table: Self::Table, row: usize, chunk: usize) -> [__m512i; 2];
    /// `SETS` sets of 16 coordinates of a chunk, from set `FIRST` on, of two values in turn.
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
    // SAFETY: as long as a vector; AVX-512 is enabled.
    unsafe { _mm512_loadu_si512(of.as_ptr().cast()) }
}
