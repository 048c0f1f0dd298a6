//! ERNIE 4.5 with experts: selected by softmax scores with a bias, in addition to shared experts.

use kvant::ops::PairLayout;

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
    spec::{DecoderSpec, FeedForwardSpec, MoeSpec, RouterSpec, RoutingSpec, ScoreBias},
};

pub(super) static FAMILY: Family = Family {
    name: "ernie4_5_moe",
    model_types: &["ernie4_5_moe"],
    wrappers: &[],
    architectures: &[("Ernie4_5_MoeForCausalLM", "ernie4_5_moe")],
    describe,
    names: &[BIAS, ROUTER, SHARED_EXPERTS, PRE_NORM],
    experts: MLP_EXPERTS,
};

const BIAS: Names = &[(Part::RouterBias, "mlp.moe_statics.e_score_correction_bias")];

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    json.refuse_true(&["use_bias"])?;
    let text = &json.text;
    let mut attention = json.attention(&Scaling::parse(text, 5e5)?)?;
    attention.rope.layout = PairLayout::Interleaved;
    let layers = Layers::parse(text)?;
    let experts = experts(json)?;
    let mut decoder = json.pre_norm(|l| {
        let feed_forward = if layers.has_experts(l) { experts } else { json.dense()?.into() };
        Ok((attention.clone(), feed_forward))
    })?;
    decoder.output = json.output(true)?;
    Ok(decoder)
}

fn experts(json: &ConfigJson) -> Result<FeedForwardSpec> {
    let text = &json.text;
    let experts = text.size("moe_num_experts", None, MAX_EXPERTS)?;
    if let Some(other) = text.string("moe_gate_act")?.filter(|&name| name != "softmax") {
        return Err(text.error("moe_gate_act", "absent or \"softmax\"", format_args!("{other:?}")));
    }
    let min_sum = text.float("moe_norm_min", None, "from 0 to 1", |min| (0.0..=1.0).contains(&min))?;
    let moe = MoeSpec {
        experts,
        top_k: text.size("moe_k", None, experts)?,
        width: text.size("moe_intermediate_size", None, MAX_WIDTH)?,
        activation: json.activation("hidden_act", "silu")?,
        // MLX has no bias.
        routing: RoutingSpec { bias: ScoreBias::IfStored, min_sum: min_sum as f32, ..RoutingSpec::softmax(true) },
        biases: false,
        router: RouterSpec::Plain,
    };
    Ok(beside_shared(moe, text.count("moe_num_shared_experts", None, MAX_EXPERTS)?))
}

/// The layers with experts: one per `interval` from `start` to `end`.
struct Layers {
    interval: usize,
    start: usize,
    end: usize,
}

impl Layers {
    fn parse(text: &Fields) -> Result<Layers> {
        const END: &str = "moe_layer_end_index";
        let is_last = text.get(END).is_none_or(|end| end.is_null() || end.as_i64() == Some(-1));
        Ok(Layers {
            interval: text.size("moe_layer_interval", None, MAX_LAYERS)?,
            start: text.count("moe_layer_start_index", None, MAX_LAYERS)?,
            end: if is_last { MAX_LAYERS } else { text.count(END, None, MAX_LAYERS)? },
        })
    }

    fn has_experts(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.interval) && (self.start..=self.end).contains(&layer)
    }
}
