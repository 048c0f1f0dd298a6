//! The tasks of mlx-native's entry points, done with kvant: the kernels in the tables of `docs/from-mlx-native.md`, on
//! every device.

use crate::common::{
    Bound, Out, Rng, assert_close, devices, indices, input,
    layers::{self, Source, fill, linear_spec, planes, range_step, ring_spec},
    nmse, rounded, run, sees_indices,
};
use kvant::{
    Codec, DType, Device, Encoder, Error, HeadOrder, KvLayer, Result, Step, Tensor,
    codec::{self, Norm, TurboQuant},
    ops::{self, Angles, Attend, HeadNorm, KvRead, KvSide, KvWrite, NormRope, PairLayout, Rope},
};

/// The bytes of each side's dense tensor, as f32.
fn dense(layer: &KvLayer) -> [Vec<f32>; 2] {
    [layer.k(), layer.v()].map(|side| side.tensors().next().unwrap().1.to_f32().unwrap())
}

/// Writes tokens `first..first + n` of a source at positions `start..`.
fn write_range(
    layer: &KvLayer,
    (k, v): (&Tensor, &Tensor),
    order: HeadOrder,
    first_token: usize,
    positions: std::ops::Range<usize>,
) -> Result<()> {
    let device = layer.device();
    let step = range_step(device, layer.spec().sequences, positions)?;
    run(device, |enc| ops::kv_write(enc, &KvWrite::new(k, v, &step, layer).order(order).first_token(first_token)))
}

fn upload(device: &Device, dtype: DType, values: &[f32], shape: &[usize]) -> Tensor {
    input(device, dtype, values, shape).unwrap()
}

/// `kv_cache_copy`, `kv_cache_copy_f32`: rows into a token-major cache [cap, row], linear or sliding.
#[test]
fn kv_cache_copy() {
    let (heads, dim, row) = (3, 20, 60);
    for (from, to) in [(DType::BF16, Codec::BF16), (DType::F16, Codec::F16), (DType::F32, Codec::F32)] {
        let Codec::Dense(to_type) = to else { unreachable!() };
        for device in devices() {
            // The engine's own buffers, [cap, row].
            let memory = [0; 2].map(|_| Tensor::zeros(device, to_type, &[8, row]).unwrap());
            for sliding in [false, true] {
                let spec = linear_spec(heads, 8, dim, to).ring(sliding).order(HeadOrder::TokenMajor);
                let layer = KvLayer::from_dense(spec, &memory[0], &memory[1]).unwrap();
                let data = Source::random(&mut Rng::of("copy"), 5, heads, dim);
                let shape = [5, heads, dim];
                let (k, v) = (upload(device, from, &data.k, &shape), upload(device, from, &data.v, &shape));
                let start = if sliding { 6 } else { 2 };
                write_range(&layer, (&k, &v), HeadOrder::TokenMajor, 0, start..start + 5).unwrap();
                for (memory, values) in memory.iter().zip([&data.k, &data.v]) {
                    let cache = memory.to_f32().unwrap();
                    let want = rounded(from, values);
                    for t in 0..5 {
                        let slot = if sliding { (start + t) % 8 } else { start + t };
                        assert!(cache[slot * row..][..row] == want[t * row..][..row], "{device}: {from}, token {t}");
                    }
                }
                // A linear cache that would overflow returns an error if the host sees positions; otherwise the kernel
                // skips the token.
                if !sliding {
                    let before = planes(&layer).unwrap();
                    let overflow = write_range(&layer, (&k, &v), HeadOrder::TokenMajor, 0, 4..9);
                    if sees_indices(device) {
                        assert!(matches!(overflow, Err(Error::OutOfRange { .. })), "{device}: {overflow:?}");
                        assert!(planes(&layer).unwrap() == before, "{device}: nothing is written");
                    }
                }
                // No tokens: nothing happens.
                let before = planes(&layer).unwrap();
                write_range(&layer, (&k, &v), HeadOrder::TokenMajor, 5, 5..5).unwrap();
                assert!(planes(&layer).unwrap() == before, "{device}: no token, no change");
            }
        }
    }
}

