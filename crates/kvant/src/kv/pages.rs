//! The pages of a pool: the free pages, and the hold count of each page. This file does not access their memory.
//!
//! The memory is divided into slabs of equal size. A slab belongs to one layer group at a time and is cut into pages of
//! that group. When its last page becomes free, any group can take the slab. Memory thereby moves between groups with
//! different page sizes.

/// A page as page tables store it: its distance from the start of the pool's memory, in
/// [`PAGE_UNIT`](crate::layer::PAGE_UNIT)s.
pub(super) type Page = u32;

/// The ownership of all pages.
#[derive(Clone, Debug)]
pub(super) struct Pages {
    /// Units of a slab.
    slab_units: u32,
    groups: Vec<GroupSlabs>,
    slabs: Vec<Slab>,
    /// Hold counts: `max_per_slab` for each slab.
    holds: Vec<u32>,
    max_per_slab: usize,
    /// Slabs without a group. The next one is taken from the end.
    free: Vec<u32>,
}

#[derive(Clone, Debug)]
struct GroupSlabs {
    /// Units of a page.
    units: u32,
    /// Pages of a slab.
    per_slab: u32,
    /// Slabs of the group that have free pages. The next page comes from the last slab, which was full most recently,
    /// so that the other slabs can become empty.
    open: Vec<u32>,
    in_use: usize,
}

#[derive(Clone, Copy, Debug)]
struct Slab {
    group: usize,
    used: u32,
}

const NO_GROUP: usize = usize::MAX;

impl Pages {
    /// Makes `slabs` slabs of `slab_units` units, for groups whose pages have `units` units, at most a slab.
    pub fn new(slabs: u32, slab_units: u32, units: &[u32]) -> Pages {
        let per_slab = |units: u32| slab_units / units;
        let max_per_slab = units.iter().map(|&units| per_slab(units)).max().unwrap_or(0) as usize;
        let group = |&units: &u32| GroupSlabs { units, per_slab: per_slab(units), open: Vec::new(), in_use: 0 };
        Pages {
            slab_units,
            groups: units.iter().map(group).collect(),
            slabs: vec![Slab { group: NO_GROUP, used: 0 }; slabs as usize],
            holds: vec![0; slabs as usize * max_per_slab],
            max_per_slab,
            free: (0..slabs).rev().collect(),
        }
    }

    /// The slab of a page, and the index of its hold count.
    fn find(&self, page: Page) -> (usize, usize) {
        let slab = (page / self.slab_units) as usize;
        let index = page % self.slab_units / self.groups[self.slabs[slab].group].units;
        (slab, slab * self.max_per_slab + index as usize)
    }

    /// The hold count of a page.
    pub fn holds(&self, page: Page) -> u32 {
        self.holds[self.find(page).1]
    }

    /// Takes a free page of a group, with one hold.
    pub fn take(&mut self, group: usize) -> Option<Page> {
        let slab = match self.groups[group].open.last() {
            Some(&slab) => slab as usize,
            None => {
                let slab = self.free.pop()?;
                self.slabs[slab as usize].group = group;
                self.groups[group].open.push(slab);
                slab as usize
            }
        };
        let per_slab = self.groups[group].per_slab as usize;
        let first = slab * self.max_per_slab;
        let index = self.holds[first..first + per_slab].iter().position(|&holds| holds == 0);
        let index = index.expect("an open slab has a free page");
        self.count_taken(slab, first + index);
        Some(slab as u32 * self.slab_units + index as u32 * self.groups[group].units)
    }

    /// Counts a free page of an open slab as held once.
    fn count_taken(&mut self, slab: usize, hold: usize) {
        self.holds[hold] = 1;
        let group = &mut self.groups[self.slabs[slab].group];
        group.in_use += 1;
        self.slabs[slab].used += 1;
        if self.slabs[slab].used == group.per_slab {
            group.open.retain(|&open| open as usize != slab);
        }
    }

    /// Holds a page once more.
    pub fn hold(&mut self, page: Page) {
        let (_, hold) = self.find(page);
        self.holds[hold] += 1;
    }

