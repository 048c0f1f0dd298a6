//! Renders conversations to tokens.
//!
//! Names of special tokens that the template writes become these tokens; names in texts of users and tools remain text.
//! Before rendering, a marker is inserted after the first character of each name in a text. Segments between markers
//! are encoded separately, so no special token can span a marker.

use super::{ChatTemplate, Content, ContentPart, Conversation, JsonValue, Message, mark::free_mark};
use crate::{Error, Result, Tokenizer};

impl ChatTemplate {
    /// Converts a conversation to ids. As in transformers, they start with the beginning-of-text token if and only if
    /// the template writes it.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; `Tokenizer`; `Argument` if the texts contain all 254 markers.
    pub fn encode(&self, conversation: &Conversation, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        self.encode_within(conversation, tokenizer, usize::MAX)
    }

    /// Like [`ChatTemplate::encode`], for conversations of at most `limit` tokens. A text whose length alone exceeds
    /// the limit is rejected without tokenising it. The result of other texts can exceed the limit.
    ///
    /// # Errors
    /// As [`ChatTemplate::encode`]; `TooLong`.
    pub fn encode_within(&self, conversation: &Conversation, tokenizer: &Tokenizer, limit: usize) -> Result<Vec<u32>> {
        let marker = Marker::new(conversation, tokenizer)?;
        let messages: Vec<Message> = conversation.messages.iter().map(|message| marker.message(message)).collect();
        let tools: Vec<JsonValue> = conversation.tools.iter().map(|tool| marker.json(tool)).collect();
        let marked = Conversation { messages: &messages, tools, ..conversation.clone() };
        let text = self.render(&marked)?;
        let mut ids = Vec::new();
        let pieces = text.split(marker.mark).filter(|piece| !piece.is_empty());
        if limit != usize::MAX {
            let min_tokens = pieces.clone().map(|piece| tokenizer.min_tokens(piece)).sum();
            if min_tokens > limit {
                return Err(Error::TooLong { min_tokens, limit });
            }
        }
        for piece in pieces {
            ids.extend(tokenizer.encode(piece, false)?);
        }
        Ok(ids)
    }
}

struct Marker {
    mark: char,
    /// The names of special tokens.
    names: Vec<String>,
}

impl Marker {
    fn new(conversation: &Conversation, tokenizer: &Tokenizer) -> Result<Marker> {
        Ok(Marker { mark: free_mark(conversation.messages, &conversation.tools)?, names: tokenizer.special_names() })
    }

    fn text(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for (place, c) in text.char_indices() {
            out.push(c);
            if self.names.iter().any(|name| text[place..].starts_with(name.as_str())) {
                out.push(self.mark);
            }
        }
        out
    }

    fn message(&self, message: &Message) -> Message {
        let content = message.content.as_ref().map(|content| match content {
            Content::Text(text) => Content::Text(self.text(text)),
            Content::Parts(parts) => Content::Parts(
                parts.iter().map(|ContentPart::Text { text }| ContentPart::Text { text: self.text(text) }).collect(),
            ),
        });
        let optional = |text: &Option<String>| text.as_ref().map(|text| self.text(text));
        let mut tool_calls = message.tool_calls.clone();
        for call in &mut tool_calls {
            call.id = optional(&call.id);
            call.function.name = self.text(&call.function.name);
            call.function.arguments = self.json(&call.function.arguments);
        }
        Message {
            role: message.role,
            content,
            reasoning_content: optional(&message.reasoning_content),
            tool_calls,
            tool_call_id: optional(&message.tool_call_id),
            name: optional(&message.name),
        }
    }

    /// Keys of objects are also texts.
    fn json(&self, value: &JsonValue) -> JsonValue {
        match value {
            JsonValue::String(text) => JsonValue::String(self.text(text)),
            JsonValue::Array(items) => JsonValue::Array(items.iter().map(|item| self.json(item)).collect()),
            JsonValue::Object(fields) => {
                JsonValue::Object(fields.iter().map(|(name, value)| (self.text(name), self.json(value))).collect())
            }
            other => other.clone(),
        }
    }
}
