//! `/v1/messages` and `/v1/messages/count_tokens`, in Anthropic's format.

use std::sync::Arc;

use axum::{
    Extension,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use kvant_engine::{FinishReason, Finished};
use kvant_models::chat::{ChatRole, JsonValue, Message, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    answer::AnswerReader,
    app::{App, RequestId},
    blocks::{Block, Blocks, parsed},
    body::Json,
    conversation::{ChatRequest, content_text, ends_with_answer, sent_call},
    error::{ApiError, Result},
    fields::{only_fields, string},
    generation::{Generation, Gone, Sender, channel, named_stream},
    ids::random_id,
    sampling::{SamplingFields, Strings},
    serving::Serving,
    structured::OutputConstraint,
    tools::{auto_tools, check_tools, must_call},
};

#[derive(Debug, Deserialize)]
pub(crate) struct MessagesRequest {
    model: Option<String>,
    max_tokens: usize,
    messages: Vec<TurnMessage>,
    system: Option<JsonValue>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<Value>,
    thinking: Option<Value>,
    service_tier: Option<String>,
    output_config: Option<OutputConfig>,
    thread: Option<Value>,
    // Has no effect on the answer.
    #[expect(dead_code, reason = "has no effect")]
    metadata: Option<Map<String, Value>>,
}

/// The format of the answer, and its effort.
#[derive(Debug, Deserialize)]
struct OutputConfig {
    format: Option<JsonValue>,
    // A hint for models that were trained for it.
    #[expect(dead_code, reason = "has no effect")]
    effort: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct CountRequest {
    model: Option<String>,
    messages: Vec<TurnMessage>,
    system: Option<JsonValue>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<Value>,
    thinking: Option<Value>,
    #[expect(dead_code, reason = "changes no prompt")]
    output_config: Option<OutputConfig>,
}

#[derive(Debug, Deserialize)]
struct TurnMessage {
    role: String,
    content: JsonValue,
}

#[derive(Debug, Deserialize)]
struct Tool {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<JsonValue>,
    strict: Option<bool>,
    // A hint: prefixes are cached anyway.
    #[expect(dead_code, reason = "has no effect")]
    cache_control: Option<Value>,
}

/// Data shared by all events of an answer.
struct MessageAnswer {
    id: String,
    model: String,
    reader: AnswerReader,
    blocks: Blocks,
    prompt_tokens: usize,
    stops: Vec<String>,
}

pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    Json(request): Json<MessagesRequest>,
) -> Result<Response> {
    let app = Serving::of(&app, request.model.as_deref()).await?;
    let model = app.name.clone();
    if request.max_tokens == 0 {
        return Err(ApiError::field("max_tokens", "`max_tokens` must be at least 1, got 0"));
    }
    if request.thread.is_some() {
        return Err(ApiError::no_threads());
    }
    let strict = app.options.strict_fields;
    if strict && !matches!(request.service_tier.as_deref(), None | Some("auto" | "standard_only")) {
        return Err(ApiError::unsupported("service_tier", "only the default tier exists"));
    }
    let format = request.output_config.as_ref().and_then(|config| config.format.as_ref());
    let shape = OutputConstraint::of_format(format, "output_config.format", None)?;
    let (tools, shape) = chosen_tools(&app, request.tools, request.tool_choice.as_ref(), shape)?;
    let chat = chat(&app, request.system, request.messages, tools, request.thinking.as_ref())?;
    let one_call = request.tool_choice.is_some_and(|choice| choice["disable_parallel_tool_use"] == true);
    let chat = ChatRequest { shape, one_call, ..chat };
    let prompt = app.encoding(chat.bytes(), move |app| chat.prompt(app)).await??;
    let prompt_tokens = prompt.ids.len();
    let stops = request.stop_sequences.unwrap_or_default();
    let sampling = SamplingFields {
        temperature: request.temperature,
        top_p: request.top_p,
        top_k: request.top_k,
        stop: Some(Strings::Many(stops.clone())),
        ..SamplingFields::default()
    };
    let max_tokens = app.max_tokens(Some(request.max_tokens), request.max_tokens);
    let base = prompt.request().max_tokens(max_tokens).cache(app.scope(&headers, None));
    let generation = Generation::submit(&app, &id, vec![sampling.apply(base, &app)?]);
    let generation = generation.map_err(|error| error.of_prompt("messages"))?;
    let (message_id, blocks) = (random_id("msg_"), Blocks::default());
    let answer = MessageAnswer { id: message_id, model, reader: prompt.reader, blocks, prompt_tokens, stops };
    if request.stream.unwrap_or(false) {
        let events = channel(move |sender| answer.stream(id, generation, sender));
        return Ok(named_stream(&app, events));
    }
    Ok(Json(answer.collect(generation).await?).into_response())
}

pub(crate) async fn count(State(app): State<Arc<App>>, Json(request): Json<CountRequest>) -> Result<Json<Value>> {
    let app = Serving::of(&app, request.model.as_deref()).await?;
    let (tools, _) = chosen_tools(&app, request.tools, request.tool_choice.as_ref(), OutputConstraint::default())?;
    let chat = chat(&app, request.system, request.messages, tools, request.thinking.as_ref())?;
    let prompt = app.encoding(chat.bytes(), move |app| chat.prompt(app)).await??;
    Ok(Json(json!({"input_tokens": prompt.ids.len()})))
}

fn chat(
    app: &App,
    system: Option<JsonValue>,
    turns: Vec<TurnMessage>,
    tools: Vec<JsonValue>,
    thinking: Option<&Value>,
) -> Result<ChatRequest> {
    let max = app.options.messages;
    if !(1..=max).contains(&turns.len()) {
        let message = format!("`messages` must have 1 to {max} elements, got {}", turns.len());
        return Err(ApiError::field("messages", message));
    }
    let mut messages = Vec::new();
    if let Some(system) = system {
        messages.push(Message::system(content_text(&system, "system")?));
    }
    for (index, turn) in turns.iter().enumerate() {
        turn.add_to(&mut messages, &format!("messages[{index}]"))?;
    }
    let thinking = match thinking.map(|thinking| thinking["type"].as_str()) {
        None => None,
        Some(Some("enabled" | "adaptive")) => Some(true),
        Some(Some("disabled")) => Some(false),
        Some(_) => {
            return Err(ApiError::field("thinking.type", "`thinking.type` must be enabled, adaptive or disabled"));
        }
    };
    let continues = ends_with_answer(&messages);
    Ok(ChatRequest { messages, tools, thinking, generation_prompt: true, continues, ..ChatRequest::default() })
}

/// Converts tools to OpenAI's format, which templates expect, and returns the calls that the answer must have.
fn chosen_tools(
    app: &App,
    tools: Option<Vec<Tool>>,
    choice: Option<&Value>,
    shape: OutputConstraint,
) -> Result<(Vec<JsonValue>, OutputConstraint)> {
    let mut converted = Vec::new();
    for (index, tool) in tools.unwrap_or_default().into_iter().enumerate() {
        if !matches!(tool.kind.as_deref(), None | Some("custom")) {
            return Err(ApiError::unsupported(format!("tools[{index}].type"), "only tools that the client runs"));
        }
        let mut function = JsonValue::from(json!({"name": tool.name}));
        if let Some(description) = tool.description {
            function["description"] = description.into();
        }
        if let Some(schema) = tool.input_schema {
            function["parameters"] = schema;
        }
        if tool.strict == Some(true) {
            function["strict"] = true.into();
        }
        let mut tool = JsonValue::from(json!({"type": "function"}));
        tool["function"] = function;
        converted.push(tool);
    }
    check_tools(app, &converted)?;
    match choice.map(|choice| choice["type"].as_str()) {
        None => auto_tools(converted, shape),
        Some(Some("auto")) => auto_tools(converted, shape),
        Some(Some("none")) => Ok((Vec::new(), shape)),
        Some(Some("any")) => must_call(converted, None, shape),
        Some(Some("tool")) => match choice.and_then(|choice| choice["name"].as_str()) {
            Some(name) => must_call(converted, Some(name), shape),
            None => Err(ApiError::field("tool_choice.name", "`tool_choice.name` is needed")),
        },
        Some(_) => Err(ApiError::field("tool_choice.type", "`tool_choice.type` must be auto, none, any or tool")),
    }
}

impl TurnMessage {
    /// Adds the messages of a turn. Each tool result becomes a message of its own.
    fn add_to(&self, messages: &mut Vec<Message>, path: &str) -> Result<()> {
        let role = match self.role.as_str() {
            "user" => ChatRole::User,
            "assistant" => ChatRole::Assistant,
            _ => {
                return Err(ApiError::field(
                    format!("{path}.role"),
                    format!("`{path}.role` must be user or assistant"),
                ));
            }
        };
        let path = format!("{path}.content");
        let JsonValue::Array(blocks) = &self.content else {
            messages.push(Message::new(role, content_text(&self.content, &path)?));
            return Ok(());
        };
        let mut turn = Turn { role, text: String::new(), reasoning: None, calls: Vec::new() };
        for (index, block) in blocks.iter().enumerate() {
            turn.add(messages, block, &format!("{path}[{index}]"))?;
        }
        let has_result = blocks.iter().any(|block| block["type"] == "tool_result");
        if !turn.text.is_empty() || !has_result {
            let mut message = Message::new(role, turn.text).tool_calls(turn.calls);
            message.reasoning_content = turn.reasoning;
            messages.push(message);
        }
        Ok(())
    }
}

/// The blocks of a turn that form one message.
struct Turn {
    role: ChatRole,
    text: String,
    reasoning: Option<String>,
    calls: Vec<ToolCall>,
}

impl Turn {
    /// Adds a block. The result of a tool becomes a message. Fields that only answers have are accepted.
    fn add(&mut self, messages: &mut Vec<Message>, block: &JsonValue, path: &str) -> Result<()> {
        let only = |known: &[&str]| only_fields(block, path, &[known, &["type", "cache_control"]].concat());
        match (block["type"].as_str().unwrap_or_default(), self.role) {
            ("text", _) => {
                only(&["text", "citations", "parsed_output"])?;
                self.text.push_str(string(block, path, "text")?);
            }
            ("thinking", ChatRole::Assistant) => {
                only(&["thinking", "signature"])?;
                self.reasoning.get_or_insert_default().push_str(string(block, path, "thinking")?);
            }
            // Reasoning that only the model that wrote it can read.
            ("redacted_thinking", ChatRole::Assistant) => only(&["data"])?,
            ("tool_use", ChatRole::Assistant) => {
                only(&["id", "name", "input", "caller"])?;
                let (id, name) = (string(block, path, "id")?, string(block, path, "name")?);
                self.calls.push(sent_call(id, name.to_string(), block["input"].clone()));
            }
            ("tool_result", ChatRole::User) => {
                only(&["tool_use_id", "content", "is_error"])?;
                let content = match &block["content"] {
                    JsonValue::Null => String::new(),
                    content => content_text(content, &format!("{path}.content"))?,
                };
                messages.push(Message::tool(string(block, path, "tool_use_id")?, content));
            }
            (kind, _) => {
                let kind: String = kind.chars().take(32).collect();
                let role = if self.role == ChatRole::User { "user" } else { "assistant" };
                return Err(ApiError::unsupported(path, &format!("no {kind:?} in a message of {role}")));
            }
        }
        Ok(())
    }
}

impl MessageAnswer {
    async fn collect(mut self, mut generation: Generation) -> Result<JsonValue> {
        let mut end = None;
        while let Some(event) = generation.next().await {
            let added = self.reader.read(event?.1);
            for part in added.parts {
                self.blocks.add(part);
            }
            end = added.finished.or(end);
        }
        let (delta, usage) = self.end(end.as_ref());
        let mut message = self.message(usage);
        message["stop_reason"] = delta["stop_reason"].clone();
        message["stop_sequence"] = delta["stop_sequence"].clone();
        let mut message = JsonValue::from(message);
        message["content"] = JsonValue::Array(self.blocks.0.iter().map(whole_block).collect());
        Ok(message)
    }

    async fn stream(mut self, id: RequestId, mut generation: Generation, sender: Sender) -> Result<(), Gone> {
        let usage = json!({"input_tokens": self.prompt_tokens, "output_tokens": 0});
        let message = self.message(usage);
        sender.named("message_start", &json!({"type": "message_start", "message": message})).await?;
        let mut end = None;
        while let Some(event) = generation.next().await {
            let event = match event {
                Ok((_, event)) => event,
                Err(error) => return sender.named("error", &error.anthropic_body(&id.0)).await,
            };
            let added = self.reader.read(event);
            for part in added.parts {
                let change = self.blocks.add(part);
                let index = self.blocks.last();
                if change.is_new {
                    if index > 0 {
                        self.stop_block(&sender, index - 1).await?;
                    }
                    let block = empty_block(&self.blocks.0[index]);
                    let start = json!({"type": "content_block_start", "index": index, "content_block": block});
                    sender.named("content_block_start", &start).await?;
                }
                let delta = match &self.blocks.0[index] {
                    Block::Text(_) => json!({"type": "text_delta", "text": change.delta}),
                    Block::Reasoning(_) => json!({"type": "thinking_delta", "thinking": change.delta}),
                    Block::Call { .. } => json!({"type": "input_json_delta", "partial_json": change.delta}),
                };
                let delta = json!({"type": "content_block_delta", "index": index, "delta": delta});
                sender.named("content_block_delta", &delta).await?;
            }
            end = added.finished.or(end);
        }
        if !self.blocks.0.is_empty() {
            self.stop_block(&sender, self.blocks.last()).await?;
        }
        let (delta, usage) = self.end(end.as_ref());
        sender.named("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage})).await?;
        sender.named("message_stop", &json!({"type": "message_stop"})).await
    }

    async fn stop_block(&self, sender: &Sender, index: usize) -> Result<(), Gone> {
        if matches!(self.blocks.0.get(index), Some(Block::Reasoning(_))) {
            // Clients send the signature back with the reasoning. It is not verified.
            let delta = json!({"type": "signature_delta", "signature": ""});
            let delta = json!({"type": "content_block_delta", "index": index, "delta": delta});
            sender.named("content_block_delta", &delta).await?;
        }
        sender.named("content_block_stop", &json!({"type": "content_block_stop", "index": index})).await
    }

    /// The answer without content.
    fn message(&self, usage: Value) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": usage,
        })
    }

    /// The stop reason, and the usage.
    fn end(&self, finished: Option<&Finished>) -> (Value, Value) {
        let Some(finished) = finished else { return (json!({}), json!({})) };
        let (reason, stop) = match finished.reason {
            FinishReason::StopString(index) => ("stop_sequence", self.stops.get(index)),
            FinishReason::StopId(_) | FinishReason::Grammar if self.reader.has_calls => ("tool_use", None),
            FinishReason::StopId(_) | FinishReason::Grammar => ("end_turn", None),
            _ => ("max_tokens", None),
        };
        let usage = finished.usage;
        let usage = json!({
            "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.generated_tokens,
        });
        (json!({"stop_reason": reason, "stop_sequence": stop}), usage)
    }
}

fn empty_block(block: &Block) -> Value {
    match block {
        Block::Text(_) => json!({"type": "text", "text": ""}),
        Block::Reasoning(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
        Block::Call { id, name, .. } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
    }
}

fn whole_block(block: &Block) -> JsonValue {
    let mut value = JsonValue::from(empty_block(block));
    match block {
        Block::Text(text) => value["text"] = text.as_str().into(),
        Block::Reasoning(text) => value["thinking"] = text.as_str().into(),
        Block::Call { arguments, .. } => value["input"] = parsed(arguments),
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_keeps_its_numbers() {
        let arguments = r#"{"id":123456789012345678901,"share":0.12345678901234567890}"#.to_string();
        let block = whole_block(&Block::Call { id: "c".to_string(), name: "f".to_string(), arguments });
        let expected = r#"{"type":"tool_use","id":"c","name":"f","input":{"id":123456789012345678901,"share":0.12345678901234567890}}"#;
        assert_eq!(block.to_string(), expected);
    }
}
