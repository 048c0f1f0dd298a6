//! Calls in the XML form of Qwen3-Coder and Qwen 3.5:
//!
//! ```text
//! <function=weather>
//! <parameter=place>
//! Zürich
//! </parameter>
//! </function>
//! ```
//!
//! Arguments are texts without quotes. The schemas of the functions determine which of them are strings; others are
//! JSON.

use indexmap::IndexMap;

use super::{FunctionCall, JsonValue, stop::partial_end};

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// Maximum nesting depth of alternatives in a schema.
const MAX_DEPTH: usize = 8;

/// Whether a text without surrounding white space is in this form, or begins it.
pub fn is_xml(text: &str) -> bool {
    text.starts_with(FUNCTION) || FUNCTION.starts_with(text)
}

/// The calls in a text. `None` if it is not a sequence of complete calls. `tools` are in OpenAI's format.
pub fn parse(tools: &[JsonValue], text: &str) -> Option<Vec<FunctionCall>> {
    let (mut rest, mut calls) = (text.trim(), Vec::new());
    while !rest.is_empty() {
        let (name, inner) = rest.strip_prefix(FUNCTION)?.split_once('>')?;
        let mut reader = Parameters { tools, function: name, rest: inner };
        let mut arguments = IndexMap::new();
        while let Some((name, value)) = reader.next() {
            arguments.insert(name.to_string(), value);
        }
        rest = reader.rest.trim_start().strip_prefix(FUNCTION_END)?.trim_start();
        calls.push(FunctionCall { name: name.to_string(), arguments: JsonValue::Object(arguments) });
    }
    (!calls.is_empty()).then_some(calls)
}

/// The call that a truncated text begins, with its partial arguments as JSON text. `Some(None)` if its name is
/// incomplete. `None` if the text does not begin a call of one of the functions.
pub fn parse_cut(tools: &[JsonValue], functions: &[String], text: &str) -> Option<Option<FunctionCall>> {
    let Some(call) = text.strip_prefix(FUNCTION) else { return FUNCTION.starts_with(text).then_some(None) };
    let Some((name, inner)) = call.split_once('>') else { return Some(None) };
    if !functions.iter().any(|known| known == name) {
        return None;
    }
    let mut reader = Parameters { tools, function: name, rest: inner };
    let mut arguments = IndexMap::new();
    while let Some((name, value)) = reader.next() {
        arguments.insert(name.to_string(), value);
    }
    let is_complete = reader.rest.trim_start().starts_with(FUNCTION_END);
    let mut json = JsonValue::Object(arguments).to_string();
    if !is_complete {
        json.pop();
        reader.value_so_far(&mut json);
    }
    Some(Some(FunctionCall { name: name.to_string(), arguments: json.into() }))
}

/// Reads the parameters of a call.
struct Parameters<'a> {
    tools: &'a [JsonValue],
    function: &'a str,
    rest: &'a str,
}

impl<'a> Parameters<'a> {
    /// The next complete parameter.
    fn next(&mut self) -> Option<(&'a str, JsonValue)> {
        let (name, rest) = self.rest.trim_start().strip_prefix(PARAMETER)?.split_once('>')?;
        let (value, rest) = rest.split_once(PARAMETER_END)?;
        self.rest = rest;
        Some((name, self.types(name).value(without_breaks(value))))
    }

    /// Appends the known part of a truncated parameter to the JSON of the previous ones.
    fn value_so_far(&self, json: &mut String) {
        let Some(begun) = self.rest.trim_start().strip_prefix(PARAMETER) else { return };
        let Some((name, value)) = begun.split_once('>') else { return };
        json.push_str(if json.len() > 1 { "," } else { "" });
        json.push_str(&JsonValue::from(name).to_string());
        json.push(':');
        if self.types(name).is_only_text() {
            // The last line break belongs to the delimiter.
            let value = &value[..value.len() - partial_end(value, [PARAMETER_END].into_iter())];
            let value = value.strip_prefix('\n').unwrap_or(value);
            let quoted = JsonValue::from(value.strip_suffix('\n').unwrap_or(value)).to_string();
            json.push_str(quoted.strip_suffix('"').unwrap_or(&quoted));
        }
    }

