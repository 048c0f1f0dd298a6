//! The reference device against a model without slots: every vector ever written, by sequence and position.

use std::ops::Range;

use crate::common::query;
use kvant::{
    Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor, f16,
    ops::{
        Attend, HeadNorm, KvRead, KvSide, KvWrite, NormRope, NormRopeWrite, Residual, RmsNorm, Rope, attend, kv_read,
        kv_write, norm_rope, norm_rope_write, rms_norm,
    },
    reference,
};
use proptest::prelude::*;

const DIM: usize = 64;

fn device() -> Device {
    Device::reference()
}

fn run(record: impl FnOnce(&mut kvant::Encoder) -> Result<()>) {
    let mut enc = device().encoder().unwrap();
    record(&mut enc).unwrap();
    enc.commit().unwrap().wait().unwrap();
}

fn tensor(data: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&device(), data, shape).unwrap()
}

/// Coordinate i of a vector; unique to its side, sequence, position and head.
fn coordinate(side: usize, sequence: usize, position: usize, head: usize, i: usize) -> f32 {
    let x = ((side * 7 + sequence) * 1009 + position) * 31 + head;
    ((x * 131 + i * 17) as f32 * 0.37).sin()
}

/// Keys or values of some tokens (sequence, position), in an order.
fn source(side: usize, tokens: &[(u32, u32)], heads: usize, order: HeadOrder) -> Tensor {
    let mut data = vec![0.0; tokens.len() * heads * DIM];
    for (token, &(sequence, position)) in tokens.iter().enumerate() {
        for head in 0..heads {
            let row = match order {
                HeadOrder::TokenMajor => token * heads + head,
                HeadOrder::HeadMajor => head * tokens.len() + token,
            };
            for i in 0..DIM {
                data[row * DIM + i] = coordinate(side, sequence as usize, position as usize, head, i);
            }
        }
    }
    let shape = match order {
        HeadOrder::TokenMajor => [tokens.len(), heads, DIM],
        HeadOrder::HeadMajor => [heads, tokens.len(), DIM],
    };
    tensor(&data, &shape)
}

#[derive(Clone, Debug)]
struct Case {
    spec: LayerSpec,
    source: HeadOrder,
    /// Tokens of each sequence that arrive with each step.
    steps: Vec<Vec<usize>>,
    window: Option<usize>,
    softcap: Option<f32>,
    splits: usize,
}

fn cases(codec: Codec) -> impl Strategy<Value = Case> {
    let order = prop::sample::select(vec![HeadOrder::HeadMajor, HeadOrder::TokenMajor]);
    let source = prop::sample::select(vec![HeadOrder::HeadMajor, HeadOrder::TokenMajor]);
    let layer = (1..3usize, 1..3usize, 1..9usize, any::<bool>(), order, source);
    let steps = prop::collection::vec(prop::collection::vec(0..6usize, 2), 1..5);
    let masks = (prop::option::of(1..7usize), prop::option::of(0.5f32..3.0), 0..4usize);
    (layer, steps, masks).prop_map(move |(layer, mut steps, (window, softcap, splits))| {
        let (sequences, kv_heads, capacity, ring, order, source) = layer;
        let capacity = if ring { capacity } else { 24 };
        steps.iter_mut().for_each(|step| step.truncate(sequences));
        let spec = LayerSpec::new(kv_heads, DIM, capacity, codec).sequences(sequences).ring(ring).order(order);
        Case { spec, source, steps, window, softcap, splits }
    })
}

/// The tokens of a step, one sequence after the other, and the lengths after it.
fn advance(lens: &mut [usize], arrivals: &[usize]) -> Vec<(u32, u32)> {
    let mut tokens = Vec::new();
    for (sequence, (len, n)) in lens.iter_mut().zip(arrivals).enumerate() {
        tokens.extend((*len..*len + n).map(|position| (sequence as u32, position as u32)));
        *len += n;
    }
    tokens
}

/// `Step::new` computes lengths from the given tokens; here, a sequence without tokens keeps its length.
fn step(tokens: &[(u32, u32)], lens: &[usize]) -> Step {
    let step = Step::new(&device(), lens.len(), tokens).unwrap();
    step.lens().write(&lens.iter().map(|&n| n as u32).collect::<Vec<_>>()).unwrap();
    step
}

