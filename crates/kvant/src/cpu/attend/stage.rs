//! Widens keys and values to f32 for matrix products.

use super::{
    kv_rows::{KvRows, KvSource, LoadRows, RowLoader, with_loader},
    task::deinterleave,
    tile::KeyTile,
};
use crate::cpu::{
    hadamard,
    simd::{Simd, SimdKernel, SimdLevel},
};

/// Rows of a side, and the vectors that must be added to them.
#[derive(Clone, Copy)]
pub(super) struct StagedSide<'a> {
    pub side: &'a KvRows,
    pub means: Option<RowMeans>,
}

/// Vectors that were subtracted from rows when these were stored, in the order of chunks: the mean of the page, or one
/// vector for each row.
#[derive(Clone, Copy)]
pub(super) struct RowMeans {
    start: *const f32,
    /// The row that `start` belongs to, and the floats between rows; 0 for a shared mean.
    first: usize,
    stride: usize,
}

impl RowMeans {
    /// A mean that all rows share.
    pub fn shared(mean: *const f32) -> RowMeans {
        RowMeans { start: mean, first: 0, stride: 0 }
    }

    /// One vector of `stride` floats for each row from `first` on.
    pub fn of_rows(start: *const f32, first: usize, stride: usize) -> RowMeans {
        RowMeans { start, first, stride }
    }

    #[inline(always)]
    fn row(self, row: usize) -> *const f32 {
        self.start.wrapping_add((row - self.first) * self.stride)
    }
}

/// The vectors that must be added to the keys of a tile. Decodes the mean of the page to `mean`. If keys have a bias,
/// writes the sum of bias and mean of each key to `rows`, `[keys, D]`.
///
/// # Safety
/// The level's instructions are enabled; the source has the keys, and they are not in fixed point; the slices have the
/// lengths of their vectors.
#[inline(always)]
pub(super) unsafe fn key_means<S: Simd>(
    source: &KvSource,
    tile: &KeyTile,
    mean: &mut [f32],
    rows: &mut [f32],
) -> Option<RowMeans> {
    let (k, dim) = (&source.k, mean.len());
    // SAFETY: passed on to the caller.
    unsafe {
        let centred = k.mean::<S>(false, mean);
        let Some(bias) = source.bias else { return centred.then(|| RowMeans::shared(mean.as_ptr())) };
        if !centred {
            mean.fill(0.0);
        }
        let (page, slot) = (tile.position / bias.page_tokens, tile.position % bias.page_tokens);
        let (at_page, pairs) = (&mut [0f32; 512][..dim], &mut [0f32; 512][..dim]);
        bias.at_page(page, at_page);
        for (key, row) in rows.chunks_exact_mut(dim).take(tile.keys).enumerate() {
            bias.at_slot(at_page, slot + key, pairs, row);
            hadamard::rotate::<S>(row, hadamard::signs(dim));
            if k.interleaved {
                row.chunks_exact_mut(2 * S::LANES).for_each(deinterleave);
            }
            row.iter_mut().zip(&*mean).for_each(|(x, mean)| *x += mean);
        }
        Some(RowMeans::of_rows(rows.as_ptr(), tile.row, dim))
    }
}

impl StagedSide<'_> {
    /// Loads `2 · LANES` coordinates of a row, from `first` on: times their norm, plus the mean.
    ///
    /// # Safety
    /// The level's instructions are enabled; `rows` is the side's loader, and the row exists and has the chunk.
    #[inline(always)]
    pub unsafe fn chunk<S: Simd, R: LoadRows>(&self, rows: &R, row: usize, first: usize) -> (S::F, S::F) {
        let StagedSide { side, means } = *self;
        // SAFETY: passed on to the caller.
        unsafe {
            let (a, b) = rows.chunk::<S>(row, first / (2 * S::LANES));
            if !side.quantised {
                return (a, b);
            }
            let norm = S::splat(side.norm(row, first / side.block));
            match means.map(|means| means.row(row).add(first)) {
                Some(mean) => (S::fma(a, norm, S::load(mean)), S::fma(b, norm, S::load(mean.add(S::LANES)))),
                None => (S::mul(a, norm), S::mul(b, norm)),
            }
        }
    }
}

/// A range of coordinates of some rows, and its destination.
pub(super) struct StagedPart<'a> {
    pub from: StagedSide<'a>,
    pub row: usize,
    pub keys: usize,
    /// A whole number of chunks.
    pub first: usize,
    pub coordinates: usize,
    pub to: *mut f32,
    pub stride: usize,
}

/// Widens a part to f32. Returns whether all numbers are finite.
///
/// # Safety
/// The side has the rows, `to` has room for them, `stride` apart; the level is supported.
pub(super) unsafe fn stage(level: SimdLevel, part: StagedPart) -> bool {
    with_loader!(part.from.side.loader, rows => level.dispatch(StageKernel { rows, part }))
}

struct StageKernel<'a, R> {
    rows: R,
    part: StagedPart<'a>,
}

impl<R: LoadRows> SimdKernel for StageKernel<'_, R> {
    type Output = bool;
    #[inline(always)]
    fn run<S: Simd>(self) -> bool {
        let StagedPart { from, row, keys, first, coordinates, to, stride } = self.part;
        // SAFETY: `dispatch` enables the instructions; the caller of `stage` guarantees the rows and the room.
        unsafe {
            // Sums of 0 · x: zero, or NaN if an x is not finite.
            let mut zeros = [S::zero(); 2];
            for key in 0..keys {
                let to = to.add(key * stride);
                for at in (0..coordinates).step_by(2 * S::LANES) {
                    let (a, b) = from.chunk::<S, R>(&self.rows, row + key, first + at);
                    S::store(to.add(at), a);
                    S::store(to.add(at + S::LANES), b);
                    zeros = [S::fma(a, S::zero(), zeros[0]), S::fma(b, S::zero(), zeros[1])];
                }
            }
            S::sum(S::add(zeros[0], zeros[1])) == 0.0
        }
    }
}
