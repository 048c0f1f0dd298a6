//! The second block of a layer: a gated MLP, and in some models a parallel mixture of experts.

use kvant::{
    Tensor,
    ops::{self, Activation, Columns, Experts, Gate, Linear, MoeCombine, MoeRoute, Residual, RmsNorm},
};

use super::Pass;
use crate::{
    Result,
    weights::{GateUp, Matrix, MoeWeights},
    workspace::MoeViews,
};

impl Pass<'_> {
    /// y = mlp(norm(h)), or with experts y = norm1(mlp(norm(h))) + norm2(experts(norm(h))).
    pub(super) fn feedforward(&mut self, l: usize) -> Result<()> {
        let views = self.views;
        let layer = &self.model.weights.layers[l];
        self.norm(&views.h, Some(&layer.pre_feedforward_norm), &views.x)?;
        let own = &views.layers[l];
        self.project(&layer.gate_up, own.gate_up.as_ref(), &[&own.gate, &own.up])?;
        self.gelu_gate(Columns::from(&own.gate), Columns::from(&own.up), &own.gate)?;
        self.linear(&own.gate, &layer.down, &views.y)?;
        if let (Some(moe), Some(moe_views)) = (&layer.moe, &views.moe) {
            self.norm(&views.y, Some(&moe.post_norm_1), &views.y1)?;
            self.experts(moe, moe_views)?;
            // The sum of both branches, each with its own norm.
            ops::rms_norm(
                self.enc,
                &RmsNorm::new(&views.y, self.model.config.rms_norm_eps, &views.y)
                    .weight(Some(&moe.post_norm_2))
                    .residual(Residual::After(&views.y1)),
            )?;
        }
        Ok(())
    }

    /// y = Σ over a token's experts of weight · expert(norm(h)).
    fn experts(&mut self, moe: &MoeWeights, own: &MoeViews) -> Result<()> {
        let views = self.views;
        let config = &self.model.config;
        // The router reads the residual stream under a norm whose weight is the router's scale.
        ops::rms_norm(
            self.enc,
            &RmsNorm::new(&views.h, config.rms_norm_eps, &views.x)
                .weight(Some(&moe.router_scale))
                .scale((config.hidden_size as f32).sqrt().recip()),
        )?;
        self.linear(&views.x, &moe.router, &own.logits)?;
        let expert_scale = Some(&moe.expert_scale);
        let args = MoeRoute::new(&own.logits, &own.ids, &own.weights).expert_scale(expert_scale);
        ops::moe_route(self.enc, &args)?;

        self.norm(&views.h, Some(&moe.pre_norm_2), &views.x)?;
        match &moe.gate_up {
            GateUp::Fused(matrix) => {
                self.expert_linear(&views.x, matrix, false, &own.gate_up)?;
                let up = Columns { tensor: &own.gate_up, start: own.gate_up.shape()[1] / 2 };
                self.gelu_gate(Columns::from(&own.gate_up), up, &own.gate)?;
            }
            GateUp::Split { gate, up } => {
                self.expert_linear(&views.x, gate, false, &own.gate)?;
                self.expert_linear(&views.x, up, false, &own.up)?;
                self.gelu_gate(Columns::from(&own.gate), Columns::from(&own.up), &own.gate)?;
            }
        }
        self.expert_linear(&own.gate, &moe.down, true, &own.out)?;
        ops::moe_combine(self.enc, &MoeCombine::new(&own.out, &own.weights, &views.y))?;
        Ok(())
    }

    /// Multiplies each row by the matrix of its expert.
    fn expert_linear(&mut self, x: &Tensor, matrix: &Matrix, expanded: bool, out: &Tensor) -> Result<()> {
        let ids = &self.views.moe.as_ref().expect("asked only with experts").ids;
        let experts = Some(Experts::new(ids).expanded(expanded));
        let args = Linear::new(x, matrix.weight(), out).experts(experts);
        Ok(ops::linear(self.enc, &args)?)
    }

    pub(super) fn gelu_gate(&mut self, gate: Columns, up: Columns, out: &Tensor) -> Result<()> {
        Ok(ops::gate(self.enc, &Gate::new(gate, up, Activation::GeluTanh, out))?)
    }
}
