//! Rules of all operations: overlap, tensors of another device, encoders and graphs.

use super::*;
use crate::common::{sees_indices, with};

fn f32s(device: &Device, shape: &[usize]) -> Tensor {
    let t = Tensor::zeros(device, DType::F32, shape).unwrap();
    t.write(&crate::common::Rng::of("overlap").normals(t.elements())).unwrap();
    t
}

fn refused_overlap(device: &Device, what: &str, record: impl FnOnce(&mut Encoder) -> Result<()>) {
    let result = run(device, record);
    assert!(matches!(result, Err(Error::Overlap { .. })), "{device}: {what}: {result:?}");
}

/// Overlaps that are not explicitly allowed as in-place pairs are rejected.
#[test]
fn overlap_is_refused_unless_the_operation_works_in_place() {
    for device in devices() {
        let memory = f32s(device, &[12, 64]);
        let part = |range: std::ops::Range<usize>| memory.rows(range).unwrap();
        let (a, shifted, b) = (part(0..4), part(1..5), part(8..12));
        let cap = 3.0;
        run(device, |e| ops::softcap(e, &Softcap::new(&a, cap, &a))).unwrap();
        refused_overlap(device, "softcap, shifted", |e| ops::softcap(e, &Softcap::new(&a, cap, &shifted)));
        for (x, y, out) in [(&a, &b, &a), (&a, &b, &b), (&a, &a, &a)] {
            run(device, |e| ops::add(e, &Add::new(x, y, out))).unwrap();
        }
        refused_overlap(device, "add, shifted x", |e| ops::add(e, &Add::new(&shifted, &b, &a)));
        refused_overlap(device, "add, shifted y", |e| ops::add(e, &Add::new(&b, &shifted, &a)));
        run(device, |e| ops::hadamard(e, &Hadamard::new(&a, &a))).unwrap();
        refused_overlap(device, "hadamard, shifted", |e| ops::hadamard(e, &Hadamard::new(&shifted, &a)));

        let norm = |x, residual, out| RmsNorm::new(x, 1e-6, out).residual(residual);
        run(device, |e| ops::rms_norm(e, &norm(&a, Residual::After(&b), &b))).unwrap();
        run(device, |e| ops::rms_norm(e, &norm(&a, Residual::Before { residual: &b, sum: &b }, &a))).unwrap();
        run(device, |e| ops::rms_norm(e, &norm(&a, Residual::Before { residual: &b, sum: &a }, &b))).unwrap();
        run(device, |e| ops::rms_norm(e, &norm(&a, Residual::None, &b).gate(Some(&b)))).unwrap();
        refused_overlap(device, "rms_norm over a shifted gate", |e| {
            ops::rms_norm(e, &norm(&b, Residual::None, &a).gate(Some(&shifted)))
        });
        refused_overlap(device, "rms_norm, out and sum", |e| {
            ops::rms_norm(e, &norm(&a, Residual::Before { residual: &b, sum: &a }, &a))
        });
        refused_overlap(device, "rms_norm, out and a next out", |e| {
            ops::rms_norm(e, &norm(&a, Residual::None, &a).next(&[NextNorm::new(&a)]))
        });
        refused_overlap(device, "rms_norm, two next outs", |e| {
            ops::rms_norm(e, &norm(&a, Residual::None, &a).next(&[NextNorm::new(&b), NextNorm::new(&b)]))
        });
        refused_overlap(device, "rms_norm, shifted", |e| ops::rms_norm(e, &norm(&a, Residual::None, &shifted)));
        // The weight of a single row has the output's size, but it is not an in-place pair.
        let (row, weight) = (part(0..1), part(5..6));
        let flat = weight.reshape(&[64]).unwrap();
        refused_overlap(device, "rms_norm over its weight", |e| {
            ops::rms_norm(e, &norm(&row, Residual::None, &weight).weight(Some(&flat)))
        });

        let (whole, up) = (Columns::from(&a), Columns::from(&b));
        let activation = Activation::Silu;
        run(device, |e| ops::gate(e, &Gate::new(whole, up, activation, &a))).unwrap();
        refused_overlap(device, "gate, shifted", |e| ops::gate(e, &Gate::new(whole, up, activation, &shifted)));
        let w = f32s(device, &[64, 64]);
        let weight = Weight::Dense(&w);
        refused_overlap(device, "linear in place", |e| ops::linear(e, &Linear::new(&a, weight, &a)));

        let heads = |t: &Tensor| t.reshape(&[2, 2, 64]).unwrap();
        let (x, y) = (heads(&a), heads(&b));
        let positions = Tensor::from_slice(device, &[3u32, 4], &[2]).unwrap();
        let rope = Some(Rope::new(1e4, 32));
        let norm_rope = |out_order, out| NormRope::new(&x, &positions, out).rope(rope).out_order(out_order);
        run(device, |e| ops::norm_rope(e, &norm_rope(HeadOrder::TokenMajor, &x))).unwrap();
        refused_overlap(device, "norm_rope, head-major, in place", |e| {
            ops::norm_rope(e, &norm_rope(HeadOrder::HeadMajor, &x)).map(drop)
        });

        let layer = KvLayer::new(device, linear_spec(2, 4, 64, Codec::F32)).unwrap();
        let step = Step::new(device, 1, &[(0, 0), (0, 1)]).unwrap();
        let write = |q_out, k, v| NormRopeWrite::new(&x, k, v, &step, &layer, q_out).rope(rope);
        let z = f32s(device, &[2, 2, 64]);
        run(device, |e| ops::norm_rope_write(e, &write(&x, &y, &y)).map(drop)).unwrap();
        refused_overlap(device, "norm_rope_write, queries over keys", |e| {
            ops::norm_rope_write(e, &write(&y, &y, &z)).map(drop)
        });
        refused_overlap(device, "norm_rope_write, queries over values", |e| {
            ops::norm_rope_write(e, &write(&z, &y, &z)).map(drop)
        });

        // A layer over the memory of its source.
        let own = KvLayer::from_dense(linear_spec(2, 2, 64, Codec::F32), &y, &z).unwrap();
        let (order, first_token) = (HeadOrder::TokenMajor, 0);
        refused_overlap(device, "kv_write onto itself", |e| {
            ops::kv_write(e, &KvWrite::new(&y, &x, &step, &own).order(order).first_token(first_token))
        });
        refused_overlap(device, "norm_rope_write onto itself", |e| {
            ops::norm_rope_write(e, &with(write(&x, &y, &x), |args| args.layer = &own)).map(drop)
        });
        let twice = KvLayer::from_dense(linear_spec(2, 2, 64, Codec::F32), &y, &y).unwrap();
        refused_overlap(device, "K and V in one place", |e| {
            ops::kv_write(e, &KvWrite::new(&x, &x, &step, &twice).order(order).first_token(first_token))
        });
        refused_overlap(device, "attend onto its queries", |e| ops::attend(e, &decode(&layer, &x, &step, &x)));
        refused_overlap(device, "attend onto its cache", |e| ops::attend(e, &decode(&own, &x, &step, &y)));
    }
}

