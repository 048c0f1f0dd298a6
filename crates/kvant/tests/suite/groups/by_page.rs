//! Caches whose positions are divided among the ranks: attention is that of one device, whatever happens to sequences.

use super::{cpus, groups, reference_groups};
use crate::common::{Bound, Rng, assert_close, run};
use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, Error, KvPool, PoolSpec, PrefixCache, Result, Sequence, Step, StepSize,
    Tensor,
    ops::{self, AllGather, Attend, HeadNorm, KvRead, KvSide, KvWrite, MergeAttention, NormRopeWrite, Query, Rope},
};

pub(super) const HEADS: usize = 8;
pub(super) const KV_HEADS: usize = 2;
pub(super) const DIM: usize = 64;

/// Groups whose ranks can divide a page of 64 positions.
pub(super) fn dividing() -> Vec<Device> {
    groups()
        .into_iter()
        .chain(reference_groups())
        .filter(|group| group.ranks().is_power_of_two() && group.ranks() <= 4)
        .collect()
}

fn layer(device: &Device, codec: Codec) -> CacheLayer {
    CacheLayer::new(KV_HEADS, DIM, codec).position_ranks(device.ranks())
}

pub(super) fn pool(device: &Device, codec: Codec, sequences: usize) -> KvPool {
    let spec = PoolSpec::new(vec![layer(device, codec)], 0).page_tokens(64).room_for(sequences, 512, 64).unwrap();
    KvPool::new(device, &spec).unwrap()
}

/// The vectors of tokens, `[tokens, heads, D]`, on all ranks.
fn vectors(device: &Device, tokens: &[u32], heads: usize) -> Result<Tensor> {
    let values = tokens.iter().flat_map(|token| Rng::of(format!("{heads} heads of {token}")).normals(heads * DIM));
    Tensor::from_slice(device, &values.collect::<Vec<f32>>(), &[tokens.len(), heads, DIM])
}

/// The tensors of a pass over some tokens.
pub(super) struct Space {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    sinks: Tensor,
    out: Tensor,
    ends: Tensor,
    own: Tensor,
    all: Tensor,
}

impl Space {
    pub fn new(device: &Device, tokens: &[u32]) -> Result<Space> {
        let (count, ranks) = (tokens.len(), device.ranks());
        let zeros = |shape: &[usize]| Tensor::zeros(device, DType::F32, shape);
        let own = HEADS / ranks;
        Ok(Space {
            q: vectors(device, tokens, HEADS)?,
            k: vectors(device, tokens, KV_HEADS)?,
            v: vectors(device, &tokens.iter().map(|token| token + 1_000_000).collect::<Vec<_>>(), KV_HEADS)?,
            sinks: Tensor::from_rank_bytes(device, DType::F32, &[own], |rank| {
                let sinks: Vec<f32> = (rank * own..(rank + 1) * own).map(|head| head as f32 / 4.0 - 1.0).collect();
                Ok::<_, Error>(bytemuck::cast_slice::<f32, u8>(&sinks).to_vec())
            })?,
            out: zeros(&[count, HEADS, DIM])?,
            ends: zeros(&[count, HEADS])?,
            own: zeros(&[count, own, DIM])?,
            all: zeros(&[count, HEADS * DIM])?,
        })
    }

    /// Stores keys and values.
    pub fn store(&self, enc: &mut Encoder, pool: &KvPool, step: &Step) -> Result<()> {
        ops::kv_write(enc, &KvWrite::new(&self.k, &self.v, step, pool.layer(0)?))
    }

    /// Attends to the keys of all ranks.
    pub fn attend(&self, enc: &mut Encoder, pool: &KvPool, step: &Step) -> Result<()> {
        self.attend_with(enc, pool, step, (&self.q).into())
    }

    fn attend_with(&self, enc: &mut Encoder, pool: &KvPool, step: &Step, q: Query) -> Result<()> {
        let (count, ranks) = (self.q.shape()[0], pool.device().ranks());
        let attend = Attend::new(q, pool.layer(0)?, step, &self.out).ends(Some(&self.ends));
        ops::attend(enc, &attend.softcap(Some(20.0)))?;
        ops::merge_attention(enc, &MergeAttention::new(&self.out, &self.ends, &self.own).sinks(Some(&self.sinks)))?;
        ops::all_gather(enc, &AllGather::new(&self.own.reshape(&[count, HEADS / ranks * DIM])?, &self.all))
    }

    pub fn result(&self) -> Result<Vec<f32>> {
        self.all.on_rank(self.all.device().ranks() - 1)?.to_vec()
    }
}

