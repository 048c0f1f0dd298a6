//! Caches of sealed pages whose positions are divided among the ranks: each rank is a device with its rows alone.

use super::by_page::{DIM, HEADS, KV_HEADS, Space, dividing, feed, pool};
use crate::common::{Bound, Rng, assert_close, nmse, run};
use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, KeyBias, KeyTurns, KvPool, PoolSpec, PrefixCache, Sequence, Step,
    StepSize, Tensor,
    ops::{self, Attend, KvWrite, NormRope, Rope},
};

/// Positions of a page on all ranks together.
const PAGE: usize = 64;
const CENTRED: Codec = Codec::tq_centred(4);

/// A sequence with the rows of one rank, in a pool of the reference. Its pages have the rank's part of a page.
struct RankRows {
    pool: KvPool,
    sequence: Sequence,
    latest: Option<Step>,
}

impl RankRows {
    fn new(ranks: usize, codec: Codec) -> RankRows {
        let layer = CacheLayer::new(KV_HEADS, DIM, codec);
        let spec = PoolSpec::new(vec![layer], 0).page_tokens(PAGE / ranks).room_for(1, 512, 64).unwrap();
        let pool = KvPool::new(&Device::reference(), &spec).unwrap();
        RankRows { sequence: pool.sequence(), pool, latest: None }
    }

    fn store(&mut self, space: &Space) {
        let step = self.pool.step(&mut [(&mut self.sequence, 1)]).unwrap();
        let layer = self.pool.layer(0).unwrap();
        run(self.pool.device(), |enc| ops::kv_write(enc, &KvWrite::new(&space.k, &space.v, &step, layer))).unwrap();
        self.latest = Some(step);
    }

    /// The result over all rows `[H, D]`, and its ends.
    fn attend(&self, space: &Space) -> Option<[Vec<f32>; 2]> {
        let (step, device) = (self.latest.as_ref()?, self.pool.device());
        let out = Tensor::zeros(device, DType::F32, &[1, HEADS, DIM]).unwrap();
        let ends = Tensor::zeros(device, DType::F32, &[1, HEADS]).unwrap();
        let attend = Attend::new(&space.q, self.pool.layer(0).unwrap(), step, &out).ends(Some(&ends));
        run(device, |enc| ops::attend(enc, &attend.softcap(Some(20.0)))).unwrap();
        Some([out.to_vec().unwrap(), ends.to_vec().unwrap()])
    }
}

/// The sink of a head, as in [`Space`].
fn sink(head: usize) -> f64 {
    head as f64 / 4.0 - 1.0
}

/// Merges results of ranks and the sinks, in f64.
fn merged(results: &[[Vec<f32>; 2]]) -> Vec<f32> {
    let weight = |result: &[Vec<f32>; 2], head: usize| f64::from(result[1][head]).exp2();
    let element = |at: usize| {
        let head = at / DIM;
        let sum: f64 = results.iter().map(|result| weight(result, head)).sum();
        let weighted: f64 = results.iter().map(|result| weight(result, head) * f64::from(result[0][at])).sum();
        (weighted / (sum + sink(head).exp())) as f32
    };
    (0..HEADS * DIM).map(element).collect()
}

/// Attention of each token, token by token.
fn by_rank_rows(tokens: &[u32], ranks: usize, codec: Codec) -> Vec<f32> {
    let mut rows: Vec<RankRows> = (0..ranks).map(|_| RankRows::new(ranks, codec)).collect();
    let of_token = |(position, &token): (usize, &u32)| {
        let space = Space::new(&Device::reference(), &[token]).unwrap();
        rows[position % PAGE / (PAGE / ranks)].store(&space);
        merged(&rows.iter().filter_map(|rows| rows.attend(&space)).collect::<Vec<_>>())
    };
    tokens.iter().enumerate().flat_map(of_token).collect()
}

