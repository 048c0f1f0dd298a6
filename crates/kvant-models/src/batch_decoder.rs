//! Decode steps of batches with recorded passes.

use std::time::{Duration, Instant};

use kvant::{DType, Encoder, Graph, KvPool, Sequence, Step, StepSize, Submission, Tensor, device::DeviceKind, ops};

use crate::{
    DeviceTokens, Error, Model, Result, Sampling, TargetStates,
    forward::{Wanted, Workspace},
};

/// Feeds one or a few tokens to each sequence of a batch, repeatedly.
///
/// A pass is recorded the first time that a batch of its size occurs, and then replayed, including the sampling.
/// Tokens, positions, lengths and page tables are read from device memory, so nothing is planned or validated again. On
/// CUDA, a recorded pass is a CUDA graph. On a GPU, passes have 1, 2, 4, 8 … rows, and unused rows are
/// [inactive](Step::INACTIVE). Results equal [`Model::forward`]'s except for rounding: kernels depend on the number of
/// rows, except on a [batch-invariant](kvant::CpuOptions::batch_invariant) CPU device.
///
/// Several tokens of a sequence, such as drafts to verify, are separate [rows](KvPool::tokens_into) of these passes,
/// each with logits and sampling. This pays off only for few tokens: attention reads the keys of the sequence for each
/// of them.
///
/// ```no_run
/// use kvant::Device;
/// use kvant_models::{BatchDecoder, Logits, Model, PoolOptions, Sampling};
/// let model = Model::load("path/to/a/model".as_ref(), &Device::default())?;
/// let pool = model.new_pool(&PoolOptions::default())?;
/// let (mut a, mut b) = (pool.sequence(), pool.sequence());
/// model.feed(&mut a, &[2, 17, 300], Logits::Last)?;
/// model.feed(&mut b, &[2, 90], Logits::Last)?;
///
/// let mut decoder = BatchDecoder::new(&model, &pool, 8)?;
/// let mut tokens = vec![5, 91];
/// for _ in 0..10 {
///     decoder.append(&mut [(&mut a, 1), (&mut b, 1)])?;
///     decoder.run(&tokens, &[&Sampling::default(), &Sampling::default().temperature(0.7).seed(1)])?.wait()?;
///     tokens = decoder.drawn()?.to_vec::<u32>()?;
/// }
/// # Ok::<(), kvant_models::Error>(())
/// ```
pub struct BatchDecoder {
    model: Model,
    pool: KvPool,
    /// Maximum rows of a pass.
    rows: usize,
    /// Scratch memory shared by all passes.
    space: Workspace,
    /// f32 `[rows, vocab_size]`.
    logits: Tensor,
    /// u32 `[rows]`.
    drawn: Tensor,
    /// The sampling parameters, u32 `[rows, 8]`, and the values last written there.
    how: Tensor,
    written: Vec<u32>,
    /// The rows of the next step.
    words: Vec<u32>,
    /// Recorded passes, least recently used first.
    passes: Vec<RecordedPass>,
    /// Number of tokens of the latest step, which the last pass computes.
    live: usize,
    /// Receives hidden states for a drafter.
    states: Option<TargetStates>,
}

/// The smallest maximum length for which passes are recorded. Each further one is [`GROWTH`] times as long. Kernels and
/// page tables depend on the maximum length.
const FIRST_LENGTH: usize = 1024;
const GROWTH: usize = 4;
/// Maximum recorded passes.
const MAX_PASSES: usize = 64;

/// A pass of `rows` rows, for sequences of up to `longest` tokens.
struct RecordedPass {
    rows: usize,
    longest: usize,
    step: Step,
    ids: Tensor,
    /// One graph per [`Then`].
    graphs: [Option<Graph>; 3],
}

/// The sampling that follows a pass.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Then {
    Nothing,
    /// The most probable token of each row, which is faster than sampling.
    Greedy,
    /// Samples from each row with its own parameters.
    Draw,
}

