//! Requests.

use std::sync::Arc;

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
    /// Maximum tokens to generate. 0 only computes the prompt, for `prompt_logprobs`. The end of the context also ends
    /// the text. Default: 128.
    pub max_tokens: usize,
    /// Minimum tokens before a stop id or stop string can end the text. Until then, stop ids are not sampled. Default:
    /// 0.
    pub min_tokens: usize,
    /// Sampling parameters, including the seed. Default: greedy.
    pub sampling: Sampling,
    /// Requests log probabilities of each generated token, and of this number of most probable tokens.
    pub logprobs: Option<usize>,
    /// Requests log probabilities of each token of the prompt except the first. The prompt is then computed completely,
    /// without the prefix cache.
    pub prompt_logprobs: Option<usize>,
    /// If set, the request is for an embedding of its prompt instead of text; `max_tokens` must be 0.
    pub pooling: Option<Pooling>,
    /// Ids that end the text. Default: [`Tokenizer::eos`](kvant_models::Tokenizer::eos).
    pub stop_ids: Option<Vec<u32>>,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Whether the text includes the stop string that ends it. Default: false.
    pub include_stop: bool,
    /// Whether the text includes the names of special tokens. Default: false.
    pub special_tokens: bool,
    /// The grammar that the text must follow, from [`Engine::compile`](crate::Engine::compile). Stop ids are sampled
    /// only where the text is complete. The text ends if no token can follow. Stop strings and `max_tokens` can end it
    /// earlier.
    pub grammar: Option<CompiledGrammar>,
    /// Requests of higher priority run first. One level of priority counts like arriving 1000 steps of the engine
    /// earlier, so that no request waits forever. Default: 0.
    pub priority: i8,
    /// The scope in which pages are shared. Default: all requests.
    pub cache: CacheScope,
}

/// The requests that share pages of equal prefixes with a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CacheScope {
    /// All requests of this scope.
    #[default]
    Shared,
    /// Requests with an equal salt, for example of one API key. Others cannot use timing to detect which prompts were
    /// computed.
    Salted(Vec<u8>),
    /// No other request.
    Private,
}

/// Marks salts that clients choose, so that they differ from the empty salt of [`CacheScope::Shared`].
const CLIENT_SALT: u8 = 1;

impl CacheScope {
    /// The scope of a client with an API key and a salt of its choice. Either can be empty.
    pub fn of_client(key: &[u8], salt: &str) -> CacheScope {
        if key.is_empty() && salt.is_empty() {
            return CacheScope::Shared;
        }
        // The length separates the key from the salt.
        let length = (key.len() as u64).to_le_bytes();
        CacheScope::Salted([&length, key, salt.as_bytes()].concat())
    }

    /// The salt in the pool. `None` if nothing is cached.
    pub(crate) fn pool_salt(&self) -> Option<Arc<[u8]>> {
        match self {
            CacheScope::Shared => Some(Arc::default()),
            CacheScope::Salted(salt) => Some([&[CLIENT_SALT], &salt[..]].concat().into()),
            CacheScope::Private => None,
        }
    }

    /// The salt that a client chose, from a salt in the pool; empty for [`CacheScope::Shared`]. `None` if the salt has
    /// an API key, or another form than that of [`CacheScope::of_client`].
    pub fn salt_of(pool_salt: &[u8]) -> Option<&str> {
        match pool_salt {
            [] => Some(""),
            [CLIENT_SALT, 0, 0, 0, 0, 0, 0, 0, 0, salt @ ..] => std::str::from_utf8(salt).ok(),
            _ => None,
        }
    }
}

impl EngineRequest {
    /// Creates a greedy request for 128 tokens.
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

    /// Requests an embedding of the prompt, and no text.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_of_clients() {
        let salt_of = |key: &[u8], salt: &str| {
            let pool_salt = CacheScope::of_client(key, salt).pool_salt().unwrap();
            CacheScope::salt_of(&pool_salt).map(str::to_string)
        };
        assert_eq!(salt_of(b"", "").as_deref(), Some(""));
        assert_eq!(salt_of(b"", "tenant").as_deref(), Some("tenant"));
        // Nobody learns a key, or that its prefixes exist.
        assert_eq!((salt_of(b"key", ""), salt_of(b"key", "tenant")), (None, None));
        assert_eq!(CacheScope::salt_of(b"of another program"), None);
        assert_eq!(CacheScope::Private.pool_salt(), None);
    }
}
