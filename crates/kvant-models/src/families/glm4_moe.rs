//! GLM 4.5 to 4.7: experts selected by sigmoids with a bias, a shared expert, and rotation of half of each head.

use kvant::ops::{ExpertGroups, ExpertScores};

use super::{
    common::{ConfigJson, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH},
    experts::{MLP_EXPERTS, ROUTER, SHARED_EXPERTS, beside_shared},
    family::{Family, Names, PRE_NORM},
    rope::Scaling,
};
use crate::{
    Result,
    config::fields::Fields,
    source::Part,
    spec::{DecoderSpec, FeedForwardSpec, MoeSpec, QkNorm, RouterSpec, RoutingSpec, ScoreBias},
};

pub(super) static FAMILY: Family = Family {
    name: "glm4_moe",
    model_types: &["glm4_moe"],
    wrappers: &[],
    architectures: &[("Glm4MoeForCausalLM", "glm4_moe")],
    describe,
    names: &[BIAS, ROUTER, SHARED_EXPERTS, PRE_NORM],
    experts: MLP_EXPERTS,
};

const BIAS: Names = &[(Part::RouterBias, "mlp.gate.e_score_correction_bias")];

/// Layers for multi-token prediction follow the decoder's layers and are not read.
fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    let mut attention = json.attention(&Scaling::parse_partial(text, 1e4, 0.5)?)?;
    attention.qkv_bias = text.bool_or_null("attention_bias")?.unwrap_or(false);
    attention.qk_norm = (text.bool_or_null("use_qk_norm")? == Some(true)).then_some(QkNorm::Heads);
    let dense = text.count("first_k_dense_replace", None, MAX_LAYERS)?;
    let experts = experts(json)?;
    json.pre_norm(|l| {
        let feed_forward = if l < dense { json.dense()?.into() } else { experts };
        Ok((attention.clone(), feed_forward))
    })
}

fn experts(json: &ConfigJson) -> Result<FeedForwardSpec> {
    let text = &json.text;
    let experts = text.size("n_routed_experts", None, MAX_EXPERTS)?;
    let moe = MoeSpec {
        experts,
        top_k: text.size("num_experts_per_tok", None, experts)?,
        width: text.size("moe_intermediate_size", None, MAX_WIDTH)?,
        activation: json.activation("hidden_act", "silu")?,
        routing: routing(text, experts)?,
        biases: false,
        router: RouterSpec::Plain,
    };
    Ok(beside_shared(moe, text.count("n_shared_experts", None, MAX_EXPERTS)?))
}

fn routing(text: &Fields, experts: usize) -> Result<RoutingSpec> {
    for (key, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(other) = text.string(key)?.filter(|&name| name != only) {
            return Err(text.error(key, format_args!("absent or {only:?}"), format_args!("{other:?}")));
        }
    }
    let count = text.size("n_group", None, ExpertGroups::MAX.min(experts))?;
    let chosen = text.size("topk_group", None, count)?;
    let fits = |scale: f64| scale.abs() <= 1e6;
    Ok(RoutingSpec {
        scores: ExpertScores::Sigmoid,
        bias: ScoreBias::Stored,
        // This value disables the choice among groups.
        groups: (chosen < count).then_some(ExpertGroups { count, chosen }),
        normalise: text.bool_or_null("norm_topk_prob")?.unwrap_or(true),
        epsilon: 1e-20,
        scale: text.float("routed_scaling_factor", None, "a number from -1e6 to 1e6", fits)? as f32,
        ..RoutingSpec::softmax(true)
    })
}
