//! Visibility: a query sees nothing beyond the end, a ring in the order of its positions, and a window up to its edge.

use super::*;

/// NaN beyond the length, in a capacity that is not a multiple of any tile: `Case::layer` fills the cache with NaN
/// first.
#[test]
fn tail_nan() {
    for (k, v) in [
        (Codec::F32, Codec::F32),
        (Codec::F16, Codec::BF16),
        (Codec::tq(4), Codec::tq(8)),
        (Codec::tq(5), Codec::tq(6)),
    ] {
        for len in [1, 2, 31, 32, 33, 63, 64, 65, 127] {
            for order in [HeadOrder::HeadMajor, HeadOrder::TokenMajor] {
                let case =
                    Case { k, v, order, kv_heads: 2, group: 2, sequences: vec![(len - 1, 1)], ..Case::default() };
                let data = case.data();
                for device in devices() {
                    let layer = case.layer(device, &data).unwrap();
                    let out = case.attend(&layer, &data).unwrap().tensor.to_f32().unwrap();
                    assert!(out.iter().all(|x| x.is_finite()), "{device}: {case}: NaN came in from beyond the length");
                }
                case.check();
            }
        }
    }
}

/// Huge numbers in the rest of the cache, which an additive mask would let through.
#[test]
fn tail_garbage() {
    for codec in [Codec::F32, Codec::F16, Codec::tq(8)] {
        let case = Case { k: codec, v: codec, sequences: vec![(4, 1)], ..Case::default() };
        let data = case.data();
        for device in devices() {
            let clean = case.layer(device, &data).unwrap();
            let dirty = KvLayer::new(device, case.spec().capacity(12)).unwrap();
            let huge = Source { k: vec![3e4; 12 * 64], v: vec![-6e4; 12 * 64], heads: 1, dim: 64 };
            layers::write_at(&dirty, &huge, 0).unwrap();
            layers::write_at(&dirty, &data.source, 0).unwrap();
            let run = |layer| case.attend(layer, &data).unwrap().tensor.to_f32().unwrap();
            assert_close(format!("{device}: {codec}"), &run(&dirty), &run(&clean), case.bound());
        }
    }
}

/// Lengths before, at, one past and many times the capacity of a ring.
#[test]
fn ring_wrap() {
    for capacity in [1, 7, 16, 64] {
        for len in [1, capacity - 1, capacity, capacity + 1, 2 * capacity, 2 * capacity + 1, 17 * capacity + 3] {
            if len == 0 {
                continue;
            }
            for (k, v) in [(Codec::F32, Codec::F32), (Codec::tq(4), Codec::F16)] {
                for order in [HeadOrder::HeadMajor, HeadOrder::TokenMajor] {
                    let (ring, sequences) = (Some(capacity), vec![(len - 1, 1)]);
                    Case { ring, k, v, order, kv_heads: 2, group: 2, sequences, ..Case::default() }.check();
                }
            }
        }
    }
    // Written one by one, and compared with a cache of the last tokens only.
    for device in devices() {
        let (capacity, total) = (7, 40);
        let layer = KvLayer::new(device, ring_spec(1, capacity, 64, Codec::F32)).unwrap();
        let data = Source::random(&mut Rng::of("ring"), total, 1, 64);
        let query = Rng::of("query").normals(64);
        let q = input(device, DType::F32, &query, &[1, 1, 64]).unwrap();
        for p in 0..total {
            layers::write_at(&layer, &data.part(p..p + 1), p).unwrap();
            let held = data.part((p + 1).saturating_sub(capacity)..p + 1);
            let want = by_hand(&query, &rows(&held.k, 64), &rows(&held.v, 64), 0.125, None);
            let got = attend(&layer, &q, &range_step(device, 1, p..p + 1).unwrap(), None).unwrap();
            assert_close(format!("{device}: position {p}"), &got, &want, Bound::of(DType::F32));
        }
    }
}

/// A batch longer than the ring writes each slot once, with the latest token, in every run.
#[test]
fn ring_batch_longer_than_cap() {
    for codec in CODECS {
        for (start, tokens) in [(0, 9), (3, 17), (5, 64)] {
            for device in devices() {
                let data = Source::random(&mut Rng::of(tokens), tokens, 3, 64);
                let fresh = || {
                    let layer = KvLayer::new(device, ring_spec(3, 8, 64, codec)).unwrap();
                    fill(&layer, 0x3C).unwrap();
                    layer
                };
                let (at_once, one_by_one) = (fresh(), fresh());
                layers::write_at(&at_once, &data, start).unwrap();
                for t in 0..tokens {
                    layers::write_at(&one_by_one, &data.part(t..t + 1), start + t).unwrap();
                }
                assert!(
                    planes(&at_once).unwrap() == planes(&one_by_one).unwrap(),
                    "{device}: {codec}: {tokens} tokens from {start} on in a ring of 8"
                );
                if codec == Codec::F32 {
                    let held = start + tokens - 8..start + tokens;
                    let got = layers::read(&at_once, KvSide::V, 0, held).unwrap();
                    assert_eq!(got, data.part(tokens - 8..tokens).v, "{device}");
                }
            }
        }
    }
}

