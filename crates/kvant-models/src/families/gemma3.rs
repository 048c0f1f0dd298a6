//! Gemma 3, text: norms of 1 + w before and after both halves, five sliding layers per full one, and a rotary base for
//! each kind.

use super::{
    common::{ConfigJson, Kind, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH},
    family::{Family, PRE_NORM, SANDWICH},
    rope::Scaling,
};
use crate::{
    Result,
    spec::{BlockSpec, DecoderSpec, DenseSpec, FeedForwardSpec, QkNorm},
};

pub(super) static FAMILY: Family = Family {
    name: "gemma3",
    model_types: &["gemma3_text"],
    wrappers: &[("gemma3", "gemma3_text")],
    architectures: &[("Gemma3ForCausalLM", "gemma3_text"), ("Gemma3ForConditionalGeneration", "gemma3")],
    describe,
    names: &[SANDWICH, PRE_NORM],
    experts: &[],
};

/// Without `layer_types`, every sixth layer is full.
const PATTERN: usize = 6;

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    json.refuse_true(&["use_bidirectional_attention"])?;
    let text = &json.text;
    let hidden_size = text.size("hidden_size", None, MAX_WIDTH)?;
    let count = json.layers()?;
    let kinds = kinds(json, count)?;
    let theta = |key: &str| text.float(key, None, "a number from 1 to 1e12", |theta| (1.0..=1e12).contains(&theta));
    let [sliding, full] = Scaling::of_kinds(text, [theta("rope_local_base_freq")?, theta("rope_theta")?])?;
    let is_sliding = kinds.contains(&Kind::Sliding);
    let window = if is_sliding { Some(text.size("sliding_window", None, MAX_POSITIONS)?) } else { None };
    let width = text.size("intermediate_size", None, MAX_WIDTH)?;
    let activation = json.activation("hidden_activation", "gelu_pytorch_tanh")?;
    let positive = |scalar: f64| scalar > 0.0 && scalar <= 1e6;
    let scalar = text.float("query_pre_attn_scalar", None, "above 0, at most 1e6", positive)?;
    let block = |kind: Kind| {
        let scaling = if kind == Kind::Full { &full } else { &sliding };
        let mut attention = json.attention(scaling)?;
        attention.scale = scaling.score_scale(scalar.powf(-0.5));
        attention.window = window.filter(|_| kind == Kind::Sliding);
        attention.qk_norm = Some(QkNorm::Heads);
        (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
        let feed_forward = FeedForwardSpec::Dense(DenseSpec { width, activation, biases: false });
        Ok(BlockSpec { mixer: attention.into(), feed_forward, pre_norms: true, post_norms: true, scalar: false })
    };
    Ok(DecoderSpec {
        hidden_size,
        vocab_size: json.vocab_size()?,
        embedding_scale: (hidden_size as f32).sqrt(),
        embedding_norm: false,
        per_layer_input: None,
        blocks: kinds.into_iter().map(block).collect::<Result<_>>()?,
        norm_eps: json.norm_eps("rms_norm_eps")?,
        post_norm_eps: json.norm_eps("rms_norm_eps")?,
        norm_offset: 1.0,
        final_norm_offset: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        final_softcap: json.softcap("final_logit_softcapping")?,
        output: json.output(true)?,
        query_scaling: None,
    })
}

fn kinds(json: &ConfigJson, count: usize) -> Result<Vec<Kind>> {
    if let Some(kinds) = json.layer_types(count)? {
        return Ok(kinds);
    }
    let pattern = json.text.size("sliding_window_pattern", Some(PATTERN), MAX_LAYERS)?;
    Ok((1..=count).map(|l| if l.is_multiple_of(pattern) { Kind::Full } else { Kind::Sliding }).collect())
}
