//! Answers of a prescribed form: JSON, calls of tools, and other languages, as grammars for the engine.

use kvant_engine::{CompiledGrammar, Grammar, SubmitError};
use kvant_models::chat::ReplyFormat;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    app::App,
    error::{ApiError, Result},
};

/// The form that an answer must have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shape {
    /// The form of text.
    text: Option<TextShape>,
    /// Functions, as tools in OpenAI's form.
    calls: Vec<Value>,
    /// Whether the answer must be a call.
    must_call: bool,
}

/// The form of text, and the field that asks for it.
#[derive(Clone, Debug)]
struct TextShape {
    field: String,
    grammar: Grammar,
}

/// Whether thoughts come before the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thoughts {
    /// The prompt has begun them.
    Open,
    /// The model decides.
    Allowed,
    Never,
}

/// Other languages of texts, under vLLM's names. One of the fields is set.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct StructuredOutputs {
    json: Option<Value>,
    json_object: Option<bool>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
}

impl Shape {
    /// The form of text that `response_format` or, in `field`, its equivalent asks for. `wrapper` is the key of the
    /// object that has the schema.
    pub fn of_format(format: Option<&Value>, field: &str, wrapper: Option<&str>) -> Result<Shape> {
        let Some(format) = format else { return Ok(Shape::default()) };
        match format["type"].as_str() {
            Some("text") => Ok(Shape::default()),
            Some("json_object") => Ok(Shape::of_text(field.to_string(), Grammar::JsonObject)),
            Some("json_schema") => {
                let (field, holder) = match wrapper {
                    Some(key) => (format!("{field}.{key}.schema"), &format[key]),
                    None => (format!("{field}.schema"), format),
                };
                match &holder["schema"] {
                    Value::Null => Err(ApiError::field(&field, format!("`{field}` is needed"))),
                    schema => Ok(Shape::of_text(field, Grammar::JsonSchema(schema.to_string()))),
                }
            }
            _ => {
                let path = format!("{field}.type");
                Err(ApiError::field(&path, format!("`{path}` must be text, json_object or json_schema")))
            }
        }
    }

    fn of_text(field: String, grammar: Grammar) -> Shape {
        Shape { text: Some(TextShape { field, grammar }), ..Shape::default() }
    }

    /// Adds what `structured_outputs` asks for.
    pub fn and_structured(self, outputs: Option<StructuredOutputs>) -> Result<Shape> {
        let Some(outputs) = outputs else { return Ok(self) };
        let name = "structured_outputs";
        let StructuredOutputs { json, json_object, regex, choice, grammar } = outputs;
        let choice = choice.map(|choices| {
            let choices: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
            Grammar::Lark(format!("start: {}", choices.join(" | ")))
        });
        let asked = [
            ("json", json.map(schema_text).map(Grammar::JsonSchema)),
            ("json_object", json_object.filter(|&on| on).map(|_| Grammar::JsonObject)),
            ("regex", regex.map(Grammar::Regex)),
            ("choice", choice),
            ("grammar", grammar.map(Grammar::Lark)),
        ];
        let mut asked = asked.into_iter().filter_map(|(key, grammar)| Some((key, grammar?)));
        match (asked.next(), asked.next(), &self.text) {
            (Some((key, grammar)), None, None) => Ok(Shape::of_text(format!("{name}.{key}"), grammar)),
            (None, ..) => Ok(self),
            _ => Err(ApiError::field(name, format!("`{name}` must ask for one form, and `response_format` for none"))),
        }
    }

    /// Adds functions that the answer can call, or must call.
    pub fn and_calls(self, calls: Vec<Value>, must_call: bool) -> Shape {
        Shape { calls, must_call, ..self }
    }

    /// How the answer is read: a call that is not in the family's own form is JSON.
    pub fn read_as(&self, family: ReplyFormat) -> ReplyFormat {
        let has_own = matches!(family, ReplyFormat::Hermes | ReplyFormat::Mistral);
        if self.must_call && !has_own { ReplyFormat::Llama3 } else { family }
    }

    /// The grammar of an answer, if it must have a form.
    pub fn compile(&self, app: &App, family: ReplyFormat, thoughts: Thoughts) -> Result<Option<CompiledGrammar>> {
        let (field, grammar) = match &self.text {
            Some(TextShape { field, .. }) if !self.must_call => (field.as_str(), self.grammar(app, family, thoughts)?),
            _ if self.must_call => ("tools", self.grammar(app, family, thoughts)?),
            _ => return Ok(None),
        };
        compiled(app, field, &grammar).map(Some)
    }

