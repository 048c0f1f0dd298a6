//! Printing what a model writes: thoughts to standard error, content to standard output, until a stop string.

use kvant_models::chat::{FunctionCall, Message, ReplyEvent, ReplyFormat, ReplyParser, StopStrings};

use crate::{Result, output};

/// Takes the text of a reply piece by piece.
pub struct ReplyPrinter {
    parser: ReplyParser,
    stop: StopStrings,
    hides_thoughts: bool,
    /// Whether standard output is for JSON: then content goes to standard error.
    json: bool,
    reasoning: String,
    content: String,
}

impl ReplyPrinter {
    pub fn new(parser: ReplyParser, stop: &[String]) -> ReplyPrinter {
        let stop = StopStrings::new(stop.iter().cloned());
        let (reasoning, content) = (String::new(), String::new());
        ReplyPrinter { parser, stop, hides_thoughts: false, json: false, reasoning, content }
    }

    pub fn hides_thoughts(mut self, hides: bool) -> ReplyPrinter {
        self.hides_thoughts = hides;
        self
    }

    pub fn json(mut self, json: bool) -> ReplyPrinter {
        self.json = json;
        self
    }

    /// Whether a stop string has been found.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_stopped()
    }

    pub fn push(&mut self, piece: &str) -> Result {
        let events = self.parser.push(piece);
        self.print(events)
    }

    fn print(&mut self, events: Vec<ReplyEvent>) -> Result {
        for event in events {
            match event {
                ReplyEvent::Reasoning(text) => {
                    if !self.hides_thoughts {
                        output::note(&text)?;
                    }
                    self.reasoning += &text;
                }
                ReplyEvent::ToolCall(FunctionCall { name, arguments, .. }) => {
                    self.content(&format!("{name}({arguments})"))?
                }
                ReplyEvent::Content(text) => {
                    let text = self.stop.push(&text);
                    self.content(&text)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn content(&mut self, text: &str) -> Result {
        if self.content.is_empty() && !self.reasoning.is_empty() && !self.hides_thoughts && !text.is_empty() {
            output::note("\n\n")?;
        }
        self.content += text;
        output::people(text, self.json)
    }

    /// Prints what was held back. Returns the content and the thoughts.
    pub fn finish(mut self) -> Result<(String, String)> {
        let parser = std::mem::replace(&mut self.parser, ReplyParser::new(ReplyFormat::Plain));
        self.print(parser.finish())?;
        let rest = self.stop.finish();
        self.content(&rest)?;
        Ok((self.content, self.reasoning))
    }

    /// The same, as a message of its own line.
    pub fn message(self) -> Result<Message> {
        let json = self.json;
        let (content, reasoning) = self.finish()?;
        output::people("\n", json)?;
        let message = Message::assistant(content);
        Ok(if reasoning.is_empty() { message } else { message.reasoning(reasoning) })
    }
}