/// Softmax by hand, over the positions that a token may see.
fn expected(case: &Case, q: &[f32], sequence: usize, head: usize, seen: Range<usize>) -> Vec<f64> {
    let scores: Vec<f64> = seen
        .clone()
        .map(|j| {
            let k = |i| f64::from(coordinate(0, sequence, j, head, i));
            let s = 0.3f32 as f64 * (0..DIM).map(|i| f64::from(q[i]) * k(i)).sum::<f64>();
            case.softcap.map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh())
        })
        .collect();
    let sum: f64 = scores.iter().map(|s| s.exp()).sum();
    let mut out = vec![0.0; DIM];
    for (j, s) in seen.zip(scores) {
        for (i, out) in out.iter_mut().enumerate() {
            *out += s.exp() / sum * f64::from(coordinate(1, sequence, j, head, i));
        }
    }
    out
}

/// Runs the case: writes each step, then attends to it.
fn check(case: &Case) -> std::result::Result<(), TestCaseError> {
    let spec = case.spec;
    let heads = 2 * spec.kv_heads;
    let layer = KvLayer::new(&device(), spec).unwrap();
    let mut lens = vec![0; spec.sequences];
    for arrivals in &case.steps {
        let tokens = advance(&mut lens, arrivals);
        let step = step(&tokens, &lens);
        let (k, v) = (source(0, &tokens, spec.kv_heads, case.source), source(1, &tokens, spec.kv_heads, case.source));
        let q: Vec<f32> = (0..tokens.len() * heads * DIM).map(|i| (i as f32 * 0.71).cos()).collect();
        let q_tensor = tensor(&q, &[tokens.len(), heads, DIM]);
        let out = tensor(&vec![f32::NAN; q.len()], &[tokens.len(), heads, DIM]);
        let args = Attend::new(&q_tensor, &layer, &step, &out)
            .scale(0.3)
            .softcap(case.softcap)
            .window(case.window)
            .splits((case.splits > 0).then_some(case.splits));
        let write = KvWrite::new(&k, &v, &step, &layer).order(case.source);
        run(|enc| kv_write(enc, &write));
        run(|enc| attend(enc, &args));
        let out = out.to_vec::<f32>().unwrap();
        for (token, &(sequence, position)) in tokens.iter().enumerate() {
            let (sequence, position) = (sequence as usize, position as usize);
            // The held positions: the last `capacity` ones.
            let oldest = lens[sequence].saturating_sub(spec.capacity);
            let first = oldest.max((position + 1).saturating_sub(case.window.unwrap_or(usize::MAX)));
            for head in 0..heads {
                let at = (token * heads + head) * DIM;
                let expected =
                    expected(case, &q[at..at + DIM], sequence, head / 2, first.min(position + 1)..position + 1);
                for i in 0..DIM {
                    prop_assert!((f64::from(out[at + i]) - expected[i]).abs() < 1e-6, "token {token}, head {head}");
                }
            }
        }
    }
    // Reading returns the held vectors, bit for bit.
    for (sequence, &len) in lens.iter().enumerate() {
        let held = len.saturating_sub(spec.capacity)..len;
        let tokens: Vec<(u32, u32)> = held.clone().map(|position| (sequence as u32, position as u32)).collect();
        for (side, number) in [(KvSide::K, 0), (KvSide::V, 1)] {
            let wanted = source(number, &tokens, spec.kv_heads, case.source);
            let out = Tensor::zeros(&device(), DType::F32, wanted.shape()).unwrap();
            let order = case.source;
            let args = KvRead::new(&layer, side, &out).sequence(sequence).start(held.start).order(order);
            run(|enc| kv_read(enc, &args));
            prop_assert_eq!(out.to_vec::<f32>().unwrap(), wanted.to_vec::<f32>().unwrap());
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::common::proptest_cases(128)))]

    #[test]
    fn writing_then_attending_is_softmax_over_history(case in cases(Codec::F32)) {
        check(&case)?;
    }
}

