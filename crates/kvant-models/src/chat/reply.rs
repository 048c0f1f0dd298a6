//! Parses a model's reply while it is generated: reasoning, content, tool calls.

use super::{FunctionCall, JsonValue, ReplyFormat, stop::partial_end, tool_calls};

/// A part of a reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReplyEvent {
    /// More reasoning.
    Reasoning(String),
    /// More content.
    Content(String),
    /// A complete call.
    ToolCall(FunctionCall),
}

/// Receives the text of a reply piece by piece, including the names of special tokens, and returns its parts.
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
    /// The functions that were offered to the model.
    functions: Vec<String>,
    /// Their schemas, as tools in OpenAI's format.
    tools: Vec<JsonValue>,
    state: State,
    /// Text that is not assigned to a part yet.
    held: String,
    /// The function name in the latest harmony header.
    name: Option<String>,
    /// Whether the state has emitted text: line breaks before it are dropped.
    is_begun: bool,
    /// Whether reasoning has ended.
    is_after_thoughts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// Only white space so far.
    Start,
    Content,
    Reasoning,
    Call,
    /// JSON that is a call or content.
    UnmarkedCall,
    /// Before a harmony message, or within the name of Gemma's channel.
    Header,
}

impl ReplyParser {
    /// Creates a parser without calls: text that looks like a call is content. See [`ReplyParser::functions`].
    pub fn new(format: ReplyFormat) -> ReplyParser {
        ReplyParser {
            format,
            functions: Vec::new(),
            tools: Vec::new(),
            state: State::Start,
            held: String::new(),
            name: None,
            is_begun: false,
            is_after_thoughts: false,
        }
    }

    /// Sets the names of the functions that were offered to the model, which enables calls. If the format has no
    /// delimiter for calls, the reply must call one of these functions to count as a call.
    #[must_use]
    pub fn functions(self, names: impl IntoIterator<Item = impl Into<String>>) -> ReplyParser {
        ReplyParser { functions: names.into_iter().map(Into::into).collect(), ..self }
    }

    /// Sets the functions that were offered to the model, as tools in OpenAI's format. Some formats write arguments
    /// without their types, which are those of the schemas.
    #[must_use]
    pub fn tools(self, tools: &[JsonValue]) -> ReplyParser {
        let names = tools.iter().filter_map(|tool| tool["function"]["name"].as_str());
        ReplyParser { tools: tools.to_vec(), ..self.functions(names) }
    }

    /// Sets the prompt that the reply follows. Templates with reasoning enabled write `<think>` themselves.
    #[must_use]
    pub fn after_prompt(mut self, prompt: &str) -> ReplyParser {
        let opened = match self.format {
            ReplyFormat::Hermes | ReplyFormat::QwenXml | ReplyFormat::Lfm2 => prompt.trim_end().ends_with("<think>"),
            ReplyFormat::Mistral => prompt.trim_end().ends_with("[THINK]"),
            ReplyFormat::Gemma4 => prompt.trim_end().ends_with("<|channel>thought"),
            _ => false,
        };
        if opened {
            self.state = State::Reasoning;
        }
        self
    }

    /// Sets the beginning of the reply, which is in the prompt. Its events are dropped.
    #[must_use]
    pub fn after_reply(mut self, beginning: &str) -> ReplyParser {
        self.push(beginning);
        if !matches!(self.state, State::Call | State::UnmarkedCall) {
            self.held.clear();
        }
        self
    }

    /// Receives a piece.
    pub fn push(&mut self, piece: &str) -> Vec<ReplyEvent> {
        self.held.push_str(piece);
        let mut events = Vec::new();
        while self.step(&mut events) {}
        events
    }

    /// Ends a truncated reply, for example at the token limit. The beginning of a call of an offered function becomes a
    /// call whose arguments are the partial JSON text. A call with an incomplete name is dropped.
    pub fn finish_cut(mut self) -> Vec<ReplyEvent> {
        let offered = (&self.functions[..], &self.tools[..]);
        let cut = match self.state {
            State::Call => tool_calls::parse_cut(self.format, self.name.clone(), offered, &self.held),
            State::UnmarkedCall => tool_calls::parse_unmarked_cut(&self.functions, &self.held),
            _ => None,
        };
        match cut {
            Some(call) => {
                self.held.clear();
                call.into_iter().map(ReplyEvent::ToolCall).collect()
            }
            None => self.finish(),
        }
    }

