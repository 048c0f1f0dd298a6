//! Random histories of a pool, against a list of tokens, naive attention and a naive convolution.

use std::{cell::RefCell, collections::HashMap, ops::Range};

use super::{
    states::{STATE, convolve},
    tokens::{DIM, WINDOW, prompt_token, vector},
};
use crate::common::{
    Bound, Rng, assert_close, devices,
    layers::{self, Source},
    proptest_cases, run,
};
use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, Error, KvPool, PoolSpec, PrefixCache, Sequence, StateLayer, Step,
    Tensor,
    codec::{self, PageMean, TurboQuant},
    ops::{self, Attend, StateRuns},
};
use proptest::prelude::*;

/// The next action of a random history. Indices choose among the existing sequences.
#[derive(Clone, Debug)]
enum Action {
    Begin { prompt: u32, tokens: usize },
    Append { which: Vec<(u16, usize)> },
    Fork(u16),
    Truncate(u16, u16),
    End(u16),
    Keep(u16),
    Find { prompt: u32, tokens: usize },
    Move(u16),
    Hold(u16, usize),
    Forget,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let count = prop_oneof![4 => Just(1usize), 2 => 1..6usize, 2 => 10..45usize];
    let action = prop_oneof![
        3 => (0..3u32, 1..70usize).prop_map(|(prompt, tokens)| Action::Begin { prompt, tokens }),
        8 => prop::collection::vec((any::<u16>(), count), 1..4).prop_map(|which| Action::Append { which }),
        2 => any::<u16>().prop_map(Action::Fork),
        3 => (any::<u16>(), any::<u16>()).prop_map(|(which, len)| Action::Truncate(which, len)),
        2 => any::<u16>().prop_map(Action::End),
        3 => any::<u16>().prop_map(Action::Keep),
        4 => (0..3u32, 1..90usize).prop_map(|(prompt, tokens)| Action::Find { prompt, tokens }),
        1 => any::<u16>().prop_map(Action::Move),
        1 => (any::<u16>(), 0..30usize).prop_map(|(which, n)| Action::Hold(which, n)),
        1 => Just(Action::Forget),
    ];
    prop::collection::vec(action, 1..40)
}

/// A sequence and its expected contents.
struct Tracked {
    sequence: Sequence,
    tokens: Vec<u32>,
    /// The length before the latest step: later tokens can always be removed.
    certain: usize,
    /// In a pool with states: the lengths at which the latest step left states, except its end.
    kept: Vec<usize>,
    hold: usize,
}

/// Positions of a page.
const PAGE: usize = 16;

/// The lengths at which a step of `count` tokens leaves states in a sequence of `len` tokens, except its end.
fn kept_lengths(len: usize, count: usize, hold: usize) -> Vec<usize> {
    let end = if count <= StateRuns::MAX_KEPT { len + count } else { len + hold.min(1) };
    (len.max(end.saturating_sub(hold)).max(1)..end).collect()
}

/// Keys and values by layer and all tokens up to their own. Sealed ones by layer, all tokens up to the end of their
/// page, and position. The devices of a case share them.
type Rows = RefCell<HashMap<(usize, Vec<u32>, Option<usize>), [Vec<f64>; 2]>>;

/// A pool of a full and a sliding layer, with the sequences of a history.
struct History<'a> {
    pool: KvPool,
    cache: PrefixCache,
    codec: Codec,
    rows: &'a Rows,
    tracked: Vec<Tracked>,
}

/// The vector as stored before its page is sealed. A layer that does not seal pages always has it in this form.
fn stored(codec: Codec, x: Vec<f32>) -> Vec<f64> {
    let wide = || x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    match codec {
        Codec::TurboQuant(tq) if tq.centred => x.iter().map(|&x| half::f16::from_f32(x).to_f64()).collect(),
        Codec::TurboQuant(tq) => codec::decode(tq, &codec::encode(tq, &wide()).unwrap()).unwrap(),
        Codec::Dense(_) => wide(),
    }
}

/// The vectors of a page after sealing.
fn sealed(tq: TurboQuant, page: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let mean = PageMean::of(DIM, page.iter().map(Vec::as_slice)).unwrap();
    let of = |x: &Vec<f64>| codec::decode_around(tq, &mean, &codec::encode_around(tq, &mean, x).unwrap()).unwrap();
    page.iter().map(of).collect()
}