/// `…_batch_f32`, `…_batch_f32_to_f16`, and their `_kv_dual` forms: one token, all heads, K and V, head-major.
#[test]
fn one_token_of_all_heads() {
    let (heads, dim, cap) = (4, 64, 7);
    for to in [DType::F32, DType::F16] {
        for device in devices() {
            let layer = KvLayer::new(device, linear_spec(heads, cap, dim, Codec::Dense(to))).unwrap();
            let data = Source::random(&mut Rng::of("one"), 1, heads, dim);
            let shape = [1, heads, dim];
            let (k, v) = (upload(device, DType::F32, &data.k, &shape), upload(device, DType::F32, &data.v, &shape));
            write_range(&layer, (&k, &v), HeadOrder::TokenMajor, 0, 5..6).unwrap();
            for (cache, values) in dense(&layer).iter().zip([&data.k, &data.v]) {
                let values = rounded(to, values);
                for (at, row) in cache.chunks(dim).enumerate() {
                    let (head, slot) = (at / cap, at % cap);
                    let want = if slot == 5 { &values[head * dim..][..dim] } else { &vec![0.0; dim] };
                    assert!(row == want, "{device}: {to}, head {head}, slot {slot}");
                }
            }
        }
    }
}

/// `…_seq_f32`, `…_seq_f32_to_f16` and their `_dual` forms: a range of a token-major source into a ring.
#[test]
fn a_token_range_into_a_ring() {
    let (heads, dim, cap, total) = (2, 64, 6, 20);
    for to in [DType::F32, DType::F16] {
        for device in devices() {
            let layer = KvLayer::new(device, ring_spec(heads, cap, dim, Codec::Dense(to))).unwrap();
            let data = Source::random(&mut Rng::of("sequence"), total, heads, dim);
            let shape = [total, heads, dim];
            let (k, v) = (upload(device, DType::F32, &data.k, &shape), upload(device, DType::F32, &data.v, &shape));
            // A sliding prefill: the last min(T, cap) tokens.
            let offset = total - cap;
            write_range(&layer, (&k, &v), HeadOrder::TokenMajor, offset, offset..total).unwrap();
            for (cache, values) in dense(&layer).iter().zip([&data.k, &data.v]) {
                let values = rounded(to, values);
                for position in offset..total {
                    for head in 0..heads {
                        let got = &cache[(head * cap + position % cap) * dim..][..dim];
                        assert!(got == &values[(position * heads + head) * dim..][..dim], "{device}: {position}");
                    }
                }
            }
            // The prompt need not be cut: writing all of it at once gives the same contents.
            let whole = KvLayer::new(device, *layer.spec()).unwrap();
            write_range(&whole, (&k, &v), HeadOrder::TokenMajor, 0, 0..total).unwrap();
            assert!(planes(&whole).unwrap() == planes(&layer).unwrap(), "{device}: the last tokens win");
        }
    }
}

/// `…_seq_bf16`: bf16 source, f32 cache.
#[test]
fn bf16_source_into_an_f32_cache() {
    for device in devices() {
        let layer = KvLayer::new(device, linear_spec(2, 5, 64, Codec::F32)).unwrap();
        let data = Source::random(&mut Rng::of("bf16"), 5, 2, 64);
        layers::write(&layer, &data, DType::BF16, &range_step(device, 1, 0..5).unwrap()).unwrap();
        let k = layers::read(&layer, KvSide::K, 0, 0..5).unwrap();
        assert!(k == rounded(DType::BF16, &data.k), "{device}: bf16 widens exactly");
    }
}

/// `…_seq_bf16_to_bf16_head_major`: a head-major source, bit for bit.
#[test]
fn head_major_bf16_bit_for_bit() {
    let (heads, tokens, dim) = (3, 4, 64);
    for device in devices() {
        let mut rng = Rng::of("bits");
        let mut random = || -> Vec<u8> { (0..heads * tokens * dim * 2).map(|_| rng.bits() as u8).collect() };
        let (k_bytes, v_bytes) = (random(), random());
        let shape = [heads, tokens, dim];
        let up = |bytes: &[u8]| Tensor::from_bytes(device, DType::BF16, &shape, bytes).unwrap();
        let (k, v) = (up(&k_bytes), up(&v_bytes));
        let layer = KvLayer::new(device, linear_spec(heads, tokens, dim, Codec::BF16)).unwrap();
        write_range(&layer, (&k, &v), HeadOrder::HeadMajor, 0, 0..tokens).unwrap();
        assert!(planes(&layer).unwrap() == [k_bytes, v_bytes], "{device}: NaN payloads and all");
    }
}

