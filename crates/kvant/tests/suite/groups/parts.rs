//! Ranks that each have a part of the work: of a matrix's inputs, of the heads of a cache.

use super::{cpus, groups};
use crate::common::{Bound, Rng, assert_close, run};
use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, Error, KvPool, PoolSpec, PrefixCache, Result, Sequence, Tensor,
    ops::{self, AllGather, AllReduce, Attend, KvWrite, Linear, Weight},
};

/// The columns `range` of rows of `width` numbers.
fn columns(values: &[f32], width: usize, range: std::ops::Range<usize>) -> Vec<f32> {
    values.chunks_exact(width).flat_map(|row| row[range.clone()].to_vec()).collect()
}

fn f32s(device: &Device, shape: &[usize], values: impl Fn(usize) -> Vec<f32>) -> Result<Tensor> {
    Tensor::from_rank_bytes(device, DType::F32, shape, |rank| {
        Ok::<_, Error>(bytemuck::cast_slice::<f32, u8>(&values(rank)).to_vec())
    })
}

/// Two matrices as in a feed-forward: the first by outputs, the second by inputs, with one sum.
#[test]
fn a_feed_forward_in_parts() {
    let (rows, inputs, hidden) = (3, 48, 96);
    let mut rng = Rng::of("feed-forward");
    let (x, up, down) = (rng.normals(rows * inputs), rng.normals(hidden * inputs), rng.normals(inputs * hidden));
    let of = |device: &Device| -> Result<Vec<f32>> {
        let part = hidden / device.ranks();
        let x = Tensor::from_slice(device, &x, &[rows, inputs])?;
        let up = f32s(device, &[part, inputs], |rank| up[rank * part * inputs..(rank + 1) * part * inputs].to_vec())?;
        let down = f32s(device, &[inputs, part], |rank| columns(&down, hidden, rank * part..(rank + 1) * part))?;
        let zeros = |shape: &[usize]| Tensor::zeros(device, DType::F32, shape);
        let (h, y) = (zeros(&[rows, part])?, zeros(&[rows, inputs])?);
        let record = |enc: &mut Encoder| {
            ops::linear(enc, &Linear::new(&x, Weight::Dense(&up), &h))?;
            ops::linear(enc, &Linear::new(&h, Weight::Dense(&down), &y))?;
            ops::all_reduce(enc, &AllReduce::new(&y, &y))
        };
        run(device, record)?;
        let once = y.on_rank(device.ranks() - 1)?.to_vec::<f32>()?;
        Encoder::capture(device, record)?.replay()?.wait()?;
        assert_eq!(y.to_vec::<f32>()?, once, "{device}: a graph");
        Ok(once)
    };
    let want = of(&Device::reference()).unwrap();
    for group in groups() {
        let got = of(&group).unwrap();
        assert_close(format!("{group}"), &got, &want, Bound::of(DType::F32).times(8.0));
    }
}

const HEADS: usize = 24;
const DIM: usize = 64;

/// Keys and values of a token, and its query: of all heads, or of those of a rank.
fn vectors(token: u32, heads: std::ops::Range<usize>) -> Vec<f32> {
    Rng::of(format!("token {token}")).normals(HEADS * DIM)[heads.start * DIM..heads.end * DIM].to_vec()
}

/// Appends tokens to a sequence of heads by rank; returns the attention of the last one, of all heads.
fn feed(pool: &KvPool, sequence: &mut Sequence, tokens: &[u32]) -> Result<Vec<f32>> {
    let device = pool.device();
    let (heads, mut last) = (HEADS / device.ranks(), Vec::new());
    let fed = sequence.len();
    for &token in &tokens[fed..] {
        let step = pool.step(&mut [(&mut *sequence, 1)])?;
        let x = f32s(device, &[1, heads, DIM], |rank| vectors(token, rank * heads..(rank + 1) * heads))?;
        let out = Tensor::zeros(device, DType::F32, &[1, heads, DIM])?;
        let all = Tensor::zeros(device, DType::F32, &[1, HEADS * DIM])?;
        run(device, |enc| {
            ops::kv_write(enc, &KvWrite::new(&x, &x, &step, pool.layer(0)?))?;
            ops::attend(enc, &Attend::new(&x, pool.layer(0)?, &step, &out))?;
            ops::all_gather(enc, &AllGather::new(&out.reshape(&[1, heads * DIM])?, &all))
        })?;
        last = all.on_rank(device.ranks() - 1)?.to_vec()?;
    }
    Ok(last)
}

