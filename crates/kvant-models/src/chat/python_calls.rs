//! Calls as LFM2 writes them: a list of Python calls whose arguments are named literals.
//!
//! ```text
//! [weather(place="Zürich", days=2), now()]
//! ```
//!
//! The reader converts literals to JSON text while it reads, so that a truncated text gives the beginning of the JSON.

use super::{FunctionCall, JsonValue};

/// Maximum nesting depth of arguments.
const MAX_DEPTH: usize = 64;

/// The calls in a text. `None` if it is not a list of complete calls.
pub fn parse(text: &str) -> Option<Vec<FunctionCall>> {
    let (mut reader, mut calls) = (Literals { rest: text.trim() }, Vec::new());
    let is_list = reader.take("[");
    let is_over = |rest: &str| rest.is_empty() || is_list && rest == "]";
    while !is_over(reader.rest.trim()) {
        let (name, mut json) = (reader.name()?, String::new());
        if !reader.arguments(&mut json)? {
            return None;
        }
        calls.push(FunctionCall { name: name.to_string(), arguments: JsonValue::parse(&json).ok()? });
        if !reader.take(",") {
            break;
        }
    }
    let is_closed = !is_list || reader.take("]");
    (is_closed && reader.is_at_end() && !calls.is_empty()).then_some(calls)
}

/// The call that a truncated text begins, with its partial arguments as JSON text. `Some(None)` if its name is
/// incomplete. `None` if the text does not begin a call of one of the functions.
pub fn parse_cut(functions: &[String], text: &str) -> Option<Option<FunctionCall>> {
    let mut reader = Literals { rest: text };
    reader.take("[");
    if !reader.rest.contains('(') {
        return Some(None);
    }
    let (name, mut json) = (reader.name()?, String::new());
    if !functions.iter().any(|known| known == name) {
        return None;
    }
    reader.arguments(&mut json)?;
    Some(Some(FunctionCall { name: name.to_string(), arguments: json.into() }))
}

/// Reads Python literals. Functions return whether what they read is complete, as the text may end within it; `None` if
/// the text is invalid.
struct Literals<'t> {
    rest: &'t str,
}

impl<'t> Literals<'t> {
    fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn is_at_end(&self) -> bool {
        self.rest.trim().is_empty()
    }

