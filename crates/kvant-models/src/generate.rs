//! Generates tokens from a prompt.

use std::{ops::ControlFlow, time::Instant};

use kvant::Sequence;

use crate::{Decoder, Error, Model, Result, Sampling};

/// The arguments of [`generate()`].
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The ids to feed first; at least one.
    pub prompt: &'a [u32],
    /// Maximum tokens to generate.
    pub max_tokens: usize,
    /// The sampling parameters.
    pub sampling: Sampling,
    /// Ids that end the text. They are not passed to the callback.
    pub stop: &'a [u32],
}

impl<'a> Request<'a> {
    /// A greedy request for 128 tokens.
    pub fn new(prompt: &'a [u32]) -> Request<'a> {
        Request { prompt, max_tokens: 128, sampling: Sampling::default(), stop: &[] }
    }
}

/// The reason why [`generate()`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model sampled a stop id.
    Stop,
    /// `max_tokens` tokens were generated.
    Length,
    /// The pool has no page for another token.
    OutOfPages,
    /// The callback returned `Break`.
    Cancelled,
}

/// Counts and times of a [`generate()`] call.
#[derive(Clone, Copy, Debug)]
pub struct GenerateStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens passed to the callback.
    pub generated_tokens: usize,
    /// Time to feed the prompt and sample the first token.
    pub prompt_seconds: f64,
    /// Passes of a single token after the prompt.
    pub decode_steps: usize,
    /// Time of the decode steps, without the callback.
    pub decode_seconds: f64,
    /// The reason why generation ended.
    pub finish: Finish,
}

/// Feeds a prompt to a sequence, which may contain tokens, and samples tokens one after another. Each token is passed
/// to `on_token`, which can end the generation.
///
/// The last token passed to the callback is not fed: the sequence ends before it.
///
/// # Errors
/// As [`Model::feed`]; `NotANumber`; `Argument` if `max_tokens` is 0; `Kvant` for sampling parameters out of range.
pub fn generate(
    model: &Model,
    sequence: &mut Sequence,
    request: &Request,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<GenerateStats> {
    if request.max_tokens == 0 {
        return Err(Error::argument("max_tokens", "at least 1", 0));
    }
    let mut decoder = Decoder::new(model, sequence, request.sampling.clone())?;
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
        // Time in the callback is excluded.
        let started = Instant::now();
        token = match decoder.next(&[token]) {
            Err(Error::Kvant(kvant::Error::OutOfPages { .. })) => {
                stats.finish = Finish::OutOfPages;
                break;
            }
            token => token?,
        };
        stats.decode_seconds += started.elapsed().as_secs_f64();
        stats.decode_steps += 1;
    }
    Ok(stats)
}
