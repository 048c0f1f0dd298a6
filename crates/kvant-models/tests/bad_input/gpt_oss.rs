//! Configurations and files of gpt-oss.

use kvant::ops::Activation;
use kvant_models::{Config, Error, spec::OutputMatrix};
use serde_json::{Value, json};

use crate::{checkpoint, common::model_dir, config_bytes, config_of, load};

/// The keys of gpt-oss-20b that describe its decoder.
fn released() -> Value {
    let kind = |l: usize| if l.is_multiple_of(2) { "sliding_attention" } else { "full_attention" };
    json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": (0..24).map(kind).collect::<Vec<_>>(), "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": false,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201088,
    })
}

#[test]
fn released_configurations_are_understood() {
    let config = Config::parse(&released()).unwrap();
    let blocks = &config.decoder.blocks;
    let windows: Vec<_> = blocks.iter().map(|block| block.attention().unwrap().window).collect();
    assert_eq!(windows, [Some(128), None].repeat(12));
    let (attention, moe) = (blocks[1].attention().unwrap(), blocks[1].feed_forward.moe().unwrap());
    assert!(
        attention.qkv_bias
            && attention.output_bias
            && attention.sinks
            && moe.biases
            && config.decoder.output == OutputMatrix::Own
    );
    assert_eq!((moe.experts, moe.top_k, moe.width, moe.activation), (32, 4, 2880, Activation::ClampedSwish));
    // 0.1 · ln(32) + 1, on queries and keys.
    let factor = (attention.scale * 8.0).sqrt();
    assert!((factor - 1.346_573_6).abs() < 1e-6, "{factor}");
    // Transformers' defaults equal the released models.
    let mut short = released();
    for key in [
        "layer_types",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "swiglu_limit",
        "attention_bias",
        "head_dim",
        "rms_norm_eps",
        "hidden_act",
        "num_experts_per_tok",
        "tie_word_embeddings",
    ] {
        short.as_object_mut().unwrap().remove(key);
    }
    assert_eq!(Config::parse(&short).unwrap(), config);
}

#[test]
fn configurations_of_gpt_oss_are_checked_by_key() {
    let cases = [
        ("swiglu_limit", json!(8.0)),
        ("swiglu_alpha", json!(1.0)),
        ("hidden_act", json!("gelu_pytorch_tanh")),
        ("hidden_act", json!("relu")),
        ("num_local_experts", json!(0)),
        ("num_local_experts", json!(1 << 20)),
        ("num_experts_per_tok", json!(33)),
        ("num_experts_per_tok", json!(0)),
        ("intermediate_size", json!(1u64 << 40)),
        ("sliding_window", json!(null)),
        ("sliding_window", json!(0)),
        ("layer_types", json!(["full_attention"])),
        ("attention_bias", json!(1)),
        ("num_key_value_heads", json!(7)),
        ("rms_norm_eps", json!(-1)),
    ];
    for (key, value) in cases {
        let mut config = released();
        config[key] = value.clone();
        match Config::parse(&config) {
            Err(Error::Config { key: named, .. }) => assert!(named == key || named == "num_attention_heads", "{named}"),
            other => panic!("{key} = {value}: {other:?}"),
        }
    }
    let mut config = released();
    config["rope_scaling"]["truncate"] = json!("no");
    assert!(matches!(Config::parse(&config), Err(Error::Config { key, .. }) if key == "rope_scaling.truncate"));
}

/// Every 32 inputs of a row share a scale: other widths are impossible in MXFP4.
#[test]
fn widths_that_mxfp4_lacks_are_refused() {
    let mut config = config_of("gpt_oss_mxfp4");
    config["intermediate_size"] = json!(80);
    let dir = model_dir(config.to_string().as_bytes(), &checkpoint("gpt_oss_mxfp4").bytes());
    assert!(matches!(load(dir.path()), Err(Error::TensorShape { name, .. }) if name.contains("gate_up_proj")));
    config["hidden_size"] = json!(80);
    let dir = model_dir(config.to_string().as_bytes(), &checkpoint("gpt_oss_mxfp4").bytes());
    assert!(load(dir.path()).is_err());
}

#[test]
fn sinks_are_finite() {
    let mut parts = checkpoint("gpt_oss");
    let name = "model.layers.1.self_attn.sinks";
    let start = parts.header[name]["data_offsets"][0].as_u64().unwrap() as usize;
    parts.data[start..start + 2].copy_from_slice(&[0x80, 0x7F]);
    let dir = model_dir(&config_bytes("gpt_oss"), &parts.bytes());
    assert!(matches!(load(dir.path()), Err(Error::TensorValue { name: got, .. }) if got == name));
}

#[test]
fn experts_of_another_dtype_are_named() {
    for (name, dtype) in [
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "I8"),
        ("model.layers.0.mlp.experts.down_proj_scales", "I8"),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", "I16"),
    ] {
        let mut wrong = checkpoint("gpt_oss_mxfp4");
        wrong.header[name]["dtype"] = dtype.into();
        let dir = model_dir(&config_bytes("gpt_oss_mxfp4"), &wrong.bytes());
        match load(dir.path()) {
            Err(Error::TensorDType { name: got, .. }) => assert_eq!(got, name),
            other => panic!("{name} as {dtype}: {other:?}"),
        }
    }
}
