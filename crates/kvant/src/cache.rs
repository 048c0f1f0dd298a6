//! The cache of a model: one [`KvLayer`] per layer, and the length of each sequence.

use crate::{
    Codec, DType, Device, Error, KvLayer, LayerSpec, Planes, Result, SlotOrder, Step, Tensor,
    ops::{self, check},
};

mod snapshot;
#[cfg(test)]
mod tests;

pub use snapshot::LOAD_LIMIT;

const NAME: &str = "kv_cache";

/// The specification of a [`KvCache`].
#[derive(Clone, Debug, PartialEq)]
pub struct CacheSpec {
    /// One entry per layer.
    pub layers: Vec<CacheLayer>,
    /// The number of independent sequences, S.
    pub sequences: usize,
    /// The number of tokens per sequence in a linear layer (a layer without a window). It must fit in u32. If all
    /// layers have windows, it has no effect: sequences can grow until positions overflow u32.
    pub capacity: usize,
    /// Slots of a ring in addition to its window. With a slack of n, the last n + 1 tokens that a sequence has ever
    /// had can always be truncated ([`KvCache::truncate`]), and n + 1 tokens can always be appended to a sequence at
    /// once ([`KvCache::max_batch`]).
    pub slack: usize,
}

/// One layer of a [`CacheSpec`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheLayer {
    /// KV heads, Hk.
    pub kv_heads: usize,
    /// Coordinates of a key or value, D.
    pub head_dim: usize,
    /// How many positions a token sees, itself included; `None` for all. [`attend`](ops::attend()) applies it. A
    /// layer with a window is a ring of window + slack slots. If the linear layers limit sequences to that many
    /// tokens or fewer, the layer is linear.
    pub window: Option<usize>,
    /// The codec of keys.
    pub k: Codec,
    /// The codec of values.
    pub v: Codec,
}

/// The memory of one layer of a [`KvCache`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerBytes {
    /// The codec of keys.
    pub k: Codec,
    /// Bytes of the keys.
    pub k_bytes: usize,
    /// The codec of values.
    pub v: Codec,
    /// Bytes of the values.
    pub v_bytes: usize,
}

/// Keys and values of several sequences in all layers of a model, with the lengths of the sequences.
///
/// The constructor allocates all memory. A forward pass calls [`KvCache::append`], which returns a [`Step`] with the
/// positions of the new tokens, then writes and attends with this step in every layer. Layers with a window are rings
/// that hold the last window + slack positions. The cache records which positions a ring has overwritten, and refuses
/// requests that need them.
///
/// Every call either succeeds completely or returns an error and leaves the cache unchanged.
///
/// ```
/// use kvant::{CacheLayer, CacheSpec, Codec, Device, KvCache};
/// let global = CacheLayer { kv_heads: 2, head_dim: 64, window: None, k: Codec::tq(6), v: Codec::tq(4) };
/// let sliding = CacheLayer { window: Some(128), k: Codec::F16, v: Codec::F16, ..global };
/// let spec = CacheSpec { layers: vec![sliding, global], sequences: 1, capacity: 4096, slack: 31 };
/// let mut cache = KvCache::new(&Device::cpu(), &spec)?;
///
/// let step = cache.append(&[(0, 20)])?; // a prompt of 20 tokens
/// assert_eq!(step.positions.to_vec::<u32>()?[19], 19);
/// let step = cache.append(&[(0, 4)])?; // one token and a draft of three
/// cache.truncate(0, 22)?; // one token of the draft was accepted
/// assert_eq!(cache.len(0)?, 22);
/// assert!(cache.bytes() < cache.bytes_as(Codec::F16));
/// # Ok::<(), kvant::Error>(())
/// ```
pub struct KvCache {
    device: Device,
    spec: CacheSpec,
    layers: Vec<KvLayer>,
    sequences: Vec<Sequence>,
    /// The buffers of [`KvCache::append_into`], kept so that a step allocates nothing.
    spare: (Vec<Sequence>, Rows),
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sequence {
    /// The number of tokens.
    len: usize,
    /// The largest length since the sequence was last empty; 0 exactly when `len` is 0. A ring of n slots holds the
    /// positions from `written - n` on: truncation does not restore overwritten slots.
    written: usize,
}

impl KvCache {
    /// Allocates an empty cache.
    ///
    /// # Errors
    /// `Value`, `DType` or `Overflow` for an invalid specification; `OutOfMemory`.
    pub fn new(device: &Device, spec: &CacheSpec) -> Result<KvCache> {
        let layers = layer_specs(spec)?;
        let layers = layers.into_iter().map(|layer| KvLayer::new(device, layer)).collect::<Result<_>>()?;
        let mut sequences = Vec::new();
        let bytes = spec.sequences.saturating_mul(size_of::<Sequence>());
        sequences
            .try_reserve_exact(spec.sequences)
            .map_err(|_| Error::OutOfMemory { device: device.to_string(), bytes })?;
        sequences.resize(spec.sequences, Sequence::default());
        Ok(KvCache { device: device.clone(), spec: spec.clone(), layers, sequences, spare: Default::default() })
    }

