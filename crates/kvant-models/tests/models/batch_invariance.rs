//! Logits on batch-invariant CPU devices.

use kvant::{Codec, CpuOptions, Device, SimdLevel};
use kvant_models::{Logits, Model, PoolOptions};

use crate::common::{batch_invariance::check, golden, shipped};

fn device(simd: SimdLevel, threads: usize) -> Device {
    let (simd, threads) = (Some(simd), Some(threads));
    Device::cpu_with(CpuOptions { simd, threads, batch_invariant: true, ..CpuOptions::default() }).unwrap()
}

/// Every level, and up to three threads on the best one. Logits do not depend on the number of threads.
fn check_levels(load: impl Fn(&Device) -> Model, codec: Codec, what: &str) {
    for level in SimdLevel::ALL.into_iter().filter(|level| level.is_supported()) {
        check_threads(&load, level, if level == SimdLevel::best() { 3 } else { 1 }, codec, what);
    }
}

fn check_threads(load: impl Fn(&Device) -> Model, level: SimdLevel, max: usize, codec: Codec, what: &str) {
    let of_threads = |threads| {
        let model = load(&device(level, threads));
        check(&model, codec, 32, &format!("{what}, {codec}, {level}, {threads} threads"))
    };
    let expected = of_threads(1);
    for threads in 2..=max {
        assert!(of_threads(threads) == expected, "{what}, {codec}, {level}: {threads} threads differ from one");
    }
}

const CODECS: [Codec; 3] = [Codec::F16, Codec::tq(4), Codec::tq_centred(4)];

#[test]
fn logits_of_the_shipped_model_do_not_depend_on_the_batch() {
    for codec in CODECS {
        check_threads(|device| Model::load(&shipped(), device).unwrap(), SimdLevel::best(), 3, codec, "shipped");
    }
}

/// Dense, MXFP8, 4-bit and block weights, windows, sinks, experts, and layers that share keys.
#[test]
fn logits_of_small_models_do_not_depend_on_the_batch() {
    let names = ["llama", "llama_mxfp8", "gemma3", "gpt_oss_mxfp4", "qwen3_moe_mlx", "ple_shared", "k_quants_gguf"];
    // One codec per model, in turn; `./check all` tests every codec.
    let all = std::env::var("KVANT_TEST_SCOPE").is_ok_and(|scope| scope == "all");
    for (index, name) in names.into_iter().enumerate() {
        let codecs = if all { &CODECS[..] } else { &CODECS[index % CODECS.len()..][..1] };
        for &codec in codecs {
            check_levels(|device| Model::load(&golden(name), device).unwrap(), codec, name);
        }
    }
}

/// Long contexts in pages: attention tasks have several KV heads, and threads share the keys of a token.
#[test]
fn logits_after_long_texts_do_not_depend_on_chunks() {
    const TOKENS: usize = 4300;
    const LAST: usize = 6;
    for codec in CODECS {
        // The last logits of a text fed in chunks, with its last tokens in pieces.
        let last = |threads: usize, chunk: usize, piece: usize| {
            let model = Model::load(&golden("llama"), &device(SimdLevel::best(), threads)).unwrap();
            let options = PoolOptions { codecs: codec.into(), longest: TOKENS, ..PoolOptions::default() };
            let mut sequence = model.new_pool(&options).unwrap().sequence();
            let text: Vec<u32> = (0..TOKENS).map(|i| (i * i % 251 % model.vocab_size()) as u32).collect();
            let (text, end) = text.split_at(TOKENS - LAST);
            for tokens in text.chunks(chunk) {
                model.feed(&mut sequence, tokens, Logits::Last).unwrap();
            }
            let pieces = end.chunks(piece).map(|tokens| model.feed(&mut sequence, tokens, Logits::All).unwrap());
            let logits: Vec<f32> = pieces.flat_map(|logits| logits.to_f32().unwrap()).collect();
            assert_eq!(logits.len(), LAST * model.vocab_size());
            logits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let expected = last(1, 512, LAST);
        for (threads, chunk, piece) in [(3, 512, 1), (1, 453, 1), (2, 64, 4)] {
            assert!(
                last(threads, chunk, piece) == expected,
                "{codec}, {threads} threads, {chunk} and {piece} at a time"
            );
        }
    }
}
