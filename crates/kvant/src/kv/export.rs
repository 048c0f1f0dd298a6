//! A sequence as bytes: a safetensors file in memory, for a file, another process or another machine.
//!
//! The tensor `group.N` is u8 `[pages, bytes of a page]`: the pages of layer group N as they are on the device. Layers
//! that seal pages have a group of sealed pages, with the means of centred codecs, and one of dense pages. The metadata
//! has the layers, the length, the first page of each group, and whether page 0 precedes it. The last group has the
//! states of recurrent layers, if the pool has any: the page of the last boundary, if it is kept, and the page of the
//! current states, but not those of a step's other rows; the metadata has the length at the boundary.
//!
//! A page of a group of devices has the bytes of all ranks, one after the other; the metadata then has the number of
//! ranks. An import does not trust the bytes: it checks everything against the pool before it takes a page.

use std::{borrow::Cow, collections::HashMap};

use safetensors::{Dtype, SafeTensors, View};

use super::{
    layout::{PageKind, PoolLayout},
    pool::{KvPool, PoolState},
    sequence::{GroupPages, Sequence, SequencePages},
    spec::{CacheLayer, StateLayer},
};
use crate::{Codec, Error, Result, codec::TurboQuant};

const FORMAT: &str = "kvant-sequence";

/// The version of the file format: 4 with states, 3 if a layer seals pages, otherwise 1. Version 2 had centred codecs
/// without dense pages.
fn version(pool: &KvPool) -> &'static str {
    match pool.layout().state_group() {
        Some(_) => "4",
        None if pool.layout().seals() => "3",
        None => "1",
    }
}

/// The description of a codec, the same as in files of version 1.
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
    /// Exports the sequence as a safetensors file, for [`KvPool::import`]. The file holds neither token ids nor the
    /// identity of the model; store these separately.
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
            let page_bytes = pool.saved_page_bytes(index);
            let count = self.pages.lasting(pool.layout(), index).count();
            let total = page_bytes.saturating_mul(count);
            let mut bytes = Vec::new();
            let failed = |_| Error::OutOfMemory { device: "the host".to_string(), bytes: total };
            bytes.try_reserve_exact(total).map_err(failed)?;
            bytes.resize(total, 0);
            for (page, to) in self.pages.lasting(pool.layout(), index).zip(bytes.chunks_exact_mut(page_bytes)) {
                pool.save_page(index, page, to)?;
            }
            metadata.insert(format!("first.{index}"), held.first.to_string());
            if held.kept.is_some() {
                metadata.insert(format!("kept.{index}"), "1".to_string());
                if Some(index) == pool.layout().state_group() {
                    metadata.insert("boundary".to_string(), held.boundary.to_string());
                }
            }
            tensors.push((format!("group.{index}"), GroupBytes { shape: [count, page_bytes], bytes }));
        }
        safetensors::serialize(tensors, Some(metadata)).map_err(|error| file(&error.to_string()))
    }
}

impl KvPool {
    /// Imports a sequence from the bytes of [`Sequence::export`]. The exporting pool must have had the same layers and
    /// page size, and its device as many ranks.
    ///
    /// # Errors
    /// `File` for bytes that are not an export, or that come from other layers; `OutOfPages`; `DeviceFault`.
    pub fn import(&self, bytes: &[u8]) -> Result<Sequence> {
        let layout = self.layout();
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| file(&error.to_string()))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| file(&error.to_string()))?;
        let empty = HashMap::new();
        let metadata = metadata.metadata().as_ref().unwrap_or(&empty);
        for (key, wanted) in describe(self) {
            match metadata.get(&key) {
                Some(got) if *got == wanted => {}
                Some(got) => return Err(file(&format!("`{key}` is {got:?}, the pool has {wanted:?}"))),
                None => return Err(file(&format!("`{key}` is missing, the pool has {wanted:?}"))),
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
            let page_bytes = self.saved_page_bytes(index);
            let count = tensor.shape().first().copied().unwrap_or(0);
            let expected = [count, page_bytes];
            if tensor.dtype() != Dtype::U8 || tensor.shape() != expected {
                let (dtype, shape) = (tensor.dtype(), tensor.shape());
                return Err(file(&format!("{name} is {dtype:?} {shape:?}, not U8 {expected:?}")));
            }
            let kept = metadata.contains_key(&format!("kept.{index}"));
            let has_boundary = kept && Some(index) == layout.state_group();
            let boundary = if has_boundary { number("boundary")? } else { 0 };
            contents.push(GroupContents { first, kept, count, boundary, bytes: tensor.data() });
        }
        check_contents(layout, len, &contents)?;
        let mut sequence = self.sequence();
        sequence.pages = self.take_all(len, &contents)?;
        // The sequence owns the pages from here on, and releases them if a transfer fails.
        for (index, of) in contents.iter().enumerate() {
            let pages = of.bytes.chunks_exact(self.saved_page_bytes(index));
            for (page, bytes) in sequence.pages.groups[index].all().zip(pages) {
                self.load_page(index, page, bytes)?;
            }
        }
        Ok(sequence)
    }

    /// Takes the pages of a sequence of `len` tokens.
    fn take_all(&self, len: usize, contents: &[GroupContents]) -> Result<SequencePages> {
        let layout = self.layout();
        let PoolState { pages, prefixes, .. } = &mut *self.lock();
        prefixes.make_room(pages, self, |trial| {
            let lacks =
                |(group, of): (usize, &GroupContents)| (0..of.count).filter(|_| trial.take(group).is_none()).count();
            contents.iter().enumerate().map(lacks).sum()
        })?;
        let mut taken = SequencePages::new(layout);
        for (group, of) in contents.iter().enumerate() {
            let held = GroupPages { first: of.first, huge_end: of.first, boundary: of.boundary, ..Default::default() };
            taken.groups[group] = held;
            for index in 0..of.count {
                let Some(page) = pages.take(group) else {
                    taken.release(layout, pages);
                    return Err(Error::OutOfPages { missing: 1 });
                };
                let held = &mut taken.groups[group];
                match of.kept && index == 0 {
                    true => held.kept = Some(page),
                    false => held.pages.push(page),
                }
            }
        }
        taken.len = len;
        Ok(taken)
    }
}