    /// The specification.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// The device that holds the cache.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The keys and values of a layer.
    pub fn layer(&self, index: usize) -> Result<&KvLayer> {
        let below = || format!("below {}", self.layers.len());
        self.layers.get(index).ok_or_else(|| value("layer", below(), index))
    }

    /// The number of tokens of a sequence.
    pub fn len(&self, sequence: usize) -> Result<usize> {
        Ok(self.sequence(sequence)?.len)
    }

    /// Appends tokens to sequences. `tokens` are (sequence, count) pairs, in the order of the step's tokens. A
    /// sequence's new tokens get the positions after its last one.
    ///
    /// After the step's keys and values are written, each of its tokens finds its complete window in every layer. The
    /// new tokens count from now on: if the pass that should write them fails, remove them with
    /// [`KvCache::truncate`].
    ///
    /// # Errors
    /// - `CacheFull` if a linear layer has too few free slots, or if positions would overflow u32.
    /// - `Value` if the batch is so long that a ring would overwrite positions that its first token sees. Up to
    ///   [`KvCache::max_batch`] tokens per sequence always fit; [`KvCache::room`] returns how many fit now;
    ///   [`KvCache::append_fresh`] accepts any number.
    pub fn append(&mut self, tokens: &[(usize, usize)]) -> Result<Step> {
        let (mut after, mut rows) = <(Vec<Sequence>, Rows)>::default();
        self.after(tokens, true, &mut after)?;
        rows.fill(&self.device, &self.sequences, tokens)?;
        let step = rows.upload(&self.device)?;
        self.sequences = after;
        Ok(step)
    }

    /// As [`KvCache::append`], but rewrites the buffers of an existing step, for a captured [`Graph`](crate::Graph).
    ///
    /// The number of tokens must be the step's. Commit operations that use the step before this call: operations that
    /// are still recorded would read the new tokens.
    pub fn append_into(&mut self, tokens: &[(usize, usize)], step: &Step) -> Result<()> {
        let (mut after, mut rows) = std::mem::take(&mut self.spare);
        let result = self.write_step(tokens, step, &mut after, &mut rows);
        if result.is_ok() {
            std::mem::swap(&mut self.sequences, &mut after);
        }
        self.spare = (after, rows);
        result
    }

    fn write_step(
        &self,
        tokens: &[(usize, usize)],
        step: &Step,
        after: &mut Vec<Sequence>,
        rows: &mut Rows,
    ) -> Result<()> {
        self.after(tokens, true, after)?;
        rows.fill(&self.device, &self.sequences, tokens)?;
        step.validate(NAME, rows.positions.len(), after.len())?;
        for (arg, tensor) in
            [("step.positions", &step.positions), ("step.sequence", &step.sequence), ("step.lens", &step.lens)]
        {
            if tensor.device() != &self.device {
                let (expected, got) = (self.device.to_string(), tensor.device().to_string());
                return Err(Error::WrongDevice { op: NAME, arg, expected, got });
            }
        }
        step.positions.write(&rows.positions)?;
        step.sequence.write(&rows.sequence)?;
        step.lens.write(&rows.lens)
    }

