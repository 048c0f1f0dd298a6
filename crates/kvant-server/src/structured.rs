//! Structured outputs: JSON, tool calls, and other languages, as grammars for the engine.

use kvant_engine::{CompiledGrammar, Grammar, InexactNumber, SubmitError};
use kvant_models::chat::{JsonValue, ReplyFormat};
use serde::Deserialize;
use serde_json::json;

use crate::{
    calls::{Delimiters, Reasoning, call, is_strict, literal, mark, parameters, rule, special, without},
    error::{ApiError, Result},
    fields::only_fields,
    gemma_calls::{GemmaCalls, is_enforceable},
    harmony_calls::HarmonyAnswer,
    named_calls::{CallForm, NamedCalls},
    serving::Serving,
};

/// A constraint on the format of an answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputConstraint {
    /// The format of text.
    text: Option<TextShape>,
    /// The functions that the answer can call, as tools in OpenAI's format.
    calls: Vec<JsonValue>,
    /// Whether the answer must be a call.
    must_call: bool,
}

/// The format of text, and the field that requests it.
#[derive(Clone, Debug)]
struct TextShape {
    field: String,
    grammar: Grammar,
}

/// Other languages of texts, named as in vLLM. One of the fields is set.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct StructuredOutputs {
    json: Option<JsonValue>,
    json_object: Option<bool>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
}

