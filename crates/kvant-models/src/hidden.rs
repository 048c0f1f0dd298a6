//! Hidden states, which are pooled to embeddings.

use kvant::{DType, KvPool, Step, Tensor};

use crate::{Error, Model, Result, TargetStates, pass_rows::PassRows};

impl Model {
    /// Like [`Model::forward`], but returns the hidden states of `rows` after the final norm, `[rows.len(),
    /// hidden_size]` in the dtype of activations. These are the input of the output matrix and of pooling.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn hidden(&self, pool: &KvPool, step: &Step, tokens: &[u32], rows: &[usize]) -> Result<Tensor> {
        self.hidden_with(pool, step, tokens, rows, None)
    }

    /// Like [`Model::hidden`], and leaves hidden states for the drafter in `states`.
    ///
    /// # Errors
    /// As [`Model::forward`]; `Argument` for more tokens than rows of `states`.
    pub fn hidden_with(
        &self,
        pool: &KvPool,
        step: &Step,
        tokens: &[u32],
        rows: &[usize],
        states: Option<&TargetStates>,
    ) -> Result<Tensor> {
        self.check_pass(pool, step, tokens, rows)?;
        states.map_or(Ok(()), |states| states.check(self, tokens.len()))?;
        let out = Tensor::zeros(self.device(), self.activations(), &[rows.len(), self.decoder().hidden_size])?;
        if !tokens.is_empty() {
            let wanted = PassRows { rows, out: &out, is_hidden: true, states };
            self.run(pool, step, tokens, None, wanted, None)?.wait()?;
        }
        Ok(out)
    }

    /// Computes logits of hidden states, f32 `[rows, vocab_size]`. They equal [`Model::forward`]'s except for rounding.
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
            let space = self.space(1)?;
            let mut enc = self.device().encoder()?;
            self.network().logits(&mut enc, &space.views, hidden, &out)?;
            let submission = enc.commit();
            self.give_spaces([space]);
            submission?.wait()?;
        }
        Ok(out)
    }

    fn not_hidden(&self, hidden: &Tensor) -> Error {
        let (width, dtype) = (self.decoder().hidden_size, self.activations());
        let expected = format_args!("[rows, {width}] of {dtype} on {}", self.device()).to_string();
        Error::argument("hidden", expected, format_args!("{hidden:?}"))
    }
}
