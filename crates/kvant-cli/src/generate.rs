//! `kvant generate`: continues a text.

use std::{
    io::{IsTerminal, Read},
    ops::ControlFlow,
    path::PathBuf,
    sync::Arc,
    time::Instant,
};

use clap::builder::NonEmptyStringValueParser;
use kvant::{Codec, Sequence, device::DeviceKind};
use kvant_models::{
    Files, GenerateStats, LoadOptions, Model, PoolOptions, Request, Sampling, TextStream, Tokenizer,
    chat::{ChatTemplate, Conversation, GenerationDefaults, Message, ReplyFormat, ReplyParser},
    generate,
};
use serde::Serialize;

#[cfg(feature = "serve")]
use crate::drafts::{DraftArgs, Drafting};
use crate::{
    Result,
    args::{ActivationArgs, Kv, ModelDeviceArgs},
    memory::{self, Demand},
    output,
    reply::ReplyPrinter,
    shipped,
};

/// Continue a text
///
/// Without arguments: the small model that ships with kvant, and a suitable prompt.
#[derive(clap::Args)]
pub struct GenerateArgs {
    /// Like --model; the text can follow
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    place: Option<PathBuf>,
    /// Like --prompt
    #[arg(value_name = "PROMPT", conflicts_with = "prompt", requires = "place")]
    text: Option<String>,
    /// Directory of a checkpoint in Hugging Face or MLX layout, a GGUF file, or a name on the Hugging Face Hub such as
    /// openai/gpt-oss-20b [default: the model that ships with kvant]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// The text to continue; `-` reads it from standard input. Names of special tokens, such as `<eos>`, are parsed as
    /// these tokens. The beginning-of-text token is added if it is missing
    #[arg(long, allow_hyphen_values = true, default_value = shipped::PROMPT, hide_default_value = true)]
    prompt: String,
    /// The prompt is a message that the model answers: uses the checkpoint's chat template
    #[arg(long)]
    chat: bool,
    /// The system message
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    system: Option<String>,
    /// End the text before this string; can be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Stop after N tokens, or earlier at the model's end of text
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 256,
        value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 always selects the most probable token [default: 0.7; with --chat the model's, if it has one]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample from the most probable tokens with a total probability of P [default: 0.95; with --chat the model's, if
    /// it has one]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Sample from the K most probable tokens; 0 for all [default: 0; with --chat the model's, if it has one]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// The seed: equal seeds give equal texts on one machine
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 0)]
    seed: u64,
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
    /// One JSON object: text, reasoning (with --chat, if the model reasons), prompt_tokens, generated_tokens,
    /// decode_steps, accepted_drafts and rejected_drafts (with drafts), warm_up_seconds, prompt_tokens_per_s,
    /// decode_tokens_per_s, cache_bytes, cache_bytes_f16, kv, device; the text streams to standard error
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    text: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning: String,
    prompt_tokens: usize,
    generated_tokens: usize,
    /// Passes after the prompt, of one token and its drafts. The prompt's pass gives the first token.
    decode_steps: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    accepted_drafts: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rejected_drafts: Option<u64>,
    /// Time to compile kernels, not included in the rates; 0 on the CPU.
    warm_up_seconds: f64,
    /// Of the prompt's pass, including the first sampled token.
    prompt_tokens_per_s: f64,
    /// Of the tokens of the decode steps.
    decode_tokens_per_s: f64,
    /// The allocated bytes of the cache.
    cache_bytes: usize,
    /// Bytes of this cache in f16.
    cache_bytes_f16: usize,
    kv: String,
    device: String,
}