fn decode<'a>(layer: &'a KvLayer, q: &'a Tensor, step: &'a Step, out: &'a Tensor) -> Attend<'a> {
    Attend::new(q, layer, step, out).scale(0.125)
}

/// Scales and softcaps are bounded. With the largest f32 as softcap, scores would underflow relative to it, and its
/// product with log2(e) overflows. The inverse of the smallest f32 overflows, too.
#[test]
fn scale_and_softcap_have_largest_values() {
    for device in devices() {
        let (q, out) = (Tensor::zeros(device, DType::F32, &[1, 2, 64]).unwrap(), f32s(device, &[1, 2, 64]));
        let layer = KvLayer::new(device, linear_spec(1, 2, 64, Codec::F32)).unwrap();
        let step = Step::new(device, 1, &[(0, 0)]).unwrap();
        let with = |cap| run(device, |e| ops::attend(e, &decode(&layer, &q, &step, &out).softcap(Some(cap))));
        let scaled = |scale| run(device, |e| ops::attend(e, &decode(&layer, &q, &step, &out).scale(scale)));
        for taken in [with(1e30), with(f32::MIN_POSITIVE), scaled(2.3e38), scaled(-2.3e38)] {
            taken.unwrap();
            assert!(out.to_f32().unwrap().iter().all(|x| x.is_finite()), "{device}");
        }
        let both = decode(&layer, &q, &step, &out).scale(8.0).softcap(Some(1.2e-38));
        for (refused, name) in [
            (run(device, |e| ops::attend(e, &both)), "softcap"),
            (with(f32::MAX), "softcap"),
            (with(1.1e30), "softcap"),
            (with(1e-38), "softcap"),
            (scaled(f32::MAX), "scale"),
            (scaled(f32::MIN), "scale"),
        ] {
            let refusal = refused.unwrap_err();
            assert!(matches!(refusal, Error::Value { arg, .. } if arg == name), "{device}: {refusal}");
        }
    }
}

