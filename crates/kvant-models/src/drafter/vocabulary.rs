//! From a drafter's last norm to logits over the target's vocabulary.

use kvant::{DType, Device, Encoder, Tensor};

use super::Drafter;
use crate::{Result, forward::Views};

/// The tokens that a drafter can draft.
#[derive(Debug)]
pub(super) enum Vocabulary {
    /// All tokens of the target.
    Whole,
}

/// Scratch for the logits of several rows.
pub(super) struct VocabularyBuffers;

/// The scratch in the shapes of a number of rows.
pub(super) struct VocabularyViews;

impl Vocabulary {
    pub(super) fn bytes(&self) -> usize {
        0
    }

    pub(super) fn buffers(&self, _: &Device, _: DType, _: usize) -> Result<VocabularyBuffers> {
        Ok(VocabularyBuffers)
    }
}

impl VocabularyBuffers {
    pub(super) fn views(&self, _: usize) -> Result<VocabularyViews> {
        Ok(VocabularyViews)
    }
}

impl Drafter {
    /// Writes the logits of rows after the last norm.
    pub(super) fn draft_logits(
        &self,
        enc: &mut Encoder,
        (views, _): (&Views, &VocabularyViews),
        x: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        match &self.vocabulary {
            Vocabulary::Whole => self.network.logits(enc, views, x, out),
        }
    }
}
