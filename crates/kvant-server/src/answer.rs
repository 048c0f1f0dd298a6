//! The parts of a model's answer: reasoning, text, tool calls.

use kvant_engine::{Event, Finished};
use kvant_models::{
    TokenLogprobs,
    chat::{JsonValue, ReplyEvent, ReplyFormat, ReplyParser},
};

use crate::{generation::finish_reason, ids::random_id};

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

/// The parts and log probabilities that one event adds to a choice.
#[derive(Debug, Default)]
pub(crate) struct Added {
    pub parts: Vec<Part>,
    pub logprobs: Vec<TokenLogprobs>,
    pub finished: Option<Finished>,
}

/// Splits the text of a choice into parts.
#[derive(Clone, Debug)]
pub(crate) struct AnswerReader {
    /// `None` after the end.
    parser: Option<ReplyParser>,
    /// Whether the latest text was reasoning.
    pub is_reasoning: bool,
    pub has_calls: bool,
    /// Tokens of reasoning.
    pub reasoning_tokens: usize,
    /// Whether text after the first call is ignored.
    one_call: bool,
    /// Whether the answer must be a call. The beginning of a delimiter is then no text.
    must_call: bool,
}

impl AnswerReader {
    /// Creates a reader of an answer that can call `functions`. `prompt` is the end of the text that the answer
    /// continues; it can end within reasoning.
    pub fn new(format: ReplyFormat, functions: &[&str], prompt: &str) -> AnswerReader {
        AnswerReader::of(ReplyParser::new(format).functions(functions.iter().copied()).after_prompt(prompt))
    }

    /// Creates a reader of an answer whose beginning is in the prompt.
    pub fn continuing(format: ReplyFormat, functions: &[&str], begun: &str) -> AnswerReader {
        AnswerReader::of(ReplyParser::new(format).functions(functions.iter().copied()).after_reply(begun))
    }

    fn of(parser: ReplyParser) -> AnswerReader {
        let is_reasoning = matches!(parser.clone().push("x").first(), Some(ReplyEvent::Reasoning(_)));
        AnswerReader {
            parser: Some(parser),
            is_reasoning,
            has_calls: false,
            reasoning_tokens: 0,
            one_call: false,
            must_call: false,
        }
    }

    /// Sets the tools that the answer can call, in OpenAI's format.
    #[must_use]
    pub fn tools(self, tools: &[JsonValue]) -> AnswerReader {
        AnswerReader { parser: self.parser.map(|parser| parser.tools(tools)), ..self }
    }

    /// Sets whether the answer must be a call.
    #[must_use]
    pub fn must_call(self, must_call: bool) -> AnswerReader {
        AnswerReader { must_call, ..self }
    }

    /// Sets whether the answer ends after its first call. Later text of the model is ignored.
    #[must_use]
    pub fn one_call(self, one_call: bool) -> AnswerReader {
        AnswerReader { one_call, ..self }
    }

    /// Returns the parts that an event adds.
    pub fn read(&mut self, event: Event) -> Added {
        match event {
            Event::Token(token) => {
                let parts = self.push(&token.text);
                self.reasoning_tokens += usize::from(self.is_reasoning);
                Added { parts, logprobs: token.logprobs.into_iter().collect(), finished: None }
            }
            Event::Finished(finished) => {
                let mut parts = self.push(&finished.text);
                let is_cut = finish_reason(&finished.reason) == "length";
                let finish = if is_cut { ReplyParser::finish_cut } else { ReplyParser::finish };
                let rest = self.parser.take().map(finish).unwrap_or_default();
                let is_mark = |event: &ReplyEvent| is_cut && matches!(event, ReplyEvent::Content(_));
                let rest = rest.into_iter().filter(|event| !(self.must_call && is_mark(event)));
                let rest: Vec<ReplyEvent> = rest.collect();
                parts.extend(rest.into_iter().flat_map(|event| self.parts(event)));
                Added { parts, logprobs: Vec::new(), finished: Some(finished) }
            }
            _ => Added::default(),
        }
    }

    fn push(&mut self, text: &str) -> Vec<Part> {
        let events = self.parser.as_mut().map(|parser| parser.push(text)).unwrap_or_default();
        events.into_iter().flat_map(|event| self.parts(event)).collect()
    }

    fn parts(&mut self, event: ReplyEvent) -> Vec<Part> {
        if self.one_call && self.has_calls {
            return Vec::new();
        }
        self.is_reasoning = matches!(event, ReplyEvent::Reasoning(_));
        match event {
            ReplyEvent::Reasoning(text) => vec![Part::Reasoning(text)],
            ReplyEvent::Content(text) => vec![Part::Text(text)],
            ReplyEvent::ToolCall(call) => {
                self.has_calls = true;
                let arguments = match call.arguments {
                    JsonValue::String(json) => json,
                    value => value.to_string(),
                };
                vec![Part::Call { id: random_id("call_"), name: call.name }, Part::Arguments(arguments)]
            }
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_ids_and_json() {
        let mut reader = AnswerReader::new(ReplyFormat::Hermes, &["f"], "");
        let parts = reader.push("Look.<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 3}}</tool_call>");
        let [Part::Text(text), Part::Call { id, name }, Part::Arguments(json)] = &parts[..] else {
            panic!("{parts:?}")
        };
        assert_eq!((text.as_str(), name.as_str(), json.as_str()), ("Look.", "f", "{\"x\":3}"));
        assert!(id.starts_with("call_") && reader.has_calls);
    }

    #[test]
    fn an_answer_can_end_with_its_first_call() {
        let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
        let text = format!("A{call}\n{call} B");
        let count = |one: bool| AnswerReader::new(ReplyFormat::Hermes, &["f"], "").one_call(one).push(&text).len();
        assert_eq!((count(true), count(false)), (3, 7));
    }

    #[test]
    fn a_prompt_can_end_within_reasoning() {
        let mut reader = AnswerReader::new(ReplyFormat::Hermes, &[], "<think>\n");
        assert!(reader.is_reasoning);
        assert_eq!(reader.push("a"), [Part::Reasoning("a".to_string())]);
        assert!(!AnswerReader::new(ReplyFormat::Plain, &[], "<think>").is_reasoning);
    }
}
