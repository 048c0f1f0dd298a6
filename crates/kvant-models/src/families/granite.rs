//! Granite 3 and 4, dense: as Llama, with factors of the embedding, the scores, the outputs of both halves and the
//! logits. Granite 4 is the hybrid architecture with only attention layers and no experts.

use serde_json::Value;

use super::{
    common::{ConfigJson, MAX_EXPERTS, MAX_WIDTH},
    family::{ExpertNames, Family, PRE_NORM},
    rope::Scaling,
};
use crate::{Result, source::Part, spec::DecoderSpec};

pub(super) static FAMILY: Family = Family {
    name: "granite",
    model_types: &["granite"],
    wrappers: &[],
    architectures: &[("GraniteForCausalLM", "granite")],
    describe,
    names: &[PRE_NORM],
    experts: &[],
};

pub(super) static HYBRID: Family = Family {
    name: "granite_hybrid",
    model_types: &["granitemoehybrid"],
    wrappers: &[],
    architectures: &[("GraniteMoeHybridForCausalLM", "granitemoehybrid")],
    describe,
    names: &[PRE_NORM],
    // The names of the MLP: Hugging Face fuses its matrices, MLX splits them.
    experts: &[
        ExpertNames::plain(&[
            (Part::GateUp, "shared_mlp.input_linear.weight"),
            (Part::Down, "shared_mlp.output_linear.weight"),
        ]),
        ExpertNames::plain(&[(Part::Down, "mlp.down_proj.weight")]),
    ],
};

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let scaling = Scaling::parse(&json.text, 1e4)?;
    let mut attention = json.attention(&scaling)?;
    attention.scale = scaling.score_scale(json.multiplier("attention_multiplier")?);
    let mut dense = json.dense()?;
    if json.model_type == "granitemoehybrid" {
        check_hybrid(json)?;
        dense.width = json.text.size("shared_intermediate_size", None, MAX_WIDTH)?;
        if !is_rotated(json)? {
            attention.rope.stop();
            // YaRN's factor is part of the cosines and sines, which these layers do not use.
            attention.scale = json.multiplier("attention_multiplier")? as f32;
        }
    } else {
        dense.biases = json.text.bool_or_null("mlp_bias")?.unwrap_or(false);
    }
    (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
    let mut decoder = json.pre_norm(|_| Ok((attention.clone(), dense.into())))?;
    decoder.embedding_scale = json.multiplier("embedding_multiplier")? as f32;
    decoder.residual_scale = json.multiplier("residual_multiplier")? as f32;
    decoder.logit_scale = (1.0 / json.multiplier("logits_scaling")?) as f32;
    Ok(decoder)
}

/// Rejects experts, and layers other than attention.
fn check_hybrid(json: &ConfigJson) -> Result<()> {
    let text = &json.text;
    let experts = text.count("num_local_experts", Some(8), MAX_EXPERTS)?;
    if experts > 0 {
        return Err(text.error("num_local_experts", "0", experts));
    }
    let expected = "an array with \"attention\" for every layer";
    let Some(Value::Array(kinds)) = text.get("layer_types") else {
        return Err(text.missing("layer_types", expected));
    };
    let other = kinds.iter().find(|kind| !matches!(kind.as_str(), Some("attention" | "full_attention")));
    match other {
        Some(other) => Err(text.error("layer_types", expected, other)),
        None if kinds.len() != json.layers()? => Err(text.error("layer_types", expected, kinds.len())),
        None => Ok(()),
    }
}

/// Without the key, transformers rotates nothing and MLX everything: the file is ambiguous.
fn is_rotated(json: &ConfigJson) -> Result<bool> {
    const KEY: &str = "position_embedding_type";
    match json.text.string(KEY)? {
        Some("rope") => Ok(true),
        Some("nope") => Ok(false),
        other => Err(json.text.error(KEY, "\"rope\" or \"nope\"", format_args!("{:?}", other.unwrap_or_default()))),
    }
}