/// Attention over a quantised layer equals attention over the decoded vectors, and rotating the query does not change
/// it.
#[test]
fn quantised_attention_is_attention_over_decoded_vectors() {
    let tokens: Vec<(u32, u32)> = (0..9).map(|position| (0, position)).collect();
    for (k_codec, v_codec) in [(Codec::tq(4), Codec::tq(6)), (Codec::tq(8), Codec::F16), (Codec::BF16, Codec::tq(5))] {
        let spec = LayerSpec::new(1, DIM, 6, k_codec).v(v_codec).ring(true);
        let layer = KvLayer::new(&device(), spec).unwrap();
        let order = HeadOrder::TokenMajor;
        let (k, v) = (source(0, &tokens, 1, order), source(1, &tokens, 1, order));
        let written = step(&tokens, &[9]);
        run(|enc| kv_write(enc, &KvWrite::new(&k, &v, &written, &layer).order(order)));
        let read = |side| {
            let out = Tensor::zeros(&device(), DType::F32, &[6, 1, DIM]).unwrap();
            let args = KvRead::new(&layer, side, &out).start(3).order(order);
            run(|enc| kv_read(enc, &args));
            out.to_vec::<f32>().unwrap()
        };
        let (keys, values) = (read(KvSide::K), read(KvSide::V));
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (keys, values) = (wide(&keys), wide(&values));
        let q: Vec<f32> = (0..DIM).map(|i| coordinate(2, 0, 0, 0, i)).collect();
        let vector = reference::QueryVector { q: &wide(&q), scale: 0.5, softcap: None };
        let expected = reference::attend(vector, keys.chunks(DIM).zip(values.chunks(DIM))).unwrap().finish();

        let last = step(&tokens[8..], &[9]);
        let rotated: Vec<f32> = reference::hadamard(&wide(&q), false).unwrap().iter().map(|&x| x as f32).collect();
        for (q, q_rotated) in [(&q, false), (&rotated, true)] {
            if q_rotated && !k_codec.is_quantised() {
                continue;
            }
            let (q, out) = (tensor(q, &[1, 1, DIM]), tensor(&[f32::NAN; DIM], &[1, 1, DIM]));
            let args = Attend::new(query(&q, q_rotated), &layer, &last, &out).scale(0.5);
            run(|enc| attend(enc, &args));
            let out = out.to_vec::<f32>().unwrap();
            assert!(out.iter().zip(&expected).all(|(a, e)| (f64::from(*a) - e).abs() < 1e-5));
        }
    }
}

/// Keys and values reach a TurboQuant or dense layer without intermediate rounding: from f32 sources, the fused
/// operation equals the two operations in sequence, up to that rounding.
#[test]
fn fused_write_is_its_two_parts() {
    let tokens: Vec<(u32, u32)> = vec![(1, 5), (0, 0), (1, 6)];
    let (kv_heads, heads) = (2, 4);
    let random = |n: usize, seed: usize| (0..n).map(|i| coordinate(3, seed, i, 1, i)).collect::<Vec<f32>>();
    let q = tensor(&random(3 * heads * DIM, 0), &[3, heads, DIM]);
    let k = tensor(&random(3 * kv_heads * DIM, 1), &[3, kv_heads, DIM]);
    let weight = tensor(&random(DIM, 2), &[DIM]);
    let norm = HeadNorm::new(1e-6).weight(Some(&weight));
    let rope = Rope::new(1e4, 16);
    for codec in [Codec::F32, Codec::tq(8)] {
        let spec = LayerSpec::new(kv_heads, DIM, 4, codec).sequences(2).ring(true).order(HeadOrder::TokenMajor);
        let layers = [0, 1].map(|_| KvLayer::new(&device(), spec).unwrap());
        let step = step(&tokens, &[1, 7]);
        let outs = [0, 1].map(|_| Tensor::zeros(&device(), DType::F32, q.shape()).unwrap());
        // Values are the raw keys, normed without a weight: one tensor serves both.
        let fused = NormRopeWrite::new(&q, &k, &k, &step, &layers[0], &outs[0])
            .q_norm(Some(norm))
            .k_norm(Some(norm))
            .v_norm(Some(HeadNorm::new(1e-6)))
            .rope(Some(rope));
        run(|enc| norm_rope_write(enc, &fused).map(drop));
        let part = |x: &Tensor, norm, rope, rotate, out: &Tensor| {
            let out_order = HeadOrder::TokenMajor;
            let args =
                NormRope::new(x, step.positions(), out).norm(Some(norm)).rope(rope).rotate(rotate).out_order(out_order);
            run(|enc| norm_rope(enc, &args).map(drop));
        };
        let [k_out, v_out] = [0, 1].map(|_| Tensor::zeros(&device(), DType::F32, k.shape()).unwrap());
        part(&q, norm, Some(rope), codec.is_quantised(), &outs[1]);
        part(&k, norm, Some(rope), false, &k_out);
        part(&k, HeadNorm::new(1e-6), None, false, &v_out);
        let order = HeadOrder::TokenMajor;
        let write = KvWrite::new(&k_out, &v_out, &step, &layers[1]).order(order);
        run(|enc| kv_write(enc, &write));
        assert_eq!(outs[0].to_vec::<f32>().unwrap(), outs[1].to_vec::<f32>().unwrap());
        for (sequence, start, n) in [(0, 0, 1), (1, 5, 2)] {
            for side in [KvSide::K, KvSide::V] {
                let [a, b] = [0, 1].map(|i| {
                    let out = Tensor::zeros(&device(), DType::F32, &[n, kv_heads, DIM]).unwrap();
                    let args = KvRead::new(&layers[i], side, &out).sequence(sequence).start(start).order(order);
                    run(|enc| kv_read(enc, &args));
                    out.to_vec::<f32>().unwrap()
                });
                assert!(a.iter().any(|x| *x != 0.0));
                assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-6), "{codec} {side:?}");
            }
        }
    }
}

