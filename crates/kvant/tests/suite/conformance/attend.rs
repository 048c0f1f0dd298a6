//! attend against the reference over the same cache bytes.

use std::collections::HashSet;

use crate::common::{
    FLOATS, Rng,
    attention::Case,
    devices,
    layers::CODECS,
    leaves_out, limited, on_threads, one_in,
    without_gpu::{self, Model},
};
use kvant::{Codec, DType, DeviceKind, HeadOrder};

const HEAD_DIMS: [usize; 4] = [64, 128, 256, 512];
/// Head sizes that are not powers of two, which support only dense caches.
const OTHER_HEAD_DIMS: [usize; 4] = [80, 96, 112, 192];
const GROUPS: [usize; 4] = [1, 2, 3, 8];

/// Lengths around the sizes at which kernels split a context.
#[test]
fn contexts_and_batches() {
    for past in [0, 1, 2, 63, 64, 65, 200] {
        for new in [1, 2, 5, 33] {
            Case { kv_heads: 2, group: 2, sequences: vec![(past, new)], ..Case::default() }.check();
        }
    }
}

#[test]
fn head_sizes_and_ratios() {
    for head_dim in HEAD_DIMS {
        for group in GROUPS {
            for (sequences, kv_heads) in [(vec![(65, 1)], 1), (vec![(12, 5)], 2), (vec![(0, 33)], 1)] {
                Case { head_dim, group, kv_heads, sequences, ..Case::default() }.check();
            }
        }
    }
}

/// The factors that [`other_head_sizes`] varies: options, batches, query heads of a KV head, head size, K, V, dtype of
/// q, dtype of out.
const OTHER_FACTORS: [usize; 8] = [9, 6, 4, 4, 3, 3, 3, 3];

/// A head size that is not a power of two, with decode, verification, prompts and all options.
fn other_head_size(choice: [usize; 8]) -> Case {
    let [besides, batch, group, head_dim, k, v, q, out] = choice;
    let batches: [Vec<(usize, usize)>; 6] = [
        vec![(70, 1)],
        vec![(300, 1), (0, 1), (17, 1)],
        vec![(30, 4)],
        vec![(3, 70)],
        vec![(0, 33), (64, 1), (5, 0), (33, 3)],
        vec![(500, 2)],
    ];
    let plain = Case {
        head_dim: OTHER_HEAD_DIMS[head_dim],
        kv_heads: if GROUPS[group] < 8 { 2 } else { 1 },
        group: GROUPS[group],
        k: Codec::Dense(FLOATS[k]),
        v: Codec::Dense(FLOATS[v]),
        q: FLOATS[q],
        out: FLOATS[out],
        sequences: batches[batch].clone(),
        ..Case::default()
    };
    match besides {
        0 => plain,
        1 => Case { ring: Some(50), ..plain },
        2 => Case { window: Some(40), ..plain },
        3 => Case { softcap: Some(4.0), scale: 0.5, ..plain },
        4 => Case { sinks: true, ..plain },
        5 => Case { order: HeadOrder::TokenMajor, ..plain },
        6 => Case { splits: Some(3), ..plain },
        7 => Case { splits: Some(1), source: DType::BF16, ..plain },
        _ => Case { ring: Some(90), window: Some(33), softcap: Some(30.0), sinks: true, splits: Some(7), ..plain },
    }
}

#[test]
fn other_head_sizes() {
    let cases: Vec<Case> = pairwise(OTHER_FACTORS).into_iter().map(other_head_size).collect();
    println!("{} cases", cases.len());
    on_threads(&cases, |case| {
        comes_to(case, "attend_generic");
        case.check();
    });
}

/// A value that is not finite affects only tokens that see it, in the last coordinates as well.
#[test]
fn other_head_sizes_with_values_that_are_not_finite() {
    for (i, head_dim) in OTHER_HEAD_DIMS.into_iter().enumerate() {
        let k = Codec::Dense(FLOATS[i % 3]);
        for sequences in [vec![(40, 1), (70, 1)], vec![(20, 40)]] {
            let case =
                Case { head_dim, kv_heads: 2, group: 2, k, v: k, window: Some(20), sequences, ..Case::default() };
            check_not_finite(&case, 11, 1);
        }
    }
}

/// Keys and values of every pair of codecs, at every head size.
#[test]
fn codec_pairs() {
    let mut cases = Vec::new();
    for (d, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        for (i, k) in CODECS.into_iter().enumerate() {
            for (j, v) in CODECS.into_iter().enumerate() {
                let case = Case { head_dim, k, v, group: 2, sequences: vec![(37, 2)], ..Case::default() };
                cases.push(((d + i + j) % 3, case));
            }
        }
    }
    // A third of the cases, which covers every pair of codecs, and every codec at every head size.
    if leaves_out() {
        cases.retain(|(third, _)| *third == 0);
    }
    on_threads(&one_in(1, |(_, case)| case.head_dim.to_string(), cases), |(_, case)| case.check());
}

