//! Parses the texts of tool calls.

use indexmap::IndexMap;

use super::{FunctionCall, JsonValue, ReplyFormat, python_calls, stop::partial_end, xml_calls};

/// Maximum nesting depth of arguments.
const MAX_DEPTH: usize = 64;

/// The calls in a text; `name` comes from a harmony header. `None` if the text is not a call.
pub fn parse(format: ReplyFormat, name: Option<String>, tools: &[JsonValue], text: &str) -> Option<Vec<FunctionCall>> {
    let text = text.trim();
    match format {
        ReplyFormat::Harmony => Some(vec![FunctionCall { name: name?, arguments: object(text)? }]),
        ReplyFormat::Gemma4 => Some(vec![gemma(text)?]),
        ReplyFormat::Hermes | ReplyFormat::QwenXml if xml_calls::is_xml(text) => xml_calls::parse(tools, text),
        ReplyFormat::Lfm2 if !is_json(text) => python_calls::parse(text),
        ReplyFormat::Mistral if !text.starts_with(['[', '{']) => {
            let (name, arguments) = text.split_once("[ARGS]").or_else(|| Some(text.split_at(text.find('{')?)))?;
            let name = name.split("[CALL_ID]").next().unwrap_or_default().trim().to_string();
            Some(vec![FunctionCall { name, arguments: object(arguments)? }])
        }
        _ => match JsonValue::parse(text).ok()? {
            JsonValue::Array(calls) => calls.into_iter().map(call).collect(),
            value => Some(vec![call(value)?]),
        },
    }
}

/// Whether a text begins an object, or a list of objects.
fn is_json(text: &str) -> bool {
    text.strip_prefix('[').unwrap_or(text).trim_start().starts_with('{')
}

/// The call in a reply that is JSON without delimiters. `None` if the JSON is not a call of one of the functions.
pub fn parse_unmarked(functions: &[String], text: &str) -> Option<FunctionCall> {
    let value = JsonValue::parse(text.trim()).ok()?;
    let fields = value.as_object()?;
    let is_call = |key: &String| matches!(key.as_str(), "type" | "name" | "parameters" | "arguments");
    let is_offered = functions.iter().any(|name| fields.get("name").is_some_and(|asked| asked == name.as_str()));
    (is_offered && fields.keys().all(is_call)).then(|| call(value)).flatten()
}

/// The call that a truncated text begins, with its partial arguments as text. `Some(None)` if its name is incomplete.
/// `None` if the text does not begin a call of one of the functions, or is a complete one.
pub fn parse_cut(
    format: ReplyFormat,
    name: Option<String>,
    (functions, tools): (&[String], &[JsonValue]),
    text: &str,
) -> Option<Option<FunctionCall>> {
    if parse(format, name.clone(), tools, text).is_some() {
        return None;
    }
    let text = text.trim_start();
    match format {
        ReplyFormat::Gemma4 => gemma_cut(functions, text),
        ReplyFormat::Hermes | ReplyFormat::QwenXml if xml_calls::is_xml(text) => {
            xml_calls::parse_cut(tools, functions, text)
        }
        ReplyFormat::Lfm2 if !is_json(text) => python_calls::parse_cut(functions, text),
        ReplyFormat::Harmony => Some(Some(FunctionCall { name: name?, arguments: value_of(text).into() })),
        ReplyFormat::Mistral if !text.starts_with(['[', '{']) => match text.split_once("[ARGS]") {
            Some((name, arguments)) => {
                let name = name.split("[CALL_ID]").next().unwrap_or_default().trim().to_string();
                functions.contains(&name).then(|| Some(FunctionCall { name, arguments: arguments.into() }))
            }
            None => Some(None),
        },
        _ => begun(functions, text.strip_prefix('[').unwrap_or(text)),
    }
}

/// Like [`parse_cut`], for a reply that is JSON without delimiters.
pub fn parse_unmarked_cut(functions: &[String], text: &str) -> Option<Option<FunctionCall>> {
    if parse_unmarked(functions, text).is_some() { None } else { begun(functions, text) }
}

/// Parses the beginning of `{"name": …, "arguments": …}`.
fn begun(functions: &[String], text: &str) -> Option<Option<FunctionCall>> {
    let mut reader = CutText { rest: text };
    for piece in ["{", "\"name\"", ":"] {
        if !reader.take(piece)? {
            return Some(None);
        }
    }
    let mut quoted = functions.iter().map(|name| (name, JsonValue::from(name.as_str()).to_string()));
    let (name, quoted) = quoted.find(|(_, quoted)| reader.can_take(quoted))?;
    if !reader.take(&quoted)? {
        return Some(None);
    }
    let call = |arguments: &str| Some(Some(FunctionCall { name: name.clone(), arguments: arguments.into() }));
    if !reader.take(",")? {
        return call("");
    }
    let key = ["\"arguments\"", "\"parameters\""].into_iter().find(|key| reader.can_take(key))?;
    if !reader.take(key)? || !reader.take(":")? {
        return call("");
    }
    call(value_of(reader.rest.trim_start()))
}