    /// The types of a parameter by the function's schema.
    fn types(&self, parameter: &str) -> Types {
        let function = self.tools.iter().map(|tool| &tool["function"]).find(|f| f["name"] == self.function);
        let Some(function) = function else { return Types::default() };
        let parameters = &function["parameters"];
        match &parameters["properties"][parameter] {
            // Without a schema, the text is not interpreted.
            JsonValue::Null => Types { text: true, ..Types::default() },
            schema => Types::of(parameters, schema, 0),
        }
    }
}

/// The value without the line breaks after the opening and before the closing delimiter, which belong to the form.
fn without_breaks(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// How a parameter is written in the XML form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterForm {
    /// As it is, without quotes; `null` if the schema allows it.
    Text,
    /// As JSON.
    Json,
    /// As either. A text that is JSON is not a string.
    Either,
}

impl ParameterForm {
    /// The form of a parameter with the schema `schema`, within the schema of all parameters.
    pub fn of(parameters: &JsonValue, schema: &JsonValue) -> ParameterForm {
        match Types::of(parameters, schema, 0) {
            Types { text: true, json: true, .. } => ParameterForm::Either,
            Types { text: true, .. } => ParameterForm::Text,
            _ => ParameterForm::Json,
        }
    }
}

/// The target of a reference within a schema, such as `#/$defs/name`.
pub fn referenced<'s>(root: &'s JsonValue, path: &str) -> Option<&'s JsonValue> {
    let mut target = root;
    for key in path.strip_prefix("#/")?.split('/') {
        target = target.as_object()?.get(&key.replace("~1", "/").replace("~0", "~"))?;
    }
    Some(target)
}

/// The types that a schema allows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Types {
    text: bool,
    null: bool,
    /// Numbers, booleans, arrays and objects.
    json: bool,
}

impl Types {
    const ALL: Types = Types { text: true, null: true, json: true };

    fn of(root: &JsonValue, schema: &JsonValue, depth: usize) -> Types {
        let named = |name: &JsonValue| match name.as_str() {
            Some("string") => Types { text: true, ..Types::default() },
            Some("null") => Types { null: true, ..Types::default() },
            _ => Types { json: true, ..Types::default() },
        };
        let of_value = |value: &JsonValue| Types {
            text: value.as_str().is_some(),
            null: *value == JsonValue::Null,
            json: value.as_str().is_none() && *value != JsonValue::Null,
        };
        match &schema["type"] {
            JsonValue::Null => {}
            JsonValue::Array(names) => return names.iter().map(named).fold(Types::default(), Types::or),
            name => return named(name),
        }
        if depth > MAX_DEPTH {
            return Types::ALL;
        }
        // References within references could multiply without end.
        let path = schema["$ref"].as_str().filter(|_| depth == 0);
        if let Some(target) = path.and_then(|path| referenced(root, path)) {
            return Types::of(root, target, depth + 1);
        }
        if let Some(value) = schema.as_object().and_then(|fields| fields.get("const")) {
            return of_value(value);
        }
        if let JsonValue::Array(values) = &schema["enum"] {
            return values.iter().map(of_value).fold(Types::default(), Types::or);
        }
        if let Some([whole]) = schema["allOf"].as_array() {
            return Types::of(root, whole, depth + 1);
        }
        let alternatives = ["anyOf", "oneOf"].into_iter().find_map(|key| schema[key].as_array());
        match alternatives {
            Some(schemas) => {
                schemas.iter().map(|schema| Types::of(root, schema, depth + 1)).fold(Types::default(), Types::or)
            }
            None => Types::ALL,
        }
    }

    fn or(self, other: Types) -> Types {
        Types { text: self.text || other.text, null: self.null || other.null, json: self.json || other.json }
    }

    fn is_only_text(self) -> bool {
        self.text && !self.null && !self.json
    }

    /// The value of a text. A text that is no JSON is a string.
    fn value(self, text: &str) -> JsonValue {
        // Templates write booleans as Python does.
        let json = match text.trim() {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            other => other,
        };
        let parsed = || JsonValue::parse(json).ok().filter(|value| value.as_str().is_none() || !self.text);
        match parsed().filter(|_| !self.is_only_text()) {
            Some(JsonValue::Null) if self.null || !self.text => JsonValue::Null,
            Some(value) if value != JsonValue::Null && (self.json || !self.text) => value,
            _ => text.into(),
        }
    }
}
