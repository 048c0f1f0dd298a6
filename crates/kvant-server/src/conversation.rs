//! Conversations in requests, and the prompts that the model's template makes of them.

use std::{collections::BTreeMap, sync::Arc};

use axum::extract::State;
use kvant_engine::{CompiledGrammar, EngineRequest};
use kvant_models::chat::{ChatRole, ChatTemplate, Content, Conversation, JsonValue, Message, ReplyFormat, ToolCall};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    answer::AnswerReader,
    app::App,
    body::Json,
    calls::Reasoning,
    error::{ApiError, Result},
    fields::{only_fields, string},
    serving::{Serving, tokenized},
    structured::OutputConstraint,
    tools::check_tools,
};

/// A message in OpenAI's format.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatMessage {
    pub role: String,
    pub content: Option<JsonValue>,
    pub name: Option<String>,
    pub tool_calls: Option<Vec<SentCall>>,
    pub tool_call_id: Option<String>,
    pub reasoning_content: Option<String>,
    /// Another name of `reasoning_content`.
    pub reasoning: Option<String>,
    /// The refusal in an earlier answer of another model.
    pub refusal: Option<String>,
    // Sources of an earlier answer, and its content as parsed by clients.
    #[expect(dead_code, reason = "has no effect")]
    pub annotations: Option<Vec<JsonValue>>,
    #[expect(dead_code, reason = "has no effect")]
    pub parsed: Option<JsonValue>,
}

/// A call in an earlier answer.
#[derive(Debug, Deserialize)]
pub(crate) struct SentCall {
    id: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    function: SentFunction,
    /// The index of the call in a stream, which clients keep.
    #[expect(dead_code, reason = "has no effect")]
    index: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct SentFunction {
    name: String,
    /// JSON in a string, or an object.
    arguments: JsonValue,
    #[expect(dead_code, reason = "has no effect")]
    parsed_arguments: Option<JsonValue>,
}

/// A conversation to answer.
#[derive(Debug, Default)]
pub(crate) struct ChatRequest {
    pub messages: Vec<Message>,
    pub tools: Vec<JsonValue>,
    pub variables: BTreeMap<String, JsonValue>,
    pub thinking: Option<bool>,
    pub generation_prompt: bool,
    /// Whether the answer continues the last message.
    pub continues: bool,
    pub shape: OutputConstraint,
    /// Whether the answer ends after its first call.
    pub one_call: bool,
}

/// The ids of a conversation, and the format of its answer.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub ids: Vec<u32>,
    pub reader: AnswerReader,
    /// Whether the text of the answer must show the names of special tokens.
    has_marks: bool,
    /// The format of the answer.
    grammar: Option<CompiledGrammar>,
}

impl Prompt {
    /// A request that continues the prompt.
    pub fn request(&self) -> EngineRequest {
        let request = EngineRequest::new(self.ids.clone()).special_tokens(self.has_marks);
        self.grammar.clone().map_or(request.clone(), |grammar| request.grammar(grammar))
    }
}

/// Tokens at the end of a prompt that are searched for the start of reasoning.
const TAIL: usize = 32;

/// Converts messages from OpenAI's format to the format of templates.
pub(crate) fn messages(app: &App, messages: Vec<ChatMessage>) -> Result<Vec<Message>> {
    let max = app.options.messages;
    if !(1..=max).contains(&messages.len()) {
        let message = format!("`messages` must have 1 to {max} elements, got {}", messages.len());
        return Err(ApiError::field("messages", message));
    }
    messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| message.into_message(&format!("messages[{index}]")))
        .collect()
}

impl ChatMessage {
    pub fn new(role: String, content: Option<JsonValue>) -> ChatMessage {
        ChatMessage {
            role,
            content,
            name: None,
            tool_calls: None,
            tool_call_id: None,
            reasoning_content: None,
            reasoning: None,
            refusal: None,
            annotations: None,
            parsed: None,
        }
    }

