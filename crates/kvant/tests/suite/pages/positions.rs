//! Steps over positions of a pool: they append nothing, and later steps do not notice them.

use std::ops::Range;

use super::{
    states::{STATE, convolve},
    tokens::{DIM, WINDOW, feed, prompt_token, two_layers, vector},
};
use crate::common::{
    Bound, Rng, assert_close, bytes_of, devices,
    layers::{self, Source},
    proptest_cases, run,
};
use kvant::{
    CacheLayer, Codec, DType, Device, Error, KvPool, PoolSpec, PrefixCache, Sequence, StateLayer, Step, StepSize,
    Tensor,
    ops::{self, Attend},
};
use proptest::prelude::*;

/// Positions of a page.
const PAGE: usize = 16;

fn prompt(len: usize) -> Vec<u32> {
    (0..len).map(|at| prompt_token(0, at)).collect()
}

/// Writes rows of a layer at positions, and returns the attention over them. `tokens` are those up to the last one.
fn at_positions(pool: &KvPool, step: &Step, layer: usize, positions: Range<usize>, tokens: &[u32]) -> Vec<u8> {
    let (device, count) = (pool.device(), positions.len());
    let kv = pool.layer(layer).unwrap();
    let side = |side| positions.clone().flat_map(|at| vector(side, layer, &tokens[..=at])).collect();
    layers::write(kv, &Source { k: side(0), v: side(1), heads: 1, dim: DIM }, DType::F32, step).unwrap();
    let q = Tensor::from_slice(device, &Rng::of("query").normals(count * 2 * DIM), &[count, 2, DIM]).unwrap();
    let out = Tensor::zeros(device, DType::F32, &[count, 2, DIM]).unwrap();
    run(device, |enc| ops::attend(enc, &Attend::new(&q, kv, step, &out))).unwrap();
    bytes_of(&out).unwrap()
}

/// Pages that positions after the end take are the pages of the next tokens, and rows that were written there are seen.
#[test]
fn pages_after_the_end_are_those_of_the_next_tokens() {
    for device in devices() {
        let spec = PoolSpec::new(two_layers(), 1 << 20).page_tokens(PAGE);
        let (pool, other) = (KvPool::new(device, &spec).unwrap(), KvPool::new(device, &spec).unwrap());
        let tokens = prompt(60);
        let (mut sequence, mut plain) = (pool.sequence(), other.sequence());
        feed(&pool, &mut sequence, &tokens[..30]);
        feed(&other, &mut plain, &tokens[..30]);
        let step = pool.positions(&mut [(&mut sequence, 30..50)]).unwrap();
        assert_eq!(step.positions().to_vec::<u32>().unwrap(), (30..50).collect::<Vec<u32>>());
        assert_eq!((step.lens().to_vec::<u32>().unwrap(), sequence.len()), (vec![50], 30));
        let used = pool.usage().used;
        let ahead: Vec<Vec<u8>> = (0..2).map(|layer| at_positions(&pool, &step, layer, 30..50, &tokens)).collect();
        let next = other.step(&mut [(&mut plain, 20)]).unwrap();
        for (layer, ahead) in ahead.iter().enumerate() {
            assert!(at_positions(&other, &next, layer, 30..50, &tokens) == *ahead, "{device}: layer {layer}");
        }
        plain.truncate(30).unwrap();
        // Other tokens overwrite the drafts.
        let tokens = [&tokens[..30], &prompt(90)[60..]].concat();
        for end in [31, 50] {
            let same = feed(&pool, &mut sequence, &tokens[..end]) == feed(&other, &mut plain, &tokens[..end]);
            assert!(same, "{device}: {end} tokens");
            assert_eq!(pool.usage().used, used, "{device}: no page was taken twice");
        }
        drop(sequence);
        assert_eq!(pool.usage().used, 0);
    }
}

