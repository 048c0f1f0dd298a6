//! The pages that a step takes and releases, and the log of these changes.

use super::{
    layout::{PageKind, PoolLayout},
    pages::{Page, Pages},
    step_rows::StepRows,
};
use crate::ops::StateRuns;

/// One change of page ownership by a step. `sequence` is an index of the batch.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    /// The oldest page is released: the window has passed it.
    Passed { sequence: usize, group: usize, page: Page },
    /// Page 0 stays, and the pages after it are released.
    Kept { sequence: usize, group: usize },
    /// A kept page is released: page 0, which the window has passed, or the states of an earlier boundary.
    Dropped { sequence: usize, group: usize, page: Page },
    /// The last page is replaced by a copy, because others hold it, too.
    Copied { sequence: usize, group: usize, from: Page, to: Page },
    /// States become those of the boundary at length `at`: the current ones, or those after a row of the previous step.
    Boundary { sequence: usize, group: usize, at: usize, page: Page },
    /// States after a row of the previous step, or at its start, are released.
    Unheld { sequence: usize, group: usize, page: Page },
    /// The states at the start of the step stay.
    Held { sequence: usize, group: usize, page: Page },
    /// The step writes the states after one of its rows. `is_new`: to a page that it takes, instead of the current one.
    Written { sequence: usize, group: usize, row: usize, page: Page, is_new: bool },
    /// A new last page is taken; `index` is its index in the sequence.
    New { sequence: usize, group: usize, index: usize, page: Page },
}

/// Releases the pages that a batch no longer needs. Begins the log.
pub(super) fn release<R: StepRows>(pages: &mut Pages, layout: &PoolLayout, batch: &[R], log: &mut Vec<Change>) {
    log.clear();
    for (sequence, rows) in batch.iter().enumerate().filter(|(_, rows)| R::APPENDS && rows.count() > 0) {
        for (group, of) in layout.groups.iter().enumerate() {
            match of.kind {
                PageKind::State { .. } => release_states(pages, layout, rows, [sequence, group], log),
                _ => release_passed(pages, layout, rows, [sequence, group], log),
            }
        }
    }
}

/// Releases the pages that windows have passed.
fn release_passed<R: StepRows>(
    pages: &mut Pages,
    layout: &PoolLayout,
    rows: &R,
    [sequence, group]: [usize; 2],
    log: &mut Vec<Change>,
) {
    let (owner, of) = (rows.pages(), &layout.groups[group]);
    let held = &owner.groups[group];
    let passed = of.first_held(owner.len, owner.hold, layout.page_tokens);
    let passed = passed.saturating_sub(held.first).min(held.pages.len());
    // Dense layers keep the first page while the window sees it.
    let first_is_seen = of.oldest_seen(owner.len).saturating_sub(owner.hold) < layout.page_tokens;
    for (index, &page) in (held.first..).zip(&held.pages[..passed]) {
        if of.kind == PageKind::Dense && index == 0 && first_is_seen {
            log.push(Change::Kept { sequence, group });
        } else {
            pages.release(page);
            log.push(Change::Passed { sequence, group, page });
        }
    }
    if let Some(page) = held.kept.filter(|_| !first_is_seen) {
        pages.release(page);
        log.push(Change::Dropped { sequence, group, page });
    }
}

/// Releases the states of the previous step's rows. If there are states at a later multiple of the page size than the
/// kept ones, they replace these.
fn release_states<R: StepRows>(
    pages: &mut Pages,
    layout: &PoolLayout,
    rows: &R,
    [sequence, group]: [usize; 2],
    log: &mut Vec<Change>,
) {
    let owner = rows.pages();
    let held = &owner.groups[group];
    let boundary = match layout.groups[group].kind {
        PageKind::State { max: 2.. } => held.boundary_states(owner.len, layout.page_tokens),
        _ => None,
    };
    if let Some((at, page)) = boundary {
        if let Some(page) = held.kept {
            pages.release(page);
            log.push(Change::Dropped { sequence, group, page });
        }
        log.push(Change::Boundary { sequence, group, at, page });
    }
    for &(at, page) in &held.rows {
        if boundary != Some((at, page)) {
            pages.release(page);
            log.push(Change::Unheld { sequence, group, page });
        }
    }
}

