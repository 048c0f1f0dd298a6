//! Gemma 4's assistants against transformers.

use kvant::{Codec, Device};

use super::*;
use crate::{Taps, safetensors::SafetensorsFile};

/// The drafts that transformers makes.
struct Golden {
    lens: Vec<u32>,
    fed: Vec<u32>,
    logits: Vec<f32>,
    hidden: Vec<f32>,
    tokens: Vec<u32>,
}

const DRAFTS: usize = 3;
/// The golden assistants and their targets.
pub const PAIRS: [(&str, &str); 2] = [("assistant", "dense"), ("assistant_centroids", "ple_shared")];

impl Golden {
    fn read(assistant: &str, target: &str) -> Golden {
        let file = SafetensorsFile::open(&golden(assistant).join("drafts.safetensors")).unwrap();
        let tokens = SafetensorsFile::open(&golden(target).join("logits.safetensors")).unwrap();
        let floats = |name: &str| file.read(name, &Device::cpu()).unwrap().to_f32().unwrap();
        let ids = |file: &SafetensorsFile, name: &str| file.read(name, &Device::cpu()).unwrap().to_vec().unwrap();
        Golden {
            lens: ids(&file, "lens"),
            fed: ids(&file, "fed"),
            logits: floats("logits"),
            hidden: floats("hidden"),
            tokens: ids(&tokens, "tokens"),
        }
    }
}

/// The worst differences of logits and of hidden states, over all prefixes and drafts. The prompt is fed in passes of
/// up to `piece` tokens.
fn differences(pair: &mut Pair, golden: &Golden, piece: usize) -> [f32; 2] {
    let (vocab, width) = (pair.target.vocab_size(), pair.drafter.hidden_width());
    let mut worst = [0f32; 2];
    for (case, &len) in golden.lens.iter().enumerate() {
        let mut sequence = pair.pool.sequence();
        let mut last = None;
        for tokens in golden.tokens[..len as usize].chunks(piece) {
            let step = pair.feed(&mut sequence, tokens, tokens.len() - 1);
            last = Some(step.select(&[tokens.len() - 1]).unwrap());
        }
        let step = last.unwrap();
        let mut left = None;
        for draft in case * DRAFTS..(case + 1) * DRAFTS {
            let hidden = left.as_ref().map_or(Hidden::Features(&[0]), Hidden::Fed);
            let (logits, hidden) = pair.draft(&step, &golden.fed[draft..draft + 1], hidden, 0);
            let of_logits = max_difference(&logits, &golden.logits[draft * vocab..(draft + 1) * vocab]);
            let of_hidden = &golden.hidden[draft * width..(draft + 1) * width];
            let of_hidden = max_difference(&hidden.to_f32().unwrap(), of_hidden);
            worst = [worst[0].max(of_logits), worst[1].max(of_hidden)];
            left = Some(hidden);
        }
    }
    worst
}

fn pair(assistant: &Path, target: &str, device: &Device, codecs: &CacheCodecs) -> Pair {
    let target = load(&golden(target), device);
    let drafter = load_drafter(&files(assistant), &target);
    assert!(drafter.taps() == Taps::Final && drafter.cache_layer().is_none());
    Pair::new(target, drafter, codecs)
}

/// Compares an assistant with transformers, over an exact cache.
pub fn check(assistant: &Path, name: &str, target: &str, device: &Device) {
    let golden = Golden::read(name, target);
    let mut pair = pair(assistant, target, device, &Codec::F32.into());
    // Windows pass pages of 16 positions in all but the shortest prefixes.
    for piece in [MAX_ROWS, 5, 1] {
        let [logits, hidden] = differences(&mut pair, &golden, piece);
        println!("{name} on {device}, {piece} at a time: logits differ by {logits:.1e}, hidden states by {hidden:.1e}");
        assert!(logits < 5e-4 && hidden < 5e-4, "{name}: logits off by {logits}, hidden states by {hidden}");
    }
}

#[test]
fn assistants_match_transformers() {
    for (name, target) in PAIRS {
        for device in devices() {
            check(&golden(name), name, target, &device);
        }
    }
}

/// Assistants read the target's cache in any codec. The prompt is long enough for sealed pages.
#[test]
fn assistants_read_quantised_caches() {
    let tokens: Vec<u32> = (0..200u32).map(|i| (i * i * 29 + 11 * i + 1) % 96).collect();
    for (name, target) in PAIRS {
        let logits = |codec: &str, device: &Device| -> Vec<f32> {
            let codecs = CacheCodecs::from(codec.parse::<Codec>().unwrap());
            let mut pair = pair(&golden(name), target, device, &codecs);
            let (mut sequence, mut step) = (pair.pool.sequence(), None);
            for piece in tokens.chunks(40) {
                let of_piece = pair.feed(&mut sequence, piece, piece.len() - 1);
                step = Some(of_piece.select(&[piece.len() - 1]).unwrap());
            }
            pair.draft(&step.unwrap(), &[17], Hidden::Features(&[0]), 0).0
        };
        let exact = logits("f32", &Device::cpu());
        // Minimum and maximum effect of a codec.
        for (codec, min, max) in [("f16", 0.0, 0.02), ("tq8", 1e-3, 0.15), ("tq4c", 0.02, 1.0)] {
            let [cpu, reference] = [Device::cpu(), Device::reference()].map(|device| logits(codec, &device));
            let (devices, effect) = (finite_difference(&cpu, &reference), finite_difference(&cpu, &exact));
            println!("{name} over {codec}: devices differ by {devices:.1e}, from f32 by {effect:.1e}");
            assert!(devices < 2e-2, "{name} over {codec}: devices differ by {devices}");
            assert!((min..max).contains(&effect), "{name} over {codec}: differs from f32 by {effect}");
        }
    }
}

/// The difference of logits that both have: other groups may be selected.
fn finite_difference(got: &[f32], want: &[f32]) -> f32 {
    let both = got.iter().zip(want).filter(|(got, want)| got.is_finite() && want.is_finite());
    let (got, want): (Vec<f32>, Vec<f32>) = both.map(|(got, want)| (*got, *want)).unzip();
    assert!(got.len() >= 12);
    max_difference(&got, &want)
}