    /// As [`KvCache::append`], for a batch of any length. The tokens attend to their raw keys and values
    /// ([`Fresh`](ops::Fresh)), which are written to the cache afterwards.
    ///
    /// Also returns `past` for `Fresh`: u32 `[S]`, the lengths before the call.
    ///
    /// A batch of more than [`KvCache::max_batch`] tokens may count as having overwritten positions of the rings,
    /// even if its pass fails before it writes. [`KvCache::truncate`] then cannot restore the previous length.
    /// [`KvCache::fork`] the sequence first if that must not happen.
    ///
    /// # Errors
    /// `CacheFull`, as for [`KvCache::append`].
    pub fn append_fresh(&mut self, tokens: &[(usize, usize)]) -> Result<(Step, Tensor)> {
        let (mut after, mut rows) = <(Vec<Sequence>, Rows)>::default();
        self.after(tokens, false, &mut after)?;
        let past: Vec<u32> = self.sequences.iter().map(|sequence| sequence.len as u32).collect();
        let past = Tensor::from_slice(&self.device, &past, &[past.len()])?;
        rows.fill(&self.device, &self.sequences, tokens)?;
        let step = rows.upload(&self.device)?;
        self.sequences = after;
        Ok((step, past))
    }

    /// The number of tokens of one sequence that can always be appended at once, if the capacity permits: slack + 1
    /// if there are rings, else the capacity.
    pub fn max_batch(&self) -> usize {
        let rings = self.rings().map(|(_, window, slots)| slots - window + 1);
        rings.min().unwrap_or(self.spec.capacity)
    }

    /// The number of tokens that can be appended to a sequence at once now.
    pub fn room(&self, sequence: usize) -> Result<usize> {
        let sequence = self.sequence(sequence)?;
        Ok(self.ring_room(sequence).min(self.limit() - sequence.len))
    }

    /// Truncates a sequence to its first `len` tokens.
    ///
    /// Removing up to slack + 1 tokens always succeeds. The count includes tokens that were removed before and not
    /// written again. Truncating to 0 always succeeds.
    ///
    /// # Errors
    /// - `Value` if the sequence has fewer than `len` tokens.
    /// - `RingOverwritten` if a ring no longer holds all positions that the next token would see.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        let now = self.sequence(sequence)?;
        check::value_is(NAME, "len", len <= now.len, format_args!("at most the length {}", now.len), len)?;
        if len == 0 {
            return self.clear(sequence);
        }
        let after = Sequence { len, ..now };
        if let Some((layer, needed, oldest)) = self.lost(after) {
            return Err(Error::RingOverwritten { sequence, layer, needed, oldest });
        }
        self.sequences[sequence] = after;
        Ok(())
    }

