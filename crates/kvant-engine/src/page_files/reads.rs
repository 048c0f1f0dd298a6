//! Pages that are read ahead of their use, on a thread of their own.

use std::{collections::HashMap, sync::Arc};

use super::format::PageName;

/// Maximum bytes of pages that are read but not taken.
const MAX_READ: usize = 64 << 20;

/// A page, and the number of the store that requested it.
pub type ReadKey = (u64, PageName);

/// Pages that were requested and not taken yet.
#[derive(Debug, Default)]
pub struct Reads {
    pages: HashMap<ReadKey, ReadPage>,
    bytes: usize,
    /// Pages that are being read, or will be.
    running: usize,
}

#[derive(Debug)]
struct ReadPage {
    bytes: usize,
    state: ReadState,
}

#[derive(Debug)]
enum ReadState {
    Reading,
    /// `None` if the page is missing or damaged.
    Done(Option<Vec<u8>>),
}

/// A requested page.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken {
    Unknown,
    Reading,
    /// `None` if the page is missing or damaged.
    Done(Option<Vec<u8>>),
}

/// A page to read.
pub struct ReadWork {
    pub key: ReadKey,
    pub bytes: usize,
    /// Called when the page is read.
    pub wake: Arc<dyn Fn() + Send + Sync>,
}

impl Reads {
    /// Takes a page that is read.
    pub fn take(&mut self, key: &ReadKey) -> Taken {
        match self.pages.get(key).map(|page| &page.state) {
            None => return Taken::Unknown,
            Some(ReadState::Reading) => return Taken::Reading,
            Some(ReadState::Done(_)) => {}
        }
        match self.pages.remove(key) {
            Some(ReadPage { bytes, state: ReadState::Done(page) }) => {
                self.bytes -= bytes;
                Taken::Done(page)
            }
            _ => Taken::Unknown,
        }
    }

    /// Requests a page, which must then be read. Returns false if there is no memory for it until a running read ends.
    pub fn begin(&mut self, key: ReadKey, bytes: usize) -> bool {
        if self.bytes.saturating_add(bytes) > MAX_READ && self.running == 0 {
            // Requests that were cancelled do not take their pages.
            *self = Reads::default();
        }
        if self.bytes > 0 && self.bytes.saturating_add(bytes) > MAX_READ {
            return false;
        }
        self.bytes += bytes;
        self.running += 1;
        self.pages.insert(key, ReadPage { bytes, state: ReadState::Reading });
        true
    }

    /// Sets the result of a read.
    pub fn end(&mut self, key: &ReadKey, read: Option<Vec<u8>>) {
        self.running -= 1;
        if let Some(page) = self.pages.get_mut(key) {
            page.state = ReadState::Done(read);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(group: u32) -> ReadKey {
        (0, PageName { identity: [0; 32], key: [1; 32], group })
    }

    #[test]
    fn memory_is_limited_and_returns() {
        let mut reads = Reads::default();
        let half = MAX_READ / 2;
        assert_eq!(reads.take(&key(0)), Taken::Unknown);
        assert!(reads.begin(key(0), half) && reads.begin(key(1), half));
        assert!(!reads.begin(key(2), half), "two pages are being read");
        assert_eq!(reads.take(&key(0)), Taken::Reading);
        reads.end(&key(0), Some(vec![7]));
        reads.end(&key(1), None);
        assert_eq!(reads.take(&key(0)), Taken::Done(Some(vec![7])));
        assert_eq!(reads.take(&key(0)), Taken::Unknown, "it is taken");
        assert!(reads.begin(key(2), half));
        reads.end(&key(2), Some(vec![8]));
        // Nobody takes the pages 1 and 2.
        assert!(reads.begin(key(3), half));
        assert_eq!((reads.take(&key(1)), reads.bytes, reads.running), (Taken::Unknown, half, 1));
        // A page larger than the limit is read alone.
        reads.end(&key(3), None);
        assert!(reads.begin(key(4), 2 * MAX_READ) && !reads.begin(key(5), 1));
    }
}
