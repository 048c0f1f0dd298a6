//! The state of the server, which all requests share.

use std::sync::{Arc, OnceLock, atomic::AtomicBool};

use axum::http::HeaderMap;
use kvant_engine::CacheScope;
use kvant_transfer::Transfers;
use tokio::sync::Semaphore;

use crate::{ServerOptions, error::Result, hosts, ids::now, keys, models::Catalog, statuses::Statuses, store::Store};

/// State shared by all requests.
pub(crate) struct App {
    pub models: Arc<Catalog>,
    pub options: ServerOptions,
    pub is_draining: AtomicBool,
    /// Permits to tokenise long texts.
    pub long_texts: Arc<Semaphore>,
    /// Start time of the server, in seconds since 1970.
    pub started: u64,
    /// Number of responses by status.
    pub statuses: Statuses,
    /// Conversations of earlier responses.
    pub store: Store,
    /// Transfers of prompts between workers, if the server takes part in them.
    pub transfers: OnceLock<Transfers>,
}

/// The id of a request in logs, errors and the header `x-request-id`.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(pub Arc<str>);

/// Maximum long texts that are tokenised at the same time.
const MAX_LONG_TEXTS: usize = 2;

impl App {
    pub fn new(models: Catalog, options: ServerOptions) -> App {
        let long_texts = Arc::new(Semaphore::new(MAX_LONG_TEXTS));
        let (statuses, store) = (Statuses::default(), Store::new(options.store_limit));
        let (models, is_draining) = (Arc::new(models), AtomicBool::new(false));
        let transfers = OnceLock::new();
        App { models, options, is_draining, long_texts, started: now(), statuses, store, transfers }
    }

    /// The token limit of an answer. `asked` is the request's limit, `usual` the route's default.
    pub fn max_tokens(&self, asked: Option<usize>, usual: usize) -> usize {
        let asked = asked.or(self.options.default_max_tokens).unwrap_or(usual);
        asked.min(self.options.max_tokens.unwrap_or(usize::MAX))
    }

    /// Checks the API key and the host name of a request.
    pub fn admit(&self, headers: &HeaderMap, is_public: bool) -> Result<()> {
        if let Some(names) = &self.options.hosts {
            hosts::check(names, headers)?;
        }
        if is_public { Ok(()) } else { self.options.keys.check(headers) }
    }

    /// The scope in which the request can share cached pages.
    pub fn scope(&self, headers: &HeaderMap, salt: Option<String>) -> CacheScope {
        let key = keys::key(headers).filter(|_| self.options.salt_per_key).unwrap_or_default();
        CacheScope::of_client(key, &salt.unwrap_or_default())
    }
}
