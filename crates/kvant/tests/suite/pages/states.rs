//! The states of recurrent layers in a pool: forks, boundaries, prefixes, exports, graphs.

use super::tokens::{DIM, prompt_token, vector};
use crate::common::{Bound, assert_close, devices, run};
use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, Error, KvPool, PoolSpec, PrefixCache, Sequence, StateLayer, Step,
    StepSize, Tensor,
    ops::{self, CausalConv},
};

/// Channels of the convolution.
const CHANNELS: usize = 8;
/// The inputs that a convolution of three taps keeps.
pub const STATE: [usize; 2] = [2, CHANNELS];
const TAPS: [f32; 3] = [0.5, -1.25, 2.0];
const PAGE: usize = 16;

/// The input of a layer at the last of `tokens`. It depends on all of them, so that the state of another history is
/// detected.
fn input(state: usize, tokens: &[u32]) -> Vec<f32> {
    vector(2, state, tokens)[..CHANNELS].to_vec()
}

/// Runs a convolution over the new tokens of each sequence, given with all its tokens and the number of new ones, and
/// compares it with a naive one over all tokens.
pub fn convolve(pool: &KvPool, state: usize, step: &Step, sequences: &[(&[u32], usize)]) {
    let (device, mut inputs, mut want) = (pool.device(), Vec::new(), Vec::new());
    for &(tokens, count) in sequences {
        for at in tokens.len() - count..tokens.len() {
            inputs.extend(input(state, &tokens[..=at]));
            let mut out = [0.0; CHANNELS];
            for (tap, weight) in TAPS.iter().enumerate() {
                let Some(of) = (at + 1 + tap).checked_sub(TAPS.len()) else { continue };
                let x = input(state, &tokens[..=of]);
                out.iter_mut().zip(x).for_each(|(out, x)| *out += weight * x);
            }
            want.extend(out);
        }
    }
    let got = conv_of(pool, state, step, &inputs);
    let bound = Bound::of(DType::F32).over(device, Codec::F32, 8.0);
    assert_close(format!("state {state} on {device}"), &got.to_f32().unwrap(), &want, bound);
}

/// The convolution of the rows of a step.
fn conv_of(pool: &KvPool, state: usize, step: &Step, inputs: &[f32]) -> Tensor {
    let device = pool.device();
    let x = Tensor::from_slice(device, inputs, &[inputs.len() / CHANNELS, CHANNELS]).unwrap();
    let out = Tensor::zeros(device, DType::F32, x.shape()).unwrap();
    run(device, |enc| conv(enc, pool, state, step, [&x, &out])).unwrap();
    out
}

fn conv(enc: &mut Encoder, pool: &KvPool, state: usize, step: &Step, [x, out]: [&Tensor; 2]) -> kvant::Result<()> {
    let weight = Tensor::from_slice(pool.device(), &TAPS.repeat(CHANNELS), &[CHANNELS, TAPS.len()])?;
    let runs = step.runs()?.expect("a step of a pool with states");
    ops::causal_conv(enc, &CausalConv::new(x, &weight, pool.state(state)?, runs, out))
}

/// A pool of one layer and two states.
fn pool(device: &Device, keeps_boundaries: bool) -> KvPool {
    let state = StateLayer::new(DType::F32, &STATE);
    let spec = PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], 1 << 20).page_tokens(PAGE);
    KvPool::new(device, &spec.states(vec![state.clone(), state]).keeps_boundaries(keeps_boundaries)).unwrap()
}

fn prompt(prompt: u32, len: usize) -> Vec<u32> {
    (0..len).map(|at| prompt_token(prompt, at)).collect()
}

/// Appends the tokens that a sequence lacks, and checks both layers of states.
pub fn feed(pool: &KvPool, sequence: &mut Sequence, tokens: &[u32]) {
    let count = tokens.len() - sequence.len();
    let step = pool.step(&mut [(sequence, count)]).unwrap();
    for state in 0..2 {
        convolve(pool, state, &step, &[(tokens, count)]);
    }
}

/// Bytes of the states of one sequence.
fn page_bytes(pool: &KvPool) -> usize {
    let mut sequence = pool.sequence();
    pool.step(&mut [(&mut sequence, 1)]).unwrap();
    pool.usage().states
}

