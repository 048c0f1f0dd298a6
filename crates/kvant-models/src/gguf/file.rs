//! GGUF files, and models split into several files.

use std::{
    collections::HashMap,
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use kvant::{DType, Device, Tensor};

use super::{
    GgufHeader, GgufTensor, GgufType, Metadata,
    affine::{self, AffineBytes, GROUP},
    dequantise,
    types::dense_dtype,
};
use crate::{
    Error, Result,
    open_file::{self, OpenFile},
    parallel::{self, PIECE},
    source::Destination,
};

/// Maximum shards. Models have a few dozen.
const SHARD_LIMIT: u64 = 4096;

/// One open GGUF file.
#[derive(Debug)]
struct GgufFile {
    path: PathBuf,
    file: OpenFile,
    header: GgufHeader,
}

impl GgufFile {
    fn open(path: &Path) -> Result<GgufFile> {
        let file = OpenFile::Disk(open_file::open(path)?);
        let failed = |e: io::Error| Error::file(path, e);
        let length = file.len().map_err(failed)?;
        let reader = BufReader::with_capacity(1 << 16, Sequential { file: &file, at: 0, length });
        let header = GgufHeader::read(reader, length).map_err(|reason| Error::file(path, reason))?;
        Ok(GgufFile { path: path.to_path_buf(), file, header })
    }

    fn read_bytes(&self, name: &str, start: u64, bytes: &mut [u8]) -> Result<()> {
        let read = self.file.read_at(self.header.data_start + start, bytes);
        read.map_err(|e| Error::file(&self.path, format_args!("tensor `{name}`: {e}")))
    }
}

/// Reads a file sequentially.
struct Sequential<'a> {
    file: &'a OpenFile,
    at: u64,
    length: u64,
}

impl Read for Sequential<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = bytes.len().min(usize::try_from(self.length - self.at).unwrap_or(usize::MAX));
        self.file.read_at(self.at, &mut bytes[..count])?;
        self.at += count as u64;
        Ok(count)
    }
}

/// A model's GGUF file, or all files of a split model (`NAME-00001-of-00003.gguf`).
///
/// Tensors are read piece by piece; files are neither loaded nor mapped completely.
///
/// ```no_run
/// use kvant_models::gguf::Gguf;
/// let gguf = Gguf::open("model-Q4_K_M.gguf".as_ref())?;
/// println!("{:?}", gguf.metadata().text("general.architecture")?);
/// for (name, tensor) in gguf.tensors() {
///     println!("{name}: {} {:?}", tensor.kind, tensor.shape);
/// }
/// # Ok::<(), kvant_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Gguf {
    files: Vec<GgufFile>,
    /// The file index of each tensor.
    place: HashMap<String, usize>,
}

/// A matrix of affine codes: the tensors of [`kvant::ops::Affine`].
#[derive(Clone, Debug)]
pub struct AffineTensors {
    /// u32 `[.., N, K·bits/32]`.
    pub codes: Tensor,
    /// f16 or f32 `[.., N, K/group]`.
    pub scales: Tensor,
    /// The biases, with the shape and dtype of `scales`.
    pub biases: Tensor,
    /// Bits per code.
    pub bits: u32,
    /// Inputs that share a scale and a bias.
    pub group: usize,
}

impl Gguf {
    /// Opens a file and checks its header. For a split model, `path` names any of its files; all must be in one
    /// directory.
    ///
    /// # Errors
    /// `File` with the reason.
    pub fn open(path: &Path) -> Result<Gguf> {
        let first = GgufFile::open(path)?;
        let Some(split) = Split::of(&first)? else { return Gguf::join(vec![first]) };
        let mut files = Vec::new();
        let mut named = Some(first);
        for number in 0..split.count {
            let file = if number == split.number { named.take() } else { None };
            let file = match file {
                Some(file) => file,
                None => GgufFile::open(&split.path(number))?,
            };
            let found = Split::of(&file)?;
            if found.as_ref().map(|other| (other.number, other.count)) != Some((number, split.count)) {
                let expected = format!("split.no and split.count must be {number} and {}", split.count);
                return Err(Error::file(&file.path, expected));
            }
            files.push(file);
        }
        let gguf = Gguf::join(files)?;
        let found = gguf.place.len();
        if let Some(count) = whole(&gguf.files[0], "split.tensors.count")?.filter(|&count| count != found as u64) {
            return Err(Error::file(path, format!("`split.tensors.count` is {count}, the files have {found}")));
        }
        Ok(gguf)
    }

    /// The paths of all files of the model.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The path of the file, or of the first file of a split model.
    pub fn path(&self) -> &Path {
        &self.files[0].path
    }