/// Appends tokens to sequences; returns the attention of all of them.
pub(super) fn feed(pool: &KvPool, batch: &mut [(&mut Sequence, &[u32])]) -> Result<Vec<f32>> {
    let tokens: Vec<u32> = batch.iter().flat_map(|(_, tokens)| tokens.to_vec()).collect();
    let mut counts: Vec<_> = batch.iter_mut().map(|(sequence, tokens)| (&mut **sequence, tokens.len())).collect();
    let step = pool.step(&mut counts)?;
    let space = Space::new(pool.device(), &tokens)?;
    run(pool.device(), |enc| {
        space.store(enc, pool, &step)?;
        space.attend(enc, pool, &step)
    })?;
    space.result()
}

/// A pool with whole positions on the reference.
fn whole(sequences: usize) -> KvPool {
    pool(&Device::reference(), Codec::F32, sequences)
}

fn assert_near(what: impl std::fmt::Display, got: &[f32], want: &[f32]) {
    assert_close(what, got, want, Bound::of(DType::F32).times(4.0));
}

const CODECS: [Codec; 4] = [Codec::F32, Codec::F16, Codec::BF16, Codec::tq(4)];

#[test]
fn prompts_and_single_tokens() {
    let tokens: Vec<u32> = (0..300).collect();
    for codec in CODECS {
        let one = pool(&Device::reference(), codec, 1);
        for group in dividing() {
            let pool = pool(&group, codec, 1);
            let (mut sequence, mut same) = (pool.sequence(), one.sequence());
            let bound = Bound::of(DType::F32).over(&group.rank(0).unwrap(), codec, 1.0).times(4.0);
            // The first ranks alone have keys at first; chunks begin and end within shares and pages.
            for count in [1, 1, 14, 1, 20, 27, 1, 100, 1, 60, 1, 1, 64] {
                let piece = &tokens[sequence.len()..sequence.len() + count];
                let got = feed(&pool, &mut [(&mut sequence, piece)]).unwrap();
                let want = feed(&one, &mut [(&mut same, piece)]).unwrap();
                assert_close(format!("{group}: {codec}, {count} before {}", same.len()), &got, &want, bound);
            }
        }
    }
}

/// A batch of single tokens and prompts of several lengths.
#[test]
fn batches() {
    let one = whole(4);
    for group in dividing() {
        let pool = pool(&group, Codec::F32, 4);
        let mut ours: Vec<Sequence> = (0..4).map(|_| pool.sequence()).collect();
        let mut wanted: Vec<Sequence> = (0..4).map(|_| one.sequence()).collect();
        for (round, counts) in [[3, 70, 17, 0], [1, 1, 1, 5], [1, 1, 40, 33], [1, 0, 1, 1]].into_iter().enumerate() {
            let tokens = [0u32, 1, 2, 3].map(|index| {
                let first = index * 1000 + round as u32 * 100;
                (first..first + counts[index as usize]).collect::<Vec<u32>>()
            });
            let batch = |sequences: &mut Vec<Sequence>, pool: &KvPool| {
                let mut batch: Vec<_> = sequences.iter_mut().zip(&tokens).map(|(s, tokens)| (s, &tokens[..])).collect();
                feed(pool, &mut batch).unwrap()
            };
            assert_near(format!("{group}: {round}"), &batch(&mut ours, &pool), &batch(&mut wanted, &one));
        }
    }
}

/// Keys and queries are rotated by their positions in the text, wherever a rank stores them.
#[test]
fn rotated_keys() {
    let rope = Rope::new(1e4, DIM / 2);
    let feed = |pool: &KvPool, sequence: &mut Sequence, tokens: &[u32]| -> Result<Vec<f32>> {
        let (device, space) = (pool.device(), Space::new(pool.device(), tokens)?);
        let step = pool.step(&mut [(sequence, tokens.len())])?;
        run(device, |enc| {
            let write = NormRopeWrite::new(&space.q, &space.k, &space.v, &step, pool.layer(0)?, &space.q);
            let norm = HeadNorm::new(1e-6);
            let q = ops::norm_rope_write(enc, &write.k_norm(Some(norm)).v_norm(Some(norm)).rope(Some(rope)))?;
            assert_eq!(q.is_rotated(), pool.layer(0)?.rotates_queries());
            space.attend_with(enc, pool, &step, q)
        })?;
        space.result()
    };
    let tokens: Vec<u32> = (0..200).collect();
    for codec in CODECS {
        let one = pool(&Device::reference(), codec, 1);
        for group in dividing() {
            let pool = pool(&group, codec, 1);
            let (mut sequence, mut same) = (pool.sequence(), one.sequence());
            let bound = Bound::of(DType::F32).over(&group.rank(0).unwrap(), codec, 1.0).times(8.0);
            for count in [1, 15, 1, 30, 1, 20, 70, 1, 1] {
                let piece = &tokens[sequence.len()..sequence.len() + count];
                let got = feed(&pool, &mut sequence, piece).unwrap();
                let want = feed(&one, &mut same, piece).unwrap();
                assert_close(format!("{group}: {codec}, {count} before {}", same.len()), &got, &want, bound);
            }
        }
    }
}

