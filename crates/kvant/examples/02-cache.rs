//! The cache of a whole model: sliding layers as rings, truncated drafts, forked sequences.
//!
//! Run it with `cargo run -p kvant --example 02-cache`.

use kvant::{CacheLayer, CacheSpec, Codec, DType, Device, Error, KvCache, Result, Tensor, ops};

fn main() -> Result<()> {
    let device = Device::cpu();

    // A sliding layer that sees the last 8 positions, and a full layer whose values are quantised to 4 bits. There
    // are two sequences of up to 64 tokens. The ring has 8 + 4 slots, so that a draft of 4 tokens can be truncated.
    let full = CacheLayer { kv_heads: 1, head_dim: 64, window: None, k: Codec::F16, v: Codec::tq(4) };
    let sliding = CacheLayer { window: Some(8), v: Codec::F16, ..full };
    let spec = CacheSpec { layers: vec![sliding, full], sequences: 2, capacity: 64, slack: 4 };
    let mut cache = KvCache::new(&device, &spec)?;
    println!("{} bytes; {} in f16", cache.bytes(), cache.bytes_as(Codec::F16));

    // A step holds the positions of its tokens; their keys and values are written to every layer with it. The tokens
    // come in batches of 5, because a ring of 12 slots cannot hold 20 new tokens and the window of the first one.
    for _ in 0..4 {
        append(&mut cache, 0, 5)?;
    }
    println!("sequence 0 has {} tokens", cache.len(0)?);

    // The ring has wrapped: it holds positions 8 to 19, in slots 8 to 11, then 0 to 7. `kv_read` returns them in
    // order.
    let held = read(&cache, 0, 8..20)?;
    println!("the ring holds {held:?}");
    assert_eq!(held, (8..20).map(|p| p as f32).collect::<Vec<_>>());

    // A draft of 4 tokens, of which the first is accepted.
    append(&mut cache, 0, 4)?;
    cache.truncate(0, 21)?;
    assert_eq!(read(&cache, 0, 13..21)?, (13..21).map(|p| p as f32).collect::<Vec<_>>());

    // Truncating further would need positions that the ring has overwritten. That is an error, never a wrong answer.
    match cache.truncate(0, 15) {
        Err(error @ Error::RingOverwritten { .. }) => println!("expected error: {error}"),
        other => panic!("truncated to positions that the ring has overwritten: {other:?}"),
    }

    // A second sequence continues from the same tokens.
    cache.fork(0, 1)?;
    append(&mut cache, 1, 1)?;
    println!("lengths {} and {}", cache.len(0)?, cache.len(1)?);
    assert_eq!(read(&cache, 1, 14..22)?, (14..22).map(|p| p as f32).collect::<Vec<_>>());
    Ok(())
}

/// Appends tokens whose keys and values are their positions.
fn append(cache: &mut KvCache, sequence: usize, tokens: usize) -> Result<()> {
    let start = cache.len(sequence)?;
    let step = cache.append(&[(sequence, tokens)])?;
    let rows: Vec<f32> = (start..start + tokens).flat_map(|position| [position as f32; 64]).collect();
    let rows = Tensor::from_slice(cache.device(), &rows, &[tokens, 1, 64])?;
    let mut enc = cache.device().encoder()?;
    for index in 0..cache.spec().layers.len() {
        let order = ops::SourceOrder::TokenMajor;
        let layer = cache.layer(index)?;
        ops::kv_write(&mut enc, &ops::KvWrite { k: &rows, v: &rows, order, first_token: 0, step: &step, layer })?;
    }
    enc.commit()?.wait()
}

/// Returns the first coordinate of the keys at some positions of the sliding layer.
fn read(cache: &KvCache, sequence: usize, positions: std::ops::Range<usize>) -> Result<Vec<f32>> {
    let out = Tensor::zeros(cache.device(), DType::F32, &[positions.len(), 1, 64])?;
    let (side, order) = (ops::KvSide::K, ops::SourceOrder::TokenMajor);
    let start = positions.start;
    let layer = cache.layer(0)?;
    let mut enc = cache.device().encoder()?;
    ops::kv_read(&mut enc, &ops::KvRead { layer, side, sequence, start, keep_rotated: false, order, out: &out })?;
    enc.commit()?.wait()?;
    Ok(out.to_f32()?.chunks_exact(64).map(|row| row[0]).collect())
}
