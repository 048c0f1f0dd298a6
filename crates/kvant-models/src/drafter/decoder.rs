//! Proposes drafts for batches of sequences.
//!
//! The first pass *catches up*: it computes the drafter's keys and values at the positions of the target's latest pass,
//! and the first draft of each sequence. Each further pass has one row per sequence, at the next position. All passes
//! are enqueued at once: drawn tokens and hidden states stay on the device until all drafts are read back.

use std::{cmp::Reverse, ops::Range, sync::Arc};

use kvant::{DType, Encoder, Graph, KvPool, Readback, Sequence, Step, StepSize, Submission, Tensor, ops};

use super::{DraftHidden, DraftInput, DraftOutput, DraftSpace, Drafter, TargetStates, states::no_drafter};
use crate::{
    DeviceTokens, Error, Model, Result, Sampling,
    batch_decoder::{Then, bucket, capture, is_host, lengths},
    forward::Features,
};

/// Maximum rows of a recorded first pass.
const MAX_RECORDED: usize = 128;
/// Maximum recorded passes of each kind.
const MAX_PASSES: usize = 128;
/// Maximum sizes that are recorded in advance, each with two first passes.
const MAX_SIZES: usize = 48;

/// A sequence whose next tokens are drafted, after a pass of the target.
#[derive(Debug)]
pub struct Draft<'a> {
    /// The sequence. It keeps its length.
    pub sequence: &'a mut Sequence,
    /// The position of the first row.
    pub position: usize,
    /// The rows of the target's latest pass, without rejected drafts: indices of its tokens, or of its rows with logits
    /// for a drafter that reads [`Taps::Final`](crate::Taps::Final), which only reads the last row.
    pub rows: Range<usize>,
    /// The token after each row.
    pub next: &'a [u32],
    /// The index of the last token of `next` among tokens that are still on the device, if it is not known.
    pub fed: Option<usize>,
    /// Maximum drafts; 0 to compute only keys and values.
    pub drafts: usize,
    /// The sampling of the target. A draft is drawn with the random numbers of its position, so that it is likely to
    /// equal the target's draw.
    pub sampling: &'a Sampling,
}

impl Draft<'_> {
    /// The position of the last row.
    fn last(&self) -> usize {
        self.position + self.rows.len() - 1
    }
}

/// Proposes drafts with the drafter of a model.
///
/// ```no_run
/// # fn run(model: &kvant_models::Model, pool: &kvant::KvPool) -> kvant_models::Result<()> {
/// use kvant_models::{Draft, DraftDecoder, Sampling};
/// let mut drafter = DraftDecoder::new(model, pool, 8, 4, 512)?;
/// let (mut sequence, prompt) = (pool.sequence(), [2, 17, 300]);
/// let step = pool.step(&mut [(&mut sequence, 3)])?;
/// let logits = kvant::Tensor::zeros(model.device(), kvant::DType::F32, &[1, model.vocab_size()])?;
/// model.start_with(pool, &step, &prompt, None, (&[2], &logits), Some(drafter.states()))?.wait()?;
/// // The target has drawn token 5.
/// let (next, sampling) = ([17, 300, 5], Sampling::default());
/// let (rows, fed) = (0..3, None);
/// let draft = Draft { sequence: &mut sequence, position: 0, rows, next: &next, fed, drafts: 4, sampling: &sampling };
/// let drafts = drafter.propose(&mut [draft], None)?;
/// assert!(drafts[0].len() <= 4);
/// # Ok(()) }
/// ```
pub struct DraftDecoder {
    model: Model,
    drafter: Arc<Drafter>,
    pool: KvPool,
    /// Maximum sequences of a batch, and maximum drafts of each.
    sequences: usize,
    drafts: usize,
    states: TargetStates,
    space: DraftSpace,
    buffers: DraftBuffers,
    /// The rows of states, the wanted rows and the sampling parameters that were written last.
    written: [Vec<u32>; 3],
    /// Recorded passes, least recently used first.
    firsts: Vec<FirstPass>,
    chains: Vec<Chain>,
}

