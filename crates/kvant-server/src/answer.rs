//! The parts of a model's answer: thoughts, text, tool calls.

use kvant_engine::{Event, Finished};
use kvant_models::TokenLogprobs;

use crate::sampling::random_id;

/// A part of an answer, in the order of the model's text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Part {
    Reasoning(String),
    Text(String),
    /// A tool call begins.
    Call {
        id: String,
        name: String,
    },
    /// JSON of the arguments of the latest call: all of it, or the next piece.
    Arguments(String),
}

/// What an event of a choice adds to its answer.
#[derive(Debug, Default)]
pub(crate) struct Added {
    pub parts: Vec<Part>,
    pub logprobs: Vec<TokenLogprobs>,
    pub finished: Option<Finished>,
}

/// Splits the text of a choice into parts.
#[derive(Debug)]
pub(crate) struct AnswerReader {
    place: Place,
    /// Text that may become a mark.
    held: String,
    /// Whether to look for tool calls.
    has_tools: bool,
    pub has_calls: bool,
    /// Tokens of thoughts.
    pub reasoning_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// At the beginning, where thoughts can begin.
    Start,
    Reasoning,
    Text,
    Call,
}

const THINK: &str = "<think>";
const END_THINK: &str = "</think>";
const CALL: &str = "<tool_call>";
const END_CALL: &str = "</tool_call>";

impl AnswerReader {
    /// `prompt`: the text that the answer continues, which can end within thoughts.
    pub fn new(prompt: &str, has_tools: bool) -> AnswerReader {
        let thinks = prompt.trim_end().ends_with(THINK);
        let place = if thinks { Place::Reasoning } else { Place::Start };
        AnswerReader { place, held: String::new(), has_tools, has_calls: false, reasoning_tokens: 0 }
    }

    /// What an event adds.
    pub fn read(&mut self, event: Event) -> Added {
        match event {
            Event::Token(token) => {
                self.reasoning_tokens += usize::from(self.place == Place::Reasoning);
                let logprobs = token.logprobs.into_iter().collect();
                Added { parts: self.push(&token.text), logprobs, finished: None }
            }
            Event::Finished(finished) => {
                let mut parts = self.push(&finished.text);
                parts.extend(self.finish());
                Added { parts, logprobs: Vec::new(), finished: Some(finished) }
            }
            _ => Added::default(),
        }
    }

    fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// Takes text up to the next mark. Returns whether there is more to do.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.place {
            Place::Start => {
                let rest = self.held.trim_start();
                if rest.is_empty() || (rest.len() < THINK.len() && THINK.starts_with(rest)) {
                    return false;
                }
                self.place = match rest.strip_prefix(THINK) {
                    Some(rest) => {
                        self.held = rest.to_string();
                        Place::Reasoning
                    }
                    None => Place::Text,
                };
                true
            }
            Place::Reasoning => self.until(END_THINK, Place::Text, parts, Part::Reasoning),
            Place::Text if !self.has_tools => {
                if !self.held.is_empty() {
                    parts.push(Part::Text(std::mem::take(&mut self.held)));
                }
                false
            }
            Place::Text => self.until(CALL, Place::Call, parts, Part::Text),
            Place::Call => {
                let Some(end) = self.held.find(END_CALL) else { return false };
                let call: String = self.held.drain(..end + END_CALL.len()).collect();
                self.call(&call[..end], parts);
                self.place = Place::Text;
                true
            }
        }
    }

    /// Takes text before a mark.
    fn until(&mut self, mark: &str, then: Place, parts: &mut Vec<Part>, part: fn(String) -> Part) -> bool {
        let found = self.held.find(mark);
        let end = found.unwrap_or_else(|| self.held.len() - beginning_of(mark, &self.held));
        let text: String = self.held.drain(..end).collect();
        let is_space = self.has_calls && text.trim().is_empty();
        if !text.is_empty() && !is_space {
            parts.push(part(text));
        }
        if found.is_some() {
            self.held.drain(..mark.len());
            self.place = then;
        }
        found.is_some()
    }

    /// A tool call in JSON. One that is none stays text.
    fn call(&mut self, json: &str, parts: &mut Vec<Part>) {
        let call: Option<(String, String)> = serde_json::from_str(json).ok().and_then(|call: serde_json::Value| {
            let name = call["name"].as_str()?.to_string();
            let arguments = call.get("arguments").or_else(|| call.get("parameters")).filter(|a| a.is_object());
            Some((name, arguments.map_or_else(|| "{}".to_string(), ToString::to_string)))
        });
        match call {
            Some((name, arguments)) => {
                self.has_calls = true;
                parts.push(Part::Call { id: random_id("call_"), name });
                parts.push(Part::Arguments(arguments));
            }
            None => parts.push(Part::Text(format!("{CALL}{json}{END_CALL}"))),
        }
    }

    fn finish(&mut self) -> Vec<Part> {
        let rest = std::mem::take(&mut self.held);
        let mut parts = Vec::new();
        match self.place {
            Place::Reasoning => parts.push(Part::Reasoning(rest)),
            // A model that ends after its call need not write the mark.
            Place::Call => self.call(&rest, &mut parts),
            _ => parts.push(Part::Text(rest)),
        }
        parts.retain(|part| !matches!(part, Part::Reasoning(text) | Part::Text(text) if text.is_empty()));
        parts
    }
}

