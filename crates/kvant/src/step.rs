//! The positions of one step's tokens.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    DType, Device, Encoder, Error, KvLayer, Result, Tensor,
    encoder::{Access, Touch},
    group::{Rank, RankTensors},
    layer::PageTable,
    ops::{self, StateRuns, check},
    position_share::StepShare,
};

/// The tokens of one forward pass: T tokens of up to S sequences, each with its own position.
///
/// [`KvPool`](crate::KvPool) makes steps for its layers; for layers with memory of their own, an engine makes them
/// itself. Positions, sequences, lengths and page tables are on the device, so that a captured [`Graph`](crate::Graph)
/// reads the new values when they are rewritten. [`Step::batch`] has the host's knowledge of them.
///
/// No two tokens may have the same sequence and position. If two do, the contents of their slot are unspecified (on a
/// GPU, a mix of both).
///
/// A row whose sequence is [`Step::INACTIVE`] is inactive on every device: nothing is stored for it, and
/// [`attend`](crate::ops::attend()) writes zeros. A position without a page, or whose entry in the page table is not a
/// page of the pool, is neither written nor seen.
///
/// On the CPU, any other entry that is out of range is an error when the operation runs
/// ([`Encoder::commit`](crate::Encoder::commit)). A GPU kernel skips the token, or writes zeros for it if the
/// operation's documentation says so. It never reads or writes outside the layer.
#[derive(Clone, Debug)]
pub struct Step {
    pub(crate) positions: Tensor,
    pub(crate) sequence: Tensor,
    pub(crate) lens: Tensor,
    pub(crate) pages: Option<Arc<StepPages>>,
    batch: Batch,
}

impl RankTensors for Step {
    fn move_to(&mut self, rank: &Rank) {
        for tensor in [&mut self.positions, &mut self.sequence, &mut self.lens] {
            tensor.move_to(rank);
        }
        self.pages = self.pages.take().map(|pages| pages.on_rank(rank));
    }
}

/// The host's knowledge of a step, which decides how kernels divide the work. It does not change results, up to
/// rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Batch {
    /// Sequences that have tokens in the step.
    pub sequences: usize,
    /// The longest length of a sequence after the step; `usize::MAX` if that is not known.
    pub longest: usize,
    /// Maximum tokens of one sequence.
    pub max_new: usize,
    /// The number of leading tokens that are the only ones of their sequences. GPUs have other kernels for these than
    /// for prompts, so put them first.
    pub decode: usize,
}

impl Batch {
    /// A guess from the numbers of tokens and sequences: one token for each sequence if `tokens` is at most
    /// `sequences`, otherwise all tokens in one sequence.
    pub fn guess(tokens: usize, sequences: usize) -> Batch {
        let max_new = if tokens <= sequences { 1 } else { tokens };
        let decode = if max_new == 1 { tokens } else { 0 };
        Batch { sequences: tokens.min(sequences), longest: usize::MAX, max_new, decode }
    }

    /// Counts a batch from the sequence of each token.
    fn of(tokens: &[u32]) -> Batch {
        let mut sorted: Vec<u32> = tokens.iter().copied().filter(|&sequence| sequence != Step::INACTIVE).collect();
        sorted.sort_unstable();
        let counts = || sorted.chunk_by(|a, b| a == b).map(<[u32]>::len);
        let first = |token: &u32| sorted.partition_point(|sequence| sequence < token);
        let alone =
            |token: &u32| sorted.get(first(token)) == Some(token) && sorted.get(first(token) + 1) != Some(token);
        Batch {
            sequences: counts().count(),
            longest: usize::MAX,
            max_new: counts().max().unwrap_or(0),
            decode: tokens.iter().take_while(|token| alone(token)).count(),
        }
    }
}

setters! { Batch {
    sequences: usize,
    longest: usize,
    max_new: usize,
    decode: usize,
} }

