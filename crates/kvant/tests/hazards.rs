//! The ways in which caches and attention kernels are known to go wrong, one test each, on every device.

mod common;

use common::{
    Bound, FLOATS, Out, Rng, assert_close,
    attention::Case,
    bytes_of, devices, indices, input,
    layers::{self, CODECS, Source, copy_to, fill, linear_spec, planes, range_step, ring_spec, step},
    nmse, run, sees_indices,
};
use kvant::{
    Codec, DType, Device, DeviceKind, Encoder, Error, KvLayer, LayerSpec, Result, SlotOrder, Step, Tensor,
    ops::{
        self, Angles, Attend, Hadamard, HeadNorm, KvRead, KvSide, KvWrite, NormRope, PairLayout, Residual, RmsNorm,
        Rope, SourceOrder, attend::Plan,
    },
};

/// The plain attention of f32 queries over a layer.
fn attend(layer: &KvLayer, q: &Tensor, step: &Step, window: Option<usize>) -> Result<Vec<f32>> {
    let out = Out::new(layer.device(), DType::F32, q.shape())?;
    run(layer.device(), |enc| ops::attend(enc, &plain(layer, q, step, window, &out.tensor)))?;
    out.bytes()?;
    out.tensor.to_f32()
}

fn plain<'a>(layer: &'a KvLayer, q: &'a Tensor, step: &'a Step, window: Option<usize>, out: &'a Tensor) -> Attend<'a> {
    let scale = (layer.spec().head_dim as f32).powf(-0.5);
    Attend { q, layer, step, fresh: None, scale, softcap: None, window, q_rotated: false, plan: None, out }
}

/// Softmax attention of one query over the given keys and values of one head, in f64.
fn by_hand(q: &[f32], keys: &[&[f32]], values: &[&[f32]], scale: f64, softcap: Option<f64>) -> Vec<f32> {
    let dot = |k: &[f32]| k.iter().zip(q).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() * scale;
    let cap = |s: f64| softcap.map_or(s, |c| c * (s / c).tanh());
    let scores: Vec<f64> = keys.iter().map(|k| cap(dot(k))).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let column = |d: usize| values.iter().zip(&weights).map(|(v, w)| f64::from(v[d]) * w).sum::<f64>() / total;
    (0..values.first().map_or(0, |v| v.len())).map(|d| column(d) as f32).collect()
}

fn rows(x: &[f32], dim: usize) -> Vec<&[f32]> {
    x.chunks(dim).collect()
}

