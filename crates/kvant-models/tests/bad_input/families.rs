//! Keys of the dense families: impossible values are errors that name the key, and spellings of one key are equivalent.

use kvant::Device;
use kvant_models::{Config, Error, Files, Inspection, Model, spec::OutputMatrix};
use serde_json::{Value, json};

use crate::{
    assert_modest,
    common::{Parts, golden, model_dir},
    config_of,
};

#[test]
fn impossible_values_name_their_key() {
    let long = |factors: Value| json!({"type": "longrope", "short_factor": factors, "long_factor": [1.0]});
    let cases = [
        ("smollm3", "no_rope_layers", json!([1, 0]), "no_rope_layers"),
        ("smollm3", "no_rope_layers", json!([1, 2, 0]), "no_rope_layers"),
        ("smollm3", "use_sliding_window", json!(3), "use_sliding_window"),
        ("smollm3_mlx", "no_rope_layer_interval", json!(0), "no_rope_layer_interval"),
        ("smollm3_mlx", "layer_types", json!(vec!["sliding_attention"; 4]), "sliding_window"),
        ("seed_oss", "attention_out_bias", json!("x"), "attention_out_bias"),
        ("granite", "residual_multiplier", json!(0), "residual_multiplier"),
        ("granite", "logits_scaling", json!(-1), "logits_scaling"),
        ("granite", "embedding_multiplier", json!("x"), "embedding_multiplier"),
        ("granite", "attention_multiplier", json!(1e9), "attention_multiplier"),
        ("granite_hybrid", "num_local_experts", json!(8), "num_local_experts"),
        ("granite_hybrid", "layer_types", json!(["attention", "linear_attention"]), "layer_types"),
        ("granite_hybrid", "layer_types", json!(["attention"]), "layer_types"),
        ("granite_hybrid", "layer_types", json!(null), "layer_types"),
        ("granite_hybrid", "position_embedding_type", json!(null), "position_embedding_type"),
        ("olmo3", "rope_theta", json!(1e4), "rope_theta"),
        ("olmo3", "sliding_window", json!(null), "sliding_window"),
        ("exaone4", "sliding_window_pattern", json!("LX"), "sliding_window_pattern"),
        ("exaone4", "sliding_window_pattern", json!(""), "sliding_window_pattern"),
        ("exaone4", "sliding_window_pattern", json!(0), "sliding_window_pattern"),
        ("phi3", "partial_rotary_factor", json!(0.71), "partial_rotary_factor"),
        ("phi3", "partial_rotary_factor", json!(1.5), "partial_rotary_factor"),
        ("phi3", "original_max_position_embeddings", json!(0), "original_max_position_embeddings"),
        ("phi3", "rope_scaling", json!({"type": "linear", "factor": 2.0}), "rope_scaling.rope_type"),
        ("phi3", "rope_scaling", long(json!([1.0])), "rope_scaling.short_factor"),
        ("phi3", "rope_scaling", long(json!(vec![0.0; 24])), "rope_scaling.short_factor"),
        ("phi3", "rope_scaling", long(json!(vec![1.0; 24])), "rope_scaling.long_factor"),
        ("phi3", "attention_bias", json!(true), "attention_bias"),
        ("ernie4_5", "use_bias", json!(3), "use_bias"),
        ("hunyuan", "rope_scaling", json!({"type": "dynamic", "factor": 2.0}), "rope_scaling.alpha"),
        ("hunyuan", "use_qk_norm", json!(false), "use_qk_norm"),
        ("llama", "partial_rotary_factor", json!(0.5), "partial_rotary_factor"),
        ("muse_glimmer", "layer_rope_theta", json!([5e4, 0]), "layer_rope_theta"),
        ("muse_glimmer", "layer_rope_theta", json!([5e4, 1e4, 0]), "layer_rope_theta"),
        ("muse_glimmer", "layer_rope_theta", json!(5e4), "layer_rope_theta"),
        ("muse_glimmer", "post_norm_eps", json!(-1), "post_norm_eps"),
        ("muse_glimmer", "qk_scale_factor", json!(0), "qk_scale_factor"),
        ("muse_glimmer", "output_multiplier", json!("x"), "output_multiplier"),
        ("muse_glimmer", "final_logit_softcapping", json!(0), "final_logit_softcapping"),
        ("muse_glimmer", "sliding_window", json!(null), "sliding_window"),
        ("muse_glimmer", "hidden_activation", json!("relu"), "hidden_activation"),
    ];
    for (variant, key, value, named) in cases {
        let mut config = config_of(variant);
        let text = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
        text[key] = value.clone();
        match Config::parse(&config) {
            Err(Error::Config { key: got, .. }) => {
                assert_eq!(got.trim_start_matches("text_config."), named, "{variant}: {key} {value}");
            }
            other => panic!("{variant}: {key} {value}: {other:?}"),
        }
    }
}

