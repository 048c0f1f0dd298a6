//! The pages in a directory: their sizes, the order of their use, and those that are not written yet.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use super::format::{PageName, file_len};

/// Minimum time between two touches of a file: waiting requests look up their prefixes in every step.
const TOUCH: Duration = Duration::from_secs(60);

/// Which pages a directory has. A page counts from the moment that it is accepted.
#[derive(Debug, Default)]
pub struct Index {
    entries: HashMap<PageName, Entry>,
    /// Pages by the time of their latest use.
    order: BTreeMap<u64, PageName>,
    clock: u64,
    bytes: u64,
    /// Bytes of pages that are not written yet.
    pub unwritten: usize,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    used: u64,
    /// When the file was touched.
    touched: Option<Instant>,
    /// The contents, until they are written.
    page: Option<Arc<Vec<u8>>>,
}

impl Index {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn has(&self, name: &PageName) -> bool {
        self.entries.contains_key(name)
    }

    /// The contents of a page that is not written yet.
    pub fn unwritten_page(&self, name: &PageName) -> Option<Arc<Vec<u8>>> {
        self.entries.get(name)?.page.clone()
    }

    /// Adds a file of `bytes` bytes as the most recently used one.
    pub fn add_file(&mut self, name: PageName, bytes: u64) {
        self.add(name, bytes, None);
    }

    /// Adds a page that is not written yet.
    pub fn add_page(&mut self, name: PageName, page: Vec<u8>) {
        self.unwritten += page.len();
        self.add(name, file_len(page.len()), Some(Arc::new(page)));
    }

    fn add(&mut self, name: PageName, bytes: u64, page: Option<Arc<Vec<u8>>>) {
        self.remove(&name);
        self.clock += 1;
        self.order.insert(self.clock, name);
        self.bytes += bytes;
        self.entries.insert(name, Entry { bytes, used: self.clock, touched: None, page });
    }

    /// Marks a page as the most recently used one. Returns whether it is a file whose time should be set, too.
    pub fn touch(&mut self, name: &PageName) -> bool {
        let Some(entry) = self.entries.get_mut(name) else { return false };
        self.order.remove(&entry.used);
        self.clock += 1;
        entry.used = self.clock;
        self.order.insert(self.clock, *name);
        let is_due = entry.page.is_none() && entry.touched.is_none_or(|touched| touched.elapsed() >= TOUCH);
        if is_due {
            entry.touched = Some(Instant::now());
        }
        is_due
    }

    /// Marks a page as written. Returns false if it was removed meanwhile.
    pub fn set_written(&mut self, name: &PageName) -> bool {
        let Some(entry) = self.entries.get_mut(name) else { return false };
        self.unwritten -= entry.page.take().map_or(0, |page| page.len());
        true
    }

    /// Removes a page. Returns whether it existed.
    pub fn remove(&mut self, name: &PageName) -> bool {
        let Some(entry) = self.entries.remove(name) else { return false };
        self.order.remove(&entry.used);
        self.bytes -= entry.bytes;
        self.unwritten -= entry.page.map_or(0, |page| page.len());
        true
    }

    /// Removes the least recently used pages until the others have at most `limit` bytes. Returns the removed ones.
    pub fn shrink(&mut self, limit: u64) -> Vec<PageName> {
        let mut removed = Vec::new();
        while self.bytes > limit
            && let Some((_, &oldest)) = self.order.first_key_value()
        {
            self.remove(&oldest);
            removed.push(oldest);
        }
        removed
    }

    /// Removes all pages of an identity. Returns them.
    pub fn clear(&mut self, identity: &[u8; 32]) -> Vec<PageName> {
        let of_identity = |name: &&PageName| name.identity == *identity;
        let names: Vec<PageName> = self.entries.keys().filter(of_identity).copied().collect();
        for name in &names {
            self.remove(name);
        }
        names
    }
}
