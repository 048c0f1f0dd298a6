//! Attention over pages.

use kvant::{
    CacheLayer, Codec, DType, Device, DeviceKind, Encoder, HeadOrder, KvLayer, KvPool, LayerSpec, PoolSpec, Result,
    Sequence, Step, Tensor,
    ops::{self, Attend, KvWrite, Query},
};

use crate::timer::{CACHE, Timer, in_turns, noise, random_bits};

const SIZES: [usize; 3] = [32, 64, 128];
const HEADS: usize = 8;
const KV_HEADS: usize = 2;

/// One decode step over a contiguous layer, then over pages of 32, 64 and 128 positions, in turns: the times of the
/// first in µs, and the ratios of the others. Queries and output have the dtype with the fast kernels.
pub fn decode(timer: &Timer) -> Result<()> {
    let device = &timer.device;
    let dense = if device.kind() == DeviceKind::Cpu { Codec::F16 } else { Codec::BF16 };
    println!("| D on {} | cache | keys | contiguous, µs | 32 | 64 | 128 |", device.name());
    println!("|---|---|---|---|---|---|---|");
    for keys in [1024, 131_072] {
        for head_dim in [64, 128, 256, 512] {
            for codec in [dense].into_iter().chain([8, 6, 5, 4, 3, 2].map(Codec::tq)) {
                if !timer.is_wanted(&format!("{head_dim} {codec} {keys}")) {
                    continue;
                }
                let times = Cache { head_dim, codec, keys }.times(device)?;
                let ratios: Vec<String> = times[1..].iter().map(|time| format!("{:.3}", time / times[0])).collect();
                println!("| {head_dim} | {codec} | {keys} | {:.2} | {} |", times[0], ratios.join(" | "));
            }
        }
    }
    Ok(())
}

/// A cache of one sequence.
#[derive(Clone, Copy)]
struct Cache {
    head_dim: usize,
    codec: Codec,
    keys: usize,
}

/// FilledCache layers, the step of the last token, and the sequence if it has pages.
type FilledCache = (Vec<KvLayer>, Step, Option<Sequence>);

impl Cache {
    /// Bytes of a layer.
    fn bytes(self) -> usize {
        2 * KV_HEADS * self.keys * self.codec.bytes_per_vector(self.head_dim)
    }

    fn layers(self) -> usize {
        (CACHE / 2).div_ceil(self.bytes()).min(64)
    }

    /// µs of a step over contiguous layers, and over pages of each size.
    fn times(self, device: &Device) -> Result<Vec<f64>> {
        let dtype = if device.kind() == DeviceKind::Cpu { DType::F32 } else { DType::BF16 };
        let q = noise(device, dtype, &[1, HEADS, self.head_dim])?;
        let out = Tensor::zeros(device, dtype, &[1, HEADS, self.head_dim])?;
        let calls = if self.keys > 10_000 { self.layers() } else { self.layers().max(60) };
        let mut filled = vec![self.contiguous(device)?];
        for page_tokens in SIZES {
            filled.push(self.paged(device, page_tokens)?);
        }
        let graphs = filled.iter().map(|(layers, step, _)| {
            Encoder::capture(device, |enc| {
                layers.iter().cycle().take(calls).try_for_each(|layer| {
                    let q = query(&q, self.codec);
                    ops::attend(enc, &Attend::new(q, layer, step, &out).scale(0.1))
                })
            })
        });
        in_turns(&graphs.collect::<Result<Vec<_>>>()?, calls)
    }

    fn contiguous(self, device: &Device) -> Result<FilledCache> {
        let Cache { head_dim, codec, keys } = self;
        let spec = LayerSpec::new(KV_HEADS, head_dim, keys, codec);
        let mut layers = Vec::new();
        for _ in 0..self.layers() {
            let layer = KvLayer::new(device, spec)?;
            for planes in [layer.k(), layer.v()] {
                planes.tensors().try_for_each(|(_, plane)| plane.write_bytes(&random_bits(plane.bytes())))?;
            }
            layers.push(layer);
        }
        let step = Step::new(device, 1, &[(0, keys as u32 - 1)])?;
        let batch = step.batch().longest(keys);
        Ok((layers, step.with_batch(batch), None))
    }