#[test]
fn a_sequence_goes_back_to_its_boundary_and_nowhere_else() {
    for device in devices() {
        let pool = pool(device, true);
        let tokens = prompt(0, 60);
        let mut sequence = pool.sequence();
        for end in [20, 32] {
            feed(&pool, &mut sequence, &tokens[..end]);
            assert_eq!(sequence.boundary(), None, "no step began at a multiple of {PAGE}");
        }
        for end in [35, 36, 50] {
            feed(&pool, &mut sequence, &tokens[..end]);
            assert_eq!(sequence.boundary(), Some(32));
        }
        for len in [1, 16, 31, 33, 48, 49] {
            let error = sequence.truncate(len).unwrap_err();
            assert!(matches!(error, Error::NoStates { at, kept: Some(32) } if at == len), "{error}");
            assert_eq!(error.to_string(), format!("no states are kept at {len} tokens; they are kept at 32"));
        }
        assert_eq!(sequence.len(), 50);
        sequence.truncate(32).unwrap();
        let other = [&tokens[..32], &prompt(1, 60)[40..]].concat();
        feed(&pool, &mut sequence, &other[..40]);
        sequence.truncate(32).unwrap();
        feed(&pool, &mut sequence, &tokens);
        sequence.truncate(0).unwrap();
        feed(&pool, &mut sequence, &tokens[..7]);
        drop(sequence);
        assert_eq!((pool.usage().used, pool.usage().states), (0, 0));
    }
}

/// After a step with drafts, a sequence goes back to the accepted ones, at any length.
#[test]
fn a_step_that_holds_tokens_goes_back_to_each_of_them() {
    for (device, keeps_boundaries) in devices().iter().flat_map(|device| [(device, true), (device, false)]) {
        let pool = pool(device, keeps_boundaries);
        let (page, tokens, other) = (page_bytes(&pool), prompt(0, 100), prompt(1, 100));
        let mut sequence = pool.sequence();
        feed(&pool, &mut sequence, &tokens[..13]);
        // Four drafts after a token in each step; some are accepted.
        for accepted in [0, 1, 4, 2, 0, 0, 3, 4, 4, 1, 2, 3, 0, 4] {
            let start = sequence.len();
            let drafted = [&tokens[..start + 1 + accepted], &other[40..][..4 - accepted]].concat();
            sequence.hold(4);
            feed(&pool, &mut sequence, &drafted);
            assert!(pool.usage().states <= 6 * page, "the states after each row, and those at the boundary");
            let fork = sequence.fork();
            assert!(sequence.truncate(start).is_err() || keeps_boundaries && start.is_multiple_of(PAGE));
            if sequence.len() > start {
                sequence.truncate(start + 1 + accepted).unwrap();
            } else {
                feed(&pool, &mut sequence, &tokens[..start + 1 + accepted]);
            }
            drop(fork);
        }
        let before = pool.usage().states;
        sequence.hold(0);
        let len = sequence.len();
        feed(&pool, &mut sequence, &tokens[..len + 1]);
        assert!(pool.usage().states <= before.min(2 * page), "a step without drafts releases the others");
        // Boundaries within a step count.
        if keeps_boundaries {
            assert_eq!(sequence.boundary(), Some(len / PAGE * PAGE), "at {len} tokens");
        }
        drop(sequence);
        assert_eq!(pool.usage().used, 0);
    }
}

/// The lengths to which a sequence can go back, by the tokens of its last step and those that it holds.
#[test]
fn held_tokens_can_be_removed() {
    let pool = pool(&Device::cpu(), false);
    let tokens = prompt(0, 60);
    let counts = [1, 2, 7, 15, 16, 17, 30];
    for (count, hold) in counts.into_iter().flat_map(|count| [0, 1, 3, 15, 16, 40].map(|hold| (count, hold))) {
        for start in [0, 16, 20] {
            for to in 1..start + count {
                let mut sequence = pool.sequence();
                if start > 0 {
                    feed(&pool, &mut sequence, &tokens[..start]);
                }
                sequence.hold(hold);
                feed(&pool, &mut sequence, &tokens[..start + count]);
                let is_held = match count {
                    ..=16 => to >= start && to + hold >= start + count,
                    _ => to == start && hold > 0,
                };
                assert_eq!(sequence.truncate(to).is_ok(), is_held, "{start} + {count} tokens, {hold} held: to {to}");
                let next = [&tokens[..sequence.len()], &prompt(1, 60)[40..]].concat();
                feed(&pool, &mut sequence, &next);
            }
        }
    }
    assert_eq!(pool.usage().used, 0);
}

