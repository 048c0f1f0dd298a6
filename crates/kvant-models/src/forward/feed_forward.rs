//! The second half of a block: a gated MLP, a mixture of experts, or both in parallel.

use kvant::{
    Tensor,
    ops::{
        self, Activation, AddBias, Columns, Experts, Gate, Linear, MoeCombine, MoeRoute, NextNorm, Residual, RmsNorm,
    },
};

use super::{
    HalfNorms, Pass,
    workspace::{DenseViews, MoeViews},
};
use crate::{
    Result,
    spec::MoeSpec,
    weights::{DenseWeights, GateUp, MoeWeights, Projection},
};

impl<'a> Pass<'a> {
    /// The norms of h that the half reads: x, and in a parallel one the inputs of the router and of the experts.
    pub(super) fn feed_forward_norms(&self, l: usize) -> HalfNorms<'a> {
        let weights = &self.network.weights.blocks[l].feed_forward;
        let mut norms = HalfNorms::new(&self.views.x, weights.norm.as_ref());
        if let (Some(parallel), Some(views), Some(moe)) = (&weights.parallel, &self.views.parallel, &weights.moe) {
            norms.push(NextNorm::new(&views.experts_input).weight(Some(&parallel.before_experts)));
            if let Some((weight, _)) = &moe.router_scales {
                let scale = (self.spec().hidden_size as f32).sqrt().recip();
                norms.push(NextNorm::new(&views.router_input).weight(Some(weight)).scale(scale));
            }
        }
        norms
    }

    /// y = feed_forward(x), where x = norm(h) or h.
    pub(super) fn feed_forward(&mut self, l: usize) -> Result<()> {
        let views = self.views;
        let x = self.input(l);
        let own = &views.blocks[l];
        let spec = &self.spec().blocks[l].feed_forward;
        let weights = &self.network.weights.blocks[l].feed_forward;
        let parallel = weights.parallel.as_ref().zip(views.parallel.as_ref());
        if let (Some(dense), Some(dense_views), Some(spec)) = (&weights.dense, &own.dense, spec.dense()) {
            let out = parallel.map_or(&views.y, |(_, views)| &views.dense_output);
            self.dense(x, dense, dense_views, spec.activation, out)?;
        }
        let (Some(moe), Some(moe_views), Some(spec)) = (&weights.moe, &own.moe, spec.moe()) else { return Ok(()) };
        let Some((norms, parallel)) = parallel else {
            self.route(x, moe, moe_views, spec)?;
            self.experts(x, moe, moe_views, spec)?;
            return Ok(ops::moe_combine(self.enc, &MoeCombine::new(&moe_views.out, &moe_views.weights, &views.y))?);
        };
        // A router without a norm of its own reads what the experts read.
        let router_input = if moe.router_scales.is_some() { &parallel.router_input } else { &parallel.experts_input };
        self.route(router_input, moe, moe_views, spec)?;
        self.experts(&parallel.experts_input, moe, moe_views, spec)?;
        // y = norm(Σ weight · expert) + norm(dense).
        let residual = Residual::Normed { residual: &parallel.dense_output, weight: Some(&norms.after_dense) };
        let args = RmsNorm::new(&moe_views.out, self.spec().norm_eps, &views.y).weight(Some(&norms.after_experts));
        Ok(ops::rms_norm(self.enc, &args.combine(Some(&moe_views.weights)).residual(residual))?)
    }

    /// out = mlp(x).
    fn dense(
        &mut self,
        x: &Tensor,
        weights: &DenseWeights,
        own: &DenseViews,
        activation: Activation,
        out: &Tensor,
    ) -> Result<()> {
        self.project(x, &weights.gate_up, &own.gate_up, &[&own.gate, &own.up])?;
        self.gate(Columns::from(&own.gate), Columns::from(&own.up), activation, &own.gate)?;
        self.output_linear(&own.gate, &weights.down, out)
    }

    /// Chooses the experts of each token.
    fn route(&mut self, x: &Tensor, moe: &MoeWeights, own: &MoeViews, spec: MoeSpec) -> Result<()> {
        self.biased_linear(x, &moe.router, &own.logits)?;
        let expert_scale = moe.router_scales.as_ref().map(|(_, factors)| factors);
        let args =
            MoeRoute::new(&own.logits, &own.ids, &own.weights).expert_scale(expert_scale).normalise(spec.normalise);
        Ok(ops::moe_route(self.enc, &args)?)
    }

    /// The outputs of each token's experts, without their weights.
    fn experts(&mut self, x: &Tensor, moe: &MoeWeights, own: &MoeViews, spec: MoeSpec) -> Result<()> {
        match &moe.gate_up {
            GateUp::Fused(both) => {
                self.expert_linear(x, both, own, false, 1.0, &own.gate_up)?;
                let up = Columns { tensor: &own.gate_up, start: spec.width };
                self.gate(Columns::from(&own.gate_up), up, spec.activation, &own.gate)?;
            }
            GateUp::Split { gate, up } => {
                self.expert_linear(x, gate, own, false, 1.0, &own.gate)?;
                self.expert_linear(x, up, own, false, 1.0, &own.up)?;
                self.gate(Columns::from(&own.gate), Columns::from(&own.up), spec.activation, &own.gate)?;
            }
        }
        self.expert_linear(&own.gate, &moe.down, own, true, self.spec().residual_scale, &own.out)
    }

    /// Multiplies each row by the matrix of its expert, and adds that expert's bias.
    fn expert_linear(
        &mut self,
        x: &Tensor,
        weights: &Projection,
        own: &MoeViews,
        expanded: bool,
        alpha: f32,
        out: &Tensor,
    ) -> Result<()> {
        let experts = Some(Experts::new(&own.ids).expanded(expanded));
        ops::linear(self.enc, &Linear::new(x, weights.matrix.weight(), out).experts(experts).alpha(alpha))?;
        if let Some(bias) = &weights.bias {
            ops::add_bias(self.enc, &AddBias::new(out, bias, out).experts(Some(&own.ids)))?;
        }
        Ok(())
    }

    pub(super) fn gate(&mut self, gate: Columns, up: Columns, activation: Activation, out: &Tensor) -> Result<()> {
        Ok(ops::gate(self.enc, &Gate::new(gate, up, activation, out))?)
    }
}
