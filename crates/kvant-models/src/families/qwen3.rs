//! Qwen 3, dense and with experts: as Llama, with norms of queries and keys.

use super::{
    common::ConfigJson,
    experts::{MLP_EXPERTS, QwenExperts, ROUTER},
    family::{Family, PRE_NORM},
    qwen2,
    rope::Scaling,
};
use crate::{
    Result,
    spec::{DecoderSpec, FeedForwardSpec, QkNorm},
};

pub(super) static FAMILY: Family = Family {
    name: "qwen3",
    model_types: &["qwen3", "qwen3_moe"],
    wrappers: &[],
    architectures: &[("Qwen3ForCausalLM", "qwen3"), ("Qwen3MoeForCausalLM", "qwen3_moe")],
    describe,
    names: &[ROUTER, PRE_NORM],
    experts: MLP_EXPERTS,
};

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    let scaling = Scaling::parse(text, 1e4)?;
    let mut attention = json.attention(&scaling)?;
    attention.qk_norm = Some(QkNorm::Heads);
    (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
    let count = json.layers()?;
    let is_moe = json.model_type == "qwen3_moe";
    // For mixtures of experts, transformers does not support layer types.
    let windows = if is_moe { vec![qwen2::window(json)?; count] } else { qwen2::windows(json, |l, max| l >= max)? };
    let experts = if is_moe { Some(QwenExperts::parse(json, count)?) } else { None };
    json.pre_norm(|l| {
        let mut attention = attention.clone();
        attention.window = windows[l];
        let feed_forward = match &experts {
            Some(experts) if experts.has(l) => FeedForwardSpec::Moe(experts.spec),
            _ => json.dense()?.into(),
        };
        Ok((attention, feed_forward))
    })
}
