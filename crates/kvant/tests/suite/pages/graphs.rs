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

/// A sequence, and its key and value of each position.
struct Live {
    sequence: Sequence,
    rows: Vec<[Vec<f32>; 2]>,
}

fn naive(q: &[f32], rows: &[[Vec<f32>; 2]]) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    let scores: Vec<f64> = rows.iter().map(|[k, _]| dot(q, k) * (DIM as f64).powf(-0.5)).collect();
    let most = scores.iter().copied().fold(f64::MIN, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
    let total: f64 = weights.iter().sum();
    let value = |i: usize| rows.iter().zip(&weights).map(|([_, v], w)| w * f64::from(v[i])).sum::<f64>() / total;
    (0..DIM).map(|i| value(i) as f32).collect()
}

/// Steps of one token each, by replays of a graph for 32 rows, while one to 32 sequences join, leave and run out of
/// pages. Rows without a sequence are zeros.
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
        live.retain(|of| of.rows.len() < LONGEST && rng.below(90) > 0);
        let joins = if rng.below(12) == 0 { rng.below(ROWS) } else { rng.below(2) };
        for _ in 0..joins.min(ROWS - live.len()).max(usize::from(live.is_empty())) {
            live.push(Live { sequence: pool.sequence(), rows: Vec::new() });
        }
        loop {
            let mut batch: Vec<(&mut Sequence, usize)> = live.iter_mut().map(|of| (&mut of.sequence, 1)).collect();
            match pool.step_into(&mut batch, &step) {
                Ok(()) => break,
                Err(Error::OutOfPages { .. }) => {
                    refused += 1;
                    live.remove(rng.below(live.len()));
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
        for (row, of) in live.iter_mut().enumerate() {
            let at = row * DIM..(row + 1) * DIM;
            of.rows.push([k[at.clone()].to_vec(), v[at].to_vec()]);
        }
        for (index, out) in outs.iter().enumerate() {
            let mut want = Vec::new();
            for (row, of) in live.iter().enumerate() {
                let seen = if index == 0 { of.rows.len() } else { of.rows.len().min(WINDOW) };
                for head in 0..HEADS {
                    let at = (row * HEADS + head) * DIM;
                    want.extend(naive(&q[at..at + DIM], &of.rows[of.rows.len() - seen..]));
                }
            }
            want.resize(ROWS * HEADS * DIM, 0.0);
            let name = format!("step {number}, layer {index}, {} rows on {device}", live.len());
            assert_close(name, &out.to_f32()?, &want, Bound::of(DType::F32));
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
