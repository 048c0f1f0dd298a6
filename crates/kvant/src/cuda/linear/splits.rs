//! Rows of outputs that blocks divide, and inputs that several blocks of the same outputs divide.

use super::warp_tiling::TILE;
use crate::{
    Result,
    gpu::{Builder, Launch, Use},
};

/// Blocks that have the same outputs and a part of the inputs each, at most.
pub(super) const SPLITS: usize = 4;

/// How the outputs, and the inputs of long rows, are divided.
#[derive(Clone, Copy)]
pub(super) struct Splits {
    /// Blocks that have the same outputs and a part of the inputs each, and the number of groups of such blocks.
    pub splits: usize,
    pub stretches: usize,
    /// Tiles of outputs of such blocks, at most.
    pub tiles: usize,
}

impl Splits {
    pub(super) fn blocks(&self) -> usize {
        self.stretches * self.splits
    }

    /// Bytes of the sums of `rows` rows that blocks leave for the one that adds them up.
    pub(super) fn partial_bytes(&self, rows: usize) -> usize {
        self.blocks() * self.tiles * TILE * rows * size_of::<f32>()
    }

    /// Adds the launch. If blocks share rows, its argument `index` is memory for their sums, and the next one counts
    /// their arrivals.
    pub(super) fn push(&self, launch: Launch, index: u32, rows: usize, b: &mut Builder) -> Result<()> {
        if self.splits == 1 {
            return b.push(launch);
        }
        let partials = b.scratch(self.partial_bytes(rows))?;
        let arrivals = b.zeroed_scratch(self.stretches * size_of::<u32>())?;
        b.push(launch.scratch(index, &partials, Use::ReadWrite).scratch(index + 1, &arrivals, Use::ReadWrite))
    }
}
