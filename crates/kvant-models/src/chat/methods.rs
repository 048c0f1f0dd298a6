//! Python's string methods. `minijinja-contrib` has the methods of dictionaries and lists.

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, from_args},
};
use minijinja_contrib::pycompat;

use super::{
    budget::{made, spend},
    python::{self, is_space},
};

/// Calls a method that minijinja does not have.
pub fn call(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return pycompat::unknown_method_callback(state, value, method, args) };
    let strings = match method {
        "strip" => trim(text, from_args::<(_,)>(args)?.0)?,
        "lstrip" => strip(text, from_args::<(_,)>(args)?.0, true, false)?,
        "rstrip" => strip(text, from_args::<(_,)>(args)?.0, false, true)?,
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            made(text.strip_prefix(prefix).unwrap_or(text).to_string())?
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            made(text.strip_suffix(suffix).unwrap_or(text).to_string())?
        }
        "replace" => {
            let (old, new, count, options): (&str, &str, Option<i64>, Kwargs) = from_args(args)?;
            replace(text, old, new, count, options)?
        }
        "upper" => made(text.to_uppercase())?,
        "lower" => made(text.to_lowercase())?,
        "join" => {
            let (values,): (Value,) = from_args(args)?;
            join(text, &values)?
        }
        "split" | "rsplit" => return split(text, args, method == "rsplit"),
        "partition" | "rpartition" => return partition(text, args, method == "rpartition"),
        "splitlines" => return splitlines(text, args),
        "find" | "rfind" | "index" | "rindex" => return find(text, method, args),
        "count" => {
            let (what,): (&str,) = from_args(args)?;
            let count = if what.is_empty() { text.chars().count() + 1 } else { text.matches(what).count() };
            return Ok(Value::from(count));
        }
        "format" => return format(state, value, args),
        _ => return pycompat::unknown_method_callback(state, value, method, args),
    };
    Ok(Value::from(strings))
}

/// `strip(chars)`; also the filter `trim`.
pub fn trim(text: &str, chars: Option<Value>) -> Result<String, Error> {
    strip(text, chars, true, true)
}

fn strip(text: &str, chars: Option<Value>, left: bool, right: bool) -> Result<String, Error> {
    let chars = chars.filter(|chars| !chars.is_none());
    let chars: Option<Vec<char>> = match &chars {
        None => None,
        Some(chars) => {
            Some(chars.as_str().ok_or_else(|| invalid("the characters to strip must be a string"))?.chars().collect())
        }
    };
    let goes = |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(&c));
    let text = if left { text.trim_start_matches(goes) } else { text };
    made(if right { text.trim_end_matches(goes) } else { text }.to_string())
}

/// `replace(old, new, count)`; also the filter.
pub fn replace(text: &str, old: &str, new: &str, count: Option<i64>, options: Kwargs) -> Result<String, Error> {
    let count = options.get::<Option<i64>>("count")?.or(count);
    options.assert_all_used()?;
    let max = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let found = text.matches(old).count().min(max);
    spend(text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, max))
}

/// `separator.join(values)`.
pub fn join(separator: &str, values: &Value) -> Result<String, Error> {
    let mut out = String::new();
    for (index, value) in values.try_iter()?.enumerate() {
        let text = value.as_str().map_or_else(|| python::str(&value), str::to_string);
        let separator = if index > 0 { separator } else { "" };
        spend(separator.len() + text.len())?;
        out.push_str(separator);
        out.push_str(&text);
    }
    Ok(out)
}

/// A list of texts.
fn list<'a>(items: impl IntoIterator<Item = &'a str>) -> Result<Value, Error> {
    let mut values = Vec::new();
    for item in items {
        spend(item.len() + size_of::<Value>())?;
        values.push(Value::from(item));
    }
    Ok(Value::from(values))
}

/// `split(sep, maxsplit)` and `rsplit`.
fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (separator, max, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = options.get::<Option<Value>>("sep")?.or(separator).filter(|separator| !separator.is_none());
    let max = options.get::<Option<i64>>("maxsplit")?.or(max);
    options.assert_all_used()?;
    let max = max.and_then(|max| usize::try_from(max).ok()).unwrap_or(usize::MAX - 1).saturating_add(1);
    let Some(separator) = separator else { return list(words(text, max, from_right)) };
    let separator = separator.as_str().filter(|separator| !separator.is_empty());
    let separator = separator.ok_or_else(|| invalid("the separator must be a string that is not empty"))?;
    if from_right {
        let mut parts: Vec<&str> = text.rsplitn(max, separator).collect();
        parts.reverse();
        return list(parts);
    }
    list(text.splitn(max, separator))
}

