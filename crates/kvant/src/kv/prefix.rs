//! Finds shared pages by the tokens that they hold.
//!
//! The pages form a tree. A node has the tokens of one page, and at most one page for each layer group; the path from
//! its root has the tokens before. Children are found by a hash of their tokens, then compared token by token.
//!
//! A sequence can continue after a node if every group has the pages that the next token sees: all pages of the path
//! for a group without window, the last ones for a group with a window. Each kept prefix keeps these last pages at its
//! end.
//!
//! In layers that seal pages, the next token sees the first and the last page (the last two, if ranks divide positions)
//! as dense pages, the others as sealed ones. A kept prefix has the dense pages that its sequence had when it was kept,
//! and can be continued there. When memory is short, dense pages and states are evicted first, except at branches and
//! at the ends of prefixes: dense pages are dropped, states move to host memory.

use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::BuildHasher,
    ops::Range,
};

use super::{
    layout::{LayerGroup, PageKind, PoolLayout},
    pages::{Page, Pages},
    pool::{KvPool, NAME},
    prefix_watch::{PrefixChange, Watcher, page_digest, root_digest},
    sequence::{GroupPages, Sequence, SequencePages},
    store::{PageKey, Stored, host_memory},
};
use crate::{Error, Result, ops::check};

/// Prefixes of a [`KvPool`] that new sequences can continue, without computing their keys and values again.
///
/// A pool keeps the prefixes of all its caches. Only full pages are shared, so a prefix ends at a multiple of
/// [`PoolSpec::page_tokens`](crate::PoolSpec::page_tokens). When a step needs more pages than are free, the pool
/// evicts, from the ends of prefixes, the least recently used pages that no sequence holds.
///
/// ```
/// use kvant::{CacheLayer, Codec, Device, KvPool, PoolSpec, PrefixCache};
/// let layer = CacheLayer::new(2, 64, Codec::F16);
/// let pool = KvPool::new(&Device::cpu(), &PoolSpec::new(vec![layer], 4 << 20))?;
/// let cache = PrefixCache::new(&pool, b"model");
///
/// let prompt: Vec<u32> = (0..150).collect();
/// let mut a = pool.sequence();
/// pool.step(&mut [(&mut a, prompt.len())])?; // then run the model, which writes keys and values
/// cache.keep(&a, &prompt)?;
///
/// // At least one token is left to compute, as its logits are needed.
/// let b = cache.find(&prompt[..prompt.len() - 1])?;
/// assert_eq!(b.len(), 128); // two pages of 64
/// # Ok::<(), kvant::Error>(())
/// ```
pub struct PrefixCache {
    pub(super) pool: KvPool,
    pub(super) salt: Box<[u8]>,
}

/// The prefixes of a pool.
pub(super) struct Prefixes {
    /// Includes free entries, which are not alive.
    pub(super) nodes: Vec<Node>,
    free: Vec<usize>,
    pub(super) roots: HashMap<Box<[u8]>, usize>,
    /// Children by parent and hash of their tokens.
    children: HashMap<(usize, u64), Vec<usize>>,
    hasher: RandomState,
    /// Counts uses.
    clock: u64,
    host_bytes: usize,
    host_limit: usize,
    /// The tier below host memory.
    pub(super) stored: Stored,
    pub(super) watcher: Option<Watcher>,
}

#[derive(Debug, Default)]
pub(super) struct Node {
    /// False for a free entry.
    is_alive: bool,
    /// Whether the node stays although it has neither pages in memory nor children.
    pub(super) is_pinned: bool,
    /// Whether a lookup ended here. Known only with a store.
    pub(super) is_end: bool,
    pub(super) parent: Option<usize>,
    hash: u64,
    /// The hash of the salt and of all tokens up to this page.
    pub(super) digest: u64,
    /// The name of its pages in a store; zeros without one.
    pub(super) key: PageKey,
    pub(super) tokens: Box<[u32]>,
    /// One entry per group; none for a root.
    pub(super) pages: Vec<PagePlace>,
    pub(super) children: usize,
    /// Children with a page on the device.
    device_children: usize,
    used: u64,
}

