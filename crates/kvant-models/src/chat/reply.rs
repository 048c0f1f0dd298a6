//! Parsing a model's reply while it is generated: thoughts, content, tool calls.

use super::{FunctionCall, stop::partial_end, tool_calls};

/// How a family of models writes replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplyFormat {
    /// All is content.
    Plain,
    /// `<think>…</think>`, and calls as JSON in `<tool_call>…</tool_call>`: Qwen, Hermes, DeepSeek's thoughts and
    /// others.
    Hermes,
    /// `[THINK]…[/THINK]`, and calls after `[TOOL_CALLS]`.
    Mistral,
    /// A reply that is JSON, or what follows `<|python_tag|>`, is a call.
    Llama3,
    /// `<|channel>thought…<channel|>`, and calls in `<|tool_call>…<tool_call|>`.
    Gemma4,
    /// Channels of gpt-oss: `<|channel|>analysis<|message|>…<|end|>`.
    Harmony,
}

impl ReplyFormat {
    /// The format that a chat template implies.
    pub fn of_template(source: &str) -> ReplyFormat {
        let has = |text| source.contains(text);
        match () {
            () if has("<|channel|>") && has("<|message|>") => ReplyFormat::Harmony,
            () if has("<|channel>") || has("<|tool_call>") => ReplyFormat::Gemma4,
            () if has("[TOOL_CALLS]") || has("[THINK]") => ReplyFormat::Mistral,
            () if has("<tool_call>") || has("<think>") || has("</think>") => ReplyFormat::Hermes,
            () if has("<|start_header_id|>") && has("parameters") => ReplyFormat::Llama3,
            () => ReplyFormat::Plain,
        }
    }
}

/// A part of a reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReplyEvent {
    /// More of the thoughts.
    Reasoning(String),
    /// More of the content.
    Content(String),
    /// A complete call.
    ToolCall(FunctionCall),
}

/// Takes the text of a reply piece by piece, with the names of special tokens, and returns its parts.
///
/// ```
/// use kvant_models::chat::{ReplyEvent, ReplyFormat, ReplyParser};
/// let mut parser = ReplyParser::new(ReplyFormat::Hermes);
/// assert_eq!(parser.push("<think>\nHm"), [ReplyEvent::Reasoning("Hm".into())]);
/// assert_eq!(parser.push("</think>\n\nYes"), [ReplyEvent::Content("Yes".into())]);
/// ```
#[derive(Clone, Debug)]
pub struct ReplyParser {
    format: ReplyFormat,
    state: State,
    /// Text that is not decided yet.
    held: String,
    /// The name of the call of a harmony header.
    name: Option<String>,
    /// Whether the state has given text yet: line breaks before it are dropped.
    is_begun: bool,
    /// Whether thoughts have ended.
    is_after_thoughts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// Nothing but white space yet.
    Start,
    Content,
    Reasoning,
    Call,
    /// Before a harmony message, or the name of Gemma's channel.
    Header,
}

impl ReplyParser {
    /// A parser of one reply.
    pub fn new(format: ReplyFormat) -> ReplyParser {
        ReplyParser {
            format,
            state: State::Start,
            held: String::new(),
            name: None,
            is_begun: false,
            is_after_thoughts: false,
        }
    }

    /// Continues the end of a prompt: templates that ask for thoughts write `<think>` themselves.
    #[must_use]
    pub fn after_prompt(mut self, prompt: &str) -> ReplyParser {
        let opened = match self.format {
            ReplyFormat::Hermes => prompt.trim_end().ends_with("<think>"),
            ReplyFormat::Mistral => prompt.trim_end().ends_with("[THINK]"),
            ReplyFormat::Gemma4 => prompt.trim_end().ends_with("<|channel>thought"),
            _ => false,
        };
        if opened {
            self.state = State::Reasoning;
        }
        self
    }

    /// Takes a piece.
    pub fn push(&mut self, piece: &str) -> Vec<ReplyEvent> {
        self.held.push_str(piece);
        let mut events = Vec::new();
        while self.step(&mut events) {}
        events
    }

    /// Ends the reply.
    pub fn finish(mut self) -> Vec<ReplyEvent> {
        let mut events = Vec::new();
        let rest = std::mem::take(&mut self.held);
        match self.state {
            State::Call => self.call(&rest, &mut events),
            State::Header => {}
            _ => self.text(rest, true, &mut events),
        }
        events
    }