    fn into_message(self, path: &str) -> Result<Message> {
        let role = match self.role.as_str() {
            // All templates know `system`; a template that also knows `developer` treats both alike.
            "system" | "developer" => ChatRole::System,
            "user" => ChatRole::User,
            "assistant" => ChatRole::Assistant,
            "tool" => ChatRole::Tool,
            other => {
                let other: String = other.chars().take(32).collect();
                let known = "system, developer, user, assistant or tool";
                return Err(ApiError::field(
                    format!("{path}.role"),
                    format!("`{path}.role` must be {known}, got {other:?}"),
                ));
            }
        };
        let only = |has: bool, field: &str, of: ChatRole| match has && role != of {
            true => Err(ApiError::field(format!("{path}.{field}"), format!("`{path}.{field}` is not for this role"))),
            false => Ok(()),
        };
        let calls = self.tool_calls.unwrap_or_default().into_iter().enumerate();
        let calls = calls.map(|(index, call)| call.into_call(&format!("{path}.tool_calls[{index}]")));
        let calls = calls.collect::<Result<Vec<_>>>()?;
        only(!calls.is_empty(), "tool_calls", ChatRole::Assistant)?;
        only(self.tool_call_id.is_some(), "tool_call_id", ChatRole::Tool)?;
        let text = self.content.map(|content| content_text(&content, &format!("{path}.content"))).transpose()?;
        let text = text.or(self.refusal);
        let reasoning = self.reasoning_content.or(self.reasoning);
        only(reasoning.is_some(), "reasoning_content", ChatRole::Assistant)?;
        if text.is_none() && calls.is_empty() && reasoning.is_none() {
            return Err(ApiError::field(format!("{path}.content"), format!("`{path}.content` is needed")));
        }
        // Many templates concatenate the content with strings, which fails for null.
        let mut message = Message::new(role, text.unwrap_or_default()).tool_calls(calls);
        message.reasoning_content = reasoning;
        message.tool_call_id = self.tool_call_id;
        message.name = self.name;
        Ok(message)
    }
}

impl SentCall {
    fn into_call(self, path: &str) -> Result<ToolCall> {
        if !matches!(self.kind.as_deref(), None | Some("function")) {
            return Err(ApiError::unsupported(format!("{path}.type"), "only calls of functions"));
        }
        let mut call = sent_call("", self.function.name, self.function.arguments);
        call.id = self.id;
        Ok(call)
    }
}

/// A call in an earlier answer. Its arguments are an object, or JSON text of one. Empty arguments are an empty object.
pub(crate) fn sent_call(id: &str, name: String, arguments: JsonValue) -> ToolCall {
    let is_empty = arguments.is_null() || arguments.as_str().is_some_and(|text| text.trim().is_empty());
    let arguments = if is_empty { json!({}).into() } else { arguments };
    let mut call = ToolCall::new(id, name, arguments);
    call.function.parse_arguments();
    call
}

/// Whether the answer continues the last message. The request can say so; otherwise it does if the last message is an
/// answer, as in llama.cpp.
fn continues(messages: &[Message], asked: Option<bool>, generation_prompt: Option<bool>) -> Result<bool> {
    let field = "continue_final_message";
    match (asked, generation_prompt) {
        (Some(true), Some(true)) => {
            Err(ApiError::field(field, format!("`{field}` and `add_generation_prompt` exclude each other")))
        }
        (Some(true), _) if !ends_with_answer(messages) => {
            let message = format!("`{field}` needs a message of the assistant without calls at the end of `messages`");
            Err(ApiError::field(field, message))
        }
        (Some(true), _) => Ok(true),
        (None, None) => Ok(ends_with_answer(messages)),
        _ => Ok(false),
    }
}

/// Whether the last message is an answer that can be continued.
pub(crate) fn ends_with_answer(messages: &[Message]) -> bool {
    messages.last().is_some_and(|last| last.role == ChatRole::Assistant && last.tool_calls.is_empty())
}

