//! `kvant bench norm-rope`: norm and RoPE of the query heads of some tokens.
//!
//! The data does not rotate: a model's projection leaves activations in the processor's cache.

use std::time::Duration;

use kvant::{DType, Device, Tensor, ops};

use super::{
    buffers,
    case::{Case, Measured},
    timing,
};
use crate::result::Result;

pub fn measure(device: &Device, case: &Case, budget: Duration) -> Result<Measured> {
    let (tokens, head_dim) = (case.context as usize, case.shape.head_dim);
    let shape = [tokens, case.shape.heads, head_dim];
    let x = buffers::random(device, case.activations, &shape, 1)?;
    let weight = buffers::random(device, DType::F32, &[head_dim], 2)?;
    let out = Tensor::zeros(device, case.activations, &shape)?;
    let positions: Vec<u32> = (0..case.context).collect();
    let positions = Tensor::from_slice(device, &positions, &[tokens])?;
    let norm_rope = ops::NormRope::new(&x, &positions, &out)
        .norm(Some(ops::HeadNorm::new(1e-6).weight(Some(&weight))))
        .rope(Some(ops::Rope::new(1e4, head_dim / 2)));
    let timing = timing::repeat(budget, |_| {
        let mut enc = device.encoder()?;
        ops::norm_rope(&mut enc, &norm_rope)?;
        Ok(enc.commit()?.wait()?)
    })?;
    Ok(Measured { timing, bytes: x.bytes() + out.bytes() })
}
