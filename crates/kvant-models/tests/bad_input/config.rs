//! Configurations.

use std::path::Path;

use kvant_models::{Config, Error, Logits, PoolOptions};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{
    any_value, assert_modest, checkpoint,
    common::{golden, model_dir},
    config_bytes, config_of, load,
};

/// Routers that the description cannot express, and inconsistent numbers.
#[test]
fn other_experts_are_refused_by_key() {
    let cases = [
        ("glm4_moe", "scoring_func", json!("softmax")),
        ("glm4_moe", "topk_method", json!("greedy")),
        ("glm4_moe", "n_group", json!(0)),
        ("glm4_moe", "n_group", json!(9)),
        ("glm4_moe", "topk_group", json!(5)),
        ("glm4_moe", "routed_scaling_factor", json!(1e9)),
        ("glm4_moe", "num_experts_per_tok", json!(9)),
        ("glm4_moe", "partial_rotary_factor", json!(0.01)),
        ("glm4_moe", "n_shared_experts", json!(-1)),
        ("qwen2_moe", "shared_expert_intermediate_size", json!(0)),
        ("ernie4_5_moe", "moe_gate_act", json!("sigmoid")),
        ("ernie4_5_moe", "moe_norm_min", json!(-1)),
        ("ernie4_5_moe", "moe_layer_end_index", json!(-2)),
        ("ernie4_5_moe", "use_bias", json!(true)),
        ("hunyuan_moe", "moe_topk", json!([2, 3])),
        ("hunyuan_moe", "moe_topk", json!([])),
        ("hunyuan_moe", "num_shared_expert", json!(2)),
        ("hunyuan_moe", "use_cla", json!(true)),
        ("minimax_m2", "scoring_func", json!("softmax")),
        ("minimax_m2", "qk_norm_type", json!("per_head")),
        ("minimax_m2", "rotary_dim", json!(65)),
        ("minimax_m2", "use_routing_bias", json!(false)),
    ];
    for (variant, key, value) in cases {
        let mut config = config_of(variant);
        config[key] = value.clone();
        let dir = model_dir(config.to_string().as_bytes(), &checkpoint(variant).bytes());
        match load(dir.path()) {
            Err(Error::Config { key: named, .. }) => assert_eq!(named, key, "{variant}: {value}"),
            other => panic!("{variant}: {key} = {value}: {other:?}"),
        }
    }
    // Groups that do not divide the experts, or have too few.
    for (count, chosen) in [(3, 1), (8, 4), (4, 1)] {
        let mut config = config_of("glm4_moe");
        (config["n_group"], config["topk_group"]) = (count.into(), chosen.into());
        let dir = model_dir(config.to_string().as_bytes(), &checkpoint("glm4_moe").bytes());
        let error = load(dir.path()).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { what, .. } if what == "layer 1"), "{error}");
    }
}

