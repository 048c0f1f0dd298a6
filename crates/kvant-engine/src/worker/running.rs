//! The state of one request in the engine's thread.

use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::Instant,
};

use kvant_models::{Result, Sampler};

use crate::{CacheScope, EngineRequest, scheduler::NewTask, text::Reader};

/// A request that was submitted.
pub(crate) struct Job {
    pub id: u64,
    pub request: EngineRequest,
    pub reader: Reader,
    pub submitted: Instant,
}

/// A request that runs or waits.
pub(super) struct Running {
    pub sampler: Sampler,
    /// Ids that end the text.
    pub stop_ids: Vec<u32>,
    min_tokens: usize,
    pub logprobs: Option<usize>,
    pub prompt_logprobs: Option<usize>,
    pub prompt_len: usize,
    pub generated: usize,
    pub submitted: Instant,
    /// When the latest token was drawn.
    pub latest: Option<Instant>,
    pub unread: Arc<AtomicUsize>,
    pub is_paused: bool,
    pub has_begun: bool,
    /// The stop id that was drawn.
    pub ended_by: Option<u32>,
}

impl Running {
    /// A request and its task for the scheduler. `eos` are the model's ids that end a text, `context` is the longest
    /// text.
    ///
    /// # Errors
    /// Those of [`Sampler::new`].
    pub fn new(job: Job, vocab: usize, context: usize, eos: &[u32]) -> Result<(Running, NewTask)> {
        let Job { id, request, reader, submitted } = job;
        let mut sampler = Sampler::new(request.sampling, vocab)?;
        sampler.accept_prompt(&request.prompt);
        let salt = match request.cache {
            CacheScope::Shared => Some(Arc::default()),
            // Not equal to the salt of all others, however it is chosen.
            CacheScope::Salted(salt) => Some([&[1], &salt[..]].concat().into()),
            CacheScope::Private => None,
        };
        let running = Running {
            sampler,
            stop_ids: request.stop_ids.unwrap_or_else(|| eos.to_vec()),
            min_tokens: request.min_tokens,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            prompt_len: request.prompt.len(),
            generated: 0,
            submitted,
            latest: None,
            unread: reader.unread,
            is_paused: false,
            has_begun: false,
            ended_by: None,
        };
        let max_tokens = request.max_tokens.min(context.saturating_sub(request.prompt.len()));
        let task = NewTask::new(id, request.prompt, max_tokens)
            .priority(request.priority)
            .salt(salt)
            .scores_prompt(request.prompt_logprobs.is_some());
        Ok((running, task))
    }

    /// Whether logits change before a token is drawn.
    pub fn changes_logits(&self) -> bool {
        !self.sampler.sampling().is_plain() || self.generated < self.min_tokens
    }

    /// Changes logits before a token is drawn. Returns whether a token is left that may be drawn.
    pub fn adjust(&self, logits: &mut [f32]) -> bool {
        // Stop ids may still take the last token that is left.
        let _ = self.sampler.adjust(logits, None);
        if self.generated < self.min_tokens {
            for &id in &self.stop_ids {
                if let Some(logit) = logits.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        logits.iter().any(|&logit| logit != f32::NEG_INFINITY)
    }
}
