//! Conversations as text: chat templates, tool calls, reasoning.
//!
//! | task | item |
//! |---|---|
//! | describe a conversation | [`Message`], [`ChatRole`], [`Content`], [`ToolCall`] |
//! | render it with the model's template | [`ChatTemplate`], [`Conversation`] |
//! | tokens of it, in which users cannot write special tokens | [`ChatTemplate::encode`] |
//! | split a reply into reasoning, content and tool calls | [`ReplyParser`] |
//! | JSON whose numbers keep their digits, as in the arguments of calls | [`JsonValue`] |
//! | end a text at stop strings | [`StopStrings`] |
//! | the sampling parameters that a checkpoint recommends | [`GenerationDefaults`] |

mod budget;
pub(crate) mod defaults;
mod encode;
mod exact;
mod format_time;
mod jinja;
mod json;
mod mark;
mod message;
mod methods;
mod operators;
mod python;
mod python_calls;
mod reply;
mod reply_format;
mod stop;
mod template;
mod tool_calls;
mod xml_calls;

pub use defaults::GenerationDefaults;
pub use exact::{JsonValue, keeps_digits};
pub use message::{ChatRole, Content, ContentPart, FunctionCall, Message, ToolCall};
pub use reply::{ReplyEvent, ReplyParser};
pub use reply_format::ReplyFormat;
pub use stop::StopStrings;
pub use template::{ChatTemplate, Clock, Conversation, SpecialTokens};
pub use xml_calls::{ParameterForm, referenced};
