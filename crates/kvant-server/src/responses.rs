//! `/v1/responses`: text, tools and streams in the format of OpenAI's responses, which can continue earlier ones.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Extension,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use kvant_engine::Finished;
use kvant_models::chat::{ChatRole, JsonValue, Message};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    answer::AnswerReader,
    app::{App, RequestId},
    blocks::{Block, Blocks},
    body::Json,
    conversation::{ChatRequest, content_text, sent_call, thinking},
    error::{ApiError, Result},
    fields::{only_fields, string},
    generation::{Generation, Gone, Sender, TokenUsage, channel, event_stream, finish_reason},
    ids::{now, random_id},
    keys,
    sampling::{SamplingFields, TokenLimit, sampling_request},
    serving::Serving,
    structured::OutputConstraint,
    tools::chosen_tools,
};

sampling_request! {
    struct ResponsesRequest {
        model: Option<String>,
        input: JsonValue,
        instructions: Option<String>,
        max_output_tokens: Option<TokenLimit>,
        stream: Option<bool>,
        tools: Option<Vec<JsonValue>>,
        tool_choice: Option<Value>,
        parallel_tool_calls: Option<bool>,
        reasoning: Option<Map<String, Value>>,
        text: Option<TextOptions>,
        include: Option<Vec<String>>,
        store: Option<bool>,
        previous_response_id: Option<String>,
        background: Option<bool>,
        truncation: Option<String>,
        service_tier: Option<String>,
        metadata: Option<Map<String, Value>>,
        // The following fields have no effect on the answer.
        #[expect(dead_code, reason = "has no effect")]
        user: Option<String>,
        #[expect(dead_code, reason = "has no effect")]
        safety_identifier: Option<String>,
        #[expect(dead_code, reason = "has no effect")]
        prompt_cache_key: Option<String>,
    }
}

/// Prefixes of tool types that run on OpenAI's servers.
const HOSTED: [&str; 4] = ["web_search", "file_search", "code_interpreter", "image_generation"];

#[derive(Debug, Default, Deserialize)]
pub(crate) struct TextOptions {
    format: Option<JsonValue>,
    verbosity: Option<String>,
}

/// Data shared by all events of an answer.
struct ResponseAnswer {
    /// The response without output.
    object: JsonValue,
    reader: AnswerReader,
    blocks: Blocks,
    /// The id of each block.
    ids: Vec<String>,
    /// The sequence number of the next event.
    sequence: u64,
    /// The conversation to keep when the answer ends.
    keep: Option<Keep>,
}

/// A conversation to keep.
struct Keep {
    app: Arc<App>,
    owner: Vec<u8>,
    /// Without the instructions: later requests bring their own.
    messages: Vec<Message>,
}

pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    Json(mut request): Json<ResponsesRequest>,
) -> Result<Response> {
    let sampling = request.sampling_fields();
    let app = Serving::of(&app, request.model.as_deref()).await?;
    let model = app.name.clone();
    check_fixed(&app, &request)?;
    let object = describe(&app, &request, &sampling, &model);
    let tools = request.tools.take().map(|tools| own_tools(&app, tools, request.tool_choice.as_ref()));
    let format = request.text.as_ref().and_then(|text| text.format.as_ref());
    let shape = OutputConstraint::of_format(format, "text.format", None)?;
    let (tools, shape) = chosen_tools(&app, tools, request.tool_choice.as_ref(), shape)?;
    let mut variables = BTreeMap::new();
    let thinking = thinking(effort(request.reasoning.as_ref())?, &mut variables)?;
    let owner = keys::key(&headers).unwrap_or_default().to_vec();
    let earlier = request.previous_response_id.as_ref().map(|id| earlier(&app, &owner, id)).transpose()?;
    let messages = messages(&app, &request, earlier.as_deref().unwrap_or_default())?;
    let is_kept = request.store != Some(false) && app.store.is_on();
    let instructions = usize::from(request.instructions.is_some());
    let keep = || Keep { app: Arc::clone(app.app()), owner, messages: messages[instructions..].to_vec() };
    let keep = is_kept.then(keep);
    let one_call = request.parallel_tool_calls == Some(false);
    let chat = ChatRequest {
        messages,
        tools,
        variables,
        thinking,
        shape,
        one_call,
        generation_prompt: true,
        ..ChatRequest::default()
    };
    let prompt = app.encoding(chat.bytes(), move |app| chat.prompt(app)).await?;
    let prompt = prompt.map_err(|error| error.renamed("messages", "input"))?;

    let asked = request.max_output_tokens.map(|TokenLimit(limit)| limit);
    let max_tokens = app.max_tokens(asked, app.model.engine.context());
    let base = prompt.request().max_tokens(max_tokens).cache(app.scope(&headers, None));
    let generation = Generation::submit(&app, &id, vec![sampling.apply(base, &app)?]);
    let generation = generation.map_err(|error| error.of_prompt("input"))?;
    let answer =
        ResponseAnswer { object, reader: prompt.reader, blocks: Blocks::default(), ids: Vec::new(), sequence: 0, keep };
    if request.stream.unwrap_or(false) {
        let events = channel(move |sender| answer.stream(generation, sender));
        return Ok(event_stream(&app, events));
    }
    Ok(Json(answer.collect(generation).await?).into_response())
}

