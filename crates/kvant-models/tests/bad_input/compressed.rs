//! Invalid files of compressed-tensors and of 8-bit floats.

use kvant_models::Error;
use serde_json::json;

use crate::{checkpoint, common::model_dir, config_bytes, config_of, load};

#[test]
fn every_wrong_part_is_named() {
    for variant in ["llama_w4a16", "llama_fp8"] {
        let parts = checkpoint(variant);
        // Its contents are the shapes of the other tensors.
        let names = parts.names().into_iter().filter(|name| name.contains("_proj.") && !name.ends_with("weight_shape"));
        for name in names {
            let mut wrong = parts.clone();
            let shape = wrong.header[&name]["shape"].as_array().unwrap().clone();
            wrong.header[&name]["shape"] = [vec![json!(1), json!(1)], shape].concat().into();
            let dir = model_dir(&config_bytes(variant), &wrong.bytes());
            match load(dir.path()) {
                Err(Error::TensorShape { name: got, .. }) => assert_eq!(got, name),
                other => panic!("{name}: {other:?}"),
            }
            let mut wrong = parts.clone();
            let dtype = wrong.header[&name]["dtype"].as_str().unwrap();
            let other = match dtype {
                "I32" => "U32",
                "F32" => "I32",
                "F8_E4M3" => "F8_E5M2",
                _ => "I16",
            };
            wrong.header[&name]["dtype"] = other.into();
            let dir = model_dir(&config_bytes(variant), &wrong.bytes());
            match load(dir.path()) {
                Err(Error::TensorDType { name: got, .. }) => assert_eq!(got, name),
                other => panic!("{name}: {other:?}"),
            }
            let mut less = parts.clone();
            less.remove(&name);
            let dir = model_dir(&config_bytes(variant), &less.bytes());
            match load(dir.path()) {
                // Without it, the zero point is the middle code.
                Ok(_) => assert!(name.ends_with("zero_point"), "{name}"),
                Err(Error::MissingTensor { name: missing }) => {
                    let as_dense = name.replace(".weight_packed", ".weight");
                    let as_others = name.replace("_scale_inv", "_scale");
                    assert!(missing == name || missing == as_dense || missing == as_others, "{name}: {missing}");
                }
                Err(other) => panic!("{name}: {other}"),
            }
        }
    }
}

#[test]
fn groups_in_another_order_are_refused() {
    let mut parts = checkpoint("llama_w4a16");
    let entry = json!({"dtype": "I32", "shape": [0], "data_offsets": [parts.data.len(), parts.data.len()]});
    parts.header.insert("model.layers.0.self_attn.q_proj.weight_g_idx".into(), entry);
    let dir = model_dir(&config_bytes("llama_w4a16"), &parts.bytes());
    assert!(matches!(load(dir.path()), Err(Error::Unsupported { what, .. }) if what.contains("weight_g_idx")));
}

#[test]
fn methods_are_checked_by_key() {
    for (variant, key, value) in [
        ("llama_w4a16", "format", json!("marlin-24")),
        ("llama_w4a16", "format", json!(4)),
        ("llama_w4a16", "quant_method", json!("awq")),
        ("llama_fp8", "weight_block_size", json!([0, 128])),
        ("llama_fp8", "weight_block_size", json!([128])),
        ("llama_fp8", "weight_block_size", json!("128")),
    ] {
        let mut config = config_of(variant);
        config["quantization_config"][key] = value.clone();
        let dir = model_dir(config.to_string().as_bytes(), &checkpoint(variant).bytes());
        match load(dir.path()) {
            Err(Error::Config { key: named, .. }) => assert!(named.ends_with(key), "{named}"),
            other => panic!("{key} = {value}: {other:?}"),
        }
    }
}

/// Stacked experts have neither format.
#[test]
fn stacked_experts_are_refused() {
    let module = "model.layers.0.mlp.switch_mlp.gate_proj";
    let parts = checkpoint("qwen3_moe_mlx");
    let mut packed = parts.clone();
    let entry = json!({"dtype": "I32", "shape": [0], "data_offsets": [packed.data.len(), packed.data.len()]});
    packed.header.insert(format!("{module}.weight_packed"), entry);
    let mut fp8 = parts;
    let info = &mut fp8.header[&format!("{module}.weight")];
    info["dtype"] = json!("F8_E4M3");
    let shape: Vec<u64> = serde_json::from_value(info["shape"].clone()).unwrap();
    info["shape"] = json!([shape[0], shape[1], shape[2] * 4]);
    for wrong in [packed, fp8] {
        let dir = model_dir(&config_bytes("qwen3_moe_mlx"), &wrong.bytes());
        match load(dir.path()) {
            Err(Error::Unsupported { what, .. }) => assert!(what.contains(module), "{what}"),
            other => panic!("{other:?}"),
        }
    }
}
