//! Grammars for gpt-oss's answers: messages with headers, whose channels are reasoning, text and calls.

use kvant_models::chat::JsonValue;

use crate::{
    calls::{Reasoning, escaped, json_rule, mark, special},
    serving::Serving,
};

/// An answer after `<|start|>assistant`.
pub(crate) struct HarmonyAnswer<'f> {
    /// Function names, and the schemas of their arguments.
    pub calls: Vec<(&'f JsonValue, JsonValue)>,
    pub must_call: bool,
    /// The rule for constrained text.
    pub text: Option<String>,
    pub reasoning: Reasoning,
}

const MARKS: [&str; 5] = ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"];

impl HarmonyAnswer<'_> {
    pub fn grammar(&self, app: &Serving) -> String {
        let [channel, message, constrain, start, end] = MARKS.map(|name| mark(app, name));
        let mut rules = vec![
            format!("next: {end} {start} \"assistant\""),
            format!("BODY: {}", body(app)),
            format!("of_json: ({constrain}? \"json\")? {message}"),
            format!("reasoning: {channel} \"analysis\" {message} BODY"),
        ];
        for (index, (name, schema)) in self.calls.iter().enumerate() {
            let to = format!("to=functions\\.{}", escaped(name.as_str().unwrap_or_default()));
            rules.push(format!("call_{index}: {channel} /commentary {to} ?/ of_json arguments_{index}"));
            // A later message can name the function before its channel.
            rules.push(format!(
                "late_{index}: {end} {start} /assistant {to} ?/ {channel} /commentary ?/ of_json arguments_{index}"
            ));
            rules.push(format!("arguments_{index}: {}", json_rule(schema.clone())));
        }
        let each =
            |kind: &str| (0..self.calls.len()).map(|index| format!("{kind}_{index}")).collect::<Vec<_>>().join(" | ");
        let (calls, late) = (each("call"), each("late"));
        if let Some(text) = &self.text {
            rules.push(format!("text: {channel} /final ?/ of_json formed\nformed: {text}"));
        }
        let is_free = !self.must_call && self.text.is_none();
        if is_free {
            rules.push(format!("free: {channel} NAME ({constrain} /[a-z]{{1,16}}/)? {message} BODY"));
            rules.push("NAME: /[^<]*/ & ~/(?s:.*)to=functions(?s:.*)/".to_string());
        }
        let answers = match (self.must_call, self.calls.is_empty()) {
            (true, _) => calls.clone(),
            (false, true) => "text".to_string(),
            (false, false) => format!("text | {calls}"),
        };
        rules.push(match (self.reasoning, self.calls.is_empty()) {
            _ if is_free => format!("start: {calls} | free (next free)* ({late} | next ({calls}))?"),
            (Reasoning::Never, _) => format!("start: {answers}"),
            (_, true) => format!("start: (reasoning next)? ({answers})"),
            (_, false) => format!("start: {answers} | reasoning (next ({answers}) | {late})"),
        });
        rules.join("\n")
    }
}

/// The text of a message. It contains no delimiters, which are special tokens in the family's tokenizers.
fn body(app: &Serving) -> String {
    if MARKS.iter().all(|mark| special(app, mark).is_some()) {
        return "/(?s:.*)/".to_string();
    }
    let marks = MARKS.map(escaped).join("|");
    format!("/(?s:.*)/ & ~/(?s:.*)({marks})(?s:.*)/")
}
