//! `kvant.Codec`: vectors in a storage format, for research.

use std::collections::HashMap;

use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, HeadOrder, KvLayer, KvPool, LayerSpec, PoolSpec, Step, Tensor,
    codec::{Encoded, PageMean, TurboQuant, decode_around, encode_around, pack, plane_bytes, unpack},
    ops::{self, KvSide},
};
use kvant_models::KvCodec;
use pyo3::{prelude::*, types::PyBytes};

use crate::{dlpack::Place, error};

/// Positions of a page.
const PAGE: usize = 64;

/// The codec of a name.
#[pyclass(frozen, name = "Codec", module = "kvant._kvant")]
pub struct PyCodec(Codec);

/// The bytes of each plane.
type PlaneBytes = Vec<(&'static str, Vec<u8>)>;

#[pymethods]
impl PyCodec {
    #[new]
    fn new(name: &str) -> PyResult<PyCodec> {
        name.parse().map(PyCodec).map_err(error::kvant)
    }

    #[getter]
    fn name(&self) -> String {
        self.0.to_string()
    }

    /// Bytes of a vector, without means of pages.
    fn bytes_per_vector(&self, size: usize) -> usize {
        self.0.bytes_per_vector(size)
    }

    /// The bytes of each plane of this number of vectors, for codecs that are not centred.
    fn plane_bytes(&self, vectors: usize, size: usize) -> PyResult<Vec<(&'static str, usize)>> {
        let layer = layer_of(&Device::cpu(), self.0, vectors, size).map_err(error::kvant)?;
        let part = |bytes: usize| if vectors == 0 { 0 } else { bytes };
        Ok(layer.k().tensors().map(|(name, tensor)| (name, part(tensor.bytes()))).collect())
    }

    /// Encodes `[vectors, size]` of a GPU into planes there, by name; not for centred codecs. `gpu`: as for `attend`.
    fn encode_into(
        &self,
        x: &Bound<'_, PyAny>,
        planes: HashMap<String, Bound<'_, PyAny>>,
        gpu: (usize, usize),
    ) -> PyResult<()> {
        let (py, place) = (x.py(), Place::new(Some(gpu))?);
        let x = place.tensor(x, "x")?;
        let [vectors, size] = dims(&x, "x")?;
        let layer = layer_of(&place.device, self.0, vectors, size).map_err(error::kvant)?;
        let outs = plane_tensors(&layer, &planes, &place)?;
        error::run(py, || place.run(|enc| write_rows(enc, &x, &layer, &outs)).map_err(error::kvant))
    }

    /// Decodes planes of a GPU into `[vectors, size]`. `gpu`: as for `attend`.
    fn decode_from(
        &self,
        planes: HashMap<String, Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
        gpu: (usize, usize),
    ) -> PyResult<()> {
        let (py, place) = (out.py(), Place::new(Some(gpu))?);
        let out = place.tensor(out, "out")?;
        let [vectors, size] = dims(&out, "out")?;
        let layer = layer_of(&place.device, self.0, vectors, size).map_err(error::kvant)?;
        let ins = plane_tensors(&layer, &planes, &place)?;
        let decode = |enc: &mut Encoder| {
            if vectors == 0 {
                return Ok(());
            }
            ins.iter().zip(layer.k().tensors()).try_for_each(|(from, (_, to))| ops::copy(enc, from, to))?;
            read_rows(enc, &layer, &out)
        };
        error::run(py, || place.run(decode).map_err(error::kvant))
    }

    /// Encodes `[vectors, size]` and returns the planes. A page has `page` vectors.
    fn encode(&self, x: &Bound<'_, PyAny>, page: usize) -> PyResult<Vec<(&'static str, Py<PyBytes>)>> {
        let py = x.py();
        let x = Place::new(None)?.tensor(x, "x")?;
        let planes = error::run(py, || match self.0 {
            Codec::TurboQuant(tq) if tq.centred => encode_pages(tq, &x, page),
            codec => encode_rows(codec, &x),
        })?;
        Ok(planes.into_iter().map(|(name, bytes)| (name, PyBytes::new(py, &bytes).unbind())).collect())
    }

    /// Decodes planes into `[vectors, size]`.
    fn decode(&self, planes: HashMap<String, Vec<u8>>, page: usize, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = out.py();
        let out = Place::new(None)?.tensor(out, "out")?;
        error::run(py, || match self.0 {
            Codec::TurboQuant(tq) if tq.centred => decode_pages(tq, &planes, page, &out),
            codec => decode_rows(codec, &planes, &out),
        })
    }
}

/// Attention of the last positions, `[tokens, heads, size]`, over keys and values `[positions, KV heads, size]` that a
/// cache type stores. `gpu`: the number of the arrays' GPU and a `CUstream`, in whose order they are used; None is the
/// CPU.
#[pyfunction]
#[pyo3(signature = (kv, q, k, v, out, scale, softcap, window, sinks, gpu))]
#[allow(clippy::too_many_arguments, reason = "the arguments of attention")]
pub fn attend(
    kv: &str,
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    scale: Option<f32>,
    softcap: Option<f32>,
    window: Option<usize>,
    sinks: Option<&Bound<'_, PyAny>>,
    gpu: Option<(usize, usize)>,
) -> PyResult<()> {
    let place = Place::new(gpu)?;
    let codecs: KvCodec = kv.parse().map_err(error::kvant)?;
    let py = q.py();
    let tensor = |array: &Bound<'_, PyAny>, name| place.tensor(array, name);
    let (q, k, v, out) = (tensor(q, "q")?, tensor(k, "k")?, tensor(v, "v")?, tensor(out, "out")?);
    let sinks = sinks.map(|sinks| tensor(sinks, "sinks")).transpose()?;
    let [positions, kv_heads, size] = dims(&k, "k")?;
    let [tokens, ..] = dims::<3>(&q, "q")?;
    if tokens > positions {
        return Err(error::value(format!("`q` must have at most the {positions} positions of `k`, got {tokens}")));
    }
    error::run(py, || {
        let run = || {
            let layer = CacheLayer::new(kv_heads, size, codecs.k).v(codecs.v).window(window);
            let spec = PoolSpec::new(vec![layer], 0).room_for(1, positions, positions)?;
            let pool = KvPool::new(&place.device, &spec)?;
            let mut sequence = pool.sequence();
            let step = pool.step(&mut [(&mut sequence, positions)])?;
            let last = step.select(&(positions - tokens..positions).collect::<Vec<_>>())?;
            let layer = pool.layer(0)?;
            place.run(|enc| {
                ops::kv_write(enc, &ops::KvWrite::new(&k, &v, &step, layer))?;
                let attend = ops::Attend::new(&q, layer, &last, &out);
                let scale = scale.unwrap_or(attend.scale);
                ops::attend(enc, &attend.scale(scale).softcap(softcap).sinks(sinks.as_ref()))
            })
        };
        run().map_err(error::kvant)
    })
}

fn dims<const N: usize>(tensor: &Tensor, arg: &str) -> PyResult<[usize; N]> {
    let wrong = |_| error::value(format!("`{arg}` must have {N} dimensions, got {:?}", tensor.shape()));
    tensor.shape().try_into().map_err(wrong)
}

/// A layer whose keys are the vectors.
fn layer_of(device: &Device, codec: Codec, vectors: usize, size: usize) -> kvant::Result<KvLayer> {
    KvLayer::new(device, LayerSpec::new(1, size, vectors.max(1), codec).v(Codec::BF16))
}

fn encode_rows(codec: Codec, x: &Tensor) -> PyResult<PlaneBytes> {
    let [vectors, size] = dims(x, "x")?;
    let encode = || -> kvant::Result<PlaneBytes> {
        let layer = layer_of(x.device(), codec, vectors, size)?;
        let mut enc = x.device().encoder()?;
        write_rows(&mut enc, x, &layer, &[])?;
        enc.commit()?.wait()?;
        let plane = |(name, tensor): (&'static str, &Tensor)| {
            let mut bytes = vec![0; tensor.bytes()];
            tensor.read_bytes(&mut bytes)?;
            Ok((name, bytes))
        };
        layer.k().tensors().map(plane).collect()
    };
    if vectors == 0 { Ok(Vec::new()) } else { encode().map_err(error::kvant) }
}

fn decode_rows(codec: Codec, planes: &HashMap<String, Vec<u8>>, out: &Tensor) -> PyResult<()> {
    let [vectors, size] = dims(out, "out")?;
    if vectors == 0 {
        return Ok(());
    }
    let layer = layer_of(out.device(), codec, vectors, size).map_err(error::kvant)?;
    for (name, tensor) in layer.k().tensors() {
        tensor.write_bytes(plane(planes, name)?).map_err(error::kvant)?;
    }
    let decode = || {
        let mut enc = out.device().encoder()?;
        read_rows(&mut enc, &layer, out)?;
        enc.commit()?.wait()
    };
    decode().map_err(error::kvant)
}

/// Encodes the vectors `x` as keys of a layer, and copies its planes to `outs`.
fn write_rows(enc: &mut Encoder, x: &Tensor, layer: &KvLayer, outs: &[Tensor]) -> kvant::Result<()> {
    let &[vectors, size] = x.shape() else { return Ok(()) };
    if vectors == 0 {
        return Ok(());
    }
    let tokens: Vec<(u32, u32)> = (0..vectors as u32).map(|position| (0, position)).collect();
    let step = Step::new(x.device(), 1, &tokens)?;
    let rows = x.reshape(&[vectors, 1, size])?;
    ops::kv_write(enc, &ops::KvWrite::new(&rows, &rows, &step, layer))?;
    layer.k().tensors().zip(outs).try_for_each(|((_, from), to)| ops::copy(enc, from, to))
}

/// Decodes the keys of a layer into the vectors `out`.
fn read_rows(enc: &mut Encoder, layer: &KvLayer, out: &Tensor) -> kvant::Result<()> {
    let &[vectors, size] = out.shape() else { return Ok(()) };
    let out = out.reshape(&[vectors, 1, size])?;
    ops::kv_read(enc, &ops::KvRead::new(layer, KvSide::K, &out).order(HeadOrder::TokenMajor))
}

/// The caller's planes of a layer's keys, in the layer's order.
fn plane_tensors(layer: &KvLayer, planes: &HashMap<String, Bound<'_, PyAny>>, place: &Place) -> PyResult<Vec<Tensor>> {
    let of_plane = |(name, _): (&'static str, &Tensor)| {
        let missing = || error::value(format!("`encoded` must have the plane {name:?}"));
        place.tensor(planes.get(name).ok_or_else(missing)?, name)
    };
    layer.k().tensors().map(of_plane).collect()
}

fn plane<'a>(planes: &'a HashMap<String, Vec<u8>>, name: &str) -> PyResult<&'a [u8]> {
    let missing = || error::value(format!("`encoded` must have the plane {name:?}"));
    planes.get(name).map(Vec::as_slice).ok_or_else(missing)
}

