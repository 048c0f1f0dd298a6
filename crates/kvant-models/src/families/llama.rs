//! Llama 2 and 3, and Mistral: norms before both halves, grouped queries, a gated SiLU MLP. Mistral may have a window.

use super::{
    common::{ConfigJson, MAX_POSITIONS},
    family::{Family, PRE_NORM},
    rope::Scaling,
};
use crate::{Result, spec::DecoderSpec};

pub(super) static FAMILY: Family = Family {
    name: "llama",
    model_types: &["llama", "mistral"],
    // Mistral Small 3 with images. Its text may also be Ministral 3.
    wrappers: &[("mistral3", "mistral")],
    architectures: &[
        ("LlamaForCausalLM", "llama"),
        ("MistralForCausalLM", "mistral"),
        ("Mistral3ForConditionalGeneration", "mistral3"),
    ],
    describe,
    names: &[PRE_NORM],
    experts: &[],
};

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let scaling = Scaling::parse(&json.text, 1e4)?;
    let mut attention = json.attention(&scaling)?;
    let mut dense = json.dense()?;
    if json.model_type == "llama" {
        (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
        dense.biases = json.text.bool_or_null("mlp_bias")?.unwrap_or(false);
    } else {
        json.refuse_true(&["attention_bias", "mlp_bias"])?;
        // Null means no window.
        attention.window = json.text.size_or_null("sliding_window", MAX_POSITIONS)?;
    }
    json.pre_norm(|_| Ok((attention.clone(), dense.into())))
}
