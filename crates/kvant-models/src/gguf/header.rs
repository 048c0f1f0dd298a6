//! Reads and checks the header of a GGUF file: metadata and the list of tensors.
//!
//! The format, little endian: magic, version, number of tensors, number of pairs; the pairs; per tensor its name,
//! dimensions (innermost first), type and offset; padding to the alignment; the data.

use std::{
    collections::HashMap,
    io::{self, Read},
};

use super::{
    GgufType,
    metadata::{Metadata, MetadataValue, Scalar, Scalars, Texts, ValueType},
};

/// Maximum bytes of a header: several times the largest existing one; vocabularies take some 20 MiB.
const HEADER_LIMIT: u64 = 256 << 20;
/// Maximum metadata pairs. Files have some dozens.
const PAIR_LIMIT: u64 = 1 << 16;
/// Maximum tensors. Models have some thousands.
const TENSOR_LIMIT: u64 = 1 << 18;
/// Maximum dimensions of a tensor.
const RANK_LIMIT: u32 = 4;
/// Maximum nesting depth of arrays.
const DEPTH_LIMIT: u32 = 4;
/// Maximum alignment. Files use 32, rarely a page.
const ALIGNMENT_LIMIT: u64 = 1 << 16;
const DEFAULT_ALIGNMENT: u64 = 32;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// The type of the elements.
    pub kind: GgufType,
    /// The dimensions, outermost first: the reverse of the order in the file.
    pub shape: Vec<usize>,
    /// Offset of the first byte from [`GgufHeader::data_start`].
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
}

impl GgufTensor {
    /// Blocks of a row; 0 if rows are not whole blocks.
    pub(super) fn row_blocks(&self) -> u64 {
        let elements = self.shape.last().map_or(0, |&elements| elements as u64);
        let block = self.kind.block_elements();
        if elements.is_multiple_of(block) { elements / block } else { 0 }
    }
}

/// The checked header of a file: keys and names are unique; tensors are aligned, contiguous and within the file.
#[derive(Clone, Debug)]
pub struct GgufHeader {
    /// The version of the format: 2 or 3.
    pub version: u32,
    /// The alignment of tensors in bytes, a power of two.
    pub alignment: u64,
    /// The offset of the data in the file.
    pub data_start: u64,
    /// The key-value pairs.
    pub metadata: Metadata,
    /// The tensors by name.
    pub tensors: HashMap<String, GgufTensor>,
}

type Checked<T> = Result<T, String>;

impl GgufHeader {
    /// Reads the header of a file with `file_bytes` bytes.
    ///
    /// # Errors
    /// The reason.
    pub fn read(file: impl Read, file_bytes: u64) -> Checked<GgufHeader> {
        let mut input = Input { reader: file, left: file_bytes.min(HEADER_LIMIT), cut: file_bytes > HEADER_LIMIT };
        let version = read_version(&mut input)?;
        let tensor_count = input.u64("the number of tensors")?;
        let pair_count = input.u64("the number of metadata pairs")?;
        limit("metadata pairs", pair_count, PAIR_LIMIT)?;
        limit("tensors", tensor_count, TENSOR_LIMIT)?;
        let mut metadata = Metadata::default();
        for _ in 0..pair_count {
            let key = input.text("a metadata key")?;
            let value = read_value(&mut input).map_err(|reason| format!("metadata `{}`: {reason}", short(&key)))?;
            let shown = short(&key);
            if !metadata.insert(key, value) {
                return Err(format!("metadata `{shown}` appears twice"));
            }
        }
        let alignment = alignment(&metadata)?;
        let tensors = read_tensors(&mut input, tensor_count, alignment)?;
        let data_start = input.consumed(file_bytes).next_multiple_of(alignment);
        check_extents(&tensors, data_start, file_bytes, alignment)?;
        Ok(GgufHeader { version, alignment, data_start, metadata, tensors })
    }
}

/// The unread part of a header.
struct Input<R> {
    reader: R,
    left: u64,
    /// Whether the file continues beyond [`HEADER_LIMIT`].
    cut: bool,
}

impl<R: Read> Input<R> {
    fn need(&self, bytes: u64, what: &str) -> Checked<()> {
        if bytes <= self.left {
            return Ok(());
        }
        let (left, limit) = (self.left, if self.cut { "limit of a header" } else { "file" });
        Err(format!("{what} needs {bytes} bytes, {left} remain in the {limit}; the file may be truncated"))
    }

