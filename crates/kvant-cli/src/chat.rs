//! `kvant chat`: a conversation with a model.

use std::{
    hash::{BuildHasher, RandomState},
    io::{BufRead, IsTerminal},
    ops::ControlFlow,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
};

use kvant::Sequence;
use kvant_models::{
    Files, Model, PoolOptions, Request, Sampling, Tokenizer,
    chat::{
        ChatTemplate, Conversation, FunctionCall, GenerationDefaults, Message, ReplyEvent, ReplyParser, SpecialTokens,
        StopStrings,
    },
    generate,
};
use rustyline::error::ReadlineError;

use crate::{
    Result,
    args::{ActivationArgs, DeviceArgs, Kv},
    memory::{self, Demand},
    output, shipped, tokens,
};

/// For models without a template, by `--plain`.
const PLAIN: &str = "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}\
                     {% if add_generation_prompt %}Assistant:{% endif %}";

const HELP: &str = "/system TEXT     set the system message\n\
                    /think on|off|hidden\n\
                    /save FILE, /load FILE\n\
                    /clear           forget the conversation\n\
                    /help\n\
                    A line that ends with \\ continues on the next. Ctrl-C stops an answer, Ctrl-D ends the chat.\n";

/// Chat with a model
///
/// Lines are messages, and lines that begin with / are commands: /help lists them. Reads lines without a prompt where
/// standard input is no terminal.
#[derive(clap::Args)]
pub struct ChatArgs {
    /// Directory of a checkpoint with a chat template, or a GGUF file
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The system message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// A Jinja chat template, in place of the model's
    #[arg(long, value_name = "FILE", conflicts_with = "plain")]
    template: Option<PathBuf>,
    /// Use a plain template, for models without one
    #[arg(long)]
    plain: bool,
    /// End an answer at this text; can be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// The longest conversation, in tokens
    #[arg(long, value_name = "N", default_value_t = 4096)]
    context: usize,
    /// The longest answer, in tokens
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 always selects the most probable token [default: the model's, or 0.7]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample from the most probable tokens with a total probability of P [default: the model's, or 0.9]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Sample from the K most probable tokens; 0 for all [default: the model's, or 0]
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// The same seed gives the same answers [default: random]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Cache type [default: bf16 on CUDA, f16 elsewhere]: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, or K:V as in
    /// f16:tq4
    #[arg(long, value_name = "KV")]
    kv: Option<Kv>,
    #[command(flatten)]
    activations: ActivationArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Set by Ctrl-C.
static STOPPED: AtomicBool = AtomicBool::new(false);

struct Chat<'a> {
    args: &'a ChatArgs,
    model: Model,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    sampling: Sampling,
    sequence: Sequence,
    /// The tokens of the sequence.
    fed: Vec<u32>,
    messages: Vec<Message>,
    system: Option<String>,
    thinking: Option<bool>,
    hides_thoughts: bool,
}

pub fn run(args: &ChatArgs) -> Result {
    let files = shipped::files(Some(&args.model))?;
    let template = template(args, &files)?;
    let device = args.device.open()?;
    let tokenizer = Tokenizer::load_files(&files)?;
    let defaults = GenerationDefaults::load_files(&files)?;
    let mut sampling = defaults.sampling(Sampling::default().temperature(0.7).top_p(0.9));
    sampling.temperature = args.temperature.unwrap_or(sampling.temperature);
    sampling.top_p = args.top_p.unwrap_or(sampling.top_p);
    sampling.top_k = args.top_k.unwrap_or(sampling.top_k);
    sampling.seed = args.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
    let kv = args.kv.unwrap_or_else(|| args.activations.kv(&device));
    let options = PoolOptions { k: kv.k, v: kv.v, longest: args.context, ..PoolOptions::default() };
    let load = args.activations.options(&device);
    memory::check(&files, &device, &Demand { pool: options, load, bytes: None, shorter: "--context" })?;
    let model = args.activations.load(&files, &device)?;
    let sequence = model.new_pool(&options)?.sequence();
    let system = args.system.clone();
    let (fed, messages) = (Vec::new(), Vec::new());
    let mut chat = Chat {
        args,
        model,
        tokenizer,
        template,
        sampling,
        sequence,
        fed,
        messages,
        system,
        thinking: None,
        hides_thoughts: false,
    };
    ctrlc::set_handler(|| STOPPED.store(true, Ordering::Relaxed))?;
    if std::io::stdin().is_terminal() { chat.with_editor() } else { chat.with_lines() }
}

fn template(args: &ChatArgs, files: &Files) -> Result<ChatTemplate> {
    let tokens = || SpecialTokens::load_files(files);
    match &args.template {
        Some(path) => Ok(ChatTemplate::new(&tokens::read_text(path)?, tokens()?)?),
        None if args.plain => Ok(ChatTemplate::new(PLAIN, tokens()?)?),
        None => ChatTemplate::load_files(files)?.ok_or_else(|| {
            let name = args.model.display();
            format!("{name}: the model has no chat template. Give one with --template FILE, or use --plain").into()
        }),
    }
}

impl Chat<'_> {
    fn with_editor(&mut self) -> Result {
        let mut editor = rustyline::DefaultEditor::new()?;
        let mut text = String::new();
        loop {
            match editor.readline(if text.is_empty() { "> " } else { ". " }) {
                Ok(line) => {
                    if let Some(line) = line.strip_suffix('\\') {
                        text = text + line + "\n";
                        continue;
                    }
                    text += &line;
                    let text = std::mem::take(&mut text);
                    editor.add_history_entry(&text)?;
                    self.line(&text)?;
                }
                Err(ReadlineError::Interrupted) => text.clear(),
                Err(ReadlineError::Eof) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn with_lines(&mut self) -> Result {
        for line in std::io::stdin().lock().lines() {
            self.line(&line?)?;
        }
        Ok(())
    }

    /// Runs a command or answers a message. Their errors do not end the chat.
    fn line(&mut self, line: &str) -> Result {
        let done = match line.trim() {
            "" => Ok(()),
            command if command.starts_with('/') => self.command(command),
            message => self.answer(message),
        };
        match done {
            Err(error) if output::is_closed(&*error) => Err(error),
            Err(error) => {
                output::report(&*error);
                Ok(())
            }
            done => done,
        }
    }

    fn command(&mut self, command: &str) -> Result {
        let (name, rest) = command.split_once(' ').unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("/help", _) => output::note(HELP)?,
            ("/clear", _) => self.messages.clear(),
            ("/system", "") => self.system = None,
            ("/system", text) => self.system = Some(text.to_string()),
            ("/think", how @ ("on" | "off" | "hidden")) => {
                self.thinking = Some(how != "off");
                self.hides_thoughts = how == "hidden";
            }
            ("/save", path) if !path.is_empty() => {
                let json = serde_json::to_string_pretty(&self.conversation())?;
                std::fs::write(path, json).map_err(|error| format!("{path}: {error}"))?;
            }
            ("/load", path) if !path.is_empty() => {
                let json = tokens::read_text(path.as_ref())?;
                self.messages = serde_json::from_str(&json).map_err(|error| format!("{path}: {error}"))?;
                self.system = None;
            }
            _ => return Err(format!("{command}: no such command; /help lists them").into()),
        }
        Ok(())
    }

    /// The messages, with the system message first.
    fn conversation(&self) -> Vec<Message> {
        self.system.iter().map(|text| Message::system(text.as_str())).chain(self.messages.iter().cloned()).collect()
    }

    fn answer(&mut self, text: &str) -> Result {
        self.messages.push(Message::user(text));
        let answered = self.reply();
        match answered {
            Ok(reply) => self.messages.push(reply),
            Err(error) => {
                self.messages.pop();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Generates the next message and prints it.
    fn reply(&mut self) -> Result<Message> {
        let messages = self.conversation();
        let mut conversation = Conversation::new(&messages);
        if let Some(on) = self.thinking {
            conversation = conversation.thinking(on);
        }
        let prompt = self.template.encode(&conversation, &self.tokenizer)?;
        if prompt.is_empty() {
            return Err("the chat template makes an empty text of this conversation".into());
        }
        let room = self.args.context.saturating_sub(prompt.len());
        if room == 0 {
            return Err(format!("the conversation has {} tokens, --context {}", prompt.len(), self.args.context).into());
        }
        let rest = self.keep_prefix(&prompt)?;

        let mut printer = Printer {
            parser: ReplyParser::new(self.template.reply_format()).after_prompt(&self.template.render(&conversation)?),
            stop: StopStrings::new(self.args.stop.iter().cloned()),
            hides_thoughts: self.hides_thoughts,
            reasoning: String::new(),
            content: String::new(),
        };
        let sampling = self.sampling.clone();
        let max_tokens = room.min(self.args.max_tokens as usize);
        let request = Request { max_tokens, sampling, stop: self.tokenizer.eos(), ..Request::new(&prompt[rest..]) };
        let (mut stream, mut printed) = (self.tokenizer.stream_with_special(), Ok(()));
        let fed = &mut self.fed;
        fed.extend(&prompt[rest..]);
        STOPPED.store(false, Ordering::Relaxed);
        let generated = generate(&self.model, &mut self.sequence, &request, |token| {
            fed.push(token);
            printed = stream.push(token).map_err(Into::into).and_then(|piece| printer.push(&piece));
            let goes_on = printed.is_ok() && !printer.stop.is_stopped() && !STOPPED.load(Ordering::Relaxed);
            if goes_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        // The last token is not fed; after an error, even fewer are.
        self.fed.truncate(self.sequence.len());
        generated?;
        printed?;
        printer.push(&stream.finish()?)?;
        printer.finish()
    }

    /// Truncates the sequence to what it shares with a prompt, of which at least one token remains. Returns the length.
    fn keep_prefix(&mut self, prompt: &[u32]) -> Result<usize> {
        let same = self.fed.iter().zip(prompt).take_while(|(a, b)| a == b).count().min(prompt.len() - 1);
        // Windows may have passed: then all is computed again.
        let kept = if self.sequence.truncate(same).is_ok() { same } else { 0 };
        self.sequence.truncate(kept)?;
        self.fed.truncate(kept);
        Ok(kept)
    }
}

/// Prints a reply: thoughts to standard error, content to standard output.
struct Printer {
    parser: ReplyParser,
    stop: StopStrings,
    hides_thoughts: bool,
    reasoning: String,
    content: String,
}

impl Printer {
    fn push(&mut self, piece: &str) -> Result {
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
        output::text(text)
    }

    fn finish(mut self) -> Result<Message> {
        let events =
            std::mem::replace(&mut self.parser, ReplyParser::new(kvant_models::chat::ReplyFormat::Plain)).finish();
        self.print(events)?;
        let rest = self.stop.finish();
        self.content(&rest)?;
        output::text("\n")?;
        let message = Message::assistant(self.content);
        Ok(if self.reasoning.is_empty() { message } else { message.reasoning(self.reasoning) })
    }
}
