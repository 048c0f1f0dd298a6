//! Decodes token by token with a recorded pass.

use kvant::{Sequence, Submission, Tensor};

use crate::{BatchDecoder, DeviceSampler, Error, Model, Result, Sampler, Sampling};

/// Feeds tokens to one sequence, and samples the next ones.
///
/// The pass of a single token is recorded once and then replayed, including the sampling. Token, position and lengths
/// are read from device memory, so nothing is planned or validated again. On CUDA, the recorded pass is a CUDA graph.
/// Results equal [`Model::feed`]'s.
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
    sequence: &'a mut Sequence,
    sampler: Sampler,
    /// The latest sampled token.
    latest: Option<u32>,
    /// The recorded passes of one row.
    passes: BatchDecoder,
    logits: Tensor,
    /// Samples after a pass that is not recorded.
    device_sampler: DeviceSampler,
    model: &'a Model,
}

impl<'a> Decoder<'a> {
    /// Continues a sequence, which may contain tokens.
    ///
    /// # Errors
    /// `Argument` for a sequence of another model's pool, and for sampling parameters out of range.
    pub fn new(model: &'a Model, sequence: &'a mut Sequence, sampling: Sampling) -> Result<Decoder<'a>> {
        let passes = BatchDecoder::new(model, sequence.pool(), 1)?;
        Ok(Decoder {
            sampler: Sampler::new(sampling, model.vocab_size())?,
            latest: None,
            logits: passes.first_logits()?,
            device_sampler: DeviceSampler::new(model.device(), 1)?,
            passes,
            sequence,
            model,
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
    /// As [`Model::feed`], with equal effect on the sequence.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<()> {
        let before = self.sequence.len();
        let fed = match tokens {
            &[token] => self.replay(token, false).and_then(|replay| Ok(replay.wait()?)),
            _ => return self.model.feed_into(self.sequence, tokens, &self.logits),
        };
        self.undo(before, fed)
    }

    /// Feeds tokens and samples the next one. For penalties, a token counts as generated if the previous call sampled
    /// it.
    ///
    /// # Errors
    /// As [`Decoder::feed`]; `NotANumber`; `NothingAllowed`. If only sampling fails, the fed tokens are removed, unless
    /// sliding windows cannot restore the earlier positions: then they stay.
    pub fn next(&mut self, tokens: &[u32]) -> Result<u32> {
        let before = self.sequence.len();
        let drawn = match tokens {
            &[token] if self.sampler.sampling().is_plain() => self.replay_and_draw(token),
            _ => self.feed(tokens).and_then(|()| self.adjust_and_draw(tokens)),
        };
        // `None`: all logits are NaN.
        let drawn = drawn.and_then(|drawn| {
            let position = (before + tokens.len()).saturating_sub(1);
            drawn.ok_or(Error::NotANumber { position, activations: self.model.activations() })
        });
        self.latest = drawn.as_ref().ok().copied();
        self.undo(before, drawn)
    }

    /// The number of tokens of the sequence.
    pub fn len(&self) -> usize {
        self.sequence.len()
    }

    /// Whether the sequence has no tokens.
    pub fn is_empty(&self) -> bool {
        self.sequence.is_empty()
    }

    /// Truncates the sequence to `len` tokens.
    ///
    /// # Errors
    /// `Kvant`, as [`Sequence::truncate`].
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        Ok(self.sequence.truncate(len)?)
    }

    /// If `result` is an error, removes the fed tokens and returns the error. If windows have passed the earlier
    /// positions, the tokens stay.
    fn undo<T>(&mut self, before: usize, result: Result<T>) -> Result<T> {
        if result.is_err() {
            let _ = self.sequence.truncate(before);
        }
        result
    }

    /// Launches the recorded pass of a token.
    fn replay(&mut self, token: u32, draws: bool) -> Result<Submission> {
        self.model.check_tokens(&[token])?;
        self.passes.append(&mut [(&mut *self.sequence, 1)])?;
        let sampling = [self.sampler.sampling()];
        self.passes.run(&[token], if draws { &sampling } else { &[] })
    }

    fn replay_and_draw(&mut self, token: u32) -> Result<Option<u32>> {
        let replay = self.replay(token, true)?;
        // The download also waits, but another thread may already have received the failure of this replay. `wait`
        // afterwards always returns it.
        let drawn = self.passes.drawn()?.to_vec::<u32>();
        replay.wait()?;
        Ok(drawn?.first().copied().filter(|&token| token != u32::MAX))
    }

    /// Samples after a pass that is not recorded, or from logits that the host adjusts.
    fn adjust_and_draw(&mut self, tokens: &[u32]) -> Result<Option<u32>> {
        if !self.sampler.sampling().is_plain() {
            match tokens {
                &[token] if Some(token) == self.latest => self.sampler.accept(token),
                _ => self.sampler.accept_prompt(tokens),
            }
            let mut logits = self.logits.to_vec::<f32>()?;
            if !self.sampler.adjust(&mut logits, None) {
                return Err(Error::NothingAllowed { position: self.sequence.len() });
            }
            self.logits.write(&logits)?;
        }
        // The counter depends only on the position, so that a run that continues from a snapshot samples equal tokens.
        let how = (self.sampler.sampling(), self.sequence.len() as u32);
        Ok(self.device_sampler.draw(&self.logits, &[how])?.first().copied().flatten())
    }
}
