//! Cache layers: making, filling, copying and reading them.

use kvant::{
    Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Result, Step,
    ops::{self, KvRead, KvSide, KvWrite},
};

use super::{Out, Output, bytes_of, indices, input, run};

/// Every codec.
pub const CODECS: [Codec; 9] = [
    Codec::F32,
    Codec::F16,
    Codec::BF16,
    Codec::tq(8),
    Codec::tq(6),
    Codec::tq(5),
    Codec::tq(4),
    Codec::tq(3),
    Codec::tq(2),
];

/// Every codec with page means, for the layers of pools.
pub const CENTRED_CODECS: [Codec; 6] = [
    Codec::tq_centred(8),
    Codec::tq_centred(6),
    Codec::tq_centred(5),
    Codec::tq_centred(4),
    Codec::tq_centred(3),
    Codec::tq_centred(2),
];

/// The mean squared errors of the optimal quantisers of N(0, 1), by bits.
pub const GAUSSIAN_MSE: [(u32, f64); 6] =
    [(2, 0.1175), (3, 3.454e-2), (4, 9.501e-3), (5, 2.505e-3), (6, 6.44e-4), (8, 4.12e-5)];

/// A head-major linear layer of one sequence.
pub fn linear_spec(kv_heads: usize, capacity: usize, head_dim: usize, codec: Codec) -> LayerSpec {
    LayerSpec::new(kv_heads, head_dim, capacity, codec)
}

/// A head-major ring of one sequence.
pub fn ring_spec(kv_heads: usize, capacity: usize, head_dim: usize, codec: Codec) -> LayerSpec {
    linear_spec(kv_heads, capacity, head_dim, codec).ring(true)
}

/// Keys and values of some tokens, token-major.
#[derive(Clone)]
pub struct Source {
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub heads: usize,
    pub dim: usize,
}

impl Source {
    pub fn random(rng: &mut super::Rng, tokens: usize, heads: usize, dim: usize) -> Source {
        Source { k: rng.normals(tokens * heads * dim), v: rng.normals(tokens * heads * dim), heads, dim }
    }

    pub fn tokens(&self) -> usize {
        self.k.len() / (self.heads * self.dim)
    }

    /// Tokens `range`.
    pub fn part(&self, range: std::ops::Range<usize>) -> Source {
        let row = self.heads * self.dim;
        let cut = |x: &[f32]| x[range.start * row..range.end * row].to_vec();
        Source { k: cut(&self.k), v: cut(&self.v), ..*self }
    }

    /// Tokens in this order.
    pub fn gather(&self, tokens: &[usize]) -> Source {
        let row = self.heads * self.dim;
        let take = |x: &[f32]| tokens.iter().flat_map(|&t| x[t * row..][..row].to_vec()).collect();
        Source { k: take(&self.k), v: take(&self.v), ..*self }
    }
}

/// Token-major values in an order.
pub fn ordered(values: &[f32], order: HeadOrder, [tokens, heads, dim]: [usize; 3]) -> (Vec<f32>, [usize; 3]) {
    match order {
        HeadOrder::TokenMajor => (values.to_vec(), [tokens, heads, dim]),
        HeadOrder::HeadMajor => {
            let rows = (0..heads).flat_map(|h| (0..tokens).map(move |t| t * heads + h));
            (rows.flat_map(|row| values[row * dim..][..dim].to_vec()).collect(), [heads, tokens, dim])
        }
    }
}

/// A step whose buffers are surrounded by numbers that are out of range.
pub fn step(device: &Device, sequences: usize, tokens: &[(u32, u32)]) -> Result<Step> {
    let plain = Step::new(device, sequences, tokens)?;
    let guarded = |t: &kvant::Tensor| indices(device, &t.to_vec::<u32>()?, t.shape());
    let step = Step::from_tensors(guarded(plain.positions())?, guarded(plain.sequence())?, guarded(plain.lens())?);
    Ok(step.with_batch(plain.batch()))
}

