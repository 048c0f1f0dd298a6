//! Random checkpoints with properties of released models: key biases as in Qwen 2.5 and gpt-oss, and a first token
//! whose keys have one large coordinate, as attention sinks do. A plain codec fails on both; sealed and exact pages do
//! not.

use kvant::{Codec, Device};
use kvant_models::{Logits, Model, PoolOptions};

use crate::common::{Parts, golden, model_dir};

/// The first token of every text, which occurs nowhere else.
const FIRST: u32 = 1;

/// Calls `change` with the position (row, column) and the value of each element of a bf16 tensor.
fn edit(parts: &mut Parts, name: &str, change: impl Fn(usize, usize, &mut f32)) {
    let entry = &parts.header[name];
    assert_eq!(entry["dtype"], "BF16", "{name}");
    let columns = entry["shape"].as_array().unwrap().last().unwrap().as_u64().unwrap() as usize;
    let [start, end] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap() as usize);
    for (i, bytes) in parts.data[start..end].chunks_exact_mut(2).enumerate() {
        let mut value = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
        change(i / columns, i % columns, &mut value);
        bytes.copy_from_slice(&value.to_bits().to_le_bytes()[2..]);
    }
}

/// Adds key biases that are many times longer than the keys without them.
fn with_large_biases(variant: &str, size: f32) -> tempfile::TempDir {
    let mut parts = Parts::read(&golden(variant).join("model.safetensors"));
    for name in parts.names().into_iter().filter(|name| name.ends_with("self_attn.k_proj.bias")) {
        edit(&mut parts, &name, |_, i, x| {
            let random = (i as u32).wrapping_mul(2_654_435_761) >> 8;
            *x = size * (random as f32 / (1 << 23) as f32 - 1.0);
        });
    }
    let config = std::fs::read(golden(variant).join("config.json")).unwrap();
    model_dir(&config, &parts.bytes())
}

/// Adds a sink at [`FIRST`]: in the first layer, its key has one coordinate of `size` that queries ignore, and one that
/// all queries match.
fn with_sink(variant: &str, size: f32) -> tempfile::TempDir {
    const HEAD_DIM: usize = 64;
    // Pairs of low frequency, (30, 62) and (31, 63), hardly change with the position.
    const UNSEEN: usize = 30;
    const SOUGHT: usize = 31;
    let mut parts = Parts::read(&golden(variant).join("model.safetensors"));
    // Hidden coordinate 0 is nonzero only for FIRST, coordinate 1 has an equal value for all other tokens.
    edit(&mut parts, "model.embed_tokens.weight", |token, i, x| match (token as u32 == FIRST, i) {
        (true, _) => *x = if i == 0 { 1.0 } else { 0.0 },
        (false, 0) => *x = 0.0,
        (false, 1) => *x = 1.0,
        _ => {}
    });
    edit(&mut parts, "model.layers.0.input_layernorm.weight", |_, _, x| *x = 1.0);
    edit(&mut parts, "model.layers.0.self_attn.k_proj.weight", |row, i, x| match (row, i) {
        (UNSEEN, 0) => *x = size,
        (SOUGHT, 0) => *x = 3.0,
        _ => {}
    });
    edit(&mut parts, "model.layers.0.self_attn.q_proj.weight", |row, i, x| match row % HEAD_DIM % (HEAD_DIM / 2) {
        UNSEEN => *x = 0.0,
        SOUGHT if i == 1 => *x = 1.0,
        _ => {}
    });
    let config = std::fs::read(golden(variant).join("config.json")).unwrap();
    model_dir(&config, &parts.bytes())
}

/// The mean divergence of next-token distributions from an f32 cache, for a text fed in chunks.
fn divergence(model: &Model, codec: Codec) -> f64 {
    let random = (0..230u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 20) % 96);
    let tokens: Vec<u32> =
        [FIRST].into_iter().chain(random.map(|token| if token == FIRST { 2 } else { token })).collect();
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

/// Asserts that the divergence with tq4 is more than 20 times that with tq4c.
fn assert_harmless(what: &str, dir: &tempfile::TempDir) {
    for device in [Device::cpu(), Device::reference()] {
        let model = Model::load(dir.path(), &device).unwrap();
        let [plain, sealed] = [Codec::tq(4), Codec::tq_centred(4)].map(|codec| divergence(&model, codec));
        println!("{what} on {device}: {plain} {sealed}");
        assert!(sealed < plain / 20.0, "{what} on {device}: tq4 {plain}, tq4c {sealed}");
    }
}

#[test]
fn large_biases_of_keys_cost_nothing_in_sealed_pages() {
    for variant in ["qwen2", "gpt_oss"] {
        assert_harmless(variant, &with_large_biases(variant, 40.0));
    }
}

#[test]
fn a_sink_costs_nothing_in_an_exact_first_page() {
    assert_harmless("llama with a sink", &with_sink("llama", 60.0));
}