/// The pages of a group in a file: `count` pages, in order. If page 0 was kept, it is the first one, and the others
/// begin at index `first`. In the group of states, the kept page has the states at length `boundary`.
struct GroupContents<'a> {
    first: usize,
    kept: bool,
    count: usize,
    boundary: usize,
    bytes: &'a [u8],
}

impl GroupContents<'_> {
    /// The index after that of the last page; `None` without pages.
    fn end(&self) -> Option<usize> {
        self.first.checked_add(self.count.checked_sub(usize::from(self.kept))?)
    }
}

/// Checks that the pages belong to a sequence of `len` tokens that can be continued.
fn check_contents(layout: &PoolLayout, len: usize, contents: &[GroupContents]) -> Result<()> {
    let page_tokens = layout.page_tokens;
    for (index, (group, of)) in layout.groups.iter().zip(contents).enumerate() {
        let wrong = || {
            let GroupContents { first, count, .. } = of;
            let text = "the next token needs other pages";
            Err(file(&format!("`first.{index}` is {first}, with {count} pages for {len} tokens: {text}")))
        };
        let Some(end) = of.end() else { return wrong() };
        let needed = group.first_needed(len, page_tokens);
        let fits = match group.kind {
            PageKind::Plain => !of.kept && of.first <= needed && end == group.end_needed(len, page_tokens),
            PageKind::Sealed => {
                // Pages after the end of the sealed ones are dense.
                let dense = layout.dense_group(index).and_then(|dense| contents.get(dense));
                let follows = dense.is_some_and(|dense| dense.first <= end.max(needed));
                let end_needed = group.end_needed(len, page_tokens);
                !of.kept && (1..=needed).contains(&of.first) && end <= end_needed.max(of.first) && follows
            }
            PageKind::Dense => {
                let sees_first = group.oldest_seen(len) < page_tokens;
                let has_first = of.kept || of.first == 0 || !sees_first;
                let kept_is_before = !of.kept || of.first > 0;
                // Page 0 may be needed again after truncation, and is the kept one.
                let begins = of.first <= needed.max(usize::from(of.kept));
                has_first && kept_is_before && begins && end == group.end_needed(len, page_tokens)
            }
            PageKind::State { max } => {
                let at_boundary = of.boundary > 0 && of.boundary < len && of.boundary.is_multiple_of(page_tokens);
                let fits = !of.kept || (max > 1 && at_boundary);
                fits && of.first == 0 && end == group.end_needed(len, page_tokens)
            }
        };
        if !fits {
            return wrong();
        }
    }
    Ok(())
}

/// The properties that two pools must share for an import.
pub(super) fn describe(pool: &KvPool) -> HashMap<String, String> {
    let mut metadata = HashMap::from([
        ("format".to_string(), FORMAT.to_string()),
        ("version".to_string(), version(pool).to_string()),
        ("page_tokens".to_string(), pool.spec().page_tokens.to_string()),
        ("layers".to_string(), pool.spec().layers.len().to_string()),
    ]);
    let ranks = pool.device().ranks();
    if ranks > 1 {
        metadata.insert("ranks".to_string(), ranks.to_string());
    }
    for (index, StateLayer { dtype, shape }) in pool.spec().states.iter().enumerate() {
        metadata.insert(format!("state.{index}"), format!("{dtype:?} {shape:?}"));
    }
    for (index, layer) in pool.spec().layers.iter().enumerate() {
        let CacheLayer { kv_heads, head_dim, window, k, v, dense, position_ranks } = layer;
        let window = window.map_or("all".to_string(), |window| window.to_string());
        let (k, v) = (codec_text(*k), codec_text(*v));
        let dense = if layer.seals() { format!(", dense pages {dense:?}") } else { String::new() };
        let has_bias = pool.layer(index).is_ok_and(|layer| layer.key_bias().is_some());
        let bias = if has_bias { " without their bias" } else { "" };
        let division =
            if *position_ranks > 1 { format!(", positions on {position_ranks} ranks") } else { String::new() };
        let text =
            format!("{kv_heads} heads of {head_dim}, window {window}, keys {k}{bias}, values {v}{dense}{division}");
        metadata.insert(format!("layer.{index}"), text);
    }
    metadata
}

fn file(reason: &str) -> Error {
    Error::File { path: "exported sequence".to_string(), reason: reason.to_string() }
}
