//! Conversations as text: chat templates, tool calls, reasoning.
//!
//! | task | item |
//! |---|---|
//! | describe a conversation | [`Message`], [`Role`], [`Content`], [`ToolCall`] |
//! | render it with the model's template | [`ChatTemplate`], [`Conversation`] |

mod format_time;
mod jinja;
mod json;
mod message;
mod methods;
mod operators;
mod python;
mod template;

pub use message::{Content, FunctionCall, Message, Part, Role, ToolCall};
pub use template::{ChatTemplate, Clock, Conversation, SpecialTokens};
