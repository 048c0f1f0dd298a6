//! Grammars for calls with named arguments: the XML form of Qwen3-Coder and Qwen 3.5, and the Python calls of LFM2.
//! Arguments are in the order of the schema's properties.

use kvant_models::chat::{JsonValue, ParameterForm, referenced};
use serde_json::json;

use crate::{
    calls::{Rules, escaped, json_rule, literal, regex_rule},
    gemma_calls::{bound, only, whole_text},
};

/// Ends a parameter in the XML form.
const PARAMETER_END: &str = "</parameter>";
/// Texts that end a value in the parsers.
const ENDS: [&str; 2] = [PARAMETER_END, "</tool_call>"];
/// Maximum depth of references and alternatives.
const MAX_DEPTH: usize = 8;
/// Keywords of definitions. They are copied for each argument: at most this number of bytes in all.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
const MAX_COPIED: usize = 64 << 10;
/// Any text of a parameter, and calls with arbitrary arguments.
const SHARED: [&str; 5] = [
    "free_parameter: \"<parameter=\" /[^<>\\n]{1,64}/ \">\\n\" any_text \"\\n\"",
    "any_text[suffix=\"</parameter>\"]: ANY_TEXT",
    "free_argument: /[A-Za-z_][A-Za-z0-9_]{0,63}/ \"=\" any_value",
    "any_value: \"True\" | \"False\" | \"None\" | any_json",
    "any_json: ",
];

/// The form of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallForm {
    Xml,
    Python,
}

/// The rules of calls.
pub(crate) struct NamedCalls {
    form: CallForm,
    rules: Rules,
}

/// A property of the object of all arguments.
struct Property<'s> {
    name: &'s str,
    schema: &'s JsonValue,
    is_required: bool,
}

/// A text that a schema allows.
enum AllowedText {
    Whole(String),
    Matching { min: u64, max: Option<u64>, regex: Option<String> },
}

impl NamedCalls {
    pub fn new(form: CallForm) -> NamedCalls {
        NamedCalls { form, rules: Rules::new("named") }
    }

    /// The call of a function with arguments that match a schema. `None` if the form cannot enforce the schema.
    pub fn call(&mut self, function: &str, schema: &JsonValue) -> Option<String> {
        let before = self.rules.size();
        let call = self.enforced(function, schema);
        if call.is_none() {
            self.rules.truncate(before);
        }
        call
    }

    /// The rules of all calls.
    pub fn rules(self) -> Vec<String> {
        let [parameter, text, argument, value, any] = SHARED;
        let json = format!("{any}{}", json_rule(json!({}).into()));
        let terminal = format!("ANY_TEXT: {}", self::text(0, None, None));
        let shared = [parameter, text, argument, value].map(str::to_string);
        self.rules.into_vec().into_iter().chain(shared).chain([json, terminal]).collect()
    }

    fn enforced(&mut self, function: &str, schema: &JsonValue) -> Option<String> {
        if function.contains(['>', '(', '<', '\n', '=']) {
            return None;
        }
        let properties = properties(schema)?;
        let definitions: usize = DEFINITIONS.iter().map(|key| schema[*key].to_string().len()).sum();
        if definitions.saturating_mul(properties.len()) > MAX_COPIED {
            return None;
        }
        let is_free = properties.is_empty() && !(schema["additionalProperties"] == false);
        let (before, after) = match self.form {
            CallForm::Xml => (literal(&format!("<function={function}>\n")), literal("</function>")),
            CallForm::Python => (literal(&format!("{function}(")), literal(")")),
        };
        let arguments = match self.form {
            CallForm::Xml if is_free => "free_parameter*".to_string(),
            CallForm::Python if is_free => "(free_argument (\",\" \" \"? free_argument)*)?".to_string(),
            CallForm::Xml => self.parameters(schema, &properties)?,
            CallForm::Python => self.arguments(schema, &properties)?,
        };
        Some(format!("{before} {arguments} {after}"))
    }

    fn parameters(&mut self, root: &JsonValue, properties: &[Property]) -> Option<String> {
        let mut all = Vec::new();
        for Property { name, schema, is_required } in properties {
            if name.contains(['>', '<', '\n']) || name.is_empty() {
                return None;
            }
            let value = self.parameter(root, schema)?;
            let parameter = self.rules.add(&format!("{} ({value}) \"\\n\"", literal(&format!("<parameter={name}>\n"))));
            all.push(if *is_required { parameter } else { format!("{parameter}?") });
        }
        Some(all.join(" "))
    }

