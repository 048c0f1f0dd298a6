//! Checkpoint files: one safetensors file, or several with an index.
//!
//! The format: eight bytes of header length (little endian), a JSON header with the dtype, shape and byte range of each
//! tensor, then the data. Everything is checked before any allocation. Tensors are copied from the file to the device
//! in chunks; files are neither loaded nor mapped completely.

use std::{
    collections::HashMap,
    fmt, io,
    path::{Path, PathBuf},
};

use kvant::{DType, Device, Tensor};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::{
    Error, Files, Result,
    open_file::{self, OpenFile},
    parallel::{self, PIECE},
    source::Destination,
};

/// Maximum bytes of a header, according to the format.
const HEADER_LIMIT: u64 = 100_000_000;
/// Maximum shards. Checkpoints have a few dozen.
const SHARD_LIMIT: usize = 4096;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The dtype as named in the file: `F32`, `BF16`, `U32`, …
    pub dtype: String,
    /// The dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Offset of the first byte from the end of the header.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
}

impl TensorInfo {
    /// The dtype, if kvant supports it.
    pub fn dtype(&self) -> Option<DType> {
        Some(match self.dtype.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::BF16,
            "U32" => DType::U32,
            "U8" => DType::U8,
            _ => return None,
        })
    }
}

/// Bits per element of the format's dtypes; `None` for unknown ones, whose length cannot be checked.
fn element_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E5M2FNUZ" | "F8_E4M3FNUZ" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// The checked header of a file: names are unique, ranges match shapes, and the tensors cover the data exactly.
#[derive(Clone, Debug, Default)]
pub struct Header {
    tensors: HashMap<String, TensorInfo>,
}

impl Header {
    /// Parses a header's JSON. `data_bytes` is the number of bytes in the file after the header.
    ///
    /// # Errors
    /// The reason.
    pub fn parse(json: &[u8], data_bytes: u64) -> std::result::Result<Header, String> {
        let RawHeader(entries) = serde_json::from_slice(json).map_err(|e| format!("header: {e}"))?;
        let mut tensors = HashMap::with_capacity(entries.len());
        let mut ranges = Vec::with_capacity(entries.len());
        for (name, entry) in entries {
            let info = entry.check(data_bytes).map_err(|reason| format!("header: tensor `{name}`: {reason}"))?;
            ranges.push((info.start, info.end));
            if tensors.insert(name.clone(), info).is_some() {
                return Err(format!("header: tensor `{name}` appears twice"));
            }
        }
        ranges.sort_unstable();
        let mut covered = 0;
        for (start, end) in ranges {
            if start != covered {
                return Err(format!("header: tensors overlap or leave a gap at byte {}", start.min(covered)));
            }
            covered = end;
        }
        if covered != data_bytes {
            return Err(format!("header: tensors take {covered} bytes, the file has {data_bytes}"));
        }
        Ok(Header { tensors })
    }

    /// The tensors by name.
    pub fn tensors(&self) -> &HashMap<String, TensorInfo> {
        &self.tensors
    }
}

#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawEntry {
    fn check(self, data_bytes: u64) -> std::result::Result<TensorInfo, String> {
        let (start, end) = self.data_offsets;
        if start > end || end > data_bytes {
            return Err(format!(
                "bytes {start}..{end} are outside of the {data_bytes} bytes that the file has after its header; it may be truncated"
            ));
        }
        let shape: Option<Vec<usize>> = self.shape.iter().map(|&d| usize::try_from(d).ok()).collect();
        let elements = self.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        let (Some(shape), Some(elements)) = (shape, elements) else {
            return Err(format!("the shape {:?} overflows", self.shape));
        };
        if let Some(bits) = element_bits(&self.dtype) {
            let bytes = elements.checked_mul(bits).map(|bits| bits.div_ceil(8));
            if bytes != Some(end - start) {
                return Err(format!(
                    "a shape of {:?} and dtype {} do not match {} bytes",
                    self.shape,
                    self.dtype,
                    end - start
                ));
            }
        }
        Ok(TensorInfo { dtype: self.dtype, shape, start, end })
    }
}

/// The header's entries in order, including duplicates, which a map would hide.
struct RawHeader(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// One open safetensors file.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: OpenFile,
    data_start: u64,
    header: Header,
}

impl SafetensorsFile {
    /// Opens a file and checks its header.
    pub fn open(path: &Path) -> Result<SafetensorsFile> {
        SafetensorsFile::new(path.to_path_buf(), OpenFile::Disk(open_file::open(path)?))
    }

