//! Stop strings.

/// Ends a text at the first stop string, piece by piece.
///
/// The end of a piece that may begin a stop string is held back until later pieces decide.
///
/// ```
/// use kvant_models::chat::StopStrings;
/// let mut stop = StopStrings::new(["\n\nUser:"]);
/// assert_eq!(stop.push("Hello\n"), "Hello");
/// assert_eq!(stop.push("\nWorld\n\nUs"), "\n\nWorld");
/// assert_eq!(stop.push("er: more"), "");
/// assert!(stop.is_stopped());
/// ```
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    is_stopped: bool,
}

impl StopStrings {
    /// Creates a finder. Empty strings are ignored.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> StopStrings {
        let stops = stops.into_iter().map(Into::into).filter(|stop| !stop.is_empty()).collect();
        StopStrings { stops, held: String::new(), is_stopped: false }
    }

    /// Receives a piece. Returns the text that can no longer be part of a stop string. After a stop string, it is
    /// empty.
    pub fn push(&mut self, piece: &str) -> String {
        if self.is_stopped {
            return String::new();
        }
        self.held.push_str(piece);
        // The string that ends first, as if the text arrived byte by byte.
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop.len())));
        if let Some((place, _)) = found.min_by_key(|&(place, len)| (place + len, place)) {
            self.is_stopped = true;
            self.held.truncate(place);
            return std::mem::take(&mut self.held);
        }
        let keep = partial_end(&self.held, self.stops.iter().map(String::as_str));
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// Returns the held-back text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string was found.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }
}

/// The length of the longest suffix of a text that is a proper prefix of a marker.
pub(super) fn partial_end<'a>(text: &str, markers: impl Iterator<Item = &'a str>) -> usize {
    let longest = |marker: &str| {
        let max = (marker.len() - 1).min(text.len());
        let fits = |n: &usize| marker.is_char_boundary(*n) && text.as_bytes().ends_with(&marker.as_bytes()[..*n]);
        (1..=max).rev().find(fits).unwrap_or(0)
    };
    markers.map(longest).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut stop = StopStrings::new(stops.iter().copied());
        let mut text: String = pieces.iter().map(|piece| stop.push(piece)).collect();
        text += &stop.finish();
        (text, stop.is_stopped())
    }

    #[test]
    fn any_cut_gives_the_same_text() {
        for (stops, text, expected) in [
            (&["END"][..], "abcENDdef", ("abc", true)),
            (&["END"], "abcENdef EN", ("abcENdef EN", false)),
            (&["aab"], "aaab", ("a", true)),
            (&["bc", "abcd"], "xabcd", ("xa", true)),
            (&["é!", "🦀"], "caf é🦀é!", ("caf é", true)),
            (&[""], "abc", ("abc", false)),
            (&[], "abc", ("abc", false)),
        ] {
            for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
                let (found, stopped) = run(stops, &[&text[..cut], &text[cut..]]);
                assert_eq!((found.as_str(), stopped), expected, "{text:?} cut at {cut}");
            }
            let chars: Vec<String> = text.chars().map(String::from).collect();
            let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
            assert_eq!(run(stops, &chars), (expected.0.to_string(), expected.1), "{text:?}");
        }
    }
}