/// A step may end short of its rows twice: lengths below the first one can still be chosen.
#[test]
fn a_step_is_shortened_twice() {
    for device in devices() {
        let pool = pool(device, true);
        let tokens = prompt(0, 60);
        let mut sequence = pool.sequence();
        feed(&pool, &mut sequence, &tokens[..9]);
        sequence.hold(12);
        feed(&pool, &mut sequence, &tokens[..21]);
        let fork = sequence.fork();
        for len in [19, 16, 10, 9] {
            sequence.truncate(len).unwrap();
            assert!(sequence.truncate(8).is_err());
        }
        let other = [&tokens[..9], &prompt(1, 60)[40..]].concat();
        feed(&pool, &mut sequence, &other);
        // The fork shares the states and still has all of them.
        for len in [18, 11] {
            let mut sequence = fork.fork();
            sequence.truncate(len).unwrap();
            feed(&pool, &mut sequence, &tokens[..30]);
        }
        drop((sequence, fork));
        assert_eq!(pool.usage().used, 0);
    }
}

/// Forks that continue at a boundary read the same states in one step.
#[test]
fn forks_share_the_states_of_a_boundary() {
    for device in devices() {
        let pool = pool(device, true);
        let (page, tokens) = (page_bytes(&pool), prompt(0, 60));
        let mut a = pool.sequence();
        feed(&pool, &mut a, &tokens[..32]);
        let mut b = a.fork();
        let other = [&tokens[..32], &prompt(1, 60)[40..]].concat();
        let step = pool.step(&mut [(&mut a, 3), (&mut b, 5)]).unwrap();
        for state in 0..2 {
            convolve(&pool, state, &step, &[(&tokens[..35], 3), (&other[..37], 5)]);
        }
        assert_eq!(pool.usage().states, 3 * page, "the boundary, and the states of each");
        for sequence in [&mut a, &mut b] {
            sequence.truncate(32).unwrap();
        }
        feed(&pool, &mut b, &other);
        feed(&pool, &mut a, &tokens);
    }
}

/// A sequence whose prefixes are kept needs two pages of states, however many boundaries it passes.
#[test]
fn kept_boundaries_make_room() {
    let state = StateLayer::new(DType::F32, &[64, 256]);
    let spec = PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], 3 * 64 * 256 * 4).page_tokens(PAGE);
    let pool = KvPool::new(&Device::cpu(), &spec.states(vec![state])).unwrap();
    let (cache, tokens) = (PrefixCache::new(&pool, b"states"), prompt(0, 90));
    let mut sequence = pool.sequence();
    for end in [16, 32, 48, 50, 64, 80, 90] {
        let count = end - sequence.len();
        pool.step(&mut [(&mut sequence, count)]).unwrap();
        cache.keep(&sequence, &tokens[..end]).unwrap();
    }
    drop(sequence);
    assert_eq!(cache.find(&tokens).unwrap().len(), 80);
}

/// A refused step leaves the held states of its sequences.
#[test]
fn held_states_need_memory() {
    let spec = |pages: usize| {
        let state = StateLayer::new(DType::F32, &[64, 256]);
        let spec = PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], pages * 64 * 256 * 4);
        spec.page_tokens(PAGE).states(vec![state]).keeps_boundaries(false)
    };
    let pool = KvPool::new(&Device::cpu(), &spec(4)).unwrap();
    let mut sequence = pool.sequence();
    sequence.hold(2);
    pool.step(&mut [(&mut sequence, 5)]).unwrap();
    pool.step(&mut [(&mut sequence, 5)]).unwrap();
    let mut other = pool.sequence();
    assert!(matches!(pool.step(&mut [(&mut other, 1)]), Err(Error::OutOfPages { .. })));
    assert!(matches!(pool.step(&mut [(&mut sequence, 4), (&mut other, 1)]), Err(Error::OutOfPages { .. })));
    sequence.truncate(8).unwrap();
    sequence.hold(0);
    pool.step(&mut [(&mut sequence, 1), (&mut other, 1)]).unwrap();
    drop((sequence, other));
    assert_eq!(pool.usage().used, 0);
}

#[test]
fn forks_copy_their_states_at_the_first_write() {
    for device in devices() {
        let pool = pool(device, true);
        let (page, tokens) = (page_bytes(&pool), prompt(0, 40));
        let mut a = pool.sequence();
        feed(&pool, &mut a, &tokens[..20]);
        let mut b = a.fork();
        assert_eq!(pool.usage().states, page);
        let other = [&tokens[..20], &prompt(1, 60)[40..]].concat();
        for end in [23, 30] {
            feed(&pool, &mut b, &other[..end]);
            assert_eq!(pool.usage().states, 2 * page);
            feed(&pool, &mut a, &tokens[..end]);
            assert_eq!(pool.usage().states, 2 * page, "the last holder writes in place");
        }
    }
}

