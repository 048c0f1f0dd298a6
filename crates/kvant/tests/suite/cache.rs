//! A cache on every device: forks and snapshots hold what the original held, byte for byte.

use crate::common::{
    Rng, bytes_of, devices,
    layers::{self, CODECS, Source},
    run,
};
use kvant::{
    CacheLayer, CacheSpec, Codec, DType, Device, Error, KvCache, KvLayer, LayerSpec, Step, Tensor,
    ops::{self, Attend, KvSide},
};

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
    let mut all = Vec::new();
    for index in 0..2 * CODECS.len() {
        let (layer, kept) = (cache.layer(index).unwrap(), cache.held(sequence, index).unwrap());
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

/// What a token sees does not depend on what the caller remembers of the layer: after a draft was taken back, a ring holds its
/// tokens where older ones were, and no window reaches them.
#[test]
fn what_was_taken_back_is_not_seen() {
    let layer = |window| CacheLayer { kv_heads: 1, head_dim: 64, window, k: Codec::F32, v: Codec::F32 };
    let layers = vec![layer(Some(8)), layer(None)];
    for device in devices() {
        // With so much slack the sliding layer is no ring, and its window holds all the same.
        for (slack, held) in [(3, 3..12), (100, 0..12)] {
            let spec = CacheSpec { layers: layers.clone(), sequences: 1, capacity: 40, slack };
            let mut cache = KvCache::new(device, &spec).unwrap();
            let write = |cache: &KvCache, step: &Step, values: &[f32]| {
                let k = vec![0.0; values.len() * 64];
                let v = values.iter().flat_map(|&value| [value; 64]).collect();
                let source = Source { k, v, heads: 1, dim: 64 };
                (0..2).for_each(|i| layers::write(cache.layer(i).unwrap(), &source, DType::F32, step).unwrap());
            };
            for position in 0..11 {
                let step = cache.append(&[(0, 1)]).unwrap();
                write(&cache, &step, &[position as f32]);
            }
            let draft = cache.append(&[(0, 3)]).unwrap();
            write(&cache, &draft, &[1000.0; 3]);
            cache.truncate(0, 11).unwrap();
            let step = cache.append(&[(0, 1)]).unwrap();
            write(&cache, &step, &[11.0]);

            // Equal keys: what comes out is the mean of the values that are seen.
            let mean = |layer: usize, window| -> kvant::Result<f32> {
                let q = Tensor::zeros(device, DType::F32, &[1, 1, 64])?;
                let out = Tensor::zeros(device, DType::F32, &[1, 1, 64])?;
                let layer = cache.layer(layer)?;
                let (step, fresh, scale, softcap, plan) = (&step, None, 1.0, None, None);
                run(device, |enc| {
                    let q_rotated = false;
                    let (q, out) = (&q, &out);
                    ops::attend(enc, &Attend { q, layer, step, fresh, scale, softcap, window, q_rotated, plan, out })
                })?;
                Ok(out.to_f32()?[0])
            };
            let case = format!("{device}: slack {slack}");
            for (layer, window, want) in [
                (0, None, 7.5),
                (0, Some(8), 7.5),
                (0, Some(4), 9.5),
                (1, None, 5.5),
                (1, Some(8), 7.5),
                (1, Some(50), 5.5),
            ] {
                let got = mean(layer, window).unwrap();
                assert!((got - want).abs() < 1e-4, "{case}, layer {layer}, window {window:?}: {got}, not {want}");
            }
            for window in [0, 9, usize::MAX] {
                let wider = mean(0, Some(window));
                assert!(matches!(wider, Err(Error::Value { arg: "window", .. })), "{case}, {window}: {wider:?}");
            }
            // What the cache says that it holds is what was written there.
            assert_eq!((cache.held(0, 0).unwrap(), cache.held(0, 1).unwrap()), (held.clone(), 0..12), "{case}");
            let read = layers::read(cache.layer(0).unwrap(), KvSide::V, 0, held.clone()).unwrap();
            assert!(read.chunks(64).zip(held.clone()).all(|(row, position)| row[0] == position as f32), "{case}");
            assert!(cache.held(1, 0).is_err() && cache.held(0, 2).is_err(), "{case}");
            cache.clear(0).unwrap();
            assert_eq!(cache.held(0, 0).unwrap(), 0..0, "{case}");
        }
        // A ring holds its window.
        let spec = LayerSpec { window: Some(5), ..layers::ring_spec(1, 4, 64, Codec::F32) };
        for (spec, fits) in [
            (spec, false),
            (LayerSpec { window: Some(4), ..spec }, true),
            (LayerSpec { window: Some(0), ..spec }, false),
            (LayerSpec { ring: false, ..spec }, true),
        ] {
            assert_eq!(KvLayer::new(device, spec).is_ok(), fits, "{device}: {spec:?}");
        }
    }
}
