//! Attention over contiguous layers, alone and with its neighbours.

use kvant::{
    Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor, bf16,
    ops::{self, Attend, HeadNorm, KvWrite, Linear, NormRopeWrite},
};

use kvant_bench::data;

use crate::timer::{Timer, copies, noise};

/// Decode attention of one token over a full cache, and (tokens > 1) attention of the last tokens of a prompt.
pub fn contexts(timer: &Timer) -> Result<()> {
    timer.head();
    let device = &timer.device;
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
            let filled = FilledLayers::new(device, *codec, [dim, heads, kv_heads, len, tokens], None)?;
            let name = format!("attend {dim}, {heads}, {kv_heads}, {len} {codec}, {tokens} tokens, window {window:?}");
            filled.time(timer, &name, window, len)?;
        }
    }
    // A ring with a window.
    for position in [2000, 1_000_000] {
        let filled = FilledLayers::new(device, bf16, [256, 16, 8, 1024, 1], Some(position))?;
        let name = format!("attend 256, 16, 8 bf16, ring, window 1024, position {position}");
        filled.time(timer, &name, Some(1024), 1024)?;
    }
    Ok(())
}

/// One token of each of many sequences.
pub fn batches(timer: &Timer) -> Result<()> {
    timer.head();
    let device = &timer.device;
    for (dim, heads, kv_heads, len) in
        [(64, 32, 8, 2048), (128, 32, 8, 1024), (128, 32, 8, 4096), (256, 32, 16, 1024), (256, 8, 2, 512)]
    {
        for codec in [Codec::BF16, Codec::tq(8), Codec::tq(4), Codec::tq(3)] {
            for sequences in [16, 64] {
                let spec = LayerSpec::new(kv_heads, dim, len, codec).sequences(sequences).order(HeadOrder::HeadMajor);
                let at: Vec<(u32, u32)> = (0..sequences as u32).map(|sequence| (sequence, len as u32 - 1)).collect();
                let filled = FilledLayers::of(device, spec, heads, 0..len, &at)?;
                let name = format!("attend {dim}, {heads}, {kv_heads}, {len} {codec}, {sequences} sequences");
                filled.time(timer, &name, None, len)?;
            }
        }
    }
    Ok(())
}

/// The normalised error √(Σ(x−y)²/Σy²) of attention for a prompt of 512 normal tokens in bf16; tools/h200/peers.py
/// computes that of PyTorch's kernels.
pub fn prompt_errors(timer: &Timer) -> Result<()> {
    println!("| on {} | error |\n|---|---|", timer.device.name());
    let device = &timer.device;
    let (tokens, heads, kv_heads) = (512, 8, 4);
    for head_dim in [64, 128, 256, 512] {
        let normals = |heads: usize, seed| -> Vec<bf16> {
            data::gaussian(tokens * heads * head_dim, seed).into_iter().map(bf16::from_f32).collect()
        };
        let (q, k, v) = (normals(heads, 1), normals(kv_heads, 2), normals(kv_heads, 3));
        let attend_on = |device: &Device, dtype| -> Result<Vec<f32>> {
            let tensor = |x: &[bf16], heads| Tensor::from_slice(device, x, &[tokens, heads, head_dim]);
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
        println!("| prompt of {tokens} tokens, D {head_dim} | {:.3e} |", error.sqrt());
    }
    Ok(())
}

/// Decode attention together with a layer's other operations, because launches may begin before earlier ones end.
pub fn steps(timer: &Timer) -> Result<()> {
    timer.head();
    let device = &timer.device;
    for (dim, heads, kv_heads) in [(128, 32, 8), (256, 16, 8), (512, 16, 2)] {
        for codec in [Codec::BF16, Codec::tq(4)] {
            for len in [1024, 4096, 32768] {
                FilledLayers::new(device, codec, [dim, heads, kv_heads, len, 1], None)?.time_step(timer)?;
            }
        }
    }
    Ok(())
}

/// Layers full of keys, and the queries of the last tokens.
struct FilledLayers {
    layers: Vec<KvLayer>,
    step: Step,
    q: Tensor,
    out: Tensor,
}

impl FilledLayers {
    fn new(device: &Device, codec: Codec, shape: [usize; 5], ring: Option<usize>) -> Result<FilledLayers> {
        let [head_dim, heads, kv_heads, len, tokens] = shape;
        let order = HeadOrder::HeadMajor;
        let spec = LayerSpec::new(kv_heads, head_dim, len, codec).ring(ring.is_some()).order(order);
        // The last token ends the cache, wherever that is.
        let end = ring.map_or(len, |position| position + 1);
        let at: Vec<(u32, u32)> = (end - tokens..end).map(|position| (0, position as u32)).collect();
        FilledLayers::of(device, spec, heads, end - len..end, &at)
    }

    /// Layers whose sequences all hold `held`, and queries at each (sequence, position) of `at`.
    fn of(
        device: &Device,
        spec: LayerSpec,
        heads: usize,
        held: std::ops::Range<usize>,
        at: &[(u32, u32)],
    ) -> Result<FilledLayers> {
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
        Ok(FilledLayers { layers, step: Step::new(device, spec.sequences, at)?, q, out })
    }

    fn time(&self, timer: &Timer, name: &str, window: Option<usize>, keys: usize) -> Result<()> {
        let FilledLayers { layers, step, q, out } = self;
        let bytes = layers[0].bytes() / layers[0].spec().capacity * keys;
        let scale = (layers[0].spec().head_dim as f32).powf(-0.5);
        timer.line(name, bytes, layers.len(), |enc, i| {
            let layer = &layers[i];
            ops::attend(enc, &Attend::new(q, layer, step, out).scale(scale).window(window))
        })
    }

    /// Times attention together with a layer's small operations before and after it.
    fn time_step(&self, timer: &Timer) -> Result<()> {
        let device = &timer.device;
        let FilledLayers { layers, step, q, out } = self;
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
        timer.line(&name, layers[0].bytes(), layers.len(), |enc, i| {
            let layer = &layers[i];
            let write = NormRopeWrite::new(q, &one, &one, step, layer, &rotated);
            let q = ops::norm_rope_write(enc, &write.q_norm(norm).k_norm(norm).v_norm(norm))?;
            ops::attend(enc, &Attend::new(q, layer, step, out))?;
            ops::linear(enc, &Linear::new(&x, &matrix, &sums))
        })
    }
}
