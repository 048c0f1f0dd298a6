//! Rules of all operations: what may overlap, tensors of another device, encoders and graphs.

use super::*;
use crate::common::sees_indices;

fn f32s(device: &Device, shape: &[usize]) -> Tensor {
    let t = Tensor::zeros(device, DType::F32, shape).unwrap();
    t.write(&crate::common::Rng::of("overlap").normals(t.elements())).unwrap();
    t
}

fn refused_overlap(device: &Device, what: &str, record: impl FnOnce(&mut Encoder) -> Result<()>) {
    let result = run(device, record);
    assert!(matches!(result, Err(Error::Overlap { .. })), "{device}: {what}: {result:?}");
}

/// What may be done in place, and what may not: anything that is not said to be allowed is refused.
#[test]
fn overlap_is_refused_unless_the_operation_works_in_place() {
    for device in devices() {
        let memory = f32s(device, &[12, 64]);
        let part = |range: std::ops::Range<usize>| memory.rows(range).unwrap();
        let (a, shifted, b) = (part(0..4), part(1..5), part(8..12));
        let cap = 3.0;
        run(device, |e| ops::softcap(e, &Softcap { x: &a, cap, out: &a })).unwrap();
        refused_overlap(device, "softcap, shifted", |e| ops::softcap(e, &Softcap { x: &a, cap, out: &shifted }));
        run(device, |e| ops::hadamard(e, &Hadamard { x: &a, inverse: false, out: &a })).unwrap();
        refused_overlap(device, "hadamard, shifted", |e| {
            ops::hadamard(e, &Hadamard { x: &shifted, inverse: false, out: &a })
        });

        let norm = |x, residual, out| RmsNorm { x, weight: None, eps: 1e-6, residual, scale: 1.0, out };
        run(device, |e| ops::rms_norm(e, &norm(&a, Residual::After(&b), &b))).unwrap();
        run(device, |e| ops::rms_norm(e, &norm(&a, Residual::Before { residual: &b, sum: &b }, &a))).unwrap();
        run(device, |e| ops::rms_norm(e, &norm(&a, Residual::Before { residual: &b, sum: &a }, &b))).unwrap();
        refused_overlap(device, "rms_norm, out and sum", |e| {
            ops::rms_norm(e, &norm(&a, Residual::Before { residual: &b, sum: &a }, &a))
        });
        refused_overlap(device, "rms_norm, shifted", |e| ops::rms_norm(e, &norm(&a, Residual::None, &shifted)));
        // The weight of a single row is as large as the output, but it is not what works in place.
        let (row, weight) = (part(0..1), part(5..6));
        let flat = weight.reshape(&[64]).unwrap();
        refused_overlap(device, "rms_norm over its weight", |e| {
            ops::rms_norm(e, &RmsNorm { weight: Some(&flat), ..norm(&row, Residual::None, &weight) })
        });

        let (whole, up) = (Columns::all(&a), Columns::all(&b));
        let activation = Activation::Silu;
        run(device, |e| ops::gate(e, &Gate { gate: whole, up, activation, out: &a })).unwrap();
        refused_overlap(device, "gate, shifted", |e| {
            ops::gate(e, &Gate { gate: whole, up, activation, out: &shifted })
        });
        let w = f32s(device, &[64, 64]);
        let weight = Weight::Dense(&w);
        refused_overlap(device, "linear in place", |e| {
            ops::linear(e, &Linear { x: &a, weight, experts: None, alpha: 1.0, out: &a })
        });

        let heads = |t: &Tensor| t.reshape(&[2, 2, 64]).unwrap();
        let (x, y) = (heads(&a), heads(&b));
        let positions = Tensor::from_slice(device, &[3u32, 4], &[2]).unwrap();
        let rope = Some(Rope {
            angles: Angles::Theta(1e4),
            rotated_pairs: 32,
            layout: PairLayout::Halves,
            freq_factors: None,
        });
        let norm_rope =
            |out_order, out| NormRope { x: &x, norm: None, rope, positions: &positions, rotate: false, out_order, out };
        run(device, |e| ops::norm_rope(e, &norm_rope(SourceOrder::TokenMajor, &x))).unwrap();
        refused_overlap(device, "norm_rope, head-major, in place", |e| {
            ops::norm_rope(e, &norm_rope(SourceOrder::HeadMajor, &x))
        });

        let layer = KvLayer::new(device, linear_spec(2, 4, 64, Codec::F32)).unwrap();
        let step = Step::new(device, 1, &[(0, 0), (0, 1)]).unwrap();
        let write = |q_out, k, v| NormRopeWrite {
            q: &x,
            k,
            v,
            q_norm: None,
            k_norm: None,
            v_norm: None,
            rope,
            rotate_q: false,
            step: &step,
            layer: &layer,
            q_out,
        };
        let z = f32s(device, &[2, 2, 64]);
        run(device, |e| ops::norm_rope_write(e, &write(&x, &y, &y))).unwrap();
        refused_overlap(device, "norm_rope_write, queries over keys", |e| ops::norm_rope_write(e, &write(&y, &y, &z)));
        refused_overlap(device, "norm_rope_write, queries over values", |e| {
            ops::norm_rope_write(e, &write(&z, &y, &z))
        });

        // A layer over the memory of its source.
        let own = KvLayer::from_dense(linear_spec(2, 2, 64, Codec::F32), &y, &z).unwrap();
        let (order, first_token) = (SourceOrder::TokenMajor, 0);
        refused_overlap(device, "kv_write onto itself", |e| {
            ops::kv_write(e, &KvWrite { k: &y, v: &x, order, first_token, step: &step, layer: &own })
        });
        refused_overlap(device, "norm_rope_write onto itself", |e| {
            ops::norm_rope_write(e, &NormRopeWrite { layer: &own, ..write(&x, &y, &x) })
        });
        let twice = KvLayer::from_dense(linear_spec(2, 2, 64, Codec::F32), &y, &y).unwrap();
        refused_overlap(device, "K and V in one place", |e| {
            ops::kv_write(e, &KvWrite { k: &x, v: &x, order, first_token, step: &step, layer: &twice })
        });
        refused_overlap(device, "attend onto its queries", |e| ops::attend(e, &decode(&layer, &x, &step, &x)));
        refused_overlap(device, "attend onto its cache", |e| ops::attend(e, &decode(&own, &x, &step, &y)));
    }
}

