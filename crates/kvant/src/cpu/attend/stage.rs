//! Keys and values in f32, as matrix products take them.

use super::kv_rows::{KvRows, LoadRows, RowLoader, with_loader};
use crate::cpu::simd::{Simd, SimdKernel, SimdLevel};

/// Rows of a side, and the mean of their page if they are stored minus it.
#[derive(Clone, Copy)]
pub(super) struct StagedSide<'a> {
    pub side: &'a KvRows,
    /// In the order of chunks.
    pub mean: Option<*const f32>,
}

impl StagedSide<'_> {
    /// `2 · LANES` coordinates of a row, from `first` on: times their norm, plus the mean.
    ///
    /// # Safety
    /// The level's instructions are enabled; `rows` is the side's loader, and the row exists and has the chunk.
    #[inline(always)]
    pub unsafe fn chunk<S: Simd, R: LoadRows>(&self, rows: &R, row: usize, first: usize) -> (S::F, S::F) {
        let StagedSide { side, mean } = *self;
        // SAFETY: passed on to the caller.
        unsafe {
            let (a, b) = rows.chunk::<S>(row, first / (2 * S::LANES));
            if !side.quantised {
                return (a, b);
            }
            let norm = S::splat(side.norm(row, first / side.block));
            match mean.map(|mean| mean.add(first)) {
                Some(mean) => (S::fma(a, norm, S::load(mean)), S::fma(b, norm, S::load(mean.add(S::LANES)))),
                None => (S::mul(a, norm), S::mul(b, norm)),
            }
        }
    }
}

/// Some coordinates of some rows, and their place in memory.
pub(super) struct StagedPart<'a> {
    pub from: StagedSide<'a>,
    pub row: usize,
    pub keys: usize,
    /// Whole chunks.
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
        // SAFETY: `dispatch` enables the instructions; the caller of `stage` vouches for the rows and the room.
        unsafe {
            // A zero, or NaN where something is not finite.
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
