//! Function calls in grammars: the delimiters of each family, and fragments of Lark syntax.

use kvant_engine::Grammar;
use kvant_models::chat::{JsonValue, ReplyFormat};
use serde_json::{Value, json};

use crate::serving::Serving;

/// Whether reasoning precedes the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reasoning {
    /// The prompt has begun the reasoning.
    Open,
    /// The model decides.
    Allowed,
    Never,
}

/// The delimiters in the answers of a family.
pub(crate) struct Delimiters {
    /// Delimiters before and after reasoning.
    pub reasoning: Option<(&'static [&'static str], &'static str)>,
    /// Delimiters before and after a call.
    pub call: Option<[&'static [&'static str]; 2]>,
}

impl Delimiters {
    pub fn of(family: ReplyFormat) -> Delimiters {
        match family {
            ReplyFormat::Hermes | ReplyFormat::QwenXml => Delimiters {
                reasoning: Some((&["<think>"], "</think>")),
                call: Some([&["<tool_call>", "\n"], &["\n", "</tool_call>"]]),
            },
            ReplyFormat::Lfm2 => Delimiters {
                reasoning: Some((&["<think>"], "</think>")),
                call: Some([&["<|tool_call_start|>", "["], &["]", "<|tool_call_end|>"]]),
            },
            ReplyFormat::Mistral => {
                let reasoning: (&[&str], &str) = (&["[THINK]"], "[/THINK]");
                Delimiters { reasoning: Some(reasoning), call: Some([&["[TOOL_CALLS]", "["], &["]"]]) }
            }
            ReplyFormat::Llama3 => Delimiters { reasoning: None, call: Some([&[], &[]]) },
            ReplyFormat::Gemma4 => Delimiters {
                reasoning: Some((&["<|channel>", "thought\n"], "<channel|>")),
                call: Some([&["<|tool_call>"], &["<tool_call|>"]]),
            },
            _ => Delimiters { reasoning: None, call: None },
        }
    }
}

/// A delimiter in a grammar: a special token if the vocabulary has it, or else text.
pub(crate) fn mark(app: &Serving, name: &str) -> String {
    special(app, name).unwrap_or_else(|| literal(name))
}

/// The special token with a name.
pub(crate) fn special(app: &Serving, name: &str) -> Option<String> {
    let tokenizer = app.model.engine.tokenizer();
    let ids = tokenizer.encode(name, false).ok()?;
    // A text that the vocabulary lacks may be a single special token for the unknown.
    let is_named = |ids: &[u32]| tokenizer.decode_with_special(ids).is_ok_and(|text| text.trim() == name);
    let is_special = ids.len() == 1 && tokenizer.is_special(ids[0]) && is_named(&ids);
    is_special.then(|| format!("<[{}]>", ids[0]))
}

/// Rules of a grammar, with distinct names: `PREFIX_1`, `PREFIX_2`, and so on.
pub(crate) struct Rules {
    prefix: &'static str,
    rules: Vec<String>,
    names: usize,
}

impl Rules {
    pub fn new(prefix: &'static str) -> Rules {
        Rules { prefix, rules: Vec::new(), names: 0 }
    }

    /// Adds a rule, and returns its name.
    pub fn add(&mut self, body: &str) -> String {
        let name = self.new_name();
        self.define(&name, body);
        name
    }

    pub fn new_name(&mut self) -> String {
        self.names += 1;
        format!("{}_{}", self.prefix, self.names)
    }

    /// Adds the rule of a name, which can have attributes.
    pub fn define(&mut self, name: &str, body: &str) {
        self.rules.push(format!("{name}: {body}"));
    }

    /// Adds the rules of a list whose elements come in order, and returns the name of the first one. An element is its
    /// text in the grammar, and whether it is required.
    pub fn list(&mut self, elements: Vec<(String, bool)>, separator: &str) -> String {
        // Two rules for each element: with and without one before it. The rule after the last element is empty.
        let (mut first, mut later) = ("\"\"".to_string(), "\"\"".to_string());
        for (element, is_required) in elements.into_iter().rev() {
            let (without_first, without_later) = match is_required {
                true => (String::new(), String::new()),
                false => (format!(" | {first}"), format!(" | {later}")),
            };
            first = self.add(&format!("{element} {later}{without_first}"));
            later = self.add(&format!("{} {element} {later}{without_later}", literal(separator)));
        }
        first
    }

    /// The number of rules and names, for [`Rules::truncate`].
    pub fn size(&self) -> (usize, usize) {
        (self.rules.len(), self.names)
    }

