//! Layers that seal pages: how pages are stored, independently of schedules. `pages::histories` compares attention over
//! them with naive attention.

mod attention;
mod biases;
mod decode;
mod shared;

use super::tokens::{DIM, WINDOW, feed, prompt_token};
use crate::common::{
    Out, Rng, devices, input,
    layers::{self, CENTRED_CODECS, GAUSSIAN_MSE, Source},
    nmse, run,
};
use kvant::{
    CacheLayer, Codec, DType, Device, DeviceKind, Error, KvPool, PoolSpec, Sequence, Step,
    ops::{self, HeadNorm, KvSide, NormRopeWrite, Rope},
};

const PAGE: usize = 16;

/// The reference, and the devices of this case.
fn reference_and_devices() -> Vec<Device> {
    [Device::reference()].into_iter().chain(devices().iter().cloned()).collect()
}

/// A pool with room for `tokens` tokens and no more, because msl-host compares all memory that a launch may write.
fn pool_of(device: &Device, layer: CacheLayer, tokens: usize) -> KvPool {
    let spec = PoolSpec::new(vec![layer], 0).page_tokens(PAGE).room_for(1, tokens, tokens).unwrap();
    KvPool::new(device, &spec).unwrap()
}

fn pool(device: &Device, heads: usize, dim: usize, codec: Codec) -> KvPool {
    pool_of(device, CacheLayer::new(heads, dim, codec), 25 * PAGE)
}

/// Normal vectors, plus one vector per head whose coordinates are `size`.
fn around(rng: &mut Rng, tokens: usize, heads: usize, dim: usize, size: f32) -> Source {
    let mut source = Source::random(rng, tokens, heads, dim);
    let common: Vec<f32> = rng.normals(heads * dim).iter().map(|x| size * x).collect();
    for (i, x) in source.k.iter_mut().chain(&mut source.v).enumerate() {
        *x += common[i % common.len()];
    }
    source
}

/// Appends tokens to a sequence, and returns the step that wrote them to layer 0.
fn append(pool: &KvPool, sequence: &mut Sequence, source: &Source) -> Step {
    let step = pool.step(&mut [(sequence, source.tokens())]).unwrap();
    layers::write(pool.layer(0).unwrap(), source, DType::F32, &step).unwrap();
    step
}

/// The sealed keys and values of a sequence: the pages between the first one and the last two.
fn sealed(pool: &KvPool, sequence: &mut Sequence) -> [Vec<f32>; 2] {
    let (positions, step) = (sealed_positions(sequence.len()), pool.step(&mut [(sequence, 0)]).unwrap());
    [KvSide::K, KvSide::V]
        .map(|side| layers::read_paged(pool.layer(0).unwrap(), side, &step, 0, positions.clone()).unwrap())
}

/// The positions that are sealed and no longer dense, in a sequence of `len` tokens whose last token was alone in its
/// step.
fn sealed_positions(len: usize) -> std::ops::Range<usize> {
    PAGE..(((len - 1) / PAGE).saturating_sub(1) * PAGE).max(PAGE)
}

/// Prompts at once, in pieces, token by token, and anything in between: the same pages are sealed, with equal bytes.
#[test]
fn schedules_do_not_matter() {
    let tokens = 7 * PAGE + 3;
    for device in reference_and_devices() {
        for (codec, dim) in CENTRED_CODECS.into_iter().zip([64, 128, 256, 8, 512, 64]) {
            let data = around(&mut Rng::of(format!("schedules {codec}")), tokens, 2, dim, 3.0);
            let stored = |pieces: &mut dyn FnMut(usize) -> usize| {
                let pool = pool(&device, 2, dim, codec);
                let mut sequence = pool.sequence();
                while sequence.len() < tokens - 1 {
                    let at = sequence.len();
                    let count = pieces(at).min(tokens - 1 - at);
                    append(&pool, &mut sequence, &data.part(at..at + count));
                }
                // A last step releases the dense pages that are sealed.
                append(&pool, &mut sequence, &data.part(tokens - 1..tokens));
                (sealed(&pool, &mut sequence), pool.usage().used)
            };
            let (want, used) = stored(&mut |_| tokens);
            assert!(!want[0].is_empty());
            let mut rng = Rng::of("pieces");
            for piece in [Some(1), Some(7), Some(PAGE), Some(3 * PAGE), None] {
                let (got, pages) = stored(&mut |_| piece.unwrap_or_else(|| 1 + rng.below(3 * PAGE)));
                assert!(got == want, "{device}: {codec}, pieces of {piece:?}");
                assert_eq!(pages, used, "{device}: {codec}, pieces of {piece:?}");
            }
        }
    }
}

