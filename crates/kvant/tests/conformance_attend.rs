//! attend against the reference over the same cache bytes.

mod common;

use common::{FLOATS, Rng, attention::Case, layers::CODECS};
use kvant::{Codec, DType, SlotOrder, ops::SourceOrder};

const HEAD_DIMS: [usize; 4] = [64, 128, 256, 512];
const GROUPS: [usize; 4] = [1, 2, 3, 8];

/// Lengths around the sizes that kernels split a context at.
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

/// Keys and values of every pair of codecs, at every head size.
#[test]
fn codec_pairs() {
    for head_dim in HEAD_DIMS {
        for k in CODECS {
            for v in CODECS {
                Case { head_dim, k, v, group: 2, sequences: vec![(37, 2)], ..Case::default() }.check();
            }
        }
    }
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
                Case { sequences: vec![(20, 5)], fresh: Some(SourceOrder::TokenMajor), ..case }.check();
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
            for order in [SlotOrder::HeadMajor, SlotOrder::TokenMajor] {
                let case = Case { kv_heads: 2, group: 3, k, v, order, sequences: sequences.clone(), ..Case::default() };
                Case { window: Some(9), ring: Some(11), ..case.clone() }.check();
                case.check();
            }
        }
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

/// Scores far beyond what exp can take; a negative and a zero scale.
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
            for order in [SlotOrder::HeadMajor, SlotOrder::TokenMajor] {
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

/// A step's own keys and values beside the cache, raw, in both layouts.
#[test]
fn fresh_keys_and_values() {
    for order in [SourceOrder::TokenMajor, SourceOrder::HeadMajor] {
        for (past, new) in [(0, 1), (0, 33), (5, 2), (64, 5), (200, 17)] {
            for (k, v) in [(Codec::F32, Codec::F32), (Codec::tq(4), Codec::tq(8)), (Codec::F16, Codec::tq(6))] {
                let (fresh, sequences) = (Some(order), vec![(past, new)]);
                let case = Case { fresh, k, v, kv_heads: 2, group: 2, sequences, ..Case::default() };
                Case { ring: Some(16), window: Some(12), ..case.clone() }.check();
                Case { ring: Some(9), head_dim: 128, ..case.clone() }.check();
                case.check();
            }
        }
        // More tokens than a threadgroup has threads.
        Case { fresh: Some(order), ring: Some(16), window: Some(20), sequences: vec![(3, 150)], ..Case::default() }
            .check();
        let sequences = vec![(0, 9), (30, 1), (7, 0), (12, 20)];
        Case { fresh: Some(order), ring: Some(16), source: DType::BF16, kv_heads: 3, sequences, ..Case::default() }
            .check();
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

/// A key or a value that is not a number shows in the rows of the tokens that see it, and in no other: neither of its
/// tile nor of its batch. An infinity likewise.
#[test]
fn not_finite_keys_and_values() {
    for (k, v) in
        [(Codec::F32, Codec::F32), (Codec::F16, Codec::BF16), (Codec::F32, Codec::tq(5)), (Codec::tq(4), Codec::F16)]
    {
        for (sequences, window) in
            [(vec![(0, 40)], Some(9)), (vec![(0, 40)], None), (vec![(20, 3)], Some(2)), (vec![(12, 8), (12, 12)], None)]
        {
            for fresh in [None, Some(SourceOrder::TokenMajor)] {
                for bad in [f32::NAN, f32::INFINITY] {
                    let sequences = sequences.clone();
                    let case = Case { k, v, group: 2, sequences, window, fresh, ..Case::default() };
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

/// However the context is split, also into more parts than it has positions.
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
                Case { fresh: Some(SourceOrder::HeadMajor), ..case.clone() }.check();
                case.check();
            }
        }
    }
}

/// Anything with anything.
#[test]
fn random_combinations() {
    let mut rng = Rng::of("random attention");
    for _ in 0..100 {
        let k = rng.pick(&CODECS);
        let fresh = rng.pick(&[None, None, Some(SourceOrder::TokenMajor), Some(SourceOrder::HeadMajor)]);
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
            order: rng.pick(&[SlotOrder::HeadMajor, SlotOrder::TokenMajor]),
            sequences,
            scale: rng.pick(&[0.0, 0.0, 0.3]),
            softcap: rng.pick(&[None, None, Some(4.0)]),
            window: rng.pick(&[None, Some(1), Some(20)]),
            fresh,
            q_rotated: k.is_quantised() && fresh.is_none() && rng.below(2) == 0,
            splits: rng.pick(&[None, None, Some(1), Some(4)]),
        }
        .check();
    }
}
