//! `kvant bench attend`: decode attention of one sequence, with the query at the last position.

use std::time::Duration;

use kvant::{Device, Tensor, ops};

use super::{Case, Measured, buffers, timing};
use crate::Result;

pub fn measure(device: &Device, case: &Case, budget: Duration) -> Result<Measured> {
    let context = case.context as usize;
    let layers = buffers::layers(device, case, context)?;
    let shape = [1, case.shape.heads, case.shape.head_dim];
    let q = buffers::random(device, case.activations, &shape, 3)?;
    let out = Tensor::zeros(device, case.activations, &shape)?;
    let step = buffers::step(device, context - 1, context)?;
    let mut attend = ops::Attend::new(&q, &layers[0], &step, &out);
    let timing = timing::repeat(budget, |i| {
        attend.layer = &layers[i % layers.len()];
        let mut enc = device.encoder()?;
        ops::attend(&mut enc, &attend)?;
        Ok(enc.commit()?.wait()?)
    })?;
    Ok(Measured { timing, bytes: context * buffers::token_bytes(case) })
}
