//! kv_write and kv_read against the reference: dtypes, codecs, layouts, rings, several sequences, odd sizes.

use crate::common::{
    Bound, EPS, FLOATS, Out, Output, Rng, conform, devices, indices, input,
    layers::{self, CODECS, GAUSSIAN_MSE, Source, copy_to, fill, linear_spec, ordered, ring_spec, same_planes, step},
    nmse, run,
};
use kvant::{
    Codec, DType, Device, DeviceKind, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor,
    codec::{BITS, Norm, TurboQuant},
    ops::{self, KvRead, KvSide, KvWrite},
};

const ORDERS: [HeadOrder; 2] = [HeadOrder::TokenMajor, HeadOrder::HeadMajor];
const SLOT_ORDERS: [HeadOrder; 2] = [HeadOrder::HeadMajor, HeadOrder::TokenMajor];

/// Finite and infinite values at which conversions can go wrong: halfway points, the largest numbers, subnormals,
/// zeros.
fn corners() -> Vec<f32> {
    let mut values = vec![0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45];
    values.extend([65504.0, 65519.99, 65520.0, -65520.0, 65536.0, 1e-8, 5.96e-8, 2.98e-8, 2.980_233e-8, 6.1e-5]);
    for exponent in [-30, -20, -14, -1, 0, 1, 10, 15] {
        let one = 2f32.powi(exponent);
        // Halfway between neighbours of f16 and of bf16, below an even and below an odd one, and slightly off.
        for step in [2f32.powi(-11), 2f32.powi(-8)] {
            for odd in [1.0, 3.0] {
                let half = one * (1.0 + odd * step);
                values.extend([half, f32::from_bits(half.to_bits() + 1), f32::from_bits(half.to_bits() - 1), -half]);
            }
        }
    }
    values
}

/// A batch of tokens of several sequences, to be written in one launch.
struct Batch {
    spec: LayerSpec,
    k_type: DType,
    v_type: DType,
    order: HeadOrder,
    first_token: usize,
    /// (sequence, position) of each entry.
    tokens: Vec<(u32, u32)>,
    /// Tokens of the source that follow the last entry.
    behind: usize,
}

impl Batch {
    fn write(&self, device: &Device, data: &Source) -> Result<KvLayer> {
        let layer = KvLayer::new(device, self.spec)?;
        // Slots that are not written must not change.
        fill(&layer, 0x3C)?;
        let dims = [data.tokens(), self.spec.kv_heads, self.spec.head_dim];
        let side = |values: &[f32], dtype| {
            let (values, shape) = ordered(values, self.order, dims);
            input(device, dtype, &values, &shape)
        };
        let (k, v) = (side(&data.k, self.k_type)?, side(&data.v, self.v_type)?);
        let step = step(device, self.spec.sequences, &self.tokens)?;
        let (order, first_token) = (self.order, self.first_token);
        run(device, |enc| {
            ops::kv_write(enc, &KvWrite::new(&k, &v, &step, &layer).order(order).first_token(first_token))
        })?;
        Ok(layer)
    }

    fn source(&self, rng: &mut Rng) -> Source {
        let tokens = self.first_token + self.tokens.len() + self.behind;
        let mut data = Source::random(rng, tokens, self.spec.kv_heads, self.spec.head_dim);
        if !self.spec.k.is_quantised() {
            let corners = corners();
            for x in data.k.iter_mut().chain(&mut data.v) {
                if rng.below(8) == 0 {
                    *x = rng.pick(&corners);
                }
            }
        }
        data
    }
}

fn name(batch: &Batch) -> String {
    let LayerSpec { sequences, kv_heads, capacity, head_dim, k, v, ring, order, .. } = batch.spec;
    format!(
        "{} {:?} +{} -> k {k}, v {v}, {order:?}, ring {ring}, S {sequences}, Hk {kv_heads}, cap {capacity}, D {head_dim}, T {}",
        batch.k_type,
        batch.order,
        batch.first_token,
        batch.tokens.len()
    )
}

