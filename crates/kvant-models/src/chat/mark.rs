//! Characters that mark the names of special tokens in the texts of a conversation.

use super::{JsonValue, Message};
use crate::{Error, Result};

/// Candidates for the marker: the last private-use characters of Unicode, which texts do not need.
const MARKS: std::ops::RangeInclusive<char> = '\u{10ff00}'..='\u{10fffd}';

/// A marker that no text of a conversation contains.
pub(super) fn free_mark(messages: &[Message], tools: &[JsonValue]) -> Result<char> {
    let texts = serde_json::to_string(&(messages, tools)).unwrap_or_default();
    let mark = MARKS.into_iter().find(|&mark| !texts.contains(mark));
    mark.ok_or_else(|| Error::argument("messages", "without some private character", "all"))
}
