//! Prefixes that move between pools, page by page: to another process or machine.

use super::{
    layout::{LayerGroup, PageKind, PoolLayout},
    pages::Page,
    pool::{KvPool, NAME, PoolState},
    prefix::{NeededPages, PagePlace, PrefixCache, Prefixes},
    store::host_memory,
};
use crate::{Error, Result, ops::check};

/// A page of a kept prefix, as it is stored. [`KvPool::page_format`] describes the bytes.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixPage {
    /// The page has the positions from `index · page_tokens` on.
    pub index: usize,
    /// The layer group.
    pub group: usize,
    /// The keys and values of all layers of the group, or states.
    pub bytes: Vec<u8>,
}

impl PrefixPage {
    /// A page of a prefix.
    pub fn new(index: usize, group: usize, bytes: Vec<u8>) -> PrefixPage {
        PrefixPage { index, group, bytes }
    }
}

impl std::fmt::Debug for PrefixPage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let PrefixPage { index, group, bytes } = self;
        write!(f, "PrefixPage({index} of group {group}, {} bytes)", bytes.len())
    }
}

impl KvPool {
    /// Bytes of a page of each layer group, as [`PrefixPage::bytes`] has them.
    pub fn page_bytes(&self) -> Vec<usize> {
        (0..self.layout().groups.len()).map(|group| self.saved_page_bytes(group)).collect()
    }
}

impl PrefixCache {
    /// Copies pages of the longest kept prefix of `tokens`: of all pages that a sequence needs to continue it, those
    /// with an index of at least `from[group]` (0 if absent), with at most `max_bytes` bytes together, but at least
    /// one. Pages are in the order of their indices. Empty if there are no more.
    ///
    /// `may_grow`: a request still computes `tokens`. Only pages that the whole of `tokens` needs are copied, without
    /// dense pages of layers that seal pages and without states: these are known at the end.
    ///
    /// The prefix may change between two calls. [`PrefixCache::import_pages`] accepts any pages.
    ///
    /// # Errors
    /// `DeviceFault`.
    pub fn export_pages(
        &self,
        tokens: &[u32],
        from: &[usize],
        may_grow: bool,
        max_bytes: usize,
    ) -> Result<Vec<PrefixPage>> {
        let mut state = self.pool.lock();
        let layout = self.pool.layout();
        let path = state.prefixes.path(layout, &self.salt, tokens);
        state.prefixes.pin(&path, true);
        let mut numbers = match may_grow {
            true => state.prefixes.lasting_pages(&path, layout, tokens.len()),
            false => state.prefixes.needed_pages(&path[..state.prefixes.continuable(&path, layout, true)], layout),
        };
        numbers.retain(|&(index, group)| index >= from.get(group).copied().unwrap_or(0));
        let pages = state.copy_pages(&self.pool, &path, numbers, max_bytes);
        state.prefixes.pin(&path, false);
        pages
    }

    /// The number of pages of each layer group that another pool need not send, for [`PrefixCache::export_pages`] as
    /// `from`: of the pages that the whole of `tokens` needs, the first ones are kept. 0 for states, and for the dense
    /// pages of layers that seal pages.
    pub fn held_pages(&self, tokens: &[u32]) -> Vec<usize> {
        let mut state = self.pool.lock();
        let layout = self.pool.layout();
        let path = state.prefixes.path(layout, &self.salt, tokens);
        let pages = state.prefixes.lasting_pages(&path, layout, tokens.len());
        let mut held = vec![0; layout.groups.len()];
        for (index, group) in pages {
            held[group] = index + 1;
        }
        held
    }

    /// Keeps pages of a prefix of `tokens` that [`PrefixCache::export_pages`] has copied from a pool with equal
    /// [format](KvPool::page_format). The bytes are trusted. Returns how many pages were kept: fewer than `pages` if
    /// the pool has no room. [`PrefixCache::find`] finds the prefix if it has all pages that its layers need.
    ///
    /// # Errors
    /// `Value` for a page that does not fit the pool or the tokens. `DeviceFault`.
    pub fn import_pages(&self, tokens: &[u32], pages: &[PrefixPage]) -> Result<usize> {
        let layout = self.pool.layout();
        let count = tokens.len() / layout.page_tokens;
        for PrefixPage { index, group, bytes } in pages {
            let groups = layout.groups.len();
            check::value_is(NAME, "pages (group)", *group < groups, format_args!("below {groups}"), group)?;
            check::value_is(NAME, "pages (index)", *index < count, format_args!("below {count}"), index)?;
            let size = self.pool.saved_page_bytes(*group);
            check::value_is(NAME, "pages (bytes)", bytes.len() == size, size, bytes.len())?;
        }
        let Some(depth) = pages.iter().map(|page| page.index + 1).max() else { return Ok(0) };
        let mut state = self.pool.lock();
        let path = state.prefixes.whole_path(layout, &self.salt, &tokens[..depth * layout.page_tokens]);
        state.prefixes.pin(&path, true);
        // Held pages are not evicted to make room for the others.
        let held = pages.iter().map(|page| state.keep_page(&self.pool, &path, page));
        let held: Vec<Result<Page>> = held.map_while(Result::transpose).collect();
        held.iter().flatten().for_each(|&page| {
            state.pages.release(page);
        });
        state.prefixes.pin(&path, false);
        Ok(held.into_iter().collect::<Result<Vec<Page>>>()?.len())
    }
}

