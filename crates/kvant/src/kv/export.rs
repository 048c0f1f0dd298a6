//! A sequence as bytes: a safetensors file in memory, for a file, another process or another machine.
//!
//! The tensor `group.N` is u8 `[pages, bytes of a page]`: the pages of layer group N as they are on the device, with
//! encoded keys and values, and the means of centred codecs. The metadata has the layers, the length, and the first
//! page of each group. The bytes are untrusted when they come back: everything is checked against the pool before a
//! page is taken.

use std::{borrow::Cow, collections::HashMap};

use safetensors::{Dtype, SafeTensors, View};

use super::{
    pool::{CacheLayer, KvPool, PoolLayout, PoolState},
    sequence::{GroupPages, Sequence, SequencePages},
};
use crate::{Codec, Error, Result, codec::TurboQuant};

const FORMAT: &str = "kvant-sequence";

/// The version of files: 2 if a layer is centred, whose pages hold means and norms in f16.
fn version(pool: &KvPool) -> &'static str {
    let mut codecs = pool.spec().layers.iter().flat_map(|layer| [layer.k, layer.v]);
    if codecs.any(Codec::is_centred) { "2" } else { "1" }
}

/// The description of a codec, which files of version 1 have, too.
fn codec_text(codec: Codec) -> String {
    match codec {
        Codec::Dense(dtype) => format!("Dense({dtype:?})"),
        Codec::TurboQuant(TurboQuant { bits, scale, centred: true, .. }) => format!("tq{bits}c, scale {scale:?}"),
        Codec::TurboQuant(TurboQuant { bits, scale, norm, .. }) => {
            format!("TurboQuant(TurboQuant {{ bits: {bits}, scale: {scale:?}, norm: {norm:?} }})")
        }
    }
}

/// The pages of one group.
struct GroupBytes {
    shape: [usize; 2],
    bytes: Vec<u8>,
}

impl View for GroupBytes {
    fn dtype(&self) -> Dtype {
        Dtype::U8
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

impl Sequence {
    /// The sequence as bytes, for [`KvPool::import`]: a safetensors file. It holds neither token ids nor the identity
    /// of the model; store these separately.
    ///
    /// Commit operations that write to the sequence before this call.
    ///
    /// # Errors
    /// `OutOfMemory`, `DeviceFault`.
    pub fn export(&self) -> Result<Vec<u8>> {
        let pool = self.pool();
        let mut tensors = Vec::new();
        let mut metadata = describe(pool);
        metadata.insert("len".to_string(), self.len().to_string());
        for (index, held) in self.pages.groups.iter().enumerate() {
            let page_bytes = pool.layout().groups[index].page_bytes;
            let total = page_bytes.saturating_mul(held.pages.len());
            let mut bytes = Vec::new();
            let failed = |_| Error::OutOfMemory { device: "the host".to_string(), bytes: total };
            bytes.try_reserve_exact(total).map_err(failed)?;
            bytes.resize(total, 0);
            for (&page, to) in held.pages.iter().zip(bytes.chunks_exact_mut(page_bytes)) {
                pool.page(index, page)?.read_bytes(to)?;
            }
            metadata.insert(format!("first.{index}"), held.first.to_string());
            tensors.push((format!("group.{index}"), GroupBytes { shape: [held.pages.len(), page_bytes], bytes }));
        }
        safetensors::serialize(tensors, Some(metadata)).map_err(|error| file(&error.to_string()))
    }
}

impl KvPool {
    /// A sequence from the bytes of [`Sequence::export`], of a pool with the same layers and positions of a page.
    ///
    /// # Errors
    /// `File` for bytes that are not such a file, or whose layers are others; `OutOfPages`; `DeviceFault`.
    pub fn import(&self, bytes: &[u8]) -> Result<Sequence> {
        let layout = self.layout();
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| file(&error.to_string()))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| file(&error.to_string()))?;
        let empty = HashMap::new();
        let metadata = metadata.metadata().as_ref().unwrap_or(&empty);
        for (key, wanted) in describe(self) {
            match metadata.get(&key) {
                Some(got) if *got == wanted => {}
                got => return Err(file(&format!("`{key}` is {got:?}, the pool has {wanted:?}"))),
            }
        }
        let number = |key: &str| {
            let value = metadata.get(key).and_then(|value| value.parse::<u32>().ok());
            value.map(|value| value as usize).ok_or_else(|| file(&format!("`{key}` is not a number")))
        };
        let len = number("len")?;
        let mut contents = Vec::new();
        for index in 0..layout.groups.len() {
            let (name, first) = (format!("group.{index}"), number(&format!("first.{index}"))?);
            let tensor = tensors.tensor(&name).map_err(|error| file(&format!("{name}: {error}")))?;
            let pages = pages_of(layout, index, len, first).ok_or_else(|| {
                file(&format!("`first.{index}` is {first}: the next of {len} tokens sees older positions, or none"))
            })?;
            let expected = [pages, layout.groups[index].page_bytes];
            if tensor.dtype() != Dtype::U8 || tensor.shape() != expected {
                let (dtype, shape) = (tensor.dtype(), tensor.shape());
                return Err(file(&format!("{name} is {dtype:?} {shape:?}, not U8 {expected:?}")));
            }
            contents.push((first, tensor.data()));
        }
        let mut sequence = self.sequence();
        sequence.pages = self.take_all(len, &contents)?;
        // From here on the pages are the sequence's, which gives them back if a transfer fails.
        for (index, (_, bytes)) in contents.iter().enumerate() {
            let pages = bytes.chunks_exact(layout.groups[index].page_bytes);
            for (&page, bytes) in sequence.pages.groups[index].pages.iter().zip(pages) {
                self.page(index, page)?.write_bytes(bytes)?;
            }
        }
        Ok(sequence)
    }

