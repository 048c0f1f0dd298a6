//! A thread that converts tokens to text, finds stop strings, and sends events.

use std::collections::HashMap;

use flume::{Receiver, WeakSender};
use kvant_models::{TextStream, TokenLogprobs, Tokenizer};

use crate::{
    EngineRequest, Event, Failure, FinishReason, Finished, TextToken, Usage,
    commands::{Command, Reader},
    shared::Shared,
    stop::{StopFinder, Stopped},
};

/// A message of the engine's thread about one request.
#[derive(Debug)]
pub(crate) enum Output {
    Start(Box<NewText>),
    /// The request runs for the first time.
    Began {
        cached_tokens: usize,
    },
    Prompt(Vec<TokenLogprobs>),
    Embedding(Vec<f32>),
    /// A step has verified drafts. Its tokens follow.
    Drafts {
        accepted: usize,
        rejected: usize,
    },
    Token {
        id: u32,
        logprobs: Option<TokenLogprobs>,
    },
    /// The log probabilities of the stop id that ended the request.
    Stop(TokenLogprobs),
    End(FinishReason),
    Failed(Failure),
    /// The reader of the events has disconnected.
    Gone,
}

/// The data to decode the text of a request.
#[derive(Debug)]
pub(crate) struct NewText {
    pub stop: StopFinder,
    pub special_tokens: bool,
    pub min_tokens: usize,
    /// The prompt that the text continues.
    pub prompt: Vec<u32>,
    pub reader: Reader,
}

impl NewText {
    pub fn new(request: &EngineRequest, reader: Reader) -> NewText {
        NewText {
            stop: StopFinder::new(request.stop.clone(), request.include_stop),
            special_tokens: request.special_tokens,
            min_tokens: request.min_tokens,
            prompt: request.prompt.clone(),
            reader,
        }
    }
}

/// The text of a request.
struct Text<'t> {
    stream: TextStream<&'t Tokenizer>,
    stop: StopFinder,
    min_tokens: usize,
    usage: Usage,
    stop_logprobs: Option<TokenLogprobs>,
    reader: Reader,
}

/// Processes messages until the engine's thread ends.
pub(crate) fn run(
    tokenizer: &Tokenizer,
    outputs: &Receiver<Vec<(u64, Output)>>,
    shared: &Shared,
    to: &WeakSender<Command>,
) {
    let mut texts: HashMap<u64, Text> = HashMap::new();
    for outputs in outputs.iter() {
        for (id, output) in outputs {
            handle(tokenizer, &mut texts, id, output, shared, to);
        }
    }
    let reason = shared.failure().unwrap_or_else(|| "the engine has stopped".to_string());
    for (_, text) in texts.drain() {
        text.reader.send(Event::Failed(Failure::Engine(reason.clone())));
        shared.ended();
    }
}

fn handle<'t>(
    tokenizer: &'t Tokenizer,
    texts: &mut HashMap<u64, Text<'t>>,
    id: u64,
    output: Output,
    shared: &Shared,
    to: &WeakSender<Command>,
) {
    if let Output::Start(new) = output {
        start(tokenizer, texts, id, *new, shared, to);
        return;
    }
    // The engine may compute tokens after a stop string. They are not part of the text.
    let Some(text) = texts.get_mut(&id) else { return };
    let last = match output {
        Output::Began { cached_tokens } => return text.usage.cached_tokens = cached_tokens,
        Output::Drafts { accepted, rejected } => {
            text.usage.accepted_drafts += accepted;
            text.usage.rejected_drafts += rejected;
            return;
        }
        Output::Prompt(logprobs) => return text.reader.send(Event::Prompt(logprobs)),
        Output::Embedding(numbers) => return text.reader.send(Event::Embedding(numbers)),
        Output::Token { id: token, logprobs } => match text.push(token, logprobs) {
            Ok(()) => return,
            Err(last) => {
                let is_complete = matches!(last, Event::Finished(_));
                let _ = to.upgrade().map(|to| to.send(Command::End { id, is_complete }));
                Some(last)
            }
        },
        Output::Stop(logprobs) => return text.stop_logprobs = Some(logprobs),
        Output::End(reason) => Some(text.finish(reason)),
        Output::Failed(failure) => Some(Event::Failed(failure)),
        Output::Start(_) | Output::Gone => None,
    };
    if let Some(last) = last {
        text.reader.send(last);
    }
    texts.remove(&id);
    shared.ended();
}

/// Starts the text of a request at the end of its prompt.
fn start<'t>(
    tokenizer: &'t Tokenizer,
    texts: &mut HashMap<u64, Text<'t>>,
    id: u64,
    new: NewText,
    shared: &Shared,
    to: &WeakSender<Command>,
) {
    let NewText { stop, special_tokens, min_tokens, prompt, reader } = new;
    let usage = Usage { prompt_tokens: prompt.len(), ..Usage::default() };
    match tokenizer.stream().special(special_tokens).after(&prompt) {
        Ok(stream) => {
            texts.insert(id, Text { stream, stop, min_tokens, usage, stop_logprobs: None, reader });
        }
        Err(error) => {
            let _ = to.upgrade().map(|to| to.send(Command::End { id, is_complete: false }));
            reader.send(Event::Failed(Failure::Request(error.to_string())));
            shared.ended();
        }
    }
}

impl Text<'_> {
    /// Sends a token. Returns the last event if the text ends.
    fn push(&mut self, id: u32, logprobs: Option<TokenLogprobs>) -> Result<(), Event> {
        self.usage.generated_tokens += 1;
        let failed = |error: kvant_models::Error| Event::Failed(Failure::Request(error.to_string()));
        let piece = self.stream.push(id).map_err(failed)?;
        if self.usage.generated_tokens <= self.min_tokens {
            self.reader.send(Event::Token(TextToken { id, text: piece, logprobs }));
            return Ok(());
        }
        match self.stop.push(&piece) {
            Ok(text) => {
                self.reader.send(Event::Token(TextToken { id, text, logprobs }));
                Ok(())
            }
            Err(Stopped { index, text }) => {
                self.reader.send(Event::Token(TextToken { id, text, logprobs }));
                let (text, reason) = (String::new(), FinishReason::StopString(index));
                Err(Event::Finished(Finished { text, reason, usage: self.usage, logprobs: None }))
            }
        }
    }

    /// Returns the last event of a text that the engine has ended.
    fn finish(&mut self, reason: FinishReason) -> Event {
        let rest = match self.stream.rest() {
            Ok(rest) => rest,
            Err(error) => return Event::Failed(Failure::Request(error.to_string())),
        };
        let (text, reason) = match self.stop.push(&rest) {
            Ok(text) => (text + &self.stop.finish(), reason),
            Err(Stopped { index, text }) => (text, FinishReason::StopString(index)),
        };
        Event::Finished(Finished { text, reason, usage: self.usage, logprobs: self.stop_logprobs.take() })
    }
}
