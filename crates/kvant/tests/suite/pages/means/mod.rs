//! Codecs with page means: which mean a page gets, what is stored around it, and attention over both.

mod attention;
mod decode;
mod shared;

use super::tokens::{DIM, WINDOW, feed, prompt_token};
use crate::common::{
    Out, Rng, devices, input,
    layers::{self, CENTRED_CODECS, GAUSSIAN_MSE, Source},
    nmse, run, sees_indices,
};
use kvant::{
    CacheLayer, Codec, DType, Device, DeviceKind, Error, KvPool, PoolSpec, Sequence, Step,
    ops::{self, Angles, HeadNorm, KvSide, NormRopeWrite, Rope},
};

const PAGE: usize = 16;

/// The reference, and the devices of this case.
fn reference_and_devices() -> Vec<Device> {
    [Device::reference()].into_iter().chain(devices().iter().cloned()).collect()
}

/// A pool with room for so many tokens: not more, since msl-host compares all memory that a launch may write.
fn pool_of(device: &Device, layer: CacheLayer, tokens: usize) -> KvPool {
    let spec = PoolSpec::new(vec![layer], 0).page_tokens(PAGE).room_for(1, tokens, tokens).unwrap();
    KvPool::new(device, &spec).unwrap()
}

fn pool(device: &Device, heads: usize, dim: usize, codec: Codec) -> KvPool {
    pool_of(device, CacheLayer::new(heads, dim, codec), 25 * PAGE)
}

/// Normal vectors around a vector of each head whose coordinates are `size`.
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

/// The bytes of the mean of each page of the step's first sequence: keys of the first head.
fn means(pool: &KvPool, step: &Step) -> Vec<Option<Vec<u8>>> {
    let layer = pool.layer(0).unwrap();
    let dim = layer.spec().head_dim;
    let (_, plane) = layer.k().tensors().find(|(name, _)| *name == "means").expect("the codec is centred");
    let table = step.page_tables()[0].to_vec::<u32>().unwrap();
    let width = step.page_tables()[0].shape()[1];
    let mean = |&entry: &u32| {
        let first = entry as usize * 256;
        (entry != Step::INACTIVE).then(|| plane.rows(first..first + dim + 4).unwrap().to_vec::<u8>().unwrap())
    };
    table[..width].iter().map(mean).collect()
}