#[test]
fn dense_planes_are_the_same_bytes() {
    let mut rng = Rng::of("dense planes");
    for from in FLOATS {
        for to in FLOATS {
            for order in ORDERS {
                for slots in SLOT_ORDERS {
                    for ring in [false, true] {
                        let (head_dim, kv_heads) = (rng.pick(&[1, 7, 64, 80, 129]), rng.pick(&[1, 2, 3]));
                        let (capacity, sequences) = (rng.pick(&[5, 16, 33]), rng.pick(&[1, 3]));
                        let spec = linear_spec(kv_heads, capacity, head_dim, Codec::F32)
                            .k(Codec::Dense(to))
                            .sequences(sequences)
                            .v(Codec::Dense(rng.pick(&FLOATS)))
                            .ring(ring)
                            .order(slots);
                        let mut tokens = Vec::new();
                        for s in 0..sequences {
                            let start = if ring { rng.below(3 * capacity) } else { rng.below(capacity - 2) };
                            let room = if ring { 2 * capacity } else { capacity - start };
                            tokens.extend((start..start + rng.below(room + 1)).map(|p| (s as u32, p as u32)));
                        }
                        rng.shuffle(&mut tokens);
                        let (first_token, behind) = (rng.below(3), rng.below(3));
                        let v_type = rng.pick(&FLOATS);
                        let batch = Batch { spec, k_type: from, v_type, order, first_token, tokens, behind };
                        let data = batch.source(&mut rng);
                        conform(name(&batch), |device| same_planes(&batch.write(device, &data)?));
                    }
                }
            }
        }
    }
}

/// A copy is bit for bit, including NaN, so it must not use arithmetic.
#[test]
fn the_same_dtype_keeps_nan_payloads() {
    // Also next to a quantised side.
    let layers_of = |dtype| {
        let dense = Codec::Dense(dtype);
        [(67, dense, dense), (64, Codec::tq(4), dense), (256, Codec::tq(5), dense), (8, dense, Codec::tq(8))]
            .map(|(dim, k, v)| (dtype, dim, k, v))
    };
    for (dtype, dim, k_codec, v_codec) in FLOATS.into_iter().flat_map(layers_of) {
        for device in devices() {
            let spec = linear_spec(2, 4, dim, k_codec).k(k_codec).v(v_codec);
            let layer = KvLayer::new(device, spec).unwrap();
            let mut rng = Rng::of(dtype);
            // Random bytes include every kind of NaN.
            let mut random = || -> Vec<u8> { (0..3 * 2 * dim * dtype.size()).map(|_| rng.bits() as u8).collect() };
            let (k_bytes, v_bytes) = (random(), random());
            let upload = |bytes: &[u8]| Tensor::from_bytes(device, dtype, &[3, 2, dim], bytes).unwrap();
            let (k, v) = (upload(&k_bytes), upload(&v_bytes));
            let step = layers::range_step(device, 1, 1..4).unwrap();
            run(device, |enc| {
                let order = HeadOrder::TokenMajor;
                ops::kv_write(enc, &KvWrite::new(&k, &v, &step, &layer).order(order))
            })
            .unwrap();
            for (side, codec, bytes) in [(KvSide::K, k_codec, k_bytes), (KvSide::V, v_codec, v_bytes)] {
                if codec.is_quantised() {
                    continue;
                }
                let out = Out::new(device, dtype, &[3, 2, dim]).unwrap();
                let order = HeadOrder::TokenMajor;
                let read = KvRead::new(&layer, side, &out.tensor).start(1).order(order);
                run(device, |enc| ops::kv_read(enc, &read)).unwrap();
                assert!(
                    out.bytes().unwrap() == bytes,
                    "{device}: k {k_codec}, v {v_codec}, {side:?}: the bits changed"
                );
            }
        }
    }
}

/// NaN of one dtype is converted to NaN of another, in the same place.
#[test]
fn nan_is_converted_to_nan() {
    for (from, to) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
        for device in devices() {
            let layer = KvLayer::new(device, linear_spec(1, 2, 37, Codec::Dense(to))).unwrap();
            let mut data = Source { k: vec![1.0; 37], v: vec![2.0; 37], heads: 1, dim: 37 };
            (data.k[17], data.v[36]) = (f32::NAN, -f32::NAN);
            layers::write(&layer, &data, from, &layers::range_step(device, 1, 0..1).unwrap()).unwrap();
            for (side, want) in [(KvSide::K, &data.k), (KvSide::V, &data.v)] {
                let got = layers::read(&layer, side, 0, 0..1).unwrap();
                for (i, (x, y)) in got.iter().zip(want).enumerate() {
                    let same = x == y || (x.is_nan() && y.is_nan());
                    assert!(same, "{device}: {from} -> {to}, {side:?} {i}: {x}, not {y}");
                }
            }
        }
    }
}

