//! Test data of the benches: random numbers, and enough cache layers to exceed a processor's cache.

use kvant::{Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Step, Tensor, bf16, device::DeviceKind, f16, ops};
use kvant_models::KvCodec;

use super::case::Case;
use crate::{output, result::Result};

/// Bytes of cached keys and values that a case rotates over.
const ROTATION: usize = 700_000_000;
/// Tokens per write while filling.
const CHUNK: usize = 1024;

/// Keys and values of new tokens, `[tokens, kv_heads, head_dim]`.
pub struct Source {
    pub k: Tensor,
    pub v: Tensor,
}

impl Source {
    pub fn new(device: &Device, case: &Case, tokens: usize) -> Result<Source> {
        let shape = [tokens, case.shape.kv_heads, case.shape.head_dim];
        Ok(Source { k: random(device, case.activations, &shape, 1)?, v: random(device, case.activations, &shape, 2)? })
    }
}

/// Linear layers of `capacity` filled slots. Their number depends on [`ROTATION`] and the free memory.
pub fn layers(device: &Device, case: &Case, capacity: usize) -> Result<Vec<KvLayer>> {
    let KvCodec { k, v } = case.kv;
    let (kv_heads, head_dim) = (case.shape.kv_heads, case.shape.head_dim);
    let order = HeadOrder::HeadMajor;
    let spec = LayerSpec::new(kv_heads, head_dim, capacity, k).v(v).order(order);
    let count = layer_count(device, &spec)?;
    let first = KvLayer::new(device, spec)?;
    fill(&first, case)?;
    let mut all = vec![first];
    for _ in 1..count {
        all.push(KvLayer::new(device, spec)?);
    }
    // The remaining layers are copies of the first: copying is faster than encoding again.
    let mut bytes = Vec::new();
    for side in [KvLayer::k, KvLayer::v] {
        for (plane, (_, source)) in side(&all[0]).tensors().enumerate() {
            bytes.resize(source.bytes(), 0);
            source.read_bytes(&mut bytes)?;
            for layer in &all[1..] {
                let (_, target) = side(layer).tensors().nth(plane).expect("layers of one kind have the same planes");
                target.write_bytes(&bytes)?;
            }
        }
    }
    Ok(all)
}

/// Bytes of the keys and values of `tokens` tokens in a layer of the case, including the means of their pages.
pub fn cached_bytes(case: &Case, tokens: usize) -> usize {
    let (dim, pages) = (case.shape.head_dim, tokens.div_ceil(case.page_tokens()));
    let side = |codec: Codec| tokens * codec.bytes_per_vector(dim) + pages * codec.bytes_per_mean(dim);
    case.shape.kv_heads * (side(case.kv.k) + side(case.kv.v))
}

fn layer_count(device: &Device, spec: &LayerSpec) -> Result<usize> {
    let vector = spec.k.bytes_per_vector(spec.head_dim).saturating_add(spec.v.bytes_per_vector(spec.head_dim));
    copies(device, vector.saturating_mul(spec.kv_heads).saturating_mul(spec.capacity))
}

/// The number of caches of `bytes` bytes that [`ROTATION`] requires and memory permits.
pub fn copies(device: &Device, bytes: usize) -> Result<usize> {
    let bytes = bytes.max(1);
    let wanted = ROTATION.div_ceil(bytes);
    let in_host_memory = matches!(device.kind(), DeviceKind::Cpu | DeviceKind::Reference);
    must_fit(bytes)?;
    Ok(if in_host_memory { wanted.min(usable_memory() / bytes) } else { wanted })
}

/// Rejects sizes that would make the system swap or exhaust its memory.
fn must_fit(bytes: usize) -> Result {
    let usable = usable_memory();
    if bytes <= usable {
        return Ok(());
    }
    let (need, have) = (output::bytes(bytes), output::bytes(usable));
    Err(format!("this shape and context require {need} of memory, and only {have} are available").into())
}

/// Three quarters of the free memory, if the system reports it.
fn usable_memory() -> usize {
    available_memory().map_or(usize::MAX, |bytes| bytes / 4 * 3)
}

/// The available memory, if the system reports it.
fn available_memory() -> Option<usize> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Writes every slot.
fn fill(layer: &KvLayer, case: &Case) -> Result {
    let device = layer.device();
    let capacity = layer.spec().capacity;
    let source = Source::new(device, case, CHUNK.min(capacity))?;
    for start in (0..capacity).step_by(CHUNK) {
        let end = capacity.min(start + CHUNK);
        let step = step(device, start, end)?;
        let (k, v) = (&source.k, &source.v);
        let write = ops::KvWrite::new(k, v, &step, layer);
        let mut enc = device.encoder()?;
        ops::kv_write(&mut enc, &write)?;
        enc.commit()?.wait()?;
    }
    Ok(())
}

/// A step of positions `start..end` of the only sequence.
pub fn step(device: &Device, start: usize, end: usize) -> Result<Step> {
    let tokens = (start..end).map(|position| Ok((0, u32::try_from(position)?))).collect::<Result<Vec<_>>>()?;
    Ok(Step::new(device, 1, &tokens)?)
}

/// Random numbers of variance 1: sums of four uniform numbers, which are sufficiently normal for a timing.
pub fn random(device: &Device, dtype: DType, shape: &[usize], seed: u64) -> Result<Tensor> {
    let elements = shape.iter().fold(1usize, |n, &dim| n.saturating_mul(dim));
    must_fit(elements.saturating_mul(2 * size_of::<f32>()))?; // on the host and on the device
    let mut state = seed;
    let uniform_variance = 1.0f32 / 12.0;
    let scale = 1.0 / (65536.0 * (4.0 * uniform_variance).sqrt());
    let values: Vec<f32> = (0..elements)
        .map(|_| {
            // splitmix64 (Steele et al. 2014)
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            let sum: u64 = (0..4).map(|i| (z >> (16 * i)) & 0xffff).sum();
            (sum as f32 - 2.0 * 65535.0) * scale
        })
        .collect();
    Ok(match dtype {
        DType::F16 => Tensor::from_slice(device, &values.into_iter().map(f16::from_f32).collect::<Vec<_>>(), shape),
        DType::BF16 => Tensor::from_slice(device, &values.into_iter().map(bf16::from_f32).collect::<Vec<_>>(), shape),
        _ => Tensor::from_slice(device, &values, shape),
    }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_have_mean_0_and_variance_1() {
        let x = random(&Device::cpu(), DType::F32, &[10_000], 7).unwrap().to_f32().unwrap();
        let mean = x.iter().sum::<f32>() / x.len() as f32;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / x.len() as f32;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.05, "mean {mean}, variance {variance}");
    }
}