    /// The markers of a state, with the next state.
    fn markers(&self) -> &'static [(&'static str, State)] {
        use State::*;
        match (self.format, self.state) {
            (ReplyFormat::Plain, _) => &[],
            (ReplyFormat::Hermes, Reasoning) => &[("</think>", Content)],
            (ReplyFormat::Hermes, Call) => &[("</tool_call>", Content)],
            (ReplyFormat::Hermes, _) => &[("<think>", Reasoning), ("<tool_call>", Call)],
            (ReplyFormat::Mistral, Reasoning) => &[("[/THINK]", Content)],
            (ReplyFormat::Mistral, Call) => &[("[TOOL_CALLS]", Call)],
            (ReplyFormat::Mistral, _) => &[("[THINK]", Reasoning), ("[TOOL_CALLS]", Call)],
            (ReplyFormat::Llama3, Call) => &[("<|python_tag|>", Call)],
            (ReplyFormat::Llama3, _) => &[("<|python_tag|>", Call)],
            (ReplyFormat::Gemma4, Header) => &[("\n", Reasoning), ("<channel|>", Content)],
            (ReplyFormat::Gemma4, Reasoning) => &[("<channel|>", Content)],
            (ReplyFormat::Gemma4, Call) => &[("<tool_call|>", Content)],
            (ReplyFormat::Gemma4, _) => &[("<|channel>", Header), ("<|tool_call>", Call)],
            (ReplyFormat::Harmony, Header) => &[("<|message|>", Content)],
            (ReplyFormat::Harmony, _) => &[
                ("<|channel|>", Header),
                ("<|start|>", Header),
                ("<|end|>", Header),
                ("<|return|>", Header),
                ("<|call|>", Header),
            ],
        }
    }

    /// Takes what is decided from the text that is held. Returns whether a marker was found.
    fn step(&mut self, events: &mut Vec<ReplyEvent>) -> bool {
        if self.state == State::Start {
            let Some(first) = self.held.trim_start().chars().next() else { return false };
            self.state = if self.format == ReplyFormat::Llama3 && first == '{' { State::Call } else { State::Content };
        }
        let markers = self.markers();
        let found = markers.iter().filter_map(|&(marker, next)| Some((self.held.find(marker)?, marker, next)));
        let Some((place, marker, next)) = found.min_by_key(|(place, ..)| *place) else {
            if !matches!(self.state, State::Call | State::Header) {
                let keep = partial_end(&self.held, markers.iter().map(|(marker, _)| *marker));
                let text: String = self.held.drain(..self.held.len() - keep).collect();
                self.text(text, false, events);
            }
            return false;
        };
        let before: String = self.held.drain(..place + marker.len()).collect();
        let before = &before[..place];
        match self.state {
            State::Call => self.call(before, events),
            State::Header => {}
            _ => self.text(before.to_string(), true, events),
        }
        self.is_after_thoughts |= self.state == State::Reasoning;
        let next = if self.state == State::Header { self.after_header(before, next) } else { next };
        (self.state, self.is_begun) = (next, false);
        true
    }

    /// The state after a harmony header, such as `assistant<|channel|>commentary to=functions.f <|constrain|>json`.
    fn after_header(&mut self, header: &str, next: State) -> State {
        if self.format != ReplyFormat::Harmony {
            return next;
        }
        let name = header.split("to=functions.").nth(1);
        let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
        self.name = name.map(|name| name.chars().take_while(|&c| is_name(c)).collect());
        match self.name {
            Some(_) => State::Call,
            None if header.contains("analysis") => State::Reasoning,
            None => State::Content,
        }
    }

    /// Gives text. Line breaks around thoughts belong to the format.
    fn text(&mut self, mut text: String, is_last: bool, events: &mut Vec<ReplyEvent>) {
        let is_reasoning = self.state == State::Reasoning;
        if !self.is_begun && (is_reasoning || self.is_after_thoughts) {
            text = text.trim_start_matches(['\n', '\r']).to_string();
        }
        if is_reasoning {
            let end = text.trim_end_matches(['\n', '\r']).len();
            let breaks = text.split_off(end);
            if !is_last {
                self.held.insert_str(0, &breaks);
            }
        }
        if !text.is_empty() {
            self.is_begun = true;
            events.push(if is_reasoning { ReplyEvent::Reasoning(text) } else { ReplyEvent::Content(text) });
        }
    }

    /// Gives the calls of a text. One that cannot be parsed is content.
    fn call(&mut self, text: &str, events: &mut Vec<ReplyEvent>) {
        match tool_calls::parse(self.format, self.name.take(), text) {
            Some(calls) => events.extend(calls.into_iter().map(ReplyEvent::ToolCall)),
            None if text.trim().is_empty() => {}
            None => events.push(ReplyEvent::Content(text.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn joined(events: Vec<ReplyEvent>) -> (String, String, Vec<FunctionCall>) {
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for event in events {
            match event {
                ReplyEvent::Reasoning(text) => reasoning += &text,
                ReplyEvent::Content(text) => content += &text,
                ReplyEvent::ToolCall(call) => calls.push(call),
            }
        }
        (reasoning, content, calls)
    }

    #[test]
    fn any_cut_gives_the_same_parts() {
        let weather = FunctionCall { name: "weather".into(), arguments: json!({"place": "Zürich", "days": 2}) };
        let json_call = r#"{"name": "weather", "arguments": {"place": "Zürich", "days": 2}}"#;
        let cases: &[(ReplyFormat, String, &str, &str, usize)] = &[
            (ReplyFormat::Plain, "<think>a</think>".into(), "", "<think>a</think>", 0),
            (ReplyFormat::Hermes, "<think>\nWhy,\n\nhow?\n</think>\n\nBécause <thi".into(), "Why,\n\nhow?", "Bécause <thi", 0),
            (ReplyFormat::Hermes, format!("Look.<tool_call>\n{json_call}\n</tool_call>"), "", "Look.", 1),
            (ReplyFormat::Hermes, format!("<tool_call>{json_call}</tool_call><tool_call>{json_call}</tool_call>"), "", "", 2),
            (ReplyFormat::Hermes, "<tool_call>not json</tool_call>".into(), "", "not json", 0),
            (ReplyFormat::Mistral, format!("[THINK]Hm[/THINK]Ok[TOOL_CALLS][{json_call}, {json_call}]"), "Hm", "Ok", 2),
            (ReplyFormat::Mistral, "[TOOL_CALLS]weather[ARGS]{\"place\": \"Zürich\", \"days\": 2}".into(), "", "", 1),
            (ReplyFormat::Llama3, json_call.replace("arguments", "parameters"), "", "", 1),
            (ReplyFormat::Llama3, format!("<|python_tag|>{json_call}"), "", "", 1),
            (ReplyFormat::Llama3, "{curly} text".into(), "", "{curly} text", 0),
            (
                ReplyFormat::Gemma4,
                "<|channel>thought\nHm.\n<channel|>Ok.<|tool_call>call:weather{days:2,place:<|\"|>Zürich<|\"|>}<tool_call|>".into(),
                "Hm.",
                "Ok.",
                1,
            ),
            (
                ReplyFormat::Harmony,
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Ok.<|return|>".into(),
                "Hm.",
                "Ok.",
                0,
            ),
            (
                ReplyFormat::Harmony,
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather \
                 <|constrain|>json<|message|>{\"place\": \"Zürich\", \"days\": 2}<|call|>"
                    .into(),
                "Hm.",
                "",
                1,
            ),
        ];
        for (format, text, reasoning, content, calls) in cases {
            let expected = (reasoning.to_string(), content.to_string(), vec![weather.clone(); *calls]);
            for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
                let mut parser = ReplyParser::new(*format);
                let mut events = parser.push(&text[..cut]);
                events.extend(parser.push(&text[cut..]));
                events.extend(parser.finish());
                assert_eq!(joined(events), expected, "{text:?} cut at {cut}");
            }
            let mut parser = ReplyParser::new(*format);
            let mut events: Vec<_> = text.chars().flat_map(|c| parser.push(&c.to_string())).collect();
            events.extend(parser.finish());
            assert_eq!(joined(events), expected, "{text:?}");
        }
    }

    #[test]
    fn a_prompt_can_open_the_thoughts() {
        let mut parser = ReplyParser::new(ReplyFormat::Hermes).after_prompt("<|im_start|>assistant\n<think>\n");
        assert_eq!(parser.push("Hm</think>Ok"), [ReplyEvent::Reasoning("Hm".into()), ReplyEvent::Content("Ok".into())]);
    }
}