impl OutputConstraint {
    /// The constraint that `response_format`, or its equivalent in `field`, requests. `wrapper` is the key of the
    /// object that contains the schema.
    pub fn of_format(format: Option<&JsonValue>, field: &str, wrapper: Option<&str>) -> Result<OutputConstraint> {
        let Some(format) = format else { return Ok(OutputConstraint::default()) };
        match format["type"].as_str() {
            Some("text") => {
                only_fields(format, field, &["type"])?;
                Ok(OutputConstraint::default())
            }
            // As in llama.cpp, `json_object` can have a schema.
            Some("json_object") => {
                only_fields(format, field, &["type", "schema"])?;
                match &format["schema"] {
                    JsonValue::Null => Ok(OutputConstraint::of_text(field.to_string(), Grammar::JsonObject)),
                    schema => Ok(OutputConstraint::of_text(
                        format!("{field}.schema"),
                        Grammar::JsonSchema(schema.to_string()),
                    )),
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
                        Ok(OutputConstraint::of_text(field, Grammar::JsonSchema(schema.to_string())))
                    }
                }
            }
            _ => {
                let path = format!("{field}.type");
                Err(ApiError::field(&path, format!("`{path}` must be text, json_object or json_schema")))
            }
        }
    }

    fn of_text(field: String, grammar: Grammar) -> OutputConstraint {
        OutputConstraint { text: Some(TextShape { field, grammar }), ..OutputConstraint::default() }
    }

    /// Adds the constraint of `structured_outputs`.
    pub fn and_structured(self, outputs: Option<StructuredOutputs>) -> Result<OutputConstraint> {
        let Some(outputs) = outputs else { return Ok(self) };
        let name = "structured_outputs";
        let StructuredOutputs { json, json_object, regex, choice, grammar } = outputs;
        if choice.as_ref().is_some_and(Vec::is_empty) {
            let field = format!("{name}.choice");
            return Err(ApiError::field(&field, format!("`{field}` must have at least one element, got none")));
        }
        let constraints = [
            ("json", json.map(schema_text).map(Grammar::JsonSchema)),
            ("json_object", json_object.filter(|&on| on).map(|_| Grammar::JsonObject)),
            ("regex", regex.map(Grammar::Regex)),
            ("choice", choice.map(|choices| Grammar::one_of(&choices))),
            ("grammar", grammar.map(Grammar::Lark)),
        ];
        let mut constraints = constraints.into_iter().filter_map(|(key, grammar)| Some((key, grammar?)));
        match (constraints.next(), constraints.next(), &self.text) {
            (Some((key, grammar)), None, None) => Ok(OutputConstraint::of_text(format!("{name}.{key}"), grammar)),
            (None, ..) => Ok(self),
            _ => Err(ApiError::field(name, format!("`{name}` must set one constraint, without `response_format`"))),
        }
    }

    /// Adds functions that the answer can or must call.
    pub fn and_calls(self, calls: Vec<JsonValue>, must_call: bool) -> OutputConstraint {
        OutputConstraint { calls, must_call, ..self }
    }

    /// Whether the answer must be a call.
    pub fn must_call(&self) -> bool {
        self.must_call
    }

    /// The functions that the answer can call, as tools in OpenAI's format.
    pub fn tools(&self) -> &[JsonValue] {
        &self.calls
    }

    /// The names of the functions that the answer can call.
    pub fn functions(&self) -> impl Iterator<Item = &str> {
        self.calls.iter().filter_map(|tool| tool["function"]["name"].as_str())
    }

    /// The format in which the answer is parsed. A call that is not in the family's own format is JSON.
    pub fn read_as(&self, family: ReplyFormat) -> ReplyFormat {
        let has_own = match family {
            ReplyFormat::Hermes
            | ReplyFormat::QwenXml
            | ReplyFormat::Lfm2
            | ReplyFormat::Mistral
            | ReplyFormat::Harmony => true,
            ReplyFormat::Gemma4 => self.calls.iter().all(|tool| is_enforceable(&parameters(&tool["function"]))),
            _ => false,
        };
        if self.must_call && !has_own { ReplyFormat::Llama3 } else { family }
    }

    /// Compiles the grammar of an answer, if it is constrained.
    pub fn compile(&self, app: &Serving, family: ReplyFormat, reasoning: Reasoning) -> Result<Option<CompiledGrammar>> {
        if self.must_call || self.text.is_some() {
            self.check_numbers()?;
        }
        if self.must_call {
            let calls = compiled(app, "tools", &self.grammar(app, family, reasoning, None)?);
            return calls.map(Some).map_err(|error| self.call_error(app).unwrap_or(error));
        }
        let Some(TextShape { field, grammar }) = &self.text else { return self.compile_strict(app, family, reasoning) };
        let delimiters = Delimiters::of(family);
        let has_calls = !self.calls.is_empty() && delimiters.call.is_some();
        let alone = || compiled(app, field, grammar);
        let has_delimiters = has_calls || family == ReplyFormat::Harmony;
        if !has_delimiters && (delimiters.reasoning.is_none() || reasoning == Reasoning::Never) {
            return alone().map(Some);
        }
        if matches!(grammar, Grammar::Lark(_)) {
            // Positions in errors refer to the client's text.
            alone()?;
        }
        let whole = compiled(app, field, &self.grammar(app, family, reasoning, Some(grammar))?);
        whole.map(Some).map_err(|error| alone().err().unwrap_or(error))
    }

    /// The grammar of an answer that is free except for calls of strict functions.
    fn compile_strict(
        &self,
        app: &Serving,
        family: ReplyFormat,
        reasoning: Reasoning,
    ) -> Result<Option<CompiledGrammar>> {
        // Without calls, there is nothing to enforce.
        if family == ReplyFormat::Plain || !self.calls.iter().any(|tool| is_strict(&tool["function"])) {
            return Ok(None);
        }
        self.check_numbers()?;
        let grammar = compiled(app, "tools", &self.grammar(app, family, reasoning, None)?);
        grammar.map(Some).map_err(|error| self.call_error(app).unwrap_or(error))
    }

    /// Rejects function parameters with a number that cannot be enforced exactly.
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
            let error = compiled(app, "tools", &schema).err().filter(|error| error.status.is_client_error())?;
            let name = tool["function"]["name"].as_str().unwrap_or_default();
            Some(ApiError { message: format!("the parameters of {name:?}: {}", error.message), ..error })
        })
    }

    /// The grammar of reasoning followed by text or a call. Text is free if it is unconstrained and no call is
    /// required.
    fn grammar(
        &self,
        app: &Serving,
        family: ReplyFormat,
        reasoning: Reasoning,
        text: Option<&Grammar>,
    ) -> Result<Grammar> {
        let key = if family == ReplyFormat::Llama3 { "parameters" } else { "arguments" };
        let family = if self.must_call { self.read_as(family) } else { family };
        let is_free = !self.must_call && text.is_none();
        // Arguments of other functions are free if nothing else is constrained.
        let schema = |function: &JsonValue| match is_free && !is_strict(function) {
            true => json!({"type": "object"}).into(),
            false => parameters(function),
        };
        if family == ReplyFormat::Harmony {
            let calls = self.calls.iter().map(|tool| (&tool["function"]["name"], schema(&tool["function"]))).collect();
            let answer = HarmonyAnswer { calls, must_call: self.must_call, text: text.map(rule), reasoning };
            return Ok(Grammar::Lark(answer.grammar(app)));
        }
        let delimiters = Delimiters::of(family);
        let (start, of_reasoning) = reasoning_before(app, &delimiters, reasoning)?;
        let mut rules = vec![format!("start: {start}")];
        rules.extend(of_reasoning);
        let mut answers = Vec::new();
        if let Some(grammar) = text {
            answers.push("text");
            rules.push(format!("text: {}", rule(grammar)));
        }
        if self.must_call || !self.calls.is_empty() && delimiters.call.is_some() {
            answers.push("call");
            let [before, after] = delimiters
                .call
                .unwrap_or([&[], &[]])
                .map(|parts| parts.iter().map(|part| mark(app, part)).collect::<Vec<_>>().join(" "));
            let calls: Vec<String> = match family {
                ReplyFormat::Gemma4 => self.gemma_calls(app, schema, &mut rules)?,
                ReplyFormat::QwenXml => self.named_calls(CallForm::Xml, schema, &mut rules),
                ReplyFormat::Lfm2 => self.named_calls(CallForm::Python, schema, &mut rules),
                _ => self.calls.iter().map(|tool| call(&tool["function"], key, schema(&tool["function"]))).collect(),
            };
            let calls = calls.join(" | ");
            match (is_free, delimiters.call.map(|[before, _]| before)) {
                (false, _) => rules.push(format!("call: {before} ({calls}) {after}")),
                (true, Some([first, ..])) => {
                    // A list can contain several calls.
                    let is_list = !matches!(family, ReplyFormat::Gemma4 | ReplyFormat::QwenXml);
                    let more = if is_list { format!("(\",\" \" \"? ({calls}))*") } else { String::new() };
                    rules.push(format!("call: {before} ({calls}) {more} {after}"));
                    rules.push(format!("FREE: {}", without(app, first)));
                    answers = vec!["FREE (call FREE)*"];
                }
                // Without delimiters, any JSON is a call.
                (true, _) => {
                    rules.push(format!("call: {calls}\nFREE: /(\\s*[^{{\\s](?s:.*))?/"));
                    answers.push("FREE");
                }
            }
        }
        rules.push(format!("answer: {}", answers.join(" | ")));
        Ok(Grammar::Lark(rules.join("\n")))
    }

    /// The calls with named arguments, and their rules. If the form cannot enforce the schema of a function, its calls
    /// are JSON, which the parser reads, too.
    fn named_calls(
        &self,
        form: CallForm,
        schema: impl Fn(&JsonValue) -> JsonValue,
        rules: &mut Vec<String>,
    ) -> Vec<String> {
        let mut named = NamedCalls::new(form);
        let functions = self.calls.iter().map(|tool| &tool["function"]);
        let calls = functions.map(|function| {
            let (name, schema) = (function["name"].as_str().unwrap_or_default(), schema(function));
            named.call(name, &schema).unwrap_or_else(|| call(function, "arguments", schema))
        });
        let calls = calls.collect();
        rules.extend(named.rules());
        calls
    }

    /// The calls in Gemma's format, and their rules. If the format cannot enforce the schema of a function, arguments
    /// of a function that is not strict are free.
    fn gemma_calls(
        &self,
        app: &Serving,
        schema: impl Fn(&JsonValue) -> JsonValue,
        rules: &mut Vec<String>,
    ) -> Result<Vec<String>> {
        let mut form = GemmaCalls::new(app);
        let mut calls = Vec::new();
        for (index, tool) in self.calls.iter().enumerate() {
            let function = &tool["function"];
            let call = form.call(&function["name"], &schema(function)).or_else(|keyword| {
                if is_strict(function) {
                    let why = format!("the model's call format cannot enforce `{keyword}` unless a call is required");
                    return Err(ApiError::unsupported(format!("tools[{index}].function.strict"), &why));
                }
                Ok(form.free_call(&function["name"]))
            })?;
            calls.push(call);
        }
        rules.extend(form.rules());
        Ok(calls)
    }
}

