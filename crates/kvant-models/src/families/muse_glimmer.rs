//! Muse Glimmer, text: norms of 1 + w around both halves, a norm of the embedding, a gate of the attention's output,
//! and norms of queries and keys without weights. One layer in four is full and has no rotary embedding.

use serde_json::Value;

use super::{
    common::{ConfigJson, Kind, MAX_POSITIONS},
    family::{Family, Names, PRE_NORM, SANDWICH},
    rope::Scaling,
};
use crate::{
    Result,
    source::Part,
    spec::{DecoderSpec, QkNorm},
};

pub(super) static FAMILY: Family = Family {
    name: "muse_glimmer",
    // MLX's files have the text model's keys with the type of the whole model.
    model_types: &["muse_glimmer_text", "muse_glimmer"],
    wrappers: &[("muse_glimmer", "muse_glimmer_text")],
    architectures: &[("MuseGlimmerForConditionalGeneration", "muse_glimmer")],
    describe,
    names: &[GATE, SANDWICH, PRE_NORM],
    experts: &[],
};

const GATE: Names = &[(Part::AttentionGate, "self_attn.gate_proj.weight")];

/// One layer in `PATTERN` is full: the last one.
const PATTERN: usize = 4;

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    let count = json.layers()?;
    let scaling = Scaling::parse(text, 1e4)?;
    let mut attention = json.attention(&scaling)?;
    // A factor of the queries equals a factor of their scores.
    let positive = |factor: f64| factor > 0.0 && factor <= 1e6;
    let factor = text.float("qk_scale_factor", None, "above 0, at most 1e6", positive)?;
    let plain = factor * (attention.head_dim as f64).powf(-0.5);
    attention.scale = scaling.score_scale(plain);
    attention.qk_norm = Some(QkNorm::Unweighted);
    attention.output_gate = true;
    (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
    let windows = json.windows(&kinds(json, count)?, text.size_or_null("sliding_window", MAX_POSITIONS)?)?;
    let rotates = rotating_layers(json, count, scaling.theta())?;
    let mut dense = json.dense()?;
    dense.activation = json.activation("hidden_activation", "silu")?;
    let mut decoder = json.pre_norm(|l| {
        let mut attention = attention.clone();
        attention.window = windows[l];
        if !rotates[l] {
            attention.rope.stop();
            // YaRN's factor is part of the cosines and sines, which these layers do not use.
            attention.scale = plain as f32;
        }
        Ok((attention, dense.into()))
    })?;
    decoder.blocks.iter_mut().for_each(|block| block.post_norms = true);
    decoder.embedding_norm = true;
    decoder.post_norm_eps = json.norm_eps("post_norm_eps")?;
    decoder.norm_offset = 1.0;
    decoder.logit_scale = json.multiplier("output_multiplier")? as f32;
    decoder.final_softcap = json.softcap("final_logit_softcapping")?;
    Ok(decoder)
}

/// Whether a layer is the last of a pattern, which is full and has no rotary embedding.
fn ends_pattern(l: usize, count: usize) -> bool {
    (count - 1 - l).is_multiple_of(PATTERN)
}

fn kinds(json: &ConfigJson, count: usize) -> Result<Vec<Kind>> {
    let kind = |l| if ends_pattern(l, count) { Kind::Full } else { Kind::Sliding };
    Ok(json.layer_types(count)?.unwrap_or_else(|| (0..count).map(kind).collect()))
}

/// The layers with a rotary embedding: `layer_rope_theta` is 0 for the others. Any other value must equal `rope_theta`,
/// the only base that transformers and MLX use.
fn rotating_layers(json: &ConfigJson, count: usize, theta: f64) -> Result<Vec<bool>> {
    const KEY: &str = "layer_rope_theta";
    let text = &json.text;
    let thetas = match text.get(KEY) {
        None | Some(Value::Null) => return Ok((0..count).map(|l| !ends_pattern(l, count)).collect()),
        Some(Value::Array(thetas)) => thetas,
        Some(other) => return Err(text.error(KEY, "an array", other)),
    };
    if thetas.len() != count {
        return Err(text.error(KEY, format_args!("{count} numbers, like num_hidden_layers"), thetas.len()));
    }
    let rotates = |value: &Value| match value.as_f64() {
        Some(0.0) => Ok(false),
        Some(own) if own == theta => Ok(true),
        _ => Err(text.error(KEY, format_args!("numbers that are 0 or rope_theta, {theta}"), value)),
    };
    thetas.iter().map(rotates).collect()
}
