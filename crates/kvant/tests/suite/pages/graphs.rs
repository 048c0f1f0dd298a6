//! One captured graph serves sequences that join and leave.

use super::tokens::DIM;
use crate::common::{Bound, Rng, assert_close, devices};
use kvant::{
    CacheLayer, Codec, DType, Device, DeviceKind, Encoder, Error, KvPool, PoolSpec, Result, Sequence, StepSize, Tensor,
    ops::{self, Attend, KvWrite},
};

const ROWS: usize = 32;
const LONGEST: usize = 70;
const WINDOW: usize = 20;
/// Query heads.
const HEADS: usize = 2;
/// Maximum tokens of a sequence in a step.
const MAX_NEW: usize = 5;

/// A sequence, and its keys and values by position.
struct Live {
    sequence: Sequence,
    rows: Vec<[Vec<f32>; 2]>,
}

fn naive(q: &[f32], rows: &[[Vec<f32>; 2]]) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    let scores: Vec<f64> = rows.iter().map(|[k, _]| dot(q, k) * (DIM as f64).powf(-0.5)).collect();
    let max = scores.iter().copied().fold(f64::MIN, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    let value = |i: usize| rows.iter().zip(&weights).map(|([_, v], w)| w * f64::from(v[i])).sum::<f64>() / total;
    (0..DIM).map(|i| value(i) as f32).collect()
}

/// Replays of a graph for 32 rows, while one to 32 sequences join, leave and run out of pages. Sequences get one token,
/// or a few tokens with a row each; some of these tokens are rolled back. Rows without a sequence are zeros.
fn serve(device: &Device, steps: usize) -> Result<()> {
    let full = CacheLayer::new(1, DIM, Codec::F32);
    let layers = vec![full, full.window(Some(WINDOW))];
    // Room for a quarter of the rows at full length.
    let spec = PoolSpec::new(layers, 0).page_tokens(16).room_for(ROWS / 4, LONGEST, 1)?;
    let pool = KvPool::new(device, &spec)?;
    let step = pool.reserve_step(StepSize::decode(ROWS, LONGEST))?;
    let zeros = |heads| Tensor::zeros(device, DType::F32, &[ROWS, heads, DIM]);
    let (q, k, v) = (zeros(HEADS)?, zeros(1)?, zeros(1)?);
    let outs = [zeros(HEADS)?, zeros(HEADS)?];
    let graph = Encoder::capture(device, |enc| {
        outs.iter().enumerate().try_for_each(|(index, out)| {
            let layer = pool.layer(index)?;
            ops::kv_write(enc, &KvWrite::new(&k, &v, &step, layer))?;
            ops::attend(enc, &Attend::new(&q, layer, &step, out))
        })
    })?;
    let mut rng = Rng::of("graph");
    let (mut live, mut refused): (Vec<Live>, usize) = (Vec::new(), 0);
    let mut met = [false; ROWS + 1];
    for number in 0..steps {
        live.retain(|of| of.rows.len() + MAX_NEW <= LONGEST && rng.below(90) > 0);
        let joins = if rng.below(12) == 0 { rng.below(ROWS) } else { rng.below(2) };
        for _ in 0..joins.min(ROWS - live.len()).max(usize::from(live.is_empty())) {
            live.push(Live { sequence: pool.sequence(), rows: Vec::new() });
        }
        let mut counts = vec![1; live.len()];
        while number % 3 == 0 && counts.iter().sum::<usize>() < ROWS && rng.below(10) > 0 {
            let count = &mut counts[rng.below(live.len())];
            *count = (*count + 1).min(MAX_NEW);
        }
        loop {
            let growing = live.iter_mut().map(|of| &mut of.sequence).zip(counts.iter().copied());
            let mut batch: Vec<(&mut Sequence, usize)> = growing.collect();
            let written = match number % 2 {
                0 => pool.tokens_into(&mut batch, &step),
                _ if counts.iter().all(|&count| count == 1) => pool.step_into(&mut batch, &step),
                _ => pool.tokens_into(&mut batch, &step),
            };
            match written {
                Ok(()) => break,
                Err(Error::OutOfPages { .. }) => {
                    refused += 1;
                    let index = rng.below(live.len());
                    live.remove(index);
                    counts.remove(index);
                }
                Err(error) => return Err(error),
            }
        }
        met[live.len()] = true;
        let inputs = [(&q, HEADS), (&k, 1), (&v, 1)].map(|(tensor, heads)| (tensor, rng.normals(ROWS * heads * DIM)));
        for (tensor, values) in &inputs {
            tensor.write(values)?;
        }
        let [(_, q), (_, k), (_, v)] = &inputs;
        graph.replay()?.wait()?;
        let rows: Vec<usize> = counts.iter().enumerate().flat_map(|(of, &count)| vec![of; count]).collect();
        for (row, &of) in rows.iter().enumerate() {
            let at = row * DIM..(row + 1) * DIM;
            live[of].rows.push([k[at.clone()].to_vec(), v[at].to_vec()]);
        }
        for (index, out) in outs.iter().enumerate() {
            let mut want = Vec::new();
            for (row, &of) in rows.iter().enumerate() {
                let later = rows[row..].iter().filter(|&&other| other == of).count() - 1;
                let known = &live[of].rows[..live[of].rows.len() - later];
                let seen = if index == 0 { known.len() } else { known.len().min(WINDOW) };
                for head in 0..HEADS {
                    let at = (row * HEADS + head) * DIM;
                    want.extend(naive(&q[at..at + DIM], &known[known.len() - seen..]));
                }
            }
            want.resize(ROWS * HEADS * DIM, 0.0);
            let name = format!("step {number}, layer {index}, {} rows on {device}", rows.len());
            assert_close(name, &out.to_f32()?, &want, Bound::of(DType::F32));
        }
        for (of, &count) in live.iter_mut().zip(&counts) {
            let len = of.rows.len() - rng.below(count);
            of.sequence.truncate(len)?;
            of.rows.truncate(len);
        }
    }
    drop(live);
    assert_eq!(pool.usage().used, 0, "every page is free after the last handle");
    if steps >= 1000 {
        assert!(refused > 0, "the pool was never full");
        assert!(met.iter().filter(|&&met| met).count() > ROWS / 2, "few numbers of rows: {met:?}");
    }
    Ok(())
}

