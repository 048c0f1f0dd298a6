//! Keys and values that depend on all tokens before them, and attention over sequences of these tokens.

use crate::common::{
    Rng, bytes_of,
    layers::{self, Source},
    run,
};
use kvant::{
    CacheLayer, Codec, DType, KvPool, Sequence, Tensor,
    ops::{self, Attend},
};

pub const WINDOW: usize = 21;

pub const DIM: usize = 64;

/// Token `at` of one of the prompts that histories share.
pub fn prompt_token(prompt: u32, at: usize) -> u32 {
    // Prompts have their first 40 tokens in common.
    if at < 40 { at as u32 } else { 1000 * (prompt + 1) + at as u32 }
}

/// A key or value that depends on all tokens up to its own, so that a page of another history is detected.
pub fn vector(side: u32, layer: usize, tokens: &[u32]) -> Vec<f32> {
    let hash = tokens.iter().fold(u64::from(side) << 32 | layer as u64, |hash, &token| {
        (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    Rng::new(hash).normals(DIM)
}

/// Appends the tokens that a sequence lacks, and returns the attention of each layer over them.
pub fn feed(pool: &KvPool, sequence: &mut Sequence, tokens: &[u32]) -> Vec<Vec<u8>> {
    let (start, count) = (sequence.len(), tokens.len() - sequence.len());
    let step = pool.step(&mut [(sequence, count)]).unwrap();
    let q = Rng::of(tokens.len()).normals(count * 2 * DIM);
    let q = Tensor::from_slice(pool.device(), &q, &[count, 2, DIM]).unwrap();
    let layers = 0..pool.spec().layers.len();
    layers
        .map(|index| {
            let layer = pool.layer(index).unwrap();
            let side = |side| (start..tokens.len()).flat_map(|at| vector(side, index, &tokens[..=at])).collect();
            layers::write(layer, &Source { k: side(0), v: side(1), heads: 1, dim: DIM }, DType::F32, &step).unwrap();
            let out = Tensor::zeros(pool.device(), DType::F32, &[count, 2, DIM]).unwrap();
            run(pool.device(), |enc| ops::attend(enc, &Attend::new(&q, layer, &step, &out))).unwrap();
            bytes_of(&out).unwrap()
        })
        .collect()
}

/// A full and a sliding layer.
pub fn two_layers() -> Vec<CacheLayer> {
    let full = CacheLayer::new(1, DIM, Codec::F32);
    vec![full.window(Some(WINDOW)), full]
}