/// ‖a − b‖/‖a‖ of two stored means.
fn distance(a: &Option<Vec<u8>>, b: &Option<Vec<u8>>) -> f64 {
    let decoded = |mean: &Option<Vec<u8>>| -> Vec<f64> {
        let (codes, scale) = mean.as_ref().expect("the page is held").split_last_chunk::<4>().expect("four bytes");
        codes.iter().map(|&code| f64::from(i8::from_le_bytes([code])) * f64::from(f32::from_le_bytes(*scale))).collect()
    };
    let (a, b) = (decoded(a), decoded(b));
    let length = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    length(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / length(&mut a.iter().copied())
}

/// Which mean a page gets depends on how much of it the step fills, and on the page before.
#[test]
fn pages_get_means_by_the_policy() {
    for device in reference_and_devices() {
        let pool = pool(&device, 2, 64, Codec::tq_centred(4));
        let mut rng = Rng::of("policy");
        let data = around(&mut rng, 100, 2, 64, 3.0);
        // Whole pages: each its own, and the last one, which is not full, that of the previous one's stored vectors:
        // nearly the previous one's.
        let mut sequence = pool.sequence();
        let step = append(&pool, &mut sequence, &data.part(0..2 * PAGE + 3));
        let at_once = means(&pool, &step);
        assert_ne!(at_once[0], at_once[1], "{device}");
        assert!(distance(&at_once[2], &at_once[1]) < 0.05, "{device}");
        assert!(distance(&at_once[2], &at_once[0]) > 0.05, "{device}");
        // Tokens that follow change no mean.
        for at in 2 * PAGE + 3..3 * PAGE {
            let step = append(&pool, &mut sequence, &data.part(at..at + 1));
            assert_eq!(means(&pool, &step), at_once, "{device}: position {at}");
        }
        // A page opened by one token gets the mean of what the page before stores, not of what that was opened with.
        let step = append(&pool, &mut sequence, &data.part(3 * PAGE..3 * PAGE + 1));
        let opened = means(&pool, &step);
        assert_eq!(opened[..3], at_once[..], "{device}");
        let mut alone = pool.sequence();
        let third = means(&pool, &append(&pool, &mut alone, &data.part(2 * PAGE..3 * PAGE)));
        assert!(distance(&opened[3], &third[0]) < 0.05, "{device}");
        assert!(distance(&opened[3], &at_once[2]) > 0.05, "{device}");
        // A roll-back into a page keeps its mean. One to its first position opens it again.
        sequence.truncate(PAGE + 5).unwrap();
        let step = append(&pool, &mut sequence, &data.part(50..52));
        assert_eq!(means(&pool, &step), at_once[..2], "{device}");
        sequence.truncate(PAGE).unwrap();
        let step = append(&pool, &mut sequence, &data.part(50..52));
        let reopened = means(&pool, &step);
        assert_eq!(reopened[0], at_once[0], "{device}");
        assert!(distance(&reopened[1], &at_once[0]) < 0.05, "{device}");
        sequence.truncate(PAGE).unwrap();
        let step = append(&pool, &mut sequence, &data.part(50..50 + PAGE));
        assert!(distance(&means(&pool, &step)[1], &at_once[0]) > 0.05, "{device}: the step fills the page");
        // The first page has no page before: the mean of what is there.
        let mut other = pool.sequence();
        let first = means(&pool, &append(&pool, &mut other, &data.part(0..3)));
        let mut longer = pool.sequence();
        assert_ne!(first, means(&pool, &append(&pool, &mut longer, &data.part(0..4))), "{device}");
        let grown = means(&pool, &append(&pool, &mut other, &data.part(3..2 * PAGE + 3)));
        assert_eq!(grown[0], first[0], "{device}: stays");
        assert_eq!(grown[1..], at_once[1..], "{device}: whole, and the mean of what that stores");
        // Chunks of whole pages give what one step gives.
        let mut chunked = pool.sequence();
        append(&pool, &mut chunked, &data.part(0..PAGE));
        let step = append(&pool, &mut chunked, &data.part(PAGE..2 * PAGE + 3));
        assert_eq!(means(&pool, &step), at_once, "{device}");
    }
}

/// A page that a window has passed is no previous page.
#[test]
fn a_window_of_one_token_leaves_no_previous_page() {
    for device in reference_and_devices() {
        let layer = CacheLayer::new(1, 64, Codec::tq_centred(4)).window(Some(1));
        let pool = pool_of(&device, layer, 4 * PAGE);
        let data = around(&mut Rng::of("passed"), PAGE + 1, 1, 64, 3.0);
        let mut sequence = pool.sequence();
        let before = means(&pool, &append(&pool, &mut sequence, &data.part(0..PAGE)));
        let after = means(&pool, &append(&pool, &mut sequence, &data.part(PAGE..PAGE + 1)));
        assert_eq!(after[0], None, "{device}: passed");
        assert!(after[1].is_some() && after[1] != before[0], "{device}");
    }
}

/// A fork shares the mean with the page, and its copy of the page has the mean, too.
#[test]
fn forks_share_means() {
    for device in reference_and_devices() {
        let pool = pool(&device, 1, 64, Codec::tq_centred(4));
        let data = around(&mut Rng::of("forks"), 60, 1, 64, 3.0);
        let mut a = pool.sequence();
        let before = means(&pool, &append(&pool, &mut a, &data.part(0..PAGE + 5)));
        let mut b = a.fork();
        let of_a = means(&pool, &append(&pool, &mut a, &data.part(30..32)));
        let of_b = means(&pool, &append(&pool, &mut b, &data.part(40..42)));
        assert_eq!((&of_a, &of_b), (&before, &before), "{device}");
        // Each reads what it wrote.
        for (sequence, own) in [(&mut a, 30..32), (&mut b, 40..42)] {
            let step = pool.step(&mut [(sequence, 0)]).unwrap();
            let got = layers::read_paged(pool.layer(0).unwrap(), KvSide::K, &step, 0, PAGE + 5..PAGE + 7).unwrap();
            assert!(nmse(&got, &data.part(own).k) < 0.02, "{device}");
        }
    }
}

/// Keys and values of every codec, page by page and token by token, are as far from the source as theory says.
#[test]
fn what_is_stored_has_the_optimal_distortion() {
    for (dim, heads) in [(64, 3), (256, 2), (512, 1)] {
        for device in reference_and_devices() {
            for (bits, optimum) in GAUSSIAN_MSE {
                let pool = pool(&device, heads, dim, Codec::tq_centred(bits));
                let mut rng = Rng::of((bits * 1000) as usize + dim);
                let tokens = 6 * PAGE + 7;
                let data = around(&mut rng, tokens, heads, dim, 5.0);
                let mut sequence = pool.sequence();
                append(&pool, &mut sequence, &data.part(0..4 * PAGE));
                for at in 4 * PAGE..tokens {
                    append(&pool, &mut sequence, &data.part(at..at + 1));
                }
                let step = pool.step(&mut [(&mut sequence, 0)]).unwrap();
                for (side, source) in [(KvSide::K, &data.k), (KvSide::V, &data.v)] {
                    let got = layers::read_paged(pool.layer(0).unwrap(), side, &step, 0, 0..tokens).unwrap();
                    // Relative to the variance around the common part. A page that decode opens has the deviation of
                    // another page's mean, a sixteenth, on top.
                    let error: f64 = got.iter().zip(source).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                    let ratio = error / got.len() as f64 / (optimum / (1.0 - optimum));
                    assert!((0.7..1.3).contains(&ratio), "{device}: tq{bits}c, D {dim}: {ratio}");
                }
            }
        }
    }
}

/// The tokens of a step may come in any order, and in any number of threads' hands.
#[test]
fn the_order_of_tokens_does_not_matter() {
    for device in reference_and_devices() {
        let pool = pool(&device, 2, 64, Codec::tq_centred(5));
        let data = around(&mut Rng::of("order"), 5 * PAGE + 9, 2, 64, 3.0);
        let tokens = data.tokens();
        let mut a = pool.sequence();
        let in_order = append(&pool, &mut a, &data);
        let want = layers::read_paged(pool.layer(0).unwrap(), KvSide::K, &in_order, 0, 0..tokens).unwrap();
        let mut b = pool.sequence();
        let step = pool.step(&mut [(&mut b, tokens)]).unwrap();
        let mut order: Vec<usize> = (0..tokens).collect();
        Rng::of("shuffle").shuffle(&mut order);
        let shuffled = step.select(&order).unwrap();
        layers::write(pool.layer(0).unwrap(), &data.gather(&order), DType::F32, &shuffled).unwrap();
        assert_eq!(means(&pool, &step), means(&pool, &in_order), "{device}");
        let got = layers::read_paged(pool.layer(0).unwrap(), KvSide::K, &step, 0, 0..tokens).unwrap();
        assert!(got == want, "{device}");
    }
}

/// A vector that is not finite touches no other: the rest is stored as if it were not there.
#[test]
fn vectors_that_are_not_finite_touch_no_other() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for device in reference_and_devices() {
            let pool = pool(&device, 2, 64, Codec::tq_centred(4));
            let data = around(&mut Rng::of("not finite"), 10, 2, 64, 3.0);
            // Head 1 of token 4.
            let (token, at) = (4, (4 * 2 + 1) * 64);
            let mut damaged = data.clone();
            damaged.k[at + 7] = bad;
            damaged.v[at] = bad;
            let mut sequence = pool.sequence();
            let step = append(&pool, &mut sequence, &damaged);
            // The same step without the token.
            let mut without = pool.sequence();
            let all = pool.step(&mut [(&mut without, 10)]).unwrap();
            let rest: Vec<usize> = (0..10).filter(|&i| i != token).collect();
            let selected = all.select(&rest).unwrap();
            layers::write(pool.layer(0).unwrap(), &data.gather(&rest), DType::F32, &selected).unwrap();
            for side in [KvSide::K, KvSide::V] {
                let read = |step| layers::read_paged(pool.layer(0).unwrap(), side, step, 0, 0..10).unwrap();
                let (got, want) = (read(&step), read(&all));
                for i in rest.iter().copied() {
                    // Head 1, whose page's mean leaves the vector out.
                    let row = (i * 2 + 1) * 64..(i * 2 + 2) * 64;
                    assert!(got[row.clone()] == want[row], "{device}: {bad} in token {token}, token {i}");
                }
                assert!(got[at..at + 64].iter().all(|x| x.is_nan()), "{device}");
                let other = &got[(token * 2) * 64..(token * 2 + 1) * 64];
                assert!(other.iter().all(|x| x.is_finite()), "{device}: the other head");
            }
        }
    }
}