#[test]
fn absurd_configurations_are_refused_by_key() {
    let cases = [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!(1u64 << 40)),
        ("hidden_size", json!("32")),
        ("hidden_size", json!(32.5)),
        ("hidden_size", json!(null)),
        ("num_hidden_layers", json!(0)),
        ("num_hidden_layers", json!(u64::MAX)),
        ("num_attention_heads", json!(0)),
        ("num_attention_heads", json!([2])),
        ("num_key_value_heads", json!(0)),
        ("head_dim", json!(65)),
        ("global_head_dim", json!(0)),
        ("intermediate_size", json!(1u64 << 60)),
        ("vocab_size", json!(1u64 << 33)),
        ("sliding_window", json!(0)),
        ("sliding_window", json!(1u64 << 32)),
        ("rms_norm_eps", json!(-1e-6)),
        ("rms_norm_eps", json!("tiny")),
        ("final_logit_softcapping", json!(0.0)),
        ("final_logit_softcapping", json!(-3)),
        // Not zero, but zero when rounded to f32.
        ("final_logit_softcapping", json!(9e-309)),
        ("num_kv_shared_layers", json!(2)),
        ("num_experts", json!(0)),
        ("num_experts", json!(1 << 20)),
        ("top_k_experts", json!(7)),
        ("top_k_experts", json!(0)),
        ("moe_intermediate_size", json!(0)),
        ("layer_types", json!("full_attention")),
        ("layer_types", json!([])),
        ("attention_bias", json!(true)),
        ("attention_k_eq_v", json!(3)),
        ("hidden_activation", json!("relu")),
        ("use_bidirectional_attention", json!("all")),
        ("eos_token_id", json!(-1)),
        ("eos_token_id", json!([1, "x"])),
        ("rope_parameters", json!(3)),
        ("text_config", json!(3)),
        ("per_layer_config", json!([])),
    ];
    let parts = checkpoint("moe").bytes();
    for (key, value) in cases {
        let mut config = config_of("moe");
        if key == "text_config" {
            config["model_type"] = "gemma4".into();
        }
        config[key] = value.clone();
        let dir = model_dir(config.to_string().as_bytes(), &parts);
        match load(dir.path()) {
            // An unsupported head size can also be derived, and the error then names its inputs.
            Err(Error::Config { key: named, .. }) => {
                assert!(named.starts_with(key) || (key == "global_head_dim" && named == "head_dim"), "{key}: {named}");
            }
            other => panic!("{key} = {value}: {other:?}"),
        }
    }
    let nested = [
        ("/layer_types/2", json!("sliding_attention")),
        ("/layer_types/0", json!("chunked_attention")),
        ("/layer_types/0", json!(7)),
        ("/rope_parameters/full_attention/rope_theta", json!(0)),
        ("/rope_parameters/full_attention/rope_theta", json!(null)),
        ("/rope_parameters/full_attention/rope_type", json!("yarn")),
        ("/rope_parameters/full_attention/type", json!("linear")),
        ("/rope_parameters/sliding_attention/type", json!("linear")),
        ("/rope_parameters/full_attention/partial_rotary_factor", json!(1.5)),
        ("/rope_parameters/sliding_attention", json!(null)),
        // Ambiguous: one implementation rotates all pairs, another a part.
        ("/rope_parameters/sliding_attention/partial_rotary_factor", json!(0.25)),
    ];
    for (pointer, value) in nested {
        let mut config = config_of("moe");
        let (object, last) = pointer.rsplit_once('/').unwrap();
        match config.pointer_mut(object).unwrap() {
            Value::Array(list) => list[last.parse::<usize>().unwrap()] = value.clone(),
            object => object[last] = value.clone(),
        }
        let Err(Error::Config { key, .. }) = Config::parse(&config) else { panic!("{pointer} = {value}") };
        assert!(key.contains(last), "{pointer}: {key}");
    }
    for (key, value) in [
        ("3", json!({})),
        ("x", json!({})),
        ("0", json!(3)),
        ("0", json!({"head_dim": 100})),
        ("00", json!({"num_key_value_heads": 0})),
        ("1", json!({"intermediate_size": 8})),
    ] {
        let mut config = config_of("moe");
        config["per_layer_config"] = json!({key: value});
        assert!(matches!(Config::parse(&config), Err(Error::Config { .. })), "{key}");
    }
    for quantization in [
        json!(4),
        json!({}),
        json!({"bits": 7, "group_size": 64}),
        json!({"bits": 4, "group_size": 16}),
        json!({"bits": 4, "group_size": 64, "mode": "mxfp4"}),
        json!({"bits": 8, "group_size": 32, "mode": "mxfp4"}),
        json!({"bits": 4, "group_size": 32, "mode": "mxfp8"}),
        json!({"bits": 8, "group_size": 64, "mode": "mxfp8"}),
        json!({"bits": 4, "group_size": 32, "mode": "nvfp4"}),
        json!({"bits": 4, "group_size": 16, "mode": "nvfp8"}),
        json!({"bits": 4, "group_size": 64, "model.layers.0.mlp.up_proj": 8}),
        json!({"bits": 4, "group_size": 64, "model.layers.0.mlp.up_proj": {"mode": "nvfp4", "bits": 8}}),
        json!({"quant_method": "gptq", "bits": 4, "group_size": 128}),
    ] {
        let mut config = config_of("moe_mlx");
        config["quantization"] = quantization.clone();
        let dir = model_dir(config.to_string().as_bytes(), &checkpoint("moe_mlx").bytes());
        let error = load(dir.path()).unwrap_err();
        assert!(matches!(error, Error::Config { .. }), "{quantization}");
        assert_eq!(quantization["mode"] == "nvfp8", error.to_string().contains("\"mxfp8\" or \"nvfp4\""), "{error}");
    }
}