/// A GPU cannot check ids before it uses them.
#[test]
fn rows_need_experts() {
    for device in devices() {
        let (x, out) = (f32s(device, &[2, 64]), f32s(device, &[2, 8]));
        let weight = ops::Weight::Dense(&f32s(device, &[0, 8, 64]));
        let ids = Tensor::from_slice(device, &[1u32, 1], &[2, 1]).unwrap();
        let experts = Some(ops::Experts::new(&ids));
        let refusal = run(device, |e| ops::linear(e, &ops::Linear::new(&x, weight, &out).experts(experts)));
        let refusal = refusal.unwrap_err();
        assert!(matches!(refusal, Error::Value { arg: "E", .. }), "{device}: {refusal}");
    }
}

#[test]
fn a_tensor_of_another_device_is_refused() {
    for device in devices() {
        let (here, there) = (f32s(device, &[2, 64]), f32s(&Device::reference(), &[2, 64]));
        let before = bytes_of(&there).unwrap();
        for (x, out) in [(&here, &there), (&there, &here), (&there, &there)] {
            let result = run(device, |e| ops::softcap(e, &Softcap::new(x, 1.0, out)));
            assert!(matches!(result, Err(Error::WrongDevice { .. })), "{device}: {result:?}");
            let captured = Encoder::capture(device, |e| ops::softcap(e, &Softcap::new(x, 1.0, out)));
            assert!(captured.is_err(), "{device}: a capture refuses, too");
        }
        assert_eq!(before, bytes_of(&there).unwrap(), "{device}");
        let spec = linear_spec(1, 2, 64, Codec::F32);
        // A layer whose sides are on two devices.
        let apart = KvLayer::from_dense(spec, &here, &there);
        let q = f32s(device, &[1, 1, 64]);
        let step = Step::new(device, 1, &[(0, 0)]).unwrap();
        let out = f32s(device, &[1, 1, 64]);
        let refused = apart.and_then(|layer| run(device, |e| ops::attend(e, &decode(&layer, &q, &step, &out))));
        assert!(matches!(refused, Err(Error::WrongDevice { .. })), "{device}: {refused:?}");
    }
}

// --------------------------------------------------------------------------------------------------- encoder and graph

/// The encoder orders dependent operations, in a chain over the same few tensors.
#[test]
fn operations_see_earlier_writes() {
    for device in devices() {
        let (a, b) = (f32s(device, &[3, 64]), f32s(device, &[3, 64]));
        let start = a.to_f32().unwrap();
        let mut enc = device.encoder().unwrap();
        for _ in 0..10 {
            ops::hadamard(&mut enc, &Hadamard::new(&a, &b)).unwrap();
            ops::hadamard(&mut enc, &Hadamard::new(&b, &b)).unwrap();
            ops::hadamard(&mut enc, &Hadamard::new(&b, &a).inverse(true)).unwrap();
            ops::hadamard(&mut enc, &Hadamard::new(&a, &a).inverse(true)).unwrap();
        }
        enc.commit().unwrap().wait().unwrap();
        let bound = crate::common::Bound::of(DType::F32);
        crate::common::assert_close(format!("{device}: there and back"), &a.to_f32().unwrap(), &start, bound);
    }
}

/// A failed call leaves the encoder unchanged: earlier and later operations run.
#[test]
fn an_encoder_survives_a_rejected_call() {
    for device in devices() {
        let (x, y) = (f32s(device, &[2, 64]), f32s(device, &[2, 64]));
        let start = x.to_f32().unwrap();
        let mut enc = device.encoder().unwrap();
        ops::hadamard(&mut enc, &Hadamard::new(&x, &y)).unwrap();
        for cap in [-1.0, 0.0, 1e-40, f32::INFINITY] {
            assert!(ops::softcap(&mut enc, &Softcap::new(&y, cap, &y)).is_err());
        }
        ops::hadamard(&mut enc, &Hadamard::new(&y, &y).inverse(true)).unwrap();
        enc.commit().unwrap().wait().unwrap();
        let bound = crate::common::Bound::of(DType::F32);
        crate::common::assert_close(format!("{device}"), &y.to_f32().unwrap(), &start, bound);
    }
}