/// A long sequence has dense pages only for its first page and two or three others; the memory that a pool requests
/// suffices.
#[test]
fn few_pages_are_dense() {
    let layer = CacheLayer::new(1, 64, Codec::tq_centred(4));
    let spec = PoolSpec::new(vec![layer], 0).page_tokens(PAGE).room_for(1, 40 * PAGE, 1).unwrap();
    let pool = KvPool::new(&Device::cpu(), &spec).unwrap();
    let mut sequence = pool.sequence();
    for _ in 0..40 * PAGE {
        pool.step(&mut [(&mut sequence, 1)]).unwrap();
    }
    // Planes begin at multiples of 256 bytes: 512 of codes, 256 of norms, 256 of a mean.
    let (dense, sealed) = (2 * PAGE * 64 * 2, 2 * (512 + 256 + 256));
    let used = pool.usage().used;
    assert_eq!(used, 3 * dense + 37 * sealed);
    assert!((used..used + 2 * dense).contains(&spec.bytes), "{} for {used} bytes", spec.bytes);
}

/// Sealed keys and values of every codec have the theoretical distance from the source.
#[test]
fn sealed_vectors_have_the_optimal_distortion() {
    for (dim, heads) in [(64, 3), (256, 2), (512, 1)] {
        for device in reference_and_devices() {
            for (bits, optimum) in GAUSSIAN_MSE {
                let pool = pool(&device, heads, dim, Codec::tq_centred(bits));
                let mut rng = Rng::of((bits * 1000) as usize + dim);
                let tokens = 8 * PAGE + 7;
                let data = around(&mut rng, tokens, heads, dim, 5.0);
                let mut sequence = pool.sequence();
                append(&pool, &mut sequence, &data.part(0..4 * PAGE));
                for at in 4 * PAGE..tokens {
                    append(&pool, &mut sequence, &data.part(at..at + 1));
                }
                let of = data.part(sealed_positions(tokens));
                for (got, source) in sealed(&pool, &mut sequence).iter().zip([&of.k, &of.v]) {
                    // Relative to the variance around the common part.
                    let error: f64 = got.iter().zip(source).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                    // The mean of sixteen vectors removes a sixteenth of their variance.
                    let ratio = error / got.len() as f64 / (optimum / (1.0 - optimum)) / (15.0 / 16.0);
                    assert!((0.8..1.15).contains(&ratio), "{device}: tq{bits}c, D {dim}: {ratio}");
                }
            }
        }
    }
}

/// The tokens of a step may come in any order, and be processed by any number of threads.
#[test]
fn the_order_of_tokens_does_not_matter() {
    for device in reference_and_devices() {
        let pool = pool(&device, 2, 64, Codec::tq_centred(5));
        let data = around(&mut Rng::of("order"), 5 * PAGE + 9, 2, 64, 3.0);
        let tokens = data.tokens();
        let mut a = pool.sequence();
        append(&pool, &mut a, &data);
        let mut b = pool.sequence();
        let step = pool.step(&mut [(&mut b, tokens)]).unwrap();
        let mut order: Vec<usize> = (0..tokens).collect();
        Rng::of("shuffle").shuffle(&mut order);
        let shuffled = step.select(&order).unwrap();
        layers::write(pool.layer(0).unwrap(), &data.gather(&order), DType::F32, &shuffled).unwrap();
        for sequence in [&mut a, &mut b] {
            append(&pool, sequence, &data.part(0..1));
        }
        assert!(sealed(&pool, &mut a) == sealed(&pool, &mut b), "{device}");
    }
}