#[test]
fn two_keys_of_tied_embeddings_must_agree() {
    for (inner, outer, fine) in [(true, true, true), (true, false, false), (false, true, false)] {
        let mut config = config_of("wide");
        config["text_config"]["tie_word_embeddings"] = inner.into();
        config["tie_word_embeddings"] = outer.into();
        assert_eq!(Config::parse(&config).is_ok(), fine, "{inner} {outer}");
    }
}

/// Files have overrides for other towers, in formats that text models do not need.
#[test]
fn overrides_of_modules_that_text_does_not_have_are_ignored() {
    for (name, value) in [
        ("vision_tower.blocks.0.mlp", json!({"bits": 3, "group_size": 16, "mode": "mxfp4"})),
        ("multi_modal_projector.linear", json!(8)),
        ("model.layers.9.mlp.up_proj", json!({"bits": "many"})),
    ] {
        let mut config = config_of("moe_mlx");
        config["quantization"][name] = value;
        let dir = model_dir(config.to_string().as_bytes(), &checkpoint("moe_mlx").bytes());
        load(dir.path()).unwrap();
    }
}

/// Without layer_types, transformers makes every sixth layer full, MLX the number that another key gives.
#[test]
fn layers_whose_kinds_are_ambiguous_are_refused() {
    let mut config = config_of("moe");
    config.as_object_mut().unwrap().remove("layer_types");
    let kinds = |config: &Value| {
        Config::parse(config)
            .map(|c| c.decoder.blocks.iter().map(|b| b.attention().unwrap().window.is_none()).collect::<Vec<_>>())
    };
    let want = kinds(&config).unwrap();
    assert_eq!((want.len() < 6, want.last()), (true, Some(&true)));
    assert!(!want[..want.len() - 1].contains(&true));
    config["sliding_window_pattern"] = 6.into();
    assert_eq!(kinds(&config).unwrap(), want);
    config["sliding_window_pattern"] = 2.into();
    assert!(matches!(kinds(&config), Err(Error::Config { key, .. }) if key == "sliding_window_pattern"));
}

/// The text part of Gemma 4 12B's file: a model without per-layer inputs and experts.
#[test]
fn unified_models_are_read_as_text_models() {
    let mut text = config_of("dense");
    let want = Config::parse(&text).unwrap();
    assert_eq!(want.decoder.per_layer_input, None);
    assert!(want.decoder.blocks.iter().all(|block| block.feed_forward.moe().is_none()));
    text["model_type"] = "gemma4_unified_text".into();
    let whole = |text: &Value| json!({"model_type": "gemma4_unified", "text_config": text});
    for size in [json!(0), Value::Null] {
        text["hidden_size_per_layer_input"] = size;
        assert_eq!(Config::parse(&text).unwrap(), want);
    }
    // In the other models, an absent key means 256.
    text.as_object_mut().unwrap().remove("hidden_size_per_layer_input");
    assert_eq!(Config::parse(&text).unwrap(), want);
    assert_eq!(Config::parse(&whole(&text)).unwrap(), want);
    let mut unnamed = text.clone();
    unnamed.as_object_mut().unwrap().remove("model_type");
    unnamed["architectures"] = json!(["Gemma4UnifiedForCausalLM"]);
    assert_eq!(Config::parse(&unnamed).unwrap(), want);
    let unnamed = json!({"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": text});
    assert_eq!(Config::parse(&unnamed).unwrap(), want);

    for (key, value) in [("hidden_size_per_layer_input", json!(256)), ("enable_moe_block", json!(true))] {
        let mut odd = text.clone();
        odd[key] = value;
        assert!(matches!(Config::parse(&whole(&odd)), Err(Error::Config { key: k, .. }) if k.ends_with(key)), "{key}");
    }
}

