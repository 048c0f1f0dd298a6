//! A cache in a safetensors file, with the specification and the lengths in its metadata.
//!
//! Only slots in use are stored: a tensor `[Hk, used slots, row]` per layer, side, sequence and plane, named
//! `layer.side.sequence.plane`. Files are untrusted: the reader checks all sizes against limits before it allocates
//! memory.

use std::{
    collections::HashMap,
    fs::File,
    io::{BufReader, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use super::*;
use crate::codec::{Norm, TurboQuant};

/// Bytes of the largest cache that [`KvCache::load`] allocates. [`KvCache::load_within`] takes another limit.
pub const LOAD_LIMIT: u64 = 64 << 30;

const FORMAT: &str = "kvant-cache";
const VERSION: &str = "1";
/// The safetensors format's limit.
const MAX_HEADER: u64 = 100_000_000;
/// A lower bound on the header bytes of one tensor.
const MIN_ENTRY: u64 = 50;
/// Each layer also takes one or two kilobytes outside of its planes, which the limit in bytes does not count.
const MAX_LAYERS: usize = 4096;
/// Bytes per transfer.
const CHUNK: usize = 4 << 20;

impl KvCache {
    /// Writes the cache to a file.
    ///
    /// The data is written to a unique temporary file in the same directory, which is then renamed. A file of this
    /// name is therefore always complete; if several threads save to one path, the last one wins.
    ///
    /// Commit operations that write to the cache before this call: it does not save what an
    /// [`Encoder`](crate::Encoder) has recorded and not run. The file holds neither token ids nor the identity of the
    /// model; store these separately.
    ///
    /// # Errors
    /// `Io`; `File` if the cache has more layers and sequences than a file can list; `DeviceFault`.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (temporary, file) = create_beside(path)?;
        let written = self.write_file(file, &temporary);
        let written = written.and_then(|()| std::fs::rename(&temporary, path).map_err(io(path)));
        if written.is_err() {
            // The first error is the one to return.
            let _ = std::fs::remove_file(&temporary);
        }
        written
    }

    /// Reads a cache that [`KvCache::save`] wrote.
    ///
    /// A cache of more than [`LOAD_LIMIT`] bytes of memory, its full capacity included, is an error, however short
    /// the file is. [`KvCache::load_within`] takes another limit.
    ///
    /// # Errors
    /// `Io`; `File` if the file is not a complete, consistent snapshot; `OutOfMemory`; `DeviceFault`.
    pub fn load(device: &Device, path: impl AsRef<Path>) -> Result<KvCache> {
        KvCache::load_within(device, path, LOAD_LIMIT)
    }

    /// As [`KvCache::load`], for caches of at most `max_bytes`.
    pub fn load_within(device: &Device, path: impl AsRef<Path>, max_bytes: u64) -> Result<KvCache> {
        let path = path.as_ref();
        let bad = |reason: String| Error::File { path: path.display().to_string(), reason };
        // Opening a pipe would block until a writer appears.
        if !std::fs::metadata(path).map_err(io(path))?.is_file() {
            return Err(bad("not a regular file".to_string()));
        }
        let file = File::open(path).map_err(io(path))?;
        let file_len = file.metadata().map_err(io(path))?.len();
        let mut file = BufReader::new(file);
        let (metadata, data_start) = read_header(&mut file, file_len, path)?;
        let (spec, sequences) = parse(metadata.metadata()).map_err(bad)?;
        let bytes = total_bytes(&spec).map_err(|error| bad(error.to_string()))?;
        if bytes.is_none_or(|bytes| bytes as u64 > max_bytes) {
            return Err(bad(format!("the cache takes more than the limit of {max_bytes} bytes of memory")));
        }
        let mut cache = KvCache::new(device, &spec).map_err(|error| match error {
            Error::OutOfMemory { .. } | Error::DeviceFault { .. } => error,
            error => bad(error.to_string()),
        })?;
        cache.sequences = sequences;
        // The list of expected tensors can be far longer than the file, so its length is checked first.
        let (found, belong) = (metadata.tensors().len(), cache.stored_count());
        if belong != Some(found) {
            let belong = belong.map_or("too many".to_string(), |n| n.to_string());
            return Err(bad(format!("the file has {found} tensors, expected {belong}")));
        }
        for (index, sequence) in cache.sequences.iter().enumerate() {
            cache.check_sequence(*sequence).map_err(|reason| bad(format!("sequence {index}: {reason}")))?;
        }
        let stored = cache.stored();
        let infos = stored.iter().map(|part| {
            let info = metadata.info(&part.name).ok_or_else(|| bad(format!("tensor {} is missing", part.name)))?;
            if info.dtype != part.info.dtype || info.shape != part.info.shape {
                let (got, want) = ((info.dtype, &info.shape), (part.info.dtype, &part.info.shape));
                return Err(bad(format!("tensor {} must be {want:?}, got {got:?}", part.name)));
            }
            Ok(info.data_offsets.0 as u64)
        });
        for (part, offset) in stored.iter().zip(infos.collect::<Result<Vec<_>>>()?) {
            file.seek(SeekFrom::Start(data_start + offset)).map_err(io(path))?;
            part.each_chunk(|rows, buffer| {
                file.read_exact(buffer).map_err(io(path))?;
                rows.write_bytes(buffer)
            })?;
        }
        Ok(cache)
    }

    fn write_file(&self, file: File, path: &Path) -> Result<()> {
        let bad = |reason: &str| Error::File { path: path.display().to_string(), reason: reason.to_string() };
        let too_many = "too many layers and sequences for one snapshot file";
        if self.layers.len() > MAX_LAYERS
            || self.stored_count().is_none_or(|count| count as u64 > MAX_HEADER / MIN_ENTRY)
        {
            return Err(bad(too_many));
        }
        let stored = self.stored();
        let mut end = 0;
        let infos = stored.iter().map(|part| {
            let start = end;
            end += part.bytes();
            (part.name.clone(), TensorInfo { data_offsets: (start, end), ..part.info.clone() })
        });
        let metadata = Metadata::new(Some(self.describe()), infos.collect()).map_err(|e| bad(&e.to_string()))?;
        let mut header = serde_json::to_vec(&metadata).map_err(|e| bad(&e.to_string()))?;
        // The data starts at a multiple of 8.
        header.resize(header.len().next_multiple_of(8), b' ');
        if header.len() as u64 > MAX_HEADER {
            return Err(bad(too_many));
        }
        let mut file = BufWriter::new(file);
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(io(path))?;
        file.write_all(&header).map_err(io(path))?;
        for part in &stored {
            part.each_chunk(|rows, buffer| {
                rows.read_bytes(buffer)?;
                file.write_all(buffer).map_err(io(path))
            })?;
        }
        let file = file.into_inner().map_err(|error| io(path)(error.into_error()))?;
        file.sync_all().map_err(io(path))
    }

    /// The number of tensors in a file of this cache: those of sequences that have tokens.
    fn stored_count(&self) -> Option<usize> {
        let planes = self.layers.iter().map(|layer| layer.k.tensors().count() + layer.v.tensors().count());
        let used = self.sequences.iter().filter(|sequence| sequence.len > 0).count();
        planes.sum::<usize>().checked_mul(used)
    }

    /// The tensors in a file of this cache, in order.
    fn stored(&self) -> Vec<Stored<'_>> {
        let mut stored = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            for (side, planes) in [("k", &layer.k), ("v", &layer.v)] {
                for (sequence, &state) in self.sequences.iter().enumerate() {
                    let used = used_slots(layer, state);
                    for (plane, tensor) in planes.tensors().filter(|_| used > 0) {
                        let dtype = match tensor.dtype() {
                            DType::F32 => Dtype::F32,
                            DType::F16 => Dtype::F16,
                            DType::BF16 => Dtype::BF16,
                            DType::U32 => Dtype::U32,
                            DType::U8 => Dtype::U8,
                        };
                        let shape = vec![layer.spec().kv_heads, used, tensor.shape()[1]];
                        let info = TensorInfo { dtype, shape, data_offsets: (0, 0) };
                        let name = format!("{index}.{side}.{sequence}.{plane}");
                        stored.push(Stored { name, info, layer, sequence, used, tensor });
                    }
                }
            }
        }
        stored
    }

    fn describe(&self) -> HashMap<String, String> {
        let spec = &self.spec;
        let layer = |l: &CacheLayer| {
            let window = l.window.map_or("all".to_string(), |window| window.to_string());
            format!("{}:{}:{window}:{}:{}", l.kv_heads, l.head_dim, codec_name(l.k), codec_name(l.v))
        };
        let lengths = self.sequences.iter().map(|sequence| format!("{}/{}", sequence.len, sequence.written));
        let entries = [
            ("format", FORMAT.to_string()),
            ("version", VERSION.to_string()),
            ("sequences", spec.sequences.to_string()),
            ("capacity", spec.capacity.to_string()),
            ("slack", spec.slack.to_string()),
            ("layers", spec.layers.iter().map(layer).collect::<Vec<_>>().join(";")),
            ("lengths", lengths.collect::<Vec<_>>().join(";")),
        ];
        entries.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
    }

    /// Whether a sequence can be in this state: the invariant that `append` and `truncate` maintain.
    fn check_sequence(&self, sequence: Sequence) -> std::result::Result<(), String> {
        let Sequence { len, written } = sequence;
        if len > written || written > self.limit() || (len == 0) != (written == 0) {
            return Err(format!("length {len} contradicts the largest length {written}"));
        }
        if len == 0 {
            // There can be many empty sequences, and the check below visits every layer.
            return Ok(());
        }
        match self.lost(sequence) {
            Some((layer, ..)) => Err(format!("layer {layer} does not hold the positions that length {len} needs")),
            None => Ok(()),
        }
    }
}