/// A page without a finite vector has a mean of zeros.
#[test]
fn means_of_nothing_are_zeros() {
    for device in reference_and_devices() {
        for x in [f32::NAN, 0.0] {
            let pool = pool(&device, 1, 64, Codec::tq_centred(3));
            let source = Source { k: vec![x; 64], v: vec![x; 64], heads: 1, dim: 64 };
            let mut sequence = pool.sequence();
            let step = append(&pool, &mut sequence, &source);
            assert_eq!(means(&pool, &step)[0], Some(vec![0; 68]), "{device}");
            let got = layers::read_paged(pool.layer(0).unwrap(), KvSide::K, &step, 0, 0..1).unwrap();
            assert!(got.iter().all(|&y| y.is_nan() == x.is_nan() && (x.is_nan() || y == 0.0)), "{device}: {got:?}");
        }
    }
}

/// What a device writes is what the reference writes, except that a coordinate next to a threshold may fall to its
/// other side; and the fused operation writes it, too.
#[test]
fn devices_write_what_the_reference_writes() {
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
        for (j, dim) in [8, 64, 128, 512].into_iter().enumerate() {
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

/// A step with gaps opens several pages of a sequence without filling them: each gets the mean of what the page before
/// stores, which the same step has written around the mean of the page before that.
#[test]
fn a_step_with_gaps_opens_pages_in_order() {
    let tokens = 6 * PAGE;
    // Of each page but the fourth a token is missing, and of the fifth the first: it is not opened.
    let missing = |at: usize| at % PAGE == [5, 9, 2, PAGE, 0, 3][at / PAGE];
    let written: Vec<usize> = (0..tokens).filter(|&at| !missing(at)).collect();
    let store = |device: &Device, dim: usize, shuffled: bool| {
        let layer = CacheLayer::new(2, dim, Codec::tq_centred(5)).v(Codec::F16);
        let pool = pool_of(device, layer, tokens + PAGE);
        layers::fill(pool.layer(0).unwrap(), 0).unwrap();
        let data = around(&mut Rng::of(format!("gaps {dim}")), tokens, 2, dim, 3.0);
        let mut sequence = pool.sequence();
        let step = pool.step(&mut [(&mut sequence, tokens)]).unwrap();
        let mut order = written.clone();
        if shuffled {
            Rng::of("shuffle").shuffle(&mut order);
        }
        let part = step.select(&order).unwrap();
        layers::write(pool.layer(0).unwrap(), &data.gather(&order), DType::F32, &part).unwrap();
        let read = |side| layers::read_paged(pool.layer(0).unwrap(), side, &step, 0, 0..tokens).unwrap();
        (means(&pool, &step), read(KvSide::K), read(KvSide::V))
    };
    for device in reference_and_devices() {
        for dim in [64, 512] {
            let (want_means, want_k, want_v) = store(&Device::reference(), dim, false);
            for shuffled in [false, true] {
                let (got_means, k, v) = store(&device, dim, shuffled);
                for (page, (got, want)) in got_means.iter().zip(&want_means).enumerate() {
                    // Nobody has opened the fifth page: its mean is the zeros that were there.
                    let same = if page == 4 { got == want } else { distance(got, want) < 0.01 };
                    assert!(same, "{device}: D {dim}, page {page}");
                }
                assert!(nmse(&k, &want_k) < 1e-4, "{device}: D {dim}: {}", nmse(&k, &want_k));
                assert!(v == want_v, "{device}: D {dim}: the other side");
            }
        }
    }
}

/// Many rows of 16-bit numbers, for which CUDA has another kernel, in steps that end within a page.
#[test]
fn many_rows_are_stored_as_the_reference_stores_them() {
    let centred = Codec::tq_centred;
    let cases = [
        (128, DType::BF16, centred(4), centred(8)),
        (256, DType::F16, centred(3), Codec::F16),
        (512, DType::BF16, centred(6), centred(5)),
    ];
    for (dim, dtype, k, v) in cases {
        for device in devices() {
            // Enough for every multiprocessor; elsewhere once more tokens in a step than a threadgroup has threads.
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
                (means(&pool, &step), [read(KvSide::K), read(KvSide::V)])
            };
            let (want_means, want) = store(&Device::reference());
            let (got_means, got) = store(device);
            for (page, (got, want)) in got_means.iter().zip(&want_means).enumerate() {
                assert!(distance(got, want) < 0.01, "{device}: D {dim}, page {page}");
            }
            for (got, want) in got.iter().zip(&want) {
                assert!(nmse(got, want) < 1e-4, "{device}: D {dim}: {}", nmse(got, want));
            }
        }
    }
}

/// Steps that mix prompts, drafts and decode of many sequences, of which pages begin anywhere among the tokens.
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

/// The fused operation stores normed and rotated keys around their own mean.
#[test]
fn fused_writes_store_around_the_mean_of_what_they_write() {
    let (heads, dim, tokens) = (2, 128, 2 * PAGE + 3);
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
        let read = |side| layers::read_paged(layer, side, &step, 0, 0..tokens).unwrap();
        (means(&pool, &step), [read(KvSide::K), read(KvSide::V)])
    };
    let counts: [&[usize]; 3] = [&[tokens], &[PAGE, PAGE + 3], &[PAGE - 1, 1, 1, PAGE + 2]];
    for counts in counts {
        let (want_means, want) = store(&Device::reference(), counts);
        for device in reference_and_devices() {
            let (got_means, got) = store(&device, counts);
            for (got, want) in got_means.iter().zip(&want_means) {
                assert!(distance(got, want) < 0.01, "{device}: {counts:?}");
            }
            for (got, want) in got.iter().zip(&want) {
                assert!(nmse(got, want) < 1e-4, "{device}: {counts:?}: {}", nmse(got, want));
            }
        }
    }
}

