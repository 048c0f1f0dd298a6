//! The pages of a [`KvPool`], as the scheduler sees them.

use kvant::{KvPool, PrefixCache, Sequence, Step};
use kvant_models::BatchDecoder;

use super::{Storage, StorageError};

/// Kept prefixes can be continued at multiples of so many tokens, and where they end.
const KEEP_EVERY: usize = 128;

/// A [`KvPool`] as the storage of a [`Scheduler`](super::Scheduler).
pub struct PoolStorage {
    pool: KvPool,
    /// The most tokens that a sequence gets in a step.
    max_new: usize,
    /// Whether prefixes are kept.
    keeps: bool,
    decoder: Option<BatchDecoder>,
    /// The most tokens of a request in a step of the decoder.
    max_recorded: usize,
}

/// A step of a [`PoolStorage`].
#[derive(Clone, Debug)]
pub enum PoolStep {
    /// Few tokens of each request: the step that [`PoolStorage::decoder`] runs next.
    Recorded,
    /// Any other.
    Mixed(Box<Step>),
}

impl PoolStorage {
    /// `max_new` is the most tokens of a step. `keeps`: whether requests share prefixes.
    pub fn new(pool: KvPool, max_new: usize, keeps: bool) -> PoolStorage {
        PoolStorage { pool, max_new, keeps, decoder: None, max_recorded: 0 }
    }

    /// Steps of at most `most` tokens of each request are steps of a decoder of this pool, as far as it has rows.
    #[must_use]
    pub fn with_decoder(self, decoder: BatchDecoder, most: usize) -> PoolStorage {
        // The pool seals pages before such a step, not within it.
        let max_recorded = most.min(self.pool.spec().page_tokens);
        PoolStorage { decoder: Some(decoder), max_recorded, ..self }
    }

    /// The decoder.
    pub fn decoder(&mut self) -> Option<&mut BatchDecoder> {
        self.decoder.as_mut()
    }

    /// The pool.
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }
}

impl Storage for PoolStorage {
    type Sequence = Sequence;
    type Step = PoolStep;

    fn empty(&mut self) -> Sequence {
        self.pool.sequence()
    }

    fn find(&mut self, salt: &[u8], tokens: &[u32]) -> Result<Sequence, StorageError> {
        match self.keeps {
            true => Ok(PrefixCache::new(&self.pool, salt).find(tokens)?),
            false => Ok(self.pool.sequence()),
        }
    }

    fn keep(&mut self, salt: &[u8], sequence: &Sequence, tokens: &[u32], done: usize) -> Result<(), StorageError> {
        let page = self.page_tokens();
        if !self.keeps || tokens.len() / page == done / page && done > 0 {
            return Ok(());
        }
        let cache = PrefixCache::new(&self.pool, salt);
        // A window's pages are kept only where a prefix ends.
        if self.pool.spec().layers.iter().any(|layer| layer.window.is_some()) {
            let first = (done / KEEP_EVERY + 1) * KEEP_EVERY;
            for end in (first..tokens.len()).step_by(KEEP_EVERY) {
                let mut prefix = sequence.fork();
                // Windows may have passed the first ones.
                if prefix.truncate(end).is_ok() {
                    cache.keep(&prefix, &tokens[..end])?;
                }
            }
        }
        Ok(cache.keep(sequence, tokens)?)
    }

    fn append(&mut self, batch: &mut [(&mut Sequence, usize)]) -> Result<PoolStep, StorageError> {
        let failure = |error| match error {
            kvant::Error::OutOfPages { .. } => StorageError::OutOfPages,
            other => StorageError::Failed(other),
        };
        if let Some(decoder) = &mut self.decoder
            && batch.iter().all(|(_, count)| *count <= self.max_recorded)
            && batch.iter().map(|(_, count)| count).sum::<usize>() <= decoder.rows()
        {
            match decoder.append(batch) {
                Ok(()) => return Ok(PoolStep::Recorded),
                Err(kvant_models::Error::Kvant(error)) => return Err(failure(error)),
                // A text that is too long for the model: its pass reports that.
                Err(_) => {}
            }
        }
        self.pool.step(batch).map(|step| PoolStep::Mixed(Box::new(step))).map_err(failure)
    }

    fn truncate(&mut self, sequence: &mut Sequence, len: usize) -> Result<(), StorageError> {
        Ok(sequence.truncate(len)?)
    }

    fn len(&self, sequence: &Sequence) -> usize {
        sequence.len()
    }

    fn need(&self, len: usize) -> usize {
        self.pool.need(len, self.max_new)
    }

    fn spared(&self, found: usize) -> usize {
        self.pool.shared(found)
    }

    fn capacity(&self) -> usize {
        self.pool.spec().bytes
    }

    fn page_tokens(&self) -> usize {
        self.pool.spec().page_tokens
    }
}
