//! LFM2, dense and with experts: most layers are short convolutions, the others attention with norms of queries and
//! keys.

use kvant::ops::{Activation, ExpertScores};
use serde_json::Value;

use super::{
    common::{ConfigJson, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH},
    family::{ExpertNames, Family, Names, PRE_NORM},
    rope::Scaling,
};
use crate::{
    Result,
    source::Part,
    spec::{
        DecoderSpec, DenseSpec, FeedForwardSpec, MixerSpec, MoeSpec, OutputMatrix, QkNorm, RouterSpec, RoutingSpec,
        ScoreBias, ShortConvSpec,
    },
};

pub(super) static FAMILY: Family = Family {
    name: "lfm2",
    model_types: &["lfm2", "lfm2_moe"],
    wrappers: &[],
    architectures: &[("Lfm2ForCausalLM", "lfm2"), ("Lfm2MoeForCausalLM", "lfm2_moe")],
    describe,
    names: &[NAMES, PRE_NORM],
    experts: &[JOINED_EXPERTS, EXPERTS, MLX_EXPERTS],
};

const NAMES: Names = &[
    (Part::AttentionNorm, "operator_norm.weight"),
    (Part::AttentionOutput, "self_attn.out_proj.weight"),
    (Part::QueryNorm, "self_attn.q_layernorm.weight"),
    (Part::KeyNorm, "self_attn.k_layernorm.weight"),
    (Part::ConvInput, "conv.in_proj.weight"),
    (Part::ConvTaps, "conv.conv.weight"),
    (Part::ConvOutput, "conv.out_proj.weight"),
    (Part::FeedForwardNorm, "ffn_norm.weight"),
    (Part::Gate, "feed_forward.w1.weight"),
    (Part::Up, "feed_forward.w3.weight"),
    (Part::Down, "feed_forward.w2.weight"),
    (Part::Router, "feed_forward.gate.weight"),
    (Part::RouterBias, "feed_forward.expert_bias"),
];
const JOINED_EXPERTS: ExpertNames = ExpertNames::plain(&[
    (Part::ExpertGateUp, "feed_forward.experts.gate_up_proj"),
    (Part::ExpertDown, "feed_forward.experts.down_proj"),
]);
const EXPERTS: ExpertNames = ExpertNames::plain(&[
    (Part::ExpertGate, "feed_forward.experts.{}.w1.weight"),
    (Part::ExpertUp, "feed_forward.experts.{}.w3.weight"),
    (Part::ExpertDown, "feed_forward.experts.{}.w2.weight"),
]);
const MLX_EXPERTS: ExpertNames = ExpertNames::plain(&[
    (Part::ExpertGate, "feed_forward.switch_mlp.gate_proj.weight"),
    (Part::ExpertUp, "feed_forward.switch_mlp.up_proj.weight"),
    (Part::ExpertDown, "feed_forward.switch_mlp.down_proj.weight"),
]);

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    let mut attention = json.attention(&Scaling::parse(text, 1e6)?)?;
    attention.qk_norm = Some(QkNorm::Heads);
    let count = json.layers()?;
    let is_conv = conv_layers(json, count)?;
    let conv = ShortConvSpec {
        channels: text.size("hidden_size", None, MAX_WIDTH)?,
        taps: text.size("conv_L_cache", None, MAX_WIDTH)?,
        biases: text.bool_or_null("conv_bias")?.unwrap_or(false),
    };
    let is_moe = json.model_type == "lfm2_moe";
    let dense = DenseSpec { width: dense_width(json, is_moe)?, activation: Activation::Silu, biases: false };
    let moe = if is_moe { Some((experts(json)?, text.count("num_dense_layers", None, MAX_LAYERS)?)) } else { None };
    let mut decoder = json.pre_norm_with("norm_eps", |l| {
        let mixer = if is_conv[l] { MixerSpec::ShortConv(conv) } else { attention.clone().into() };
        let feed_forward = match moe {
            Some((moe, first)) if l >= first => FeedForwardSpec::Moe(moe),
            _ => dense.into(),
        };
        Ok((mixer, feed_forward))
    })?;
    // An older name, which takes precedence.
    if let Some(is_tied) = text.bool_or_null("tie_embedding")? {
        decoder.output = if is_tied { OutputMatrix::Embedding } else { OutputMatrix::Own };
    }
    Ok(decoder)
}

/// Whether each layer is a convolution: by `layer_types`, or all but `full_attn_idxs`.
fn conv_layers(json: &ConfigJson, count: usize) -> Result<Vec<bool>> {
    if let Some(kinds) = json.layer_kinds(count, &[("conv", true), ("full_attention", false)])? {
        return Ok(kinds);
    }
    const KEY: &str = "full_attn_idxs";
    if json.model_type == "lfm2_moe" {
        return Err(json.text.missing("layer_types", "the kind of each layer"));
    }
    if matches!(json.text.get(KEY), None | Some(Value::Null)) {
        return Ok(vec![false; count]);
    }
    let attention = json.text.indices(KEY, count)?;
    Ok((0..count).map(|l| !attention.contains(&l)).collect())
}

/// The width of the MLP: two thirds of `intermediate_size` or `block_ff_dim`, times a factor, rounded up to a multiple.
fn dense_width(json: &ConfigJson, is_moe: bool) -> Result<usize> {
    let text = &json.text;
    let stored = match text.size_or_null("block_ff_dim", MAX_WIDTH)? {
        Some(width) if !is_moe => width,
        _ => text.size("intermediate_size", None, MAX_WIDTH)?,
    };
    if is_moe || text.bool_or_null("block_auto_adjust_ff_dim")? == Some(false) {
        return Ok(stored);
    }
    let multiple = text.size("block_multiple_of", None, MAX_WIDTH)?;
    let width = (2 * stored / 3) as f64;
    let factor = text.float_or_null("block_ffn_dim_multiplier", "above 0, at most 100", |f| f > 0.0 && f <= 100.0)?;
    let Some(factor) = factor else { return Ok(width as usize) };
    Ok(((factor * width) as usize).next_multiple_of(multiple))
}

fn experts(json: &ConfigJson) -> Result<MoeSpec> {
    let text = &json.text;
    let experts = text.size("num_experts", None, MAX_EXPERTS)?;
    let has_bias = text.bool_or_null("use_expert_bias")?.unwrap_or(true);
    Ok(MoeSpec {
        experts,
        top_k: text.size("num_experts_per_tok", None, experts)?,
        width: text.size("moe_intermediate_size", None, MAX_WIDTH)?,
        activation: Activation::Silu,
        routing: RoutingSpec {
            scores: ExpertScores::Sigmoid,
            bias: if has_bias { ScoreBias::Stored } else { ScoreBias::None },
            normalise: text.bool_or_null("norm_topk_prob")?.unwrap_or(true),
            epsilon: 1e-6,
            scale: json.multiplier("routed_scaling_factor")? as f32,
            ..RoutingSpec::softmax(true)
        },
        biases: false,
        router: RouterSpec::Plain,
    })
}
