//! Compares predictions of a text with several caches to predictions with an f32 cache.
//!
//! The tokens are divided into windows. Each starts with empty caches at position 0, and predicts its second to its
//! last token. All caches, including the f32 one, advance through a window together, a few tokens at a time. This
//! computes the f32 logits once and keeps only a few rows of logits in memory.

use kvant::{Codec, DType, KvPool, PoolSpec, Tensor};
use kvant_models::{CacheCodecs, KvCodec, Model, PoolOptions};
use rayon::prelude::*;

use crate::{
    Result,
    cache_type::CacheType,
    progress::Progress,
    score::{Comparison, Exact, Score},
    sequence::{self, CacheSequence},
};

/// A text, and how it is fed.
pub struct Measurement<'a> {
    pub model: &'a Model,
    /// Not empty; each window has at least two tokens, and none is longer than the first.
    pub windows: Vec<&'a [u32]>,
    pub step_tokens: usize,
    pub page_tokens: usize,
}

impl Measurement<'_> {
    /// A pool for one window.
    pub fn pool(&self, codecs: &CacheCodecs) -> kvant_models::Result<KvPool> {
        self.model.new_pool(&self.options(codecs))
    }

    /// The specification of a pool for one window.
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

    /// The score of each cache type. Counts processed tokens in `progress`.
    pub fn scores(&self, types: &[CacheType], progress: &mut Progress) -> Result<Vec<Score>> {
        let vocabulary = self.model.vocab_size().max(1);
        let text = |kv: &CacheType| -> Result<CacheSequence> {
            let pool = sequence::pool(kv, self.model, 1, self.longest(), self.page_tokens)?;
            Ok(CacheSequence::new(kv, &pool))
        };
        let mut exact = text(&CacheType::from(KvCodec::from(Codec::F32)))?;
        let mut candidates = Vec::new();
        for kv in types {
            candidates.push((text(kv)?, Score::default()));
        }
        let rows = self.step_tokens.min(self.longest());
        let out = Tensor::zeros(self.model.device(), DType::F32, &[rows, vocabulary])?;
        let (mut exact_rows, mut rows) = (Vec::new(), Vec::new());
        let mut weights = vec![0.0; out.elements()];
        for window in &self.windows {
            exact.clear()?;
            candidates.iter_mut().try_for_each(|(text, _)| text.clear())?;
            // The last token is predicted, but predicts nothing.
            let chunks = window[..window.len() - 1].chunks(self.step_tokens);
            for (chunk, targets) in chunks.zip(window[1..].chunks(self.step_tokens)) {
                exact.feed_all(self.model, chunk, &out, &mut exact_rows)?;
                let exact = exact_rows.par_chunks_exact(vocabulary).zip(weights.par_chunks_exact_mut(vocabulary));
                let exact: Vec<Exact> = exact.map(|(logits, weights)| Exact::within(logits, weights)).collect();
                for (text, score) in &mut candidates {
                    text.feed_all(self.model, chunk, &out, &mut rows)?;
                    let compared: Vec<Comparison> = exact
                        .par_iter()
                        .zip(rows.par_chunks_exact(vocabulary))
                        .zip(targets)
                        .map(|((exact, other), &token)| exact.compare(other, token))
                        .collect();
                    compared.into_iter().for_each(|of| score.add(of));
                }
                progress.add(chunk.len());
            }
            progress.add(1);
        }
        Ok(candidates.into_iter().map(|(_, score)| score).collect())
    }
}
