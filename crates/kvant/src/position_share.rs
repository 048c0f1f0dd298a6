//! Layers whose positions are divided among the ranks of a group ([`CacheLayer::position_ranks`]).
//!
//! Rank r of N stores positions r·P/N to (r + 1)·P/N of a page of P positions, in a page of P/N slots. The page has the
//! same number on all ranks. A rank's rows are in the order of their positions. Therefore a token sees a leading part
//! of them, and operations only need the positions and lengths of a [`StepShare`].
//!
//! [`CacheLayer::position_ranks`]: crate::CacheLayer::position_ranks

use crate::{
    Error, KvLayer, Result, Step, Tensor,
    group::{Rank, RankTensors},
    ops::check,
};

/// The positions of each page that a rank stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PositionShare {
    /// Positions of a page, a multiple of `ranks`.
    pub page_tokens: usize,
    pub ranks: usize,
    pub rank: usize,
}

/// The words of a token in a [`StepShare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenWords {
    pub position: u32,
    pub seen: u32,
    pub stored: u32,
}

impl PositionShare {
    /// The rows that the rank has of the first `len` positions of a sequence.
    pub(crate) fn rows(self, len: usize) -> usize {
        let slots = self.page_tokens / self.ranks;
        let in_page = (len % self.page_tokens).saturating_sub(self.rank * slots).min(slots);
        len / self.page_tokens * slots + in_page
    }

    /// Whether the rank stores a position.
    pub(crate) fn stores(self, position: usize) -> bool {
        position % self.page_tokens / (self.page_tokens / self.ranks) == self.rank
    }

    /// The words of a token at a position of a sequence, which may be inactive.
    pub(crate) fn token(self, position: u32, sequence: u32) -> TokenWords {
        let rows = self.rows((position as usize).saturating_add(1));
        if sequence == Step::INACTIVE || rows == 0 {
            return TokenWords { position: 0, seen: Step::INACTIVE, stored: Step::INACTIVE };
        }
        let stored = if self.stores(position as usize) { sequence } else { Step::INACTIVE };
        TokenWords { position: (rows - 1) as u32, seen: sequence, stored }
    }
}

/// The tensors of a step for a rank that stores a share of the positions. They are in the memory of all ranks.
#[derive(Clone, Debug)]
pub(crate) struct StepShare {
    pub share: PositionShare,
    /// u32 `[T]`: the last of the rank's rows that each token sees. The row of the token itself, if the rank stores it.
    pub positions: Tensor,
    /// u32 `[T]`: the sequence of each token, or inactive if the token sees no row of the rank.
    pub seen: Tensor,
    /// u32 `[T]`: the sequence of each token, or inactive if another rank stores it.
    pub stored: Tensor,
    /// u32 `[S]`: the rank's rows of each sequence after the step.
    pub lens: Tensor,
}

impl StepShare {
    /// The share of some tokens, whose positions and sequences are given.
    pub(crate) fn of_tokens(&self, positions: &[u32], sequence: &[u32]) -> Result<StepShare> {
        let words = positions.iter().zip(sequence).map(|(&position, &sequence)| self.share.token(position, sequence));
        let words: Vec<TokenWords> = words.collect();
        let upload = |word: fn(&TokenWords) -> u32| {
            let words: Vec<u32> = words.iter().map(word).collect();
            Tensor::from_slice(self.lens.device(), &words, &[words.len()])
        };
        Ok(StepShare {
            positions: upload(|token| token.position)?,
            seen: upload(|token| token.seen)?,
            stored: upload(|token| token.stored)?,
            ..self.clone()
        })
    }
}

/// The use that a call makes of the positions of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PositionUse {
    /// It reads the rows that tokens see.
    See,
    /// It stores the rows of the tokens.
    Store,
}

impl Step {
    /// Moves the step of a call to a rank: if the ranks divide the positions of the layer, the rank's share of it.
    pub(crate) fn move_share_to(&mut self, rank: &Rank, layer: &KvLayer, used: PositionUse) {
        let is_divided = layer.position_ranks() > 1;
        let shares = self.pages.as_ref().filter(|_| is_divided).map(|pages| &pages.shares);
        if let Some(of_rank) = shares.and_then(|shares| shares.get(rank.index())) {
            let StepShare { positions, seen, stored, lens, .. } = of_rank;
            let sequence = if used == PositionUse::See { seen } else { stored };
            (self.positions, self.sequence, self.lens) = (positions.clone(), sequence.clone(), lens.clone());
            let batch = self.batch();
            self.set_known_batch(batch.longest(layer.max_rows(batch.longest)));
        }
        self.move_to(rank);
    }
}

