//! Prompt lookup: drafts are the tokens that followed an earlier occurrence of the last few tokens.

use std::collections::HashMap;

/// Length of the matched n-gram in tokens.
const LENGTH: usize = 3;

/// The n-grams of one text, and the current number of drafts.
#[derive(Debug)]
pub(super) struct Lookup {
    /// The latest position after each n-gram, except after the last one of the text.
    after: HashMap<[u32; LENGTH], usize>,
    /// Number of positions indexed.
    known: usize,
    /// Number of drafts to propose next: the previously accepted ones and some more.
    next: usize,
    max: usize,
}

impl Lookup {
    /// Creates a lookup of at most `max` drafts.
    pub fn new(max: usize) -> Lookup {
        Lookup { after: HashMap::new(), known: LENGTH, next: max.min(2), max }
    }

    /// Returns the tokens that may follow; possibly none. `tokens` has grown since the last call. The next `ahead`
    /// tokens are already being sampled and are not drafts.
    pub fn propose<'t>(&mut self, tokens: &'t [u32], ahead: usize) -> &'t [u32] {
        for end in self.known..tokens.len() {
            if let Ok(gram) = tokens[end - LENGTH..end].try_into() {
                self.after.insert(gram, end);
            }
        }
        self.known = tokens.len().max(LENGTH);
        let last = tokens.last_chunk::<LENGTH>().and_then(|gram| self.after.get(gram));
        last.map_or(&[], |&after| &tokens[after..(after + ahead + self.next).min(tokens.len())])
    }

    /// Adapts the number of drafts to the number that was accepted.
    pub fn learn(&mut self, proposed: usize, accepted: usize) {
        self.next = if accepted == proposed { (2 * self.next).min(self.max) } else { accepted + 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_continuation_is_proposed() {
        let mut lookup = Lookup::new(4);
        assert!(lookup.propose(&[1, 2], 0).is_empty());
        let tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 8, 1, 2, 3];
        assert_eq!(lookup.propose(&tokens[..9], 0), [4, 5]);
        assert_eq!(lookup.propose(&tokens, 0), [7, 8]);
        lookup.learn(2, 2);
        assert_eq!(lookup.propose(&tokens, 0), [7, 8, 1, 2]);
        lookup.learn(4, 0);
        assert_eq!(lookup.propose(&tokens, 0), [7]);
        lookup.learn(1, 1);
        assert_eq!(lookup.propose(&tokens, 0), [7, 8]);
        assert_eq!(lookup.propose(&tokens, 1), [7, 8, 1]);
        assert!(lookup.propose(&[9; 3], 0).is_empty());
    }

    #[test]
    fn a_repeated_token_continues_itself() {
        let mut lookup = Lookup::new(8);
        assert_eq!(lookup.propose(&[5; 6], 0), [5]);
    }
}
