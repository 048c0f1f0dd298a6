//! Gemma 4, text: two kinds of attention layers with different head shapes, values that may equal the keys, per-layer
//! inputs, shared keys and values, and experts in parallel with an MLP.

use kvant::ops::{Activation, PairLayout};
use serde_json::Value;

use super::{
    common::{ConfigJson, Kind, MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH},
    family::{ExpertNames, Family, PRE_NORM, SANDWICH},
};
use crate::{
    Result,
    config::fields::{Fields, shown},
    source::Part,
    spec::{
        AttentionSpec, BlockSpec, DecoderSpec, DenseSpec, FeedForwardSpec, KeysValues, MoeSpec, ParallelSum,
        PerLayerInputSpec, QkNorm, RopeSpec, RouterSpec, RoutingSpec,
    },
};

pub(super) static FAMILY: Family = Family {
    name: "gemma4",
    model_types: &["gemma4_text", "gemma4_unified_text"],
    wrappers: &[("gemma4", "gemma4_text"), ("gemma4_unified", "gemma4_unified_text")],
    architectures: &[
        ("Gemma4ForCausalLM", "gemma4_text"),
        ("Gemma4ForConditionalGeneration", "gemma4"),
        ("Gemma4UnifiedForCausalLM", "gemma4_unified_text"),
        ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified"),
    ],
    describe,
    names: &[
        &[
            (Part::Router, "router.proj.weight"),
            (Part::RouterNorm, "router.scale"),
            (Part::ExpertScale, "router.per_expert_scale"),
            (Part::DensePostNorm, "post_feedforward_layernorm_1.weight"),
            (Part::ExpertsNorm, "pre_feedforward_layernorm_2.weight"),
            (Part::ExpertsPostNorm, "post_feedforward_layernorm_2.weight"),
            (Part::PerLayerGate, "per_layer_input_gate.weight"),
            (Part::PerLayerOutput, "per_layer_projection.weight"),
            (Part::PerLayerPostNorm, "post_per_layer_input_norm.weight"),
            (Part::Scalar, "layer_scalar"),
        ],
        SANDWICH,
        PRE_NORM,
    ],
    experts: &[
        ExpertNames::plain(&[(Part::ExpertGateUp, "experts.gate_up_proj"), (Part::ExpertDown, "experts.down_proj")]),
        // MLX.
        ExpertNames::plain(&[
            (Part::ExpertGate, "experts.switch_glu.gate_proj.weight"),
            (Part::ExpertUp, "experts.switch_glu.up_proj.weight"),
            (Part::ExpertDown, "experts.switch_glu.down_proj.weight"),
        ]),
    ],
};

/// Without `layer_types`, every sixth layer is full.
const PATTERN: usize = 6;

fn describe(json: &ConfigJson) -> Result<DecoderSpec> {
    let unified = json.model_type == "gemma4_unified_text";
    refuse_variants(json)?;
    if unified {
        refuse_in_unified(&json.text)?;
    }
    let hidden_size = json.text.size("hidden_size", None, MAX_WIDTH)?;
    Ok(DecoderSpec {
        hidden_size,
        vocab_size: json.vocab_size()?,
        embedding_scale: (hidden_size as f32).sqrt(),
        embedding_norm: false,
        per_layer_input: if unified { None } else { per_layer_input(&json.text)? },
        blocks: blocks(json)?,
        norm_eps: json.norm_eps("rms_norm_eps")?,
        post_norm_eps: json.norm_eps("rms_norm_eps")?,
        norm_offset: 0.0,
        final_norm_offset: 0.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        final_softcap: json.softcap("final_logit_softcapping")?,
        output: json.output(true)?,
        query_scaling: None,
    })
}

/// The text part of a unified model (Gemma 4 12B) is Gemma 4 without per-layer inputs and experts. Transformers ignores
/// the keys that enable these, MLX does not. A file with such keys is ambiguous, and an error.
fn refuse_in_unified(text: &Fields) -> Result<()> {
    if text.count("hidden_size_per_layer_input", Some(0), MAX_WIDTH)? != 0 {
        let expected = "absent, null or 0 in a gemma4_unified model";
        return Err(text.error("hidden_size_per_layer_input", expected, "another number"));
    }
    if text.bool_or_null("enable_moe_block")? == Some(true) {
        return Err(text.error("enable_moe_block", "absent, null or false in a gemma4_unified model", "true"));
    }
    Ok(())
}

/// Rejects flags that would change the arithmetic in unimplemented ways.
fn refuse_variants(json: &ConfigJson) -> Result<()> {
    json.refuse_true(&["attention_bias"])?;
    let text = &json.text;
    let activation = text.string("hidden_activation")?.unwrap_or("gelu_pytorch_tanh");
    if activation != "gelu_pytorch_tanh" {
        return Err(text.error("hidden_activation", "\"gelu_pytorch_tanh\"", format_args!("{activation:?}")));
    }
    match text.get("use_bidirectional_attention") {
        // "vision" affects only images: text stays causal.
        None | Some(Value::Null | Value::Bool(false)) => Ok(()),
        Some(Value::String(s)) if s == "vision" => Ok(()),
        Some(other) => Err(text.error("use_bidirectional_attention", "null or \"vision\"", other)),
    }
}

