//! Stores queries, keys and values as AMX tiles of bf16.

use std::arch::x86_64::*;

use crate::cpu::{
    amx_product::{PAIR, digits},
    attend::{
        kv_rows::{LoadRows, RowLoader, with_loader},
        stage::StagedSide,
        tile::{MAX_TILE as TILE, Queries},
    },
    simd::{Avx512, Simd},
};

/// Coordinates of a chunk: a word of an AMX tile has one from its first half and one from its second.
pub(super) const CHUNK: usize = 32;
/// Keys of a pair of AMX tiles of values.
pub(super) const KEYS: usize = 32;
/// Words in the row of an AMX tile, and rows of an AMX tile.
const WORDS: usize = 16;

/// Rows of words for one AMX tile, before they are transposed.
#[repr(align(64))]
struct Words([__m512i; WORDS]);

impl Words {
    #[inline(always)]
    unsafe fn new() -> Words {
        // SAFETY: the caller enables the instructions.
        Words(unsafe { [_mm512_setzero_si512(); WORDS] })
    }

    /// # Safety
    /// The instructions of `Avx512` are enabled; `to` has room for an AMX tile.
    #[inline(always)]
    unsafe fn transpose(&self, to: *mut u8) {
        // SAFETY: words can be moved as floats.
        unsafe { Avx512::transpose16(self.0.as_ptr().cast(), WORDS, to.cast()) }
    }
}

/// Stores the queries as `[rows / 16, D / 32]` pairs of AMX tiles: a row of an AMX tile has one word of each query.
/// Returns whether all are finite.
///
/// # Safety
/// The instructions of `Avx512` are enabled; `to` has room for `rows`, a multiple of 16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn stage_queries(queries: &Queries, rows: usize, to: *mut u8) -> bool {
    let dim = queries.head_dim;
    // SAFETY: the caller's promise, and the queries are valid.
    unsafe {
        let mut largest = LargestMagnitude::new();
        for first in (0..rows).step_by(WORDS) {
            for chunk in 0..dim / CHUNK {
                let (mut upper, mut lower) = (Words::new(), Words::new());
                for row in first..queries.rows.min(first + WORDS) {
                    let from = queries.q.add(row * dim + chunk * CHUNK);
                    let numbers = [Avx512::load(from), Avx512::load(from.add(CHUNK / 2))];
                    largest.add(numbers);
                    [upper.0[row - first], lower.0[row - first]] = digits(numbers);
                }
                let to = to.add((first / WORDS * (dim / CHUNK) + chunk) * PAIR);
                upper.transpose(to);
                lower.transpose(to.add(PAIR / 2));
            }
        }
        largest.is_finite()
    }
}

/// Keys or values to stage.
pub(super) struct StagedTile<'a> {
    pub from: StagedSide<'a>,
    pub row: usize,
    pub keys: usize,
    pub head_dim: usize,
    /// Whether lo is zero; it is then not stored.
    pub is_exact: bool,
    pub to: *mut u8,
}

/// Stores keys as `[keys / 16, D / 32]` pairs of AMX tiles: a row of an AMX tile is a part of one key. Returns whether
/// all are finite.
///
/// # Safety
/// The instructions of `Avx512` are enabled; the keys exist, and `to` has room for [`TILE`] of them.
pub(super) unsafe fn stage_keys(tile: StagedTile) -> bool {
    // SAFETY: passed on to the caller.
    unsafe { with_loader!(tile.from.side.loader, rows => store_keys(rows, tile)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn store_keys<R: LoadRows>(rows: R, tile: StagedTile) -> bool {
    let StagedTile { from, row, keys, head_dim, is_exact, to } = tile;
    debug_assert!(keys <= TILE);
    let chunks = head_dim / CHUNK;
    // SAFETY: passed on to the caller.
    unsafe {
        let mut largest = LargestMagnitude::new();
        for key in 0..keys {
            let to = to.add(key / WORDS * chunks * PAIR + key % WORDS * size_of::<__m512i>());
            for chunk in 0..chunks {
                let (a, b) = from.chunk::<Avx512, R>(&rows, row + key, chunk * CHUNK);
                largest.add([a, b]);
                let [upper, lower] = digits([a, b]);
                let to = to.add(chunk * PAIR);
                _mm512_storeu_si512(to.cast(), upper);
                if !is_exact {
                    _mm512_storeu_si512(to.add(PAIR / 2).cast(), lower);
                }
            }
        }
        largest.is_finite()
    }
}

/// Stores values as `[D / 16, TILE / 32]` pairs of AMX tiles: a row of an AMX tile is one coordinate of 32 values, and
/// a word has that coordinate of two neighbours. Absent values are zero. Returns whether all are finite.
///
/// # Safety
/// As for [`stage_keys`].
pub(super) unsafe fn stage_values(tile: StagedTile) -> bool {
    // SAFETY: passed on to the caller.
    unsafe { with_loader!(tile.from.side.loader, rows => store_values(rows, tile)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn store_values<R: LoadRows>(rows: R, tile: StagedTile) -> bool {
    let StagedTile { from, row, keys, head_dim, is_exact, to } = tile;
    debug_assert!(keys <= TILE);
    // SAFETY: passed on to the caller.
    unsafe {
        let mut largest = LargestMagnitude::new();
        for first in (0..keys).step_by(KEYS) {
            for chunk in 0..head_dim / CHUNK {
                // For the first half of the chunk, and for the second.
                let mut upper = [Words::new(), Words::new()];
                let mut lower = [Words::new(), Words::new()];
                for word in 0..WORDS.min((keys - first).div_ceil(2)) {
                    let key = first + 2 * word;
                    let (a, b) = from.chunk::<Avx512, R>(&rows, row + key, chunk * CHUNK);
                    let mut next = (Avx512::zero(), Avx512::zero());
                    if key + 1 < keys {
                        next = from.chunk::<Avx512, R>(&rows, row + key + 1, chunk * CHUNK);
                    }
                    for (half, numbers) in [[a, next.0], [b, next.1]].into_iter().enumerate() {
                        largest.add(numbers);
                        [upper[half].0[word], lower[half].0[word]] = digits(numbers);
                    }
                }
                for half in 0..2 {
                    let to = to.add(((2 * chunk + half) * (TILE / KEYS) + first / KEYS) * PAIR);
                    upper[half].transpose(to);
                    if !is_exact {
                        lower[half].transpose(to.add(PAIR / 2));
                    }
                }
            }
        }
        largest.is_finite()
    }
}

/// The largest magnitude of some numbers.
#[derive(Clone, Copy)]
struct LargestMagnitude(__m512i);

impl LargestMagnitude {
    /// # Safety
    /// For all functions: the instructions of `Avx512` are enabled.
    #[inline(always)]
    pub unsafe fn new() -> LargestMagnitude {
        // SAFETY: the caller's promise.
        LargestMagnitude(unsafe { _mm512_setzero_si512() })
    }

    #[inline(always)]
    pub unsafe fn add(&mut self, numbers: [__m512; 2]) {
        for x in numbers {
            // SAFETY: the caller's promise.
            unsafe {
                let magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX));
                self.0 = _mm512_max_epu32(self.0, magnitude);
            }
        }
    }

    /// Whether all numbers are finite after rounding to bf16.
    #[inline(always)]
    pub unsafe fn is_finite(self) -> bool {
        // Larger magnitudes round to infinity; NaN compare larger still.
        const LARGEST: u32 = 0x7f7f_7fff;
        // SAFETY: the caller's promise.
        unsafe { _mm512_reduce_max_epu32(self.0) <= LARGEST }
    }
}
