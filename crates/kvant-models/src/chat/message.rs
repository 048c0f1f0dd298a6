//! The messages of a conversation, in the format of OpenAI's chat completions.

use serde::{Deserialize, Serialize};

use super::JsonValue;

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ChatRole {
    /// Instructions for the whole conversation.
    System,
    /// Instructions, as newer models call them (gpt-oss).
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// The content of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// A text.
    Text(String),
    /// Parts, which the template concatenates.
    Parts(Vec<ContentPart>),
}

impl Content {
    /// The texts, concatenated.
    pub fn text(&self) -> String {
        match self {
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => parts.iter().map(|ContentPart::Text { text }| text.as_str()).collect(),
        }
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Content {
        Content::Text(text.to_string())
    }
}

impl From<String> for Content {
    fn from(text: String) -> Content {
        Content::Text(text)
    }
}

/// A part of a [`Content`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum ContentPart {
    /// A text.
    Text {
        /// The text.
        text: String,
    },
}

/// A message of a conversation.
///
/// ```
/// use kvant_models::chat::{Message, ChatRole};
/// let message: Message = serde_json::from_str(r#"{"role": "user", "content": "Hello"}"#)?;
/// assert_eq!(message, Message::user("Hello"));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Message {
    /// The author.
    pub role: ChatRole,
    /// The content. A message with tool calls needs none.
    #[serde(default)]
    pub content: Option<Content>,
    /// The model's reasoning before the content. Most templates drop the reasoning of earlier turns.
    #[serde(default, alias = "reasoning", alias = "thinking", skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The tool calls of the model.
    #[serde(default, deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The id of the call that a message of [`ChatRole::Tool`] answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of the author or of the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message with only a content.
    pub fn new(role: ChatRole, content: impl Into<Content>) -> Message {
        Message {
            role,
            content: Some(content.into()),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// A system message.
    pub fn system(content: impl Into<Content>) -> Message {
        Message::new(ChatRole::System, content)
    }

    /// A user's message.
    pub fn user(content: impl Into<Content>) -> Message {
        Message::new(ChatRole::User, content)
    }

    /// A model's answer.
    pub fn assistant(content: impl Into<Content>) -> Message {
        Message::new(ChatRole::Assistant, content)
    }

    /// The result of a tool call.
    pub fn tool(id: impl Into<String>, content: impl Into<Content>) -> Message {
        Message { tool_call_id: Some(id.into()), ..Message::new(ChatRole::Tool, content) }
    }

    /// Sets the reasoning.
    #[must_use]
    pub fn reasoning(self, reasoning: impl Into<String>) -> Message {
        Message { reasoning_content: Some(reasoning.into()), ..self }
    }

    /// Sets the tool calls.
    #[must_use]
    pub fn tool_calls(self, tool_calls: Vec<ToolCall>) -> Message {
        Message { tool_calls, ..self }
    }
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ToolCall {
    /// Always `function`.
    #[serde(rename = "type", default = "function")]
    pub kind: String,
    /// The id of the call, to which the result refers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The called function.
    pub function: FunctionCall,
}

/// A function and its arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// The name of the function.
    pub name: String,
    /// The arguments. Templates expect an object. OpenAI's clients send JSON text of an object, which
    /// [`FunctionCall::parse_arguments`] converts.
    pub arguments: JsonValue,
}

impl ToolCall {
    /// A call of a function.
    pub fn new(id: impl Into<String>, name: impl Into<String>, arguments: impl Into<JsonValue>) -> ToolCall {
        let function = FunctionCall { name: name.into(), arguments: arguments.into() };
        ToolCall { kind: self::function(), id: Some(id.into()), function }
    }
}

impl FunctionCall {
    /// Parses arguments that are JSON text of an object.
    pub fn parse_arguments(&mut self) {
        if let JsonValue::String(json) = &self.arguments
            && let Ok(object @ JsonValue::Object(_)) = JsonValue::parse(json)
        {
            self.arguments = object;
        }
    }
}

fn function() -> String {
    "function".to_string()
}

/// Some clients send `null` for no calls.
fn null_is_empty<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<ToolCall>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