/// A vector that is not finite affects no other: the rest of its page is sealed around the mean of the others.
#[test]
fn vectors_that_are_not_finite_do_not_affect_others() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for device in reference_and_devices() {
            let pool = pool(&device, 2, 64, Codec::tq_centred(4));
            let data = around(&mut Rng::of("not finite"), 4 * PAGE, 2, 64, 3.0);
            // Head 1 of the fifth token of page 1.
            let at = ((PAGE + 4) * 2 + 1) * 64;
            let mut damaged = data.clone();
            damaged.k[at + 7] = bad;
            damaged.v[at] = bad;
            let stored = |data: &Source| {
                let mut sequence = pool.sequence();
                append(&pool, &mut sequence, data);
                append(&pool, &mut sequence, &data.part(0..1));
                sealed(&pool, &mut sequence)
            };
            for (got, source) in stored(&damaged).iter().zip([&data.k, &data.v]) {
                let at = at - PAGE * 2 * 64;
                assert!(got[at..at + 64].iter().all(|x| x.is_nan()), "{device}: {bad}");
                let rest = |x: &[f32]| [&x[..at], &x[at + 64..PAGE * 2 * 64]].concat();
                let error = nmse(&rest(got), &rest(&source[PAGE * 2 * 64..2 * PAGE * 2 * 64]));
                assert!(error < 0.01, "{device}: {bad}: {error}");
            }
        }
    }
}

/// A page without a finite vector has a mean of zeros.
#[test]
fn pages_without_a_finite_vector_are_sealed() {
    for device in reference_and_devices() {
        for x in [f32::NAN, 0.0] {
            let pool = pool(&device, 1, 64, Codec::tq_centred(3));
            let all = vec![x; 4 * PAGE * 64];
            let source = Source { k: all.clone(), v: all, heads: 1, dim: 64 };
            let mut sequence = pool.sequence();
            append(&pool, &mut sequence, &source);
            append(&pool, &mut sequence, &source.part(0..1));
            let [k, v] = sealed(&pool, &mut sequence);
            let fits = |y: &f32| y.is_nan() == x.is_nan() && (x.is_nan() || *y == 0.0);
            assert!(k.iter().chain(&v).all(fits), "{device}: {k:?}");
        }
    }
}

/// A device writes the reference's bytes, except that a coordinate at a threshold may be rounded the other way; so does
/// the fused operation.
#[test]
fn devices_write_the_bytes_of_the_reference() {
    let written = |device: &Device, codec: Codec, dim: usize, fused: bool| -> [Vec<f32>; 2] {
        let layer = CacheLayer::new(2, dim, codec).v(Codec::tq_centred(6));
        let pool = pool_of(device, layer, 16 * PAGE);
        let data = around(&mut Rng::of(format!("{codec} {dim}")), 200, 2, dim, 4.0);
        let (mut a, mut b) = (pool.sequence(), pool.sequence());
        let mut at = 0;
        for (of_a, of_b) in [(PAGE + 3, 2 * PAGE), (1, 1), (PAGE, 0), (2, 40)] {
            let step = pool.step(&mut [(&mut a, of_a), (&mut b, of_b)]).unwrap();
            let part = data.part(at..at + of_a + of_b);
            at += of_a + of_b;
            if !fused {
                layers::write(pool.layer(0).unwrap(), &part, DType::F32, &step).unwrap();
                continue;
            }
            let x = |values: &[f32]| input(device, DType::F32, values, &[of_a + of_b, 2, dim]).unwrap();
            let (k, v) = (x(&part.k), x(&part.v));
            let q_out = Out::new(device, DType::F32, &[of_a + of_b, 2, dim]).unwrap();
            let args = NormRopeWrite::new(&k, &k, &v, &step, pool.layer(0).unwrap(), &q_out.tensor);
            run(device, |enc| ops::norm_rope_write(enc, &args)).unwrap();
        }
        let step = pool.step(&mut [(&mut a, 0), (&mut b, 0)]).unwrap();
        let read = |side| {
            let of = |(index, sequence): (usize, &Sequence)| {
                layers::read_paged(pool.layer(0).unwrap(), side, &step, index, 0..sequence.len()).unwrap()
            };
            [&a, &b].into_iter().enumerate().flat_map(of).collect()
        };
        [read(KvSide::K), read(KvSide::V)]
    };
    for (i, codec) in CENTRED_CODECS.into_iter().enumerate() {
        for (j, dim) in [8, 64, 128, 512, 1024].into_iter().enumerate() {
            // Both operations for each codec and for each size.
            let fused = (i + j) % 2 == 0;
            let want = written(&Device::reference(), codec, dim, fused);
            for device in devices() {
                let got = written(device, codec, dim, fused);
                for (got, want) in got.iter().zip(&want) {
                    let error = nmse(got, want);
                    assert!(error < 1e-4, "{device}: {codec}, D {dim}, fused {fused}: {error}");
                }
            }
        }
    }
}