/// The inputs and outputs of all passes.
struct DraftBuffers {
    /// The tokens after the rows of the first pass, u32 `[M]`.
    ids: Tensor,
    /// The rows of [`TargetStates`] that the first pass reads, u32 `[taps.count()·M]`.
    state_rows: Tensor,
    /// The last row of each sequence, u32 `[S]`.
    wanted: Tensor,
    /// The position of each draft, u32 `[drafts·S]`, one draft of all sequences after the other.
    counters: Tensor,
    /// The sampling parameters, u32 `[S, 8]`.
    how: Tensor,
    /// The drafts, u32 `[drafts·S]`.
    drawn: Tensor,
    /// `[S, hidden_width]` each: passes read one and write the other.
    hidden: [Tensor; 2],
    /// f32 `[S, vocab_size]`.
    logits: Tensor,
}

/// The size of recorded passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftSize {
    /// Rows of the first pass.
    rows: usize,
    sequences: usize,
    /// Maximum length of a sequence.
    longest: usize,
}

/// A recorded first pass.
struct FirstPass {
    /// Rows, sequences that get a draft, and the maximum length.
    size: [usize; 3],
    step: Step,
    /// One graph per [`Then`].
    graphs: [Option<Graph>; 3],
}

/// Recorded passes after the first one.
struct Chain {
    /// Sequences, and the maximum length.
    size: [usize; 2],
    /// The step of each pass.
    steps: Vec<Step>,
    /// Graphs of all passes at once, by number of passes and [`Then`].
    graphs: Vec<(usize, Then, Graph)>,
}

/// The drafts of a batch, in the order of computation.
type Ordered<'d, 'a> = [(usize, &'d mut Draft<'a>)];

impl DraftDecoder {
    /// Creates a decoder for up to `sequences` sequences with up to `drafts` drafts each, after passes of up to `rows`
    /// tokens.
    ///
    /// # Errors
    /// `Argument` for a model without a drafter, for 0, and for a pool of another model; `Kvant` with `OutOfMemory`.
    pub fn new(model: &Model, pool: &KvPool, sequences: usize, drafts: usize, rows: usize) -> Result<DraftDecoder> {
        model.check_pool(pool)?;
        let drafter = model.shared_drafter().ok_or_else(no_drafter)?;
        for (arg, number) in [("sequences", sequences), ("drafts", drafts)] {
            if number == 0 {
                return Err(Error::argument(arg, "at least 1", 0));
            }
        }
        let sequences = bucket(sequences, model);
        // Padded passes have more rows.
        let rows = rows.max(bucket(rows.min(MAX_RECORDED), model)).max(sequences);
        let states = TargetStates::new(model, rows)?;
        let (device, count) = (model.device(), drafts.saturating_mul(sequences));
        let words = |shape: &[usize]| Tensor::zeros(device, DType::U32, shape);
        let hidden = || Tensor::zeros(device, model.activations(), &[sequences, drafter.hidden_width()]);
        let buffers = DraftBuffers {
            ids: words(&[rows])?,
            state_rows: words(&[rows * states.taps().count()])?,
            wanted: words(&[sequences])?,
            counters: words(&[count])?,
            how: words(&[sequences, ops::SampleRow::WORDS])?,
            drawn: words(&[count])?,
            hidden: [hidden()?, hidden()?],
            logits: Tensor::zeros(device, DType::F32, &[sequences, model.vocab_size()])?,
        };
        let space = DraftSpace::new(&drafter, rows, sequences)?;
        let (model, pool, written) = (model.clone(), pool.clone(), Default::default());
        let (firsts, chains) = (Vec::new(), Vec::new());
        Ok(DraftDecoder { model, drafter, pool, sequences, drafts, states, space, buffers, written, firsts, chains })
    }

    /// The hidden states that passes of the target must leave before [`DraftDecoder::propose`].
    pub fn states(&self) -> &TargetStates {
        &self.states
    }