/// Compares a layer's planes with the reference's. Encoding in f32 may rarely choose the other of two centroids for a
/// coordinate between them, and norms differ by the rounding of a sum. The least-squares and unbiased norms depend on
/// the indices, so one norm may deviate more for each index that differs. A side's norms come after its indices.
fn quantised_alike(case: &str, got: &[Output], want: &[Output]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut other_indices = 0;
    for (got, want) in got.iter().zip(want) {
        let (Output::Same(plane, got), Output::Same(_, want)) = (got, want) else { unreachable!() };
        if plane.ends_with("norms") {
            let floats =
                |bytes: &[u8]| -> Vec<f32> { bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect() };
            for (i, (x, y)) in floats(got).into_iter().zip(floats(want)).enumerate() {
                let off = (x - y).abs() / y.abs();
                if x == y || off <= 1e-4 || (x.is_nan() && y.is_nan()) {
                    continue;
                }
                if other_indices > 0 && off <= 0.2 {
                    other_indices -= 1;
                } else {
                    wrong.push(format!("{case}: {plane} {i} is {x}, not {y}"));
                }
            }
            other_indices = 0;
        } else {
            let changed = got.iter().zip(want).filter(|(x, y)| x != y).count();
            other_indices += changed;
            if changed > 1 + got.len() / 2000 {
                wrong.push(format!("{case}: {changed} of {} bytes of {plane} differ", got.len()));
            }
        }
    }
    wrong
}

#[test]
fn quantised_planes_are_alike() {
    let mut rng = Rng::of("quantised planes");
    for bits in BITS {
        for from in FLOATS {
            for ring in [false, true] {
                let (order, slots) = (rng.pick(&ORDERS), rng.pick(&SLOT_ORDERS));
                let norm = rng.pick(&[Norm::Rms, Norm::LeastSquares, Norm::Unbiased]);
                let scale = rng.pick(&[1.0, 1.0, 0.9, 1.25]);
                let (head_dim, kv_heads) = (rng.pick(&[8, 64, 128, 256, 512, 2048]), rng.pick(&[1, 2, 3]));
                let v = rng.pick(&CODECS);
                let spec = linear_spec(kv_heads, 19, head_dim, Codec::F32)
                    .k(Codec::TurboQuant(TurboQuant { bits, scale, norm, centred: false }))
                    .sequences(2)
                    .v(v)
                    .ring(ring)
                    .order(slots);
                let mut tokens: Vec<(u32, u32)> = (3..19).map(|p| (1, p)).collect();
                tokens.extend((0..if ring { 30 } else { 11 }).map(|p| (0, p)));
                rng.shuffle(&mut tokens);
                let batch = Batch { spec, k_type: from, v_type: from, order, first_token: 1, tokens, behind: 1 };
                let data = batch.source(&mut rng);
                let want = same_planes(&batch.write(&Device::reference(), &data).unwrap()).unwrap();
                for device in devices() {
                    let got = same_planes(&batch.write(device, &data).unwrap()).unwrap();
                    let wrong = quantised_alike(&name(&batch), &got, &want);
                    assert!(wrong.is_empty(), "{device}: {}", wrong.join("\n  "));
                }
            }
        }
    }
}

