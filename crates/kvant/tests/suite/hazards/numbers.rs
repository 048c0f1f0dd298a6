//! Numerical results: the softcap, the norms of two blocks, the pairs and the angles of RoPE, the rotation of long
//! heads and of outliers.

use super::*;

/// The softcap changes the result as specified.
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
                let args = plain(&layer, &q, &step, None, &out.tensor).softcap(softcap);
                run(device, |enc| ops::attend(enc, &args)).unwrap();
                out.tensor.to_f32().unwrap()
            };
            for cap in [1.0, 5.0] {
                let want = by_hand(&query, &rows(&k, 64), &rows(&v, 64), 0.125, Some(cap));
                let got = with(Some(cap as f32));
                let bound = Bound::of(DType::F32).over(device, codec, 1.0).times(4.0);
                assert_close(format!("{device}: {codec}, cap {cap}"), &got, &want, bound);
                assert!(nmse(&got, &with(None)) > 1e-2, "{device}: {codec}: the cap changes nothing");
            }
        }
    }
}

/// A head of 512 has two blocks with a norm each: blocks of very different energy, and single coordinates.
#[test]
fn head_512_two_blocks() {
    let dim = 512;
    for (bits, optimum) in GAUSSIAN_MSE {
        // One token per pair of coordinates that are not zero: the rotation mixes all 512 before they are cut into
        // blocks.
        let mut data = Source::random(&mut Rng::of("blocks"), 40, 1, dim);
        for t in 0..40 {
            if t >= 20 {
                data.k[t * dim..][..dim].fill(0.0);
                data.k[t * dim + (t * 37) % dim] = 3.0;
            }
        }
        // Different energies in the rotated domain, where blocks are.
        let reference = Device::reference();
        let skewed: Vec<f32> = {
            let mut y = Rng::of("skewed").normals(20 * dim);
            for row in y.chunks_mut(dim) {
                row[..256].iter_mut().for_each(|x| *x *= 100.0);
                row[256..].iter_mut().for_each(|x| *x *= 0.01);
            }
            let y = input(&reference, DType::F32, &y, &[20, dim]).unwrap();
            let x = Out::new(&reference, DType::F32, &[20, dim]).unwrap();
            run(&reference, |enc| ops::hadamard(enc, &Hadamard::new(&y, &x.tensor).inverse(true))).unwrap();
            x.tensor.to_f32().unwrap()
        };
        data.k[..20 * dim].copy_from_slice(&skewed);
        for device in devices() {
            let layer = KvLayer::new(device, linear_spec(1, 40, dim, Codec::tq(bits))).unwrap();
            layers::write_at(&layer, &data, 0).unwrap();
            let rotated = |keep_rotated: bool| {
                let out = Out::new(device, DType::F32, &[40, 1, dim]).unwrap();
                let args = KvRead::new(&layer, KvSide::K, &out.tensor).keep_rotated(keep_rotated);
                run(device, |enc| ops::kv_read(enc, &args)).unwrap();
                out.tensor.to_f32().unwrap()
            };
            let stored = rotated(true);
            for (t, row) in stored.chunks(dim).take(20).enumerate() {
                // The weak block is as precise as the strong one.
                let x = input(device, DType::F32, &data.k[t * dim..][..dim], &[1, dim]).unwrap();
                let y = Out::new(device, DType::F32, &[1, dim]).unwrap();
                run(device, |enc| ops::hadamard(enc, &Hadamard::new(&x, &y.tensor))).unwrap();
                let y = y.tensor.to_f32().unwrap();
                for block in [0..256, 256..512] {
                    let error = nmse(&row[block.clone()], &y[block.clone()]);
                    assert!(
                        error < 1.6 * optimum + 0.004,
                        "{device}: tq{bits}, token {t}, block {block:?}: {error:.3e}"
                    );
                }
            }
            // A one-hot vector becomes ±1/√512 everywhere, and decodes to that coordinate.
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

/// Partial rotation turns exactly the pairs of the layout, for one token and for many.
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
                // Coordinates outside of the pairs do not change at all.
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

/// RoPE without a norm, in f32, with one head added or not.
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
    let rope = Some(Rope::new(theta, rotated_pairs).layout(layout));
    let out_order = HeadOrder::TokenMajor;
    let args = NormRope::new(&x, &positions, &out.tensor).rope(rope).out_order(out_order);
    run(device, |enc| ops::norm_rope(enc, &args)).unwrap();
    out.bytes().unwrap();
    out.tensor.to_f32().unwrap()
}

/// Angles at far positions, measured as the direction of a turned unit vector.
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

/// Vectors with a kurtosis of 70 quantise as well as others, because they are rotated first.
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

/// A Hadamard transform with more coordinates than a threadgroup has threads.
#[test]
fn large_head() {
    for dim in [2048, 4096] {
        let values = Rng::new(dim as u64).normals(3 * dim);
        let rotate = |device: &Device, values: &[f32], inverse| {
            let x = input(device, DType::F32, values, &[3, dim]).unwrap();
            let y = Out::new(device, DType::F32, &[3, dim]).unwrap();
            run(device, |enc| ops::hadamard(enc, &Hadamard::new(&x, &y.tensor).inverse(inverse))).unwrap();
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
            // The codec supports it, too.
            let layer = KvLayer::new(device, linear_spec(1, 3, dim, Codec::tq(6))).unwrap();
            let data = Source { k: values.clone(), v: values.clone(), heads: 1, dim };
            layers::write_at(&layer, &data, 0).unwrap();
            let error = nmse(&layers::read(&layer, KvSide::V, 0, 0..3).unwrap(), &values);
            assert!(error < 8e-4, "{device}: tq6 of {dim} coordinates: {error:.3e}");
        }
    }
}
