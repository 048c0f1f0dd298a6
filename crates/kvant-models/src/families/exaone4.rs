//! EXAONE 4: norms of the outputs of both halves, and of queries and keys. In models with a window, full layers have no
//! rotary embedding.

use serde_json::Value;

use super::{
    common::{ConfigJson, Kind, MAX_LAYERS, MAX_POSITIONS},
    family::{Family, PRE_NORM, SANDWICH},
    rope::Scaling,
};
use crate::{
    Result,
    spec::{DecoderSpec, QkNorm},
};

pub(super) static FAMILY: Family = Family {
    name: "exaone4",
    model_types: &["exaone4"],
    wrappers: &[],
    architectures: &[("Exaone4ForCausalLM", "exaone4")],
    describe,
    names: &[SANDWICH, PRE_NORM],
    experts: &[],
};

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    let mut attention = json.attention(&Scaling::parse(text, 1e4)?)?;
    attention.qk_norm = Some(QkNorm::Heads);
    let default = text.get("sliding_window").is_none().then_some(4096);
    let window = text.size_or_null("sliding_window", MAX_POSITIONS)?.or(default);
    let kinds = kinds(json, window.is_some())?;
    let windows = json.windows(&kinds, window)?;
    let dense = json.dense()?;
    let decoder = json.post_norm(|l| {
        let mut attention = attention.clone();
        attention.window = windows[l];
        if window.is_some() && kinds[l] == Kind::Full {
            attention.rope.stop();
            // YaRN's factor is part of the cosines and sines, which these layers do not use.
            attention.scale = (attention.head_dim as f64).powf(-0.5) as f32;
        }
        Ok((attention, dense.into()))
    })?;
    Ok(decoder)
}

/// The kinds in `layer_types`, or by `sliding_window_pattern`: either the interval of full layers or, as in MLX, a
/// repeated pattern of L for sliding and G for full layers.
fn kinds(json: &ConfigJson, has_window: bool) -> Result<Vec<Kind>> {
    const KEY: &str = "sliding_window_pattern";
    let text = &json.text;
    let count = json.layers()?;
    if let Some(kinds) = json.layer_types(count)? {
        return Ok(kinds);
    }
    if !has_window {
        return Ok(vec![Kind::Full; count]);
    }
    if let Some(Value::String(pattern)) = text.get(KEY) {
        let kind = |letter| match letter {
            'L' => Ok(Kind::Sliding),
            'G' => Ok(Kind::Full),
            _ => Err(text.error(KEY, "a number, or a text of L and G", format_args!("{pattern:?}"))),
        };
        let kinds: Vec<Kind> = pattern.chars().take(MAX_LAYERS).map(kind).collect::<Result<_>>()?;
        if kinds.is_empty() {
            return Err(text.error(KEY, "a number, or a text of L and G", "an empty text"));
        }
        return Ok(kinds.into_iter().cycle().take(count).collect());
    }
    let interval = text.size(KEY, Some(4), MAX_LAYERS)?;
    Ok((1..=count).map(|l| if l.is_multiple_of(interval) { Kind::Full } else { Kind::Sliding }).collect())
}