    fn join(files: Vec<GgufFile>) -> Result<Gguf> {
        let mut place = HashMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.header.tensors.keys() {
                if place.insert(name.clone(), i).is_some() {
                    return Err(Error::file(&file.path, format_args!("tensor `{name}` is also in another file")));
                }
            }
        }
        Ok(Gguf { files, place })
    }

    /// The metadata; for a split model, the first file's.
    pub fn metadata(&self) -> &Metadata {
        &self.files[0].header.metadata
    }

    /// The headers of all files.
    pub fn headers(&self) -> impl ExactSizeIterator<Item = &GgufHeader> {
        self.files.iter().map(|file| &file.header)
    }

    /// All tensors with their names, in unspecified order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &GgufTensor)> {
        self.files.iter().flat_map(|file| file.header.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)))
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.files[*self.place.get(name)?].header.tensors.get(name)
    }

    /// Reads a tensor to a device: F32, F16 and BF16 unchanged, quantised types as f32.
    ///
    /// # Errors
    /// `MissingTensor`; `TensorDType` for a type that is not supported; `File`; `Kvant` if memory is short.
    pub fn read(&self, name: &str, device: &Device) -> Result<Tensor> {
        let tensor = Tensor::zeros(device, self.dense_dtype(name)?, &self.find(name)?.1.shape)?;
        self.read_to(name, &Destination::whole(&tensor)?)?;
        Ok(tensor)
    }

    /// The dtype of [`Gguf::read`]'s result.
    pub(super) fn dense_dtype(&self, name: &str) -> Result<DType> {
        let (_, info) = self.find(name)?;
        dense_dtype(info.kind).ok_or_else(|| Error::TensorDType {
            name: name.to_string(),
            expected: "F32, F16, BF16, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS or MXFP4",
            got: info.kind.to_string(),
        })
    }

    /// Like [`Gguf::read`], into a tensor with the file's shape and this dtype.
    pub(super) fn read_to(&self, name: &str, tensor: &Destination) -> Result<()> {
        let (file, info) = self.find(name)?;
        file.pieces(name, info, tensor.devices(), Vec::new, |floats, first, blocks| {
            let in_block = info.kind.block_elements() as usize;
            let elements = blocks.len() / info.kind.block_bytes() as usize * in_block;
            let start = first * in_block * tensor.dtype().size();
            if matches!(info.kind, GgufType::F32 | GgufType::F16 | GgufType::BF16) {
                return tensor.write_at(start, blocks);
            }
            floats.resize(elements, 0.0);
            let decoded = dequantise(info.kind, blocks, floats);
            debug_assert!(decoded, "the type is supported and pieces are whole blocks");
            tensor.write_at(start, bytemuck::cast_slice(floats))
        })
    }

    /// Whether two tensors have equal type, shape and bytes.
    pub(super) fn same(&self, a: &str, b: &str) -> Result<bool> {
        let ((file_a, of_a), (file_b, of_b)) = (self.find(a)?, self.find(b)?);
        if (of_a.kind, &of_a.shape) != (of_b.kind, &of_b.shape) {
            return Ok(false);
        }
        let same = AtomicBool::new(true);
        file_a.pieces(a, of_a, 1, Vec::new, |other, first, bytes| {
            other.resize(bytes.len(), 0);
            let start = of_b.start + first as u64 * of_b.kind.block_bytes();
            file_b.read_bytes(b, start, other)?;
            same.fetch_and(bytes == other.as_slice(), Ordering::Relaxed);
            Ok(())
        })?;
        Ok(same.into_inner())
    }

    /// Whether [`Gguf::read_affine`] reads the type: Q4_0, Q4_1, Q8_0.
    pub fn is_affine(kind: GgufType) -> bool {
        affine::bits(kind).is_some()
    }

    /// Reads a matrix with affine codes to a device. Every weight equals the file's. Scales and biases are f16, or f32
    /// if a bias overflows f16.
    ///
    /// # Errors
    /// As [`Gguf::read`].
    pub fn read_affine(&self, name: &str, device: &Device) -> Result<AffineTensors> {
        let (_, info) = self.find(name)?;
        let Some(bits) = affine::bits(info.kind) else {
            let expected = "of a type with affine codes";
            return Err(Error::TensorDType { name: name.to_string(), expected, got: info.kind.to_string() });
        };
        match self.affine_with(name, bits, DType::F16, device)? {
            Some(matrix) => Ok(matrix),
            None => Ok(self.affine_with(name, bits, DType::F32, device)?.expect("f32 holds every bias")),
        }
    }

    /// Returns `None` if a bias overflows `dtype`, the dtype of scales and biases.
    fn affine_with(&self, name: &str, bits: u32, dtype: DType, device: &Device) -> Result<Option<AffineTensors>> {
        let (_, info) = self.find(name)?;
        let with_inputs = |inputs: &dyn Fn(usize) -> usize| {
            let mut shape = info.shape.clone();
            let last = shape.last_mut().expect("blocks have rows");
            *last = inputs(*last);
            shape
        };
        let groups = with_inputs(&|inputs| inputs / GROUP);
        let matrix = AffineTensors {
            codes: Tensor::zeros(device, DType::U32, &with_inputs(&|inputs| inputs / 32 * bits as usize))?,
            scales: Tensor::zeros(device, dtype, &groups)?,
            biases: Tensor::zeros(device, dtype, &groups)?,
            bits,
            group: GROUP,
        };
        let parts = [&matrix.codes, &matrix.scales, &matrix.biases].map(Destination::whole);
        let [codes, scales, biases] = parts;
        let fits = self.read_affine_to(name, [&codes?, &scales?, &biases?])?;
        Ok(fits.then_some(matrix))
    }

    /// Reads codes, scales and biases of an affine matrix into tensors of matching shapes. Returns false if a bias
    /// overflows the dtype of `biases`; the contents are then unspecified.
    pub(super) fn read_affine_to(&self, name: &str, [codes, scales, biases]: [&Destination; 3]) -> Result<bool> {
        let (file, info) = self.find(name)?;
        let bits = affine::bits(info.kind).expect("the caller has checked the type") as usize;
        let dtype = scales.dtype();
        let fits = AtomicBool::new(true);
        file.pieces(name, info, codes.devices(), AffineBytes::default, |bytes, first, blocks| {
            if !fits.load(Ordering::Relaxed) || bytes.convert(info.kind, blocks, dtype).is_err() {
                fits.store(false, Ordering::Relaxed);
                return Ok(());
            }
            codes.write_at(first * bits * DType::U32.size(), &bytes.codes)?;
            scales.write_at(first * dtype.size(), &bytes.scales)?;
            biases.write_at(first * dtype.size(), &bytes.biases)
        })?;
        Ok(fits.into_inner())
    }

    /// Reads the bytes of a tensor into a u8 tensor with this number of elements.
    pub(super) fn read_bytes_to(&self, name: &str, tensor: &Destination) -> Result<()> {
        let (file, info) = self.find(name)?;
        file.pieces(
            name,
            info,
            tensor.devices(),
            || (),
            |(), first, bytes| tensor.write_at(first * info.kind.block_bytes() as usize, bytes),
        )
    }

    fn find(&self, name: &str) -> Result<(&GgufFile, &GgufTensor)> {
        let missing = || Error::MissingTensor { name: name.to_string() };
        let file = &self.files[*self.place.get(name).ok_or_else(missing)?];
        Ok((file, file.header.tensors.get(name).ok_or_else(missing)?))
    }
}

