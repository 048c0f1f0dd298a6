//! The state of one request in the engine's thread.

use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::Instant,
};

use kvant_models::{Pooling, Sampler, Sampling};

use super::lookup::Lookup;
use crate::{
    Failure, FinishReason,
    commands::Job,
    grammar::{Allowed, GrammarState},
    scheduler::NewTask,
};

/// The running sum of a prompt's hidden states.
#[derive(Default)]
pub(super) struct Pooled {
    sum: Vec<f64>,
    count: usize,
}

impl Pooled {
    pub fn add(&mut self, hidden: &[f32]) {
        self.sum.resize(hidden.len(), 0.0);
        self.sum.iter_mut().zip(hidden).for_each(|(sum, &number)| *sum += f64::from(number));
        self.count += 1;
    }

    pub fn mean(&self) -> Vec<f32> {
        let count = self.count.max(1) as f64;
        self.sum.iter().map(|sum| (sum / count) as f32).collect()
    }
}

/// A running or waiting request.
pub(super) struct Running {
    pub sampler: Sampler,
    grammar: Option<GrammarState>,
    /// Proposes drafts, if the request has any.
    pub lookup: Option<Lookup>,
    /// Ids that end the text.
    pub stop_ids: Vec<u32>,
    min_tokens: usize,
    pub logprobs: Option<usize>,
    pub prompt_logprobs: Option<usize>,
    /// The sum of the hidden states for its embedding.
    pub pooled: Option<Pooled>,
    pub prompt_len: usize,
    pub generated: usize,
    pub submitted: Instant,
    /// The start of the first step; before that, the time of submission.
    pub begun: Instant,
    /// The time of the first token.
    pub first: Option<Instant>,
    /// The time of the latest token.
    pub latest: Option<Instant>,
    pub unread: Arc<AtomicUsize>,
    pub is_paused: bool,
    pub has_begun: bool,
    /// The finish reason, if the engine's thread has determined it.
    pub end: Option<FinishReason>,
}

/// The reason why no token can be sampled.
pub(super) enum NoToken {
    /// The text is complete.
    End,
    Failed(Failure),
}

impl Running {
    /// Creates a request and its task for the scheduler. `eos`: the model's stop ids. `context`: maximum tokens of a
    /// text. `drafts`: maximum drafts of a step.
    ///
    /// # Errors
    /// As [`Sampler::new`].
    pub fn new(
        job: Job,
        vocab: usize,
        context: usize,
        eos: &[u32],
        drafts: usize,
    ) -> kvant_models::Result<(Running, NewTask)> {
        let Job { id, request, grammar, reader, submitted } = job;
        let mut sampler = Sampler::new(request.sampling, vocab)?;
        sampler.accept_prompt(&request.prompt);
        let salt = request.cache.pool_salt();
        let running = Running {
            sampler,
            // Computing the masks of drafts would cost more time than drafts save.
            lookup: (drafts > 0 && grammar.is_none()).then(|| Lookup::new(drafts)),
            grammar,
            stop_ids: request.stop_ids.unwrap_or_else(|| eos.to_vec()),
            min_tokens: request.min_tokens,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            pooled: request.pooling.map(|_| Pooled::default()),
            prompt_len: request.prompt.len(),
            generated: 0,
            submitted,
            begun: submitted,
            first: None,
            latest: None,
            unread: reader.unread,
            is_paused: false,
            has_begun: false,
            end: None,
        };
        let last = request.prompt.len() - 1;
        let wanted = match (request.pooling, request.prompt_logprobs) {
            (Some(Pooling::Last), _) => last..last + 1,
            (Some(Pooling::Mean), _) => 0..last + 1,
            // The last token's logits predict the first generated token.
            (None, Some(_)) => 0..last,
            (None, None) => 0..0,
        };
        let max_tokens = request.max_tokens.min(context.saturating_sub(request.prompt.len()));
        let task = NewTask::new(id, request.prompt, max_tokens).priority(request.priority).salt(salt).wanted(wanted);
        Ok((running, task))
    }

    /// Whether logits are adjusted before sampling.
    pub fn changes_logits(&self) -> bool {
        !self.sampler.sampling().is_plain() || self.generated < self.min_tokens || self.grammar.is_some()
    }

    /// The sampling parameters, if logits are not adjusted.
    pub fn plain_sampling(&self) -> Option<&Sampling> {
        (!self.changes_logits()).then(|| self.sampler.sampling())
    }

    /// Adjusts logits before sampling. `drafts` are not accepted yet.
    ///
    /// # Errors
    /// The reason why no token may be sampled.
    pub fn adjust(&mut self, logits: &mut [f32], drafts: &[u32]) -> Result<(), NoToken> {
        let allowed = self.allowed(logits.len()).map_err(|reason| NoToken::Failed(Failure::Grammar(reason)))?;
        // A stop id may still be the only remaining token.
        let mask = allowed.as_ref().map(|allowed| &*allowed.tokens);
        let _ = match drafts {
            [] => self.sampler.adjust(logits, mask),
            drafts => {
                let mut sampler = self.sampler.clone();
                drafts.iter().for_each(|&id| sampler.accept(id));
                sampler.adjust(logits, mask)
            }
        };
        if self.generated + drafts.len() < self.min_tokens {
            for &id in &self.stop_ids {
                if let Some(logit) = logits.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        if logits.iter().any(|&logit| logit != f32::NEG_INFINITY) {
            return Ok(());
        }
        match allowed {
            Some(Allowed { may_end: true, .. }) => Err(NoToken::End),
            _ => Err(NoToken::Failed(Failure::Request("no token may be drawn".to_string()))),
        }
    }

    /// The tokens that the grammar allows, and the stop ids if the text may end.
    fn allowed(&mut self, vocab: usize) -> Result<Option<Allowed>, String> {
        let Some(grammar) = &mut self.grammar else { return Ok(None) };
        let mut allowed = grammar.allowed()?;
        allowed.tokens.resize(vocab.div_ceil(32), 0);
        if allowed.may_end {
            for &id in &self.stop_ids {
                if let Some(word) = allowed.tokens.get_mut(id as usize / 32) {
                    *word |= 1 << (id % 32);
                }
            }
        }
        Ok(Some(allowed))
    }

    /// Counts a token of the text. Sets `end` if it is the last one.
    ///
    /// # Errors
    /// The grammar rejects the token.
    pub fn accept(&mut self, token: u32) -> Result<(), Failure> {
        self.sampler.accept(token);
        self.generated += 1;
        if let Some(grammar) = &mut self.grammar {
            grammar.accept(token).map_err(Failure::Grammar)?;
            self.end = grammar.is_complete().then_some(FinishReason::Grammar);
        }
        Ok(())
    }
}