/// Splits into at most `max` words; the last one has the rest of the text.
fn words(text: &str, max: usize, from_right: bool) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = if from_right { text.trim_end_matches(is_space) } else { text.trim_start_matches(is_space) };
    while !rest.is_empty() && words.len() + 1 < max {
        let place = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(place) = place else { break };
        if from_right {
            let start = place + rest[place..].chars().next().map_or(0, char::len_utf8);
            words.push(&rest[start..]);
            rest = rest[..place].trim_end_matches(is_space);
        } else {
            words.push(&rest[..place]);
            rest = rest[place..].trim_start_matches(is_space);
        }
    }
    if !rest.is_empty() {
        let is_last = words.len() + 1 < max;
        words.push(if is_last { rest.trim_matches(is_space) } else { rest });
    }
    if from_right {
        words.reverse();
    }
    words
}

/// `partition(sep)` and `rpartition`.
fn partition(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(invalid("empty separator"));
    }
    let found = if from_right { text.rsplit_once(separator) } else { text.split_once(separator) };
    match (found, from_right) {
        (Some((before, after)), _) => list([before, separator, after]),
        (None, false) => list([text, "", ""]),
        (None, true) => list(["", "", text]),
    }
}

/// The lines of a text without line breaks, as `str.splitlines`.
pub fn lines(text: &str) -> Vec<&str> {
    split_lines(text).into_iter().map(|(line, _)| line).collect()
}

/// Lines without and with their line breaks.
fn split_lines(text: &str) -> Vec<(&str, &str)> {
    let ends =
        |c| matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(place) = rest.find(ends) {
        let end =
            if rest[place..].starts_with("\r\n") { 2 } else { rest[place..].chars().next().map_or(1, char::len_utf8) };
        lines.push((&rest[..place], &rest[..place + end]));
        rest = &rest[place + end..];
    }
    if !rest.is_empty() {
        lines.push((rest, rest));
    }
    lines
}

fn splitlines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep, options): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = options.get::<Option<bool>>("keepends")?.or(keep).unwrap_or(false);
    options.assert_all_used()?;
    list(split_lines(text).into_iter().map(|(line, whole)| if keep { whole } else { line }))
}

/// `find`, `rfind`, `index` and `rindex`: an index in characters. If not found, −1 or an error.
fn find(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (what,): (&str,) = from_args(args)?;
    let place = if method.starts_with('r') { text.rfind(what) } else { text.find(what) };
    match place {
        Some(place) => Ok(Value::from(text[..place].chars().count())),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(invalid("substring not found")),
    }
}

/// `format(...)`. Widths are limited.
fn format(state: &State, value: &Value, args: &[Value]) -> Result<Value, Error> {
    let pattern = value.as_str().unwrap_or_default();
    let digits = pattern.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    if digits > 3 {
        return Err(invalid("a format with more than three digits"));
    }
    let max = args.iter().map(|arg| arg.as_str().map_or(64, str::len)).max().unwrap_or(0) + 1000;
    spend(pattern.matches('{').count().saturating_mul(max).saturating_add(pattern.len()))?;
    pycompat::unknown_method_callback(state, value, "format", args)
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of CPython 3.11.
    #[test]
    fn words_and_lines_as_in_python() {
        assert_eq!(words("  a b  c ", usize::MAX, false), ["a", "b", "c"]);
        assert_eq!(words("  a b  c ", 2, false), ["a", "b  c "]);
        assert_eq!(words("  a b  c ", 2, true), ["  a b", "c"]);
        assert_eq!(words(" a ", 9, true), ["a"]);
        assert_eq!(words(" ", 9, false), [""; 0]);
        assert_eq!(lines("a\r\nb\n\nc\u{2028}"), ["a", "b", "", "c"]);
        assert_eq!(lines("a\u{b}b"), ["a", "b"]);
        assert!(lines("").is_empty());
    }
}