fn blocks(json: &ConfigJson) -> Result<Vec<BlockSpec>> {
    let text = &json.text;
    let count = json.layers()?;
    let kinds = layer_kinds(json, count)?;
    let heads = text.size("num_attention_heads", None, MAX_HEADS)?;
    let shapes = head_shapes(text, &kinds)?;
    let shared = text.count("num_kv_shared_layers", Some(0), count - 1)?;
    let double_wide = text.bool_or_null("use_double_wide_mlp")?.unwrap_or(false);
    let k_eq_v = text.bool_or_null("attention_k_eq_v")?.unwrap_or(false);
    let intermediate = text.size("intermediate_size", None, MAX_WIDTH)?;
    let moe = moe(text)?;
    let has = |kind| kinds.contains(&kind);
    let window = if has(Kind::Sliding) { text.size("sliding_window", None, MAX_POSITIONS)? } else { 1 };
    let own = count - shared;
    let mut blocks = Vec::with_capacity(count);
    for (l, (&kind, &(head_dim, kv_heads))) in kinds.iter().zip(&shapes).enumerate() {
        json.check_heads(heads, kv_heads, head_dim, format_args!("layer {l}"))?;
        let source = if l < own { None } else { Some(kv_source(text, &kinds[..own], kind, l)?) };
        if let Some(source) = source
            && shapes[source] != shapes[l]
        {
            let expected =
                format!("a number for which layer {l} has the KV shape of layer {source}, whose KV it shares");
            return Err(text.error("num_kv_shared_layers", expected, shared));
        }
        let attention = AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            window: (kind == Kind::Sliding).then_some(window),
            rope: rope(text, kind, head_dim)?,
            scale: 1.0,
            softcap: None,
            qk_norm: Some(QkNorm::Heads),
            v_norm: true,
            qkv_bias: false,
            output_bias: false,
            sinks: false,
            output_gate: false,
            keys_values: match source {
                Some(source) => KeysValues::SharedWith(source),
                None if k_eq_v && kind == Kind::Full => KeysValues::KeysAreValues,
                None => KeysValues::Own,
            },
            position_ranks: 1,
        };
        let width = if double_wide && source.is_some() { 2 * intermediate } else { intermediate };
        let dense = DenseSpec { width, activation: Activation::GeluTanh, biases: false };
        let feed_forward = match moe {
            Some(moe) => FeedForwardSpec::Parallel(dense, moe, ParallelSum::Normed),
            None => FeedForwardSpec::Dense(dense),
        };
        blocks.push(BlockSpec {
            mixer: attention.into(),
            feed_forward,
            pre_norms: true,
            post_norms: true,
            scalar: true,
        });
    }
    Ok(blocks)
}

/// The last layer of this kind with its own keys and values.
fn kv_source(text: &Fields, own: &[Kind], kind: Kind, layer: usize) -> Result<usize> {
    own.iter().rposition(|&k| k == kind).ok_or_else(|| {
        let expected = format!("small enough that layer {layer} has a {} layer to share KV with", kind.name());
        text.error("num_kv_shared_layers", expected, text.get("num_kv_shared_layers").unwrap_or(&Value::Null))
    })
}

fn layer_kinds(json: &ConfigJson, count: usize) -> Result<Vec<Kind>> {
    let text = &json.text;
    let Some(kinds) = json.layer_types(count)? else {
        // Transformers ignores the key, MLX reads it: any other number is ambiguous.
        if let Some(pattern) = text.size_or_null("sliding_window_pattern", MAX_LAYERS)?.filter(|&n| n != PATTERN) {
            let expected = format!("absent or {PATTERN} where layer_types is absent");
            return Err(text.error("sliding_window_pattern", expected, pattern));
        }
        let full = |l: usize| (l + 1).is_multiple_of(PATTERN) || l + 1 == count;
        return Ok((0..count).map(|l| if full(l) { Kind::Full } else { Kind::Sliding }).collect());
    };
    // Transformers always makes the last layer full, MLX does not: a sliding last layer is ambiguous.
    if kinds.last() == Some(&Kind::Sliding) {
        let key = format!("layer_types[{}]", count - 1);
        return Err(text.error(&key, "\"full_attention\" in the last layer", "\"sliding_attention\""));
    }
    Ok(kinds)
}

