//! `kvant bench model`: measures a model's speed on a device, relative to the device's memory bandwidth.

#[cfg(feature = "serve")]
mod drafts;
mod parts;
mod printout;
mod read;

use std::path::PathBuf;

use kvant_models::{Model, Sampling};

#[cfg(feature = "serve")]
use self::drafts::DraftCase;
use self::{
    parts::Parts,
    printout::{ModelLine, Printout},
};
use super::timing::{self, Timing};
#[cfg(feature = "serve")]
use crate::drafts::DraftArgs;
use crate::{
    Result,
    args::{ActivationArgs, Kv, ModelDeviceArgs},
    shipped,
};

#[derive(clap::Args)]
pub struct ModelArgs {
    /// Directory of a checkpoint in Hugging Face or MLX layout, a GGUF file, or a name on the Hugging Face Hub such as
    /// openai/gpt-oss-20b [default: the model that ships with kvant]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Lengths of prompts. If any of --prompts, --decode and --sequences is given, only the given ones are measured
    /// [default: 512,6752, within the model's context]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    prompts: Option<Vec<u32>>,
    /// Tokens in the cache of one decoding sequence, including the new one [default: 128,32768, within the model's
    /// context]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    decode: Option<Vec<u32>>,
    /// Numbers of sequences that decode together [default: 1,8,32]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4096))]
    sequences: Option<Vec<u32>>,
    /// Tokens in the cache of each of --sequences at the first step [default: 2048, within the model's context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Cache types [default: bf16 on CUDA, f16 elsewhere]: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, these with
    /// sealed pages (tq4c), K:V as in f16:tq4, or @FILE with types per layer
    #[arg(long, value_name = "KV,…", value_delimiter = ',')]
    kv: Vec<Kv>,
    /// Temperatures of the draws of steps; 0 takes the most probable token
    #[arg(long, value_name = "T,…", value_delimiter = ',', default_value = "0")]
    temperature: Vec<f32>,
    #[cfg(feature = "serve")]
    #[command(flatten)]
    drafts: DraftArgs,
    /// Measure an engine with drafts, and accept these shares of them whatever the model samples; without --drafter,
    /// drafts are arbitrary tokens. The cases are --sequences at --context
    #[cfg(feature = "serve")]
    #[arg(long, value_name = "P,…", value_delimiter = ',', value_parser = share)]
    acceptance: Vec<f32>,
    #[command(flatten)]
    activations: ActivationArgs,
    #[command(flatten)]
    device: ModelDeviceArgs,
    /// Seconds of measurement per case
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// One JSON object per line: op (read, copy, load, prompt, decode, batch), device, kv, sequences, context,
    /// temperature, us_first, us_median, us_min, tokens_per_second, bytes, gbps, of_read; null where not applicable.
    /// With drafts, op is drafts, and other fields are those of the text
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ModelArgs) -> Result {
    let budget = timing::budget(args.seconds)?;
    let draws: Vec<Sampling> = args.temperature.iter().map(|&t| Sampling::default().temperature(t)).collect();
    draws.iter().try_for_each(|sampling| sampling.validate(usize::MAX))?;
    let files = shipped::files(args.model.as_deref())?;
    let device = args.device.open()?;
    let mut report = Printout { device: device.clone(), json: args.json, read_gbps: 0.0 };
    report.heading()?;
    // Measured before the model takes the memory.
    let rates = read::measure(&device, budget)?;
    for (op, timing, bytes) in [("read", &rates.read, rates.read_bytes), ("copy", &rates.copy, rates.copy_bytes)] {
        report.read_gbps = report.read_gbps.max(bytes as f64 / timing.median_us / 1e3);
        report.print(ModelLine { bytes: Some(bytes), ..report.line(op, timing) })?;
    }
    let default = [args.activations.kv(&device, None)];
    let types = if args.kv.is_empty() { &default[..] } else { &args.kv };
    let division = args.device.cache_division();
    let mut loaded = None;
    let us = timing::once(|| {
        loaded = Some(args.activations.load(&files, &device, args.longest(), division)?);
        Ok(())
    })?;
    let model = loaded.ok_or("no model")?;
    #[cfg(feature = "serve")]
    let model = {
        let dense_weights = args.activations.options(&device).dense_weights;
        let drafter = args.drafts.files(args.model.as_deref(), &files)?;
        args.drafts.attach(model, drafter.as_ref(), dense_weights)?
    };
    let load = report.line("load", &Timing { median_us: us, min_us: us });
    report.print(ModelLine { bytes: Some(model.weight_bytes()), ..load })?;
    let parts = Parts { model: &model, report: &report, budget };
    let cases = Cases::of(args, &model);
    for kv in types {
        #[cfg(feature = "serve")]
        if args.drafts.count() > 0 || !args.acceptance.is_empty() {
            args.measure_drafts(&parts, kv, &cases)?;
            continue;
        }
        for &tokens in &cases.prompts {
            parts.prompt(kv, tokens)?;
        }
        for &context in &cases.decode {
            draws.iter().try_for_each(|sampling| parts.decode(kv, context, sampling))?;
        }
        for &sequences in &cases.sequences {
            draws.iter().try_for_each(|sampling| parts.batch(kv, sequences, cases.context, sampling))?;
        }
    }
    Ok(())
}

