//! Writing new keys and values to the cache, including the encoding of its codec.

use kvant::{Codec, DType, Device, KvLayer, LayerSpec, Step, Tensor, ops};

use crate::{Result, Shape, data};

/// Slots of a layer, unless one call writes more.
const CAPACITY: usize = 4096;

/// The tokens of one call.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// Sizes.
    pub shape: Shape,
    /// The dtype of new keys and values.
    pub source: DType,
    /// The codec of the cache.
    pub codec: Codec,
    /// Tokens that a call writes.
    pub tokens: usize,
}

impl Batch {
    /// Elements of keys and values together.
    pub fn elements(&self) -> usize {
        2 * self.shape.elements(self.tokens)
    }

    /// Bytes that a call stores.
    pub fn bytes(&self) -> usize {
        2 * self.tokens * self.shape.kv_heads * self.codec.bytes_per_vector(self.shape.head_dim)
    }
}

/// Writes of the same new tokens, each time to other slots. The tokens do not rotate, because a model has just computed
/// them.
pub struct Writing {
    device: Device,
    k: Tensor,
    v: Tensor,
    layers: Vec<KvLayer>,
    steps: Vec<Step>,
    next: usize,
}

impl Writing {
    /// Rotates over `rotation` bytes of cache.
    pub fn new(device: &Device, batch: &Batch, rotation: usize) -> Result<Writing> {
        let Batch { shape, source, codec, tokens } = *batch;
        let capacity = CAPACITY.max(tokens);
        let spec = LayerSpec::new(shape.kv_heads, shape.head_dim, capacity, codec);
        let steps = (0..capacity / tokens).map(|i| {
            let positions = i * tokens..(i + 1) * tokens;
            let tokens = positions.map(|at| Ok((0, u32::try_from(at)?))).collect::<Result<Vec<_>>>()?;
            Ok(Step::new(device, 1, &tokens)?)
        });
        let steps = steps.collect::<Result<Vec<_>>>()?;
        let layer_bytes = capacity / tokens * batch.bytes();
        let layers = (0..rotation.div_ceil(layer_bytes).max(1)).map(|_| touched(KvLayer::new(device, spec)?));
        let side = |seed| -> Result<Tensor> {
            let shape = [tokens, shape.kv_heads, shape.head_dim];
            let values = data::normal(shape.iter().product(), seed);
            cast(device, source, &values, &shape)
        };
        let (k, v) = (side(1)?, side(2)?);
        Ok(Writing { device: device.clone(), k, v, layers: layers.collect::<Result<_>>()?, steps, next: 0 })
    }

    /// Runs one call: writes all tokens of a batch.
    pub fn call(&mut self) -> Result {
        let (layers, steps) = (self.layers.len(), self.steps.len());
        let write = ops::KvWrite::new(
            &self.k,
            &self.v,
            &self.steps[self.next / layers % steps],
            &self.layers[self.next % layers],
        );
        self.next += 1;
        let mut enc = self.device.encoder()?;
        ops::kv_write(&mut enc, &write)?;
        Ok(enc.commit()?.wait()?)
    }
}

/// Writes to every page of the layer, so that the system does not allocate pages during the measurement.
fn touched(layer: KvLayer) -> Result<KvLayer> {
    for planes in [layer.k(), layer.v()] {
        for (_, tensor) in planes.tensors() {
            tensor.write_bytes(&vec![1; tensor.bytes()])?;
        }
    }
    Ok(layer)
}

/// A tensor of a float type.
pub(crate) fn cast(device: &Device, dtype: DType, values: &[f32], shape: &[usize]) -> Result<Tensor> {
    Ok(match dtype {
        DType::F32 => Tensor::from_slice(device, values, shape)?,
        DType::F16 => {
            let values: Vec<_> = values.iter().map(|&x| kvant::f16::from_f32(x)).collect();
            Tensor::from_slice(device, &values, shape)?
        }
        DType::BF16 => {
            let values: Vec<_> = values.iter().map(|&x| kvant::bf16::from_f32(x)).collect();
            Tensor::from_slice(device, &values, shape)?
        }
        other => return Err(format!("{other}: not a float").into()),
    })
}