/// Encodes pages around their means, as the definition does.
fn encode_pages(tq: TurboQuant, x: &Tensor, page: usize) -> PyResult<PlaneBytes> {
    let [vectors, size] = dims(x, "x")?;
    let page = checked_page(page)?;
    let encode = || -> kvant::Result<PlaneBytes> {
        let (low_bytes, high_bytes) = plane_bytes(tq.bits, size)?;
        let x: Vec<f64> = x.to_f32()?.into_iter().map(f64::from).collect();
        let [mut low, mut high] = [low_bytes, high_bytes].map(|bytes| vec![0; vectors * bytes]);
        let (mut norms, mut means) = (Vec::new(), Vec::new());
        let mut row = 0;
        for vectors in x.chunks(page * size) {
            let mean = PageMean::of(size, vectors.chunks(size))?;
            means.extend(mean.codes.iter().map(|&code| code as u8));
            means.extend(mean.scale.to_le_bytes());
            for vector in vectors.chunks(size) {
                let encoded = encode_around(tq, &mean, vector)?;
                let [low, high] = [(&mut low, low_bytes), (&mut high, high_bytes)]
                    .map(|(plane, bytes)| &mut plane[row * bytes..(row + 1) * bytes]);
                pack(tq.bits, &encoded.indices, low, high)?;
                norms.extend(encoded.norms.iter().flat_map(|&norm| kvant::f16::from_f32(norm).to_le_bytes()));
                row += 1;
            }
        }
        let high = (high_bytes > 0).then_some(("high", high));
        Ok([Some(("low", low)), high, Some(("norms", norms)), Some(("means", means))].into_iter().flatten().collect())
    };
    encode().map_err(error::kvant)
}