/// Positions `range` of sequence 0.
pub fn range_step(device: &Device, sequences: usize, range: std::ops::Range<usize>) -> Result<Step> {
    step(device, sequences, &range.map(|p| (0, p as u32)).collect::<Vec<_>>())
}

/// Writes `source`, in a dtype and token-major, at the positions of `step`.
pub fn write(layer: &KvLayer, source: &Source, dtype: DType, step: &Step) -> Result<()> {
    let device = layer.device();
    let shape = [source.tokens(), source.heads, source.dim];
    let (k, v) = (input(device, dtype, &source.k, &shape)?, input(device, dtype, &source.v, &shape)?);
    run(device, |enc| {
        let order = HeadOrder::TokenMajor;
        ops::kv_write(enc, &KvWrite::new(&k, &v, step, layer).order(order))
    })
}

/// Writes f32 `source` at positions `start..` of sequence 0.
pub fn write_at(layer: &KvLayer, source: &Source, start: usize) -> Result<()> {
    let step = range_step(layer.device(), layer.spec().sequences, start..start + source.tokens())?;
    write(layer, source, DType::F32, &step)
}

/// Positions `range` of one side, token-major, as f32.
pub fn read(layer: &KvLayer, side: KvSide, sequence: usize, range: std::ops::Range<usize>) -> Result<Vec<f32>> {
    read_with(layer, side, None, sequence, range)
}

/// As [`read`], over the pages of a step.
pub fn read_paged(
    layer: &KvLayer,
    side: KvSide,
    step: &Step,
    sequence: usize,
    range: std::ops::Range<usize>,
) -> Result<Vec<f32>> {
    read_with(layer, side, Some(step), sequence, range)
}

fn read_with(
    layer: &KvLayer,
    side: KvSide,
    step: Option<&Step>,
    sequence: usize,
    range: std::ops::Range<usize>,
) -> Result<Vec<f32>> {
    let spec = layer.spec();
    let out = Out::new(layer.device(), DType::F32, &[range.len(), spec.kv_heads, spec.head_dim])?;
    run(layer.device(), |enc| {
        let (start, order) = (range.start, HeadOrder::TokenMajor);
        ops::kv_read(
            enc,
            &KvRead::new(layer, side, &out.tensor).sequence(sequence).step(step).start(start).order(order),
        )
    })?;
    out.bytes()?;
    out.tensor.to_f32()
}

/// The bytes of every plane.
pub fn planes(layer: &KvLayer) -> Result<Vec<Vec<u8>>> {
    layer.k().tensors().chain(layer.v().tensors()).map(|(_, t)| bytes_of(t)).collect()
}

/// The planes as outputs that must be equal.
pub fn same_planes(layer: &KvLayer) -> Result<Vec<Output>> {
    let named = |side: &'static str, planes: &kvant::Planes| -> Result<Vec<Output>> {
        planes.tensors().map(|(name, t)| Ok(Output::Same(format!("{side}.{name}"), bytes_of(t)?))).collect()
    };
    Ok([named("k", layer.k())?, named("v", layer.v())?].concat_outputs())
}

trait ConcatOutputs {
    fn concat_outputs(self) -> Vec<Output>;
}

impl ConcatOutputs for [Vec<Output>; 2] {
    fn concat_outputs(self) -> Vec<Output> {
        self.into_iter().flatten().collect()
    }
}

/// A layer on another device with the same bytes.
pub fn copy_to(layer: &KvLayer, device: &Device) -> Result<KvLayer> {
    let copy = KvLayer::new(device, *layer.spec())?;
    for (from, to) in [(layer.k(), copy.k()), (layer.v(), copy.v())] {
        for ((_, from), (_, to)) in from.tensors().zip(to.tensors()) {
            to.write_bytes(&bytes_of(from)?)?;
        }
    }
    Ok(copy)
}

/// Fills every plane with a byte: 0xFF makes every float NaN.
pub fn fill(layer: &KvLayer, byte: u8) -> Result<()> {
    for (_, t) in layer.k().tensors().chain(layer.v().tensors()) {
        t.write_bytes(&vec![byte; t.bytes()])?;
    }
    Ok(())
}
