//! Qwen 3, dense and with experts: as Llama, with norms of queries and keys.

use super::{
    ExpertNames, Family, Names, PRE_NORM,
    common::{ConfigJson, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH},
    qwen2,
    rope::Scaling,
};
use crate::{
    Result,
    source::Part,
    spec::{DecoderSpec, FeedForwardSpec, MoeSpec, QkNorm, RouterSpec},
};

pub(super) static FAMILY: Family = Family {
    name: "qwen3",
    model_types: &["qwen3", "qwen3_moe"],
    wrappers: &[],
    architectures: &[("Qwen3ForCausalLM", "qwen3"), ("Qwen3MoeForCausalLM", "qwen3_moe")],
    describe,
    names: &[ROUTER, PRE_NORM],
    experts: &[
        ExpertNames::plain(&[
            (Part::ExpertGate, "mlp.experts.{}.gate_proj.weight"),
            (Part::ExpertUp, "mlp.experts.{}.up_proj.weight"),
            (Part::ExpertDown, "mlp.experts.{}.down_proj.weight"),
        ]),
        // MLX.
        ExpertNames::plain(&[
            (Part::ExpertGate, "mlp.switch_mlp.gate_proj.weight"),
            (Part::ExpertUp, "mlp.switch_mlp.up_proj.weight"),
            (Part::ExpertDown, "mlp.switch_mlp.down_proj.weight"),
        ]),
    ],
};

const ROUTER: Names = &[(Part::Router, "mlp.gate.weight")];

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    let scaling = Scaling::parse(text, 1e4)?;
    let mut attention = json.attention(&scaling)?;
    attention.qk_norm = Some(QkNorm::Heads);
    (attention.qkv_bias, attention.output_bias) = json.attention_bias(false)?;
    let count = json.layers()?;
    let is_moe = json.model_type == "qwen3_moe";
    // In a mixture of experts, transformers knows no kinds of layers.
    let windows = if is_moe { vec![qwen2::window(json)?; count] } else { qwen2::windows(json)? };
    let experts = if is_moe { Some(Experts::parse(json, count)?) } else { None };
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

/// The layers with experts, which are all alike.
struct Experts {
    spec: MoeSpec,
    /// Every so many layers have experts.
    step: usize,
    /// These do not.
    dense: Vec<usize>,
}

impl Experts {
    fn parse(json: &ConfigJson, layers: usize) -> Result<Experts> {
        let text = &json.text;
        let experts = text.size("num_experts", None, MAX_EXPERTS)?;
        let top_k = text.size("num_experts_per_tok", None, experts)?;
        let spec = MoeSpec {
            experts,
            top_k,
            width: text.size("moe_intermediate_size", None, MAX_WIDTH)?,
            activation: json.activation("hidden_act", "silu")?,
            normalise: text.bool_or_null("norm_topk_prob")?.unwrap_or(false),
            biases: false,
            router: RouterSpec::Plain,
        };
        let dense = text.indices("mlp_only_layers", layers)?;
        Ok(Experts { spec, step: text.size("decoder_sparse_step", None, MAX_LAYERS)?, dense })
    }

    fn has(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.step) && !self.dense.contains(&layer)
    }
}
