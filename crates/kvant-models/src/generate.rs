//! Prompt in, tokens out.

use std::{ops::ControlFlow, time::Instant};

use kvant::KvCache;

use crate::{Decoder, Error, Model, Result};

/// How a token is drawn from its logits; see [`kvant::ops::Sample`] for the order of the cuts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 or more; 0 takes the likeliest.
    pub temperature: f32,
    /// Only the likeliest tokens that together reach this share, above 0 and at most 1; 1 for all.
    pub top_p: f32,
    /// Only so many of the likeliest tokens; 0 for all.
    pub top_k: usize,
    /// Only tokens at least this likely relative to the likeliest, at least 0 and below 1; 0 for all.
    pub min_p: f32,
    /// The stream of random numbers: the same seed gives the same text.
    pub seed: u64,
}

impl Default for Sampling {
    /// Greedy.
    fn default() -> Self {
        Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 }
    }
}

/// What [`generate()`] is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The ids that the sequence is fed first; at least one.
    pub prompt: &'a [u32],
    /// How many tokens to make at most.
    pub max_tokens: usize,
    /// How they are drawn.
    pub sampling: Sampling,
    /// Ids that end the text; they are not handed out.
    pub stop: &'a [u32],
    /// The sequence of the cache that goes on; it need not be empty.
    pub sequence: usize,
}

impl<'a> Request<'a> {
    /// 128 tokens, greedily, for sequence 0.
    pub fn new(prompt: &'a [u32]) -> Request<'a> {
        Request { prompt, max_tokens: 128, sampling: Sampling::default(), stop: &[], sequence: 0 }
    }
}

/// Why [`generate()`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model chose one of the stop ids.
    Stop,
    /// `max_tokens` were made.
    Length,
    /// The cache has no room for another token.
    CacheFull,
    /// The callback said so.
    Cancelled,
}

/// What [`generate()`] did, and how long it took.
#[derive(Clone, Copy, Debug)]
pub struct GenerateStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens handed out.
    pub generated_tokens: usize,
    /// Time to feed the prompt and draw the first token.
    pub prompt_seconds: f64,
    /// Passes of a single token after that.
    pub decode_steps: usize,
    /// Time for these.
    pub decode_seconds: f64,
    /// Why it ended.
    pub finish: Finish,
}

/// Feeds a prompt and draws tokens one after another, handing each to `on_token`, which can end it.
///
/// The last token handed out has not been fed: the sequence ends before it.
///
/// # Errors
/// Those of [`Model::forward`], `NotANumber`, and `Kvant` for sampling parameters out of range.
pub fn generate(
    model: &Model,
    cache: &mut KvCache,
    request: &Request,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<GenerateStats> {
    if request.max_tokens == 0 {
        return Err(Error::argument("max_tokens", "at least 1", 0));
    }
    let mut decoder = Decoder::new(model, cache, request.sequence, request.sampling)?;
    let started = Instant::now();
    let mut token = decoder.next(request.prompt)?;
    let mut stats = GenerateStats {
        prompt_tokens: request.prompt.len(),
        generated_tokens: 0,
        prompt_seconds: started.elapsed().as_secs_f64(),
        decode_steps: 0,
        decode_seconds: 0.0,
        finish: Finish::Length,
    };
    loop {
        if request.stop.contains(&token) {
            stats.finish = Finish::Stop;
            break;
        }
        stats.generated_tokens += 1;
        if on_token(token).is_break() {
            stats.finish = Finish::Cancelled;
            break;
        }
        if stats.generated_tokens == request.max_tokens {
            break;
        }
        if decoder.cache().room(request.sequence)? == 0 {
            stats.finish = Finish::CacheFull;
            break;
        }
        // The time of the callback is the caller's.
        let started = Instant::now();
        token = decoder.next(&[token])?;
        stats.decode_seconds += started.elapsed().as_secs_f64();
        stats.decode_steps += 1;
    }
    Ok(stats)
}