impl BatchDecoder {
    /// Creates a decoder for batches of up to `rows` tokens of sequences of a pool.
    ///
    /// # Errors
    /// `Argument` for 0 rows, and for a pool of another model; `Kvant` with `OutOfMemory`.
    pub fn new(model: &Model, pool: &KvPool, rows: usize) -> Result<BatchDecoder> {
        model.check_pool(pool)?;
        if rows == 0 {
            return Err(Error::argument("rows", "at least 1", 0));
        }
        let rows = bucket(rows, model);
        Ok(BatchDecoder {
            space: model.workspace(rows)?,
            logits: Tensor::zeros(model.device(), DType::F32, &[rows, model.vocab_size()])?,
            drawn: Tensor::zeros(model.device(), DType::U32, &[rows])?,
            how: Tensor::zeros(model.device(), DType::U32, &[rows, ops::SampleRow::WORDS])?,
            written: Vec::new(),
            words: Vec::new(),
            model: model.clone(),
            pool: pool.clone(),
            rows,
            passes: Vec::new(),
            live: 0,
            states: None,
        })
    }

    /// Lets all passes leave hidden states for the model's drafter.
    ///
    /// # Errors
    /// `Argument` for fewer rows than the decoder's, and for the states of another model.
    pub fn leave_states(&mut self, states: &TargetStates) -> Result<()> {
        states.check(&self.model, self.rows)?;
        self.passes.clear();
        self.states = Some(states.clone());
        Ok(())
    }

    /// Maximum tokens of a batch.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Appends tokens to each sequence of a batch. This becomes the next step to [run](BatchDecoder::run). The
    /// sequences must not change before the step has run.
    ///
    /// # Errors
    /// `Argument` for a sequence without tokens, no sequences, more tokens than rows, or a sequence longer than the
    /// model's table of query factors; `Kvant`, as [`KvPool::tokens_into`]. The sequences are then unchanged.
    pub fn append(&mut self, batch: &mut [(&mut Sequence, usize)]) -> Result<()> {
        self.live = 0;
        let tokens = batch.iter().fold(0usize, |sum, (_, count)| sum.saturating_add(*count));
        if batch.is_empty() || tokens > self.rows {
            return Err(Error::argument("batch", format_args!("1 to {} tokens", self.rows), tokens));
        }
        if let Some((_, count)) = batch.iter().find(|(_, count)| *count == 0) {
            return Err(Error::argument("batch", "tokens of each sequence", count));
        }
        let longest = batch.iter().map(|(sequence, count)| sequence.len().saturating_add(*count)).max().unwrap_or(0);
        self.model.check_length(longest)?;
        self.select(bucket(tokens, &self.model), longest)?;
        if let Some(pass) = self.passes.last() {
            self.pool.tokens_into(batch, &pass.step)?;
            self.live = tokens;
        }
        Ok(())
    }

    /// Starts the pass over the last appended step, with the ids of its tokens, sequence by sequence. If `draws` has
    /// parameters for each token, it also samples after each of them; the counter is the position of the sampled token.
    /// Penalties, biases and suppressed tokens are not applied.
    ///
    /// # Errors
    /// `Argument` for ids outside the vocabulary, a number of ids that differs from the step's tokens, or parameters
    /// for only some of them; `Kvant`. The sequences keep their tokens: truncate them if the pass failed.
    pub fn run(&mut self, tokens: &[u32], draws: &[&Sampling]) -> Result<Submission> {
        self.run_fed(tokens, None, draws)
    }

    /// Like [`BatchDecoder::run`], with tokens that an earlier step samples and that need not be known yet. The host
    /// can start a step before the previous one is done, and [read](kvant::Tensor::read_back) the previous one's tokens
    /// while it runs.
    ///
    /// # Errors
    /// As [`BatchDecoder::run`]; `Argument` or `Kvant` for places out of range.
    pub fn run_fed(&mut self, tokens: &[u32], fed: Option<DeviceTokens>, draws: &[&Sampling]) -> Result<Submission> {
        let known = DeviceTokens::known(fed.as_ref(), tokens);
        self.model.check_tokens(&known)?;
        let expected = self.live;
        if !draws.is_empty() && draws.len() != expected {
            return Err(Error::argument("draws", format_args!("none, or {expected}"), draws.len()));
        }
        let Some(pass) = self.passes.last().filter(|_| tokens.len() == expected && expected > 0) else {
            return Err(Error::argument("tokens", format_args!("{expected} ids"), tokens.len()));
        };
        let ids = pass.ids.rows(0..tokens.len())?;
        match fed {
            Some(fed) => {
                let mut enc = self.model.device().encoder()?;
                fed.write(&mut enc, &known, &ids)?;
                // Passes are ordered, so the pass runs after it.
                drop(enc.commit()?);
            }
            None => ids.write(&known)?,
        }
        let then = match draws {
            [] => Then::Nothing,
            draws if draws.iter().all(|sampling| sampling.is_greedy()) => Then::Greedy,
            draws => {
                self.write_draws(draws)?;
                Then::Draw
            }
        };
        match self.passes.last().and_then(|pass| pass.graphs[then as usize].as_ref()) {
            Some(graph) => Ok(graph.replay()?),
            None => self.record(then),
        }
    }

