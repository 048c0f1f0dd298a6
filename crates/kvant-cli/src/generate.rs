//! `kvant generate`: continues a text.

use std::{
    io::{IsTerminal, Read},
    ops::ControlFlow,
    path::PathBuf,
    time::Instant,
};

use kvant::{Codec, Sequence, device::DeviceKind};
use kvant_models::{Model, PoolOptions, Request, Sampling, TextStream, Tokenizer, generate};
use serde::Serialize;

use crate::{
    Result,
    args::{ActivationArgs, DeviceArgs, Kv},
    memory::{self, Demand},
    output, shipped,
};

/// Continue a text
///
/// Without arguments: the small model that ships with kvant, and a prompt that suits it.
#[derive(clap::Args)]
pub struct GenerateArgs {
    /// Directory of a checkpoint in Hugging Face or MLX layout, or a GGUF file [default: the model that ships with
    /// kvant]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// The text to continue; `-` reads it from standard input. Names of special tokens, such as `<eos>`, become these
    /// tokens. The token that starts a text is added if it is missing
    #[arg(long, allow_hyphen_values = true, default_value = shipped::PROMPT, hide_default_value = true)]
    prompt: String,
    /// Stop after N tokens, or earlier at the model's end of text
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 256,
        value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 always selects the most probable token
    #[arg(long, value_name = "T", allow_negative_numbers = true, default_value_t = 0.7)]
    temperature: f32,
    /// Sample from the most probable tokens with a total probability of P
    #[arg(long, value_name = "P", allow_negative_numbers = true, default_value_t = 0.9)]
    top_p: f32,
    /// Sample from the K most probable tokens; 0 for all
    #[arg(long, value_name = "K", allow_negative_numbers = true, default_value_t = 0)]
    top_k: usize,
    /// The same seed gives the same text
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 0)]
    seed: u64,
    /// Cache type [default: bf16 on CUDA, f16 elsewhere]: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, or K:V as in
    /// f16:tq4
    #[arg(long, value_name = "KV")]
    kv: Option<Kv>,
    #[command(flatten)]
    activations: ActivationArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// One JSON object: text, prompt_tokens, generated_tokens, decode_steps, warm_up_seconds, prompt_tokens_per_s,
    /// decode_tokens_per_s, cache_bytes, cache_bytes_f16, kv, device; the text streams to standard error
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    text: String,
    prompt_tokens: usize,
    generated_tokens: usize,
    /// Passes of one token after the prompt. The prompt's pass gives the first token.
    decode_steps: usize,
    /// Time to compile kernels, which is not part of the rates; 0 on the CPU.
    warm_up_seconds: f64,
    /// Of the prompt's pass, the first draw included.
    prompt_tokens_per_s: f64,
    /// Of the decode steps.
    decode_tokens_per_s: f64,
    /// Of the whole cache, as allocated.
    cache_bytes: usize,
    /// The same cache in f16.
    cache_bytes_f16: usize,
    kv: String,
    device: String,
}

pub fn run(args: &GenerateArgs) -> Result {
    let files = shipped::files(args.model.as_deref())?;
    let device = args.device.open()?;
    let prompt = prompt(args)?;
    let tokenizer = Tokenizer::load_files(&files)?;
    let prompt_ids = tokenizer.encode_prompt(&prompt)?;
    let longest = prompt_ids.len().saturating_add(args.max_tokens as usize);
    let kv = args.kv.unwrap_or_else(|| args.activations.kv(&device));
    let options = PoolOptions { k: kv.k, v: kv.v, longest, ..PoolOptions::default() };
    let load = args.activations.options(&device);
    memory::check(&files, &device, &Demand { pool: options, load, bytes: None, shorter: "--max-tokens" })?;
    let model = args.activations.load(&files, &device)?;
    let as_f16 = PoolOptions { k: Codec::F16, v: Codec::F16, ..options };
    let mut sequence = model.new_pool(&options)?.sequence();

    // The prompt and its continuation are one text, where a person sees both streams.
    if !args.json && std::io::stderr().is_terminal() {
        output::note(&prompt)?;
    }
    let sampling =
        Sampling::default().temperature(args.temperature).top_p(args.top_p).top_k(args.top_k).seed(args.seed);
    let max_tokens = args.max_tokens as usize;
    let request = Request { max_tokens, sampling, stop: tokenizer.eos(), ..Request::new(&prompt_ids) };
    let warm_up_seconds = match device.kind() {
        DeviceKind::Cuda | DeviceKind::Metal => warm_up(&model, &mut sequence, &request)?,
        _ => 0.0,
    };
    let mut writer = Writer { stream: tokenizer.stream(), text: String::new(), json: args.json };
    let mut written = Ok(());
    let stats = generate(&model, &mut sequence, &request, |token| {
        written = writer.push(token);
        if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    written?;
    let text = writer.finish()?;

    let report = Report {
        text,
        prompt_tokens: stats.prompt_tokens,
        generated_tokens: stats.generated_tokens,
        decode_steps: stats.decode_steps,
        warm_up_seconds: output::round3(warm_up_seconds),
        prompt_tokens_per_s: rate(stats.prompt_tokens, stats.prompt_seconds),
        decode_tokens_per_s: rate(stats.decode_steps, stats.decode_seconds),
        cache_bytes: sequence.pool().spec().bytes,
        cache_bytes_f16: model.pool_spec(&as_f16)?.bytes,
        kv: kv.to_string(),
        device: device.to_string(),
    };
    // The text is out: who does not want to read this need not.
    let _ = output::note(&report.people());
    if args.json { output::json_line(&report) } else { Ok(()) }
}

/// Runs the kernels of a request once, because a GPU compiles them at their first use. Returns the time. The sequence
/// is empty before and after.
fn warm_up(model: &Model, sequence: &mut Sequence, request: &Request) -> Result<f64> {
    let started = Instant::now();
    // Kernels depend on the tokens of a pass: one full pass, and the rest.
    let pass = model.pass_tokens();
    let tokens = request.prompt.len();
    let prompt = &request.prompt[..tokens.min(pass + tokens % pass)];
    let request = Request { prompt, max_tokens: request.max_tokens.min(3), stop: &[], ..request.clone() };
    generate(model, sequence, &request, |_| ControlFlow::Continue(()))?;
    sequence.truncate(0)?;
    Ok(started.elapsed().as_secs_f64())
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
        let warm_up = match self.warm_up_seconds {
            0.0 => String::new(),
            seconds => format!("kernels compiled or loaded in {seconds:.1} s, not part of the rates\n"),
        };
        format!(
            "\nprompt: {} tokens, {:.0} tokens/s; generated: {} tokens, in {} decode steps after the first, {:.0} tokens/s\n\
             {warm_up}device: {}\n\
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
    if args.prompt != "-" {
        return Ok(args.prompt.clone());
    }
    let mut text = String::new();
    std::io::stdin().lock().read_to_string(&mut text).map_err(|error| format!("standard input: {error}"))?;
    Ok(text)
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