    /// The text's own grammar, or one of thoughts and text or calls.
    fn grammar(&self, app: &App, family: ReplyFormat, thoughts: Thoughts) -> Result<Grammar> {
        let marks = Marks::of(family);
        let text = self.text.as_ref().filter(|_| !self.must_call).map(|text| &text.grammar);
        let has_calls = self.must_call || !self.calls.is_empty() && marks.call.is_some();
        match text {
            Some(grammar) if !has_calls && (marks.thoughts.is_none() || thoughts == Thoughts::Never) => {
                return Ok(grammar.clone());
            }
            // They have rules of their own.
            Some(grammar @ Grammar::Lark(_)) => return Ok(grammar.clone()),
            _ => {}
        }
        let mut rules = Vec::new();
        let start = match thoughts {
            Thoughts::Open => "start: rest answer",
            Thoughts::Allowed if marks.thoughts.is_some() => "start: (open rest)? answer",
            _ => "start: answer",
        };
        rules.push(start.to_string());
        match marks.thoughts {
            None if thoughts == Thoughts::Open => {
                return Err(ApiError::unsupported("tool_choice", "the prompt asks for thoughts first"));
            }
            Some([open, close]) if thoughts != Thoughts::Never => {
                rules.push(format!("open: {}\nGAP: /[ \\n]{{1,4}}/", mark(app, open)));
                rules.push(match special(app, close) {
                    Some(close) => format!("rest: thoughts {close} GAP?\nthoughts: /(?s:.*)/"),
                    None => format!("rest: thoughts GAP?\nthoughts[suffix={}]: /(?s:.*)/", literal(close)),
                });
            }
            _ => {}
        }
        let mut answers = Vec::new();
        if let Some(grammar) = text {
            answers.push("text".to_string());
            rules.push(format!("text: {}", rule(grammar)));
        }
        if has_calls {
            answers.push("call".to_string());
            let [before, after] = marks
                .call
                .unwrap_or([&[], &[]])
                .map(|parts| parts.iter().map(|part| mark(app, part)).collect::<Vec<_>>().join(" "));
            let key = if family == ReplyFormat::Llama3 { "parameters" } else { "arguments" };
            let calls: Vec<String> = self.calls.iter().map(|tool| call(&tool["function"], key)).collect();
            rules.push(format!("call: {before} ({}) {after}", calls.join(" | ")));
        }
        rules.push(format!("answer: {}", answers.join(" | ")));
        Ok(Grammar::Lark(rules.join("\n")))
    }
}

/// Compiles a grammar. An error names `field`.
fn compiled(app: &App, field: &str, grammar: &Grammar) -> Result<CompiledGrammar> {
    app.engine.compile(grammar).map_err(|error| match error {
        SubmitError::Invalid { got, .. } if Grammar::IS_SUPPORTED => {
            ApiError::field(field, format!("`{field}` cannot be enforced: {got}"))
        }
        SubmitError::Invalid { got, .. } => ApiError::unsupported(field, &got),
        other => other.into(),
    })
}

/// The marks in a family's answers.
struct Marks {
    /// Around thoughts.
    thoughts: Option<[&'static str; 2]>,
    /// Before and after the JSON of a call.
    call: Option<[&'static [&'static str]; 2]>,
}

impl Marks {
    fn of(family: ReplyFormat) -> Marks {
        match family {
            ReplyFormat::Hermes => Marks {
                thoughts: Some(["<think>", "</think>"]),
                call: Some([&["<tool_call>", "\n"], &["\n", "</tool_call>"]]),
            },
            ReplyFormat::Mistral => {
                Marks { thoughts: Some(["[THINK]", "[/THINK]"]), call: Some([&["[TOOL_CALLS]", "["], &["]"]]) }
            }
            ReplyFormat::Llama3 => Marks { thoughts: None, call: Some([&[], &[]]) },
            _ => Marks { thoughts: None, call: None },
        }
    }
}

/// A mark in a grammar: a special token, or text.
fn mark(app: &App, name: &str) -> String {
    special(app, name).unwrap_or_else(|| literal(name))
}

/// The special token of a name.
fn special(app: &App, name: &str) -> Option<String> {
    let tokenizer = app.engine.tokenizer();
    let ids = tokenizer.encode(name, false).ok()?;
    let is_special = ids.len() == 1 && tokenizer.decode(&ids).is_ok_and(|text| text.is_empty());
    is_special.then(|| format!("<[{}]>", ids[0]))
}

/// Text in a grammar.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// The call of a function as JSON.
fn call(function: &Value, key: &str) -> String {
    let schema = match &function["parameters"] {
        Value::Null => json!({"type": "object"}),
        schema => schema.clone(),
    };
    let name = format!("{{\"name\": {}, \"{key}\": ", function["name"]);
    format!("{} {} {}", literal(&name), json_rule(schema), literal("}"))
}

/// A grammar as a part of another one.
fn rule(grammar: &Grammar) -> String {
    match grammar {
        Grammar::JsonSchema(schema) => json_rule(serde_json::from_str(schema).unwrap_or_default()),
        Grammar::Regex(regex) => format!("/{}/", regex.replace('/', "\\/").replace('\n', "\\n")),
        _ => json_rule(json!({"type": "object"})),
    }
}

fn json_rule(schema: Value) -> String {
    // `true` allows everything.
    let mut schema = if schema == true { json!({}) } else { schema };
    if let Some(fields) = schema.as_object_mut() {
        fields.insert("x-guidance".to_string(), json!({"whitespace_pattern": Grammar::WHITESPACE}));
    }
    format!("%json {schema}")
}

/// The text of a schema, which some clients send as a string.
fn schema_text(schema: Value) -> String {
    match schema {
        Value::String(text) => text,
        schema => schema.to_string(),
    }
}
