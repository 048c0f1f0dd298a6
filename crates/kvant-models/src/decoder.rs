//! Decoding token by token with a pass that was recorded once.

use kvant::{DType, Encoder, Graph, KvCache, Submission, Tensor, ops};

use crate::{Error, Model, Result, Sampling, workspace::Workspace};

/// Feeds tokens to one sequence of a cache, and draws the next tokens.
///
/// A pass of a single token is recorded the first time and replayed afterwards, including the draw. Token, position
/// and lengths are read from device memory, so nothing is planned or validated again. On CUDA, the recorded pass is a
/// CUDA graph. Results are those of [`Model::forward`].
///
/// ```no_run
/// use kvant::Device;
/// use kvant_models::{CacheOptions, Decoder, Model, Sampling};
/// let model = Model::load("path/to/a/model".as_ref(), &Device::default())?;
/// let mut cache = model.new_cache(&CacheOptions::default())?;
/// let mut decoder = Decoder::new(&model, &mut cache, 0, Sampling::default())?;
/// let mut token = decoder.next(&[2, 17, 300])?;
/// for _ in 0..10 {
///     token = decoder.next(&[token])?;
/// }
/// # Ok::<(), kvant_models::Error>(())
/// ```
pub struct Decoder<'a> {
    model: &'a Model,
    cache: &'a mut KvCache,
    sequence: usize,
    sampling: Sampling,
    /// Scratch for one token.
    space: Workspace,
    logits: Tensor,
    /// The counter of a draw that is not recorded.
    counter: Tensor,
    drawn: Tensor,
    /// The recorded pass without and with the draw.
    graphs: [Option<Graph>; 2],
}

/// The operation after a pass.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Nothing,
    Draw,
}

impl<'a> Decoder<'a> {
    /// Continues a sequence of `cache`, which need not be empty.
    ///
    /// # Errors
    /// `Kvant` for sampling parameters out of range.
    pub fn new(model: &'a Model, cache: &'a mut KvCache, sequence: usize, sampling: Sampling) -> Result<Decoder<'a>> {
        let device = model.device();
        let decoder = Decoder {
            space: model.workspace(1)?,
            model,
            cache,
            sequence,
            sampling,
            logits: Tensor::zeros(device, DType::F32, &[1, model.vocab_size()])?,
            counter: Tensor::zeros(device, DType::U32, &[1])?,
            drawn: Tensor::zeros(device, DType::U32, &[1])?,
            graphs: [None, None],
        };
        // Invalid sampling parameters are errors now, before a prompt is fed.
        decoder.draw()?;
        Ok(decoder)
    }

    /// The cache.
    pub fn cache(&self) -> &KvCache {
        self.cache
    }

    /// The logits of the last token fed, f32 `[1, vocab_size]`.
    pub fn logits(&self) -> &Tensor {
        &self.logits
    }

    /// Feeds tokens. [`Decoder::logits`] then holds the logits of the last one.
    ///
    /// # Errors
    /// Those of [`Model::forward`], with the same effect on the sequence.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<()> {
        let before = self.cache.len(self.sequence)?;
        let replay = self.run(tokens, Then::Nothing)?;
        let done = wait(replay);
        self.undo(before, done)
    }

    /// Feeds tokens and draws the next one.
    ///
    /// # Errors
    /// As [`Decoder::feed`]; `NotANumber`. If only the draw fails, the fed tokens are removed again, unless they are
    /// more than sliding windows can restore: then they stay.
    pub fn next(&mut self, tokens: &[u32]) -> Result<u32> {
        let before = self.cache.len(self.sequence)?;
        let replay = self.run(tokens, Then::Draw)?;
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
        self.undo(before, drawn)
    }

    /// Truncates the sequence to `len` tokens.
    ///
    /// # Errors
    /// `Kvant`, as [`KvCache::truncate`].
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        Ok(self.cache.truncate(self.sequence, len)?)
    }

    /// Runs a pass. The returned replay may not have finished.
    fn run(&mut self, tokens: &[u32], then: Then) -> Result<Option<Submission>> {
        let before = self.cache.len(self.sequence)?;
        if let &[token] = tokens {
            self.model.check(self.cache, self.sequence, tokens)?;
            let replayed = self.replay(token, then);
            return self.undo(before, replayed).map(Some);
        }
        self.model.forward_into(self.cache, self.sequence, tokens, &self.logits)?;
        if then == Then::Nothing {
            return Ok(None);
        }
        let drawn = self.count_and_draw();
        self.undo(before, drawn).map(|()| None)
    }

    /// Removes the fed tokens if `result` is an error. If rings have overwritten the positions before, the tokens
    /// stay; the error is returned in any case.
    fn undo<T>(&mut self, before: usize, result: Result<T>) -> Result<T> {
        if result.is_err() {
            let _ = self.cache.truncate(self.sequence, before);
        }
        result
    }

    fn replay(&mut self, token: u32, then: Then) -> Result<Submission> {
        self.space.views.ids.write(&[token])?;
        self.space.append(self.cache, self.sequence, 1)?;
        if self.graphs[then as usize].is_none() {
            self.graphs[then as usize] = Some(self.record(then)?);
        }
        Ok(self.graphs[then as usize].as_ref().expect("just recorded").replay()?)
    }

    fn record(&self, then: Then) -> Result<Graph> {
        let mut encoded = Ok(());
        let graph = Encoder::capture(self.model.device(), |enc| {
            encoded = self.model.gemma4().encode(enc, &self.space, self.cache, Some(&self.logits));
            if encoded.is_ok() && then == Then::Draw {
                // The counter is the position, as in `count_and_draw`, read from the step.
                let counter = self.space.parts().0.lens.rows(self.sequence..self.sequence + 1)?;
                ops::sample(enc, &self.sample(&counter))?;
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
        self.counter.write(&[self.cache.len(self.sequence)? as u32])?;
        self.draw()
    }

    fn draw(&self) -> Result<()> {
        let mut enc = self.model.device().encoder()?;
        ops::sample(&mut enc, &self.sample(&self.counter))?;
        Ok(enc.commit()?.wait()?)
    }

    fn sample<'s>(&'s self, counter: &'s Tensor) -> ops::Sample<'s> {
        let Sampling { temperature, top_p, top_k, min_p, seed } = self.sampling;
        ops::Sample { logits: &self.logits, temperature, top_k, top_p, min_p, seed, counter, out: &self.drawn }
    }
}

fn wait(replay: Option<Submission>) -> Result<()> {
    Ok(replay.map_or(Ok(()), Submission::wait)?)
}
