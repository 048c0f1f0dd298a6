//! A gated delta net: linear attention with a state for each head.

use kvant::{
    KvPool,
    ops::{self, CausalConv, DeltaRule, RmsNorm},
};

use super::{Pass, workspace::DeltaNetViews};
use crate::{Result, spec::DeltaNetSpec, weights::DeltaNetWeights};

impl Pass<'_> {
    /// y = delta_net(x). The states of the step's sequences advance by their tokens.
    pub(super) fn delta_net(
        &mut self,
        l: usize,
        pool: &KvPool,
        (spec, weights, own): (&DeltaNetSpec, &DeltaNetWeights, &DeltaNetViews),
    ) -> Result<()> {
        let (step, first) = (self.step, self.network.stored[l]);
        let (inputs, matrices, runs) = (pool.state(first)?, pool.state(first + 1)?, super::runs(step)?);
        let DeltaNetViews { all, qkv, z, z_heads, b, a, convolved, out, out_heads } = own;
        debug_assert_eq!(qkv.shape()[1], spec.channels());
        self.project(self.mixer_input(l), &weights.projections, all, &[qkv, z, b, a])?;
        let conv = CausalConv::new(qkv, &weights.conv, inputs, runs, convolved).silu(true);
        ops::causal_conv(self.enc, &conv)?;
        let decay = [&weights.rate, &weights.a_bias];
        let rule = DeltaRule::new(convolved, [a, b], decay, matrices, runs, out).tiled(spec.tiled);
        ops::delta_rule(self.enc, &rule)?;
        // Each head of each token is a row.
        let norm = RmsNorm::new(out_heads, self.spec().norm_eps, z_heads).weight(Some(&weights.norm));
        ops::rms_norm(self.enc, &norm.gate(Some(z_heads)))?;
        self.output_linear(z, &weights.output, &self.views.y)?;
        self.leave_partial();
        Ok(())
    }
}
