//! Phi 3, 3.5, 4 and 4 mini: as Llama, with fused matrices, partially rotated heads, and LongRoPE.

use super::{
    common::{ConfigJson, MAX_POSITIONS},
    family::{Family, Names, PRE_NORM},
    rope::{self, Scaling},
};
use crate::{
    Result,
    config::fields::Fields,
    source::Part,
    spec::{AttentionSpec, DecoderSpec, LongRope},
};

pub(super) static FAMILY: Family = Family {
    name: "phi3",
    model_types: &["phi3"],
    wrappers: &[],
    architectures: &[("Phi3ForCausalLM", "phi3")],
    describe,
    names: &[FUSED, PRE_NORM],
    experts: &[],
};

const FUSED: Names = &[(Part::QueryKeyValue, "self_attn.qkv_proj.weight"), (Part::GateUp, "mlp.gate_up_proj.weight")];

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    json.refuse_true(&["attention_bias", "mlp_bias"])?;
    let text = &json.text;
    let long = match rope::object(text)? {
        Some(fields) if is_long(&fields)? => Some(fields),
        _ => None,
    };
    let scaling = match &long {
        Some(fields) => Scaling::unscaled(text, fields, 1e4)?,
        None => Scaling::parse_partial(text, 1e4, 1.0)?,
    };
    let mut attention = json.attention(&scaling)?;
    attention.window = text.size_or_null("sliding_window", MAX_POSITIONS)?;
    if let Some(fields) = &long {
        long_rope(json, fields, &mut attention)?;
    }
    let dense = json.dense()?;
    json.pre_norm(|_| Ok((attention.clone(), dense.into())))
}

/// Whether the type is LongRoPE, including its older names.
fn is_long(fields: &Fields) -> Result<bool> {
    let kind = rope::type_of(fields)?;
    match kind {
        "longrope" | "su" | "yarn" => Ok(true),
        "default" => Ok(false),
        _ => Err(fields.error("rope_type", "\"default\" or \"longrope\"", format_args!("{kind:?}"))),
    }
}

fn long_rope(json: &ConfigJson, fields: &Fields, attention: &mut AttentionSpec) -> Result<()> {
    let text = &json.text;
    let original = text.size("original_max_position_embeddings", Some(4096), MAX_POSITIONS)?;
    let max = text.size("max_position_embeddings", Some(4096), MAX_POSITIONS)?;
    let factor = fields.float_or_null("factor", "a number from 1e-3 to 1e6", |f| (1e-3..=1e6).contains(&f))?;
    let factor = factor.unwrap_or(max as f64 / original as f64);
    let usual = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
    let given = fields.float_or_null("attention_factor", "from 1e-3 to 1e3", |f| (1e-3..=1e3).contains(&f))?;
    let magnitude = given.unwrap_or(usual);
    let rope = &mut attention.rope;
    let factors = |key: &str| {
        let fits = |factor: f64| (1e-3..=1e6).contains(&factor);
        let factors = fields.floats(key, rope.rotated_pairs, "from 1e-3 to 1e6", fits)?;
        Ok::<_, crate::Error>(factors.into_iter().map(|factor| factor as f32).collect::<Vec<_>>())
    };
    let (short, long) = (factors("short_factor")?, factors("long_factor")?);
    rope.factors = Some(short);
    rope.long = Some(LongRope { original, factors: long, magnitude: magnitude as f32 });
    attention.fold_magnitude();
    Ok(())
}
