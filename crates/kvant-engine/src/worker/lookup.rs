//! Prompt lookup: predicts the tokens that followed an earlier occurrence of the last few tokens.

use std::collections::HashMap;

/// Minimum length of a match in tokens.
const MIN_LENGTH: usize = 2;
/// Maximum length that is compared. Longer matches count as equally good.
const MAX_LENGTH: usize = 32;
/// Maximum earlier occurrences that are compared, from the latest one back.
const MAX_CANDIDATES: usize = 16;
/// Marks the first occurrence of an n-gram.
const NONE: u32 = u32::MAX;

/// The n-grams of one text, each with the positions after its occurrences.
#[derive(Debug, Default)]
pub(super) struct Lookup {
    /// The latest position after each n-gram, except after the last one of the text.
    latest: HashMap<[u32; MIN_LENGTH], u32>,
    /// For each position from [`MIN_LENGTH`] on: the previous position after an equal n-gram, or [`NONE`].
    previous: Vec<u32>,
}

/// An earlier occurrence of the last tokens of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Match {
    /// Number of equal tokens, at most [`MAX_LENGTH`].
    pub length: usize,
    /// The position after the occurrence: the token there is the prediction.
    pub end: usize,
}

impl Lookup {
    /// Finds the longest match of the end of a text; among equally long ones, the latest. `tokens` has grown since the
    /// last call.
    pub fn find(&mut self, tokens: &[u32]) -> Option<Match> {
        self.index(tokens);
        let mut end = *self.latest.get(tokens.last_chunk::<MIN_LENGTH>()?)?;
        let mut best = None;
        for _ in 0..MAX_CANDIDATES {
            let length = matched(tokens, end as usize);
            if best.is_none_or(|best: Match| length > best.length) {
                best = Some(Match { length, end: end as usize });
            }
            match self.previous.get(end as usize - MIN_LENGTH) {
                Some(&before) if before != NONE && length < MAX_LENGTH => end = before,
                _ => break,
            }
        }
        best
    }

    /// Adds the n-grams that have a token after them.
    fn index(&mut self, tokens: &[u32]) {
        for end in MIN_LENGTH + self.previous.len()..tokens.len() {
            let (Ok(gram), Ok(position)) = (tokens[end - MIN_LENGTH..end].try_into(), u32::try_from(end)) else {
                return;
            };
            self.previous.push(self.latest.insert(gram, position).unwrap_or(NONE));
        }
    }
}

/// The number of equal tokens before `end` and before the end of the text.
fn matched(tokens: &[u32], end: usize) -> usize {
    let earlier = tokens[..end].iter().rev();
    earlier.zip(tokens.iter().rev()).take(MAX_LENGTH).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(lookup: &mut Lookup, tokens: &[u32]) -> Option<(usize, usize)> {
        lookup.find(tokens).map(|found| (found.length, found.end))
    }

    #[test]
    fn the_longest_match_wins_and_then_the_latest() {
        let mut lookup = Lookup::default();
        let tokens = [1, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3, 7, 2, 3];
        assert_eq!(find(&mut lookup, &tokens[..1]), None);
        assert_eq!(find(&mut lookup, &tokens[..4]), None);
        // After [2, 3]: 4.
        assert_eq!(find(&mut lookup, &tokens[..7]), Some((2, 3)));
        // After [1, 2, 3]: 4, although 6 follows the latest [2, 3].
        assert_eq!(find(&mut lookup, &tokens[..11]), Some((3, 3)));
        // After [2, 3]: 7 is the latest.
        assert_eq!(find(&mut lookup, &tokens), Some((2, 11)));
    }

    #[test]
    fn a_repeated_token_continues_itself() {
        let mut lookup = Lookup::default();
        assert_eq!(find(&mut lookup, &[5; 2]), None);
        assert_eq!(find(&mut lookup, &[5; 6]), Some((5, 5)));
        assert_eq!(find(&mut lookup, &[5; 60]), Some((MAX_LENGTH, 59)));
    }

    /// Every result equals that of a search over the whole text, if its n-gram is not too frequent.
    #[test]
    fn matches_equal_a_full_search() {
        let mut lookup = Lookup::default();
        let mut state = 1u64;
        let tokens: Vec<u32> = (0..400)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) as u32 % 12
            })
            .collect();
        for len in 0..tokens.len() {
            let text = &tokens[..len];
            let all =
                (MIN_LENGTH..len).map(|end| (matched(text, end), end)).filter(|(length, _)| *length >= MIN_LENGTH);
            assert_eq!(find(&mut lookup, text), all.max(), "{len}");
        }
    }
}