/// A page of a node.
#[derive(Debug, Default)]
pub(super) enum PagePlace {
    /// Not in memory. A store may have it.
    #[default]
    Nowhere,
    Device(Page),
    Host(Box<[u8]>),
}

impl Node {
    fn device_pages(&self) -> impl Iterator<Item = Page> + '_ {
        self.pages.iter().filter_map(|held| if let PagePlace::Device(page) = held { Some(*page) } else { None })
    }

    fn is_on_device(&self) -> bool {
        self.device_pages().next().is_some()
    }

    fn host_bytes(&self) -> usize {
        self.pages.iter().map(|held| if let PagePlace::Host(bytes) = held { bytes.len() } else { 0 }).sum()
    }

    /// Pages that can be evicted without the node's other pages: pages that no sequence holds, of groups with a window,
    /// of groups of dense pages, and of states; with their groups.
    fn evictable_alone<'a>(
        &'a self,
        pages: &'a Pages,
        layout: &'a PoolLayout,
    ) -> impl Iterator<Item = (usize, Page)> + 'a {
        let goes = |group: &LayerGroup| {
            group.window.is_some() || matches!(group.kind, PageKind::Dense | PageKind::State { .. })
        };
        let of_group = self.pages.iter().zip(&layout.groups).enumerate().filter(move |(_, (_, group))| goes(group));
        let on_device = of_group.filter_map(|(index, (held, _))| match held {
            PagePlace::Device(page) => Some((index, *page)),
            _ => None,
        });
        on_device.filter(|(_, page)| pages.holds(*page) == 1)
    }

    /// Pages that only a branch at this node would read, with their groups: states, and dense pages that the node also
    /// has as sealed pages. Sequences hold none of them. Empty unless the node has exactly one child.
    fn redundant<'a>(&'a self, pages: &'a Pages, layout: &'a PoolLayout) -> impl Iterator<Item = (usize, Page)> + 'a {
        self.evictable_alone(pages, layout).filter(|(group, _)| self.is_redundant(*group, layout))
    }

    /// Whether a sequence holds one of the node's pages.
    fn is_in_use(&self, pages: &Pages) -> bool {
        self.device_pages().any(|page| pages.holds(page) > 1)
    }
}

impl PrefixCache {
    /// Makes a cache of a pool's prefixes. Caches with equal pool and salt share prefixes. The salt identifies
    /// everything else that keys and values depend on, such as model, adapter or tenant.
    pub fn new(pool: &KvPool, salt: &[u8]) -> PrefixCache {
        PrefixCache { pool: pool.clone(), salt: salt.into() }
    }

    /// Keeps the full pages of a sequence whose tokens are `tokens`, for sequences that begin alike. The prefix can be
    /// continued at the end of its last full page.
    ///
    /// Commit the pass that writes the tokens' keys and values before another sequence uses them.
    ///
    /// # Errors
    /// `Value` if the number of tokens is not the sequence's length, or for a sequence of another pool.
    pub fn keep(&self, sequence: &Sequence, tokens: &[u32]) -> Result<()> {
        check::value_is(NAME, "sequence", *sequence.pool() == self.pool, "of this pool", "of another pool")?;
        let len = sequence.len();
        let expected = format_args!("the sequence's {len} tokens");
        check::value_is(NAME, "tokens", tokens.len() == sequence.len(), expected, tokens.len())?;
        let state = &mut *self.pool.lock();
        state.prefixes.keep(&mut state.pages, self.pool.layout(), &self.salt, &sequence.pages, tokens);
        Ok(())
    }

    /// Returns the longest kept prefix of `tokens` that every layer can continue, as a sequence. The sequence is empty
    /// if no prefix fits. Pages in host memory and in a [store](KvPool::set_page_store) are copied to the device.
    ///
    /// # Errors
    /// `DeviceFault` if pages cannot be copied back from host memory.
    pub fn find(&self, tokens: &[u32]) -> Result<Sequence> {
        let mut state = self.pool.lock();
        let found = state.find(&self.pool, &self.salt, tokens);
        drop(state);
        Ok(Sequence::new(self.pool.clone(), found?))
    }

