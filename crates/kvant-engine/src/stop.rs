//! Finds stop strings in a growing text.

/// Finds the first of several strings in a text. Holds back text that may become one of them.
#[derive(Debug, Default)]
pub(crate) struct StopFinder {
    strings: Vec<String>,
    include: bool,
    /// Text that may be the beginning of a stop string.
    held: String,
}

/// A stop string was found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stopped {
    /// The index of the string.
    pub index: usize,
    /// The rest of the text before it.
    pub text: String,
}

impl StopFinder {
    /// Creates a finder. `include`: the text includes the stop string.
    pub fn new(strings: Vec<String>, include: bool) -> StopFinder {
        StopFinder { strings, include, held: String::new() }
    }

    /// Appends to the text. Returns the text that is final now. The string that begins first ends the text; among
    /// strings that begin at one position, the first of the list wins.
    pub fn push(&mut self, piece: &str) -> Result<String, Stopped> {
        if self.strings.is_empty() {
            return Ok(piece.to_string());
        }
        self.held.push_str(piece);
        let found =
            self.strings.iter().enumerate().filter_map(|(index, string)| Some((self.held.find(string)?, index)));
        if let Some((at, index)) = found.min() {
            let end = if self.include { at + self.strings[index].len() } else { at };
            let text = self.held[..end].to_string();
            self.held.clear();
            return Err(Stopped { index, text });
        }
        let certain = self.held.len() - self.longest_beginning();
        Ok(self.held.drain(..certain).collect())
    }

    /// Returns the text that was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length of the longest suffix of the text that begins a stop string.
    fn longest_beginning(&self) -> usize {
        let max = self.strings.iter().map(String::len).max().unwrap_or(0).saturating_sub(1);
        let first = self.held.len().saturating_sub(max);
        let starts = (first..self.held.len()).filter(|&at| self.held.is_char_boundary(at));
        let mut tails = starts.map(|at| &self.held[at..]);
        let tail = tails.find(|tail| self.strings.iter().any(|string| string.starts_with(tail)));
        tail.map_or(0, str::len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(strings: &[&str], pieces: &[&str], include: bool) -> (String, Option<usize>) {
        let mut finder = StopFinder::new(strings.iter().map(|s| s.to_string()).collect(), include);
        let mut text = String::new();
        for piece in pieces {
            match finder.push(piece) {
                Ok(certain) => text.push_str(&certain),
                Err(stopped) => return (text + &stopped.text, Some(stopped.index)),
            }
        }
        (text + &finder.finish(), None)
    }

    #[test]
    fn strings_across_pieces() {
        assert_eq!(run(&["END"], &["a", "bE", "N", "Dx"], false), ("ab".to_string(), Some(0)));
        assert_eq!(run(&["END"], &["a", "bE", "N", "Dx"], true), ("abEND".to_string(), Some(0)));
        assert_eq!(run(&["END"], &["aE", "EN", "d"], false), ("aEENd".to_string(), None));
        assert_eq!(run(&["abab", "b"], &["aba"], false), ("a".to_string(), Some(1)));
        assert_eq!(run(&["öß"], &["xö", "y", "ö", "ß"], false), ("xöy".to_string(), Some(0)));
        assert_eq!(run(&[], &["a", "b"], false), ("ab".to_string(), None));
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            strings in prop::collection::vec("[abö]{1,4}", 1..4),
            pieces in prop::collection::vec("[abö]{0,3}", 0..12),
        ) {
            let whole = pieces.concat();
            let strings: Vec<&str> = strings.iter().map(String::as_str).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (text, stopped) = run(&strings, &pieces, false);
            let first = strings.iter().filter_map(|string| whole.find(string)).min();
            prop_assert!(whole.starts_with(&text));
            match stopped {
                // A string is found when it is complete: another one may begin earlier and end later.
                Some(index) => prop_assert!(whole[text.len()..].starts_with(strings[index]) && text.len() >= first.unwrap()),
                None => prop_assert!(first.is_none() && text == whole),
            }
        }
    }
}
