//! Requests, and why they are refused.

use kvant_models::{Pooling, Sampling};

use crate::CompiledGrammar;

/// One text to generate.
///
/// ```
/// use kvant_engine::{CacheScope, EngineRequest};
/// use kvant_models::Sampling;
/// let request = EngineRequest::new(vec![2, 17, 300])
///     .max_tokens(50)
///     .sampling(Sampling::default().temperature(0.8).seed(7))
///     .stop(["\n\n"])
///     .logprobs(5)
///     .cache(CacheScope::Salted(b"key of a customer".to_vec()));
/// assert!(request.prompt_logprobs.is_none());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineRequest {
    /// The ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// The largest number of tokens to generate. 0 computes the prompt only, for `prompt_logprobs`. The text ends
    /// earlier where the context ends. Default: 128.
    pub max_tokens: usize,
    /// Stop ids and stop strings end the text only after so many tokens; until then, stop ids are not drawn.
    /// Default: 0.
    pub min_tokens: usize,
    /// How tokens are drawn, seed included. Default: greedy.
    pub sampling: Sampling,
    /// Log probabilities of each generated token, with those of so many most probable tokens.
    pub logprobs: Option<usize>,
    /// The same for each token of the prompt except the first. The prompt is then computed in full, without the prefix
    /// cache.
    pub prompt_logprobs: Option<usize>,
    /// With a pooling, the request is for an embedding of its prompt, not for text; `max_tokens` must be 0.
    pub pooling: Option<Pooling>,
    /// Ids that end the text. Default: [`Tokenizer::eos`](kvant_models::Tokenizer::eos).
    pub stop_ids: Option<Vec<u32>>,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Whether the text includes the stop string that ends it. Default: false.
    pub include_stop: bool,
    /// Whether the text includes the names of special tokens. Default: false.
    pub special_tokens: bool,
    /// The language that the text must follow, from [`Engine::compile`](crate::Engine::compile). Ids that end the text
    /// are drawn only where it is complete. The text ends by itself where nothing can follow. Stop strings and
    /// `max_tokens` can end it before.
    pub grammar: Option<CompiledGrammar>,
    /// Requests of higher priority run first. One step of priority counts like an earlier arrival by 1000 steps of the
    /// engine, so that no request waits forever. Default: 0.
    pub priority: i8,
    /// Who shares this request's pages. Default: everyone.
    pub cache: CacheScope,
}

/// With whom a request shares the pages of equal prefixes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CacheScope {
    /// With all requests of this scope.
    #[default]
    Shared,
    /// With requests of the same salt, for example of one API key: others cannot find out by timing what was computed.
    Salted(Vec<u8>),
    /// With nobody.
    Private,
}

impl EngineRequest {
    /// A greedy request for 128 tokens.
    pub fn new(prompt: Vec<u32>) -> EngineRequest {
        EngineRequest {
            prompt,
            max_tokens: 128,
            min_tokens: 0,
            sampling: Sampling::default(),
            logprobs: None,
            prompt_logprobs: None,
            pooling: None,
            stop_ids: None,
            stop: Vec::new(),
            include_stop: false,
            special_tokens: false,
            grammar: None,
            priority: 0,
            cache: CacheScope::Shared,
        }
    }

    /// Asks for an embedding of the prompt, and for no text.
    #[must_use]
    pub fn embed(self, pooling: Pooling) -> Self {
        EngineRequest { pooling: Some(pooling), max_tokens: 0, ..self }
    }

    /// Sets [`EngineRequest::max_tokens`].
    #[must_use]
    pub fn max_tokens(self, max_tokens: usize) -> Self {
        EngineRequest { max_tokens, ..self }
    }

    /// Sets [`EngineRequest::min_tokens`].
    #[must_use]
    pub fn min_tokens(self, min_tokens: usize) -> Self {
        EngineRequest { min_tokens, ..self }
    }

    /// Sets [`EngineRequest::sampling`].
    #[must_use]
    pub fn sampling(self, sampling: Sampling) -> Self {
        EngineRequest { sampling, ..self }
    }

    /// Sets [`EngineRequest::logprobs`].
    #[must_use]
    pub fn logprobs(self, top: usize) -> Self {
        EngineRequest { logprobs: Some(top), ..self }
    }

    /// Sets [`EngineRequest::prompt_logprobs`].
    #[must_use]
    pub fn prompt_logprobs(self, top: usize) -> Self {
        EngineRequest { prompt_logprobs: Some(top), ..self }
    }

    /// Sets [`EngineRequest::stop_ids`]; an empty list ignores the model's end of text.
    #[must_use]
    pub fn stop_ids(self, ids: Vec<u32>) -> Self {
        EngineRequest { stop_ids: Some(ids), ..self }
    }

    /// Sets [`EngineRequest::stop`].
    #[must_use]
    pub fn stop<S: Into<String>>(self, strings: impl IntoIterator<Item = S>) -> Self {
        EngineRequest { stop: strings.into_iter().map(Into::into).collect(), ..self }
    }

    /// Sets [`EngineRequest::include_stop`].
    #[must_use]
    pub fn include_stop(self, include_stop: bool) -> Self {
        EngineRequest { include_stop, ..self }
    }

    /// Sets [`EngineRequest::special_tokens`].
    #[must_use]
    pub fn special_tokens(self, special_tokens: bool) -> Self {
        EngineRequest { special_tokens, ..self }
    }

    /// Sets [`EngineRequest::grammar`].
    #[must_use]
    pub fn grammar(self, grammar: CompiledGrammar) -> Self {
        EngineRequest { grammar: Some(grammar), ..self }
    }

    /// Sets [`EngineRequest::priority`].
    #[must_use]
    pub fn priority(self, priority: i8) -> Self {
        EngineRequest { priority, ..self }
    }

    /// Sets [`EngineRequest::cache`].
    #[must_use]
    pub fn cache(self, cache: CacheScope) -> Self {
        EngineRequest { cache, ..self }
    }
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// As many requests wait as the queue has room for. Try again later.
    #[error("the queue is full: {limit} requests run or wait")]
    Busy {
        /// The most requests that can run and wait.
        limit: usize,
    },
    /// The engine finishes its requests and takes no others.
    #[error("the engine is shutting down")]
    Draining,
    /// The engine has failed.
    #[error("the engine has failed: {reason}")]
    Unhealthy {
        /// What happened.
        reason: String,
    },
    /// The system starts no thread for the request. Try again later.
    #[error("the system cannot start a thread for the request: {reason}")]
    NoThread {
        /// The system's reason.
        reason: String,
    },
    /// The prompt leaves no room in the context.
    #[error("`prompt` must be at most {limit} tokens, got {got} tokens")]
    ContextLength {
        /// The longest prompt of this request.
        limit: usize,
        /// The tokens of the prompt.
        got: usize,
    },
    /// A field of the request is invalid.
    #[error("`{field}` must be {expected}, got {got}")]
    Invalid {
        /// The field of [`EngineRequest`] or [`Sampling`].
        field: &'static str,
        /// The accepted values, in words.
        expected: String,
        /// The actual value.
        got: String,
    },
}

impl SubmitError {
    pub(crate) fn invalid(field: &'static str, expected: impl ToString, got: impl ToString) -> SubmitError {
        SubmitError::Invalid { field, expected: expected.to_string(), got: got.to_string() }
    }
}