    /// Maximum drafts of a sequence.
    pub fn drafts(&self) -> usize {
        self.drafts
    }

    /// Computes the drafter's keys and values after a pass of the target, and drafts the tokens that may follow those
    /// of each sequence. Returns the drafts of each sequence, possibly fewer than asked for: if pages are missing, or
    /// logits are not numbers. Waits only if there are any.
    ///
    /// `drawn`, u32 `[n]`, has the tokens that are still on the device ([`Draft::fed`]).
    ///
    /// # Errors
    /// `Argument` for a batch or drafts beyond the decoder's limits, rows that are not those of the states, or tokens
    /// outside the vocabulary; `Kvant`.
    pub fn propose(&mut self, batch: &mut [Draft], drawn: Option<&Tensor>) -> Result<Vec<Vec<u32>>> {
        self.check(batch, drawn)?;
        let mut drafts: Vec<Vec<u32>> = batch.iter().map(|_| Vec::new()).collect();
        // Passes have the sequences with most drafts first. Sequences with one row come before others, because GPUs
        // have other kernels for them.
        let mut ordered: Vec<(usize, &mut Draft)> = batch.iter_mut().enumerate().collect();
        ordered.retain(|(_, of)| !of.rows.is_empty() && (of.drafts > 0 || self.has_layer()));
        ordered.sort_by_key(|(_, of)| (Reverse(of.drafts), of.rows.len() > 1));
        let Some(max) = ordered.first().map(|(_, of)| of.drafts) else { return Ok(drafts) };
        let (then, submission) = match self.first(&mut ordered, drawn) {
            Err(Error::Kvant(kvant::Error::OutOfPages { .. })) => return Ok(drafts),
            result => result?,
        };
        if max == 0 {
            return Ok(drafts);
        }
        let count = ordered.iter().filter(|(_, of)| of.drafts > 0).count();
        let (passes, chained) = self.chain(&mut ordered[..count], max, then)?;
        let readback = self.buffers.drawn.rows(0..(passes - 1) * self.sequences + count)?.read_back()?;
        for submission in std::iter::once(submission).chain(chained) {
            submission.wait()?;
        }
        self.sort_out(&ordered[..count], passes, readback, &mut drafts)?;
        Ok(drafts)
    }

    /// The sizes of batches for sequences of up to `longest` tokens, to be [recorded](DraftDecoder::record_size) in
    /// advance. Empty on a CPU, which compiles nothing.
    pub fn sizes(&self, longest: usize) -> Vec<DraftSize> {
        if is_host(&self.model) {
            return Vec::new();
        }
        let mut counts: Vec<usize> = (1..=self.sequences).map(|count| bucket(count, &self.model)).collect();
        counts.dedup();
        let mut sizes = Vec::new();
        for longest in lengths(longest) {
            for &sequences in &counts {
                let max = MAX_RECORDED.min(bucket(sequences.saturating_mul(1 + self.drafts), &self.model));
                let doubled = std::iter::successors(Some(sequences), |&rows| Some(bucket(2 * rows, &self.model)));
                sizes.extend(doubled.take_while(|&rows| rows <= max).map(|rows| DraftSize {
                    rows,
                    sequences,
                    longest,
                }));
            }
        }
        sizes.truncate(MAX_SIZES);
        sizes
    }

    /// Records the passes of a size and runs them with only inactive rows, so that no sequence changes.
    ///
    /// # Errors
    /// `Kvant`: `Compile`, `OutOfMemory`, `Unsupported`.
    pub fn record_size(&mut self, size: DraftSize) -> Result<()> {
        let DraftSize { rows, sequences, longest } = size;
        for (count, then) in [(sequences, Then::Greedy), (sequences, Then::Draw), (0, Then::Nothing)] {
            self.select_first([rows, count, longest])?;
            if let Some(pass) = self.firsts.last() {
                self.pool.positions_into(&mut [], &pass.step)?;
            }
            self.replay_first(then)?.wait()?;
        }
        for (passes, then) in (1..self.drafts).flat_map(|passes| [(passes, Then::Greedy), (passes, Then::Draw)]) {
            self.select_chain([sequences, longest], passes)?;
            for step in self.chains.last().map_or(&[][..], |chain| &chain.steps) {
                self.pool.positions_into(&mut [], step)?;
            }
            self.replay_chain(passes, then)?.wait()?;
        }
        Ok(())
    }