    /// Copies a sequence to another one, which must be empty. Commit operations that write to the sequence before
    /// this call: writes that an [`Encoder`](crate::Encoder) has only recorded are not copied.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<()> {
        let source = self.sequence(from)?;
        let target = self.sequence(to)?;
        check::value_is(
            NAME,
            "to",
            target.len == 0,
            "an empty sequence",
            format_args!("a sequence of {} tokens", target.len),
        )?;
        let mut enc = self.device.encoder()?;
        for layer in &self.layers {
            let used = used_slots(layer, source);
            for planes in [&layer.k, &layer.v] {
                for (_, plane) in planes.tensors() {
                    for (from, to) in used_rows(layer, from, used).zip(used_rows(layer, to, used)) {
                        ops::copy(&mut enc, &plane.rows(from)?, &plane.rows(to)?)?;
                    }
                }
            }
        }
        enc.commit()?.wait()?;
        self.sequences[to] = source;
        Ok(())
    }

    /// Empties a sequence.
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.sequence(sequence)?;
        self.sequences[sequence] = Sequence::default();
        Ok(())
    }

    /// The positions of a sequence that a layer still holds, and that [`kv_read`](ops::kv_read()) can return. On a
    /// ring, the range starts after the overwritten positions; removed tokens have also overwritten positions. On a
    /// ring of window 1, the range can be shorter than the positions in the ring.
    pub fn held(&self, sequence: usize, layer: usize) -> Result<std::ops::Range<usize>> {
        let (sequence, spec) = (self.sequence(sequence)?, self.layer(layer)?.spec());
        let first = if spec.ring { sequence.written.saturating_sub(spec.capacity) } else { 0 };
        Ok(first.min(sequence.len)..sequence.len)
    }

    /// Bytes of all layers.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(KvLayer::bytes).sum()
    }

    /// The codecs and bytes of each layer.
    pub fn layer_bytes(&self) -> Vec<LayerBytes> {
        let bytes = |layer: &KvLayer| {
            let (k, v): (&Planes, &Planes) = (&layer.k, &layer.v);
            LayerBytes { k: k.codec(), k_bytes: k.bytes(), v: v.codec(), v_bytes: v.bytes() }
        };
        self.layers.iter().map(bytes).collect()
    }

    /// Bytes that the same slots would take if `codec` stored all keys and values.
    pub fn bytes_as(&self, codec: Codec) -> usize {
        let bytes = |layer: &KvLayer| {
            let s = layer.spec();
            (s.sequences * s.kv_heads * s.capacity).saturating_mul(2).saturating_mul(codec.bytes_per_vector(s.head_dim))
        };
        self.layers.iter().map(bytes).fold(0, usize::saturating_add)
    }

    fn sequence(&self, sequence: usize) -> Result<Sequence> {
        let below = || format!("below {}", self.sequences.len());
        self.sequences.get(sequence).copied().ok_or_else(|| value("sequence", below(), sequence))
    }

    /// The layers that wrap: (index, window, slots).
    fn rings(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let layers = self.layers.iter().zip(&self.spec.layers).enumerate();
        layers.filter(|(_, (layer, _))| layer.spec().ring).filter_map(|(index, (layer, spec))| {
            let slots = layer.spec().capacity;
            Some((index, spec.window?, slots))
        })
    }

    /// The first layer that no longer holds all positions that the next token of the sequence sees, the token itself
    /// excluded. Returns the layer, the oldest position that the token sees, and the oldest position that is held.
    fn lost(&self, sequence: Sequence) -> Option<(usize, usize, usize)> {
        let mut layers = self.rings().map(|(layer, window, slots)| {
            (layer, oldest_seen(sequence.len, window), sequence.written.saturating_sub(slots))
        });
        layers.find(|&(_, needed, oldest)| needed < sequence.len && needed < oldest)
    }

    /// The longest length of a sequence.
    fn limit(&self) -> usize {
        length_limit(&self.spec)
    }

    /// The number of tokens that the rings can take at once. Appending n tokens keeps the positions from max(written,
    /// len + n) − slots on, and the first new token sees those from `oldest_seen(len)` on.
    fn ring_room(&self, sequence: Sequence) -> usize {
        let room = |(_, window, slots)| oldest_seen(sequence.len, window) + slots - sequence.len;
        self.rings().map(room).min().unwrap_or(usize::MAX)
    }

    /// Sets `after` to the sequences after appending `tokens`, or returns why that is impossible.
    fn after(&self, tokens: &[(usize, usize)], through_cache: bool, after: &mut Vec<Sequence>) -> Result<()> {
        after.clone_from(&self.sequences);
        for &(index, count) in tokens {
            let before = self.sequence(index)?;
            let len = after[index].len.checked_add(count).ok_or(Error::Overflow { op: NAME, arg: "tokens" })?;
            let added = len - before.len;
            let capacity = self.limit();
            if len > capacity {
                return Err(Error::CacheFull { sequence: index, len: before.len, tokens: added, capacity });
            }
            if through_cache && added > self.ring_room(before) {
                let room = self.ring_room(before);
                let expected = format!(
                    "at most {room} for sequence {index} at once, or its rings would overwrite positions that the \
                     first new token sees (use smaller batches or append_fresh)"
                );
                return Err(value("tokens", expected, added));
            }
            after[index] = Sequence { len, written: before.written.max(len) };
        }
        Ok(())
    }
}

