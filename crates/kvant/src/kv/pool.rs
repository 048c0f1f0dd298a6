//! The memory of many sequences, and the steps of batches.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    growth::{Change, apply, release, take, undo},
    layout::{LayerGroup, LayerPlace, PageKind, PoolLayout},
    pages::{Page, Pages},
    prefix::Prefixes,
    sequence::{Sequence, SequencePages},
    spec::{CacheLayer, PoolSpec, StateLayer, StepSize},
    step_rows::StepRows,
    step_words::{StepShape, padded, run_words, share_words},
};
use crate::{
    Batch, Codec, DType, Device, Error, HeadOrder, KeyBias, KvLayer, LayerSpec, Planes, Result, Step, Tensor,
    layer::{LayerPages, PAGE_UNIT},
    ops::{self, StateRuns, StateSlots, check},
    position_share::{PositionShare, StepShare},
    step::{StepPages, rank_slots},
};

pub(super) const NAME: &str = "kv_pool";

/// The memory of a pool that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolUsage {
    /// Bytes of all pages.
    pub bytes: usize,
    /// Bytes of pages that a sequence or the prefix cache holds, including states.
    pub used: usize,
    /// Bytes of states that a sequence or the prefix cache holds.
    pub states: usize,
    /// Bytes of host memory that hold evicted prefixes.
    pub host: usize,
}

/// Keys and values of many sequences in all layers of a model, in pages.
///
/// A page holds `page_tokens` consecutive positions of all layers that have the same window. A [`Sequence`] takes pages
/// as it grows, releases those that its windows have passed, and shares them with its forks. All groups of layers take
/// pages from one budget of bytes. Cloning a pool is cheap and gives the same pool.
///
/// A forward pass calls [`KvPool::step`] for a batch of any mixture of sequences and numbers of tokens, then writes and
/// attends with this step in every layer.
///
/// Every call either succeeds completely or returns an error and leaves pool and sequences unchanged.
///
/// ```
/// use kvant::{CacheLayer, Codec, Device, KvPool, PoolSpec};
/// let full = CacheLayer::new(2, 64, Codec::F16);
/// let sliding = full.window(Some(128));
/// let pool = KvPool::new(&Device::cpu(), &PoolSpec::new(vec![sliding, full], 4 << 20))?;
///
/// let (mut a, mut b) = (pool.sequence(), pool.sequence());
/// let step = pool.step(&mut [(&mut a, 20), (&mut b, 7)])?; // two prompts
/// assert_eq!(step.lens().to_vec::<u32>()?, [20, 7]);
/// let mut c = a.fork(); // shares the pages of `a`
/// pool.step(&mut [(&mut a, 1), (&mut c, 4)])?; // one token, and a draft of four
/// c.truncate(22)?; // two tokens of the draft were accepted
/// assert_eq!((a.len(), b.len(), c.len()), (21, 7, 22));
/// drop((a, b, c));
/// assert_eq!(pool.usage().used, 0);
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone)]
pub struct KvPool(Arc<Shared>);

struct Shared {
    id: u64,
    device: Device,
    spec: PoolSpec,
    layout: PoolLayout,
    layers: Vec<KvLayer>,
    states: Vec<StateSlots>,
    /// Maximum length of a sequence: the number of positions that the key biases' turns cover.
    longest: usize,
    memory: Tensor,
    state: Mutex<PoolState>,
}

pub(super) struct PoolState {
    pub pages: Pages,
    pub prefixes: Prefixes,
    /// Kept between steps, so that a step allocates nothing.
    log: Vec<Change>,
    words: Vec<u32>,
}

impl KvPool {
    /// Allocates the memory of a pool. On the CPU, the system maps each page of memory at its first use.
    ///
    /// # Errors
    /// `Value`, `DType` or `Overflow` for an invalid specification; `Value` for a budget below one page per group;
    /// `OutOfMemory`.
    pub fn new(device: &Device, spec: &PoolSpec) -> Result<KvPool> {
        KvPool::with_key_biases(device, spec, Vec::new())
    }