impl History<'_> {
    fn new<'a>(device: &Device, codec: Codec, bytes: usize, states: usize, rows: &'a Rows) -> History<'a> {
        let full = CacheLayer::new(1, DIM, codec);
        let sliding = full.window(Some(WINDOW));
        let spec = PoolSpec::new(vec![sliding, full, sliding], bytes).page_tokens(PAGE).host_bytes(bytes / 4);
        let spec = spec.states(vec![StateLayer::new(DType::F32, &STATE); states]);
        let pool = KvPool::new(device, &spec).unwrap();
        let cache = PrefixCache::new(&pool, b"history");
        History { cache, pool, codec, rows, tracked: Vec::new() }
    }

    /// Appends to the sequences, writes their keys and values, and compares attention with the naive one.
    fn append(&mut self, counts: &[(usize, usize)], rng: &mut Rng) -> bool {
        let before: Vec<usize> = self.tracked.iter().map(|tracked| tracked.sequence.len()).collect();
        let used = self.pool.usage().used;
        let mut batch: Vec<(&mut Sequence, usize)> = Vec::new();
        let mut order = Vec::new();
        for (index, tracked) in self.tracked.iter_mut().enumerate() {
            if let Some(&(_, count)) = counts.iter().find(|(which, _)| *which == index) {
                order.push((index, count));
                batch.push((&mut tracked.sequence, count));
            }
        }
        let step = match self.pool.step(&mut batch) {
            Ok(step) => step,
            Err(Error::OutOfPages { missing }) => {
                assert!(missing > 0);
                let after: Vec<usize> = self.tracked.iter().map(|tracked| tracked.sequence.len()).collect();
                assert_eq!((after, self.pool.usage().used), (before, used), "a refused step changes nothing");
                return false;
            }
            Err(error) => panic!("{error}"),
        };
        for &(index, count) in &order {
            let tracked = &mut self.tracked[index];
            if count > 0 {
                tracked.certain = tracked.tokens.len();
                tracked.kept = kept_lengths(tracked.certain, count, tracked.hold);
            }
            let at = tracked.tokens.len();
            tracked.tokens.extend((at..at + count).map(|_| rng.below(1 << 20) as u32));
        }
        self.write_and_compare(&order, &step, rng);
        true
    }

    fn write_and_compare(&self, order: &[(usize, usize)], step: &Step, rng: &mut Rng) {
        let device = self.pool.device();
        let tokens = step.tokens();
        if tokens == 0 {
            return;
        }
        let q = rng.normals(tokens * 2 * DIM);
        for layer in 0..3 {
            let side = |side: u32| -> Vec<f32> {
                let of = |&(index, count): &(usize, usize)| {
                    let all = &self.tracked[index].tokens;
                    (all.len() - count..all.len()).flat_map(move |at| vector(side, layer, &all[..=at]))
                };
                order.iter().flat_map(of).collect()
            };
            let kv_layer = self.pool.layer(layer).unwrap();
            layers::write(kv_layer, &Source { k: side(0), v: side(1), heads: 1, dim: DIM }, DType::F32, step).unwrap();
            let q_tensor = Tensor::from_slice(device, &q, &[tokens, 2, DIM]).unwrap();
            let out = Tensor::zeros(device, DType::F32, &[tokens, 2, DIM]).unwrap();
            run(device, |enc: &mut Encoder| ops::attend(enc, &Attend::new(&q_tensor, kv_layer, step, &out))).unwrap();
            let mut want = Vec::new();
            for &(index, count) in order {
                let all = &self.tracked[index].tokens;
                for position in all.len() - count..all.len() {
                    let first = if layer == 1 { 0 } else { (position + 1).saturating_sub(WINDOW) };
                    let at = want.len();
                    want.extend(self.naive(&q[at..at + 2 * DIM], layer, all, first..position + 1));
                }
            }
            let bound = Bound::of(DType::F32).over(device, self.codec, 1.0);
            // The codec's own encoder computes in f64, so a coordinate at a threshold may differ.
            let loose =
                Bound { arithmetic: bound.arithmetic + if self.codec.is_quantised() { 0.02 } else { 0.0 }, ..bound };
            assert_close(format!("layer {layer} on {device}"), &out.to_f32().unwrap(), &want, loose);
        }
        let sequences: Vec<(&[u32], usize)> =
            order.iter().map(|&(index, count)| (&*self.tracked[index].tokens, count)).collect();
        for state in 0..self.pool.spec().states.len() {
            convolve(&self.pool, state, step, &sequences);
        }
    }

    fn naive(&self, q: &[f32], layer: usize, tokens: &[u32], seen: Range<usize>) -> Vec<f32> {
        let scale = (DIM as f64).powf(-0.5);
        let mut rows = self.rows.borrow_mut();
        let exact = |at: usize| [0, 1].map(|side| stored(self.codec, vector(side, layer, &tokens[..=at])));
        // A token sees the first page, its own and the one before exactly.
        let own = (seen.end - 1) / PAGE;
        let is_sealed = |at: usize| self.codec.is_centred() && at / PAGE > 0 && at / PAGE + 1 < own;
        let key = |at: usize| match is_sealed(at) {
            // A sealed vector depends on the whole page.
            true => (layer, tokens[..(at / PAGE + 1) * PAGE].to_vec(), Some(at)),
            false => (layer, tokens[..=at].to_vec(), None),
        };
        for at in seen.clone() {
            if rows.contains_key(&key(at)) {
                continue;
            }
            let Codec::TurboQuant(tq) = self.codec else {
                rows.insert(key(at), exact(at));
                continue;
            };
            if !is_sealed(at) {
                rows.insert(key(at), exact(at));
                continue;
            }
            let first = at / PAGE * PAGE;
            let [k, v]: [Vec<_>; 2] =
                [0, 1].map(|side| (first..first + PAGE).map(|at| exact(at)[side].clone()).collect());
            for (i, (k, v)) in sealed(tq, &k).into_iter().zip(sealed(tq, &v)).enumerate() {
                rows.insert(key(first + i), [k, v]);
            }
        }
        let rows: Vec<&[Vec<f64>; 2]> = seen.map(|at| &rows[&key(at)]).collect();
        let mut out = Vec::new();
        for q in q.chunks_exact(DIM) {
            let scores: Vec<f64> = rows
                .iter()
                .map(|[k, _]| scale * q.iter().zip(k).map(|(&q, k)| f64::from(q) * k).sum::<f64>())
                .collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            let value = |i: usize| rows.iter().zip(&weights).map(|([_, v], w)| w * v[i]).sum::<f64>() / total;
            out.extend((0..DIM).map(|i| value(i) as f32));
        }
        out
    }

    fn act(&mut self, action: &Action, rng: &mut Rng) {
        let pick = |which: u16, n: usize| usize::from(which) % n.max(1);
        let n = self.tracked.len();
        match *action {
            Action::Begin { prompt, tokens } | Action::Find { prompt, tokens } => {
                let all: Vec<u32> = (0..tokens).map(|at| prompt_token(prompt, at)).collect();
                let sequence = match action {
                    Action::Find { .. } => self.cache.find(&all[..tokens - 1]).unwrap(),
                    _ => self.pool.sequence(),
                };
                let found = sequence.len();
                assert!(found < tokens && found % 16 == 0);
                self.tracked.push(Tracked {
                    sequence,
                    tokens: all[..found].to_vec(),
                    certain: found,
                    kept: Vec::new(),
                    hold: 0,
                });
                // The rest of the prompt, whose tokens are not random.
                let Tracked { sequence, .. } = &mut self.tracked[n];
                match self.pool.step(&mut [(sequence, tokens - found)]) {
                    Ok(step) => {
                        self.tracked[n].tokens = all;
                        self.write_and_compare(&[(n, tokens - found)], &step, rng);
                    }
                    Err(Error::OutOfPages { .. }) => drop(self.tracked.pop()),
                    Err(error) => panic!("{error}"),
                }
            }
            Action::Forget => self.cache.clear(),
            _ if n == 0 => {}
            Action::Append { ref which } => {
                let mut counts: Vec<(usize, usize)> =
                    which.iter().map(|&(which, count)| (pick(which, n), count)).collect();
                counts.sort_unstable();
                counts.dedup_by_key(|(which, _)| *which);
                if !self.append(&counts, rng) {
                    self.tracked.remove(counts[0].0);
                }
            }
            Action::Fork(which) => {
                let Tracked { sequence, tokens, kept, hold, .. } = &self.tracked[pick(which, n)];
                let (sequence, tokens, kept, hold) = (sequence.fork(), tokens.clone(), kept.clone(), *hold);
                self.tracked.push(Tracked { certain: tokens.len(), sequence, tokens, kept, hold });
            }
            Action::Truncate(which, len) => {
                let Tracked { sequence, tokens, certain, kept: held, .. } = &mut self.tracked[pick(which, n)];
                // Often to the start of the latest step, or within it.
                let len = match len % 4 {
                    0 => *certain,
                    1 if !held.is_empty() => held[pick(len / 4, held.len())],
                    _ => pick(len, tokens.len() + 1),
                };
                match sequence.truncate(len) {
                    Ok(()) => {
                        held.retain(|&at| at < len || len == tokens.len());
                        tokens.truncate(len);
                    }
                    Err(Error::NotHeld { needed, oldest }) => {
                        assert!(len < *certain && needed < oldest && sequence.len() == tokens.len());
                    }
                    Err(Error::NoStates { at, kept }) => {
                        assert!(at == len && kept == held.last().copied().or(sequence.boundary()));
                        assert!(len < tokens.len() && !held.contains(&len) && sequence.boundary() != Some(len));
                        assert!(sequence.len() == tokens.len() && !self.pool.spec().states.is_empty());
                    }
                    Err(error) => panic!("{error}"),
                }
                *certain = (*certain).min(tokens.len());
            }
            Action::End(which) => drop(self.tracked.remove(pick(which, n))),
            Action::Keep(which) => {
                let Tracked { sequence, tokens, .. } = &self.tracked[pick(which, n)];
                self.cache.keep(sequence, tokens).unwrap();
            }
            Action::Move(which) => {
                let Tracked { sequence, tokens, .. } = &self.tracked[pick(which, n)];
                let bytes = sequence.export().unwrap();
                match self.pool.import(&bytes) {
                    Ok(sequence) => {
                        assert_eq!(sequence.len(), tokens.len());
                        let tokens = tokens.clone();
                        let (certain, kept) = (tokens.len(), Vec::new());
                        self.tracked.push(Tracked { certain, sequence, tokens, kept, hold: 0 });
                    }
                    Err(Error::OutOfPages { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Action::Hold(which, tokens) => {
                let tracked = &mut self.tracked[pick(which, n)];
                tracked.hold = tokens;
                tracked.sequence.hold(tokens);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: proptest_cases(96), ..ProptestConfig::default() })]
    #[test]
    fn random_histories_match_naive_attention(
        actions in actions(),
        codec in prop::sample::select(vec![Codec::F32, Codec::tq(8), Codec::tq_centred(5)]),
        // From a pool that is nearly always full to one with room for all.
        pages in prop_oneof![6..14usize, 14..60usize],
        states in prop_oneof![2 => Just(0usize), 1 => Just(1), 1 => Just(2)],
        seed in any::<u64>(),
    ) {
        // A page of the sliding group: two layers, whose planes begin at multiples of 256 bytes.
        let widest = if codec.is_centred() { Codec::F16 } else { codec };
        let slab = 2 * 2 * (PAGE * widest.bytes_per_vector(DIM).next_multiple_of(16) + 512);
        let rows = Rows::default();
        for device in devices() {
            // msl-host is slow.
            if device.kind() == kvant::DeviceKind::Metal && seed % 5 != 0 {
                continue;
            }
            let mut history = History::new(device, codec, pages * slab, states, &rows);
            let mut rng = Rng::new(seed);
            for action in &actions {
                history.act(action, &mut rng);
            }
            let History { pool, cache, tracked, .. } = history;
            drop(tracked);
            cache.clear();
            prop_assert_eq!(pool.usage().used, 0, "every page is free after the last handle");
        }
    }
}
