//! `kvant eval`: measures the prediction quality and memory of cache types.

use std::path::{Path, PathBuf};

use kvant_eval::{EvalOptions, Subject, documents};
use kvant_models::{CacheDivision, Files, Tokenizer};

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
    #[command(flatten)]
    options: EvalOptions,
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

pub fn run(args: &EvalArgs) -> Result {
    let EvalArgs { options, json, .. } = args;
    let files = shipped::files(args.model.as_deref())?;
    let device = args.device.open()?;
    let tokens = read(&args.source, &files)?;
    if options.windows(&tokens).is_empty() {
        let from = args.source.path().display();
        return Err(format!("{from}: at least 2 tokens are required, got {}", tokens.len()).into());
    }
    let model = args.activations.load(&files, &device, options.context(&files)?, CacheDivision::default())?;
    let name = args.model.as_deref().map_or("shipped".into(), Path::to_string_lossy);
    let subject = Subject { model: &model, name: &name, files: &files, tokens: &tokens };
    options.run(&subject, &mut |lines| output::text(&if *json { lines.json()? } else { lines.table() }))
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
    for document in documents(&text) {
        tokens.extend(tokenizer.encode(&document, true)?);
        tokens.extend(tokenizer.eos_token());
    }
    Ok(tokens)
}
