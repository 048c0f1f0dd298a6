//! `kvant logits`: writes a model's logits for given tokens.

use std::path::PathBuf;

use kvant::Codec;
use kvant_models::{Logits, PoolOptions};

use crate::{
    Result,
    args::{ActivationArgs, Kv, ModelDeviceArgs},
    output, shipped, tokens,
};

/// Write the logits after each of the given tokens to a file
///
/// The file is a safetensors file with one f32 tensor `logits` [T, vocabulary]. Row t has the logits after tokens
/// 0..=t, fed from position 0. No token is added.
#[derive(clap::Args)]
pub struct LogitsArgs {
    /// Directory of a checkpoint in Hugging Face or MLX layout, a GGUF file, or a name on the Hugging Face Hub such as
    /// openai/gpt-oss-20b [default: the model that ships with kvant]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    #[command(flatten)]
    tokens: Tokens,
    /// Cache type: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, these with sealed pages
    /// (tq4c), K:V as in f16:tq4, or @FILE with types per layer
    #[arg(long, default_value_t = Kv::from(Codec::F32))]
    kv: Kv,
    /// Feed N tokens per pass [default: all at once]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    step: Option<u32>,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    activations: ActivationArgs,
    #[command(flatten)]
    device: ModelDeviceArgs,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Tokens {
    /// Token ids, as in "2 17 301"
    #[arg(long, value_name = "IDS")]
    tokens: Option<String>,
    /// File of token ids, separated by white space
    #[arg(long, value_name = "FILE")]
    tokens_file: Option<PathBuf>,
}

pub fn run(args: &LogitsArgs) -> Result {
    let tokens = match (&args.tokens.tokens, &args.tokens.tokens_file) {
        (Some(text), _) => tokens::parse(text, "--tokens")?,
        (None, Some(path)) => tokens::read(path)?,
        (None, None) => unreachable!("clap requires one of them"),
    };
    // Checked before the slow part.
    if let Some(folder) = args.out.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        return Err(format!("--out: {}: no such directory", folder.display()).into());
    }
    let files = shipped::files(args.model.as_deref())?;
    let device = args.device.open()?;
    let division = args.device.cache_division();
    let model = args.activations.load(&files, &device, tokens.len(), division)?;
    let step = args.step.map_or(tokens.len(), |step| step as usize);
    let mut sequence = model
        .new_pool(&PoolOptions { codecs: args.kv.codecs.clone(), longest: tokens.len(), ..PoolOptions::default() })?
        .sequence();
    let mut bytes: Vec<u8> = Vec::new();
    for chunk in tokens.chunks(step) {
        let logits = model.feed(&mut sequence, chunk, Logits::All)?.to_f32()?;
        bytes
            .try_reserve(size_of_val(&logits[..]))
            .map_err(|_| format!("there is no memory for the logits of {} tokens", tokens.len()))?;
        bytes.extend(logits.iter().flat_map(|x| x.to_le_bytes()));
    }
    let vocabulary = bytes.len() / 4 / tokens.len();
    write(&args.out, &bytes, [tokens.len(), vocabulary])?;
    output::note(&format!("{}: logits [{}, {vocabulary}] on {device}\n", args.out.display(), tokens.len()))
}

fn write(path: &std::path::Path, bytes: &[u8], shape: [usize; 2]) -> Result {
    // `safetensors::serialize_to_file` would replace a device such as `/dev/null` by a regular file.
    let tensor = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [0, bytes.len()]});
    let mut header = serde_json::json!({"logits": tensor}).to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    output::replace(path, &[&(header.len() as u64).to_le_bytes(), header.as_bytes(), bytes])
}
