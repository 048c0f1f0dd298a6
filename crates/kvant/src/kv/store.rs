//! The tier of prefixes outside of the pool's memory: pages that outlive the process.
//!
//! The tree of `prefix.rs` does not record which pages are stored: a page that is neither on the device nor in host
//! memory is looked up by its key. A lookup extends the tree by nodes whose pages are only stored.

use std::collections::{HashSet, VecDeque};

use super::{
    layout::{PageKind, PoolLayout},
    pages::Page,
    pool::{KvPool, PoolState},
    prefix::{Node, PagePlace, PrefixCache, Prefixes},
    transfer::PrefixPage,
};
use crate::Result;

/// Identifies the tokens of a page and all tokens before it. Keys of different tokens must differ, even if somebody
/// chooses tokens to make them equal: use a cryptographic hash.
pub type PageKey = [u8; 32];

/// Ends of lookups that are remembered at most.
const MAX_SOUGHT: usize = 1 << 16;
/// Unwritten pages that a call of [`KvPool::store_pages`] examines at most.
const MAX_EXAMINED: usize = 64;

/// Pages of prefixes outside of a pool's memory, such as files.
///
/// The pool trusts the bytes that [`PageStore::read`] returns: a store verifies them. All pages of a layer group have
/// equal sizes. Layers that seal pages have groups of dense and of sealed pages, and recurrent states have a group.
/// A store may lose any page at any time.
pub trait PageStore: Send {
    /// The key of the empty prefix of a [salt](crate::PrefixCache::new). It must also depend on
    /// [`KvPool::page_format`], and on everything that keys and values depend on, such as the model's weights.
    fn root(&self, salt: &[u8]) -> PageKey;

    /// The key of the page with `tokens` after the page, or the empty prefix, with the key `parent`.
    fn child(&self, parent: &PageKey, tokens: &[u32]) -> PageKey;

    /// Whether the page of a layer group is stored.
    fn has(&self, key: &PageKey, group: usize) -> bool;

    /// The page of a layer group, which has `bytes` bytes. `None` if it is missing or damaged; `has` is false then.
    fn read(&mut self, key: &PageKey, group: usize, bytes: usize) -> Option<Vec<u8>>;

    /// Like [`PageStore::read`], but may read the page in the background, until a later call returns it. The pool calls
    /// it before `read` ([`PrefixCache::prefetch`](crate::PrefixCache::prefetch)). By default it reads.
    fn fetch(&mut self, key: &PageKey, group: usize, bytes: usize) -> Fetched {
        self.read(key, group, bytes).map_or(Fetched::Missing, Fetched::Page)
    }

    /// Whether [`PageStore::write`] would not wait.
    fn has_room(&self) -> bool;

    /// Stores a page, or drops it. May return before the page is written, and may wait for earlier pages.
    fn write(&mut self, key: &PageKey, group: usize, page: Vec<u8>);

    /// Marks pages, with their layer groups, as used now: those of a prefix, the last one first. Some may not be
    /// stored.
    fn touch(&mut self, pages: &[(PageKey, usize)]);

    /// Removes the pages of all salts.
    fn clear(&mut self);
}

/// The result of [`PageStore::fetch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// The page. The store need not keep it in memory.
    Page(Vec<u8>),
    /// The page is being read, or will be.
    Reading,
    /// The page is missing or damaged; `has` is false now.
    Missing,
}

/// The result of [`PrefixCache::prefetch`](crate::PrefixCache::prefetch).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prefetched {
    /// Pages that came to the device.
    pub pages: usize,
    /// Whether the store still reads pages.
    pub is_reading: bool,
}

/// The store of a pool's prefixes, and the pages that it does not have yet.
#[derive(Default)]
pub(super) struct Stored {
    pub store: Option<Box<dyn PageStore>>,
    /// Nodes and groups whose pages came to the device. Entries may be out of date.
    unwritten: VecDeque<(usize, usize)>,
    /// The last pages of lookups that did not find them. Equal lookups will come again, so their nodes become ends.
    sought: HashSet<PageKey>,
}

