//! Token by token through a pass that was recorded once.

use kvant::{DType, Encoder, Graph, KvCache, Submission, Tensor, ops};

use crate::{Error, Model, Result, Sampling, workspace::Workspace};

/// Feeds one sequence of a cache, and draws the tokens that follow.
///
/// A pass of a single token is recorded the first time and replayed for every other one, drawing included: token, position
/// and lengths are read from device memory, so nothing is planned or validated again. On CUDA this is a CUDA graph. Results
/// are those of [`Model::forward`].
///
/// ```no_run
/// use kvant::Device;
/// use kvant_models::{CacheOptions, Decoder, Model, Sampling};
/// let model = Model::load("models/rustdoc-11m-4bit".as_ref(), &Device::default())?;
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
    /// Of one token.
    space: Workspace,
    logits: Tensor,
    /// The number of the draw, where it is not recorded.
    counter: Tensor,
    drawn: Tensor,
    /// The pass alone, and with the draw after it.
    graphs: [Option<Graph>; 2],
}

/// What follows a pass.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Nothing,
    Draw,
}

impl<'a> Decoder<'a> {
    /// Goes on with a sequence of `cache`, which need not be empty.
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
        // Parameters out of range are refused now, not when the prompt has been fed.
        decoder.draw()?;
        Ok(decoder)
    }

    /// The cache that is fed.
    pub fn cache(&self) -> &KvCache {
        self.cache
    }

    /// The logits of the last token fed, f32 `[1, vocab_size]`.
    pub fn logits(&self) -> &Tensor {
        &self.logits
    }

    /// Feeds tokens; [`Decoder::logits`] are the last one's then.
    ///
    /// # Errors
    /// Those of [`Model::forward`], which leave the sequence as they do there.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<()> {
        let before = self.cache.len(self.sequence)?;
        let replay = self.run(tokens, Then::Nothing)?;
        let done = wait(replay);
        self.undo(before, done)
    }

    /// Feeds tokens and draws the one that follows.
    ///
    /// # Errors
    /// As of [`Decoder::feed`], and `NotANumber`. When only the draw fails, after more tokens than sliding windows let one take
    /// back, these stay.
    pub fn next(&mut self, tokens: &[u32]) -> Result<u32> {
        let before = self.cache.len(self.sequence)?;
        let replay = self.run(tokens, Then::Draw)?;
        // Fetching waits, too, but may find that another thread has been told of a failure; waiting after it costs nothing.
        let fetched = self.drawn.to_vec::<u32>().map_err(Error::from);
        let drawn = wait(replay).and(fetched).and_then(|drawn| match drawn[0] {
            // There was nothing but NaN to draw from.
            u32::MAX => {
                Err(Error::NotANumber { position: before + tokens.len() - 1, activations: self.model.activations() })
            }
            token => Ok(token),
        });
        self.undo(before, drawn)
    }

    /// Takes tokens back: the sequence has `len` afterwards.
    ///
    /// # Errors
    /// `Kvant`, as of [`KvCache::truncate`].
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        Ok(self.cache.truncate(self.sequence, len)?)
    }

    /// A replay may still be on its way.
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

    /// The result; a failure takes back what was fed. Where rings have moved on, it stays, and the failure is told all the same.
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
                // The number of the position, as in `count_and_draw`, from where the step has it.
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
        // A position draws its own number, so that a run continued from a snapshot goes on as it would have.
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
