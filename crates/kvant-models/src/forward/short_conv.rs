//! A short convolution between two products.

use kvant::{
    KvPool,
    ops::{self, Activation, CausalConv, Columns},
};

use super::{Pass, workspace::ShortConvViews};
use crate::{Result, spec::ShortConvSpec, weights::ShortConvWeights};

impl Pass<'_> {
    /// y = short_conv(x). The states of the step's sequences advance by their tokens.
    pub(super) fn short_conv(
        &mut self,
        l: usize,
        pool: &KvPool,
        (spec, weights, own): (&ShortConvSpec, &ShortConvWeights, &ShortConvViews),
    ) -> Result<()> {
        let (inputs, runs) = (pool.state(self.network.stored[l])?, super::runs(self.step)?);
        let ShortConvViews { projected, product, convolved } = own;
        self.biased_linear(self.mixer_input(l), &weights.input, projected)?;
        // The parts b, c and u of the projection.
        let [b, c, u] = [0, 1, 2].map(|part| Columns { tensor: projected, start: part * spec.channels });
        self.gate(b, u, Activation::Identity, product)?;
        let conv = CausalConv::new(product, &weights.conv, inputs, runs, convolved).bias(weights.conv_bias.as_ref());
        ops::causal_conv(self.enc, &conv)?;
        self.gate(c, Columns::from(convolved), Activation::Identity, product)?;
        self.output_linear(product, &weights.output, &self.views.y)?;
        self.leave_partial();
        Ok(())
    }
}