fn decode<'a>(layer: &'a KvLayer, q: &'a Tensor, step: &'a Step, out: &'a Tensor) -> Attend<'a> {
    Attend { q, layer, step, fresh: None, scale: 0.125, softcap: None, window: None, q_rotated: false, plan: None, out }
}

/// The largest number is no way to say "no cap": scores would be next to nothing beside it, and its product with log2(e) is infinite;
/// so is the inverse of the smallest. Likewise the scale.
#[test]
fn scale_and_softcap_have_largest_values() {
    for device in devices() {
        let (q, out) = (Tensor::zeros(device, DType::F32, &[1, 2, 64]).unwrap(), f32s(device, &[1, 2, 64]));
        let layer = KvLayer::new(device, linear_spec(1, 2, 64, Codec::F32)).unwrap();
        let step = Step::new(device, 1, &[(0, 0)]).unwrap();
        let with =
            |cap| run(device, |e| ops::attend(e, &Attend { softcap: Some(cap), ..decode(&layer, &q, &step, &out) }));
        let scaled = |scale| run(device, |e| ops::attend(e, &Attend { scale, ..decode(&layer, &q, &step, &out) }));
        for taken in [with(1e30), with(f32::MIN_POSITIVE), scaled(2.3e38), scaled(-2.3e38)] {
            taken.unwrap();
            assert!(out.to_f32().unwrap().iter().all(|x| x.is_finite()), "{device}");
        }
        let both = Attend { scale: 8.0, softcap: Some(1.2e-38), ..decode(&layer, &q, &step, &out) };
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

/// A GPU does not see the ids in time.
#[test]
fn rows_need_experts() {
    for device in devices() {
        let (x, out) = (f32s(device, &[2, 64]), f32s(device, &[2, 8]));
        let weight = ops::Weight::Dense(&f32s(device, &[0, 8, 64]));
        let ids = Tensor::from_slice(device, &[1u32, 1], &[2, 1]).unwrap();
        let experts = Some(ops::Experts { ids: &ids, expanded: false });
        let refusal = run(device, |e| ops::linear(e, &ops::Linear { x: &x, weight, experts, alpha: 1.0, out: &out }));
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
            let result = run(device, |e| ops::softcap(e, &Softcap { x, cap: 1.0, out }));
            assert!(matches!(result, Err(Error::WrongDevice { .. })), "{device}: {result:?}");
            let captured = Encoder::capture(device, |e| ops::softcap(e, &Softcap { x, cap: 1.0, out }));
            assert!(captured.is_err(), "{device}: a capture refuses, too");
        }
        assert_eq!(before, bytes_of(&there).unwrap(), "{device}");
        let spec = linear_spec(1, 2, 64, Codec::F32);
        // A layer whose halves live apart.
        let apart = KvLayer::from_dense(spec, &here, &there);
        let q = f32s(device, &[1, 1, 64]);
        let step = Step::new(device, 1, &[(0, 0)]).unwrap();
        let out = f32s(device, &[1, 1, 64]);
        let refused = apart.and_then(|layer| run(device, |e| ops::attend(e, &decode(&layer, &q, &step, &out))));
        assert!(matches!(refused, Err(Error::WrongDevice { .. })), "{device}: {refused:?}");
    }
}

// ----------------------------------------------------------------------------------------------------- encoder and graph

/// An encoder orders what depends on each other, in a chain of operations over the same few tensors.
#[test]
fn operations_see_what_came_before() {
    for device in devices() {
        let (a, b) = (f32s(device, &[3, 64]), f32s(device, &[3, 64]));
        let start = a.to_f32().unwrap();
        let mut enc = device.encoder().unwrap();
        for _ in 0..10 {
            ops::hadamard(&mut enc, &Hadamard { x: &a, inverse: false, out: &b }).unwrap();
            ops::hadamard(&mut enc, &Hadamard { x: &b, inverse: false, out: &b }).unwrap();
            ops::hadamard(&mut enc, &Hadamard { x: &b, inverse: true, out: &a }).unwrap();
            ops::hadamard(&mut enc, &Hadamard { x: &a, inverse: true, out: &a }).unwrap();
        }
        enc.commit().unwrap().wait().unwrap();
        let bound = crate::common::Bound::of(DType::F32);
        crate::common::assert_close(format!("{device}: there and back"), &a.to_f32().unwrap(), &start, bound);
    }
}

/// A failed call leaves the encoder as it was: what came before and comes after runs.
#[test]
fn an_encoder_outlives_a_refusal() {
    for device in devices() {
        let (x, y) = (f32s(device, &[2, 64]), f32s(device, &[2, 64]));
        let start = x.to_f32().unwrap();
        let mut enc = device.encoder().unwrap();
        ops::hadamard(&mut enc, &Hadamard { x: &x, inverse: false, out: &y }).unwrap();
        for cap in [-1.0, 0.0, 1e-40, f32::INFINITY] {
            assert!(ops::softcap(&mut enc, &Softcap { x: &y, cap, out: &y }).is_err());
        }
        ops::hadamard(&mut enc, &Hadamard { x: &y, inverse: true, out: &y }).unwrap();
        enc.commit().unwrap().wait().unwrap();
        let bound = crate::common::Bound::of(DType::F32);
        crate::common::assert_close(format!("{device}"), &y.to_f32().unwrap(), &start, bound);
    }
}

/// A decode step, captured once and replayed: each replay follows the positions that were written in between, and gives
/// the bits of a run without a graph.
#[test]
fn a_replayed_decode_step_advances() {
    let (heads, kv_heads, dim, steps) = (4, 2, 64, 12);
    for codec in [Codec::F16, Codec::tq(4)] {
        for ring in [false, true] {
            for device in devices() {
                let mut rng = crate::common::Rng::of("decode");
                let capacity = if ring { 5 } else { steps };
                let spec = LayerSpec { ring, ..linear_spec(kv_heads, capacity, dim, codec) };
                let (q, out) = (f32s(device, &[1, heads, dim]), f32s(device, &[1, heads, dim]));
                let (k, v) = (f32s(device, &[1, kv_heads, dim]), f32s(device, &[1, kv_heads, dim]));
                let index = |value| indices(device, &[value], &[1]).unwrap();
                let step = Step::from_tensors(index(0), index(0), index(1));
                let (captured, plain) = (KvLayer::new(device, spec).unwrap(), KvLayer::new(device, spec).unwrap());
                let record = |enc: &mut Encoder, layer: &KvLayer| {
                    let rope = Some(Rope {
                        angles: Angles::Theta(1e4),
                        rotated_pairs: 32,
                        layout: PairLayout::Halves,
                        freq_factors: None,
                    });
                    let args = NormRopeWrite {
                        q: &q,
                        k: &k,
                        v: &v,
                        q_norm: None,
                        k_norm: Some(HeadNorm { weight: None, eps: 1e-6 }),
                        v_norm: None,
                        rope,
                        rotate_q: false,
                        step: &step,
                        layer,
                        q_out: &q,
                    };
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

/// A capture that exchanges its encoder for another one, which runs or is another device's, is refused.
#[test]
fn a_capture_keeps_its_encoder() {
    for device in devices() {
        let run = |enc: &mut Encoder| device.encoder().map(|other| *enc = other);
        let result = Encoder::capture(device, run);
        assert!(matches!(result, Err(Error::Value { op: "capture", .. })), "{device}");
        let mut elsewhere = None;
        let foreign = CpuOptions { threads: Some(1), simd: None };
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

/// Sizes that no machine has give errors or numbers of no use, and neither a panic nor the end of the process.
#[test]
fn absurd_sizes() {
    let device = Device::cpu();
    for sequences in [u32::MAX as usize + 1, usize::MAX >> 4, usize::MAX] {
        let step = Step::new(&device, sequences, &[]);
        assert!(matches!(step, Err(Error::Value { arg: "sequences", .. })), "{sequences}: {step:?}");
    }
    for order in [SlotOrder::HeadMajor, SlotOrder::TokenMajor] {
        let layer = KvLayer::new(&device, LayerSpec { order, ..linear_spec(2, 3, 64, Codec::F32) }).unwrap();
        assert_eq!(layer.row(usize::MAX, usize::MAX, usize::MAX), usize::MAX, "{order:?}");
    }
    let angles = kvant::reference::rope_angles(1, 1e4, 64, usize::MAX, None);
    assert!(matches!(angles, Err(Error::OutOfMemory { .. })), "{angles:?}");
    assert_eq!(kvant::codec::nearest(1.0, &[0.0; 1000]), 255);
}

/// A tensor of no elements may be as long as it likes in its other dimensions, as long as these can be counted.
#[test]
fn absurd_sizes_of_nothing() {
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
            // A GPU's kernels count in 32 bits.
            let may_refuse = matches!(result, Err(Error::Value { .. })) && !sees_indices(device);
            assert!(result.is_ok() || may_refuse, "{device}: {what}: {result:?}");
        };
        let (wide, tall) = (empty(DType::BF16, &[0, HUGE]), empty(DType::BF16, &[HUGE, 0]));
        let (ids, no_ids) = (indices(device, &[0], &[1]).unwrap(), empty(DType::U32, &[0]));
        done("argmax", &|enc| ops::argmax(enc, &Argmax { x: &wide, out: &no_ids }));
        for temperature in [0.0, 1.0] {
            let (logits, counter, out) = (&wide, &no_ids, &no_ids.clone());
            let (top_k, top_p, min_p, seed) = (0, 0.5, 0.0, 1);
            let args = Sample { logits, temperature, top_k, top_p, min_p, seed, counter, out };
            done("sample", &|enc| ops::sample(enc, &args));
        }
        done("softcap", &|enc| ops::softcap(enc, &Softcap { x: &tall, cap: 1.0, out: &empty(DType::F32, &[HUGE, 0]) }));
        let (gate, up, activation) = (Columns::all(&tall), Columns::all(&tall), Activation::Silu);
        done("gate", &|enc| ops::gate(enc, &Gate { gate, up, activation, out: &empty(DType::F32, &[HUGE, 0]) }));
        let residual = Residual::None;
        let args =
            RmsNorm { x: &wide, weight: None, eps: 1e-6, residual, scale: 1.0, out: &empty(DType::F32, &[0, HUGE]) };
        done("rms_norm", &|enc| ops::rms_norm(enc, &args));
        let (table, out) = (Weight::Dense(&tall), &empty(DType::F32, &[1, 0]));
        done("embed", &|enc| ops::embed(enc, &Embed { table, ids: &ids, scale: 1.0, out }));

        let weights = [empty(DType::F32, &[0, 2]), empty(DType::F32, &[HUGE, 0])];
        let sides =
            [(&wide, &weights[0], empty(DType::F32, &[0, HUGE])), (&tall, &weights[1], empty(DType::F32, &[HUGE, 0]))];
        done("moe_combine", &|enc| {
            ops::moe_combine(enc, &MoeCombine { x: sides[0].0, weights: sides[0].1, out: &sides[0].2 })
        });
        let x = empty(DType::BF16, &[0, 0]);
        done("moe_combine of nothing", &|enc| {
            ops::moe_combine(enc, &MoeCombine { x: &x, weights: sides[1].1, out: &sides[1].2 })
        });
        let out = f32s(device, &[1, 1]);
        let (matrices, choice) = (empty(DType::BF16, &[HUGE, 1, 0]), ids.reshape(&[1, 1]).unwrap());
        let (x, weight, experts) =
            (empty(DType::F32, &[1, 0]), Weight::Dense(&matrices), Experts { ids: &choice, expanded: false });
        let args = Linear { x: &x, weight, experts: Some(experts), alpha: 1.0, out: &out };
        done("linear", &|enc| ops::linear(enc, &args));
        if sees_indices(device) {
            assert_eq!(out.to_vec::<f32>().unwrap(), [0.0], "{device}: a sum of nothing");
        }

        let (heads, rope, norm) = ([0, HUGE / 64, 64], None, Some(HeadNorm { weight: None, eps: 1e-6 }));
        let (x, out) = (empty(DType::BF16, &heads), empty(DType::F32, &heads));
        let (rotate, out_order) = (false, SourceOrder::TokenMajor);
        let args = NormRope { x: &x, norm, rope, positions: &no_ids, rotate, out_order, out: &out };
        done("norm_rope", &|enc| ops::norm_rope(enc, &args));
        let layer = KvLayer::new(device, linear_spec(1, 1, 64, Codec::F32)).unwrap();
        let step = Step::new(device, 1, &[]).unwrap();
        let kv = empty(DType::F32, &[0, 1, 64]);
        let (q, k, v, q_norm, rotate_q) = (&x, &kv, &kv, norm, false);
        let (step, layer, q_out) = (&step, &layer, &out);
        let args = NormRopeWrite { q, k, v, q_norm, k_norm: norm, v_norm: norm, rope, rotate_q, step, layer, q_out };
        done("norm_rope_write", &|enc| ops::norm_rope_write(enc, &args));
    }
}

/// An empty graph and an empty encoder are fine.
#[test]
fn nothing_recorded() {
    for device in devices() {
        device.encoder().unwrap().commit().unwrap().wait().unwrap();
        let graph = Encoder::capture(device, |_| Ok(())).unwrap();
        graph.replay().unwrap().wait().unwrap();
        graph.replay().unwrap().wait().unwrap();
        let _ = input(device, DType::F32, &[1.0], &[1]).unwrap();
    }
}

/// `step.lens()` in place of the lengths before the step: tokens would attend to the step's own keys twice.
#[test]
fn past_ends_before_the_step() {
    for device in devices().iter().filter(|device| sees_indices(device)) {
        let spec = LayerSpec { sequences: 2, ..linear_spec(1, 4, 64, Codec::F32) };
        let layer = KvLayer::new(device, spec).unwrap();
        let step = Step::new(device, 2, &[(1, 0), (1, 1)]).unwrap();
        let (x, out) = (f32s(device, &[2, 1, 64]), f32s(device, &[2, 1, 64]));
        let attend = |past: &Tensor| {
            let fresh = Some(Fresh { k: &x, v: &x, order: SourceOrder::TokenMajor, past });
            run(device, |enc| ops::attend(enc, &Attend { fresh, ..decode(&layer, &x, &step, &out) }))
        };
        attend(&indices(device, &[0, 0], &[2]).unwrap()).unwrap();
        // Another sequence may be as long as it likes.
        attend(&indices(device, &[2, 0], &[2]).unwrap()).unwrap();
        let before = out.to_vec::<f32>().unwrap();
        let result = attend(step.lens());
        let refused = matches!(result, Err(Error::OutOfRange { arg: "fresh.past", index: 1, got: 2, limit: 1, .. }));
        assert!(refused, "{device}: {result:?}");
        assert_eq!(out.to_vec::<f32>().unwrap(), before, "{device}");
    }
}
