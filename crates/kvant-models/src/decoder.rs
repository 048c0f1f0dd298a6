//! Decoding token by token with a pass that was recorded once.

use kvant::{DType, Encoder, Graph, Sequence, Step, StepSize, Submission, Tensor, ops};

use crate::{
    Error, Model, Result, Sampler, Sampling,
    forward::{Wanted, Workspace},
};

/// Feeds tokens to one sequence, and draws the next tokens.
///
/// A pass of a single token is recorded the first time and replayed afterwards, including the draw. Token, position
/// and lengths are read from device memory, so nothing is planned or validated again. On CUDA, the recorded pass is a
/// CUDA graph. Results are those of [`Model::feed`].
///
/// ```no_run
/// use kvant::Device;
/// use kvant_models::{Decoder, Model, PoolOptions, Sampling};
/// let model = Model::load("path/to/a/model".as_ref(), &Device::default())?;
/// let mut sequence = model.new_pool(&PoolOptions::default())?.sequence();
/// let mut decoder = Decoder::new(&model, &mut sequence, Sampling::default())?;
/// let mut token = decoder.next(&[2, 17, 300])?;
/// for _ in 0..10 {
///     token = decoder.next(&[token])?;
/// }
/// # Ok::<(), kvant_models::Error>(())
/// ```
pub struct Decoder<'a> {
    model: &'a Model,
    sequence: &'a mut Sequence,
    sampler: Sampler,
    /// The latest token drawn.
    latest: Option<u32>,
    /// The step of the recorded passes, for lengths up to `longest`.
    step: Step,
    longest: usize,
    /// Scratch for one token.
    space: Workspace,
    logits: Tensor,
    /// The counter of a draw that is not recorded.
    counter: Tensor,
    drawn: Tensor,
    /// The recorded pass without and with the draw.
    graphs: [Option<Graph>; 2],
}

/// The first length that passes are recorded for; each next one is [`GROWTH`] times as long. Kernels and page tables
/// depend on it.
const FIRST_LONGEST: usize = 1024;
const GROWTH: usize = 4;

/// The operation after a pass.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Nothing,
    Draw,
}

