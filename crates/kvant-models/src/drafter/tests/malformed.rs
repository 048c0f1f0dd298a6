//! Files without a drafter, drafters of other targets, and invalid checkpoints are typed errors.

use kvant::Device;
use serde_json::{Value, json};

use super::{checkpoint::Tensors, eagle3, mtp, *};
use crate::Error;

fn refused(target: &str, drafter: &Path) -> Error {
    match Drafter::load(&files(drafter), &load(&golden(target), &Device::cpu()), None) {
        Ok(_) => panic!("{target}: the drafter is taken"),
        Err(error) => error,
    }
}

fn refused_directory(target: &str, config: &Value, tensors: &Tensors) -> Error {
    refused(target, tensors.directory(config).path())
}

/// The differing property of a drafter for another model.
fn difference(error: Error) -> &'static str {
    match error {
        Error::OtherTarget { what, .. } => what,
        other => panic!("{other}"),
    }
}

#[test]
fn models_are_no_drafters() {
    for (target, files) in
        [("llama", "llama"), ("qwen3_5", "qwen3_5"), ("gemma4_gguf", "gemma4_gguf"), ("dense", "dense")]
    {
        let error = refused(target, &golden(files));
        assert!(matches!(error, Error::NotADrafter { .. }), "{files}: {error}");
    }
}

#[test]
fn drafters_have_one_target() {
    // Assistants.
    assert_eq!(difference(refused("llama", &golden("assistant"))), "family");
    assert_eq!(difference(refused("wide", &golden("assistant"))), "KV heads");
    let assistant = |change: &dyn Fn(&mut Value)| {
        let mut config = mtp::config("assistant");
        change(&mut config);
        difference(refused_directory("dense", &config, &Tensors::default()))
    };
    assert_eq!(assistant(&|config| config["backbone_hidden_size"] = 33.into()), "hidden size");
    assert_eq!(assistant(&|config| config["text_config"]["vocab_size"] = 97.into()), "vocabulary");
    // Multi-token prediction.
    let predictor = |key: &str, value: u64| {
        let mut config = mtp::config("qwen3_5");
        let tensors = mtp::tensors(&config);
        config[key] = value.into();
        difference(refused_directory("qwen3_5", &config, &tensors))
    };
    assert_eq!(predictor("vocab_size", 97), "vocabulary");
    assert_eq!(predictor("hidden_size", 128), "hidden size");
    let config = mtp::config("qwen3_5");
    assert_eq!(difference(refused_directory("qwen3_next", &config, &mtp::tensors(&config))), "family");
    // EAGLE-3.
    let head = eagle3::head(64, [0, 1, 2]);
    assert_eq!(difference(refused_directory("dense", &head.config, &head.tensors)), "hidden size");
    let mut other = head.config.clone();
    other["transformer_layer_config"]["vocab_size"] = 100.into();
    assert_eq!(difference(refused_directory("llama", &other, &head.tensors)), "vocabulary");
}

/// Missing tensors, and tensors of other shapes, are named.
#[test]
fn tensors_are_checked() {
    let config = mtp::config("qwen3_5");
    let names = ["mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"];
    for name in names {
        let mut tensors = mtp::tensors(&config);
        tensors.remove(name);
        let error = refused_directory("qwen3_5", &config, &tensors);
        assert!(matches!(&error, Error::MissingTensor { name: missing } if missing == name), "{name}: {error}");
        tensors.matrix(name, &[3, 5]);
        let error = refused_directory("qwen3_5", &config, &tensors);
        assert!(matches!(&error, Error::TensorShape { name: wrong, .. } if wrong == name), "{name}: {error}");
    }
    let mut two = mtp::tensors(&config);
    two.norm("mtp.layers.1.input_layernorm.weight", 64, 0.0);
    assert!(matches!(refused_directory("qwen3_5", &config, &two), Error::Unsupported { .. }));
}

/// The map from draft tokens to target tokens.
#[test]
fn maps_of_vocabularies_are_checked() {
    let head = eagle3::head(64, [0, 1, 2]);
    let with = |values: Vec<i64>| {
        let mut tensors = head.tensors.clone();
        tensors.integers("d2t", values);
        refused_directory("llama", &head.config, &tensors)
    };
    // Draft token i is target token i + offset.
    let offsets = |index: usize, offset: i64| (0..40).map(|i| if i == index { offset } else { i as i64 + 3 }).collect();
    for wrong in [offsets(39, 57), offsets(0, -1), offsets(5, i64::MAX), offsets(3, 8)] {
        let error = with(wrong);
        assert!(matches!(&error, Error::TensorValue { name, .. } if name == "d2t"), "{error}");
    }
    assert!(matches!(with(vec![0; 39]), Error::TensorShape { .. }));
    let mut floats = head.tensors.clone();
    floats.remove("d2t");
    assert!(matches!(refused_directory("llama", &head.config, &floats), Error::MissingTensor { .. }));
    floats.norm("d2t", 40, 0.0);
    assert!(matches!(refused_directory("llama", &head.config, &floats), Error::TensorDType { .. }));
}

#[test]
fn configurations_are_checked() {
    let head = eagle3::head(64, [0, 1, 2]);
    let key_of = |change: &dyn Fn(&mut Value)| {
        let mut config = head.config.clone();
        change(&mut config);
        match refused_directory("llama", &config, &head.tensors) {
            Error::Config { key, .. } => key,
            Error::Unsupported { what, .. } => what,
            other => panic!("{other}"),
        }
    };
    let layers = "eagle_aux_hidden_state_layer_ids";
    assert!(key_of(&|config| config[layers] = json!([0, 1, 3])).contains(layers));
    assert!(key_of(&|config| config[layers] = json!([0, 1])).contains(layers));
    assert_eq!(key_of(&|config| config["draft_vocab_size"] = 97.into()), "draft_vocab_size");
    assert_eq!(key_of(&|config| config["fc_norm"] = true.into()), "fc_norm");
    assert_eq!(key_of(&|config| config["eagle_config"] = json!({"use_last_layernorm": false})), "use_last_layernorm");
    let two = key_of(&|config| config["transformer_layer_config"]["num_hidden_layers"] = 2.into());
    assert!(two.contains("2 layers"), "{two}");

    let centroids = |key: &str, value: Value| {
        let mut config = mtp::config("assistant_centroids");
        config[key] = value;
        match refused_directory("ple_shared", &config, &Tensors::default()) {
            Error::Config { key, .. } => key,
            other => panic!("{other}"),
        }
    };
    let mut narrow = mtp::config("assistant");
    narrow["text_config"]["sliding_window"] = 1.into();
    let error = refused_directory("dense", &narrow, &Tensors::default());
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    for (key, value) in [("num_centroids", 7), ("num_centroids", 0), ("centroid_intermediate_top_k", 9)] {
        assert_eq!(centroids(key, value.into()), key);
    }
}
