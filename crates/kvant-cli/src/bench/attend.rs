//! `kvant bench attend`: decode attention of one sequence, with the query at the last position.

use std::time::Duration;

use kvant::{Device, Tensor, ops};

use super::{
    buffers,
    case::{Case, Measured},
    pages::PagedCache,
    timing,
};
use crate::result::Result;

pub fn measure(device: &Device, case: &Case, budget: Duration) -> Result<Measured> {
    let context = case.context as usize;
    let paged = if case.is_paged() { Some(PagedCache::filled(device, case, context)?) } else { None };
    let (layers, step) = match &paged {
        Some(cache) => (cache.layers.clone(), cache.steps[0].clone()),
        None => (buffers::layers(device, case, context)?, buffers::step(device, context - 1, context)?),
    };
    let shape = [1, case.shape.heads, case.shape.head_dim];
    let q = buffers::random(device, case.activations, &shape, 3)?;
    let out = Tensor::zeros(device, case.activations, &shape)?;
    let mut attend = ops::Attend::new(&q, &layers[0], &step, &out);
    let timing = timing::repeat(budget, |i| {
        attend.layer = &layers[i % layers.len()];
        let mut enc = device.encoder()?;
        ops::attend(&mut enc, &attend)?;
        Ok(enc.commit()?.wait()?)
    })?;
    Ok(Measured { timing, bytes: buffers::cached_bytes(case, context) })
}
