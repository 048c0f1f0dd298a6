//! Qwen3-Next and Qwen 3.5 (also 3.6 and 3.8), dense and with experts: three of four layers are gated delta nets, the
//! others are attention with a gate of its output. Norms multiply by 1 + w, except those of the delta nets.

use kvant::ops::Activation;

use super::{
    common::{ConfigJson, MAX_HEADS, MAX_LAYERS, MAX_WIDTH},
    experts::{MLP_EXPERTS, QwenExperts, ROUTER},
    family::{ExpertNames, Family, Names, PRE_NORM},
    qwen2_moe::SHARED_EXPERT,
    rope::Scaling,
};
use crate::{
    Result,
    source::Part,
    spec::{DecoderSpec, DeltaNetSpec, DenseSpec, FeedForwardSpec, MixerSpec, ParallelSum, QkNorm},
};

pub(super) static NEXT: Family = Family {
    name: "qwen3_next",
    model_types: &["qwen3_next"],
    wrappers: &[],
    architectures: &[("Qwen3NextForCausalLM", "qwen3_next")],
    describe,
    names: &[JOINT_DELTA_NET, DELTA_NET, GATED_ATTENTION, SHARED_EXPERT, ROUTER, PRE_NORM],
    experts: MLP_EXPERTS,
};

pub(super) static FAMILY: Family = Family {
    name: "qwen3_5",
    model_types: &["qwen3_5_text", "qwen3_5_moe_text"],
    wrappers: &[("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text")],
    architectures: &[
        ("Qwen3_5ForCausalLM", "qwen3_5_text"),
        ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    ],
    describe,
    names: &[SEPARATE_DELTA_NET, DELTA_NET, GATED_ATTENTION, SHARED_EXPERT, ROUTER, PRE_NORM],
    experts: &[JOINED_EXPERTS, MLP_EXPERTS[0], MLP_EXPERTS[1]],
};

const DELTA_NET: Names = &[
    (Part::ConvTaps, "linear_attn.conv1d.weight"),
    (Part::DeltaRate, "linear_attn.A_log"),
    (Part::DeltaABias, "linear_attn.dt_bias"),
    (Part::DeltaNorm, "linear_attn.norm.weight"),
    (Part::DeltaOutput, "linear_attn.out_proj.weight"),
];
const JOINT_DELTA_NET: Names =
    &[(Part::DeltaJoint, "linear_attn.in_proj_qkvz.weight"), (Part::DeltaGatesJoint, "linear_attn.in_proj_ba.weight")];
const SEPARATE_DELTA_NET: Names = &[
    (Part::DeltaQkv, "linear_attn.in_proj_qkv.weight"),
    (Part::DeltaZ, "linear_attn.in_proj_z.weight"),
    (Part::DeltaB, "linear_attn.in_proj_b.weight"),
    (Part::DeltaA, "linear_attn.in_proj_a.weight"),
];
const GATED_ATTENTION: Names = &[(Part::QueryGateJoint, "self_attn.q_proj.weight")];
const JOINED_EXPERTS: ExpertNames = ExpertNames::plain(&[
    (Part::ExpertGateUp, "mlp.experts.gate_up_proj"),
    (Part::ExpertDown, "mlp.experts.down_proj"),
]);

/// One layer in `INTERVAL` is attention if the file does not specify the layers.
const INTERVAL: usize = 4;

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    json.refuse_true(&["attention_bias"])?;
    let mut attention = json.attention(&Scaling::parse_partial(text, 1e4, 1.0)?)?;
    attention.qk_norm = Some(QkNorm::Heads);
    attention.output_gate = true;
    let count = json.layers()?;
    let (net, is_net) = (delta_net(json)?, delta_layers(json, count)?);
    let experts = experts(json, count)?;
    let mut decoder = json.pre_norm(|l| {
        let mixer = if is_net[l] { MixerSpec::DeltaNet(net) } else { attention.clone().into() };
        let feed_forward = match &experts {
            Some((experts, shared)) if experts.has(l) => {
                FeedForwardSpec::Parallel(*shared, experts.spec, ParallelSum::Gated)
            }
            _ => json.dense()?.into(),
        };
        Ok((mixer, feed_forward))
    })?;
    (decoder.norm_offset, decoder.final_norm_offset) = (1.0, 1.0);
    Ok(decoder)
}

fn delta_net(json: &ConfigJson) -> Result<DeltaNetSpec> {
    let text = &json.text;
    if json.activation("hidden_act", "silu")? != Activation::Silu {
        return Err(text.error("hidden_act", "\"silu\" with linear attention", "another"));
    }
    let (heads, dim) = (|key| text.size(key, None, MAX_HEADS), |key| text.size(key, None, MAX_WIDTH));
    Ok(DeltaNetSpec {
        key_heads: heads("linear_num_key_heads")?,
        value_heads: heads("linear_num_value_heads")?,
        key_dim: dim("linear_key_head_dim")?,
        value_dim: dim("linear_value_head_dim")?,
        taps: text.size("linear_conv_kernel_dim", None, MAX_WIDTH)?,
        tiled: false,
    })
}

/// Whether each layer is a delta net: by `layer_types`, or all but every `full_attention_interval`-th.
fn delta_layers(json: &ConfigJson, count: usize) -> Result<Vec<bool>> {
    if let Some(kinds) = json.layer_kinds(count, &[("linear_attention", true), ("full_attention", false)])? {
        return Ok(kinds);
    }
    let interval = json.text.size_or_null("full_attention_interval", MAX_LAYERS)?.unwrap_or(INTERVAL);
    Ok((0..count).map(|l| !(l + 1).is_multiple_of(interval)).collect())
}

/// The experts, and the shared one, of models that have any.
fn experts(json: &ConfigJson, count: usize) -> Result<Option<(QwenExperts, DenseSpec)>> {
    let text = &json.text;
    let experts = match json.model_type.as_str() {
        "qwen3_5_moe_text" => QwenExperts::in_all_layers(json)?,
        "qwen3_next" => QwenExperts::parse(json, count)?,
        _ => return Ok(None),
    };
    let shared = DenseSpec {
        width: text.size("shared_expert_intermediate_size", None, MAX_WIDTH)?,
        activation: experts.spec.activation,
        biases: false,
    };
    Ok(Some((experts, shared)))
}
