//! The filter `tojson`: Python's `json.dumps` with `ensure_ascii` disabled by default.

use std::fmt::Write;

use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, ValueKind},
};

use super::{budget::spend, exact::LongNumber, python};

/// Maximum nesting depth of values.
const MAX_DEPTH: usize = 128;

/// The filter. Its arguments are those of `json.dumps`.
pub fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.or(ensure_ascii).unwrap_or(false);
    let indent = options.get::<Option<Value>>("indent")?.or(indent).filter(|indent| !indent.is_none());
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let indent = indent.map(indent_text).transpose()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("`separators` must be two strings")),
        None if indent.is_some() => (",".to_string(), ": ".to_string()),
        None => (", ".to_string(), ": ".to_string()),
    };
    let mut dump = Dump { out: String::new(), ensure_ascii, indent, item, key, sort_keys };
    dump.write(value, 0)?;
    Ok(dump.out)
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// The text of one indentation level, from a number of spaces or a text.
fn indent_text(indent: Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str() {
        return Ok(text.to_string());
    }
    match indent.as_i64() {
        Some(spaces) if spaces <= 64 => Ok(" ".repeat(spaces.max(0) as usize)),
        _ => Err(invalid("`indent` must be a text or at most 64")),
    }
}

struct Dump {
    out: String,
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl Dump {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("the value is nested too deeply"));
        }
        spend(size_of::<Value>())?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map => self.object(value, depth)?,
            ValueKind::Seq | ValueKind::Iterable => self.array(value, depth)?,
            kind => match value.downcast_object_ref::<LongNumber>() {
                Some(number) => self.out.push_str(&number.0),
                None => return Err(invalid(format!("{kind} is not JSON serializable"))),
            },
        }
        Ok(())
    }

    fn array(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut is_empty = true;
        self.out.push('[');
        for item in value.try_iter()? {
            self.separate(&mut is_empty, depth + 1);
            self.write(&item, depth + 1)?;
        }
        self.close(is_empty, depth, ']');
        Ok(())
    }

    fn object(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        let mut is_empty = true;
        self.out.push('{');
        for key in keys {
            self.separate(&mut is_empty, depth + 1);
            let name = match key.kind() {
                ValueKind::String => key.as_str().unwrap_or_default().to_string(),
                ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_string(),
                ValueKind::None => "null".to_string(),
                ValueKind::Number => number(&key),
                kind => return Err(invalid(format!("a key must be a string, got {kind}"))),
            };
            self.string(&name);
            self.out.push_str(&self.key);
            self.write(&value.get_item(&key)?, depth + 1)?;
        }
        self.close(is_empty, depth, '}');
        Ok(())
    }

    /// Writes the separator before an item.
    fn separate(&mut self, is_first: &mut bool, depth: usize) {
        if !*is_first {
            self.out.push_str(&self.item);
        }
        *is_first = false;
        self.new_line(depth);
    }

    /// Closes a list or object after its last item.
    fn close(&mut self, is_empty: bool, depth: usize, bracket: char) {
        if !is_empty {
            self.new_line(depth);
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            (0..depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            let _ = match c {
                '"' => write!(self.out, "\\\""),
                '\\' => write!(self.out, "\\\\"),
                '\n' => write!(self.out, "\\n"),
                '\r' => write!(self.out, "\\r"),
                '\t' => write!(self.out, "\\t"),
                '\u{8}' => write!(self.out, "\\b"),
                '\u{c}' => write!(self.out, "\\f"),
                c if (c as u32) < 0x20 => write!(self.out, "\\u{:04x}", c as u32),
                c if self.ensure_ascii && !c.is_ascii() => {
                    c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(self.out, "\\u{unit:04x}"))
                }
                c => write!(self.out, "{c}"),
            };
        }
        self.out.push('"');
    }
}

fn number(value: &Value) -> String {
    match python::number(value).as_str() {
        "nan" => "NaN".to_string(),
        "inf" => "Infinity".to_string(),
        "-inf" => "-Infinity".to_string(),
        number => number.to_string(),
    }
}
