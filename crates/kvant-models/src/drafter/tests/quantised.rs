//! Drafters with quantised matrices against the values that these represent.

use kvant::{Codec, Device};
use serde_json::{Value, json};

use super::{checkpoint::Tensors, eagle3, mtp, *};
use crate::safetensors::SafetensorsFile;

/// The tensors of a golden checkpoint.
fn read(name: &str) -> Tensors {
    let file = SafetensorsFile::open(&golden(name).join("model.safetensors")).unwrap();
    let mut tensors = Tensors::default();
    for (name, info) in file.header().tensors().iter().filter(|(_, info)| info.dtype != "I64") {
        tensors.set(name, &info.shape, file.read(name, &Device::cpu()).unwrap().to_f32().unwrap());
    }
    tensors
}

/// Logits after a prompt.
fn logits(target: &str, config: &Value, tensors: &Tensors) -> Vec<f32> {
    let (dir, model) = (tensors.directory(config), load(&golden(target), &Device::cpu()));
    let drafter = Drafter::load(&files(dir.path()), &model, None).unwrap();
    let is_assistant = drafter.cache_layer().is_none();
    let mut pair = Pair::new(model, drafter, &Codec::F32.into());
    let (mut sequence, tokens) = (pair.pool.sequence(), mtp::prompt());
    let step = pair.feed(&mut sequence, &tokens[..9], 8);
    if is_assistant {
        return pair.draft(&step.select(&[8]).unwrap(), &tokens[9..10], Hidden::Features(&[0]), 0).0;
    }
    pair.draft(&step, &tokens[1..10], Hidden::Features(&(0..9).collect::<Vec<_>>()), 8).0
}

#[test]
fn quantised_matrices_are_read() {
    let mut ordered = read("assistant_centroids");
    ordered.integers("masked_embedding.token_ordering", (0..96).map(|place| place * 5 % 96).collect());
    let (head, predictor) = (eagle3::middle(64, [1, 2, 2]), mtp::config("qwen3_5"));
    for (target, mut config, tensors) in [
        ("ple_shared", mtp::config("assistant_centroids"), ordered),
        ("llama", head.config, head.tensors),
        ("qwen3_5", predictor.clone(), mtp::tensors(&predictor)),
    ] {
        let [coded, values] = tensors.quantised();
        let want = logits(target, &config, &values);
        config["quantization"] = json!({"group_size": 32, "bits": 8});
        let worst = max_difference(&logits(target, &config, &coded), &want);
        println!("{target}: quantised logits differ by {worst:.1e}");
        assert!(worst < 1e-3, "{target}: off by {worst}");
    }
}