    /// The name before the parenthesis of a call.
    fn name(&mut self) -> Option<&'t str> {
        let (name, rest) = self.rest.split_once('(')?;
        let name = name.trim();
        let is_name = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || "[](){},='\"".contains(c));
        self.rest = rest;
        is_name.then_some(name)
    }

    /// Appends the arguments after the opening parenthesis as an object.
    fn arguments(&mut self, json: &mut String) -> Option<bool> {
        json.push('{');
        self.items(json, ")", |reader, json| {
            let Some((key, rest)) = reader.rest.split_once('=') else { return reader.can_be_key().then_some(false) };
            let key = key.trim();
            if key.is_empty() || key.contains(|c: char| c.is_whitespace() || "[](){},'\"".contains(c)) {
                return None;
            }
            reader.rest = rest;
            json.push_str(&JsonValue::from(key).to_string());
            json.push(':');
            reader.value(json, 1)
        })
        .inspect(|&is_whole| json.push_str(if is_whole { "}" } else { "" }))
    }

    /// Whether the rest can be the beginning of a key.
    fn can_be_key(&self) -> bool {
        !self.rest.trim().contains(|c: char| c.is_whitespace() || "[](){},'\"".contains(c))
    }

    /// Items between commas, up to a closing delimiter. A comma may follow the last one.
    fn items(
        &mut self,
        json: &mut String,
        close: &str,
        item: impl Fn(&mut Self, &mut String) -> Option<bool>,
    ) -> Option<bool> {
        let mut is_first = true;
        while !self.take(close) {
            if self.is_at_end() {
                return Some(false);
            }
            if !is_first && !self.take(",") {
                return None;
            }
            if !is_first && self.take(close) {
                return Some(true);
            }
            if self.is_at_end() {
                return Some(false);
            }
            // The item appends to what precedes it only if its beginning is certain.
            let before = json.len();
            json.push_str(if is_first { "" } else { "," });
            let comma = json.len();
            let is_whole = item(self, json)?;
            if json.len() == comma {
                json.truncate(before);
            }
            if !is_whole {
                return Some(false);
            }
            is_first = false;
        }
        Some(true)
    }

    fn value(&mut self, json: &mut String, depth: usize) -> Option<bool> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.rest = self.rest.trim_start();
        match self.rest.chars().next() {
            None => Some(false),
            Some('"' | '\'') => self.quoted(json),
            Some(open @ ('[' | '(')) => {
                self.take(&open.to_string());
                json.push('[');
                let close = if open == '[' { "]" } else { ")" };
                let is_whole = self.items(json, close, |reader, json| reader.value(json, depth + 1))?;
                json.push_str(if is_whole { "]" } else { "" });
                Some(is_whole)
            }
            Some('{') => {
                self.take("{");
                json.push('{');
                let is_whole = self.items(json, "}", |reader, json| reader.field(json, depth + 1))?;
                json.push_str(if is_whole { "}" } else { "" });
                Some(is_whole)
            }
            _ => self.word(json),
        }
    }

    /// A key in quotes, and its value.
    fn field(&mut self, json: &mut String, depth: usize) -> Option<bool> {
        self.rest = self.rest.trim_start();
        if !self.rest.starts_with(['"', '\'']) {
            return None;
        }
        if !self.quoted(json)? {
            return Some(false);
        }
        if !self.take(":") {
            return self.is_at_end().then_some(false);
        }
        json.push(':');
        self.value(json, depth)
    }

    /// A number, a boolean or None.
    fn word(&mut self, json: &mut String) -> Option<bool> {
        let end = self.rest.find(|c: char| c.is_whitespace() || ",)]}".contains(c));
        let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        let is_number = word.starts_with(|c: char| c == '-' || c.is_ascii_digit());
        if end.is_none() {
            // More of the word may follow.
            json.push_str(if is_number { word } else { "" });
            return Some(false);
        }
        let word = match word {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            "true" | "false" | "null" => word,
            _ if is_number && JsonValue::parse(word).is_ok() => word,
            _ => return None,
        };
        json.push_str(word);
        Some(true)
    }

    /// A text in quotes.
    fn quoted(&mut self, json: &mut String) -> Option<bool> {
        let quote = self.rest.chars().next()?;
        self.rest = &self.rest[1..];
        let mut text = String::new();
        let is_whole = loop {
            let Some(c) = self.rest.chars().next() else { break false };
            if c == '\\' {
                let Some(read) = escape(self.rest) else {
                    // The text ends within the escape.
                    self.rest = "";
                    break false;
                };
                text.push_str(&read.text);
                self.rest = &self.rest[read.bytes..];
                continue;
            }
            self.rest = &self.rest[c.len_utf8()..];
            if c == quote {
                break true;
            }
            text.push(c);
        };
        let quoted = JsonValue::from(text.as_str()).to_string();
        json.push_str(if is_whole { &quoted } else { quoted.strip_suffix('"').unwrap_or(&quoted) });
        Some(is_whole)
    }
}

/// The text of an escape, and its length.
struct Escape {
    text: String,
    bytes: usize,
}

/// The escape at the beginning of a text; `None` if the text ends within it. As in Python, the backslash of an unknown
/// escape is part of the text. As in JSON, two halves of a surrogate pair are one character.
fn escape(text: &str) -> Option<Escape> {
    let kind = text[1..].chars().next()?;
    let plain = |text: &str| Some(Escape { text: text.to_string(), bytes: 1 + kind.len_utf8() });
    let digits = match kind {
        'n' => return plain("\n"),
        't' => return plain("\t"),
        'r' => return plain("\r"),
        'b' => return plain("\u{8}"),
        'f' => return plain("\u{c}"),
        'v' => return plain("\u{b}"),
        'a' => return plain("\u{7}"),
        '\n' => return plain(""),
        '\\' | '\'' | '"' | '/' => return plain(&kind.to_string()),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        other => return plain(&format!("\\{other}")),
    };
    let unknown = plain(&format!("\\{kind}"));
    let Some(unit) = hex(text, digits)? else { return unknown };
    let of =
        |c: Option<char>, bytes| Some(Escape { text: c.unwrap_or(char::REPLACEMENT_CHARACTER).to_string(), bytes });
    let bytes = 2 + digits;
    if unit & 0xFFFF_FC00 != 0xD800 || kind != 'u' {
        return of(char::from_u32(unit), bytes);
    }
    let second = &text[bytes..];
    if "\\u".starts_with(second) {
        return None;
    }
    let low = if second.starts_with("\\u") { hex(second, 4)? } else { None };
    match low {
        Some(low) if low & 0xFFFF_FC00 == 0xDC00 => {
            of(char::from_u32(0x10000 + ((unit & 0x3FF) << 10) + (low & 0x3FF)), 2 * bytes)
        }
        _ => of(None, bytes),
    }
}