fn pool(device: &Device, codec: Codec, sequences: usize) -> KvPool {
    let layer = CacheLayer::new(HEADS / device.ranks(), DIM, codec);
    let spec = PoolSpec::new(vec![layer], 0).page_tokens(16).room_for(sequences, 64, 64).unwrap();
    KvPool::new(device, &spec).unwrap()
}

/// Ranks hold their heads of the same pages: attention is that of one device with all heads.
#[test]
fn a_cache_by_heads() {
    let tokens: Vec<u32> = (0..40).collect();
    for codec in [Codec::F16, Codec::tq(4), Codec::tq_centred(4)] {
        let one = pool(&Device::reference(), codec, 2);
        let want = feed(&one, &mut one.sequence(), &tokens).unwrap();
        for group in groups() {
            let pool = pool(&group, codec, 2);
            let got = feed(&pool, &mut pool.sequence(), &tokens).unwrap();
            let bound = Bound::of(DType::F32).over(&group.rank(0).unwrap(), codec, 1.0);
            assert_close(format!("{group}: {codec}"), &got, &want, bound);
        }
    }
}

/// A fork, a sequence from bytes and a prefix that was in host memory go on with the bits of every rank.
#[test]
fn sequences_by_heads_move() {
    let tokens: Vec<u32> = (0..41).collect();
    for group in groups() {
        let pool = pool(&group, Codec::F16, 3);
        let mut sequence = pool.sequence();
        feed(&pool, &mut sequence, &tokens[..40]).unwrap();
        let (mut fork, bytes) = (sequence.fork(), sequence.export().unwrap());
        let want = feed(&pool, &mut sequence, &tokens).unwrap();
        assert_eq!(feed(&pool, &mut fork, &tokens).unwrap(), want, "{group}: a fork");
        let other = super::parts::pool(&group, Codec::F16, 1);
        let mut imported = other.import(&bytes).unwrap();
        assert_eq!(feed(&other, &mut imported, &tokens).unwrap(), want, "{group}: imported");
        let one = super::parts::pool(&Device::cpu(), Codec::F16, 1);
        if group.ranks() > 1 {
            assert!(matches!(one.import(&bytes), Err(Error::File { .. })));
        }
    }
}

#[test]
fn prefixes_by_heads_come_back_from_host_memory() {
    for ranks in [1, 2, 3] {
        let group = cpus(ranks, 1);
        let layer = CacheLayer::new(HEADS / ranks, DIM, Codec::F16);
        let spec = PoolSpec::new(vec![layer], 0).page_tokens(16).room_for(1, 64, 64).unwrap();
        let pool = KvPool::new(&group, &spec.host_bytes(1 << 20)).unwrap();
        let cache = PrefixCache::new(&pool, b"heads");
        let tokens: Vec<u32> = (0..41).collect();
        let mut sequence = pool.sequence();
        feed(&pool, &mut sequence, &tokens[..32]).unwrap();
        cache.keep(&sequence, &tokens[..32]).unwrap();
        let want = feed(&pool, &mut sequence, &tokens).unwrap();
        drop(sequence);
        // Needs all pages.
        let others: Vec<u32> = (1000..1064).collect();
        feed(&pool, &mut pool.sequence(), &others).unwrap();
        let mut found = cache.find(&tokens[..33]).unwrap();
        assert_eq!(found.len(), 32, "{group}");
        assert_eq!(feed(&pool, &mut found, &tokens).unwrap(), want, "{group}");
    }
}
