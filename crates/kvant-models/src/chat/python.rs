//! Python's text of a value: `str(value)` and `repr(value)`.

use std::fmt::Write;

use minijinja::{Value, value::ValueKind};

use super::budget;

/// Maximum nesting depth of values; deeper ones are truncated.
const MAX_DEPTH: usize = 64;

/// `str(value)`.
pub fn str(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_string(),
        None => {
            let mut out = String::new();
            write_repr(&mut out, value, 0);
            out
        }
    }
}

fn write_repr(out: &mut String, value: &Value, depth: usize) {
    // A list can exceed any text: reaching the limit fails the rendering.
    if depth > MAX_DEPTH || budget::spend(1).is_err() {
        out.push_str("...");
        return;
    }
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(out, &key, depth + 1);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1);
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                if budget::spend(size_of::<Value>()).is_err() {
                    break;
                }
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(out, &item, depth + 1);
            }
            out.push(']');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// A number as printed by Python and its `json`.
pub fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(number) => float(number),
        Err(_) => value.to_string(),
    }
}

/// `repr` of a float: the shortest digits, with an exponent below 1e-4 and from 1e16.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_string();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_string();
    }
    let magnitude = number.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = number.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

/// `repr` of a string.
fn write_quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        let _ = match c {
            '\\' => write!(out, "\\\\"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            c if c == quote => write!(out, "\\{c}"),
            c if is_printable(c) => write!(out, "{c}"),
            c if (c as u32) < 0x100 => write!(out, "\\x{:02x}", c as u32),
            c if (c as u32) < 0x10000 => write!(out, "\\u{:04x}", c as u32),
            c => write!(out, "\\U{:08x}", c as u32),
        };
    }
    out.push(quote);
}

/// `str.isprintable` for relevant characters: control characters and separators other than the space are not printable.
fn is_printable(c: char) -> bool {
    let invisible = matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}');
    let other = matches!(c, '\u{e000}'..='\u{f8ff}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{f0000}'..);
    c == ' ' || !(c.is_control() || c.is_whitespace() || invisible || other)
}

/// Whether `str.strip` removes the character: as `char::is_whitespace`, plus four ASCII separators.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of CPython 3.11.
    #[test]
    fn values_print_as_in_python() {
        budget::start_budget();
        let print = |json: &str| str(&Value::from_serialize(serde_json::from_str::<serde_json::Value>(json).unwrap()));
        assert_eq!(print("null"), "None");
        assert_eq!(print("[true, false]"), "[True, False]");
        assert_eq!(
            print(r#"{"a": "it's", "b": "\"it's\"", "c": ["é\n\u0001\u2028"]}"#),
            r#"{'a': "it's", 'b': '"it\'s"', 'c': ['é\n\x01\u2028']}"#
        );
        for (number, text) in [
            ("1.0", "1.0"),
            ("0.1", "0.1"),
            ("1e22", "1e+22"),
            ("1.5e-7", "1.5e-07"),
            ("123456789012345680.0", "1.2345678901234568e+17"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("-0.0", "-0.0"),
            ("7", "7"),
            ("-9223372036854775808", "-9223372036854775808"),
        ] {
            assert_eq!(print(number), text);
        }
    }
}
