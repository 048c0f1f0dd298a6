//! The hidden states that a target leaves for its drafter.

use kvant::Tensor;

use crate::{
    Error, Model, Result,
    forward::{Features, Taps},
};

/// The hidden states that the latest pass of a model left for its drafter. Cloning is cheap; clones share the memory.
#[derive(Clone, Debug)]
pub struct TargetStates {
    taps: Taps,
    /// Maximum rows of a pass.
    rows: usize,
    /// `[taps.count()·rows, hidden_size]` in the dtype of activations.
    table: Tensor,
}

impl TargetStates {
    /// Allocates memory for passes of up to `rows` tokens.
    ///
    /// # Errors
    /// `Argument` for a model without a drafter, or 0 rows; `Kvant` with `OutOfMemory`.
    pub fn new(model: &Model, rows: usize) -> Result<TargetStates> {
        let Some(drafter) = model.drafter() else { return Err(no_drafter()) };
        if rows == 0 {
            return Err(Error::argument("rows", "at least 1", 0));
        }
        let (taps, width) = (drafter.taps(), model.decoder().hidden_size);
        let shape = [rows.saturating_mul(taps.count()), width];
        Ok(TargetStates { taps, rows, table: Tensor::zeros(model.device(), model.activations(), &shape)? })
    }

    /// Maximum tokens of a pass.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Whether a pass leaves the hidden states of every row, instead of the rows with logits.
    pub fn is_of_every_row(&self) -> bool {
        self.taps != Taps::Final
    }

    pub(crate) fn taps(&self) -> Taps {
        self.taps
    }

    pub(crate) fn table(&self) -> &Tensor {
        &self.table
    }

    /// The destination of a pass.
    pub(crate) fn features(&self) -> Features<'_> {
        Features { taps: self.taps, out: &self.table }
    }

    /// Checks that a pass of `rows` tokens of a model can leave its hidden states here.
    pub(crate) fn check(&self, model: &Model, rows: usize) -> Result<()> {
        let fits = model.drafter().is_some_and(|drafter| drafter.taps() == self.taps)
            && (self.table.device(), self.table.dtype()) == (model.device(), model.activations())
            && self.table.shape()[1] == model.decoder().hidden_size;
        if !fits {
            return Err(Error::argument("states", "those of the model's drafter", "others"));
        }
        match rows <= self.rows {
            true => Ok(()),
            false => Err(Error::argument("tokens", format_args!("at most {} for the drafter", self.rows), rows)),
        }
    }
}

/// The error of a model without a drafter.
pub(super) fn no_drafter() -> Error {
    Error::argument("model", "one with a drafter", "one without")
}