    /// The number of tokens, in whole pages, that `tokens` has in common with a kept prefix. [`PrefixCache::find`] may
    /// find fewer: there must also be positions of windows, and [states](crate::StateLayer). A pass that ends here lets
    /// [`PrefixCache::keep`] keep the states, so that later sequences can continue where texts part.
    pub fn matched(&self, tokens: &[u32]) -> usize {
        let layout = self.pool.layout();
        let prefixes = &mut self.pool.lock().prefixes;
        let path = prefixes.path(layout, &self.salt, tokens);
        prefixes.pin(&path, false);
        path.len() * layout.page_tokens
    }

    /// Calls `report` with all later changes of the pool's prefixes, of every salt, after the pages that are stored
    /// now. It replaces an earlier function. `report` is called while the pool is locked: it must not use the pool, and
    /// should only pass the change on.
    pub fn watch(&self, report: impl FnMut(PrefixChange) + Send + 'static) {
        let state = &mut *self.pool.lock();
        state.prefixes.watch(self.pool.layout(), Box::new(report));
    }

    /// Removes all prefixes of the pool, including those in host memory and in its store. Pages that sequences hold are
    /// not affected.
    pub fn clear(&self) {
        let state = &mut *self.pool.lock();
        state.prefixes.clear(&mut state.pages);
    }
}

impl super::pool::PoolState {
    fn find(&mut self, pool: &KvPool, salt: &[u8], tokens: &[u32]) -> Result<SequencePages> {
        let layout = pool.layout();
        let path = self.prefixes.path(layout, salt, tokens);
        // Making room for its pages must not remove the path's nodes.
        self.prefixes.pin(&path, true);
        let found = self.find_on(pool, &path);
        self.prefixes.pin(&path, false);
        found
    }

    /// Holds the pages of the longest part of a path that can be continued.
    fn find_on(&mut self, pool: &KvPool, path: &[usize]) -> Result<SequencePages> {
        let layout = pool.layout();
        for host in [true, false] {
            // Each attempt but the last one finds a page missing.
            for _ in 0..=path.len() * layout.groups.len() {
                let depth = self.prefixes.continuable(path, layout, host);
                if depth == 0 {
                    break;
                }
                match self.acquire(pool, &path[..depth], host)? {
                    Acquired::Pages(found) => {
                        self.prefixes.touch_stored(&path[..depth], layout.groups.len());
                        return Ok(found);
                    }
                    Acquired::NoRoom => break,
                    // The store no longer has the page.
                    Acquired::Damaged => {}
                }
            }
        }
        Ok(SequencePages::new(layout))
    }

    /// Holds the pages of a path that can be continued. `host`: including pages in host memory and in the store.
    fn acquire(&mut self, pool: &KvPool, path: &[usize], host: bool) -> Result<Acquired> {
        let layout = pool.layout();
        let mut found = SequencePages::new(layout);
        found.len = path.len() * layout.page_tokens;
        // Pages on the device first: held pages are not evicted to make room for the others.
        let mut missing = Vec::new();
        for (group, held) in found.groups.iter_mut().enumerate() {
            let Some(NeededPages { kept, pages }) = self.prefixes.needed(path, layout, group, host) else {
                continue;
            };
            let has_first = pages.is_empty() || matches!(layout.groups[group].kind, PageKind::State { .. });
            held.first = if has_first { held.first } else { pages.start };
            let mut hold = |place: Option<usize>, node: usize| match self.prefixes.nodes[node].pages[group] {
                PagePlace::Device(page) => {
                    self.pages.hold(page);
                    page
                }
                _ => {
                    missing.push(Missing { group, place, node });
                    Page::MAX
                }
            };
            held.kept = if kept { Some(hold(None, path[0])) } else { None };
            held.pages = path[pages].iter().enumerate().map(|(place, &node)| hold(Some(place), node)).collect();
        }
        let restored = self.restore(pool, &missing, &mut found.groups);
        if !matches!(restored, Ok(Restored::All)) {
            for group in &mut found.groups {
                group.kept = group.kept.filter(|&page| page != Page::MAX);
                group.pages.retain(|&page| page != Page::MAX);
            }
            found.release(layout, &mut self.pages);
            let is_damaged = matches!(restored?, Restored::Damaged);
            return Ok(if is_damaged { Acquired::Damaged } else { Acquired::NoRoom });
        }
        Ok(Acquired::Pages(found))
    }