/// Checks the fields for which the server supports only one value.
fn check_fixed(app: &App, request: &ResponsesRequest) -> Result<()> {
    let strict = app.options.strict_fields;
    let text = request.text.as_ref();
    let verbosity = text.and_then(|text| text.verbosity.as_deref());
    let mut included = request.include.iter().flatten();
    let refused = [
        ("text.verbosity", strict && !matches!(verbosity, None | Some("medium"))),
        // The other values are outputs of hosted tools and stored reasoning, which the server does not have.
        ("include", included.any(|part| strict || part == "message.output_text.logprobs")),
        ("background", request.background == Some(true)),
        ("truncation", !matches!(request.truncation.as_deref(), None | Some("disabled"))),
        ("service_tier", strict && !matches!(request.service_tier.as_deref(), None | Some("auto" | "default"))),
    ];
    match refused.iter().find(|(_, is_asked)| *is_asked) {
        Some((field, _)) => Err(ApiError::unsupported(*field, "only its default value is")),
        None => Ok(()),
    }
}

fn effort(reasoning: Option<&Map<String, Value>>) -> Result<Option<String>> {
    let Some(reasoning) = reasoning else { return Ok(None) };
    let mut effort = None;
    for (key, value) in reasoning.iter().filter(|(_, value)| !value.is_null()) {
        match (key.as_str(), value.as_str()) {
            ("effort", Some(word)) => effort = Some(word.to_string()),
            ("summary" | "generate_summary", Some("auto" | "concise" | "detailed")) => {}
            _ => return Err(ApiError::unsupported(format!("reasoning.{key}"), "only `effort`")),
        }
    }
    Ok(effort)
}

/// Converts tools to the format of chat completions. Tools that run on OpenAI's servers are dropped unless the model
/// must call them.
fn own_tools(app: &App, tools: Vec<JsonValue>, choice: Option<&Value>) -> Vec<JsonValue> {
    let is_free = !app.options.strict_fields && choice.is_none_or(|choice| choice == "auto" || choice == "none");
    let is_hosted = |tool: &JsonValue| {
        let kind = tool["type"].as_str().unwrap_or_default();
        HOSTED.iter().any(|hosted| kind.starts_with(hosted))
    };
    tools.into_iter().filter(|tool| !(is_free && is_hosted(tool))).map(nested).collect()
}

/// Converts a tool from the format of responses to that of chat completions.
fn nested(mut function: JsonValue) -> JsonValue {
    let Some(fields) = function.as_object_mut() else { return function };
    let mut tool = JsonValue::default();
    tool["type"] = fields.shift_remove("type").unwrap_or_default();
    tool["function"] = function;
    tool
}

/// The conversation up to an earlier response.
fn earlier(app: &App, owner: &[u8], id: &str) -> Result<Arc<[Message]>> {
    app.store.get(owner, id).ok_or_else(|| {
        let id: String = id.chars().take(64).collect();
        let message = format!("there is no response {id:?}: it is too old, was not stored, or belongs to another key");
        ApiError { code: Some("previous_response_not_found"), ..ApiError::field("previous_response_id", message) }
    })
}