/// Many rows of 16-bit numbers, in steps that end within a page.
#[test]
fn many_rows_are_sealed_as_the_reference_seals_them() {
    let centred = Codec::tq_centred;
    let cases = [
        (128, DType::BF16, centred(4), centred(8)),
        (256, DType::F16, centred(3), Codec::F16),
        (512, DType::BF16, centred(6), centred(5)),
    ];
    for (dim, dtype, k, v) in cases {
        for device in devices() {
            // Enough for every multiprocessor; on other devices, more tokens in a step than a threadgroup has threads.
            let (heads, tokens) = match device.kind() {
                DeviceKind::Cuda => (16, 300),
                _ if dim == 128 => (1, 330),
                _ => (2, 60),
            };
            let store = |device: &Device| {
                let layer = CacheLayer::new(heads, dim, k).v(v);
                let pool = pool_of(device, layer, tokens + PAGE);
                let data = around(&mut Rng::of(format!("many {dim}")), tokens, heads, dim, 2.0);
                let (mut sequence, mut at) = (pool.sequence(), 0);
                for count in [tokens - 25, 25] {
                    let step = pool.step(&mut [(&mut sequence, count)]).unwrap();
                    layers::write(pool.layer(0).unwrap(), &data.part(at..at + count), dtype, &step).unwrap();
                    at += count;
                }
                let step = pool.step(&mut [(&mut sequence, 0)]).unwrap();
                let read = |side| layers::read_paged(pool.layer(0).unwrap(), side, &step, 0, 0..tokens).unwrap();
                [read(KvSide::K), read(KvSide::V)]
            };
            let (want, got) = (store(&Device::reference()), store(device));
            for (got, want) in got.iter().zip(&want) {
                assert!(nmse(got, want) < 1e-4, "{device}: D {dim}: {}", nmse(got, want));
            }
        }
    }
}