    /// Copies pages from host memory and from the store to the device.
    fn restore(&mut self, pool: &KvPool, missing: &[Missing], groups: &mut [GroupPages]) -> Result<Restored> {
        for &Missing { group, place, node } in missing {
            let Some(page) = self.take_page(pool, group) else { return Ok(Restored::NoRoom) };
            // Making room may have moved the page from host memory to the store.
            let stored = match &self.prefixes.nodes[node].pages[group] {
                PagePlace::Host(_) => None,
                _ => self.prefixes.read_stored(node, group, pool.saved_page_bytes(group)),
            };
            let bytes = match (&self.prefixes.nodes[node].pages[group], &stored) {
                (PagePlace::Host(bytes), _) => bytes,
                (_, Some(bytes)) => &bytes[..],
                _ => {
                    self.pages.release(page);
                    return Ok(Restored::Damaged);
                }
            };
            if let Err(error) = pool.load_page(group, page, bytes) {
                self.pages.release(page);
                return Err(error);
            }
            // The sequence and the tree each hold the page.
            self.pages.hold(page);
            self.prefixes.set(node, group, PagePlace::Device(page));
            match place {
                Some(place) => groups[group].pages[place] = page,
                None => groups[group].kept = Some(page),
            }
        }
        Ok(Restored::All)
    }
}

/// The result of holding the pages of a path.
enum Acquired {
    Pages(SequencePages),
    /// The device has no room for the pages that are not on it.
    NoRoom,
    /// A page is no longer in host memory or the store.
    Damaged,
}

/// The result of copying pages to the device.
enum Restored {
    All,
    NoRoom,
    Damaged,
}

/// A page of a found prefix that is not on the device: its node, and its index in the sequence; `None` for the kept
/// page 0.
#[derive(Clone, Copy)]
struct Missing {
    group: usize,
    place: Option<usize>,
    node: usize,
}

/// The leaves in host memory that stay although a page needs room there.
#[derive(Clone, Copy)]
enum Leaves {
    All,
    /// Only this one, whose pages are being saved.
    Except(usize),
}

/// The pages of a group that a sequence of full pages needs: a range of indices, and whether page 0 is kept in
/// addition.
pub(super) struct NeededPages {
    pub(super) kept: bool,
    pub(super) pages: Range<usize>,
}

impl Prefixes {
    pub fn new(host_limit: usize) -> Prefixes {
        Prefixes {
            nodes: Vec::new(),
            free: Vec::new(),
            roots: HashMap::new(),
            children: HashMap::new(),
            hasher: RandomState::new(),
            clock: 0,
            host_bytes: 0,
            host_limit,
            stored: Stored::default(),
            watcher: None,
        }
    }

    /// Bytes of pages in host memory.
    pub fn host_bytes(&self) -> usize {
        self.host_bytes
    }

