//! Grammars for Gemma 4's calls: `call:name{key:value,…}` with unquoted keys, and texts between `<|"|>`.

use std::collections::HashMap;

use kvant_models::chat::{JsonValue, referenced};
use serde_json::json;

use crate::{
    calls::{Rules, escaped, json_rule, literal, mark, regex_rule},
    serving::Serving,
};

/// The delimiter of texts.
const QUOTE: &str = "<|\"|>";
/// Maximum value of `minItems` and `maxItems`.
const MAX_ITEMS: u64 = 1000;
/// Maximum references of the schemas of one function.
const MAX_REFERENCES: usize = 1000;
/// Keywords that do not constrain values, or are read elsewhere.
const ANNOTATIONS: [&str; 12] = [
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
];
const NUMBERS: [&str; 5] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
/// The formats that JSON grammars enforce.
const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// A rule, or the keyword of a schema that this format cannot enforce.
pub(crate) type Enforced<T> = Result<T, String>;

/// The rules of calls.
pub(crate) struct GemmaCalls {
    quote: String,
    rules: Rules,
    /// The schema of all arguments of the current function, and the rules of its references.
    root: JsonValue,
    references: HashMap<String, String>,
}

/// Whether the format can enforce a schema.
pub(crate) fn is_enforceable(schema: &JsonValue) -> bool {
    let mut form = GemmaCalls::of(literal(QUOTE));
    form.arguments(schema).is_ok()
}

impl GemmaCalls {
    pub fn new(app: &Serving) -> GemmaCalls {
        GemmaCalls::of(mark(app, QUOTE))
    }

    fn of(quote: String) -> GemmaCalls {
        let (root, references) = (JsonValue::Null, HashMap::new());
        GemmaCalls { quote, rules: Rules::new("value"), root, references }
    }

    /// The call of a function with arguments that match a schema.
    pub fn call(&mut self, name: &JsonValue, schema: &JsonValue) -> Enforced<String> {
        let before = self.rules.size();
        let arguments = self.arguments(schema).inspect_err(|_| self.rules.truncate(before))?;
        Ok(format!("{} {arguments}", begin(name)))
    }

    /// The call of a function with arbitrary arguments.
    pub fn free_call(&self, name: &JsonValue) -> String {
        format!("{} any_object", begin(name))
    }

    /// The rules of all calls.
    pub fn rules(self) -> Vec<String> {
        let quote = &self.quote;
        let text = format!("/(?s:.*)/ & ~/(?s:.*){}(?s:.*)/", escaped(QUOTE));
        let number = json_rule(json!({"type": "number"}).into());
        let shared = [
            "any: any_text | any_number | \"true\" | \"false\" | \"null\" | any_object | any_list".to_string(),
            format!("any_text: {quote} TEXT {quote}\nTEXT: {text}"),
            format!("any_number: {number}"),
            "any_object: \"{\" (any_field (\",\" any_field)*)? \"}\"".to_string(),
            "any_field: /[A-Za-z0-9_.-]{1,64}/ \":\" any".to_string(),
            "any_list: \"[\" (any (\",\" any)*)? \"]\"".to_string(),
        ];
        self.rules.into_vec().into_iter().chain(shared).collect()
    }

    fn arguments(&mut self, schema: &JsonValue) -> Enforced<String> {
        self.root = schema.clone();
        self.references.clear();
        self.value(schema)
    }

    /// The rule of a value.
    fn value(&mut self, schema: &JsonValue) -> Enforced<String> {
        let fields = match schema {
            JsonValue::Object(fields) => fields,
            other if *other == true => return Ok("any".to_string()),
            _ => return Err("false".to_string()),
        };
        if let Some(JsonValue::String(path)) = fields.get("$ref") {
            only(schema, &["$ref"])?;
            return self.reference(path);
        }
        // Some generators of schemas wrap a reference in `allOf` to add a description.
        if let Some([whole]) = fields.get("allOf").and_then(JsonValue::as_array) {
            only(schema, &["allOf"])?;
            return self.value(whole);
        }
        if let Some(value) = fields.get("const") {
            only(schema, &["const", "type"])?;
            return self.literal(value);
        }
        if let Some(JsonValue::Array(values)) = fields.get("enum") {
            only(schema, &["enum", "type"])?;
            if values.is_empty() {
                return Err("enum".to_string());
            }
            let values = values.iter().map(|value| self.literal(value)).collect::<Enforced<Vec<_>>>()?;
            return Ok(self.rules.add(&values.join(" | ")));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(JsonValue::Array(schemas)) = fields.get(key) {
                only(schema, &[key, "type", "discriminator"])?;
                if schemas.is_empty() {
                    return Err(key.to_string());
                }
                let values = schemas.iter().map(|schema| self.value(schema)).collect::<Enforced<Vec<_>>>()?;
                return Ok(self.rules.add(&values.join(" | ")));
            }
        }
        match fields.get("type") {
            Some(JsonValue::String(kind)) => self.of_kind(kind, schema),
            Some(JsonValue::Array(kinds)) => {
                let kinds = kinds.iter().map(|kind| self.of_kind(kind.as_str().unwrap_or_default(), schema));
                let kinds = kinds.collect::<Enforced<Vec<_>>>()?;
                Ok(self.rules.add(&kinds.join(" | ")))
            }
            _ if fields.contains_key("properties") => self.of_kind("object", schema),
            _ => only(schema, &[]).map(|()| "any".to_string()),
        }
    }