/// The part of a step that depends on its pool.
#[derive(Debug)]
pub(crate) struct StepPages {
    pub pool: u64,
    /// For each group, u32 `[S, width]`.
    pub tables: Vec<Tensor>,
    /// For each group of sealed pages, u32 `[n, 3]`: the pages that are sealed in the pass, in the form that
    /// [`seal`](crate::ops::seal::seal) takes. Empty for the other groups. Also empty if a sequence can have more new
    /// tokens than a page has positions: the pool then seals before the pass.
    pub seals: Vec<Tensor>,
    /// The tokens of each sequence and the slot of its states, if the pool has states.
    pub runs: Option<StateRuns>,
    /// The step of each rank, for layers whose positions the ranks divide; empty without such layers.
    pub shares: Vec<StepShare>,
    /// The tensor that all tensors of the step are views of.
    pub base: Tensor,
    pub written: Mutex<WrittenStep>,
    /// The pages of each rank of a group, made when a call of the rank needs them; see [`rank_slots`].
    pub of_ranks: Box<[OnceLock<Arc<StepPages>>]>,
}

/// The slots of [`StepPages::of_ranks`]: none on a plain device.
pub(crate) fn rank_slots(device: &Device) -> Box<[OnceLock<Arc<StepPages>>]> {
    let ranks = if device.ranks() > 1 { device.ranks() } else { 0 };
    (0..ranks).map(|_| OnceLock::new()).collect()
}

/// The latest contents that a pool wrote to a step.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrittenStep {
    /// The states of the sequences at that time.
    pub stamps: Vec<Stamp>,
    /// The positions of the tokens, then their sequences.
    pub tokens: Vec<u32>,
    /// Whether the tokens are positions that no sequence has gained, so that recurrent states do not advance.
    pub are_positions: bool,
    /// Counts rewrites, which change the page tables of steps selected from this one.
    rewrites: Arc<AtomicU64>,
}

impl WrittenStep {
    /// Removes the contents. Steps selected from this one become out of date.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.stamps.clear();
        self.rewrites.fetch_add(1, Ordering::Relaxed);
    }

    /// The current number of rewrites.
    fn stamp(&self) -> Stamp {
        Stamp { changes: Arc::clone(&self.rewrites), seen: self.rewrites.load(Ordering::Relaxed) }
    }
}

/// The state of a step's source (a sequence, or the step from which it was selected) at the time the step was made.
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    /// Counts changes of the source.
    pub changes: Arc<AtomicU64>,
    pub seen: u64,
}

impl StepPages {
    /// The pages of a rank, which all of its calls share.
    fn on_rank(&self, rank: &Rank) -> Arc<StepPages> {
        let moved = || {
            let (mut tables, mut seals, mut base) = (self.tables.clone(), self.seals.clone(), self.base.clone());
            tables.move_to(rank);
            seals.move_to(rank);
            base.move_to(rank);
            let mut runs = self.runs.clone();
            runs.move_to(rank);
            // Shares and contents are not needed: the encoder has checked the step of the group, and a rank has one
            // share.
            let (shares, written, of_ranks) = (Vec::new(), Mutex::default(), Box::default());
            Arc::new(StepPages { pool: self.pool, tables, seals, runs, shares, base, written, of_ranks })
        };
        self.of_ranks.get(rank.index()).map_or_else(moved, |slot| Arc::clone(slot.get_or_init(moved)))
    }

    pub fn lock(&self) -> MutexGuard<'_, WrittenStep> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An error if a sequence, or the step from which this one was selected, has changed since the step was written.
    pub fn check_is_latest(&self, op: &'static str) -> Result<()> {
        let is_latest = self.lock().stamps.iter().all(|stamp| stamp.changes.load(Ordering::Relaxed) == stamp.seen);
        check::value_is(op, "step", is_latest, "the latest step of its sequences", "one that is out of date")
    }
}

impl Step {
    /// The sequence of an inactive row.
    pub const INACTIVE: u32 = u32::MAX;

