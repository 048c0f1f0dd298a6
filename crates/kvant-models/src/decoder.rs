//! Decoding token by token with a pass that was recorded once.

use kvant::{Sequence, Submission, Tensor};

use crate::{BatchDecoder, DeviceSampler, Error, Model, Result, Sampler, Sampling};

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
    sequence: &'a mut Sequence,
    sampler: Sampler,
    /// The latest token drawn.
    latest: Option<u32>,
    /// The recorded passes, of one row.
    passes: BatchDecoder,
    logits: Tensor,
    /// Draws after a pass that is not recorded.
    device_sampler: DeviceSampler,
    model: &'a Model,
}

impl<'a> Decoder<'a> {
    /// Continues a sequence, which need not be empty.
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
    /// Those of [`Model::feed`], with the same effect on the sequence.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<()> {
        let before = self.sequence.len();
        let fed = match tokens {
            &[token] => self.replay(token, false).and_then(|replay| Ok(replay.wait()?)),
            _ => return self.model.feed_into(self.sequence, tokens, &self.logits),
        };
        self.undo(before, fed)
    }

    /// Feeds tokens and draws the next one. For penalties, a token counts as generated if it was drawn by the call
    /// before.
    ///
    /// # Errors
    /// As [`Decoder::feed`]; `NotANumber`; `NothingAllowed`. If only the draw fails, the fed tokens are removed again,
    /// unless they are more than sliding windows can restore: then they stay.
    pub fn next(&mut self, tokens: &[u32]) -> Result<u32> {
        let before = self.sequence.len();
        let drawn = match tokens {
            &[token] if self.sampler.sampling().is_plain() => self.replay_and_draw(token),
            _ => self.feed(tokens).and_then(|()| self.adjust_and_draw(tokens)),
        };
        // None: all logits are NaN.
        let drawn = drawn.and_then(|drawn| {
            let position = (before + tokens.len()).saturating_sub(1);
            drawn.ok_or(Error::NotANumber { position, activations: self.model.activations() })
        });
        self.latest = drawn.as_ref().ok().copied();
        self.undo(before, drawn)
    }

    /// Truncates the sequence to `len` tokens.
    ///
    /// # Errors
    /// `Kvant`, as [`Sequence::truncate`].
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        Ok(self.sequence.truncate(len)?)
    }

    /// Removes the fed tokens if `result` is an error. If windows have passed the positions before, the tokens stay;
    /// the error is returned in any case.
    fn undo<T>(&mut self, before: usize, result: Result<T>) -> Result<T> {
        if result.is_err() {
            let _ = self.sequence.truncate(before);
        }
        result
    }

    /// Starts the recorded pass of a token.
    fn replay(&mut self, token: u32, draws: bool) -> Result<Submission> {
        self.model.check_tokens(&[token])?;
        self.passes.append(&mut [(&mut *self.sequence, 1)])?;
        let sampling = [self.sampler.sampling()];
        self.passes.run(&[token], if draws { &sampling } else { &[] })
    }

    fn replay_and_draw(&mut self, token: u32) -> Result<Option<u32>> {
        let replay = self.replay(token, true)?;
        // The download also waits, but another thread may already have received the failure of this replay. `wait`
        // afterwards returns it in any case.
        let drawn = self.passes.drawn()?.to_vec::<u32>();
        replay.wait()?;
        Ok(drawn?.first().copied().filter(|&token| token != u32::MAX))
    }

    /// Draws after a pass that is not recorded, or from logits that are changed on the host.
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
        // The counter depends only on the position, so that a run that continues from a snapshot draws the same
        // tokens.
        let how = (self.sampler.sampling(), self.sequence.len() as u32);
        Ok(self.device_sampler.draw(&self.logits, &[how])?.first().copied().flatten())
    }
}