/// Creates a new temporary file next to `path` and returns its name. Other threads may save to the same path at the
/// same time, and another process with the same id may have left a file behind.
fn create_beside(path: &Path) -> Result<(PathBuf, File)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}.{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        let name = PathBuf::from(name);
        match File::create_new(&name) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            file => return Ok((name, file.map_err(io(path))?)),
        }
    }
}

/// A tensor of the file, and the rows of the cache that it holds.
struct Stored<'a> {
    name: String,
    info: TensorInfo,
    layer: &'a KvLayer,
    sequence: usize,
    used: usize,
    tensor: &'a Tensor,
}

impl Stored<'_> {
    fn row_bytes(&self) -> usize {
        self.tensor.shape()[1] * self.tensor.dtype().size()
    }

    fn bytes(&self) -> usize {
        self.layer.spec().kv_heads * self.used * self.row_bytes()
    }

    /// Calls `visit` with views of the rows, in the file's order, and with a buffer of each view's size.
    fn each_chunk(&self, mut visit: impl FnMut(&Tensor, &mut [u8]) -> Result<()>) -> Result<()> {
        let step = (CHUNK / self.row_bytes()).max(1);
        let mut buffer = Vec::new();
        for rows in used_rows(self.layer, self.sequence, self.used) {
            for start in rows.clone().step_by(step) {
                let view = self.tensor.rows(start..(start + step).min(rows.end))?;
                buffer.resize(view.bytes(), 0);
                visit(&view, &mut buffer)?;
            }
        }
        Ok(())
    }
}