fn messages(app: &App, request: &ResponsesRequest, earlier: &[Message]) -> Result<Vec<Message>> {
    let mut messages: Vec<Message> = request.instructions.iter().map(|text| Message::system(text.as_str())).collect();
    messages.extend_from_slice(earlier);
    match &request.input {
        JsonValue::String(text) => messages.push(Message::user(text.as_str())),
        JsonValue::Array(items) if (1..=app.options.messages).contains(&items.len()) => {
            for (index, item) in items.iter().enumerate() {
                add_item(&mut messages, item, &format!("input[{index}]"))?;
            }
        }
        _ => {
            let message = format!("`input` must be a string or a list of 1 to {} items", app.options.messages);
            return Err(ApiError::field("input", message));
        }
    }
    let max = app.options.messages;
    if messages.len() > max {
        let message =
            format!("`input` and the conversation before it must have at most {max} messages, got {}", messages.len());
        return Err(ApiError::field("input", message));
    }
    Ok(messages)
}

/// Adds an item of the input. Fields that only items of answers have are accepted. Reasoning and calls belong to the
/// preceding message of the model.
fn add_item(messages: &mut Vec<Message>, item: &JsonValue, path: &str) -> Result<()> {
    let only = |known: &[&str]| only_fields(item, path, &[known, &["type", "id", "status"]].concat());
    match item["type"].as_str().unwrap_or("message") {
        "message" => {
            only(&["role", "content", "phase"])?;
            let role = match string(item, path, "role")? {
                "system" | "developer" => ChatRole::System,
                "user" => ChatRole::User,
                "assistant" => ChatRole::Assistant,
                _ => {
                    let message = format!("`{path}.role` must be system, developer, user or assistant");
                    return Err(ApiError::field(format!("{path}.role"), message));
                }
            };
            let text = content_text(&item["content"], &format!("{path}.content"))?;
            match messages.last_mut().filter(|last| role == ChatRole::Assistant && is_open(last)) {
                Some(last) => last.content = Some(text.into()),
                None => messages.push(Message::new(role, text)),
            }
        }
        "reasoning" => {
            only(&["content", "summary", "encrypted_content"])?;
            // A model with hidden reasoning has only summaries.
            let texts = |field: &str| -> String {
                let parts = item[field].as_array().into_iter().flatten();
                parts.filter_map(|part| part["text"].as_str()).collect()
            };
            let reasoning = Some(texts("content")).filter(|text| !text.is_empty()).unwrap_or_else(|| texts("summary"));
            messages.push(Message::assistant("").reasoning(reasoning));
        }
        "function_call" => {
            only(&["call_id", "name", "arguments", "parsed_arguments", "namespace", "caller"])?;
            let (id, name) = (string(item, path, "call_id")?, string(item, path, "name")?);
            let call = sent_call(id, name.to_string(), string(item, path, "arguments")?.into());
            match messages.last_mut().filter(|last| last.role == ChatRole::Assistant) {
                Some(last) => last.tool_calls.push(call),
                None => messages.push(Message::assistant("").tool_calls(vec![call])),
            }
        }
        "function_call_output" => {
            only(&["call_id", "output"])?;
            let text = content_text(&item["output"], &format!("{path}.output"))?;
            messages.push(Message::tool(string(item, path, "call_id")?, text));
        }
        other => {
            let other: String = other.chars().take(32).collect();
            return Err(ApiError::unsupported(format!("{path}.type"), &format!("no items of type {other:?}")));
        }
    }
    Ok(())
}

/// Whether a message has only reasoning.
fn is_open(message: &Message) -> bool {
    let is_empty = message.content.as_ref().is_none_or(|content| content.text().is_empty());
    message.role == ChatRole::Assistant
        && message.reasoning_content.is_some()
        && is_empty
        && message.tool_calls.is_empty()
}