    fn new(path: PathBuf, file: OpenFile) -> Result<SafetensorsFile> {
        let failed = |e: io::Error| Error::file(&path, e);
        let length = file.len().map_err(failed)?;
        let mut prefix = [0u8; 8];
        if length < 8 {
            return Err(Error::file(&path, "the file is too short for a safetensors header"));
        }
        file.read_at(0, &mut prefix).map_err(failed)?;
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > HEADER_LIMIT || header_bytes > length - 8 {
            let reason =
                format!("the header claims {header_bytes} bytes, the file has {} after its length", length - 8);
            return Err(Error::file(&path, reason));
        }
        let mut json = vec![0; header_bytes as usize];
        file.read_at(8, &mut json).map_err(failed)?;
        let data_start = 8 + header_bytes;
        let header = Header::parse(&json, length - data_start).map_err(|reason| Error::file(&path, reason))?;
        Ok(SafetensorsFile { path, file, data_start, header })
    }

    /// The file's header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Reads a tensor to a device, in the file's dtype.
    pub fn read(&self, name: &str, device: &Device) -> Result<Tensor> {
        let info = self.header.tensors.get(name).ok_or_else(|| Error::MissingTensor { name: name.to_string() })?;
        let dtype = info.dtype().ok_or_else(|| Error::TensorDType {
            name: name.to_string(),
            expected: "F32, F16, BF16, U32 or U8",
            got: info.dtype.clone(),
        })?;
        let tensor = Tensor::zeros(device, dtype, &info.shape)?;
        self.read_into(name, &tensor)?;
        Ok(tensor)
    }

    /// Like [`SafetensorsFile::read`], into a tensor of equal shape and dtype.
    pub fn read_into(&self, name: &str, tensor: &Tensor) -> Result<()> {
        self.read_to(name, &Destination::whole(tensor)?)
    }

    fn read_to(&self, name: &str, tensor: &Destination) -> Result<()> {
        let info = self.header.tensors.get(name).ok_or_else(|| Error::MissingTensor { name: name.to_string() })?;
        if info.shape != tensor.shape() {
            let (expected, got) = (tensor.shape().to_vec(), info.shape.clone());
            return Err(Error::TensorShape { name: name.to_string(), expected, got });
        }
        if info.dtype() != Some(tensor.dtype()) {
            return Err(Error::TensorDType {
                name: name.to_string(),
                expected: "of the destination's dtype",
                got: info.dtype.clone(),
            });
        }
        let step = tensor.piece();
        parallel::for_each(tensor.bytes().div_ceil(step), tensor.devices(), Vec::new, |piece, number| {
            let start = number * step;
            piece.resize(step.min(tensor.bytes() - start), 0);
            self.read_bytes(name, info.start + start as u64, piece)?;
            tensor.write_at(start, piece)
        })
    }

    /// Reads bytes of a tensor. `start` is the offset from the end of the header.
    fn read_bytes(&self, name: &str, start: u64, bytes: &mut [u8]) -> Result<()> {
        let read = self.file.read_at(self.data_start + start, bytes);
        read.map_err(|e| Error::file(&self.path, format_args!("tensor `{name}`: {e}")))
    }
}