    /// Distributes drawn tokens to the sequences.
    fn sort_out(&self, ordered: &Ordered, passes: usize, readback: Readback, drafts: &mut [Vec<u32>]) -> Result<()> {
        let tokens = readback.to_vec::<u32>()?;
        for (row, (index, of)) in ordered.iter().enumerate() {
            let own = tokens.iter().skip(row).step_by(self.sequences).take(of.drafts.min(passes));
            drafts[*index].extend(own.copied().take_while(|&token| (token as usize) < self.model.vocab_size()));
        }
        Ok(())
    }

    /// Whether the drafter has keys and values of its own.
    fn has_layer(&self) -> bool {
        self.drafter.cache_layer().is_some()
    }

    fn check(&self, batch: &[Draft], drawn: Option<&Tensor>) -> Result<()> {
        let at_most = |arg, got: usize, max: usize| match got <= max {
            true => Ok(()),
            false => Err(Error::argument(arg, format_args!("at most {max}"), got)),
        };
        at_most("batch (sequences)", batch.len(), self.sequences)?;
        let mut rows = 0usize;
        for of in batch {
            at_most("drafts", of.drafts, self.drafts)?;
            at_most("rows", of.rows.end, self.states.rows())?;
            rows = rows.saturating_add(of.rows.len());
            let longest = of.position.saturating_add(of.rows.len()).saturating_add(of.drafts);
            at_most("position", longest, u32::MAX as usize / 2)?;
            self.model.check_length(longest)?;
            if of.next.len() != of.rows.len() {
                return Err(Error::argument("next", format_args!("{} tokens", of.rows.len()), of.next.len()));
            }
            match (of.fed, of.next.split_last()) {
                (Some(index), Some((_, known))) => {
                    let count = drawn.map_or(0, Tensor::elements);
                    if index >= count {
                        return Err(Error::argument("fed", format_args!("below {count}"), index));
                    }
                    self.model.check_tokens(known)?;
                }
                _ => self.model.check_tokens(of.next)?,
            }
        }
        at_most("batch (rows)", rows, self.states.rows())
    }

    /// Enqueues the first pass: uploads its inputs and those of all later passes, then encodes or replays it.
    fn first(&mut self, ordered: &mut Ordered, drawn: Option<&Tensor>) -> Result<(Then, Submission)> {
        let count = ordered.iter().filter(|(_, of)| of.drafts > 0).count();
        let longest = ordered.iter().map(|(_, of)| of.last() + 1 + of.drafts).max().unwrap_or(0);
        let positions =
            |of: &Draft| if self.has_layer() { of.position..of.last() + 1 } else { of.last()..of.last() + 1 };
        let rows: usize = ordered.iter().map(|(_, of)| positions(of).len()).sum();
        let mut batch: Vec<(&mut Sequence, Range<usize>)> = Vec::with_capacity(ordered.len());
        for (_, of) in ordered.iter_mut() {
            let positions = positions(of);
            batch.push((&mut *of.sequence, positions));
        }
        // Without a recorded step, rows of a sequence share a row of lengths, which an assistant has anyway.
        let is_recorded = rows <= MAX_RECORDED;
        let (size, made) = match is_recorded {
            true => {
                let of_bucket = |rows| if rows == 0 { 0 } else { bucket(rows, &self.model) };
                let bound = lengths(longest).last().unwrap_or(longest);
                ([of_bucket(rows), of_bucket(count), bound], None)
            }
            false => ([rows, count, longest], Some(self.pool.positions(&mut batch)?)),
        };
        if is_recorded {
            self.select_first(size)?;
            if let Some(pass) = self.firsts.last() {
                self.pool.positions_into(&mut batch, &pass.step)?;
            }
        }
        let then = self.write(ordered, size, drawn)?;
        let submission = match made {
            Some(step) => {
                self.space.fit(&self.drafter, size[0], size[1].max(1))?;
                let mut enc = self.model.device().encoder()?;
                self.encode_first(&mut enc, &step, size, then)?;
                enc.commit()?
            }
            None => self.replay_first(then)?,
        };
        Ok((then, submission))
    }

