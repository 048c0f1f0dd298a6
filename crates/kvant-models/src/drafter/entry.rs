//! The start of a drafter's pass: from the embedding of the next token and the target's hidden states to the residual
//! stream.

use kvant::{
    Encoder, Tensor,
    ops::{self, Embed, Linear, RmsNorm},
};

use super::{DraftHidden, DraftInput, Drafter, space::SpaceViews};
use crate::{Result, forward::Entered, source::Matrix};

/// The weights of a drafter's entry.
#[derive(Debug)]
pub(super) enum Entry {
    /// h = input(\[e; hidden\]), where e is the target's scaled embedding. `output` projects the last norm to the
    /// hidden state of the next pass.
    Assistant { input: Matrix, output: Matrix },
    /// h = input(\[norm(e); norm(hidden)\]).
    Mtp { input: Matrix, embedding_norm: Tensor, hidden_norm: Tensor },
    /// h = input(features), or the hidden state that the last pass left. The first block reads \[norm(e); norm(h)\].
    Eagle3 {
        /// `[H, 3·target_width]`.
        input: Matrix,
        /// The norm of all of the target's hidden states together.
        features_norm: Option<Tensor>,
        embedding_norm: Tensor,
        /// Whether the normed h is also the residual stream.
        norm_before_residual: bool,
        /// Whether the hidden state for the next pass is normed.
        norm_output: bool,
    },
}

impl Entry {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Entry::Assistant { input, output } => input.bytes() + output.bytes(),
            Entry::Mtp { input, .. } | Entry::Eagle3 { input, .. } => input.bytes(),
        }
    }

    /// Whether the first block's mixer reads both inputs.
    fn is_joined_in_block(&self) -> bool {
        matches!(self, Entry::Eagle3 { .. })
    }
}

impl Drafter {
    /// Writes the residual stream to the views, and returns the start of the blocks.
    pub(super) fn enter<'v>(
        &self,
        enc: &mut Encoder,
        views: &'v SpaceViews,
        input: DraftInput,
    ) -> Result<Option<&'v Tensor>> {
        let eps = self.network.spec().norm_eps;
        let norm = |enc: &mut Encoder, x: &Tensor, weight: &Tensor, out: &Tensor| {
            ops::rms_norm(enc, &RmsNorm::new(x, eps, out).weight(Some(weight)))
        };
        let SpaceViews { stream, embedding, hidden, pair, joined, .. } = views;
        let table = self.network.weights.embed.weight();
        ops::embed(enc, &Embed::new(table, input.ids, embedding).scale(self.network.embedding_scale()))?;
        match &self.entry {
            Entry::Assistant { .. } => read_hidden(enc, input.hidden, hidden)?,
            Entry::Mtp { embedding_norm, hidden_norm, .. } => {
                norm(enc, embedding, embedding_norm, embedding)?;
                read_hidden(enc, input.hidden, hidden)?;
                norm(enc, hidden, hidden_norm, hidden)?;
            }
            Entry::Eagle3 { embedding_norm, norm_before_residual, .. } => {
                norm(enc, embedding, embedding_norm, embedding)?;
                self.enter_features(enc, views, input.hidden)?;
                let hidden_norm = self.network.weights.blocks[0].mixer_norm.as_ref();
                ops::rms_norm(enc, &RmsNorm::new(stream, eps, hidden).weight(hidden_norm))?;
                if *norm_before_residual {
                    ops::copy(enc, hidden, stream)?;
                }
            }
        }
        // Row 2t of the joined rows is the embedding of token t, row 2t + 1 the hidden state.
        ops::embed(enc, &Embed::new(pair, &views.alternate, &views.joined_rows))?;
        match &self.entry {
            Entry::Assistant { input, .. } | Entry::Mtp { input, .. } => {
                ops::linear(enc, &Linear::new(joined, input.weight(), stream))?;
                Ok(None)
            }
            Entry::Eagle3 { .. } => Ok(Some(joined)),
        }
    }

    /// Writes EAGLE-3's residual stream.
    fn enter_features(&self, enc: &mut Encoder, views: &SpaceViews, hidden: DraftHidden) -> Result<()> {
        let Entry::Eagle3 { input, features_norm, .. } = &self.entry else { return Ok(()) };
        let (eps, features) = (self.network.spec().norm_eps, &views.features);
        let DraftHidden::Features { .. } = hidden else { return read_hidden(enc, hidden, &views.stream) };
        let Some(features) = features else { return Ok(()) };
        read_hidden(enc, hidden, &features.rows)?;
        if let Some(weight) = features_norm {
            ops::rms_norm(enc, &RmsNorm::new(&features.joined, eps, &features.joined).weight(Some(weight)))?;
        }
        ops::linear(enc, &Linear::new(&features.joined, input.weight(), &views.stream))?;
        Ok(())
    }

    /// The start of the blocks, after [`Drafter::enter`].
    pub(super) fn entered<'v>(&self, first_input: Option<&'v Tensor>, lens: &'v Tensor) -> Entered<'v> {
        let is_assistant = matches!(self.entry, Entry::Assistant { .. });
        debug_assert_eq!(first_input.is_some(), self.entry.is_joined_in_block());
        Entered { first_input, query_positions: is_assistant.then_some(lens) }
    }
}

/// Copies hidden states to `out`.
fn read_hidden(enc: &mut Encoder, hidden: DraftHidden, out: &Tensor) -> Result<()> {
    match hidden {
        DraftHidden::Features { table, rows } => ops::embed(enc, &Embed::new(table, rows, out))?,
        DraftHidden::Fed(from) => ops::copy(enc, from, out)?,
    }
    Ok(())
}