/// The number after `\u`, `\x` or `\U`; `None` if the text ends within its digits, `Some(None)` if there are others.
fn hex(text: &str, digits: usize) -> Option<Option<u32>> {
    match text.get(2..2 + digits) {
        Some(digits) => Some(u32::from_str_radix(digits, 16).ok()),
        None if text.len() < 2 + digits => None,
        None => Some(None),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn literals() {
        for (arguments, value) in [
            ("", json!({})),
            ("a=1, b = -2.5,", json!({"a": 1, "b": -2.5})),
            (
                "a=True, b=False, c=None, d=true, e=null",
                json!({"a": true, "b": false, "c": null, "d": true, "e": null}),
            ),
            (r#"a="x, (y)=']", b='it\'s "é"'"#, json!({"a": "x, (y)=']", "b": "it's \"é\""})),
            (r#"a="\n\t\\\/\x41\u00e9\U0001F600\d""#, json!({"a": "\n\t\\/Aé😀\\d"})),
            (r#"a="\ud83d\ude00 \ud83d""#, json!({"a": "😀 \u{fffd}"})),
            (
                r#"a="\u00é0 \xyz\ud83d\u00é0 \U00000041 \Uffffffff""#,
                json!({"a": "\\u00é0 \\xyz\u{fffd}\\u00é0 A \u{fffd}"}),
            ),
            (
                "a=[1, 'b', []], b=(1, 2), c={'d': {\"e\": None,}}",
                json!({"a": [1, "b", []], "b": [1, 2], "c": {"d": {"e": null}}}),
            ),
        ] {
            let expected = FunctionCall { name: "f".into(), arguments: value.into() };
            for text in [format!("[f({arguments})]"), format!("f({arguments})"), format!(" [ f( {arguments} ) , ] ")] {
                assert_eq!(parse(&text).as_deref(), Some(&[expected.clone()][..]), "{text}");
            }
            assert_eq!(parse(&format!("[f({arguments}),f({arguments})]")).unwrap(), [expected.clone(), expected]);
        }
        let digits = parse("[f(a=123456789012345678901, b=0.12345678901234567890)]").unwrap();
        assert_eq!(digits[0].arguments.to_string(), r#"{"a":123456789012345678901,"b":0.12345678901234567890}"#);
    }

    #[test]
    fn texts_that_are_no_calls() {
        let deep = format!("[f(a={})]", "[".repeat(9999));
        for text in [
            "",
            "[]",
            "f",
            "[f]",
            "[f(]",
            "[f(1)]",
            "[f('a')]",
            "[f(a)]",
            "[f(a=b)]",
            "[f(a=1 b=2)]",
            "[f(a=1)",
            "[f(a=1)] x",
            "[f(a={b: 1})]",
            "[f(a={1: 2})]",
            "[f(a='x)]",
            "f g(a=1)",
            "[(a=1)]",
            "[f(a=1)]]",
            "[f(=1)]",
            "[f(a=[1 2])]",
            &deep,
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    /// At any truncation, the partial arguments are a prefix of the complete ones.
    #[test]
    fn arguments_that_are_cut() {
        let text =
            r#"[weather(place="Zü\"rich\n\ud83d\ude00", days=25, exact=True, more=[None, {'x': -1.5}], last='')]"#;
        let whole = parse(text).unwrap()[0].arguments.to_string();
        let functions = ["weather".to_string()];
        let mut longest = 0;
        for cut in (0..text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            let call = parse_cut(&functions, &text[..cut]).unwrap_or_else(|| panic!("{:?} is content", &text[..cut]));
            assert_eq!(call.is_some(), cut > "[weather".len(), "{:?}", &text[..cut]);
            let Some(call) = call else { continue };
            let so_far = call.arguments.as_str().unwrap();
            assert!(call.name == "weather" && whole.starts_with(so_far), "{:?}: {so_far}", &text[..cut]);
            longest = longest.max(so_far.len());
        }
        assert_eq!(longest, whole.len());
        for text in ["[other(a=", "[weather(a b=", "[weather('a'", "a word (in", "[weather(a=b,"] {
            assert_eq!(parse_cut(&functions, text), None, "{text}");
        }
    }
}