/// The start of an answer, and the rules of its reasoning.
fn reasoning_before(
    app: &Serving,
    delimiters: &Delimiters,
    reasoning: Reasoning,
) -> Result<(&'static str, Vec<String>)> {
    let start = match reasoning {
        Reasoning::Open => "rest answer",
        Reasoning::Allowed if delimiters.reasoning.is_some() => "(open rest)? answer",
        _ => "answer",
    };
    let rules = match delimiters.reasoning {
        None if reasoning == Reasoning::Open => {
            return Err(ApiError::unsupported("tool_choice", "the prompt requires reasoning first"));
        }
        Some((open, close)) if reasoning != Reasoning::Never => {
            let open = open.iter().map(|part| mark(app, part)).collect::<Vec<_>>().join(" ");
            let rest = match special(app, close) {
                Some(close) => format!("rest: reasoning {close} GAP?\nreasoning: /(?s:.*)/"),
                None => format!("rest: reasoning GAP?\nreasoning[suffix={}]: /(?s:.*)/", literal(close)),
            };
            vec![format!("open: {open}\nGAP: /[ \\n]{{1,4}}/"), rest]
        }
        _ => Vec::new(),
    };
    Ok((start, rules))
}

/// Compiles a grammar. Errors name `field`.
fn compiled(app: &Serving, field: &str, grammar: &Grammar) -> Result<CompiledGrammar> {
    app.model.engine.compile(grammar).map_err(|error| match error {
        SubmitError::Invalid { got, .. } if Grammar::IS_SUPPORTED => {
            ApiError::field(field, format!("`{field}` cannot be enforced: {got}"))
        }
        SubmitError::Invalid { got, .. } => ApiError::unsupported(field, &got),
        other => other.into(),
    })
}

/// Forbids additional properties in objects of a strict schema, as OpenAI's API does, which requires
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
                    // These keywords have values, not schemas.
                    "enum" | "const" | "default" | "examples" => {}
                    _ => close(value),
                }
            }
        }
        JsonValue::Array(items) => items.iter_mut().for_each(close),
        _ => {}
    }
}

/// The text of a schema, which some clients send as a string.
fn schema_text(schema: JsonValue) -> String {
    match schema {
        JsonValue::String(text) => text,
        schema => schema.to_string(),
    }
}