/// Bytes at the end of `text` that begin `mark`.
fn beginning_of(mark: &str, text: &str) -> usize {
    (1..mark.len()).rev().find(|&n| text.ends_with(&mark[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of a text that comes in pieces of `size` bytes, with neighbours joined.
    fn read(prompt: &str, text: &str, has_tools: bool, size: usize) -> Vec<Part> {
        let mut reader = AnswerReader::new(prompt, has_tools);
        let mut parts = Vec::new();
        for piece in text.as_bytes().chunks(size) {
            parts.extend(reader.push(std::str::from_utf8(piece).unwrap()));
        }
        parts.extend(reader.finish());
        let mut joined: Vec<Part> = Vec::new();
        for part in parts {
            match (joined.last_mut(), part) {
                (Some(Part::Text(all)), Part::Text(more)) | (Some(Part::Reasoning(all)), Part::Reasoning(more)) => {
                    all.push_str(&more);
                }
                (_, Part::Call { name, .. }) => joined.push(Part::Call { id: String::new(), name }),
                (_, part) => joined.push(part),
            }
        }
        joined
    }

    #[test]
    fn thoughts_text_and_calls() {
        let text = |text: &str| Part::Text(text.to_string());
        let reasoning = |text: &str| Part::Reasoning(text.to_string());
        let call = |name: &str| Part::Call { id: String::new(), name: name.to_string() };
        let arguments = |json: &str| Part::Arguments(json.to_string());
        let weather = r#"<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>"#;
        let two = format!("<think>hm</think>Look: {weather}\n{weather}");
        let called = || [call("weather"), arguments(r#"{"place":"Oslo"}"#)];
        for size in 1..12 {
            assert_eq!(read("", "a < b <think>", true, size), [text("a < b <think>")]);
            assert_eq!(read("", "<think>a</think>b", false, size), [reasoning("a"), text("b")]);
            assert_eq!(read("x<think>\n", "a</think>b", false, size), [reasoning("a"), text("b")]);
            assert_eq!(read("x<think>\n", "endless", false, size), [reasoning("endless")]);
            let expected: Vec<Part> =
                [reasoning("hm"), text("Look: ")].into_iter().chain(called()).chain(called()).collect();
            assert_eq!(read("", &two, true, size), expected);
            assert_eq!(read("", weather, false, size), [text(weather)]);
            let broken = "<tool_call>not json</tool_call>";
            assert_eq!(read("", broken, true, size), [text(broken)]);
        }
    }
}
