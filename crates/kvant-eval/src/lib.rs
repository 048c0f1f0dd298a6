//! Measures the prediction quality and memory of cache types, for `kvant eval`.
//!
//! [`EvalOptions`] are the options of the command, [`EvalOptions::run`] measures, and [`Lines`] are the results. Error
//! messages name the options.

#![forbid(unsafe_code)]

mod answers;
mod budget;
mod cache_type;
mod exponential;
mod files;
mod formats;
mod kv;
mod lines;
mod measure;
mod needles;
mod prediction;
mod progress;
mod report;
mod result;
mod resume;
mod row;
mod score;
mod sequence;
mod stream;
mod vectors;

use std::hash::{DefaultHasher, Hash, Hasher};

use kvant::Codec;
use kvant_models::{Config, Files, Model, PoolOptions, Tokenizer};

use self::{
    answers::AnswerArgs, budget::BudgetArgs, cache_type::CacheType, measure::Measurement, needles::NeedleArgs,
    report::ReportArgs,
};
pub use self::{files::replace, kv::Kv, lines::Lines, result::Result, stream::documents};

/// The options of `kvant eval`, except model, text, device and format of the output.
#[derive(clap::Args)]
pub struct EvalOptions {
    /// Cache types: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, these with sealed pages (tq4c), K:V as in f16:tq4, or
    /// @FILE with types per layer. For comparison, also formats of other software: q8_0, q4_0 and iq4_nl of llama.cpp
    /// (q4_0-rot rotated), mlx4, fp8, nvfp4, kivi4, kivi2, kvarn4, kvarn2. For --budget, the types to choose from
    /// [default: f16 and tq8c to tq2c; for --budget tq8c to tq2c]
    #[arg(long, value_name = "KV,…", value_delimiter = ',')]
    kv: Vec<CacheType>,
    #[command(flatten)]
    answers: AnswerArgs,
    #[command(flatten)]
    budget: BudgetArgs,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    needles: NeedleArgs,
    /// Maximum tokens in a window
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..))]
    window_tokens: u32,
    /// Positions per page: 16, 32, 64, 128 or 256
    #[arg(long, value_name = "N", default_value_t = PoolOptions::default().page_tokens)]
    page_tokens: usize,
}

/// The model and its text.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The model, loaded for [`EvalOptions::context`].
    pub model: &'a Model,
    /// Its name in reports.
    pub name: &'a str,
    /// Its files.
    pub files: &'a Files,
    /// The text.
    pub tokens: &'a [u32],
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

impl EvalOptions {
    /// The parts of a text that are predicted, each from an empty cache. Empty for a text of one token.
    pub fn windows<'a>(&self, tokens: &'a [u32]) -> Vec<&'a [u32]> {
        let used = self.budget.asked().map_or(tokens.len(), |_| self.budget.tokens().min(tokens.len()));
        stream::windows(&tokens[..used], self.window_tokens as usize)
    }

    /// The longest text: a window, an answer with its prompt, or, because a report also looks for needles, what the
    /// model was made for.
    ///
    /// # Errors
    /// Those of [`Config::load_files`].
    pub fn context(&self, files: &Files) -> Result<usize> {
        let window = self.window_tokens as usize;
        if self.report.report.is_none() && !self.answers.answers {
            return Ok(window.max(self.needles.longest()));
        }
        let made_for = Config::load_files(files)?.max_position_embeddings;
        if self.report.report.is_none() {
            return Ok(self.answers.longest(made_for.unwrap_or(usize::MAX)).max(self.needles.longest()));
        }
        Ok(made_for.unwrap_or(window).max(window))
    }

    /// Measures, and passes results to `print` when they are known. The text must have a window.
    ///
    /// # Errors
    /// A message for an option that does not suit model or text; errors of the model, of files and of `print`.
    pub fn run(&self, subject: &Subject, print: &mut dyn FnMut(&Lines) -> Result) -> Result {
        let Subject { model, files, tokens, .. } = *subject;
        let vocabulary = model.vocab_size();
        if let Some((index, id)) = tokens.iter().enumerate().find(|&(_, &id)| id as usize >= vocabulary) {
            return Err(format!("token {index} must be below the vocabulary's {vocabulary}, got {id}").into());
        }
        let (windows, page_tokens) = (self.windows(tokens), self.page_tokens);
        let step_tokens = (STEP_LOGITS / vocabulary.max(1)).clamp(1, STEP_TOKENS);
        let measurement = Measurement { model, windows, step_tokens, page_tokens };
        let described = described(subject, &measurement);
        let answers = self.answers.answers.then(|| self.answers.prompts(model, tokens, page_tokens));
        let needles = || {
            let tokenizer = Tokenizer::load_files(files).ok();
            self.needles.needles(&measurement, tokenizer.as_ref())
        };
        if self.report.report.is_none() && (answers.is_some() || self.needles.asked()) {
            let kv = if self.kv.is_empty() { &defaults()[..] } else { &self.kv };
            if let Some(answers) = answers {
                // Answers are compared with f16, which is the first default.
                let kv = if self.kv.is_empty() { &kv[1..] } else { kv };
                print(&Lines::Answers(answers.measure(kv)?))?;
            }
            if self.needles.asked() {
                print(&Lines::Needles(needles::lines(kv, &needles()?)?))?;
            }
            return Ok(());
        }
        let lines = match (self.budget.asked(), &self.report.report) {
            (Some((bits, out)), _) => budget::run(bits, out, &self.kv, &measurement, &described)?,
            (None, Some(folder)) => {
                report::run(folder, &self.kv, &measurement, &needles()?, answers.as_ref(), &described)?
            }
            _ if self.kv.is_empty() => prediction::measure(&defaults(), &measurement)?,
            _ => prediction::measure(&self.kv, &measurement)?,
        };
        print(&Lines::Predictions(lines))
    }
}

fn defaults() -> [CacheType; 7] {
    DEFAULTS.map(|codec| CacheType::from(kvant_models::KvCodec::from(codec)))
}

/// Describes the measurement in one line.
fn described(subject: &Subject, measurement: &Measurement) -> String {
    let Measurement { model, windows, page_tokens, .. } = measurement;
    let mut hasher = DefaultHasher::new();
    windows.hash(&mut hasher);
    let (name, device, text) = (subject.name, model.device(), hasher.finish());
    format!("model {name:?} in {} on {device}, text {text:016x}, pages of {page_tokens}", model.activations())
}