/// Fields of text parts, in requests and in answers that clients send back.
const TEXT_FIELDS: [&str; 10] =
    ["type", "text", "refusal", "annotations", "citations", "logprobs", "cache_control", "parsed", "id", "index"];

/// The text of a content field: a string, or a list of text parts.
pub(crate) fn content_text(content: &JsonValue, path: &str) -> Result<String> {
    let invalid = |what: &str| Err(ApiError::field(path, format!("`{path}` must be {what}")));
    match content {
        JsonValue::String(text) => Ok(text.clone()),
        JsonValue::Array(parts) => {
            let parts = parts.iter().enumerate().map(|(index, part)| part_text(part, &format!("{path}[{index}]")));
            parts.collect()
        }
        _ => invalid("a string or a list of parts"),
    }
}

fn part_text<'p>(part: &'p JsonValue, path: &str) -> Result<&'p str> {
    let field = match part["type"].as_str() {
        Some("text" | "input_text" | "output_text") => "text",
        // A refusal by another model.
        Some("refusal") => "refusal",
        Some(other) => {
            let other: String = other.chars().take(32).collect();
            return Err(ApiError::unsupported(path, &format!("the model reads text only, got {other:?}")));
        }
        None => return Err(ApiError::field(path, format!("`{path}` must be an object with `type`"))),
    };
    only_fields(part, path, &TEXT_FIELDS)?;
    string(part, path, field)
}

/// Whether the model reasons before its answer. Some templates read the effort as a variable.
pub(crate) fn thinking(effort: Option<String>, variables: &mut BTreeMap<String, JsonValue>) -> Result<Option<bool>> {
    let Some(effort) = effort else { return Ok(None) };
    match effort.as_str() {
        "none" => Ok(Some(false)),
        "minimal" | "low" | "medium" | "high" | "xhigh" => {
            variables.entry("reasoning_effort".to_string()).or_insert(JsonValue::String(effort));
            Ok(Some(true))
        }
        _ => {
            let known = "none, minimal, low, medium, high or xhigh";
            Err(ApiError::field("reasoning_effort", format!("`reasoning_effort` must be {known}")))
        }
    }
}

impl ChatRequest {
    /// Bytes of text that the template receives.
    pub fn bytes(&self) -> usize {
        let of_json = |value: &JsonValue| value.to_string().len();
        let of_message = |message: &Message| {
            let content = message.content.as_ref().map_or(0, |content| content.text().len());
            let calls = message.tool_calls.iter().map(|call| of_json(&call.function.arguments)).sum::<usize>();
            content + message.reasoning_content.as_ref().map_or(0, String::len) + calls
        };
        let values = self.tools.iter().chain(self.variables.values()).map(of_json).sum::<usize>();
        self.messages.iter().map(of_message).sum::<usize>() + values
    }

    /// Creates a conversation whose answer is a new message, or continues the last one.
    pub fn new(
        messages: Vec<Message>,
        continues_last: Option<bool>,
        generation_prompt: Option<bool>,
    ) -> Result<ChatRequest> {
        let continues = continues(&messages, continues_last, generation_prompt)?;
        Ok(ChatRequest {
            messages,
            continues,
            generation_prompt: generation_prompt.unwrap_or(true),
            ..ChatRequest::default()
        })
    }