/// Reads and checks the header. Returns it with the offset of the data. The tensors cover the rest of the file
/// exactly.
fn read_header(file: &mut impl Read, file_len: u64, path: &Path) -> Result<(Metadata, u64)> {
    let bad = |reason: &str| Error::File { path: path.display().to_string(), reason: reason.to_string() };
    let mut prefix = [0; 8];
    let Some(rest) = file_len.checked_sub(prefix.len() as u64) else {
        return Err(bad("the file is too short for a safetensors header"));
    };
    file.read_exact(&mut prefix).map_err(io(path))?;
    let header_len = u64::from_le_bytes(prefix);
    if header_len > rest.min(MAX_HEADER) {
        return Err(bad("the header is longer than the file, or than the format allows"));
    }
    let mut header = vec![0; header_len as usize];
    file.read_exact(&mut header).map_err(io(path))?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| bad(&format!("header: {error}")))?;
    if metadata.data_len() as u64 != rest - header_len {
        return Err(bad("the length of the file does not match its header"));
    }
    Ok((metadata, 8 + header_len))
}

/// Parses the specification and the lengths. The size of the header bounds their sizes.
fn parse(metadata: &Option<HashMap<String, String>>) -> std::result::Result<(CacheSpec, Vec<Sequence>), String> {
    let get =
        |key: &str| metadata.as_ref().and_then(|m| m.get(key)).ok_or(format!("the metadata has no entry {key:?}"));
    let number = |text: &str| text.parse::<usize>().map_err(|_| format!("expected a number, got {text:?}"));
    if get("format").ok().is_none_or(|format| format != FORMAT) {
        return Err(format!("not a snapshot of a cache: its metadata has no format {FORMAT:?}"));
    }
    let version = get("version")?;
    if version != VERSION {
        return Err(format!("snapshot version must be {VERSION:?}, got {version:?}"));
    }
    let layer = |text: &str| {
        let fields: Vec<&str> = text.split(':').collect();
        let [kv_heads, head_dim, window, k, v] = fields[..] else { return Err(format!("invalid layer {text:?}")) };
        let window = if window == "all" { None } else { Some(number(window)?) };
        let (k, v) = (parse_codec(k)?, parse_codec(v)?);
        Ok(CacheLayer { kv_heads: number(kv_heads)?, head_dim: number(head_dim)?, window, k, v })
    };
    let layers = get("layers")?;
    if layers.split(';').nth(MAX_LAYERS).is_some() {
        return Err(format!("more than {MAX_LAYERS} layers"));
    }
    let layers = layers.split(';').map(layer).collect::<std::result::Result<_, _>>()?;
    let sequence = |text: &str| {
        let (len, written) = text.split_once('/').ok_or(format!("invalid length {text:?}"))?;
        Ok::<_, String>(Sequence { len: number(len)?, written: number(written)? })
    };
    let lengths = get("lengths")?.split(';').map(sequence).collect::<std::result::Result<Vec<_>, _>>()?;
    let (capacity, slack) = (number(get("capacity")?)?, number(get("slack")?)?);
    let spec = CacheSpec { layers, sequences: number(get("sequences")?)?, capacity, slack };
    if lengths.len() != spec.sequences {
        return Err(format!("{} lengths for {} sequences", lengths.len(), spec.sequences));
    }
    Ok((spec, lengths))
}

