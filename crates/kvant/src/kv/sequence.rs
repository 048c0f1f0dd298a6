//! A sequence of a pool.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    layout::{PageKind, PoolLayout},
    pages::{Page, Pages},
    pool::{KvPool, NAME},
};
use crate::{Error, Result, ops::check, step::Stamp};

/// The tokens of one conversation in a [`KvPool`]: its length, and the pages that hold its keys and values.
///
/// Dropping a sequence releases its pages. Work that was committed before may still read them: on every device, passes
/// run in order.
pub struct Sequence {
    pool: KvPool,
    pub(super) pages: SequencePages,
}

/// The part of a sequence that does not refer to the pool.
#[derive(Debug, Default)]
pub(super) struct SequencePages {
    pub len: usize,
    /// The number of positions that are kept beyond the windows.
    pub hold: usize,
    pub groups: Vec<GroupPages>,
    /// Counts changes, so that a step can detect that it is out of date.
    changes: Arc<AtomicU64>,
}

/// The pages of a sequence in one layer group: `pages[i]` holds the positions from `(first + i) · page_tokens`.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupPages {
    pub first: usize,
    pub pages: Vec<Page>,
    /// Page 0, if it is kept although the other pages begin later: in groups whose first page stays dense. In the group
    /// of states, the states at `boundary`.
    pub kept: Option<Page>,
    /// The length of the sequence at the states that are kept.
    pub boundary: usize,
    /// In the group of states: the states that the latest step left at other lengths than its end, with these lengths
    /// in rising order, so that the sequence can be truncated to them.
    pub rows: Vec<(usize, Page)>,
    /// End of the pages that were moved to huge pages of the host's memory.
    pub huge_end: usize,
}

impl GroupPages {
    /// All pages, including those of earlier states.
    pub fn all(&self) -> impl Iterator<Item = Page> + '_ {
        self.rows.iter().map(|(_, page)| *page).chain(self.lasting())
    }

    /// The pages that later steps need, including the kept one.
    pub fn lasting(&self) -> impl Iterator<Item = Page> + '_ {
        self.kept.iter().chain(&self.pages).copied()
    }

    /// The exclusive end of the indices of the pages.
    pub fn end(&self) -> usize {
        self.first + self.pages.len()
    }

    /// The states of a sequence of `len` tokens at position `at`, if they are held.
    pub fn states_at(&self, at: usize, len: usize) -> Option<Page> {
        let kept = self.kept.filter(|_| self.boundary == at);
        let row = || self.rows.iter().find(|(row, _)| *row == at).map(|(_, page)| *page);
        kept.or_else(row).or_else(|| self.pages.first().copied().filter(|_| at == len))
    }

    /// The latest states of a sequence of `len` tokens at a multiple of the page size, other than the kept ones, and
    /// the length there.
    pub fn boundary_states(&self, len: usize, page_tokens: usize) -> Option<(usize, Page)> {
        let current = self.pages.first().map(|&page| (len, page));
        self.rows.iter().copied().chain(current).rfind(|(at, _)| at.is_multiple_of(page_tokens))
    }

    /// The latest length before the current one at which states are held.
    fn latest_states(&self) -> Option<usize> {
        self.rows.last().map(|(row, _)| *row).or(self.kept.map(|_| self.boundary))
    }

    /// Returns to the states at length `at`, which are held. Returns the pages that are no longer needed.
    fn cut_states(&mut self, at: usize) -> Vec<Page> {
        let mut cut = std::mem::take(&mut self.pages);
        let index = self.rows.iter().position(|(row, _)| *row == at);
        // States at earlier lengths stay.
        cut.extend(self.rows.drain(index.map_or(0, |index| index + 1)..).map(|(_, page)| page));
        self.pages.extend(if index.is_some() { self.rows.pop().map(|(_, page)| page) } else { self.kept.take() });
        cut
    }

    /// The page with an index, if it is held.
    pub fn get(&self, index: usize) -> Option<Page> {
        let kept = if index == 0 { self.kept } else { None };
        kept.or_else(|| self.pages.get(index.checked_sub(self.first)?).copied())
    }

    /// Removes the pages from index `end` on.
    fn cut(&mut self, end: usize) -> Vec<Page> {
        let mut cut = self.pages.split_off(end.saturating_sub(self.first).min(self.pages.len()));
        if end <= 1
            && self.first > 0
            && let Some(kept) = self.kept.take()
        {
            // The kept page 0 becomes the last page again.
            cut.append(&mut self.pages);
            (self.first, self.pages) = (0, vec![kept]);
        }
        if end == 0 {
            cut.append(&mut self.pages);
        }
        self.huge_end = self.huge_end.min(end);
        cut
    }
}

impl SequencePages {
    /// Makes an empty list of pages. The first sealed page will have index 1.
    pub fn new(layout: &PoolLayout) -> SequencePages {
        let groups = layout.groups.iter().map(|group| GroupPages { first: group.first_index(), ..Default::default() });
        SequencePages { groups: groups.collect(), ..Default::default() }
    }

    /// Copies the list of pages, and holds each page once more. Pages after the end of the sequence are not shared.
    pub fn fork(&self, layout: &PoolLayout, pages: &mut Pages) -> SequencePages {
        let (mut groups, len) = (self.groups.clone(), self.len);
        for (group, held) in layout.groups.iter().zip(&mut groups) {
            if group.kind == PageKind::Plain {
                drop(held.cut(group.end_needed(len, layout.page_tokens)));
            }
        }
        groups.iter().flat_map(GroupPages::all).for_each(|page| pages.hold(page));
        SequencePages { len, hold: self.hold, groups, changes: Arc::default() }
    }