/// Checks that an operation that needs all positions of a layer has them.
pub(crate) fn check_undivided(op: &'static str, layer: &KvLayer) -> Result<()> {
    match layer.position_ranks() {
        1 => Ok(()),
        ranks => {
            let (expected, got) = ("a layer with all positions on each rank", format!("one divided among {ranks}"));
            Err(Error::Value { op, arg: "layer", expected: expected.to_string(), got })
        }
    }
}

/// Checks that ranks can divide the positions of pages: each rank must get at least 16 of a page, the minimum page
/// size.
pub(crate) fn check_page(op: &'static str, ranks: usize, page_tokens: usize) -> Result<()> {
    const MIN_SLOTS: usize = 16;
    let fits = ranks.is_power_of_two() && ranks <= 256 / MIN_SLOTS;
    check::value_is(op, "position_ranks", fits, "1, 2, 4, 8 or 16, which divide the positions of a page", ranks)?;
    let min = ranks * MIN_SLOTS;
    let expected = format_args!("at least {min}, of which each of {ranks} ranks stores {MIN_SLOTS}");
    check::value_is(op, "page_tokens", ranks == 1 || page_tokens >= min, expected, page_tokens)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares(page_tokens: usize, ranks: usize) -> impl Iterator<Item = PositionShare> {
        (0..ranks).map(move |rank| PositionShare { page_tokens, ranks, rank })
    }

    #[test]
    fn a_page_of_64_on_four_ranks() {
        let rows = |len: usize| shares(64, 4).map(|share| share.rows(len)).collect::<Vec<_>>();
        assert_eq!(rows(0), [0, 0, 0, 0]);
        assert_eq!(rows(1), [1, 0, 0, 0]);
        assert_eq!(rows(17), [16, 1, 0, 0]);
        assert_eq!(rows(64), [16; 4]);
        assert_eq!(rows(64 + 40), [32, 32, 24, 16]);
        assert_eq!(rows(usize::MAX)[0], usize::MAX / 64 * 16 + 16);
        let at_70 = shares(64, 4).map(|share| share.token(70, 3)).collect::<Vec<_>>();
        let other = TokenWords { position: 15, seen: 3, stored: Step::INACTIVE };
        assert_eq!(at_70, [TokenWords { position: 22, seen: 3, stored: 3 }, other, other, other]);
        // No row of rank 1 is visible yet.
        let token = PositionShare { page_tokens: 64, ranks: 4, rank: 1 }.token(15, 3);
        assert_eq!((token.seen, token.stored), (Step::INACTIVE, Step::INACTIVE));
        assert_eq!(PositionShare { page_tokens: 64, ranks: 4, rank: 0 }.token(5, Step::INACTIVE).seen, Step::INACTIVE);
    }

    #[test]
    fn pages_that_do_not_divide_are_refused() {
        for ranks in [1, 2, 4, 8, 16] {
            assert!(check_page("test", ranks, 16 * ranks).is_ok());
            assert_eq!(check_page("test", ranks, 8 * ranks).is_ok(), ranks == 1);
        }
        for ranks in [0, 3, 5, 6, 32, usize::MAX] {
            let error = check_page("test", ranks, 256).unwrap_err();
            assert!(matches!(error, Error::Value { arg: "position_ranks", .. }), "{error}");
        }
        let error = check_page("test", 4, 32).unwrap_err().to_string();
        assert!(error.contains("at least 64") && error.contains("got 32"), "{error}");
    }

    proptest! {
        /// Compares rows and owners with a count of positions.
        #[test]
        fn rows_count_stored_positions(shift in 0u32..5, ranks in prop::sample::select(vec![1usize, 2, 4, 8, 16]), len in 0usize..1500) {
            let page_tokens = 16 << shift;
            prop_assume!(page_tokens >= ranks);
            for share in shares(page_tokens, ranks) {
                let counted = (0..len).filter(|&position| share.stores(position)).count();
                prop_assert_eq!(share.rows(len), counted);
            }
            let total: usize = shares(page_tokens, ranks).map(|share| share.rows(len)).sum();
            prop_assert_eq!(total, len);
            let owners = shares(page_tokens, ranks).filter(|share| share.stores(len)).count();
            prop_assert_eq!(owners, 1);
            for share in shares(page_tokens, ranks) {
                let TokenWords { position, seen, stored } = share.token(len as u32, 7);
                prop_assert_eq!(seen == 7, share.rows(len + 1) > 0);
                prop_assert_eq!(stored == 7, share.stores(len));
                // A page has its number on all ranks.
                if stored == 7 {
                    prop_assert_eq!(position as usize / (page_tokens / ranks), len / page_tokens);
                }
                if seen == 7 {
                    prop_assert_eq!(position as usize + 1, share.rows(len + 1));
                }
            }
        }
    }
}
