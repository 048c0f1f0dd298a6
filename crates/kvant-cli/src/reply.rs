//! Prints a model's answer up to a stop string: reasoning to standard error, content to standard output.

use kvant_models::chat::{FunctionCall, Message, ReplyEvent, ReplyFormat, ReplyParser, StopStrings};

use crate::{output, result::Result};

/// Receives the text of an answer piece by piece.
pub struct ReplyPrinter {
    parser: ReplyParser,
    stop: StopStrings,
    hides_reasoning: bool,
    /// Whether standard output is used for JSON. Content then goes to standard error.
    json: bool,
    reasoning: String,
    content: String,
}

impl ReplyPrinter {
    pub fn new(parser: ReplyParser, stop: &[String]) -> ReplyPrinter {
        let stop = StopStrings::new(stop.iter().cloned());
        let (reasoning, content) = (String::new(), String::new());
        ReplyPrinter { parser, stop, hides_reasoning: false, json: false, reasoning, content }
    }

    pub fn hides_reasoning(mut self, hides: bool) -> ReplyPrinter {
        self.hides_reasoning = hides;
        self
    }

    pub fn json(mut self, json: bool) -> ReplyPrinter {
        self.json = json;
        self
    }

    /// Whether a stop string was found.
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
                    if !self.hides_reasoning {
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
        if self.content.is_empty() && !self.reasoning.is_empty() && !self.hides_reasoning && !text.is_empty() {
            output::note("\n\n")?;
        }
        self.content += text;
        output::people(text, self.json)
    }

    /// Prints held-back text. Returns the content and the reasoning.
    pub fn finish(mut self) -> Result<(String, String)> {
        let parser = std::mem::replace(&mut self.parser, ReplyParser::new(ReplyFormat::Plain));
        self.print(parser.finish())?;
        let rest = self.stop.finish();
        self.content(&rest)?;
        Ok((self.content, self.reasoning))
    }

    /// Like [`ReplyPrinter::finish`], but returns a message, and ends the line.
    pub fn message(self) -> Result<Message> {
        let json = self.json;
        let (content, reasoning) = self.finish()?;
        output::people("\n", json)?;
        let message = Message::assistant(content);
        Ok(if reasoning.is_empty() { message } else { message.reasoning(reasoning) })
    }
}
