//! Names and keys shared by mixtures of experts.

use super::{
    common::{ConfigJson, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH},
    family::{ExpertNames, Names},
};
use crate::{
    Result,
    source::Part,
    spec::{DenseSpec, FeedForwardSpec, MoeSpec, ParallelSum, RouterSpec, RoutingSpec},
};

/// A matrix per expert, or MLX's stacks.
pub(super) const MLP_EXPERTS: &[ExpertNames] = &[
    ExpertNames::plain(&[
        (Part::ExpertGate, "mlp.experts.{}.gate_proj.weight"),
        (Part::ExpertUp, "mlp.experts.{}.up_proj.weight"),
        (Part::ExpertDown, "mlp.experts.{}.down_proj.weight"),
    ]),
    // MLX.
    ExpertNames::plain(&[
        (Part::ExpertGate, "mlp.switch_mlp.gate_proj.weight"),
        (Part::ExpertUp, "mlp.switch_mlp.up_proj.weight"),
        (Part::ExpertDown, "mlp.switch_mlp.down_proj.weight"),
    ]),
];

pub(super) const ROUTER: Names = &[(Part::Router, "mlp.gate.weight")];

pub(super) const SHARED_EXPERTS: Names = &[
    (Part::SharedGate, "mlp.shared_experts.gate_proj.weight"),
    (Part::SharedUp, "mlp.shared_experts.up_proj.weight"),
    (Part::SharedDown, "mlp.shared_experts.down_proj.weight"),
];

/// Experts with shared ones, which form one MLP.
pub(super) fn beside_shared(moe: MoeSpec, shared: usize) -> FeedForwardSpec {
    if shared == 0 {
        return FeedForwardSpec::Moe(moe);
    }
    let dense = DenseSpec { width: shared * moe.width, activation: moe.activation, biases: false };
    FeedForwardSpec::Parallel(dense, moe, ParallelSum::Plain)
}

/// The experts of Qwen, which are equal in all layers, and the layers that have them.
pub(super) struct QwenExperts {
    pub spec: MoeSpec,
    /// One layer in `step` has experts.
    step: usize,
    /// Layers without experts.
    dense: Vec<usize>,
}

impl QwenExperts {
    pub(super) fn parse(json: &ConfigJson, layers: usize) -> Result<QwenExperts> {
        let text = &json.text;
        let mut spec = QwenExperts::in_all_layers(json)?.spec;
        spec.routing = RoutingSpec::softmax(text.bool_or_null("norm_topk_prob")?.unwrap_or(false));
        let dense = text.indices("mlp_only_layers", layers)?;
        Ok(QwenExperts { spec, step: text.size("decoder_sparse_step", None, MAX_LAYERS)?, dense })
    }

    /// As [`QwenExperts::parse`], for families whose layers all have experts, with weights that add up to 1.
    pub(super) fn in_all_layers(json: &ConfigJson) -> Result<QwenExperts> {
        let text = &json.text;
        let experts = text.size("num_experts", None, MAX_EXPERTS)?;
        let spec = MoeSpec {
            experts,
            top_k: text.size("num_experts_per_tok", None, experts)?,
            width: text.size("moe_intermediate_size", None, MAX_WIDTH)?,
            activation: json.activation("hidden_act", "silu")?,
            routing: RoutingSpec::softmax(true),
            biases: false,
            router: RouterSpec::Plain,
        };
        Ok(QwenExperts { spec, step: 1, dense: Vec::new() })
    }

    pub(super) fn has(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.step) && !self.dense.contains(&layer)
    }
}
