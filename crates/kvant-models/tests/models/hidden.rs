//! Compares hidden states with transformers, and checks the logits and embeddings computed from them.

use kvant::Device;
use kvant_models::{Error, Files, LoadOptions, Model, Pooling};

use crate::common::{exact, floats, golden, ids, max_difference};

const TOLERANCE: f32 = 1e-3;

/// All tokens as one sequence.
fn rows_of(model: &Model, tokens: &[u32], rows: &[usize]) -> kvant::Tensor {
    let pool = model.new_pool(&exact(64)).unwrap();
    let mut sequence = pool.sequence();
    let step = pool.step(&mut [(&mut sequence, tokens.len())]).unwrap();
    model.hidden(&pool, &step, tokens, rows).unwrap()
}

#[test]
fn hidden_states_match_transformers() {
    for variant in ["qwen3", "gemma3", "granite"] {
        for device in [Device::cpu(), Device::reference()] {
            let model = Model::load(&golden(variant), &device).unwrap();
            let tokens = ids(&golden(variant).join("logits.safetensors"), "tokens");
            let logits = floats(&golden(variant).join("logits.safetensors"), "logits");
            let expected = floats(&golden(variant).join("hidden.safetensors"), "hidden");
            let (width, vocab) = (model.decoder().hidden_size, model.vocab_size());
            let (every, some) = ((0..tokens.len()).collect::<Vec<_>>(), [tokens.len() - 1, 3]);
            for rows in [&every[..], &some[..]] {
                let hidden = rows_of(&model, &tokens, rows);
                assert_eq!(hidden.shape(), [rows.len(), width]);
                let pick = |of: &[f32], width: usize| -> Vec<f32> {
                    rows.iter().flat_map(|&row| of[row * width..(row + 1) * width].to_vec()).collect()
                };
                let worst = max_difference(&hidden.to_f32().unwrap(), &pick(&expected, width));
                println!("{variant} on {device}: hidden states differ by {worst:.1e}");
                assert!(worst < TOLERANCE, "{variant} on {device}: off by {worst}");
                let worst = max_difference(&model.logits_of(&hidden).unwrap().to_f32().unwrap(), &pick(&logits, vocab));
                assert!(worst < 2.0 * TOLERANCE, "{variant} on {device}: logits off by {worst}");
            }
            assert_eq!(rows_of(&model, &tokens, &[]).shape(), [0, width]);
        }
    }
}

#[test]
fn arguments_are_checked() {
    let model = Model::load_with(&golden("qwen3"), &Device::cpu(), &LoadOptions::default()).unwrap();
    let pool = model.new_pool(&exact(64)).unwrap();
    let mut sequence = pool.sequence();
    let step = pool.step(&mut [(&mut sequence, 3)]).unwrap();
    let arg = |error: Error| match error {
        Error::Argument { arg, .. } => arg,
        other => panic!("{other}"),
    };
    assert_eq!(arg(model.hidden(&pool, &step, &[1, 2, 3], &[3]).unwrap_err()), "rows");
    assert_eq!(arg(model.hidden(&pool, &step, &[1, 2], &[0]).unwrap_err()), "tokens");
    let wrong = kvant::Tensor::zeros(model.device(), kvant::DType::F32, &[2, 5]).unwrap();
    assert_eq!(arg(model.logits_of(&wrong).unwrap_err()), "hidden");
}

#[test]
fn pooling_of_a_checkpoint() {
    let of = |files: &[(&str, &str)]| {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = directory.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        Pooling::load_files(&Files::directory(directory.path()))
    };
    let config = "1_Pooling/config.json";
    assert_eq!(of(&[]).unwrap(), None);
    let last =
        r#"{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}"#;
    assert_eq!(of(&[(config, last)]).unwrap(), Some(Pooling::Last));
    let mean = r#"{"word_embedding_dimension": 8, "pooling_mode_mean_tokens": true}"#;
    assert_eq!(of(&[(config, mean)]).unwrap(), Some(Pooling::Mean));
    let modules = |kind: &str| format!(r#"[{{"idx": 0, "type": "sentence_transformers.models.{kind}"}}]"#);
    for kind in ["Transformer", "Pooling", "Normalize"] {
        assert_eq!(of(&[(config, mean), ("modules.json", &modules(kind))]).unwrap(), Some(Pooling::Mean));
    }
    for (files, expected) in [
        (vec![(config, r#"{"pooling_mode_cls_token": true}"#)], "pooling_mode_cls_token"),
        (vec![(config, r#"{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}"#)], "pooling_mode_max"),
        (vec![(config, "{}")], "pooling_mode"),
        (vec![(config, "[1]")], "config.json"),
        (vec![(config, mean), ("modules.json", &modules("Dense"))], "Dense"),
    ] {
        let error = of(&files).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
