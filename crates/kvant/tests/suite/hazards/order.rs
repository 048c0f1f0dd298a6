//! The order of work: threads, splits, tokens at once or one by one, equal bits in every run.

use super::*;

/// Thousands of threadgroups and a hundred runs: a missing barrier shows as a changed bit.
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
        // msl-host runs each launch in several orders, compares them, and detects races. The CPU has many devices.
        let rounds = match device.kind() {
            _ if device.name().contains("msl-host") => 5,
            DeviceKind::Cpu => 25,
            _ => 100,
        };
        for round in 0..rounds {
            run(device, |enc| {
                ops::attend(enc, &plain(&layer, &x, &step, Some(12), &outs[0].tensor))?;
                let (weight, eps, residual, scale) = (None, 1e-6, Residual::None, 1.0);
                ops::rms_norm(
                    enc,
                    &RmsNorm::new(&flat, eps, &norm_out).weight(weight).residual(residual).scale(scale),
                )?;
                ops::hadamard(enc, &Hadamard::new(&x, &outs[2].tensor))?;
                let (order, first_token) = (HeadOrder::TokenMajor, 0);
                ops::kv_write(enc, &KvWrite::new(&x, &x, &step, &codes).order(order).first_token(first_token))
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

/// Passes of several threads do not interfere: neither in shared memory, nor in a library's workspace.
#[test]
fn passes_of_two_threads() {
    for device in devices() {
        let (rounds, inputs) = if device.kind() == DeviceKind::Cuda { (300, 16384) } else { (3, 512) };
        let mut rng = Rng::of("two threads");
        let mut random = |dtype, shape: &[usize; 2]| input(device, dtype, &rng.normals(shape[0] * shape[1]), shape);
        let weight = random(DType::BF16, &[128, inputs]).unwrap();
        let between = Tensor::zeros(device, DType::F32, &[8, 64]).unwrap();
        let works = [(); 2].map(|()| {
            let (x, from) = (random(DType::BF16, &[64, inputs]).unwrap(), random(DType::F32, &[8, 64]).unwrap());
            let product = Tensor::zeros(device, DType::BF16, &[64, 128]).unwrap();
            (x, product, from, Tensor::zeros(device, DType::F32, &[8, 64]).unwrap())
        });
        let pass = |(x, product, from, to): &(Tensor, Tensor, Tensor, Tensor)| {
            run(device, |enc| {
                ops::hadamard(enc, &Hadamard::new(from, &between))?;
                let weight = ops::Weight::Dense(&weight);
                ops::linear(enc, &ops::Linear::new(x, weight, product))?;
                ops::hadamard(enc, &Hadamard::new(&between, to).inverse(true))
            })
            .unwrap();
            [bytes_of(product).unwrap(), bytes_of(to).unwrap()]
        };
        let alone = works.each_ref().map(pass);
        std::thread::scope(|scope| {
            for (work, alone) in works.iter().zip(&alone) {
                let pass = &pass;
                scope.spawn(move || {
                    for round in 0..rounds {
                        assert!(pass(work) == *alone, "{device}: round {round} gives other bits than a pass alone");
                    }
                });
            }
        });
    }
}

/// A started download has the data committed before it, and none committed later.
#[test]
fn downloads_in_the_order_of_work() {
    for device in devices() {
        let len = 1000;
        let x = Tensor::zeros(device, DType::U32, &[len]).unwrap();
        let values: Vec<u32> = (0..20).collect();
        let mut downloads = Vec::new();
        for &value in &values {
            let from = Tensor::from_slice(device, &vec![value; len], &[len]).unwrap();
            run(device, |enc| ops::copy(enc, &from, &x)).unwrap();
            // Views as well, and downloads that nobody reads.
            downloads.push((value, x.rows(value as usize..len).unwrap().read_back().unwrap()));
            drop(x.read_back().unwrap());
        }
        x.write(&vec![77u32; len]).unwrap();
        for (value, download) in downloads {
            let got = download.to_vec::<u32>().unwrap();
            assert!(got.len() == len - value as usize && got.iter().all(|&got| got == value), "{device}: {value}");
        }
        let last = x.read_back().unwrap();
        while !last.is_done() {
            std::thread::yield_now();
        }
        assert_eq!(last.to_vec::<u32>().unwrap(), vec![77; len]);
        assert!(matches!(x.read_back().unwrap().to_vec::<f32>(), Err(Error::DType { .. })));
        assert!(x.rows(5..5).unwrap().read_back().unwrap().to_vec::<u32>().unwrap().is_empty());
    }
}

/// With one split, attention writes the output directly, without a merge.
#[test]
fn one_split_writes_output() {
    for (k, v) in [(Codec::F32, Codec::F32), (Codec::tq(4), Codec::tq(4))] {
        for sequences in [vec![(0, 1)], vec![(99, 1)], vec![(50, 6)]] {
            Case { splits: Some(1), k, v, kv_heads: 2, group: 2, sequences, ..Case::default() }.check();
        }
    }
}

/// More splits than positions leave empty splits, which must not count, in any order of merging.
#[test]
fn empty_splits_do_not_count() {
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
    // A token that sees nothing gets zeros: the ring has overwritten all positions up to it.
    for device in devices() {
        let layer = KvLayer::new(device, ring_spec(1, 4, 64, Codec::F32)).unwrap();
        let data = Source::random(&mut Rng::of("nothing"), 10, 1, 64);
        layers::write_at(&layer, &data, 0).unwrap();
        let q = input(device, DType::F32, &Rng::of("q").normals(640), &[10, 1, 64]).unwrap();
        for splits in [None, Some(1), Some(3)] {
            let out = Out::new(device, DType::F32, &[10, 1, 64]).unwrap();
            let step = range_step(device, 1, 0..10).unwrap();
            let args = plain(&layer, &q, &step, None, &out.tensor).splits(splits);
            run(device, |enc| ops::attend(enc, &args)).unwrap();
            out.bytes().unwrap();
            let out = out.tensor.to_f32().unwrap();
            assert!(out[..6 * 64].iter().all(|&x| x == 0.0), "{device}: a token that sees nothing gets zeros");
            assert!(out[6 * 64..].chunks(64).all(|row| row.iter().any(|&x| x != 0.0)), "{device}: other tokens do not");
        }
    }
}

/// States merge as the algebra of splits requires: for any cut, grouping and empty parts, merged states equal the state
/// over all keys.
#[test]
fn states_merge() {
    use kvant::reference::{QueryVector, State, attend};
    let mut rng = Rng::of("states");
    let mut vector = |scale: f64| -> Vec<f64> { (0..8).map(|_| rng.normal() * scale).collect() };
    let q = vector(1.0);
    let kv: Vec<(Vec<f64>, Vec<f64>)> =
        (0..12).map(|i| (vector(if i == 5 { 300.0 } else { 1.0 }), vector(1.0))).collect();
    let query = QueryVector { q: &q, scale: 1.0, softcap: None };
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
                    // A ring with room for the window and a whole chunk.
                    let ring = window.map_or(total, |w| w + chunk);
                    let spec = linear_spec(kv_heads, ring, dim, codec).ring(window.is_some());
                    let layer = KvLayer::new(device, spec).unwrap();
                    let starts = (0..total).step_by(chunk);
                    starts
                        .flat_map(|s| advance(&layer, &data, &queries, heads, s..(s + chunk).min(total), window))
                        .collect()
                };
                let at_once = all(total);
                for chunk in [1, 7] {
                    let case = format!("{device}: D {dim}, {codec}, window {window:?}, chunks of {chunk}");
                    let bound = Bound::of(DType::F32).times(2.0).over(device, codec, 1.0);
                    assert_close(case, &all(chunk), &at_once, bound);
                }
            }
        }
    }
}

