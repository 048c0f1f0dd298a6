//! `kvant chat`: a conversation with a model.

mod writing;

use std::{
    hash::{BuildHasher, RandomState},
    io::{BufRead, IsTerminal},
    ops::ControlFlow,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use clap::builder::NonEmptyStringValueParser;
use kvant_models::{
    Files, GenerateStats, LoadOptions, PoolOptions, Request, Sampling, Tokenizer,
    chat::{ChatRole, ChatTemplate, Conversation, GenerationDefaults, Message, ReplyParser, SpecialTokens},
};
use rustyline::error::ReadlineError;

use self::writing::Writing;
#[cfg(feature = "serve")]
use crate::drafts::DraftArgs;
use crate::{
    Result,
    args::{ActivationArgs, Kv, ModelDeviceArgs},
    memory::{self, Demand},
    output,
    reply::ReplyPrinter,
    shipped, suggest, terminal, tokens,
};

/// The template for models without one, selected by `--plain`.
const PLAIN: &str = "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}\
                     {% if add_generation_prompt %}Assistant:{% endif %}";

const HELP: &str = "/system TEXT     set the system message\n\
                    /think on|off|hidden\n\
                    /retry           answer the last message again\n\
                    /set NAME VALUE  temperature, top_p, top_k, min_p, seed or max_tokens; without a name, show all\n\
                    /kv              show the cache: its type, tokens and bytes\n\
                    /save FILE, /load FILE\n\
                    /clear           forget the conversation\n\
                    /exit, /quit, /help\n\
                    A line that ends with \\ continues on the next. Ctrl-C stops an answer, Ctrl-D ends the chat.\n\
                    Keys typed during an answer belong to the next line.\n";

/// Chat with a model
///
/// Lines are messages, and lines that begin with / are commands: /help lists them. If standard input is not a terminal,
/// lines are read without a prompt, and the exit code is 1 if any of them has failed.
#[derive(clap::Args)]
pub struct ChatArgs {
    /// Directory of a checkpoint in Hugging Face or MLX layout, a GGUF file, or a name on the Hugging Face Hub such as
    /// openai/gpt-oss-20b
    #[arg(value_name = "MODEL")]
    model: Option<PathBuf>,
    /// The system message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// A Jinja chat template that replaces the model's
    #[arg(long, value_name = "FILE", conflicts_with = "plain")]
    template: Option<PathBuf>,
    /// Use a plain template, for models without a chat template
    #[arg(long)]
    plain: bool,
    /// End an answer at this text; can be repeated
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Maximum tokens of the conversation. When it is full, the oldest turns are dropped
    #[arg(long, value_name = "N", default_value_t = 4096)]
    context: usize,
    /// Maximum tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 always selects the most probable token [default: the model's, or 0.7]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample from the most probable tokens with a total probability of P [default: the model's, or 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Sample from the K most probable tokens; 0 for all [default: the model's, or 0]
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from tokens with at least P times the probability of the most probable one [default: the model's, or
    /// 0.05]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// The seed: with equal seeds, answers are equal [default: random]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Cache type [default: bf16 on CUDA, f16 elsewhere]: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, these with
    /// sealed pages (tq4c), K:V as in f16:tq4, or @FILE with types per layer
    #[arg(long, value_name = "KV")]
    kv: Option<Kv>,
    #[cfg(feature = "serve")]
    #[command(flatten)]
    drafts: DraftArgs,
    #[command(flatten)]
    activations: ActivationArgs,
    #[command(flatten)]
    device: ModelDeviceArgs,
}

/// Set by Ctrl-C.
static STOPPED: AtomicBool = AtomicBool::new(false);

struct Chat<'a> {
    args: &'a ChatArgs,
    vocab_size: usize,
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    sampling: Sampling,
    /// Maximum tokens of an answer.
    max_tokens: usize,
    kv: String,
    writing: Writing,
    messages: Vec<Message>,
    system: Option<String>,
    /// The number of oldest messages that are dropped because the context is full.
    left_out: usize,
    thinking: Option<bool>,
    hides_reasoning: bool,
}

pub fn run(args: &ChatArgs) -> Result {
    let Some(name) = &args.model else {
        return Err(format!("a model is needed. {}", suggest::text("chat")).into());
    };
    let files = shipped::files(Some(name))?;
    let template = template(args, &files)?;
    let device = args.device.open()?;
    let tokenizer = Arc::new(Tokenizer::load_files(&files)?);
    let defaults = GenerationDefaults::load_files(&files)?;
    let mut sampling = defaults.sampling(Sampling::usual());
    sampling.temperature = args.temperature.unwrap_or(sampling.temperature);
    sampling.top_p = args.top_p.unwrap_or(sampling.top_p);
    sampling.top_k = args.top_k.unwrap_or(sampling.top_k);
    sampling.min_p = args.min_p.unwrap_or(sampling.min_p);
    sampling.seed = args.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
    let kv = args.activations.kv(&device, args.kv.as_ref());
    memory::warn_of_context(&files, args.context)?;
    #[cfg(feature = "serve")]
    let drafts = args.drafts.count();
    #[cfg(not(feature = "serve"))]
    let drafts = 0;
    let options = PoolOptions { codecs: kv.codecs, longest: args.context, drafts, ..PoolOptions::default() };
    let division = args.device.cache_division();
    let load = LoadOptions { cache_division: division, ..args.activations.options(&device) };
    #[cfg(feature = "serve")]
    let drafter = args.drafts.files(Some(name), &files)?;
    #[cfg(not(feature = "serve"))]
    let drafter = None;
    let demand = Demand {
        ranks: device.ranks(),
        pool: options.clone(),
        load,
        bytes: None,
        drafter: drafter.as_ref(),
        shorter: "--context",
    };
    memory::check(&files, &device, &demand)?;
    let model = args.activations.load(&files, &device, args.context, division)?;
    let vocab_size = model.vocab_size();
    let writing = Writing::start(args, model, &tokenizer, &options, drafter.as_ref())?;
    let (system, messages) = (args.system.clone(), Vec::new());
    let mut chat = Chat {
        args,
        vocab_size,
        tokenizer,
        template,
        sampling,
        max_tokens: args.max_tokens as usize,
        kv: kv.name,
        writing,
        messages,
        system,
        left_out: 0,
        thinking: None,
        hides_reasoning: false,
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
            let name = args.model.as_deref().unwrap_or(std::path::Path::new("the model")).display();
            format!("{name}: the model has no chat template. Give one with --template FILE, or use --plain").into()
        }),
    }
}