#[test]
fn activation_dtypes() {
    for source in FLOATS {
        for q in FLOATS {
            for out in FLOATS {
                let case = Case { source, q, out, kv_heads: 3, group: 2, ..Case::default() };
                Case { k: Codec::F16, v: Codec::BF16, sequences: vec![(66, 1)], ..case.clone() }.check();
                Case { k: Codec::tq(4), v: Codec::tq(6), sequences: vec![(20, 5)], head_dim: 128, ..case.clone() }
                    .check();
                Case { sequences: vec![(20, 5)], sinks: true, ..case }.check();
            }
        }
    }
}

/// Sequences of different lengths, some without a new token, in one batch; their tokens interleave.
#[test]
fn several_sequences() {
    let batches: [Vec<(usize, usize)>; 4] = [
        vec![(10, 1), (0, 1), (130, 1)],
        vec![(0, 7), (64, 1), (5, 0), (33, 3)],
        vec![(0, 0), (1, 1)],
        vec![(200, 2), (3, 33), (63, 1), (0, 5), (17, 0), (1, 1)],
    ];
    for sequences in batches {
        for (k, v) in [(Codec::F32, Codec::F32), (Codec::F16, Codec::tq(8)), (Codec::tq(4), Codec::tq(5))] {
            for order in [HeadOrder::HeadMajor, HeadOrder::TokenMajor] {
                let case = Case { kv_heads: 2, group: 3, k, v, order, sequences: sequences.clone(), ..Case::default() };
                Case { window: Some(9), ring: Some(11), ..case.clone() }.check();
                case.check();
            }
        }
    }
}

/// Enough tokens and KV heads that each block of CUDA processes one of each; two blocks fit on a multiprocessor if
/// tables leave room.
#[test]
fn many_sequences() {
    // More than twice the number of an H200's multiprocessors.
    let sequences: Vec<(usize, usize)> = (0..34).map(|i| ([0, 1, 15, 16, 17, 63, 100][i % 7], 1)).collect();
    let (tq4, tq8) = (Codec::tq(4), Codec::tq(8));
    for (head_dim, group, k, v, window) in
        [(128, 2, tq4, tq4, None), (128, 1, tq8, tq4, Some(50)), (256, 2, tq4, tq4, Some(50))]
    {
        let plain = Case { head_dim, group, k, v, window, sequences: sequences.clone(), ..Case::default() };
        let (q, out) = (DType::BF16, DType::BF16);
        Case { kv_heads: 8, q, out, softcap: window.map(|_| 4.0), ..plain }.check();
    }
}

#[test]
fn windows() {
    for window in [1, 2, 7, 64, 65, 1000, usize::MAX] {
        for (past, new) in [(0, 5), (66, 1), (70, 9), (200, 33)] {
            for codec in [Codec::F32, Codec::tq(8)] {
                let sequences = vec![(past, new)];
                Case { window: Some(window), k: codec, v: codec, kv_heads: 2, group: 2, sequences, ..Case::default() }
                    .check();
            }
        }
    }
}

#[test]
fn softcaps() {
    for softcap in [0.5, 5.0, 50.0, 1e30] {
        for (k, v) in [(Codec::F32, Codec::F32), (Codec::BF16, Codec::tq(4)), (Codec::tq(6), Codec::F16)] {
            for sequences in [vec![(70, 1)], vec![(13, 6)]] {
                Case { softcap: Some(softcap), scale: 0.5, k, v, group: 2, sequences, ..Case::default() }.check();
            }
        }
    }
}

/// Scores far beyond the range of exp; a negative and a zero scale.
#[test]
fn scales() {
    for scale in [1.0, 1000.0, -1.0, 1e-30] {
        for sequences in [vec![(70, 1)], vec![(3, 20)]] {
            Case { scale, group: 2, sequences: sequences.clone(), ..Case::default() }.check();
            Case { scale, softcap: Some(30.0), k: Codec::F16, v: Codec::F16, sequences, ..Case::default() }.check();
        }
    }
}

/// Rings before, at and long after they wrap; a token of a batch longer than the ring may see nothing.
#[test]
fn rings() {
    for ring in [1, 8, 13, 64] {
        for (past, new) in [(0, 1), (ring - 1, 1), (ring, 1), (5 * ring + 3, 1), (ring + 2, 4), (3, 2 * ring + 3)] {
            for order in [HeadOrder::HeadMajor, HeadOrder::TokenMajor] {
                for window in [None, Some(6)] {
                    let ring = Some(ring);
                    let sequences = vec![(past, new)];
                    let case = Case { ring, order, window, kv_heads: 2, group: 2, sequences, ..Case::default() };
                    Case { k: Codec::tq(5), v: Codec::BF16, ..case.clone() }.check();
                    case.check();
                }
            }
        }
    }
}

