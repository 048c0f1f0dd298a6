//! Drafts by prompt lookup: what followed the last few tokens when a text had them before.

use std::collections::HashMap;

/// Tokens that must be equal.
const LENGTH: usize = 3;

/// The n-grams of one text, and how many drafts are worth a try.
#[derive(Debug)]
pub(super) struct Lookup {
    /// The latest position after each n-gram, except after the last one of the text.
    after: HashMap<[u32; LENGTH], usize>,
    /// Positions that have been looked at.
    known: usize,
    /// Drafts of the next try: as many as were right the last time, and some more.
    next: usize,
    most: usize,
}

impl Lookup {
    /// `most` is the largest number of drafts.
    pub fn new(most: usize) -> Lookup {
        Lookup { after: HashMap::new(), known: LENGTH, next: most.min(2), most }
    }

    /// The tokens that may follow; possibly none. `tokens` has grown since the last call. `ahead` of them are being
    /// drawn, and are not drafts.
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

    /// Learns how many of the tried drafts were right.
    pub fn learn(&mut self, tried: usize, right: usize) {
        self.next = if right == tried { (2 * self.next).min(self.most) } else { right + 1 };
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