#[test]
fn same_dtype_keeps_the_bits_of_nan() {
    let bits: Vec<f16> = (0..DIM as u16).map(|i| f16::from_bits(0x7c01 + i * 13)).collect();
    assert!(bits.iter().all(|x| x.is_nan()));
    let source = Tensor::from_slice(&device(), &bits, &[1, 1, DIM]).unwrap();
    let spec = LayerSpec::new(1, DIM, 1, Codec::F16).v(Codec::F32);
    let layer = KvLayer::new(&device(), spec).unwrap();
    let (step, order) = (step(&[(0, 0)], &[1]), HeadOrder::HeadMajor);
    run(|enc| kv_write(enc, &KvWrite::new(&source, &source, &step, &layer).order(order)));
    let stored: Vec<f16> = layer.k().tensors().next().unwrap().1.to_vec().unwrap();
    assert!(stored.iter().zip(&bits).all(|(a, b)| a.to_bits() == b.to_bits()));
    let widened: Vec<f32> = layer.v().tensors().next().unwrap().1.to_vec().unwrap();
    assert!(widened.iter().all(|x| x.is_nan()));
}

/// Each kind of residual, with outputs that overwrite inputs.
#[test]
fn norms_in_place() {
    let (x, r): (Vec<f32>, Vec<f32>) = (0..3 * 8).map(|i| ((i as f32).sin(), (i as f32 * 0.4).cos())).unzip();
    let weight = [1.0, 2.0, 0.5, -1.0, 3.0, 0.0, 1.5, 1.0];
    let normed = |row: &[f32]| {
        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 8.0;
        let r = 1.0 / (mean + f64::from(1e-5f32)).sqrt();
        row.iter().zip(weight).map(|(x, w)| f64::from(*x) * r * f64::from(w)).collect::<Vec<_>>()
    };
    let w = tensor(&weight, &[8]);
    let close = |t: &Tensor, expected: &[f64]| {
        let got = t.to_vec::<f32>().unwrap();
        assert!(got.iter().zip(expected).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-6), "{got:?} {expected:?}");
    };
    let call = |x: &Tensor, residual: Residual, out: &Tensor| {
        run(|enc| rms_norm(enc, &RmsNorm::new(x, 1e-5, out).weight(Some(&w)).residual(residual).scale(2.0)));
    };
    let all: Vec<f64> = x.chunks(8).flat_map(normed).collect();
    let t = tensor(&x, &[3, 8]);
    call(&t, Residual::None, &t);
    close(&t, &all.iter().map(|n| 2.0 * n).collect::<Vec<_>>());
    let (t, residual) = (tensor(&x, &[3, 8]), tensor(&r, &[3, 8]));
    call(&t, Residual::After(&residual), &residual);
    close(&residual, &all.iter().zip(&r).map(|(n, r)| 2.0 * (n + f64::from(*r))).collect::<Vec<_>>());
    let (t, residual) = (tensor(&x, &[3, 8]), tensor(&r, &[3, 8]));
    call(&t, Residual::Before { residual: &residual, sum: &residual }, &t);
    let sum: Vec<f32> = x.iter().zip(&r).map(|(x, r)| x + r).collect();
    close(&residual, &sum.iter().map(|&s| s.into()).collect::<Vec<_>>());
    close(&t, &sum.chunks(8).flat_map(normed).map(|n| 2.0 * n).collect::<Vec<_>>());
}