fn decode_pages(tq: TurboQuant, planes: &HashMap<String, Vec<u8>>, page: usize, out: &Tensor) -> PyResult<()> {
    let [vectors, size] = dims(out, "out")?;
    let page = checked_page(page)?;
    let (low_bytes, high_bytes) = plane_bytes(tq.bits, size).map_err(error::kvant)?;
    let (blocks, mean_bytes) = (size.div_ceil(kvant::codec::BLOCK), size + 4);
    let sized = |name: &str, rows: usize, bytes: usize| {
        let plane = if bytes == 0 { Ok(&[][..]) } else { plane(planes, name) }?;
        let message = || format!("the plane {name:?} must have {} bytes, got {}", rows * bytes, plane.len());
        if plane.len() == rows * bytes { Ok(plane) } else { Err(error::value(message())) }
    };
    let (low, high) = (sized("low", vectors, low_bytes)?, sized("high", vectors, high_bytes)?);
    let (norms, means) = (sized("norms", vectors, 2 * blocks)?, sized("means", vectors.div_ceil(page), mean_bytes)?);
    let decode = || {
        let mut decoded = Vec::with_capacity(vectors * size);
        for row in 0..vectors {
            let mut indices = vec![0; size];
            let of_row = |plane: &[u8], bytes: usize| plane[row * bytes..(row + 1) * bytes].to_vec();
            unpack(tq.bits, &of_row(low, low_bytes), &of_row(high, high_bytes), &mut indices)?;
            let norms = of_row(norms, 2 * blocks);
            let norms = norms.chunks(2).map(|bytes| kvant::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()).collect();
            let (codes, scale) = means[row / page * mean_bytes..][..mean_bytes].split_at(size);
            let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
            let mean = PageMean { codes: codes.iter().map(|&code| code as i8).collect(), scale };
            decoded.extend(decode_around(tq, &mean, &Encoded { indices, norms })?);
        }
        write(out, &decoded)
    };
    decode().map_err(error::kvant)
}

fn checked_page(page: usize) -> PyResult<usize> {
    match page {
        0 => Err(error::value("`page_tokens` must be at least 1, got 0")),
        page => Ok(page),
    }
}

/// Writes numbers in the dtype of `out`.
fn write(out: &Tensor, numbers: &[f64]) -> kvant::Result<()> {
    match out.dtype() {
        DType::F16 => out.write(&numbers.iter().map(|&x| kvant::f16::from_f64(x)).collect::<Vec<_>>()),
        DType::BF16 => out.write(&numbers.iter().map(|&x| kvant::bf16::from_f64(x)).collect::<Vec<_>>()),
        _ => out.write(&numbers.iter().map(|&x| x as f32).collect::<Vec<_>>()),
    }
}

/// Positions of a page unless a caller chooses another number.
pub const DEFAULT_PAGE: usize = PAGE;