/// A decode step, captured once and replayed: each replay uses the positions that were written in between, and gives
/// the bits of a run without a graph.
#[test]
fn a_replayed_decode_step_advances() {
    let (heads, kv_heads, dim, steps) = (4, 2, 64, 12);
    for codec in [Codec::F16, Codec::tq(4)] {
        for ring in [false, true] {
            for device in devices() {
                let mut rng = crate::common::Rng::of("decode");
                let capacity = if ring { 5 } else { steps };
                let spec = linear_spec(kv_heads, capacity, dim, codec).ring(ring);
                let (q, out) = (f32s(device, &[1, heads, dim]), f32s(device, &[1, heads, dim]));
                let (k, v) = (f32s(device, &[1, kv_heads, dim]), f32s(device, &[1, kv_heads, dim]));
                let index = |value| indices(device, &[value], &[1]).unwrap();
                let step = Step::from_tensors(index(0), index(0), index(1));
                let (captured, plain) = (KvLayer::new(device, spec).unwrap(), KvLayer::new(device, spec).unwrap());
                let record = |enc: &mut Encoder, layer: &KvLayer| {
                    let rope = Some(Rope::new(1e4, 32));
                    let args =
                        NormRopeWrite::new(&q, &k, &v, &step, layer, &q).k_norm(Some(HeadNorm::new(1e-6))).rope(rope);
                    ops::norm_rope_write(enc, &args)?;
                    ops::attend(enc, &decode(layer, &q, &step, &out))
                };
                let before = out.to_f32().unwrap();
                let graph = Encoder::capture(device, |enc| record(enc, &captured)).unwrap();
                assert!(out.to_f32().unwrap() == before, "{device}: a capture runs nothing");
                let untouched = |layer: &KvLayer| {
                    crate::common::layers::planes(layer).unwrap().iter().flatten().all(|&byte| byte == 0)
                };
                assert!(untouched(&captured), "{device}: a capture writes nothing");
                let mut seen = Vec::new();
                for position in 0..steps {
                    let (query, key, value) =
                        (rng.normals(heads * dim), rng.normals(kv_heads * dim), rng.normals(kv_heads * dim));
                    step.positions().write(&[position as u32]).unwrap();
                    step.lens().write(&[position as u32 + 1]).unwrap();
                    k.write(&key).unwrap();
                    v.write(&value).unwrap();
                    q.write(&query).unwrap();
                    graph.replay().unwrap().wait().unwrap();
                    let replayed = out.to_f32().unwrap();
                    q.write(&query).unwrap();
                    run(device, |enc| record(enc, &plain)).unwrap();
                    let case = format!("{device}: {codec}, ring {ring}, position {position}");
                    let bound = crate::common::Bound::of(DType::F32);
                    crate::common::assert_close(&case, &replayed, &out.to_f32().unwrap(), bound);
                    assert!(!seen.contains(&replayed), "{case}: the step did not advance");
                    seen.push(replayed);
                }
                let planes = |layer| crate::common::layers::planes(layer).unwrap();
                assert!(planes(&captured) == planes(&plain), "{device}: {codec}: the caches differ");
            }
        }
    }
}

/// A capture whose closure replaces its encoder, by one that runs or one of another device, is rejected.
#[test]
fn a_capture_keeps_its_encoder() {
    for device in devices() {
        let run = |enc: &mut Encoder| device.encoder().map(|other| *enc = other);
        let result = Encoder::capture(device, run);
        assert!(matches!(result, Err(Error::Value { op: "capture", .. })), "{device}");
        let mut elsewhere = None;
        let foreign = CpuOptions { threads: Some(1), ..CpuOptions::default() };
        let result = Encoder::capture(device, |enc| {
            let within = Encoder::capture(&Device::cpu_with(foreign)?, |other| {
                std::mem::swap(enc, other);
                Ok(())
            });
            elsewhere = Some(within.is_err());
            Ok(())
        });
        assert!(matches!(result, Err(Error::Value { op: "capture", .. })), "{device}");
        assert_eq!(elsewhere, Some(true), "{device}");
    }
}