    /// Uploads the inputs of the first pass, and the positions and sampling of all drafts.
    fn write(&mut self, ordered: &Ordered, [rows, count, _]: [usize; 3], drawn: Option<&Tensor>) -> Result<Then> {
        let (mut ids, mut states, mut wanted) = (Vec::with_capacity(rows), Vec::with_capacity(rows), Vec::new());
        let mut fed = Vec::new();
        for (_, of) in ordered {
            let first = if self.has_layer() { 0 } else { of.rows.len() - 1 };
            ids.extend_from_slice(&of.next[first..]);
            states.extend(of.rows.clone().skip(first));
            if let Some(index) = of.fed {
                fed.push((ids.len() - 1, index));
            }
            if of.drafts > 0 {
                wanted.push(ids.len() as u32 - 1);
            }
        }
        // Padded rows are inactive, but read valid tokens and states.
        ids.resize(rows, 0);
        states.resize(rows, 0);
        wanted.resize(count, 0);
        let states = Features::rows(self.states.taps(), self.states.rows(), &states);
        write_changed(&self.buffers.state_rows.rows(0..states.len())?, states, &mut self.written[0])?;
        let to = self.buffers.ids.rows(0..rows)?;
        match drawn.filter(|_| !fed.is_empty()) {
            Some(drawn) => {
                let fed = DeviceTokens { drawn, places: &fed };
                let known = DeviceTokens::known(Some(&fed), &ids);
                let mut enc = self.model.device().encoder()?;
                fed.write(&mut enc, &known, &to)?;
                // Passes are ordered, so the pass runs after it.
                drop(enc.commit()?);
            }
            None => to.write(&ids)?,
        }
        if count == 0 {
            return Ok(Then::Nothing);
        }
        write_changed(&self.buffers.wanted.rows(0..count)?, wanted, &mut self.written[1])?;
        self.write_sampling(ordered)
    }

    /// Uploads the positions of all drafts, and their sampling.
    fn write_sampling(&mut self, ordered: &Ordered) -> Result<Then> {
        let drafting = || ordered.iter().map(|(_, of)| of).filter(|of| of.drafts > 0);
        if drafting().all(|of| of.sampling.is_greedy()) {
            return Ok(Then::Greedy);
        }
        let passes = drafting().map(|of| of.drafts).max().unwrap_or(0);
        let mut counters = vec![0u32; passes * self.sequences];
        for (pass, counters) in counters.chunks_mut(self.sequences).enumerate() {
            for (of, counter) in drafting().zip(counters) {
                // The row at position p drafts the token of p + 2.
                *counter = u32::try_from(of.last() + 2 + pass).unwrap_or(u32::MAX);
            }
        }
        self.buffers.counters.rows(0..counters.len())?.write(&counters)?;
        let how: Vec<u32> = drafting().flat_map(|of| of.sampling.row().words()).collect();
        write_changed(&self.buffers.how.rows(0..how.len() / ops::SampleRow::WORDS)?, how, &mut self.written[2])?;
        Ok(Then::Draw)
    }