    /// Uploads a step for a cache of `sequences` sequences. `tokens` are (sequence, position) pairs. The length of each
    /// sequence is its largest position in this step plus one; sequences without tokens have length 0. A row whose
    /// sequence is [`Step::INACTIVE`] is inactive.
    ///
    /// # Errors
    /// `OutOfRange` for a sequence that does not exist; `Value`, `Overflow`, `OutOfMemory`.
    ///
    /// # Example
    /// ```
    /// use kvant::{Device, Step};
    /// // Two tokens of sequence 0, and one of sequence 2.
    /// let step = Step::new(&Device::cpu(), 3, &[(0, 5), (0, 6), (2, 0)])?;
    /// assert_eq!(step.lens().to_vec::<u32>()?, [7, 0, 1]);
    /// # Ok::<(), kvant::Error>(())
    /// ```
    pub fn new(device: &Device, sequences: usize, tokens: &[(u32, u32)]) -> Result<Step> {
        check::at_most("step", "sequences", sequences, u32::MAX as usize)?;
        let (mut lens, bytes) = (Vec::new(), sequences.saturating_mul(size_of::<u32>()));
        let failed = |_| Error::OutOfMemory { device: device.to_string(), bytes };
        lens.try_reserve_exact(sequences).map_err(failed)?;
        lens.resize(sequences, 0u32);
        for (index, &(sequence, position)) in tokens.iter().enumerate() {
            if sequence == Step::INACTIVE {
                continue;
            }
            let len = lens.get_mut(sequence as usize).ok_or(Error::OutOfRange {
                op: "step",
                arg: "sequence",
                index,
                got: sequence.into(),
                limit: sequences as u64,
            })?;
            let end = position.checked_add(1).ok_or(Error::Overflow { op: "step", arg: "position" })?;
            *len = end.max(*len);
        }
        let (sequence, positions): (Vec<u32>, Vec<u32>) = tokens.iter().copied().unzip();
        // Lengths may grow when the tensors are rewritten.
        let batch = Batch::of(&sequence);
        let positions = Tensor::from_slice(device, &positions, &[tokens.len()])?;
        let sequence = Tensor::from_slice(device, &sequence, &[tokens.len()])?;
        Ok(Step::from_tensors(positions, sequence, Tensor::from_slice(device, &lens, &[sequences])?).with_batch(batch))
    }

    /// A step of existing tensors: u32 `[T]`, `[T]` and `[S]`, as [`Step::positions`], [`Step::sequence`] and
    /// [`Step::lens`] return them. The operations check dtypes and shapes. The host does not know the contents, so that
    /// [`Step::batch`] is [`Batch::guess`]; [`Step::with_batch`] corrects it.
    pub fn from_tensors(positions: Tensor, sequence: Tensor, lens: Tensor) -> Step {
        let batch = Batch::guess(positions.elements(), lens.elements());
        Step { positions, sequence, lens, pages: None, batch }
    }

    pub(crate) fn with_pages(self, pages: StepPages) -> Step {
        Step { pages: Some(Arc::new(pages)), ..self }
    }

    /// Returns the step with another [`Step::batch`]. In a step of a [`KvPool`](crate::KvPool), these numbers are
    /// limits of later contents, and never shrink.
    #[must_use]
    pub fn with_batch(self, batch: Batch) -> Step {
        if self.pages.is_none() {
            return Step { batch, ..self };
        }
        let own = self.batch;
        let batch = Batch {
            sequences: batch.sequences.max(own.sequences),
            longest: batch.longest.max(own.longest),
            max_new: batch.max_new.max(own.max_new),
            decode: batch.decode.min(own.decode),
        };
        Step { batch, ..self }
    }

    /// As [`Step::with_batch`], for a batch that a pool has counted.
    pub(crate) fn with_known_batch(self, batch: Batch) -> Step {
        Step { batch, ..self }
    }

    /// As [`Step::with_known_batch`], in place.
    pub(crate) fn set_known_batch(&mut self, batch: Batch) {
        self.batch = batch;
    }

    /// u32 `[T]`: the position of each token, counted from 0 in its sequence.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// u32 `[T]`: the sequence of each token, below S, or [`Step::INACTIVE`].
    pub fn sequence(&self) -> &Tensor {
        &self.sequence
    }

    /// u32 `[S]`: the number of tokens of each sequence after this step's tokens are written, including those that are
    /// no longer held. Each position is below its sequence's length.
    pub fn lens(&self) -> &Tensor {
        &self.lens
    }

