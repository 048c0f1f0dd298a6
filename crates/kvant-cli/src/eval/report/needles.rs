//! A retrieval test: how probable a model finds the rest of a needle in a long text, by the needle's depth.
//!
//! A needle is a passage from the end of the text, which is not in the context otherwise. The context has a needle at
//! each of several depths. After it, the first half of a needle is fed again: the number is the mean probability of the
//! tokens of its second half, each after the true ones before it. Without the needles, the same number shows how much a
//! model knows without retrieval.

use kvant_models::Logits;

use super::super::{
    cache_type::CacheType,
    formats::Format,
    measure::Measurement,
    progress::Progress,
    score::Exact,
    sequence::{self, CacheSequence},
};
use crate::Result;

/// Needles in a context.
const DEPTHS: usize = 8;
/// Tokens of a needle.
const NEEDLE: usize = 32;
/// Those that are fed again before the rest is predicted.
const CUE: usize = 16;
/// Tokens of a pass: whole pages of every size.
const STEP: usize = 256;
/// Contexts have so many tokens together, if the text has as many.
const TOKENS: usize = 16384;
/// The most contexts.
const ROUNDS: usize = 8;

/// Contexts with needles.
pub struct Needles<'a> {
    contexts: Vec<NeedleContext>,
    measurement: &'a Measurement<'a>,
}

struct NeedleContext {
    text: Vec<u32>,
    with_needles: Vec<u32>,
    /// In the order of their depths.
    needles: Vec<Vec<u32>>,
}

impl Needles<'_> {
    /// Contexts of `tokens` tokens, cues and the rest of needles included. `None` if these or the text are so short
    /// that needles would be a large part of them.
    pub fn new<'a>(tokens: usize, measurement: &'a Measurement<'a>) -> Option<Needles<'a>> {
        const OF_ALL: usize = DEPTHS * NEEDLE;
        let all: Vec<u32> = measurement.windows.iter().copied().flatten().copied().collect();
        let text_tokens = tokens.min(all.len().saturating_sub(OF_ALL)).checked_sub(OF_ALL + NEEDLE)?;
        if text_tokens < 2 * OF_ALL {
            return None;
        }
        let rounds = (TOKENS / text_tokens).clamp(1, ROUNDS).min(all.len() / (text_tokens + OF_ALL));
        let (texts, passages) = all.split_at(all.len() - rounds * OF_ALL);
        let context = |(text, passages): (&[u32], &[u32])| {
            let needles: Vec<Vec<u32>> = passages.chunks_exact(NEEDLE).map(<[u32]>::to_vec).collect();
            let pieces = text.chunks(text.len().div_ceil(DEPTHS)).zip(&needles);
            let with_needle = |(piece, needle): (&[u32], &Vec<u32>)| {
                let (before, after) = piece.split_at(piece.len() / 2);
                [before, needle, after].concat()
            };
            NeedleContext { text: text.to_vec(), with_needles: pieces.flat_map(with_needle).collect(), needles }
        };
        let contexts = texts.chunks_exact(text_tokens).zip(passages.chunks_exact(OF_ALL)).map(context).collect();
        Some(Needles { contexts, measurement })
    }

    /// Tokens that a measurement feeds.
    pub fn tokens(&self) -> usize {
        self.contexts.iter().map(|context| context.with_needles.len() + DEPTHS * (NEEDLE - 1)).sum()
    }

    /// Tokens before the cue of a needle.
    pub fn context(&self) -> usize {
        self.contexts.first().map_or(0, |context| context.with_needles.len())
    }

    /// The mean probability of a needle's rest at each depth, over all contexts; or of the same tokens where the
    /// contexts are without needles.
    pub fn measure(&self, kv: &CacheType, with_needles: bool, progress: &mut Progress) -> Result<Vec<f64>> {
        let Measurement { model, page_tokens, .. } = *self.measurement;
        // Of a fork, the last page is copied, and it may get another one. A tile may be written anew.
        let longest = self.context() + NEEDLE + 2 * page_tokens + kv.format().and_then(Format::tile).unwrap_or(0);
        let pool = sequence::pool(kv, model, 1, longest, page_tokens)?;
        let mut sums = vec![0.0; DEPTHS];
        for context in &self.contexts {
            let mut sequence = CacheSequence::new(kv, &pool);
            let text = if with_needles { &context.with_needles } else { &context.text };
            for chunk in text.chunks(STEP.min(model.pass_tokens())) {
                sequence.feed(model, chunk, Logits::Last)?;
                progress.add(chunk.len());
            }
            for (needle, sum) in context.needles.iter().zip(&mut sums) {
                let mut fork = sequence.fork();
                let logits = fork.feed(model, &needle[..NEEDLE - 1], Logits::All)?;
                let rows = logits.chunks_exact(model.vocab_size().max(1)).zip(&needle[1..]).skip(CUE - 1);
                let rest: f64 = rows.map(|(row, &token)| Exact::new(row).probability(token)).sum();
                *sum += rest / (NEEDLE - CUE) as f64 / self.contexts.len() as f64;
                progress.add(NEEDLE - 1);
            }
        }
        Ok(sums)
    }
}

/// The share of the text before each needle.
pub fn depths() -> Vec<f64> {
    (0..DEPTHS).map(|depth| (depth as f64 + 0.5) / DEPTHS as f64).collect()
}
