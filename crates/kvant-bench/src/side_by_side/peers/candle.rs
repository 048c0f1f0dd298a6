//! candle's attention for CPUs.

use candle_core::{DType, Device, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use kvant_bench::{Result, Shape};

/// Attention of one query over each layer in turn, `[1, tokens, kv_heads, head_dim]` in candle's layout.
pub struct CandleAttention {
    shape: Shape,
    tokens: usize,
    dtype: DType,
    query: Tensor,
    layers: Vec<[Tensor; 2]>,
    next: usize,
    out: Option<Tensor>,
}

impl CandleAttention {
    /// `sides` are the keys and the values, `[kv_heads, tokens, head_dim]`; stored and computed in f32 or f16.
    pub fn new(
        shape: Shape,
        dtype: DType,
        query: &[f32],
        sides: &[Vec<f32>; 2],
        copies: usize,
    ) -> Result<CandleAttention> {
        let (cpu, tokens) = (&Device::Cpu, sides[0].len() / shape.elements(1));
        let query = Tensor::from_slice(query, (1, 1, shape.heads, shape.head_dim), cpu)?.to_dtype(dtype)?;
        let side = |numbers: &[f32]| -> Result<Tensor> {
            let by_head = Tensor::from_slice(numbers, (1, shape.kv_heads, tokens, shape.head_dim), cpu)?;
            Ok(by_head.transpose(1, 2)?.contiguous()?.to_dtype(dtype)?)
        };
        let mut layers = vec![[side(&sides[0])?, side(&sides[1])?]];
        for _ in 1..copies {
            let [k, v] = &layers[0];
            layers.push([k.copy()?, v.copy()?]);
        }
        Ok(CandleAttention { shape, tokens, dtype, query, layers, next: 0, out: None })
    }

    /// Runs one call, over the next layer.
    pub fn call(&mut self) -> Result {
        let [k, v] = &self.layers[self.next % self.layers.len()];
        self.next += 1;
        let (q, scale, mask) = (&self.query, self.shape.scale(), AttnMask::causal_with_offset(self.tokens - 1));
        self.out = Some(match self.dtype {
            DType::F16 => flash_attn::<kvant::f16>(q, k, v, scale, mask, None, None)?,
            _ => flash_attn::<f32>(q, k, v, scale, mask, None, None)?,
        });
        Ok(())
    }

    /// The output of the last call, `[heads, head_dim]`.
    pub fn output(&self) -> Result<Vec<f32>> {
        let out = self.out.as_ref().ok_or("nothing was computed yet")?;
        Ok(out.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    }
}