    fn of_kind(&mut self, kind: &str, schema: &JsonValue) -> Enforced<String> {
        let of_union =
            ["type", "items", "properties", "required", "additionalProperties", "minLength", "maxLength", "pattern"];
        let is_union = schema["type"].as_array().is_some();
        let check =
            |keys: &[&str]| only(schema, &if is_union { [keys, &of_union, &NUMBERS].concat() } else { keys.to_vec() });
        match kind {
            "null" => check(&["type"]).map(|()| "\"null\"".to_string()),
            "boolean" => check(&["type"]).map(|()| "(\"true\" | \"false\")".to_string()),
            "number" | "integer" => {
                check(&[&["type", "format"][..], &NUMBERS].concat())?;
                let mut number = JsonValue::from(json!({"type": kind}));
                for key in NUMBERS.iter().filter(|key| !schema[**key].is_null()) {
                    number[*key] = schema[*key].clone();
                }
                Ok(self.rules.add(&json_rule(number)))
            }
            "string" => {
                check(&["type", "format", "minLength", "maxLength", "pattern"])?;
                if schema["format"].as_str().is_some_and(|format| FORMATS.contains(&format)) {
                    return Err("format".to_string());
                }
                let regex = match &schema["pattern"] {
                    JsonValue::Null => None,
                    pattern => Some(pattern.as_str().and_then(whole_text).ok_or("pattern")?),
                };
                Ok(self.text(bound(schema, "minLength")?, bound(schema, "maxLength")?, regex))
            }
            "array" => {
                check(&["type", "items", "minItems", "maxItems"])?;
                self.list(schema)
            }
            "object" => {
                check(&["type", "properties", "required", "additionalProperties"])?;
                self.object(schema)
            }
            _ => Err("type".to_string()),
        }
    }

    /// The rule of a reference within the schema.
    fn reference(&mut self, path: &str) -> Enforced<String> {
        if let Some(name) = self.references.get(path) {
            return Ok(name.clone());
        }
        // A chain of references is followed recursively.
        if self.references.len() == MAX_REFERENCES {
            return Err(format!("$ref, more than {MAX_REFERENCES} times"));
        }
        let target = referenced(&self.root, path).ok_or_else(|| format!("$ref: {path}"))?.clone();
        // Schemas can be recursive.
        let name = self.rules.new_name();
        self.references.insert(path.to_string(), name.clone());
        let body = self.value(&target)?;
        self.rules.define(&name, &body);
        Ok(name)
    }

    fn text(&mut self, min: Option<u64>, max: Option<u64>, regex: Option<String>) -> String {
        if (min, max, &regex) == (None, None, &None) {
            return "any_text".to_string();
        }
        let regex = regex.map(|regex| format!(" & {}", regex_rule(&regex))).unwrap_or_default();
        let (min, max) = (min.unwrap_or(0), max.map(|max| max.to_string()).unwrap_or_default());
        let name = self.rules.new_name();
        let (terminal, quote) = (name.to_uppercase(), &self.quote);
        self.rules.define(&name, &format!("{quote} {terminal} {quote}"));
        let mark = escaped(QUOTE);
        self.rules.define(&terminal, &format!("/(?s:.{{{min},{max}}})/{regex} & ~/(?s:.*){mark}(?s:.*)/"));
        name
    }