    /// As [`KvPool::new`], for layers whose keys have biases. `biases` has one entry per layer, or is empty. A layer
    /// that seals pages stores quantised keys without the bias. Sequences can then have at most as many tokens as the
    /// biases' turns cover.
    ///
    /// # Errors
    /// As [`KvPool::new`]; `Value` if the number of biases is not that of the layers, or if a bias does not fit the
    /// keys or the page size; `WrongDevice`.
    pub fn with_key_biases(device: &Device, spec: &PoolSpec, biases: Vec<Option<KeyBias>>) -> Result<KvPool> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (layout, places, states) = PoolLayout::new(spec)?;
        let count = biases.is_empty() || biases.len() == spec.layers.len();
        check::value_is(NAME, "biases", count, format_args!("none, or {}", spec.layers.len()), biases.len())?;
        for (bias, layer) in biases.iter().zip(&spec.layers) {
            bias.as_ref().map_or(Ok(()), |bias| bias.check(device, layer, spec.page_tokens))?;
        }
        for layer in &spec.layers {
            let (ranks, fits) = (device.ranks(), [1, device.ranks()].contains(&layer.position_ranks));
            let expected = format_args!("1, or the {ranks} ranks of the device");
            check::value_is(NAME, "position_ranks", fits, expected, layer.position_ranks)?;
        }
        let longest = biases.iter().flatten().map(KeyBias::positions).min().unwrap_or(usize::MAX);
        let bytes = layout.slabs as usize * layout.slab_units as usize * PAGE_UNIT;
        let memory = Tensor::sparse(device, DType::U8, &[bytes])?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let paged = |layer: &CacheLayer, place: &LayerPlace, k, v| {
            let entries = (bytes - layout.groups[place.group].page_bytes) / PAGE_UNIT + 1;
            let CacheLayer { kv_heads, head_dim, window, position_ranks, .. } = *layer;
            let (group, page_tokens) = (place.group, layout.page_tokens / position_ranks);
            let pages = LayerPages { pool: id, group, page_tokens, position_ranks, entries: entries as u32 };
            let (sequences, capacity) = (u32::MAX as usize, u32::MAX as usize);
            let order = HeadOrder::HeadMajor;
            let spec = LayerSpec { sequences, kv_heads, capacity, head_dim, k, v, window, ring: false, order };
            let side = |codec, at| Planes::of_pages(&memory, codec, head_dim, at);
            Ok(KvLayer::paged(spec, pages, side(k, place.planes[0])?, side(v, place.planes[1])?))
        };
        let results = Arc::default();
        let biases = biases.into_iter().chain(std::iter::repeat(None));
        let layers = spec.layers.iter().zip(&places).zip(biases).map(|((layer, (place, dense)), bias)| {
            let whole = paged(layer, place, layer.k, layer.v)?;
            let Some(dense) = dense else { return Ok(whole) };
            let codec = Codec::Dense(layer.dense);
            Ok(whole.with_dense_pages(paged(layer, dense, codec, codec)?, &results).with_key_bias(bias))
        });
        let layers = layers.collect::<Result<_>>()?;
        let state_group = layout.state_group().map(|group| layout.groups[group].page_bytes);
        let slots = state_group.map_or(0, |page| (bytes - page) / PAGE_UNIT + 1);
        let slots = states.into_iter().zip(&spec.states).map(|(first, StateLayer { dtype, shape })| {
            StateSlots::paged(&memory, *dtype, shape, first, slots, PAGE_UNIT)
        });
        let states = slots.collect::<Result<_>>()?;
        let units: Vec<u32> = layout.groups.iter().map(|group| (group.page_bytes / PAGE_UNIT) as u32).collect();
        let pool_state = PoolState {
            pages: Pages::new(layout.slabs, layout.slab_units, &units),
            prefixes: Prefixes::new(spec.host_bytes),
            log: Vec::new(),
            words: Vec::new(),
        };
        let (device, spec, state) = (device.clone(), spec.clone(), Mutex::new(pool_state));
        Ok(KvPool(Arc::new(Shared { id, device, spec, layout, layers, states, longest, memory, state })))
    }

    /// The specification.
    pub fn spec(&self) -> &PoolSpec {
        &self.0.spec
    }

    /// The device that holds the pool.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The keys and values of a layer.
    ///
    /// # Errors
    /// `Value` for a layer that does not exist.
    pub fn layer(&self, index: usize) -> Result<&KvLayer> {
        self.layout().group_of(index)?;
        Ok(&self.0.layers[index])
    }

    /// The states of all sequences in a recurrent layer: entry `index` of [`PoolSpec::states`].
    /// [`Step::runs`](crate::Step::runs) has the slot of each sequence.
    ///
    /// # Errors
    /// `Value` for a state that does not exist.
    pub fn state(&self, index: usize) -> Result<&StateSlots> {
        let states = &self.0.states;
        check::value_is(NAME, "index", index < states.len(), format_args!("below {}", states.len()), index)?;
        Ok(&states[index])
    }

    /// The memory that is in use.
    pub fn usage(&self) -> PoolUsage {
        let state = self.lock();
        let of_group = |group: usize| state.pages.in_use(group) * self.layout().groups[group].page_bytes;
        let used = (0..self.layout().groups.len()).map(of_group).sum();
        let states = self.layout().state_group().map_or(0, of_group);
        PoolUsage { bytes: self.0.memory.bytes(), used, states, host: state.prefixes.host_bytes() }
    }

    /// Maximum bytes of the pages of a sequence of up to `longest` tokens, fed with up to `max_new` tokens at a time.
    /// Includes memory that is lost because pages do not divide a slab evenly.
    pub fn need(&self, longest: usize, max_new: usize) -> usize {
        let layout = self.layout();
        let of_group = |group: &LayerGroup| {
            let pages = group.max_pages(longest, max_new, layout.page_tokens);
            pages.saturating_mul(layout.slab_share(group))
        };
        layout.groups.iter().map(of_group).fold(0, usize::saturating_add)
    }

    /// The part of [`KvPool::need`] that a sequence shares, at any length, with the prefix of `found` tokens that it
    /// continues.
    pub fn shared(&self, found: usize) -> usize {
        let layout = self.layout();
        let pages = |group: &&LayerGroup| match group.kind {
            PageKind::Plain => found / layout.page_tokens,
            PageKind::Sealed => (found / layout.page_tokens).saturating_sub(2),
            PageKind::Dense | PageKind::State { .. } => 0,
        };
        let full = layout.groups.iter().filter(|group| group.window.is_none());
        full.map(|group| pages(&group).saturating_mul(layout.slab_share(group))).fold(0, usize::saturating_add)
    }

    /// Makes an empty sequence, without pages.
    pub fn sequence(&self) -> Sequence {
        Sequence::new(self.clone(), SequencePages::new(self.layout()))
    }

    /// Appends tokens to sequences: `batch` has each sequence and the number of its new tokens, which may be 0. Row i
    /// of the step's lengths and page tables is sequence i of the batch; its tokens get the positions after its last
    /// one. Put sequences with one new token first: GPUs then use decode kernels for them.
    ///
    /// The sequences are longer at once: if the pass that writes the tokens fails, remove them with
    /// [`Sequence::truncate`]. A step is valid until one of its sequences changes.
    ///
    /// Commit operations that write to a sequence before this call: it may copy a page that two sequences share.
    ///
    /// # Errors
    /// - `OutOfPages` with the number of missing pages, counted as if all prefixes were evicted.
    /// - `Value` for a sequence of another pool; `Overflow` for a position beyond u32; `OutOfMemory`, `DeviceFault`.
    pub fn step(&self, batch: &mut [(&mut Sequence, usize)]) -> Result<Step> {
        self.new_step(batch)
    }

    /// A step over positions of sequences, before and after their ends. `batch` has each sequence and its positions.
    /// The sequences keep their lengths. For layers that are written apart from the others, such as those of a model
    /// that drafts tokens.
    ///
    /// A token sees the positions before its own and its own, as if it were the last one of its sequence. Positions
    /// after the end must have been written in such steps. All positions can be written in layers that do not seal
    /// pages; a page that other sequences or prefixes hold is copied before. Pages for positions after the end are
    /// taken, and later used by the sequence's next tokens. Layers that seal pages can be read at positions before the
    /// end, and must not be written. Recurrent states are not affected: [`Step::runs`] is `None`.
    ///
    /// # Errors
    /// As [`KvPool::step`]; `NotHeld` if a layer no longer holds a position that the first one sees. Pool and sequences
    /// are then unchanged.
    pub fn positions(&self, batch: &mut [(&mut Sequence, Range<usize>)]) -> Result<Step> {
        self.new_step(batch)
    }

    /// Makes a step of the rows of a batch.
    fn new_step<R: StepRows>(&self, batch: &mut [R]) -> Result<Step> {
        let (mut tokens, mut longest, mut max_new) = (0usize, 0, 0);
        for rows in &*batch {
            let overflow = Error::Overflow { op: NAME, arg: "batch" };
            let end = rows.start().checked_add(rows.count()).filter(|&end| end < u32::MAX as usize).ok_or(overflow)?;
            (tokens, longest, max_new) =
                (tokens.saturating_add(rows.count()), end.max(longest), max_new.max(rows.count()));
        }
        let (sequences, counts) = (batch.len(), || batch.iter().map(R::count).filter(|&count| count > 0));
        // Sequences without rows are only read.
        let (live, decode) = (counts().count(), counts().take_while(|&count| count == 1).count());
        let step = self.empty_step(StepSize { sequences, tokens, longest, max_new, alone: decode })?;
        let step = step.with_known_batch(Batch { sequences: live, longest, max_new, decode });
        self.rewrite(batch, &step, false)?;
        Ok(step)
    }

    /// Allocates a step for a captured [`Graph`](crate::Graph), which [`KvPool::step_into`] rewrites for each replay.
    /// Its rows are inactive until then.
    ///
    /// # Errors
    /// `Overflow`, `OutOfMemory`.
    pub fn reserve_step(&self, size: StepSize) -> Result<Step> {
        let step = self.empty_step(size)?;
        if let Some(pages) = &step.pages {
            let (shape, mut words) = (StepShape::of(&step, pages), Vec::new());
            shape.fill::<(&mut Sequence, usize)>(&mut words, &[], self.layout().tables());
            shape.base.write(&words)?;
        }
        Ok(step)
    }

    /// As [`KvPool::step`], but rewrites the buffers of an existing step. The batch can have fewer sequences and tokens
    /// than the step: the other rows are inactive.
    ///
    /// # Errors
    /// As [`KvPool::step`]; `Value` for a batch that is larger than the step, and for a step of another pool.
    pub fn step_into(&self, batch: &mut [(&mut Sequence, usize)], step: &Step) -> Result<()> {
        self.rewrite(batch, step, false)
    }

    /// As [`KvPool::step_into`], for a step that was reserved for decoding ([`StepSize::decode`]). Each token gets its
    /// own row of lengths and page tables, as if it were the only token of a sequence that ends with it. A graph of
    /// decode steps can therefore also verify drafts. Attention reads the keys of a sequence once for each of its
    /// tokens.
    ///
    /// # Errors
    /// As [`KvPool::step_into`]; `Value` for more tokens of a sequence than positions of a page, if a layer seals
    /// pages.
    pub fn tokens_into(&self, batch: &mut [(&mut Sequence, usize)], step: &Step) -> Result<()> {
        self.rewrite(batch, step, true)
    }

    /// As [`KvPool::positions`], but rewrites the buffers of an existing step, in which each position gets its own row
    /// of lengths and page tables, as in [`KvPool::tokens_into`].
    ///
    /// # Errors
    /// As [`KvPool::positions`]; `Value` for a batch that is larger than the step, and for a step of another pool.
    pub fn positions_into(&self, batch: &mut [(&mut Sequence, Range<usize>)], step: &Step) -> Result<()> {
        self.rewrite(batch, step, true)
    }

    /// Rewrites a step. `is_unrolled`: each token gets a row.
    fn rewrite<R: StepRows>(&self, batch: &mut [R], step: &Step, is_unrolled: bool) -> Result<()> {
        let Some(of_pool) = step.pages.as_ref().filter(|pages| pages.pool == self.0.id) else {
            return check::value_is(NAME, "step", false, "a step of this pool", "another");
        };
        let shape = StepShape { is_unrolled, ..StepShape::of(step, of_pool) };
        self.check_batch(batch, step, &shape)?;
        let mut state = self.lock();
        self.take_pages(&mut state, batch)?;
        let written = self.write_step(&mut state, batch, &shape);
        let PoolState { pages, log, words, .. } = &mut *state;
        if let Err(error) = written {
            undo(pages, log, 0);
            return Err(error);
        }
        apply(log, batch);
        let mut written = of_pool.lock();
        written.clear();
        written.are_positions = !R::APPENDS;
        written.tokens.extend_from_slice(&words[..shape.at_sequence() + shape.tokens]);
        for rows in batch {
            let count = rows.count();
            if R::APPENDS && count > 0 {
                let pages = rows.pages_mut();
                pages.len += count;
                pages.changed();
                self.move_to_huge_pages(pages);
            }
            written.stamps.push(rows.pages().stamp());
        }
        Ok(())
    }

    /// Checks a batch against the limits of its step.
    fn check_batch<R: StepRows>(&self, batch: &[R], step: &Step, shape: &StepShape) -> Result<()> {
        let StepShape { tokens: max_tokens, sequences, width, .. } = *shape;
        let limits = step.batch();
        let longest = limits.longest.min(width * self.layout().page_tokens).min(self.0.longest);
        // An unrolled sequence has a row for each token.
        let max_new = match shape.is_unrolled {
            // Pages are sealed before the pass, not within it.
            true if R::APPENDS && self.layout().seals() => max_tokens.min(self.layout().page_tokens),
            true => max_tokens,
            false => limits.max_new,
        };
        let (mut tokens, mut live, mut alone, mut rows) = (0usize, 0usize, 0, 0usize);
        for of in batch {
            let (sequence, count, own_rows) = (of.sequence(), of.count(), shape.rows(of.count()));
            (live, rows) = (live.saturating_add(own_rows.min(count)), rows.saturating_add(own_rows));
            let own = sequence.pool() == self;
            check::value_is(NAME, "batch", own, "sequences of this pool", "one of another pool")?;
            check::at_most(NAME, "batch (tokens of a sequence)", count, max_new)?;
            let len = of.start().saturating_add(count);
            check::at_most(NAME, "batch (length of a sequence)", len, longest)?;
            if !R::APPENDS && count > 0 {
                sequence.pages.check_seen(self.layout(), of.start().min(sequence.len()))?;
            }
            let are_alone = alone == tokens && (shape.is_unrolled || count == 1);
            alone += if are_alone { count } else { 0 };
            tokens = tokens.saturating_add(count);
        }
        check::at_most(NAME, "batch", rows, sequences)?;
        let is_alone = alone >= limits.decode.min(tokens);
        let first = format_args!("{} leading tokens that are the only ones of their sequences", limits.decode);
        check::value_is(NAME, "batch", is_alone, first, alone)?;
        check::at_most(NAME, "batch (sequences with tokens)", live, limits.sequences)?;
        check::at_most(NAME, "batch (tokens)", tokens, max_tokens)
    }

    /// Takes the pages of a batch and logs the changes. Evicts prefixes if that frees enough pages.
    fn take_pages<R: StepRows>(&self, state: &mut PoolState, batch: &[R]) -> Result<()> {
        let PoolState { pages, prefixes, log, .. } = state;
        let layout = self.layout();
        release(pages, layout, batch, log);
        let released = log.len();
        if take(pages, layout, batch, log) == 0 {
            return Ok(());
        }
        undo(pages, log, released);
        // Prefixes may hold the released pages alone now, and be evicted.
        let room = prefixes.make_room(pages, self, |trial| {
            let missing = take(trial, layout, batch, log);
            log.truncate(released);
            missing
        });
        if let Err(error) = room {
            undo(pages, log, 0);
            return Err(error);
        }
        let missing = take(pages, layout, batch, log);
        debug_assert_eq!(missing, 0);
        Ok(())
    }

    /// Copies shared pages and uploads the step.
    fn write_step<R: StepRows>(&self, state: &mut PoolState, batch: &[R], shape: &StepShape) -> Result<()> {
        let mut copies = state.log.iter().filter_map(|change| match *change {
            Change::Copied { group, from, to, .. } => Some((self.page(group, from), self.page(group, to))),
            _ => None,
        });
        if let Some(first) = copies.next() {
            let mut enc = self.0.device.encoder()?;
            for (from, to) in std::iter::once(first).chain(copies) {
                ops::copy(&mut enc, &from?, &to?)?;
            }
            // No need to wait: later operations on these pages run after it.
            drop(enc.commit()?);
        }
        let PoolState { log, words, .. } = state;
        let tables = self.layout().tables();
        shape.fill(words, batch, tables);
        shape.fill_pages(words, log, batch, tables);
        let sealed = self.seal_in_pass(words, log, batch, shape);
        shape.repeat_tables(words, batch, tables);
        shape.base.write(words)?;
        self.seal_now(&sealed)
    }

    /// Writes the pages that this pass fills and seals to the step's words. Returns the pages that must be sealed
    /// before the pass, with their groups: earlier passes filled them, or the step has no row left for them.
    fn seal_in_pass<R: StepRows>(
        &self,
        words: &mut [u32],
        log: &[Change],
        batch: &[R],
        shape: &StepShape,
    ) -> Vec<(usize, [u32; 3])> {
        // Most steps seal nothing: their vectors stay empty and unallocated.
        let (mut now, mut next) = (Vec::new(), Vec::new());
        for change in log {
            let Change::New { sequence, group, index, page } = *change else { continue };
            let Some(dense) = self.layout().dense_group(group) else { continue };
            next.resize(self.layout().groups.len(), 0);
            let from = words[shape.table_row(dense, shape.first_row(batch, sequence)) + index];
            // Each page that the pass seals is filled by its new tokens, so that `shape.seals` rows suffice.
            let row = [from, page, index as u32];
            if index < batch[sequence].start() / self.layout().page_tokens || next[group] == shape.seals {
                now.push((group, row));
                continue;
            }
            let at = shape.at_seals(self.layout().sealed_before(group), self.layout().tables()) + 3 * next[group];
            words[at..at + 3].copy_from_slice(&row);
            next[group] += 1;
        }
        now
    }

    /// Seals pages at once, in all layers of their groups.
    fn seal_now(&self, sealed: &[(usize, [u32; 3])]) -> Result<()> {
        if sealed.is_empty() {
            return Ok(());
        }
        let mut enc = self.0.device.encoder()?;
        for group in 0..self.layout().groups.len() {
            let pages: Vec<u32> = sealed.iter().filter(|(of, _)| *of == group).flat_map(|(_, pages)| *pages).collect();
            if pages.is_empty() {
                continue;
            }
            let pages = Tensor::from_slice(&self.0.device, &pages, &[pages.len() / 3, 3])?;
            for (layer, _) in self.0.layers.iter().zip(&self.layout().layer_groups).filter(|(_, of)| **of == group) {
                ops::seal::seal(&mut enc, layer, &pages)?;
            }
        }
        // No need to wait: later operations on these pages run after it.
        drop(enc.commit()?);
        Ok(())
    }

    /// Moves the full pages of a sequence to huge pages of the host's memory, which are faster to read.
    fn move_to_huge_pages(&self, pages: &mut SequencePages) {
        let full = pages.len / self.layout().page_tokens;
        for (group, held) in pages.groups.iter_mut().enumerate() {
            let full = full.min(held.end());
            for index in held.huge_end.max(held.first)..full {
                let page = held.pages.get(index - held.first).map(|&page| self.page(group, page));
                if let Some(Ok(memory)) = page {
                    crate::host::move_to_huge_pages(&memory);
                }
            }
            held.huge_end = full;
        }
    }

    /// Allocates a step without contents.
    fn empty_step(&self, size: StepSize) -> Result<Step> {
        let StepSize { sequences, tokens, longest, max_new, alone } = size;
        let groups = self.layout().tables();
        check::at_most(NAME, "sequences", sequences, u32::MAX as usize - 1)?;
        let width = longest.div_ceil(self.layout().page_tokens);
        let overflow = || Error::Overflow { op: NAME, arg: "sequences" };
        let table = sequences.checked_mul(width).and_then(padded).ok_or_else(overflow)?;
        let [at_sequence, at_lens] = [1, 2].map(|n| padded(tokens)?.checked_mul(n));
        let (at_sequence, at_lens) = (at_sequence.ok_or_else(overflow)?, at_lens.ok_or_else(overflow)?);
        let at_tables = padded(sequences).and_then(|n| n.checked_add(at_lens)).ok_or_else(overflow)?;
        let at_seals = table.checked_mul(groups).and_then(|n| n.checked_add(at_tables)).ok_or_else(overflow)?;
        let page_tokens = self.layout().page_tokens;
        let sealing = (0..groups).filter(|&group| self.layout().dense_group(group).is_some()).count();
        // Otherwise the pool seals before the pass.
        let seals = if max_new > page_tokens { tokens.div_ceil(page_tokens).checked_add(sequences) } else { Some(0) };
        let of_group = seals.and_then(|n| padded(n.checked_mul(3)?)).ok_or_else(overflow)?;
        let at_runs = of_group.checked_mul(sealing).and_then(|n| n.checked_add(at_seals)).ok_or_else(overflow)?;
        let of_runs =
            if self.0.states.is_empty() { [0; 4] } else { run_words(tokens, sequences).ok_or_else(overflow)? };
        // Positions, two kinds of sequences, and lengths of each rank.
        let ranks = self.position_ranks();
        let of_rank = share_words(tokens, sequences).and_then(|words| words.iter().sum::<usize>().checked_mul(ranks));
        let at_shares = at_runs;
        let at_runs = of_rank.and_then(|words| words.checked_add(at_shares)).ok_or_else(overflow)?;
        let [at_past, at_slots, at_after, total] = {
            let mut end = at_runs;
            let ends = of_runs.map(|words| {
                end = end.saturating_add(words);
                end
            });
            check::at_most(NAME, "sequences", end, usize::MAX - 1)?;
            ends
        };
        let base = Tensor::zeros(&self.0.device, DType::U32, &[total])?;
        let part = |first: usize, len: usize| base.rows(first..first + len);
        let tables =
            (0..groups).map(|group| part(at_tables + group * table, sequences * width)?.reshape(&[sequences, width]));
        let seals = (0..groups).map(|group| {
            let room = if self.layout().dense_group(group).is_some() { seals.unwrap_or(0) } else { 0 };
            let first = at_seals + self.layout().sealed_before(group) * of_group;
            part(first, 3 * room)?.reshape(&[room, 3])
        });
        let pages = StepPages {
            pool: self.0.id,
            tables: tables.collect::<Result<_>>()?,
            seals: seals.collect::<Result<_>>()?,
            runs: match self.0.states.is_empty() {
                true => None,
                false => {
                    let starts = part(at_runs, sequences + 1)?;
                    let (past, slots) = (part(at_past, sequences)?, part(at_slots, sequences)?);
                    Some(StateRuns::from_tensors(starts, slots, past, part(at_after, tokens)?, max_new))
                }
            },
            shares: self.step_shares(&base, at_shares, [tokens, sequences])?,
            written: Mutex::default(),
            of_ranks: rank_slots(&self.0.device),
            base: base.clone(),
        };
        let step = Step::from_tensors(part(0, tokens)?, part(at_sequence, tokens)?, part(at_lens, sequences)?);
        let batch = Batch { sequences, longest, max_new, decode: alone };
        Ok(step.with_pages(pages).with_known_batch(batch))
    }

    /// The number of ranks that divide positions; 0 if no layer is divided.
    fn position_ranks(&self) -> usize {
        let is_divided = |layer: &CacheLayer| layer.position_ranks > 1;
        if self.spec().layers.iter().any(is_divided) { self.0.device.ranks() } else { 0 }
    }

    /// The shares of all ranks of a step, from a word of its memory on.
    fn step_shares(&self, base: &Tensor, first: usize, [tokens, sequences]: [usize; 2]) -> Result<Vec<StepShare>> {
        let ranks = self.position_ranks();
        let share = |rank| {
            let [of_tokens, .., of_lens] = share_words(tokens, sequences).expect("the step's size has been checked");
            let at = first + rank * (3 * of_tokens + of_lens);
            let part = |index: usize, len: usize| base.rows(at + index * of_tokens..at + index * of_tokens + len);
            Ok(StepShare {
                share: PositionShare { page_tokens: self.layout().page_tokens, ranks, rank },
                positions: part(0, tokens)?,
                seen: part(1, tokens)?,
                stored: part(2, tokens)?,
                lens: part(3, sequences)?,
            })
        };
        (0..ranks).map(share).collect()
    }

    pub(super) fn layout(&self) -> &PoolLayout {
        &self.0.layout
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PoolState> {
        // A panic elsewhere leaves the state consistent: changes are applied at once.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(all(test, target_os = "linux"))]
    pub(super) fn memory(&self) -> &Tensor {
        &self.0.memory
    }

    /// Bytes of a page that is saved in host memory: those of all ranks of the device, one after the other.
    pub(super) fn saved_page_bytes(&self, group: usize) -> usize {
        self.layout().groups[group].page_bytes.saturating_mul(self.device().ranks())
    }

    /// Reads a page into `out`, which has [`KvPool::saved_page_bytes`] bytes.
    pub(super) fn save_page(&self, group: usize, page: Page, out: &mut [u8]) -> Result<()> {
        let memory = self.page(group, page)?;
        let mut ranks = out.chunks_exact_mut(memory.bytes()).enumerate();
        ranks.try_for_each(|(rank, out)| memory.on_rank(rank)?.read_bytes(out))
    }

    /// Overwrites a page with the bytes that [`KvPool::save_page`] read.
    pub(super) fn load_page(&self, group: usize, page: Page, saved: &[u8]) -> Result<()> {
        let memory = self.page(group, page)?;
        let mut ranks = saved.chunks_exact(memory.bytes()).enumerate();
        ranks.try_for_each(|(rank, bytes)| memory.on_rank(rank)?.write_bytes(bytes))
    }

    /// The memory of a page.
    fn page(&self, group: usize, page: Page) -> Result<Tensor> {
        let first = page as usize * PAGE_UNIT;
        self.0.memory.rows(first..first + self.layout().groups[group].page_bytes)
    }
}

impl PartialEq for KvPool {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for KvPool {}

impl std::fmt::Debug for KvPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvPool({} layers on {})", self.0.layers.len(), self.0.device)
    }
}
