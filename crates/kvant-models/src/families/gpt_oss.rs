//! gpt-oss: experts with biases and a clamped activation, sinks, and a window in every other layer.

use kvant::ops::Activation;
use serde_json::{Value, json};

use super::{
    ExpertLayout, ExpertNames, Family, Names, PRE_NORM,
    common::{ConfigJson, Kind, MAX_EXPERTS, MAX_POSITIONS, MAX_WIDTH},
    rope::{Scaling, theta_of},
};
use crate::{
    Result,
    config::fields::Fields,
    source::Part,
    spec::{DecoderSpec, FeedForwardSpec, MoeSpec, RouterSpec},
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
    let mut attention = json.attention(Some(64), &scaling(text)?)?;
    (attention.qkv_bias, attention.output_bias) = json.attention_bias(true)?;
    attention.sinks = true;
    let window = if kinds.contains(&Kind::Sliding) { Some(window(text)?) } else { None };
    let moe = FeedForwardSpec::Moe(moe(text)?);
    let mut decoder = json.pre_norm(|l| {
        let mut attention = attention.clone();
        attention.window = window.filter(|_| kinds[l] == Kind::Sliding);
        Ok((attention, moe))
    })?;
    if text.get("rms_norm_eps").is_none() {
        decoder.norm_eps = 1e-5;
    }
    Ok(decoder)
}

fn moe(text: &Fields) -> Result<MoeSpec> {
    // Transformers knows the number of experts by two names.
    let key = if text.get("num_local_experts").is_none() { "num_experts" } else { "num_local_experts" };
    let experts = text.size(key, Some(128), MAX_EXPERTS)?;
    Ok(MoeSpec {
        experts,
        top_k: text.size("num_experts_per_tok", Some(4), experts)?,
        width: text.size("intermediate_size", Some(2880), MAX_WIDTH)?,
        activation: Activation::ClampedSwish,
        normalise: true,
        biases: true,
        router: RouterSpec::Plain,
    })
}

/// The activation function has these constants.
fn check_activation(json: &ConfigJson) -> Result<()> {
    let text = &json.text;
    if json.activation("hidden_act", "silu")? != Activation::Silu {
        return Err(text.error("hidden_act", "\"silu\"", text.get("hidden_act").unwrap_or(&Value::Null)));
    }
    text.float("swiglu_limit", Some(7.0), "absent or 7", |limit| limit == 7.0)?;
    text.float("swiglu_alpha", Some(1.702), "absent or 1.702", |alpha| alpha == 1.702)?;
    Ok(())
}

fn window(text: &Fields) -> Result<usize> {
    let default = text.get("sliding_window").is_none().then_some(128);
    text.size("sliding_window", default, MAX_POSITIONS)
}

/// A file without a scaling means that of the released models.
fn scaling(text: &Fields) -> Result<Scaling> {
    if text.first_of(&["rope_scaling", "rope_parameters"])?.is_some() {
        return Scaling::parse(text, THETA);
    }
    let released = json!({
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
        "original_max_position_embeddings": 4096,
    });
    Scaling::of(&Fields::new(&released)?, text, theta_of(text, Some(THETA))?)
}