#[test]
fn ranks_seal_their_rows() {
    let tokens: Vec<u32> = (0..470).collect();
    for ranks in [2, 4] {
        let groups: Vec<Device> = dividing().into_iter().filter(|group| group.ranks() == ranks).collect();
        for codec in [CENTRED, Codec::tq_centred(6)] {
            if groups.is_empty() {
                continue;
            }
            let want = by_rank_rows(&tokens, ranks, codec);
            for group in &groups {
                let layer = CacheLayer::new(KV_HEADS, DIM, codec).position_ranks(ranks);
                let spec = PoolSpec::new(vec![layer], 0).page_tokens(PAGE).room_for(1, 512, 140).unwrap();
                let pool = KvPool::new(group, &spec).unwrap();
                // An index next to a threshold may differ from the reference's. A page in the wrong form costs 1e-5.
                // Chunks begin and end within shares and pages, and are longer than pages.
                let (mut sequence, mut rng) = (pool.sequence(), Rng::of("chunks"));
                while sequence.len() < tokens.len() {
                    let at = sequence.len();
                    let count = [1, 1, 1 + rng.below(40), 1 + rng.below(140)][rng.below(4)].min(tokens.len() - at);
                    let got = feed(&pool, &mut [(&mut sequence, &tokens[at..at + count])]).unwrap();
                    let want = &want[at * HEADS * DIM..(at + count) * HEADS * DIM];
                    let error = nmse(&got, want);
                    assert!(error < 1e-7, "{group}: {codec}, {count} after {at}: {error:.1e}");
                }
            }
        }
    }
}

/// Truncated and forked sequences, and continued prefixes, have the results of sequences fed at once.
#[test]
fn any_history_gives_equal_pages() {
    for group in dividing() {
        let spec = PoolSpec::new(vec![CacheLayer::new(KV_HEADS, DIM, CENTRED).position_ranks(group.ranks())], 0);
        let pool = KvPool::new(&group, &spec.page_tokens(PAGE).room_for(8, 512, 128).unwrap()).unwrap();
        let (cache, mut rng) = (PrefixCache::new(&pool, b"sealed"), Rng::of("sealed history"));
        let bound = Bound::of(DType::F32).over(&group.rank(0).unwrap(), CENTRED, 1.0).times(4.0);
        let (mut truncated, mut found_tokens) = (0, 0);
        for round in 0..12u32 {
            let tokens: Vec<u32> = (0..420).map(|at| if at < 200 { at } else { round * 1000 + at }).collect();
            let mut sequence = cache.find(&tokens).unwrap();
            found_tokens += sequence.len();
            let mut got = Vec::new();
            while sequence.len() < tokens.len() {
                let at = sequence.len();
                let count = (1 + rng.below(100)).min(tokens.len() - at);
                got = feed(&pool, &mut [(&mut sequence, &tokens[at..at + count])]).unwrap();
                if rng.below(4) == 0 {
                    // Wrong tokens of a fork leave no trace.
                    let mut fork = sequence.fork();
                    feed(&pool, &mut [(&mut fork, &[7; 30])]).unwrap();
                }
                if rng.below(3) == 0 && count > 1 && at + count < tokens.len() {
                    sequence.truncate(at + 1 + rng.below(count - 1)).unwrap();
                    truncated += 1;
                }
                if rng.below(3) == 0 {
                    cache.keep(&sequence, &tokens[..sequence.len()]).unwrap();
                }
            }
            let mut whole = pool.sequence();
            let want = feed(&pool, &mut [(&mut whole, &tokens)]).unwrap();
            assert_close(format!("{group}: round {round}"), &got, &want[want.len() - got.len()..], bound);
        }
        assert!(truncated > 5 && found_tokens > 6 * PAGE, "{group}: {truncated} {found_tokens}");
    }
}

/// Wherever a prompt ends, its last full page can be continued.
#[test]
fn prefixes_of_any_length_are_found() {
    for group in dividing() {
        let pool = pool(&group, CENTRED, 3);
        for extra in 0..PAGE {
            let cache = PrefixCache::new(&pool, format!("prefix {extra}").as_bytes());
            let tokens: Vec<u32> = (0..(3 * PAGE + extra) as u32).collect();
            let mut sequence = pool.sequence();
            pool.step(&mut [(&mut sequence, 20)]).unwrap();
            while sequence.len() < tokens.len() {
                let count = (tokens.len() - sequence.len()).min(PAGE);
                pool.step(&mut [(&mut sequence, count)]).unwrap();
            }
            cache.keep(&sequence, &tokens).unwrap();
            let wanted = [&tokens[..], &[9]].concat();
            assert_eq!(cache.find(&wanted).unwrap().len(), 3 * PAGE, "{group}: {extra} more");
        }
    }
}