/// A few draft tokens verified at once, on a wrapped ring, equal the same tokens one by one.
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
                let bound = Bound::of(DType::F32).times(2.0).over(device, codec, 1.0);
                assert_close(&case, &by_one, &at_once, bound);
                assert!(planes(&one).unwrap() == planes(&many).unwrap(), "{case}: the caches differ");
            }
        }
    }
}

/// Equal inputs give equal bits, three times.
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

/// The codec's output does not depend on the device's threads, and a layer's bytes have one meaning on all devices.
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

/// Operations run at the commit, on every device, and transfers do not wait for it. A program that forgets to commit in
/// between therefore fails on the CPU as on a GPU.
#[test]
fn nothing_runs_before_the_commit() {
    for device in devices() {
        let (x, y) = (ones(device), Tensor::zeros(device, DType::F32, &[1, 1, 64]).unwrap());
        let all = |value: f32| vec![value; 64];
        let wide = |enc: &mut Encoder| ops::softcap(enc, &Softcap::new(&x, 1e6, &y)).unwrap();
        let mut enc = device.encoder().unwrap();
        wide(&mut enc);
        assert_eq!(y.to_f32().unwrap(), all(0.0), "{device}: an operation ran before the commit");
        drop(enc);
        assert_eq!(y.to_f32().unwrap(), all(0.0), "{device}: an operation ran that was never committed");
        let mut enc = device.encoder().unwrap();
        wide(&mut enc);
        x.write(&all(5.0)).unwrap();
        enc.commit().unwrap().wait().unwrap();
        let got = y.to_f32().unwrap();
        assert!(got.iter().all(|y| (y - 5.0).abs() < 1e-4), "{device}: read before the commit: {got:?}");

        let layer = CacheLayer::new(1, 64, Codec::F32);
        let pool = KvPool::new(device, &PoolSpec::new(vec![layer], 1 << 20).page_tokens(16)).unwrap();
        let write = |enc: &mut Encoder, step: &Step, token: &Tensor| {
            let (layer, order, first_token) = (pool.layer(0).unwrap(), HeadOrder::TokenMajor, 0);
            ops::kv_write(enc, &KvWrite::new(token, token, step, layer).order(order).first_token(first_token)).unwrap();
        };
        let read = |sequence: &Sequence| -> Vec<f32> {
            let mut same = sequence.fork();
            let step = pool.step(&mut [(&mut same, 0)]).unwrap();
            let keys = layers::read_paged(pool.layer(0).unwrap(), KvSide::K, &step, 0, 0..sequence.len()).unwrap();
            keys.chunks(64).map(|key| key[0]).collect()
        };
        let (one, two) = (ones(device), ones(device));
        two.write(&all(2.0)).unwrap();

        // A fork that gets its own page, and an export, have the committed data.
        let mut a = pool.sequence();
        let step = pool.step(&mut [(&mut a, 1)]).unwrap();
        let mut enc = device.encoder().unwrap();
        write(&mut enc, &step, &one);
        let exported = a.export().unwrap();
        let mut fork = a.fork();
        pool.step(&mut [(&mut fork, 1)]).unwrap();
        enc.commit().unwrap().wait().unwrap();
        let imported = pool.import(&exported).unwrap();
        let got = [read(&a), read(&fork)[..1].to_vec(), read(&imported)].concat();
        assert_eq!(got, [1.0, 0.0, 0.0], "{device}: written, forked, exported");

        // A rewritten step affects all operations recorded with it.
        let mut b = pool.sequence();
        let step = pool.reserve_step(StepSize::decode(1, 16)).unwrap();
        pool.step_into(&mut [(&mut b, 1)], &step).unwrap();
        let mut enc = device.encoder().unwrap();
        write(&mut enc, &step, &one);
        pool.step_into(&mut [(&mut b, 1)], &step).unwrap();
        write(&mut enc, &step, &two);
        enc.commit().unwrap().wait().unwrap();
        assert_eq!(read(&b), [0.0, 2.0], "{device}: two tokens through one step");
    }
}

