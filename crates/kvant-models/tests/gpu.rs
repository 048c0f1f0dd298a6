//! Whole models on the GPUs' kernels: on every GPU present, and the Metal kernels under msl-host.

mod common;

use common::{FAMILIES, VARIANTS, exact, floats, golden, ids, max_difference, shipped};
use kvant::{Codec, Device, DeviceKind};
use kvant_models::{Decoder, Logits, Model, PoolOptions, Sampling};

/// What the logits may differ by, with an f32 cache.
const TOLERANCE: f32 = 2e-3;

/// The logits of `tokens`: the first `prompt` at once, the others one by one, half of these by a pass that is recorded.
fn logits(model: &Model, options: &PoolOptions, tokens: &[u32], prompt: usize) -> Vec<f32> {
    let mut sequence = model.new_pool(options).unwrap().sequence();
    let recorded = prompt + (tokens.len() - prompt) / 2;
    let pieces = std::iter::once(&tokens[..prompt]).chain(tokens[prompt..recorded].chunks(1));
    let forward = |piece| model.feed(&mut sequence, piece, Logits::All).unwrap().to_f32().unwrap();
    let mut logits: Vec<f32> = pieces.flat_map(forward).collect();
    let mut decoder = Decoder::new(model, &mut sequence, Sampling::default()).unwrap();
    for token in tokens[recorded..].chunks(1) {
        decoder.feed(token).unwrap();
        logits.extend(decoder.logits().to_f32().unwrap());
    }
    logits
}

/// The devices with kernels of their own, and the tokens that are worth their time: msl-host is no fast machine.
fn gpus() -> Vec<(Device, usize)> {
    let present = Device::list().into_iter().filter_map(|entry| entry.device.ok());
    let mut gpus: Vec<(Device, usize)> = present
        .filter(|device| matches!(device.kind(), DeviceKind::Metal | DeviceKind::Cuda))
        .map(|device| (device, usize::MAX))
        .collect();
    let only = std::env::var("KVANT_TEST_DEVICE").ok();
    let wanted = |kind: DeviceKind| only.as_deref().is_none_or(|only| only == kind.name());
    gpus.retain(|(device, _)| wanted(device.kind()));
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    if wanted(DeviceKind::Metal) {
        gpus.push((msl(kvant_msl::Build::Plain, kvant_msl::Schedule::Random(1)), 20));
        gpus.push((msl(kvant_msl::Build::Checker, kvant_msl::Schedule::Reverse), 5));
    }
    gpus
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn msl(build: kvant_msl::Build, schedule: kvant_msl::Schedule) -> Device {
    kvant_msl::device(kvant_msl::Runs::once(build, schedule)).unwrap_or_else(|e| panic!("{e}"))
}

/// Against transformers and MLX.
#[test]
fn every_variant_matches() {
    for (device, most) in gpus() {
        for variant in VARIANTS.into_iter().chain(FAMILIES) {
            let file = golden(variant).join("logits.safetensors");
            let (mut tokens, expected) = (ids(&file, "tokens"), floats(&file, "logits"));
            tokens.truncate(most);
            let model = Model::load(&golden(variant), &device).unwrap();
            let got = logits(&model, &exact(1024), &tokens, tokens.len() * 3 / 4);
            let worst = max_difference(&got, &expected[..got.len()]);
            println!("{device}, {variant}: {worst:.1e}");
            assert!(worst < TOLERANCE, "{device}, {variant}: off by {worst}");
        }
    }
}

/// The shipped model against the CPU: exact caches and compressed ones, a prompt and single tokens after it.
#[test]
fn the_shipped_model_matches_the_cpu() {
    let cpu = Model::load(&shipped(), &Device::cpu()).unwrap();
    let all = ids(&golden("rustdoc-11m").join("4bit.safetensors"), "tokens");
    for (device, most) in gpus() {
        let model = Model::load(&shipped(), &device).unwrap();
        let tokens = &all[..most.min(all.len())];
        for (codec, tolerance) in [(Codec::F32, TOLERANCE), (Codec::BF16, 0.1), (Codec::tq(8), 0.1)] {
            let options = PoolOptions { k: codec, v: codec, ..exact(256) };
            let prompt = tokens.len() * 3 / 4;
            // In pieces so short that the CPU multiplies in f32: of 16 tokens and more it rounds activations to 16
            // bits.
            let mut sequence = cpu.new_pool(&options).unwrap().sequence();
            let exact = |piece| cpu.feed(&mut sequence, piece, Logits::All).unwrap().to_f32().unwrap();
            let want: Vec<f32> = tokens.chunks(7).flat_map(exact).collect();
            let got = logits(&model, &options, tokens, prompt);
            let worst = max_difference(&got, &want);
            println!("{device}, {codec}: {worst:.1e}");
            assert!(worst < tolerance, "{device}, {codec} cache: off by {worst}");
        }
    }
}
