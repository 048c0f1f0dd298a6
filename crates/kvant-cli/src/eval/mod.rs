//! `kvant eval`: measures the prediction quality and memory of cache types.

mod answers;
mod budget;
mod cache_type;
mod exponential;
mod formats;
mod measure;
mod needles;
mod progress;
mod report;
mod resume;
mod score;
mod sequence;
mod stream;
mod vectors;

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
};

use kvant::Codec;
use kvant_models::{Config, Files, PoolOptions, Tokenizer};
use serde::{Deserialize, Serialize};

use self::{
    answers::AnswerLine, cache_type::CacheType, measure::Measurement, needles::NeedleLine, progress::Progress,
    score::Score,
};
use crate::{
    Result,
    args::{ActivationArgs, DeviceArgs},
    output, shipped, tokens,
};

/// Measure how well a model predicts a text with each cache type, or answers with it
///
/// The tokens are divided into windows. Each starts with an empty cache and predicts its second to its last token.
/// Divergence and agreement compare the next-token distributions with the ones of an f32 cache. Bytes per token are the
/// keys and values of one token in all layers, on average over a window.
#[derive(clap::Args)]
pub struct EvalArgs {
    /// Directory of a checkpoint in Hugging Face or MLX layout, a GGUF file, or a name on the Hugging Face Hub such as
    /// openai/gpt-oss-20b [default: the model that ships with kvant]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    #[command(flatten)]
    source: TextSource,
    /// Cache types: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, these with sealed pages (tq4c), K:V as in f16:tq4, or
    /// @FILE with types per layer. For comparison, also formats of other software: q8_0, q4_0 and iq4_nl of llama.cpp
    /// (q4_0-rot rotated), mlx4, fp8, nvfp4, kivi4, kivi2, kvarn4, kvarn2. For --budget, the types to choose from
    /// [default: f16 and tq8c to tq2c; for --budget tq8c to tq2c]
    #[arg(long, value_name = "KV,…", value_delimiter = ',')]
    kv: Vec<CacheType>,
    #[command(flatten)]
    answers: answers::AnswerArgs,
    #[command(flatten)]
    budget: budget::BudgetArgs,
    #[command(flatten)]
    report: report::ReportArgs,
    #[command(flatten)]
    needles: needles::NeedleArgs,
    /// Maximum tokens in a window
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..))]
    window_tokens: u32,
    /// Positions per page: 16, 32, 64, 128 or 256
    #[arg(long, value_name = "N", default_value_t = PoolOptions::default().page_tokens)]
    page_tokens: usize,
    #[command(flatten)]
    activations: ActivationArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// One JSON object per cache type: kv, tokens, nats_per_token, perplexity, kl_mean, kl_p99, top1_agreement,
    /// bytes_per_token. With --answers kv, prompt_tokens, answer_tokens, first_divergence, kl_mean, kl_p99,
    /// top1_agreement. With --needle-tokens, also one per length: kv, context_tokens, needle_probability,
    /// needle_probability_min, pass_keys_found, pass_keys
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct TextSource {
    /// Text file; documents are separated by lines `<|doc|>`, and each becomes `<bos> text <eos>`
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// File of token ids, separated by white space: one stream, without added tokens
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
}

impl TextSource {
    fn path(&self) -> &Path {
        self.text.as_deref().or(self.tokens.as_deref()).unwrap_or_else(|| unreachable!("clap requires one of them"))
    }
}

/// The default cache types.
const DEFAULTS: [Codec; 7] = [
    Codec::F16,
    Codec::tq_centred(8),
    Codec::tq_centred(6),
    Codec::tq_centred(5),
    Codec::tq_centred(4),
    Codec::tq_centred(3),
    Codec::tq_centred(2),
];

/// Maximum tokens of a step, and maximum rows of logits. A token sees only the contents of the cache, which do not
/// depend on steps.
const STEP_TOKENS: usize = 512;
const STEP_LOGITS: usize = 1 << 26;

/// The results of a cache type.
#[derive(Clone, Serialize, Deserialize)]
struct EvalLine {
    kv: String,
    /// Number of predictions.
    tokens: usize,
    nats_per_token: f64,
    perplexity: f64,
    kl_mean: f64,
    kl_p99: f64,
    top1_agreement: f64,
    bytes_per_token: usize,
}