/// The response before it has output.
fn describe(app: &Serving, request: &ResponsesRequest, sampling: &SamplingFields, model: &str) -> JsonValue {
    let default = &app.model.sampling;
    let max_output_tokens =
        request.max_output_tokens.map(|TokenLimit(limit)| limit).filter(|&limit| limit < usize::MAX);
    let object = json!({
        "id": random_id("resp_"), "object": "response", "created_at": now(), "status": "in_progress",
        "background": false, "error": null, "incomplete_details": null, "instructions": request.instructions,
        "max_output_tokens": max_output_tokens, "metadata": request.metadata.clone().unwrap_or_default(),
        "model": model, "output": [],
        "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true), "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning.as_ref().and_then(|r| r.get("effort")), "summary": null},
        "store": request.store != Some(false) && app.store.is_on(), "temperature": sampling.temperature.unwrap_or(default.temperature), "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice.clone().unwrap_or(json!("auto")),
        "tools": [], "top_p": sampling.top_p.unwrap_or(default.top_p),
        "truncation": "disabled", "usage": null, "user": null,
    });
    let mut object = JsonValue::from(object);
    object["tools"] = JsonValue::Array(request.tools.clone().unwrap_or_default());
    object
}

impl ResponseAnswer {
    async fn collect(mut self, mut generation: Generation) -> Result<JsonValue> {
        let mut end = None;
        while let Some(event) = generation.next().await {
            let added = self.reader.read(event?.1);
            for part in added.parts {
                self.add(part);
            }
            end = added.finished.or(end);
        }
        self.keep();
        Ok(self.complete(end.as_ref()))
    }

    /// Keeps the conversation, including the answer.
    fn keep(&mut self) {
        if let (Some(Keep { app, owner, mut messages }), Some(id)) = (self.keep.take(), self.object["id"].as_str()) {
            messages.push(self.blocks.message());
            app.store.insert(&owner, id, messages);
        }
    }

    /// Adds a part. A new block gets an id.
    fn add(&mut self, part: crate::answer::Part) -> crate::blocks::Change {
        let change = self.blocks.add(part);
        if change.is_new {
            let prefix = match self.blocks.0.last() {
                Some(Block::Reasoning(_)) => "rs_",
                Some(Block::Call { .. }) => "fc_",
                _ => "msg_",
            };
            self.ids.push(random_id(prefix));
        }
        change
    }

    /// The finished response.
    fn complete(&self, end: Option<&Finished>) -> JsonValue {
        let mut object = self.object.clone();
        let items = (0..self.blocks.0.len()).map(|index| self.item(index, "completed").into());
        object["output"] = JsonValue::Array(items.collect());
        if let Some(end) = end {
            let is_complete = finish_reason(&end.reason) == "stop";
            object["status"] = if is_complete { "completed" } else { "incomplete" }.into();
            if !is_complete {
                object["incomplete_details"] = json!({"reason": "max_output_tokens"}).into();
            }
            let mut usage = TokenUsage::default();
            usage.add(end.usage, true);
            object["usage"] = json!({
                "input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.generated,
                "output_tokens_details": {"reasoning_tokens": self.reader.reasoning_tokens},
                "total_tokens": usage.prompt + usage.generated,
            })
            .into();
        }
        object
    }

    fn item(&self, index: usize, status: &str) -> Value {
        let id = &self.ids[index];
        let is_done = status == "completed";
        let content = if is_done { vec![self.content(index, is_done)] } else { Vec::new() };
        match &self.blocks.0[index] {
            Block::Text(_) => {
                json!({"id": id, "type": "message", "role": "assistant", "status": status, "content": content})
            }
            Block::Reasoning(_) => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
            Block::Call { id: call_id, name, arguments } => {
                let arguments = if is_done { arguments.as_str() } else { "" };
                json!({
                    "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                    "arguments": arguments,
                })
            }
        }
    }

    /// The content part with the text of a block.
    fn content(&self, index: usize, is_done: bool) -> Value {
        let text = |text: &str| if is_done { text.to_string() } else { String::new() };
        match &self.blocks.0[index] {
            Block::Text(all) => json!({"type": "output_text", "text": text(all), "annotations": [], "logprobs": []}),
            Block::Reasoning(all) => json!({"type": "reasoning_text", "text": text(all)}),
            Block::Call { .. } => Value::Null,
        }
    }