/// Sizes beyond any machine give errors or useless numbers, but no panic or abort.
#[test]
fn excessive_sizes() {
    let device = Device::cpu();
    for sequences in [u32::MAX as usize + 1, usize::MAX >> 4, usize::MAX] {
        let step = Step::new(&device, sequences, &[]);
        assert!(matches!(step, Err(Error::Value { arg: "sequences", .. })), "{sequences}: {step:?}");
    }
    for order in [HeadOrder::HeadMajor, HeadOrder::TokenMajor] {
        let layer = KvLayer::new(&device, linear_spec(2, 3, 64, Codec::F32).order(order)).unwrap();
        assert_eq!(layer.row(usize::MAX, usize::MAX, usize::MAX), usize::MAX, "{order:?}");
    }
    let angles = kvant::reference::rope_angles(1, 1e4, 64, usize::MAX, None);
    assert!(matches!(angles, Err(Error::OutOfMemory { .. })), "{angles:?}");
    assert_eq!(kvant::codec::nearest(1.0, &[0.0; 1000]), 255);
}

/// An empty tensor may have any other dimensions whose product does not overflow.
#[test]
fn excessive_sizes_of_empty_tensors() {
    const HUGE: usize = 1 << 56;
    let reference = Device::reference();
    for device in devices().iter().chain([&reference]) {
        let empty = |dtype, shape: &[usize]| Tensor::zeros(device, dtype, shape).unwrap();
        for shape in [[0, usize::MAX], [usize::MAX, 0], [0, usize::MAX / 2]] {
            let zeros = Tensor::zeros(device, DType::F32, &shape);
            assert!(matches!(zeros, Err(Error::Overflow { .. })), "{device}: {zeros:?}");
            let bytes = Tensor::from_bytes(device, DType::F32, &shape, &[]);
            assert!(matches!(bytes, Err(Error::Overflow { .. })), "{device}: {bytes:?}");
            let reshaped = empty(DType::F32, &[0]).reshape(&shape);
            assert!(matches!(reshaped, Err(Error::Overflow { .. })), "{device}: {reshaped:?}");
        }
        let done = |what: &str, record: &dyn Fn(&mut Encoder) -> Result<()>| {
            let result = run(device, record);
            // GPU kernels count in 32 bits.
            let may_refuse = matches!(result, Err(Error::Value { .. })) && !sees_indices(device);
            assert!(result.is_ok() || may_refuse, "{device}: {what}: {result:?}");
        };
        let (wide, tall) = (empty(DType::BF16, &[0, HUGE]), empty(DType::BF16, &[HUGE, 0]));
        let (ids, no_ids) = (indices(device, &[0], &[1]).unwrap(), empty(DType::U32, &[0]));
        done("argmax", &|enc| ops::argmax(enc, &Argmax::new(&wide, &no_ids)));
        for temperature in [0.0, 1.0] {
            let (logits, counter, out) = (&wide, &no_ids, &no_ids.clone());
            let (top_k, top_p, min_p, seed) = (0, 0.5, 0.0, 1);
            let args = Sample::new(logits, counter, out)
                .temperature(temperature)
                .top_k(top_k)
                .top_p(top_p)
                .min_p(min_p)
                .seed(seed);
            done("sample", &|enc| ops::sample(enc, &args));
        }
        done("add", &|enc| ops::add(enc, &Add::new(&tall, &tall, &empty(DType::F32, &[HUGE, 0]))));
        done("softcap", &|enc| ops::softcap(enc, &Softcap::new(&tall, 1.0, &empty(DType::F32, &[HUGE, 0]))));
        let (gate, up, activation) = (Columns::from(&tall), Columns::from(&tall), Activation::Silu);
        done("gate", &|enc| ops::gate(enc, &Gate::new(gate, up, activation, &empty(DType::F32, &[HUGE, 0]))));
        let out = empty(DType::F32, &[0, HUGE]);
        let args = RmsNorm::new(&wide, 1e-6, &out);
        done("rms_norm", &|enc| ops::rms_norm(enc, &args));
        let (table, out) = (Weight::Dense(&tall), &empty(DType::F32, &[1, 0]));
        done("embed", &|enc| ops::embed(enc, &Embed::new(table, &ids, out)));

        let weights = [empty(DType::F32, &[0, 2]), empty(DType::F32, &[HUGE, 0])];
        let sides =
            [(&wide, &weights[0], empty(DType::F32, &[0, HUGE])), (&tall, &weights[1], empty(DType::F32, &[HUGE, 0]))];
        done("moe_combine", &|enc| ops::moe_combine(enc, &MoeCombine::new(sides[0].0, sides[0].1, &sides[0].2)));
        let x = empty(DType::BF16, &[0, 0]);
        done("moe_combine of nothing", &|enc| ops::moe_combine(enc, &MoeCombine::new(&x, sides[1].1, &sides[1].2)));
        let out = f32s(device, &[1, 1]);
        let (matrices, choice) = (empty(DType::BF16, &[HUGE, 1, 0]), ids.reshape(&[1, 1]).unwrap());
        let (x, weight, experts) = (empty(DType::F32, &[1, 0]), Weight::Dense(&matrices), Experts::new(&choice));
        let args = Linear::new(&x, weight, &out).experts(Some(experts));
        done("linear", &|enc| ops::linear(enc, &args));
        if sees_indices(device) {
            assert_eq!(out.to_vec::<f32>().unwrap(), [0.0], "{device}: a sum of nothing");
        }

        let (heads, rope, norm) = ([0, HUGE / 64, 64], None, Some(HeadNorm::new(1e-6)));
        let (x, out) = (empty(DType::BF16, &heads), empty(DType::F32, &heads));
        let (rotate, out_order) = (false, HeadOrder::TokenMajor);
        let args = NormRope::new(&x, &no_ids, &out).norm(norm).rope(rope).rotate(rotate).out_order(out_order);
        done("norm_rope", &|enc| ops::norm_rope(enc, &args).map(drop));
        let layer = KvLayer::new(device, linear_spec(1, 1, 64, Codec::F32)).unwrap();
        let step = Step::new(device, 1, &[]).unwrap();
        let kv = empty(DType::F32, &[0, 1, 64]);
        let args =
            NormRopeWrite::new(&x, &kv, &kv, &step, &layer, &out).q_norm(norm).k_norm(norm).v_norm(norm).rope(rope);
        done("norm_rope_write", &|enc| ops::norm_rope_write(enc, &args).map(drop));
    }
}

