//! The per-head RMS norm and rotary embedding of queries, in one operation.

use kvant::{DType, Device, Tensor, ops};

use crate::{Result, data};

/// Heads of some tokens, which are normed and turned.
pub struct NormRope {
    device: Device,
    x: Tensor,
    weight: Tensor,
    positions: Tensor,
    out: Tensor,
}

impl NormRope {
    /// Prepares `tokens` tokens of `heads` heads.
    pub fn new(device: &Device, tokens: usize, heads: usize, head_dim: usize) -> Result<NormRope> {
        let x = data::tensor(device, &[tokens, heads, head_dim], 1)?;
        let positions = (0..tokens).map(|i| Ok(u32::try_from(1000 + i)?)).collect::<Result<Vec<_>>>()?;
        Ok(NormRope {
            device: device.clone(),
            weight: data::tensor(device, &[head_dim], 2)?,
            positions: Tensor::from_slice(device, &positions, &[tokens])?,
            out: Tensor::zeros(device, DType::F32, x.shape())?,
            x,
        })
    }

    /// Runs one call.
    pub fn call(&mut self) -> Result {
        let norm_rope = ops::NormRope::new(&self.x, &self.positions, &self.out)
            .norm(Some(ops::HeadNorm::new(1e-6).weight(Some(&self.weight))))
            .rope(Some(ops::Rope::new(1e4, self.weight.elements() / 2)));
        let mut enc = self.device.encoder()?;
        ops::norm_rope(&mut enc, &norm_rope)?;
        Ok(enc.commit()?.wait()?)
    }

    /// The inputs and the output.
    pub fn values(&self) -> Result<[Vec<f32>; 3]> {
        Ok([self.x.to_f32()?, self.weight.to_f32()?, self.out.to_f32()?])
    }
}
