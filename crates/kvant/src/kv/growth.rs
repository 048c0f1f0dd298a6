//! The pages that a step takes and releases, and the log of these changes.

use super::{
    layout::{PageKind, PoolLayout},
    pages::{Page, Pages},
    step_rows::StepRows,
};

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
    /// The states of a boundary are kept, and the sequence continues with a copy of them.
    Boundary { sequence: usize, group: usize, from: Page, to: Page },
    /// The states at the start of the step are kept, and the sequence continues with a copy of them.
    Held { sequence: usize, group: usize, from: Page, to: Page },
    /// The states at the start of an earlier step are released.
    Unheld { sequence: usize, group: usize, page: Page },
    /// A new last page is taken; `index` is its index in the sequence.
    New { sequence: usize, group: usize, index: usize, page: Page },
}

/// Takes the pages of a batch. Returns the number of missing pages; the log has the changes that were made.
pub(super) fn take<R: StepRows>(pages: &mut Pages, layout: &PoolLayout, batch: &[R], log: &mut Vec<Change>) -> usize {
    log.clear();
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

/// Takes the pages of new tokens and releases those that windows have passed.
fn grow<R: StepRows>(pages: &mut Pages, layout: &PoolLayout, batch: &[R], log: &mut Vec<Change>) -> usize {
    let mut missing = 0;
    let growing = || batch.iter().enumerate().filter(|(_, rows)| rows.count() > 0);
    for (sequence, rows) in growing() {
        let owner = rows.pages();
        for (group, held) in owner.groups.iter().enumerate() {
            let of = &layout.groups[group];
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
            if let Some((_, page)) = held.start {
                pages.release(page);
                log.push(Change::Unheld { sequence, group, page });
            }
        }
    }
    for (sequence, rows) in growing() {
        let owner = rows.pages();
        for (group, held) in owner.groups.iter().enumerate() {
            let of = &layout.groups[group];
            for index in of.new_pages(owner.len, owner.len + rows.count(), held.end(), layout.page_tokens) {
                match pages.take(group) {
                    Some(page) => log.push(Change::New { sequence, group, index, page }),
                    None => missing += 1,
                }
            }
            // Pages after the one of the next token are not shared.
            let next = owner.len / layout.page_tokens;
            let from =
                if matches!(of.kind, PageKind::State { .. }) { held.pages.first().copied() } else { held.get(next) };
            let (Some(from), is_boundary) = (from, owner.len % layout.page_tokens == 0) else { continue };
            match of.kind {
                PageKind::State { max: 2.. } if is_boundary => {
                    if let Some(page) = held.kept {
                        pages.release(page);
                        log.push(Change::Dropped { sequence, group, page });
                    }
                    match pages.take(group) {
                        Some(to) => log.push(Change::Boundary { sequence, group, from, to }),
                        None => missing += 1,
                    }
                    continue;
                }
                PageKind::State { .. } if owner.hold > 0 => {
                    match pages.take(group) {
                        Some(to) => log.push(Change::Held { sequence, group, from, to }),
                        None => missing += 1,
                    }
                    continue;
                }
                PageKind::Sealed => continue,
                PageKind::Plain | PageKind::Dense if is_boundary => continue,
                PageKind::Plain | PageKind::Dense | PageKind::State { .. } => {}
            }
            // The last page gets new tokens, so copy it unless only this sequence holds it.
            if pages.holds(from) > 1 {
                match pages.take(group) {
                    Some(to) => {
                        pages.release(from);
                        log.push(Change::Copied { sequence, group, from, to });
                    }
                    None => missing += 1,
                }
            }
        }
    }
    missing
}

/// Undoes the changes of [`take`].
pub(super) fn undo(pages: &mut Pages, log: &mut Vec<Change>) {
    for change in log.drain(..).rev() {
        match change {
            Change::Passed { group, page, .. }
            | Change::Dropped { group, page, .. }
            | Change::Unheld { group, page, .. } => pages.undo_release(group, page),
            Change::Kept { .. } => {}
            Change::Copied { group, from, to, .. } => {
                pages.undo_release(group, from);
                pages.release(to);
            }
            Change::Boundary { to: page, .. } | Change::Held { to: page, .. } | Change::New { page, .. } => {
                pages.release(page);
            }
        }
    }
}

/// Writes the changes of [`take`] to the sequences.
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
            Change::Boundary { sequence, group, from, to, .. } => {
                let owner = batch[sequence].pages_mut();
                let held = &mut owner.groups[group];
                (held.kept, held.boundary, held.pages) = (Some(from), owner.len, vec![to]);
            }
            Change::Held { sequence, group, from, to } => {
                let owner = batch[sequence].pages_mut();
                let held = &mut owner.groups[group];
                (held.start, held.pages) = (Some((owner.len, from)), vec![to]);
            }
            Change::Unheld { sequence, group, .. } => batch[sequence].pages_mut().groups[group].start = None,
            Change::New { sequence, group, index, page } => {
                let held = &mut batch[sequence].pages_mut().groups[group];
                held.first = if held.pages.is_empty() { index } else { held.first };
                held.pages.push(page);
            }
        }
    }
}