/// Enough rows for code that CUDA uses only with many.
#[test]
fn many_rows_are_alike() {
    let devices: Vec<_> = devices().iter().filter(|device| device.kind() == DeviceKind::Cuda).collect();
    if devices.is_empty() {
        return;
    }
    let mut rng = Rng::of("many rows");
    for (bits, from, head_dim, ring) in [
        (4, DType::BF16, 256, false),
        (5, DType::F16, 128, true),
        (6, DType::BF16, 512, false),
        (8, DType::F16, 256, true),
        (2, DType::F16, 512, true),
        (3, DType::BF16, 128, true),
    ] {
        let norm = rng.pick(&[Norm::Rms, Norm::LeastSquares, Norm::Unbiased]);
        let spec = linear_spec(12, if ring { 400 } else { 600 }, head_dim, Codec::F32)
            .k(Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm, centred: false }))
            .sequences(1)
            .v(if ring { Codec::Dense(from) } else { Codec::tq(12 - bits) })
            .ring(ring)
            .order(rng.pick(&SLOT_ORDERS));
        let mut tokens: Vec<(u32, u32)> = (0..500).map(|p| (0, p)).collect();
        rng.shuffle(&mut tokens);
        let order = rng.pick(&ORDERS);
        let batch = Batch { spec, k_type: from, v_type: from, order, first_token: 1, tokens, behind: 1 };
        let data = batch.source(&mut rng);
        let want = same_planes(&batch.write(&Device::reference(), &data).unwrap()).unwrap();
        for device in &devices {
            let got = same_planes(&batch.write(device, &data).unwrap()).unwrap();
            // Byte by byte, if a row is dense.
            let wrong = quantised_alike(&name(&batch), &got, &want);
            assert!(wrong.is_empty(), "{device}: {}", wrong.join("\n  "));
        }
    }
}

/// The distortion of read vectors equals the reference's, not only approximately.
#[test]
fn quantised_distortion_is_the_references() {
    for bits in BITS {
        for head_dim in [64, 128, 256, 512] {
            let data = Source::random(&mut Rng::of(format!("{bits} {head_dim}")), 65, 2, head_dim);
            let distortion = |device: &Device| -> Result<(f64, f64)> {
                let layer = KvLayer::new(device, linear_spec(2, 70, head_dim, Codec::tq(bits)))?;
                layers::write_at(&layer, &data, 0)?;
                let k = layers::read(&layer, KvSide::K, 0, 0..65)?;
                let v = layers::read(&layer, KvSide::V, 0, 0..65)?;
                Ok((nmse(&k, &data.k), nmse(&v, &data.v)))
            };
            let want = distortion(&Device::reference()).unwrap();
            for device in devices() {
                let got = distortion(device).unwrap();
                for (got, want) in [(got.0, want.0), (got.1, want.1)] {
                    let close = (got / want - 1.0).abs() < 1e-3;
                    assert!(close, "{device}: tq{bits}, D {head_dim}: distortion {got:.5e}, not {want:.5e}");
                }
            }
        }
    }
}

/// Reads over equal bytes: every codec into every dtype, in order out of a wrapped ring, both layouts.
#[test]
fn reads_agree() {
    let mut rng = Rng::of("reads");
    for codec in CODECS {
        for to in FLOATS {
            for order in ORDERS {
                for keep_rotated in [false, true] {
                    let head_dim =
                        if codec.is_quantised() { rng.pick(&[8, 64, 256, 512]) } else { rng.pick(&[7, 64, 96]) };
                    let (kv_heads, slots) = (rng.pick(&[1, 2, 3]), rng.pick(&SLOT_ORDERS));
                    let ring = rng.below(2) == 0;
                    let other = if codec.is_quantised() { rng.pick(&CODECS) } else { Codec::F16 };
                    let side = rng.pick(&[KvSide::K, KvSide::V]);
                    let (k, v) = if side == KvSide::K { (codec, other) } else { (other, codec) };
                    let plain = linear_spec(kv_heads, 17, head_dim, codec);
                    let spec = plain.k(k).sequences(2).v(v).ring(ring).order(slots);
                    let len: usize = if ring { rng.pick(&[5, 17, 18, 40]) } else { 17 };
                    let data = Source::random(&mut rng, len, kv_heads, head_dim);
                    let tokens: Vec<(u32, u32)> = (0..len as u32).map(|p| (1, p)).collect();
                    let held = len.saturating_sub(17);
                    let start = held + rng.below(len - held);
                    let count = rng.below(len - start + 1);
                    let case = format!(
                        "{side:?} of {spec:?}, {start}+{count} of {len} -> {to} {order:?}, kept {keep_rotated}"
                    );
                    for device in devices() {
                        let layer = KvLayer::new(device, spec).unwrap();
                        fill(&layer, 0xFF).unwrap();
                        let step = step(device, 2, &tokens).unwrap();
                        layers::write(&layer, &data, DType::F32, &step).unwrap();
                        let copy = copy_to(&layer, &Device::reference()).unwrap();
                        let read = |layer: &KvLayer| -> Result<Output> {
                            let shape = match order {
                                HeadOrder::TokenMajor => [count, kv_heads, head_dim],
                                HeadOrder::HeadMajor => [kv_heads, count, head_dim],
                            };
                            let out = Out::new(layer.device(), to, &shape)?;
                            let args = KvRead::new(layer, side, &out.tensor)
                                .sequence(1)
                                .start(start)
                                .keep_rotated(keep_rotated)
                                .order(order);
                            run(layer.device(), |enc| ops::kv_read(enc, &args))?;
                            if codec.is_quantised() { out.close("read") } else { out.same("read") }
                        };
                        let wrong = crate::common::differences(&[read(&layer).unwrap()], &[read(&copy).unwrap()]);
                        assert!(wrong.is_empty(), "{device}: {case}: {}", wrong.join(", "));
                    }
                }
            }
        }
    }
}