    /// Uploads the sampling parameters, unless they are unchanged.
    fn write_draws(&mut self, draws: &[&Sampling]) -> Result<()> {
        let BatchDecoder { how, written, words, .. } = self;
        words.clear();
        words.extend(draws.iter().flat_map(|sampling| sampling.row().words()));
        if !written.starts_with(words) {
            // Unknown until the upload has succeeded.
            written.clear();
            how.rows(0..draws.len())?.write(words)?;
            std::mem::swap(written, words);
        }
        Ok(())
    }

    /// The logits of the latest step, f32 `[tokens, vocab_size]`.
    ///
    /// # Errors
    /// None if the step has run.
    pub fn logits(&self) -> Result<Tensor> {
        Ok(self.logits.rows(0..self.live)?)
    }

    /// The tokens that the latest step has sampled, u32 `[tokens]`; `u32::MAX` after logits of only NaN.
    ///
    /// # Errors
    /// None if the step has run.
    pub fn drawn(&self) -> Result<Tensor> {
        Ok(self.drawn.rows(0..self.live)?)
    }

    /// The hidden states of the latest step after the final norm, in the dtype of activations, `[tokens, hidden_size]`.
    /// They are valid until the next step.
    ///
    /// # Errors
    /// None if the step has run.
    pub fn hidden(&mut self) -> Result<Tensor> {
        // Passes of all sizes store the hidden states at the start of one buffer. The views may belong to a smaller
        // pass.
        self.space.fit(self.model.rank_decoder(), self.live.max(1))?;
        Ok(self.space.views.x.rows(0..self.live)?)
    }

    /// The logits of the first row, f32 `[1, vocab_size]`.
    pub(crate) fn first_logits(&self) -> Result<Tensor> {
        Ok(self.logits.rows(0..1)?)
    }

    /// Moves the pass for a number of rows and a length to the end, or creates it.
    fn select(&mut self, rows: usize, longest: usize) -> Result<()> {
        let bound = lengths(longest).last().unwrap_or(longest);
        if let Some(index) = self.passes.iter().position(|pass| (pass.rows, pass.longest) == (rows, bound)) {
            self.passes[index..].rotate_left(1);
            return Ok(());
        }
        if self.passes.len() >= MAX_PASSES {
            self.passes.remove(0);
        }
        self.space.fit(self.model.rank_decoder(), rows)?;
        let (ids, step) = (self.space.views.ids.clone(), self.pool.reserve_step(StepSize::decode(rows, bound))?);
        self.passes.push(RecordedPass { rows, longest: bound, step, ids, graphs: [None, None, None] });
        Ok(())
    }

    /// Records the last pass and runs it.
    fn record(&mut self, then: Then) -> Result<Submission> {
        let BatchDecoder { model, pool, space, logits, drawn, how, passes, states, .. } = self;
        let Some(pass) = passes.last_mut() else { return Err(Error::argument("tokens", "a step", "none")) };
        space.fit(model.rank_decoder(), pass.rows)?;
        let rows = 0..pass.rows;
        let (logits, drawn, how) = (logits.rows(rows.clone())?, drawn.rows(rows.clone())?, how.rows(rows)?);
        let graph = capture(model, |enc| {
            let wanted = Wanted::Every { logits: Some(&logits) };
            let features = states.as_ref().map(TargetStates::features);
            model.network().encode(enc, &space.views, pool, &pass.step, &wanted, features.as_ref())?;
            if then != Then::Nothing {
                let draw = ops::Sample::new(&logits, pass.step.lens(), &drawn);
                ops::sample(enc, &draw.rows((then == Then::Draw).then_some(&how)))?;
            }
            Ok(())
        })?;
        Ok(pass.graphs[then as usize].insert(graph).replay()?)
    }