    async fn stream(mut self, mut generation: Generation, sender: Sender) -> Result<(), Gone> {
        for kind in ["response.created", "response.in_progress"] {
            let object = self.object.clone();
            self.send_response(&sender, kind, object).await?;
        }
        let mut end = None;
        while let Some(event) = generation.next().await {
            let event = match event {
                Ok((_, event)) => event,
                Err(error) => return self.fail(&sender, &error).await,
            };
            let added = self.reader.read(event);
            for part in added.parts {
                let change = self.add(part);
                let index = self.blocks.last();
                if change.is_new {
                    if index > 0 {
                        self.close(&sender, index - 1).await?;
                    }
                    self.open(&sender, index).await?;
                }
                let (kind, mut event) = (self.kind(index, "delta"), self.place(index));
                event["delta"] = json!(change.delta);
                if !change.delta.is_empty() {
                    self.send(&sender, kind, event).await?;
                }
            }
            end = added.finished.or(end);
        }
        if !self.blocks.0.is_empty() {
            self.close(&sender, self.blocks.last()).await?;
        }
        self.keep();
        let response = self.complete(end.as_ref());
        let kind = if response["status"] == "completed" { "response.completed" } else { "response.incomplete" };
        self.send_response(&sender, kind, response).await
    }

    async fn fail(&mut self, sender: &Sender, error: &ApiError) -> Result<(), Gone> {
        let mut response = self.complete(None);
        response["status"] = "failed".into();
        response["error"] = json!({"code": error.code.unwrap_or("server_error"), "message": error.message}).into();
        self.send_response(sender, "response.failed", response).await
    }

    async fn open(&mut self, sender: &Sender, index: usize) -> Result<(), Gone> {
        let added = json!({"output_index": index, "item": self.item(index, "in_progress")});
        self.send(sender, "response.output_item.added", added).await?;
        if matches!(self.blocks.0[index], Block::Call { .. }) {
            return Ok(());
        }
        let mut event = self.place(index);
        event["part"] = self.content(index, false);
        self.send(sender, "response.content_part.added", event).await
    }

    async fn close(&mut self, sender: &Sender, index: usize) -> Result<(), Gone> {
        let (kind, mut event) = (self.kind(index, "done"), self.place(index));
        match &self.blocks.0[index] {
            Block::Text(text) | Block::Reasoning(text) => event["text"] = json!(text),
            Block::Call { arguments, name, .. } => {
                event["arguments"] = json!(arguments);
                event["name"] = json!(name);
            }
        }
        self.send(sender, kind, event).await?;
        if !matches!(self.blocks.0[index], Block::Call { .. }) {
            let mut event = self.place(index);
            event["part"] = self.content(index, true);
            self.send(sender, "response.content_part.done", event).await?;
        }
        let done = json!({"output_index": index, "item": self.item(index, "completed")});
        self.send(sender, "response.output_item.done", done).await
    }

    /// The name of a text event of a block.
    fn kind(&self, index: usize, what: &str) -> &'static str {
        match (&self.blocks.0[index], what) {
            (Block::Text(_), "delta") => "response.output_text.delta",
            (Block::Text(_), _) => "response.output_text.done",
            (Block::Reasoning(_), "delta") => "response.reasoning_text.delta",
            (Block::Reasoning(_), _) => "response.reasoning_text.done",
            (Block::Call { .. }, "delta") => "response.function_call_arguments.delta",
            (Block::Call { .. }, _) => "response.function_call_arguments.done",
        }
    }

    /// The fields that locate a text.
    fn place(&self, index: usize) -> Value {
        let mut event = json!({"item_id": self.ids[index], "output_index": index});
        if !matches!(self.blocks.0[index], Block::Call { .. }) {
            event["content_index"] = json!(0);
        }
        if matches!(self.blocks.0[index], Block::Text(_)) {
            event["logprobs"] = json!([]);
        }
        event
    }

    async fn send_response(&mut self, sender: &Sender, kind: &str, response: JsonValue) -> Result<(), Gone> {
        let mut event = JsonValue::default();
        event["response"] = response;
        self.send(sender, kind, event).await
    }

    async fn send(&mut self, sender: &Sender, kind: &str, event: impl Into<JsonValue>) -> Result<(), Gone> {
        let mut event = event.into();
        event["type"] = kind.into();
        event["sequence_number"] = json!(self.sequence).into();
        self.sequence += 1;
        sender.named(kind, &event).await
    }
}
