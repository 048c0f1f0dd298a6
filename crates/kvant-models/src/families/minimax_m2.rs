//! MiniMax M2: experts selected by sigmoids with a bias, norms over all queries and all keys of a token, and rotation
//! of a part of each head.

use kvant::ops::ExpertScores;

use super::{
    common::{ConfigJson, MAX_EXPERTS, MAX_WIDTH},
    family::{ExpertNames, Family, Names, PRE_NORM},
    rope::Scaling,
};
use crate::{
    Result,
    config::fields::Fields,
    source::Part,
    spec::{DecoderSpec, FeedForwardSpec, MoeSpec, QkNorm, RouterSpec, RoutingSpec, ScoreBias},
};

pub(super) static FAMILY: Family = Family {
    name: "minimax_m2",
    model_types: &["minimax_m2"],
    wrappers: &[],
    architectures: &[("MiniMaxM2ForCausalLM", "minimax_m2")],
    describe,
    names: &[OWN, PRE_NORM],
    experts: &[
        ExpertNames::plain(&[
            (Part::ExpertGate, "block_sparse_moe.experts.{}.w1.weight"),
            (Part::ExpertUp, "block_sparse_moe.experts.{}.w3.weight"),
            (Part::ExpertDown, "block_sparse_moe.experts.{}.w2.weight"),
        ]),
        // MLX.
        ExpertNames::plain(&[
            (Part::ExpertGate, "block_sparse_moe.switch_mlp.gate_proj.weight"),
            (Part::ExpertUp, "block_sparse_moe.switch_mlp.up_proj.weight"),
            (Part::ExpertDown, "block_sparse_moe.switch_mlp.down_proj.weight"),
        ]),
    ],
};

const OWN: Names =
    &[(Part::Router, "block_sparse_moe.gate.weight"), (Part::RouterBias, "block_sparse_moe.e_score_correction_bias")];

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    refuse_variants(text)?;
    // Released files give the number of rotated coordinates.
    let head_dim = text.size("head_dim", None, MAX_WIDTH)?;
    let rotary_dim = text.size_or_null("rotary_dim", head_dim)?.unwrap_or(head_dim);
    let scaling = Scaling::parse_partial(text, 5e6, rotary_dim as f64 / head_dim as f64)?;
    let mut attention = json.attention(&scaling)?;
    attention.qk_norm = Some(QkNorm::Rows);
    let experts = FeedForwardSpec::Moe(experts(json)?);
    json.pre_norm(|_| Ok((attention.clone(), experts)))
}

/// Transformers ignores these keys of released files.
fn refuse_variants(text: &Fields) -> Result<()> {
    for (key, only) in [("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")] {
        if let Some(other) = text.string(key)?.filter(|&name| name != only) {
            return Err(text.error(key, format_args!("absent or {only:?}"), format_args!("{other:?}")));
        }
    }
    for key in ["use_qk_norm", "use_routing_bias"] {
        if text.bool_or_null(key)? == Some(false) {
            return Err(text.error(key, "absent or true", false));
        }
    }
    if text.count("shared_intermediate_size", Some(0), MAX_WIDTH)? != 0 {
        return Err(text.error("shared_intermediate_size", "absent or 0", "another number"));
    }
    Ok(())
}

fn experts(json: &ConfigJson) -> Result<MoeSpec> {
    let text = &json.text;
    let experts = text.size("num_local_experts", None, MAX_EXPERTS)?;
    Ok(MoeSpec {
        experts,
        top_k: text.size("num_experts_per_tok", None, experts)?,
        width: text.size("intermediate_size", None, MAX_WIDTH)?,
        activation: json.activation("hidden_act", "silu")?,
        routing: RoutingSpec { scores: ExpertScores::Sigmoid, bias: ScoreBias::Stored, ..RoutingSpec::softmax(true) },
        biases: false,
        router: RouterSpec::Plain,
    })
}