/// Random lengths, truncations and forks against one device.
#[test]
fn sequences_of_any_history() {
    let one = whole(4);
    for group in dividing() {
        let (pool, mut rng) = (pool(&group, Codec::F32, 4), Rng::of("history"));
        let mut pairs = vec![(pool.sequence(), one.sequence())];
        for round in 0..40u32 {
            let at = rng.below(pairs.len());
            match rng.below(4) {
                0 if pairs.len() < 4 => {
                    let fork = (pairs[at].0.fork(), pairs[at].1.fork());
                    pairs.push(fork);
                }
                1 => {
                    let len = rng.below(pairs[at].0.len() + 1);
                    pairs[at].0.truncate(len).unwrap();
                    pairs[at].1.truncate(len).unwrap();
                }
                _ => {}
            }
            let (ours, wanted) = &mut pairs[at];
            let count = (1 + rng.below(50)).min(500 - ours.len()).max(1) as u32;
            let tokens: Vec<u32> = (round * 100..round * 100 + count).collect();
            if ours.len() + tokens.len() > 500 {
                ours.truncate(3).unwrap();
                wanted.truncate(3).unwrap();
            }
            let got = feed(&pool, &mut [(ours, &tokens)]).unwrap();
            let want = feed(&one, &mut [(wanted, &tokens)]).unwrap();
            assert_near(format!("{group}: round {round}, {} tokens", wanted.len()), &got, &want);
        }
    }
}

/// One recorded pass serves all steps. Drafts have rows of their own.
#[test]
fn recorded_steps() {
    let one = whole(2);
    for group in dividing() {
        let pool = pool(&group, Codec::F32, 2);
        let step = pool.reserve_step(StepSize::decode(4, 512)).unwrap();
        let space = Space::new(&group, &[0; 4]).unwrap();
        let graph = Encoder::capture(&group, |enc| {
            space.store(enc, &pool, &step)?;
            space.attend(enc, &pool, &step)
        })
        .unwrap();
        let (mut a, mut b) = (pool.sequence(), pool.sequence());
        let (mut same_a, mut same_b) = (one.sequence(), one.sequence());
        let prompt: Vec<u32> = (0..61).collect();
        feed(&pool, &mut [(&mut a, &prompt[..]), (&mut b, &prompt[..14])]).unwrap();
        feed(&one, &mut [(&mut same_a, &prompt[..]), (&mut same_b, &prompt[..14])]).unwrap();
        for round in 0..8u32 {
            // Three tokens of the first sequence, two of them drafts, and one of the second.
            let tokens = [0, 1, 2, 3].map(|index| 500 + round * 10 + index);
            let fresh = Space::new(&group, &tokens).unwrap();
            for (to, from) in [(&space.q, &fresh.q), (&space.k, &fresh.k), (&space.v, &fresh.v)] {
                to.write(&from.to_vec::<f32>().unwrap()).unwrap();
            }
            pool.tokens_into(&mut [(&mut a, 3), (&mut b, 1)], &step).unwrap();
            graph.replay().unwrap().wait().unwrap();
            let want = feed(&one, &mut [(&mut same_a, &tokens[..3]), (&mut same_b, &tokens[3..])]).unwrap();
            assert_near(format!("{group}: round {round}"), &space.result().unwrap(), &want);
            for sequence in [&mut a, &mut same_a] {
                sequence.truncate(sequence.len() - 1).unwrap();
            }
        }
    }
}

/// Tokens that are selected from a step see what they see in it.
#[test]
fn selected_tokens() {
    for group in dividing() {
        let pool = pool(&group, Codec::F32, 2);
        let (mut a, mut b) = (pool.sequence(), pool.sequence());
        let tokens: Vec<u32> = (0..110).collect();
        let step = pool.step(&mut [(&mut a, 70), (&mut b, 40)]).unwrap();
        let (all, chosen) = (Space::new(&group, &tokens).unwrap(), [109, 69, 5, 17]);
        let some = Space::new(&group, &chosen.map(|index| tokens[index])).unwrap();
        let selected = step.select(&chosen).unwrap();
        run(&group, |enc| {
            all.store(enc, &pool, &step)?;
            all.attend(enc, &pool, &step)?;
            some.attend(enc, &pool, &selected)
        })
        .unwrap();
        let (all, some) = (all.result().unwrap(), some.result().unwrap());
        for (row, index) in chosen.into_iter().enumerate() {
            let width = HEADS * DIM;
            let (got, want) = (&some[row * width..(row + 1) * width], &all[index * width..(index + 1) * width]);
            assert_near(format!("{group}: token {index}"), got, want);
        }
    }
}