/// Four tokens up to position 13 of a ring of 8: each token sees logical positions, although the slots have wrapped and
/// later tokens of the batch have already overwritten older ones.
#[test]
fn multi_token_on_wrapped_ring() {
    let data = Source::random(&mut Rng::of("wrapped"), 14, 1, 64);
    let queries = Rng::of("queries").normals(4 * 64);
    for device in devices() {
        let layer = KvLayer::new(device, ring_spec(1, 8, 64, Codec::F32)).unwrap();
        layers::write_at(&layer, &data.part(0..10), 0).unwrap();
        layers::write_at(&layer, &data.part(10..14), 10).unwrap();
        let q = input(device, DType::F32, &queries, &[4, 1, 64]).unwrap();
        for window in [None, Some(5)] {
            let got = attend(&layer, &q, &range_step(device, 1, 10..14).unwrap(), window).unwrap();
            for t in 0..4 {
                let position = 10 + t;
                // Slots hold positions 6..14.
                let first = 6.max((position + 1usize).saturating_sub(window.unwrap_or(100)));
                let seen = data.part(first..position + 1);
                let want = by_hand(&queries[t * 64..][..64], &rows(&seen.k, 64), &rows(&seen.v, 64), 0.125, None);
                let case = format!("{device}: position {position}, window {window:?}");
                assert_close(case, &got[t * 64..][..64], &want, Bound::of(DType::F32));
            }
        }
    }
    for codec in CODECS {
        Case { ring: Some(8), k: codec, v: codec, group: 2, sequences: vec![(10, 4)], ..Case::default() }.check();
    }
}

/// After a token overwrites the oldest one, the next slot is the oldest: it is seen, and the overwritten token is not.
#[test]
fn oldest_slot_after_write() {
    let dim = 64;
    for device in devices() {
        let layer = KvLayer::new(device, ring_spec(1, 8, dim, Codec::F32)).unwrap();
        for position in 0..20usize {
            // Value p everywhere; keys of zero give every visible position an equal weight.
            let token = Source { k: vec![0.0; dim], v: vec![position as f32; dim], heads: 1, dim };
            layers::write_at(&layer, &token, position).unwrap();
            let q = input(device, DType::F32, &vec![1.0; dim], &[1, 1, dim]).unwrap();
            for window in [None, Some(8), Some(7)] {
                let got = attend(&layer, &q, &range_step(device, 1, position..position + 1).unwrap(), window).unwrap();
                let seen = (position + 1).min(window.unwrap_or(8));
                let mean = position as f32 - (seen - 1) as f32 / 2.0;
                let close = got.iter().all(|x| (x - mean).abs() < 1e-4);
                assert!(close, "{device}: position {position}, window {window:?}: {}, not {mean}", got[0]);
            }
        }
    }
}

/// A position just outside the window has no weight, however large its score; a position at its edge has.
#[test]
fn window_excludes_older() {
    let dim = 64;
    for codec in [Codec::F32, Codec::F16, Codec::tq(8)] {
        for device in devices() {
            for (len, window) in [(10, 4), (70, 64), (200, 65), (33, 32)] {
                for ring in [false, true] {
                    let spec = linear_spec(1, if ring { window + 3 } else { len }, dim, codec).ring(ring);
                    let layer = KvLayer::new(device, spec).unwrap();
                    let edge = len - window;
                    let mut data = Source { k: vec![0.0; len * dim], v: vec![0.0; len * dim], heads: 1, dim };
                    // The last position outside has a large score and the value 100, the first one inside a large score
                    // and the value 1.
                    for (position, says) in [(edge - 1, 100.0), (edge, 1.0)] {
                        data.k[position * dim..][..dim].fill(4.0);
                        data.v[position * dim..][..dim].fill(says);
                    }
                    layers::write_at(&layer, &data, 0).unwrap();
                    let q = input(device, DType::F32, &vec![4.0; dim], &[1, 1, dim]).unwrap();
                    let got = attend(&layer, &q, &range_step(device, 1, len - 1..len).unwrap(), Some(window)).unwrap();
                    let close = got.iter().all(|x| (x - 1.0).abs() < 0.05);
                    assert!(close, "{device}: {codec}, window {window} of {len}, ring {ring}: {:?}", &got[..4]);
                }
            }
        }
    }
}