    fn literal(&mut self, value: &JsonValue) -> Enforced<String> {
        match value {
            JsonValue::String(text) if text.contains(QUOTE) => Err("enum".to_string()),
            JsonValue::String(text) => Ok(format!("({} {} {})", self.quote, literal(text), self.quote)),
            JsonValue::Array(_) | JsonValue::Object(_) => Err("enum".to_string()),
            value => Ok(literal(&value.to_string())),
        }
    }

    fn list(&mut self, schema: &JsonValue) -> Enforced<String> {
        let item = if schema["items"].is_null() { "any".to_string() } else { self.value(&schema["items"])? };
        let (min, max) = (bound(schema, "minItems")?.unwrap_or(0), bound(schema, "maxItems")?);
        let more = |count: u64| count.saturating_sub(1);
        let items = match max {
            Some(max) if max < min => return Err("maxItems".to_string()),
            Some(0) => String::new(),
            max => {
                let max = max.map(|max| more(max).to_string()).unwrap_or_default();
                let some = format!("{item} (\",\" {item}){{{},{max}}}", more(min));
                if min == 0 { format!("({some})?") } else { some }
            }
        };
        Ok(self.rules.add(&format!("\"[\" {items} \"]\"")))
    }

    /// Fields in alphabetical order, as the family's template writes them.
    fn object(&mut self, schema: &JsonValue) -> Enforced<String> {
        let Some(properties) = schema["properties"].as_object().filter(|properties| !properties.is_empty()) else {
            return match &schema["additionalProperties"] {
                _ if schema["required"].as_array().is_some_and(|names| !names.is_empty()) => {
                    Err("required".to_string())
                }
                none if *none == false => Ok(literal("{}")),
                JsonValue::Object(fields) if !fields.is_empty() => Err("additionalProperties".to_string()),
                _ => Ok("any_object".to_string()),
            };
        };
        let required = schema["required"].as_array().unwrap_or_default();
        if required.iter().any(|name| name.as_str().is_none_or(|name| !properties.contains_key(name))) {
            return Err("required".to_string());
        }
        let mut properties: Vec<_> = properties.iter().collect();
        properties.sort_by_key(|(name, _)| name.to_lowercase());
        let field = |(name, schema): (&String, &JsonValue)| {
            let is_required = required.iter().any(|other| *other == name.as_str());
            Ok((format!("{} {}", self.key(name)?, self.value(schema)?), is_required))
        };
        let fields = properties.into_iter().map(field).collect::<Enforced<Vec<_>>>()?;
        let fields = self.rules.list(fields, ",");
        Ok(self.rules.add(&format!("\"{{\" {fields} \"}}\"")))
    }

    fn key(&self, name: &str) -> Enforced<String> {
        let is_plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b)) && !name.is_empty();
        match is_plain {
            true => Ok(literal(&format!("{name}:"))),
            false if name.contains(QUOTE) => Err("properties".to_string()),
            false => Ok(format!("{} {} {} \":\"", self.quote, literal(name), self.quote)),
        }
    }
}

fn begin(name: &JsonValue) -> String {
    literal(&format!("call:{}", name.as_str().unwrap_or_default()))
}

/// Converts a schema's pattern, which can match any part of a text, to a regular expression for the whole text. Returns
/// `None` for anchors within the pattern, backreferences and lookarounds.
pub(crate) fn whole_text(pattern: &str) -> Option<String> {
    let (is_start, rest) = pattern.strip_prefix('^').map_or((false, pattern), |rest| (true, rest));
    let mut found = Pattern::default();
    for c in rest.chars() {
        found.push(c)?;
    }
    if found.is_escaped || found.is_class || found.depth != 0 || found.has_choice && (is_start || found.is_end) {
        return None;
    }
    let [before, after] = [is_start, found.is_end].map(|is_anchored| if is_anchored { "" } else { "(?s:.*)" });
    Some(format!("{before}(?:{}){after}", found.out))
}

/// The state of the conversion, which reads a pattern without its first anchor from left to right.
#[derive(Default)]
struct Pattern {
    out: String,
    is_escaped: bool,
    is_class: bool,
    /// Whether the class has no character yet, only its brackets and `^`.
    is_empty_class: bool,
    /// Groups that are open.
    depth: usize,
    /// Whether a `|` was found outside of groups.
    has_choice: bool,
    /// Whether the last character was the anchor `$`.
    is_end: bool,
    /// Whether the last character began a group.
    is_group: bool,
    /// Whether the last characters were `(?`.
    is_kind: bool,
}

