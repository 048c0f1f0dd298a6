//! Tensors that a model lacks or cannot use, and unsupported computations.

use std::ops::ControlFlow;

use half::bf16;
use kvant::{DType, Device};
use kvant_models::{Decoder, Error, LoadOptions, Logits, Model, PoolOptions, Request, Sampling, generate};
use serde_json::{Value, json};

use crate::{
    checkpoint,
    common::{golden, model_dir},
    config_bytes, config_of, load,
};

#[test]
fn every_missing_tensor_is_named() {
    for variant in
        ["ple_shared", "moe", "moe_mlx", "gpt_oss", "gpt_oss_mxfp4", "gpt_oss_mlx", "llama_mxfp8", "qwen3_moe_nvfp4"]
    {
        let parts = checkpoint(variant);
        for name in parts.names() {
            let mut less = parts.clone();
            less.remove(&name);
            let dir = model_dir(&config_bytes(variant), &less.bytes());
            // Layer 3 of `ple_shared` shares keys and values: its own tensors in the file are ignored.
            let ignored = name.contains("layers.3.self_attn.k") || name.contains("layers.3.self_attn.v");
            match load(dir.path()) {
                Ok(_) => assert!(variant == "ple_shared" && ignored, "{name}"),
                // Without its scales, a matrix counts as dense and has the wrong shape. Without the fused experts, the
                // loader looks for MLX's.
                Err(Error::TensorShape { name: wrong, .. }) => {
                    assert_eq!(Some(wrong.as_str()), name.replace(".scales", ".weight").as_str().into());
                    assert!(name.ends_with(".scales"));
                }
                Err(Error::MissingTensor { name: missing }) => {
                    let other = name.ends_with("experts.gate_up_proj") && missing.contains("experts.switch_glu.gate");
                    assert!(missing == name || other, "{name}: {missing}");
                }
                Err(other) => panic!("{name}: {other}"),
            }
        }
    }
}

#[test]
fn every_wrong_shape_is_named() {
    for variant in
        ["ple_shared", "moe", "moe_mlx", "gpt_oss", "gpt_oss_mxfp4", "gpt_oss_mlx", "llama_mxfp8", "qwen3_moe_nvfp4"]
    {
        let parts = checkpoint(variant);
        for name in parts.names() {
            let mut wrong = parts.clone();
            let shape = wrong.header[&name]["shape"].as_array().unwrap().clone();
            // An equal number of elements in other dimensions.
            wrong.header[&name]["shape"] = [vec![json!(1)], shape].concat().into();
            let dir = model_dir(&config_bytes(variant), &wrong.bytes());
            let ignored = name.contains("layers.3.self_attn.k") || name.contains("layers.3.self_attn.v");
            match load(dir.path()) {
                Ok(_) => assert!(variant == "ple_shared" && ignored, "{name}"),
                Err(Error::TensorShape { name: got, .. }) => assert_eq!(got, name),
                Err(other) => panic!("{name}: {other}"),
            }
        }
    }
}

#[test]
fn tensors_of_another_dtype_are_named() {
    let parts = checkpoint("moe_mlx");
    for (name, dtype) in [
        ("model.norm.weight", "I32"),
        ("model.norm.weight", "U32"),
        ("model.layers.0.mlp.up_proj.weight", "F32"),
        ("model.layers.0.mlp.up_proj.weight", "I32"),
        ("model.layers.0.mlp.up_proj.scales", "I32"),
    ] {
        let mut wrong = parts.clone();
        wrong.header[name]["dtype"] = dtype.into();
        let dir = model_dir(&config_bytes("moe_mlx"), &wrong.bytes());
        match load(dir.path()) {
            Err(Error::TensorDType { name: got, .. }) => assert_eq!(got, name),
            other => panic!("{name} as {dtype}: {other:?}"),
        }
    }
}