    /// The value of a parameter, with the delimiter behind it.
    fn parameter(&mut self, root: &JsonValue, schema: &JsonValue) -> Option<String> {
        let end = literal(&format!("\n{PARAMETER_END}"));
        let form = ParameterForm::of(root, schema);
        if form == ParameterForm::Json {
            let json = match schema["type"].as_str() {
                Some("boolean") if only(schema, &["type"]).is_ok() => {
                    "(\"true\" | \"false\" | \"True\" | \"False\")".to_string()
                }
                _ => json_rule(alone(root, schema)?),
            };
            return Some(format!("{} {end}", self.rules.add(&json)));
        }
        let mut alternatives = Vec::new();
        for found in texts(root, schema, form == ParameterForm::Either, 0)? {
            alternatives.push(match found {
                AllowedText::Whole(value) if ENDS.iter().any(|end| value.contains(end)) => return None,
                AllowedText::Whole(value) => literal(&format!("{value}\n{PARAMETER_END}")),
                AllowedText::Matching { min: 0, max: None, regex: None } => "any_text".to_string(),
                AllowedText::Matching { min, max, regex } => {
                    let name = self.rules.new_name();
                    let terminal = name.to_uppercase();
                    self.rules.define(&format!("{name}[suffix={}]", literal(PARAMETER_END)), &terminal);
                    self.rules.define(&terminal, &text(min, max, regex.as_deref()));
                    name
                }
            });
        }
        Some(alternatives.join(" | "))
    }

    fn arguments(&mut self, root: &JsonValue, properties: &[Property]) -> Option<String> {
        let mut arguments = Vec::new();
        for Property { name, schema, is_required } in properties {
            let is_name = |c: char| c.is_alphanumeric() || "_-.$".contains(c);
            if !name.chars().all(is_name) || name.is_empty() {
                return None;
            }
            let kind = schema["type"].as_str().filter(|_| only(schema, &["type"]).is_ok());
            let value = match kind {
                Some("boolean") => "(\"True\" | \"False\")".to_string(),
                Some("null") => "\"None\"".to_string(),
                _ => json_rule(alone(root, schema)?),
            };
            let argument = format!("{} {}", literal(&format!("{name}=")), self.rules.add(&value));
            arguments.push((argument, *is_required));
        }
        Some(self.rules.list(arguments, ", "))
    }
}

/// A terminal for the text of a parameter, with the line break behind it.
fn text(min: u64, max: Option<u64>, regex: Option<&str>) -> String {
    let max = max.map(|max| max.to_string()).unwrap_or_default();
    let regex = regex.map(|regex| format!(" & {}", regex_rule(&format!("(?:{regex})\n")))).unwrap_or_default();
    let ends = ENDS.map(|end| format!(" & ~/(?s:.*){}(?s:.*)/", escaped(end))).concat();
    format!("/(?s:.{{{min},{max}}})\\n/{regex}{ends}")
}

/// The properties of an object of arguments. `None` if other keywords constrain it.
fn properties(schema: &JsonValue) -> Option<Vec<Property<'_>>> {
    only(schema, &["type", "properties", "required", "additionalProperties"]).ok()?;
    if schema["type"] != "object" {
        return None;
    }
    let required = schema["required"].as_array().unwrap_or_default();
    let all = schema["properties"].as_object().into_iter().flatten();
    let mut all: Vec<Property> = all.map(|(name, schema)| Property { name, schema, is_required: false }).collect();
    for name in required {
        all.iter_mut().find(|property| *name == property.name)?.is_required = true;
    }
    let extra = &schema["additionalProperties"];
    let has_extra = extra.as_object().is_some_and(|fields| !fields.is_empty());
    (!has_extra || !all.is_empty()).then_some(all)
}