    fn paged(self, device: &Device, page_tokens: usize) -> Result<FilledCache> {
        let (keys, count) = (self.keys, self.layers());
        let layer = CacheLayer::new(KV_HEADS, self.head_dim, self.codec);
        let room = count * (self.bytes() + 4096 * keys.div_ceil(page_tokens));
        let pool = KvPool::new(device, &PoolSpec::new(vec![layer; count], room).page_tokens(page_tokens))?;
        if let Some((_, memory)) = pool.layer(0)?.k().tensors().next() {
            memory.write_bytes(&random_bits(memory.bytes()))?;
        }
        let mut sequence = pool.sequence();
        pool.step(&mut [(&mut sequence, keys - 1)])?;
        let step = pool.step(&mut [(&mut sequence, 1)])?;
        let layers = (0..count).map(|index| pool.layer(index).cloned()).collect::<Result<_>>()?;
        Ok((layers, step, Some(sequence)))
    }
}

/// Queries as models prepare them: rotated for quantised keys.
fn query(q: &Tensor, keys: Codec) -> Query<'_> {
    if keys.is_quantised() { Query::Rotated(q) } else { Query::Raw(q) }
}

/// The last tokens of a prompt over a pool: whole prompts, and chunks of long ones.
pub fn prompts(timer: &Timer) -> Result<()> {
    timer.head();
    let device = &timer.device;
    for (head_dim, heads, kv_heads) in [(128, 32, 8), (256, 16, 8), (512, 16, 2)] {
        for (tokens, keys) in [(4096, 4096), (64, 4096), (256, 4096), (512, 32768)] {
            for codec in [Codec::BF16, Codec::tq(8), Codec::tq(4), Codec::tq_centred(4), Codec::tq(2)] {
                let name = format!("prompt {head_dim}, {heads}, {kv_heads}, {keys} {codec}, {tokens} tokens");
                let layer = CacheLayer::new(kv_heads, head_dim, codec);
                let copies = 4;
                let spec = PoolSpec::new(vec![layer; copies], 1 << 20).room_for(1, keys, tokens)?;
                let pool = KvPool::new(device, &spec)?;
                let mut sequence = pool.sequence();
                let rows = noise(device, DType::BF16, &[1024.min(keys), kv_heads, head_dim])?;
                let (mut step, mut written) = (pool.step(&mut [(&mut sequence, 0)])?, 0);
                while written < keys {
                    // The last step has the measured tokens.
                    let rest = keys - written;
                    let count = if rest > tokens { (rest - tokens).min(1024) } else { rest };
                    step = pool.step(&mut [(&mut sequence, count)])?;
                    for (at, part) in (0..count).step_by(1024).map(|at| (at, 1024.min(count - at))) {
                        let part_of_step = step.select(&(at..at + part).collect::<Vec<_>>())?;
                        let rows = rows.rows(0..part)?;
                        let mut enc = device.encoder()?;
                        for index in 0..copies {
                            let layer = pool.layer(index)?;
                            let args = KvWrite::new(&rows, &rows, &part_of_step, layer);
                            ops::kv_write(&mut enc, &args.order(HeadOrder::TokenMajor))?;
                        }
                        enc.commit()?.wait()?;
                    }
                    written += count;
                }
                let q = noise(device, DType::BF16, &[tokens, heads, head_dim])?;
                let out = Tensor::zeros(device, DType::BF16, &[tokens, heads, head_dim])?;
                let bytes = 2 * kv_heads * keys * codec.bytes_per_vector(head_dim) + q.bytes() + out.bytes();
                timer.line(&name, bytes, copies, |enc, copy| {
                    let q = query(&q, codec);
                    ops::attend(enc, &Attend::new(q, pool.layer(copy)?, &step, &out).scale(0.1))
                })?;
            }
        }
    }
    Ok(())
}
