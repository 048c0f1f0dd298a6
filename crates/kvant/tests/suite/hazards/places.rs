//! Memory addresses: beyond 4 GiB, with strides of the capacity, at unaligned offsets.

use super::*;

/// Slots at byte offsets beyond 4 GiB. The memory is zeroed lazily on the host, and few pages are touched.
#[test]
fn slot_offset_beyond_4gib() {
    let dim = 512;
    let orders = [
        (HeadOrder::HeadMajor, 1, (1 << 21) + 70),
        (HeadOrder::HeadMajor, 2, (1 << 20) + 70),
        (HeadOrder::TokenMajor, 2, (1 << 20) + 70),
    ];
    for device in devices() {
        for (order, kv_heads, capacity) in orders {
            let spec = linear_spec(kv_heads, capacity, dim, Codec::F32).v(Codec::F16).order(order);
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
            let small = KvLayer::new(device, spec.capacity(tokens)).unwrap();
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

/// The last possible positions, on rings: counters of keys must not wrap. A token beyond the length, at the very last
/// position, is an error, or reads arbitrary slots of the layer and terminates.
#[test]
fn positions_near_the_end() {
    let (kv_heads, heads, capacity) = (2, 4, 200);
    let written = capacity + 5;
    let cases = [
        (Codec::F32, DType::F32, 64),
        (Codec::F16, DType::F16, 128),
        (Codec::BF16, DType::BF16, 512),
        (Codec::tq(4), DType::F16, 128),
        (Codec::tq(8), DType::BF16, 256),
        (Codec::tq(5), DType::BF16, 512),
        (Codec::tq(6), DType::F32, 64),
    ];
    for (codec, dtype, dim) in cases {
        let data = Source::random(&mut Rng::of("the end"), written, kv_heads, dim);
        let queries = Rng::of("q").normals(3 * heads * dim);
        for device in devices() {
            // Equal slots at much earlier positions.
            let end = u32::MAX as usize;
            let layers = [end, end % capacity + 2 * capacity].map(|end| {
                let layer = KvLayer::new(device, ring_spec(kv_heads, capacity, dim, codec)).unwrap();
                fill(&layer, 0xFF).unwrap();
                let step = range_step(device, 1, end - written..end).unwrap();
                layers::write(&layer, &data, DType::F32, &step).unwrap();
                (layer, end)
            });
            assert!(
                planes(&layers[0].0).unwrap() == planes(&layers[1].0).unwrap(),
                "{device}: {codec}: written elsewhere"
            );
            let result = |layer: &KvLayer, step: &Step, window| -> Result<Vec<f32>> {
                let shape = [step.tokens(), heads, dim];
                let q = input(device, dtype, &queries[..step.tokens() * heads * dim], &shape)?;
                let out = Out::new(device, dtype, &shape)?;
                run(device, |enc| ops::attend(enc, &plain(layer, &q, step, window, &out.tensor)))?;
                out.bytes()?;
                out.tensor.to_f32()
            };
            // Decode, and several tokens.
            for tokens in [1, 3] {
                for window in [None, Some(3), Some(150)] {
                    let [far, near] = [0, 1].map(|i| {
                        let (layer, end) = &layers[i];
                        result(layer, &range_step(device, 1, end - tokens..*end).unwrap(), window).unwrap()
                    });
                    let what = format!("{device}: {codec}, {tokens} tokens, window {window:?}");
                    // Tiles begin at other slots, and integers are relative to a tile's unit.
                    assert_close(what, &far, &near, Bound::of(dtype).over(device, codec, 1.0));
                }
            }
            let step = range_step(device, 1, end - 1..end).unwrap();
            let positions = indices(device, &[u32::MAX], &[1]).unwrap();
            let step = Step::from_tensors(positions, step.sequence().clone(), step.lens().clone());
            let beyond = result(&layers[0].0, &step, None);
            assert!(sees_indices(device) == beyond.is_err(), "{device}: {codec}: {beyond:?}");
        }
    }
}

/// A capacity far beyond the length, several heads and sequences: strides follow from the capacity.
#[test]
fn capacity_stride() {
    for codec in CODECS {
        for order in [HeadOrder::HeadMajor, HeadOrder::TokenMajor] {
            for device in devices() {
                let roomy = linear_spec(3, 1000, 128, codec).sequences(2).order(order);
                let tight = roomy.capacity(9);
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

/// Every tensor as a view at an offset: all helpers of these tests make such views (`crate::common::input`). Here the
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
        let step = Step::from_tensors(part(1, 4), part(6, 4), part(11, 1));
        let layer = KvLayer::new(device, linear_spec(kv_heads, 4, dim, Codec::F32)).unwrap();
        let record = |enc: &mut Encoder| {
            let (order, first_token) = (HeadOrder::TokenMajor, 0);
            ops::kv_write(enc, &KvWrite::new(&k, &v, &step, &layer).order(order).first_token(first_token))?;
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
        // Memory outside the output must not change.
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

/// Offsets that are aligned only to an element.
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
                    let all = Tensor::from_bytes(device, dtype, &[flat.len()], &crate::common::encode(dtype, &flat))?;
                    all.rows(shift..flat.len())?.reshape(shape)
                };
                let shape = [tokens, heads, dim];
                let (q, k, v) =
                    (up(&values, &shape)?, up(&keys, &[tokens, kv_heads, dim])?, up(&vals, &[tokens, kv_heads, dim])?);
                let weight = up(&values[..dim], &[dim])?;
                let (out, normed) = (up(&values, &shape)?, up(&values, &shape)?);
                let layer =
                    KvLayer::new(device, linear_spec(kv_heads, tokens, dim, Codec::Dense(dtype)).v(Codec::tq(5)))?;
                let step = range_step(device, 1, 0..tokens)?;
                run(device, |enc| {
                    let (order, first_token) = (HeadOrder::TokenMajor, 0);
                    ops::kv_write(enc, &KvWrite::new(&k, &v, &step, &layer).order(order).first_token(first_token))?;
                    ops::attend(enc, &plain(&layer, &q, &step, None, &out))?;
                    let rope = Rope::new(1e4, 20).layout(PairLayout::LeadingHalves);
                    let norm = Some(HeadNorm::new(1e-6).weight(Some(&weight)));
                    let args = NormRope::new(&q, step.positions(), &normed).norm(norm).rope(Some(rope)).rotate(true);
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
    // An engine's own dense caches at this offset.
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
