//! Answers of a prescribed form: JSON, calls of tools, and other languages, as grammars for the engine.

use kvant_engine::{CompiledGrammar, Grammar, InexactNumber, SubmitError};
use kvant_models::chat::{JsonValue, ReplyFormat};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    error::{ApiError, Result},
    fields::only_fields,
    serving::Serving,
};

/// The form that an answer must have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shape {
    /// The form of text.
    text: Option<TextShape>,
    /// The functions that the answer can call, as tools in OpenAI's form.
    calls: Vec<JsonValue>,
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
    json: Option<JsonValue>,
    json_object: Option<bool>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
}

impl Shape {
    /// The form of text that `response_format` or, in `field`, its equivalent asks for. `wrapper` is the key of the
    /// object that has the schema.
    pub fn of_format(format: Option<&JsonValue>, field: &str, wrapper: Option<&str>) -> Result<Shape> {
        let Some(format) = format else { return Ok(Shape::default()) };
        match format["type"].as_str() {
            Some("text") => {
                only_fields(format, field, &["type"])?;
                Ok(Shape::default())
            }
            // As in llama.cpp, it can have a schema.
            Some("json_object") => {
                only_fields(format, field, &["type", "schema"])?;
                match &format["schema"] {
                    JsonValue::Null => Ok(Shape::of_text(field.to_string(), Grammar::JsonObject)),
                    schema => Ok(Shape::of_text(format!("{field}.schema"), Grammar::JsonSchema(schema.to_string()))),
                }
            }
            Some("json_schema") => {
                const OF_SCHEMA: [&str; 4] = ["name", "description", "schema", "strict"];
                let (field, holder) = match wrapper {
                    Some(key) => {
                        only_fields(format, field, &["type", key])?;
                        let holder = format!("{field}.{key}");
                        only_fields(&format[key], &holder, &OF_SCHEMA)?;
                        (format!("{holder}.schema"), &format[key])
                    }
                    None => {
                        only_fields(format, field, &[&OF_SCHEMA[..], &["type"]].concat())?;
                        (format!("{field}.schema"), format)
                    }
                };
                match &holder["schema"] {
                    JsonValue::Null => Err(ApiError::field(&field, format!("`{field}` is needed"))),
                    schema => {
                        let mut schema = schema.clone();
                        if holder["strict"] == true {
                            close(&mut schema);
                        }
                        Ok(Shape::of_text(field, Grammar::JsonSchema(schema.to_string())))
                    }
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
        if choice.as_ref().is_some_and(Vec::is_empty) {
            let field = format!("{name}.choice");
            return Err(ApiError::field(&field, format!("`{field}` must have at least one element, got none")));
        }
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
    pub fn and_calls(self, calls: Vec<JsonValue>, must_call: bool) -> Shape {
        Shape { calls, must_call, ..self }
    }

    /// Whether the answer must be a call.
    pub fn must_call(&self) -> bool {
        self.must_call
    }

    /// The names of the functions that the answer can call.
    pub fn functions(&self) -> impl Iterator<Item = &str> {
        self.calls.iter().filter_map(|tool| tool["function"]["name"].as_str())
    }

    /// How the answer is read: a call that is not in the family's own form is JSON.
    pub fn read_as(&self, family: ReplyFormat) -> ReplyFormat {
        let has_own = matches!(family, ReplyFormat::Hermes | ReplyFormat::Mistral);
        if self.must_call && !has_own { ReplyFormat::Llama3 } else { family }
    }

    /// The grammar of an answer, if it must have a form.
    pub fn compile(&self, app: &Serving, family: ReplyFormat, thoughts: Thoughts) -> Result<Option<CompiledGrammar>> {
        if self.must_call || self.text.is_some() {
            self.check_numbers()?;
        }
        if self.must_call {
            let calls = compiled(app, "tools", &self.grammar(app, family, thoughts, None)?);
            return calls.map(Some).map_err(|error| self.call_error(app).unwrap_or(error));
        }
        let Some(TextShape { field, grammar }) = &self.text else { return self.compile_strict(app, family, thoughts) };
        let marks = Marks::of(family);
        let has_calls = !self.calls.is_empty() && marks.call.is_some();
        let alone = || compiled(app, field, grammar);
        if !has_calls && (marks.thoughts.is_none() || thoughts == Thoughts::Never) {
            return alone().map(Some);
        }
        if matches!(grammar, Grammar::Lark(_)) {
            // Places in its errors are those that the client knows.
            alone()?;
        }
        let whole = compiled(app, field, &self.grammar(app, family, thoughts, Some(grammar))?);
        whole.map(Some).map_err(|error| alone().err().unwrap_or(error))
    }

    /// The grammar of an answer that is free, but for the calls of functions that are strict.
    fn compile_strict(
        &self,
        app: &Serving,
        family: ReplyFormat,
        thoughts: Thoughts,
    ) -> Result<Option<CompiledGrammar>> {
        let strict = self.calls.iter().position(|tool| is_strict(&tool["function"]));
        let Some(index) = strict else { return Ok(None) };
        // Without calls there is nothing to enforce.
        if family == ReplyFormat::Plain {
            return Ok(None);
        }
        if Marks::of(family).call.is_none() {
            let what = "the model's calls are not JSON: only with `tool_choice` required or a function";
            return Err(ApiError::unsupported(format!("tools[{index}].function.strict"), what));
        }
        self.check_numbers()?;
        let grammar = compiled(app, "tools", &self.grammar(app, family, thoughts, None)?);
        grammar.map(Some).map_err(|error| self.call_error(app).unwrap_or(error))
    }

    /// Refuses parameters of functions with a number that cannot be enforced exactly.
    fn check_numbers(&self) -> Result<()> {
        let inexact = |tool: &JsonValue| {
            let function = &tool["function"];
            let number = InexactNumber::find(&function["parameters"])?;
            let name = function["name"].as_str().unwrap_or_default();
            Some(ApiError::field("tools", format!("the parameters of {name:?}: {number}")))
        };
        self.calls.iter().find_map(inexact).map_or(Ok(()), Err)
    }

    /// The error of the first function whose parameters cannot be enforced.
    fn call_error(&self, app: &Serving) -> Option<ApiError> {
        self.calls.iter().find_map(|tool| {
            let schema = Grammar::JsonSchema(parameters(&tool["function"]).to_string());
            let error = compiled(app, "tools", &schema).err()?;
            let name = tool["function"]["name"].as_str().unwrap_or_default();
            Some(ApiError { message: format!("the parameters of {name:?}: {}", error.message), ..error })
        })
    }

    /// The grammar of thoughts and then text or a call. Text is free if it needs no form and no call must be.
    fn grammar(
        &self,
        app: &Serving,
        family: ReplyFormat,
        thoughts: Thoughts,
        text: Option<&Grammar>,
    ) -> Result<Grammar> {
        let marks = Marks::of(family);
        let has_calls = self.must_call || !self.calls.is_empty() && marks.call.is_some();
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
            Some((open, close)) if thoughts != Thoughts::Never => {
                let open = open.iter().map(|part| mark(app, part)).collect::<Vec<_>>().join(" ");
                rules.push(format!("open: {open}\nGAP: /[ \\n]{{1,4}}/"));
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
            let is_free = !self.must_call && text.is_none();
            // Arguments of other functions are free where nothing else must have a form.
            let schema = |function: &JsonValue| match is_free && !is_strict(function) {
                true => json!({"type": "object"}).into(),
                false => parameters(function),
            };
            let of_tool = |tool: &JsonValue| call(&tool["function"], key, schema(&tool["function"]));
            let calls = self.calls.iter().map(of_tool).collect::<Vec<_>>().join(" | ");
            match (is_free, marks.call.map(|[before, _]| before)) {
                (false, _) => rules.push(format!("call: {before} ({calls}) {after}")),
                (true, Some([first, ..])) => {
                    // Several calls can be in one list.
                    rules.push(format!("call: {before} ({calls}) (\",\" \" \"? ({calls}))* {after}"));
                    rules.push(format!("FREE: {}", without(app, first)));
                    answers = vec!["FREE (call FREE)*".to_string()];
                }
                // JSON is a call.
                (true, _) => {
                    rules.push(format!("call: {calls}\nFREE: /(\\s*[^{{\\s](?s:.*))?/"));
                    answers.push("FREE".to_string());
                }
            }
        }
        rules.push(format!("answer: {}", answers.join(" | ")));
        Ok(Grammar::Lark(rules.join("\n")))
    }
}

/// Compiles a grammar. An error names `field`.
fn compiled(app: &Serving, field: &str, grammar: &Grammar) -> Result<CompiledGrammar> {
    app.model.engine.compile(grammar).map_err(|error| match error {
        SubmitError::Invalid { got, .. } if Grammar::IS_SUPPORTED => {
            ApiError::field(field, format!("`{field}` cannot be enforced: {got}"))
        }
        SubmitError::Invalid { got, .. } => ApiError::unsupported(field, &got),
        other => other.into(),
    })
}

/// The marks in a family's answers.
struct Marks {
    /// Before and after thoughts.
    thoughts: Option<(&'static [&'static str], &'static str)>,
    /// Before and after the JSON of a call.
    call: Option<[&'static [&'static str]; 2]>,
}

impl Marks {
    fn of(family: ReplyFormat) -> Marks {
        match family {
            ReplyFormat::Hermes => Marks {
                thoughts: Some((&["<think>"], "</think>")),
                call: Some([&["<tool_call>", "\n"], &["\n", "</tool_call>"]]),
            },
            ReplyFormat::Mistral => {
                let thoughts: (&[&str], &str) = (&["[THINK]"], "[/THINK]");
                Marks { thoughts: Some(thoughts), call: Some([&["[TOOL_CALLS]", "["], &["]"]]) }
            }
            ReplyFormat::Llama3 => Marks { thoughts: None, call: Some([&[], &[]]) },
            // Its calls are no JSON.
            ReplyFormat::Gemma4 => Marks { thoughts: Some((&["<|channel>", "thought\n"], "<channel|>")), call: None },
            _ => Marks { thoughts: None, call: None },
        }
    }
}

/// A mark in a grammar: a special token, or text.
fn mark(app: &Serving, name: &str) -> String {
    special(app, name).unwrap_or_else(|| literal(name))
}

/// The special token of a name.
fn special(app: &Serving, name: &str) -> Option<String> {
    let tokenizer = app.model.engine.tokenizer();
    let ids = tokenizer.encode(name, false).ok()?;
    let is_special = ids.len() == 1 && tokenizer.decode(&ids).is_ok_and(|text| text.is_empty());
    is_special.then(|| format!("<[{}]>", ids[0]))
}

/// Text in a grammar.
fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Text without a mark, as a terminal. Text never has a special token.
fn without(app: &Serving, mark: &str) -> String {
    if special(app, mark).is_some() {
        return "/(?s:.*)/".to_string();
    }
    let is_meta = |c: &char| "[](){}.*+?^$|\\/".contains(*c);
    let escaped: String = mark.chars().flat_map(|c| is_meta(&c).then_some('\\').into_iter().chain([c])).collect();
    format!("/(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/")
}

/// Whether the arguments of a function must be as its schema says.
fn is_strict(function: &JsonValue) -> bool {
    function["strict"] == true
}

/// The call of a function as JSON, with arguments of a schema.
fn call(function: &JsonValue, key: &str, schema: JsonValue) -> String {
    let name = format!("{{\"name\": {}, \"{key}\": ", function["name"]);
    format!("{} {} {}", literal(&name), json_rule(schema), literal("}"))
}

/// The schema of a function's arguments, which are an object. A function without parameters has no arguments.
fn parameters(function: &JsonValue) -> JsonValue {
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

/// Objects of a strict schema have no other properties than those it names, as in OpenAI's API, which asks for
/// `additionalProperties: false`.
fn close(schema: &mut JsonValue) {
    match schema {
        JsonValue::Object(fields) => {
            let has_properties = fields.get("properties").is_some_and(JsonValue::is_object);
            if has_properties && !fields.contains_key("additionalProperties") {
                fields.insert("additionalProperties".to_string(), false.into());
            }
            for (key, value) in fields {
                match key.as_str() {
                    // Values, not schemas.
                    "enum" | "const" | "default" | "examples" => {}
                    _ => close(value),
                }
            }
        }
        JsonValue::Array(items) => items.iter_mut().for_each(close),
        _ => {}
    }
}

/// A grammar as a part of another one.
fn rule(grammar: &Grammar) -> String {
    match grammar {
        Grammar::JsonSchema(schema) => json_rule(JsonValue::parse(schema).unwrap_or_default()),
        Grammar::Regex(regex) => format!("%lark {{\nstart: {}\n}}", regex_rule(regex)),
        Grammar::Lark(lark) => format!("%lark {{\n{lark}\n}}"),
        _ => json_rule(json!({"type": "object"}).into()),
    }
}

/// A regular expression between slashes. Slashes in it are escaped, also those that are already.
fn regex_rule(regex: &str) -> String {
    // Two slashes begin a comment.
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

fn json_rule(schema: JsonValue) -> String {
    // `true` allows everything.
    let mut schema = if schema == true { json!({}).into() } else { schema };
    if schema.is_object() {
        schema["x-guidance"] = json!({"whitespace_pattern": Grammar::WHITESPACE}).into();
    }
    format!("%json {schema}")
}

/// The text of a schema, which some clients send as a string.
fn schema_text(schema: JsonValue) -> String {
    match schema {
        JsonValue::String(text) => text,
        schema => schema.to_string(),
    }
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