/// Steps that mix prompts, drafts and decode of many sequences, whose pages begin anywhere among the tokens.
#[test]
fn mixed_steps_are_stored_as_the_reference_stores_them() {
    const COUNTS: [[usize; 9]; 5] = [
        [40, 16, 1, 5, 33, 15, 2, 64, 17],
        [1, 1, 15, 12, 1, 1, 30, 1, 1],
        [9, 31, 2, 0, 16, 1, 48, 15, 3],
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [2, 1, 16, 32, 1, 17, 1, 2, 5],
    ];
    let (heads, dim) = (2, 128);
    let store = |device: &Device, dtype: DType, shuffled: bool| {
        let layer = CacheLayer::new(heads, dim, Codec::tq_centred(5)).v(Codec::tq(4));
        let spec = PoolSpec::new(vec![layer], 0).page_tokens(PAGE).room_for(9, 9 * PAGE, 200).unwrap();
        let pool = KvPool::new(device, &spec).unwrap();
        let mut rng = Rng::of("mixed");
        let mut sequences: Vec<Sequence> = (0..9).map(|_| pool.sequence()).collect();
        for counts in COUNTS {
            let tokens = counts.iter().sum();
            let step = pool.step(&mut sequences.iter_mut().zip(counts).collect::<Vec<_>>()).unwrap();
            let data = around(&mut rng, tokens, heads, dim, 2.0);
            let mut order: Vec<usize> = (0..tokens).collect();
            if shuffled {
                Rng::of(tokens).shuffle(&mut order);
            }
            let step = step.select(&order).unwrap();
            layers::write(pool.layer(0).unwrap(), &data.gather(&order), dtype, &step).unwrap();
        }
        let step = pool.step(&mut sequences.iter_mut().map(|sequence| (sequence, 0)).collect::<Vec<_>>()).unwrap();
        let read = |side| -> Vec<f32> {
            let lengths = sequences.iter().map(Sequence::len).enumerate();
            let of = |(index, len)| layers::read_paged(pool.layer(0).unwrap(), side, &step, index, 0..len).unwrap();
            lengths.flat_map(of).collect()
        };
        [read(KvSide::K), read(KvSide::V)]
    };
    for dtype in [DType::F32, DType::BF16] {
        let want = store(&Device::reference(), dtype, false);
        for device in devices() {
            let in_order = store(device, dtype, false);
            for (got, want) in in_order.iter().zip(&want) {
                assert!(nmse(got, want) < 1e-4, "{device}: {dtype:?}: {}", nmse(got, want));
            }
            assert!(store(device, dtype, true) == in_order, "{device}: {dtype:?}: another order");
        }
    }
}

/// The fused operation stores normed and rotated keys, and seals the pages that it has stored.
#[test]
fn fused_writes_seal_their_pages() {
    let (heads, dim, tokens) = (2, 128, 5 * PAGE + 3);
    let store = |device: &Device, counts: &[usize]| {
        let layer = CacheLayer::new(heads, dim, Codec::tq_centred(6));
        let pool = pool_of(device, layer, tokens + PAGE);
        let layer = pool.layer(0).unwrap();
        let data = around(&mut Rng::of("fused"), tokens, heads, dim, 2.0);
        let weight = input(device, DType::F32, &Rng::of("weight").normals(dim), &[dim]).unwrap();
        let norm = HeadNorm::new(1e-6).weight(Some(&weight));
        let (mut sequence, mut at) = (pool.sequence(), 0);
        for &count in counts {
            let step = pool.step(&mut [(&mut sequence, count)]).unwrap();
            let part = data.part(at..at + count);
            at += count;
            let x = |values: &[f32]| input(device, DType::F32, values, &[count, heads, dim]).unwrap();
            let (k, v) = (x(&part.k), x(&part.v));
            let q_out = Out::new(device, DType::F32, &[count, heads, dim]).unwrap();
            let args = NormRopeWrite::new(&k, &k, &v, &step, layer, &q_out.tensor)
                .k_norm(Some(norm))
                .v_norm(Some(norm))
                .rope(Some(Rope::new(10_000.0, dim / 2)));
            run(device, |enc| ops::norm_rope_write(enc, &args)).unwrap();
            q_out.bytes().unwrap();
        }
        let step = pool.step(&mut [(&mut sequence, 0)]).unwrap();
        [KvSide::K, KvSide::V].map(|side| layers::read_paged(layer, side, &step, 0, 0..tokens).unwrap())
    };
    let counts: [&[usize]; 3] = [&[tokens], &[2 * PAGE, 3 * PAGE + 3], &[PAGE - 1, 1, 1, 4 * PAGE + 2]];
    for counts in counts {
        let want = store(&Device::reference(), counts);
        for device in reference_and_devices() {
            for (got, want) in store(&device, counts).iter().zip(&want) {
                assert!(nmse(got, want) < 1e-4, "{device}: {counts:?}: {}", nmse(got, want));
            }
        }
    }
}