impl<'a> Decoder<'a> {
    /// Continues a sequence, which need not be empty.
    ///
    /// # Errors
    /// `Argument` for a sequence of another model's pool, and for sampling parameters out of range.
    pub fn new(model: &'a Model, sequence: &'a mut Sequence, sampling: Sampling) -> Result<Decoder<'a>> {
        let device = model.device();
        model.check_pool(sequence.pool())?;
        let longest = FIRST_LONGEST;
        Ok(Decoder {
            space: model.workspace(1)?,
            step: sequence.pool().reserve_step(StepSize::decode(1, longest))?,
            longest,
            model,
            sequence,
            sampler: Sampler::new(sampling, model.vocab_size())?,
            latest: None,
            logits: Tensor::zeros(device, DType::F32, &[1, model.vocab_size()])?,
            counter: Tensor::zeros(device, DType::U32, &[1])?,
            drawn: Tensor::zeros(device, DType::U32, &[1])?,
            graphs: [None, None],
        })
    }

    /// The sequence.
    pub fn sequence(&self) -> &Sequence {
        self.sequence
    }

    /// The logits of the last token fed, f32 `[1, vocab_size]`.
    pub fn logits(&self) -> &Tensor {
        &self.logits
    }

    /// Feeds tokens. [`Decoder::logits`] then holds the logits of the last one.
    ///
    /// # Errors
    /// Those of [`Model::feed`], with the same effect on the sequence.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<()> {
        let before = self.sequence.len();
        let replay = self.run(tokens, Then::Nothing)?;
        let done = wait(replay);
        self.undo(before, done)
    }

    /// Feeds tokens and draws the next one. For penalties, a token counts as generated if it was drawn by the call
    /// before.
    ///
    /// # Errors
    /// As [`Decoder::feed`]; `NotANumber`; `NothingAllowed`. If only the draw fails, the fed tokens are removed again,
    /// unless they are more than sliding windows can restore: then they stay.
    pub fn next(&mut self, tokens: &[u32]) -> Result<u32> {
        let before = self.sequence.len();
        let replay = match self.sampler.sampling().is_plain() {
            true => self.run(tokens, Then::Draw)?,
            false => {
                let drawn = self.run(tokens, Then::Nothing).and_then(|replay| {
                    wait(replay)?;
                    self.adjust_and_draw(tokens)
                });
                self.undo(before, drawn)?;
                None
            }
        };
        // The download also waits, but another thread may already have received the failure of this replay. `wait`
        // afterwards returns it in any case.
        let fetched = self.drawn.to_vec::<u32>().map_err(Error::from);
        let drawn = wait(replay).and(fetched).and_then(|drawn| match drawn[0] {
            // All logits are NaN.
            u32::MAX => {
                Err(Error::NotANumber { position: before + tokens.len() - 1, activations: self.model.activations() })
            }
            token => Ok(token),
        });
        self.latest = drawn.as_ref().ok().copied();
        self.undo(before, drawn)
    }

    /// Draws from logits that are changed on the host.
    fn adjust_and_draw(&mut self, tokens: &[u32]) -> Result<()> {
        match tokens {
            &[token] if Some(token) == self.latest => self.sampler.accept(token),
            _ => self.sampler.accept_prompt(tokens),
        }
        let mut logits = self.logits.to_vec::<f32>()?;
        if !self.sampler.adjust(&mut logits, None) {
            return Err(Error::NothingAllowed { position: self.sequence.len() });
        }
        self.logits.write(&logits)?;
        self.count_and_draw()
    }

    /// Truncates the sequence to `len` tokens.
    ///
    /// # Errors
    /// `Kvant`, as [`Sequence::truncate`].
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        Ok(self.sequence.truncate(len)?)
    }

    /// Runs a pass. The returned replay may not have finished.
    fn run(&mut self, tokens: &[u32], then: Then) -> Result<Option<Submission>> {
        let before = self.sequence.len();
        if let &[token] = tokens {
            self.model.check_tokens(tokens)?;
            self.model.check_length(before + 1)?;
            let replayed = self.replay(token, then);
            return self.undo(before, replayed).map(Some);
        }
        self.model.feed_into(self.sequence, tokens, &self.logits)?;
        if then == Then::Nothing {
            return Ok(None);
        }
        let drawn = self.count_and_draw();
        self.undo(before, drawn).map(|()| None)
    }

    /// Removes the fed tokens if `result` is an error. If windows have passed the positions before, the tokens stay;
    /// the error is returned in any case.
    fn undo<T>(&mut self, before: usize, result: Result<T>) -> Result<T> {
        if result.is_err() {
            let _ = self.sequence.truncate(before);
        }
        result
    }

    fn replay(&mut self, token: u32, then: Then) -> Result<Submission> {
        let pool = self.sequence.pool().clone();
        while self.sequence.len() >= self.longest {
            self.longest = self.longest.saturating_mul(GROWTH);
            self.step = pool.reserve_step(StepSize::decode(1, self.longest))?;
            self.graphs = [None, None];
        }
        self.space.views.ids.write(&[token])?;
        pool.step_into(&mut [(&mut *self.sequence, 1)], &self.step)?;
        if self.graphs[then as usize].is_none() {
            self.graphs[then as usize] = Some(self.record(then)?);
        }
        Ok(self.graphs[then as usize].as_ref().expect("just recorded").replay()?)
    }

    fn record(&self, then: Then) -> Result<Graph> {
        let mut encoded = Ok(());
        let graph = Encoder::capture(self.model.device(), |enc| {
            let wanted = Wanted::Every { logits: &self.logits };
            encoded = self.model.network().encode(enc, &self.space.views, self.sequence.pool(), &self.step, &wanted);
            if encoded.is_ok() && then == Then::Draw {
                // The counter is the length, as in `count_and_draw`, read from the step.
                ops::sample(enc, &self.sample(self.step.lens()))?;
            }
            Ok(())
        });
        encoded?;
        Ok(graph?)
    }

    /// Draws after a pass that is not recorded.
    fn count_and_draw(&self) -> Result<()> {
        // The counter depends only on the position, so that a run that continues from a snapshot draws the same
        // tokens.
        self.counter.write(&[self.sequence.len() as u32])?;
        self.draw()
    }

    fn draw(&self) -> Result<()> {
        let mut enc = self.model.device().encoder()?;
        ops::sample(&mut enc, &self.sample(&self.counter))?;
        Ok(enc.commit()?.wait()?)
    }

    fn sample<'s>(&'s self, counter: &'s Tensor) -> ops::Sample<'s> {
        let Sampling { temperature, top_p, top_k, min_p, seed, .. } = *self.sampler.sampling();
        ops::Sample::new(&self.logits, counter, &self.drawn)
            .temperature(temperature)
            .top_k(top_k)
            .top_p(top_p)
            .min_p(min_p)
            .seed(seed)
    }
}

fn wait(replay: Option<Submission>) -> Result<()> {
    Ok(replay.map_or(Ok(()), Submission::wait)?)
}
