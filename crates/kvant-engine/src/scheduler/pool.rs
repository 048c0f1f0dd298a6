//! The pages of a [`KvPool`], as the scheduler sees them.

use kvant::{CacheLayer, Codec, KvPool, PrefixCache, Sequence, Step};
use kvant_models::BatchDecoder;

use super::{Storage, StorageError};

/// Kept prefixes can be continued at multiples of so many tokens, and where they end.
const KEEP_EVERY: usize = 128;

/// A [`KvPool`] as the storage of a [`Scheduler`](super::Scheduler).
pub struct PoolStorage {
    pool: KvPool,
    groups: Vec<PageGroup>,
    /// The most tokens that a sequence gets in a step.
    most_new: usize,
    /// Whether prefixes are kept.
    keeps: bool,
    decoder: Option<BatchDecoder>,
    /// The most tokens of a request in a step of the decoder.
    most_recorded: usize,
}

/// A step of a [`PoolStorage`].
#[derive(Clone, Debug)]
pub enum PoolStep {
    /// Few tokens of each request: the step that [`PoolStorage::decoder`] runs next.
    Recorded,
    /// Any other.
    Mixed(Box<Step>),
}

/// Layers with the same window.
#[derive(Debug)]
struct PageGroup {
    window: Option<usize>,
    /// Bytes of a page, and the share of the memory that no page fits into.
    page_bytes: usize,
}

impl PoolStorage {
    /// `most_new` is the most tokens of a step. `keeps`: whether requests share prefixes.
    pub fn new(pool: KvPool, most_new: usize, keeps: bool) -> PoolStorage {
        let page_tokens = pool.spec().page_tokens;
        let mut groups: Vec<PageGroup> = Vec::new();
        for layer in &pool.spec().layers {
            let CacheLayer { kv_heads, head_dim, window, k, v, .. } = *layer;
            let of_page =
                |codec: Codec| page_tokens * codec.bytes_per_vector(head_dim) + codec.bytes_per_mean(head_dim);
            let bytes = kv_heads * (of_page(k) + of_page(v));
            match groups.iter_mut().find(|group| group.window == window) {
                Some(group) => group.page_bytes += bytes,
                None => groups.push(PageGroup { window, page_bytes: bytes }),
            }
        }
        // The pool divides its memory into slabs of the largest page.
        let slab = groups.iter().map(|group| group.page_bytes).max().unwrap_or(1).max(1);
        for group in &mut groups {
            group.page_bytes = slab / (slab / group.page_bytes.max(1)).max(1);
        }
        PoolStorage { pool, groups, most_new, keeps, decoder: None, most_recorded: 0 }
    }

    /// Steps of at most `most` tokens of each request are steps of a decoder of this pool, as far as it has rows. Where
    /// pages have means, these are steps of one token of each request.
    #[must_use]
    pub fn with_decoder(self, decoder: BatchDecoder, most: usize) -> PoolStorage {
        let has_mean = |layer: &CacheLayer| [layer.k, layer.v].iter().any(|of| of.bytes_per_mean(layer.head_dim) > 0);
        let most_recorded = if self.pool.spec().layers.iter().any(has_mean) { 1 } else { most };
        PoolStorage { decoder: Some(decoder), most_recorded, ..self }
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
        if self.groups.iter().any(|group| group.window.is_some()) {
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
            && batch.iter().all(|(_, count)| *count <= self.most_recorded)
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
        let page = self.page_tokens();
        let of_group = |group: &PageGroup| {
            let all = len.div_ceil(page);
            // The window may begin and end within a page.
            let in_window = |window: usize| window.saturating_add(self.most_new).div_ceil(page) + 1;
            group.window.map_or(all, |window| in_window(window).min(all)).saturating_mul(group.page_bytes)
        };
        self.groups.iter().map(of_group).fold(0, usize::saturating_add)
    }

    fn spared(&self, found: usize) -> usize {
        let full = self.groups.iter().filter(|group| group.window.is_none());
        full.map(|group| found / self.page_tokens() * group.page_bytes).sum()
    }

    fn capacity(&self) -> usize {
        self.pool.spec().bytes
    }

    fn page_tokens(&self) -> usize {
        self.pool.spec().page_tokens
    }
}