/// Tokens whose positions have no angles are skipped, and fill no page.
#[test]
fn positions_without_angles_count_for_no_mean() {
    let (dim, tokens, known) = (64, 2 * PAGE, PAGE + 4);
    for device in reference_and_devices().iter().filter(|device| !sees_indices(device)) {
        let store = |selected: usize| {
            let pool = pool(device, 2, dim, Codec::tq_centred(4));
            let layer = pool.layer(0).unwrap();
            layers::fill(layer, 0).unwrap();
            let data = around(&mut Rng::of("angles"), tokens, 2, dim, 2.0).part(0..selected);
            let mut sequence = pool.sequence();
            let whole = pool.step(&mut [(&mut sequence, tokens)]).unwrap();
            let step = whole.select(&(0..selected).collect::<Vec<_>>()).unwrap();
            let x = |values: &[f32]| input(device, DType::F32, values, &[selected, 2, dim]).unwrap();
            let (k, v) = (x(&data.k), x(&data.v));
            let table = |x: f32| input(device, DType::F32, &vec![x; known * dim / 2], &[known, dim / 2]).unwrap();
            let (cos, sin) = (table(0.8), table(0.6));
            let q_out = Out::new(device, DType::F32, &[selected, 2, dim]).unwrap();
            let rope = Rope::new(Angles::Tables { cos: &cos, sin: &sin }, dim / 2);
            let args = NormRopeWrite::new(&k, &k, &v, &step, layer, &q_out.tensor).rope(Some(rope));
            run(device, |enc| ops::norm_rope_write(enc, &args)).unwrap();
            let read = |side| layers::read_paged(layer, side, &whole, 0, 0..tokens).unwrap();
            (means(&pool, &whole), read(KvSide::K), read(KvSide::V))
        };
        assert!(store(tokens) == store(known), "{device}");
    }
}

