//! The words that a step uploads to the device.

use super::{growth::Change, step_rows::StepRows};
use crate::{
    Step, Tensor,
    ops::StateRuns,
    position_share::{StepShare, TokenWords},
    step::StepPages,
};

/// The dimensions of a step's upload: positions, sequences, lengths, and the table of each group.
pub(super) struct StepShape<'a> {
    pub base: &'a Tensor,
    pub tokens: usize,
    /// Rows of lengths and tables.
    pub sequences: usize,
    pub width: usize,
    /// Maximum pages of a group that the pass seals.
    pub seals: usize,
    /// The first words of the runs' starts, past tokens, slots and slots after rows, if the pool has states.
    pub runs: Option<[usize; 4]>,
    /// The shares of the ranks; empty if no layer's positions are divided.
    pub shares: &'a [StepShare],
    /// Each token has a row, instead of each sequence.
    pub is_unrolled: bool,
}

/// Rounds a count of words up, so that the next part is aligned to 16 bytes.
pub(super) fn padded(words: usize) -> Option<usize> {
    words.checked_next_multiple_of(4)
}

/// The words of the runs of up to `sequences` sequences: starts, past tokens, slots, slots after rows.
pub(super) fn run_words(tokens: usize, sequences: usize) -> Option<[usize; 4]> {
    let [starts, others] = [padded(sequences.checked_add(1)?)?, padded(sequences)?];
    Some([starts, others, others, padded(tokens)?])
}

/// The words of a rank's share of a step: positions, the sequences of tokens that see rows, the sequences of tokens
/// that are stored, and lengths.
pub(super) fn share_words(tokens: usize, sequences: usize) -> Option<[usize; 4]> {
    let (tokens, sequences) = (padded(tokens)?, padded(sequences)?);
    tokens.checked_mul(3)?.checked_add(sequences)?;
    Some([tokens, tokens, tokens, sequences])
}