    /// Moves the first pass of a size to the end, or creates it.
    fn select_first(&mut self, size: [usize; 3]) -> Result<()> {
        if let Some(index) = self.firsts.iter().position(|pass| pass.size == size) {
            self.firsts[index..].rotate_left(1);
            return Ok(());
        }
        if self.firsts.len() >= MAX_PASSES {
            self.firsts.remove(0);
        }
        let step = self.pool.reserve_step(StepSize::decode(size[0], size[2]))?;
        self.firsts.push(FirstPass { size, step, graphs: [None, None, None] });
        Ok(())
    }

    fn replay_first(&mut self, then: Then) -> Result<Submission> {
        let Some(FirstPass { size, step, graphs }) = self.firsts.last() else { return Err(no_drafter()) };
        if let Some(graph) = &graphs[then as usize] {
            return Ok(graph.replay()?);
        }
        let (size, step) = (*size, step.clone());
        self.space.fit(&self.drafter, size[0], size[1].max(1))?;
        let graph = capture(&self.model, |enc| self.encode_first(enc, &step, size, then))?;
        let submission = graph.replay()?;
        if let Some(pass) = self.firsts.last_mut() {
            pass.graphs[then as usize] = Some(graph);
        }
        Ok(submission)
    }

    fn encode_first(&self, enc: &mut Encoder, step: &Step, [rows, count, _]: [usize; 3], then: Then) -> Result<()> {
        let DraftBuffers { ids, state_rows, wanted, hidden, logits, .. } = &self.buffers;
        let (ids, state_rows) = (ids.rows(0..rows)?, state_rows.rows(0..rows * self.states.taps().count())?);
        let hidden_of = DraftHidden::Features { table: self.states.table(), rows: &state_rows };
        let input = DraftInput { ids: &ids, hidden: hidden_of };
        if then == Then::Nothing {
            return self.drafter.encode(enc, &self.space, &self.pool, step, input, None);
        }
        let (wanted, hidden, logits) = (wanted.rows(0..count)?, hidden[0].rows(0..count)?, logits.rows(0..count)?);
        let out = DraftOutput { rows: Some(&wanted), hidden: &hidden, logits: &logits };
        self.drafter.encode(enc, &self.space, &self.pool, step, input, Some(out))?;
        self.draw(enc, 0, count, then)
    }

    /// Samples a draft of each of `count` sequences.
    fn draw(&self, enc: &mut Encoder, pass: usize, count: usize, then: Then) -> Result<()> {
        let DraftBuffers { counters, how, drawn, logits, .. } = &self.buffers;
        let at = pass * self.sequences;
        let (counters, drawn) = (counters.rows(at..at + count)?, drawn.rows(at..at + count)?);
        let (logits, how) = (logits.rows(0..count)?, how.rows(0..count)?);
        let sample = ops::Sample::new(&logits, &counters, &drawn).rows((then == Then::Draw).then_some(&how));
        Ok(ops::sample(enc, &sample)?)
    }

    /// Enqueues the passes after the first one. Returns the number of all passes, which missing pages reduce.
    fn chain(&mut self, ordered: &mut Ordered, max: usize, then: Then) -> Result<(usize, Option<Submission>)> {
        let count = ordered.iter().filter(|(_, of)| of.drafts > 1).count();
        if max <= 1 || count == 0 {
            return Ok((1, None));
        }
        let longest = ordered.iter().map(|(_, of)| of.last() + 1 + of.drafts).max().unwrap_or(0);
        let size = [bucket(count, &self.model), lengths(longest).last().unwrap_or(longest)];
        self.select_chain(size, max - 1)?;
        let passes = self.write_chain(ordered, max)?;
        if passes == 1 {
            return Ok((1, None));
        }
        match self.replay_chain(passes - 1, then) {
            // On a CPU: a draft of logits that are not numbers.
            Err(Error::Kvant(kvant::Error::OutOfRange { .. })) => Ok((1, None)),
            submission => Ok((passes, Some(submission?))),
        }
    }