/// Reading a ring at every position returns the vectors written there.
#[test]
fn a_wrapped_ring_is_read_in_order() {
    for device in devices() {
        let layer = KvLayer::new(device, ring_spec(2, 8, 64, Codec::F32)).unwrap();
        let data = Source::random(&mut Rng::of("order"), 29, 2, 64);
        for p in 0..29 {
            layers::write_at(&layer, &data.part(p..p + 1), p).unwrap();
            let held = (p + 1).saturating_sub(8)..p + 1;
            let want = data.part(held.clone());
            assert_eq!(layers::read(&layer, KvSide::K, 0, held.clone()).unwrap(), want.k, "{device}: K after {p}");
            assert_eq!(layers::read(&layer, KvSide::V, 0, held).unwrap(), want.v, "{device}: V after {p}");
        }
    }
}

/// A vector that is not finite reads as NaN and does not affect its neighbours; zeros stay zeros.
#[test]
fn odd_vectors_do_not_affect_others() {
    for (bits, optimum) in GAUSSIAN_MSE {
        for head_dim in [64, 512, 2048] {
            let mut data = Source::random(&mut Rng::of("odd vectors"), 6, 1, head_dim);
            data.k[head_dim + 3] = f32::NAN;
            data.k[3 * head_dim + head_dim - 1] = f32::INFINITY;
            data.k[4 * head_dim..5 * head_dim].fill(0.0);
            for device in devices() {
                let layer = KvLayer::new(device, linear_spec(1, 6, head_dim, Codec::tq(bits))).unwrap();
                layers::write_at(&layer, &data, 0).unwrap();
                let read = layers::read(&layer, KvSide::K, 0, 0..6).unwrap();
                let row = |t: usize| &read[t * head_dim..][..head_dim];
                let case = format!("{device}: tq{bits}, D {head_dim}");
                assert!(row(1).iter().all(|x| x.is_nan()), "{case}: NaN must show");
                assert!(row(3).iter().all(|x| x.is_nan()), "{case}: infinity must show");
                assert!(row(4).iter().all(|&x| x == 0.0), "{case}: zeros must stay zeros");
                for t in [0, 2, 5] {
                    let error = nmse(row(t), &data.k[t * head_dim..][..head_dim]);
                    assert!(error < 1.6 * optimum + 0.004, "{case}: neighbour {t} is off by {error:.3e}");
                }
            }
        }
    }
}

