//! SmolLM 3: as Llama, without a rotary embedding in some layers.

use super::{
    common::{ConfigJson, Kind, MAX_LAYERS, MAX_POSITIONS},
    family::{Family, PRE_NORM},
    rope::Scaling,
};
use crate::{Result, spec::DecoderSpec};

pub(super) static FAMILY: Family = Family {
    name: "smollm3",
    model_types: &["smollm3"],
    wrappers: &[],
    architectures: &[("SmolLM3ForCausalLM", "smollm3")],
    describe,
    names: &[PRE_NORM],
    experts: &[],
};

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    let count = json.layers()?;
    let mut attention = json.attention(&Scaling::parse(text, 2e6)?)?;
    (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
    let mut dense = json.dense()?;
    dense.biases = text.bool_or_null("mlp_bias")?.unwrap_or(false);
    let rotates = rotating_layers(json, count)?;
    let windows = windows(json, &rotates)?;
    let mut decoder = json.pre_norm(|l| {
        let mut attention = attention.clone();
        attention.window = windows[l];
        if !rotates[l] {
            attention.rope.stop();
            // YaRN's factor is part of the cosines and sines, which these layers do not use.
            attention.scale = (attention.head_dim as f64).powf(-0.5) as f32;
        }
        Ok((attention, dense.into()))
    })?;
    decoder.output = json.output(true)?;
    Ok(decoder)
}

/// The layers with a rotary embedding: `no_rope_layers` has a 1 for each of them.
fn rotating_layers(json: &ConfigJson, count: usize) -> Result<Vec<bool>> {
    const KEY: &str = "no_rope_layers";
    let text = &json.text;
    if text.get(KEY).is_none_or(serde_json::Value::is_null) {
        let interval = text.size("no_rope_layer_interval", Some(4), MAX_LAYERS)?;
        return Ok((1..=count).map(|l| !l.is_multiple_of(interval)).collect());
    }
    let marks = text.indices(KEY, 2)?;
    if marks.len() != count {
        return Err(text.error(KEY, format_args!("{count} numbers, like num_hidden_layers"), marks.len()));
    }
    Ok(marks.into_iter().map(|mark| mark == 1).collect())
}

/// The window of each layer. Without `layer_types`, the layers without a rotary embedding have it.
fn windows(json: &ConfigJson, rotates: &[bool]) -> Result<Vec<Option<usize>>> {
    let text = &json.text;
    let is_used = text.bool_or_null("use_sliding_window")? == Some(true);
    let window = text.size_or_null("sliding_window", MAX_POSITIONS)?.filter(|_| is_used);
    let kind = |rotates: &bool| if *rotates || window.is_none() { Kind::Full } else { Kind::Sliding };
    let kinds = json.layer_types(rotates.len())?.unwrap_or_else(|| rotates.iter().map(kind).collect());
    json.windows(&kinds, window)
}