/// Rows of one layer are written again at positions that the sequence has. The other layers keep theirs.
#[test]
fn positions_of_the_past_are_written_again() {
    for device in devices() {
        let full = CacheLayer::new(1, DIM, Codec::F32);
        let layers = vec![full.k(Codec::tq_centred(5)).v(Codec::tq_centred(5)), full];
        let spec = PoolSpec::new(layers, 1 << 20).page_tokens(PAGE).states(vec![StateLayer::new(DType::F32, &STATE)]);
        let pool = KvPool::new(device, &spec).unwrap();
        let append = |sequence: &mut Sequence, tokens: &[u32]| {
            let start = sequence.len();
            let step = pool.step(&mut [(sequence, tokens.len() - start)]).unwrap();
            convolve(&pool, 0, &step, &[(tokens, tokens.len() - start)]);
            [0, 1].map(|layer| at_positions(&pool, &step, layer, start..tokens.len(), tokens))
        };
        let tokens = prompt(100);
        let (mut sequence, mut plain) = (pool.sequence(), pool.sequence());
        for end in [70, 83] {
            append(&mut sequence, &tokens[..end]);
            append(&mut plain, &tokens[..end]);
        }
        let before = pool.usage();
        let step = pool.positions(&mut [(&mut sequence, 70..83)]).unwrap();
        assert!(step.runs().unwrap().is_none(), "states do not advance");
        let other: Vec<u32> = tokens.iter().enumerate().map(|(at, &token)| token + u32::from(at >= 70)).collect();
        at_positions(&pool, &step, 1, 70..83, &other);
        assert_eq!((pool.usage(), sequence.len()), (before, 83));
        // The sealed layer and the states are those of a sequence that was left alone; layer 1 has the new rows.
        let mut ours = pool.sequence();
        append(&mut ours, &other[..70]);
        append(&mut ours, &other[..83]);
        let last = &tokens[..84];
        let states_of_others = [&other[..83], &tokens[83..84]].concat();
        let results = [append(&mut sequence, last), append(&mut plain, last), append(&mut ours, &states_of_others)];
        assert!(results[0][0] == results[1][0], "{device}: the sealed layer is unchanged");
        // The last row differs between them, but not the rows before it.
        assert!(results[0][1] != results[1][1], "{device}: the rows are new");
        let of_ours = pool.positions(&mut [(&mut ours, 82..84)]).unwrap();
        let of_sequence = pool.positions(&mut [(&mut sequence, 82..84)]).unwrap();
        let [a, b] = [&of_ours, &of_sequence].map(|step| at_positions(&pool, step, 1, 82..84, &other));
        assert!(a == b, "{device}: the rows are those of the other tokens");
    }
}

/// A page that a fork or a prefix holds is copied before positions in it are written.
#[test]
fn shared_pages_are_copied() {
    for device in devices() {
        let spec = PoolSpec::new(two_layers(), 1 << 20).page_tokens(PAGE);
        let pool = KvPool::new(device, &spec).unwrap();
        let cache = PrefixCache::new(&pool, b"positions");
        let tokens = prompt(60);
        let mut sequence = pool.sequence();
        feed(&pool, &mut sequence, &tokens[..40]);
        cache.keep(&sequence, &tokens[..40]).unwrap();
        let mut fork = sequence.fork();
        let earlier = pool.positions(&mut [(&mut fork, 39..40)]).unwrap();
        let earlier_of_fork = earlier.select(&[0]).unwrap();
        let step = pool.positions(&mut [(&mut sequence, 30..55)]).unwrap();
        for layer in 0..2 {
            at_positions(&pool, &step, layer, 30..55, &vec![7; 60]);
        }
        // The fork's last page was copied before, so that the sequence does not share it.
        at_positions(&pool, &earlier_of_fork, 0, 39..40, &tokens);
        let mut found = cache.find(&tokens[..39]).unwrap();
        assert_eq!(found.len(), 32);
        let mut alone = pool.sequence();
        feed(&pool, &mut alone, &tokens[..32]);
        feed(&pool, &mut alone.fork(), &tokens[..40]);
        let want = feed(&pool, &mut alone.fork(), &tokens[..41]);
        assert!(feed(&pool, &mut found, &tokens[..41]) == want, "{device}: the prefix is unchanged");
        let mut whole = pool.sequence();
        feed(&pool, &mut whole, &tokens[..40]);
        let want = feed(&pool, &mut whole, &tokens[..41]);
        assert!(feed(&pool, &mut fork, &tokens[..41]) == want, "{device}: the fork is unchanged");
        // Pages after the end are not part of forks and exports.
        let (mut ahead, bytes) = (sequence.fork(), sequence.export().unwrap());
        let mut moved = pool.import(&bytes).unwrap();
        let used = pool.usage().used;
        pool.step(&mut [(&mut moved, 20)]).unwrap();
        pool.step(&mut [(&mut ahead, 20)]).unwrap();
        assert!(pool.usage().used > used);
        drop((sequence, fork, found, alone, whole, ahead, moved));
        cache.clear();
        assert_eq!(pool.usage().used, 0);
    }
}