/// A vector that all keys of a page have in common does not change a softmax, and with page means causes no error.
#[test]
fn a_constant_in_all_keys_causes_no_error() {
    for device in reference_and_devices() {
        let mut rng = Rng::of("constant");
        let plain = around(&mut rng, 6 * PAGE, 1, 64, 0.0);
        let moved = around(&mut Rng::of("constant"), 6 * PAGE, 1, 64, 8.0);
        let error = |codec: Codec, source: &Source| {
            let pool = pool(&device, 1, 64, codec);
            let mut sequence = pool.sequence();
            append(&pool, &mut sequence, source);
            append(&pool, &mut sequence, &source.part(0..1));
            let [got, _] = sealed(&pool, &mut sequence);
            let sealed = sealed_positions(sequence.len());
            let source = &source.k[sealed.start * 64..sealed.end * 64];
            got.iter().zip(source).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
        };
        for bits in [2, 4, 6] {
            let (before, after) = (error(Codec::tq_centred(bits), &plain), error(Codec::tq_centred(bits), &moved));
            assert!((after / before - 1.0).abs() < 0.15, "{device}: tq{bits}c: {after}, not {before}");
            let (before, after) = (error(Codec::tq(bits), &plain), error(Codec::tq(bits), &moved));
            assert!(after > 20.0 * before, "{device}: tq{bits} has no means");
        }
    }
}

/// Exports contain sealed and dense pages. Files without layers that seal keep version 1.
#[test]
fn exports_carry_both_kinds_of_pages() {
    for device in reference_and_devices() {
        for (codec, version) in [(Codec::tq_centred(5), "3"), (Codec::tq(5), "1")] {
            let layer = CacheLayer::new(1, DIM, codec).v(Codec::BF16);
            let spec = PoolSpec::new(vec![layer, layer.window(Some(WINDOW))], 1 << 20).page_tokens(PAGE);
            let (pool, other) = (KvPool::new(&device, &spec).unwrap(), KvPool::new(&device, &spec).unwrap());
            let tokens: Vec<u32> = (0..70).map(|at| prompt_token(0, at)).collect();
            let mut sequence = pool.sequence();
            feed(&pool, &mut sequence, &tokens[..50]);
            feed(&pool, &mut sequence, &tokens[..69]);
            let bytes = sequence.export().unwrap();
            let text = String::from_utf8_lossy(&bytes[..2000]).to_string();
            assert!(text.contains(&format!("\"version\":\"{version}\"")), "{text}");
            let mut moved = other.import(&bytes).unwrap();
            assert!(feed(&other, &mut moved, &tokens) == feed(&pool, &mut sequence, &tokens), "{device}");
            if version == "3" {
                // Pages at wrong indices: sealed ones, dense ones, and without the first page.
                for (from, to) in
                    [("first.0\":\"1", "first.0\":\"2"), ("first.1\":\"2", "first.1\":\"1"), ("kept.1", "kept.9")]
                {
                    let at = bytes.windows(from.len()).position(|part| part == from.as_bytes()).expect(from);
                    let mut lying = bytes.clone();
                    lying[at..at + to.len()].copy_from_slice(to.as_bytes());
                    let result = other.import(&lying);
                    assert!(matches!(result, Err(Error::File { .. })), "{device}: {to}: {result:?}");
                }
            }
            let plain = if version == "3" { Codec::tq(5) } else { Codec::tq_centred(5) };
            let layer = layer.k(plain);
            let spec = PoolSpec::new(vec![layer, layer.window(Some(WINDOW))], 1 << 20).page_tokens(PAGE);
            let wrong = KvPool::new(&device, &spec).unwrap().import(&bytes);
            assert!(matches!(wrong, Err(Error::File { .. })), "{device}");
        }
    }
}
