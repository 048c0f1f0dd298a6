//! Qwen 1.5 and 2 with experts, and a shared expert weighted by a sigmoid.

use super::{
    common::{ConfigJson, MAX_WIDTH},
    experts::{MLP_EXPERTS, QwenExperts, ROUTER},
    family::{Family, Names, PRE_NORM},
    qwen2,
    rope::Scaling,
};
use crate::{
    Result,
    source::Part,
    spec::{DecoderSpec, DenseSpec, FeedForwardSpec, ParallelSum},
};

pub(super) static FAMILY: Family = Family {
    name: "qwen2_moe",
    model_types: &["qwen2_moe"],
    wrappers: &[],
    architectures: &[("Qwen2MoeForCausalLM", "qwen2_moe")],
    describe,
    names: &[SHARED_EXPERT, ROUTER, PRE_NORM],
    experts: MLP_EXPERTS,
};

pub(super) const SHARED_EXPERT: Names = &[
    (Part::SharedGate, "mlp.shared_expert.gate_proj.weight"),
    (Part::SharedUp, "mlp.shared_expert.up_proj.weight"),
    (Part::SharedDown, "mlp.shared_expert.down_proj.weight"),
    (Part::SharedRouter, "mlp.shared_expert_gate.weight"),
];

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    let mut attention = json.attention(&Scaling::parse(text, 1e4)?)?;
    attention.qkv_bias = text.bool_or_null("qkv_bias")?.unwrap_or(true);
    let count = json.layers()?;
    let windows = qwen2::windows(json, |l, max| l % 2 == 0 && l < max)?;
    let experts = QwenExperts::parse(json, count)?;
    let shared = DenseSpec {
        width: text.size("shared_expert_intermediate_size", None, MAX_WIDTH)?,
        activation: experts.spec.activation,
        biases: false,
    };
    json.pre_norm(|l| {
        let mut attention = attention.clone();
        attention.window = windows[l];
        let feed_forward = if experts.has(l) {
            FeedForwardSpec::Parallel(shared, experts.spec, ParallelSum::Gated)
        } else {
            json.dense()?.into()
        };
        Ok((attention, feed_forward))
    })
}