/// Invalid positions change nothing, and the errors name them.
#[test]
fn invalid_positions_are_refused() {
    let full = CacheLayer::new(1, DIM, Codec::F32);
    let spec = PoolSpec::new(vec![full, full.window(Some(WINDOW))], 0).page_tokens(PAGE).room_for(1, 100, 1).unwrap();
    let (pool, other) = (KvPool::new(&Device::cpu(), &spec).unwrap(), KvPool::new(&Device::cpu(), &spec).unwrap());
    let mut sequence = pool.sequence();
    for _ in 0..90 {
        pool.step(&mut [(&mut sequence, 1)]).unwrap();
    }
    let used = pool.usage();
    let mut refused = |positions: Range<usize>| pool.positions(&mut [(&mut sequence, positions)]).unwrap_err();
    assert!(matches!(refused(20..21), Error::NotHeld { .. }), "the window has passed its positions");
    assert!(matches!(refused(90..2000), Error::OutOfPages { missing } if missing > 0));
    assert!(matches!(refused(90..usize::MAX), Error::Overflow { .. }));
    assert!(matches!(other.positions(&mut [(&mut sequence, 89..90)]), Err(Error::Value { arg: "batch", .. })));
    let step = pool.reserve_step(StepSize::decode(4, 100)).unwrap();
    assert!(pool.positions_into(&mut [(&mut sequence, 85..90)], &step).is_err(), "more positions than rows");
    assert!(pool.positions_into(&mut [(&mut sequence, 98..101)], &step).is_err(), "beyond the step's length");
    assert_eq!((pool.usage(), sequence.len()), (used, 90));
    pool.positions_into(&mut [(&mut sequence, 87..91)], &step).unwrap();
    assert_eq!(step.lens().to_vec::<u32>().unwrap(), [88, 89, 90, 91]);
    // Pages before positions after the end are taken, too.
    let used = pool.usage().used;
    pool.positions(&mut [(&mut sequence, 99..100)]).unwrap();
    assert!(pool.usage().used > used && sequence.len() == 90);
    // A step of the same positions does not invalidate the earlier one.
    pool.positions(&mut [(&mut sequence, 90..91)]).unwrap();
    assert!(step.select(&[0]).is_ok() && step.runs().is_ok());
    sequence.truncate(89).unwrap();
    assert!(step.runs().is_err(), "out of date");
}

/// Runs two pools through the same history, one of them with steps over positions in between, whose rows are nonsense
/// in an extra layer.
#[derive(Clone, Debug)]
enum Action {
    Append(u16, usize),
    Draft(u16, usize),
    Again(u16),
    Fork(u16),
    Truncate(u16),
    Keep(u16),
    Find(usize),
    End(u16),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        5 => (any::<u16>(), 1..25usize).prop_map(|(of, count)| Action::Append(of, count)),
        5 => (any::<u16>(), 1..40usize).prop_map(|(of, count)| Action::Draft(of, count)),
        3 => any::<u16>().prop_map(Action::Again),
        2 => any::<u16>().prop_map(Action::Fork),
        2 => any::<u16>().prop_map(Action::Truncate),
        2 => any::<u16>().prop_map(Action::Keep),
        2 => (20..90usize).prop_map(Action::Find),
        1 => any::<u16>().prop_map(Action::End),
    ];
    prop::collection::vec(action, 1..40)
}

