//! `kvant bench norm-rope`: norm and RoPE of the query heads of some tokens.
//!
//! The data does not rotate: activations are in the cache level where the projection has left them.

use std::time::Duration;

use kvant::{DType, Device, Tensor, ops};

use super::{Case, Measured, buffers, timing};
use crate::Result;

pub fn measure(device: &Device, case: &Case, budget: Duration) -> Result<Measured> {
    let (tokens, head_dim) = (case.context as usize, case.shape.head_dim);
    let shape = [tokens, case.shape.heads, head_dim];
    let x = buffers::random(device, case.activations, &shape, 1)?;
    let weight = buffers::random(device, DType::F32, &[head_dim], 2)?;
    let out = Tensor::zeros(device, case.activations, &shape)?;
    let positions: Vec<u32> = (0..case.context).collect();
    let positions = Tensor::from_slice(device, &positions, &[tokens])?;
    let norm_rope = ops::NormRope {
        x: &x,
        norm: Some(ops::HeadNorm { weight: Some(&weight), eps: 1e-6 }),
        rope: Some(ops::Rope {
            angles: ops::Angles::Theta(1e4),
            rotated_pairs: head_dim / 2,
            layout: ops::PairLayout::Halves,
            freq_factors: None,
        }),
        positions: &positions,
        rotate: false,
        out_order: ops::SourceOrder::TokenMajor,
        out: &out,
    };
    let timing = timing::repeat(budget, |_| {
        let mut enc = device.encoder()?;
        ops::norm_rope(&mut enc, &norm_rope)?;
        Ok(enc.commit()?.wait()?)
    })?;
    Ok(Measured { timing, bytes: x.bytes() + out.bytes() })
}
