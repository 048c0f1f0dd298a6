//! The second half of a block: a gated MLP, a mixture of experts, or both in parallel.

use kvant::{
    Tensor,
    ops::{self, Activation, AddBias, Columns, Experts, Gate, Linear, MoeCombine, MoeRoute, Residual, RmsNorm},
};

use super::{
    Pass,
    workspace::{DenseViews, MoeViews},
};
use crate::{
    Result,
    spec::MoeSpec,
    weights::{DenseWeights, GateUp, MoeWeights, ParallelNorms, Projection},
};

impl Pass<'_> {
    /// y = feed_forward(x), where x = norm(h).
    pub(super) fn feed_forward(&mut self, l: usize) -> Result<()> {
        let own = &self.views.blocks[l];
        let spec = &self.network.spec().blocks[l].feed_forward;
        let weights = &self.network.weights.blocks[l].feed_forward;
        if let (Some(dense), Some(views), Some(spec)) = (&weights.dense, &own.dense, spec.dense()) {
            self.dense(dense, views, spec.activation)?;
        }
        let (Some(moe), Some(views), Some(spec)) = (&weights.moe, &own.moe, spec.moe()) else { return Ok(()) };
        match &weights.parallel {
            None => {
                self.route(moe, views, spec)?;
                self.experts(moe, views, spec)
            }
            Some(norms) => self.in_parallel(moe, views, spec, norms),
        }
    }

    /// y = norm₁(y) + norm₂(experts(norm₃(h))).
    fn in_parallel(&mut self, moe: &MoeWeights, own: &MoeViews, spec: MoeSpec, norms: &ParallelNorms) -> Result<()> {
        let views = self.views;
        self.norm(&views.y, Some(&norms.after_dense), &views.y1)?;
        if moe.router_scales.is_some() {
            self.route(moe, own, spec)?;
            self.norm(&views.h, Some(&norms.before_experts), &views.x)?;
        } else {
            self.norm(&views.h, Some(&norms.before_experts), &views.x)?;
            self.route(moe, own, spec)?;
        }
        self.experts(moe, own, spec)?;
        let args = RmsNorm::new(&views.y, self.network.spec().norm_eps, &views.y)
            .weight(Some(&norms.after_experts))
            .residual(Residual::After(&views.y1));
        Ok(ops::rms_norm(self.enc, &args)?)
    }

    /// y = mlp(x).
    fn dense(&mut self, weights: &DenseWeights, own: &DenseViews, activation: Activation) -> Result<()> {
        self.project(&weights.gate_up, own.gate_up.as_ref(), &[&own.gate, &own.up])?;
        self.gate(Columns::from(&own.gate), Columns::from(&own.up), activation, &own.gate)?;
        self.linear(&own.gate, &weights.down, &self.views.y)
    }

    /// Chooses the experts of each token. A router with a norm of its own reads h, and overwrites x.
    fn route(&mut self, moe: &MoeWeights, own: &MoeViews, spec: MoeSpec) -> Result<()> {
        let views = self.views;
        if let Some((weight, _)) = &moe.router_scales {
            let decoder = self.network.spec();
            let args = RmsNorm::new(&views.h, decoder.norm_eps, &views.x)
                .weight(Some(weight))
                .scale((decoder.hidden_size as f32).sqrt().recip());
            ops::rms_norm(self.enc, &args)?;
        }
        self.biased_linear(&views.x, &moe.router, &own.logits)?;
        let expert_scale = moe.router_scales.as_ref().map(|(_, factors)| factors);
        let args =
            MoeRoute::new(&own.logits, &own.ids, &own.weights).expert_scale(expert_scale).normalise(spec.normalise);
        Ok(ops::moe_route(self.enc, &args)?)
    }

    /// y = Σ over a token's experts of weight · expert(x).
    fn experts(&mut self, moe: &MoeWeights, own: &MoeViews, spec: MoeSpec) -> Result<()> {
        let views = self.views;
        match &moe.gate_up {
            GateUp::Fused(both) => {
                self.expert_linear(&views.x, both, own, false, &own.gate_up)?;
                let up = Columns { tensor: &own.gate_up, start: spec.width };
                self.gate(Columns::from(&own.gate_up), up, spec.activation, &own.gate)?;
            }
            GateUp::Split { gate, up } => {
                self.expert_linear(&views.x, gate, own, false, &own.gate)?;
                self.expert_linear(&views.x, up, own, false, &own.up)?;
                self.gate(Columns::from(&own.gate), Columns::from(&own.up), spec.activation, &own.gate)?;
            }
        }
        self.expert_linear(&own.gate, &moe.down, own, true, &own.out)?;
        Ok(ops::moe_combine(self.enc, &MoeCombine::new(&own.out, &own.weights, &views.y))?)
    }

    /// Multiplies each row by the matrix of its expert, and adds that expert's bias.
    fn expert_linear(
        &mut self,
        x: &Tensor,
        weights: &Projection,
        own: &MoeViews,
        expanded: bool,
        out: &Tensor,
    ) -> Result<()> {
        let experts = Some(Experts::new(&own.ids).expanded(expanded));
        ops::linear(self.enc, &Linear::new(x, weights.matrix.weight(), out).experts(experts))?;
        if let Some(bias) = &weights.bias {
            ops::add_bias(self.enc, &AddBias::new(out, bias, out).experts(Some(&own.ids)))?;
        }
        Ok(())
    }

    pub(super) fn gate(&mut self, gate: Columns, up: Columns, activation: Activation, out: &Tensor) -> Result<()> {
        Ok(ops::gate(self.enc, &Gate::new(gate, up, activation, out))?)
    }
}