/// Maximum drafts with `--acceptance` alone.
#[cfg(feature = "serve")]
const PLANTED_DRAFTS: usize = 8;
/// Maximum context of the default decode cases.
const DECODE: usize = 32768;

/// A share from 0 to 1.
#[cfg(feature = "serve")]
fn share(text: &str) -> std::result::Result<f32, String> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "expected 0 to 1".to_string())
}

impl ModelArgs {
    /// Measures the cases of drafts.
    #[cfg(feature = "serve")]
    fn measure_drafts(&self, parts: &Parts, kv: &Kv, cases: &Cases) -> Result {
        let shares: Vec<Option<f32>> = match &self.acceptance[..] {
            [] => vec![None],
            shares => shares.iter().copied().map(Some).collect(),
        };
        // Without a drafter, planted drafts are free.
        let drafts = if self.drafts.count() == 0 { PLANTED_DRAFTS } else { self.drafts.count() };
        for &sequences in if cases.sequences.is_empty() { &[1][..] } else { &cases.sequences } {
            let context = cases.context;
            let case = |&acceptance| DraftCase { sequences, context, drafts, acceptance };
            parts.drafts(kv, &shares.iter().map(case).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// An upper bound of the tokens of all cases.
    fn longest(&self) -> usize {
        let lists = [&self.prompts, &self.decode];
        let asked = lists.into_iter().flatten().flatten().chain(&self.context).map(|&tokens| tokens as usize);
        asked.max().unwrap_or(0).max(DECODE) + parts::BATCH_STEPS
    }
}

/// The cases measured for each cache type.
struct Cases {
    prompts: Vec<usize>,
    decode: Vec<usize>,
    sequences: Vec<usize>,
    context: usize,
}

impl Cases {
    /// The requested cases, or the defaults that fit into the model's context.
    fn of(args: &ModelArgs, model: &Model) -> Cases {
        let allowed = model.config().max_position_embeddings.unwrap_or(usize::MAX);
        let asked = [&args.prompts, &args.decode, &args.sequences];
        let is_default = asked.iter().all(|list| list.is_none());
        let list = |asked: &Option<Vec<u32>>, defaults: &[usize], max: usize| match asked {
            Some(asked) => asked.iter().map(|&n| n as usize).collect(),
            None if is_default => defaults.iter().copied().filter(|&n| n <= max).collect(),
            None => Vec::new(),
        };
        let context = 2048.min(allowed.saturating_sub(parts::BATCH_STEPS).max(1));
        Cases {
            prompts: list(&args.prompts, &[512, 6752], allowed),
            decode: list(&args.decode, &[128, DECODE], allowed),
            sequences: list(&args.sequences, &[1, 8, 32], usize::MAX),
            context: args.context.map_or(context, |context| context as usize),
        }
    }
}