impl<'a> StepShape<'a> {
    pub fn of(step: &Step, pages: &'a StepPages) -> StepShape<'a> {
        let width = pages.tables.first().map_or(0, |table| table.shape()[1]);
        let (tokens, sequences) = (step.tokens(), step.sequences());
        let seals = pages.seals.iter().map(|seals| seals.shape()[0]).max().unwrap_or(0);
        let runs = pages.runs.is_some().then(|| {
            let mut at = pages.base.elements();
            let mut words = run_words(tokens, sequences).expect("the step's size has been checked");
            for words in words.iter_mut().rev() {
                at -= *words;
                *words = at;
            }
            words
        });
        let (base, shares) = (&pages.base, &pages.shares);
        StepShape { base, tokens, sequences, width, seals, runs, shares, is_unrolled: false }
    }

    /// The first word of the pages to seal of a group of sealed pages; `before` is the number of such groups before it.
    pub fn at_seals(&self, before: usize, groups: usize) -> usize {
        let of_group = padded(3 * self.seals).expect("the step's size has been checked");
        self.table_row(groups, 0) + before * of_group
    }

    /// The number of rows of a sequence with `count` new tokens.
    pub fn rows(&self, count: usize) -> usize {
        if self.is_unrolled { count } else { 1 }
    }

    /// The first row of a sequence of a batch.
    pub fn first_row<R: StepRows>(&self, batch: &[R], sequence: usize) -> usize {
        match self.is_unrolled {
            true => batch[..sequence].iter().map(R::count).sum(),
            false => sequence,
        }
    }

    /// The first word of the sequences.
    pub fn at_sequence(&self) -> usize {
        padded(self.tokens).expect("the step's size has been checked")
    }

    /// The first word of a row of a group's table.
    pub fn table_row(&self, group: usize, row: usize) -> usize {
        let [tokens, sequences, table] = [self.tokens, self.sequences, self.sequences * self.width]
            .map(|words| padded(words).expect("the step's size has been checked"));
        2 * tokens + sequences + group * table + row * self.width
    }

    /// Fills positions, sequences and lengths after the step, the runs, and the first row of each sequence with the
    /// pages that it holds before the step. `tables` is the number of page tables.
    pub fn fill<R: StepRows>(&self, words: &mut Vec<u32>, batch: &[R], tables: usize) {
        words.clear();
        words.resize(self.base.elements(), Step::INACTIVE);
        let at_sequence = self.at_sequence();
        let at_lens = 2 * at_sequence;
        words[..self.tokens].fill(0);
        words[at_lens..at_lens + self.sequences].fill(0);
        let (mut token, mut row) = (0, 0);
        for of in batch {
            let (start, count) = (of.start(), of.count());
            let rows = self.rows(count);
            for index in 0..count {
                words[token] = (start + index) as u32;
                words[at_sequence + token] = (row + index.min(rows - 1)) as u32;
                token += 1;
            }
            for index in 0..rows {
                // The last row has the length with all new tokens.
                words[at_lens + row + index] = (start + count - (rows - 1 - index)) as u32;
            }
            for (group, held) in of.pages().groups.iter().take(tables).enumerate().filter(|_| rows > 0) {
                let at = self.table_row(group, row);
                if let Some(kept) = held.kept {
                    words[at] = kept;
                }
                // The sequence may have pages after the last one of the step.
                let count = held.pages.len().min(self.width.saturating_sub(held.first));
                if count > 0 {
                    words[at + held.first..][..count].copy_from_slice(&held.pages[..count]);
                }
            }
            row += rows;
        }
        self.fill_runs(words, batch, tables);
        self.fill_shares(words);
    }

    /// Fills the shares of all ranks, from positions, sequences and lengths.
    fn fill_shares(&self, words: &mut [u32]) {
        let at_sequence = self.at_sequence();
        let first_word = |tensor: &Tensor| (tensor.byte_offset() - self.base.byte_offset()) / size_of::<u32>();
        for StepShare { share, positions, seen, stored, lens } in self.shares {
            let [at_positions, at_seen, at_stored, at_lens] = [positions, seen, stored, lens].map(first_word);
            for token in 0..self.tokens {
                let TokenWords { position, seen, stored } = share.token(words[token], words[at_sequence + token]);
                words[at_positions + token] = position;
                words[at_seen + token] = seen;
                words[at_stored + token] = stored;
            }
            for sequence in 0..self.sequences {
                words[at_lens + sequence] = share.rows(words[2 * at_sequence + sequence] as usize) as u32;
            }
        }
    }

    /// Fills the runs: each sequence's new tokens, with the states that it holds before the step. `group` is that of
    /// the states. The states after rows are written by [`StepShape::fill_pages`].
    fn fill_runs<R: StepRows>(&self, words: &mut [u32], batch: &[R], group: usize) {
        let Some([starts, past, slots, _]) = self.runs else { return };
        let batch = if R::APPENDS { batch } else { &[] };
        let mut end = 0;
        words[starts] = 0;
        for index in 0..self.sequences {
            let count = batch.get(index).map_or(0, R::count);
            end += count as u32;
            words[starts + index + 1] = end;
            words[past + index] = batch.get(index).map_or(0, |rows| rows.start() as u32);
            let held = batch.get(index).and_then(|rows| rows.pages().groups.get(group)?.pages.first());
            words[slots + index] = held.copied().filter(|_| count > 0).unwrap_or(StateRuns::INACTIVE);
        }
    }

    /// Copies the page table of each sequence from its first row to its other rows.
    pub fn repeat_tables<R: StepRows>(&self, words: &mut [u32], batch: &[R], tables: usize) {
        let mut row = 0;
        for rows in batch.iter().map(|of| self.rows(of.count())) {
            for other in 1..rows {
                for group in 0..tables {
                    let from = self.table_row(group, row);
                    words.copy_within(from..from + self.width, self.table_row(group, row + other));
                }
            }
            row += rows;
        }
    }

    /// Applies the changes of a step to the page tables, and to the slots of the runs. `tables` is also the group of
    /// states.
    pub fn fill_pages<R: StepRows>(&self, words: &mut [u32], log: &[Change], batch: &[R], tables: usize) {
        for change in log {
            match *change {
                Change::Kept { .. } | Change::Unheld { .. } | Change::Boundary { .. } | Change::Held { .. } => {}
                // States of earlier boundaries are in no slot.
                Change::Dropped { group, .. } if group == tables => {}
                Change::Copied { sequence, group, to, .. } if group == tables => {
                    if let Some([_, _, slots, _]) = self.runs {
                        words[slots + sequence] = to;
                    }
                }
                Change::Written { sequence, row, page, .. } => self.set_after(words, [sequence, row], page),
                Change::Passed { sequence, group, page } | Change::Dropped { sequence, group, page } => {
                    let row = self.table_row(group, self.first_row(batch, sequence));
                    words[row..row + self.width].iter_mut().filter(|entry| **entry == page).for_each(|entry| {
                        *entry = Step::INACTIVE;
                    });
                }
                Change::Copied { sequence, group, from, to } => {
                    let row = self.table_row(group, self.first_row(batch, sequence));
                    words[row..row + self.width].iter_mut().filter(|entry| **entry == from).for_each(|entry| {
                        *entry = to;
                    });
                }
                Change::New { sequence, group, index, page } => {
                    words[self.table_row(group, self.first_row(batch, sequence)) + index] = page;
                }
            }
        }
    }

    /// Sets the slot of the states after a row of a sequence.
    fn set_after(&self, words: &mut [u32], [sequence, row]: [usize; 2], page: u32) {
        let Some([starts, _, slots, after]) = self.runs else { return };
        words[after + words[starts + sequence] as usize + row] = page;
        // A sequence without states begins with zeros, and needs a slot that exists.
        if words[slots + sequence] == StateRuns::INACTIVE {
            words[slots + sequence] = page;
        }
    }
}