#[test]
fn recorded_steps_seal() {
    for group in dividing() {
        let (pool, other) = (pool(&group, CENTRED, 1), pool(&group, CENTRED, 1));
        let step = pool.reserve_step(StepSize::decode(1, 512)).unwrap();
        let space = Space::new(&group, &[0]).unwrap();
        let graph = Encoder::capture(&group, |enc| {
            space.store(enc, &pool, &step)?;
            space.attend(enc, &pool, &step)
        })
        .unwrap();
        let (mut sequence, mut same) = (pool.sequence(), other.sequence());
        let prompt: Vec<u32> = (0..60).collect();
        feed(&pool, &mut [(&mut sequence, &prompt)]).unwrap();
        feed(&other, &mut [(&mut same, &prompt)]).unwrap();
        let bound = Bound::of(DType::F32).over(&group.rank(0).unwrap(), CENTRED, 1.0).times(4.0);
        for token in 60..260 {
            let fresh = Space::new(&group, &[token]).unwrap();
            for (to, from) in [(&space.q, &fresh.q), (&space.k, &fresh.k), (&space.v, &fresh.v)] {
                to.write(&from.to_vec::<f32>().unwrap()).unwrap();
            }
            pool.step_into(&mut [(&mut sequence, 1)], &step).unwrap();
            graph.replay().unwrap().wait().unwrap();
            let want = feed(&other, &mut [(&mut same, &[token])]).unwrap();
            assert_close(format!("{group}: token {token}"), &space.result().unwrap(), &want, bound);
        }
    }
}

/// Sealed keys lack their bias, which turns by positions of the text.
#[test]
fn biases_turn_by_positions_of_the_text() {
    let tokens: Vec<u32> = (0..400).collect();
    let rope = Rope::new(1e4, DIM / 2);
    let bias_values: Vec<f32> = Rng::of("bias").normals(KV_HEADS * DIM).iter().map(|x| 10.0 * x).collect();
    for group in dividing() {
        let ranks = group.ranks();
        let results = |codec: Codec, has_bias: bool| {
            let layer = CacheLayer::new(KV_HEADS, DIM, codec).position_ranks(ranks);
            let spec = PoolSpec::new(vec![layer], 0).page_tokens(PAGE).room_for(1, 400, 400).unwrap();
            let turns = KeyTurns::divided(&group, rope, DIM, [PAGE, ranks], 400).unwrap();
            let bias = Tensor::from_slice(&group, &bias_values, &[KV_HEADS, DIM]).unwrap();
            let of_layer = has_bias.then(|| KeyBias::new(&bias, &turns).unwrap());
            let pool = KvPool::with_key_biases(&group, &spec, vec![of_layer]).unwrap();
            let space = Space::new(&group, &tokens).unwrap();
            // Scores stay within the softcap.
            space.q.write(&space.q.to_vec::<f32>().unwrap().iter().map(|x| x / 2.0).collect::<Vec<f32>>()).unwrap();
            let k = space.k.to_vec::<f32>().unwrap();
            let biased: Vec<f32> = k.iter().zip(bias_values.iter().cycle()).map(|(k, bias)| k + bias).collect();
            space.k.write(&biased).unwrap();
            let mut sequence = pool.sequence();
            let step = pool.step(&mut [(&mut sequence, tokens.len())]).unwrap();
            run(&group, |enc| {
                ops::norm_rope(enc, &NormRope::new(&space.k, step.positions(), &space.k).rope(Some(rope)))?;
                space.store(enc, &pool, &step)?;
                space.attend(enc, &pool, &step)
            })
            .unwrap();
            space.result().unwrap()
        };
        let exact = results(Codec::F32, false);
        let [with, without] = [true, false].map(|has_bias| nmse(&results(CENTRED, has_bias), &exact));
        assert!(with < 0.05 && with < without / 3.0, "{group}: {with} and {without}");
    }
}
