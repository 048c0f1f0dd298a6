//! A sequence of a pool.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    pages::{Page, Pages},
    pool::{KvPool, NAME, PoolLayout},
};
use crate::{Error, Result, ops::check, step::Stamp};

/// The tokens of one conversation in a [`KvPool`]: its length, and the pages that hold its keys and values.
///
/// Dropping a sequence gives its pages back. Work that was committed before may still read them: on every device,
/// passes run in order.
pub struct Sequence {
    pool: KvPool,
    pub(super) pages: SequencePages,
}

/// The part of a sequence that knows no pool.
#[derive(Debug, Default)]
pub(super) struct SequencePages {
    pub len: usize,
    /// Positions behind the window that are kept.
    pub hold: usize,
    pub groups: Vec<GroupPages>,
    /// Counts changes, so that a step can find out that it is out of date.
    changes: Arc<AtomicU64>,
}

/// The pages of a sequence in one layer group: `pages[i]` holds positions `(first + i) · page_tokens` and on.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupPages {
    pub first: usize,
    pub pages: Vec<Page>,
    /// Pages before this one are in huge pages of the host's memory, where there are such.
    pub settled: usize,
}

impl SequencePages {
    pub fn new(groups: usize) -> SequencePages {
        SequencePages { groups: vec![GroupPages::default(); groups], ..Default::default() }
    }

    /// The same pages, held once more.
    pub fn fork(&self, pages: &mut Pages) -> SequencePages {
        self.groups.iter().flat_map(|group| &group.pages).for_each(|&page| pages.hold(page));
        SequencePages { len: self.len, hold: self.hold, groups: self.groups.clone(), changes: Arc::default() }
    }

    /// Gives all pages up.
    pub fn release(&mut self, pages: &mut Pages) {
        for group in &mut self.groups {
            group.pages.drain(..).for_each(|page| {
                pages.release(page);
            });
            (group.first, group.settled) = (0, 0);
        }
        self.len = 0;
        self.changed();
    }

    /// Makes the steps that were made for the sequence out of date.
    pub fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// The sequence as it is now, for a step.
    pub fn stamp(&self) -> Stamp {
        Stamp { changes: Arc::clone(&self.changes), seen: self.changes.load(Ordering::Relaxed) }
    }

    /// The oldest position that a group holds.
    pub fn oldest(&self, group: usize, page_tokens: usize) -> usize {
        self.groups[group].first * page_tokens
    }
}

impl Sequence {
    pub(super) fn new(pool: KvPool, pages: SequencePages) -> Sequence {
        Sequence { pool, pages }
    }

    /// The pool of the sequence.
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.pages.len
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.pages.len == 0
    }

    /// The positions that a layer holds.
    ///
    /// # Errors
    /// `Value` for a layer that does not exist.
    pub fn held(&self, layer: usize) -> Result<Range<usize>> {
        let group = self.pool.layout().group_of(layer)?;
        Ok(self.pages.oldest(group, self.pool.layout().page_tokens).min(self.len())..self.len())
    }

    /// Keeps `tokens` positions more than the windows need, from the next step on, so that as many tokens can be
    /// truncated.
    pub fn hold(&mut self, tokens: usize) {
        self.pages.hold = tokens;
    }

    /// Another sequence with the same tokens. No key is copied: the two share their pages, and the last, partly filled
    /// page is copied when one of them writes to it.
    pub fn fork(&self) -> Sequence {
        let pages = self.pages.fork(&mut self.pool.lock().pages);
        Sequence::new(self.pool.clone(), pages)
    }

    /// Truncates to the first `len` tokens. Pages that only hold later positions are given back.
    ///
    /// A layer with a window holds the positions that the latest step could see: the tokens of that step can always be
    /// removed, more after [`Sequence::hold`]. Truncation to 0 always succeeds.
    ///
    /// # Errors
    /// - `Value` if the sequence has fewer tokens.
    /// - `NotHeld` if a layer no longer holds what the next token would see. The sequence is unchanged.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        let now = self.len();
        check::value_is(NAME, "len", len <= now, format_args!("at most the length {now}"), len)?;
        if len == now {
            return Ok(());
        }
        let pool = self.pool.clone();
        let PoolLayout { ref groups, page_tokens, .. } = *pool.layout();
        if len == 0 {
            self.pages.release(&mut pool.lock().pages);
            return Ok(());
        }
        for (index, group) in groups.iter().enumerate() {
            let (needed, oldest) = (group.oldest_seen(len), self.pages.oldest(index, page_tokens));
            if needed < oldest {
                return Err(Error::NotHeld { needed, oldest });
            }
        }
        let mut state = pool.lock();
        for group in &mut self.pages.groups {
            group.settled = group.settled.min(len / page_tokens);
            let keep = len.div_ceil(page_tokens) - group.first;
            group.pages.drain(keep..).for_each(|page| {
                state.pages.release(page);
            });
        }
        self.pages.len = len;
        self.pages.changed();
        Ok(())
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.pages.release(&mut self.pool.lock().pages);
    }
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sequence({} tokens)", self.len())
    }
}