/// The contents of an index buffer are checked when the operation runs: earlier operations have then run, and may have
/// written it.
#[test]
fn indices_are_checked_when_the_operation_runs() {
    for device in devices() {
        let spec = linear_spec(1, 2, 64, Codec::F32);
        let (layer, token) = (KvLayer::new(device, spec).unwrap(), ones(device));
        let step = |position: u32| Step::new(device, 1, &[(0, position)]).unwrap();
        let write = |enc: &mut Encoder, step: &Step| {
            let (layer, order, first_token) = (&layer, HeadOrder::TokenMajor, 0);
            ops::kv_write(enc, &KvWrite::new(&token, &token, step, layer).order(order).first_token(first_token))
        };
        let (good, bad, last) = (step(0), step(9), step(1));
        let mut enc = device.encoder().unwrap();
        for step in [&good, &bad, &last] {
            write(&mut enc, step).unwrap_or_else(|e| panic!("{device}: checked before it runs: {e}"));
        }
        let ran = enc.commit().and_then(|submission| submission.wait());
        let keys = layers::read(&layer, KvSide::K, 0, 0..2).unwrap();
        if sees_indices(device) {
            assert!(matches!(ran, Err(Error::OutOfRange { .. })), "{device}: {ran:?}");
            assert_eq!([keys[0], keys[64]], [1.0, 0.0], "{device}: the earlier operation, and no later one");
        } else {
            ran.unwrap();
            assert_eq!([keys[0], keys[64]], [1.0, 1.0], "{device}: all operations");
        }
        // A step that is invalid when it is recorded and valid when it runs.
        let mut enc = device.encoder().unwrap();
        write(&mut enc, &bad).unwrap();
        bad.positions().write(&[1u32]).unwrap();
        bad.lens().write(&[2u32]).unwrap();
        enc.commit().unwrap().wait().unwrap();
    }
}

/// The keys or values of one token of one head.
fn ones(device: &Device) -> Tensor {
    Tensor::from_slice(device, &[1f32; 64], &[1, 1, 64]).unwrap()
}