/// A score without a value for each head, also for tokens that see nothing.
#[test]
fn sinks() {
    for (past, new) in [(0, 1), (0, 33), (5, 2), (64, 5), (200, 17)] {
        for (k, v) in [(Codec::F32, Codec::F32), (Codec::tq(4), Codec::tq(8)), (Codec::F16, Codec::tq(6))] {
            let case =
                Case { sinks: true, k, v, kv_heads: 2, group: 2, sequences: vec![(past, new)], ..Case::default() };
            Case { ring: Some(16), window: Some(12), ..case.clone() }.check();
            Case { ring: Some(9), head_dim: 128, ..case.clone() }.check();
            Case { splits: Some(3), ..case.clone() }.check();
            Case { softcap: Some(5.0), group: 8, ..case.clone() }.check();
            case.check();
        }
    }
    let sequences = vec![(0, 9), (30, 1), (7, 0), (12, 20)];
    Case { sinks: true, ring: Some(16), source: DType::BF16, kv_heads: 3, sequences, ..Case::default() }.check();
}

/// Decode rows before a chunk of a prompt, which GPUs run with two kernels.
#[test]
fn decode_rows_before_a_prompt() {
    for (k, v) in [(Codec::F16, Codec::F16), (Codec::tq(4), Codec::tq(8)), (Codec::F32, Codec::BF16)] {
        let sequences = vec![(70, 1), (3, 1), (200, 1), (65, 90), (0, 0), (9, 1)];
        let case = Case {
            k,
            v,
            q: DType::F16,
            out: DType::F16,
            kv_heads: 2,
            group: 4,
            head_dim: 128,
            sequences,
            ..Case::default()
        };
        let mut data = case.data();
        data.tokens.sort_by_key(|&(sequence, _)| (sequence == 3, sequence));
        case.check_data(&data);
        Case { window: Some(40), sinks: true, ..case.clone() }.check_data(&data);
    }
}

#[test]
fn rotated_queries() {
    for head_dim in HEAD_DIMS {
        for (k, v) in [(Codec::tq(4), Codec::tq(4)), (Codec::tq(8), Codec::F32), (Codec::tq(6), Codec::tq(5))] {
            for sequences in [vec![(70, 1)], vec![(4, 5), (9, 2)]] {
                Case { q_rotated: true, head_dim, k, v, kv_heads: 2, group: 2, sequences, ..Case::default() }.check();
            }
        }
    }
}

/// A key or a value that is NaN or infinite affects only the rows of tokens that see it, not others of its tile or
/// batch.
#[test]
fn not_finite_keys_and_values() {
    for (k, v) in
        [(Codec::F32, Codec::F32), (Codec::F16, Codec::BF16), (Codec::F32, Codec::tq(5)), (Codec::tq(4), Codec::F16)]
    {
        for (sequences, window) in
            [(vec![(0, 40)], Some(9)), (vec![(0, 40)], None), (vec![(20, 3)], Some(2)), (vec![(12, 8), (12, 12)], None)]
        {
            for sinks in [false, true] {
                for bad in [f32::NAN, f32::INFINITY] {
                    let sequences = sequences.clone();
                    let case = Case { k, v, group: 2, sequences, window, sinks, ..Case::default() };
                    let mut data = case.data();
                    data.source.k[11 * case.head_dim + 7] = f32::NAN;
                    for token in [9, 21] {
                        data.source.v[token * case.head_dim + 5] = bad;
                    }
                    case.check_data(&data);
                }
            }
        }
    }
}

/// A batch may be empty; it is explained, too.
#[test]
fn empty_batches_are_explained() {
    for (k, q) in [(Codec::F32, DType::F32), (Codec::BF16, DType::BF16), (Codec::tq(4), DType::BF16)] {
        for (head_dim, past) in [(128, 5), (128, 1100), (512, 5)] {
            let case = Case { head_dim, k, v: k, q, out: q, sequences: vec![(past, 0)], ..Case::default() };
            for device in devices().iter().chain([&without_gpu::device()]) {
                case.kernel(device).unwrap_or_else(|e| panic!("{device}: {case}: {e}"));
            }
            case.check();
        }
    }
}

/// Contexts split in any way, also into more parts than positions.
#[test]
fn forced_splits() {
    for splits in [1, 2, 3, 7, 64] {
        for sequences in
            [vec![(0, 1)], vec![(1, 1)], vec![(64, 1)], vec![(199, 1)], vec![(30, 5)], vec![(9, 1), (150, 2)]]
        {
            for (k, v) in [(Codec::F32, Codec::F32), (Codec::tq(4), Codec::tq(8))] {
                let splits = Some(splits);
                let case =
                    Case { splits, k, v, kv_heads: 2, group: 3, sequences: sequences.clone(), ..Case::default() };
                Case { ring: Some(16), window: Some(10), ..case.clone() }.check();
                Case { sinks: true, ..case.clone() }.check();
                case.check();
            }
        }
    }
}

/// K and V for CUDA's decode kernels: two kernels for quantised caches, two for others.
const DECODED: [(Codec, Codec); 11] = [
    (Codec::F16, Codec::F16),
    (Codec::BF16, Codec::BF16),
    (Codec::tq(4), Codec::tq(4)),
    (Codec::tq(5), Codec::tq(5)),
    (Codec::tq(6), Codec::tq(6)),
    (Codec::tq(8), Codec::tq(8)),
    (Codec::tq(8), Codec::tq(6)),
    (Codec::tq(4), Codec::tq(8)),
    (Codec::tq(2), Codec::tq(2)),
    (Codec::tq(3), Codec::tq(3)),
    (Codec::tq(3), Codec::tq(2)),
];