/// Bytes of a cache; `None` if they overflow.
fn total_bytes(spec: &CacheSpec) -> Result<Option<usize>> {
    let mut total = Some(0usize);
    for layer in layer_specs(spec)? {
        // The size of a vector is defined only for head sizes that the codec supports.
        layer.k.validate(NAME, "k", layer.head_dim)?;
        layer.v.validate(NAME, "v", layer.head_dim)?;
        // Two vectors of at most 4 bytes per coordinate (8-bit codes with their norms are smaller).
        let widest = layer.head_dim.checked_mul(8);
        let vector =
            widest.map(|_| layer.k.bytes_per_vector(layer.head_dim) + layer.v.bytes_per_vector(layer.head_dim));
        let rows = crate::tensor::element_count(&[layer.sequences, layer.kv_heads, layer.capacity])?;
        total = total.and_then(|total| total.checked_add(rows.checked_mul(vector?)?));
    }
    Ok(total)
}

/// A codec with all its parameters: `f16`, `tq4/1/rms`.
fn codec_name(codec: Codec) -> String {
    let Codec::TurboQuant(tq) = codec else { return codec.to_string() };
    let norm = match tq.norm {
        Norm::Rms => "rms",
        Norm::LeastSquares => "least-squares",
        Norm::Unbiased => "unbiased",
    };
    format!("{codec}/{}/{norm}", tq.scale)
}

fn parse_codec(text: &str) -> std::result::Result<Codec, String> {
    let bad = || format!("invalid codec {text:?}");
    let mut fields = text.split('/');
    let codec: Codec = fields.next().unwrap_or_default().parse().map_err(|_| bad())?;
    let codec = match codec {
        Codec::Dense(_) => codec,
        Codec::TurboQuant(tq) => {
            let scale = fields.next().and_then(|scale| scale.parse().ok()).ok_or_else(bad)?;
            let norm = match fields.next() {
                Some("rms") => Norm::Rms,
                Some("least-squares") => Norm::LeastSquares,
                Some("unbiased") => Norm::Unbiased,
                _ => return Err(bad()),
            };
            Codec::TurboQuant(TurboQuant { scale, norm, ..tq })
        }
    };
    fields.next().is_none().then_some(codec).ok_or_else(bad)
}

fn io(path: &Path) -> impl Fn(std::io::Error) -> Error {
    let path = path.display().to_string();
    move |source| Error::Io { path: path.clone(), source }
}
