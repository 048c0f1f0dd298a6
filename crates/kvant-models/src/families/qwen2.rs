//! Qwen 2 and 2.5: as Llama, with biases of queries, keys and values.

use super::{
    common::{ConfigJson, Kind, MAX_LAYERS, MAX_POSITIONS},
    family::{Family, PRE_NORM},
    rope::Scaling,
};
use crate::{Result, spec::DecoderSpec};

pub(super) static FAMILY: Family = Family {
    name: "qwen2",
    model_types: &["qwen2"],
    wrappers: &[],
    architectures: &[("Qwen2ForCausalLM", "qwen2")],
    describe,
    names: &[PRE_NORM],
    experts: &[],
};

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let mut attention = json.attention(&Scaling::parse(&json.text, 1e4)?)?;
    attention.qkv_bias = true;
    let dense = json.dense()?;
    let windows = windows(json, |l, max| l >= max)?;
    json.pre_norm(|l| {
        let mut attention = attention.clone();
        attention.window = windows[l];
        Ok((attention, dense.into()))
    })
}

/// The window of each layer, shared with Qwen 3 and models with experts. `layer_types` names the sliding layers.
/// Without it, `is_sliding` gets the layer and `max_window_layers`.
pub(super) fn windows(json: &ConfigJson, is_sliding: fn(usize, usize) -> bool) -> Result<Vec<Option<usize>>> {
    let text = &json.text;
    let count = json.layers()?;
    let width = window(json)?;
    let Some(kinds) = json.layer_types(count)? else {
        let max = text.count("max_window_layers", None, MAX_LAYERS)?;
        return Ok((0..count).map(|l| width.filter(|_| is_sliding(l, max))).collect());
    };
    if width.is_none() && kinds.contains(&Kind::Sliding) {
        let expected = "true, with a sliding_window, where layer_types has \"sliding_attention\"";
        let is_used = text.bool_or_null("use_sliding_window")? == Some(true);
        return Err(text.error("use_sliding_window", expected, is_used));
    }
    Ok(kinds.into_iter().map(|kind| width.filter(|_| kind == Kind::Sliding)).collect())
}

/// The width of the window. It has no effect without `use_sliding_window`.
pub(super) fn window(json: &ConfigJson) -> Result<Option<usize>> {
    let text = &json.text;
    let width = text.size_or_null("sliding_window", MAX_POSITIONS)?;
    let is_used = text.bool_or_null("use_sliding_window")? == Some(true);
    Ok(width.filter(|_| is_used))
}
