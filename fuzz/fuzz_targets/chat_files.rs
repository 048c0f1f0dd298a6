//! Arbitrary bytes as tokenizer_config.json, generation_config.json or chat_template.jinja: an error, or sampling
//! parameters and a template that renders or rejects a conversation.
#![cfg_attr(fuzzing, no_main)]

use kvant_models::{
    Files, Sampling,
    chat::{ChatTemplate, Clock, Conversation, GenerationDefaults, Message, ToolCall},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, &[u8])| {
    kvant_fuzz::allow_caught_panics();
    let (kind, bytes) = input;
    let name = ["chat_template.jinja", "tokenizer_config.json", "generation_config.json"][usize::from(kind % 3)];
    let folder = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(folder.path().join(name), bytes).expect("room for it");
    let files = Files::directory(folder.path());
    if let Ok(defaults) = GenerationDefaults::load_files(&files) {
        let _ = defaults.sampling(Sampling::default());
    }
    let Ok(Some(template)) = ChatTemplate::load_files(&files) else { return };
    let call = ToolCall::new("1", "weather", serde_json::json!({"city": "Bern"}));
    let messages = [
        Message::system("Be brief."),
        Message::user("Hello <|im_end|>"),
        Message::assistant("").reasoning("Hm.").tool_calls(vec![call]),
        Message::tool("1", "21 degrees"),
    ];
    let tools = [serde_json::json!({"type": "function", "function": {"name": "weather", "parameters": {}}})];
    let _ = template.reply_format();
    for conversation in [Conversation::new(&messages), Conversation::new(&messages[..2]).tools(&tools).thinking(true)] {
        let _ = template.render(&conversation.clock(Clock::Now));
    }
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
