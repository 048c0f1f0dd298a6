//! Hunyuan, dense: as Llama, with two differences. Queries and keys are normed after the rotary embedding, and a factor
//! multiplies the base of the embedding.

use super::{
    common::{ConfigJson, MAX_WIDTH},
    family::{Family, Names, PRE_NORM},
    rope::{self, Scaling},
};
use crate::{
    Result,
    source::Part,
    spec::{AttentionSpec, DecoderSpec, QkNorm},
};

pub(super) static FAMILY: Family = Family {
    name: "hunyuan",
    model_types: &["hunyuan_v1_dense"],
    wrappers: &[],
    architectures: &[("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")],
    describe,
    names: &[NORMS, PRE_NORM],
    experts: &[],
};

pub(super) const NORMS: Names =
    &[(Part::QueryNorm, "self_attn.query_layernorm.weight"), (Part::KeyNorm, "self_attn.key_layernorm.weight")];

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let attention = attention(json)?;
    let dense = json.dense()?;
    json.pre_norm(|_| Ok((attention.clone(), dense.into())))
}

/// The attention of every layer, also used by models with experts.
pub(super) fn attention(json: &ConfigJson) -> Result<AttentionSpec> {
    let text = &json.text;
    // Transformers ignores the key, MLX reads it: any other value is ambiguous.
    if text.bool_or_null("use_qk_norm")? == Some(false) {
        return Err(text.error("use_qk_norm", "true or absent", false));
    }
    // Transformers requires the key.
    text.size("head_dim", None, MAX_WIDTH)?;
    let mut attention = json.attention(&Scaling::none(1e4))?;
    let rope = scaling(json, attention.head_dim)?;
    attention = json.attention(&rope)?;
    attention.qk_norm = Some(QkNorm::RotatedHeads);
    (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
    Ok(attention)
}

/// The type `dynamic` with an `alpha` raises the base, independent of the length of the text.
fn scaling(json: &ConfigJson, head_dim: usize) -> Result<Scaling> {
    let text = &json.text;
    let fields = match rope::object(text)? {
        Some(fields) if rope::type_of(&fields)? == "dynamic" => fields,
        _ => return Scaling::parse(text, 1e4),
    };
    let alpha = fields.float("alpha", None, "a number from 1e-3 to 1e6", |alpha| (1e-3..=1e6).contains(&alpha))?;
    let theta = Scaling::unscaled(text, &fields, 1e4)?.theta();
    Ok(Scaling::none(theta * alpha.powf(head_dim as f64 / (head_dim as f64 - 2.0))))
}
