//! Ministral 3: as Llama, with YaRN and queries scaled by position.

use super::{
    common::{ConfigJson, MAX_POSITIONS},
    family::{Family, PRE_NORM},
    rope::{self, Scaling},
};
use crate::{
    Result,
    spec::{DecoderSpec, QueryScaling},
};

pub(super) static FAMILY: Family = Family {
    name: "ministral3",
    model_types: &["ministral3"],
    wrappers: &[],
    architectures: &[("Ministral3ForCausalLM", "ministral3")],
    describe,
    names: &[PRE_NORM],
    experts: &[],
};

/// Maximum positions of the table of factors: 16 MiB.
const MAX_TABLE: usize = 1 << 22;

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    json.refuse_true(&["attention_bias", "mlp_bias"])?;
    let text = &json.text;
    let mut attention = json.attention(&Scaling::parse(text, 1e4)?)?;
    attention.window = text.size_or_null("sliding_window", MAX_POSITIONS)?;
    let dense = json.dense()?;
    let mut decoder = json.pre_norm(|_| Ok((attention.clone(), dense.into())))?;
    decoder.query_scaling = query_scaling(json)?;
    Ok(decoder)
}

fn query_scaling(json: &ConfigJson) -> Result<Option<QueryScaling>> {
    const BETA: &str = "llama_4_scaling_beta";
    let text = &json.text;
    let fields = rope::object(text)?.ok_or_else(|| text.missing("rope_parameters", "an object"))?;
    let beta = fields.float(BETA, None, "a number from 0 to 100", |beta| (0.0..=100.0).contains(&beta))?;
    if beta == 0.0 {
        return Ok(None);
    }
    let period = rope::visible_original(&fields, text)?;
    let positions = text.size("max_position_embeddings", None, MAX_TABLE)?;
    Ok(Some(QueryScaling { beta, period, positions }))
}
