//! `kvant bench kv-write` and `encode`: writing new keys and values to the cache.
//!
//! The slots rotate. The new keys and values do not: in a model they have just been computed and are in the same
//! cache level.

use std::time::Duration;

use kvant::{Device, Step, ops};

use super::{Case, Measured, buffers, timing};
use crate::Result;

/// Slots of a layer, unless one call fills more.
const CAPACITY: usize = 4096;

pub fn measure(device: &Device, case: &Case, budget: Duration) -> Result<Measured> {
    let tokens = case.context as usize;
    let capacity = tokens.max(CAPACITY);
    let layers = buffers::layers(device, case, capacity)?;
    let source = buffers::Source::new(device, case, tokens)?;
    let steps: Vec<Step> =
        (0..capacity / tokens).map(|i| buffers::step(device, i * tokens, (i + 1) * tokens)).collect::<Result<_>>()?;
    let timing = timing::repeat(budget, |i| {
        let write =
            ops::KvWrite::new(&source.k, &source.v, &steps[i / layers.len() % steps.len()], &layers[i % layers.len()]);
        let mut enc = device.encoder()?;
        ops::kv_write(&mut enc, &write)?;
        Ok(enc.commit()?.wait()?)
    })?;
    let bytes = source.k.bytes() + source.v.bytes() + tokens * buffers::token_bytes(case);
    Ok(Measured { timing, bytes })
}
