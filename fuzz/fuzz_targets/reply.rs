//! Arbitrary text as a model's reply: its parts do not depend on how the text is divided into pieces.
#![cfg_attr(fuzzing, no_main)]

use kvant_models::chat::{ReplyEvent, ReplyFormat, ReplyParser};
use libfuzzer_sys::fuzz_target;

const FORMATS: [ReplyFormat; 6] = [
    ReplyFormat::Plain,
    ReplyFormat::Hermes,
    ReplyFormat::Mistral,
    ReplyFormat::Llama3,
    ReplyFormat::Gemma4,
    ReplyFormat::Harmony,
];

/// The parts of a reply. Adjacent parts of one kind are joined.
fn parts<'a>(format: ReplyFormat, pieces: impl Iterator<Item = &'a str>) -> Vec<ReplyEvent> {
    let mut parser = ReplyParser::new(format);
    let mut events: Vec<ReplyEvent> = pieces.flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    let mut joined: Vec<ReplyEvent> = Vec::new();
    for event in events {
        match (joined.last_mut(), event) {
            (Some(ReplyEvent::Content(text)), ReplyEvent::Content(more)) => text.push_str(&more),
            (Some(ReplyEvent::Reasoning(text)), ReplyEvent::Reasoning(more)) => text.push_str(&more),
            (_, event) => joined.push(event),
        }
    }
    joined
}

fuzz_target!(|input: (u8, u8, &str)| {
    let (format, size, text) = input;
    let format = FORMATS[usize::from(format) % FORMATS.len()];
    let size = usize::from(size % 7) + 1;
    let chars: Vec<String> = text.chars().map(String::from).collect();
    let pieces: Vec<String> = chars.chunks(size).map(|chars| chars.concat()).collect();
    let whole = parts(format, std::iter::once(text));
    assert_eq!(parts(format, pieces.iter().map(String::as_str)), whole, "pieces of {size} characters");
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
