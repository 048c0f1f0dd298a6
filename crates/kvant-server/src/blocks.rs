//! An answer as a list of blocks: Anthropic's content blocks and the output items of OpenAI's responses.

use kvant_models::chat::{JsonValue, Message};

use crate::{answer::Part, conversation::sent_call};

/// A block of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Block {
    Reasoning(String),
    Text(String),
    Call { id: String, name: String, arguments: String },
}

/// The change that a part makes to the list.
#[derive(Debug, PartialEq)]
pub(crate) struct Change {
    /// Whether the part begins a new block.
    pub is_new: bool,
    /// The text, reasoning or JSON that the part adds to the last block.
    pub delta: String,
}

/// The blocks of an answer.
#[derive(Debug, Default)]
pub(crate) struct Blocks(pub Vec<Block>);

impl Blocks {
    /// Adds a part to the last block, or as a new block if the kind differs.
    pub fn add(&mut self, part: Part) -> Change {
        let (block, delta) = match (self.0.last_mut(), part) {
            (Some(Block::Text(text)), Part::Text(delta))
            | (Some(Block::Reasoning(text)), Part::Reasoning(delta))
            | (Some(Block::Call { arguments: text, .. }), Part::Arguments(delta)) => {
                text.push_str(&delta);
                return Change { is_new: false, delta };
            }
            (_, Part::Text(text)) => (Block::Text(text.clone()), text),
            (_, Part::Reasoning(text)) => (Block::Reasoning(text.clone()), text),
            (_, Part::Call { id, name }) => (Block::Call { id, name, arguments: String::new() }, String::new()),
            // Arguments always follow a call.
            (_, Part::Arguments(_)) => return Change { is_new: false, delta: String::new() },
        };
        self.0.push(block);
        Change { is_new: true, delta }
    }

    /// The answer as a message of a conversation.
    pub fn message(&self) -> Message {
        let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
        for block in &self.0 {
            match block {
                Block::Text(more) => text += more,
                Block::Reasoning(more) => reasoning += more,
                Block::Call { id, name, arguments } => {
                    calls.push(sent_call(id, name.clone(), parsed(arguments)));
                }
            }
        }
        let mut message = Message::assistant(text).tool_calls(calls);
        message.reasoning_content = Some(reasoning).filter(|reasoning| !reasoning.is_empty());
        message
    }

    /// The index of the last block.
    pub fn last(&self) -> usize {
        self.0.len().saturating_sub(1)
    }
}

/// Arguments of a call as JSON.
pub(crate) fn parsed(arguments: &str) -> JsonValue {
    JsonValue::parse(arguments).unwrap_or_else(|_| JsonValue::Object(Default::default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_one_kind_are_one_block() {
        let mut blocks = Blocks::default();
        let call = || Part::Call { id: "i".to_string(), name: "f".to_string() };
        let parts = [
            Part::Reasoning("a".to_string()),
            Part::Reasoning("b".to_string()),
            Part::Text("c".to_string()),
            call(),
            Part::Arguments("{".to_string()),
            Part::Arguments("}".to_string()),
            call(),
        ];
        let new: Vec<bool> = parts.into_iter().map(|part| blocks.add(part).is_new).collect();
        assert_eq!(new, [true, false, true, true, false, false, true]);
        let call = |arguments: &str| Block::Call {
            id: "i".to_string(),
            name: "f".to_string(),
            arguments: arguments.to_string(),
        };
        assert_eq!(blocks.0, [Block::Reasoning("ab".to_string()), Block::Text("c".to_string()), call("{}"), call("")]);
    }
}