    fn fill(&mut self, bytes: &mut [u8], what: &str) -> Checked<()> {
        self.need(bytes.len() as u64, what)?;
        self.left -= bytes.len() as u64;
        self.reader.read_exact(bytes).map_err(|e: io::Error| format!("{what}: {e}"))
    }

    /// The length is checked against the file before the allocation.
    fn bytes(&mut self, count: u64, what: &str) -> Checked<Vec<u8>> {
        self.need(count, what)?;
        let mut bytes = vec![0; count as usize];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Checked<u32> {
        let mut bytes = [0; 4];
        self.fill(&mut bytes, what).map(|()| u32::from_le_bytes(bytes))
    }

    fn u64(&mut self, what: &str) -> Checked<u64> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes, what).map(|()| u64::from_le_bytes(bytes))
    }

    fn text(&mut self, what: &str) -> Checked<String> {
        let count = self.u64(what)?;
        String::from_utf8(self.bytes(count, what)?).map_err(|_| format!("{what} is not UTF-8"))
    }

    fn consumed(&self, file_bytes: u64) -> u64 {
        file_bytes.min(HEADER_LIMIT) - self.left
    }
}

/// Shortens a name: in malicious files it can be long.
fn short(name: &str) -> String {
    name.chars().take(80).collect()
}

fn limit(what: &str, count: u64, max: u64) -> Checked<()> {
    if count <= max { Ok(()) } else { Err(format!("the header claims {count} {what}, the limit is {max}")) }
}

fn read_version(input: &mut Input<impl Read>) -> Checked<u32> {
    let mut magic = [0; 4];
    input.fill(&mut magic, "the magic number")?;
    if &magic != b"GGUF" {
        return Err("not a GGUF file: it does not start with the letters GGUF".to_string());
    }
    match input.u32("the version")? {
        version @ (2 | 3) => Ok(version),
        version if matches!(version.swap_bytes(), 1..=3) => {
            Err("a big-endian GGUF file; only little-endian ones are supported".to_string())
        }
        version => Err(format!("GGUF version {version}; versions 2 and 3 are supported")),
    }
}

fn read_type(input: &mut Input<impl Read>) -> Checked<ValueType> {
    let id = input.u32("a value type")?;
    ValueType::from_id(id).ok_or_else(|| format!("value type {id} is unknown"))
}

fn read_value(input: &mut Input<impl Read>) -> Checked<MetadataValue> {
    match read_type(input)? {
        ValueType::String => input.text("a string").map(MetadataValue::Text),
        ValueType::Array => read_array(input),
        kind => read_scalar(input, kind).map(MetadataValue::Scalar),
    }
}

fn read_scalar(input: &mut Input<impl Read>, kind: ValueType) -> Checked<Scalar> {
    let mut bytes = [0; 8];
    let bytes = &mut bytes[..kind.size().expect("strings and arrays are read elsewhere")];
    input.fill(bytes, "a number")?;
    Scalar::read(kind, bytes)
}

fn read_array(input: &mut Input<impl Read>) -> Checked<MetadataValue> {
    let (kind, count) = (read_type(input)?, input.u64("an array's length")?);
    match (kind, kind.size()) {
        (_, Some(size)) => {
            let bytes =
                count.checked_mul(size as u64).ok_or_else(|| format!("an array of {count} numbers overflows"))?;
            Scalars::new(kind, input.bytes(bytes, "an array")?).map(MetadataValue::Scalars)
        }
        (ValueType::String, None) => {
            let mut texts = Texts::default();
            // The header limit keeps the sum of lengths below 4 GiB.
            for _ in 0..count {
                texts.push(&input.text("a string of an array")?);
            }
            Ok(MetadataValue::Texts(texts))
        }
        (_, None) => {
            skip_arrays(input, count, DEPTH_LIMIT - 1)?;
            Ok(MetadataValue::Nested { count })
        }
    }
}

