//! Seed-OSS: as Llama, with biases of queries, keys and values.

use super::{
    common::ConfigJson,
    family::{Family, PRE_NORM},
    rope::Scaling,
};
use crate::{Result, spec::DecoderSpec};

pub(super) static FAMILY: Family = Family {
    name: "seed_oss",
    model_types: &["seed_oss"],
    wrappers: &[],
    architectures: &[("SeedOssForCausalLM", "seed_oss")],
    describe,
    names: &[PRE_NORM],
    experts: &[],
};

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let is = |key: &str, default| Ok::<_, crate::Error>(json.text.bool_or_null(key)?.unwrap_or(default));
    let mut attention = json.attention(&Scaling::parse(&json.text, 1e4)?)?;
    attention.qkv_bias = is("attention_bias", true)?;
    attention.output_bias = is("attention_out_bias", false)?;
    let mut dense = json.dense()?;
    dense.biases = is("mlp_bias", false)?;
    json.pre_norm(|_| Ok((attention.clone(), dense.into())))
}