/// NaN beyond the length, in a capacity that is no multiple of any tile: `Case::layer` fills the cache with NaN first.
#[test]
fn tail_nan() {
    for (k, v) in [
        (Codec::F32, Codec::F32),
        (Codec::F16, Codec::BF16),
        (Codec::tq(4), Codec::tq(8)),
        (Codec::tq(5), Codec::tq(6)),
    ] {
        for len in [1, 2, 31, 32, 33, 63, 64, 65, 127] {
            for order in [SlotOrder::HeadMajor, SlotOrder::TokenMajor] {
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

/// The same when the rest of the cache holds huge numbers, which an additive mask would let through.
#[test]
fn tail_garbage() {
    for codec in [Codec::F32, Codec::F16, Codec::tq(8)] {
        let case = Case { k: codec, v: codec, sequences: vec![(4, 1)], ..Case::default() };
        let data = case.data();
        for device in devices() {
            let clean = case.layer(device, &data).unwrap();
            let dirty = KvLayer::new(device, LayerSpec { capacity: 12, ..case.spec() }).unwrap();
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
                for order in [SlotOrder::HeadMajor, SlotOrder::TokenMajor] {
                    let (ring, sequences) = (Some(capacity), vec![(len - 1, 1)]);
                    Case { ring, k, v, order, kv_heads: 2, group: 2, sequences, ..Case::default() }.check();
                }
            }
        }
    }
    // Written one by one, and compared with what the last tokens alone give.
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

/// A batch longer than the ring writes each slot once: the last tokens win, in every run.
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

/// Four tokens up to position 13 of a ring of 8: each token sees by logical position, though the slots have wrapped and
/// the later tokens of the batch have already overwritten older ones.
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

/// Once a token is written over the oldest one, the oldest is the next slot: it is seen, and what was overwritten is not.
#[test]
fn oldest_slot_after_write() {
    let dim = 64;
    for device in devices() {
        let layer = KvLayer::new(device, ring_spec(1, 8, dim, Codec::F32)).unwrap();
        for position in 0..20usize {
            // Value p everywhere; keys of zero give every visible position the same weight.
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

/// A position just outside the window has no weight, however large its score; the one at its edge has.
#[test]
fn window_excludes_older() {
    let dim = 64;
    for codec in [Codec::F32, Codec::F16, Codec::tq(8)] {
        for device in devices() {
            for (len, window) in [(10, 4), (70, 64), (200, 65), (33, 32)] {
                for ring in [false, true] {
                    let spec = LayerSpec { ring, ..linear_spec(1, if ring { window + 3 } else { len }, dim, codec) };
                    let layer = KvLayer::new(device, spec).unwrap();
                    let edge = len - window;
                    let mut data = Source { k: vec![0.0; len * dim], v: vec![0.0; len * dim], heads: 1, dim };
                    // The last position outside shouts and says 100, the first one inside shouts and says 1.
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

/// Slots whose bytes lie beyond 4 GiB. The memory is zeroed lazily where the host's is used, and few pages are touched.
#[test]
fn slot_offset_beyond_4gib() {
    let dim = 512;
    let orders = [
        (SlotOrder::HeadMajor, 1, (1 << 21) + 70),
        (SlotOrder::HeadMajor, 2, (1 << 20) + 70),
        (SlotOrder::TokenMajor, 2, (1 << 20) + 70),
    ];
    for device in devices() {
        for (order, kv_heads, capacity) in orders {
            let spec = LayerSpec { order, v: Codec::F16, ..linear_spec(kv_heads, capacity, dim, Codec::F32) };
            let layer = match KvLayer::new(device, spec) {
                Err(Error::OutOfMemory { .. }) => {
                    println!("{device}: no memory for a layer beyond 4 GiB; checked by arithmetic alone");
                    continue;
                }
                other => other.unwrap(),
            };
            let last = layer.row(0, kv_heads - 1, capacity - 1);
            assert_eq!(last + 1, kv_heads * capacity, "the last row of the layer");
            assert!(last * dim * 4 > u32::MAX as usize, "its offset needs more than 32 bits");
            // A small layer that holds the same last tokens, from position 0 on.
            let tokens = 5;
            let start = capacity - tokens;
            let data = Source::random(&mut Rng::of("far"), tokens, kv_heads, dim);
            let small = KvLayer::new(device, LayerSpec { capacity: tokens, ..spec }).unwrap();
            layers::write_at(&layer, &data, start).unwrap();
            layers::write_at(&small, &data, 0).unwrap();
            for side in [KvSide::K, KvSide::V] {
                let far = layers::read(&layer, side, 0, start..capacity).unwrap();
                let near = layers::read(&small, side, 0, 0..tokens).unwrap();
                assert!(far == near, "{device}: {order:?}, Hk {kv_heads}: {side:?} differs");
            }
            let q = input(device, DType::F32, &Rng::of("q").normals(2 * kv_heads * dim), &[2, kv_heads, dim]).unwrap();
            let far_step = range_step(device, 1, capacity - 2..capacity).unwrap();
            let near_step = range_step(device, 1, tokens - 2..tokens).unwrap();
            let far = attend(&layer, &q, &far_step, Some(3)).unwrap();
            let near = attend(&small, &q, &near_step, Some(3)).unwrap();
            assert_close(format!("{device}: {order:?}, Hk {kv_heads}"), &far, &near, Bound::of(DType::F32));
        }
    }
}

/// A capacity far beyond the length, several heads and sequences: strides come from the capacity.
#[test]
fn capacity_stride() {
    for codec in CODECS {
        for order in [SlotOrder::HeadMajor, SlotOrder::TokenMajor] {
            for device in devices() {
                let roomy = LayerSpec { sequences: 2, order, ..linear_spec(3, 1000, 128, codec) };
                let tight = LayerSpec { capacity: 9, ..roomy };
                let data = Source::random(&mut Rng::of("stride"), 18, 3, 128);
                let tokens: Vec<(u32, u32)> = (0..18).map(|t| (t % 2, t / 2)).collect();
                let q = input(device, DType::F32, &Rng::of("q").normals(18 * 6 * 128), &[18, 6, 128]).unwrap();
                let out = [roomy, tight].map(|spec| {
                    let layer = KvLayer::new(device, spec).unwrap();
                    fill(&layer, 0xFF).unwrap();
                    let step = step(device, 2, &tokens).unwrap();
                    layers::write(&layer, &data, DType::F32, &step).unwrap();
                    attend(&layer, &q, &step, None).unwrap()
                });
                assert_close(format!("{device}: {codec}, {order:?}"), &out[0], &out[1], Bound::of(DType::F32));
            }
        }
    }
}

/// Every tensor as a view at an offset: all helpers of these tests make such views (`common::input`). Here the same
/// tensors also serve a captured graph, and views of one allocation serve as different arguments.
#[test]
fn view_offset() {
    let (tokens, heads, kv_heads, dim) = (4, 4, 2, 64);
    for device in devices() {
        let mut rng = Rng::of("views");
        // One allocation holds unused rows, queries, keys, values, and room for the output.
        let all = Tensor::zeros(device, DType::F32, &[100, dim]).unwrap();
        all.write(&rng.normals(100 * dim)).unwrap();
        let view = |start: usize, heads: usize| {
            all.rows(start..start + tokens * heads).unwrap().reshape(&[tokens, heads, dim]).unwrap()
        };
        let (q, k, v, out) = (view(3, heads), view(20, kv_heads), view(31, kv_heads), view(41, heads));
        let numbers = Tensor::from_slice(device, &[9u32, 0, 1, 2, 3, 9, 0, 0, 0, 0, 9, 4, 9], &[13]).unwrap();
        let part = |start, len| numbers.rows(start..start + len).unwrap();
        let step = Step { positions: part(1, 4), sequence: part(6, 4), lens: part(11, 1) };
        let layer = KvLayer::new(device, linear_spec(kv_heads, 4, dim, Codec::F32)).unwrap();
        let record = |enc: &mut Encoder| {
            let (order, first_token) = (SourceOrder::TokenMajor, 0);
            ops::kv_write(enc, &KvWrite { k: &k, v: &v, order, first_token, step: &step, layer: &layer })?;
            ops::attend(enc, &plain(&layer, &q, &step, None, &out))
        };
        let before = all.to_f32().unwrap();
        run(device, record).unwrap();
        let at_once = out.to_f32().unwrap();

        let (keys, values) = (k.to_f32().unwrap(), v.to_f32().unwrap());
        for t in 0..tokens {
            for h in 0..heads {
                let query = &before[(3 + t * heads + h) * dim..][..dim];
                let row = |j: usize| (j * kv_heads + h / 2) * dim..(j * kv_heads + h / 2 + 1) * dim;
                let keys: Vec<&[f32]> = (0..=t).map(|j| &keys[row(j)]).collect();
                let values: Vec<&[f32]> = (0..=t).map(|j| &values[row(j)]).collect();
                let want = by_hand(query, &keys, &values, 0.125, None);
                let got = &at_once[(t * heads + h) * dim..][..dim];
                assert_close(format!("{device}: token {t}, head {h}"), got, &want, Bound::of(DType::F32));
            }
        }
        // Nothing outside the output changed.
        let after = all.to_f32().unwrap();
        let outside = (0..41 * dim).chain((41 + tokens * heads) * dim..100 * dim);
        assert!(outside.into_iter().all(|i| before[i] == after[i]), "{device}: wrote outside the output's view");

        let graph = Encoder::capture(device, record).unwrap();
        out.write(&vec![0.0; tokens * heads * dim]).unwrap();
        fill(&layer, 0).unwrap();
        graph.replay().unwrap().wait().unwrap();
        assert!(out.to_f32().unwrap() == at_once, "{device}: a replayed graph gives other bits");
    }
}

/// The softcap is not a parameter that nobody looks at: it changes the result, into what it should be.
#[test]
fn softcap_used() {
    let data = Source::random(&mut Rng::of("softcap"), 20, 1, 64);
    let query: Vec<f32> = Rng::of("q").normals(64).iter().map(|x| x * 4.0).collect();
    for codec in [Codec::F32, Codec::F16, Codec::tq(8), Codec::tq(4)] {
        for device in devices() {
            let layer = KvLayer::new(device, linear_spec(1, 20, 64, codec)).unwrap();
            layers::write_at(&layer, &data, 0).unwrap();
            let (k, v) = (
                layers::read(&layer, KvSide::K, 0, 0..20).unwrap(),
                layers::read(&layer, KvSide::V, 0, 0..20).unwrap(),
            );
            let q = input(device, DType::F32, &query, &[1, 1, 64]).unwrap();
            let step = range_step(device, 1, 19..20).unwrap();
            let with = |softcap| {
                let out = Out::new(device, DType::F32, &[1, 1, 64]).unwrap();
                let args = Attend { softcap, ..plain(&layer, &q, &step, None, &out.tensor) };
                run(device, |enc| ops::attend(enc, &args)).unwrap();
                out.tensor.to_f32().unwrap()
            };
            for cap in [1.0, 5.0] {
                let want = by_hand(&query, &rows(&k, 64), &rows(&v, 64), 0.125, Some(cap));
                let got = with(Some(cap as f32));
                assert_close(format!("{device}: {codec}, cap {cap}"), &got, &want, Bound::of(DType::F32).times(4.0));
                assert!(nmse(&got, &with(None)) > 1e-2, "{device}: {codec}: the cap changes nothing");
            }
        }
    }
}

/// A head of 512 has two blocks with a norm each: blocks of very different energy, and single coordinates.
#[test]
fn head_512_two_blocks() {
    let dim = 512;
    for bits in [4, 5, 6, 8] {
        // One token per pair of coordinates that are not zero: the rotation mixes all 512 before it is cut into blocks.
        let mut data = Source::random(&mut Rng::of("blocks"), 40, 1, dim);
        for t in 0..40 {
            if t >= 20 {
                data.k[t * dim..][..dim].fill(0.0);
                data.k[t * dim + (t * 37) % dim] = 3.0;
            }
        }
        // Asymmetric energies where it matters, in the rotated domain.
        let reference = Device::reference();
        let skewed: Vec<f32> = {
            let mut y = Rng::of("skewed").normals(20 * dim);
            for row in y.chunks_mut(dim) {
                row[..256].iter_mut().for_each(|x| *x *= 100.0);
                row[256..].iter_mut().for_each(|x| *x *= 0.01);
            }
            let y = input(&reference, DType::F32, &y, &[20, dim]).unwrap();
            let x = Out::new(&reference, DType::F32, &[20, dim]).unwrap();
            run(&reference, |enc| ops::hadamard(enc, &Hadamard { x: &y, inverse: true, out: &x.tensor })).unwrap();
            x.tensor.to_f32().unwrap()
        };
        data.k[..20 * dim].copy_from_slice(&skewed);
        for device in devices() {
            let layer = KvLayer::new(device, linear_spec(1, 40, dim, Codec::tq(bits))).unwrap();
            layers::write_at(&layer, &data, 0).unwrap();
            let rotated = |keep_rotated: bool| {
                let out = Out::new(device, DType::F32, &[40, 1, dim]).unwrap();
                let args = KvRead {
                    layer: &layer,
                    side: KvSide::K,
                    sequence: 0,
                    start: 0,
                    keep_rotated,
                    order: SourceOrder::TokenMajor,
                    out: &out.tensor,
                };
                run(device, |enc| ops::kv_read(enc, &args)).unwrap();
                out.tensor.to_f32().unwrap()
            };
            let stored = rotated(true);
            for (t, row) in stored.chunks(dim).take(20).enumerate() {
                // The quiet block is as well kept as the loud one.
                let x = input(device, DType::F32, &data.k[t * dim..][..dim], &[1, dim]).unwrap();
                let y = Out::new(device, DType::F32, &[1, dim]).unwrap();
                run(device, |enc| ops::hadamard(enc, &Hadamard { x: &x, inverse: false, out: &y.tensor })).unwrap();
                let y = y.tensor.to_f32().unwrap();
                for block in [0..256, 256..512] {
                    let error = nmse(&row[block.clone()], &y[block.clone()]);
                    assert!(error < 0.02, "{device}: tq{bits}, token {t}, block {block:?}: {error:.3e}");
                }
            }
            // A one-hot vector becomes ±1/√512 everywhere, and comes back as that coordinate.
            for (t, row) in rotated(false).chunks(dim).enumerate().skip(20) {
                let at = (t * 37) % dim;
                let error = nmse(row, &data.k[t * dim..][..dim]);
                let largest = (0..dim).max_by(|&a, &b| row[a].abs().total_cmp(&row[b].abs())).unwrap();
                assert!(largest == at && row[at] > 0.0, "{device}: tq{bits}: coordinate {at} came back at {largest}");
                assert!(error < 0.05, "{device}: tq{bits}: one-hot {at} is off by {error:.3e}");
            }
        }
        let codec = Codec::tq(bits);
        Case { head_dim: dim, k: codec, v: codec, group: 2, sequences: vec![(40, 2)], ..Case::default() }.check();
    }
}

/// Which coordinates turn together when only some do: exactly the pairs of the layout, for one token and for many.
#[test]
fn partial_rotary_pairs() {
    let (dim, pairs, theta) = (64usize, 10usize, 10_000f64);
    for (layout, denominator) in
        [(PairLayout::Halves, dim), (PairLayout::LeadingHalves, 2 * pairs), (PairLayout::Interleaved, 2 * pairs)]
    {
        let pair = |i: usize| match layout {
            PairLayout::Halves => (i, i + dim / 2),
            PairLayout::LeadingHalves => (i, i + pairs),
            PairLayout::Interleaved => (2 * i, 2 * i + 1),
        };
        for device in devices() {
            for tokens in [1, 6] {
                let x = Rng::of("partial").normals(tokens * dim);
                let positions: Vec<u32> = (0..tokens as u32).map(|t| 3 + 7 * t).collect();
                let mut want = x.clone();
                for (row, &position) in want.chunks_mut(dim).zip(&positions) {
                    for i in 0..pairs {
                        let angle = f64::from(position) * theta.powf(-2.0 * i as f64 / denominator as f64);
                        let (a, b) = pair(i);
                        let (u, w) = (f64::from(row[a]), f64::from(row[b]));
                        row[a] = (u * angle.cos() - w * angle.sin()) as f32;
                        row[b] = (u * angle.sin() + w * angle.cos()) as f32;
                    }
                }
                let got = rope(device, &x, &[tokens, 1, dim], &positions, theta, pairs, layout);
                assert_close(format!("{device}: {layout:?}, {tokens} tokens"), &got, &want, Bound::of(DType::F32));
                // What does not turn is not touched at all.
                let turned: Vec<usize> = (0..pairs).flat_map(|i| [pair(i).0, pair(i).1]).collect();
                for (i, (x, y)) in x.iter().zip(&got).enumerate() {
                    assert!(
                        turned.contains(&(i % dim)) || x == y,
                        "{device}: {layout:?}: coordinate {} changed",
                        i % dim
                    );
                }
            }
        }
    }
}

/// RoPE without a norm, f32, one head more or less.
fn rope(
    device: &Device,
    x: &[f32],
    shape: &[usize; 3],
    positions: &[u32],
    theta: f64,
    rotated_pairs: usize,
    layout: PairLayout,
) -> Vec<f32> {
    let x = input(device, DType::F32, x, shape).unwrap();
    let positions = indices(device, positions, &[positions.len()]).unwrap();
    let out = Out::new(device, DType::F32, shape).unwrap();
    let rope = Some(Rope { angles: Angles::Theta(theta), rotated_pairs, layout, freq_factors: None });
    let out_order = SourceOrder::TokenMajor;
    let args = NormRope { x: &x, norm: None, rope, positions: &positions, rotate: false, out_order, out: &out.tensor };
    run(device, |enc| ops::norm_rope(enc, &args)).unwrap();
    out.bytes().unwrap();
    out.tensor.to_f32().unwrap()
}

/// Angles at far positions, read off as the direction of a turned unit vector.
#[test]
fn rope_far_position() {
    let dim = 128;
    for theta in [1e4, 1e6] {
        for device in devices() {
            for position in [1u32, 4096, 65_535, 524_287, 1_000_003, 1_048_575, 1_048_576] {
                let x: Vec<f32> = (0..dim).map(|i| f32::from(u8::from(i < dim / 2))).collect();
                let got = rope(device, &x, &[1, 1, dim], &[position], theta, dim / 2, PairLayout::Halves);
                for i in 0..dim / 2 {
                    let exact = f64::from(position) * theta.powf(-2.0 * i as f64 / dim as f64);
                    let angle = f64::from(got[i + dim / 2]).atan2(f64::from(got[i]));
                    let turns = (angle - exact) / std::f64::consts::TAU;
                    let off = (turns - turns.round()).abs() * std::f64::consts::TAU;
                    assert!(off < 1e-5, "{device}: position {position}, pair {i}: the angle is off by {off:.2e}");
                }
            }
        }
    }
}

/// Thousands of groups of threads, a hundred runs: a missing barrier shows as a bit that changes.
#[test]
fn reduction_race() {
    let (tokens, heads, dim) = (128, 24, 64);
    for device in devices() {
        let mut rng = Rng::of("race");
        let layer = KvLayer::new(device, linear_spec(3, tokens, dim, Codec::F16)).unwrap();
        let codes = KvLayer::new(device, linear_spec(heads, tokens, dim, Codec::tq(4))).unwrap();
        layers::write_at(&layer, &Source::random(&mut rng, tokens, 3, dim), 0).unwrap();
        let shape = [tokens, heads, dim];
        let x = input(device, DType::F32, &rng.normals(shape.iter().product()), &shape).unwrap();
        let flat = x.reshape(&[tokens * heads, dim]).unwrap();
        let step = range_step(device, 1, 0..tokens).unwrap();
        let outs = [0; 3].map(|_| Out::new(device, DType::F32, &shape).unwrap());
        let norm_out = outs[1].tensor.reshape(&[tokens * heads, dim]).unwrap();
        let mut first: Option<Vec<Vec<u8>>> = None;
        // msl-host runs each launch in several orders, compares them itself, and watches for races.
        let rounds = if device.name().contains("msl-host") { 5 } else { 100 };
        for round in 0..rounds {
            run(device, |enc| {
                ops::attend(enc, &plain(&layer, &x, &step, Some(12), &outs[0].tensor))?;
                let (weight, eps, residual, scale) = (None, 1e-6, Residual::None, 1.0);
                ops::rms_norm(enc, &RmsNorm { x: &flat, weight, eps, residual, scale, out: &norm_out })?;
                ops::hadamard(enc, &Hadamard { x: &x, inverse: false, out: &outs[2].tensor })?;
                let (order, first_token) = (SourceOrder::TokenMajor, 0);
                ops::kv_write(enc, &KvWrite { k: &x, v: &x, order, first_token, step: &step, layer: &codes })
            })
            .unwrap();
            let mut bytes: Vec<Vec<u8>> = outs.iter().map(|out| out.bytes().unwrap()).collect();
            bytes.extend(planes(&codes).unwrap());
            if round == 0 {
                first = Some(bytes);
            } else {
                assert!(first.as_ref() == Some(&bytes), "{device}: round {round} gives other bits than the first");
            }
        }
    }
}

/// A context in one part writes the output itself; nothing is left for a merge to do.
#[test]
fn one_split_writes_output() {
    for (k, v) in [(Codec::F32, Codec::F32), (Codec::tq(4), Codec::tq(4))] {
        for sequences in [vec![(0, 1)], vec![(99, 1)], vec![(50, 6)]] {
            Case { splits: Some(1), k, v, kv_heads: 2, group: 2, sequences, ..Case::default() }.check();
        }
    }
    // The plan says so, and a plan made by the device itself gives the same as none.
    for device in devices() {
        let mut rng = Rng::of("plan");
        let layer = KvLayer::new(device, linear_spec(2, 300, 64, Codec::F32)).unwrap();
        layers::write_at(&layer, &Source::random(&mut rng, 300, 2, 64), 0).unwrap();
        let q = input(device, DType::F32, &rng.normals(256), &[1, 4, 64]).unwrap();
        let step = range_step(device, 1, 299..300).unwrap();
        let results: Vec<Vec<f32>> = [None, Some(1), Some(0)]
            .into_iter()
            .map(|splits| {
                let out = Out::new(device, DType::F32, &[1, 4, 64]).unwrap();
                let args = plain(&layer, &q, &step, None, &out.tensor);
                let mut plan: Plan = ops::attend::plan(&args, device).unwrap();
                assert!(!plan.kernel.is_empty() && !plan.reason.is_empty(), "{device}: a plan has a reason");
                plan.splits = splits.unwrap_or(plan.splits);
                run(device, |enc| ops::attend(enc, &Attend { plan: Some(&plan), ..args })).unwrap();
                out.bytes().unwrap();
                out.tensor.to_f32().unwrap()
            })
            .collect();
        for other in &results[1..] {
            assert_close(format!("{device}: plans"), other, &results[0], Bound::of(DType::F32));
        }
    }
}

/// More parts than positions leave parts with nothing: they must not count, in whatever order they are merged.
#[test]
fn empty_state_merge() {
    for splits in [2, 5, 16, 33, 1000] {
        for sequences in [vec![(0, 1)], vec![(3, 1)], vec![(1, 3)], vec![(0, 1), (40, 1), (2, 0)]] {
            for (ring, window) in [(None, None), (Some(8), Some(3)), (None, Some(1))] {
                for codec in [Codec::F32, Codec::tq(8)] {
                    let (splits, sequences) = (Some(splits), sequences.clone());
                    Case {
                        splits,
                        ring,
                        window,
                        k: codec,
                        v: codec,
                        kv_heads: 2,
                        group: 2,
                        sequences,
                        ..Case::default()
                    }
                    .check();
                }
            }
        }
    }
    // A token that sees nothing at all gets zeros: the ring has lost everything up to it.
    for device in devices() {
        let layer = KvLayer::new(device, ring_spec(1, 4, 64, Codec::F32)).unwrap();
        let data = Source::random(&mut Rng::of("nothing"), 10, 1, 64);
        layers::write_at(&layer, &data, 0).unwrap();
        let q = input(device, DType::F32, &Rng::of("q").normals(640), &[10, 1, 64]).unwrap();
        for splits in [0, 1, 3] {
            let out = Out::new(device, DType::F32, &[10, 1, 64]).unwrap();
            let step = range_step(device, 1, 0..10).unwrap();
            let plan = Plan { kernel: "forced", reason: "by a test".into(), splits };
            let args = Attend { plan: Some(&plan), ..plain(&layer, &q, &step, None, &out.tensor) };
            run(device, |enc| ops::attend(enc, &args)).unwrap();
            out.bytes().unwrap();
            let out = out.tensor.to_f32().unwrap();
            assert!(out[..6 * 64].iter().all(|&x| x == 0.0), "{device}: a token that sees nothing gets zeros");
            assert!(out[6 * 64..].chunks(64).all(|row| row.iter().any(|&x| x != 0.0)), "{device}: the others do not");
        }
    }
}

/// The algebra behind splits: over any cut, in any grouping, with empty parts anywhere, merged states are the state over
/// everything.
#[test]
fn states_merge() {
    use kvant::reference::{Query, State, attend};
    let mut rng = Rng::of("states");
    let mut vector = |scale: f64| -> Vec<f64> { (0..8).map(|_| rng.normal() * scale).collect() };
    let q = vector(1.0);
    let kv: Vec<(Vec<f64>, Vec<f64>)> =
        (0..12).map(|i| (vector(if i == 5 { 300.0 } else { 1.0 }), vector(1.0))).collect();
    let query = Query { q: &q, scale: 1.0, softcap: None };
    let over = |range: std::ops::Range<usize>| attend(query, kv[range].iter().map(|(k, v)| (&k[..], &v[..]))).unwrap();
    let whole = over(0..12).finish();
    let empty = || State::empty(8);
    assert!(over(3..3) == empty() && empty().finish().iter().all(|&x| x == 0.0), "nothing gives the empty state");
    assert!(empty().merge(over(0..12)) == over(0..12) && over(0..12).merge(empty()) == over(0..12));
    assert!(empty().merge(empty()) == empty());
    for (a, b) in (0..=12).flat_map(|a| (a..=12).map(move |b| (a, b))) {
        let parts = || [over(0..a), over(a..b), over(b..12)];
        let [x, y, z] = parts();
        let left = x.merge(y).merge(z);
        let [x, y, z] = parts();
        let right = x.merge(y.merge(z));
        let [x, y, z] = parts();
        let turned = z.merge(x).merge(y);
        for state in [left, right, turned] {
            let off = state.finish().iter().zip(&whole).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
            assert!(off < 1e-12, "cut at {a} and {b}: off by {off:e}");
        }
    }
}

/// Writes and attends positions `range` in one step, and returns the output.
fn advance(
    layer: &KvLayer,
    data: &Source,
    queries: &[f32],
    heads: usize,
    range: std::ops::Range<usize>,
    window: Option<usize>,
) -> Vec<f32> {
    let (device, dim) = (layer.device(), layer.spec().head_dim);
    layers::write_at(layer, &data.part(range.clone()), range.start).unwrap();
    let row = heads * dim;
    let part = &queries[range.start * row..range.end * row];
    let q = input(device, DType::F32, part, &[range.len(), heads, dim]).unwrap();
    attend(layer, &q, &range_step(device, 1, range).unwrap(), window).unwrap()
}

/// N tokens at once, N one by one, and in chunks of 7.
#[test]
fn prefill_equals_decodes() {
    let (total, heads, kv_heads) = (75, 4, 2);
    for (dim, codec) in
        [(64, Codec::F32), (128, Codec::F16), (64, Codec::tq(4)), (256, Codec::tq(6)), (512, Codec::tq(8))]
    {
        let data = Source::random(&mut Rng::of(dim), total, kv_heads, dim);
        let queries = Rng::of("queries").normals(total * heads * dim);
        for window in [None, Some(16)] {
            for device in devices() {
                let all = |chunk: usize| -> Vec<f32> {
                    // A ring with room for a whole chunk beside the window.
                    let ring = window.map_or(total, |w| w + chunk);
                    let spec = LayerSpec { ring: window.is_some(), ..linear_spec(kv_heads, ring, dim, codec) };
                    let layer = KvLayer::new(device, spec).unwrap();
                    let starts = (0..total).step_by(chunk);
                    starts
                        .flat_map(|s| advance(&layer, &data, &queries, heads, s..(s + chunk).min(total), window))
                        .collect()
                };
                let at_once = all(total);
                for chunk in [1, 7] {
                    let case = format!("{device}: D {dim}, {codec}, window {window:?}, chunks of {chunk}");
                    assert_close(case, &all(chunk), &at_once, Bound::of(DType::F32).times(2.0));
                }
            }
        }
    }
}

/// A few drafted tokens verified at once, on a ring that has wrapped, equal the same tokens one by one.
#[test]
fn verify_equals_sequential() {
    let (heads, kv_heads, dim, window) = (8, 1, 64, 12);
    let data = Source::random(&mut Rng::of("verify"), 60, kv_heads, dim);
    let queries = Rng::of("queries").normals(60 * heads * dim);
    for codec in [Codec::F32, Codec::BF16, Codec::tq(4), Codec::tq(5)] {
        for device in devices() {
            for draft in [2, 3, 4, 8] {
                let spec = ring_spec(kv_heads, window + 8, dim, codec);
                let (one, many) = (KvLayer::new(device, spec).unwrap(), KvLayer::new(device, spec).unwrap());
                for layer in [&one, &many] {
                    layers::write_at(layer, &data.part(0..47), 0).unwrap();
                }
                let at_once = advance(&many, &data, &queries, heads, 47..47 + draft, Some(window));
                let by_one: Vec<f32> = (47..47 + draft)
                    .flat_map(|p| advance(&one, &data, &queries, heads, p..p + 1, Some(window)))
                    .collect();
                let case = format!("{device}: {codec}, {draft} tokens");
                assert_close(&case, &by_one, &at_once, Bound::of(DType::F32).times(2.0));
                assert!(planes(&one).unwrap() == planes(&many).unwrap(), "{case}: the caches differ");
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- refusals

/// What `attempt` returns must be an error that `expected` knows, and nothing may have been written.
fn refused(
    what: &str,
    device: &Device,
    watched: &[&Tensor],
    attempt: impl FnOnce(&mut Encoder) -> Result<()>,
    expected: fn(&Error) -> bool,
) {
    let before: Vec<Vec<u8>> = watched.iter().map(|t| bytes_of(t).unwrap()).collect();
    match run(device, attempt) {
        Ok(()) => panic!("{device}: {what} is accepted"),
        Err(e) => assert!(expected(&e), "{device}: {what}: the wrong error: {e:?}"),
    }
    let after: Vec<Vec<u8>> = watched.iter().map(|t| bytes_of(t).unwrap()).collect();
    assert!(before == after, "{device}: {what}: something was written");
}

/// One valid set of arguments for a write, an attention and a norm, to be spoilt one at a time.
struct Valid {
    layer: KvLayer,
    step: Step,
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    out: Tensor,
}

impl Valid {
    fn new(device: &Device) -> Valid {
        let mut rng = Rng::of("valid");
        let layer = KvLayer::new(device, linear_spec(2, 4, 64, Codec::F32)).unwrap();
        fill(&layer, 0x3C).unwrap();
        let up = |rng: &mut Rng, shape: &[usize]| {
            Tensor::from_slice(device, &rng.normals(shape.iter().product()), shape).unwrap()
        };
        Valid {
            layer,
            step: Step::new(device, 1, &[(0, 0), (0, 1), (0, 2)]).unwrap(),
            q: up(&mut rng, &[3, 4, 64]),
            kv: up(&mut rng, &[3, 2, 64]),
            weight: up(&mut rng, &[64]),
            out: up(&mut rng, &[3, 4, 64]),
        }
    }

    fn attend<'a>(&'a self) -> Attend<'a> {
        plain(&self.layer, &self.q, &self.step, None, &self.out)
    }

    fn write<'a>(&'a self) -> KvWrite<'a> {
        let order = SourceOrder::TokenMajor;
        KvWrite { k: &self.kv, v: &self.kv, order, first_token: 0, step: &self.step, layer: &self.layer }
    }

    fn norm<'a>(&'a self) -> NormRope<'a> {
        NormRope {
            x: &self.q,
            norm: Some(HeadNorm { weight: Some(&self.weight), eps: 1e-6 }),
            rope: None,
            positions: &self.step.positions,
            rotate: false,
            out_order: SourceOrder::TokenMajor,
            out: &self.out,
        }
    }

    fn watched(&self) -> Vec<&Tensor> {
        let planes = self.layer.k().tensors().chain(self.layer.v().tensors());
        planes.map(|(_, t)| t).chain([&self.out]).collect()
    }
}

#[test]
fn undersized_tensor() {
    let shape = |e: &Error| matches!(e, Error::Shape { .. } | Error::Value { .. });
    for device in devices() {
        let v = Valid::new(device);
        let w = v.watched();
        let two = |t: &Tensor| t.rows(0..2).unwrap();
        let (q, kv, weight, out) = (two(&v.q), two(&v.kv), v.weight.rows(0..63).unwrap(), two(&v.out));
        let short = Step { positions: two(&v.step.positions), ..v.step.clone() };
        let sequence = Step { sequence: two(&v.step.sequence), ..v.step.clone() };
        let lens = Step { lens: v.step.lens.rows(0..0).unwrap(), ..v.step.clone() };
        refused("attend: q too short", device, &w, |e| ops::attend(e, &Attend { q: &q, ..v.attend() }), shape);
        refused("attend: out too short", device, &w, |e| ops::attend(e, &Attend { out: &out, ..v.attend() }), shape);
        for step in [&short, &sequence, &lens] {
            refused("attend: step too short", device, &w, |e| ops::attend(e, &Attend { step, ..v.attend() }), shape);
        }
        refused("kv_write: k too short", device, &w, |e| ops::kv_write(e, &KvWrite { k: &kv, ..v.write() }), shape);
        refused("kv_write: v too short", device, &w, |e| ops::kv_write(e, &KvWrite { v: &kv, ..v.write() }), shape);
        let both = KvWrite { k: &kv, v: &kv, ..v.write() };
        refused("kv_write: both too short", device, &w, |e| ops::kv_write(e, &both), shape);
        let late = KvWrite { first_token: 1, ..v.write() };
        refused("kv_write: range too long", device, &w, |e| ops::kv_write(e, &late), shape);
        let overflow = KvWrite { first_token: usize::MAX, ..v.write() };
        refused("kv_write: range overflows", device, &w, |e| ops::kv_write(e, &overflow), shape);
        let norm = NormRope { norm: Some(HeadNorm { weight: Some(&weight), eps: 1e-6 }), ..v.norm() };
        refused("norm_rope: weight too short", device, &w, |e| ops::norm_rope(e, &norm), shape);
        refused(
            "norm_rope: out too short",
            device,
            &w,
            |e| ops::norm_rope(e, &NormRope { out: &out, ..v.norm() }),
            shape,
        );
        refused(
            "norm_rope: positions",
            device,
            &w,
            |e| ops::norm_rope(e, &NormRope { positions: &short.positions, ..v.norm() }),
            shape,
        );
        let k = Tensor::zeros(device, DType::F32, &[1, 2, 3, 64]).unwrap();
        let made = KvLayer::from_dense(linear_spec(2, 4, 64, Codec::F32), &k, &k);
        assert!(matches!(made, Err(Error::Shape { .. })), "{device}: a layer over too small a tensor");
        // And the arguments were right but for that.
        run(device, |e| ops::kv_write(e, &v.write())).unwrap();
        run(device, |e| ops::attend(e, &v.attend())).unwrap();
        run(device, |e| ops::norm_rope(e, &v.norm())).unwrap();
    }
}

#[test]
fn wrong_dtype() {
    let dtype = |e: &Error| matches!(e, Error::DType { .. });
    for device in devices() {
        let v = Valid::new(device);
        let w = v.watched();
        let ints = |t: &Tensor| Tensor::zeros(device, DType::U32, t.shape()).unwrap();
        let floats = |t: &Tensor| Tensor::zeros(device, DType::F32, t.shape()).unwrap();
        let (q, kv, out) = (ints(&v.q), ints(&v.kv), ints(&v.out));
        refused("attend: q", device, &w, |e| ops::attend(e, &Attend { q: &q, ..v.attend() }), dtype);
        refused("attend: out", device, &w, |e| ops::attend(e, &Attend { out: &out, ..v.attend() }), dtype);
        for step in [
            Step { positions: floats(&v.step.positions), ..v.step.clone() },
            Step { sequence: floats(&v.step.sequence), ..v.step.clone() },
            Step { lens: floats(&v.step.lens), ..v.step.clone() },
        ] {
            refused("attend: step", device, &w, |e| ops::attend(e, &Attend { step: &step, ..v.attend() }), dtype);
            refused("kv_write: step", device, &w, |e| ops::kv_write(e, &KvWrite { step: &step, ..v.write() }), dtype);
        }
        refused("kv_write: k", device, &w, |e| ops::kv_write(e, &KvWrite { k: &kv, ..v.write() }), dtype);
        refused("norm_rope: x", device, &w, |e| ops::norm_rope(e, &NormRope { x: &q, ..v.norm() }), dtype);
        refused("norm_rope: out", device, &w, |e| ops::norm_rope(e, &NormRope { out: &out, ..v.norm() }), dtype);
        let made = KvLayer::from_dense(linear_spec(2, 4, 64, Codec::F16), v.layer.k().tensors().next().unwrap().1, &kv);
        assert!(matches!(made, Err(Error::DType { .. })), "{device}: a layer over another dtype");
        assert!(v.q.to_vec::<u32>().is_err() && v.step.lens.to_f32().is_err(), "{device}: downloads are typed");
    }
}

/// Beyond the layer or the length: an error where the host sees the numbers, a skipped token elsewhere; never a write.
#[test]
fn position_out_of_range() {
    for device in devices() {
        let v = Valid::new(device);
        let bad = [
            ("a position at the capacity", vec![4, 1, 2], vec![0, 0, 0], vec![5]),
            ("a position far out", vec![0, u32::MAX, 2], vec![0, 0, 0], vec![3]),
            ("a length beyond the capacity", vec![0, 1, 2], vec![0, 0, 0], vec![5]),
            ("a position at the length", vec![0, 1, 3], vec![0, 0, 0], vec![3]),
            ("a sequence that is not there", vec![0, 1, 2], vec![0, 1, 0], vec![3]),
            ("a sequence far out", vec![0, 1, 2], vec![0, u32::MAX, 0], vec![3]),
        ];
        for (what, positions, sequence, lens) in bad {
            let u32s = |x: &[u32]| Tensor::from_slice(device, x, &[x.len()]).unwrap();
            let step = Step { positions: u32s(&positions), sequence: u32s(&sequence), lens: u32s(&lens) };
            let range = |e: &Error| matches!(e, Error::OutOfRange { .. });
            let (write, attend) = (KvWrite { step: &step, ..v.write() }, Attend { step: &step, ..v.attend() });
            if sees_indices(device) {
                let w = v.watched();
                refused(&format!("kv_write: {what}"), device, &w, |e| ops::kv_write(e, &write), range);
                refused(&format!("attend: {what}"), device, &w, |e| ops::attend(e, &attend), range);
                continue;
            }
            // The good tokens are written; no other slot changes, and nothing faults.
            let before = planes(&v.layer).unwrap();
            for result in [run(device, |e| ops::kv_write(e, &write)), run(device, |e| ops::attend(e, &attend))] {
                result.unwrap_or_else(|e| panic!("{device}: {what}: {e}"));
            }
            let row = 64 * 4;
            for (before, after) in before.iter().zip(planes(&v.layer).unwrap()) {
                for (slot, (x, y)) in before.chunks(row).zip(after.chunks(row)).enumerate() {
                    let written =
                        positions.iter().zip(&sequence).any(|(&p, &s)| s == 0 && p < lens[0] && p as usize == slot % 4);
                    assert!(written || x == y, "{device}: {what}: slot {slot} changed");
                }
            }
        }
        // Rotary tables end somewhere.
        let tables = Tensor::zeros(device, DType::F32, &[2, 32]).unwrap();
        let rope = Rope {
            angles: Angles::Tables { cos: &tables, sin: &tables },
            rotated_pairs: 32,
            layout: PairLayout::Halves,
            freq_factors: None,
        };
        let args = NormRope { rope: Some(rope), ..v.norm() };
        if sees_indices(device) {
            let range = |e: &Error| matches!(e, Error::OutOfRange { .. });
            refused("norm_rope: beyond the tables", device, &v.watched(), |e| ops::norm_rope(e, &args), range);
        } else {
            run(device, |e| ops::norm_rope(e, &args)).unwrap();
        }
    }
}

// ------------------------------------------------------------------------------------------------------------ the codec

/// Vectors with a kurtosis of 70: rotated first, they quantise as well as any.
#[test]
fn outlier_vectors() {
    let (dim, tokens) = (128, 64);
    let mut rng = Rng::of("outliers");
    let mut value = || (rng.normal() * if rng.below(64) == 0 { 10.0 } else { 1.0 }) as f32;
    let k: Vec<f32> = (0..tokens * dim).map(|_| value()).collect();
    let moment = |n: i32| k.iter().map(|&x| f64::from(x).powi(n)).sum::<f64>() / k.len() as f64;
    let kurtosis = moment(4) / moment(2).powi(2);
    assert!(kurtosis > 50.0, "the vectors are meant to be heavy-tailed: kurtosis {kurtosis}");
    let data = Source { v: k.clone(), k, heads: 1, dim };
    for (bits, limit) in [(4, 0.0105), (5, 0.0028), (6, 7.2e-4), (8, 4.7e-5)] {
        for device in devices() {
            let layer = KvLayer::new(device, linear_spec(1, tokens, dim, Codec::tq(bits))).unwrap();
            layers::write_at(&layer, &data, 0).unwrap();
            for side in [KvSide::K, KvSide::V] {
                let error = nmse(&layers::read(&layer, side, 0, 0..tokens).unwrap(), &data.k);
                assert!(error < limit, "{device}: tq{bits} {side:?}: {error:.4e}");
            }
        }
    }
}

/// A Hadamard transform with more coordinates than a GPU has threads in a group.
#[test]
fn large_head() {
    for dim in [2048, 4096] {
        let values = Rng::new(dim as u64).normals(3 * dim);
        let rotate = |device: &Device, values: &[f32], inverse| {
            let x = input(device, DType::F32, values, &[3, dim]).unwrap();
            let y = Out::new(device, DType::F32, &[3, dim]).unwrap();
            run(device, |enc| ops::hadamard(enc, &Hadamard { x: &x, inverse, out: &y.tensor })).unwrap();
            y.bytes().unwrap();
            y.tensor.to_f32().unwrap()
        };
        let want = rotate(&Device::reference(), &values, false);
        for device in devices() {
            let turned = rotate(device, &values, false);
            assert_close(format!("{device}: D {dim}"), &turned, &want, Bound::of(DType::F32));
            assert_close(
                format!("{device}: D {dim} and back"),
                &rotate(device, &turned, true),
                &values,
                Bound::of(DType::F32),
            );
            // The codec takes it, too.
            let layer = KvLayer::new(device, linear_spec(1, 3, dim, Codec::tq(6))).unwrap();
            let data = Source { k: values.clone(), v: values.clone(), heads: 1, dim };
            layers::write_at(&layer, &data, 0).unwrap();
            let error = nmse(&layers::read(&layer, KvSide::V, 0, 0..3).unwrap(), &values);
            assert!(error < 8e-4, "{device}: tq6 of {dim} coordinates: {error:.3e}");
        }
    }
}

/// Offsets that are a multiple of the element size and of nothing more.
#[test]
fn unaligned_tensor_offset() {
    let (tokens, heads, kv_heads, dim) = (3, 4, 2, 64);
    for dtype in FLOATS {
        for shift in [1, 3, 7] {
            let mut rng = Rng::new(shift as u64);
            let values = rng.normals(tokens * heads * dim);
            let (keys, vals) = (rng.normals(tokens * kv_heads * dim), rng.normals(tokens * kv_heads * dim));
            let result = |device: &Device, shift: usize| -> Result<Vec<Vec<u8>>> {
                let up = |values: &[f32], shape: &[usize]| -> Result<Tensor> {
                    let flat = [vec![f32::NAN; shift], values.to_vec()].concat();
                    let all = Tensor::from_bytes(device, dtype, &[flat.len()], &common::encode(dtype, &flat))?;
                    all.rows(shift..flat.len())?.reshape(shape)
                };
                let shape = [tokens, heads, dim];
                let (q, k, v) =
                    (up(&values, &shape)?, up(&keys, &[tokens, kv_heads, dim])?, up(&vals, &[tokens, kv_heads, dim])?);
                let weight = up(&values[..dim], &[dim])?;
                let (out, normed) = (up(&values, &shape)?, up(&values, &shape)?);
                let layer = KvLayer::new(
                    device,
                    LayerSpec { v: Codec::tq(5), ..linear_spec(kv_heads, tokens, dim, Codec::Dense(dtype)) },
                )?;
                let step = range_step(device, 1, 0..tokens)?;
                run(device, |enc| {
                    let (order, first_token) = (SourceOrder::TokenMajor, 0);
                    ops::kv_write(enc, &KvWrite { k: &k, v: &v, order, first_token, step: &step, layer: &layer })?;
                    ops::attend(enc, &plain(&layer, &q, &step, None, &out))?;
                    let rope = Rope {
                        angles: Angles::Theta(1e4),
                        rotated_pairs: 20,
                        layout: PairLayout::LeadingHalves,
                        freq_factors: None,
                    };
                    let norm = Some(HeadNorm { weight: Some(&weight), eps: 1e-6 });
                    let args = NormRope {
                        x: &q,
                        norm,
                        rope: Some(rope),
                        positions: &step.positions,
                        rotate: true,
                        out_order: SourceOrder::TokenMajor,
                        out: &normed,
                    };
                    ops::norm_rope(enc, &args)
                })?;
                Ok([vec![bytes_of(&out)?, bytes_of(&normed)?], planes(&layer)?].concat())
            };
            for device in devices() {
                let (shifted, aligned) = (result(device, shift).unwrap(), result(device, 0).unwrap());
                assert!(shifted == aligned, "{device}: {dtype}, {shift} elements off: other bits than when aligned");
            }
        }
    }
    // Dense caches of an engine's own, at such an offset.
    for device in devices() {
        let spec = linear_spec(2, 5, 64, Codec::F16);
        let memory = Tensor::zeros(device, DType::F16, &[2 * 640 + 3]).unwrap();
        let (k, v) = (memory.rows(1..641).unwrap(), memory.rows(642..1282).unwrap());
        let layer = KvLayer::from_dense(spec, &k, &v).unwrap();
        let own = KvLayer::new(device, spec).unwrap();
        let data = Source::random(&mut Rng::of("own"), 5, 2, 64);
        let q = input(device, DType::F32, &Rng::of("q").normals(2 * 256), &[2, 4, 64]).unwrap();
        let step = range_step(device, 1, 3..5).unwrap();
        let results = [&layer, &own].map(|layer| {
            layers::write_at(layer, &data, 0).unwrap();
            attend(layer, &q, &step, None).unwrap()
        });
        assert!(results[0] == results[1], "{device}: a layer at an odd offset");
        assert!(planes(&layer).unwrap() == planes(&own).unwrap(), "{device}: a layer at an odd offset");
    }
}

/// The same input gives the same bits, three times.
#[test]
fn determinism() {
    let attention = |k, v, sequences| Case { k, v, kv_heads: 2, group: 3, sequences, ..Case::default() };
    for case in [
        attention(Codec::F32, Codec::F32, vec![(700, 1)]),
        attention(Codec::F16, Codec::tq(4), vec![(300, 1), (5, 1)]),
        attention(Codec::tq(6), Codec::tq(5), vec![(100, 30)]),
        attention(Codec::tq(8), Codec::BF16, vec![(0, 100)]),
    ] {
        let data = case.data();
        for device in devices() {
            let once = || {
                let layer = case.layer(device, &data).unwrap();
                (planes(&layer).unwrap(), case.attend(&layer, &data).unwrap().bytes().unwrap())
            };
            let first = once();
            for _ in 0..2 {
                assert!(once() == first, "{device}: {case}: other bits in another run");
            }
        }
    }
}

/// What the codec writes does not depend on the device's threads, and a layer's bytes mean the same everywhere.
#[test]
fn bytes_mean_the_same_everywhere() {
    let data = Source::random(&mut Rng::of("bytes"), 20, 2, 128);
    for codec in CODECS {
        for device in devices().iter().filter(|d| d.kind() != DeviceKind::Reference) {
            let layer = KvLayer::new(device, linear_spec(2, 20, 128, codec)).unwrap();
            layers::write_at(&layer, &data, 0).unwrap();
            let there = copy_to(&layer, &Device::reference()).unwrap();
            let read = |layer| layers::read(layer, KvSide::K, 0, 0..20).unwrap();
            assert_close(format!("{device}: {codec}"), &read(&layer), &read(&there), Bound::of(DType::F32));
        }
    }
}