/// The contents of a step's buffers.
#[derive(Default)]
struct Rows {
    positions: Vec<u32>,
    sequence: Vec<u32>,
    lens: Vec<u32>,
}

impl Rows {
    /// Fills the buffers for `tokens` appended to `before`. Lengths fit in u32.
    fn fill(&mut self, device: &Device, before: &[Sequence], tokens: &[(usize, usize)]) -> Result<()> {
        let Rows { positions, sequence, lens } = self;
        positions.clear();
        sequence.clear();
        lens.clear();
        // The caller chooses the count, so the allocation can fail.
        let count = tokens.iter().fold(0, |sum: usize, &(_, count)| sum.saturating_add(count));
        for rows in [&mut *positions, &mut *sequence] {
            let bytes = count.saturating_mul(size_of::<u32>());
            rows.try_reserve(count).map_err(|_| Error::OutOfMemory { device: device.to_string(), bytes })?;
        }
        lens.extend(before.iter().map(|sequence| sequence.len as u32));
        for &(index, count) in tokens {
            let end = lens[index] + count as u32;
            positions.extend(lens[index]..end);
            sequence.resize(positions.len(), index as u32);
            lens[index] = end;
        }
        Ok(())
    }

    fn upload(&self, device: &Device) -> Result<Step> {
        let tensor = |data: &[u32]| Tensor::from_slice(device, data, &[data.len()]);
        Ok(Step { positions: tensor(&self.positions)?, sequence: tensor(&self.sequence)?, lens: tensor(&self.lens)? })
    }
}

/// The oldest position that a token at `position` sees.
fn oldest_seen(position: usize, window: usize) -> usize {
    (position + 1).saturating_sub(window)
}

/// The longest length of a sequence: the capacity of its linear layers, or else the range of u32.
fn length_limit(spec: &CacheSpec) -> usize {
    let linear = spec.layers.iter().any(|layer| layer.window.is_none());
    if linear { spec.capacity } else { u32::MAX as usize }
}

/// The layers of a specification. Allocates no device memory.
fn layer_specs(spec: &CacheSpec) -> Result<Vec<LayerSpec>> {
    check::value_is(NAME, "layers", !spec.layers.is_empty(), "at least one layer", 0)?;
    check::at_most(NAME, "capacity", spec.capacity, u32::MAX as usize)?;
    check::at_most(NAME, "sequences", spec.sequences, u32::MAX as usize)?;
    let layer = |layer: &CacheLayer| {
        let mut ring = false;
        let mut capacity = spec.capacity;
        if let Some(window) = layer.window {
            check::positive(NAME, "window", window)?;
            let slots = window.checked_add(spec.slack).ok_or(Error::Overflow { op: NAME, arg: "window" })?;
            ring = slots < length_limit(spec);
            capacity = slots.min(length_limit(spec));
        }
        let (sequences, order) = (spec.sequences, SlotOrder::HeadMajor);
        let CacheLayer { kv_heads, head_dim, window, k, v } = *layer;
        Ok(LayerSpec { sequences, kv_heads, capacity, head_dim, k, v, window, ring, order })
    };
    spec.layers.iter().map(layer).collect()
}

/// The number of slots per head that hold data of a sequence. They are the first slots until a ring has wrapped.
fn used_slots(layer: &KvLayer, sequence: Sequence) -> usize {
    let spec = layer.spec();
    if spec.ring { sequence.written.min(spec.capacity) } else { sequence.len }
}

/// The rows of those slots, head by head.
fn used_rows(layer: &KvLayer, sequence: usize, used: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..layer.spec().kv_heads).map(move |head| {
        let first = layer.row(sequence, head, 0);
        first..first + used
    })
}

fn value(arg: &'static str, expected: String, got: usize) -> Error {
    Error::Value { op: NAME, arg, expected, got: got.to_string() }
}