    /// Removes later rules, and frees their names.
    pub fn truncate(&mut self, (rules, names): (usize, usize)) {
        self.rules.truncate(rules);
        self.names = names;
    }

    pub fn into_vec(self) -> Vec<String> {
        self.rules
    }
}

/// A literal text in a grammar.
pub(crate) fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A terminal for text that does not contain `mark`. Text never contains a special token.
pub(crate) fn without(app: &Serving, mark: &str) -> String {
    if special(app, mark).is_some() {
        return "/(?s:.*)/".to_string();
    }
    format!("/(?s:.*)/ & ~/(?s:.*){}(?s:.*)/", escaped(mark))
}

/// Escapes a text for a regular expression.
pub(crate) fn escaped(text: &str) -> String {
    let is_meta = |c: &char| "[](){}.*+?^$|\\/".contains(*c);
    text.chars().flat_map(|c| is_meta(&c).then_some('\\').into_iter().chain([c])).collect()
}

/// Whether the arguments of a function must match its schema.
pub(crate) fn is_strict(function: &JsonValue) -> bool {
    function["strict"] == true
}

/// The call of a function as JSON, with arguments that match `schema`.
pub(crate) fn call(function: &JsonValue, key: &str, schema: JsonValue) -> String {
    let name = format!("{{\"name\": {}, \"{key}\": ", function["name"]);
    format!("{} {} {}", literal(&name), json_rule(schema), literal("}"))
}

/// The schema of a function's arguments, which are always an object. A function without parameters has no arguments.
pub(crate) fn parameters(function: &JsonValue) -> JsonValue {
    match &function["parameters"] {
        JsonValue::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}).into(),
        JsonValue::Object(fields) if fields.contains_key("type") => JsonValue::Object(fields.clone()),
        JsonValue::Object(fields) => {
            let mut schema = JsonValue::from(json!({"type": "object"}));
            schema.as_object_mut().into_iter().for_each(|all| all.extend(fields.clone()));
            schema
        }
        other => other.clone(),
    }
}

/// Embeds a grammar in another one.
pub(crate) fn rule(grammar: &Grammar) -> String {
    match grammar {
        Grammar::JsonSchema(schema) => json_rule(JsonValue::parse(schema).unwrap_or_default()),
        Grammar::Regex(regex) => format!("%lark {{\nstart: {}\n}}", regex_rule(regex)),
        Grammar::Lark(lark) => format!("%lark {{\n{lark}\n}}"),
        _ => json_rule(json!({"type": "object"}).into()),
    }
}

/// Writes a regular expression between slashes. Escapes each slash in it that is not escaped yet.
pub(crate) fn regex_rule(regex: &str) -> String {
    // An unescaped `//` begins a comment.
    if regex.is_empty() {
        return "\"\"".to_string();
    }
    let (mut out, mut is_escaped) = ("/".to_string(), false);
    for c in regex.chars() {
        match c {
            '/' if !is_escaped => out += "\\/",
            '\n' => out += if is_escaped { "n" } else { "\\n" },
            c => out.push(c),
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    out + "/"
}

pub(crate) fn json_rule(schema: JsonValue) -> String {
    // The schema `true` allows every value.
    let mut schema = if schema == true { json!({}).into() } else { schema };
    if schema.is_object() {
        schema["x-guidance"] = json!({"whitespace_pattern": Grammar::WHITESPACE}).into();
    }
    format!("%json {schema}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_of_regular_expressions() {
        for (regex, rule) in [
            ("a/b", r"/a\/b/"),
            (r"a\/b", r"/a\/b/"),
            (r"a\\/b", r"/a\\\/b/"),
            (r"[/\d]", r"/[\/\d]/"),
            ("a\nb", r"/a\nb/"),
            ("", "\"\""),
        ] {
            assert_eq!(regex_rule(regex), rule);
        }
    }

    #[test]
    fn arguments_are_an_object() {
        let schema = |function: Value| parameters(&function.into()).to_string();
        let none = r#"{"type":"object","properties":{},"additionalProperties":false}"#;
        assert_eq!(schema(json!({"name": "f"})), none);
        assert_eq!(schema(json!({"name": "f", "parameters": null})), none);
        assert_eq!(schema(json!({"parameters": {}})), r#"{"type":"object"}"#);
        let any = json!({"parameters": {"anyOf": [{"required": ["a"]}]}});
        assert_eq!(schema(any), r#"{"type":"object","anyOf":[{"required":["a"]}]}"#);
    }
}
