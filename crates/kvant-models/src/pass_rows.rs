//! The rows of a pass that are wanted.

use kvant::Tensor;

use crate::TargetStates;

/// The wanted rows of a pass, and their destination.
#[derive(Clone, Copy)]
pub(crate) struct PassRows<'a> {
    pub rows: &'a [usize],
    /// `[rows.len(), vocab_size or hidden_size]`.
    pub out: &'a Tensor,
    /// Whether hidden states after the final norm are wanted instead of logits.
    pub is_hidden: bool,
    /// Receives hidden states for a drafter.
    pub states: Option<&'a TargetStates>,
}

impl<'a> PassRows<'a> {
    /// Selects logits of rows.
    pub fn logits(rows: &'a [usize], out: &'a Tensor) -> PassRows<'a> {
        PassRows { rows, out, is_hidden: false, states: None }
    }
}