/// The text part of a model with images, and values that its configuration must not have.
#[test]
fn ministral_configurations_are_checked_by_key() {
    let text = config_of("ministral3");
    let whole = json!({"model_type": "mistral3", "text_config": text, "vision_config": {"model_type": "pixtral"}});
    assert_eq!(Config::parse(&whole).unwrap(), Config::parse(&text).unwrap());
    for (key, value) in [
        ("llama_4_scaling_beta", Value::Null),
        ("llama_4_scaling_beta", json!(-1)),
        ("original_max_position_embeddings", json!(0)),
        ("factor", json!("4")),
        ("rope_type", json!("longrope")),
    ] {
        let mut config = text.clone();
        config["rope_parameters"][key] = value;
        let Err(Error::Config { key: named, .. }) = Config::parse(&config) else { panic!("{key}") };
        assert!(named.starts_with("rope_parameters."), "{key}: {named}");
    }
    let mut config = text.clone();
    config["max_position_embeddings"] = json!(1u64 << 31);
    assert!(matches!(Config::parse(&config), Err(Error::Config { key, .. }) if key == "max_position_embeddings"));
}

/// The message names the invalid file.
#[test]
fn generation_configs_are_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config_bytes("moe")).unwrap();
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [1, "x"]}"#).unwrap();
    match Config::load(dir.path()) {
        Err(Error::File { path, reason }) => {
            assert!(path.ends_with("generation_config.json") && reason.contains("`eos_token_id`"), "{path}: {reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn other_architectures_are_named() {
    let parts = checkpoint("moe").bytes();
    for name in ["gpt2", "", "gemma4_text2", "gemma4_unified_assistant"] {
        let mut config = config_of("moe");
        config["model_type"] = name.into();
        let dir = model_dir(config.to_string().as_bytes(), &parts);
        let error = load(dir.path()).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }));
        assert!(error.to_string().contains(&format!("{name:?}")), "{error}");
        assert!(error.to_string().contains("gemma4_text"), "known types are listed: {error}");
    }
    let mut config = config_of("moe");
    config.as_object_mut().unwrap().remove("model_type");
    config["architectures"] = json!(["GPT2LMHeadModel"]);
    let error = Config::parse(&config).unwrap_err();
    assert!(error.to_string().contains("GPT2LMHeadModel"), "{error}");
}

#[test]
fn configurations_that_are_no_json_objects_are_file_errors() {
    let deep = "[".repeat(100_000);
    let parts = checkpoint("moe").bytes();
    for text in ["", "{", "null", "[]", "3", "{\"a\": 1,}", "\u{0}", &deep] {
        let dir = model_dir(text.as_bytes(), &parts);
        let Err(Error::File { path, .. }) = load(dir.path()) else { panic!("{text:.20}") };
        assert!(path.ends_with("config.json"));
    }
    let nowhere = Path::new("/nonexistent/model");
    assert!(matches!(load(nowhere), Err(Error::File { path, .. }) if path.contains("nonexistent")));
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(load(empty.path()), Err(Error::File { path, .. }) if path.ends_with("config.json")));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// With some keys replaced: an error, or a model that loads and runs with modest memory.
    #[test]
    fn mutated_configurations_never_panic(
        variant in prop::sample::select(vec![
            "ple_shared", "moe", "moe_mlx", "qwen2_window", "smollm3", "granite_hybrid", "olmo3", "exaone4", "phi3", "ernie4_5", "hunyuan", "muse_glimmer",
        ]),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..3),
    ) {
        let mut config = config_of(variant);
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned().chain(["per_layer_config".to_string()]).collect();
        for (key, value) in edits {
            config[key.get(&keys)] = value;
        }
        let path = golden(variant).join("model.safetensors");
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        std::fs::copy(path, dir.path().join("model.safetensors")).unwrap();
        if let Ok(model) = load(dir.path()) {
            let options = PoolOptions { longest: 16, ..PoolOptions::default() };
            let mut sequence = model.new_pool(&options).unwrap().sequence();
            match model.feed(&mut sequence, &[1, 2, 3], Logits::All) {
                Ok(logits) => prop_assert_eq!(logits.shape()[1], model.vocab_size()),
                // A context of fewer tokens.
                Err(Error::Argument { arg: "tokens", .. }) => {}
                Err(error) => prop_assert!(false, "{}", error),
            }
            assert_modest();
        }
    }
}
