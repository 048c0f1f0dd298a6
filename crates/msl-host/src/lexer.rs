//! Tokens of preprocessed source. Comments have been removed; line markers give the origin of each token.

use crate::error::Diagnostic;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Word,
    Number,
    Text,
    /// Always a single character: `>>` is two tokens, as template brackets require.
    Punct(u8),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    pub kind: TokenKind,
    pub start: usize,
    pub end: usize,
    /// Index into [`Tokens::files`].
    pub file: usize,
    pub line: u32,
}

/// The tokens of a text.
pub(crate) struct Tokens<'a> {
    pub text: &'a str,
    pub list: Vec<Token>,
    pub files: Vec<String>,
}

impl<'a> Tokens<'a> {
    pub fn new(text: &'a str) -> Tokens<'a> {
        let bytes = text.as_bytes();
        let mut tokens = Tokens { text, list: Vec::new(), files: vec!["<unknown>".into()] };
        let (mut at, mut file, mut line, mut fresh_line) = (0, 0, 1u32, true);
        while at < bytes.len() {
            let c = bytes[at];
            if c == b'\n' {
                (line, fresh_line) = (line.saturating_add(1), true);
                at += 1;
                continue;
            }
            if c.is_ascii_whitespace() {
                at += 1;
                continue;
            }
            if c == b'#' && fresh_line {
                let end = bytes[at..].iter().position(|&b| b == b'\n').map_or(bytes.len(), |n| at + n);
                if let Some((number, name)) = line_marker(&text[at..end]) {
                    file = tokens.files.iter().position(|f| f == name).unwrap_or_else(|| {
                        tokens.files.push(name.into());
                        tokens.files.len() - 1
                    });
                    line = number.saturating_sub(1); // the newline after the marker counts too
                }
                at = end;
                continue;
            }
            fresh_line = false;
            let start = at;
            let kind = if c.is_ascii_alphabetic() || c == b'_' || c >= 0x80 {
                while at < bytes.len() && (bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_' || bytes[at] >= 0x80)
                {
                    at += 1;
                }
                TokenKind::Word
            } else if c.is_ascii_digit() || (c == b'.' && bytes.get(at + 1).is_some_and(u8::is_ascii_digit)) {
                at = number_end(bytes, at);
                TokenKind::Number
            } else if c == b'"' || c == b'\'' {
                at += 1;
                while at < bytes.len() && bytes[at] != c && bytes[at] != b'\n' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at = (at + 1).min(bytes.len());
                TokenKind::Text
            } else {
                at += 1;
                TokenKind::Punct(c)
            };
            tokens.list.push(Token { kind, start, end: at, file, line });
        }
        tokens
    }

    pub fn len(&self) -> usize {
        self.list.len()
    }

    pub fn word(&self, i: usize) -> Option<&'a str> {
        self.list.get(i).filter(|t| t.kind == TokenKind::Word).map(|t| &self.text[t.start..t.end])
    }

    pub fn is_word(&self, i: usize, word: &str) -> bool {
        self.word(i) == Some(word)
    }

    pub fn is(&self, i: usize, c: u8) -> bool {
        self.list.get(i).is_some_and(|t| t.kind == TokenKind::Punct(c))
    }

    pub fn any(&self, i: usize, set: &[u8]) -> bool {
        self.list.get(i).is_some_and(|t| matches!(t.kind, TokenKind::Punct(c) if set.contains(&c)))
    }

    /// Whether `::` is at `i`.
    pub fn is_scope(&self, i: usize) -> bool {
        self.is(i, b':') && self.is(i + 1, b':')
    }

    pub fn str(&self, i: usize) -> &'a str {
        self.list.get(i).map_or("", |t| &self.text[t.start..t.end])
    }