/// The factors that [`decode_kernels`] varies, with their numbers of values: codecs, options, past length, splits,
/// query heads of a KV head, head size, sequences, dtype of q, dtype of out.
const FACTORS: [usize; 9] = [DECODED.len(), 8, 8, 4, 4, 3, 2, 3, 2];

/// A case with one token per sequence, as CUDA's decode kernels require.
fn decoded(choice: [usize; 9]) -> Case {
    let [codecs, besides, past, splits, group, head_dim, sequences, q, out] = choice;
    let (k, v) = DECODED[codecs];
    let past = [0, 14, 15, 16, 63, 64, 199, 3000][past];
    let plain = Case {
        head_dim: HEAD_DIMS[1 + head_dim],
        kv_heads: if GROUPS[group] < 8 && past < 1000 { 2 } else { 1 },
        group: GROUPS[group],
        k,
        v,
        q: if let Codec::Dense(dtype) = k { dtype } else { FLOATS[q] },
        out: [DType::F16, DType::BF16][out],
        sequences: [vec![(past, 1)], vec![(past, 1), (past / 2 + 1, 1), (7, 1)]][sequences].clone(),
        splits: [None, Some(1), Some(7), Some(64)][splits],
        ..Case::default()
    };
    // The ring has wrapped, unless it is larger than the past.
    let ring = Some(past / 2 + 13);
    match besides {
        0 => plain,
        1 => Case { ring, ..plain },
        2 => Case { window: Some(past / 3 + 2), ..plain },
        3 => Case { softcap: Some(4.0), scale: 0.5, ..plain },
        4 => Case { sinks: true, ..plain },
        5 => Case { q_rotated: k.is_quantised(), ..plain },
        6 => Case { order: HeadOrder::TokenMajor, ..plain },
        _ => Case {
            ring,
            window: Some(past / 3 + 9),
            softcap: Some(30.0),
            sinks: true,
            order: HeadOrder::TokenMajor,
            ..plain
        },
    }
}

/// Choices such that every value of a factor meets every value of every other factor.
fn pairwise<const N: usize>(factors: [usize; N]) -> Vec<[usize; N]> {
    let pairs_of = |choice: &[usize; N]| {
        let choice = *choice;
        (0..N).flat_map(move |a| (0..a).map(move |b| (a, choice[a], b, choice[b])))
    };
    let mut rng = Rng::of("pairs");
    let mut met = HashSet::new();
    let all: usize = (0..N).flat_map(|a| (0..a).map(move |b| factors[a] * factors[b])).sum();
    let mut choices = Vec::new();
    while met.len() < all {
        // Takes the best of some candidates. The first candidate covers a missing pair.
        let a_missing = (0..N)
            .flat_map(|a| (0..a).map(move |b| (a, b)))
            .flat_map(|(a, b)| (0..factors[a]).flat_map(move |x| (0..factors[b]).map(move |y| (a, x, b, y))))
            .find(|pair| !met.contains(pair));
        let mut random = || factors.map(|values| rng.below(values));
        let mut candidates: Vec<[usize; N]> = (0..60).map(|_| random()).collect();
        if let Some((a, x, b, y)) = a_missing {
            candidates.iter_mut().for_each(|choice| (choice[a], choice[b]) = (x, y));
        }
        let new = |choice: &[usize; N]| pairs_of(choice).filter(|pair| !met.contains(pair)).count();
        let best = candidates.into_iter().max_by_key(new).expect("there are some");
        met.extend(pairs_of(&best));
        choices.push(best);
    }
    choices
}

/// Panics if CUDA selects a kernel other than the one for decode; needs no GPU.
fn is_decoded(case: &Case) {
    let longest = case.sequences.iter().map(|&(past, _)| past + 8).max().unwrap_or(0);
    let keys = case.ring.unwrap_or(longest).min(case.window.unwrap_or(usize::MAX));
    let (k, v) = (case.k, case.v);
    let has_short_rows = |codec| [3, 5].map(Codec::tq).contains(&codec);
    let is_small = |codec| [2, 3].map(Codec::tq).contains(&codec);
    let has_room = match case.head_dim {
        64 => !has_short_rows(k) && !has_short_rows(v),
        512 => k.is_quantised() && (k == v || is_small(k) && is_small(v)),
        _ => true,
    };
    let kernel = match (keys <= 1024 && case.splits.is_none() && has_room, k.is_quantised()) {
        (true, true) => "attend_short_quantised",
        (true, false) => "attend_short",
        (false, true) if case.head_dim == 64 => "attend_generic",
        (false, true) => "attend_quantised",
        (false, false) => "attend_decode",
    };
    comes_to(case, kernel);
}

