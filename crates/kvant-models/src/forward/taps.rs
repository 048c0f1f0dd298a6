//! Hidden states that a pass leaves for a drafter.

use kvant::{Tensor, ops};

use super::{Pass, Stream};
use crate::Result;

/// The hidden states of a target that its drafter reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taps {
    /// After the final norm, of the rows that get logits.
    Final,
    /// After the final norm, of every row.
    FinalOfEvery,
    /// The input of three blocks, of every row: the residual stream. An index equal to the number of blocks is the
    /// output of the last block.
    Residual([usize; 3]),
}

impl Taps {
    /// The number of hidden states of a row.
    pub fn count(&self) -> usize {
        match self {
            Taps::Final | Taps::FinalOfEvery => 1,
            Taps::Residual(blocks) => blocks.len(),
        }
    }

    /// Blocks that must run for every row, of `blocks` blocks.
    fn blocks_of_every_row(&self, blocks: usize) -> usize {
        match self {
            Taps::Final => 0,
            Taps::FinalOfEvery => blocks,
            // The stream is complete after the next block's norm.
            Taps::Residual(before) => before.iter().map(|&block| block + 1).max().unwrap_or(0).min(blocks),
        }
    }

    /// Whether the final norm must run for every row.
    fn needs_end(&self, blocks: usize) -> bool {
        match self {
            Taps::Final => false,
            Taps::FinalOfEvery => true,
            Taps::Residual(before) => before.contains(&blocks),
        }
    }
}

/// The destination of the hidden states of a pass.
#[derive(Clone, Copy)]
pub(crate) struct Features<'a> {
    pub taps: Taps,
    /// `[taps.count()·M, H]`, for passes of up to M rows. Tap i of row r is row i·M + r. For [`Taps::Final`], r counts
    /// the rows that get logits.
    pub out: &'a Tensor,
}

impl Features<'_> {
    /// The rows of [`Features::out`] that hold the hidden states of some rows of a pass: all taps of a row follow one
    /// another. `capacity`: M.
    pub(crate) fn rows(taps: Taps, capacity: usize, rows: &[usize]) -> Vec<u32> {
        rows.iter().flat_map(|&row| (0..taps.count()).map(move |tap| (tap * capacity + row) as u32)).collect()
    }

    /// The rows of a tap, of a pass of `rows` rows.
    fn of_tap(&self, tap: usize, rows: usize) -> Result<Tensor> {
        let start = tap * (self.out.shape()[0] / self.taps.count());
        Ok(self.out.rows(start..start + rows)?)
    }

    /// Blocks that must run for every row, of `blocks` blocks.
    pub(super) fn blocks_of_every_row(&self, blocks: usize) -> usize {
        self.taps.blocks_of_every_row(blocks)
    }
}

impl Pass<'_> {
    /// Copies the residual stream, which enters block `l` and is complete.
    pub(super) fn tap_residual(&mut self, l: usize) -> Result<()> {
        let Some(features) = self.features else { return Ok(()) };
        let Taps::Residual(blocks) = features.taps else { return Ok(()) };
        for (tap, _) in blocks.iter().enumerate().filter(|(_, block)| **block == l) {
            ops::copy(self.enc, &self.views.h, &features.of_tap(tap, self.views.tokens)?)?;
        }
        Ok(())
    }

    /// After the last block: norms every row if the drafter needs it, and copies the hidden states.
    pub(super) fn tap_end(&mut self) -> Result<()> {
        let blocks = self.spec().blocks.len();
        let Some(features) = self.features.filter(|features| features.taps.needs_end(blocks)) else { return Ok(()) };
        self.enter(&self.final_norm())?;
        // The norm is in x.
        self.stream = Stream::Normed;
        match features.taps {
            Taps::Residual(_) => self.tap_residual(blocks),
            Taps::Final | Taps::FinalOfEvery => self.copy_norm(features),
        }
    }

    /// After the final norm of the rows that get logits: copies their hidden states.
    pub(super) fn tap_wanted(&mut self) -> Result<()> {
        match self.features.filter(|features| features.taps == Taps::Final) {
            Some(features) => self.copy_norm(features),
            None => Ok(()),
        }
    }

    fn copy_norm(&mut self, features: &Features) -> Result<()> {
        let out = features.of_tap(0, self.views.tokens)?;
        Ok(ops::copy(self.enc, &self.views.x, &out)?)
    }
}