/// Without boundaries, a sequence has one copy of its states, and can only start again.
#[test]
fn boundaries_can_be_given_up_for_memory() {
    let (with, without) = (pool(&Device::cpu(), true), pool(&Device::cpu(), false));
    let page = page_bytes(&without);
    assert_eq!(with.need(40, 16) - without.need(40, 16), page);
    let tokens = prompt(0, 40);
    let mut sequence = without.sequence();
    for end in [32, 33, 40] {
        feed(&without, &mut sequence, &tokens[..end]);
    }
    assert_eq!((without.usage().states, sequence.boundary()), (page, None));
    assert!(matches!(sequence.truncate(32), Err(Error::NoStates { at: 32, kept: None })));
    sequence.truncate(0).unwrap();
    assert_eq!(without.usage().used, 0);
}

/// A prefix is found where a step ended at a multiple of the page size, and continues with the states there.
#[test]
fn prefixes_are_found_where_their_states_are_kept() {
    for device in devices() {
        let pool = pool(device, true);
        let cache = PrefixCache::new(&pool, b"states");
        let tokens = prompt(0, 90);
        let mut sequence = pool.sequence();
        feed(&pool, &mut sequence, &tokens[..40]);
        cache.keep(&sequence, &tokens[..40]).unwrap();
        assert_eq!((cache.matched(&tokens), cache.find(&tokens).unwrap().len()), (32, 0));
        feed(&pool, &mut sequence, &tokens[..64]);
        cache.keep(&sequence, &tokens[..64]).unwrap();
        feed(&pool, &mut sequence, &tokens[..70]);
        cache.keep(&sequence, &tokens[..70]).unwrap();
        drop(sequence);
        for (asked, found) in [(90, 64), (64, 64), (63, 0), (32, 0)] {
            assert_eq!(cache.find(&tokens[..asked]).unwrap().len(), found, "{asked} tokens");
        }
        // The states of a finished text: those of its last boundary.
        let mut sequence = cache.find(&tokens).unwrap();
        for end in 65..=90 {
            feed(&pool, &mut sequence, &tokens[..end]);
        }
        cache.keep(&sequence, &tokens).unwrap();
        drop(sequence);
        let mut found = cache.find(&tokens).unwrap();
        assert_eq!(found.len(), 80);
        feed(&pool, &mut found, &tokens);
        // Another text parts from it at 40 tokens: a step that ends at 32 makes that a place to continue.
        let other = prompt(1, 90);
        assert_eq!((cache.matched(&other), cache.find(&other).unwrap().len()), (32, 0));
        let mut sequence = pool.sequence();
        feed(&pool, &mut sequence, &other[..32]);
        cache.keep(&sequence, &other[..32]).unwrap();
        assert_eq!(cache.find(&prompt(2, 90)).unwrap().len(), 32);
        drop((sequence, found));
        cache.clear();
        assert_eq!(pool.usage().used, 0);
    }
}

/// When memory is short, states within a prefix move to host memory, and the prefix can still be continued there.
#[test]
fn states_within_prefixes_come_back_from_host_memory() {
    for device in devices() {
        for host in [0, 1 << 20] {
            // States are larger than pages of keys and values, and there is room for ten of them.
            let shapes: [&[usize]; 3] = [&STATE, &STATE, &[64, 64]];
            let spec = PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], 170 << 10).page_tokens(PAGE);
            let states = shapes.map(|shape| StateLayer::new(DType::F32, shape));
            let spec = spec.states(states.to_vec()).host_bytes(host);
            let pool = KvPool::new(device, &spec).unwrap();
            let cache = PrefixCache::new(&pool, b"states");
            let tokens = prompt(0, 70);
            let mut sequence = pool.sequence();
            for end in [16, 32, 48, 64, 70] {
                feed(&pool, &mut sequence, &tokens[..end]);
                cache.keep(&sequence, &tokens[..end]).unwrap();
            }
            drop(sequence);
            let kept = pool.usage().states;
            // Another text takes memory until the states within the first one are evicted.
            let (mut other, mut len) = (pool.sequence(), 0);
            while cache.find(&tokens[..49]).unwrap().len() == 48 && pool.usage().host == 0 {
                len += PAGE;
                pool.step(&mut [(&mut other, PAGE)]).unwrap();
                assert!(len < 1 << 12, "the pool is full before");
            }
            assert!(pool.usage().states < kept + kept / 2, "states were evicted");
            drop(other);
            let found: Vec<usize> = [17, 33, 49, 65].map(|end| cache.find(&tokens[..end]).unwrap().len()).to_vec();
            let all = [16, 32, 48, 64];
            match host {
                0 => assert!(found != all && found[3] == 64, "{found:?}: the end stays"),
                _ => assert_eq!(found, all, "on {device}"),
            }
            let mut sequence = cache.find(&tokens[..20]).unwrap();
            feed(&pool, &mut sequence, &tokens[..40]);
            drop(sequence);
            cache.clear();
            assert_eq!((pool.usage().used, pool.usage().host), (0, 0));
        }
    }
}