fn comes_to(case: &Case, want: &str) {
    let compiler = without_gpu::device();
    // A GPU with lowered limits lacks shared memory for some decode kernels.
    let limited = std::env::var_os("KVANT_CUDA_LIKE").is_some() && want != "attend_prefill";
    let cuda = devices().iter().filter(|device| device.kind() == DeviceKind::Cuda && !limited);
    for device in cuda.chain([&compiler]) {
        assert_eq!(case.kernel(device).unwrap(), want, "{device}: {case}");
    }
}

/// More query heads of a KV head than CUDA's decode kernels have columns; up to twice as many are halved.
#[test]
fn large_groups() {
    let mut cases = Vec::new();
    for (i, (k, v)) in DECODED.into_iter().enumerate() {
        let q = if let Codec::Dense(dtype) = k { dtype } else { FLOATS[i % 3] };
        for (j, group) in [9, 12, 15, 16].into_iter().enumerate() {
            let (sequences, splits) = [
                (vec![(70, 1)], None),
                (vec![(1100, 1)], None),
                (vec![(300, 1), (0, 1), (17, 1)], Some(3)),
                (vec![(3000, 1), (40, 1)], None),
            ][(i + j) % 4]
                .clone();
            let head_dim = HEAD_DIMS[1 + (i + j / 2) % 3];
            let (kv_heads, order) = (1 + j % 3, [HeadOrder::HeadMajor, HeadOrder::TokenMajor][i % 2]);
            let out = [DType::F16, DType::BF16][(i + j) % 2];
            let case = Case { head_dim, kv_heads, group, k, v, q, out, order, sequences, splits, ..Case::default() };
            cases.push(match (i + 3 * j) % 5 {
                0 => Case { sinks: true, ..case },
                1 => Case { ring: Some(50), ..case },
                2 => Case { softcap: Some(4.0), ..case },
                3 => Case { window: Some(33), q_rotated: k.is_quantised(), ..case },
                _ => case,
            });
        }
    }
    for_cuda(&cases, is_decoded, Case::check);
    for group in [17, 32] {
        let case = Case { group, k: Codec::F16, v: Codec::F16, q: DType::F16, out: DType::F16, ..Case::default() };
        comes_to(&case, "attend_generic");
        case.check();
    }
}

/// One token per sequence over caches of 16 bits or fewer, for which CUDA has decode kernels.
#[test]
fn decode_kernels() {
    let cases: Vec<Case> = pairwise(FACTORS).into_iter().map(decoded).collect();
    println!("{} cases", cases.len());
    for_cuda(&cases, is_decoded, Case::check);
}

/// Contexts that just fit into the shared memory of a cluster's blocks on CUDA, and contexts that just do not: by
/// capacity, by the length of a wrapped ring, by a window.
#[test]
fn short_contexts() {
    let contexts = [
        // A layer has room for seven more.
        (vec![(1016, 1)], None, None),
        (vec![(1017, 1)], None, None),
        (vec![(1500, 1)], Some(1024), None),
        (vec![(1500, 1), (3, 1)], Some(1025), Some(1024)),
        (vec![(1100, 1), (0, 1)], None, Some(130)),
        (vec![(140, 1)], Some(131), Some(130)),
        (vec![(300, 1)], Some(256), None),
    ];
    let mut cases = Vec::new();
    for (i, (k, v)) in DECODED.into_iter().enumerate() {
        for (j, head_dim) in HEAD_DIMS.into_iter().enumerate() {
            let n = 2 * i + j;
            let (sequences, ring, window) = contexts[n % contexts.len()].clone();
            let q = if let Codec::Dense(dtype) = k { dtype } else { FLOATS[n % 3] };
            let order = if n % 5 == 0 { HeadOrder::TokenMajor } else { HeadOrder::HeadMajor };
            let plain = Case { head_dim, k, v, q, out: DType::BF16, order, sequences, ring, window, ..Case::default() };
            cases.push(Case {
                kv_heads: 1 + n % 2,
                // All numbers from one to eight.
                group: 1 + (3 * i + 2 * j + n) % 8,
                softcap: (n % 4 == 0).then_some(4.0),
                q_rotated: k.is_quantised() && n % 7 == 0,
                ..plain
            });
        }
    }
    let groups: HashSet<usize> = cases.iter().map(|case| case.group).collect();
    assert_eq!(groups.len(), 8);
    for_cuda(&cases, is_decoded, Case::check);
}

/// The factors that [`prefill_kernels`] varies: options, batches, query heads of a KV head, head size, dtype of q, K
/// and V, dtype of out.
const PREFILL_FACTORS: [usize; 6] = [8, 5, 4, 4, 2, 2];

