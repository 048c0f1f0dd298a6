//! The division of one dimension, and of a matrix, among the ranks of a group.

use std::ops::Range;

/// Consecutive elements of a dimension that are divided among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Elements of all ranks.
    pub whole: usize,
    /// Elements of one rank. Elements beyond the whole are zero.
    pub local: usize,
    /// Consecutive ranks that have the same elements.
    pub copies: usize,
}

impl Share {
    /// `local` of `whole` elements on each rank. If the ranks outnumber the parts, consecutive ranks have equal parts.
    pub(crate) fn new(whole: usize, local: usize, ranks: usize) -> Share {
        // Padding is less than `local`, so the ranks' elements reach twice the whole only if parts are repeated.
        Share { whole, local, copies: (local * ranks / whole.max(1)).max(1) }
    }

    /// The elements of a rank.
    pub(crate) fn range(self, rank: usize) -> Range<usize> {
        let start = (rank / self.copies * self.local).min(self.whole);
        start..(start + self.local).min(self.whole)
    }

    /// The share in bytes, if `units` elements take `bytes`.
    pub(crate) fn scaled(self, bytes: usize, units: usize) -> Share {
        let scale = |elements: usize| elements * bytes / units.max(1);
        Share { whole: scale(self.whole), local: scale(self.local), ..self }
    }
}

/// How a matrix is divided among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Every rank has all of it.
    Whole,
    /// By outputs, of one matrix or of several matrices that are joined by rows. Each matrix has a share.
    Outputs(Vec<Share>),
    /// By inputs, which consist of parts. Each part is divided among the ranks separately.
    Inputs(Vec<Share>),
}

impl Cut {
    /// The shape of a rank's part of a matrix of `shape`.
    pub(crate) fn shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut local = shape.to_vec();
        match (self, &mut local[..]) {
            (Cut::Outputs(shares), [.., outputs, _]) => *outputs = shares.iter().map(|share| share.local).sum(),
            (Cut::Inputs(shares), [.., inputs]) => *inputs = shares.iter().map(|share| share.local).sum(),
            (Cut::Whole | Cut::Outputs(_), _) | (Cut::Inputs(_), []) => {}
        }
        local
    }
}

/// A rank's part of rows that consist of `shares`.
pub(crate) fn of_rank<T: Copy + Default>(rows: &[T], shares: &[Share], rank: usize, out: &mut Vec<T>) {
    out.clear();
    let width = shares.iter().map(|share| share.whole).sum::<usize>().max(1);
    for row in rows.chunks_exact(width) {
        let mut first = 0;
        for share in shares {
            let of_rank = share.range(rank);
            let missing = share.local - of_rank.len();
            out.extend_from_slice(&row[first + of_rank.start..first + of_rank.end]);
            out.resize(out.len() + missing, T::default());
            first += share.whole;
        }
    }
}

/// Number of rows of the output matrix that a rank has: all if the ranks do not divide the vocabulary.
pub(crate) fn output_rows(vocab_size: usize, ranks: usize) -> usize {
    if vocab_size.is_multiple_of(ranks) { vocab_size / ranks } else { vocab_size }
}
