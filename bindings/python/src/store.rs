//! The keys and values of a batch of sequences, in the pages of a pool.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvant::{
    CacheLayer, DType, Device, Encoder, HeadOrder, KvPool, PoolSpec, Sequence, Step, Tensor,
    ops::{self, KvSide},
};
use kvant_cli::library::Kv;
use pyo3::prelude::*;

use crate::{dlpack::Place, error};

/// Part of the free memory that a store may use unless it is told otherwise.
const FREE_PART: usize = 2;
/// Sequences of maximum length for which a store on a GPU has memory unless it is told otherwise. A GPU provides memory
/// at once; the CPU, at its first use.
const SEQUENCES: usize = 4;

/// The keys and values of all layers and sequences.
#[pyclass(frozen, module = "kvant._kvant")]
pub struct Store {
    place: Place,
    /// The dtype of the model.
    dtype: DType,
    batch: Mutex<Batch>,
    pool: KvPool,
    /// Dropped last.
    _unused: ReturnsMemory,
}

/// Returns a GPU's unused memory to the system when it is dropped, because other libraries use the GPU, too.
struct ReturnsMemory(Place);

impl Drop for ReturnsMemory {
    fn drop(&mut self) {
        if self.0.is_gpu() {
            // A failed device reports its failure at the next call.
            let _ = self.0.device.trim();
        }
    }
}

/// The sequences, one for each row of a batch.
#[derive(Default)]
struct Batch {
    sequences: Vec<Sequence>,
    /// The positions of the latest tokens.
    step: Option<Step>,
    /// Tokens that can be truncated although windows have passed the tokens before them.
    hold: usize,
}

#[pymethods]
impl Store {
    /// `layers`: KV heads, size of a head, and window of each layer. `kv`: a cache type, `@FILE`, or a type per layer.
    /// `room`: maximum tokens of a sequence of the model, and bytes of GPU memory that torch holds without using them;
    /// they matter without `memory`. `gpu`: the number of a GPU; None is the CPU.
    #[new]
    #[pyo3(signature = (layers, kv, dtype, memory, page_tokens, room, gpu))]
    #[allow(clippy::too_many_arguments, reason = "one call from Python")]
    fn new(
        py: Python<'_>,
        layers: Vec<(usize, usize, Option<usize>)>,
        kv: Vec<String>,
        dtype: &str,
        memory: Option<usize>,
        page_tokens: usize,
        room: (usize, usize),
        gpu: Option<usize>,
    ) -> PyResult<Store> {
        let dtype = model_dtype(dtype)?;
        error::run(py, || {
            let place = Place::new(gpu.map(|number| (number, 0)))?;
            let layers = cache_layers(&layers, &kv, dense_dtype(dtype))?;
            let mut spec = PoolSpec::new(layers, 0).page_tokens(page_tokens);
            let bytes = match memory {
                Some(bytes) => Ok(bytes),
                None if place.is_gpu() => gpu_room(&place.device, &spec, room),
                None => place.device.memory().map(|memory| memory.free / FREE_PART),
            };
            spec.bytes = bytes.map_err(error::kvant)?;
            let pool = KvPool::new(&place.device, &spec).map_err(error::kvant)?;
            Ok(Store { _unused: ReturnsMemory(place.clone()), place, dtype, pool, batch: Mutex::default() })
        })
    }

    /// Appends `counts[i]` tokens to sequence i. Later calls of `forward` write and attend to these.
    fn extend(&self, py: Python<'_>, counts: Vec<usize>) -> PyResult<()> {
        error::run(py, || {
            let mut batch = self.lock();
            if batch.sequences.is_empty() {
                batch.sequences = counts.iter().map(|_| self.pool.sequence()).collect();
            }
            let rows = batch.sequences.len();
            if rows != counts.len() {
                return Err(error::value(format!("the cache has {rows} sequences, got a batch of {}", counts.len())));
            }
            let (hold, Batch { sequences, step, .. }) = (batch.hold, &mut *batch);
            sequences.iter_mut().for_each(|sequence| sequence.hold(hold));
            let mut tokens: Vec<_> = sequences.iter_mut().zip(counts).collect();
            *step = None;
            *step = Some(self.pool.step(&mut tokens).map_err(error::kvant)?);
            Ok(())
        })
    }

