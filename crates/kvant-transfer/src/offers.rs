//! Prompts whose pages can be fetched.

use std::{
    any::Any,
    collections::HashMap,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kvant_engine::{CacheScope, Engine};
use serde_json::Value;

/// Maximum prompts that are offered at the same time. Further ones are not offered.
const MAX_OFFERS: usize = 1024;

/// A prompt whose pages can be fetched once.
pub struct Offer {
    pub engine: Engine,
    pub scope: CacheScope,
    pub tokens: Vec<u32>,
    pub progress: Arc<Progress>,
    /// Keeps the model loaded.
    pub _keep: Arc<dyn Any + Send + Sync>,
}

/// Whether a prompt is computed.
#[derive(Debug, Default)]
pub struct Progress {
    is_over: Mutex<bool>,
    ended: Condvar,
}

impl Progress {
    /// Waits for the end of the prompt, for at most `limit`. Returns whether it has ended.
    pub fn wait(&self, limit: Duration) -> bool {
        let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.ended.wait_timeout_while(is_over, limit, |is_over| !*is_over);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn end(&self) {
        *self.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.ended.notify_all();
    }
}

/// The offers of a worker.
#[derive(Default)]
pub struct Offers {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// With the end of each offer whose prompt is computed.
    offers: HashMap<[u8; 32], (Offer, Option<Instant>)>,
    is_closed: bool,
}

impl Offers {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an offer. Returns false if there are too many, or if the token is in use.
    pub fn add(&self, token: [u8; 32], offer: Offer) -> bool {
        let mut state = self.lock();
        if state.is_closed || state.offers.len() >= MAX_OFFERS || state.offers.contains_key(&token) {
            return false;
        }
        state.offers.insert(token, (offer, None));
        self.changed.notify_all();
        true
    }

    /// Takes an offer: a token is good for one connection. Waits for an unknown token for at most `limit`.
    pub fn take(&self, token: &[u8; 32], limit: Duration) -> Option<Offer> {
        let is_unknown = |state: &mut State| !state.is_closed && !state.offers.contains_key(token);
        let waited = self.changed.wait_timeout_while(self.lock(), limit, is_unknown);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.offers.remove(token).map(|(offer, _)| offer)
    }

    /// Withdraws all offers.
    pub fn clear(&self) {
        // Engines are dropped without the lock.
        drop(std::mem::take(&mut self.lock().offers));
    }

    /// Withdraws all offers, and ends [`Offers::expire`].
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.clear();
        self.changed.notify_all();
    }

    pub fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Withdraws offers when their time is over, until they are closed.
    pub fn expire(&self) {
        let mut state = self.lock();
        while !state.is_closed {
            let now = Instant::now();
            let over = state.offers.iter().filter(|(_, (_, end))| end.is_some_and(|end| end <= now));
            let over: Vec<[u8; 32]> = over.map(|(token, _)| *token).collect();
            let over: Vec<_> = over.iter().filter_map(|token| state.offers.remove(token)).collect();
            if !over.is_empty() {
                // Engines are dropped without the lock.
                drop(state);
                drop(over);
                state = self.lock();
                continue;
            }
            let next = state.offers.values().filter_map(|(_, end)| *end).min();
            state = match next {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(next) => {
                    let waited = self.changed.wait_timeout(state, next.saturating_duration_since(now));
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn end(&self, token: &[u8; 32], time: Duration) {
        if let Some((_, end)) = self.lock().offers.get_mut(token) {
            // A time without end never expires.
            *end = Instant::now().checked_add(time);
        }
        self.changed.notify_all();
    }
}

/// An offer of a prompt that is being computed. Drop it when the prompt is computed or the request has failed: its
/// receiver then gets the last pages, and the [time of the offer](crate::TransferOptions::offer_time) begins.
pub struct Offered {
    pub(crate) params: Value,
    /// `None` if there is nothing to fetch. Dropping it ends the prompt.
    pub(crate) _offer: Option<RunningOffer>,
}

pub(crate) struct RunningOffer {
    pub token: [u8; 32],
    pub time: Duration,
    pub progress: Arc<Progress>,
    pub offers: Arc<Offers>,
}

impl Offered {
    /// `kv_transfer_params` for the worker that continues. Without an offer it has `do_remote_prefill` false.
    pub fn params(&self) -> &Value {
        &self.params
    }
}

impl fmt::Debug for Offered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the token.
        f.write_str("Offered")
    }
}

impl Drop for RunningOffer {
    fn drop(&mut self) {
        self.progress.end();
        self.offers.end(&self.token, self.time);
    }
}
