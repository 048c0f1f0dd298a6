//! The tools of a request, and the calls that its answer can or must have.

use kvant_models::chat::JsonValue;
use serde_json::Value;

use crate::{
    app::App,
    error::{ApiError, Result},
    structured::OutputConstraint,
};

/// The tools that the template shows to the model, and the calls that an answer may or must contain.
pub(crate) fn chosen_tools(
    app: &App,
    tools: Option<Vec<JsonValue>>,
    choice: Option<&Value>,
    shape: OutputConstraint,
) -> Result<(Vec<JsonValue>, OutputConstraint)> {
    let tools = tools.unwrap_or_default();
    check_tools(app, &tools)?;
    let name = match choice.map(|choice| choice.as_str()) {
        None | Some(Some("auto")) => return auto_tools(tools, shape),
        Some(Some("none")) => return Ok((Vec::new(), shape)),
        Some(Some("required")) => None,
        Some(Some(_)) => return Err(ApiError::field("tool_choice", "`tool_choice` must be auto, none or required")),
        Some(None) => {
            let choice = choice.unwrap_or(&Value::Null);
            let name = choice["function"]["name"].as_str().or(choice["name"].as_str());
            if choice["type"] != "function" || name.is_none() {
                return Err(ApiError::unsupported(
                    "tool_choice",
                    "only auto, none, required and a function by its name",
                ));
            }
            name
        }
    };
    must_call(tools, name, shape)
}

pub(crate) fn auto_tools(tools: Vec<JsonValue>, shape: OutputConstraint) -> Result<(Vec<JsonValue>, OutputConstraint)> {
    let shape = shape.and_calls(tools.clone(), false);
    Ok((tools, shape))
}

/// Returns the tools that a required call can use: all, or the one with a given name.
pub(crate) fn must_call(
    tools: Vec<JsonValue>,
    name: Option<&str>,
    shape: OutputConstraint,
) -> Result<(Vec<JsonValue>, OutputConstraint)> {
    let is_chosen = |tool: &&JsonValue| name.is_none_or(|name| tool["function"]["name"] == name);
    let calls: Vec<JsonValue> = tools.iter().filter(is_chosen).cloned().collect();
    if calls.is_empty() {
        return Err(ApiError::field("tool_choice", "`tool_choice` requires a matching function in `tools`"));
    }
    Ok((tools, shape.and_calls(calls, true)))
}

/// Checks tools in OpenAI's format: `{"type": "function", "function": {"name", "description"?, "parameters"?}}`.
pub(crate) fn check_tools(app: &App, tools: &[JsonValue]) -> Result<()> {
    let limit = app.options.schema_limit;
    let length: usize = tools.iter().map(|tool| tool.to_string().len()).sum();
    if length > limit {
        return Err(ApiError::field("tools", format!("`tools` must have at most {limit} bytes, got {length}")));
    }
    for (index, tool) in tools.iter().enumerate() {
        let path = format!("tools[{index}]");
        if tool["type"] != "function" {
            return Err(ApiError::unsupported(format!("{path}.type"), "only functions are tools"));
        }
        let function = &tool["function"];
        if !function["name"].as_str().is_some_and(is_name) {
            let path = format!("{path}.function.name");
            let what = "must have 1 to 64 letters, digits, dots, dashes and underscores";
            return Err(ApiError::field(&path, format!("`{path}` {what}")));
        }
        let path = format!("{path}.function.parameters");
        if !function["parameters"].is_object() && !function["parameters"].is_null() {
            return Err(ApiError::field(&path, format!("`{path}` must be a JSON schema")));
        }
    }
    Ok(())
}

fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
}
