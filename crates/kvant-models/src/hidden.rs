//! Hidden states, from which embeddings are pooled.

use kvant::{DType, KvPool, Step, Tensor};

use crate::{Error, Model, Result};

/// The rows of a pass that are wanted, and where they go.
#[derive(Clone, Copy)]
pub(crate) struct PassRows<'a> {
    pub rows: &'a [usize],
    /// `[rows.len(), vocab_size or hidden_size]`.
    pub out: &'a Tensor,
    /// Hidden states after the last norm, not logits.
    pub is_hidden: bool,
}

impl<'a> PassRows<'a> {
    /// The logits of rows.
    pub fn logits(rows: &'a [usize], out: &'a Tensor) -> PassRows<'a> {
        PassRows { rows, out, is_hidden: false }
    }
}

impl Model {
    /// As [`Model::forward`], but returns the hidden states of `rows` after the last norm, `[rows.len(), hidden_size]`
    /// in the dtype of activations: what the output matrix reads, and what embeddings are pooled from.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn hidden(&self, pool: &KvPool, step: &Step, tokens: &[u32], rows: &[usize]) -> Result<Tensor> {
        self.check_pass(pool, step, tokens, rows)?;
        let out = Tensor::zeros(self.device(), self.activations(), &[rows.len(), self.decoder().hidden_size])?;
        if !tokens.is_empty() {
            let wanted = PassRows { rows, out: &out, is_hidden: true };
            self.run(pool, step, tokens, None, wanted, None)?.wait()?;
        }
        Ok(out)
    }

    /// The logits of hidden states, f32 `[rows, vocab_size]`: those that [`Model::forward`] returns for these rows, up
    /// to rounding.
    ///
    /// # Errors
    /// `Argument` for hidden states of another width or dtype; `Kvant`.
    pub fn logits_of(&self, hidden: &Tensor) -> Result<Tensor> {
        let width = self.decoder().hidden_size;
        let &[rows, _] = hidden.shape() else { return Err(self.not_hidden(hidden)) };
        if hidden.shape()[1] != width || hidden.dtype() != self.activations() || hidden.device() != self.device() {
            return Err(self.not_hidden(hidden));
        }
        let out = Tensor::zeros(self.device(), DType::F32, &[rows, self.vocab_size()])?;
        if rows > 0 {
            let mut enc = self.device().encoder()?;
            self.network().logits(&mut enc, hidden, &out)?;
            enc.commit()?.wait()?;
        }
        Ok(out)
    }

    fn not_hidden(&self, hidden: &Tensor) -> Error {
        let (width, dtype) = (self.decoder().hidden_size, self.activations());
        let expected = format_args!("[rows, {width}] of {dtype} on {}", self.device()).to_string();
        Error::argument("hidden", expected, format_args!("{hidden:?}"))
    }
}
