//! The hidden states that a target leaves.

use kvant::{Codec, Device};
use serde_json::Value;

use super::{eagle3, *};
use crate::Taps;

/// The hidden states of a prompt after the final norm.
fn hidden(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let pool = model.new_pool(&crate::PoolOptions { codecs: Codec::F32.into(), ..Default::default() }).unwrap();
    let mut sequence = pool.sequence();
    let step = pool.step(&mut [(&mut sequence, tokens.len())]).unwrap();
    let rows: Vec<usize> = (0..tokens.len()).collect();
    model.hidden(&pool, &step, tokens, &rows).unwrap().to_f32().unwrap()
}

/// The residual stream before a block is the last one of a model that ends before the block.
#[test]
fn residual_streams_are_those_of_shorter_models() {
    for target in ["llama", "gpt_oss"] {
        let source = golden(target);
        let tokens = super::mtp::prompt();
        let model = load(&source, &Device::cpu());
        let (width, eps) = (model.decoder().hidden_size, f64::from(model.decoder().norm_eps));
        let blocks = model.decoder().blocks.len();
        let layers = [0, 1, blocks];
        let head = eagle3::head(width, layers);
        let dir = head.directory();
        let drafter = Drafter::load(&files(dir.path()), &model, None).unwrap();
        assert_eq!(drafter.taps(), Taps::Residual(layers));
        let pair = Pair::new(model, drafter, &Codec::F32.into());
        let mut sequence = pair.pool.sequence();
        pair.feed(&mut sequence, &tokens, 5);
        let embed = tensor_of(&source, "model.embed_tokens.weight");
        let last_norm = tensor_of(&source, "model.norm.weight");
        let shorter = tempfile::tempdir().unwrap();
        std::fs::copy(source.join("model.safetensors"), shorter.path().join("model.safetensors")).unwrap();
        let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
        config["num_hidden_layers"] = 1.into();
        if let Some(kinds) = config["layer_types"].as_array_mut() {
            kinds.truncate(1);
        }
        std::fs::write(shorter.path().join("config.json"), config.to_string()).unwrap();
        let of_one = hidden(&load(shorter.path(), &Device::cpu()), &tokens);
        let of_all = hidden(&pair.target, &tokens);
        for (row, &token) in tokens.iter().enumerate() {
            let features = pair.features_of(row);
            let [first, second, last] = [0, 1, 2].map(|tap| &features[tap * width..(tap + 1) * width]);
            assert!(max_difference(first, &embed[token as usize * width..][..width]) < 1e-6, "{target}, row {row}");
            for (stream, want) in [(second, &of_one), (last, &of_all)] {
                let normed = reference::norm(&reference::wide(stream), &last_norm, 0.0, eps);
                let worst = max_difference(&reference::narrow(&normed), &want[row * width..(row + 1) * width]);
                assert!(worst < 2e-4, "{target}, row {row}: off by {worst}");
            }
        }
    }
}

/// Layers without keys run for wanted rows only, so their hidden states are those of these rows.
#[test]
fn final_hidden_states_are_those_of_wanted_rows() {
    let model = load(&golden("ple_shared"), &Device::cpu());
    let drafter = Drafter::load(&files(&golden("assistant_centroids")), &model, None).unwrap();
    let pair = Pair::new(model, drafter, &Codec::F32.into());
    let (tokens, width) = (super::mtp::prompt(), pair.target.decoder().hidden_size);
    let want = hidden(&pair.target, &tokens);
    for row in [0, 20, tokens.len() - 1] {
        let mut sequence = pair.pool.sequence();
        pair.feed(&mut sequence, &tokens, row);
        let worst = max_difference(&pair.features_of(0), &want[row * width..(row + 1) * width]);
        assert!(worst < 1e-4, "row {row}: off by {worst}");
    }
}