    /// The source from token `a` up to and excluding token `b`.
    pub fn range(&self, a: usize, b: usize) -> &'a str {
        if a >= b || b > self.len() { "" } else { &self.text[self.list[a].start..self.list[b - 1].end] }
    }

    /// The bracket that closes the one at `open`: `(`, `[` or `{`.
    pub fn close(&self, open: usize) -> Option<usize> {
        let mut depth = 0usize;
        for i in open..self.len() {
            if self.any(i, b"([{") {
                depth += 1;
            } else if self.any(i, b")]}") {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(i);
                }
            }
        }
        None
    }

    /// The bracket that opens the one at `close`.
    pub fn open(&self, close: usize) -> Option<usize> {
        let mut depth = 0usize;
        for i in (0..=close).rev() {
            if self.any(i, b")]}") {
                depth += 1;
            } else if self.any(i, b"([{") {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(i);
                }
            }
        }
        None
    }

    /// The `>` that closes the template arguments at `open`; `None` if `<` is a comparison.
    pub fn close_angle(&self, open: usize) -> Option<usize> {
        let (mut depth, mut i) = (0usize, open);
        while i < self.len() {
            if self.is(i, b'<') {
                depth += 1;
            } else if self.is(i, b'>') {
                depth -= 1;
                if depth == 0 {
                    return Some(i);
                }
            } else if self.any(i, b"([") {
                i = self.close(i)?;
            } else if self.any(i, b";{})]") {
                return None;
            }
            i += 1;
        }
        None
    }

    /// The `<` that matches the `>` at `close`.
    pub fn open_angle(&self, close: usize) -> Option<usize> {
        let (mut depth, mut i) = (0usize, close);
        loop {
            if self.is(i, b'>') {
                depth += 1;
            } else if self.is(i, b'<') {
                depth -= 1;
                if depth == 0 {
                    return Some(i);
                }
            } else if self.any(i, b")]") {
                i = self.open(i)?;
            } else if self.any(i, b";{}") {
                return None;
            }
            i = i.checked_sub(1)?;
        }
    }

    /// `a..b` split at its outermost commas, without empty parts.
    pub fn split(&self, a: usize, b: usize) -> Vec<(usize, usize)> {
        let (mut parts, mut from, mut i) = (Vec::new(), a, a);
        while i < b {
            if self.is(i, b',') {
                parts.push((from, i));
                from = i + 1;
            } else if self.any(i, b"([{") {
                i = self.close(i).map_or(b, |c| c.min(b));
            } else if self.is(i, b'<') {
                i = self.close_angle(i).filter(|&c| c < b).unwrap_or(i);
            }
            i += 1;
        }
        parts.push((from, b));
        parts.retain(|(x, y)| x < y);
        parts
    }

    pub fn diagnostic(&self, i: usize, message: impl Into<String>) -> Diagnostic {
        let (file, line) = self.list.get(i).or(self.list.last()).map_or((0, 0), |t| (t.file, t.line));
        Diagnostic { file: self.files[file].clone(), line, message: message.into() }
    }
}

/// `# 12 "scale.metal" 2` and `#line 12 "scale.metal"`.
fn line_marker(text: &str) -> Option<(u32, &str)> {
    let rest = text[1..].trim_start();
    let rest = rest.strip_prefix("line").unwrap_or(rest).trim_start();
    let (number, rest) = rest.split_once(' ')?;
    Some((number.parse().ok()?, rest.split('"').nth(1)?))
}

/// Numbers with exponents, suffixes and separators: `1.5e-3f`, `0x1p-2`, `1'000u`.
fn number_end(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() {
        let c = bytes[at];
        let sign = (c == b'+' || c == b'-') && matches!(bytes[at - 1], b'e' | b'E' | b'p' | b'P');
        // In 0x1e+2 the sign is an operator.
        let hex_e = sign
            && matches!(bytes[at - 1], b'e' | b'E')
            && bytes[..at].iter().rev().take_while(|b| b.is_ascii_alphanumeric()).any(|b| *b == b'x');
        if !(c.is_ascii_alphanumeric() || c == b'.' || c == b'_' || (sign && !hex_e)) {
            break;
        }
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_follow_line_markers() {
        let tokens = Tokens::new("# 1 \"a.metal\"\nx\n# 7 \"b.h\" 1\n\ny 1.5e-3f+z\n");
        let found: Vec<_> = (0..tokens.len()).map(|i| (tokens.str(i), tokens.diagnostic(i, "").to_string())).collect();
        assert_eq!(found[0], ("x", "a.metal:1: ".into()));
        assert_eq!(found[1], ("y", "b.h:8: ".into()));
        assert_eq!(found.iter().map(|f| f.0).collect::<Vec<_>>(), ["x", "y", "1.5e-3f", "+", "z"]);
    }

    #[test]
    fn brackets_match() {
        let tokens = Tokens::new("f<vec<T, 4>>(a[(1)], b)");
        assert_eq!(tokens.close_angle(1), Some(8));
        assert_eq!(tokens.open_angle(8), Some(1));
        let close = tokens.close(9).expect("closed");
        assert_eq!(tokens.split(10, close).len(), 2);
    }
}
