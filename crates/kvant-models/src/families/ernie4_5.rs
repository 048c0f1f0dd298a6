//! ERNIE 4.5, dense: as Llama, with adjacent coordinates as pairs.

use kvant::ops::PairLayout;

use super::{
    common::ConfigJson,
    family::{Family, PRE_NORM},
    rope::Scaling,
};
use crate::{Result, spec::DecoderSpec};

pub(super) static FAMILY: Family = Family {
    name: "ernie4_5",
    model_types: &["ernie4_5"],
    wrappers: &[],
    architectures: &[("Ernie4_5ForCausalLM", "ernie4_5")],
    describe,
    names: &[PRE_NORM],
    experts: &[],
};

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let mut attention = json.attention(&Scaling::parse(&json.text, 5e5)?)?;
    attention.rope.layout = PairLayout::Interleaved;
    let is_biased = json.text.bool_or_null("use_bias")?.unwrap_or(false);
    (attention.qkv_bias, attention.output_bias) = (is_biased, is_biased);
    let mut dense = json.dense()?;
    dense.biases = is_biased;
    let mut decoder = json.pre_norm(|_| Ok((attention.clone(), dense.into())))?;
    decoder.output = json.output(true)?;
    Ok(decoder)
}
