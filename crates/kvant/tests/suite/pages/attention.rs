//! Attention over pages agrees with the reference.

use super::case::{CASE, Case, Filled};
use crate::common::{
    devices,
    layers::{self, CODECS},
    one_in,
};
use kvant::{CacheLayer, Codec, DType, Device, DeviceKind, HeadOrder, KvLayer, LayerSpec, Step};

#[test]
fn every_page_size() {
    for page_tokens in [16, 32, 64, 128, 256] {
        for sequences in [vec![(300, 1), (0, 1), (17, 1)], vec![(40, 20), (255, 1), (16, 16), (3, 0)], vec![(0, 130)]] {
            for (k, v) in [(Codec::F16, Codec::F32), (Codec::tq(4), Codec::tq(8))] {
                Case { page_tokens, sequences: sequences.clone(), k, v, ..CASE }.check();
            }
        }
    }
}

#[test]
fn every_codec_and_head_size() {
    for head_dim in [64, 128, 256, 512] {
        for codec in CODECS {
            for sequences in [vec![(70, 1), (33, 1)], vec![(35, 9)]] {
                Case { head_dim, k: codec, v: codec, sequences, ..CASE }.check();
            }
        }
    }
}

/// Enough sequences that each block of CUDA processes one token and KV head; two blocks fit on a multiprocessor.
#[test]
fn many_sequences() {
    let sequences: Vec<(usize, usize)> = (0..34).map(|i| ([0, 1, 15, 16, 17, 63, 64, 100, 130][i % 9], 1)).collect();
    for (head_dim, codec, window) in [(128, Codec::tq(4), None), (256, Codec::tq(4), Some(50))] {
        let (sequences, dtype) = (sequences.clone(), DType::BF16);
        Case { head_dim, kv_heads: 8, k: codec, v: codec, dtype, window, sequences, ..CASE }.check();
    }
}

/// Head sizes that are not powers of two, over dense caches.
#[test]
fn other_head_sizes() {
    for (i, head_dim) in [80, 96, 112, 192].into_iter().enumerate() {
        for codec in [Codec::F32, Codec::F16, Codec::BF16] {
            for sequences in [vec![(70, 1), (33, 1)], vec![(35, 9)], vec![(20, 70)]] {
                let window = [None, Some(40)][i % 2];
                Case { head_dim, k: codec, v: codec, sequences, window, page_tokens: 16 << (i % 3), ..CASE }.check();
            }
        }
    }
}

/// More query heads of a KV head than a decode kernel processes at once.
#[test]
fn large_groups() {
    for (i, codec) in CODECS.into_iter().enumerate() {
        let (group, head_dim) = ([10, 9, 16, 15][i % 4], [128, 256, 512][i / 3 % 3]);
        let (dtype, sequences) = (DType::BF16, vec![(70, 1), (133, 1)]);
        Case { group, head_dim, k: codec, v: codec, dtype, sequences, ..CASE }.check();
    }
}

#[test]
fn windows_pass_pages() {
    for window in [1, 5, 16, 17, 40, 1000] {
        for sequences in [vec![(100, 1), (16, 1), (0, 1)], vec![(90, 30), (5, 3)]] {
            for codec in [Codec::BF16, Codec::tq(6)] {
                Case { window: Some(window), k: codec, v: codec, sequences: sequences.clone(), ..CASE }.check();
            }
        }
    }
}

/// Decode and prompts that CUDA's fast kernels accept: queries, cache and output in 16 bits.
#[test]
fn sixteen_bits() {
    let mut cases = Vec::new();
    for (dtype, head_dim) in [(DType::F16, 64), (DType::BF16, 128), (DType::F16, 256), (DType::BF16, 512)] {
        let codec = Codec::Dense(dtype);
        let case = Case { head_dim, dtype, ..CASE };
        for page_tokens in [16, 64] {
            for sequences in [vec![(500, 1), (100, 1)], vec![(1100, 1)], vec![(60, 90)]] {
                // The long sequences test the kernels, which do not depend on every pair of head size and page size.
                if sequences.len() == 1 && (head_dim > 128) != (page_tokens == 64) {
                    continue;
                }
                let case = Case { page_tokens, sequences, ..case.clone() };
                cases.push(Case { k: codec, v: codec, group: 4, ..case.clone() });
                cases.push(Case { k: Codec::tq(4), v: Codec::tq(5), ..case });
            }
        }
    }
    one_in(3, |case| case.head_dim.to_string(), cases).iter().for_each(Case::check);
}