    /// Ends the reply.
    pub fn finish(mut self) -> Vec<ReplyEvent> {
        let mut events = Vec::new();
        let rest = std::mem::take(&mut self.held);
        match self.state {
            State::Call | State::UnmarkedCall => self.call(&rest, &mut events),
            State::Header => {}
            _ => self.text(rest, true, &mut events),
        }
        events
    }

    /// The markers recognised in this state, with the state after each.
    fn markers(&self) -> impl Iterator<Item = &'static (&'static str, State)> {
        let has_calls = !self.functions.is_empty();
        self.markers_with_calls().iter().filter(move |(_, next)| has_calls || *next != State::Call)
    }

    fn markers_with_calls(&self) -> &'static [(&'static str, State)] {
        use State::*;
        match (self.format, self.state) {
            (ReplyFormat::Plain, _) => &[],
            (ReplyFormat::Hermes | ReplyFormat::QwenXml | ReplyFormat::Lfm2, Reasoning) => &[("</think>", Content)],
            (ReplyFormat::Hermes | ReplyFormat::QwenXml, Call) => &[("</tool_call>", Content)],
            (ReplyFormat::Hermes | ReplyFormat::QwenXml, _) => &[("<think>", Reasoning), ("<tool_call>", Call)],
            (ReplyFormat::Lfm2, Call) => &[("<|tool_call_end|>", Content)],
            (ReplyFormat::Lfm2, _) => &[("<think>", Reasoning), ("<|tool_call_start|>", Call)],
            (ReplyFormat::Mistral, Reasoning) => &[("[/THINK]", Content)],
            (ReplyFormat::Mistral, Call) => &[("[TOOL_CALLS]", Call)],
            (ReplyFormat::Mistral, _) => &[("[THINK]", Reasoning), ("[TOOL_CALLS]", Call)],
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

    /// Consumes the decided part of the held text. Returns whether a marker was found.
    fn step(&mut self, events: &mut Vec<ReplyEvent>) -> bool {
        if self.state == State::Start {
            let Some(first) = self.held.trim_start().chars().next() else { return false };
            let can_be_call = self.format == ReplyFormat::Llama3 && first == '{' && !self.functions.is_empty();
            self.state = if can_be_call { State::UnmarkedCall } else { State::Content };
        }
        let found = self.markers().filter_map(|&(marker, next)| Some((self.held.find(marker)?, marker, next)));
        let Some((place, marker, next)) = found.min_by_key(|(place, ..)| *place) else {
            if !matches!(self.state, State::Call | State::UnmarkedCall | State::Header) {
                let keep = partial_end(&self.held, self.markers().map(|(marker, _)| *marker));
                let text: String = self.held.drain(..self.held.len() - keep).collect();
                self.text(text, false, events);
            }
            return false;
        };
        let before: String = self.held.drain(..place + marker.len()).collect();
        let before = &before[..place];
        match self.state {
            State::Call | State::UnmarkedCall => self.call(before, events),
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
            Some(_) if !self.functions.is_empty() => State::Call,
            _ if header.contains("analysis") => State::Reasoning,
            _ => State::Content,
        }
    }

    /// Emits text. Line breaks around reasoning belong to the format.
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

    /// Emits the calls in a text. Text that is not a valid call is content.
    fn call(&mut self, text: &str, events: &mut Vec<ReplyEvent>) {
        let calls = match self.state {
            State::UnmarkedCall => tool_calls::parse_unmarked(&self.functions, text).map(|call| vec![call]),
            _ => tool_calls::parse(self.format, self.name.take(), &self.tools, text),
        };
        match calls {
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
        let weather = FunctionCall { name: "weather".into(), arguments: json!({"place": "Zürich", "days": 2}).into() };
        let json_call = r#"{"name": "weather", "arguments": {"place": "Zürich", "days": 2}}"#;
        let cases: &[(ReplyFormat, String, &str, &str, usize)] = &[
            (ReplyFormat::Plain, "<think>a</think>".into(), "", "<think>a</think>", 0),
            (ReplyFormat::Hermes, "<think>\nWhy,\n\nhow?\n</think>\n\nBécause <thi".into(), "Why,\n\nhow?", "Bécause <thi", 0),
            (ReplyFormat::Hermes, format!("Look.<tool_call>\n{json_call}\n</tool_call>"), "", "Look.", 1),
            (ReplyFormat::Hermes, format!("<tool_call>{json_call}</tool_call><tool_call>{json_call}</tool_call>"), "", "", 2),
            (ReplyFormat::Hermes, "<tool_call>not json</tool_call>".into(), "", "not json", 0),
            (ReplyFormat::QwenXml, format!("<think>\nHm\n</think>\n\nOk<tool_call>{json_call}</tool_call>"), "Hm", "Ok", 1),
            (
                ReplyFormat::Lfm2,
                "<think>Hm</think>Ok.<|tool_call_start|>[weather(place=\"Zürich\", days=2), weather(place='Zürich',days=2)]\
                 <|tool_call_end|> Done."
                    .into(),
                "Hm",
                "Ok. Done.",
                2,
            ),
            (ReplyFormat::Lfm2, format!("<|tool_call_start|>[{json_call}]<|tool_call_end|>"), "", "", 1),
            (ReplyFormat::Lfm2, "<|tool_call_start|>[weather]<|tool_call_end|>".into(), "", "[weather]", 0),
            (ReplyFormat::Mistral, format!("[THINK]Hm[/THINK]Ok[TOOL_CALLS][{json_call}, {json_call}]"), "Hm", "Ok", 2),
            (ReplyFormat::Mistral, "[TOOL_CALLS]weather[ARGS]{\"place\": \"Zürich\", \"days\": 2}".into(), "", "", 1),
            (ReplyFormat::Llama3, json_call.replace("arguments", "parameters"), "", "", 1),
            (ReplyFormat::Llama3, format!("<|python_tag|>{json_call}"), "", "", 1),
            (ReplyFormat::Llama3, "{curly} text".into(), "", "{curly} text", 0),
            (ReplyFormat::Llama3, r#"{"name": "Ada", "age": 36}"#.into(), "", r#"{"name": "Ada", "age": 36}"#, 0),
            (ReplyFormat::Llama3, r#"{"name": "weather", "age": 36}"#.into(), "", r#"{"name": "weather", "age": 36}"#, 0),
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
                let mut parser = ReplyParser::new(*format).functions(["weather"]);
                let mut events = parser.push(&text[..cut]);
                events.extend(parser.push(&text[cut..]));
                events.extend(parser.finish());
                assert_eq!(joined(events), expected, "{text:?} cut at {cut}");
            }
            let mut parser = ReplyParser::new(*format).functions(["weather"]);
            let mut events: Vec<_> = text.chars().flat_map(|c| parser.push(&c.to_string())).collect();
            events.extend(parser.finish());
            assert_eq!(joined(events), expected, "{text:?}");
        }
    }

    /// Without functions, text that looks like a call is content, including its delimiters.
    #[test]
    fn no_functions_no_calls() {
        let call = r#"{"name": "weather", "arguments": {}}"#;
        for (format, text, content) in [
            (ReplyFormat::Hermes, format!("<think>Hm</think><tool_call>{call}</tool_call>"), None),
            (ReplyFormat::Lfm2, "<think>Hm</think><|tool_call_start|>[weather()]<|tool_call_end|>".into(), None),
            (ReplyFormat::Mistral, format!("[THINK]Hm[/THINK][TOOL_CALLS][{call}]"), None),
            (ReplyFormat::Llama3, call.to_string(), None),
            (ReplyFormat::Llama3, format!("<|python_tag|>{call}"), None),
            (ReplyFormat::Gemma4, "<|channel>thought\nHm<channel|><|tool_call>call:weather{}<tool_call|>".into(), None),
            (
                ReplyFormat::Harmony,
                "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather \
                 <|constrain|>json<|message|>{}<|call|>"
                    .into(),
                Some("{}"),
            ),
        ] {
            let mut parser = ReplyParser::new(format);
            let mut events: Vec<_> = text.chars().flat_map(|c| parser.push(&c.to_string())).collect();
            events.extend(parser.finish());
            let (_, found, calls) = joined(events);
            let after_thoughts = ["</think>", "[/THINK]", "<channel|>"].iter().find_map(|end| text.split_once(end));
            let expected = content.unwrap_or_else(|| after_thoughts.map_or(text.as_str(), |(_, rest)| rest));
            assert_eq!((found.as_str(), calls.len()), (expected, 0), "{text}");
        }
    }

    #[test]
    fn arguments_keep_their_numbers() {
        let arguments = r#"{"id":123456789012345678901,"share":0.12345678901234567890}"#;
        for (format, text) in [
            (ReplyFormat::Hermes, format!(r#"<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>"#)),
            (ReplyFormat::Mistral, format!("[TOOL_CALLS]f[ARGS]{arguments}")),
            (ReplyFormat::Llama3, format!(r#"{{"name": "f", "parameters": {arguments}}}"#)),
            (
                ReplyFormat::Gemma4,
                "<|tool_call>call:f{id:123456789012345678901,share:0.12345678901234567890}<tool_call|>".into(),
            ),
            (ReplyFormat::Harmony, format!("<|channel|>commentary to=functions.f<|message|>{arguments}<|call|>")),
        ] {
            let mut parser = ReplyParser::new(format).functions(["f"]);
            let mut events = parser.push(&text);
            events.extend(parser.finish());
            let [ReplyEvent::ToolCall(call)] = events.as_slice() else { panic!("{events:?}") };
            assert_eq!(call.arguments.to_string(), arguments);
        }
    }

    #[test]
    fn a_reply_continues_its_beginning() {
        let finish = |beginning: &str, rest: &str| {
            let mut parser = ReplyParser::new(ReplyFormat::Hermes).functions(["f"]).after_reply(beginning);
            let mut events = parser.push(rest);
            events.extend(parser.finish());
            joined(events)
        };
        assert_eq!(finish("One,", "\n two"), (String::new(), "\n two".into(), Vec::new()));
        assert_eq!(finish("<think>\nOne,", " two</think>\n\nYes"), (" two".into(), "Yes".into(), Vec::new()));
        assert_eq!(finish("<think>a</think>\n\nYes", " no"), (String::new(), " no".into(), Vec::new()));
        let (.., calls) = finish("<tool_call>{\"name\": \"f\", ", "\"arguments\": {}}</tool_call>");
        assert_eq!(calls.len(), 1);
    }

    /// A call that is truncated within its arguments is a call with partial arguments; truncated within its name, it is
    /// dropped. It is never content.
    #[test]
    fn a_cut_call_has_the_arguments_so_far() {
        let arguments = r#"{"place": "Zürich, \"Wiedikon\"", "days": [2, {"x": 1}]}"#;
        let json = |key: &str| format!(r#"{{"name": "weather", "{key}": {arguments}}}"#);
        for (format, before, call, after) in [
            (ReplyFormat::Hermes, "<tool_call>\n", json("arguments"), "\n</tool_call>"),
            (ReplyFormat::Lfm2, "<|tool_call_start|>[", json("arguments"), "]<|tool_call_end|>"),
            (ReplyFormat::Mistral, "[TOOL_CALLS][", json("arguments"), "]"),
            (ReplyFormat::Mistral, "[TOOL_CALLS]weather[ARGS]", arguments.to_string(), ""),
            (ReplyFormat::Llama3, "", json("parameters"), ""),
            (ReplyFormat::Llama3, "<|python_tag|>", json("parameters"), ""),
            (
                ReplyFormat::Harmony,
                "<|channel|>commentary to=functions.weather<|message|>",
                arguments.to_string(),
                "<|call|>",
            ),
        ] {
            let text = format!("{before}{call}{after}");
            let known = text.find("weather").unwrap() + "weather".len();
            let begins = text.rfind(arguments).unwrap();
            for cut in (before.len().max(1)..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
                let mut parser = ReplyParser::new(format).functions(["weather"]);
                let mut events = parser.push(&text[..cut]);
                events.extend(parser.finish_cut());
                let (reasoning, content, calls) = joined(events);
                assert_eq!((reasoning.as_str(), content.as_str()), ("", ""), "{format:?}: {:?}", &text[..cut]);
                let Some(found) = calls.first() else {
                    // The quote after the name completes it.
                    assert!(cut <= known, "{format:?}: no call in {:?}", &text[..cut]);
                    continue;
                };
                assert_eq!((calls.len(), found.name.as_str()), (1, "weather"));
                let so_far = &text[begins.min(cut)..cut.min(begins + arguments.len())];
                match &found.arguments {
                    JsonValue::String(part) => assert_eq!(part, so_far, "{format:?}: {:?}", &text[..cut]),
                    whole => assert_eq!(*whole, JsonValue::parse(arguments).unwrap()),
                }
            }
        }
    }

    #[test]
    fn truncated_text_without_a_call_stays_content() {
        for text in [r#"{"name": "Ada", "age": 3"#, r#"{"name": "weather", "age": 3"#, "{curly", r#"{"x": {"name"#] {
            let mut parser = ReplyParser::new(ReplyFormat::Llama3).functions(["weather"]);
            let mut events = parser.push(text);
            events.extend(parser.finish_cut());
            assert_eq!(joined(events), (String::new(), text.to_string(), Vec::new()));
        }
    }

    /// Calls as XML: schemas determine the types of arguments. Parts of a call are parts of its arguments.
    #[test]
    fn calls_as_xml() {
        let properties = json!({
            "place": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": ["boolean", "null"]},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "filter": {"type": "object"},
            "code": {"enum": ["1", "2"]},
            "mode": {"$ref": "#/$defs/mode"},
            "fixed": {"const": "5"},
        });
        let mode = json!({"mode": {"anyOf": [{"type": "string"}]}});
        let parameters = json!({"type": "object", "properties": properties, "$defs": mode});
        let function = json!({"name": "weather", "parameters": parameters});
        let tools = [json!({"type": "function", "function": function}).into()];
        let parameter = |(name, value): (&str, &str)| format!("<parameter={name}>\n{value}\n</parameter>\n");
        let values = [
            ("place", "12 <\"Zürich\">\n"),
            ("days", "2"),
            ("exact", "True"),
            ("unit", "None"),
            ("filter", "{\"a\": [1]}"),
            ("code", "1"),
            ("mode", "7"),
            ("fixed", "5"),
            ("other", "3"),
        ];
        let parameters: String = values.into_iter().map(parameter).collect();
        let call = format!("<function=weather>\n{parameters}</function>\n");
        let expected = json!({
            "place": "12 <\"Zürich\">\n", "days": 2, "exact": true, "unit": null, "filter": {"a": [1]}, "code": "1", "mode": "7",
            "fixed": "5", "other": "3",
        });
        let weather = FunctionCall { name: "weather".into(), arguments: expected.into() };
        let text = format!("<think>\nHm\n</think>\n\nLook.<tool_call>\n{call}</tool_call>");
        let read = |text: &str| {
            let mut parser = ReplyParser::new(ReplyFormat::Hermes).tools(&tools);
            let mut events: Vec<_> = text.chars().flat_map(|c| parser.push(&c.to_string())).collect();
            events.extend(parser.finish());
            joined(events)
        };
        assert_eq!(read(&text), ("Hm".into(), "Look.".into(), vec![weather.clone()]));
        assert_eq!(read(&format!("<tool_call>{call}{call}</tool_call>")).2, [weather.clone(), weather.clone()]);
        let empty = FunctionCall { name: "now".into(), arguments: json!({}).into() };
        assert_eq!(read("<tool_call>\n<function=now>\n</function>\n</tool_call>").2, [empty]);
        for bad in [
            "<function=weather>",
            "<function=weather",
            "<function=f></function> and",
            "<function=f><parameter=a></function>",
        ] {
            assert_eq!(read(&format!("<tool_call>{bad}</tool_call>")), (String::new(), bad.into(), Vec::new()));
        }
        let whole = weather.arguments.to_string();
        let mut longest = 0;
        for cut in (0..call.len()).filter(|&cut| call.is_char_boundary(cut)) {
            let mut parser = ReplyParser::new(ReplyFormat::Hermes).tools(&tools);
            let mut events = parser.push("<tool_call>\n");
            events.extend(parser.push(&call[..cut]));
            events.extend(parser.finish_cut());
            let (_, content, calls) = joined(events);
            assert_eq!(
                (content.as_str(), calls.len()),
                ("", usize::from(cut > "<function=weather".len())),
                "{:?}",
                &call[..cut]
            );
            let Some(JsonValue::String(so_far)) = calls.first().map(|call| &call.arguments) else { continue };
            assert!(whole.starts_with(so_far), "{:?}: {so_far}", &call[..cut]);
            longest = longest.max(so_far.len());
        }
        assert!(longest >= whole.len() - 1, "{longest}");
    }

    #[test]
    fn a_prompt_can_open_the_thoughts() {
        let mut parser = ReplyParser::new(ReplyFormat::Hermes).after_prompt("<|im_start|>assistant\n<think>\n");
        assert_eq!(parser.push("Hm</think>Ok"), [ReplyEvent::Reasoning("Hm".into()), ReplyEvent::Content("Ok".into())]);
    }
}
