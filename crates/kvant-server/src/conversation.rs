//! Conversations as requests have them, and the prompts that the model's template makes of them.

use std::sync::Arc;

use axum::extract::State;
use kvant_engine::{CompiledGrammar, EngineRequest};
use kvant_models::chat::{ChatRole, ChatTemplate, Conversation, Message, ReplyFormat, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    answer::AnswerReader,
    app::{App, tokenized},
    body::Json,
    error::{ApiError, Result},
    structured::{Shape, Thoughts},
};

/// A message in OpenAI's form.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatMessage {
    pub role: String,
    pub content: Option<Value>,
    pub name: Option<String>,
    pub tool_calls: Option<Vec<ToolCall>>,
    pub tool_call_id: Option<String>,
    pub reasoning_content: Option<String>,
    /// Another name of the same.
    pub reasoning: Option<String>,
    /// An earlier answer of other models.
    pub refusal: Option<String>,
}

/// A conversation to answer.
#[derive(Debug, Default)]
pub(crate) struct Talk {
    pub messages: Vec<Message>,
    pub tools: Vec<Value>,
    pub variables: Map<String, Value>,
    pub thinking: Option<bool>,
    pub generation_prompt: bool,
    pub shape: Shape,
}

/// The ids of a conversation, and how its answer is read.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub ids: Vec<u32>,
    pub reader: AnswerReader,
    /// Whether the answer's text needs the names of special tokens.
    has_marks: bool,
    /// The form of the answer.
    grammar: Option<CompiledGrammar>,
}

impl Prompt {
    /// A request that continues the prompt.
    pub fn request(&self) -> EngineRequest {
        let request = EngineRequest::new(self.ids.clone()).special_tokens(self.has_marks);
        self.grammar.clone().map_or(request.clone(), |grammar| request.grammar(grammar))
    }
}

/// The last tokens of a prompt, which can open thoughts.
const TAIL: usize = 32;

/// Messages in OpenAI's form as templates need them.
pub(crate) fn messages(app: &App, messages: Vec<ChatMessage>) -> Result<Vec<Message>> {
    let most = app.options.messages;
    if !(1..=most).contains(&messages.len()) {
        let message = format!("`messages` must have 1 to {most} elements, got {}", messages.len());
        return Err(ApiError::field("messages", message));
    }
    messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| message.into_message(&format!("messages[{index}]")))
        .collect()
}

impl ChatMessage {
    fn into_message(self, path: &str) -> Result<Message> {
        let role = match self.role.as_str() {
            // Templates know `system`, and treat it alike where they know both.
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
        let calls = self.tool_calls.unwrap_or_default();
        only(!calls.is_empty(), "tool_calls", ChatRole::Assistant)?;
        only(self.tool_call_id.is_some(), "tool_call_id", ChatRole::Tool)?;
        let text = self.content.map(|content| content_text(&content, &format!("{path}.content"))).transpose()?;
        let text = text.or(self.refusal);
        if text.is_none() && calls.is_empty() {
            return Err(ApiError::field(format!("{path}.content"), format!("`{path}.content` is needed")));
        }
        let mut message = Message::new(role, text.clone().unwrap_or_default());
        message.content = text.map(Into::into);
        message.reasoning_content = self.reasoning_content.or(self.reasoning);
        only(message.reasoning_content.is_some(), "reasoning_content", ChatRole::Assistant)?;
        message.tool_calls = calls;
        message.tool_calls.iter_mut().for_each(|call| call.function.parse_arguments());
        message.tool_call_id = self.tool_call_id;
        message.name = self.name;
        Ok(message)
    }
}

/// The text of a content: a string, or parts of text.
pub(crate) fn content_text(content: &Value, path: &str) -> Result<String> {
    let invalid = |path: String, what: &str| Err(ApiError::field(path.clone(), format!("`{path}` must be {what}")));
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let mut all = String::new();
            for (index, part) in parts.iter().enumerate() {
                let path = format!("{path}[{index}]");
                match part["type"].as_str() {
                    Some("text" | "input_text" | "output_text") => {}
                    Some(other) => {
                        let what =
                            format!("the model reads text only, got {:?}", other.chars().take(32).collect::<String>());
                        return Err(ApiError::unsupported(path, &what));
                    }
                    None => return invalid(path, "an object with `type`"),
                }
                let Some(text) = part["text"].as_str() else { return invalid(format!("{path}.text"), "a string") };
                all.push_str(text);
            }
            Ok(all)
        }
        _ => invalid(path.to_string(), "a string or a list of parts"),
    }
}