    /// Stores the new keys and values of a layer, if given, and attends. Arrays are `[tokens, heads, size]`, with the
    /// tokens of all sequences one after the other. `selected`: the tokens that `q` has, if not all. `stream`: the
    /// `CUstream` in whose order the arrays are used.
    #[pyo3(signature = (layer, q, out, kv, selected, scale, softcap, sinks, stream))]
    #[allow(clippy::too_many_arguments, reason = "one call for each layer and step: Python's calls are slow")]
    fn forward(
        &self,
        layer: usize,
        q: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        kv: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        selected: Option<Vec<usize>>,
        scale: Option<f32>,
        softcap: Option<f32>,
        sinks: Option<&Bound<'_, PyAny>>,
        stream: usize,
    ) -> PyResult<()> {
        let place = self.place.with_stream(stream);
        let tensor = |array: &Bound<'_, PyAny>, arg| place.tensor(array, arg);
        let (q_tensor, out) = (tensor(q, "query")?, tensor(out, "out")?);
        let sinks = sinks.map(|sinks| tensor(sinks, "sinks")).transpose()?;
        let kv = kv.map(|(k, v)| Ok::<_, PyErr>((tensor(&k, "key")?, tensor(&v, "value")?))).transpose()?;
        let arrays = Arrays { q: q_tensor, out, kv, sinks };
        error::run(q.py(), || self.run(layer, &arrays, selected.as_deref(), (scale, softcap), &place))
    }

    /// As `forward` for all new tokens, with arrays of the model's dtype at these addresses of the cache's device. The
    /// caller guarantees their shapes, that they are contiguous, and that they live until the work has run; on a GPU,
    /// that their memory is reused in the order of the stream. Sinks are f32 `[heads]`.
    #[pyo3(signature = (layer, heads, q, out, kv, scale, softcap, sinks, stream))]
    #[allow(clippy::too_many_arguments, reason = "one call for each layer and step: Python's calls are slow")]
    fn decode(
        &self,
        py: Python<'_>,
        layer: usize,
        heads: usize,
        q: usize,
        out: usize,
        kv: Option<(usize, usize)>,
        scale: Option<f32>,
        softcap: Option<f32>,
        sinks: Option<usize>,
        stream: usize,
    ) -> PyResult<()> {
        error::run(py, || {
            let place = self.place.with_stream(stream);
            let tokens = self.lock().step.as_ref().map_or(0, Step::tokens);
            let spec = self.pool.layer(layer).map_err(error::kvant)?.spec();
            let (kv_heads, size) = (spec.kv_heads, spec.head_dim);
            let tensor = |address: usize, dtype, shape: &[usize]| {
                // SAFETY: `kvant.transformers` passes addresses of contiguous tensors of these shapes and dtypes on
                // this device, one for each argument, and keeps them during the call. On a GPU, torch reuses memory
                // in the order of the stream.
                unsafe { place.tensor_at(address, dtype, shape) }
            };
            let states = |address, heads| tensor(address, self.dtype, &[tokens, heads, size]);
            let kv = kv.map(|(k, v)| Ok::<_, PyErr>((states(k, kv_heads)?, states(v, kv_heads)?))).transpose()?;
            let sinks = sinks.map(|sinks| tensor(sinks, DType::F32, &[heads])).transpose()?;
            let arrays = Arrays { q: states(q, heads)?, out: states(out, heads)?, kv, sinks };
            self.run(layer, &arrays, None, (scale, softcap), &place)
        })
    }

