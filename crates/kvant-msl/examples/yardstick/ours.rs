//! Operations of kvant on a device that counts.

use kvant::{Codec, DType, Device, Encoder, KvLayer, LayerSpec, Result, Step, Tensor, ops};
use kvant_msl::{Counter, Runs};
use msl_host::Counts;

/// Cores of an M2 Max.
const CORES: usize = 38;

/// Pseudo-random bytes that are finite as halves and as floats.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let next = |state: &mut u64| {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state >> 24) as u8
    };
    (0..len).map(|i| next(&mut state) & if i % 2 == 1 { 0xB7 } else { 0xFF }).collect()
}

pub fn fill(tensor: &Tensor) -> Result<()> {
    tensor.write_bytes(&noise(tensor.bytes()))
}

pub fn device() -> Result<(Device, Counter)> {
    let (runs, counter) = Runs::counting(CORES);
    Ok((kvant_msl::device(runs)?, counter))
}

/// The summed counts of the launches of one submission, and the kernels' names.
pub fn count(
    device: &Device,
    counter: &Counter,
    f: impl FnOnce(&mut Encoder) -> Result<()>,
) -> Result<(String, Counts)> {
    counter.lock().unwrap_or_else(|e| e.into_inner()).clear();
    let mut enc = device.encoder()?;
    f(&mut enc)?;
    enc.commit()?.wait()?;
    let counted = std::mem::take(&mut *counter.lock().unwrap_or_else(|e| e.into_inner()));
    let names: Vec<&str> = counted.iter().map(|c| c.kernel).collect();
    let total = counted.iter().map(|c| c.counts.clone()).reduce(|a, b| a.and(&b)).unwrap_or_default();
    Ok((names.join(", "), total))
}

/// A shape of attention.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub d: usize,
    pub tokens: usize,
    pub keys: usize,
}

/// `splits`: 0 to let the route choose.
pub fn attend(shape: Shape, codec: Codec, splits: usize) -> Result<(String, Counts)> {
    let (device, counter) = device()?;
    let Shape { heads, kv_heads, d, tokens, keys } = shape;
    let layer = KvLayer::new(&device, LayerSpec::new(kv_heads, d, keys, codec))?;
    for side in [layer.k(), layer.v()] {
        for (_, tensor) in side.tensors() {
            fill(tensor)?;
        }
    }
    let positions: Vec<(u32, u32)> = (keys - tokens..keys).map(|p| (0, p as u32)).collect();
    let step = Step::new(&device, 1, &positions)?;
    let q = Tensor::zeros(&device, DType::F16, &[tokens, heads, d])?;
    let out = Tensor::zeros(&device, DType::F16, &[tokens, heads, d])?;
    fill(&q)?;
    let attend = ops::Attend::new(&q, &layer, &step, &out).scale(0.01);
    let attend = if splits == 0 { attend } else { attend.splits(Some(splits)) };
    count(&device, &counter, |enc| ops::attend(enc, &attend))
}