/// A schema that does not need the schema around it: with the definitions that it refers to.
fn alone(root: &JsonValue, schema: &JsonValue) -> Option<JsonValue> {
    let mut schema = if *schema == true { json!({}).into() } else { schema.clone() };
    let fields = schema.as_object_mut()?;
    for key in DEFINITIONS.into_iter().filter(|key| !root[*key].is_null()) {
        if fields.insert(key.to_string(), root[key].clone()).is_some() {
            return None;
        }
    }
    has_local_references(&schema, 0).then_some(schema)
}

/// Whether all references of a schema are to definitions.
fn has_local_references(schema: &JsonValue, depth: usize) -> bool {
    if depth > 64 {
        return false;
    }
    match schema {
        JsonValue::Object(fields) => fields.iter().all(|(key, value)| match value.as_str() {
            Some(path) if key == "$ref" => path.starts_with("#/$defs/") || path.starts_with("#/definitions/"),
            _ => has_local_references(value, depth + 1),
        }),
        JsonValue::Array(items) => items.iter().all(|item| has_local_references(item, depth + 1)),
        _ => true,
    }
}

/// The texts that a schema allows. `None` if the form cannot enforce it: if the schema `is_mixed`, the parser reads
/// texts that are JSON as other values.
fn texts(root: &JsonValue, schema: &JsonValue, is_mixed: bool, depth: usize) -> Option<Vec<AllowedText>> {
    let any = || AllowedText::Matching { min: 0, max: None, regex: None };
    if depth > MAX_DEPTH {
        return None;
    }
    if *schema == true || only(schema, &[]).is_ok() && schema.is_object() {
        return Some(vec![any()]);
    }
    let of_all = |schemas: &[JsonValue]| {
        let found: Option<Vec<_>> = schemas.iter().map(|schema| texts(root, schema, is_mixed, depth + 1)).collect();
        found.map(|found| found.into_iter().flatten().collect())
    };
    let fields = schema.as_object()?;
    if let Some(JsonValue::String(path)) = fields.get("$ref") {
        // As in the parser, references within references are not followed.
        only(schema, &["$ref"]).ok().filter(|()| depth == 0)?;
        return texts(root, referenced(root, path)?, is_mixed, depth + 1);
    }
    if let Some([whole]) = fields.get("allOf").and_then(JsonValue::as_array) {
        only(schema, &["allOf"]).ok()?;
        return texts(root, whole, is_mixed, depth + 1);
    }
    if let Some(value) = fields.get("const") {
        only(schema, &["const", "type"]).ok()?;
        return Some(vec![whole(value, is_mixed)?]);
    }
    if let Some(JsonValue::Array(values)) = fields.get("enum") {
        only(schema, &["enum", "type"]).ok()?;
        return values.iter().map(|value| whole(value, is_mixed)).collect();
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(JsonValue::Array(schemas)) = fields.get(key) {
            only(schema, &[key, "type"]).ok()?;
            return of_all(schemas);
        }
    }
    only(schema, &["type", "minLength", "maxLength", "pattern"]).ok()?;
    let kinds = match fields.get("type")? {
        JsonValue::Array(kinds) => kinds.iter().map(|kind| kind.as_str()).collect::<Option<Vec<_>>>()?,
        kind => vec![kind.as_str()?],
    };
    let of_kind = |kind: &str| match kind {
        "null" => Some(AllowedText::Whole("null".to_string())),
        "string" if !is_mixed => {
            let regex = match &schema["pattern"] {
                JsonValue::Null => None,
                pattern => Some(whole_text(pattern.as_str()?)?),
            };
            let (min, max) = (bound(schema, "minLength").ok()?.unwrap_or(0), bound(schema, "maxLength").ok()?);
            Some(AllowedText::Matching { min, max, regex })
        }
        _ => None,
    };
    kinds.into_iter().map(of_kind).collect()
}

/// The text of a value that is no list and no object.
fn whole(value: &JsonValue, is_mixed: bool) -> Option<AllowedText> {
    match value {
        JsonValue::Array(_) | JsonValue::Object(_) => None,
        JsonValue::String(text) if is_mixed && is_json(text) => None,
        JsonValue::String(text) => Some(AllowedText::Whole(text.clone())),
        value => Some(AllowedText::Whole(value.to_string())),
    }
}

/// Whether the parser reads a text as another value than a string.
fn is_json(text: &str) -> bool {
    matches!(text.trim(), "True" | "False" | "None") || JsonValue::parse(text.trim()).is_ok()
}