/// An empty graph and an empty encoder are valid.
#[test]
fn empty_graphs_and_encoders() {
    for device in devices() {
        device.encoder().unwrap().commit().unwrap().wait().unwrap();
        let graph = Encoder::capture(device, |_| Ok(())).unwrap();
        graph.replay().unwrap().wait().unwrap();
        graph.replay().unwrap().wait().unwrap();
        let _ = input(device, DType::F32, &[1.0], &[1]).unwrap();
    }
}

/// Groups must divide the experts and have enough of them; numbers must be finite, and sums not negative.
#[test]
fn options_of_routes_must_fit() {
    for device in devices() {
        let (logits, weights) = (f32s(device, &[2, 12]), f32s(device, &[2, 4]));
        let ids = Tensor::zeros(device, DType::U32, &[2, 4]).unwrap();
        let valid = MoeRoute::new(&logits, &ids, &weights);
        let groups = |count, chosen| valid.groups(Some(ExpertGroups { count, chosen }));
        for taken in [groups(1, 1), groups(6, 2), groups(3, 3), valid.min_sum(-0.0).epsilon(f32::MAX).scale(-1.0)] {
            run(device, |enc| ops::moe_route(enc, &taken)).unwrap();
        }
        let before = bytes_of(&weights).unwrap();
        for (args, name) in [
            (groups(0, 1), "groups.count"),
            (groups(5, 1), "groups.count"),
            (groups(12, 6), "groups.count"),
            (groups(24, 6), "groups.count"),
            (groups(usize::MAX, 6), "groups.count"),
            (groups(3, 0), "groups.chosen"),
            (groups(3, 4), "groups.chosen"),
            (groups(6, 1), "top_k"),
            (valid.min_sum(-1.0), "min_sum"),
            (valid.min_sum(f32::NAN), "min_sum"),
            (valid.epsilon(f32::INFINITY), "epsilon"),
            (valid.scale(f32::NAN), "scale"),
        ] {
            let refusal = run(device, |enc| ops::moe_route(enc, &args)).unwrap_err();
            assert!(matches!(refusal, Error::Value { arg, .. } if arg == name), "{device}: {refusal}");
        }
        let short = f32s(device, &[11]);
        for (args, name) in [(valid.bias(Some(&short)), "bias"), (valid.expert_scale(Some(&short)), "expert_scale")] {
            let refusal = run(device, |enc| ops::moe_route(enc, &args)).unwrap_err();
            assert!(matches!(refusal, Error::Shape { arg, .. } if arg == name), "{device}: {refusal}");
        }
        assert_eq!(bytes_of(&weights).unwrap(), before, "{device}: something was written");
    }
}