/// A case with many tokens per sequence over 16 bits, as CUDA's prefill kernel requires.
fn prefilled(choice: [usize; 6]) -> Case {
    let [besides, batch, group, head_dim, dtype, out] = choice;
    let dtype = [DType::F16, DType::BF16][dtype];
    let codec = Codec::Dense(dtype);
    // Past tokens and new query rows of a head, around tiles of 64 and 128 keys and work items of 64 and 128 rows. In
    // the last batch, a work item has tokens of four sequences.
    let batches = [
        vec![(0, 130)],
        vec![(63, 66)],
        vec![(200, 64)],
        vec![(5, 64), (0, 71)],
        vec![(0, 65), (100, 64), (127, 97), (1, 32)],
    ];
    let sequences = batches[batch].iter().map(|&(past, rows): &(usize, usize)| (past, rows.div_ceil(GROUPS[group])));
    let plain = Case {
        head_dim: HEAD_DIMS[head_dim],
        kv_heads: if GROUPS[group] < 3 { 2 } else { 1 },
        group: GROUPS[group],
        k: codec,
        v: codec,
        source: dtype,
        q: dtype,
        out: [DType::F16, DType::BF16][out],
        sequences: sequences.collect(),
        splits: [None, Some(1), Some(3)][(batch + head_dim) % 3],
        ..Case::default()
    };
    match besides {
        0 => plain,
        1 => Case { ring: Some(50), ..plain },
        2 => Case { window: Some(40), ..plain },
        3 => Case { softcap: Some(4.0), scale: 0.5, ..plain },
        4 => Case { sinks: true, ..plain },
        5 => Case { order: HeadOrder::TokenMajor, ..plain },
        6 => Case { ring: Some(150), window: Some(70), order: HeadOrder::TokenMajor, ..plain },
        _ => Case { ring: Some(90), window: Some(33), softcap: Some(30.0), sinks: true, ..plain },
    }
}

/// Many tokens per sequence over 16-bit caches, for which CUDA has a prefill kernel.
#[test]
fn prefill_kernels() {
    let cases: Vec<Case> = pairwise(PREFILL_FACTORS).into_iter().map(prefilled).collect();
    println!("{} cases", cases.len());
    for_cuda(&cases, |case| comes_to(case, "attend_prefill"), Case::check);
}

/// A prompt of many tiles: ring buffers wrap several times.
#[test]
fn long_prefills() {
    let shapes = [(64, DType::F16, 1), (128, DType::BF16, 1), (256, DType::BF16, 2), (512, DType::F16, 1)];
    let cases = shapes.map(|(head_dim, dtype, splits)| {
        let (k, v) = (Codec::Dense(dtype), Codec::Dense(dtype));
        let (source, q, out, sequences, splits) = (dtype, dtype, dtype, vec![(61, 1701)], Some(splits));
        Case { head_dim, k, v, source, q, out, sequences, sinks: true, splits, ..Case::default() }
    });
    for_cuda(&cases, |case| comes_to(case, "attend_prefill"), Case::check);
}

/// More work items than a GPU has multiprocessors, so that CUDA blocks process several. A value is not finite in all
/// heads, or in every third, so that blocks repeat some items. Other devices do not treat these cases specially.
#[test]
fn prefills_of_many_items() {
    let mut cases = Vec::new();
    for head_dim in HEAD_DIMS {
        for (window, splits) in [(None, 1), (Some(40), 1), (None, 3)] {
            let sequences = vec![(20, 100), (0, 70), (3, 64)];
            let (codec, dtype) = (Codec::BF16, DType::BF16);
            let (k, v, source, q, out) = (codec, codec, dtype, dtype, dtype);
            // With one query head per KV head, a block knows one work item at a time.
            let (kv_heads, group, splits) = (80, if window.is_some() { 1 } else { 2 }, Some(splits));
            let case = Case { head_dim, kv_heads, group, k, v, source, q, out, sequences, window, ..Case::default() };
            cases.push(Case { splits, ..case });
        }
    }
    let has_cuda = has_cuda();
    on_threads(&cases, |case| {
        comes_to(case, "attend_prefill");
        if has_cuda {
            case.check();
            for apart in [1, 3] {
                let mut data = case.data();
                for head in (0..case.kv_heads).step_by(apart) {
                    data.source.v[(141 * case.kv_heads + head) * case.head_dim + 6] = f32::INFINITY;
                }
                case.check_data(&data);
            }
        }
    });
}

/// Cases that the prefill kernel does not support run another kernel.
#[test]
fn kernels_of_many_tokens() {
    let codec = Codec::BF16;
    let bf16 = DType::BF16;
    let many = Case {
        head_dim: 128,
        kv_heads: 8,
        group: 8,
        k: codec,
        v: codec,
        q: bf16,
        out: bf16,
        sequences: vec![(3, 130)],
        window: Some(5),
        ..Case::default()
    };
    comes_to(&many, "attend_prefill");
    many.check();
    let others = [
        Case { sequences: vec![(0, 7)], ..many.clone() },
        Case { sequences: vec![(7, 2); 300], ..many.clone() },
        Case { scale: -0.1, ..many.clone() },
        Case { out: DType::F32, ..many.clone() },
        Case { q: DType::F16, ..many.clone() },
        Case { k: Codec::F16, ..many.clone() },
        Case { v: Codec::tq(4), ..many },
    ];
    for case in others {
        comes_to(&case, "attend_generic");
    }
}

