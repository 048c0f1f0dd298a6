//! Options of a server.

use std::time::Duration;

use kvant_models::{Pooling, Sampling};

use crate::ApiKeys;

/// Options of a [`Server`](crate::Server).
///
/// ```
/// use kvant_server::{ApiKeys, ServerOptions};
/// let options = ServerOptions::new("rustdoc-11m").keys(ApiKeys::new(["secret"])).body_limit(1 << 20);
/// assert_eq!(options.choices, 128);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// The names of the model of [`Server::new`](crate::Server::new). Requests can use any of them; responses have the
    /// first. `*` as the last one accepts every name. [`Models`](crate::Models) have names of their own.
    pub names: Vec<String>,
    /// The accepted API keys. Default: none, and no key is required.
    pub keys: ApiKeys,
    /// Whether each API key has its own prefix cache, so that timing does not reveal the prompts of others. Default:
    /// false.
    pub salt_per_key: bool,
    /// Maximum bytes of a request body. Default: 8 MiB.
    pub body_limit: usize,
    /// Maximum messages of a conversation. Default: 2048.
    pub messages: usize,
    /// Maximum choices of a request: prompts times `n`. Default: 128.
    pub choices: usize,
    /// Maximum bytes of a JSON schema, including those of all tools. Default: 256 KiB.
    pub schema_limit: usize,
    /// Whether fields without effect are rejected too: hints, and features of other servers. Default: false.
    pub strict_fields: bool,
    /// Maximum bytes of conversations kept for `previous_response_id`; 0 keeps none. Default: 64 MiB.
    pub store_limit: usize,
    /// The time between pings in an idle stream. Default: 10 s.
    pub ping: Duration,
    /// Maximum time that a shutdown waits for running requests. Default: 30 s.
    pub drain: Duration,
    /// Maximum time that a request waits for its model to be loaded. Default: 300 s.
    pub load_time: Duration,
    /// The origin whose pages can use the server, or `*`. Default: none.
    pub cors: Option<String>,
    /// Default sampling parameters of the model of [`Server::new`](crate::Server::new). Seeds are random. Default:
    /// [`Sampling::usual`].
    pub sampling: Sampling,
    /// The pooling of embeddings of the model of [`Server::new`](crate::Server::new). Default: no embeddings.
    pub pooling: Option<Pooling>,
    /// Maximum tokens of any answer. Default: the rest of the context.
    pub max_tokens: Option<usize>,
    /// Maximum tokens of an answer if the request sets none. Default: 16 for completions, as in OpenAI's API; otherwise
    /// the rest of the context.
    pub default_max_tokens: Option<usize>,
    /// The host names by which clients can reach the server, in addition to localhost and addresses. A server on
    /// localhost needs this list against DNS rebinding: without it, a web page whose name resolves to this machine can
    /// use the server. Default: every name.
    pub hosts: Option<Vec<String>>,
    /// Maximum open connections. Further ones wait until one closes. Default: 1000.
    pub connections: usize,
    /// Maximum time to receive the head of a request, which includes the idle time after the previous response.
    /// Default: 60 s.
    pub head_time: Duration,
    /// Maximum time to receive the body of a request. Default: 60 s.
    pub body_time: Duration,
    /// Called after a long text has been tokenised, which allocates much memory: returns the freed memory to the
    /// system. Default: nothing.
    pub reclaim: Option<fn()>,
    /// The time after which a connection is closed if its client does not read. Default: 60 s.
    pub stall_time: Duration,
}

impl ServerOptions {
    /// Options for a model with this name.
    pub fn new(name: impl Into<String>) -> ServerOptions {
        ServerOptions {
            names: vec![name.into()],
            keys: ApiKeys::default(),
            salt_per_key: false,
            body_limit: 8 << 20,
            messages: 2048,
            choices: 128,
            schema_limit: 256 << 10,
            strict_fields: false,
            store_limit: 64 << 20,
            ping: Duration::from_secs(10),
            drain: Duration::from_secs(30),
            load_time: Duration::from_secs(300),
            cors: None,
            sampling: Sampling::usual(),
            pooling: None,
            max_tokens: None,
            default_max_tokens: None,
            hosts: None,
            connections: 1000,
            head_time: Duration::from_secs(60),
            body_time: Duration::from_secs(60),
            reclaim: None,
            stall_time: Duration::from_secs(60),
        }
    }

    /// Adds a name of the model.
    #[must_use]
    pub fn alias(mut self, name: impl Into<String>) -> Self {
        self.names.push(name.into());
        self
    }

