//! Makes text from files, templates and models safe for terminals and logs.
//!
//! Names in hostile files can contain control characters, which move a terminal's cursor or change its title, and can
//! have millions of characters. [`Error`](crate::Error)s display their parts by [`line()`]; programs must pass other
//! untrusted text through these functions.

use std::borrow::Cow;

/// Maximum characters of a [`line`].
const LINE: usize = 600;
/// Maximum characters of a [`message`].
const MESSAGE: usize = 4 * LINE;

/// A name or reason on one line: escapes control characters, and omits the middle of a long text.
///
/// ```
/// use kvant_models::untrusted;
/// assert_eq!(untrusted::line("a\x1b[31m\n"), r"a\u{1b}[31m\n");
/// assert!(untrusted::line(&"a".repeat(1_000_000)).len() < 1000);
/// ```
pub fn line(text: &str) -> Cow<'_, str> {
    escaped(shortened(text, LINE), |_| false)
}

/// A message that can have several lines: like [`line()`], but keeps line breaks and tabs.
pub fn message(text: &str) -> Cow<'_, str> {
    escaped(shortened(text, MESSAGE), is_layout)
}

/// Text of any length for a terminal: keeps line breaks and tabs, and escapes other control characters.
///
/// ```
/// use kvant_models::untrusted;
/// assert_eq!(untrusted::text("\ta\x07\n"), "\ta\\u{7}\n");
/// ```
pub fn text(text: &str) -> Cow<'_, str> {
    escaped(Cow::Borrowed(text), is_layout)
}

fn is_layout(c: char) -> bool {
    matches!(c, '\n' | '\t')
}

/// Control characters, line separators, and characters that change the text direction.
fn is_control(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: Cow<'_, str>, keeps: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_escaped = |c: char| is_control(c) && !keeps(c);
    if !text.contains(is_escaped) {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_escaped(c) { out.extend(c.escape_debug()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// Omits the middle of a text with more than `max` characters.
fn shortened(text: &str, max: usize) -> Cow<'_, str> {
    if text.len() <= max {
        return Cow::Borrowed(text);
    }
    let count = text.chars().count();
    if count <= max {
        return Cow::Borrowed(text);
    }
    let place = |index: usize| text.char_indices().nth(index).map_or(text.len(), |(place, _)| place);
    let (start, end) = (place(max / 2), place(count - max / 2));
    Cow::Owned(format!("{} [… {} characters …] {}", &text[..start], count - 2 * (max / 2), &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_are_escaped_and_text_is_kept() {
        for plain in ["", "model.safetensors", "naïve 日本 👨‍👩‍👧 שלום", r"C:\model 'a' \u{1b}"] {
            assert_eq!([line(plain), message(plain), text(plain)], [plain; 3]);
        }
        let hostile = "\u{1b}]0;title\u{7}\u{9b}2J\u{7f}\r\u{202e}\u{2066}\u{2028}\u{0}";
        for shown in [line(hostile), message(hostile), text(hostile)] {
            assert!(!shown.contains(is_control), "{shown:?}");
            assert_eq!(shown, r"\u{1b}]0;title\u{7}\u{9b}2J\u{7f}\r\u{202e}\u{2066}\u{2028}\0");
        }
        assert_eq!(line("a\n\tb"), r"a\n\tb");
        assert_eq!(message("a\n\tb"), "a\n\tb");
    }

    #[test]
    fn long_texts_keep_both_ends() {
        let long = format!("first{}last", "é\u{1b}".repeat(500_000));
        for shown in [line(&long), message(&long)] {
            assert!(shown.starts_with("first") && shown.ends_with("last"), "{shown}");
            assert!(shown.len() < 8 * MESSAGE, "{}", shown.len());
        }
        assert!(line(&long).contains("[… 999409 characters …]"), "{}", line(&long));
        assert_eq!(text(&long).len(), "firstlast".len() + 500_000 * (2 + r"\u{1b}".len()));
        // Exactly as long as the limit.
        assert_eq!(line(&"é".repeat(LINE)), "é".repeat(LINE));
    }
}