    /// Writes the steps of the selected passes. Returns the number of all passes, with the first one.
    fn write_chain(&self, ordered: &mut Ordered, max: usize) -> Result<usize> {
        let Some(chain) = self.chains.last() else { return Ok(1) };
        let has_layer = self.has_layer();
        let mut passes = 1;
        for step in &chain.steps[..self.num_steps(max - 1)] {
            let ahead = if has_layer { passes } else { 0 };
            let mut batch: Vec<(&mut Sequence, Range<usize>)> = Vec::new();
            for (_, of) in ordered.iter_mut().filter(|(_, of)| of.drafts > passes) {
                let position = of.last() + ahead;
                batch.push((&mut *of.sequence, position..position + 1));
            }
            match self.pool.positions_into(&mut batch, step) {
                Err(kvant::Error::OutOfPages { .. }) => return Ok(passes),
                result => result?,
            }
            passes += 1;
        }
        // The step of an assistant serves all passes.
        Ok(if has_layer { passes } else { max })
    }

    /// The number of steps for passes after the first one. An assistant's positions do not advance.
    fn num_steps(&self, passes: usize) -> usize {
        if self.has_layer() { passes } else { passes.min(1) }
    }

    /// Moves the passes of a size to the end, or creates them.
    fn select_chain(&mut self, size: [usize; 2], passes: usize) -> Result<()> {
        match self.chains.iter().position(|chain| chain.size == size) {
            Some(index) => self.chains[index..].rotate_left(1),
            None => {
                if self.chains.len() >= MAX_PASSES {
                    self.chains.remove(0);
                }
                self.chains.push(Chain { size, steps: Vec::new(), graphs: Vec::new() });
            }
        }
        let count = self.num_steps(passes);
        if let Some(chain) = self.chains.last_mut() {
            while chain.steps.len() < count {
                chain.steps.push(self.pool.reserve_step(StepSize::decode(size[0], size[1]))?);
            }
        }
        Ok(())
    }

    fn replay_chain(&mut self, passes: usize, then: Then) -> Result<Submission> {
        let Some(Chain { size, steps, graphs }) = self.chains.last() else { return Err(no_drafter()) };
        if let Some((.., graph)) = graphs.iter().find(|(of, draw, _)| (*of, *draw) == (passes, then)) {
            return Ok(graph.replay()?);
        }
        let rows = size[0];
        // An assistant has one step.
        let steps: Vec<Step> = steps.iter().cycle().take(passes).cloned().collect();
        self.space.fit(&self.drafter, rows, rows)?;
        let graph = capture(&self.model, |enc| {
            let mut numbered = steps.iter().enumerate();
            numbered.try_for_each(|(index, step)| self.encode_next(enc, step, index + 1, rows, then))
        })?;
        let submission = graph.replay()?;
        if let Some(chain) = self.chains.last_mut() {
            chain.graphs.push((passes, then, graph));
        }
        Ok(submission)
    }

    /// Encodes pass `pass`, which reads the drafts and hidden states of the one before.
    fn encode_next(&self, enc: &mut Encoder, step: &Step, pass: usize, rows: usize, then: Then) -> Result<()> {
        let DraftBuffers { drawn, hidden, logits, .. } = &self.buffers;
        let before = (pass - 1) * self.sequences;
        let ids = drawn.rows(before..before + rows)?;
        let (from, to) = (hidden[(pass - 1) % 2].rows(0..rows)?, hidden[pass % 2].rows(0..rows)?);
        let input = DraftInput { ids: &ids, hidden: DraftHidden::Fed(&from) };
        let out = DraftOutput { rows: None, hidden: &to, logits: &logits.rows(0..rows)? };
        self.drafter.encode(enc, &self.space, &self.pool, step, input, Some(out))?;
        self.draw(enc, pass, rows, then)
    }
}

/// Uploads words to the start of a buffer, unless they were `written` there last.
fn write_changed(to: &Tensor, words: Vec<u32>, written: &mut Vec<u32>) -> Result<()> {
    if !written.starts_with(&words) {
        // Unknown until the upload has succeeded.
        written.clear();
        to.write(&words)?;
        *written = words;
    }
    Ok(())
}