/// The vectors of tokens, divided by heads: `[tokens, heads / ranks, D]`.
fn vectors_by_head(device: &Device, tokens: &[u32], heads: usize) -> Result<Tensor> {
    let own = heads / device.ranks();
    Tensor::from_rank_bytes(device, DType::F32, &[tokens.len(), own, DIM], |rank| {
        let of_rank = rank * own * DIM..(rank + 1) * own * DIM;
        let heads = |token| Rng::of(format!("by head {token}")).normals(heads * DIM)[of_rank.clone()].to_vec();
        let values: Vec<f32> = tokens.iter().flat_map(heads).collect();
        Ok::<_, Error>(bytemuck::cast_slice::<f32, u8>(&values).to_vec())
    })
}

/// Layers of both divisions have one page table, and their rows do not touch.
#[test]
fn layers_of_both_divisions_share_pages() {
    let results = |device: &Device| -> Result<[Vec<f32>; 2]> {
        let by_head = CacheLayer::new(4 / device.ranks(), DIM, Codec::F16);
        let layers = vec![layer(device, Codec::F32), by_head];
        let pool = KvPool::new(device, &PoolSpec::new(layers, 0).page_tokens(64).room_for(2, 256, 256)?)?;
        let (mut a, mut b) = (pool.sequence(), pool.sequence());
        let (tokens, last): (Vec<u32>, usize) = ((0..170).collect(), 169);
        let step = pool.step(&mut [(&mut a, 100), (&mut b, 70)])?;
        let (space, x) = (Space::new(device, &tokens)?, vectors_by_head(device, &tokens, 4)?);
        let out = Tensor::zeros(device, DType::F32, x.shape())?;
        let all = Tensor::zeros(device, DType::F32, &[tokens.len(), 4 * DIM])?;
        run(device, |enc| {
            space.store(enc, &pool, &step)?;
            ops::kv_write(enc, &KvWrite::new(&x, &x, &step, pool.layer(1)?))?;
            space.attend(enc, &pool, &step)?;
            ops::attend(enc, &Attend::new(&x, pool.layer(1)?, &step, &out))?;
            ops::all_gather(enc, &AllGather::new(&out.reshape(&[tokens.len(), 4 / device.ranks() * DIM])?, &all))
        })?;
        assert_eq!(pool.layer(1)?.spec().kv_heads * device.ranks(), 4);
        Ok([space.result()?[last * HEADS * DIM..].to_vec(), all.to_vec::<f32>()?[last * 4 * DIM..].to_vec()])
    };
    let want = results(&Device::reference()).unwrap();
    for group in dividing() {
        let got = results(&group).unwrap();
        assert_near(format!("{group}: by position"), &got[0], &want[0]);
        assert_near(format!("{group}: by head"), &got[1], &want[1]);
    }
}

/// Each rank has its part of the positions, in a part of the memory.
#[test]
fn memory_is_divided() {
    let bytes = |pool: &KvPool| pool.need(512, 64);
    for group in dividing() {
        let of = |division| {
            let layer = CacheLayer::new(KV_HEADS, DIM, Codec::F16).position_ranks(division);
            let spec = PoolSpec::new(vec![layer], 0).page_tokens(64).room_for(1, 512, 64).unwrap();
            bytes(&KvPool::new(&group, &spec).unwrap())
        };
        assert_eq!(of(group.ranks()) * group.ranks(), of(1), "{group}");
    }
}

/// Codecs of caches that move: pages of one form, and dense and sealed ones.
const MOVED: [Codec; 2] = [Codec::F16, Codec::tq_centred(4)];

