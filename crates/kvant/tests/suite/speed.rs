//! Times of the operations on a GPU, as a table: `KVANT_TEST_DEVICE=cuda cargo test --release -p kvant --test suite --
//! speed:: --ignored --nocapture --test-threads 1`; KVANT_SPEED selects lines by a part of their names. This is a
//! measurement without assertions. tools/h200/peers.py measures PyTorch and FlashInfer.
//!
//! Every figure is of replays of a graph that contains the operation many times, over buffers that together exceed the
//! caches. GB/s counts each input read once and each output written once.

use std::time::{Duration, Instant};

use crate::common::{Rng, input, query};

use kvant::{
    CacheLayer, Codec, DType, Device, DeviceKind, Encoder, Graph, HeadOrder, KvLayer, KvPool, LayerSpec, PoolSpec,
    Result, Step, Tensor,
    ops::{
        self, Activation, Affine, Argmax, Attend, BlockFormat, Blocks, Columns, Embed, Experts, FloatFormat, Gate,
        Hadamard, HeadNorm, KvWrite, Linear, NormRope, NormRopeWrite, Residual, RmsNorm, Rope, Sample, ScaledFloats,
        Weight,
    },
};

/// Bytes that all buffers together exceed.
const CACHE: usize = 256 << 20;

#[test]
#[ignore = "a measurement"]
fn attention() -> Result<()> {
    attend(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn batches() -> Result<()> {
    attend_batches(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn pages() -> Result<()> {
    over_pages(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn prompts() -> Result<()> {
    prompts_over_pages(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn prompt_errors() -> Result<()> {
    errors_of_prompts(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn steps() -> Result<()> {
    around_attention(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn cache() -> Result<()> {
    kv(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn products() -> Result<()> {
    linear(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn products_of_many_rows() -> Result<()> {
    linear_many(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn dense_batches() -> Result<()> {
    linear_dense(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn block_products() -> Result<()> {
    linear_blocks(&device()?)
}

#[test]
#[ignore = "a measurement"]
fn others() -> Result<()> {
    rest(&device()?)
}

pub fn device() -> Result<Device> {
    let kind = std::env::var("KVANT_TEST_DEVICE").unwrap_or_default();
    let kind = [DeviceKind::Cuda, DeviceKind::Metal, DeviceKind::Cpu].into_iter().find(|k| k.name() == kind);
    let device = kind.map_or_else(|| Ok(Device::default()), Device::open)?;
    println!("| operation on {} | µs | GB/s |\n|---|---|---|", device.name());
    Ok(device)
}

/// Times `record`, whose argument counts from 0 to `copies`, and prints a line.
pub fn line(
    device: &Device,
    name: &str,
    bytes: usize,
    copies: usize,
    record: impl Fn(&mut Encoder, usize) -> Result<()>,
) -> Result<()> {
    if std::env::var("KVANT_SPEED").is_ok_and(|part| !name.contains(&part)) {
        return Ok(());
    }
    let calls = copies.max(60).next_multiple_of(copies);
    let graph = Encoder::capture(device, |enc| (0..calls).try_for_each(|i| record(enc, i % copies)))?;
    // The device slept while the host generated its data, and it wakes slowly.
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(150) {
        graph.replay()?.wait()?;
    }
    let mut times: Vec<f64> = (0..15)
        .map(|_| {
            let start = Instant::now();
            graph.replay()?.wait()?;
            Ok(start.elapsed().as_secs_f64() / calls as f64)
        })
        .collect::<Result<_>>()?;
    times.sort_by(f64::total_cmp);
    println!("| {name} | {:.2} | {:.0} |", times[7] * 1e6, bytes as f64 / times[7] / 1e9);
    Ok(())
}

/// Random numbers that are not zero.
pub fn noise(device: &Device, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let mut z = 1u64;
    let mut next = || {
        z = z.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (z >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let bytes: Vec<u8> = match dtype {
        DType::F32 => (0..n).flat_map(|_| next().to_le_bytes()).collect(),
        DType::F16 => (0..n).flat_map(|_| kvant::f16::from_f32(next()).to_le_bytes()).collect(),
        DType::BF16 => (0..n).flat_map(|_| kvant::bf16::from_f32(next()).to_le_bytes()).collect(),
        DType::U32 => (0..n).flat_map(|_| next().to_bits().to_le_bytes()).collect(),
        DType::U8 => (0..n).map(|_| next().to_bits() as u8).collect(),
    };
    Tensor::from_bytes(device, dtype, shape, &bytes)
}

/// Random bits that are finite numbers below 2 as bf16.
pub fn random_bits(bytes: usize) -> Vec<u8> {
    let mut z = 1u64;
    let words = (0..bytes.div_ceil(8)).map(|_| {
        z = z.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (z ^ z >> 29) & 0xBFFF_BFFF_BFFF_BFFF
    });
    let mut all: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    all.truncate(bytes);
    all
}

pub fn copies(bytes: usize) -> usize {
    CACHE.div_ceil(bytes).min(64)
}

/// The median of each graph's replays, in turns, in µs per call.
pub fn in_turns(graphs: &[Graph], calls: usize) -> Result<Vec<f64>> {
    let mut times = vec![Vec::new(); graphs.len()];
    // The device slept while the host generated its data, and it wakes slowly.
    let start = Instant::now();
    while start.elapsed().as_millis() < 60 {
        graphs[0].replay()?.wait()?;
    }
    for _ in 0..13 {
        for (graph, times) in graphs.iter().zip(&mut times) {
            let start = Instant::now();
            graph.replay()?.wait()?;
            times.push(start.elapsed().as_secs_f64() * 1e6 / calls as f64);
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    Ok(times.into_iter().map(median).collect())
}

/// Decode attention of one token over a full cache, and (tokens > 1) attention of the last tokens of a prompt.
fn attend(device: &Device) -> Result<()> {
    let (bf16, all) = (Codec::BF16, None);
    let quantised = [bf16, Codec::F16, Codec::tq(8), Codec::tq(6), Codec::tq(5), Codec::tq(4)];
    // Coordinates, query heads, KV heads, keys, query tokens, window.
    for (dim, heads, kv_heads, len, tokens, window) in [
        (128, 32, 8, 1024, 1, all),
        (128, 32, 8, 32768, 1, all),
        (128, 32, 8, 131072, 1, all),
        (256, 16, 8, 1024, 1, all),
        (256, 16, 8, 4096, 1, all),
        (256, 16, 8, 32768, 1, all),
        (256, 16, 8, 131072, 1, all),
        (512, 16, 2, 1024, 1, all),
        (512, 16, 2, 32768, 1, all),
        (512, 16, 2, 131072, 1, all),
        (512, 8, 4, 32768, 1, all),
        (256, 16, 8, 32768, 4, all),
        (256, 16, 8, 32768, 8, all),
        (64, 32, 8, 4096, 4096, all),
        (128, 32, 8, 4096, 4096, all),
        (256, 16, 8, 4096, 4096, all),
        (256, 16, 8, 4096, 4096, Some(1024)),
        (512, 16, 2, 4096, 4096, all),
    ] {
        for codec in if tokens == 1 { &quantised[..] } else { &quantised[..1] } {
            let filled = Filled::new(device, *codec, [dim, heads, kv_heads, len, tokens], None)?;
            let name = format!("attend {dim}, {heads}, {kv_heads}, {len} {codec}, {tokens} tokens, window {window:?}");
            filled.time(device, &name, window, len)?;
        }
    }
    // A ring with a window.
    for position in [2000, 1_000_000] {
        let filled = Filled::new(device, bf16, [256, 16, 8, 1024, 1], Some(position))?;
        filled.time(
            device,
            &format!("attend 256, 16, 8 bf16, ring, window 1024, position {position}"),
            Some(1024),
            1024,
        )?;
    }
    Ok(())
}

/// One token of each of many sequences.
fn attend_batches(device: &Device) -> Result<()> {
    for (dim, heads, kv_heads, len) in
        [(64, 32, 8, 2048), (128, 32, 8, 1024), (128, 32, 8, 4096), (256, 32, 16, 1024), (256, 8, 2, 512)]
    {
        for codec in [Codec::BF16, Codec::tq(8), Codec::tq(4), Codec::tq(3)] {
            for sequences in [16, 64] {
                let spec = LayerSpec::new(kv_heads, dim, len, codec).sequences(sequences).order(HeadOrder::HeadMajor);
                let at: Vec<(u32, u32)> = (0..sequences as u32).map(|sequence| (sequence, len as u32 - 1)).collect();
                let filled = Filled::of(device, spec, heads, 0..len, &at)?;
                let name = format!("attend {dim}, {heads}, {kv_heads}, {len} {codec}, {sequences} sequences");
                filled.time(device, &name, None, len)?;
            }
        }
    }
    Ok(())
}

/// Decode attention together with a layer's other operations, because launches may begin before earlier ones end. One
/// decode step over a contiguous layer, then over pages of 32, 64 and 128 positions, in turns: the times of the first
/// in µs, and the ratios of the others. Queries and output have the dtype with the fast kernels.
fn over_pages(device: &Device) -> Result<()> {
    const SIZES: [usize; 3] = [32, 64, 128];
    let dtype = if device.kind() == DeviceKind::Cpu { DType::F32 } else { DType::BF16 };
    println!("| D | cache | keys | contiguous, µs | 32 | 64 | 128 |\n|---|---|---|---|---|---|---|");
    let (heads, kv_heads) = (8, 2);
    for keys in [1024, 131_072] {
        for head_dim in [64, 128, 256, 512] {
            let dense = if device.kind() == DeviceKind::Cpu { Codec::F16 } else { Codec::BF16 };
            for codec in [dense].into_iter().chain([8, 6, 5, 4, 3, 2].map(Codec::tq)) {
                let name = format!("{head_dim} {codec} {keys}");
                if std::env::var("KVANT_SPEED").is_ok_and(|part| !name.contains(&part)) {
                    continue;
                }
                let bytes = 2 * kv_heads * keys * codec.bytes_per_vector(head_dim);
                let copies = (CACHE / 2).div_ceil(bytes).min(64);
                let spec = LayerSpec::new(kv_heads, head_dim, keys, codec);
                let mut layers = Vec::new();
                for _ in 0..copies {
                    let layer = KvLayer::new(device, spec)?;
                    for planes in [layer.k(), layer.v()] {
                        planes.tensors().try_for_each(|(_, plane)| plane.write_bytes(&random_bits(plane.bytes())))?;
                    }
                    layers.push(layer);
                }
                let slots = Step::new(device, 1, &[(0, keys as u32 - 1)])?;
                let known = slots.batch().longest(keys);
                let slots = slots.with_batch(known);
                let mut ways = vec![(layers, slots, None)];
                for page_tokens in SIZES {
                    let layer = CacheLayer::new(kv_heads, head_dim, codec);
                    let room = copies * (bytes + 4096 * keys.div_ceil(page_tokens));
                    let pool = KvPool::new(device, &PoolSpec::new(vec![layer; copies], room).page_tokens(page_tokens))?;
                    if let Some((_, memory)) = pool.layer(0)?.k().tensors().next() {
                        memory.write_bytes(&random_bits(memory.bytes()))?;
                    }
                    let mut sequence = pool.sequence();
                    pool.step(&mut [(&mut sequence, keys - 1)])?;
                    let step = pool.step(&mut [(&mut sequence, 1)])?;
                    let layers = (0..copies).map(|index| pool.layer(index).cloned()).collect::<Result<_>>()?;
                    ways.push((layers, step, Some(sequence)));
                }
                let q = noise(device, dtype, &[1, heads, head_dim])?;
                let out = Tensor::zeros(device, dtype, &[1, heads, head_dim])?;
                let calls = copies.max(if keys > 10_000 { copies } else { 60 });
                let graphs = ways.iter().map(|(layers, step, _)| {
                    Encoder::capture(device, |enc| {
                        (0..calls).try_for_each(|call| {
                            let layer = &layers[call % copies];
                            let q = query(&q, layer.spec().k.is_quantised());
                            ops::attend(enc, &Attend::new(q, layer, step, &out).scale(0.1))
                        })
                    })
                });
                let graphs = graphs.collect::<Result<Vec<_>>>()?;
                let medians = in_turns(&graphs, calls)?;
                let ratios: Vec<String> = medians[1..].iter().map(|time| format!("{:.3}", time / medians[0])).collect();
                println!("| {head_dim} | {codec} | {keys} | {:.2} | {} |", medians[0], ratios.join(" | "));
            }
        }
    }
    Ok(())
}

/// The last tokens of a prompt over a pool: whole prompts, and chunks of long ones.
fn prompts_over_pages(device: &Device) -> Result<()> {
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
                line(device, &name, bytes, copies, |enc, copy| {
                    let q = query(&q, codec.is_quantised());
                    ops::attend(enc, &Attend::new(q, pool.layer(copy)?, &step, &out).scale(0.1))
                })?;
            }
        }
    }
    Ok(())
}

/// The normalised error √(Σ(x−y)²/Σy²) of attention for a prompt of 512 normal tokens in bf16; tools/h200/peers.py
/// computes that of PyTorch's kernels.
fn errors_of_prompts(device: &Device) -> Result<()> {
    let (tokens, heads, kv_heads) = (512, 8, 4);
    for head_dim in [64, 128, 256, 512] {
        let mut rng = Rng::of(head_dim);
        let mut normals = |heads: usize| rng.normals(tokens * heads * head_dim);
        let (q, k, v) = (normals(heads), normals(kv_heads), normals(kv_heads));
        let attend_on = |device: &Device, dtype| -> Result<Vec<f32>> {
            let tensor = |x: &[f32], heads| input(device, DType::BF16, x, &[tokens, heads, head_dim]);
            let (q, k, v) = (tensor(&q, heads)?, tensor(&k, kv_heads)?, tensor(&v, kv_heads)?);
            let layer = KvLayer::new(device, LayerSpec::new(kv_heads, head_dim, tokens, Codec::BF16))?;
            let step = Step::new(device, 1, &(0..tokens as u32).map(|p| (0, p)).collect::<Vec<_>>())?;
            let out = Tensor::zeros(device, dtype, q.shape())?;
            let mut enc = device.encoder()?;
            ops::kv_write(&mut enc, &KvWrite::new(&k, &v, &step, &layer))?;
            ops::attend(&mut enc, &Attend::new(&q, &layer, &step, &out))?;
            enc.commit()?.wait()?;
            out.to_f32()
        };
        let (got, want) = (attend_on(device, DType::BF16)?, attend_on(&Device::reference(), DType::F32)?);
        let squares = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let error = squares(&mut got.iter().zip(&want).map(|(x, y)| x - y)) / squares(&mut want.iter().copied());
        println!("| prompt of {tokens} tokens, D {head_dim}: error | {:.3e} | |", error.sqrt());
    }
    Ok(())
}

fn around_attention(device: &Device) -> Result<()> {
    for (dim, heads, kv_heads) in [(128, 32, 8), (256, 16, 8), (512, 16, 2)] {
        for codec in [Codec::BF16, Codec::tq(4)] {
            for len in [1024, 4096, 32768] {
                Filled::new(device, codec, [dim, heads, kv_heads, len, 1], None)?.time_step(device)?;
            }
        }
    }
    Ok(())
}

/// Layers full of keys, and the queries of the last tokens.
struct Filled {
    layers: Vec<KvLayer>,
    step: Step,
    q: Tensor,
    out: Tensor,
}

impl Filled {
    fn new(device: &Device, codec: Codec, shape: [usize; 5], ring: Option<usize>) -> Result<Filled> {
        let [head_dim, heads, kv_heads, len, tokens] = shape;
        let order = HeadOrder::HeadMajor;
        let spec = LayerSpec::new(kv_heads, head_dim, len, codec).ring(ring.is_some()).order(order);
        // The cache ends with the last token, at any position.
        let end = ring.map_or(len, |position| position + 1);
        let at: Vec<(u32, u32)> = (end - tokens..end).map(|position| (0, position as u32)).collect();
        Filled::of(device, spec, heads, end - len..end, &at)
    }

    /// Layers whose sequences all hold these positions, and queries of the tokens `at` a sequence and position.
    fn of(
        device: &Device,
        spec: LayerSpec,
        heads: usize,
        held: std::ops::Range<usize>,
        at: &[(u32, u32)],
    ) -> Result<Filled> {
        let chunk = held.len().min(1024);
        let rows = noise(device, DType::BF16, &[chunk, spec.kv_heads, spec.head_dim])?;
        let mut layers = vec![KvLayer::new(device, spec)?];
        layers.resize_with(copies(layers[0].bytes()), || KvLayer::new(device, spec).expect("memory"));
        for layer in &layers {
            for sequence in 0..spec.sequences as u32 {
                for first in held.clone().step_by(chunk) {
                    let written: Vec<(u32, u32)> = (first..first + chunk).map(|p| (sequence, p as u32)).collect();
                    let step = Step::new(device, spec.sequences, &written)?;
                    let mut enc = device.encoder()?;
                    let write = KvWrite::new(&rows, &rows, &step, layer).order(HeadOrder::TokenMajor);
                    ops::kv_write(&mut enc, &write)?;
                    enc.commit()?.wait()?;
                }
            }
        }
        let dtype = if spec.k == Codec::F16 { DType::F16 } else { DType::BF16 };
        let q = noise(device, dtype, &[at.len(), heads, spec.head_dim])?;
        let out = noise(device, dtype, &[at.len(), heads, spec.head_dim])?;
        Ok(Filled { layers, step: Step::new(device, spec.sequences, at)?, q, out })
    }

    fn time(&self, device: &Device, name: &str, window: Option<usize>, keys: usize) -> Result<()> {
        let Filled { layers, step, q, out } = self;
        let bytes = layers[0].bytes() / layers[0].spec().capacity * keys;
        let scale = (layers[0].spec().head_dim as f32).powf(-0.5);
        line(device, name, bytes, layers.len(), |enc, i| {
            let layer = &layers[i];
            ops::attend(enc, &Attend::new(q, layer, step, out).scale(scale).window(window))
        })
    }

    /// Times attention together with a layer's small operations before and after it.
    fn time_step(&self, device: &Device) -> Result<()> {
        let Filled { layers, step, q, out } = self;
        let LayerSpec { head_dim, kv_heads, capacity, k, .. } = *layers[0].spec();
        let heads = q.shape()[1];
        let [one, weight] = [&[1, kv_heads, head_dim][..], &[head_dim]].map(|shape| noise(device, DType::BF16, shape));
        let (one, weight) = (one?, weight?);
        let norm = Some(HeadNorm::new(1e-6).weight(Some(&weight)));
        let rotated = Tensor::zeros(device, DType::BF16, q.shape())?;
        let x = out.reshape(&[1, heads * head_dim])?;
        let matrix = noise(device, DType::BF16, &[1024, heads * head_dim])?;
        let sums = Tensor::zeros(device, DType::BF16, &[1, 1024])?;
        let name = format!("norm_rope_write, attend, linear of {head_dim}, {heads}, {kv_heads}, {capacity} {k}");
        line(device, &name, layers[0].bytes(), layers.len(), |enc, i| {
            let layer = &layers[i];
            let write = NormRopeWrite::new(q, &one, &one, step, layer, &rotated);
            let q = ops::norm_rope_write(enc, &write.q_norm(norm).k_norm(norm).v_norm(norm))?;
            ops::attend(enc, &Attend::new(q, layer, step, out))?;
            ops::linear(enc, &Linear::new(&x, &matrix, &sums))
        })
    }
}

fn kv(device: &Device) -> Result<()> {
    let (tokens, heads, dim) = (8192, 8, 256);
    // Three of each, so that none is read from a cache.
    let sources = (0..6).map(|_| noise(device, DType::BF16, &[tokens, heads, dim])).collect::<Result<Vec<_>>>()?;
    let at: Vec<(u32, u32)> = (0..tokens as u32).map(|p| (0, p)).collect();
    let step = Step::new(device, 1, &at)?;
    for codec in [Codec::BF16, Codec::tq(8), Codec::tq(6), Codec::tq(5), Codec::tq(4)] {
        let spec = LayerSpec::new(heads, dim, tokens, codec);
        let layers = [KvLayer::new(device, spec)?, KvLayer::new(device, spec)?, KvLayer::new(device, spec)?];
        let bytes = 2 * sources[0].bytes() + layers[0].bytes();
        line(device, &format!("kv_write 8192 × 8 × 256 bf16 → {codec}"), bytes, 3, |enc, i| {
            let order = HeadOrder::TokenMajor;
            let (k, v) = (&sources[2 * i], &sources[2 * i + 1]);
            ops::kv_write(enc, &KvWrite::new(k, v, &step, &layers[i]).order(order))
        })?;
        let q = noise(device, DType::BF16, &[1, 16, dim])?;
        let (one, other) = (sources[0].rows(0..1)?, sources[1].rows(0..1)?);
        let one_step = Step::new(device, 1, &[(0, 4097)])?;
        let weight = noise(device, DType::BF16, &[dim])?;
        let norm = Some(HeadNorm::new(1e-6).weight(Some(&weight)));
        let rope = Some(Rope::new(1e6, dim / 2));
        let name = format!("norm_rope_write of 1 token, 16 + 8 + 8 heads × 256, bf16 → {codec}");
        line(device, &name, 0, 3, |enc, i| {
            let args = NormRopeWrite::new(&q, &one, &other, &one_step, &layers[i], &q)
                .q_norm(norm)
                .k_norm(norm)
                .v_norm(norm)
                .rope(rope);
            ops::norm_rope_write(enc, &args).map(drop)
        })?;
    }
    let q = noise(device, DType::BF16, &[4096, 16, dim])?;
    let positions = Tensor::from_slice(device, &(0..4096).collect::<Vec<u32>>(), &[4096])?;
    let rope = Some(Rope::new(1e6, dim / 2));
    line(device, "norm_rope 4096 × 16 × 256 bf16", 2 * q.bytes(), 1, |enc, _| {
        let args = NormRope::new(&q, &positions, &q).norm(Some(HeadNorm::new(1e-6))).rope(rope);
        ops::norm_rope(enc, &args).map(drop)
    })
}

fn linear(device: &Device) -> Result<()> {
    for (n, k) in [(4096, 4096), (14336, 4096), (4096, 14336), (2048, 1152)] {
        for bits in [0usize, 4, 6, 8] {
            let bytes = if bits == 0 { n * k * 2 } else { n * k * bits / 8 + n * k / 64 * 4 };
            let copies = copies(bytes);
            let values = random_bits(if bits == 0 { n * k * 2 } else { n * k * bits / 8 });
            let scales = random_bits(n * k / 64 * 2);
            let weights: Vec<[Tensor; 3]> = (0..copies)
                .map(|_| {
                    let scales = || Tensor::from_bytes(device, DType::BF16, &[n, k / 64], &scales);
                    let codes = if bits == 0 {
                        Tensor::from_bytes(device, DType::BF16, &[n, k], &values)?
                    } else {
                        Tensor::from_bytes(device, DType::U32, &[n, k * bits / 32], &values)?
                    };
                    Ok([codes, scales()?, scales()?])
                })
                .collect::<Result<_>>()?;
            for rows in [1, 4, 8, 1024] {
                if rows >= 8 && (n, k) != (4096, 4096) {
                    continue;
                }
                let x = noise(device, DType::BF16, &[rows, k])?;
                let out = Tensor::zeros(device, DType::BF16, &[rows, n])?;
                let kind = if bits == 0 { "bf16".to_string() } else { format!("{bits} bit") };
                line(device, &format!("linear {rows} × {n} × {k}, {kind}"), bytes, copies, |enc, i| {
                    let [codes, scales, biases] = &weights[i];
                    let weight = if bits == 0 {
                        Weight::Dense(codes)
                    } else {
                        Weight::Affine(Affine { codes, scales, biases, bits: bits as u32, group: 64 })
                    };
                    ops::linear(enc, &Linear::new(&x, weight, &out))
                })?;
            }
        }
    }
    Ok(())
}

/// Many rows that no library multiplies: f32 results, and activations of three dtypes.
fn linear_many(device: &Device) -> Result<()> {
    let (n, k) = (4096, 4096);
    for (bits, group) in [(0, 64), (4, 64), (6, 64), (8, 64), (4, 32), (6, 32), (8, 32), (3, 64), (5, 32)] {
        let values = random_bits(n * k * bits / 8);
        let scales = noise(device, DType::BF16, &[n, k / group])?;
        let codes = if bits == 0 {
            noise(device, DType::BF16, &[n, k])?
        } else {
            Tensor::from_bytes(device, DType::U32, &[n, k * bits / 32], &values)?
        };
        let affine = Affine { codes: &codes, scales: &scales, biases: &scales, bits: bits as u32, group };
        let weight = if bits == 0 { Weight::Dense(&codes) } else { Weight::Affine(affine) };
        let of_group = if group == 64 { String::new() } else { format!(" in groups of {group}") };
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            if bits == 0 && dtype == DType::BF16 {
                continue;
            }
            for rows in [64, 128, 512, 1024, 4096] {
                let x = noise(device, dtype, &[rows, k])?;
                let out = Tensor::zeros(device, DType::F32, &[rows, n])?;
                let name = format!("linear {rows} × {n} × {k}, {dtype}, {bits} bit{of_group}");
                line(device, &name, codes.bytes(), 1, |enc, _| ops::linear(enc, &Linear::new(&x, weight, &out)))?;
            }
        }
    }
    Ok(())
}

/// Few rows by dense weights. Gemma 4 E4B: gate and up, down, q, k and v, the attention's output, the two products of
/// the per-layer input, logits. Llama 3 8B: gate and up, down, the attention's output. Qwen 2.5 0.5B: gate and up,
/// down.
fn linear_dense(device: &Device) -> Result<()> {
    for (widths, k, out) in [
        (vec![10_240, 10_240], 2560, DType::BF16),
        (vec![2560], 10_240, DType::BF16),
        (vec![2048, 512, 512], 2560, DType::BF16),
        (vec![2560], 2048, DType::BF16),
        (vec![256], 2560, DType::BF16),
        (vec![2560], 256, DType::BF16),
        (vec![262_144], 2560, DType::F32),
        (vec![28_672], 4096, DType::BF16),
        (vec![4096], 14_336, DType::BF16),
        (vec![4096], 4096, DType::BF16),
        (vec![9728], 896, DType::BF16),
        (vec![896], 4864, DType::BF16),
    ] {
        let n: usize = widths.iter().sum();
        let bytes = n * k * 2;
        let values = random_bits(bytes);
        let weights = (0..copies(bytes)).map(|_| Tensor::from_bytes(device, DType::BF16, &[n, k], &values));
        let weights: Vec<Tensor> = weights.collect::<Result<_>>()?;
        for rows in [1, 2, 8, 9, 16, 17, 32, 33] {
            let x = noise(device, DType::BF16, &[rows, k])?;
            let out = Tensor::zeros(device, out, &[rows, n])?;
            line(device, &format!("linear {rows} × {widths:?} × {k}, bf16"), bytes, weights.len(), |enc, i| {
                let args = Linear::new(&x, Weight::Dense(&weights[i]), &out);
                ops::linear(enc, &if widths.len() > 1 { args.parts(&widths) } else { args })
            })?;
        }
    }
    Ok(())
}

/// The format of a weight.
#[derive(Clone, Copy, PartialEq)]
enum Quantised {
    Affine(u32),
    Blocks(BlockFormat),
    Floats(FloatFormat),
}

impl std::fmt::Display for Quantised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Quantised::Affine(bits) => write!(f, "affine {bits} bit"),
            Quantised::Blocks(format) => write!(f, "{format}"),
            Quantised::Floats(format) => write!(f, "{format} (scales apart)"),
        }
    }
}

impl Quantised {
    /// Bytes of the codes and of the scales of a row.
    fn row_bytes(self, k: usize) -> [usize; 2] {
        match self {
            Quantised::Affine(bits) => [k * bits as usize / 8, k / 64 * 2],
            Quantised::Blocks(format) => [format.row_bytes(k).expect("whole blocks"), 0],
            Quantised::Floats(format) => [k * format.bits() / 8, k / format.group()],
        }
    }

    /// Matrices `[lead, k]` with random codes.
    fn matrices(self, device: &Device, lead: &[usize], k: usize, count: usize) -> Result<Vec<[Tensor; 2]>> {
        let (rows, [codes, scales]) = (lead.iter().product::<usize>(), self.row_bytes(k));
        // Scales without infinities and subnormals.
        let all: Vec<u8> = random_bits(rows * codes).into_iter().map(|byte| byte & 0x7B | 0x08).collect();
        let shape = |last: usize| [lead, &[last]].concat();
        let matrix = |_| {
            let (dtype, size) = if matches!(self, Quantised::Affine(_)) { (DType::U32, 4) } else { (DType::U8, 1) };
            let (of_scales, size_of_scale) = if size == 4 { (DType::BF16, 2) } else { (DType::U8, 1) };
            let weight = Tensor::from_bytes(device, dtype, &shape(codes / size), &all)?;
            let bytes = &random_bits(rows * scales);
            Ok([weight, Tensor::from_bytes(device, of_scales, &shape(scales / size_of_scale), bytes)?])
        };
        (0..count).map(matrix).collect()
    }

    fn weight([codes, scales]: &[Tensor; 2], kind: Quantised) -> Weight<'_> {
        match kind {
            Quantised::Affine(bits) => Weight::Affine(Affine { codes, scales, biases: scales, bits, group: 64 }),
            Quantised::Blocks(format) => Blocks::new(codes, format).into(),
            Quantised::Floats(format) => ScaledFloats::new(codes, scales, format).into(),
        }
    }
}

/// Blocks and small floats, in one run with affine 4-bit weights.
fn linear_blocks(device: &Device) -> Result<()> {
    let main = [
        Quantised::Affine(4),
        Quantised::Blocks(BlockFormat::Q4_K),
        Quantised::Floats(FloatFormat::Mxfp4),
        Quantised::Blocks(BlockFormat::Q6_K),
        Quantised::Blocks(BlockFormat::MXFP4),
    ];
    let others = BlockFormat::ALL.map(Quantised::Blocks).into_iter().chain(FloatFormat::ALL.map(Quantised::Floats));
    let others = others.chain([2, 3, 5].map(Quantised::Affine)).filter(|kind| !main.contains(kind));
    main.into_iter().try_for_each(|kind| rows_of(device, kind, &[1, 2, 4, 8, 16, 32, 64]))?;
    linear_experts(device)?;
    others.into_iter().try_for_each(|kind| rows_of(device, kind, &[1, 8]))
}

/// Few rows by matrices of several shapes.
fn rows_of(device: &Device, kind: Quantised, all_rows: &[usize]) -> Result<()> {
    for (n, k) in [(14_336, 4096), (4096, 4096), (4096, 14_336)] {
        let bytes = n * kind.row_bytes(k).iter().sum::<usize>();
        let weights = kind.matrices(device, &[n], k, copies(bytes))?;
        for &rows in all_rows.iter().filter(|rows| n > k || [1, 8].contains(*rows)) {
            let x = noise(device, DType::BF16, &[rows, k])?;
            let out = Tensor::zeros(device, DType::BF16, &[rows, n])?;
            line(device, &format!("linear {rows} × {n} × {k}, {kind}"), bytes, weights.len(), |enc, i| {
                ops::linear(enc, &Linear::new(&x, Quantised::weight(&weights[i], kind), &out))
            })?;
        }
    }
    Ok(())
}

/// Experts of gpt-oss 20B and of Qwen 3 30B-A3B.
fn linear_experts(device: &Device) -> Result<()> {
    for (kind, [experts, n, k], top_k) in [
        (Quantised::Affine(4), [128, 1536, 2048], 8),
        (Quantised::Blocks(BlockFormat::Q4_K), [128, 1536, 2048], 8),
        (Quantised::Floats(FloatFormat::Mxfp4), [32, 5760, 2880], 4),
        (Quantised::Blocks(BlockFormat::MXFP4), [32, 5760, 2880], 4),
    ] {
        let of_expert = n * kind.row_bytes(k).iter().sum::<usize>();
        let weights = kind.matrices(device, &[experts, n], k, 2)?;
        for tokens in [1, 4, 16, 64, 128, 512, 2048] {
            let x = noise(device, DType::BF16, &[tokens, k])?;
            let out = Tensor::zeros(device, DType::BF16, &[tokens * top_k, n])?;
            // Other experts for every token, and in every call.
            let ids: Vec<Tensor> = (0..60)
                .map(|call| {
                    let ids: Vec<u32> = (0..tokens * top_k).map(|i| ((call * 37 + i * 11) % experts) as u32).collect();
                    Tensor::from_slice(device, &ids, &[tokens, top_k])
                })
                .collect::<Result<_>>()?;
            let bytes = of_expert * experts.min(tokens * top_k);
            let name = format!("linear {tokens} × {top_k} of {experts} experts {n} × {k}, {kind}");
            line(device, &name, bytes, 60, |enc, i| {
                let experts = Some(Experts::new(&ids[i]));
                ops::linear(enc, &Linear::new(&x, Quantised::weight(&weights[i % 2], kind), &out).experts(experts))
            })?;
        }
    }
    Ok(())
}

fn rest(device: &Device) -> Result<()> {
    for rows in [1, 4096] {
        let x = noise(device, DType::BF16, &[rows, 4096])?;
        let (out, weight) = (noise(device, DType::BF16, &[rows, 4096])?, noise(device, DType::BF16, &[4096])?);
        line(device, &format!("rms_norm {rows} × 4096 bf16, after a residual"), 3 * x.bytes(), 1, |enc, _| {
            let residual = Residual::After(&out);
            let args = RmsNorm::new(&x, 1e-6, &out).weight(Some(&weight)).residual(residual);
            ops::rms_norm(enc, &args)
        })?;
        line(device, &format!("gate {rows} × 4096 bf16"), 3 * x.bytes(), 1, |enc, _| {
            let (gate, up) = (Columns::from(&x), Columns::from(&out));
            ops::gate(enc, &Gate::new(gate, up, Activation::GeluTanh, &x))
        })?;
        let heads = x.reshape(&[rows * 16, 256])?;
        line(device, &format!("hadamard {} × 256 bf16", rows * 16), 2 * x.bytes(), 1, |enc, _| {
            ops::hadamard(enc, &Hadamard::new(&heads, &heads))
        })?;
    }
    let logits = noise(device, DType::BF16, &[1, 262_144])?;
    let (id, counter) = (Tensor::zeros(device, DType::U32, &[1])?, Tensor::zeros(device, DType::U32, &[1])?);
    line(device, "argmax of 262144 bf16", logits.bytes(), 1, |enc, _| ops::argmax(enc, &Argmax::new(&logits, &id)))?;
    for (top_k, top_p) in [(0, 1.0), (64, 0.95)] {
        line(device, &format!("sample of 262144 bf16, top_k {top_k}, top_p {top_p}"), logits.bytes(), 1, |enc, _| {
            let args = Sample::new(&logits, &counter, &id).temperature(0.01).top_k(top_k).top_p(top_p).seed(1);
            ops::sample(enc, &args)
        })?;
    }
    let table = noise(device, DType::BF16, &[4096, 4096])?;
    let ids = Tensor::from_slice(device, &(0..512).collect::<Vec<u32>>(), &[512])?;
    let out = Tensor::zeros(device, DType::BF16, &[512, 4096])?;
    line(device, "embed 512 × 4096 bf16", 2 * out.bytes(), 1, |enc, _| {
        ops::embed(enc, &Embed::new(&table, &ids, &out))
    })
}
