//! Changes of prefixes as events of vLLM.

use std::collections::HashSet;

use kvant::{PrefixChange, PrefixPlace};
use serde::Serialize;

/// The salt of a cache, as routers see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Salt {
    /// The cache has no salt.
    None,
    /// Routers know the salt from requests.
    Known(String),
    /// Nobody else may know the salt, or the prefixes: their pages are not published.
    Secret,
}

/// An event, with the fields and the order of vLLM's.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "type")]
pub(crate) enum Event {
    BlockStored(BlockStored),
    BlockRemoved { block_hashes: Vec<u64>, medium: &'static str, group_idx: u32 },
    AllBlocksCleared {},
}

#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct BlockStored {
    block_hashes: Vec<u64>,
    parent_block_hash: Option<u64>,
    token_ids: Vec<u32>,
    block_size: usize,
    lora_id: Option<u64>,
    medium: &'static str,
    lora_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_keys: Option<Vec<Option<[String; 1]>>>,
    /// For Dynamo, which cannot know which of vLLM's extra keys is a salt.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<String>,
    group_idx: u32,
    kv_cache_spec_kind: &'static str,
}

/// The function that says how routers see a salt.
pub(crate) type Salts = Box<dyn Fn(&[u8]) -> Salt + Send>;

/// Converts changes to events.
pub(crate) struct Converter {
    page_tokens: usize,
    salts: Salts,
    /// Pages of secret salts: their descendants are not published either.
    secret: HashSet<u64>,
    events: Vec<Event>,
}

impl Converter {
    pub fn new(page_tokens: usize, salts: Salts) -> Converter {
        Converter { page_tokens, salts, secret: HashSet::new(), events: Vec::new() }
    }

    /// Takes the events of all changes since the last call.
    pub fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub fn add(&mut self, change: PrefixChange) {
        match change {
            PrefixChange::Stored { hash, parent, salt, tokens, place, .. } => {
                self.stored(hash, parent, &salt, &tokens, medium(place));
            }
            PrefixChange::Removed { hash, place, .. } => self.removed(hash, medium(place)),
            PrefixChange::Cleared => {
                self.secret.clear();
                self.events.push(Event::AllBlocksCleared {});
            }
            _ => {}
        }
    }

    fn stored(&mut self, hash: u64, parent: Option<u64>, salt: &[u8], tokens: &[u32], medium: &'static str) {
        let salt = if parent.is_some() { Salt::None } else { (self.salts)(salt) };
        if salt == Salt::Secret || parent.is_some_and(|parent| self.secret.contains(&parent)) {
            self.secret.insert(hash);
            return;
        }
        // Pages of a prompt that follow one another are one event.
        if let Some(Event::BlockStored(last)) = self.events.last_mut()
            && parent.is_some()
            && parent == last.block_hashes.last().copied()
            && last.medium == medium
        {
            last.block_hashes.push(hash);
            last.token_ids.extend_from_slice(tokens);
            if let Some(keys) = &mut last.extra_keys {
                keys.push(None);
            }
            return;
        }
        let cache_salt = if let Salt::Known(salt) = salt { Some(salt) } else { None };
        self.events.push(Event::BlockStored(BlockStored {
            block_hashes: vec![hash],
            parent_block_hash: parent,
            token_ids: tokens.to_vec(),
            block_size: self.page_tokens,
            lora_id: None,
            medium,
            lora_name: None,
            extra_keys: cache_salt.clone().map(|salt| vec![Some([salt])]),
            cache_salt,
            group_idx: 0,
            kv_cache_spec_kind: "full_attention",
        }));
    }

    fn removed(&mut self, hash: u64, medium: &'static str) {
        if self.secret.remove(&hash) {
            return;
        }
        match self.events.last_mut() {
            Some(Event::BlockRemoved { block_hashes, medium: last, .. }) if *last == medium => block_hashes.push(hash),
            _ => self.events.push(Event::BlockRemoved { block_hashes: vec![hash], medium, group_idx: 0 }),
        }
    }
}

/// vLLM's name of a place. Routers know no other name for the memory in which requests run.
fn medium(place: PrefixPlace) -> &'static str {
    match place {
        PrefixPlace::Device => "GPU",
        PrefixPlace::Host => "CPU",
    }
}

/// A batch of events in MessagePack.
pub(crate) fn batch(seconds: f64, events: &[Event], rank: u32) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let mut bytes = Vec::new();
    let mut serializer = rmp_serde::Serializer::new(&mut bytes).with_struct_map();
    (seconds, events, rank).serialize(&mut serializer)?;
    Ok(bytes)
}