/// A part that all keys of a page have in common changes no softmax, and with page means no error either.
#[test]
fn a_constant_in_all_keys_costs_nothing() {
    for device in reference_and_devices() {
        let mut rng = Rng::of("constant");
        let plain = around(&mut rng, 64, 1, 64, 0.0);
        let moved = around(&mut Rng::of("constant"), 64, 1, 64, 8.0);
        let error = |codec: Codec, source: &Source| {
            let pool = pool(&device, 1, 64, codec);
            let mut sequence = pool.sequence();
            append(&pool, &mut sequence, source);
            let step = pool.step(&mut [(&mut sequence, 0)]).unwrap();
            let got = layers::read_paged(pool.layer(0).unwrap(), KvSide::K, &step, 0, 0..64).unwrap();
            got.iter().zip(&source.k).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
        };
        for bits in [2, 4, 6] {
            let (before, after) = (error(Codec::tq_centred(bits), &plain), error(Codec::tq_centred(bits), &moved));
            assert!((after / before - 1.0).abs() < 0.15, "{device}: tq{bits}c: {after}, not {before}");
            let (before, after) = (error(Codec::tq(bits), &plain), error(Codec::tq(bits), &moved));
            assert!(after > 20.0 * before, "{device}: tq{bits} has no means");
        }
    }
}

/// Exported pages carry their means. Files without centred layers keep version 1.
#[test]
fn exports_carry_means() {
    for device in reference_and_devices() {
        for (codec, version) in [(Codec::tq_centred(5), "2"), (Codec::tq(5), "1")] {
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
            let plain = if version == "2" { Codec::tq(5) } else { Codec::tq_centred(5) };
            let layer = layer.k(plain);
            let spec = PoolSpec::new(vec![layer, layer.window(Some(WINDOW))], 1 << 20).page_tokens(PAGE);
            let wrong = KvPool::new(&device, &spec).unwrap().import(&bytes);
            assert!(matches!(wrong, Err(Error::File { .. })), "{device}");
        }
    }
}