    /// The number of tokens of each sequence.
    fn lengths(&self) -> Vec<usize> {
        self.lock().sequences.iter().map(Sequence::len).collect()
    }

    /// Removes the last tokens of each sequence.
    fn truncate(&self, py: Python<'_>, lengths: Vec<usize>) -> PyResult<()> {
        error::run(py, || {
            let mut batch = self.lock();
            batch.step = None;
            let mut rows = batch.sequences.iter_mut().zip(lengths);
            rows.try_for_each(|(sequence, len)| sequence.truncate(len)).map_err(error::kvant)
        })
    }

    /// Sequence i becomes a copy of sequence `indices[i]`; the copies share pages.
    fn select(&self, py: Python<'_>, indices: Vec<usize>) -> PyResult<()> {
        error::run(py, || {
            let mut batch = self.lock();
            let rows = batch.sequences.len();
            if let Some(index) = indices.iter().find(|&&index| index >= rows) {
                return Err(error::value(format!("the cache has {rows} sequences, got index {index}")));
            }
            batch.step = None;
            let mut old: Vec<Option<Sequence>> = std::mem::take(&mut batch.sequences).into_iter().map(Some).collect();
            let mut uses = vec![0usize; rows];
            indices.iter().for_each(|&index| uses[index] += 1);
            // The last copy is the sequence, which then does not share its last page.
            let copy = |&index: &usize| {
                uses[index] -= 1;
                let sequence =
                    if uses[index] == 0 { old[index].take() } else { old[index].as_ref().map(Sequence::fork) };
                sequence.expect("a sequence is moved at its last use")
            };
            batch.sequences = indices.iter().map(copy).collect();
            Ok(())
        })
    }

    /// Keeps `tokens` more positions than windows need, so that they can be truncated.
    fn hold(&self, tokens: usize) {
        self.lock().hold = tokens;
    }

    /// Removes all sequences.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        error::run(py, || {
            let mut batch = self.lock();
            (batch.sequences, batch.step) = Default::default();
            Ok(())
        })
    }

    /// Reads keys and values of a sequence from its oldest held position on, into `[heads, tokens, size]`: `k` and `v`
    /// have room for all its tokens. Returns the first held position. `stream` as in `forward`.
    fn read(
        &self,
        layer: usize,
        row: usize,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        stream: usize,
    ) -> PyResult<usize> {
        let place = self.place.with_stream(stream);
        let sides = [(k, "k", KvSide::K), (v, "v", KvSide::V)];
        let sides = sides.map(|(array, arg, side)| Ok::<_, PyErr>((place.tensor(array, arg)?, side)));
        let sides = sides.into_iter().collect::<PyResult<Vec<_>>>()?;
        error::run(k.py(), || self.read_into(layer, row, &sides, &place))
    }

    /// Bytes of the pages in use.
    fn nbytes(&self) -> usize {
        self.pool.usage().used
    }

    /// Bytes of all pages that the store may use.
    #[getter]
    fn memory(&self) -> usize {
        self.pool.usage().bytes
    }
}

/// The arrays of a layer: queries and results, new keys and values, and sinks.
struct Arrays {
    q: Tensor,
    out: Tensor,
    kv: Option<(Tensor, Tensor)>,
    sinks: Option<Tensor>,
}

impl Store {
    /// Stores new keys and values, and attends for all tokens of the step, or the selected ones. `options`: scale and
    /// softcap.
    fn run(
        &self,
        layer: usize,
        arrays: &Arrays,
        selected: Option<&[usize]>,
        (scale, softcap): (Option<f32>, Option<f32>),
        place: &Place,
    ) -> PyResult<()> {
        let batch = self.lock();
        let step = batch.step.as_ref().ok_or_else(|| error::value("no tokens were appended"))?;
        let run = |enc: &mut Encoder| {
            let layer = self.pool.layer(layer)?;
            if let Some((k, v)) = &arrays.kv {
                ops::kv_write(enc, &ops::KvWrite::new(k, v, step, layer))?;
            }
            let some = selected.map(|tokens| step.select(tokens)).transpose()?;
            let attend = ops::Attend::new(&arrays.q, layer, some.as_ref().unwrap_or(step), &arrays.out);
            let scale = scale.unwrap_or(attend.scale);
            ops::attend(enc, &attend.scale(scale).softcap(softcap).sinks(arrays.sinks.as_ref()))
        };
        place.run(run).map_err(error::kvant)
    }