/// Reads `count` arrays and discards them.
fn skip_arrays(input: &mut Input<impl Read>, count: u64, depth: u32) -> Checked<()> {
    if depth == 0 {
        return Err(format!("arrays are nested more than {DEPTH_LIMIT} deep"));
    }
    for _ in 0..count {
        let (kind, count) = (read_type(input)?, input.u64("an array's length")?);
        match kind.size() {
            Some(size) => {
                let bytes =
                    count.checked_mul(size as u64).ok_or_else(|| format!("an array of {count} numbers overflows"))?;
                Scalars::new(kind, input.bytes(bytes, "an array")?)?;
            }
            None if kind == ValueType::String => {
                for _ in 0..count {
                    input.text("a string of an array")?;
                }
            }
            None => skip_arrays(input, count, depth - 1)?,
        }
    }
    Ok(())
}

fn alignment(metadata: &Metadata) -> Checked<u64> {
    let key = "general.alignment";
    let alignment = metadata.whole(key).map_err(|e| e.to_string())?.unwrap_or(DEFAULT_ALIGNMENT);
    if alignment.is_power_of_two() && alignment <= ALIGNMENT_LIMIT {
        return Ok(alignment);
    }
    Err(format!("metadata `{key}` must be a power of two, at most {ALIGNMENT_LIMIT}, got {alignment}"))
}

fn read_tensors(input: &mut Input<impl Read>, count: u64, alignment: u64) -> Checked<HashMap<String, GgufTensor>> {
    let mut tensors = HashMap::new();
    for _ in 0..count {
        let name = input.text("a tensor's name")?;
        let shown = short(&name);
        let tensor = read_tensor(input, alignment).map_err(|reason| format!("tensor `{shown}`: {reason}"))?;
        if tensors.insert(name, tensor).is_some() {
            return Err(format!("tensor `{shown}` appears twice"));
        }
    }
    Ok(tensors)
}

fn read_tensor(input: &mut Input<impl Read>, alignment: u64) -> Checked<GgufTensor> {
    let rank = input.u32("the number of dimensions")?;
    if rank > RANK_LIMIT {
        return Err(format!("{rank} dimensions, the limit is {RANK_LIMIT}"));
    }
    let mut sizes = [1; RANK_LIMIT as usize];
    let sizes = &mut sizes[..rank as usize];
    for size in sizes.iter_mut() {
        *size = input.u64("a dimension")?;
    }
    let id = input.u32("the type")?;
    let kind = GgufType::from_id(id).ok_or_else(|| format!("type {id} is unknown"))?;
    let start = input.u64("the offset")?;
    if !start.is_multiple_of(alignment) {
        return Err(format!("its offset {start} is not a multiple of the alignment, {alignment}"));
    }
    let inner = sizes.first().copied().unwrap_or(1);
    if !inner.is_multiple_of(kind.block_elements()) {
        return Err(format!("rows of {inner} elements are not whole blocks of {kind}, {} each", kind.block_elements()));
    }
    let elements = sizes.iter().try_fold(1u64, |n, &size| n.checked_mul(size));
    let end = elements
        .and_then(|n| (n / kind.block_elements()).checked_mul(kind.block_bytes()))
        .and_then(|bytes| start.checked_add(bytes));
    let shape: Option<Vec<usize>> = sizes.iter().rev().map(|&size| usize::try_from(size).ok()).collect();
    match (shape, end) {
        (Some(shape), Some(end)) => Ok(GgufTensor { kind, shape, start, end }),
        _ => Err(format!("the shape {sizes:?} overflows")),
    }
}

/// Checks that tensors are contiguous except for padding. Bytes after the last one are ignored.
fn check_extents(
    tensors: &HashMap<String, GgufTensor>,
    data_start: u64,
    file_bytes: u64,
    alignment: u64,
) -> Checked<()> {
    let data_bytes = file_bytes.saturating_sub(data_start);
    let mut ranges: Vec<_> = tensors.iter().map(|(name, tensor)| (tensor.start, tensor.end, name)).collect();
    ranges.sort_unstable();
    let mut expected = 0u64;
    for (start, end, name) in ranges {
        let name = short(name);
        if end > data_bytes {
            return Err(format!(
                "tensor `{name}`: bytes {start}..{end} are outside of the {data_bytes} bytes that the file has after its header; it may be truncated"
            ));
        }
        if start != expected {
            return Err(format!(
                "tensor `{name}`: it starts at byte {start}, the previous one ends at {expected} with its padding"
            ));
        }
        expected =
            end.checked_next_multiple_of(alignment).ok_or_else(|| format!("tensor `{name}`: its end overflows"))?;
    }
    Ok(())
}