impl KvPool {
    /// Describes layers, codecs, states, page size and version: pools with equal descriptions store pages as equal
    /// bytes.
    pub fn page_format(&self) -> String {
        let mut lines: Vec<String> =
            super::export::describe(self).into_iter().map(|(key, value)| format!("{key}: {value}\n")).collect();
        lines.sort_unstable();
        format!("kvant {}\n{}", env!("CARGO_PKG_VERSION"), lines.concat())
    }

    /// Sets the store of the pool's prefixes. Prefixes that are evicted from memory go there, and
    /// [`PrefixCache::find`](crate::PrefixCache::find) also finds pages that are only stored. Call it before the first
    /// prefix is kept. [`KvPool::store_pages`] stores pages before they are evicted.
    pub fn set_page_store(&self, store: Box<dyn PageStore>) {
        self.lock().prefixes.stored.store = Some(store);
    }

    /// Stores up to `max` pages of kept prefixes that the store lacks, while it has room. Leaves out the ends of
    /// prefixes, which may still grow. For the time between two passes. Returns the number of pages.
    pub fn store_pages(&self, max: usize) -> usize {
        let mut state = self.lock();
        let mut written = 0;
        let count = state.prefixes.stored.unwritten.len().min(MAX_EXAMINED);
        for _ in 0..count {
            if written >= max || !state.prefixes.stored.has_room() {
                break;
            }
            let Some((node, group)) = state.prefixes.stored.unwritten.pop_front() else { break };
            if state.prefixes.nodes[node].children == 0 {
                state.prefixes.stored.unwritten.push_back((node, group));
            } else {
                written += usize::from(state.store_page(self, node, group));
            }
        }
        written
    }

    /// Stores the next page of a kept prefix that the store lacks, and waits while the store has no room. Returns false
    /// if there is none. For times without passes.
    pub fn store_next_page(&self) -> bool {
        let mut state = self.lock();
        while let Some((node, group)) = state.prefixes.stored.unwritten.pop_front() {
            if state.store_page(self, node, group) {
                return true;
            }
        }
        false
    }

    /// Stores all pages of kept prefixes that the store lacks. For the end of a process.
    pub fn store_all_pages(&self) {
        let mut state = self.lock();
        if state.prefixes.stored.store.is_none() {
            return;
        }
        // Pages within prefixes may have become ends since they were left out.
        for node in 0..state.prefixes.nodes.len() {
            for group in 0..state.prefixes.nodes[node].pages.len() {
                state.store_page(self, node, group);
            }
        }
        state.prefixes.stored.unwritten.clear();
    }
}

impl PrefixCache {
    /// Copies those pages of the longest kept prefix of `tokens` to the device that the pool's
    /// [store](KvPool::set_page_store) has read, and lets it read the others in the background. When the result has
    /// `is_reading` false, [`PrefixCache::find`] need not wait for the store, unless pages are evicted meanwhile.
    ///
    /// # Errors
    /// `DeviceFault`.
    pub fn prefetch(&self, tokens: &[u32]) -> Result<Prefetched> {
        let mut state = self.pool.lock();
        if state.prefixes.stored.store.is_none() {
            return Ok(Prefetched::default());
        }
        let path = state.prefixes.path(self.pool.layout(), &self.salt, tokens);
        state.prefixes.pin(&path, true);
        let mut held = Vec::new();
        let fetched = state.fetch_pages(&self.pool, &path, &mut held);
        held.into_iter().for_each(|page| {
            state.pages.release(page);
        });
        state.prefixes.pin(&path, false);
        fetched
    }
}