/// (head_dim, kv_heads) of every layer, from `per_layer_config` if present, otherwise from the `global_` keys.
fn head_shapes(text: &Fields, kinds: &[Kind]) -> Result<Vec<(usize, usize)>> {
    let head_dim = text.size("head_dim", None, MAX_WIDTH)?;
    let kv_heads = text.size("num_key_value_heads", None, MAX_HEADS)?;
    let mut shapes = vec![(head_dim, kv_heads); kinds.len()];
    if let Some(overrides) = text.object("per_layer_config")? {
        let mut seen = vec![false; kinds.len()];
        for key in overrides.keys() {
            // Indices are strings, possibly with leading zeros.
            let layer = key.parse::<usize>().ok().filter(|&l| l < kinds.len() && !seen[l]);
            let Some(layer) = layer else {
                let expected = format!("an index below {}, at most once per layer", kinds.len());
                return Err(overrides.error(key, expected, format_args!("{key:?}")));
            };
            seen[layer] = true;
            let fields = overrides.object(key)?.ok_or_else(|| overrides.missing(key, "an object"))?;
            if let Some(other) = fields.keys().find(|k| !matches!(*k, "head_dim" | "num_key_value_heads")) {
                return Err(fields.error(
                    other,
                    "absent: only head_dim and num_key_value_heads can vary by layer",
                    "present",
                ));
            }
            shapes[layer] = (
                fields.size("head_dim", Some(head_dim), MAX_WIDTH)?,
                fields.size("num_key_value_heads", Some(kv_heads), MAX_HEADS)?,
            );
        }
    } else {
        let global_dim = text.size("global_head_dim", None, MAX_WIDTH)?;
        let global_heads = match text.bool_or_null("attention_k_eq_v")? {
            Some(true) => text.size_or_null("num_global_key_value_heads", MAX_HEADS)?.unwrap_or(kv_heads),
            // Without K = V, the key has no effect.
            _ => kv_heads,
        };
        for (shape, _) in shapes.iter_mut().zip(kinds).filter(|(_, kind)| **kind == Kind::Full) {
            *shape = (global_dim, global_heads);
        }
    }
    Ok(shapes)
}

fn rope(text: &Fields, kind: Kind, head_dim: usize) -> Result<RopeSpec> {
    let half = head_dim / 2;
    let spec = |theta: f64, rotated_pairs: usize, factor: f64| RopeSpec {
        theta,
        rotated_pairs,
        layout: PairLayout::Halves,
        factors: (factor != 1.0).then(|| vec![factor as f32; rotated_pairs]),
        long: None,
    };
    // If the older key exists, even as null, transformers ignores `rope_parameters`.
    if let Some(old) = text.get("rope_scaling") {
        return Err(text.error("rope_scaling", "absent: rope_parameters has the scalings", shown(old)));
    }
    let all = text.object("rope_parameters")?.ok_or_else(|| text.missing("rope_parameters", "an object"))?;
    let fields = all.object(kind.name())?.ok_or_else(|| all.missing(kind.name(), "an object"))?;
    let theta = fields.float("rope_theta", None, "a number from 1 to 1e12", |t| (1.0..=1e12).contains(&t))?;
    match super::rope::type_of(&fields)? {
        "default" => {
            // Transformers rotates all pairs regardless, MLX only this fraction: any other value is ambiguous.
            let whole = "absent or 1 where rope_type is \"default\"";
            fields.float("partial_rotary_factor", Some(1.0), whole, |part| part == 1.0)?;
            Ok(spec(theta, half, 1.0))
        }
        "proportional" => {
            let part = "above 0, at most 1";
            let partial = fields.float("partial_rotary_factor", Some(1.0), part, |p| p > 0.0 && p <= 1.0)?;
            let factor =
                fields.float("factor", Some(1.0), "a number from 1e-3 to 1e6", |f| (1e-3..=1e6).contains(&f))?;
            let rotated_pairs = (partial * head_dim as f64 / 2.0).floor() as usize;
            Ok(spec(theta, rotated_pairs.min(half), factor))
        }
        other => Err(fields.error("rope_type", "\"default\" or \"proportional\"", format_args!("{other:?}"))),
    }
}

fn per_layer_input(text: &Fields) -> Result<Option<PerLayerInputSpec>> {
    // Null and 0 mean none.
    let size = text.count("hidden_size_per_layer_input", Some(0), MAX_WIDTH)?;
    if size == 0 {
        return Ok(None);
    }
    let vocab_size = text.size("vocab_size_per_layer_input", None, MAX_VOCAB)?;
    Ok(Some(PerLayerInputSpec { size, vocab_size }))
}

fn moe(text: &Fields) -> Result<Option<MoeSpec>> {
    if text.bool_or_null("enable_moe_block")? != Some(true) {
        return Ok(None);
    }
    let experts = text.size("num_experts", None, MAX_EXPERTS)?;
    Ok(Some(MoeSpec {
        experts,
        top_k: text.size("top_k_experts", None, experts)?,
        width: text.size("moe_intermediate_size", None, MAX_WIDTH)?,
        activation: Activation::GeluTanh,
        routing: RoutingSpec::softmax(true),
        biases: false,
        router: RouterSpec::Scaled,
    }))
}