/// A value that is not finite affects only results that see it: in keys, in values, in a query.
#[test]
fn prefill_with_values_that_are_not_finite() {
    let mut cases = Vec::new();
    for (head_dim, codec) in [(64, Codec::BF16), (128, Codec::F16), (256, Codec::BF16), (512, Codec::F16)] {
        let Codec::Dense(dtype) = codec else { unreachable!("both are dense") };
        for (sequences, window) in [(vec![(30, 33)], None), (vec![(0, 70)], Some(20)), (vec![(20, 32), (0, 45)], None)]
        {
            let (kv_heads, group, splits) = (2, 2, Some(1));
            let (k, v, q, out) = (codec, codec, dtype, dtype);
            cases.push(Case { head_dim, kv_heads, group, k, v, q, out, sequences, window, splits, ..Case::default() });
        }
    }
    for_cuda(
        &cases,
        |case| comes_to(case, "attend_prefill"),
        |case| {
            // Head 1 of a token that later tokens see, and earlier ones do not.
            check_not_finite(case, 41, 11);
        },
    );
}

/// Checks values that are not finite in a key and a value, in head 1 of a token, and in a row of queries.
fn check_not_finite(case: &Case, token: usize, query_row: usize) {
    // At odd and even coordinates: kernels check pairs of 16-bit numbers.
    for (bad, coordinate) in [(f32::NAN, 7), (f32::INFINITY, 6), (f32::NEG_INFINITY, 5)] {
        let at = (token * case.kv_heads + 1) * case.head_dim + coordinate;
        let (mut key, mut value, mut query) = (case.data(), case.data(), case.data());
        key.source.k[at] = bad;
        value.source.v[at] = bad;
        query.queries[query_row * case.head_dim + coordinate] = bad;
        for data in [key, value, query] {
            case.check_data(&data);
        }
    }
}

fn has_cuda() -> bool {
    devices().iter().any(|device| device.kind() == DeviceKind::Cuda)
}

/// Cases that are many because CUDA has special kernels for them. On other devices, other tests cover their kernels, so
/// every fifth case suffices; CUDA's selection is checked for all.
fn for_cuda(cases: &[Case], chosen: impl Fn(&Case) + Sync, check: impl Fn(&Case) + Sync) {
    let has_cuda = has_cuda();
    let numbered: Vec<(usize, &Case)> = cases.iter().enumerate().collect();
    on_threads(&numbered, |&(i, case)| {
        chosen(case);
        if has_cuda || i % 5 == 0 {
            check(case);
        }
    });
}

/// A value that is not finite affects only results that see it: in keys, in values, in a query.
#[test]
fn decode_with_values_that_are_not_finite() {
    let (head_dims, mut cases) = ([128, 512, 256, 64], Vec::new());
    for (i, (k, v)) in DECODED.into_iter().enumerate() {
        let q = if let Codec::Dense(dtype) = k { dtype } else { DType::BF16 };
        for (window, splits) in [(None, None), (Some(20), None), (None, Some(7))] {
            // Sums of rotated values are NaN of either sign, and msl-host compares partial results bit by bit. CUDA
            // shares two tiles of keys among blocks anyway.
            if splits.is_some() && k.is_quantised() {
                continue;
            }
            let (head_dim, sequences) = (head_dims[i % 4], vec![(40, 1), (70, 1)]);
            cases.push(Case {
                head_dim,
                kv_heads: 2,
                group: 2,
                k,
                v,
                q,
                out: q,
                sequences,
                window,
                splits,
                ..Case::default()
            });
        }
    }
    // A token that the window hides from its sequence.
    for_cuda(&cases, is_decoded, |case| check_not_finite(case, 11, 1));
}

/// Most GPUs have less shared memory per block than an H200, which is limited here accordingly: two buffers, tiles of
/// 16 keys, few copies of tables.
#[test]
fn little_shared_memory() {
    let has_cuda = has_cuda();
    let Some(device) = has_cuda.then(|| limited::cuda_like(Model::Rtx4090)).flatten() else { return };
    let (f32, f16, tq4, tq8) = (Codec::F32, Codec::F16, Codec::tq(4), Codec::tq(8));
    let pairs =
        [(f32, f32), (tq8, f16), (f16, tq8), (tq8, tq4), (f32, tq8), (tq8, f32), (Codec::tq(5), f32), (f32, tq4)];
    let mut cases = Vec::new();
    for (i, (k, v)) in pairs.into_iter().enumerate() {
        for (j, head_dim) in [128, 256, 512].into_iter().enumerate() {
            let (q, out) = (FLOATS[(i + j) % 3], FLOATS[(i + 2 * j) % 3]);
            let sequences = [vec![(300, 1)], vec![(5, 40)], vec![(70, 3), (0, 20)]][(i + i / 3 + j) % 3].clone();
            let case = Case { head_dim, kv_heads: 2, group: 2, k, v, q, out, sequences, ..Case::default() };
            cases.push(match i % 4 {
                0 => Case { sinks: true, ..case },
                1 => Case { ring: Some(50), ..case },
                2 => Case { softcap: Some(4.0), window: Some(33), ..case },
                _ => case,
            });
        }
    }
    on_threads(&cases, |case| case.check_on(std::slice::from_ref(&device), &case.data()));
}