    /// The page tables of a step of a [`KvPool`](crate::KvPool), one for each layer group: u32 `[S, width]`.
    pub fn page_tables(&self) -> &[Tensor] {
        self.pages.as_ref().map_or(&[], |pages| &pages.tables)
    }

    /// The tokens of each sequence, and the slot of its states, for operations on [states](crate::StateLayer). `None`
    /// unless the step is of a pool with states, for [selected](Step::select) tokens, and for
    /// [positions](crate::KvPool::positions).
    ///
    /// # Errors
    /// `Value` if a sequence of the step has changed since.
    pub fn runs(&self) -> Result<Option<&StateRuns>> {
        let Some(pages) = &self.pages else { return Ok(None) };
        pages.check_is_latest("step")?;
        let are_positions = pages.lock().are_positions;
        Ok(pages.runs.as_ref().filter(|_| !are_positions))
    }

    /// Selects tokens of this step of a [`KvPool`](crate::KvPool), for operations on some tokens only. The result
    /// shares lengths and page tables: it is out of date when this step is rewritten.
    ///
    /// # Errors
    /// `Value` for a step that no pool has made; `OutOfRange` for a token beyond the step; `OutOfMemory`.
    pub fn select(&self, tokens: &[usize]) -> Result<Step> {
        let (op, count) = ("step", self.tokens());
        let Some(pages) = &self.pages else {
            return check::value_is(op, "self", false, "a step of a pool", "another").map(|()| self.clone());
        };
        let (stamps, written) = {
            let written = pages.lock();
            let stamps: Vec<Stamp> = written.stamps.iter().cloned().chain([written.stamp()]).collect();
            (stamps, written.tokens.clone())
        };
        let at_sequence = written.len().saturating_sub(count);
        let (mut positions, mut sequence) = (Vec::with_capacity(tokens.len()), Vec::with_capacity(tokens.len()));
        for (index, &token) in tokens.iter().enumerate() {
            if token >= count || written.is_empty() {
                let (got, limit) = (token as u64, count as u64);
                return Err(Error::OutOfRange { op, arg: "tokens", index, got, limit });
            }
            positions.push(written[token]);
            sequence.push(written[at_sequence + token]);
        }
        let batch = Batch::of(&sequence).longest(self.batch.longest);
        let upload = |words: &[u32]| Tensor::from_slice(self.positions.device(), words, &[words.len()]);
        let step = Step { positions: upload(&positions)?, sequence: upload(&sequence)?, ..self.clone() };
        let shares = pages.shares.iter().map(|share| share.of_tokens(&positions, &sequence)).collect::<Result<_>>()?;
        let tokens = [positions, sequence].concat();
        let written = Mutex::new(WrittenStep { stamps, tokens, are_positions: false, rewrites: Arc::default() });
        let (tables, seals, base) = (pages.tables.clone(), pages.seals.clone(), pages.base.clone());
        // The runs cover all tokens of the step, not a selection.
        let (pool, runs, of_ranks) = (pages.pool, None, rank_slots(base.device()));
        let pages = StepPages { pool, tables, seals, runs, shares, base, written, of_ranks };
        Ok(step.with_pages(pages).with_known_batch(batch))
    }

    /// The step of a range of tokens, with its own `batch`. Lengths and page tables are those of the whole step.
    pub(crate) fn range(&self, tokens: Range<usize>, batch: Batch) -> Result<Step> {
        let (positions, sequence) = (self.positions.rows(tokens.clone())?, self.sequence.rows(tokens)?);
        Ok(Step { positions, sequence, batch, ..self.clone() })
    }

    /// The host's knowledge of the step.
    pub fn batch(&self) -> Batch {
        self.batch
    }

    /// The number of sequences, S: the rows of the page tables and of the lengths.
    pub(crate) fn sequences(&self) -> usize {
        self.lens.elements()
    }