#[test]
fn states_move_with_their_sequence() {
    for device in devices() {
        let (from, to) = (pool(device, true), pool(device, true));
        let tokens = prompt(0, 60);
        let mut sequence = from.sequence();
        feed(&from, &mut sequence, &tokens[..32]);
        feed(&from, &mut sequence, &tokens[..45]);
        let bytes = sequence.export().unwrap();
        let mut moved = to.import(&bytes).unwrap();
        assert_eq!((moved.len(), moved.boundary()), (45, Some(32)));
        feed(&to, &mut moved, &tokens[..50]);
        moved.truncate(32).unwrap();
        feed(&to, &mut moved, &tokens);
        let layers = from.spec().layers.clone();
        let plain = KvPool::new(device, &PoolSpec::new(layers, 1 << 20).page_tokens(PAGE)).unwrap();
        assert!(matches!(plain.import(&bytes), Err(Error::File { .. })), "a pool without states");
        assert!(matches!(pool(device, false).import(&bytes), Err(Error::File { .. })), "no room for the boundary");
    }
}

/// A recorded step serves sequences that join and leave, with one token each or several.
#[test]
fn a_graph_continues_the_states_of_its_sequences() {
    for device in devices() {
        let pool = pool(device, true);
        let step = pool.reserve_step(StepSize::decode(6, 64)).unwrap();
        let [x, out] = [(); 2].map(|()| Tensor::zeros(device, DType::F32, &[6, CHANNELS]).unwrap());
        let graph = Encoder::capture(device, |enc| conv(enc, &pool, 0, &step, [&x, &out])).unwrap();
        let mut sequences: Vec<(Sequence, Vec<u32>)> = Vec::new();
        for round in 0..40u32 {
            if round % 3 == 0 && sequences.len() < 3 {
                sequences.push((pool.sequence(), Vec::new()));
            }
            if round % 11 == 10 {
                sequences.remove(0);
            }
            // Up to two tokens of each of three sequences.
            let counts: Vec<usize> = (0..sequences.len()).map(|index| 1 + (round as usize + index) % 2).collect();
            let (mut inputs, mut want) = (vec![0.0; 6 * CHANNELS], Vec::new());
            for ((_, tokens), &count) in sequences.iter_mut().zip(&counts) {
                for _ in 0..count {
                    tokens.push(round * 7 + tokens.len() as u32);
                    let at = want.len();
                    inputs[at..at + CHANNELS].copy_from_slice(&input(0, tokens));
                    let of = |back: usize| tokens.len().checked_sub(back).map(|end| input(0, &tokens[..end]));
                    let terms = (0..3).map(|back| of(back).filter(|_| tokens.len() > back));
                    let mut sum = vec![0.0; CHANNELS];
                    for (x, weight) in terms.zip(TAPS.iter().rev()) {
                        sum.iter_mut().zip(x.unwrap_or_default()).for_each(|(sum, x)| *sum += weight * x);
                    }
                    want.extend(sum);
                }
            }
            x.write(&inputs).unwrap();
            let mut batch: Vec<(&mut Sequence, usize)> =
                sequences.iter_mut().zip(&counts).map(|((sequence, _), &count)| (sequence, count)).collect();
            pool.tokens_into(&mut batch, &step).unwrap();
            graph.replay().unwrap().wait().unwrap();
            let got = out.to_f32().unwrap();
            let bound = Bound::of(DType::F32).over(device, Codec::F32, 8.0);
            assert_close(format!("round {round} on {device}"), &got[..want.len()], &want, bound);
        }
    }
}

#[test]
fn steps_without_states_have_no_runs() {
    let pool = KvPool::new(&Device::cpu(), &PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], 1 << 20)).unwrap();
    let mut sequence = pool.sequence();
    let step = pool.step(&mut [(&mut sequence, 3)]).unwrap();
    assert!(step.runs().unwrap().is_none() && pool.state(0).is_err());
    let empty = StateLayer::new(DType::F32, &[2, 0]);
    let spec = PoolSpec::new(pool.spec().layers.clone(), 1 << 20).states(vec![empty]);
    assert!(matches!(KvPool::new(&Device::cpu(), &spec), Err(Error::Value { arg: "states", .. })));
}