impl PoolState {
    /// Brings the pages of a path from the store to the device. Holds these and those that are there already: held
    /// pages are not evicted to make room for the others.
    fn fetch_pages(&mut self, pool: &KvPool, path: &[usize], held: &mut Vec<Page>) -> Result<Prefetched> {
        let (layout, mut fetched) = (pool.layout(), Prefetched::default());
        // Each round but the last one finds a page missing.
        for _ in 0..=path.len() * layout.groups.len() {
            let depth = self.prefixes.continuable(path, layout, true);
            let mut numbers = self.prefixes.needed_pages(&path[..depth], layout);
            numbers.sort_unstable();
            let mut is_missing = false;
            for (index, group) in numbers {
                let size = pool.saved_page_bytes(group);
                let page = match self.prefixes.nodes[path[index]].pages[group] {
                    PagePlace::Host(_) => continue,
                    PagePlace::Device(_) => PrefixPage::new(index, group, Vec::new()),
                    PagePlace::Nowhere => match self.prefixes.fetch_stored(path[index], group, size) {
                        Fetched::Page(bytes) => PrefixPage::new(index, group, bytes),
                        Fetched::Reading => {
                            fetched.is_reading = true;
                            continue;
                        }
                        Fetched::Missing => {
                            is_missing = true;
                            break;
                        }
                    },
                };
                fetched.pages += usize::from(!page.bytes.is_empty());
                match self.keep_page(pool, path, &page)? {
                    Some(page) => held.push(page),
                    // A lookup decides what fits.
                    None => return Ok(Prefetched { is_reading: false, ..fetched }),
                }
            }
            if !is_missing {
                break;
            }
        }
        Ok(fetched)
    }

    /// Stores a page that is on the device, unless nobody is likely to read it. Returns whether it did.
    fn store_page(&mut self, pool: &KvPool, node: usize, group: usize) -> bool {
        let PoolState { prefixes, .. } = self;
        let Some(&PagePlace::Device(page)) = prefixes.nodes[node].pages.get(group) else { return false };
        if prefixes.is_stored(node, group) || prefixes.is_useless(node, group, pool.layout()) {
            return false;
        }
        prefixes.store(pool, node, group, page).is_ok_and(|written| written)
    }
}

impl Stored {
    fn has_room(&self) -> bool {
        self.store.as_ref().is_some_and(|store| store.has_room())
    }

    pub fn root(&self, salt: &[u8]) -> PageKey {
        self.store.as_ref().map_or([0; 32], |store| store.root(salt))
    }

    pub fn child(&self, parent: &PageKey, tokens: &[u32]) -> PageKey {
        self.store.as_ref().map_or([0; 32], |store| store.child(parent, tokens))
    }

    /// Notes the last page of a lookup that did not find it.
    fn seek(&mut self, key: PageKey) {
        if self.sought.len() >= MAX_SOUGHT {
            self.sought.clear();
        }
        self.sought.insert(key);
    }

    /// Whether a lookup ended with a page. Forgets it.
    pub fn take_sought(&mut self, key: &PageKey) -> bool {
        self.sought.remove(key)
    }

    pub fn clear(&mut self) {
        self.unwritten.clear();
        self.sought.clear();
        if let Some(store) = &mut self.store {
            store.clear();
        }
    }
}

impl Node {
    /// Whether only a branch at this node would read the page of a group: it is one of states, or a dense page that the
    /// node also has as a sealed page, and the node has exactly one child.
    pub fn is_redundant(&self, group: usize, layout: &PoolLayout) -> bool {
        let is_sealed = || {
            let sealed = layout.sealed_group(group).map(|sealed| &self.pages[sealed]);
            sealed.is_some_and(|held| !matches!(held, PagePlace::Nowhere))
        };
        self.children == 1 && (matches!(layout.groups[group].kind, PageKind::State { .. }) || is_sealed())
    }
}

impl Prefixes {
    /// Whether the store has a page.
    pub fn is_stored(&self, node: usize, group: usize) -> bool {
        self.stored.store.as_ref().is_some_and(|store| store.has(&self.nodes[node].key, group))
    }

    /// Whether only a branch at a node would read a page, and no lookup ended at the node.
    fn is_useless(&self, node: usize, group: usize, layout: &PoolLayout) -> bool {
        !self.nodes[node].is_end && self.nodes[node].is_redundant(group, layout)
    }

    /// Notes that a page came to the device.
    pub fn note_unwritten(&mut self, node: usize, group: usize) {
        if self.stored.store.is_some() {
            self.stored.unwritten.push_back((node, group));
        }
    }

