//! Division of outputs among blocks, and of long rows of inputs among several blocks with the same outputs.

use super::warp_tiling::TILE;
use crate::{
    Result,
    gpu::{Builder, Launch, Use},
};

/// Maximum blocks with the same outputs; each has a part of the inputs.
pub(super) const SPLITS: usize = 4;

/// How the outputs, and the inputs of long rows, are divided.
#[derive(Clone, Copy)]
pub(super) struct Splits {
    /// Blocks with the same outputs, each with a part of the inputs; and the number of groups of such blocks.
    pub splits: usize,
    pub stretches: usize,
    /// Maximum tiles of outputs of such a group.
    pub tiles: usize,
}

impl Splits {
    pub(super) fn blocks(&self) -> usize {
        self.stretches * self.splits
    }

    /// Bytes of the partial sums of `rows` rows, of all blocks.
    pub(super) fn partial_bytes(&self, rows: usize) -> usize {
        self.blocks() * self.tiles * TILE * rows * size_of::<f32>()
    }

    /// Adds the launch. If blocks share outputs, argument `index` is memory for their sums, and the next argument
    /// counts their arrivals.
    pub(super) fn push(&self, launch: Launch, index: u32, rows: usize, b: &mut Builder) -> Result<()> {
        if self.splits == 1 {
            return b.push(launch);
        }
        let partials = b.scratch(self.partial_bytes(rows))?;
        let arrivals = b.zeroed_scratch(self.stretches * size_of::<u32>())?;
        b.push(launch.scratch(index, &partials, Use::ReadWrite).scratch(index + 1, &arrivals, Use::ReadWrite))
    }
}
