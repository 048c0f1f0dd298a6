//! Predictions of a text with several caches, against those with an f32 cache.
//!
//! The tokens are cut into windows. Each starts with empty caches at position 0 and predicts its second to its last
//! token. All caches, the f32 one included, advance through a window together, a few tokens at a time: the f32 logits
//! are computed once, and only a few rows of logits are held.

use kvant::{Codec, KvPool, PoolSpec};
use kvant_models::{CacheCodecs, Logits, Model, PoolOptions};
use rayon::prelude::*;

use super::{
    cache_type::CacheType,
    progress::Progress,
    score::{Comparison, Exact, Score},
};
use crate::Result;

/// A text, and how it is fed.
pub struct Measurement<'a> {
    pub model: &'a Model,
    /// Not empty; each has at least two tokens, and none more than the first.
    pub windows: Vec<&'a [u32]>,
    pub step_tokens: usize,
    pub page_tokens: usize,
}

impl Measurement<'_> {
    /// A pool for one window.
    pub fn pool(&self, codecs: &CacheCodecs) -> kvant_models::Result<KvPool> {
        self.model.new_pool(&self.options(codecs))
    }

    /// The specification of such a pool.
    pub fn spec(&self, codecs: &CacheCodecs) -> kvant_models::Result<PoolSpec> {
        self.model.pool_spec(&self.options(codecs))
    }

    fn options(&self, codecs: &CacheCodecs) -> PoolOptions {
        let (longest, page_tokens) = (self.longest(), self.page_tokens);
        PoolOptions { codecs: codecs.clone(), longest, page_tokens, ..PoolOptions::default() }
    }

    /// Tokens of the longest window.
    pub fn longest(&self) -> usize {
        self.windows.first().map_or(0, |window| window.len())
    }

    /// Tokens of all windows.
    pub fn tokens(&self) -> usize {
        self.windows.iter().map(|window| window.len()).sum()
    }

    /// The score of each cache type. Counts the tokens of the text in `progress`.
    pub fn scores(&self, types: &[CacheType], progress: &mut Progress) -> Result<Vec<Score>> {
        let vocabulary = self.model.vocab_size().max(1);
        let mut exact = self.pool(&Codec::F32.into())?.sequence();
        let mut candidates = Vec::new();
        for kv in types {
            kv.check(self.model)?;
            candidates.push((kv, self.pool(&kv.codecs())?.sequence(), Score::default()));
        }
        for window in &self.windows {
            exact.truncate(0)?;
            candidates.iter_mut().try_for_each(|(_, sequence, _)| sequence.truncate(0))?;
            // The last token is predicted, but predicts nothing.
            let chunks = window[..window.len() - 1].chunks(self.step_tokens);
            for (chunk, targets) in chunks.zip(window[1..].chunks(self.step_tokens)) {
                let logits = self.model.feed(&mut exact, chunk, Logits::All)?.to_f32()?;
                let exact: Vec<Exact> = logits.par_chunks_exact(vocabulary).map(Exact::new).collect();
                for (kv, sequence, score) in &mut candidates {
                    let logits = kv.feed(self.model, sequence, chunk, Logits::All)?.to_f32()?;
                    let rows = exact.par_iter().zip(logits.par_chunks_exact(vocabulary)).zip(targets);
                    let compared: Vec<Comparison> =
                        rows.map(|((exact, other), &token)| exact.compare(other, token)).collect();
                    compared.into_iter().for_each(|of| score.add(of));
                }
                progress.add(chunk.len());
            }
            progress.add(1);
        }
        Ok(candidates.into_iter().map(|(.., score)| score).collect())
    }
}