/// Takes the pages of a batch. Returns the number of missing pages; the log gets the changes that were made.
pub(super) fn take<R: StepRows>(pages: &mut Pages, layout: &PoolLayout, batch: &[R], log: &mut Vec<Change>) -> usize {
    if R::APPENDS { grow(pages, layout, batch, log) } else { reach(pages, layout, batch, log) }
}

/// Takes the pages of positions that are written again, or that follow the ends of sequences, in layers that do not
/// seal pages. A page that others hold, too, is copied.
fn reach<R: StepRows>(pages: &mut Pages, layout: &PoolLayout, batch: &[R], log: &mut Vec<Change>) -> usize {
    let mut missing = 0;
    for (sequence, rows) in batch.iter().enumerate().filter(|(_, rows)| rows.count() > 0) {
        let end = (rows.start() + rows.count()).div_ceil(layout.page_tokens);
        let plain = layout.groups.iter().zip(&rows.pages().groups).enumerate();
        for (group, (_, held)) in plain.filter(|(_, (of, _))| of.kind == PageKind::Plain) {
            // Pages before positions after the end are taken, too.
            for index in held.end().min(rows.start() / layout.page_tokens)..end {
                let from = held.get(index);
                if from.is_some_and(|page| pages.holds(page) == 1) {
                    continue;
                }
                match (from, pages.take(group)) {
                    (_, None) => missing += 1,
                    (None, Some(page)) => log.push(Change::New { sequence, group, index, page }),
                    (Some(from), Some(to)) => {
                        pages.release(from);
                        log.push(Change::Copied { sequence, group, from, to });
                    }
                }
            }
        }
    }
    missing
}

/// Takes the pages of new tokens, and of the states after them.
fn grow<R: StepRows>(pages: &mut Pages, layout: &PoolLayout, batch: &[R], log: &mut Vec<Change>) -> usize {
    let mut missing = 0;
    for (sequence, rows) in batch.iter().enumerate().filter(|(_, rows)| rows.count() > 0) {
        let owner = rows.pages();
        for (group, (of, held)) in layout.groups.iter().zip(&owner.groups).enumerate() {
            if matches!(of.kind, PageKind::State { .. }) {
                missing += take_states(pages, layout, rows, [sequence, group], log);
                continue;
            }
            for index in of.new_pages(owner.len, owner.len + rows.count(), held.end(), layout.page_tokens) {
                match pages.take(group) {
                    Some(page) => log.push(Change::New { sequence, group, index, page }),
                    None => missing += 1,
                }
            }
            // The last page gets new tokens. Later ones are not shared.
            let last = held.get(owner.len / layout.page_tokens).filter(|_| owner.len % layout.page_tokens != 0);
            if let Some(from) = last.filter(|_| of.kind != PageKind::Sealed) {
                missing += own(pages, from, [sequence, group], log).is_none() as usize;
            }
        }
    }
    missing
}

/// Copies a page that is about to change, unless only this sequence holds it. Returns the page to change; `None` if
/// none is free.
fn own(pages: &mut Pages, from: Page, [sequence, group]: [usize; 2], log: &mut Vec<Change>) -> Option<Page> {
    if pages.holds(from) == 1 {
        return Some(from);
    }
    let to = pages.take(group)?;
    pages.release(from);
    log.push(Change::Copied { sequence, group, from, to });
    Some(to)
}

/// Takes the pages of the states that a step writes, after each row that stays. The current states are overwritten,
/// unless they are needed at this length. Nobody writes to a page that another sequence reads in the same step: a
/// sequence that does not copy current states of others keeps its hold of them, or is their only holder.
fn take_states<R: StepRows>(
    pages: &mut Pages,
    layout: &PoolLayout,
    rows: &R,
    [sequence, group]: [usize; 2],
    log: &mut Vec<Change>,
) -> usize {
    let (owner, count) = (rows.pages(), rows.count());
    let is_boundary = layout.groups[group].kind != PageKind::State { max: 1 } && owner.len % layout.page_tokens == 0;
    let (mut overwritten, mut missing) = (None, 0);
    match owner.groups[group].pages.first() {
        None => {}
        Some(_) if is_boundary => {}
        Some(&page) if holds_start(count, owner.hold) => log.push(Change::Held { sequence, group, page }),
        Some(&page) => {
            overwritten = own(pages, page, [sequence, group], log);
            missing += usize::from(overwritten.is_none());
        }
    }
    for row in first_written(count, owner.hold)..count {
        let is_new = overwritten.is_none();
        match overwritten.take().or_else(|| pages.take(group)) {
            Some(page) => log.push(Change::Written { sequence, group, row, page, is_new }),
            None => missing += 1,
        }
    }
    missing
}

