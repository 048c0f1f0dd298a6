//! OLMo 2 and 3: norms of the outputs of both halves, and of queries and keys over all heads. OLMo 3 has three sliding
//! layers per full one, and scales the rotary embedding of full layers.

use super::{
    common::{ConfigJson, Kind, MAX_POSITIONS},
    family::{Family, PRE_NORM, SANDWICH},
    rope::{Scaling, theta_of},
};
use crate::{
    Result,
    spec::{DecoderSpec, QkNorm},
};

pub(super) static FAMILY: Family = Family {
    name: "olmo2",
    model_types: &["olmo2", "olmo3"],
    wrappers: &[],
    architectures: &[("Olmo2ForCausalLM", "olmo2"), ("Olmo3ForCausalLM", "olmo3")],
    describe,
    names: &[SANDWICH, PRE_NORM],
    experts: &[],
};

/// Without `layer_types`, every fourth layer of OLMo 3 is full.
const PATTERN: usize = 4;
const THETA: f64 = 5e5;

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    let count = json.layers()?;
    let is_3 = json.model_type == "olmo3";
    let kinds = if is_3 { kinds(json, count)? } else { vec![Kind::Full; count] };
    let [sliding, full] = if is_3 { scalings(json)? } else { [Scaling::parse(text, 1e4)?; 2] };
    let default = text.get("sliding_window").is_none().then_some(4096);
    let windows = json.windows(&kinds, text.size_or_null("sliding_window", MAX_POSITIONS)?.or(default))?;
    let dense = json.dense()?;
    let decoder = json.post_norm(|l| {
        let mut attention = json.attention(if kinds[l] == Kind::Full { &full } else { &sliding })?;
        attention.window = windows[l];
        attention.qk_norm = Some(QkNorm::Rows);
        (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
        Ok((attention, dense.into()))
    })?;
    Ok(decoder)
}

fn kinds(json: &ConfigJson, count: usize) -> Result<Vec<Kind>> {
    let kind = |l: usize| if l.is_multiple_of(PATTERN) { Kind::Full } else { Kind::Sliding };
    Ok(json.layer_types(count)?.unwrap_or_else(|| (1..=count).map(kind).collect()))
}

/// The rotary embeddings of OLMo 3's sliding and full layers. `rope_theta` is the base of full ones.
fn scalings(json: &ConfigJson) -> Result<[Scaling; 2]> {
    let text = &json.text;
    let theta = theta_of(text, Some(THETA))?;
    let both = Scaling::of_kinds(text, [THETA, theta])?;
    // For sliding layers, transformers ignores the key and MLX reads it: any other number is ambiguous.
    if theta != THETA && both[0].theta() == THETA {
        return Err(text.error("rope_theta", format_args!("{THETA}, or in rope_parameters by layer type"), theta));
    }
    Ok(both)
}
