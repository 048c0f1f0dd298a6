//! Gemma 3, text: norms of 1 + w before and after both halves, five sliding layers to a full one, a base of the rotary
//! embedding for each kind.

use super::{
    Family, PRE_NORM, SANDWICH,
    common::{ConfigJson, Kind, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH},
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
    let [sliding, full] = scalings(json)?;
    let window = text.size("sliding_window", Some(4096), MAX_POSITIONS)?;
    let width = text.size("intermediate_size", None, MAX_WIDTH)?;
    let activation = json.activation("hidden_activation", "gelu_pytorch_tanh")?;
    let positive = |scalar: f64| scalar > 0.0 && scalar <= 1e6;
    let scalar = text.float("query_pre_attn_scalar", Some(256.0), "above 0, at most 1e6", positive)?;
    let block = |kind: Kind| {
        let mut attention = json.attention(Some(256), if kind == Kind::Full { &full } else { &sliding })?;
        attention.scale = scalar.powf(-0.5) as f32;
        attention.window = (kind == Kind::Sliding).then_some(window);
        attention.qk_norm = Some(QkNorm::Heads);
        (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
        attention.softcap = json.softcap("attn_logit_softcapping")?;
        let feed_forward = FeedForwardSpec::Dense(DenseSpec { width, activation, biases: false });
        Ok(BlockSpec { attention, feed_forward, pre_norms: true, post_norms: true, scalar: false })
    };
    Ok(DecoderSpec {
        hidden_size,
        vocab_size: json.vocab_size(Some(262_208))?,
        embedding_scale: (hidden_size as f32).sqrt(),
        per_layer_input: None,
        blocks: kinds.into_iter().map(block).collect::<Result<_>>()?,
        norm_eps: json.norm_eps()?,
        norm_offset: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        final_softcap: json.softcap("final_logit_softcapping")?,
        tied_output: json.tied_output(true)?,
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

/// The rotary embeddings of sliding and of full layers: from `rope_parameters`, which has one for each, or from
/// `rope_local_base_freq` and `rope_theta` with `rope_scaling`, which older files have.
fn scalings(json: &ConfigJson) -> Result<[Scaling; 2]> {
    const LOCAL: f64 = 1e4;
    const GLOBAL: f64 = 1e6;
    let text = &json.text;
    if let Some(both) = Scaling::by_kind(text, [LOCAL, GLOBAL])? {
        return Ok(both);
    }
    let fits = |theta: f64| (1.0..=1e12).contains(&theta);
    let local = text.float("rope_local_base_freq", Some(LOCAL), "a number from 1 to 1e12", fits)?;
    Ok([Scaling::none(local), Scaling::parse(text, GLOBAL)?])
}
