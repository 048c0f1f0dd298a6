//! The second half of a block: a gated MLP, a mixture of experts, or both in parallel.

use kvant::{
    Tensor,
    ops::{
        self, Activation, AddBias, AllReduce, Columns, ExpertScores, Experts, Gate, Linear, MoeCombine, MoeRoute,
        NextNorm, Residual, RmsNorm,
    },
};

use super::{
    HalfNorms, Pass,
    workspace::{DenseViews, MoeViews},
};
use crate::{
    Result,
    spec::{MoeSpec, RoutingSpec},
    weights::{DenseWeights, GateUp, MoeWeights, ParallelWeights, Projection},
};

impl<'a> Pass<'a> {
    /// The norms of h that this half reads: x, and for a parallel branch the inputs of the router and of the experts.
    pub(super) fn feed_forward_norms(&self, l: usize) -> HalfNorms<'a> {
        let weights = &self.network.weights.blocks[l].feed_forward;
        let mut norms = HalfNorms::new(&self.views.x, weights.norm.as_ref());
        let (parallel, views) = (&weights.parallel, &self.views.parallel);
        if let (Some(ParallelWeights::Normed(own)), Some(views), Some(moe)) = (parallel, views, &weights.moe) {
            norms.push(NextNorm::new(&views.experts_input).weight(Some(&own.before_experts)));
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
        let normed = match (&weights.parallel, &views.parallel) {
            (Some(ParallelWeights::Normed(norms)), Some(views)) => Some((norms, views)),
            _ => None,
        };
        if let (Some(dense), Some(dense_views), Some(spec)) = (&weights.dense, &own.dense, spec.dense()) {
            let out = normed.map_or(&views.y, |(_, views)| &views.dense_output);
            self.dense(x, dense, dense_views, spec.activation, out)?;
        }
        let (Some(moe), Some(moe_views), Some(spec)) = (&weights.moe, &own.moe, spec.moe()) else {
            self.leave_partial();
            return Ok(());
        };
        let Some((norms, parallel)) = normed else {
            self.route(x, moe, moe_views, spec)?;
            self.experts(x, moe, moe_views, spec)?;
            self.combine(x, moe_views, weights.parallel.as_ref())?;
            self.leave_partial();
            return Ok(());
        };
        // A router without its own norm reads the input of the experts.
        let router_input = if moe.router_scales.is_some() { &parallel.router_input } else { &parallel.experts_input };
        self.route(router_input, moe, moe_views, spec)?;
        self.experts(&parallel.experts_input, moe, moe_views, spec)?;
        // y = norm(Σ weight · expert) + norm(dense).
        let residual = Residual::Normed { residual: &parallel.dense_output, weight: Some(&norms.after_dense) };
        let (mut experts, mut combine) = (&moe_views.out, Some(&moe_views.weights));
        if let Some(sums) = &parallel.sums {
            // The ranks' results are summed before their norms.
            ops::moe_combine(self.enc, &MoeCombine::new(experts, &moe_views.weights, &parallel.experts_output))?;
            ops::all_reduce(self.enc, &AllReduce::new(sums, sums))?;
            (experts, combine) = (&parallel.experts_output, None);
        }
        let args = RmsNorm::new(experts, self.spec().norm_eps, &views.y).weight(Some(&norms.after_experts));
        Ok(ops::rms_norm(self.enc, &args.combine(combine).residual(residual))?)
    }

    /// y = Σ weight · expert; added to y if a dense branch has written it.
    fn combine(&mut self, x: &Tensor, own: &MoeViews, parallel: Option<&ParallelWeights>) -> Result<()> {
        let views = self.views;
        let args = MoeCombine::new(&own.out, &own.weights, &views.y).added(parallel.map(|_| &views.y));
        let (Some(ParallelWeights::Gated(gate)), Some(shared)) = (parallel, &views.shared_router) else {
            return Ok(ops::moe_combine(self.enc, &args)?);
        };
        // The weight of a single expert is the sigmoid of its logit.
        self.linear(x, gate, &shared.logits)?;
        let route = MoeRoute::new(&shared.logits, &shared.ids, &shared.weights).scores(ExpertScores::Sigmoid);
        ops::moe_route(self.enc, &route.normalise(false))?;
        Ok(ops::moe_combine(self.enc, &args.added_weights(Some(&shared.weights)))?)
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

    /// Selects the experts of each token.
    fn route(&mut self, x: &Tensor, moe: &MoeWeights, own: &MoeViews, spec: MoeSpec) -> Result<()> {
        self.biased_linear(x, &moe.router, &own.logits)?;
        let expert_scale = moe.router_scales.as_ref().map(|(_, factors)| factors);
        let RoutingSpec { scores, bias: _, groups, normalise, min_sum, epsilon, scale } = spec.routing;
        let args = MoeRoute::new(&own.logits, &own.ids, &own.weights)
            .scores(scores)
            .bias(moe.router_bias.as_ref())
            .groups(groups)
            .expert_scale(expert_scale)
            .normalise(normalise)
            .min_sum(min_sum)
            .epsilon(epsilon)
            .scale(scale);
        Ok(ops::moe_route(self.enc, &args)?)
    }

    /// The outputs of each token's experts, not weighted.
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

    /// Multiplies each row by its expert's matrix, and adds the expert's bias.
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
