//! Conversations of earlier responses, for requests that continue them by `previous_response_id`.
//!
//! They are kept in memory up to a limit; the oldest are dropped first. A client can access only conversations of its
//! own API key.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use kvant_models::chat::Message;

/// Overhead of a message in bytes, in addition to its texts.
const OF_MESSAGE: usize = 256;

/// Conversations by the ids of their responses.
pub(crate) struct Store {
    /// Maximum bytes of all conversations.
    limit: usize,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    by_id: HashMap<String, Conversation>,
    /// Ids, oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

struct Conversation {
    /// The API key of the client.
    owner: Vec<u8>,
    messages: Arc<[Message]>,
    bytes: usize,
}

impl Store {
    /// Creates a store of at most `limit` bytes. With API keys, each key can use a quarter of them.
    pub fn new(limit: usize) -> Store {
        Store { limit, kept: Mutex::default() }
    }

    /// Whether conversations are kept.
    pub fn is_on(&self) -> bool {
        self.limit > 0
    }

    /// Keeps a conversation, and drops old ones to make room. A conversation that exceeds the limit is not kept.
    pub fn insert(&self, owner: &[u8], id: &str, messages: Vec<Message>) {
        let bytes = messages.iter().map(bytes_of).sum::<usize>().saturating_add(owner.len() + 2 * id.len());
        let own_limit = if owner.is_empty() { self.limit } else { self.limit / 4 };
        if bytes > own_limit {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        while kept.bytes_of(owner) + bytes > own_limit {
            kept.remove_oldest(|conversation| conversation.owner == owner);
        }
        while kept.bytes + bytes > self.limit {
            kept.remove_oldest(|_| true);
        }
        kept.bytes += bytes;
        kept.order.push_back(id.to_string());
        let conversation = Conversation { owner: owner.to_vec(), messages: messages.into(), bytes };
        kept.by_id.insert(id.to_string(), conversation);
    }

    /// Returns the conversation up to a response, if it belongs to this client.
    pub fn get(&self, owner: &[u8], id: &str) -> Option<Arc<[Message]>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.by_id.get(id).filter(|found| found.owner == owner).map(|found| Arc::clone(&found.messages))
    }
}

impl Kept {
    fn bytes_of(&self, owner: &[u8]) -> usize {
        self.by_id.values().filter(|conversation| conversation.owner == owner).map(|found| found.bytes).sum()
    }

    fn remove_oldest(&mut self, which: impl Fn(&Conversation) -> bool) {
        let oldest = self.order.iter().position(|id| self.by_id.get(id).is_some_and(&which));
        let removed = oldest.and_then(|at| self.order.remove(at)).and_then(|id| self.by_id.remove(&id));
        self.bytes -= removed.map_or(0, |conversation| conversation.bytes);
    }
}

fn bytes_of(message: &Message) -> usize {
    let content = message.content.as_ref().map_or(0, |content| content.text().len());
    let reasoning = message.reasoning_content.as_ref().map_or(0, String::len);
    let calls = message.tool_calls.iter().map(|call| OF_MESSAGE + call.function.arguments.to_string().len());
    OF_MESSAGE + content + reasoning + calls.sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(length: usize) -> Vec<Message> {
        vec![Message::user("x".repeat(length))]
    }

    #[test]
    fn the_oldest_go_first() {
        let store = Store::new(4000);
        let kept = |ids: &[&str]| ids.iter().map(|id| store.get(b"", id).is_some()).collect::<Vec<_>>();
        for id in ["a", "b", "c"] {
            store.insert(b"", id, text(1000));
        }
        assert_eq!(kept(&["a", "b", "c"]), [true, true, true]);
        store.insert(b"", "d", text(1000));
        assert_eq!(kept(&["a", "b", "c", "d"]), [false, true, true, true]);
        // Too large for the store: the others stay.
        store.insert(b"", "e", text(5000));
        assert_eq!(kept(&["b", "c", "d", "e"]), [true, true, true, false]);
        store.insert(b"", "f", text(3500));
        assert_eq!(kept(&["b", "c", "d", "f"]), [false, false, false, true]);
    }

    #[test]
    fn each_key_has_its_own() {
        let store = Store::new(8000);
        store.insert(b"one", "a", text(1000));
        assert!(store.get(b"one", "a").is_some() && store.get(b"two", "a").is_none() && store.get(b"", "a").is_none());
        // Each key has a quarter of the memory and does not displace conversations of others.
        store.insert(b"two", "b", text(1000));
        for id in ["c", "d", "e"] {
            store.insert(b"one", id, text(1500));
        }
        assert!(
            store.get(b"two", "b").is_some() && store.get(b"one", "a").is_none() && store.get(b"one", "e").is_some()
        );
        assert!(!Store::new(0).is_on());
    }
}
