//! Granite 3 and 4, dense: as Llama, with factors of the embedding, of the scores, of the outputs of both halves and of
//! the logits.

use super::{Family, PRE_NORM, common::ConfigJson, rope::Scaling};
use crate::{Result, spec::DecoderSpec};

pub(super) static FAMILY: Family = Family {
    name: "granite",
    model_types: &["granite"],
    wrappers: &[],
    architectures: &[("GraniteForCausalLM", "granite")],
    describe,
    names: &[PRE_NORM],
    experts: &[],
};

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let scaling = Scaling::parse(&json.text, 1e4)?;
    let mut attention = json.attention(None, &scaling)?;
    attention.scale = (json.multiplier("attention_multiplier")? * scaling.attention_factor().powi(2)) as f32;
    (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
    let mut dense = json.dense()?;
    dense.biases = json.text.bool_or_null("mlp_bias")?.unwrap_or(false);
    let mut decoder = json.pre_norm(|_| Ok((attention.clone(), dense.into())))?;
    decoder.embedding_scale = json.multiplier("embedding_multiplier")? as f32;
    decoder.residual_scale = json.multiplier("residual_multiplier")? as f32;
    decoder.logit_scale = (1.0 / json.multiplier("logits_scaling")?) as f32;
    Ok(decoder)
}
