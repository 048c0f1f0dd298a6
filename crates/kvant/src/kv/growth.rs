//! The pages that a step takes and releases, and the log of these changes.

use super::{
    layout::{PageKind, PoolLayout},
    pages::{Page, Pages},
    sequence::Sequence,
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

/// Takes the pages of a batch and releases those that windows have passed. Returns the number of missing pages; the log
/// has the changes that were made.
pub(super) fn grow(
    pages: &mut Pages,
    layout: &PoolLayout,
    batch: &[(&mut Sequence, usize)],
    log: &mut Vec<Change>,
) -> usize {
    log.clear();
    let mut missing = 0;
    let growing = || batch.iter().enumerate().filter(|(_, (_, count))| *count > 0);
    for (sequence, (owner, _)) in growing() {
        let owner = &owner.pages;
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
    for (sequence, (owner, count)) in growing() {
        let owner = &owner.pages;
        for (group, held) in owner.groups.iter().enumerate() {
            let of = &layout.groups[group];
            for index in of.new_pages(owner.len, owner.len + count, held.end(), layout.page_tokens) {
                match pages.take(group) {
                    Some(page) => log.push(Change::New { sequence, group, index, page }),
                    None => missing += 1,
                }
            }
            let (Some(&from), is_boundary) = (held.pages.last(), owner.len % layout.page_tokens == 0) else { continue };
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

/// Undoes the changes of [`grow`].
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

/// Writes the changes of [`grow`] to the sequences.
pub(super) fn apply(log: &mut Vec<Change>, batch: &mut [(&mut Sequence, usize)]) {
    for change in log.drain(..) {
        match change {
            Change::Passed { sequence, group, .. } => {
                let held = &mut batch[sequence].0.pages.groups[group];
                held.pages.remove(0);
                held.first += 1;
            }
            Change::Kept { sequence, group } => {
                let held = &mut batch[sequence].0.pages.groups[group];
                held.kept = Some(held.pages.remove(0));
                held.first += 1;
            }
            Change::Dropped { sequence, group, .. } => batch[sequence].0.pages.groups[group].kept = None,
            Change::Copied { sequence, group, from, to } => {
                let held = &mut batch[sequence].0.pages.groups[group].pages;
                held.iter_mut().filter(|page| **page == from).for_each(|page| *page = to);
            }
            Change::Boundary { sequence, group, from, to, .. } => {
                let owner = &mut batch[sequence].0.pages;
                let held = &mut owner.groups[group];
                (held.kept, held.boundary, held.pages) = (Some(from), owner.len, vec![to]);
            }
            Change::Held { sequence, group, from, to } => {
                let owner = &mut batch[sequence].0.pages;
                let held = &mut owner.groups[group];
                (held.start, held.pages) = (Some((owner.len, from)), vec![to]);
            }
            Change::Unheld { sequence, group, .. } => batch[sequence].0.pages.groups[group].start = None,
            Change::New { sequence, group, index, page } => {
                let held = &mut batch[sequence].0.pages.groups[group];
                held.first = if held.pages.is_empty() { index } else { held.first };
                held.pages.push(page);
            }
        }
    }
}
