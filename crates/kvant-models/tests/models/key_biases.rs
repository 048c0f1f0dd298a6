//! Models whose keys have large biases, as Qwen 2.5 and gpt-oss: pages are sealed without them.

use kvant::{Codec, Device};
use kvant_models::{Logits, Model, PoolOptions};

use crate::common::{Parts, golden, model_dir};

/// A random checkpoint with biases of keys as long as those of Qwen 2.5: many times the keys without them.
fn with_large_biases(variant: &str, size: f32) -> tempfile::TempDir {
    let mut parts = Parts::read(&golden(variant).join("model.safetensors"));
    for name in parts.names().into_iter().filter(|name| name.ends_with("self_attn.k_proj.bias")) {
        let [start, end] = [0, 1].map(|i| parts.header[&name]["data_offsets"][i].as_u64().unwrap() as usize);
        assert_eq!(parts.header[&name]["dtype"], "BF16", "{name}");
        for (i, x) in parts.data[start..end].chunks_exact_mut(2).enumerate() {
            let random = (i as u32).wrapping_mul(2_654_435_761) >> 8;
            let value = size * (random as f32 / (1 << 23) as f32 - 1.0);
            x.copy_from_slice(&value.to_bits().to_le_bytes()[..4][2..]);
        }
    }
    let config = std::fs::read(golden(variant).join("config.json")).unwrap();
    model_dir(&config, &parts.bytes())
}

/// The mean divergence of next-token distributions from those of an f32 cache, of a text fed in chunks.
fn divergence(model: &Model, codec: Codec) -> f64 {
    let tokens: Vec<u32> = (0..230u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 20) % 96).collect();
    let log_probabilities = |codec: Codec| {
        let options = PoolOptions { codecs: codec.into(), longest: 256, page_tokens: 16, ..Default::default() };
        let mut sequence = model.new_pool(&options).unwrap().sequence();
        let mut rows = Vec::new();
        for chunk in tokens.chunks(50) {
            let logits = model.feed(&mut sequence, chunk, Logits::All).unwrap().to_f32().unwrap();
            rows.extend(logits.chunks_exact(model.vocab_size()).map(|row| {
                let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
                row.iter().map(|&x| f64::from(x) - sum.ln()).collect::<Vec<_>>()
            }));
        }
        rows
    };
    let (want, got) = (log_probabilities(Codec::F32), log_probabilities(codec));
    let of_row = |(p, q): (&Vec<f64>, &Vec<f64>)| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
    want.iter().zip(&got).map(of_row).sum::<f64>() / want.len() as f64
}

#[test]
fn large_biases_of_keys_cost_nothing_in_sealed_pages() {
    for (variant, size) in [("qwen2", 40.0), ("gpt_oss", 40.0)] {
        let dir = with_large_biases(variant, size);
        for device in [Device::cpu(), Device::reference()] {
            let model = Model::load(dir.path(), &device).unwrap();
            let [plain, sealed] = [Codec::tq(4), Codec::tq_centred(4)].map(|codec| divergence(&model, codec));
            println!("{variant} on {device}: {plain} {sealed}");
            assert!(sealed < plain / 30.0, "{variant} on {device}: tq4 {plain}, tq4c {sealed}");
        }
    }
}