impl Pattern {
    fn push(&mut self, c: char) -> Option<()> {
        let (was_escaped, was_group, was_kind) = (self.is_escaped, self.is_group, self.is_kind);
        (self.is_escaped, self.is_group, self.is_kind) = (false, false, false);
        if self.is_end || was_kind && c != ':' {
            return None;
        }
        let is_class_start = self.is_empty_class && c == '^' && self.out.ends_with('[');
        let was_empty_class = std::mem::replace(&mut self.is_empty_class, is_class_start);
        match c {
            // As in JavaScript, digits and word characters are ASCII only.
            'd' if was_escaped => self.out.push_str("[0-9]"),
            'D' if was_escaped => self.out.push_str("[^0-9]"),
            'w' if was_escaped => self.out.push_str("[0-9A-Za-z_]"),
            'W' if was_escaped => self.out.push_str("[^0-9A-Za-z_]"),
            // Word boundaries, backreferences, and escapes of other characters.
            c if was_escaped && c.is_ascii_alphanumeric() && !"nrtsSfv".contains(c) => return None,
            // Word boundaries in Rust.
            '<' | '>' if was_escaped => self.out.push(c),
            c if was_escaped => self.out.extend(['\\', c]),
            '\\' => self.is_escaped = true,
            // In JavaScript, `[]` matches nothing and `[^]` everything; in Rust, the bracket belongs to the class.
            ']' if self.is_class && was_empty_class => return None,
            ']' => {
                self.is_class = false;
                self.out.push(c);
            }
            // In JavaScript, `[` within a class is a literal.
            '[' if self.is_class => self.out.push_str("\\["),
            // Doubled, they are operators of sets in Rust.
            '&' | '~' if self.is_class => self.out.extend(['\\', c]),
            '-' if self.is_class && self.out.ends_with('-') => return None,
            c if self.is_class => self.out.push(c),
            '^' => return None,
            '$' => self.is_end = true,
            c => {
                (self.is_class, self.is_empty_class) = (c == '[', c == '[');
                (self.is_group, self.is_kind) = (c == '(', was_group && c == '?');
                self.depth = match c {
                    '(' => self.depth + 1,
                    ')' => self.depth.checked_sub(1)?,
                    _ => self.depth,
                };
                self.has_choice |= c == '|' && self.depth == 0;
                self.out.push(c);
            }
        }
        Some(())
    }
}

/// The value of a length or count keyword.
pub(crate) fn bound(schema: &JsonValue, key: &str) -> Enforced<Option<u64>> {
    if schema[key].is_null() {
        return Ok(None);
    }
    let count = schema[key].to_string().parse().ok().filter(|count| *count <= MAX_ITEMS);
    count.map(Some).ok_or_else(|| key.to_string())
}

/// Rejects keywords that are neither in `known` nor annotations.
pub(crate) fn only(schema: &JsonValue, known: &[&str]) -> Enforced<()> {
    let mut keys = schema.as_object().into_iter().flatten().map(|(key, _)| key.as_str());
    let other = keys.find(|key| !known.contains(key) && !ANNOTATIONS.contains(key) && !key.starts_with("x-"));
    other.map_or(Ok(()), |key| Err(key.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_whole_texts() {
        for (pattern, regex) in [
            ("^a$", "(?:a)"),
            ("a|b", "(?s:.*)(?:a|b)(?s:.*)"),
            ("^(a|b)$", "(?:(a|b))"),
            ("^(?:a|b)", "(?:(?:a|b))(?s:.*)"),
            (r"\d{3}-\w$", "(?s:.*)(?:[0-9]{3}-[0-9A-Za-z_])"),
            (r"^[^$|^\d[(]\$\.$", r"(?:[^$|^[0-9]\[(]\$\.)"),
            (r"^[a&&b~]\<$", r"(?:[a\&\&b\~]<)"),
            ("^[^^-a]]$", "(?:[^^-a]])"),
            ("", "(?s:.*)(?:)(?s:.*)"),
        ] {
            assert_eq!(whole_text(pattern).as_deref(), Some(regex), "{pattern}");
        }
        for pattern in [
            "^a|b$", "a^", "a$b", "(^a)", "(a$)", r"\ba", r"(a)\1", "(?=a)b", "(?<n>a)", "(a", "a)", "[a", "\\", "[]",
            "[^]", "[+--]",
        ] {
            assert_eq!(whole_text(pattern), None, "{pattern}");
        }
    }
}
