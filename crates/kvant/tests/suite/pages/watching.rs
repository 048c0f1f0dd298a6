//! Reported changes of prefixes, replayed into a model, against the prefixes that the pool finds.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
};

use kvant::{CacheLayer, Codec, Device, Error, KvPool, PoolSpec, PrefixCache, PrefixChange, PrefixPlace, Sequence};
use proptest::prelude::*;

use crate::common::proptest_cases;

const PAGE: usize = 16;
const SALTS: [&[u8]; 2] = [b"", b"tenant"];

/// The next action. Indices choose among the existing sequences.
#[derive(Clone, Debug)]
enum Action {
    /// A sequence continues the cached prefix of a prompt.
    Begin {
        salt: usize,
        prompt: u32,
        tokens: usize,
    },
    Append(u16, usize),
    Fork(u16, u32, usize),
    Keep(u16),
    End(u16),
    /// The watcher is replaced: the new one is told of all pages.
    Watch,
    Clear,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        6 => (0..2usize, 0..3u32, 1..150usize).prop_map(|(salt, prompt, tokens)| Action::Begin { salt, prompt, tokens }),
        4 => (any::<u16>(), 1..40usize).prop_map(|(which, count)| Action::Append(which, count)),
        3 => (any::<u16>(), any::<u32>(), 1..60usize).prop_map(|(which, seed, count)| Action::Fork(which, seed, count)),
        8 => any::<u16>().prop_map(Action::Keep),
        4 => any::<u16>().prop_map(Action::End),
        1 => Just(Action::Watch),
        1 => Just(Action::Clear),
    ];
    prop::collection::vec(action, 1..60)
}

/// Token `index` of a prompt. Prompts have their first pages in common.
fn token(prompt: u32, index: usize) -> u32 {
    if index < 40 { index as u32 } else { 1000 * (prompt + 1) + index as u32 }
}

/// The pages that a router knows.
#[derive(Default)]
struct Model(HashMap<u64, Known>);

struct Known {
    parent: Option<u64>,
    salt: Box<[u8]>,
    tokens: Box<[u32]>,
    places: HashSet<PrefixPlace>,
}

impl Model {
    fn apply(&mut self, change: PrefixChange) {
        match change {
            PrefixChange::Stored { hash, parent, salt, tokens, place, .. } => {
                assert_eq!(tokens.len(), PAGE);
                let known = self.0.entry(hash).or_insert_with(|| Known {
                    parent,
                    salt: salt.clone(),
                    tokens: tokens.clone(),
                    places: HashSet::new(),
                });
                assert_eq!((known.parent, &known.salt, &known.tokens), (parent, &salt, &tokens));
                assert!(known.places.insert(place), "stored twice");
                assert_eq!(known.places.len(), 1, "a page has one place");
            }
            PrefixChange::Removed { hash, place, .. } => {
                let known = self.0.get_mut(&hash).expect("a known page");
                assert!(known.places.remove(&place), "removed twice");
                if known.places.is_empty() {
                    self.0.remove(&hash);
                }
            }
            PrefixChange::Cleared => self.0.clear(),
            other => panic!("{other:?}"),
        }
    }

    /// Tokens of whole pages at the start of a prompt that the pool holds.
    fn find(&self, salt: &[u8], tokens: &[u32]) -> usize {
        let mut parent = None;
        for (index, page) in tokens.chunks_exact(PAGE).enumerate() {
            let is_next =
                |known: &Known| known.parent == parent && *known.tokens == *page && (index > 0 || *known.salt == *salt);
            match self.0.iter().find(|(_, known)| is_next(known)) {
                Some((&hash, _)) => parent = Some(hash),
                None => return index * PAGE,
            }
        }
        tokens.len() / PAGE * PAGE
    }
}

struct Tracked {
    salt: usize,
    sequence: Sequence,
    tokens: Vec<u32>,
}

struct History {
    pool: KvPool,
    model: Arc<Mutex<Model>>,
    running: Vec<Tracked>,
    /// Every text so far.
    texts: Vec<(usize, Vec<u32>)>,
}

impl History {
    fn new(layers: &[CacheLayer], pages: usize, host_bytes: usize) -> History {
        let spec = |bytes| PoolSpec::new(layers.to_vec(), bytes).page_tokens(PAGE).host_bytes(host_bytes);
        // The budget is the need of one text of `pages` pages.
        let sizes = KvPool::new(&Device::reference(), &spec(64 << 20)).unwrap();
        let pool = KvPool::new(&Device::reference(), &spec(sizes.need(pages * PAGE, PAGE))).unwrap();
        let history = History { pool, model: Arc::default(), running: Vec::new(), texts: Vec::new() };
        history.watch();
        history
    }

    fn cache(&self, salt: usize) -> PrefixCache {
        PrefixCache::new(&self.pool, SALTS[salt])
    }

    fn watch(&self) {
        *self.model.lock().unwrap_or_else(PoisonError::into_inner) = Model::default();
        let model = Arc::clone(&self.model);
        self.cache(0).watch(move |change| model.lock().unwrap_or_else(PoisonError::into_inner).apply(change));
    }