/// Prompts over quantised pages, which CUDA decodes first: of several sequences, after decode rows, with windows.
#[test]
fn quantised_prompts() {
    let (tq, centred, bf16) = (Codec::tq, Codec::tq_centred, Codec::BF16);
    let pairs = [
        (tq(4), tq(4)),
        (tq(8), tq(5)),
        (bf16, tq(6)),
        (tq(3), bf16),
        (tq(2), tq(8)),
        (centred(4), centred(4)),
        (centred(8), tq(3)),
        (tq(6), centred(2)),
    ];
    // Other devices have no special kernel for these.
    let has_cuda = devices().iter().any(|device| device.kind() == DeviceKind::Cuda);
    for (i, (k, v)) in pairs.into_iter().enumerate() {
        for (j, head_dim) in [64, 128, 256, 512].into_iter().enumerate() {
            if !has_cuda && (i * 4 + j) % 7 != 0 {
                continue;
            }
            let sequences =
                [vec![(5, 70)], vec![(300, 1), (90, 66), (0, 0), (3, 40)], vec![(700, 65)], vec![(0, 130), (33, 64)]];
            let (sequences, window) =
                (sequences[(i + j) % 4].clone(), [None, Some(50), None, Some(16)][(i + j / 2) % 4]);
            let (page_tokens, dtype) = ([16, 64, 32, 128][(i + 3 * j) % 4], DType::BF16);
            let seals = k.is_centred() || v.is_centred();
            let q_rotated = k.is_quantised() && !seals && (i + j) % 3 == 0;
            Case { head_dim, k, v, dtype, page_tokens, window, q_rotated, sequences, ..CASE }.check();
        }
    }
}

#[test]
fn the_reference_computes_the_same_over_pages_and_over_slots() {
    let device = Device::reference();
    for window in [None, Some(20)] {
        for codec in CODECS {
            let case = Case { window, k: codec, v: codec, sequences: vec![(50, 3), (10, 1)], ..CASE };
            let source = case.source();
            let Filled { pool, step, new, sequences } = case.filled(&device, &source).unwrap();
            layers::write(pool.layer(1).unwrap(), &source.gather(&new), DType::F32, &step).unwrap();
            let paged = case.attend(pool.layer(1).unwrap(), &step).unwrap().bytes().unwrap();

            let (ring, order) = (false, HeadOrder::HeadMajor);
            let CacheLayer { kv_heads, head_dim, window, k, v, .. } = case.layer();
            let spec =
                LayerSpec::new(kv_heads, head_dim, 60, k).sequences(2).v(v).window(window).ring(ring).order(order);
            let layer = KvLayer::new(&device, spec).unwrap();
            let all: Vec<(u32, u32)> = (0..53).map(|p| (0, p)).chain((0..11).map(|p| (1, p))).collect();
            let written = Step::new(&device, 2, &all).unwrap();
            layers::write(&layer, &source, DType::F32, &written).unwrap();
            let slots = Step::new(&device, 2, &[(0, 50), (0, 51), (0, 52), (1, 10)]).unwrap();
            assert!(case.attend(&layer, &slots).unwrap().bytes().unwrap() == paged, "{codec}, window {window:?}");
            drop(sequences);
        }
    }
}

/// Enough keys that a CPU task has several KV heads in turn: all of them, or eight and three. Over slots, each head is
/// a separate task, with equal tiles in equal order.
#[test]
fn the_cpu_computes_the_same_over_long_contexts_in_pages_and_in_slots() {
    let tq = Codec::tq;
    let cases = [
        (3, Codec::F16, Codec::BF16, vec![(4200, 1), (200, 1)]),
        (11, tq(4), tq(8), vec![(4099, 3)]),
        (2, tq(3), Codec::F32, vec![(40, 2), (5000, 2)]),
    ];
    for (kv_heads, k, v, sequences) in cases {
        let case = Case { page_tokens: 64, kv_heads, k, v, sequences, ..CASE };
        let source = case.source();
        for device in devices().iter().filter(|device| device.kind() == DeviceKind::Cpu) {
            let Filled { pool, step, new, sequences } = case.filled(device, &source).unwrap();
            let paged = pool.layer(1).unwrap();
            layers::write(paged, &source.gather(&new), DType::F32, &step).unwrap();

            let lens = || case.sequences.iter().map(|&(past, new)| (past as u32, (past + new) as u32));
            let capacity = lens().map(|(_, len)| len).max().unwrap() as usize;
            let spec = LayerSpec::new(kv_heads, case.head_dim, capacity, k).v(v).sequences(2);
            let layer = KvLayer::new(device, spec).unwrap();
            let all: Vec<(u32, u32)> =
                (0..).zip(lens()).flat_map(|(s, (_, len))| (0..len).map(move |p| (s, p))).collect();
            layers::write(&layer, &source, DType::F32, &Step::new(device, 2, &all).unwrap()).unwrap();
            let last: Vec<(u32, u32)> =
                (0..).zip(lens()).flat_map(|(s, (past, len))| (past..len).map(move |p| (s, p))).collect();
            let slots = Step::new(device, 2, &last).unwrap();
            for splits in [Some(1), Some(3)] {
                let [over_pages, over_slots] = [(paged, &step), (&layer, &slots)]
                    .map(|(layer, step)| case.attend_in(layer, step, splits).unwrap().bytes().unwrap());
                assert!(over_pages == over_slots, "{device}: {case:?}, {splits:?} splits");
            }
            drop(sequences);
        }
    }
}