    fn lock(&self) -> MutexGuard<'_, Batch> {
        // Each change leaves the batch consistent.
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_into(&self, layer: usize, row: usize, sides: &[(Tensor, KvSide)], place: &Place) -> PyResult<usize> {
        let mut batch = self.lock();
        let rows = batch.sequences.len();
        let sequence = batch.sequences.get_mut(row);
        let sequence =
            sequence.ok_or_else(|| error::value(format!("the cache has {rows} sequences, got row {row}")))?;
        let read = |sequence: &mut Sequence| {
            let held = sequence.held(layer)?;
            let step = self.pool.step(&mut [(sequence, 0)])?;
            let layer = self.pool.layer(layer)?;
            place.run(|enc| {
                sides.iter().try_for_each(|(out, side)| {
                    let read = ops::KvRead::new(layer, *side, out).step(Some(&step)).order(HeadOrder::HeadMajor);
                    ops::kv_read(enc, &read)
                })
            })?;
            Ok(held.start)
        };
        let first = read(sequence).map_err(error::kvant)?;
        batch.step = None;
        Ok(first)
    }
}

/// Half of the memory that this process can still use on a GPU, or less if that suffices for some sequences of maximum
/// length. `room`: tokens of such a sequence, and bytes that torch holds without using them, which count as free.
fn gpu_room(device: &Device, spec: &PoolSpec, (longest, idle): (usize, usize)) -> kvant::Result<usize> {
    let memory = device.memory()?;
    let free = memory.free.saturating_add(memory.held);
    let part = (free.saturating_add(idle) / FREE_PART).min(free);
    Ok(spec.clone().room_for(SEQUENCES, longest, longest)?.bytes.min(part))
}

/// The layers of a pool.
fn cache_layers(layers: &[(usize, usize, Option<usize>)], kv: &[String], dense: DType) -> PyResult<Vec<CacheLayer>> {
    let parse = |name: &String| name.parse::<Kv>().map_err(error::value);
    let codecs = match kv {
        [name] => parse(name)?.codecs.of_layers(layers.len()).map_err(error::models)?,
        names if names.len() == layers.len() => {
            let one = |name| Ok::<_, PyErr>(parse(name)?.codecs.of_layers(1).map_err(error::models)?[0]);
            names.iter().map(one).collect::<PyResult<_>>()?
        }
        names => {
            let message = format!("`kv` must have types of {} layers, got {}", layers.len(), names.len());
            return Err(error::value(message));
        }
    };
    let layer = |(&(kv_heads, head_dim, window), codec): (&(usize, usize, Option<usize>), kvant_models::KvCodec)| {
        CacheLayer::new(kv_heads, head_dim, codec.k).v(codec.v).window(window).dense(dense)
    };
    Ok(layers.iter().zip(codecs).map(layer).collect())
}

fn model_dtype(name: &str) -> PyResult<DType> {
    match name {
        "bfloat16" => Ok(DType::BF16),
        "float16" => Ok(DType::F16),
        "float32" => Ok(DType::F32),
        _ => Err(error::value(format!("the model's dtype must be float32, float16 or bfloat16, got {name}"))),
    }
}

/// The dtype of pages that are not sealed yet.
fn dense_dtype(model: DType) -> DType {
    if model == DType::BF16 { DType::BF16 } else { DType::F16 }
}