/// If the scores of all seen keys are minus infinity, the output is NaN, not the zeros of a token that sees nothing. If
/// one score is finite, the others have no weight.
#[test]
fn scores_of_minus_infinity() {
    let mut cases = Vec::new();
    for (head_dim, codec, kernel) in
        [(128, Codec::F16, "attend_short"), (512, Codec::BF16, "attend_decode"), (256, Codec::F16, "attend_generic")]
    {
        let Codec::Dense(dtype) = codec else { unreachable!("all are dense") };
        let out = if kernel == "attend_generic" { DType::F32 } else { dtype };
        let plain = Case {
            head_dim,
            kv_heads: 2,
            group: 2,
            k: codec,
            v: codec,
            source: dtype,
            q: dtype,
            out,
            ..Case::default()
        };
        let one = Case { sequences: vec![(1, 1), (0, 1)], ..plain };
        for sinks in [false, true] {
            cases.push((kernel, Case { sinks, ..one.clone() }));
        }
        let shared = if kernel == "attend_generic" { kernel } else { "attend_decode" };
        cases.push((shared, Case { splits: Some(3), ..one.clone() }));
        if kernel == "attend_short" {
            let prompt = Case { sequences: vec![(2, 32)], splits: Some(1), ..one };
            cases.push(("attend_prefill", Case { sinks: true, ..prompt }));
        }
    }
    on_threads(&cases, |(kernel, case)| {
        comes_to(case, kernel);
        let all: Vec<usize> = (0..case.sequences.iter().map(|&(past, new)| past + new).sum()).collect();
        let some = [vec![0], vec![1], vec![0, 1], vec![2]];
        for bad in some.into_iter().chain([all]) {
            check_lost(case, bad);
        }
    });
}

/// Gives all queries scores of minus infinity for some keys.
fn check_lost(case: &Case, lost: impl IntoIterator<Item = usize>) {
    let mut data = case.data();
    for row in lost.into_iter().flat_map(|token| (0..case.kv_heads).map(move |head| token * case.kv_heads + head)) {
        data.source.k[row * case.head_dim + 7] = f32::NEG_INFINITY;
    }
    data.queries.iter_mut().skip(7).step_by(case.head_dim).for_each(|x| *x = 1.0);
    case.check_data(&data);
}

/// As above, with neighbouring keys that are processed together: a tile of them has no effect, whatever tiles precede
/// or follow it, and only tokens that see nothing else get NaN.
#[test]
fn tiles_of_minus_infinity() {
    for (head_dim, k, v) in
        [(64, Codec::F32, Codec::F32), (128, Codec::F16, Codec::tq(8)), (512, Codec::BF16, Codec::tq(4))]
    {
        let one = Case { head_dim, k, v, group: 2, sequences: vec![(200, 1)], ..Case::default() };
        let prompt = Case { sequences: vec![(90, 70)], window: Some(80), ..one.clone() };
        for lost in [0..64, 128..160] {
            check_lost(&Case { splits: Some(3), ..one.clone() }, lost.clone());
            check_lost(&one, lost.clone());
            check_lost(&prompt, lost);
        }
        // Most tokens of the prompt see no other key; finally all tokens.
        check_lost(&prompt, 0..150);
        check_lost(&Case { splits: Some(3), ..one }, 0..201);
        check_lost(&Case { splits: Some(2), window: None, ..prompt }, 0..160);
    }
}

/// Random combinations of all options.
#[test]
fn random_combinations() {
    let mut rng = Rng::of("random attention");
    let cases = (0..100).map(|_| {
        let k = rng.pick(&CODECS);
        let sequences = (0..rng.pick(&[1, 1, 2, 4]))
            .map(|_| (rng.pick(&[0, 1, 2, 31, 63, 64, 65, 140]), rng.pick(&[0, 1, 1, 2, 5, 18])))
            .collect();
        Case {
            head_dim: rng.pick(&HEAD_DIMS),
            kv_heads: rng.pick(&[1, 2, 3]),
            group: rng.pick(&GROUPS),
            k,
            v: rng.pick(&CODECS),
            source: rng.pick(&FLOATS),
            q: rng.pick(&FLOATS),
            out: rng.pick(&FLOATS),
            ring: rng.pick(&[None, Some(7), Some(32), Some(100)]),
            order: rng.pick(&[HeadOrder::HeadMajor, HeadOrder::TokenMajor]),
            sequences,
            scale: rng.pick(&[0.0, 0.0, 0.3]),
            softcap: rng.pick(&[None, None, Some(4.0)]),
            window: rng.pick(&[None, Some(1), Some(20)]),
            sinks: rng.below(2) == 0,
            q_rotated: k.is_quantised() && rng.below(2) == 0,
            splits: rng.pick(&[None, None, Some(1), Some(4)]),
        }
    });
    one_in(3, |case| case.head_dim.to_string(), cases).iter().for_each(Case::check);
}