/// The first of `count` rows after which states stay, if `hold` tokens can be removed.
fn first_written(count: usize, hold: usize) -> usize {
    if count <= StateRuns::MAX_KEPT { count.saturating_sub(hold.saturating_add(1)) } else { count - 1 }
}

/// Whether the states before `count` rows stay, if `hold` tokens can be removed. Of more rows than states can be kept,
/// all can be removed, or none.
fn holds_start(count: usize, hold: usize) -> bool {
    hold >= if count <= StateRuns::MAX_KEPT { count } else { 1 }
}

/// Undoes the changes of [`release`] and [`take`], down to the first `left` ones.
pub(super) fn undo(pages: &mut Pages, log: &mut Vec<Change>, left: usize) {
    for change in log.drain(left..).rev() {
        match change {
            Change::Passed { group, page, .. }
            | Change::Dropped { group, page, .. }
            | Change::Unheld { group, page, .. } => pages.undo_release(group, page),
            Change::Kept { .. }
            | Change::Boundary { .. }
            | Change::Held { .. }
            | Change::Written { is_new: false, .. } => {}
            Change::Copied { group, from, to, .. } => {
                pages.undo_release(group, from);
                pages.release(to);
            }
            Change::Written { page, .. } | Change::New { page, .. } => {
                pages.release(page);
            }
        }
    }
}

/// Writes the changes to the sequences.
pub(super) fn apply<R: StepRows>(log: &mut Vec<Change>, batch: &mut [R]) {
    for change in log.drain(..) {
        match change {
            Change::Passed { sequence, group, .. } => {
                let held = &mut batch[sequence].pages_mut().groups[group];
                held.pages.remove(0);
                held.first += 1;
            }
            Change::Kept { sequence, group } => {
                let held = &mut batch[sequence].pages_mut().groups[group];
                held.kept = Some(held.pages.remove(0));
                held.first += 1;
            }
            Change::Dropped { sequence, group, .. } => batch[sequence].pages_mut().groups[group].kept = None,
            Change::Copied { sequence, group, from, to } => {
                let owner = batch[sequence].pages_mut();
                let held = &mut owner.groups[group].pages;
                held.iter_mut().filter(|page| **page == from).for_each(|page| *page = to);
                // Earlier steps would write to a page of others.
                owner.changed();
            }
            Change::Boundary { sequence, group, at, page } => {
                let held = &mut batch[sequence].pages_mut().groups[group];
                (held.kept, held.boundary) = (Some(page), at);
                held.rows.retain(|(_, of)| *of != page);
            }
            Change::Unheld { sequence, group, page } => {
                batch[sequence].pages_mut().groups[group].rows.retain(|(_, of)| *of != page);
            }
            Change::Held { sequence, group, page } => {
                let owner = batch[sequence].pages_mut();
                let len = owner.len;
                owner.groups[group].rows.push((len, page));
            }
            Change::Written { sequence, group, row, page, .. } => {
                let count = batch[sequence].count();
                let owner = batch[sequence].pages_mut();
                let (len, held) = (owner.len, &mut owner.groups[group]);
                if row + 1 < count {
                    held.rows.push((len + row + 1, page));
                } else {
                    held.pages.clear();
                    held.pages.push(page);
                }
            }
            Change::New { sequence, group, index, page } => {
                let held = &mut batch[sequence].pages_mut().groups[group];
                held.first = if held.pages.is_empty() { index } else { held.first };
                held.pages.push(page);
            }
        }
    }
}
