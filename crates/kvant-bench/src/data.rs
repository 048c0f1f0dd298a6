//! Random test data, and the amount of memory to rotate over.

use kvant::{Device, Tensor};

use crate::Result;

/// Bytes that a case rotates over, so that it reads from memory: far more than a processor's caches.
pub const ROTATION: usize = 700_000_000;

/// The number of copies of `bytes` bytes that together have [`ROTATION`].
pub fn copies(bytes: usize) -> usize {
    ROTATION.div_ceil(bytes.max(1))
}

/// splitmix64 (Steele et al. 2014), from a seed.
pub struct SplitMix(pub u64);

impl SplitMix {
    /// 64 random bits.
    pub fn next_word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Nearly normal random numbers of variance 1; equal seeds give equal numbers. Cheaper than [`gaussian`].
pub fn normal(count: usize, seed: u64) -> Vec<f32> {
    let mut random = SplitMix(seed);
    // Sums of four uniform 16-bit numbers.
    let scale = 1.0 / (65536.0 * (4.0f32 / 12.0).sqrt());
    let mut next = || {
        let word = random.next_word();
        let sum: u64 = (0..4).map(|i| (word >> (16 * i)) & 0xffff).sum();
        (sum as f32 - 2.0 * 65535.0) * scale
    };
    (0..count).map(|_| next()).collect()
}

/// Standard normal random numbers (Box and Muller); equal seeds give equal numbers.
pub fn gaussian(count: usize, seed: u64) -> Vec<f32> {
    let mut random = SplitMix(seed);
    let mut uniform = || ((random.next_word() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let mut next = || (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    (0..count).map(|_| next() as f32).collect()
}

/// [`normal`] numbers in an f32 tensor.
pub fn tensor(device: &Device, shape: &[usize], seed: u64) -> Result<Tensor> {
    Ok(Tensor::from_slice(device, &normal(shape.iter().product(), seed), shape)?)
}