    /// Seals the pages of a layer that later tokens of the step see as sealed. Call it after the keys and values are
    /// written.
    pub(crate) fn seal(&self, enc: &mut Encoder, layer: &KvLayer) -> Result<()> {
        let group = layer.pages().map(|pages| pages.group);
        let seals = self.pages.as_ref().zip(group).and_then(|(pages, group)| pages.seals.get(group));
        seals.map_or(Ok(()), |pages| ops::seal::seal(enc, layer, pages))
    }

    /// The page table of a validated layer; `None` for a contiguous layer.
    pub(crate) fn table_of(&self, layer: &KvLayer) -> Option<&Tensor> {
        self.pages.as_ref()?.tables.get(layer.pages()?.group)
    }

    /// The page table of a layer in host memory.
    ///
    /// # Safety
    /// The tables are in host memory, the caller holds the device's lock, and nothing writes to them while the result
    /// lives.
    pub(crate) unsafe fn page_table(&self, layer: &KvLayer) -> PageTable<'_> {
        match self.table_of(layer) {
            // SAFETY: passed on to the caller.
            Some(table) => PageTable { entries: unsafe { table.host_slice() }, width: table.shape()[1] },
            None => PageTable::default(),
        }
    }

    /// The number of tokens, T.
    pub fn tokens(&self) -> usize {
        self.positions.elements()
    }

    /// Checks dtypes and shapes for `tokens` tokens of a layer, and that layer and step belong to the same pool.
    pub(crate) fn validate(&self, op: &'static str, tokens: usize, layer: &KvLayer) -> Result<()> {
        let sequences = if layer.is_paged() { self.sequences() } else { layer.spec().sequences };
        for (arg, tensor, len) in [
            ("step.positions", &self.positions, tokens),
            ("step.sequence", &self.sequence, tokens),
            ("step.lens", &self.lens, sequences),
        ] {
            check::dtype(op, arg, tensor, DType::U32)?;
            check::shape(op, arg, tensor, &[("", len)])?;
        }
        let of_pool = |pool: Option<u64>| pool.map_or("layers outside of pools".into(), |pool| format!("pool {pool}"));
        let (wanted, got) = (layer.pages().map(|pages| pages.pool), self.pages.as_ref().map(|pages| pages.pool));
        if wanted != got {
            let expected = format!("a step of {}", of_pool(wanted));
            return Err(Error::Value { op, arg: "step", expected, got: format!("a step of {}", of_pool(got)) });
        }
        self.pages.as_ref().map_or(Ok(()), |pages| pages.check_is_latest(op))
    }

    /// Checks the contents of the buffers: sequences exist, lengths fit a linear layer, and positions are below the
    /// lengths.
    ///
    /// # Safety
    /// The buffers are in host memory, and the caller holds the device's lock.
    pub(crate) unsafe fn check_indices(&self, op: &'static str, linear_capacity: Option<usize>) -> Result<()> {
        // SAFETY: passed on to the caller.
        let (positions, sequence, lens) = unsafe {
            (self.positions.host_slice::<u32>(), self.sequence.host_slice::<u32>(), self.lens.host_slice::<u32>())
        };
        if let Some(capacity) = linear_capacity {
            for (index, &len) in lens.iter().enumerate() {
                if len as usize > capacity {
                    let limit = capacity as u64 + 1;
                    return Err(Error::OutOfRange { op, arg: "step.lens", index, got: len.into(), limit });
                }
            }
        }
        for (index, (&position, &seq)) in positions.iter().zip(sequence).enumerate() {
            if seq == Step::INACTIVE {
                continue;
            }
            let Some(&len) = lens.get(seq as usize) else {
                let limit = lens.len() as u64;
                return Err(Error::OutOfRange { op, arg: "step.sequence", index, got: seq.into(), limit });
            };
            if position >= len {
                let (got, limit) = (position.into(), len.into());
                return Err(Error::OutOfRange { op, arg: "step.positions", index, got, limit });
            }
        }
        Ok(())
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        for (arg, tensor) in
            [("step.positions", &self.positions), ("step.sequence", &self.sequence), ("step.lens", &self.lens)]
        {
            visit(Touch { arg, tensor, access: Access::Read });
        }
        for tensor in self.page_tables() {
            visit(Touch { arg: "step.page_tables", tensor, access: Access::Read });
        }
    }
}