    /// Copies a page from the device to the store. Returns false without a store.
    fn store(&mut self, pool: &KvPool, node: usize, group: usize, page: Page) -> Result<bool> {
        let Some(store) = &mut self.stored.store else { return Ok(false) };
        let Some(mut bytes) = host_memory(pool.saved_page_bytes(group)) else { return Ok(false) };
        pool.save_page(group, page, &mut bytes)?;
        store.write(&self.nodes[node].key, group, bytes);
        Ok(true)
    }

    /// Stores a page that leaves the device, if it is not stored and the store takes it without waiting.
    pub fn store_evicted(&mut self, pool: &KvPool, node: usize, group: usize, page: Page) {
        let is_useless = self.is_useless(node, group, pool.layout());
        if self.stored.has_room() && !is_useless && !self.is_stored(node, group) {
            // A page that cannot be read is lost, as without a store.
            let _ = self.store(pool, node, group, page);
        }
    }

    /// Reads a page from the store.
    pub fn read_stored(&mut self, node: usize, group: usize, bytes: usize) -> Option<Vec<u8>> {
        let key = &self.nodes[node].key;
        self.stored.store.as_mut()?.read(key, group, bytes)
    }

    /// Fetches a page from the store.
    fn fetch_stored(&mut self, node: usize, group: usize, bytes: usize) -> Fetched {
        let key = &self.nodes[node].key;
        self.stored.store.as_mut().map_or(Fetched::Missing, |store| store.fetch(key, group, bytes))
    }

    /// Extends the path that matches the beginning of `tokens` by nodes for pages that only the store has.
    pub fn extend(&mut self, layout: &PoolLayout, salt: &[u8], tokens: &[u32], path: &mut Vec<usize>) {
        let Some(store) = &self.stored.store else { return };
        let mut key = path.last().map_or_else(|| store.root(salt), |&node| self.nodes[node].key);
        let rest = tokens.chunks_exact(layout.page_tokens).skip(path.len());
        let keys: Vec<PageKey> = rest
            .map(|tokens| {
                key = store.child(&key, tokens);
                key
            })
            .collect();
        let has_any = |key: &&PageKey| (0..layout.groups.len()).any(|group| store.has(key, group));
        // A layer without a window has some page of every node.
        let end = match layout.groups.iter().any(|group| group.window.is_none()) {
            true => keys.iter().take_while(has_any).count(),
            false => keys.iter().rposition(|key| has_any(&key)).map_or(0, |last| last + 1),
        };
        match (keys.last(), path.last()) {
            (Some(&last), _) => self.stored.seek(last),
            (None, Some(&last)) => self.nodes[last].is_end = true,
            (None, None) => {}
        }
        if end == 0 {
            return;
        }
        let mut at = path.last().copied().unwrap_or_else(|| self.root(salt));
        let rest = tokens.chunks_exact(layout.page_tokens).skip(path.len());
        for (tokens, key) in rest.zip(&keys[..end]) {
            at = self.new_child(at, tokens, *key, layout.groups.len());
            path.push(at);
        }
    }

    /// Marks the stored pages of a path as used.
    pub fn touch_stored(&mut self, path: &[usize], groups: usize) {
        if let Some(store) = &mut self.stored.store {
            let of_node = |&node: &usize| (0..groups).map(|group| (self.nodes[node].key, group)).collect::<Vec<_>>();
            let pages: Vec<(PageKey, usize)> = path.iter().rev().flat_map(of_node).collect();
            store.touch(&pages);
        }
    }

    /// Protects the nodes of a path from removal, or ends this and removes those at its end that have no page in
    /// memory.
    pub fn pin(&mut self, path: &[usize], is_pinned: bool) {
        for &node in path {
            self.nodes[node].is_pinned = is_pinned;
        }
        if let (false, Some(&last)) = (is_pinned, path.last()) {
            self.prune(last);
        }
    }
}

/// Zeroed host memory; `None` if there is too little.
pub(super) fn host_memory(bytes: usize) -> Option<Vec<u8>> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(bytes).ok()?;
    memory.resize(bytes, 0);
    Some(memory)
}