impl GgufFile {
    /// Visits the bytes of a tensor in pieces of whole blocks, on several threads, for data of `devices` devices.
    /// `visit` gets the thread's state, the index of the piece's first block, and the piece.
    fn pieces<S>(
        &self,
        name: &str,
        info: &GgufTensor,
        devices: usize,
        state: impl Fn() -> S + Sync,
        visit: impl Fn(&mut S, usize, &[u8]) -> Result<()> + Sync,
    ) -> Result<()> {
        let block = info.kind.block_bytes();
        let (limit, row) = ((PIECE as u64 / block).max(1), info.row_blocks());
        // Whole rows, if one is not too long.
        let blocks = if (1..=limit).contains(&row) { limit / row * row } else { limit };
        let step = blocks * block;
        let count = (info.end - info.start).div_ceil(step);
        parallel::for_each(
            count as usize,
            devices,
            || (state(), Vec::new()),
            |(state, piece), number| {
                let start = info.start + number as u64 * step;
                piece.resize((info.end - start).min(step) as usize, 0);
                self.read_bytes(name, start, piece)?;
                visit(state, number * blocks as usize, piece)
            },
        )
    }
}

/// The index of a file in a split model.
struct Split {
    number: u64,
    count: u64,
    /// The path up to `-00001-of-00003.gguf`.
    stem: String,
    directory: PathBuf,
}

impl Split {
    /// Returns `None` for a file that is a whole model.
    fn of(file: &GgufFile) -> Result<Option<Split>> {
        let count = whole(file, "split.count")?.unwrap_or(0);
        if count <= 1 {
            return Ok(None);
        }
        let number = whole(file, "split.no")?.unwrap_or(0);
        let error = |reason: String| Error::file(&file.path, reason);
        if count > SHARD_LIMIT || number >= count {
            return Err(error(format!("`split.no` is {number} of `split.count` {count}; the limit is {SHARD_LIMIT}")));
        }
        let name = file.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(stem) = name.strip_suffix(&Split::suffix(number, count)) else {
            let suffix = Split::suffix(number, count);
            return Err(error(format!("part {} of {count} of a model; its name must end with {suffix}", number + 1)));
        };
        let directory = file.path.parent().map(Path::to_path_buf).unwrap_or_default();
        Ok(Some(Split { number, count, stem: stem.to_string(), directory }))
    }

    fn suffix(number: u64, count: u64) -> String {
        format!("-{:05}-of-{count:05}.gguf", number + 1)
    }

    fn path(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{}{}", self.stem, Split::suffix(number, self.count)))
    }
}

fn whole(file: &GgufFile, key: &str) -> Result<Option<u64>> {
    file.header.metadata.whole(key).map_err(|e| Error::file(&file.path, e))
}
