//! The cache of a whole model: sequences in pages, sliding windows, truncated drafts, forks, a shared prefix.
//!
//! Run it with `cargo run -p kvant --example 02-pool`.

use kvant::{
    CacheLayer, Codec, DType, Device, Error, HeadOrder, KvPool, PoolSpec, PrefixCache, Result, Sequence, Tensor, ops,
};

fn main() -> Result<()> {
    // A sliding layer that sees the last 20 positions, and a full layer whose values are quantised to 4 bits. Both take
    // pages of 16 positions from one budget.
    let full = CacheLayer::new(1, 64, Codec::F16).v(Codec::tq(4));
    let sliding = full.v(Codec::F16).window(Some(20));
    let spec = PoolSpec::new(vec![sliding, full], 1 << 20).page_tokens(16);
    let pool = KvPool::new(&Device::cpu(), &spec)?;

    // A sequence takes pages as it grows. The sliding layer releases pages that its window has passed.
    let mut a = pool.sequence();
    for _ in 0..20 {
        append(&mut a, 5)?;
    }
    println!("{} tokens; the sliding layer holds {:?}, the full one {:?}", a.len(), a.held(0)?, a.held(1)?);
    assert_eq!(read(&a, a.held(0)?)?, a.held(0)?.map(|p| p as f32).collect::<Vec<_>>());

    // A draft of 4 tokens; the first one is accepted.
    append(&mut a, 4)?;
    a.truncate(101)?;

    // Truncating further would need positions whose page is gone. That is an error, never a wrong answer.
    match a.truncate(30) {
        Err(error @ Error::NotHeld { .. }) => println!("expected error: {error}"),
        other => panic!("truncated to positions that are not held: {other:?}"),
    }

    // Another sequence continues from the same tokens. It shares all pages, until one of the two writes to the last.
    let before = pool.usage().used;
    let mut b = a.fork();
    assert_eq!(pool.usage().used, before);
    append(&mut b, 1)?;
    println!("lengths {} and {}; {} bytes, then {}", a.len(), b.len(), before, pool.usage().used);

    // A prefix that other prompts begin with is computed once.
    let prompt: Vec<u32> = (0..50).collect();
    let cache = PrefixCache::new(&pool, b"model");
    let mut first = pool.sequence();
    append(&mut first, prompt.len())?;
    cache.keep(&first, &prompt)?;
    let second = cache.find(&prompt[..49])?;
    println!("{} of 49 tokens need not be computed again", second.len());
    assert_eq!(second.len(), 48);
    Ok(())
}

/// Appends tokens whose keys and values are their positions.
fn append(sequence: &mut Sequence, tokens: usize) -> Result<()> {
    let pool = sequence.pool().clone();
    let start = sequence.len();
    let step = pool.step(&mut [(sequence, tokens)])?;
    let rows: Vec<f32> = (start..start + tokens).flat_map(|position| [position as f32; 64]).collect();
    let rows = Tensor::from_slice(pool.device(), &rows, &[tokens, 1, 64])?;
    let mut enc = pool.device().encoder()?;
    for index in 0..pool.spec().layers.len() {
        let (layer, order) = (pool.layer(index)?, HeadOrder::TokenMajor);
        ops::kv_write(&mut enc, &ops::KvWrite::new(&rows, &rows, &step, layer).order(order))?;
    }
    enc.commit()?.wait()
}

/// Returns the first coordinate of the keys at some positions of the sliding layer.
fn read(sequence: &Sequence, positions: std::ops::Range<usize>) -> Result<Vec<f32>> {
    let pool = sequence.pool();
    // A step without tokens has the page tables.
    let mut same = sequence.fork();
    let step = pool.step(&mut [(&mut same, 0)])?;
    let out = Tensor::zeros(pool.device(), DType::F32, &[positions.len(), 1, 64])?;
    let (layer, side, order) = (pool.layer(0)?, ops::KvSide::K, HeadOrder::TokenMajor);
    let (sequence, start, keep_rotated, step) = (0, positions.start, false, Some(&step));
    let mut enc = pool.device().encoder()?;
    ops::kv_read(
        &mut enc,
        &ops::KvRead::new(layer, side, &out)
            .sequence(sequence)
            .step(step)
            .start(start)
            .keep_rotated(keep_rotated)
            .order(order),
    )?;
    enc.commit()?.wait()?;
    Ok(out.to_f32()?.chunks_exact(64).map(|row| row[0]).collect())
}
