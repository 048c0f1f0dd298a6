//! Implements the scheduler's storage with a [`KvPool`].

use kvant::{KvPool, PoolSpec, Prefetched, PrefixCache, Sequence, Step, ops::StateRuns};
use kvant_models::BatchDecoder;

use super::{Storage, StorageError};

/// Kept prefixes can be continued at multiples of this number of tokens, and at their end.
const KEEP_EVERY: usize = 128;

/// A [`KvPool`] as the storage of a [`Scheduler`](super::Scheduler).
pub struct PoolStorage {
    pool: KvPool,
    /// Maximum new tokens of a sequence in a step.
    max_new: usize,
    /// Tokens of a step for which the pages of each request are counted.
    share: usize,
    /// Whether prefixes are kept.
    keeps_prefixes: bool,
    /// Tokens of a prompt between kept states, if not only at the ends of steps.
    state_interval: Option<usize>,
    decoder: Option<BatchDecoder>,
    /// Maximum tokens of a request in a step of the decoder.
    max_recorded: usize,
}

/// A step of a [`PoolStorage`].
#[derive(Clone, Debug)]
pub enum PoolStep {
    /// Few tokens of each request: the step that [`PoolStorage::decoder`] runs next.
    Recorded,
    /// Any other step.
    Mixed(Box<Step>),
}

impl PoolStorage {
    /// Creates a storage. `max_new`: maximum tokens of a step. `keeps_prefixes`: whether requests share prefixes.
    pub fn new(pool: KvPool, max_new: usize, keeps_prefixes: bool) -> PoolStorage {
        PoolStorage {
            pool,
            max_new,
            share: max_new,
            keeps_prefixes,
            state_interval: None,
            decoder: None,
            max_recorded: 0,
        }
    }

    /// Counts the pages of a request as [`PoolSpec::room_for_steps`] does for `sequences` requests, which share the
    /// tokens of a step. Otherwise, pages for a whole step are counted for each.
    #[must_use]
    pub fn for_sequences(self, sequences: usize) -> PoolStorage {
        let share = PoolSpec::step_share(sequences, self.max_new).min(self.max_new);
        PoolStorage { share, ..self }
    }

    /// Sets the tokens of a prompt between kept states, rounded up to pages.
    #[must_use]
    pub fn with_state_interval(self, state_interval: Option<usize>) -> PoolStorage {
        PoolStorage { state_interval, ..self }
    }

    /// Adds a decoder, which runs steps with at most `max` tokens of each request if it has enough rows.
    #[must_use]
    pub fn with_decoder(self, decoder: BatchDecoder, max: usize) -> PoolStorage {
        // The pool seals pages before a decoder's step, not within it.
        let max_recorded = max.min(self.pool.spec().page_tokens);
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
        match self.keeps_prefixes {
            true => Ok(PrefixCache::new(&self.pool, salt).find(tokens)?),
            false => Ok(self.pool.sequence()),
        }
    }

    fn prefetch(&mut self, salt: &[u8], tokens: &[u32]) -> Result<(usize, bool), StorageError> {
        let fetched = match self.keeps_prefixes {
            true => PrefixCache::new(&self.pool, salt).prefetch(tokens)?,
            false => Prefetched::default(),
        };
        Ok((fetched.pages, fetched.is_reading))
    }

    fn stops(&mut self, salt: &[u8], tokens: &[u32]) -> Vec<usize> {
        if !self.keeps_prefixes || self.pool.spec().states.is_empty() {
            return Vec::new();
        }
        // At least one token is computed after a found prefix.
        let known = &tokens[..tokens.len().saturating_sub(1)];
        let (page, matched) = (self.page_tokens(), PrefixCache::new(&self.pool, salt).matched(known));
        let every =
            |step: usize| (1..known.len()).map(move |n| n.saturating_mul(step)).take_while(|&end| end < known.len());
        let passes = every((self.max_new / page).max(1) * page);
        let asked = self.state_interval.map(|tokens| every(tokens.max(1).saturating_add(page - 1) / page * page));
        let ends = passes.chain(asked.into_iter().flatten());
        let mut stops: Vec<usize> = ends.chain([matched, known.len() / page * page]).collect();
        stops.sort_unstable();
        stops.dedup();
        stops
    }

    fn keep(&mut self, salt: &[u8], sequence: &Sequence, tokens: &[u32], done: usize) -> Result<(), StorageError> {
        let page = self.page_tokens();
        if !self.keeps_prefixes || tokens.len() / page == done / page && done > 0 {
            return Ok(());
        }
        let cache = PrefixCache::new(&self.pool, salt);
        // Pages of a window layer are kept only at the end of a prefix.
        if self.pool.spec().layers.iter().any(|layer| layer.window.is_some()) {
            let first = (done / KEEP_EVERY + 1) * KEEP_EVERY;
            for end in (first..tokens.len()).step_by(KEEP_EVERY) {
                let mut prefix = sequence.fork();
                // A window may have moved past the first pages.
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
                // The text exceeds the model's context: the forward pass reports the error.
                Err(_) => {}
            }
        }
        self.pool.step(batch).map(|step| PoolStep::Mixed(Box::new(step))).map_err(failure)
    }

    fn max_drafts(&self) -> usize {
        // States are kept after each row of a step of few rows.
        if self.pool.spec().states.is_empty() { usize::MAX } else { StateRuns::MAX_KEPT - 1 }
    }

    fn hold(&mut self, sequence: &mut Sequence, drafts: usize) {
        // Windows hold all positions that the latest step could see.
        if !self.pool.spec().states.is_empty() {
            sequence.hold(drafts);
        }
    }

    fn truncate(&mut self, sequence: &mut Sequence, len: usize) -> Result<(), StorageError> {
        Ok(sequence.truncate(len)?)
    }

    fn len(&self, sequence: &Sequence) -> usize {
        sequence.len()
    }

    fn need(&self, len: usize) -> usize {
        self.pool.need(len, self.share)
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
