//! A retrieval test: the probability of planted needles in a long text, and whether pass keys are found.
//!
//! A needle is a passage from the end of the text, which the context does not contain otherwise. The context has a
//! needle at each of several depths. After the context, the first half of a needle is repeated. The result is the mean
//! probability of the tokens of its second half, each after the correct preceding ones. The probability in contexts
//! without needles shows how much of it does not depend on retrieval.
//!
//! A pass key is a number of five digits that a sentence in the context assigns to a person. After the context, the
//! beginning of that sentence is repeated: the key is found if the greedy continuation equals it.

mod contexts;

use kvant_models::{Logits, Tokenizer};
use serde::{Deserialize, Serialize};

pub use self::contexts::depths;
use self::contexts::{Context, DEPTHS, Planted};
use crate::{
    Result,
    cache_type::CacheType,
    formats::Format,
    measure::Measurement,
    progress::Progress,
    row::Row,
    score::Exact,
    sequence::{self, CacheSequence},
};

/// Tokens of a pass: whole pages of every size.
const STEP: usize = 256;

#[derive(clap::Args)]
pub struct NeedleArgs {
    /// Look for needles and pass keys in contexts of these lengths, up to the model's. A needle is a passage of 32
    /// tokens; its first half is repeated at the end, and the result is the mean probability of its second half. A pass
    /// key is a number of five digits; it is found if the greedy answer is that number. With --report, also a section
    /// of the report [default: none; with --report the context that the model was made for, or the text if that is
    /// shorter]
    #[arg(long, value_name = "N,…", value_delimiter = ',', conflicts_with = "budget",
        value_parser = clap::value_parser!(u32).range(1..))]
    needle_tokens: Vec<u32>,
}

impl NeedleArgs {
    /// Whether lengths are given.
    pub fn asked(&self) -> bool {
        !self.needle_tokens.is_empty()
    }

    /// Maximum length of a context.
    pub fn longest(&self) -> usize {
        self.needle_tokens.iter().max().map_or(0, |&tokens| tokens as usize)
    }

    /// The needles of all lengths that fit into the text, or of the maximum length that the model was made for.
    pub fn needles<'a>(
        &self,
        measurement: &'a Measurement<'a>,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Vec<Needles<'a>>> {
        let made_for = measurement.model.config().max_position_embeddings.unwrap_or(usize::MAX);
        let lengths: Vec<usize> = self.needle_tokens.iter().map(|&tokens| tokens as usize).collect();
        if let Some(tokens) = lengths.iter().find(|&&tokens| tokens > made_for) {
            return Err(format!(
                "--needle-tokens must be at most the model's context of {made_for} tokens, got {tokens}"
            )
            .into());
        }
        let text: Vec<u32> = measurement.windows.iter().copied().flatten().copied().collect();
        let mut all: Vec<Needles> = Vec::new();
        for tokens in if lengths.is_empty() { vec![made_for] } else { lengths } {
            let contexts = contexts::contexts(tokens, &text, tokenizer)?;
            let needles = Needles { contexts, measurement };
            // Contexts are not longer than the text.
            if needles.context() > 0 && all.iter().all(|other| other.context() != needles.context()) {
                all.push(needles);
            }
        }
        Ok(all)
    }
}

/// Contexts of one length with needles.
pub struct Needles<'a> {
    contexts: Vec<Context>,
    measurement: &'a Measurement<'a>,
}

/// The needles and pass keys that a cache type retrieves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Retrieved {
    /// The mean probability of a needle's second half, by depth.
    pub probabilities: Vec<f64>,
    /// `None` without a tokenizer.
    pub pass_keys: Option<PassKeys>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PassKeys {
    /// Number of keys that greedy answers match, by depth.
    pub found: Vec<usize>,
    /// Number of keys at each depth.
    pub of: usize,
}

/// A row of `--needle-tokens`.
#[derive(Serialize)]
pub struct NeedleLine {
    kv: String,
    /// Tokens before the cue.
    context_tokens: usize,
    /// Mean over all needles.
    needle_probability: f64,
    /// Minimum over the depths.
    needle_probability_min: f64,
    /// `None` without a tokenizer.
    pass_keys_found: Option<usize>,
    pass_keys: Option<usize>,
}

impl Needles<'_> {
    /// Tokens that a measurement feeds.
    pub fn tokens(&self) -> usize {
        let asked = |planted: &Planted| planted.asked.len() - 1;
        let of = |context: &Context| {
            context.text.len() + context.needles.iter().chain(&context.pass_keys).map(asked).sum::<usize>()
        };
        self.contexts.iter().map(of).sum()
    }

    /// Tokens before the cue.
    pub fn context(&self) -> usize {
        self.contexts.first().map_or(0, |context| context.text.len())
    }

    /// Queries all needles and pass keys with a cache type. If not `planted`, the contexts do not contain them.
    pub fn measure(&self, kv: &CacheType, planted: bool, progress: &mut Progress) -> Result<Retrieved> {
        let Measurement { model, page_tokens, .. } = *self.measurement;
        let planted_at = |context: &Context| context.needles.iter().chain(&context.pass_keys).cloned().collect();
        let all: Vec<Vec<Planted>> = self.contexts.iter().map(planted_at).collect();
        let asked = all.iter().flatten().map(|planted| planted.asked.len()).max().unwrap_or(0);
        // Forking copies the last page, and may allocate another one. A segment may be written again.
        let longest = self.context() + asked + 2 * page_tokens + kv.format().and_then(Format::segment).unwrap_or(0);
        let pool = sequence::pool(kv, model, 1, longest, page_tokens)?;
        let mut probabilities = vec![0.0; DEPTHS];
        let mut keys = PassKeys { found: vec![0; DEPTHS], of: 0 };
        for context in &self.contexts {
            let mut sequence = CacheSequence::new(kv, &pool);
            let text = if planted { &context.text } else { &context.without };
            for chunk in text.chunks(STEP.min(model.pass_tokens())) {
                sequence.feed(model, chunk, Logits::Last)?;
                progress.add(chunk.len());
            }
            for (needle, sum) in context.needles.iter().zip(&mut probabilities) {
                *sum += self.ask(&sequence, needle, progress)?.0 / self.contexts.len() as f64;
            }
            for (key, found) in context.pass_keys.iter().zip(&mut keys.found) {
                *found += usize::from(self.ask(&sequence, key, progress)?.1);
            }
            keys.of += usize::from(!context.pass_keys.is_empty());
        }
        Ok(Retrieved { probabilities, pass_keys: (keys.of > 0).then_some(keys) })
    }

    /// Feeds a cue and the rest after a context. Returns the result of [`compare`].
    fn ask(&self, context: &CacheSequence, planted: &Planted, progress: &mut Progress) -> Result<(f64, bool)> {
        let Measurement { model, .. } = *self.measurement;
        let asked = &planted.asked;
        let logits = context.fork().feed(model, &asked[..asked.len() - 1], Logits::All)?;
        progress.add(asked.len() - 1);
        Ok(compare(&logits, &asked[1..], planted.cue - 1))
    }
}