#[test]
fn a_graph_serves_sequences_that_join_and_leave() -> Result<()> {
    for (index, device) in devices().iter().enumerate() {
        serve(
            device,
            match device.kind() {
                DeviceKind::Metal => 12,
                _ if index == 0 || device.kind() == DeviceKind::Cuda => 1000,
                _ => 60,
            },
        )?;
    }
    Ok(())
}

/// Batches that exceed the step.
#[test]
fn rows_for_tokens_are_limited() -> Result<()> {
    for codec in [Codec::tq(4), Codec::tq_centred(4)] {
        let pool = KvPool::new(&Device::cpu(), &PoolSpec::new(vec![CacheLayer::new(1, 64, codec)], 1 << 20))?;
        let (mut a, mut b) = (pool.sequence(), pool.sequence());
        let step = pool.reserve_step(StepSize::decode(5, 100))?;
        pool.tokens_into(&mut [(&mut a, 1), (&mut b, 1)], &step)?;
        let few = pool.tokens_into(&mut [(&mut a, 2), (&mut b, 3)], &step);
        assert!(few.is_ok(), "{codec}: {few:?}");
        let len = a.len();
        let many = pool.tokens_into(&mut [(&mut a, 2), (&mut b, 4)], &step);
        assert!(matches!(many, Err(Error::Value { .. })), "{many:?}");
        assert!(pool.tokens_into(&mut [(&mut a, usize::MAX), (&mut b, 4)], &step).is_err());
        assert_eq!(a.len(), len);
        assert_eq!((step.positions().to_vec::<u32>()?, step.lens().to_vec::<u32>()?), {
            (vec![1, 2, 1, 2, 3], vec![2, 3, 2, 3, 4])
        });
        assert_eq!(step.sequence().to_vec::<u32>()?, [0, 1, 2, 3, 4]);
    }
    // Pages are sealed before the pass, so pages that the pass itself fills are not.
    for (codec, fits) in [(Codec::tq(4), true), (Codec::tq_centred(4), false)] {
        let pool = KvPool::new(&Device::cpu(), &PoolSpec::new(vec![CacheLayer::new(1, 64, codec)], 1 << 20))?;
        let (mut sequence, step) = (pool.sequence(), pool.reserve_step(StepSize::decode(65, 100))?);
        let page = pool.tokens_into(&mut [(&mut sequence, 65)], &step);
        assert_eq!(page.is_ok(), fits, "{codec}: {page:?}");
        sequence.truncate(0)?;
        pool.tokens_into(&mut [(&mut sequence, 64)], &step)?;
    }
    Ok(())
}