    /// The pages of a group up to the end of the sequence that later steps need.
    pub fn lasting(&self, layout: &PoolLayout, group: usize) -> impl Iterator<Item = Page> + '_ {
        let (of, held) = (&layout.groups[group], &self.groups[group]);
        let ahead = held.end().saturating_sub(of.end_needed(self.len, layout.page_tokens));
        let count = held.lasting().count() - if of.kind == PageKind::Plain { ahead } else { 0 };
        held.lasting().take(count)
    }

    /// Checks that every group of keys and values holds the positions that a token at `position` sees.
    pub fn check_seen(&self, layout: &PoolLayout, position: usize) -> Result<()> {
        let page_tokens = layout.page_tokens;
        for (group, held) in layout.groups.iter().zip(&self.groups) {
            let mut needed = group.first_needed(position, page_tokens);
            let end = group.end_needed(position, page_tokens);
            // A window that had passed the first page may see it again.
            if group.kind == PageKind::Dense && group.oldest_seen(position) < page_tokens && held.get(0).is_none() {
                needed = 0;
            }
            let is_held = match group.kind {
                PageKind::Dense => (needed..end).all(|index| held.get(index).is_some()),
                // Sealed pages may end earlier: the pages after them are dense.
                PageKind::Plain | PageKind::Sealed => needed >= held.first,
                PageKind::State { .. } => true,
            };
            if !is_held {
                let [needed, oldest] = [needed, held.first].map(|page| page * page_tokens);
                return Err(Error::NotHeld { needed, oldest });
            }
        }
        Ok(())
    }

    /// Releases all pages.
    pub fn release(&mut self, layout: &PoolLayout, pages: &mut Pages) {
        for (group, held) in layout.groups.iter().zip(&mut self.groups) {
            held.all().for_each(|page| {
                pages.release(page);
            });
            *held = GroupPages { first: group.first_index(), ..Default::default() };
        }
        self.len = 0;
        self.changed();
    }

    /// Invalidates all earlier steps of the sequence.
    pub fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// The current state of the sequence, for a step.
    pub fn stamp(&self) -> Stamp {
        Stamp { changes: Arc::clone(&self.changes), seen: self.changes.load(Ordering::Relaxed) }
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
        let layout = self.pool.layout();
        let group = layout.group_of(layer)?;
        let held = &self.pages.groups[group];
        // Sealed pages begin after the first page, which is dense.
        let first = match layout.dense_group(group).map(|dense| &self.pages.groups[dense]) {
            Some(dense) if dense.get(0).is_some() => 0,
            Some(dense) if held.pages.is_empty() => dense.first,
            _ => held.first,
        };
        Ok((first * layout.page_tokens).min(self.len())..self.len())
    }

    /// The length, before the latest step, to which a sequence of a pool with [states](crate::StateLayer) can be
    /// truncated: the last multiple of the page size at which a step began or kept the states. `None` without states,
    /// and before the first such step.
    pub fn boundary(&self) -> Option<usize> {
        let held = &self.pages.groups[self.pool.layout().state_group()?];
        held.kept.map(|_| held.boundary)
    }

    /// Keeps `tokens` more positions than the windows need, from the next step on, so that this many tokens can be
    /// truncated.
    ///
    /// If the pool has [states](crate::StateLayer), a step of up to [`StateRuns::MAX_KEPT`](crate::ops::StateRuns)
    /// tokens also writes the states before each of its last `tokens` tokens, and at its start if it has no more than
    /// `tokens`. Each takes the memory of one more set of states until the next step. If `tokens` is not 0, a longer
    /// step leaves the states at its start.
    pub fn hold(&mut self, tokens: usize) {
        self.pages.hold = tokens;
    }

    /// Makes another sequence with the same tokens. No key is copied: both share their pages, and the last, partly
    /// filled page is copied when one of them writes to it.
    pub fn fork(&self) -> Sequence {
        let pages = self.pages.fork(self.pool.layout(), &mut self.pool.lock().pages);
        Sequence::new(self.pool.clone(), pages)
    }

    /// Truncates to the first `len` tokens. Pages that hold only later positions are released.
    ///
    /// A layer with a window holds the positions that the latest step could see. The tokens of that step can therefore
    /// always be removed; [`Sequence::hold`] allows more. A sequence with states can only be truncated to
    /// [`Sequence::boundary`], and by the tokens of the latest step that it [held](Sequence::hold). Truncation to 0
    /// always succeeds.
    ///
    /// # Errors
    /// - `Value` if the sequence has fewer tokens.
    /// - `NotHeld` if a layer no longer holds a position that the next token would see. The sequence is unchanged.
    /// - `NoStates` if the states at this length are not kept. The sequence is unchanged.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        let now = self.len();
        check::value_is(NAME, "len", len <= now, format_args!("at most the length {now}"), len)?;
        if len == now {
            return Ok(());
        }
        let pool = self.pool.clone();
        let layout = pool.layout();
        if len == 0 {
            self.pages.release(layout, &mut pool.lock().pages);
            return Ok(());
        }
        if let Some(states) = layout.state_group()
            && self.pages.groups[states].states_at(len, now).is_none()
        {
            let kept = self.pages.groups[states].latest_states();
            return Err(Error::NoStates { at: len, kept });
        }
        self.pages.check_seen(layout, len)?;
        let mut state = pool.lock();
        for (group, held) in layout.groups.iter().zip(&mut self.pages.groups) {
            let cut = match group.kind {
                PageKind::State { .. } => held.cut_states(len),
                _ => held.cut(group.end_needed(len, layout.page_tokens)),
            };
            for page in cut {
                state.pages.release(page);
            }
        }
        self.pages.len = len;
        self.pages.changed();
        Ok(())
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.pages.release(self.pool.layout(), &mut self.pool.lock().pages);
    }
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sequence({} tokens)", self.len())
    }
}
