//! Compares configurations with transformers (`tools/config_defaults.py`).

use kvant::ops::PairLayout;
use kvant_models::{
    Config, Error,
    spec::{AttentionSpec, KeysValues, MixerSpec, OutputMatrix},
};
use serde_json::{Map, Value, json};

use crate::common::golden;

/// The cases that transformers runs and kvant rejects, by the suffixes of their names.
///
/// Scalings that depend on the length of the text, and partially rotated heads.
const REFUSED: &[&str] =
    &["/dynamic", "/longrope", "/proportional", "/partial", "/partial_yarn", "/partial_and_scaling"];
/// For families whose heads may be partially rotated.
const PARTIAL: &[&str] = &["/partial", "/partial_yarn", "/partial_and_scaling"];
/// Keys of Gemma 3 and OLMo 3 that transformers ignores and other programs read: scalings outside the objects of layer
/// kinds, the old name of the type, and `truncate`.
const BY_KIND: &[&str] = &[
    "parameters_and_theta",
    "parameters_without_theta",
    "null_scaling_and_parameters",
    "outer_original_of_llama3",
    "kinds_and_theta_beside",
    "kinds_and_truncate_beside",
    "scaling/linear_old_name",
    "yarn_truncate_false",
    "yarn_truncate_null",
];
/// A base that transformers ignores in sliding layers and MLX reads.
const OLMO3: &[&str] = &["rope/theta", "scaling_and_theta"];
/// Layers with experts, and the position embedding: without the key, transformers rotates nothing and MLX everything.
const GRANITE: &[&str] = &["without/num_local_experts", "/position_embedding_type"];
/// Heads would have 48 and 160 coordinates.
const PHI3: &[&str] = &["without/hidden_size", "without/num_attention_heads"];
/// Gemma 4 supports only the scaling types that its files use.
const GEMMA4: &[&str] = &[
    "/linear_theta",
    "/yarn_theta",
    "/only_full",
    "/kinds_and_scaling",
    "/kinds_and_theta_beside",
    "/kinds_and_truncate_beside",
];

fn is_refused(model_type: &str, name: &str) -> bool {
    let ends = |list: &[&str]| list.iter().any(|end| name.ends_with(end));
    match model_type {
        "gemma3_text" => ends(REFUSED) || ends(BY_KIND) || name.starts_with("rope/parameters/"),
        "olmo3" => ends(REFUSED) || ends(BY_KIND) || ends(OLMO3) || name.starts_with("rope/parameters/"),
        "gemma4_text" | "gemma4_unified_text" => ends(GEMMA4),
        "phi3" => ends(REFUSED) && !ends(PARTIAL) && !ends(&["/longrope"]) || ends(PHI3),
        // A head would have 42 coordinates.
        "glm4_moe" => ends(REFUSED) && !ends(PARTIAL) || ends(&["without/all"]),
        "minimax_m2" | "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" => ends(REFUSED) && !ends(PARTIAL),
        // Transformers creates a model that it cannot run.
        "ernie4_5_moe" => ends(REFUSED) || ends(&["null/moe_k", "null/moe_norm_min"]),
        "granitemoehybrid" => ends(REFUSED) || ends(GRANITE),
        _ => ends(REFUSED),
    }
}

/// The cases of a `model_type`.
struct Golden {
    model_type: String,
    json: Value,
}