    /// Renders the prompt of a conversation with the model's template.
    ///
    /// Slow for long conversations: do not call it on a thread of the runtime.
    pub fn prompt(&self, app: &Serving) -> Result<Prompt> {
        let (template, tokenizer) = (template(app)?, app.model.engine.tokenizer());
        // Names of special tokens in user texts remain text.
        let encoded = template.encode_within(&self.conversation(), tokenizer, app.model.engine.context());
        let ids = tokenized("messages", encoded)?;
        let tail = &ids[ids.len().saturating_sub(TAIL)..];
        let tail = tokenized("messages", tokenizer.decode_with_special(tail))?;
        let family = template.reply_format();
        // The continuation of a message has no header.
        let is_rest = self.continues && family == ReplyFormat::Harmony;
        let written = if is_rest { ReplyFormat::Plain } else { family };
        let format = if self.shape.must_call() { self.shape.read_as(written) } else { family };
        let reader = self.reader(format, &tail).one_call(self.one_call).must_call(self.shape.must_call());
        let reasoning = match self.reader(family, &tail).is_reasoning {
            true => Reasoning::Open,
            false if self.continues || self.thinking == Some(false) => Reasoning::Never,
            false => Reasoning::Allowed,
        };
        let grammar = self.shape.compile(app, written, reasoning)?;
        Ok(Prompt { ids, reader, has_marks: format != ReplyFormat::Plain, grammar })
    }

    /// Creates the reader of an answer to a prompt that ends with `tail`.
    fn reader(&self, format: ReplyFormat, tail: &str) -> AnswerReader {
        let functions: Vec<&str> = self.shape.functions().collect();
        match self.messages.last().filter(|_| self.continues) {
            Some(begun) => {
                let begun = begun.content.as_ref().map(Content::text).unwrap_or_default();
                AnswerReader::continuing(format, &functions, &begun).tools(self.shape.tools())
            }
            None => AnswerReader::new(format, &functions, tail).tools(self.shape.tools()),
        }
    }

    fn conversation(&self) -> Conversation<'_> {
        let mut conversation = Conversation::new(&self.messages)
            .tools(&self.tools)
            .generation_prompt(self.generation_prompt)
            .continue_last(self.continues);
        if let Some(on) = self.thinking {
            conversation = conversation.thinking(on);
        }
        for (name, value) in &self.variables {
            conversation = conversation.variable(name, value.clone());
        }
        conversation
    }
}

fn template(app: &Serving) -> Result<&ChatTemplate> {
    app.model.template.as_ref().ok_or_else(|| {
        let message = "the model has no chat template, so it cannot answer conversations: use /v1/completions, or start the \
                       server with --chat-template FILE";
        ApiError { code: Some("no_chat_template"), ..ApiError::field("messages", message) }
    })
}

/// Template variables of a request. Names of other fields are refused: their values would bypass the checks of messages
/// and tools, and texts would become special tokens.
pub(crate) fn template_variables(
    variables: Option<BTreeMap<String, JsonValue>>,
) -> Result<BTreeMap<String, JsonValue>> {
    let variables = variables.unwrap_or_default();
    let is_taken = |name: &str| matches!(name, "messages" | "tools" | "strftime_now") || name.ends_with("_token");
    match variables.keys().find(|name| is_taken(name)) {
        Some(name) => Err(ApiError::field("chat_template_kwargs", format!("`{name}` is not a variable of requests"))),
        None => Ok(variables),
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct TemplateRequest {
    model: Option<String>,
    messages: Vec<ChatMessage>,
    tools: Option<Vec<JsonValue>>,
    chat_template_kwargs: Option<BTreeMap<String, JsonValue>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
}

/// `/apply-template`: renders the prompt of a conversation as text.
pub(crate) async fn apply_template(
    State(app): State<Arc<App>>,
    Json(request): Json<TemplateRequest>,
) -> Result<Json<Value>> {
    let app = Serving::of(&app, request.model.as_deref()).await?;
    let tools = request.tools.unwrap_or_default();
    check_tools(&app, &tools)?;
    let messages = messages(&app, request.messages)?;
    let chat = ChatRequest {
        tools,
        variables: template_variables(request.chat_template_kwargs)?,
        ..ChatRequest::new(messages, request.continue_final_message, request.add_generation_prompt)?
    };
    let text = app.blocking(move |app| tokenized("messages", template(app)?.render(&chat.conversation()))).await??;
    Ok(Json(json!({"prompt": text})))
}