/// All tensors of a checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<SafetensorsFile>,
    /// The file index of each tensor.
    place: HashMap<String, usize>,
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        Checkpoint::open_files(&Files::directory(dir))
    }

    pub(crate) fn open_files(from: &Files) -> Result<Checkpoint> {
        let open = |name: &str| SafetensorsFile::new(from.path(name), from.open(name)?);
        let (single, index) = ("model.safetensors", "model.safetensors.index.json");
        if from.has(single) {
            let file = open(single)?;
            let place = file.header.tensors.keys().map(|name| (name.clone(), 0)).collect();
            return Ok(Checkpoint { files: vec![file], place });
        }
        if !from.has(index) {
            return Err(from.error("has neither model.safetensors nor model.safetensors.index.json"));
        }
        let json = from.read(index, HEADER_LIMIT)?;
        let index = from.path(index);
        let map = parse_index(&json).map_err(|reason| Error::file(&index, reason))?;
        let mut files = Vec::new();
        let mut opened = HashMap::new();
        let mut place = HashMap::with_capacity(map.len());
        for (name, shard) in map {
            let file = match opened.get(&shard) {
                Some(&file) => file,
                None => {
                    files.push(open(&shard)?);
                    opened.insert(shard.clone(), files.len() - 1);
                    files.len() - 1
                }
            };
            if !files[file].header.tensors.contains_key(&name) {
                return Err(Error::file(&index, format_args!("`{name}` is not in {shard}")));
            }
            place.insert(name, file);
        }
        Ok(Checkpoint { files, place })
    }

    /// Whether a tensor of this name exists.
    pub fn contains(&self, name: &str) -> bool {
        self.place.contains_key(name)
    }

    /// The names of all tensors, with their dtypes, shapes and ranges.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.place.keys().filter_map(|name| Some((name.as_str(), self.info(name)?)))
    }

    /// The dtype, shape and range of a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.files[*self.place.get(name)?].header.tensors.get(name)
    }

    /// Reads a tensor to a device, in the file's dtype.
    pub fn read(&self, name: &str, device: &Device) -> Result<Tensor> {
        self.find(name)?.0.read(name, device)
    }

    /// Like [`Checkpoint::read`], into a tensor of equal shape and dtype.
    pub fn read_into(&self, name: &str, tensor: &Tensor) -> Result<()> {
        self.find(name)?.0.read_into(name, tensor)
    }

    /// Reads a tensor into one of equal shape and dtype, which ranks may share.
    pub(crate) fn read_to(&self, name: &str, tensor: &Destination) -> Result<()> {
        self.find(name)?.0.read_to(name, tensor)
    }

    /// Reads all bytes of a tensor into one of another dtype or shape with equal size in bytes.
    pub(crate) fn read_raw(&self, name: &str, tensor: &Destination) -> Result<()> {
        let step = tensor.piece();
        parallel::for_each(tensor.bytes().div_ceil(step), tensor.devices(), Vec::new, |piece, number| {
            let start = number * step;
            piece.resize(step.min(tensor.bytes() - start), 0);
            self.read_bytes(name, start as u64, piece)?;
            tensor.write_at(start, piece)
        })
    }

    /// Reads bytes of a tensor, starting at its byte `start`. A range beyond the tensor is an error.
    pub(crate) fn read_bytes(&self, name: &str, start: u64, bytes: &mut [u8]) -> Result<()> {
        let (file, info) = self.find(name)?;
        let end = start.checked_add(bytes.len() as u64).and_then(|end| end.checked_add(info.start));
        match end.filter(|&end| end <= info.end) {
            Some(_) => file.read_bytes(name, info.start + start, bytes),
            None => Err(Error::file(&file.path, format_args!("tensor `{name}` has no bytes from {start} on"))),
        }
    }

    /// Whether two tensors have equal dtype, shape and bytes.
    pub(crate) fn same(&self, a: &str, b: &str) -> Result<bool> {
        let ((file_a, of_a), (file_b, of_b)) = (self.find(a)?, self.find(b)?);
        if (&of_a.dtype, &of_a.shape) != (&of_b.dtype, &of_b.shape) || of_a.end - of_a.start != of_b.end - of_b.start {
            return Ok(false);
        }
        let bytes = of_a.end - of_a.start;
        let mut pieces = [(); 2].map(|()| vec![0u8; bytes.min(PIECE as u64) as usize]);
        for done in (0..bytes).step_by(PIECE) {
            let count = (bytes - done).min(PIECE as u64) as usize;
            let [x, y] = pieces.each_mut().map(|piece| &mut piece[..count]);
            file_a.read_bytes(a, of_a.start + done, x)?;
            file_b.read_bytes(b, of_b.start + done, y)?;
            if x != y {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn find(&self, name: &str) -> Result<(&SafetensorsFile, &TensorInfo)> {
        let missing = || Error::MissingTensor { name: name.to_string() };
        let file = &self.files[*self.place.get(name).ok_or_else(missing)?];
        Ok((file, file.header.tensors.get(name).ok_or_else(missing)?))
    }
}

/// The tensor names in an index, each with the file name of its shard.
///
/// # Errors
/// The reason. A shard must be the plain name of a `.safetensors` file in the directory of the index.
pub fn parse_index(json: &[u8]) -> std::result::Result<Vec<(String, String)>, String> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let index: Index = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    let mut shards = std::collections::HashSet::new();
    for shard in index.weight_map.values() {
        let plain = shard.strip_suffix(".safetensors").is_some_and(|stem| {
            !stem.is_empty()
                && !stem.starts_with('.')
                && stem.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        });
        if !plain {
            return Err(format!("{shard:?} is not the plain name of a .safetensors file"));
        }
        shards.insert(shard);
        if shards.len() > SHARD_LIMIT {
            return Err(format!("more than {SHARD_LIMIT} shards"));
        }
    }
    Ok(index.weight_map.into_iter().collect())
}