/// Whether a line ends the chat.
fn is_end(line: &str) -> bool {
    matches!(line.trim(), "/exit" | "/quit")
}

fn messages_of(count: usize) -> String {
    if count == 1 { "1 message".to_string() } else { format!("{count} messages") }
}

/// Formats the speed of an answer.
fn speed(stats: &GenerateStats) -> String {
    let GenerateStats { prompt_tokens, generated_tokens, decode_steps, decode_seconds, prompt_seconds, .. } = *stats;
    let rate = |count: usize, seconds: f64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
    // With drafts, a step gives several tokens.
    let decoded = decode_steps.max(generated_tokens.saturating_sub(1));
    let (decode, prompt) = (rate(decoded, decode_seconds), rate(prompt_tokens, prompt_seconds));
    format!("({generated_tokens} tokens, {decode:.1} a second; prompt {prompt_tokens}, {prompt:.0} a second)\n")
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
                    if is_end(&text) {
                        return Ok(());
                    }
                    let _held = terminal::hold_keys();
                    self.line(&text)?;
                }
                Err(ReadlineError::Interrupted) => text.clear(),
                Err(ReadlineError::Eof) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn with_lines(&mut self) -> Result {
        let (mut lines, mut failed) = (0, 0);
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|error| format!("standard input: {error}"))?;
            if is_end(&line) {
                break;
            }
            lines += 1;
            let succeeded = self.line(&line)?;
            failed += usize::from(!succeeded);
        }
        // A script needs the exit code.
        if failed == 0 { Ok(()) } else { Err(format!("{failed} of {lines} lines failed").into()) }
    }

    /// Runs a command or answers a message, and returns whether that succeeded. An error does not end the chat.
    fn line(&mut self, line: &str) -> Result<bool> {
        let done = match line.trim() {
            "" => Ok(()),
            command if command.starts_with('/') => self.command(command),
            message => self.answer(message),
        };
        match done {
            Err(error) if output::is_closed(&*error) => Err(error),
            Err(error) => {
                output::report(&*error);
                Ok(false)
            }
            Ok(()) => Ok(true),
        }
    }

    fn command(&mut self, command: &str) -> Result {
        let (name, rest) = command.split_once(' ').unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("/help", _) => output::note(HELP)?,
            ("/clear", _) => (self.messages, self.left_out) = (Vec::new(), 0),
            ("/retry", _) => return self.retry(),
            ("/kv", _) => return self.show_cache(),
            ("/set", setting) => return self.set(setting),
            ("/system", "") => self.system = None,
            ("/system", text) => self.system = Some(text.to_string()),
            ("/think", how @ ("on" | "off" | "hidden")) => {
                self.thinking = Some(how != "off");
                self.hides_reasoning = how == "hidden";
            }
            ("/save", path) if !path.is_empty() => {
                let json = serde_json::to_string_pretty(&self.conversation(0))?;
                std::fs::write(path, json).map_err(|error| format!("{path}: {error}"))?;
                output::note(&format!("(saved {} to {path})\n", messages_of(self.conversation(0).len())))?;
            }
            ("/load", path) if !path.is_empty() => {
                let json = tokens::read_text(path.as_ref())?;
                self.messages = serde_json::from_str(&json).map_err(|error| format!("{path}: {error}"))?;
                (self.system, self.left_out) = (None, 0);
                output::note(&format!("(loaded {} from {path})\n", messages_of(self.messages.len())))?;
            }
            ("/save" | "/load", _) => return Err(format!("{name} needs the name of a file").into()),
            ("/think", how) => return Err(format!("/think needs on, off or hidden, got {how:?}").into()),
            _ => return Err(format!("{command}: no such command; /help lists them").into()),
        }
        Ok(())
    }

    /// Answers the last message again.
    fn retry(&mut self) -> Result {
        let is_answer = |message: &Message| message.role == ChatRole::Assistant;
        let answer = if self.messages.last().is_some_and(is_answer) { self.messages.pop() } else { None };
        if self.messages.is_empty() {
            return Err("there is no message to answer again".into());
        }
        // An unchanged seed would repeat the answer.
        self.sampling.seed = self.sampling.seed.wrapping_add(1);
        match self.reply() {
            Ok(reply) => self.messages.push(reply),
            Err(error) => {
                self.messages.extend(answer);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Shows or changes sampling parameters.
    fn set(&mut self, setting: &str) -> Result {
        let (name, value) = setting.split_once([' ', '=']).map_or((setting, ""), |(name, value)| (name, value.trim()));
        let Sampling { temperature, top_p, top_k, min_p, seed, .. } = self.sampling;
        if name.is_empty() {
            let max_tokens = self.max_tokens;
            return output::note(&format!(
                "temperature {temperature}, top_p {top_p}, top_k {top_k}, min_p {min_p}, seed {seed}, \
                 max_tokens {max_tokens}\n"
            ));
        }
        fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<T> {
            value.parse().map_err(|_| format!("/set {name} needs a number, got {value:?}").into())
        }
        let sampling = self.sampling.clone();
        let sampling = match name {
            "temperature" => sampling.temperature(number(name, value)?),
            "top_p" => sampling.top_p(number(name, value)?),
            "top_k" => sampling.top_k(number(name, value)?),
            "min_p" => sampling.min_p(number(name, value)?),
            "seed" => sampling.seed(number(name, value)?),
            "max_tokens" => {
                let limit: std::num::NonZeroUsize = number(name, value)?;
                self.max_tokens = limit.get();
                return Ok(());
            }
            _ => {
                let known = "temperature, top_p, top_k, min_p, seed and max_tokens";
                return Err(format!("/set knows {known}, got {name:?}").into());
            }
        };
        sampling.validate(self.vocab_size)?;
        self.sampling = sampling;
        Ok(())
    }

    /// Shows the contents of the cache.
    fn show_cache(&self) -> Result {
        let ((tokens, used, all), context) = (self.writing.cache(), self.args.context);
        let [used, all] = [used, all].map(output::bytes);
        output::note(&format!("{}: {tokens} of {context} tokens, {used} of {all}\n", self.kv))
    }

    /// The messages without the `left_out` oldest ones. The system message remains first.
    fn conversation(&self, left_out: usize) -> Vec<Message> {
        let messages = self.messages.iter().skip(left_out).cloned();
        self.system.iter().map(|text| Message::system(text.as_str())).chain(messages).collect()
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
        let (messages, prompt) = self.prompt()?;
        let conversation = self.view(&messages);
        let room = self.args.context - prompt.len();
        let parser = ReplyParser::new(self.template.reply_format());
        let parser = parser.after_prompt(&self.template.render(&conversation)?);
        let mut printer = ReplyPrinter::new(parser, &self.args.stop).hides_reasoning(self.hides_reasoning);
        let sampling = self.sampling.clone();
        let max_tokens = room.min(self.max_tokens);
        let request = Request { max_tokens, sampling, stop: self.tokenizer.eos(), ..Request::new(&prompt) };
        let (mut stream, mut printed) = (self.tokenizer.stream_with_special().after(&prompt)?, Ok(()));
        STOPPED.store(false, Ordering::Relaxed);
        let stats = self.writing.generate(&request, |token| {
            printed = stream.push(token).map_err(Into::into).and_then(|piece| printer.push(&piece));
            let goes_on = printed.is_ok() && !printer.is_stopped() && !STOPPED.load(Ordering::Relaxed);
            if goes_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        printed?;
        printer.push(&stream.finish()?)?;
        let message = printer.message()?;
        output::note(&speed(&stats))?;
        Ok(message)
    }

    /// Returns the messages to answer and their tokens. If they leave too little room, drops the oldest turns until
    /// half of the context is free; otherwise every answer would recompute the whole conversation.
    fn prompt(&mut self) -> Result<(Vec<Message>, Vec<u32>)> {
        let context = self.args.context;
        let mut max = context - self.max_tokens.min(context / 4);
        let before = self.left_out;
        loop {
            let messages = self.conversation(self.left_out);
            let prompt = self.template.encode(&self.view(&messages), &self.tokenizer)?;
            if prompt.is_empty() {
                return Err("the chat template makes an empty text of this conversation".into());
            }
            let next = self.next_turn();
            // The last question may use the room reserved for its answer.
            if prompt.len() <= max || (next.is_none() && prompt.len() < context) {
                if self.left_out > before {
                    output::note(&format!("(--context {context} is full: the oldest messages are left out)\n"))?;
                }
                return Ok((messages, prompt));
            }
            let Some(next) = next else {
                return Err(format!(
                    "the message must have fewer tokens than --context {context}, got {}",
                    prompt.len()
                )
                .into());
            };
            (self.left_out, max) = (next, context / 2);
        }
    }

    /// The index of the second remaining turn.
    fn next_turn(&self) -> Option<usize> {
        let rest = self.messages.iter().enumerate().skip(self.left_out + 1);
        rest.filter(|(_, message)| message.role == ChatRole::User).map(|(i, _)| i).next()
    }

    fn view<'m>(&self, messages: &'m [Message]) -> Conversation<'m> {
        let conversation = Conversation::new(messages);
        self.thinking.map_or(conversation.clone(), |on| conversation.thinking(on))
    }
}