#[test]
fn a_layer_scalar_that_is_no_number_is_refused() {
    let mut parts = checkpoint("moe_mlx");
    let name = "model.layers.1.layer_scalar";
    let start = parts.header[name]["data_offsets"][0].as_u64().unwrap() as usize;
    parts.data[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let dir = model_dir(&config_bytes("moe_mlx"), &parts.bytes());
    assert!(matches!(load(dir.path()), Err(Error::TensorValue { name: got, .. }) if got == name));
}

/// A tied model whose file also has an output matrix is valid if it is a copy of the embedding, and contradictory
/// otherwise.
#[test]
fn a_second_output_matrix_must_be_the_embedding() {
    for variant in ["ple_shared", "dense_mlx"] {
        let original = checkpoint(variant);
        let modules: Vec<String> = original.names().into_iter().filter(|name| name.contains("embed_tokens.")).collect();
        assert_eq!(modules.len(), if variant == "dense_mlx" { 3 } else { 1 });
        // A copy of all parts, with a different byte in one of them, and without the biases.
        for (changed, missing) in [(None, false), (Some(0), false), (Some(modules.len() - 1), false), (None, true)] {
            let mut parts = checkpoint(variant);
            let missing = usize::from(missing && modules.len() > 1);
            for (i, name) in modules.iter().enumerate().skip(missing) {
                let mut entry = original.header[name].clone();
                let at = |k: usize| entry["data_offsets"][k].as_u64().unwrap() as usize;
                let mut bytes = original.data[at(0)..at(1)].to_vec();
                if changed == Some(i) {
                    *bytes.last_mut().unwrap() ^= 1;
                }
                entry["data_offsets"] = json!([parts.data.len(), parts.data.len() + bytes.len()]);
                parts.data.extend(bytes);
                let part = name.rsplit_once('.').unwrap().1;
                parts.header.insert(format!("lm_head.{part}"), entry);
            }
            let dir = model_dir(&config_bytes(variant), &parts.bytes());
            let result = load(dir.path());
            if changed.is_none() && missing == 0 {
                assert!(result.is_ok(), "{variant}: {:?}", result.err());
            } else {
                let Err(Error::TensorValue { name, .. }) = result else { panic!("{variant} {changed:?} {missing}") };
                assert!(name.starts_with("lm_head."), "{name}");
            }
        }
    }
}

#[test]
fn quantised_tensors_need_a_scheme_that_fits() {
    let parts = checkpoint("moe_mlx").bytes();
    let module = "model.layers.0.mlp.up_proj";
    let with = |edit: &dyn Fn(&mut Value)| {
        let mut config = config_of("moe_mlx");
        edit(&mut config);
        let dir = model_dir(config.to_string().as_bytes(), &parts);
        load(dir.path()).unwrap_err()
    };
    let none = with(&|c| {
        c.as_object_mut().unwrap().remove("quantization");
        c.as_object_mut().unwrap().remove("quantization_config");
    });
    assert!(matches!(&none, Error::Config { key, .. } if key == "quantization"), "{none}");
    let not = with(&|c| c["quantization"][module] = false.into());
    assert!(matches!(&not, Error::Config { expected, .. } if expected.contains(module)), "{not}");
    let bits = with(&|c| c["quantization"][module] = json!({"bits": 8, "group_size": 64}));
    assert!(matches!(&bits, Error::TensorShape { name, .. } if name.contains(module)), "{bits}");
    let group = with(&|c| c["quantization"][module] = json!({"bits": 4, "group_size": 32}));
    assert!(matches!(&group, Error::TensorShape { name, .. } if name.contains(module)), "{group}");
    let divides = with(&|c| c["quantization"][module] = json!({"bits": 4, "group_size": 128}));
    assert!(matches!(&divides, Error::Config { key, .. } if key == "quantization.group_size"), "{divides}");
}

/// Activations that overflow f16 but not f32: one model fails in f16 and runs in f32, with prompts and single tokens.
#[test]
fn activations_out_of_range_are_no_tokens() {
    let mut parts = checkpoint("moe");
    let norm = parts.header["model.layers.1.post_feedforward_layernorm.weight"].clone();
    assert_eq!(norm["dtype"], "BF16");
    let at = |i: usize| norm["data_offsets"][i].as_u64().unwrap() as usize;
    parts.data[at(0)..at(1)].chunks_mut(2).for_each(|x| x.copy_from_slice(&bf16::from_f32(1e7).to_le_bytes()));
    let dir = model_dir(&config_bytes("moe"), &parts.bytes());
    for device in [Device::reference(), Device::cpu()] {
        for (activations, fails) in [(DType::F32, false), (DType::F16, true)] {
            let model =
                Model::load_with(dir.path(), &device, &LoadOptions { activations, ..LoadOptions::default() }).unwrap();
            let mut sequence =
                model.new_pool(&PoolOptions { longest: 16, ..PoolOptions::default() }).unwrap().sequence();
            let mut decoder = Decoder::new(&model, &mut sequence, Sampling::default()).unwrap();
            for (tokens, position) in [(&[2, 5, 7][..], 2), (&[2], 0)] {
                match decoder.next(tokens) {
                    Err(Error::NotANumber { position: at, activations: DType::F16 }) if fails => {
                        assert_eq!((at, decoder.sequence().len()), (position, 0));
                    }
                    Ok(token) if !fails => {
                        assert!((token as usize) < model.vocab_size());
                        decoder.truncate(0).unwrap();
                    }
                    other => panic!("{device}, {activations}: {other:?}"),
                }
            }
            let generated = generate(&model, &mut sequence, &Request::new(&[2, 5]), |_| ControlFlow::Break(()));
            assert_eq!(matches!(generated, Err(Error::NotANumber { .. })), fails, "{device}, {activations}");
        }
    }
}

/// The table of query factors has a row for each position of the context that the model was made for.
#[test]
fn positions_without_a_factor_are_refused() {
    let model = load(&golden("ministral3")).unwrap();
    let scaling = model.decoder().query_scaling.unwrap();
    assert_eq!((scaling.factor(15), scaling.positions), (1.0, 64));
    assert!((scaling.factor(33) - (1.0 + 0.5 * 3f32.ln())).abs() < 1e-6);
    let mut sequence = model.new_pool(&PoolOptions { longest: 128, ..PoolOptions::default() }).unwrap().sequence();
    model.feed(&mut sequence, &[5; 63], Logits::Last).unwrap();
    let refused = |result: Result<(), Error>| assert!(matches!(result, Err(Error::Argument { arg: "tokens", .. })));
    refused(model.feed(&mut sequence, &[5; 2], Logits::Last).map(drop));
    assert_eq!(sequence.len(), 63);
    let mut decoder = Decoder::new(&model, &mut sequence, Sampling::default()).unwrap();
    decoder.feed(&[5]).unwrap();
    refused(decoder.feed(&[5]));
    assert_eq!(decoder.sequence().len(), 64);
}
