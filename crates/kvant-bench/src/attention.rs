//! Decode attention: one query token over cached keys and values.

use kvant::{Codec, DType, Device, KvLayer, LayerSpec, Step, Tensor, ops};

use crate::{Result, Shape, data};

/// Tokens that are written at once while filling a layer.
const CHUNK: usize = 1024;

/// The cache that a query attends to.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// Sizes.
    pub shape: Shape,
    /// The codec of keys and values.
    pub codec: Codec,
    /// Position of the query. All positions up to it that are in the window are cached.
    pub position: usize,
    /// A sliding window, kept in a ring of its size.
    pub window: Option<usize>,
}

impl Context {
    /// A full layer of `tokens` tokens, with the query at the last one.
    pub fn full(shape: Shape, codec: Codec, tokens: usize) -> Context {
        Context { shape, codec, position: tokens - 1, window: None }
    }

    /// Tokens that the query sees.
    pub fn tokens(&self) -> usize {
        self.window.map_or(self.position + 1, |window| window.min(self.position + 1))
    }

    /// Bytes of the keys and values that the query sees.
    pub fn bytes(&self) -> usize {
        2 * self.tokens() * self.shape.kv_heads * self.codec.bytes_per_vector(self.shape.head_dim)
    }

    fn spec(&self) -> LayerSpec {
        LayerSpec::new(self.shape.kv_heads, self.shape.head_dim, self.window.unwrap_or(self.position + 1), self.codec)
            .window(self.window)
            .ring(self.window.is_some())
    }
}

/// Attention over a rotation of layers.
pub struct Attention {
    device: Device,
    shape: Shape,
    window: Option<usize>,
    layers: Vec<KvLayer>,
    q: Tensor,
    out: Tensor,
    step: Step,
    next: usize,
}

impl Attention {
    /// Makes `copies` layers with equal contents.
    pub fn new(device: &Device, context: &Context, copies: usize) -> Result<Attention> {
        let shape = context.shape;
        let first = KvLayer::new(device, context.spec())?;
        fill(&first, context)?;
        let mut layers = vec![first];
        for _ in 1..copies {
            layers.push(copy(&layers[0])?);
        }
        let q = data::tensor(device, &[1, shape.heads, shape.head_dim], 3)?;
        let out = Tensor::zeros(device, DType::F32, q.shape())?;
        let step = Step::new(device, 1, &[(0, u32::try_from(context.position)?)])?;
        let (device, window) = (device.clone(), context.window);
        Ok(Attention { device, shape, window, layers, q, out, step, next: 0 })
    }

    /// Runs one call, over the next layer.
    pub fn call(&mut self) -> Result {
        let layer = &self.layers[self.next % self.layers.len()];
        self.next += 1;
        let attend = describe(layer, self.window, &self.q, &self.step, &self.out);
        let mut enc = self.device.encoder()?;
        ops::attend(&mut enc, &attend)?;
        Ok(enc.commit()?.wait()?)
    }

    /// Sizes.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The query, `[heads, head_dim]`.
    pub fn query(&self) -> Result<Vec<f32>> {
        Ok(self.q.to_f32()?)
    }

    /// The output of the last call.
    pub fn output(&self) -> Result<Vec<f32>> {
        Ok(self.out.to_f32()?)
    }

    /// The bytes of the keys and of the values of a dense layer, `[kv_heads, tokens, head_dim]`.
    pub fn dense_bytes(&self) -> Result<[Vec<u8>; 2]> {
        let mut sides = [Vec::new(), Vec::new()];
        for (planes, bytes) in [self.layers[0].k(), self.layers[0].v()].into_iter().zip(&mut sides) {
            let (_, low) = planes.tensors().next().ok_or("a layer without planes")?;
            bytes.resize(low.bytes(), 0);
            low.read_bytes(bytes)?;
        }
        Ok(sides)
    }
}

fn describe<'a>(
    layer: &'a KvLayer,
    window: Option<usize>,
    q: &'a Tensor,
    step: &'a Step,
    out: &'a Tensor,
) -> ops::Attend<'a> {
    let scale = (layer.spec().head_dim as f32).sqrt().recip();
    ops::Attend::new(q, layer, step, out).scale(scale).window(window)
}

/// Writes the tokens that the query sees: repetitions of [`CHUNK`] random ones.
fn fill(layer: &KvLayer, context: &Context) -> Result {
    let (device, spec) = (layer.device(), layer.spec());
    let shape = [CHUNK.min(spec.capacity), spec.kv_heads, spec.head_dim];
    let (k, v) = (data::tensor(device, &shape, 1)?, data::tensor(device, &shape, 2)?);
    let end = context.position + 1;
    let mut start = end - context.tokens();
    while start < end {
        let stop = end.min(start + CHUNK);
        let tokens = (start..stop).map(|at| Ok((0, u32::try_from(at)?))).collect::<Result<Vec<_>>>()?;
        let step = Step::new(device, 1, &tokens)?;
        let (k, v) = (&k, &v);
        let write = ops::KvWrite::new(k, v, &step, layer);
        let mut enc = device.encoder()?;
        ops::kv_write(&mut enc, &write)?;
        enc.commit()?.wait()?;
        start = stop;
    }
    Ok(())
}

/// Copies a layer's bytes, which is faster than encoding again.
fn copy(from: &KvLayer) -> Result<KvLayer> {
    let to = KvLayer::new(from.device(), *from.spec())?;
    let mut bytes = Vec::new();
    for (from, to) in [(from.k(), to.k()), (from.v(), to.v())] {
        for ((_, from), (_, to)) in from.tensors().zip(to.tensors()) {
            bytes.resize(from.bytes(), 0);
            from.read_bytes(&mut bytes)?;
            to.write_bytes(&bytes)?;
        }
    }
    Ok(to)
}