impl Prefixes {
    /// Index and group of all pages that a sequence needs to continue after a path that can be continued.
    pub(super) fn needed_pages(&self, path: &[usize], layout: &PoolLayout) -> Vec<(usize, usize)> {
        let groups = (0..layout.groups.len()).filter(|_| !path.is_empty());
        let of_group = |group: usize| {
            let needed = self.needed(path, layout, group, true)?;
            let NeededPages { kept, pages } = needed;
            Some(kept.then_some(0).into_iter().chain(pages).map(move |index| (index, group)))
        };
        groups.filter_map(of_group).flatten().collect()
    }

    /// Index and group of the pages of a path that a prefix of `len` tokens will need, whatever follows the path.
    fn lasting_pages(&self, path: &[usize], layout: &PoolLayout, len: usize) -> Vec<(usize, usize)> {
        let whole = len / layout.page_tokens * layout.page_tokens;
        let of_group = |(group, of): (usize, &LayerGroup)| {
            let seen = of.oldest_seen(whole) / layout.page_tokens;
            let first = match of.kind {
                PageKind::Plain => seen,
                PageKind::Sealed => seen.max(1),
                PageKind::Dense | PageKind::State { .. } => path.len(),
            };
            let is_there = move |&index: &usize| match self.nodes[path[index]].pages[group] {
                PagePlace::Nowhere => self.is_stored(path[index], group),
                _ => true,
            };
            (first..path.len()).take_while(is_there).map(move |index| (index, group))
        };
        layout.groups.iter().enumerate().flat_map(of_group).collect()
    }
}

impl PoolState {
    /// Copies pages of a path, by index and group.
    fn copy_pages(
        &mut self,
        pool: &KvPool,
        path: &[usize],
        mut numbers: Vec<(usize, usize)>,
        max_bytes: usize,
    ) -> Result<Vec<PrefixPage>> {
        // The receiver can use the first pages of all groups without the last ones.
        numbers.sort_unstable();
        let (mut pages, mut total) = (Vec::new(), 0usize);
        for (index, group) in numbers {
            total = total.saturating_add(pool.saved_page_bytes(group));
            if total > max_bytes && !pages.is_empty() {
                break;
            }
            let Some(bytes) = self.copy_page(pool, path[index], group)? else { break };
            pages.push(PrefixPage { index, group, bytes });
        }
        Ok(pages)
    }

    /// The bytes of a page, wherever it is.
    fn copy_page(&mut self, pool: &KvPool, node: usize, group: usize) -> Result<Option<Vec<u8>>> {
        let size = pool.saved_page_bytes(group);
        match &self.prefixes.nodes[node].pages[group] {
            PagePlace::Device(page) => {
                let no_memory = Error::OutOfMemory { device: "the host".to_string(), bytes: size };
                let mut bytes = host_memory(size).ok_or(no_memory)?;
                pool.save_page(group, *page, &mut bytes)?;
                Ok(Some(bytes))
            }
            PagePlace::Host(bytes) => Ok(Some(bytes.to_vec())),
            PagePlace::Nowhere => Ok(self.prefixes.read_stored(node, group, size)),
        }
    }

    /// Keeps a page at a node of a path, and holds it once more. Returns `None` if the pool has no room.
    pub(super) fn keep_page(&mut self, pool: &KvPool, path: &[usize], page: &PrefixPage) -> Result<Option<Page>> {
        let &PrefixPage { index, group, ref bytes } = page;
        if let PagePlace::Device(page) = self.prefixes.nodes[path[index]].pages[group] {
            self.pages.hold(page);
            return Ok(Some(page));
        }
        let Some(to) = self.take_page(pool, group) else { return Ok(None) };
        if let Err(error) = pool.load_page(group, to, bytes) {
            self.pages.release(to);
            return Err(error);
        }
        self.prefixes.set(path[index], group, PagePlace::Device(to));
        self.prefixes.note_unwritten(path[index], group);
        self.pages.hold(to);
        Ok(Some(to))
    }

    /// Takes a page, after evicting others if necessary.
    pub(super) fn take_page(&mut self, pool: &KvPool, group: usize) -> Option<Page> {
        loop {
            if let Some(page) = self.pages.take(group) {
                return Some(page);
            }
            if !self.prefixes.evict(&mut self.pages, pool) {
                return None;
            }
        }
    }
}
