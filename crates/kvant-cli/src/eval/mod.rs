//! `kvant eval`: measures the prediction quality and memory of cache types.
//!
//! The tokens are cut into windows. Each starts with an empty cache at position 0 and predicts its second to its last
//! token. All caches, including the f32 one, advance through a window together, a few tokens at a time: the f32
//! logits are computed once, and only a few rows of logits are held.

mod progress;
mod score;
mod stream;

use std::path::PathBuf;

use kvant::{Codec, Sequence, Tensor};
use kvant_models::{Files, Logits, PoolOptions, Tokenizer};
use serde::Serialize;

use self::{
    progress::Progress,
    score::{Prediction, Score},
};
use crate::{
    Result,
    args::{ActivationArgs, DeviceArgs, Kv},
    output, shipped, tokens,
};

/// Measure how well a model predicts a text with each cache type
///
/// The tokens are cut into windows. Each starts with an empty cache and predicts its second to its last token.
/// Divergence and agreement compare the next-token distributions with those of an f32 cache. Bytes per token are
/// those of the keys and values of one token in all layers, with its
/// share of the means of pages.
#[derive(clap::Args)]
pub struct EvalArgs {
    /// Directory of a checkpoint in Hugging Face or MLX layout, or a GGUF file [default: the model that ships with
    /// kvant]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    #[command(flatten)]
    source: TextSource,
    /// Cache types: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, these with page means (tq4c), or K:V as in f16:tq4
    #[arg(long, value_name = "KV,…", value_delimiter = ',', default_value = "f16,tq8,tq6,tq5,tq4,tq3,tq2")]
    kv: Vec<Kv>,
    /// Tokens in a window
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..))]
    window_tokens: u32,
    /// Tokens of a step [default: a page]. A token sees only the contents of the cache, so this number matters to types
    /// with page means only: steps of whole pages store them as prompts are stored, steps of one token as answers are
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    step_tokens: Option<u32>,
    /// Positions of a page: 16, 32, 64, 128 or 256
    #[arg(long, value_name = "N", default_value_t = PoolOptions::default().page_tokens)]
    page_tokens: usize,
    #[command(flatten)]
    activations: ActivationArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// One JSON object per cache type: kv, tokens, nats_per_token, perplexity, kl_mean, kl_p99, top1_agreement,
    /// bytes_per_token
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct TextSource {
    /// Text file; documents are separated by lines `<|doc|>`, and each becomes `<bos> text <eos>`
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The number of predictions.
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
}

#[derive(Serialize)]
struct EvalLine {
    kv: String,
    /// Predictions.
    tokens: usize,
    nats_per_token: f64,
    perplexity: f64,
    kl_mean: f64,
    kl_p99: f64,
    top1_agreement: f64,
    bytes_per_token: usize,
}

/// A cache type and its results.
struct Candidate {
    kv: Kv,
    sequence: Sequence,
    score: Score,
}

pub fn run(args: &EvalArgs) -> Result {
    let files = shipped::files(args.model.as_deref())?;
    let device = args.device.open()?;
    let tokens = read(&args.source, &files)?;
    let windows = stream::windows(&tokens, args.window_tokens as usize);
    if windows.is_empty() {
        return Err("nothing to predict: at least 2 tokens are required".into());
    }
    let model = args.activations.load(&files, &device)?;
    let vocabulary = model.vocab_size();
    if let Some((index, id)) = tokens.iter().enumerate().find(|&(_, &id)| id as usize >= vocabulary) {
        return Err(format!("token {index} must be below the vocabulary's {vocabulary}, got {id}").into());
    }
    let (longest, page_tokens) = (windows[0].len(), args.page_tokens);
    let step_tokens = args.step_tokens.map_or(page_tokens.max(1), |tokens| tokens as usize);
    let new_sequence = |kv: Kv| -> kvant_models::Result<Sequence> {
        Ok(model
            .new_pool(&PoolOptions { k: kv.k, v: kv.v, longest, page_tokens, ..PoolOptions::default() })?
            .sequence())
    };
    let mut exact = new_sequence(Kv::F32)?;
    let mut candidates = Vec::new();
    for &kv in &args.kv {
        candidates.push(Candidate { kv, sequence: new_sequence(kv)?, score: Score::default() });
    }

    let mut progress = Progress::new(windows.iter().map(|window| window.len()).sum());
    for window in windows {
        exact.truncate(0)?;
        candidates.iter_mut().try_for_each(|candidate| candidate.sequence.truncate(0))?;
        // The last token is predicted, but predicts nothing.
        for (chunk, targets) in window[..window.len() - 1].chunks(step_tokens).zip(window[1..].chunks(step_tokens)) {
            let reference = predictions(&model.feed(&mut exact, chunk, Logits::All)?)?;
            for candidate in &mut candidates {
                let logits = model.feed(&mut candidate.sequence, chunk, Logits::All)?;
                for ((exact, other), &token) in reference.iter().zip(&predictions(&logits)?).zip(targets) {
                    candidate.score.add(exact, other, token);
                }
            }
            progress.add(chunk.len());
        }
        progress.add(1);
    }
    progress.finish();

    if !args.json {
        output::text("kv         tokens   nats/token  perplexity   KL mean    KL p99     top-1     bytes/token\n")?;
    }
    candidates.iter().try_for_each(|candidate| print(candidate, args.json))
}

/// The tokens to predict.
fn read(source: &TextSource, files: &Files) -> Result<Vec<u32>> {
    if let Some(path) = &source.tokens {
        return tokens::read(path);
    }
    let Some(path) = &source.text else { unreachable!("clap asks for one of them") };
    let text = tokens::read_text(path)?;
    let tokenizer = Tokenizer::load_files(files)?;
    let mut tokens = Vec::new();
    for document in stream::documents(&text) {
        tokens.extend(tokenizer.encode(&document, true)?);
        tokens.extend(tokenizer.eos_token());
    }
    Ok(tokens)
}

fn predictions(logits: &Tensor) -> Result<Vec<Prediction>> {
    let vocabulary = logits.shape().last().copied().unwrap_or(0).max(1);
    Ok(logits.to_f32()?.chunks_exact(vocabulary).map(Prediction::new).collect())
}

fn print(candidate: &Candidate, json: bool) -> Result {
    let Candidate { kv, sequence, score } = candidate;
    let spec = sequence.pool().spec();
    let vector = |codec: Codec, dim: usize| {
        codec.bytes_per_vector(dim) as f64 + codec.bytes_per_mean(dim) as f64 / spec.page_tokens as f64
    };
    let bytes = spec.layers.iter().map(|l| l.kv_heads as f64 * (vector(l.k, l.head_dim) + vector(l.v, l.head_dim)));
    let line = EvalLine {
        kv: kv.to_string(),
        tokens: score.tokens(),
        nats_per_token: score.nats_per_token(),
        perplexity: score.nats_per_token().exp(),
        kl_mean: score.kl_mean(),
        kl_p99: score.kl_p99(),
        top1_agreement: score.top1_agreement(),
        bytes_per_token: bytes.sum::<f64>().round() as usize,
    };
    if json {
        return output::json_line(&line);
    }
    output::text(&format!(
        "{:<9} {:>7}   {:>10.5}  {:>10.4}  {:>8.2e}  {:>8.2e}  {:>7.3} %  {:>12}\n",
        line.kv,
        line.tokens,
        line.nats_per_token,
        line.perplexity,
        line.kl_mean,
        line.kl_p99,
        line.top1_agreement * 100.0,
        line.bytes_per_token
    ))
}