/// A text that may be truncated.
struct CutText<'t> {
    rest: &'t str,
}

impl CutText<'_> {
    /// Consumes a piece after white space. Returns whether it is complete, as the text may end within it. `None` if the
    /// text differs.
    fn take(&mut self, piece: &str) -> Option<bool> {
        let rest = self.rest.trim_start();
        if let Some(after) = rest.strip_prefix(piece) {
            self.rest = after;
            return Some(true);
        }
        piece.starts_with(rest).then_some(false)
    }

    fn can_take(&self, piece: &str) -> bool {
        let rest = self.rest.trim_start();
        rest.starts_with(piece) || piece.starts_with(rest)
    }
}

/// The JSON value at the beginning of a text, or the whole text if it ends within the value.
fn value_of(text: &str) -> &str {
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<serde::de::IgnoredAny>();
    let is_whole = text.starts_with(['{', '[', '"']) && stream.next().is_some_and(|value| value.is_ok());
    if is_whole { &text[..stream.byte_offset()] } else { text }
}

/// Parses a JSON object.
fn object(text: &str) -> Option<JsonValue> {
    JsonValue::parse(text.trim()).ok().filter(JsonValue::is_object)
}

/// `{"name": …, "arguments": …}`; Llama says `parameters`.
fn call(mut value: JsonValue) -> Option<FunctionCall> {
    let fields = value.as_object_mut()?;
    let arguments = fields.shift_remove("arguments").or_else(|| fields.shift_remove("parameters"));
    let Some(JsonValue::String(name)) = fields.shift_remove("name") else { return None };
    let mut call = FunctionCall { name, arguments: arguments.unwrap_or_else(|| JsonValue::Object(IndexMap::new())) };
    call.parse_arguments();
    Some(call)
}

/// `call:name{key:value,…}` with unquoted keys, and texts between `<|"|>`.
fn gemma(text: &str) -> Option<FunctionCall> {
    let text = text.strip_prefix("call:")?;
    let (name, arguments) = text.split_at(text.find('{')?);
    let mut reader = Gemma { rest: arguments };
    let arguments = reader.value(0)?;
    reader.rest.trim().is_empty().then(|| FunctionCall { name: name.trim().to_string(), arguments })
}

/// The beginning of `call:name{…`, with its partial arguments as JSON.
fn gemma_cut(functions: &[String], text: &str) -> Option<Option<FunctionCall>> {
    let Some(call) = text.strip_prefix("call:") else { return "call:".starts_with(text).then_some(None) };
    let Some(place) = call.find('{') else { return Some(None) };
    let (name, arguments) = call.split_at(place);
    let name = name.trim();
    if !functions.iter().any(|known| known == name) {
        return None;
    }
    let (mut reader, mut json) = (Gemma { rest: arguments }, String::new());
    reader.value_so_far(&mut json, 0)?;
    Some(Some(FunctionCall { name: name.to_string(), arguments: json.into() }))
}

struct Gemma<'a> {
    rest: &'a str,
}

impl<'a> Gemma<'a> {
    const QUOTE: &'static str = "<|\"|>";

    fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn until(&mut self, end: impl Fn(char) -> bool) -> &'a str {
        let place = self.rest.find(end).unwrap_or(self.rest.len());
        let (before, rest) = self.rest.split_at(place);
        self.rest = rest;
        before.trim()
    }

    fn value(&mut self, depth: usize) -> Option<JsonValue> {
        if depth > MAX_DEPTH {
            return None;
        }
        if self.take("{") {
            let mut fields = IndexMap::new();
            while !self.take("}") {
                let quoted = self.take(Self::QUOTE);
                let key =
                    if quoted { self.quoted()? } else { self.until(|c| matches!(c, ':' | '}' | '{')).to_string() };
                if !self.take(":") {
                    return None;
                }
                fields.insert(key, self.value(depth + 1)?);
                self.take(",");
            }
            return Some(JsonValue::Object(fields));
        }
        if self.take("[") {
            let mut items = Vec::new();
            while !self.take("]") {
                items.push(self.value(depth + 1)?);
                self.take(",");
            }
            return Some(JsonValue::Array(items));
        }
        if self.take(Self::QUOTE) {
            return self.quoted().map(JsonValue::String);
        }
        let word = self.until(|c| matches!(c, ',' | '}' | ']'));
        JsonValue::parse(word).ok().or_else(|| (!word.is_empty()).then(|| word.into()))
    }

    /// Appends the JSON of a value that may be truncated. Returns whether it is complete; `None` if it is invalid.
    fn value_so_far(&mut self, json: &mut String, depth: usize) -> Option<bool> {
        if depth > MAX_DEPTH {
            return None;
        }
        let is_object = self.take("{");
        if is_object || self.take("[") {
            let (open, close) = if is_object { ('{', "}") } else { ('[', "]") };
            json.push(open);
            let mut is_first = true;
            while !self.take(close) {
                if !is_first && !self.take(",") {
                    return self.rest.trim().is_empty().then_some(false);
                }
                if self.rest.trim().is_empty() {
                    return Some(false);
                }
                if !is_first {
                    json.push(',');
                }
                is_first = false;
                if is_object && !self.key_so_far(json)? || !self.value_so_far(json, depth + 1)? {
                    return Some(false);
                }
            }
            json.push_str(close);
            return Some(true);
        }
        if self.take(Self::QUOTE) {
            return Some(self.quoted_so_far(json));
        }
        let word = self.until(|c| matches!(c, ',' | '}' | ']'));
        let is_whole = !self.rest.is_empty();
        // A truncated word can still become a delimiter or a number.
        if is_whole {
            json.push_str(&JsonValue::parse(word).unwrap_or_else(|_| word.into()).to_string());
        } else if word.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b)) {
            json.push_str(word);
        }
        Some(is_whole)
    }

    fn key_so_far(&mut self, json: &mut String) -> Option<bool> {
        if self.take(Self::QUOTE) {
            let is_whole = self.quoted_so_far(json);
            json.push_str(if is_whole { ":" } else { "" });
            return if is_whole && !self.take(":") {
                self.rest.trim().is_empty().then_some(false)
            } else {
                Some(is_whole)
            };
        }
        let key = self.until(|c| matches!(c, ':' | '}' | '{'));
        if self.rest.is_empty() {
            return Some(false);
        }
        json.push_str(&JsonValue::from(key).to_string());
        json.push(':');
        self.take(":").then_some(true)
    }

    /// Appends a text after its opening delimiter. Returns whether its closing delimiter was found.
    fn quoted_so_far(&mut self, json: &mut String) -> bool {
        let (text, is_whole) = match self.quoted() {
            Some(text) => (text, true),
            None => {
                let keep = partial_end(self.rest, [Self::QUOTE].into_iter());
                let text = self.rest[..self.rest.len() - keep].to_string();
                self.rest = "";
                (text, false)
            }
        };
        let quoted = JsonValue::from(text.as_str()).to_string();
        json.push_str(if is_whole { &quoted } else { quoted.strip_suffix('"').unwrap_or(&quoted) });
        is_whole
    }

    fn quoted(&mut self) -> Option<String> {
        let (text, rest) = self.rest.split_once(Self::QUOTE)?;
        self.rest = rest;
        Some(text.to_string())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// At any truncation, the partial arguments are a prefix of the complete ones.
    #[test]
    fn arguments_of_gemma_that_are_cut() {
        let text = "call:f{a:1.5,b:[true,<|\"|>x \"é\", {y}<|\"|>],c:{d:<|\"|><|\"|>},<|\"|>e f<|\"|>:null}";
        let whole = gemma(text).unwrap().arguments.to_string();
        assert_eq!(whole, r#"{"a":1.5,"b":[true,"x \"é\", {y}"],"c":{"d":""},"e f":null}"#);
        let mut longest = 0;
        for cut in (0..text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            let functions = ["f".to_string()];
            let found = parse_cut(ReplyFormat::Gemma4, None, (&functions, &[]), &text[..cut]);
            let call = found.unwrap_or_else(|| panic!("{:?} is content", &text[..cut]));
            assert_eq!(call.is_some(), cut > "call:f".len(), "{:?}", &text[..cut]);
            let Some(call) = call else { continue };
            let so_far = call.arguments.as_str().unwrap();
            assert!(call.name == "f" && whole.starts_with(so_far), "{:?}: {so_far}", &text[..cut]);
            longest = longest.max(so_far.len());
        }
        assert!(longest > whole.len() - 3);
        for text in ["call:g{a:", "cold:f{", "call:f{a:{{", &format!("call:f{}", "{a:".repeat(9999))] {
            assert_eq!(parse_cut(ReplyFormat::Gemma4, None, (&["f".to_string()], &[]), text), None, "{text}");
        }
    }

    #[test]
    fn arguments_of_gemma() {
        let call =
            gemma("call:f{a:1.5,b:true,c:null,d:[<|\"|>x, {y}<|\"|>,2],e:{f:<|\"|><|\"|>},g:word,h:{}}").unwrap();
        let expected =
            json!({"a": 1.5, "b": true, "c": null, "d": ["x, {y}", 2], "e": {"f": ""}, "g": "word", "h": {}});
        assert_eq!(call, FunctionCall { name: "f".into(), arguments: expected.into() });
        for bad in [
            "call:f",
            "f{}",
            "call:f{a",
            "call:f{a:",
            "call:f{a:[",
            "call:f{}x",
            "call:f{,}",
            &format!("call:f{}", "{a:".repeat(9999)),
        ] {
            assert_eq!(gemma(bad), None, "{bad}");
        }
    }
}