    /// Takes the pages of a sequence of `len` tokens: the first page and the bytes of each group.
    fn take_all(&self, len: usize, contents: &[(usize, &[u8])]) -> Result<SequencePages> {
        let layout = self.layout();
        let PoolState { pages, prefixes, .. } = &mut *self.lock();
        let counts = || contents.iter().zip(&layout.groups).map(|((_, bytes), group)| bytes.len() / group.page_bytes);
        prefixes.make_room(pages, self, |trial| {
            let lacks = |(group, count): (usize, usize)| (0..count).filter(|_| trial.take(group).is_none()).count();
            counts().enumerate().map(lacks).sum()
        })?;
        let mut taken = SequencePages::new(layout.groups.len());
        for (group, count) in counts().enumerate() {
            let first = contents[group].0;
            taken.groups[group] = GroupPages { first, pages: Vec::with_capacity(count), settled: first };
            for _ in 0..count {
                match pages.take(group) {
                    Some(page) => taken.groups[group].pages.push(page),
                    None => {
                        taken.release(pages);
                        return Err(Error::OutOfPages { missing: 1 });
                    }
                }
            }
        }
        taken.len = len;
        Ok(taken)
    }
}

/// The number of pages of a group from `first` on, for a sequence of `len` tokens; `None` if the group then lacks a
/// position that the next token sees, or begins beyond the end.
fn pages_of(layout: &PoolLayout, group: usize, len: usize, first: usize) -> Option<usize> {
    let holds = first.checked_mul(layout.page_tokens)? <= layout.groups[group].oldest_seen(len);
    holds.then(|| len.div_ceil(layout.page_tokens).checked_sub(first)).flatten()
}

/// What two pools must have in common.
fn describe(pool: &KvPool) -> HashMap<String, String> {
    let mut metadata = HashMap::from([
        ("format".to_string(), FORMAT.to_string()),
        ("version".to_string(), version(pool).to_string()),
        ("page_tokens".to_string(), pool.spec().page_tokens.to_string()),
        ("layers".to_string(), pool.spec().layers.len().to_string()),
    ]);
    for (index, layer) in pool.spec().layers.iter().enumerate() {
        let CacheLayer { kv_heads, head_dim, window, k, v } = layer;
        let window = window.map_or("all".to_string(), |window| window.to_string());
        let (k, v) = (codec_text(*k), codec_text(*v));
        let text = format!("{kv_heads} heads of {head_dim}, window {window}, keys {k}, values {v}");
        metadata.insert(format!("layer.{index}"), text);
    }
    metadata
}

fn file(reason: &str) -> Error {
    Error::File { path: "exported sequence".to_string(), reason: reason.to_string() }
}
