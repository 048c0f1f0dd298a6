//! The rows of a sequence in a step: new tokens, or positions.

use std::ops::Range;

use super::sequence::{Sequence, SequencePages};

/// A sequence of a batch, with its rows in a step.
pub(super) trait StepRows {
    /// Whether the sequence becomes longer by its rows.
    const APPENDS: bool;

    fn sequence(&self) -> &Sequence;

    fn pages_mut(&mut self) -> &mut SequencePages;

    /// The position of the first row.
    fn start(&self) -> usize;

    /// The number of rows.
    fn count(&self) -> usize;

    fn pages(&self) -> &SequencePages {
        &self.sequence().pages
    }
}

impl StepRows for (&mut Sequence, usize) {
    const APPENDS: bool = true;

    fn sequence(&self) -> &Sequence {
        self.0
    }

    fn pages_mut(&mut self) -> &mut SequencePages {
        &mut self.0.pages
    }

    fn start(&self) -> usize {
        self.0.len()
    }

    fn count(&self) -> usize {
        self.1
    }
}

impl StepRows for (&mut Sequence, Range<usize>) {
    const APPENDS: bool = false;

    fn sequence(&self) -> &Sequence {
        self.0
    }

    fn pages_mut(&mut self) -> &mut SequencePages {
        &mut self.0.pages
    }

    fn start(&self) -> usize {
        self.1.start
    }

    fn count(&self) -> usize {
        self.1.len()
    }
}