    /// The pass sizes for batches of up to [`BatchDecoder::rows`] tokens of sequences of up to `longest` tokens, to be
    /// [recorded](BatchDecoder::record_size) in advance, in the order in which they are needed. Empty on a CPU, which
    /// compiles nothing.
    pub fn sizes(&self, longest: usize) -> Vec<PassSize> {
        if is_host(&self.model) {
            return Vec::new();
        }
        let mut rows: Vec<usize> = (1..=self.rows).map(|rows| bucket(rows, &self.model)).collect();
        rows.dedup();
        let sizes = |longest| rows.iter().map(move |&rows| PassSize { rows, longest });
        let mut sizes: Vec<PassSize> = lengths(longest).flat_map(sizes).collect();
        sizes.truncate(MAX_PASSES);
        sizes
    }

    /// Records the passes of a size and runs them with only inactive rows, so that no sequence changes. The last
    /// appended step must have run.
    ///
    /// # Errors
    /// As [`BatchDecoder::append`] and [`BatchDecoder::run`].
    pub fn record_size(&mut self, size: PassSize) -> Result<()> {
        self.live = 0;
        self.select(size.rows, size.longest)?;
        if let Some(pass) = self.passes.last() {
            self.pool.step_into(&mut [], &pass.step)?;
        }
        for then in [Then::Greedy, Then::Draw, Then::Nothing] {
            let is_missing = self.passes.last().is_some_and(|pass| pass.graphs[then as usize].is_none());
            if is_missing {
                self.record(then)?.wait()?;
            }
        }
        Ok(())
    }

    /// Measures a greedy pass of `rows` rows without sequences: the shortest of `runs` runs, after one that may compile
    /// kernels. Attention is not included. The last appended step must have run.
    ///
    /// # Errors
    /// `Argument` for more than [`BatchDecoder::rows`]; otherwise as [`BatchDecoder::record_size`].
    pub fn measure(&mut self, rows: usize, runs: usize) -> Result<Duration> {
        if rows == 0 || rows > self.rows {
            return Err(Error::argument("rows", format_args!("1 to {}", self.rows), rows));
        }
        self.live = 0;
        self.select(bucket(rows, &self.model), 1)?;
        let mut shortest = Duration::MAX;
        for run in 0..=runs.max(1) {
            if let Some(pass) = self.passes.last() {
                self.pool.step_into(&mut [], &pass.step)?;
            }
            let started = Instant::now();
            match self.passes.last().and_then(|pass| pass.graphs[Then::Greedy as usize].as_ref()) {
                Some(graph) => graph.replay()?.wait()?,
                None => self.record(Then::Greedy)?.wait()?,
            }
            if run > 0 {
                shortest = shortest.min(started.elapsed());
            }
        }
        Ok(shortest)
    }
}

/// The size of a recorded pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassSize {
    /// Number of tokens.
    rows: usize,
    /// Maximum length of a sequence.
    longest: usize,
}

/// The maximum lengths for which passes are recorded, up to the first sufficient one.
pub(crate) fn lengths(longest: usize) -> impl Iterator<Item = usize> {
    let longer = move |&last: &usize| (last < longest).then(|| last.saturating_mul(GROWTH));
    std::iter::successors(Some(FIRST_LENGTH), longer)
}

/// Captures the operations that `record` encodes.
pub(crate) fn capture(model: &Model, record: impl FnOnce(&mut Encoder) -> Result<()>) -> Result<Graph> {
    let mut encoded = Ok(());
    let graph = Encoder::capture(model.device(), |enc| {
        encoded = record(enc);
        Ok(())
    });
    encoded?;
    Ok(graph?)
}

/// Whether the model runs in host memory.
pub(crate) fn is_host(model: &Model) -> bool {
    matches!(model.device().kind(), DeviceKind::Cpu | DeviceKind::Reference)
}

/// The rows of the pass for a batch. A CPU computes every row but records quickly, so it uses the exact number.
pub(crate) fn bucket(rows: usize, model: &Model) -> usize {
    match rows {
        _ if is_host(model) => rows,
        0..8 => rows.next_power_of_two(),
        8..64 => rows.next_multiple_of(8),
        _ => rows.next_multiple_of(16),
    }
}
