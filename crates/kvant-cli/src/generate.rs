//! `kvant generate`: continues a text.

use std::{
    io::{IsTerminal, Read},
    ops::ControlFlow,
    path::PathBuf,
};

use kvant::Codec;
use kvant_models::{CacheOptions, Request, Sampling, TextStream, Tokenizer, generate};
use serde::Serialize;

use crate::{
    Result,
    args::{ActivationArgs, DeviceArgs, Kv},
    output, shipped,
};

/// Continue a text
///
/// Without arguments: the small model that ships with kvant, and a prompt that suits it.
#[derive(clap::Args)]
pub struct Args {
    /// Directory of a checkpoint, Hugging Face or MLX layout [default: the model that ships with kvant]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// The text to continue; `-` reads it from standard input. The token that begins a text is put in front, and names of
    /// special tokens, as `<eos>`, stand for these tokens
    #[arg(long, allow_hyphen_values = true, default_value = shipped::PROMPT, hide_default_value = true)]
    prompt: String,
    /// Stop after so many tokens, or before at the model's end of text
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 256,
        value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 always takes the most probable token
    #[arg(long, value_name = "T", allow_negative_numbers = true, default_value_t = 0.7)]
    temperature: f32,
    /// Take from the most probable tokens that together have probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true, default_value_t = 0.9)]
    top_p: f32,
    /// Take from the K most probable tokens; 0 for all
    #[arg(long, value_name = "K", allow_negative_numbers = true, default_value_t = 0)]
    top_k: usize,
    /// The same seed gives the same text
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 0)]
    seed: u64,
    /// Cache type: f32, f16, bf16, tq8, tq6, tq5, tq4, or K:V as in f16:tq4
    #[arg(long, default_value_t = Kv::F16)]
    kv: Kv,
    #[command(flatten)]
    activations: ActivationArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// One JSON object: text, prompt_tokens, generated_tokens, prompt_tokens_per_s, decode_tokens_per_s, cache_bytes,
    /// cache_bytes_f16, kv, device; the text streams to standard error
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    text: String,
    prompt_tokens: usize,
    generated_tokens: usize,
    prompt_tokens_per_s: f64,
    decode_tokens_per_s: f64,
    /// Of the whole cache, as allocated.
    cache_bytes: usize,
    /// The same cache in f16.
    cache_bytes_f16: usize,
    kv: String,
    device: String,
}

pub fn run(args: &Args) -> Result {
    let directory = shipped::directory(args.model.as_deref())?;
    let device = args.device.open()?;
    let prompt = prompt(args)?;
    let tokenizer = Tokenizer::load(&directory)?;
    let prompt_ids = tokenizer.encode(&prompt, true)?;
    let model = args.activations.load(&directory, &device)?;
    let capacity = prompt_ids.len().saturating_add(args.max_tokens as usize);
    let options = CacheOptions { k: args.kv.k, v: args.kv.v, capacity, ..CacheOptions::default() };
    let mut cache = model.new_cache(&options)?;

    // The prompt and its continuation are one text, where a person sees both streams.
    if !args.json && std::io::stderr().is_terminal() {
        output::note(&prompt)?;
    }
    let sampling =
        Sampling { temperature: args.temperature, top_p: args.top_p, top_k: args.top_k, min_p: 0.0, seed: args.seed };
    let max_tokens = args.max_tokens as usize;
    let request = Request { max_tokens, sampling, stop: tokenizer.eos(), ..Request::new(&prompt_ids) };
    let mut writer = Writer { stream: tokenizer.stream(), text: String::new(), json: args.json };
    let mut written = Ok(());
    let stats = generate(&model, &mut cache, &request, |token| {
        written = writer.push(token);
        if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    written?;
    let text = writer.finish()?;

    let report = Report {
        text,
        prompt_tokens: stats.prompt_tokens,
        generated_tokens: stats.generated_tokens,
        prompt_tokens_per_s: rate(stats.prompt_tokens, stats.prompt_seconds),
        decode_tokens_per_s: rate(stats.decode_steps, stats.decode_seconds),
        cache_bytes: cache.bytes(),
        cache_bytes_f16: cache.bytes_as(Codec::F16),
        kv: args.kv.to_string(),
        device: device.to_string(),
    };
    // The text is out: who does not want to read this need not.
    let _ = output::note(&report.people());
    if args.json { output::json_line(&report) } else { Ok(()) }
}

/// Where the text goes, piece by piece.
struct Writer<'a> {
    stream: TextStream<'a>,
    text: String,
    json: bool,
}

impl Writer<'_> {
    fn push(&mut self, token: u32) -> Result {
        let piece = self.stream.push(token)?;
        self.text.push_str(&piece);
        output::people(&piece, self.json)
    }

    /// Writes what was held back, and ends the last line; returns the whole text.
    fn finish(self) -> Result<String> {
        let Writer { stream, mut text, json } = self;
        let rest = stream.finish()?;
        text.push_str(&rest);
        let end = if text.ends_with('\n') { "" } else { "\n" };
        output::people(&format!("{rest}{end}"), json)?;
        Ok(text)
    }
}

impl Report {
    fn people(&self) -> String {
        format!(
            "\nprompt {} tokens, {:.0} tokens/s; decode {} tokens, {:.0} tokens/s; on {}\n\
             cache {}: {}, where f16 would take {}\n",
            self.prompt_tokens,
            self.prompt_tokens_per_s,
            self.generated_tokens,
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

fn prompt(args: &Args) -> Result<String> {
    if args.prompt != "-" {
        return Ok(args.prompt.clone());
    }
    let mut text = String::new();
    std::io::stdin().lock().read_to_string(&mut text).map_err(|error| format!("standard input: {error}"))?;
    Ok(text)
}
