//! gpt-oss: experts with biases and a clamped activation, sinks, and a window in every other layer.

use kvant::ops::Activation;
use serde_json::Value;

use super::{
    common::{ConfigJson, Kind, MAX_EXPERTS, MAX_POSITIONS, MAX_WIDTH},
    family::{ExpertLayout, ExpertNames, Family, Names, PRE_NORM},
    rope::Scaling,
};
use crate::{
    Result,
    config::fields::Fields,
    source::Part,
    spec::{DecoderSpec, FeedForwardSpec, MoeSpec, RouterSpec, RoutingSpec},
};

pub(super) static FAMILY: Family = Family {
    name: "gpt_oss",
    model_types: &["gpt_oss"],
    wrappers: &[],
    architectures: &[("GptOssForCausalLM", "gpt_oss")],
    describe,
    names: &[OWN, PRE_NORM],
    experts: &[
        ExpertNames {
            names: &[
                (Part::ExpertGateUp, "mlp.experts.gate_up_proj_blocks"),
                (Part::ExpertDown, "mlp.experts.down_proj_blocks"),
            ],
            layout: ExpertLayout::InterleavedMxfp4,
        },
        ExpertNames {
            names: &[(Part::ExpertGateUp, "mlp.experts.gate_up_proj"), (Part::ExpertDown, "mlp.experts.down_proj")],
            layout: ExpertLayout::InterleavedTransposed,
        },
        // MLX.
        ExpertNames::plain(&[
            (Part::ExpertGate, "mlp.experts.gate_proj.weight"),
            (Part::ExpertUp, "mlp.experts.up_proj.weight"),
            (Part::ExpertDown, "mlp.experts.down_proj.weight"),
        ]),
    ],
};

const OWN: Names = &[(Part::Router, "mlp.router.weight"), (Part::Sinks, "self_attn.sinks")];
const THETA: f64 = 150_000.0;

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    check_activation(json)?;
    let kinds = match json.layer_types(json.layers()?)? {
        Some(kinds) => kinds,
        None => [Kind::Sliding, Kind::Full].into_iter().cycle().take(json.layers()?).collect(),
    };
    let mut attention = json.attention(&Scaling::parse(text, THETA)?)?;
    (attention.qkv_bias, attention.output_bias) = json.attention_bias(true)?;
    attention.sinks = true;
    let is_sliding = kinds.contains(&Kind::Sliding);
    let window = if is_sliding { Some(text.size("sliding_window", None, MAX_POSITIONS)?) } else { None };
    let moe = FeedForwardSpec::Moe(moe(text)?);
    json.pre_norm(|l| {
        let mut attention = attention.clone();
        attention.window = window.filter(|_| kinds[l] == Kind::Sliding);
        Ok((attention, moe))
    })
}

fn moe(text: &Fields) -> Result<MoeSpec> {
    let experts = text.size("num_local_experts", None, MAX_EXPERTS)?;
    Ok(MoeSpec {
        experts,
        top_k: text.size("num_experts_per_tok", None, experts)?,
        width: text.size("intermediate_size", None, MAX_WIDTH)?,
        activation: Activation::ClampedSwish,
        routing: RoutingSpec::softmax(true),
        biases: true,
        router: RouterSpec::Plain,
    })
}

/// Checks the constants of the activation function.
fn check_activation(json: &ConfigJson) -> Result<()> {
    let text = &json.text;
    if json.activation("hidden_act", "silu")? != Activation::Silu {
        return Err(text.error("hidden_act", "\"silu\"", text.get("hidden_act").unwrap_or(&Value::Null)));
    }
    text.float("swiglu_limit", Some(7.0), "absent or 7", |limit| limit == 7.0)?;
    text.float("swiglu_alpha", Some(1.702), "absent or 1.702", |alpha| alpha == 1.702)?;
    Ok(())
}