/// An imported sequence, and a prefix from host memory, continue on every rank.
#[test]
fn sequences_by_page_move() {
    let tokens: Vec<u32> = (0..200).collect();
    for (group, codec) in dividing().into_iter().flat_map(|group| MOVED.map(|codec| (group.clone(), codec))) {
        let own = pool(&group, codec, 2);
        let mut sequence = own.sequence();
        feed(&own, &mut [(&mut sequence, &tokens[..150])]).unwrap();
        let bytes = sequence.export().unwrap();
        let want = feed(&own, &mut [(&mut sequence, &tokens[150..])]).unwrap();
        let other = pool(&group, codec, 1);
        let mut imported = other.import(&bytes).unwrap();
        assert_eq!(feed(&other, &mut [(&mut imported, &tokens[150..])]).unwrap(), want, "{group}");
        if group.ranks() > 1 {
            let by_head = CacheLayer::new(KV_HEADS, DIM, codec);
            let spec = PoolSpec::new(vec![by_head], 0).page_tokens(64).room_for(1, 512, 64).unwrap();
            let refused = KvPool::new(&group, &spec).unwrap().import(&bytes);
            assert!(matches!(refused, Err(Error::File { .. })), "{refused:?}");
        }
    }
}

#[test]
fn prefixes_by_page_come_back_from_host_memory() {
    for (ranks, codec) in [1, 2, 4].into_iter().flat_map(|ranks| MOVED.map(|codec| (ranks, codec))) {
        let group = cpus(ranks, 1);
        let spec = PoolSpec::new(vec![layer(&group, codec)], 0).page_tokens(64).room_for(1, 256, 64).unwrap();
        let pool = KvPool::new(&group, &spec.host_bytes(1 << 20)).unwrap();
        let cache = PrefixCache::new(&pool, b"pages");
        let tokens: Vec<u32> = (0..161).collect();
        let mut sequence = pool.sequence();
        feed(&pool, &mut [(&mut sequence, &tokens[..128])]).unwrap();
        cache.keep(&sequence, &tokens[..128]).unwrap();
        let want = feed(&pool, &mut [(&mut sequence, &tokens[128..])]).unwrap();
        drop(sequence);
        // Needs all pages.
        feed(&pool, &mut [(&mut pool.sequence(), &(1000..1256).collect::<Vec<u32>>())]).unwrap();
        let mut found = cache.find(&tokens[..129]).unwrap();
        assert_eq!(found.len(), 128, "{group}, {codec}");
        assert_eq!(feed(&pool, &mut [(&mut found, &tokens[128..])]).unwrap(), want, "{group}");
    }
}

#[test]
fn divisions_that_do_not_fit_are_refused() {
    let group = cpus(2, 1);
    let new = |device: &Device, layer: CacheLayer, page_tokens| {
        KvPool::new(device, &PoolSpec::new(vec![layer], 1 << 20).page_tokens(page_tokens)).unwrap_err()
    };
    let half = CacheLayer::new(KV_HEADS, DIM, Codec::F16).position_ranks(2);
    let other = new(&Device::cpu(), half, 64);
    assert!(matches!(other, Error::Value { arg: "position_ranks", .. }), "{other}");
    let small = new(&group, half, 16);
    assert!(matches!(small, Error::Value { arg: "page_tokens", .. }), "{small}");
    assert!(small.to_string().contains("at least 32") && small.to_string().contains("got 16"), "{small}");
    let odd = new(&cpus(3, 1), half.position_ranks(3), 64);
    assert!(odd.to_string().contains("1, 2, 4, 8 or 16") && odd.to_string().contains("got 3"), "{odd}");
    let window = new(&group, half.window(Some(99)), 64);
    assert!(matches!(window, Error::Value { arg: "window", .. }), "{window}");
}

/// A rank has a part of the positions, so its attention without ends would be wrong.
#[test]
fn operations_that_need_all_positions_are_refused() {
    let group = cpus(2, 1);
    let pool = pool(&group, Codec::F16, 1);
    let (mut sequence, layer) = (pool.sequence(), pool.layer(0).unwrap());
    let step = pool.step(&mut [(&mut sequence, 2)]).unwrap();
    let Space { q, k, out, ends, .. } = Space::new(&group, &[1, 2]).unwrap();
    let without = run(&group, |enc| ops::attend(enc, &Attend::new(&q, layer, &step, &out))).unwrap_err();
    assert!(matches!(without, Error::Value { arg: "ends", .. }), "{without}");
    let attend = Attend::new(&q, layer, &step, &out).ends(Some(&ends)).window(Some(8));
    let window = run(&group, |enc| ops::attend(enc, &attend)).unwrap_err();
    assert!(matches!(window, Error::Value { arg: "window", .. }), "{window}");
    let read = KvRead::new(layer, KvSide::K, &k).step(Some(&step));
    let read = run(&group, |enc| ops::kv_read(enc, &read)).unwrap_err();
    assert!(matches!(read, Error::Value { arg: "layer", .. }), "{read}");
}