/// Softmax attention in f64 over head-major [Hk, cap, D] caches.
fn by_hand(
    q: &[f32],
    [k, v]: &[Vec<f32>; 2],
    shape: [usize; 4],
    seen: std::ops::Range<usize>,
    softcap: Option<f64>,
) -> Vec<f32> {
    let [heads, kv_heads, cap, dim] = shape;
    let mut out = Vec::new();
    for h in 0..heads {
        let row = |x: &[f32], j: usize| -> Vec<f64> {
            x[((h / (heads / kv_heads)) * cap + j) * dim..][..dim].iter().map(|&x| x.into()).collect()
        };
        let score = |j: usize| {
            let s: f64 =
                row(k, j).iter().zip(&q[h * dim..]).map(|(a, &b)| a * f64::from(b)).sum::<f64>() / (dim as f64).sqrt();
            softcap.map_or(s, |c| c * (s / c).tanh())
        };
        let largest = seen.clone().map(score).fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = seen.clone().map(|j| (score(j) - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut sum = vec![0.0; dim];
        for (j, w) in seen.clone().zip(weights) {
            sum.iter_mut().zip(row(v, j)).for_each(|(s, v)| *s += w / total * v);
        }
        out.extend(sum.into_iter().map(|x| x as f32));
    }
    out
}

/// `flash_attn_vec_dk256`, `_dk512` and their reductions: one query token, GQA, causal or sliding, f32 and f16 caches,
/// in one call that also splits and merges. mlx-native's errors are fixed here.
#[test]
fn flash_attn_vec() {
    for (dim, heads, kv_heads) in [(256, 8, 2), (512, 8, 1), (256, 4, 4)] {
        for codec in [Codec::F32, Codec::F16] {
            for device in devices() {
                // Length 45 in 50 slots: the next multiple of 32 is outside. The rest holds NaN.
                let (cap, len) = (50, 45);
                let layer = KvLayer::new(device, linear_spec(kv_heads, cap, dim, codec)).unwrap();
                fill(&layer, 0xFF).unwrap();
                let data = Source::random(&mut Rng::of("flash"), len, kv_heads, dim);
                layers::write_at(&layer, &data, 0).unwrap();
                let mut query = Rng::of("q").normals(heads * dim);
                // Overflows f16, at a coordinate that is zero in all keys.
                query[7] = 1e6;
                let no_seventh = Source {
                    k: data.k.iter().enumerate().map(|(i, &x)| if i % dim == 7 { 0.0 } else { x }).collect(),
                    ..data.clone()
                };
                layers::write_at(&layer, &no_seventh, 0).unwrap();
                let q = upload(device, DType::F32, &query, &[1, heads, dim]);
                let step = range_step(device, 1, len - 1..len).unwrap();
                for (window, softcap) in [(None, None), (Some(16), None), (None, Some(2.0))] {
                    let out = Out::new(device, DType::F32, &[1, heads, dim]).unwrap();
                    let args = Attend::new(&q, &layer, &step, &out.tensor)
                        .scale((dim as f32).powf(-0.5))
                        .softcap(softcap)
                        .window(window);
                    run(device, |enc| ops::attend(enc, &args)).unwrap();
                    let seen = window.map_or(0, |w| len - w)..len;
                    let shape = [heads, kv_heads, cap, dim];
                    let want = by_hand(&query, &dense(&layer), shape, seen, softcap.map(f64::from));
                    let case = format!("{device}: D {dim}, {codec}, window {window:?}, softcap {softcap:?}");
                    assert_close(case, &out.tensor.to_f32().unwrap(), &want, Bound::of(DType::F32).times(2.0));
                }
            }
        }
    }
}

/// `hadamard_quantize_kv` (any D), `_fast_d256`, `_fast_d512`: one token, linear or sliding, nibbles and norms.
#[test]
fn hadamard_quantize_kv() {
    // The norm that mlx-native stores, up to a factor; kvant's default has a smaller error.
    let codec = Codec::TurboQuant(TurboQuant { bits: 4, scale: 1.0, norm: Norm::Rms, centred: false });
    for dim in [64, 128, 256, 512, 2048] {
        for device in devices() {
            let data = Source::random(&mut Rng::of(dim), 1, 2, dim);
            let linear = KvLayer::new(device, linear_spec(2, 4, dim, codec)).unwrap();
            let sliding = KvLayer::new(device, ring_spec(2, 4, dim, codec)).unwrap();
            layers::write_at(&linear, &data, 3).unwrap();
            layers::write_at(&sliding, &data, 4 * 9 + 3).unwrap();
            assert!(planes(&linear).unwrap() == planes(&sliding).unwrap(), "{device}: D {dim}: position mod capacity");
            // Nibbles with the even coordinate low, one norm per block of 256.
            let shapes: Vec<_> = linear.k().tensors().map(|(name, t)| (name, t.dtype(), t.shape().to_vec())).collect();
            let blocks = dim.div_ceil(256);
            assert_eq!(
                shapes,
                [("low", DType::U8, vec![8, dim / 2]), ("norms", DType::F32, vec![8, blocks])],
                "{device}"
            );
            let low = linear.k().tensors().next().unwrap().1.to_vec::<u8>().unwrap();
            let row = linear.row(0, 1, 3);
            let indices = codec::indices(linear.k(), row..row + 1).unwrap();
            for (j, &index) in indices.iter().enumerate() {
                let byte = low[row * dim / 2 + j / 2];
                assert_eq!(index, if j % 2 == 0 { byte & 15 } else { byte >> 4 }, "{device}: coordinate {j}");
            }
            // The stored norm is ‖y‖/√B: with one block of 256, the vector's length over √256.
            let norms = linear.k().tensors().nth(1).unwrap().1.to_f32().unwrap();
            let energy: f64 = norms[row * blocks..][..blocks].iter().map(|&n| f64::from(n).powi(2)).sum();
            let x = &data.k[dim..];
            let length = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let ratio = energy * (dim / blocks) as f64 / length;
            assert!((ratio - 1.0).abs() < 1e-5, "{device}: D {dim}: the norms hold the length: {ratio}");
            let read = layers::read(&linear, KvSide::K, 0, 3..4).unwrap();
            assert!(nmse(&read, &data.k) < 0.02, "{device}: D {dim}");
            // Beyond a linear layer's capacity: an error.
            if sees_indices(device) {
                let error = layers::write_at(&linear, &data, 4).unwrap_err();
                assert!(matches!(error, Error::OutOfRange { .. }), "{device}: {error}");
            }
        }
    }
}

/// `dispatch_hadamard_quantize_kv_seq`: consecutive tokens from a source offset, in one launch.
#[test]
fn hadamard_quantize_kv_seq() {
    let (heads, dim, total) = (2, 256, 12);
    for device in devices() {
        let data = Source::random(&mut Rng::of("seq"), total, heads, dim);
        let shape = [total, heads, dim];
        let (k, v) = (upload(device, DType::F32, &data.k, &shape), upload(device, DType::F32, &data.v, &shape));
        let spec = linear_spec(heads, 10, dim, Codec::tq(4));
        let (at_once, one_by_one) = (KvLayer::new(device, spec).unwrap(), KvLayer::new(device, spec).unwrap());
        write_range(&at_once, (&k, &v), HeadOrder::TokenMajor, 3, 1..8).unwrap();
        for t in 0..7 {
            write_range(&one_by_one, (&k, &v), HeadOrder::TokenMajor, 3 + t, 1 + t..2 + t).unwrap();
        }
        assert!(planes(&at_once).unwrap() == planes(&one_by_one).unwrap(), "{device}");
        let read = layers::read(&at_once, KvSide::V, 0, 1..8).unwrap();
        assert!(nmse(&read, &data.part(3..10).v) < 0.012, "{device}");
    }
}

/// `hadamard_quantize_kv_hb_d256/512`: 5, 6 and 8 bits; packed here, one byte an index on request. Sizes and positions
/// are checked.
#[test]
fn hadamard_quantize_kv_hb() {
    for (bits, bytes, limit) in [(5, 164, 5e-3), (6, 196, 1.3e-3), (8, 260, 8e-5)] {
        assert_eq!(Codec::tq(bits).bytes_per_vector(256), bytes);
        for dim in [256, 512] {
            for device in devices() {
                let layer = KvLayer::new(device, linear_spec(2, 5, dim, Codec::tq(bits))).unwrap();
                assert_eq!(layer.k().bytes(), 10 * Codec::tq(bits).bytes_per_vector(dim), "{device}");
                let data = Source::random(&mut Rng::of("hb"), 5, 2, dim);
                layers::write_at(&layer, &data, 0).unwrap();
                let error = nmse(&layers::read(&layer, KvSide::K, 0, 0..5).unwrap(), &data.k);
                // Few vectors: compare their distortion with that of f64 arithmetic, which is near the codebook's.
                let x = upload(device, DType::F32, &data.k, &[5, 2, dim]);
                let tq = TurboQuant { bits, scale: 1.0, norm: Norm::Rms, centred: false };
                let own = codec::stats(&x, tq).unwrap().iter().map(|head| head.distortion).fold(0.0, f64::max);
                assert!(error < 1.01 * own && own < limit, "{device}: tq{bits}, D {dim}: {error:.3e}, f64 {own:.3e}");
                let indices = codec::indices(layer.k(), 0..10).unwrap();
                assert_eq!(indices.len(), 10 * dim, "{device}: one byte an index");
                assert!(indices.iter().all(|&i| u32::from(i) < 1 << bits), "{device}: below 2^{bits}");
                assert!(indices.iter().any(|&i| u32::from(i) >= 1 << (bits - 1)), "{device}: all bits are used");
                let centroids = codec::centroids(bits).unwrap();
                // Rotated vectors read as norm × centroid.
                let out = Out::new(device, DType::F32, &[5, 2, dim]).unwrap();
                let args = KvRead::new(&layer, KvSide::K, &out.tensor).keep_rotated(true);
                run(device, |enc| ops::kv_read(enc, &args)).unwrap();
                let rotated = out.tensor.to_f32().unwrap();
                let norms = layer.k().tensors().last().unwrap().1.to_f32().unwrap();
                for (t, head) in (0..5).flat_map(|t| [(t, 0), (t, 1)]) {
                    let row = layer.row(0, head, t);
                    for j in 0..dim {
                        let want = norms[row * (dim / 256) + j / 256] * centroids[indices[row * dim + j] as usize];
                        let got = rotated[(t * 2 + head) * dim + j];
                        assert!((got - want).abs() <= 1e-6 * want.abs(), "{device}: tq{bits}: {got}, not {want}");
                    }
                }
                let wrong = Source { k: data.k[dim..].to_vec(), ..data.clone() };
                let refused = {
                    let short = upload(device, DType::F32, &wrong.k[..8 * dim], &[4, 2, dim]);
                    write_range(&layer, (&short, &short), HeadOrder::TokenMajor, 0, 0..5)
                };
                assert!(matches!(refused, Err(Error::Value { .. })), "{device}: a source too short is refused");
            }
        }
    }
}

/// `scale_factor_d512` and the RMS probe: a factor on the normalised coordinates, and their statistics.
#[test]
fn scale_factor_and_rms_probe() {
    let (tokens, dim) = (40, 512);
    for device in devices() {
        let data = Source::random(&mut Rng::of("probe"), tokens, 1, dim);
        let x = upload(device, DType::F32, &data.k, &[tokens, 1, dim]);
        let mut errors = Vec::new();
        for scale in [0.5, 1.0, 1.5] {
            let tq = TurboQuant { bits: 4, scale, norm: Norm::Rms, centred: false };
            let stats = codec::stats(&x, tq).unwrap();
            assert_eq!((stats.len(), stats[0].vectors), (1, tokens), "{device}: one entry per head");
            assert!((stats[0].rms - f64::from(scale)).abs() < 1e-3, "{device}: RMS {} at {scale}", stats[0].rms);
            // The cache's error equals the probe's prediction.
            let layer = KvLayer::new(device, linear_spec(1, tokens, dim, Codec::TurboQuant(tq))).unwrap();
            layers::write_at(&layer, &data, 0).unwrap();
            let error = nmse(&layers::read(&layer, KvSide::K, 0, 0..tokens).unwrap(), &data.k);
            assert!((error / stats[0].distortion - 1.0).abs() < 1e-2, "{device}: {error} against {:?}", stats[0]);
            errors.push(error);
        }
        assert!(errors[1] < errors[0] && errors[1] < errors[2], "{device}: a scale of 1 is the best: {errors:?}");
    }
}

fn norm_rope(device: &Device, args: impl FnOnce(&mut Encoder, &Tensor) -> Result<()>, shape: &[usize]) -> Vec<f32> {
    let out = Out::new(device, DType::BF16, shape).unwrap();
    run(device, |enc| args(enc, &out.tensor)).unwrap();
    out.bytes().unwrap();
    out.tensor.to_f32().unwrap()
}

/// The norm and the rotation, in f64.
fn norm_rope_by_hand(x: &[f32], weight: Option<&[f32]>, pairs: &[(usize, usize)], angles: &[f64]) -> Vec<f32> {
    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
    let r = (mean + 1e-6).sqrt().recip();
    let mut y: Vec<f64> = x.iter().map(|&x| f64::from(x) * r).collect();
    if let Some(weight) = weight {
        y.iter_mut().zip(weight).for_each(|(y, &w)| *y *= f64::from(w));
    }
    for (&(a, b), angle) in pairs.iter().zip(angles) {
        (y[a], y[b]) = (y[a] * angle.cos() - y[b] * angle.sin(), y[a] * angle.sin() + y[b] * angle.cos());
    }
    y.into_iter().map(|y| y as f32).collect()
}

/// `fused_head_norm_rope_bf16`: one token, cos/sin tables, pairs (i, i + half_rope), optional weight, also at D = 512.
#[test]
fn fused_head_norm_rope() {
    for (dim, half_rope) in [(128, 64), (256, 32), (512, 256), (512, 64)] {
        for device in devices() {
            let mut rng = Rng::of(dim);
            let heads = 3;
            let x = rounded(DType::BF16, &rng.normals(heads * dim));
            let weight = rounded(DType::BF16, &rng.normals(dim));
            let position = 37;
            // Row p of the tables is for position p.
            let angles: Vec<f32> = (0..40 * half_rope).map(|_| 6.0 * rng.uniform() as f32).collect();
            let table = |f: fn(f32) -> f32| {
                upload(device, DType::F32, &angles.iter().map(|&a| f(a)).collect::<Vec<_>>(), &[40, half_rope])
            };
            let (cos, sin) = (table(f32::cos), table(f32::sin));
            let x_up = upload(device, DType::BF16, &x, &[1, heads, dim]);
            let w_up = upload(device, DType::BF16, &weight, &[dim]);
            let positions = indices(device, &[position as u32], &[1]).unwrap();
            for weighted in [false, true] {
                let record = |enc: &mut Encoder, out: &Tensor| {
                    let args = NormRope::new(&x_up, &positions, out)
                        .norm(Some(HeadNorm::new(1e-6).weight(weighted.then_some(&w_up))))
                        .rope(Some(
                            Rope::new(Angles::Tables { cos: &cos, sin: &sin }, half_rope)
                                .layout(PairLayout::LeadingHalves),
                        ));
                    ops::norm_rope(enc, &args).map(drop)
                };
                let got = norm_rope(device, record, &[1, heads, dim]);
                let pairs: Vec<(usize, usize)> = (0..half_rope).map(|i| (i, i + half_rope)).collect();
                let row: Vec<f64> = angles[position * half_rope..][..half_rope].iter().map(|&a| a.into()).collect();
                let w = weighted.then_some(&weight[..]);
                let want: Vec<f32> = x.chunks(dim).flat_map(|x| norm_rope_by_hand(x, w, &pairs, &row)).collect();
                let case = format!("{device}: D {dim}, half_rope {half_rope}, weighted {weighted}");
                assert_close(case, &got, &rounded(DType::BF16, &want), Bound::of(DType::BF16));
            }
        }
    }
}

/// `fused_head_norm_rope_batch_bf16`: [T, H, D], positions, theta, frequency factors, pairs (i, i + D/2) whose first
/// half_rope ones rotate; and the pairs of a single token.
#[test]
fn fused_head_norm_rope_batch() {
    let (tokens, heads, theta) = (5, 2, 1e6);
    for (dim, half_rope) in [(128, 64), (256, 128), (512, 64)] {
        for device in devices() {
            let mut rng = Rng::of(dim);
            let x = rounded(DType::BF16, &rng.normals(tokens * heads * dim));
            let weight = rounded(DType::BF16, &rng.normals(dim));
            let factors: Vec<f32> = (0..half_rope).map(|_| 1.0 + 7.0 * rng.uniform() as f32).collect();
            let positions: Vec<u32> = (0..tokens as u32).map(|t| 100 + 13 * t).collect();
            let w_up = upload(device, DType::BF16, &weight, &[dim]);
            let f_up = upload(device, DType::F32, &factors, &[half_rope]);
            for scaled in [false, true] {
                let batch = |range: std::ops::Range<usize>| {
                    let (n, row) = (range.len(), heads * dim);
                    let x = upload(device, DType::BF16, &x[range.start * row..range.end * row], &[n, heads, dim]);
                    let positions = indices(device, &positions[range], &[n]).unwrap();
                    let record = |enc: &mut Encoder, out: &Tensor| {
                        let args = NormRope::new(&x, &positions, out)
                            .norm(Some(HeadNorm::new(1e-6).weight(Some(&w_up))))
                            .rope(Some(Rope::new(theta, half_rope).freq_factors(scaled.then_some(&f_up))));
                        ops::norm_rope(enc, &args).map(drop)
                    };
                    norm_rope(device, record, &[n, heads, dim])
                };
                let got = batch(0..tokens);
                let pairs: Vec<(usize, usize)> = (0..half_rope).map(|i| (i, i + dim / 2)).collect();
                let mut want = Vec::new();
                for (t, &position) in positions.iter().enumerate() {
                    let angle = |i: usize| {
                        let angle = f64::from(position) * theta.powf(-2.0 * i as f64 / dim as f64);
                        if scaled { angle / f64::from(factors[i]) } else { angle }
                    };
                    let angles: Vec<f64> = (0..half_rope).map(angle).collect();
                    for h in 0..heads {
                        let x = &x[(t * heads + h) * dim..][..dim];
                        want.extend(norm_rope_by_hand(x, Some(&weight), &pairs, &angles));
                    }
                }
                let case = format!("{device}: D {dim}, half_rope {half_rope}, factors {scaled}");
                assert_close(&case, &got, &rounded(DType::BF16, &want), Bound::of(DType::BF16));
                // One token uses the same kernel.
                let single: Vec<f32> = (0..tokens).flat_map(|t| batch(t..t + 1)).collect();
                assert!(single == got, "{case}: a token alone gives other bits than in its batch");
            }
        }
    }
}

/// `MlxDevice`, `MlxBuffer`, `CommandEncoder`, `MlxError`: a device, tensors, an encoder that runs several operations
/// in order, and one error type.
#[test]
fn device_buffer_encoder_error() {
    for device in devices() {
        assert!(!device.name().is_empty());
        let x = Tensor::from_slice(device, &[1f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
        assert_eq!((x.dtype(), x.shape(), x.bytes()), (DType::F32, &[2usize, 2][..], 16));
        // The second operation reads the first one's output; the caller does not declare the dependency.
        let mut enc = device.encoder().unwrap();
        let (y, z) =
            (Tensor::zeros(device, DType::F32, &[2, 2]).unwrap(), Tensor::zeros(device, DType::F32, &[2, 2]).unwrap());
        ops::softcap(&mut enc, &ops::Softcap::new(&x, 2.0, &y)).unwrap();
        ops::softcap(&mut enc, &ops::Softcap::new(&y, 1.0, &z)).unwrap();
        enc.commit().unwrap().wait().unwrap();
        let want: Vec<f32> = [1f64, 2.0, 3.0, 4.0].iter().map(|x| (2.0 * (x / 2.0).tanh()).tanh() as f32).collect();
        assert_close(format!("{device}"), &z.to_f32().unwrap(), &want, Bound::of(DType::F32));
        // Invalid input is an error that names the operation and the argument, not a panic.
        let mut enc = device.encoder().unwrap();
        let error = ops::softcap(&mut enc, &ops::Softcap::new(&x, f32::NAN, &y)).unwrap_err();
        let Error::Value { op, arg, .. } = &error else { panic!("{device}: {error:?}") };
        assert_eq!((*op, *arg), ("softcap", "cap"));
        // Steps are made from plain numbers.
        let step = Step::new(device, 2, &[(0, 3), (1, 0), (0, 4)]).unwrap();
        assert_eq!(step.lens().to_vec::<u32>().unwrap(), [5, 1], "{device}");
    }
}
