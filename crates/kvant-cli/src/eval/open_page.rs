//! Centred codecs with another policy: a page keeps 16 bits until it is full, and is then encoded around its own mean.

use kvant::{
    KvPool, Sequence, Tensor,
    codec::{self, PageMean, TurboQuant},
    ops::KvSide,
};
use kvant_models::{Logits, Model};

use super::{formats::f16, vectors};
use crate::Result;

/// Feeds tokens to a sequence of an f32 pool, which plays the policy. Pages that a step fills are encoded before its
/// tokens attend to them. A page that several steps fill is encoded after the last of them.
pub fn feed(
    turbo: TurboQuant,
    model: &Model,
    sequence: &mut Sequence,
    tokens: &[u32],
    logits: Logits,
) -> Result<Tensor> {
    let pool = sequence.pool().clone();
    let page = pool.spec().page_tokens;
    if tokens.len() > model.pass_tokens() {
        return Err(format!(
            "--step-tokens must be at most {} for open pages, got {}",
            model.pass_tokens(),
            tokens.len()
        )
        .into());
    }
    // So that the page that this step completes can be written once more.
    sequence.hold(page);
    let begin = sequence.len();
    let out = model.feed_with(sequence, tokens, logits, &mut |layer, step| {
        let positions = vectors::positions(step)?;
        let stored = [KvSide::K, KvSide::V].map(|side| -> kvant::Result<Vec<f64>> {
            let mut stored = vectors::read(&pool, layer, side, step, positions.clone())?;
            stored.iter_mut().for_each(|x| *x = f16(*x));
            let token = stored.len() / positions.len();
            let first = (positions.start.next_multiple_of(page) - positions.start).min(positions.len());
            for whole in stored[first * token..].chunks_exact_mut(page * token) {
                encode(turbo, &pool, layer, whole)?;
            }
            Ok(stored)
        });
        let [k, v] = stored;
        Ok(vectors::write(&pool, layer, step, &[k?, v?])?)
    })?;
    let completed = begin.next_multiple_of(page);
    if completed > begin && completed <= sequence.len() {
        complete(turbo, &pool, sequence, completed - page)?;
    }
    Ok(out)
}

/// Encodes the page from `start` on. Only a step's tokens can be written: those from `start` on are removed and
/// appended again.
fn complete(turbo: TurboQuant, pool: &KvPool, sequence: &mut Sequence, start: usize) -> Result {
    let end = sequence.len();
    let page = pool.spec().page_tokens;
    let held = pool.step(&mut [(sequence, 0)])?;
    let layers = 0..pool.spec().layers.len();
    let stored = layers.map(|layer| {
        let read = |side| vectors::read(pool, layer, side, &held, start..end);
        Ok([read(KvSide::K)?, read(KvSide::V)?])
    });
    let stored = stored.collect::<kvant::Result<Vec<[Vec<f64>; 2]>>>()?;
    sequence.truncate(start)?;
    let step = pool.step(&mut [(sequence, end - start)])?;
    for (layer, mut sides) in stored.into_iter().enumerate() {
        for side in &mut sides {
            let token = side.len() / (end - start);
            encode(turbo, pool, layer, &mut side[..page * token])?;
        }
        vectors::write(pool, layer, &step, &sides)?;
    }
    Ok(())
}

/// Replaces the vectors of a page, token by token, by what the codec stores around their means.
fn encode(turbo: TurboQuant, pool: &KvPool, layer: usize, page: &mut [f64]) -> kvant::Result<()> {
    let spec = pool.layer(layer)?.spec();
    let (heads, dim) = (spec.kv_heads, spec.head_dim);
    for head in 0..heads {
        let mean = PageMean::of(dim, page.chunks_exact(dim).skip(head).step_by(heads))?;
        for vector in page.chunks_exact_mut(dim).skip(head).step_by(heads) {
            let encoded = codec::encode_around(turbo, &mean, vector)?;
            vector.copy_from_slice(&codec::decode_around(turbo, &mean, &encoded)?);
        }
    }
    Ok(())
}
