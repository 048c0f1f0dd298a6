//! `kvant bench kv-write` and `encode`: writing new keys and values to the cache.
//!
//! The slots rotate. The new keys and values do not: a model has just computed them, so they are cached.

use std::time::Duration;

use kvant::{Device, Step, ops};

use super::{
    buffers,
    case::{Case, Measured},
    pages::PagedCache,
    timing,
};
use crate::result::Result;

/// Slots of a layer, unless one call fills more.
const CAPACITY: usize = 4096;

pub fn measure(device: &Device, case: &Case, budget: Duration) -> Result<Measured> {
    let tokens = case.context as usize;
    let capacity = tokens.max(CAPACITY);
    let source = buffers::Source::new(device, case, tokens)?;
    // Few tokens are appended within a page; many start a sequence.
    let past = if tokens < case.page_tokens() { case.page_tokens() / 2 } else { 0 };
    let sequences = capacity.div_ceil((past + tokens).next_multiple_of(case.page_tokens()));
    let paged = if case.is_paged() { Some(PagedCache::to_write(device, case, sequences, past, tokens)?) } else { None };
    let (layers, steps) = match &paged {
        Some(cache) => (cache.layers.clone(), cache.steps.clone()),
        None => (
            buffers::layers(device, case, capacity)?,
            (0..capacity / tokens)
                .map(|i| buffers::step(device, i * tokens, (i + 1) * tokens))
                .collect::<Result<Vec<Step>>>()?,
        ),
    };
    let timing = timing::repeat(budget, |i| {
        let write =
            ops::KvWrite::new(&source.k, &source.v, &steps[i / layers.len() % steps.len()], &layers[i % layers.len()]);
        let mut enc = device.encoder()?;
        ops::kv_write(&mut enc, &write)?;
        Ok(enc.commit()?.wait()?)
    })?;
    let bytes = source.k.bytes() + source.v.bytes() + buffers::cached_bytes(case, tokens);
    Ok(Measured { timing, bytes })
}