pub fn run(args: &EvalArgs) -> Result {
    let files = shipped::files(args.model.as_deref())?;
    let device = args.device.open()?;
    let tokens = read(&args.source, &files)?;
    let used = args.budget.asked().map_or(tokens.len(), |_| args.budget.tokens().min(tokens.len()));
    let windows = stream::windows(&tokens[..used], args.window_tokens as usize);
    if windows.is_empty() {
        let from = args.source.path().display();
        return Err(format!("{from}: at least 2 tokens are required, got {}", tokens.len()).into());
    }
    let model = args.activations.load(&files, &device, context(args, &files)?)?;
    let vocabulary = model.vocab_size();
    if let Some((index, id)) = tokens.iter().enumerate().find(|&(_, &id)| id as usize >= vocabulary) {
        return Err(format!("token {index} must be below the vocabulary's {vocabulary}, got {id}").into());
    }
    let page_tokens = args.page_tokens;
    let step_tokens = (STEP_LOGITS / vocabulary.max(1)).clamp(1, STEP_TOKENS);
    let measurement = Measurement { model: &model, windows, step_tokens, page_tokens };
    let subject = subject(args, &measurement);
    let answers = args.answers.answers.then(|| args.answers.prompts(&model, &tokens, page_tokens));
    let needles = || {
        let tokenizer = Tokenizer::load_files(&files).ok();
        args.needles.needles(&measurement, tokenizer.as_ref())
    };
    if args.report.report.is_none() && (answers.is_some() || args.needles.asked()) {
        let kv = if args.kv.is_empty() { &defaults()[..] } else { &args.kv };
        if let Some(answers) = answers {
            // Answers are compared with f16, which is the first default.
            let kv = if args.kv.is_empty() { &kv[1..] } else { kv };
            AnswerLine::print_all(&answers.measure(kv)?, args.json)?;
        }
        if args.needles.asked() {
            NeedleLine::print_all(&needles::lines(kv, &needles()?)?, args.json)?;
        }
        return Ok(());
    }
    let lines = match (args.budget.asked(), &args.report.report) {
        (Some((bits, out)), _) => budget::run(bits, out, &args.kv, &measurement, &subject)?,
        (None, Some(folder)) => report::run(folder, &args.kv, &measurement, &needles()?, answers.as_ref(), &subject)?,
        _ if args.kv.is_empty() => lines(&defaults(), &measurement)?,
        _ => lines(&args.kv, &measurement)?,
    };
    if !args.json {
        output::text("kv           tokens   nats/token  perplexity   KL mean    KL p99     top-1     bytes/token\n")?;
    }
    lines.iter().try_for_each(|line| line.print(args.json))
}

/// Maximum tokens of a sequence: a window, an answer with its prompt, or, because a report also looks for needles, the
/// context that the model was made for.
fn context(args: &EvalArgs, files: &Files) -> Result<usize> {
    let window = args.window_tokens as usize;
    if args.report.report.is_none() && !args.answers.answers {
        return Ok(window.max(args.needles.longest()));
    }
    let made_for = Config::load_files(files)?.max_position_embeddings;
    if args.report.report.is_none() {
        return Ok(args.answers.longest(made_for.unwrap_or(usize::MAX)).max(args.needles.longest()));
    }
    Ok(made_for.unwrap_or(window).max(window))
}

fn defaults() -> [CacheType; 7] {
    DEFAULTS.map(|codec| CacheType::from(kvant_models::KvCodec::from(codec)))
}

/// Describes the measurement in one line.
fn subject(args: &EvalArgs, measurement: &Measurement) -> String {
    let Measurement { model, windows, page_tokens, .. } = measurement;
    let mut hasher = DefaultHasher::new();
    windows.hash(&mut hasher);
    let (name, device) =
        (args.model.as_deref().map_or("shipped".into(), |path| path.to_string_lossy()), model.device());
    let text = format!("{:016x}", hasher.finish());
    format!("model {name:?} in {} on {device}, text {text}, pages of {page_tokens}", model.activations())
}

/// Measures cache types.
fn lines(kv: &[CacheType], measurement: &Measurement) -> Result<Vec<EvalLine>> {
    let mut progress = Progress::new("", measurement.tokens());
    let scores = measurement.scores(kv, &mut progress)?;
    progress.finish();
    kv.iter().zip(&scores).map(|(kv, score)| EvalLine::new(kv, measurement, score)).collect()
}

/// Reads the tokens to predict.
fn read(source: &TextSource, files: &Files) -> Result<Vec<u32>> {
    if let Some(path) = &source.tokens {
        return tokens::read(path);
    }
    let Some(path) = &source.text else { unreachable!("clap requires one of them") };
    let text = tokens::read_text(path)?;
    let tokenizer = Tokenizer::load_files(files)?;
    let mut tokens = Vec::new();
    for document in stream::documents(&text) {
        tokens.extend(tokenizer.encode(&document, true)?);
        tokens.extend(tokenizer.eos_token());
    }
    Ok(tokens)
}

impl EvalLine {
    fn new(kv: &CacheType, measurement: &Measurement, score: &Score) -> Result<EvalLine> {
        Ok(EvalLine {
            kv: kv.to_string(),
            tokens: score.tokens(),
            nats_per_token: score.nats_per_token(),
            perplexity: score.nats_per_token().exp(),
            kl_mean: score.kl_mean(),
            kl_p99: score.kl_p99(),
            top1_agreement: score.top1_agreement(),
            bytes_per_token: kv.bytes_per_token(&measurement.spec(&kv.codecs())?, measurement.longest()),
        })
    }

    fn print(&self, json: bool) -> Result {
        if json {
            return output::json_line(self);
        }
        output::text(&format!(
            "{:<11} {:>7}   {:>10.5}  {:>10.4}  {:>8.2e}  {:>8.2e}  {:>7.3} %  {:>12}\n",
            self.kv,
            self.tokens,
            self.nats_per_token,
            self.perplexity,
            self.kl_mean,
            self.kl_p99,
            self.top1_agreement * 100.0,
            self.bytes_per_token
        ))
    }
}