impl Golden {
    fn all() -> Vec<Golden> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(golden("configs")).unwrap() {
            let path = entry.unwrap().path();
            let json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            all.push(Golden { model_type: path.file_stem().unwrap().to_str().unwrap().to_string(), json });
        }
        all.sort_by(|a, b| a.model_type.cmp(&b.model_type));
        all
    }

    /// The base and the cases with a name prefix: name, configuration, expected model.
    fn cases(&self, prefixes: &[&str]) -> Vec<(String, Value, Value)> {
        let base = &self.json["base"];
        let mut cases = vec![("base".to_string(), base["config"].clone(), base["model"].clone())];
        for (name, case) in self.json["cases"].as_object().unwrap() {
            if prefixes.iter().any(|prefix| name.starts_with(prefix)) {
                let model = &self.json["models"][case[1].as_u64().unwrap() as usize];
                cases.push((name.clone(), changed(&base["config"], &case[0]), merged(&base["model"], model)));
            }
        }
        cases
    }

    fn check(&self, name: &str, config: &Value, model: &Value) -> Result<(), String> {
        let (fails, is_refused) = (model.get("fails"), is_refused(&self.model_type, name));
        match (Config::parse(config), fails) {
            (Err(Error::Config { .. } | Error::Unsupported { .. }), _) if fails.is_some() || is_refused => Ok(()),
            (Err(error), _) => Err(error.to_string()),
            (Ok(_), Some(error)) => Err(format!("must be refused: {error}")),
            (Ok(_), None) if is_refused => Err("is not refused".to_string()),
            (Ok(got), None) => match &self.differences(&got, model)[..] {
                [] => Ok(()),
                found => Err(found[..found.len().min(3)].join("; ")),
            },
        }
    }

    /// The differences of a decoder from the expected one.
    fn differences(&self, config: &Config, model: &Value) -> Vec<String> {
        let decoder = &config.decoder;
        let mut found = Differences(Vec::new());
        found.equal("hidden", decoder.hidden_size, &model["hidden"]);
        found.equal("vocab", decoder.vocab_size, &model["vocab"]);
        found.equal("positions", config.max_position_embeddings, &model["positions"]);
        found.equal("tied", decoder.output != OutputMatrix::Own, &model["tied"]);
        found.near("eps", decoder.norm_eps, &model["eps"]);
        found.equal("softcap", decoder.final_softcap, &model["softcap"]);
        let scaling =
            decoder.query_scaling.map(|s| json!({"beta": s.beta, "period": s.period, "positions": s.positions}));
        found.equal("query_scaling", scaling, &model["query_scaling"]);
        let layers = model["layers"].as_array().unwrap();
        found.equal("layers", decoder.blocks.len(), &layers.len().into());
        for (l, (block, kind)) in decoder.blocks.iter().zip(layers).enumerate() {
            let kind = &model["kinds"][kind.as_u64().unwrap() as usize];
            match &block.mixer {
                MixerSpec::Attention(attention) => self.compare_attention(&mut found, l, attention, kind),
                MixerSpec::DeltaNet(net) => {
                    let sizes = json!([net.key_heads, net.value_heads, net.key_dim, net.value_dim, net.taps]);
                    found.equal(&format!("layer {l} delta net"), sizes, &kind["delta"]);
                }
                MixerSpec::ShortConv(conv) => {
                    let sizes = json!([conv.channels, conv.taps, conv.biases]);
                    found.equal(&format!("layer {l} convolution"), sizes, &kind["conv"]);
                }
            }
            let name = |part: &str| format!("layer {l} {part}");
            let dense = block.feed_forward.dense().map(|dense| dense.width);
            found.equal(&name("width"), dense, &kind["width"]);
            let experts = block
                .feed_forward
                .moe()
                .map(|moe| json!({"count": moe.experts, "top_k": moe.top_k, "width": moe.width}));
            found.equal(&name("experts"), experts, &kind["experts"]);
        }
        found.0
    }

    fn compare_attention(&self, found: &mut Differences, l: usize, attention: &AttentionSpec, kind: &Value) {
        let name = |part: &str| format!("layer {l} {part}");
        found.equal(&name("heads"), attention.heads, &kind["heads"]);
        if !matches!(attention.keys_values, KeysValues::SharedWith(_)) {
            found.equal(&name("kv_heads"), attention.kv_heads, &kind["kv_heads"]);
        }
        found.equal(&name("head_dim"), attention.head_dim, &kind["head_dim"]);
        found.equal(&name("window"), attention.window, &kind["window"]);
        found.near(&name("scale"), attention.scale, &kind["scale"]);
        let want = &self.json["frequencies"][kind["rope"]["frequencies"].as_u64().unwrap() as usize];
        let (want, got) = (want.as_array().unwrap(), frequencies(attention));
        found.equal(&name("pairs"), got.len(), &want.len().into());
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            found.near(&name(&format!("frequency {i}")), *got, want);
        }
    }
}

struct Differences(Vec<String>);

impl Differences {
    fn equal(&mut self, what: &str, got: impl Into<Value>, want: &Value) {
        let got = got.into();
        // Numbers may be written as floats.
        if got != *want && !(got.is_number() && got.as_f64() == want.as_f64()) {
            self.0.push(format!("{what}: {got}, expected {want}"));
        }
    }

    fn near(&mut self, what: &str, got: f32, want: &Value) {
        let want = want.as_f64().unwrap();
        if (f64::from(got) - want).abs() > 2e-5 * want.abs() {
            self.0.push(format!("{what}: {got:e}, expected {want:e}"));
        }
    }
}

/// The angle by which each pair of a head rotates per position.
fn frequencies(attention: &AttentionSpec) -> Vec<f32> {
    let (rope, pairs) = (&attention.rope, attention.head_dim / 2);
    let of_pair = |i: usize| {
        if i >= rope.rotated_pairs {
            return 0.0;
        }
        let factor = rope.factors.as_ref().map_or(1.0, |factors| f64::from(factors[i]));
        let all = if rope.layout == PairLayout::Halves { pairs } else { rope.rotated_pairs };
        (rope.theta.powf(-(i as f64) / all as f64) / factor) as f32
    };
    (0..pairs).map(of_pair).collect()
}

fn changed(base: &Value, case: &Value) -> Value {
    if let Some(whole) = case.get("whole") {
        return whole.clone();
    }
    let mut config = merged(base, &case["change"]);
    for key in case["lacks"].as_array().unwrap() {
        config.as_object_mut().unwrap().remove(key.as_str().unwrap());
    }
    config
}

fn merged(base: &Value, change: &Value) -> Value {
    let mut merged: Map<String, Value> = base.as_object().unwrap().clone();
    merged.extend(change.as_object().unwrap().clone());
    merged.into()
}

/// Checks that every case gives the model of transformers, or a known rejection.
fn check(prefixes: &[&str]) {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for golden in Golden::all() {
        for (name, config, model) in golden.cases(prefixes) {
            if let Err(reason) = golden.check(&name, &config, &model) {
                wrong.push(format!("{} {name}: {reason}", golden.model_type));
            }
            count += 1;
        }
    }
    assert!(wrong.is_empty(), "{} of {count} cases:\n{}", wrong.len(), wrong.join("\n"));
    assert!(count > 100, "{count} cases");
}

#[test]
fn keys_that_are_left_out_have_the_defaults_of_transformers() {
    check(&["without/", "null/", "alias/", "wrapper/"]);
}

#[test]
fn scalings_equal_transformers_or_are_refused() {
    check(&["rope/"]);
}
