//! The source of a grammar, and the tokens that a grammar allows.

use std::io;

/// Maximum bytes of a grammar's source.
const MAX_SOURCE: usize = 256 << 10;
/// Maximum nesting depth of brackets in a source.
const MAX_DEPTH: usize = 64;
/// Maximum operators of regular expressions in a source. The time and the memory of a compilation grow with the square
/// of their number.
const MAX_OPERATORS: usize = 5000;
/// Maximum lines of a Lark grammar. A chain of rules is compiled recursively.
const MAX_LINES: usize = 5000;

/// The language of a text.
///
/// ```
/// use kvant_engine::Grammar;
/// let answer = Grammar::JsonSchema(r#"{"enum": ["yes", "no"]}"#.to_string());
/// let date = Grammar::Regex("[0-9]{4}-[0-9]{2}-[0-9]{2}".to_string());
/// let sum = Grammar::Lark("start: NUMBER (\"+\" NUMBER)*\nNUMBER: /[0-9]+/".to_string());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Grammar {
    /// JSON that matches a JSON schema, given as JSON text. Properties come in the order of the schema. A keyword or a
    /// number that cannot be enforced is an error. A `format` without a known pattern has no effect.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// A regular expression that matches the whole text, in the syntax of the crate `regex`.
    Regex(String),
    /// A context-free grammar in `llguidance`'s variant of Lark syntax.
    Lark(String),
}

impl Grammar {
    /// The white space between two JSON tokens, as a regular expression. It is bounded, so that a model that writes
    /// only white space terminates. JSON in a [`Grammar::Lark`] gets it with the option `x-guidance`: `%json {…,
    /// "x-guidance": {"whitespace_pattern": …}}`.
    pub const WHITESPACE: &str = r"\x20|\x0A[\x20\x09]{0,64}";

    /// Whether this build supports grammars (feature `grammar`).
    pub const IS_SUPPORTED: bool = cfg!(feature = "grammar");

    /// One of several texts.
    ///
    /// ```
    /// use kvant_engine::Grammar;
    /// let Grammar::Regex(regex) = Grammar::one_of(&["a.b", "c"]) else { unreachable!() };
    /// assert_eq!(regex, r"a\x2eb|c");
    /// ```
    pub fn one_of<S: AsRef<str>>(texts: &[S]) -> Grammar {
        let mut regex = String::new();
        for (index, text) in texts.iter().enumerate() {
            regex.push_str(if index == 0 { "" } else { "|" });
            for c in text.as_ref().chars() {
                match c.is_ascii() && !c.is_ascii_alphanumeric() {
                    // Not `\*`: the limits of operators and brackets count such characters.
                    true => regex.extend(['\\', 'x', hex(c as u32 >> 4), hex(c as u32 & 15)]),
                    false => regex.push(c),
                }
            }
        }
        Grammar::Regex(regex)
    }

    /// Checks the size and the nesting depth, without compiling.
    pub(super) fn check(&self) -> Result<(), String> {
        let (Grammar::JsonSchema(source) | Grammar::Regex(source) | Grammar::Lark(source)) = self else {
            return Ok(());
        };
        if source.len() > MAX_SOURCE {
            return Err(format!("it has {} bytes; at most {MAX_SOURCE} are allowed", source.len()));
        }
        // Brackets within strings and classes count too. The limit needs no more precision.
        let mut depth = 0usize;
        for byte in source.bytes() {
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth > MAX_DEPTH {
                return Err(format!("its brackets nest deeper than {MAX_DEPTH}"));
            }
        }
        let lines = source.lines().count();
        if matches!(self, Grammar::Lark(_)) && lines > MAX_LINES {
            return Err(format!("it has {lines} lines; at most {MAX_LINES} are allowed"));
        }
        match self {
            Grammar::JsonSchema(_) => Ok(()),
            _ => check_operators(operators(source)),
        }
    }
}

fn hex(digit: u32) -> char {
    char::from_digit(digit, 16).unwrap_or('0')
}

/// The number of operators in a regular expression that make its automaton larger than its text.
pub(super) fn operators(regex: &str) -> usize {
    regex.bytes().filter(|byte| b"?*+&~".contains(byte)).count()
}

/// Checks the number of operators in all regular expressions of a source.
pub(super) fn check_operators(count: usize) -> Result<(), String> {
    match count > MAX_OPERATORS {
        true => Err(format!("it has {count} of the operators ? * + & ~; at most {MAX_OPERATORS} are allowed")),
        false => Ok(()),
    }
}

/// The tokens that can follow.
pub struct Allowed {
    /// One bit per token of the tokenizer, starting with the lowest bit of the first word. Special tokens that end a
    /// text are not included.
    pub tokens: Vec<u32>,
    /// Whether the text can end here.
    pub may_end: bool,
}

/// The reason why a grammar cannot be compiled.
#[derive(Debug)]
pub(crate) enum CompileError {
    Invalid(String),
    #[cfg_attr(not(feature = "grammar"), expect(dead_code, reason = "nothing is compiled"))]
    NoThread(io::Error),
}

impl From<String> for CompileError {
    fn from(reason: String) -> CompileError {
        CompileError::Invalid(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_and_deep_sources_are_refused() {
        assert!(Grammar::Regex("a".repeat(MAX_SOURCE)).check().is_ok());
        assert!(Grammar::Regex("a".repeat(MAX_SOURCE + 1)).check().is_err());
        assert!(Grammar::Lark(format!("start: {}", "(".repeat(MAX_DEPTH))).check().is_ok());
        assert!(Grammar::Lark(format!("start: {}", "(".repeat(MAX_DEPTH + 1))).check().is_err());
        assert!(Grammar::JsonSchema("{\"items\":".repeat(MAX_DEPTH + 1)).check().is_err());
        assert!(Grammar::JsonSchema("{},".repeat(1000)).check().is_ok());
        assert!(Grammar::Regex("a?".repeat(MAX_OPERATORS)).check().is_ok());
        assert!(Grammar::Regex("a?".repeat(MAX_OPERATORS + 1)).check().is_err());
        assert!(Grammar::Lark(format!("start: {}/a/", "~".repeat(MAX_OPERATORS + 1))).check().is_err());
        assert!(Grammar::Lark("a: b\n".repeat(MAX_LINES)).check().is_ok());
        assert!(Grammar::Lark("a: b\n".repeat(MAX_LINES + 1)).check().is_err());
    }
}