pub fn run(args: &GenerateArgs) -> Result {
    let files = shipped::files(args.model.as_deref().or(args.place.as_deref()))?;
    let device = args.device.open()?;
    let prompt = prompt(args)?;
    let tokenizer = Arc::new(Tokenizer::load_files(&files)?);
    let sampling = sampling(args, &files)?;
    let (prompt_ids, parser) = prompt_ids(args, &files, &tokenizer, &prompt)?;
    let longest = prompt_ids.len().saturating_add(args.max_tokens as usize);
    let kv = args.activations.kv(&device, args.kv.as_ref());
    #[cfg(feature = "serve")]
    let drafts = args.drafts.count();
    #[cfg(not(feature = "serve"))]
    let drafts = 0;
    let options = PoolOptions { codecs: kv.codecs.clone(), longest, drafts, ..PoolOptions::default() };
    let division = args.device.cache_division();
    let load = LoadOptions { cache_division: division, ..args.activations.options(&device) };
    #[cfg(feature = "serve")]
    let drafter = args.drafts.files(args.model.as_deref().or(args.place.as_deref()), &files)?;
    #[cfg(not(feature = "serve"))]
    let drafter = None;
    let demand = Demand {
        ranks: device.ranks(),
        pool: options.clone(),
        load,
        bytes: None,
        drafter: drafter.as_ref(),
        shorter: "--max-tokens",
    };
    memory::check(&files, &device, &demand)?;
    let model = args.activations.load(&files, &device, longest, division)?;
    let as_f16 = PoolOptions { codecs: Codec::F16.into(), drafts: 0, ..options.clone() };
    let cache_bytes_f16 = model.pool_spec(&as_f16)?.bytes;
    let mut source = Generator::start(args, model, &tokenizer, &options, drafter.as_ref())?;

    // On a terminal, the prompt and its continuation appear as one text.
    if !args.json && !args.chat && std::io::stderr().is_terminal() {
        output::note(&prompt)?;
    }
    let max_tokens = args.max_tokens as usize;
    let request = Request { max_tokens, sampling, stop: tokenizer.eos(), ..Request::new(&prompt_ids) };
    let warm_up_seconds = match device.kind() {
        DeviceKind::Cuda | DeviceKind::Metal => source.warm_up(&request)?,
        _ => 0.0,
    };
    // Special tokens separate the parts of an answer.
    let stream = tokenizer.stream().special(args.chat).after(&prompt_ids)?;
    let mut writer = Writer { stream, printer: ReplyPrinter::new(parser, &args.stop).json(args.json), json: args.json };
    let mut written = Ok(());
    let (stats, drafts) = source.generate(&request, |token| {
        written = writer.push(token);
        let goes_on = written.is_ok() && !writer.printer.is_stopped();
        if goes_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    written?;
    let (text, reasoning) = writer.finish()?;

    let accepted = drafts.map_or(0, |drafts| drafts.accepted as usize);
    let report = Report {
        text,
        reasoning,
        prompt_tokens: stats.prompt_tokens,
        generated_tokens: stats.generated_tokens,
        decode_steps: stats.decode_steps,
        accepted_drafts: drafts.map(|drafts| drafts.accepted),
        rejected_drafts: drafts.map(|drafts| drafts.tokens - drafts.accepted),
        warm_up_seconds: output::round3(warm_up_seconds),
        prompt_tokens_per_s: rate(stats.prompt_tokens, stats.prompt_seconds),
        decode_tokens_per_s: rate(stats.decode_steps + accepted, stats.decode_seconds),
        cache_bytes: source.cache_bytes(),
        cache_bytes_f16,
        kv: kv.to_string(),
        device: device.to_string(),
    };
    // The text is complete: a closed standard error is ignored.
    let _ = output::note(&report.people());
    if args.json { output::json_line(&report) } else { Ok(()) }
}

/// How a text is written: token by token, or with drafts.
enum Generator {
    Plain(Box<(Model, Sequence)>),
    #[cfg(feature = "serve")]
    Drafting(Drafting),
}

/// Counts of drafts.
#[derive(Clone, Copy)]
struct Drafts {
    tokens: u64,
    accepted: u64,
}

impl Generator {
    /// `drafter`: its files.
    fn start(
        args: &GenerateArgs,
        model: Model,
        tokenizer: &Arc<Tokenizer>,
        options: &PoolOptions,
        drafter: Option<&Files>,
    ) -> Result<Generator> {
        #[cfg(feature = "serve")]
        if args.drafts.count() > 0 {
            let dense_weights = args.activations.options(model.device()).dense_weights;
            let model = args.drafts.attach(model, drafter, dense_weights)?;
            let (tokenizer, count) = (Arc::clone(tokenizer), args.drafts.count());
            let drafting = Drafting::start(model, tokenizer, &options.codecs, options.longest, count)?;
            return Ok(Generator::Drafting(drafting));
        }
        let _ = (args, tokenizer, drafter);
        let sequence = model.new_pool(options)?.sequence();
        Ok(Generator::Plain(Box::new((model, sequence))))
    }

    fn warm_up(&mut self, request: &Request) -> Result<f64> {
        match self {
            Generator::Plain(plain) => warm_up(&plain.0, &mut plain.1, request),
            // The engine has compiled its kernels.
            #[cfg(feature = "serve")]
            Generator::Drafting(_) => Ok(0.0),
        }
    }

    fn generate(
        &mut self,
        request: &Request,
        on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<(GenerateStats, Option<Drafts>)> {
        match self {
            Generator::Plain(plain) => Ok((generate(&plain.0, &mut plain.1, request, on_token)?, None)),
            #[cfg(feature = "serve")]
            Generator::Drafting(drafting) => {
                let stats = drafting.generate(request, on_token)?;
                let drafts = drafting.stats().drafts;
                Ok((stats, Some(Drafts { tokens: drafts.tokens, accepted: drafts.accepted })))
            }
        }
    }

    fn cache_bytes(&self) -> usize {
        match self {
            Generator::Plain(plain) => plain.1.pool().spec().bytes,
            #[cfg(feature = "serve")]
            Generator::Drafting(drafting) => drafting.stats().pages_bytes,
        }
    }
}

/// Runs the kernels of a request once, because a GPU compiles them at their first use. Returns the time. The sequence
/// is empty before and after.
fn warm_up(model: &Model, sequence: &mut Sequence, request: &Request) -> Result<f64> {
    let started = Instant::now();
    // Kernels depend on the number of tokens of a pass: a full pass, and the rest.
    let pass = model.pass_tokens();
    let tokens = request.prompt.len();
    let prompt = &request.prompt[..tokens.min(pass + tokens % pass)];
    let request = Request { prompt, max_tokens: request.max_tokens.min(3), stop: &[], ..request.clone() };
    generate(model, sequence, &request, |_| ControlFlow::Continue(()))?;
    sequence.truncate(0)?;
    Ok(started.elapsed().as_secs_f64())
}

/// Prints the text piece by piece.
struct Writer<'a> {
    stream: TextStream<&'a Tokenizer>,
    printer: ReplyPrinter,
    json: bool,
}

impl Writer<'_> {
    fn push(&mut self, token: u32) -> Result {
        self.printer.push(&self.stream.push(token)?)
    }

    /// Writes held-back text and ends the last line. Returns the whole text and the reasoning.
    fn finish(self) -> Result<(String, String)> {
        let Writer { stream, mut printer, json } = self;
        printer.push(&stream.finish()?)?;
        let (text, reasoning) = printer.finish()?;
        output::people(if text.ends_with('\n') { "" } else { "\n" }, json)?;
        Ok((text, reasoning))
    }
}

impl Report {
    fn people(&self) -> String {
        let warm_up = match self.warm_up_seconds {
            0.0 => String::new(),
            seconds => format!("kernels compiled or loaded in {seconds:.1} s, not part of the rates\n"),
        };
        let drafts = match (self.accepted_drafts, self.rejected_drafts) {
            (Some(accepted), Some(rejected)) => format!("drafts: {accepted} of {} accepted\n", accepted + rejected),
            _ => String::new(),
        };
        format!(
            "\nprompt: {} tokens, {:.0} tokens/s; generated: {} tokens, in {} decode steps after the first, {:.0} tokens/s\n\
             {drafts}{warm_up}device: {}\n\
             cache {}: {}, where f16 would take {}\n",
            self.prompt_tokens,
            self.prompt_tokens_per_s,
            self.generated_tokens,
            self.decode_steps,
            self.decode_tokens_per_s,
            self.device,
            self.kv,
            output::bytes(self.cache_bytes),
            output::bytes(self.cache_bytes_f16),
        )
    }
}

/// Tokens per second; 0 when there were none.
fn rate(tokens: usize, seconds: f64) -> f64 {
    if tokens == 0 { 0.0 } else { output::round3(tokens as f64 / seconds.max(1e-9)) }
}

fn prompt(args: &GenerateArgs) -> Result<String> {
    let given = args.text.as_ref().unwrap_or(&args.prompt);
    if given != "-" {
        return Ok(given.clone());
    }
    let mut text = String::new();
    std::io::stdin().lock().read_to_string(&mut text).map_err(|error| format!("standard input: {error}"))?;
    Ok(text)
}

/// The tokens of the prompt, and a parser of the answer.
fn prompt_ids(
    args: &GenerateArgs,
    files: &Files,
    tokenizer: &Tokenizer,
    prompt: &str,
) -> Result<(Vec<u32>, ReplyParser)> {
    if !args.chat {
        return Ok((tokenizer.encode_prompt(prompt)?, ReplyParser::new(ReplyFormat::Plain)));
    }
    let template = ChatTemplate::load_files(files)?
        .ok_or("--chat: the model has no chat template; `kvant chat` has --template and --plain")?;
    let system = args.system.as_deref().map(Message::system);
    let messages: Vec<Message> = system.into_iter().chain([Message::user(prompt)]).collect();
    let conversation = Conversation::new(&messages);
    let ids = template.encode(&conversation, tokenizer)?;
    if ids.is_empty() {
        return Err("--chat: the chat template makes an empty text of this message".into());
    }
    Ok((ids, ReplyParser::new(template.reply_format()).after_prompt(&template.render(&conversation)?)))
}

/// The sampling parameters. Tokens that the checkpoint suppresses are never sampled.
fn sampling(args: &GenerateArgs, files: &Files) -> Result<Sampling> {
    let defaults = GenerationDefaults::load_files(files)?;
    let own = Sampling::usual();
    let mut sampling = defaults.sampling(own.clone());
    if !args.chat {
        let suppressed = std::mem::take(&mut sampling.suppressed);
        sampling = own;
        sampling.suppressed = suppressed;
    }
    sampling.temperature = args.temperature.unwrap_or(sampling.temperature);
    sampling.top_p = args.top_p.unwrap_or(sampling.top_p);
    sampling.top_k = args.top_k.unwrap_or(sampling.top_k);
    Ok(sampling.seed(args.seed))
}

#[cfg(test)]
mod tests {
    use kvant::Device;

    use super::*;

    #[test]
    fn a_warm_up_leaves_no_trace() {
        let files = kvant_models::Files::directory(concat!(env!("CARGO_MANIFEST_DIR"), "/model"));
        let model = Model::load_files(&files, &Device::cpu(), &Default::default()).unwrap();
        let prompt: Vec<u32> = (0..300).map(|i| i * 37 % 4000 + 5).collect();
        let sampling = Sampling::default().temperature(1.0).seed(3);
        let request = Request { max_tokens: 5, sampling, ..Request::new(&prompt) };
        let run = |warm: bool| {
            let mut sequence =
                model.new_pool(&PoolOptions { longest: 305, ..PoolOptions::default() }).unwrap().sequence();
            if warm {
                assert!(warm_up(&model, &mut sequence, &request).unwrap() > 0.0);
                assert!(sequence.is_empty());
            }
            let mut tokens = Vec::new();
            let stats = generate(&model, &mut sequence, &request, |token| {
                tokens.push(token);
                ControlFlow::Continue(())
            });
            stats.unwrap();
            tokens
        };
        assert_eq!(run(true), run(false));
    }
}
