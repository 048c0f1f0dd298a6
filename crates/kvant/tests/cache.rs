//! A cache on every device: forks and snapshots hold what the original held, byte for byte.

mod common;

use common::{
    Rng, bytes_of, devices,
    layers::{self, CODECS, Source},
};
use kvant::{CacheLayer, CacheSpec, Codec, DType, Device, KvCache, ops::KvSide};

const HEADS: usize = 2;

/// A cache of three sequences whose middle one holds `tokens` tokens; a linear layer and a ring of each codec, at a head
/// size that leaves rows of every plane at odd places.
fn filled(device: &Device, tokens: usize) -> KvCache {
    let layer = |codec, window| CacheLayer { kv_heads: HEADS, head_dim: 8, window, k: codec, v: Codec::tq(5) };
    let layers = CODECS.into_iter().flat_map(|codec| [layer(codec, None), layer(codec, Some(3))]).collect();
    let mut cache = KvCache::new(device, &CacheSpec { layers, sequences: 3, capacity: 37, slack: 2 }).unwrap();
    for start in (0..tokens).step_by(3) {
        let count = 3.min(tokens - start);
        let step = cache.append(&[(1, count)]).unwrap();
        for index in 0..2 * CODECS.len() {
            let data = Source::random(&mut Rng::of(index + 100 * start), count, HEADS, 8);
            layers::write(cache.layer(index).unwrap(), &data, DType::F32, &step).unwrap();
        }
    }
    cache
}

/// What a sequence holds, layer by layer.
fn held(cache: &KvCache, sequence: usize) -> Vec<Vec<f32>> {
    let len = cache.len(sequence).unwrap();
    let mut all = Vec::new();
    for index in 0..2 * CODECS.len() {
        let layer = cache.layer(index).unwrap();
        let kept = len.saturating_sub(layer.spec().capacity)..len;
        for side in [KvSide::K, KvSide::V] {
            all.push(layers::read(layer, side, sequence, kept.clone()).unwrap());
        }
    }
    all
}

#[test]
fn forks_hold_the_same() {
    for device in devices() {
        for tokens in [1, 4, 29, 37] {
            let mut cache = filled(device, tokens);
            let planes = |cache: &KvCache| -> Vec<Vec<u8>> {
                let layer = cache.layer(0).unwrap();
                layer.k().tensors().map(|(_, plane)| bytes_of(plane).unwrap()).collect()
            };
            let before = planes(&cache);
            cache.fork(1, 0).unwrap();
            assert_eq!(held(&cache, 0), held(&cache, 1), "{device}: {tokens} tokens forked to 0");
            cache.fork(1, 2).unwrap();
            assert_eq!(held(&cache, 2), held(&cache, 1), "{device}: {tokens} tokens forked to 2");
            // The original is untouched: its third of each plane.
            for (before, after) in before.iter().zip(planes(&cache)) {
                let third = before.len() / 3;
                assert!(before[third..2 * third] == after[third..2 * third], "{device}: the original changed");
            }
        }
    }
}

#[test]
fn snapshots_travel_between_devices() {
    let dir = std::env::temp_dir().join(format!("kvant-cache-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for device in devices() {
        let cache = filled(device, 29);
        let file = dir.join("snapshot.safetensors");
        cache.save(&file).unwrap();
        for other in [device, &Device::reference()] {
            let loaded = KvCache::load(other, &file).unwrap();
            for sequence in 0..3 {
                assert_eq!(loaded.len(sequence).unwrap(), cache.len(sequence).unwrap());
            }
            // Decoding rounds differently from device to device; on one device nothing may differ.
            let (got, want) = (held(&loaded, 1), held(&cache, 1));
            for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                let most = if other == device { 0.0 } else { 1e-5 };
                assert!((got - want).abs() <= most, "{device} to {other}: {got}, not {want}");
            }
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
