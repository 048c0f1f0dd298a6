//! `kvant eval --answers`: generates answers token by token.
//!
//! A model with an f16 cache answers prompts greedily. The other caches get these prompts and the tokens of these
//! answers, one at a time, as in generation. As long as a cache's most probable token equals f16's, its own answer
//! would be equal too. The first token that differs is therefore the position at which its own answer diverges.

use kvant::Codec;
use kvant_models::{KvCodec, Logits, Model};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{
    Result,
    cache_type::CacheType,
    progress::Progress,
    row::Row,
    score::{Exact, Score},
    sequence::{self, CacheSequence},
};

#[derive(clap::Args)]
pub struct AnswerArgs {
    /// Measure answers that are generated token by token after prompts from the text: the first token at which the most
    /// probable token differs from f16's, and the divergence along the answer of f16. With --report, also a section of
    /// the report
    #[arg(long, conflicts_with = "budget")]
    pub answers: bool,
    /// Tokens of an answer. The end of text does not end it
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    answer_tokens: u32,
    /// Maximum tokens of a prompt; prompt and answer together fit into the context that the model was made for
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Maximum prompts: consecutive parts of the text
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    prompts: u32,
}

/// The results of a cache type.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AnswerLine {
    pub kv: String,
    pub prompt_tokens: usize,
    pub answer_tokens: usize,
    /// For each answer: the index of the first token that differs from f16's answer; null if none does.
    pub first_divergence: Vec<Option<usize>>,
    /// Measured along the answers of f16.
    pub kl_mean: f64,
    pub kl_p99: f64,
    pub top1_agreement: f64,
}

/// The prompts, and how they are answered.
pub struct Answers<'a> {
    model: &'a Model,
    /// Not empty; all have equal length.
    prompts: Vec<&'a [u32]>,
    answer_tokens: usize,
    page_tokens: usize,
}

impl AnswerArgs {
    /// Maximum tokens fed to a model with a context of `made_for` tokens.
    pub fn longest(&self, made_for: usize) -> usize {
        self.prompt_in(made_for) + self.answer_tokens as usize
    }

    fn prompt_in(&self, made_for: usize) -> usize {
        made_for.saturating_sub(self.answer_tokens as usize).clamp(1, self.prompt_tokens as usize)
    }

    /// Splits a text, which is not empty, into prompts.
    pub fn prompts<'a>(&self, model: &'a Model, text: &'a [u32], page_tokens: usize) -> Answers<'a> {
        let made_for = model.config().max_position_embeddings.unwrap_or(usize::MAX);
        let prompt = self.prompt_in(made_for).min(text.len());
        let prompts = text.chunks_exact(prompt).take(self.prompts as usize).collect();
        Answers { model, prompts, answer_tokens: self.answer_tokens as usize, page_tokens }
    }
}

/// A cache type that follows the answers of f16.
struct Follower {
    texts: Vec<CacheSequence>,
    /// The logits of the next token of each answer.
    next: Vec<f32>,
    score: Score,
    first_divergence: Vec<Option<usize>>,
}