    /// Appends tokens, unless the pool is full.
    fn append(&mut self, mut tracked: Tracked, tokens: &[u32]) {
        match self.pool.step(&mut [(&mut tracked.sequence, tokens.len())]) {
            Ok(_) => tracked.tokens.extend_from_slice(tokens),
            Err(Error::OutOfPages { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        self.texts.push((tracked.salt, tracked.tokens.clone()));
        self.running.push(tracked);
    }

    /// Removes a sequence from the running ones.
    fn take(&mut self, which: u16) -> Option<Tracked> {
        let count = self.running.len();
        (count > 0).then(|| self.running.swap_remove(which as usize % count))
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::Begin { salt, prompt, tokens } => {
                let text: Vec<u32> = (0..tokens).map(|index| token(prompt, index)).collect();
                let sequence = self.cache(salt).find(&text[..tokens - 1]).unwrap();
                let found = sequence.len();
                let tracked = Tracked { salt, sequence, tokens: text[..found].to_vec() };
                self.append(tracked, &text[found..]);
            }
            Action::Append(which, count) => {
                let Some(tracked) = self.take(which) else { return };
                let tokens: Vec<u32> = (0..count).map(|index| token(9, tracked.tokens.len() + index)).collect();
                self.append(tracked, &tokens);
            }
            Action::Fork(which, seed, count) => {
                let Some(tracked) = self.take(which) else { return };
                let fork =
                    Tracked { salt: tracked.salt, sequence: tracked.sequence.fork(), tokens: tracked.tokens.clone() };
                self.running.push(tracked);
                let tokens: Vec<u32> = (0..count).map(|index| (seed % 3) * 7 + index as u32).collect();
                self.append(fork, &tokens);
            }
            Action::Keep(which) => {
                let Some(tracked) = self.take(which) else { return };
                self.cache(tracked.salt).keep(&tracked.sequence, &tracked.tokens).unwrap();
                self.running.push(tracked);
            }
            Action::End(which) => drop(self.take(which)),
            Action::Watch => self.watch(),
            Action::Clear => self.cache(1).clear(),
        }
    }

    /// Compares the model with the pool. `exactly`: every page of the tree counts: the pool has one group.
    fn check(&self, exactly: bool) {
        // Earlier texts were compared before.
        for (salt, text) in self.texts.iter().rev().take(8) {
            let known = self.model.lock().unwrap_or_else(PoisonError::into_inner).find(SALTS[*salt], text);
            let matched = self.cache(*salt).matched(text);
            assert!(known <= matched && (!exactly || known == matched), "{known} of {matched}");
            // A sequence needs at most the pages that a router knows.
            let found = self.cache(*salt).find(text).unwrap().len();
            assert!(found <= known, "{found} of {known}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(proptest_cases(60)))]
    #[test]
    fn reported_changes_are_the_cache(
        actions in actions(), pages in 4..24usize, host in 0..3usize, layers in 0..3usize,
    ) {
        let full = CacheLayer::new(1, 64, Codec::F16);
        let sealed: Codec = "tq4c".parse().unwrap();
        let (layers, exactly) = match layers {
            0 => (vec![full, full], true),
            1 => (vec![full.window(Some(20)), full], false),
            _ => (vec![CacheLayer::new(1, 256, sealed)], false),
        };
        let mut history = History::new(&layers, pages, host * 20_000);
        for action in &actions {
            history.act(action);
            history.check(exactly);
        }
    }
}

/// Equal pages of two pools have equal hashes; other salts and other tokens before them change the hash.
#[test]
fn hashes_depend_on_contents_alone() {
    let hashes = |salt: &'static [u8], first: u32| {
        let pool = KvPool::new(
            &Device::reference(),
            &PoolSpec::new(vec![CacheLayer::new(1, 64, Codec::F16)], 1 << 20).page_tokens(PAGE),
        )
        .unwrap();
        let (cache, changes) = (PrefixCache::new(&pool, salt), Arc::new(Mutex::new(Vec::new())));
        let sink = Arc::clone(&changes);
        cache.watch(move |change| sink.lock().unwrap().push(change));
        let tokens: Vec<u32> = (0..2 * PAGE as u32).map(|index| if index == 0 { first } else { index }).collect();
        let mut sequence = pool.sequence();
        pool.step(&mut [(&mut sequence, tokens.len())]).unwrap();
        cache.keep(&sequence, &tokens).unwrap();
        let changes = changes.lock().unwrap();
        let hashes = changes.iter().map(|change| match change {
            PrefixChange::Stored { hash, .. } => *hash,
            other => panic!("{other:?}"),
        });
        hashes.collect::<Vec<u64>>()
    };
    let one = hashes(b"", 5);
    assert_eq!(one.len(), 2);
    assert_eq!(one, hashes(b"", 5));
    for other in [hashes(b"salt", 5), hashes(b"", 6)] {
        assert!(other.iter().all(|hash| !one.contains(hash)), "{one:?} {other:?}");
    }
}