/// Vectors whose squares overflow or underflow f32, and vectors along one axis, agree with the reference.
#[test]
fn extreme_vectors_are_alike() {
    for bits in BITS {
        for head_dim in [8, 64, 512] {
            let mut data = Source::random(&mut Rng::of("extreme vectors"), 8, 1, head_dim);
            for (t, factor) in [1e-25f32, 1e-34, 1e17, 1e30, 1.0, 0.0].into_iter().enumerate() {
                data.k[t * head_dim..][..head_dim].iter_mut().for_each(|x| *x *= factor);
            }
            data.k[6 * head_dim + 1..7 * head_dim].fill(0.0);
            for norm in [Norm::Rms, Norm::LeastSquares, Norm::Unbiased] {
                let codec = Codec::TurboQuant(TurboQuant { bits, scale: 1.0, norm, centred: false });
                let write = |device: &Device| -> Result<Vec<Output>> {
                    let layer = KvLayer::new(device, linear_spec(1, 8, head_dim, codec))?;
                    layers::write_at(&layer, &data, 0)?;
                    same_planes(&layer)
                };
                let want = write(&Device::reference()).unwrap();
                for device in devices() {
                    let wrong = quantised_alike(&format!("{codec} D {head_dim}"), &write(device).unwrap(), &want);
                    assert!(wrong.is_empty(), "{device}: {}", wrong.join("\n  "));
                }
            }
        }
    }
}

/// Positions and lengths that a cache would not produce, but the contract allows: on a ring, a length beyond the step's
/// own tokens means that older tokens of the batch are not kept.
#[test]
fn a_length_beyond_the_step_drops_overwritten_tokens() {
    let data = Source::random(&mut Rng::of("dropped"), 6, 2, 64);
    conform("positions 0..6 of a sequence of 9 in a ring of 5", |device| {
        let layer = KvLayer::new(device, ring_spec(2, 5, 64, Codec::F16))?;
        fill(&layer, 0x3C)?;
        let step = layers::range_step(device, 1, 0..6)?;
        let lens = indices(device, &[9], &[1])?;
        let step = Step::from_tensors(step.positions().clone(), step.sequence().clone(), lens);
        layers::write(&layer, &data, DType::F32, &step)?;
        same_planes(&layer)
    });
}

/// Heads so wide that a thread processes several parts of a row.
#[test]
fn wide_heads_are_written_and_read() {
    for codec in [Codec::F32, Codec::BF16, Codec::tq(4), Codec::tq(8)] {
        let data = Source::random(&mut Rng::of(format!("wide {codec}")), 3, 2, 4096);
        conform(format!("heads of 4096, {codec}"), |device| {
            // The reference encodes, because at a threshold another encoder may choose the other code.
            let writer = if codec.is_quantised() { &Device::reference() } else { device };
            let layer = KvLayer::new(writer, layers::linear_spec(2, 4, 4096, codec))?;
            layers::write(&layer, &data, DType::F32, &layers::range_step(writer, 1, 0..3)?)?;
            let layer = layers::copy_to(&layer, device)?;
            let mut outputs = Vec::new();
            for dtype in [DType::F32, DType::F16] {
                let out = Out::new(device, dtype, &[3, 2, 4096])?;
                let (layer, side, order) = (&layer, KvSide::K, HeadOrder::TokenMajor);
                let (sequence, start, keep_rotated, step) = (0, 0, false, None);
                let read = KvRead::new(layer, side, &out.tensor)
                    .sequence(sequence)
                    .step(step)
                    .start(start)
                    .keep_rotated(keep_rotated)
                    .order(order);
                run(device, |enc| ops::kv_read(enc, &read))?;
                outputs.push(out.close(&dtype.to_string())?);
            }
            Ok(outputs)
        });
    }
}

/// The bound is tight: it excludes the smallest change of a stored number.
#[test]
fn the_comparison_notices_one_wrong_element() {
    let want: Vec<f32> = Rng::of("comparison").normals(10_000);
    let mut got = want.clone();
    got[1234] += 0.01;
    for dtype in [DType::F32, DType::F16] {
        let as_output = |v: &[f32]| Output::Close("x".into(), v.to_vec(), Bound::of(dtype));
        assert_eq!(crate::common::differences(&[as_output(&got)], &[as_output(&want)]).len(), 1);
        assert!(crate::common::differences(&[as_output(&want)], &[as_output(&want)]).is_empty());
    }
    let nearly: Vec<f32> = want.iter().map(|x| x * (1.0 + 4.0 * EPS as f32)).collect();
    let as_output = |v: &[f32]| Output::Close("x".into(), v.to_vec(), Bound::of(DType::F32));
    assert!(crate::common::differences(&[as_output(&nearly)], &[as_output(&want)]).is_empty());
}
