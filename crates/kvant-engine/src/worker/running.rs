//! The state of one request in the engine's thread.

use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::Instant,
};

use kvant_models::{Pooling, Sampler, Sampling};

use super::drafting::Drafting;
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

/// The state that the next draw of a text depends on, besides its logits.
#[derive(Clone)]
pub(super) struct DrawState {
    sampler: Sampler,
    grammar: Option<GrammarState>,
    generated: usize,
}

/// A running or waiting request.
pub(super) struct Running {
    state: DrawState,
    /// Predicts tokens, if the request has drafts.
    pub drafting: Option<Box<Drafting>>,
    /// Ids that end the text.
    pub stop_ids: Vec<u32>,
    min_tokens: usize,
    pub logprobs: Option<usize>,
    pub prompt_logprobs: Option<usize>,
    /// The sum of the hidden states for its embedding.
    pub pooled: Option<Pooled>,
    pub prompt_len: usize,
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
            drafting: (drafts > 0 && request.max_tokens > 1).then(Box::default),
            state: DrawState { sampler, grammar, generated: 0 },
            stop_ids: request.stop_ids.unwrap_or_else(|| eos.to_vec()),
            min_tokens: request.min_tokens,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            pooled: request.pooling.map(|_| Pooled::default()),
            prompt_len: request.prompt.len(),
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

    /// The sampling parameters.
    pub fn sampling(&self) -> &Sampling {
        self.state.sampler.sampling()
    }

    /// Number of generated tokens.
    pub fn generated(&self) -> usize {
        self.state.generated
    }

    /// A copy of the state, for tokens that are not accepted yet.
    pub fn state(&self) -> DrawState {
        self.state.clone()
    }

    /// Whether logits are adjusted before sampling.
    pub fn changes_logits(&self) -> bool {
        !self.sampling().is_plain() || self.generated() < self.min_tokens || self.state.grammar.is_some()
    }

    /// The sampling parameters, if logits are not adjusted.
    pub fn plain_sampling(&self) -> Option<&Sampling> {
        (!self.changes_logits()).then(|| self.sampling())
    }

    /// Adjusts logits before sampling.
    ///
    /// # Errors
    /// The reason why no token may be sampled.
    pub fn adjust(&mut self, logits: &mut [f32]) -> Result<(), NoToken> {
        self.state.adjust(logits, self.min_tokens, &self.stop_ids)
    }

    /// Adjusts logits after a draft, which is not accepted yet. `state` is the state before it.
    ///
    /// # Errors
    /// The reason why no token may be sampled: the grammar rejects the draft, or ends with it.
    pub fn adjust_after(&self, state: &mut DrawState, draft: u32, logits: &mut [f32]) -> Result<(), NoToken> {
        state.accept(draft).map_err(NoToken::Failed)?;
        match state.is_complete() {
            true => Err(NoToken::End),
            false => state.adjust(logits, self.min_tokens, &self.stop_ids),
        }
    }

    /// The number of tokens, from the first on, that the grammar allows next.
    pub fn count_valid(&self, tokens: &[u32]) -> usize {
        self.state.grammar.as_ref().map_or(tokens.len(), |grammar| grammar.count_valid(tokens))
    }

    /// Counts a token of the text. Sets `end` if it is the last one.
    ///
    /// # Errors
    /// The grammar rejects the token.
    pub fn accept(&mut self, token: u32) -> Result<(), Failure> {
        self.state.accept(token)?;
        self.end = self.state.is_complete().then_some(FinishReason::Grammar);
        Ok(())
    }
}

impl DrawState {
    /// Counts a token.
    ///
    /// # Errors
    /// The grammar rejects it.
    fn accept(&mut self, token: u32) -> Result<(), Failure> {
        self.sampler.accept(token);
        self.generated += 1;
        self.grammar.as_mut().map_or(Ok(()), |grammar| grammar.accept(token)).map_err(Failure::Grammar)
    }

    /// Whether the grammar allows no further token.
    fn is_complete(&self) -> bool {
        self.grammar.as_ref().is_some_and(GrammarState::is_complete)
    }

    /// Adjusts logits before sampling.
    fn adjust(&mut self, logits: &mut [f32], min_tokens: usize, stop_ids: &[u32]) -> Result<(), NoToken> {
        let allowed = self.allowed(logits.len(), stop_ids);
        let allowed = allowed.map_err(|reason| NoToken::Failed(Failure::Grammar(reason)))?;
        // A stop id may still be the only remaining token.
        let _ = self.sampler.adjust(logits, allowed.as_ref().map(|allowed| &*allowed.tokens));
        if self.generated < min_tokens {
            for &id in stop_ids {
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
    fn allowed(&mut self, vocab: usize, stop_ids: &[u32]) -> Result<Option<Allowed>, String> {
        let Some(grammar) = &mut self.grammar else { return Ok(None) };
        let mut allowed = grammar.allowed()?;
        allowed.tokens.resize(vocab.div_ceil(32), 0);
        if allowed.may_end {
            for &id in stop_ids {
                if let Some(word) = allowed.tokens.get_mut(id as usize / 32) {
                    *word |= 1 << (id % 32);
                }
            }
        }
        Ok(Some(allowed))
    }
}
