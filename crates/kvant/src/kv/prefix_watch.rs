//! Reports changes of kept prefixes, for routers that send a request to the holder of its prefix.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::{
    layout::{LayerGroup, PageKind, PoolLayout},
    prefix::{Node, PagePlace, Prefixes},
};

/// A change of the kept prefixes of a pool. A page is identified by a hash of its salt, its tokens and all tokens
/// before it, so equal pages of several pools have equal hashes, if all programs are built by one version of Rust.
///
/// Only layers without window count: sequences need their pages at any length. Pages of windows and states of recurrent
/// layers can be missing where a page is reported. A pool without layers of this kind reports nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrefixChange {
    /// A page is stored.
    #[non_exhaustive]
    Stored {
        /// The page.
        hash: u64,
        /// The page before it; none for the first page of a prefix.
        parent: Option<u64>,
        /// The salt of the cache. Empty unless it is the first page of a prefix.
        salt: Box<[u8]>,
        /// Its tokens.
        tokens: Box<[u32]>,
        /// Where it is stored.
        place: PrefixPlace,
    },
    /// A page is no longer stored at a place.
    #[non_exhaustive]
    Removed {
        /// The page.
        hash: u64,
        /// Where it was stored.
        place: PrefixPlace,
    },
    /// All pages were removed.
    Cleared,
}

/// Where a page of a kept prefix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrefixPlace {
    /// In the pool.
    Device,
    /// In host memory, after its eviction.
    Host,
}

/// The function that gets all changes.
pub(super) struct Watcher {
    /// The groups of layers without window.
    groups: Box<[usize]>,
    report: Box<dyn FnMut(PrefixChange) + Send>,
}

/// The hash of an empty prefix.
pub(super) fn root_digest(salt: &[u8]) -> u64 {
    digest(|hasher| salt.hash(hasher))
}

/// The hash of a page after another.
pub(super) fn page_digest(parent: u64, tokens: &[u32]) -> u64 {
    digest(|hasher| (parent, tokens).hash(hasher))
}

/// Hashes without random keys.
fn digest(hash: impl FnOnce(&mut DefaultHasher)) -> u64 {
    let mut hasher = DefaultHasher::new();
    hash(&mut hasher);
    hasher.finish()
}

impl Prefixes {
    /// Reports all later changes, after all pages that are stored now, parents first.
    pub fn watch(&mut self, layout: &PoolLayout, report: Box<dyn FnMut(PrefixChange) + Send>) {
        let counts = |group: &LayerGroup| group.window.is_none() && !matches!(group.kind, PageKind::State { .. });
        let groups = layout.groups.iter().enumerate().filter(|(_, group)| counts(group)).map(|(index, _)| index);
        self.watcher = Some(Watcher { groups: groups.collect(), report });
        let mut stored: Vec<(usize, usize)> = (0..self.nodes.len()).map(|node| (self.depth(node), node)).collect();
        stored.sort_unstable();
        stored.into_iter().for_each(|(_, node)| self.report(node, None));
    }

    /// The number of nodes above a node.
    fn depth(&self, node: usize) -> usize {
        std::iter::successors(self.nodes[node].parent, |&node| self.nodes[node].parent).count()
    }

    /// Where a node's pages are, if changes are reported.
    pub(super) fn watched_place(&self, node: usize) -> Option<PrefixPlace> {
        self.watcher.as_ref().and_then(|watcher| watcher.place(&self.nodes[node]))
    }

    /// Reports the change of a node's pages, which were at `before`.
    pub(super) fn report(&mut self, node: usize, before: Option<PrefixPlace>) {
        let after = self.watched_place(node);
        if before == after {
            return;
        }
        let Node { digest: hash, parent, ref tokens, .. } = self.nodes[node];
        let stored = after.map(|place| {
            let above = parent.filter(|&parent| self.nodes[parent].parent.is_some());
            let salt = if above.is_some() { Box::default() } else { self.salt(parent) };
            let parent = above.map(|parent| self.nodes[parent].digest);
            PrefixChange::Stored { hash, parent, salt, tokens: tokens.clone(), place }
        });
        let removed = before.map(|place| PrefixChange::Removed { hash, place });
        if let Some(watcher) = &mut self.watcher {
            removed.into_iter().chain(stored).for_each(|change| (watcher.report)(change));
        }
    }

    /// The salt of a root.
    fn salt(&self, root: Option<usize>) -> Box<[u8]> {
        let found = self.roots.iter().find(|(_, node)| Some(**node) == root);
        found.map(|(salt, _)| salt.clone()).unwrap_or_default()
    }

    /// Reports that all pages were removed.
    pub(super) fn report_cleared(&mut self) {
        if let Some(watcher) = &mut self.watcher {
            (watcher.report)(PrefixChange::Cleared);
        }
    }
}

impl Watcher {
    fn place(&self, node: &Node) -> Option<PrefixPlace> {
        let held = || self.groups.iter().filter_map(|&group| node.pages.get(group));
        if held().any(|held| matches!(held, PagePlace::Device(_))) {
            return Some(PrefixPlace::Device);
        }
        held().any(|held| matches!(held, PagePlace::Host(_))).then_some(PrefixPlace::Host)
    }
}