    /// Sets [`ServerOptions::keys`].
    #[must_use]
    pub fn keys(self, keys: ApiKeys) -> Self {
        ServerOptions { keys, ..self }
    }

    /// Sets [`ServerOptions::salt_per_key`].
    #[must_use]
    pub fn salt_per_key(self, salt_per_key: bool) -> Self {
        ServerOptions { salt_per_key, ..self }
    }

    /// Sets [`ServerOptions::body_limit`].
    #[must_use]
    pub fn body_limit(self, bytes: usize) -> Self {
        ServerOptions { body_limit: bytes, ..self }
    }

    /// Sets [`ServerOptions::messages`].
    #[must_use]
    pub fn messages(self, messages: usize) -> Self {
        ServerOptions { messages, ..self }
    }

    /// Sets [`ServerOptions::choices`].
    #[must_use]
    pub fn choices(self, choices: usize) -> Self {
        ServerOptions { choices, ..self }
    }

    /// Sets [`ServerOptions::schema_limit`].
    #[must_use]
    pub fn schema_limit(self, bytes: usize) -> Self {
        ServerOptions { schema_limit: bytes, ..self }
    }

    /// Sets [`ServerOptions::strict_fields`].
    #[must_use]
    pub fn strict_fields(self, strict_fields: bool) -> Self {
        ServerOptions { strict_fields, ..self }
    }

    /// Sets [`ServerOptions::store_limit`].
    #[must_use]
    pub fn store_limit(self, bytes: usize) -> Self {
        ServerOptions { store_limit: bytes, ..self }
    }

    /// Sets [`ServerOptions::ping`].
    #[must_use]
    pub fn ping(self, ping: Duration) -> Self {
        ServerOptions { ping, ..self }
    }

    /// Sets [`ServerOptions::drain`].
    #[must_use]
    pub fn drain(self, drain: Duration) -> Self {
        ServerOptions { drain, ..self }
    }

    /// Sets [`ServerOptions::pooling`].
    #[must_use]
    pub fn pooling(self, pooling: Option<Pooling>) -> Self {
        ServerOptions { pooling, ..self }
    }

    /// Sets [`ServerOptions::load_time`].
    #[must_use]
    pub fn load_time(self, load_time: Duration) -> Self {
        ServerOptions { load_time, ..self }
    }

    /// Sets [`ServerOptions::cors`].
    #[must_use]
    pub fn cors(self, origin: impl Into<String>) -> Self {
        ServerOptions { cors: Some(origin.into()), ..self }
    }

    /// Sets [`ServerOptions::sampling`].
    #[must_use]
    pub fn sampling(self, sampling: Sampling) -> Self {
        ServerOptions { sampling, ..self }
    }

    /// Sets [`ServerOptions::max_tokens`].
    #[must_use]
    pub fn max_tokens(self, max_tokens: usize) -> Self {
        ServerOptions { max_tokens: Some(max_tokens), ..self }
    }

    /// Sets [`ServerOptions::default_max_tokens`].
    #[must_use]
    pub fn default_max_tokens(self, tokens: usize) -> Self {
        ServerOptions { default_max_tokens: Some(tokens), ..self }
    }

    /// Sets [`ServerOptions::hosts`].
    #[must_use]
    pub fn hosts<S: Into<String>>(self, names: impl IntoIterator<Item = S>) -> Self {
        ServerOptions { hosts: Some(names.into_iter().map(Into::into).collect()), ..self }
    }

    /// Sets [`ServerOptions::connections`].
    #[must_use]
    pub fn connections(self, connections: usize) -> Self {
        ServerOptions { connections, ..self }
    }

    /// Sets [`ServerOptions::head_time`].
    #[must_use]
    pub fn head_time(self, head_time: Duration) -> Self {
        ServerOptions { head_time, ..self }
    }

    /// Sets [`ServerOptions::body_time`].
    #[must_use]
    pub fn body_time(self, body_time: Duration) -> Self {
        ServerOptions { body_time, ..self }
    }

    /// Sets [`ServerOptions::reclaim`].
    #[must_use]
    pub fn reclaim(self, reclaim: fn()) -> Self {
        ServerOptions { reclaim: Some(reclaim), ..self }
    }

    /// Sets [`ServerOptions::stall_time`].
    #[must_use]
    pub fn stall_time(self, stall_time: Duration) -> Self {
        ServerOptions { stall_time, ..self }
    }
}