/// Checks tools in OpenAI's form: `{"type": "function", "function": {"name", "description"?, "parameters"?}}`.
pub(crate) fn check_tools(app: &App, tools: &[Value]) -> Result<()> {
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
        if !function["parameters"].is_object() && !function["parameters"].is_null() {
            let path = format!("{path}.function.parameters");
            return Err(ApiError::field(&path, format!("`{path}` must be a JSON schema")));
        }
    }
    Ok(())
}

fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
}

impl Talk {
    /// The prompt of a conversation, made by the model's template.
    ///
    /// Rendering and tokenising take long for long conversations: not for a thread of the runtime.
    pub fn prompt(&self, app: &App) -> Result<Prompt> {
        let (template, tokenizer) = (template(app)?, app.engine.tokenizer());
        // Names of special tokens in texts of users stay text.
        let ids = tokenized("messages", template.encode(&self.conversation(), tokenizer))?;
        let tail = &ids[ids.len().saturating_sub(TAIL)..];
        let tail = tokenized("messages", tokenizer.decode_with_special(tail))?;
        let family = template.reply_format();
        let format = self.shape.read_as(family);
        let reader = AnswerReader::new(format, &tail);
        let thoughts = match AnswerReader::new(family, &tail).is_reasoning {
            true => Thoughts::Open,
            false if self.thinking == Some(false) => Thoughts::Never,
            false => Thoughts::Allowed,
        };
        let grammar = self.shape.compile(app, family, thoughts)?;
        Ok(Prompt { ids, reader, has_marks: format != ReplyFormat::Plain, grammar })
    }

    fn conversation(&self) -> Conversation<'_> {
        let mut conversation =
            Conversation::new(&self.messages).tools(&self.tools).generation_prompt(self.generation_prompt);
        if let Some(on) = self.thinking {
            conversation = conversation.thinking(on);
        }
        for (name, value) in &self.variables {
            conversation = conversation.variable(name, value.clone());
        }
        conversation
    }
}

fn template(app: &App) -> Result<&ChatTemplate> {
    app.template.as_ref().ok_or_else(|| {
        let message = "the model has no chat template, so it cannot answer conversations: use /v1/completions, or start the \
                       server with --chat-template FILE";
        ApiError { code: Some("no_chat_template"), ..ApiError::field("messages", message) }
    })
}

#[derive(Debug, Deserialize)]
pub(crate) struct TemplateRequest {
    model: Option<String>,
    messages: Vec<ChatMessage>,
    tools: Option<Vec<Value>>,
    chat_template_kwargs: Option<Map<String, Value>>,
    add_generation_prompt: Option<bool>,
}

/// `/apply-template`: the prompt of a conversation, as a text.
pub(crate) async fn apply_template(
    State(app): State<Arc<App>>,
    Json(request): Json<TemplateRequest>,
) -> Result<Json<Value>> {
    app.model(request.model.as_deref())?;
    let tools = request.tools.unwrap_or_default();
    check_tools(&app, &tools)?;
    let talk = Talk {
        messages: messages(&app, request.messages)?,
        tools,
        variables: request.chat_template_kwargs.unwrap_or_default(),
        generation_prompt: request.add_generation_prompt.unwrap_or(true),
        ..Talk::default()
    };
    let text = app.blocking(move |app| tokenized("messages", template(app)?.render(&talk.conversation()))).await??;
    Ok(Json(json!({"prompt": text})))
}