    /// Releases one hold of a page. Returns whether the page is now free.
    pub fn release(&mut self, page: Page) -> bool {
        let (slab, hold) = self.find(page);
        self.holds[hold] -= 1;
        if self.holds[hold] > 0 {
            return false;
        }
        let group = &mut self.groups[self.slabs[slab].group];
        group.in_use -= 1;
        let was_full = self.slabs[slab].used == group.per_slab;
        self.slabs[slab].used -= 1;
        if self.slabs[slab].used == 0 {
            group.open.retain(|&open| open as usize != slab);
            self.slabs[slab].group = NO_GROUP;
            self.free.push(slab as u32);
        } else if was_full {
            group.open.push(slab as u32);
        }
        true
    }

    /// Undoes a release of a page of a group. Everything after the release must have been undone.
    pub fn undo_release(&mut self, group: usize, page: Page) {
        let slab = (page / self.slab_units) as usize;
        if self.slabs[slab].group == NO_GROUP {
            self.free.retain(|&free| free as usize != slab);
            self.slabs[slab].group = group;
            self.groups[group].open.push(slab as u32);
        }
        let (slab, hold) = self.find(page);
        match self.holds[hold] {
            0 => self.count_taken(slab, hold),
            _ => self.holds[hold] += 1,
        }
    }

    /// Pages of a group that are held.
    pub fn in_use(&self, group: usize) -> usize {
        self.groups[group].in_use
    }

    /// Pages that a group could take.
    #[cfg(test)]
    pub fn available(&self, group: usize) -> usize {
        let GroupSlabs { per_slab, ref open, .. } = self.groups[group];
        let in_open: u32 = open.iter().map(|&slab| per_slab - self.slabs[slab as usize].used).sum();
        in_open as usize + self.free.len() * per_slab as usize
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn memory_moves_between_groups() {
        // Slabs of 10 units: one page of group 0, or three of group 1.
        let mut pages = Pages::new(2, 10, &[10, 3]);
        let small: Vec<Page> = (0..6).map(|_| pages.take(1).unwrap()).collect();
        assert_eq!(small, [0, 3, 6, 10, 13, 16]);
        assert_eq!((pages.take(0), pages.take(1), pages.available(0)), (None, None, 0));
        for page in [0, 6] {
            assert!(pages.release(page));
        }
        assert_eq!(pages.take(0), None, "one page of the slab is still held");
        pages.release(3);
        assert_eq!((pages.take(0), pages.in_use(0), pages.in_use(1)), (Some(0), 1, 3));
    }

    proptest! {
        /// Compares random takes, holds, releases and undone releases with a map of counts.
        #[test]
        fn counts_follow_a_map(actions in prop::collection::vec((0..5u8, 0..3usize, any::<prop::sample::Index>()), 0..300)) {
            let units = [7, 3, 2];
            let mut pages = Pages::new(5, 7, &units);
            let mut held: BTreeMap<Page, (usize, u32)> = BTreeMap::new();
            for (action, group, which) in actions {
                let some = (!held.is_empty()).then(|| *held.keys().nth(which.index(held.len())).unwrap());
                match (action, some) {
                    (0 | 1, _) => {
                        let could = pages.available(group) > 0;
                        let page = pages.take(group);
                        prop_assert_eq!(page.is_some(), could);
                        if let Some(page) = page {
                            let (from, to) = (page, page + units[group]);
                            prop_assert!(to <= 35 && from / 7 == (to - 1) / 7);
                            let overlaps = held.iter().any(|(&p, &(g, _))| p < to && from < p + units[g]);
                            prop_assert!(!overlaps, "{} is held", page);
                            held.insert(page, (group, 1));
                        }
                    }
                    (2, Some(page)) => {
                        pages.hold(page);
                        held.get_mut(&page).unwrap().1 += 1;
                    }
                    (3, Some(page)) => {
                        let group = held[&page].0;
                        pages.release(page);
                        pages.undo_release(group, page);
                    }
                    (_, Some(page)) => {
                        let count = held[&page].1;
                        prop_assert_eq!(pages.release(page), count == 1);
                        if count == 1 { held.remove(&page); } else { held.get_mut(&page).unwrap().1 -= 1; }
                    }
                    _ => {}
                }
                for (&page, &(_, count)) in &held {
                    prop_assert_eq!(pages.holds(page), count);
                }
                for group in 0..3 {
                    prop_assert_eq!(pages.in_use(group), held.values().filter(|held| held.0 == group).count());
                }
            }
            for (page, (_, count)) in held {
                (0..count).for_each(|_| { pages.release(page); });
            }
            prop_assert_eq!(pages.free.len(), 5);
        }
    }
}