    fn new_node(&mut self, node: Node) -> usize {
        let index = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(Node::default());
            self.nodes.len() - 1
        });
        if let Some(parent) = node.parent {
            self.nodes[parent].children += 1;
            self.children.entry((parent, node.hash)).or_default().push(index);
        }
        self.nodes[index] = Node { is_alive: true, ..node };
        index
    }

    fn child(&self, parent: usize, tokens: &[u32]) -> Option<usize> {
        let children = self.children.get(&(parent, self.hasher.hash_one(tokens)))?;
        children.iter().copied().find(|&child| *self.nodes[child].tokens == *tokens)
    }

    /// The root of a salt.
    pub(super) fn root(&mut self, salt: &[u8]) -> usize {
        if let Some(&root) = self.roots.get(salt) {
            return root;
        }
        let root = self.new_node(Node { digest: root_digest(salt), key: self.stored.root(salt), ..Node::default() });
        self.roots.insert(salt.into(), root);
        root
    }

    /// Makes a node without pages.
    pub(super) fn new_child(&mut self, parent: usize, tokens: &[u32], key: PageKey, groups: usize) -> usize {
        let pages = (0..groups).map(|_| PagePlace::Nowhere).collect();
        let is_end = self.stored.take_sought(&key);
        let digest = page_digest(self.nodes[parent].digest, tokens);
        let (parent, hash, used) = (Some(parent), self.hasher.hash_one(tokens), self.clock);
        self.new_node(Node { is_end, parent, hash, digest, key, tokens: tokens.into(), pages, used, ..Node::default() })
    }

    /// The child of a node with these tokens, which is made if it does not exist. Marks it as used now.
    fn child_or_new(&mut self, parent: usize, tokens: &[u32], layout: &PoolLayout) -> usize {
        let node = self.child(parent, tokens).unwrap_or_else(|| {
            let key = self.stored.child(&self.nodes[parent].key, tokens);
            self.new_child(parent, tokens, key, layout.groups.len())
        });
        self.nodes[node].used = self.clock;
        node
    }

    /// The nodes of all full pages of `tokens`, without the root. Makes those that do not exist.
    pub(super) fn whole_path(&mut self, layout: &PoolLayout, salt: &[u8], tokens: &[u32]) -> Vec<usize> {
        self.clock += 1;
        let (mut at, mut path) = (self.root(salt), Vec::new());
        for tokens in tokens.chunks_exact(layout.page_tokens) {
            at = self.child_or_new(at, tokens, layout);
            path.push(at);
        }
        path
    }

    /// The nodes that match the full pages of `tokens`, without the root, including new ones for pages in the store.
    /// Marks all of them as used now.
    pub(super) fn path(&mut self, layout: &PoolLayout, salt: &[u8], tokens: &[u32]) -> Vec<usize> {
        self.clock += 1;
        let mut path = Vec::new();
        let mut at = self.roots.get(salt).copied();
        for page in tokens.chunks_exact(layout.page_tokens) {
            at = at.and_then(|node| self.child(node, page));
            let Some(child) = at else { break };
            self.nodes[child].used = self.clock;
            path.push(child);
        }
        self.extend(layout, salt, tokens, &mut path);
        path
    }

    /// Maximum depth of a path after which every group can continue; `host`: counting pages in host memory and in the
    /// store.
    pub(super) fn continuable(&self, path: &[usize], layout: &PoolLayout, host: bool) -> usize {
        // The last group first: states are missing most often.
        let fits = |path: &[usize]| {
            (0..layout.groups.len()).rev().all(|group| self.needed(path, layout, group, host).is_some())
        };
        (1..=path.len()).rev().find(|&depth| fits(&path[..depth])).unwrap_or(0)
    }

    /// The pages of a group that a sequence needs to continue after the last node of a path; `None` if one of them is
    /// neither on the device nor, if `host`, in host memory or the store.
    pub(super) fn needed(&self, path: &[usize], layout: &PoolLayout, group: usize, host: bool) -> Option<NeededPages> {
        let of = &layout.groups[group];
        let (depth, len) = (path.len(), path.len() * layout.page_tokens);
        let has = |group: usize, index: usize| match self.nodes[path[index]].pages[group] {
            PagePlace::Device(_) => true,
            PagePlace::Host(_) => host,
            PagePlace::Nowhere => host && self.is_stored(path[index], group),
        };
        let seen = (of.oldest_seen(len) / layout.page_tokens).min(depth);
        // The sealed pages that exist: up to the page before the last one, which is dense.
        let sealed = |group: usize| {
            let first = seen.max(1);
            let all = first..(depth - 1).max(first);
            first..all.clone().find(|&index| !has(group, index)).unwrap_or(all.end)
        };
        let (kept, pages) = match of.kind {
            PageKind::Plain => (false, seen..depth),
            PageKind::State { .. } => (false, depth - 1..depth),
            PageKind::Sealed => return Some(NeededPages { kept: false, pages: sealed(group) }),
            PageKind::Dense => {
                let recent = depth.saturating_sub(of.recent);
                let first = sealed(layout.sealed_group(group)?).end.min(recent).max(seen);
                (first > 0 && seen == 0, first..depth)
            }
        };
        // Start with the last page, which is missing most often.
        let has_all = pages.clone().rev().all(|index| has(group, index)) && (!kept || has(group, 0));
        has_all.then_some(NeededPages { kept, pages })
    }

    fn keep(&mut self, pages: &mut Pages, layout: &PoolLayout, salt: &[u8], from: &SequencePages, tokens: &[u32]) {
        self.clock += 1;
        let depth = tokens.len() / layout.page_tokens;
        if depth == 0 {
            return;
        }
        let mut at = self.root(salt);
        for (index, tokens) in tokens.chunks_exact(layout.page_tokens).enumerate() {
            let node = self.child_or_new(at, tokens, layout);
            for (group, held) in from.groups.iter().enumerate() {
                // A group with a window keeps its pages only at the end of the prefix.
                let of = &layout.groups[group];
                let needed = index >= of.oldest_seen(depth * layout.page_tokens) / layout.page_tokens;
                let is_there = matches!(self.nodes[node].pages[group], PagePlace::Device(_));
                let page = match of.kind {
                    PageKind::State { .. } => held.states_at((index + 1) * layout.page_tokens, from.len),
                    _ => held.get(index),
                };
                if let (true, Some(page), false) = (needed, page, is_there) {
                    pages.hold(page);
                    self.set(node, group, PagePlace::Device(page));
                    self.note_unwritten(node, group);
                }
            }
            at = node;
        }
        // If all groups have windows, a path may have no page; such a path is useless.
        self.prune(at);
    }

    /// Sets a page of a node, and updates the counts that depend on it.
    pub(super) fn set(&mut self, node: usize, group: usize, held: PagePlace) {
        let before = (self.nodes[node].is_on_device(), self.nodes[node].host_bytes());
        let place = self.watched_place(node);
        self.nodes[node].pages[group] = held;
        let after = (self.nodes[node].is_on_device(), self.nodes[node].host_bytes());
        self.host_bytes = self.host_bytes + after.1 - before.1;
        if let Some(parent) = self.nodes[node].parent {
            let count = &mut self.nodes[parent].device_children;
            *count = *count + usize::from(after.0) - usize::from(before.0);
        }
        self.report(node, place);
    }

    /// Removes a node without pages and children, and each ancestor that thereby loses its last child and has no pages.
    pub(super) fn prune(&mut self, mut node: usize) {
        loop {
            let Node { is_alive, is_pinned, parent, hash, ref pages, children, .. } = self.nodes[node];
            if !is_alive || is_pinned || children > 0 || pages.iter().any(|held| !matches!(held, PagePlace::Nowhere)) {
                return;
            }
            let Some(parent) = parent else {
                self.roots.retain(|_, root| *root != node);
                self.nodes[node] = Node::default();
                self.free.push(node);
                return;
            };
            if let Some(siblings) = self.children.get_mut(&(parent, hash)) {
                siblings.retain(|&sibling| sibling != node);
                if siblings.is_empty() {
                    self.children.remove(&(parent, hash));
                }
            }
            self.nodes[node] = Node::default();
            self.free.push(node);
            self.nodes[parent].children -= 1;
            node = parent;
        }
    }

    /// Evicts prefixes until `missing` returns 0. `missing` takes the step's pages from a copy of the pages and returns
    /// how many it lacks.
    ///
    /// # Errors
    /// `OutOfPages` if evicting all unused pages would not suffice. Nothing is evicted then.
    pub fn make_room(
        &mut self,
        pages: &mut Pages,
        pool: &KvPool,
        mut missing: impl FnMut(&mut Pages) -> usize,
    ) -> Result<()> {
        let mut without_prefixes = pages.clone();
        self.evictable(pages, pool.layout()).into_iter().for_each(|page| {
            without_prefixes.release(page);
        });
        let lacking = missing(&mut without_prefixes);
        if lacking > 0 {
            return Err(Error::OutOfPages { missing: lacking });
        }
        while missing(&mut pages.clone()) > 0 {
            if !self.evict(pages, pool) {
                return Err(Error::OutOfPages { missing: 1 });
            }
        }
        Ok(())
    }

    /// The pages that repeated calls of [`Prefixes::evict`] would free.
    fn evictable(&self, pages: &Pages, layout: &PoolLayout) -> Vec<Page> {
        // A node cannot be evicted while a node below it is in use.
        let mut stays = vec![false; self.nodes.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            if node.is_in_use(pages) {
                let mut at = Some(index);
                while let Some(node) = at.filter(|&node| !stays[node]) {
                    stays[node] = true;
                    at = self.nodes[node].parent;
                }
            }
        }
        let mut free = Vec::new();
        for (index, stays) in stays.into_iter().enumerate() {
            match stays {
                true => free.extend(self.nodes[index].evictable_alone(pages, layout).map(|(_, page)| page)),
                false => free.extend(self.nodes[index].device_pages()),
            }
        }
        free
    }

    /// Evicts one page of [`Node::evictable_alone`] of the least recently used node that has one. Sequences may use the
    /// node, but no longer need the page. Returns whether it evicted a page.
    fn evict_single(&mut self, pages: &mut Pages, pool: &KvPool) -> bool {
        let layout = pool.layout();
        let nodes = self.nodes.iter().enumerate();
        let with_page =
            nodes.filter_map(|(index, node)| Some((node.used, index, node.evictable_alone(pages, layout).next()?)));
        let Some((_, index, (group, _))) = with_page.min() else { return false };
        self.leave(pages, pool, index, group, Leaves::Except(index));
        true
    }

    /// Moves a page from the device to host memory, if it has room, and to the store.
    fn leave(&mut self, pages: &mut Pages, pool: &KvPool, node: usize, group: usize, stay: Leaves) {
        let PagePlace::Device(page) = self.nodes[node].pages[group] else { return };
        self.store_evicted(pool, node, group, page);
        let saved = self.save(pool, group, page, stay);
        self.set(node, group, saved.map_or(PagePlace::Nowhere, PagePlace::Host));
        pages.release(page);
    }

    /// Evicts the pages of the least recently used node that no sequence uses and that has no descendant with pages on
    /// the device. The pages go to host memory if it has room. Returns whether it evicted a page.
    ///
    /// A node's pages of all groups are evicted together: a window's pages stay while pages below need them. If no such
    /// node exists, [`Prefixes::evict_single`] evicts single pages.
    pub fn evict(&mut self, pages: &mut Pages, pool: &KvPool) -> bool {
        if self.evict_redundant(pages, pool) {
            return true;
        }
        let leaves = self.nodes.iter().enumerate().filter(|(_, node)| node.is_on_device() && node.device_children == 0);
        let unused = leaves.filter(|(_, node)| !node.is_in_use(pages));
        let Some((index, _)) = unused.min_by_key(|(_, node)| node.used) else {
            return self.evict_single(pages, pool);
        };
        for group in 0..self.nodes[index].pages.len() {
            self.leave(pages, pool, index, group, Leaves::Except(index));
        }
        // The nodes below are reachable only through this node, and useless if a group without window lost its page.
        let is_lost = |group: usize| {
            matches!(self.nodes[index].pages[group], PagePlace::Nowhere) && !self.is_stored(index, group)
        };
        if (0..self.nodes[index].pages.len()).all(is_lost) {
            self.drop_below(index);
        }
        self.prune(index);
        true
    }

    /// Evicts one page of [`Node::redundant`], of the least recently used node that has one. States move to host memory
    /// if it has room for them. Returns whether it evicted a page.
    fn evict_redundant(&mut self, pages: &mut Pages, pool: &KvPool) -> bool {
        let layout = pool.layout();
        let of_node = |(index, node): (usize, &Node)| {
            let (group, page) = node.redundant(pages, layout).next()?;
            Some((node.used, index, group, page))
        };
        let Some((_, index, group, page)) = self.nodes.iter().enumerate().filter_map(of_node).min() else {
            return false;
        };
        let is_state = layout.state_group() == Some(group);
        if is_state {
            self.leave(pages, pool, index, group, Leaves::All);
        } else {
            self.store_evicted(pool, index, group, page);
            self.set(index, group, PagePlace::Nowhere);
            pages.release(page);
        }
        true
    }

    /// Copies a page's bytes to host memory, after evicting older ones from there if necessary: states within prefixes
    /// first, then pages of leaves, unless these stay. `None` if the page does not fit.
    fn save(&mut self, pool: &KvPool, group: usize, page: Page, stay: Leaves) -> Option<Box<[u8]>> {
        let bytes = pool.saved_page_bytes(group);
        while bytes > self.host_limit.saturating_sub(self.host_bytes) {
            let has_room = bytes <= self.host_limit && (self.forget_states(pool.layout()) || self.forget_leaf(stay));
            if !has_room {
                return None;
            }
        }
        let mut copy = host_memory(bytes)?;
        pool.save_page(group, page, &mut copy).ok()?;
        Some(copy.into())
    }

    /// Removes the least recently used states within a prefix from host memory. Returns whether there were any.
    fn forget_states(&mut self, layout: &PoolLayout) -> bool {
        let Some(group) = layout.state_group() else { return false };
        let is_within = |node: &Node| node.children == 1 && matches!(node.pages.get(group), Some(PagePlace::Host(_)));
        let within = self.nodes.iter().enumerate().filter(|(_, node)| is_within(node));
        let Some((oldest, _)) = within.min_by_key(|(_, node)| node.used) else { return false };
        self.set(oldest, group, PagePlace::Nowhere);
        true
    }

    /// Removes the least recently used leaf whose pages are all in host memory. Returns whether there was one.
    fn forget_leaf(&mut self, stay: Leaves) -> bool {
        let Leaves::Except(node) = stay else { return false };
        let is_leaf = |node: &Node| node.children == 0 && !node.is_on_device() && node.host_bytes() > 0;
        let leaves = self.nodes.iter().enumerate().filter(|&(index, other)| index != node && is_leaf(other));
        let Some((oldest, _)) = leaves.min_by_key(|(_, node)| node.used) else { return false };
        self.forget(oldest);
        true
    }

    /// Removes a node that has no children and no page on the device.
    fn forget(&mut self, node: usize) {
        for group in 0..self.nodes[node].pages.len() {
            self.set(node, group, PagePlace::Nowhere);
        }
        self.prune(node);
    }

    /// Removes all descendants of a node, which have no page on the device.
    fn drop_below(&mut self, node: usize) {
        let is_below = |nodes: &[Node], mut at: usize| {
            while let Some(parent) = nodes[at].parent {
                if parent == node {
                    return true;
                }
                at = parent;
            }
            false
        };
        let below: Vec<usize> = (0..self.nodes.len()).filter(|&at| is_below(&self.nodes, at)).collect();
        for at in below {
            for group in 0..self.nodes[at].pages.len() {
                self.set(at, group, PagePlace::Nowhere);
            }
            self.prune(at);
        }
    }

    fn clear(&mut self, pages: &mut Pages) {
        for index in 0..self.nodes.len() {
            for group in 0..self.nodes[index].pages.len() {
                if let PagePlace::Device(page) = self.nodes[index].pages[group] {
                    pages.release(page);
                }
            }
        }
        self.stored.clear();
        self.report_cleared();
        let (stored, watcher) = (std::mem::take(&mut self.stored), self.watcher.take());
        *self = Prefixes { stored, watcher, ..Prefixes::new(self.host_limit) };
    }
}
