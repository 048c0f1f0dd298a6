//! Hunyuan with experts: a shared MLP of equal width, and norms of queries and keys after the rotation.

use serde_json::Value;

use super::{
    common::{ConfigJson, MAX_EXPERTS, MAX_WIDTH},
    experts::{MLP_EXPERTS, beside_shared},
    family::{Family, Names, PRE_NORM},
    hunyuan,
};
use crate::{
    Result,
    config::fields::Fields,
    source::Part,
    spec::{DecoderSpec, MoeSpec, RouterSpec, RoutingSpec},
};

pub(super) static FAMILY: Family = Family {
    name: "hunyuan_v1_moe",
    model_types: &["hunyuan_v1_moe"],
    wrappers: &[],
    architectures: &[("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe")],
    describe,
    names: &[OWN, hunyuan::NORMS, PRE_NORM],
    experts: MLP_EXPERTS,
};

const OWN: Names = &[
    (Part::Router, "mlp.gate.wg.weight"),
    (Part::SharedGate, "mlp.shared_mlp.gate_proj.weight"),
    (Part::SharedUp, "mlp.shared_mlp.up_proj.weight"),
    (Part::SharedDown, "mlp.shared_mlp.down_proj.weight"),
];

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let text = &json.text;
    let attention = hunyuan::attention(json)?;
    let experts = of_every_layer(text, "num_experts", 1, MAX_EXPERTS)?;
    let width = text.size("intermediate_size", None, MAX_WIDTH)?;
    // Transformers ignores these keys, MLX reads them: other values are ambiguous.
    for (key, only) in [("num_shared_expert", 1), ("moe_intermediate_size", width)] {
        let value = of_every_layer(text, key, only, MAX_WIDTH)?;
        if value != only {
            return Err(text.error(key, format_args!("absent or {only}"), value));
        }
    }
    json.refuse_true(&["use_cla"])?;
    if text.bool_or_null("use_mixed_mlp_moe")? == Some(false) {
        return Err(text.error("use_mixed_mlp_moe", "absent or true", false));
    }
    let moe = MoeSpec {
        experts,
        top_k: of_every_layer(text, "moe_topk", 1, experts)?,
        width,
        activation: json.activation("hidden_act", "silu")?,
        routing: RoutingSpec::softmax(true),
        biases: false,
        router: RouterSpec::Plain,
    };
    json.pre_norm(|_| Ok((attention.clone(), beside_shared(moe, 1))))
}

/// A number from 1 to `max`, or an array with this number for every layer.
fn of_every_layer(text: &Fields, key: &str, default: usize, max: usize) -> Result<usize> {
    let Some(Value::Array(values)) = text.get(key) else { return text.size(key, Some(default), max) };
    let number = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=max).contains(n));
    let first = values.first().and_then(number).filter(|_| values.iter().all(|value| *value == values[0]));
    first.ok_or_else(|| text.error(key, format_args!("an integer from 1 to {max}, the same in all layers"), "others"))
}