/// A sequence in each of the pools, its tokens, and the length before the latest step.
struct Pair {
    sequences: [Sequence; 2],
    tokens: Vec<u32>,
    start: usize,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: proptest_cases(64), ..ProptestConfig::default() })]
    #[test]
    fn histories_do_not_notice_positions(
        actions in actions(),
        codec in prop::sample::select(vec![Codec::F32, Codec::tq_centred(5)]),
        pages in prop_oneof![8..14usize, 40..60usize],
    ) {
        let device = Device::cpu();
        // The extra layer has pages of its own, or shares those of the full layer.
        let full = CacheLayer::new(1, DIM, codec);
        let layers = vec![full.window(Some(WINDOW)), full, CacheLayer::new(1, DIM, Codec::F32)];
        let slab = 4 * (PAGE * 4 * DIM + 512);
        let pools = [pages, 200].map(|pages| {
            let spec = PoolSpec::new(layers.clone(), pages * slab).page_tokens(PAGE).host_bytes(4 * slab);
            KvPool::new(&device, &spec).unwrap()
        });
        let caches = pools.each_ref().map(|pool| PrefixCache::new(pool, b"positions"));
        let mut pairs: Vec<Pair> = Vec::new();
        let feed_layers = |pool: &KvPool, sequence: &mut Sequence, tokens: &[u32], start: usize| {
            let step = pool.step(&mut [(sequence, tokens.len() - start)])?;
            Ok::<_, Error>([0, 1].map(|layer| at_positions(pool, &step, layer, start..tokens.len(), tokens)))
        };
        for action in actions {
            let n = pairs.len().max(1);
            let pick = |of: u16| usize::from(of) % n;
            match action {
                Action::Find(len) => {
                    let tokens = prompt(len);
                    let [a, b] = caches.each_ref().map(|cache| cache.find(&tokens).unwrap());
                    // The smaller pool may have evicted more.
                    if a.len() == b.len() {
                        pairs.push(Pair { start: a.len(), tokens: tokens[..a.len()].to_vec(), sequences: [a, b] });
                    }
                }
                _ if pairs.is_empty() => {}
                Action::Append(of, count) => {
                    let Pair { sequences: [a, b], tokens, start } = &mut pairs[pick(of)];
                    *start = tokens.len();
                    tokens.extend((*start..*start + count).map(|at| prompt_token(0, at)));
                    match feed_layers(&pools[0], a, tokens, *start) {
                        Ok(got) => prop_assert!(got == feed_layers(&pools[1], b, tokens, *start).unwrap()),
                        Err(error) => {
                            prop_assert!(matches!(error, Error::OutOfPages { .. }), "{}", error);
                            pairs.remove(pick(of));
                        }
                    }
                }
                Action::Draft(of, count) => {
                    let Pair { sequences: [a, _], tokens, .. } = &mut pairs[pick(of)];
                    let (len, used) = (tokens.len(), pools[0].usage().used);
                    match pools[0].positions(&mut [(a, len..len + count)]) {
                        Ok(step) => drop(at_positions(&pools[0], &step, 2, len..len + count, &vec![9; len + count])),
                        Err(error) => {
                            prop_assert!(matches!(error, Error::OutOfPages { .. }), "{}", error);
                            prop_assert_eq!(pools[0].usage().used, used, "a refused step changes nothing");
                        }
                    }
                    prop_assert_eq!(a.len(), len);
                }
                Action::Again(of) => {
                    let Pair { sequences: [a, _], tokens, start } = &mut pairs[pick(of)];
                    let positions = *start..tokens.len();
                    if let Ok(step) = pools[0].positions(&mut [(a, positions.clone())])
                        && !positions.is_empty()
                    {
                        at_positions(&pools[0], &step, 2, positions, tokens);
                    }
                }
                Action::Fork(of) => {
                    let Pair { sequences, tokens, .. } = &pairs[pick(of)];
                    let (sequences, tokens) = (sequences.each_ref().map(Sequence::fork), tokens.clone());
                    pairs.push(Pair { sequences, start: tokens.len(), tokens });
                }
                Action::Truncate(of) => {
                    let Pair { sequences, tokens, start } = &mut pairs[pick(of)];
                    for sequence in sequences {
                        sequence.truncate(*start).unwrap();
                    }
                    tokens.truncate(*start);
                }
                Action::Keep(of) => {
                    let Pair { sequences, tokens, .. } = &pairs[pick(of)];
                    for (cache, sequence) in caches.iter().zip(sequences) {
                        cache.keep(sequence, tokens).unwrap();
                    }
                }
                Action::End(of) => drop(pairs.remove(pick(of))),
            }
        }
        drop(pairs);
        for (pool, cache) in pools.iter().zip(&caches) {
            cache.clear();
            prop_assert_eq!(pool.usage().used, 0, "every page is free after the last handle");
        }
    }
}

/// A recorded graph attends at rewritten positions of several sequences, one row each.
#[test]
fn graphs_read_positions() {
    for device in devices() {
        let spec = PoolSpec::new(two_layers(), 1 << 20).page_tokens(PAGE);
        let pool = KvPool::new(device, &spec).unwrap();
        let tokens = prompt(60);
        let (mut a, mut b) = (pool.sequence(), pool.sequence());
        feed(&pool, &mut a, &tokens[..50]);
        feed(&pool, &mut b, &tokens[..33]);
        let step = pool.reserve_step(StepSize::decode(4, 64)).unwrap();
        let q = Tensor::from_slice(device, &Rng::of("graph").normals(4 * 2 * DIM), &[4, 2, DIM]).unwrap();
        let out = Tensor::zeros(device, DType::F32, &[4, 2, DIM]).unwrap();
        let graph =
            kvant::Encoder::capture(device, |enc| ops::attend(enc, &Attend::new(&q, pool.layer(1)?, &step, &out)));
        let graph = graph.unwrap();
        for [of_a, of_b] in [[48..50, 32..33], [50..50, 30..33], [49..50, 31..33]] {
            let rows = of_a.len() + of_b.len();
            let batch = &mut [(&mut a, of_a.clone()), (&mut b, of_b.clone())];
            pool.positions_into(batch, &step).unwrap();
            graph.replay().unwrap().wait().unwrap();
            let got = out.rows(0..rows).unwrap().to_f32().unwrap();
            let rolled = pool.positions(batch).unwrap();
            let want = Tensor::zeros(device, DType::F32, &[rows, 2, DIM]).unwrap();
            let q = q.rows(0..rows).unwrap();
            run(device, |enc| ops::attend(enc, &Attend::new(&q, pool.layer(1)?, &rolled, &want))).unwrap();
            assert_close(
                format!("{of_a:?}, {of_b:?} on {device}"),
                &got,
                &want.to_f32().unwrap(),
                Bound::of(DType::F32),
            );
        }
    }
}