/// The mean probability of the tokens after the first `skip`, and whether each of them is the most probable token.
/// `logits` has one row per token.
fn compare(logits: &[f32], tokens: &[u32], skip: usize) -> (f64, bool) {
    let rows = logits.chunks_exact((logits.len() / tokens.len().max(1)).max(1)).zip(tokens).skip(skip);
    let (mut sum, mut is_greedy) = (0.0, true);
    for (row, &token) in rows {
        let exact = Exact::new(row);
        sum += exact.probability(token);
        is_greedy &= exact.top() == token;
    }
    (sum / tokens.len().saturating_sub(skip).max(1) as f64, is_greedy)
}

/// Measures cache types in contexts of all lengths.
pub fn lines(kv: &[CacheType], all: &[Needles]) -> Result<Vec<NeedleLine>> {
    if all.is_empty() {
        return Err(
            "--needle-tokens: needles would be a large part of the contexts or the text: both must be longer".into()
        );
    }
    let tokens: usize = all.iter().map(Needles::tokens).sum();
    let mut progress = Progress::new("needles: ", kv.len() * tokens);
    let mut lines = Vec::new();
    for needles in all {
        for kv in kv {
            lines.push(NeedleLine::new(kv, needles.context(), &needles.measure(kv, true, &mut progress)?));
        }
    }
    progress.finish();
    Ok(lines)
}

impl NeedleLine {
    fn new(kv: &CacheType, context_tokens: usize, found: &Retrieved) -> NeedleLine {
        let Retrieved { probabilities, pass_keys } = found;
        NeedleLine {
            kv: kv.to_string(),
            context_tokens,
            needle_probability: probabilities.iter().sum::<f64>() / probabilities.len() as f64,
            needle_probability_min: probabilities.iter().copied().fold(f64::INFINITY, f64::min),
            pass_keys_found: pass_keys.as_ref().map(PassKeys::all_found),
            pass_keys: pass_keys.as_ref().map(PassKeys::all),
        }
    }
}

impl Row for NeedleLine {
    const HEADER: &str = "kv           context   needles, probability   at the worst depth   pass keys";

    fn row(&self) -> String {
        let keys = self.pass_keys_found.zip(self.pass_keys);
        let keys = keys.map_or_else(|| "-".to_string(), |(found, of)| format!("{found} of {of}"));
        format!(
            "{:<11} {:>8}   {:>20.4}   {:>18.4}   {keys:>9}",
            self.kv, self.context_tokens, self.needle_probability, self.needle_probability_min
        )
    }
}

impl PassKeys {
    /// Number of keys at all depths.
    pub fn all(&self) -> usize {
        self.found.len() * self.of
    }

    /// Number of found keys at all depths.
    pub fn all_found(&self) -> usize {
        self.found.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_key_is_found_if_all_its_tokens_are_the_most_probable() {
        // Logits of three tokens; the first one belongs to the cue. ln 3 makes a token three times as probable.
        let ln_3 = 3f32.ln();
        let logits = [9.0, 0.0, 0.0, /**/ 0.0, ln_3, 0.0, /**/ 0.0, 0.0, ln_3];
        let near = |(probability, is_greedy): (f64, bool), want: f64, is_key: bool| {
            assert!((probability - want).abs() < 1e-6 && is_greedy == is_key, "{probability} {is_greedy}");
        };
        near(compare(&logits, &[1, 1, 2], 1), 0.6, true);
        near(compare(&logits, &[1, 1, 0], 1), 0.4, false);
        near(compare(&logits, &[1, 2, 2], 1), 0.4, false);
        near(compare(&logits, &[1, 2, 2], 2), 0.6, true);
    }

    #[test]
    fn lines_sum_up_all_depths() {
        let kv = "tq4".parse::<CacheType>().unwrap();
        let keys = PassKeys { found: vec![2, 0, 1], of: 2 };
        let found = Retrieved { probabilities: vec![0.5, 0.1, 0.9], pass_keys: Some(keys) };
        let line = NeedleLine::new(&kv, 1000, &found);
        assert!((line.needle_probability - 0.5).abs() < 1e-12);
        assert_eq!(line.needle_probability_min, 0.1);
        assert_eq!((line.pass_keys_found, line.pass_keys), (Some(3), Some(6)));
    }
}