/// MLX's files have the keys of Muse Glimmer's text model at the top level, with the type of the whole model.
#[test]
fn muse_glimmer_without_text_config() {
    let nested = config_of("muse_glimmer");
    let mut flat = nested["text_config"].clone();
    flat["model_type"] = "muse_glimmer".into();
    assert_eq!(Config::parse(&flat).unwrap().decoder, Config::parse(&nested).unwrap().decoder);
}

/// Mistral 3's output matrix is the embedding unless a key or the checkpoint specifies otherwise.
#[test]
fn output_of_a_wrapper_without_the_key() {
    let text = config_of("mistral");
    let mut text = text.as_object().unwrap().clone();
    text.remove("tie_word_embeddings");
    let wrapper = json!({"model_type": "mistral3", "text_config": text});
    let output = |config: &Value| Config::parse(config).unwrap().decoder.output;
    assert_eq!(output(&wrapper), OutputMatrix::OwnIfStored);
    for (is_tied, expected) in [(true, OutputMatrix::Embedding), (false, OutputMatrix::Own)] {
        for inside in [true, false] {
            let mut config = wrapper.clone();
            let object = if inside { &mut config["text_config"] } else { &mut config };
            object["tie_word_embeddings"] = is_tied.into();
            assert_eq!(output(&config), expected, "{config}");
        }
    }
    let own = Parts::read(&golden("mistral").join("model.safetensors"));
    let mut tied = own.clone();
    tied.remove("lm_head.weight");
    let bytes = |parts: &Parts| {
        let dir = model_dir(wrapper.to_string().as_bytes(), &parts.bytes());
        let model = Model::load(dir.path(), &Device::cpu()).unwrap();
        let listed = Inspection::open(&Files::at(dir.path()).unwrap()).unwrap();
        assert_eq!(model.weight_bytes(), listed.weight_bytes);
        model.weight_bytes()
    };
    // f16.
    assert_eq!(bytes(&own) - bytes(&tied), 2 * 96 * 64);
}

#[test]
fn patterns_of_exaone4() {
    let config = config_of("exaone4");
    let parsed = Config::parse(&config).unwrap();
    for pattern in [json!("LLLG"), json!(null)] {
        let mut other = config.clone();
        other["sliding_window_pattern"] = pattern;
        assert_eq!(Config::parse(&other).unwrap(), parsed);
    }
    let kinds = parsed.decoder.blocks.iter().map(|block| block.attention().unwrap());
    let kinds: Vec<_> = kinds.map(|attention| (attention.window, attention.rope.rotated_pairs)).collect();
    assert_eq!(kinds, [(Some(8), 32), (Some(8), 32), (Some(8), 32), (None, 0)]);
}

#[test]
fn layers_of_smollm3_without_a_list() {
    let mut config = config_of("smollm3");
    config["no_rope_layers"] = json!(null);
    config["no_rope_layer_interval"] = json!(3);
    let blocks = Config::parse(&config).unwrap().decoder.blocks;
    let kinds =
        blocks.iter().map(|block| (block.attention().unwrap().window, block.attention().unwrap().rope.rotated_pairs));
    assert_eq!(kinds.collect::<Vec<_>>(), [(None, 32), (None, 32), (Some(8), 0)]);
}

#[test]
fn granite_hybrids_may_have_no_positions() {
    let mut config = config_of("granite_hybrid");
    config["position_embedding_type"] = json!("nope");
    let blocks = Config::parse(&config).unwrap().decoder.blocks;
    assert!(blocks.iter().all(|block| block.attention().unwrap().rope.rotated_pairs == 0));
}

/// A large original context in a file does not allocate a table of that length.
#[test]
fn long_rope_tables_are_limited() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(golden("phi3").join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let mut config = config_of("phi3");
    config["original_max_position_embeddings"] = json!(1 << 30);
    // Without a factor of cosines and sines, no tables are needed.
    config["rope_scaling"]["attention_factor"] = json!(1.5);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let error = Model::load(dir.path(), &Device::cpu()).unwrap_err().to_string();
    assert!(error.contains("`context` must be at most 349525"), "{error}");
    assert_modest();
}