impl Answers<'_> {
    /// Describes the measurement in one line.
    pub fn subject(&self) -> String {
        let (answers, prompt) = (self.prompts.len(), self.prompt_tokens());
        format!("{answers} answers of {} tokens after prompts of {prompt}", self.answer_tokens)
    }

    fn prompt_tokens(&self) -> usize {
        self.prompts.first().map_or(0, |prompt| prompt.len())
    }

    /// Measures cache types.
    pub fn measure(&self, types: &[CacheType]) -> Result<Vec<AnswerLine>> {
        let tokens = self.prompts.len() * (self.prompt_tokens() + self.answer_tokens);
        let mut progress = Progress::new("answers: ", (1 + types.len()) * tokens);
        let f16 = CacheType::from(KvCodec::from(Codec::F16));
        let mut exact = self.follower(&f16, &mut progress)?;
        let mut followers = Vec::new();
        for kv in types {
            followers.push(self.follower(kv, &mut progress)?);
        }
        for place in 0..self.answer_tokens {
            let vocabulary = self.model.vocab_size().max(1);
            let rows: Vec<Exact> = exact.next.par_chunks_exact(vocabulary).map(Exact::new).collect();
            let answer: Vec<u32> = rows.iter().map(Exact::top).collect();
            followers.iter_mut().for_each(|follower| follower.compare(&rows, &answer, place));
            drop(rows);
            // No token follows the last one, so it is not fed.
            if place + 1 < self.answer_tokens {
                for follower in followers.iter_mut().chain([&mut exact]) {
                    follower.next = sequence::feed_each(self.model, &mut follower.texts, &answer)?;
                }
            }
            progress.add((1 + types.len()) * self.prompts.len());
        }
        progress.finish();
        Ok(types.iter().zip(followers).map(|(kv, follower)| self.line(kv, follower)).collect())
    }

    /// Feeds the prompts to a cache type.
    fn follower(&self, kv: &CacheType, progress: &mut Progress) -> Result<Follower> {
        let longest = self.prompt_tokens() + self.answer_tokens;
        let pool = sequence::pool(kv, self.model, self.prompts.len(), longest, self.page_tokens)?;
        let (mut texts, mut next) = (Vec::new(), Vec::new());
        // The pool has room for a single pass over all texts. A text that is fed separately keeps the pages of its last
        // pass.
        let piece = (self.model.pass_tokens() / self.prompts.len().max(1)).max(1);
        for prompt in &self.prompts {
            let mut text = CacheSequence::new(kv, &pool);
            let mut last = Vec::new();
            for piece in prompt.chunks(piece) {
                last = text.feed(self.model, piece, Logits::Last)?;
            }
            next.extend(last);
            texts.push(text);
            progress.add(prompt.len());
        }
        Ok(Follower { first_divergence: vec![None; texts.len()], texts, next, score: Score::default() })
    }

    fn line(&self, kv: &CacheType, follower: Follower) -> AnswerLine {
        let Follower { score, first_divergence, .. } = follower;
        AnswerLine {
            kv: kv.to_string(),
            prompt_tokens: self.prompt_tokens(),
            answer_tokens: self.answer_tokens,
            first_divergence,
            kl_mean: score.kl_mean(),
            kl_p99: score.kl_p99(),
            top1_agreement: score.top1_agreement(),
        }
    }
}

impl Follower {
    /// Compares the logits of token `place` of each answer with f16's.
    fn compare(&mut self, exact: &[Exact], answer: &[u32], place: usize) {
        let vocabulary = self.next.len() / exact.len().max(1);
        let others = self.next.par_chunks_exact(vocabulary.max(1));
        let compared: Vec<_> = exact
            .par_iter()
            .zip(others)
            .zip(answer)
            .map(|((exact, other), &token)| exact.compare(other, token))
            .collect();
        for (of, first) in compared.into_iter().zip(&mut self.first_divergence) {
            if !of.agrees {
                first.get_or_insert(place);
            }
            self.score.add(of);
        }
    }
}

impl AnswerLine {
    /// Number of answers equal to f16's.
    pub fn equal(&self) -> usize {
        self.first_divergence.iter().filter(|first| first.is_none()).count()
    }

    /// The median number of tokens before the first difference; the length of the answer if there is none.
    pub fn median(&self) -> usize {
        let mut tokens: Vec<usize> =
            self.first_divergence.iter().map(|first| first.unwrap_or(self.answer_tokens)).collect();
        tokens.sort_unstable();
        tokens.get(tokens.len().saturating_sub(1) / 2).copied().unwrap_or(0)
    }
}

impl Row for AnswerLine {
    const HEADER: &str = "kv          equal answers  tokens to first difference   KL mean    KL p99     top-1";

    fn row(&self) -> String {
        let same = format!("{} of {}", self.equal(), self.first_divergence.len());
        format!(
            "{:<11} {same:>13}   {:>25}  {:>8.2e}  {:>8.2e}  {:>7.3} %",
            self.kv,
            self.median(),
            self.kl_mean,
            self.kl_p99,
            self.top1_agreement * 100.0
        )
    }
}
