//! Sampling parameters that a model's authors recommend: `generation_config.json`, or metadata of a GGUF file.

use serde_json::Value;

use crate::{
    Config, Error, Files, Result, Sampling,
    config::fields::{Fields, in_file, shown},
};

/// The sampling parameters that a checkpoint recommends. All are valid for [`Sampling`].
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct GenerationDefaults {
    /// Whether to sample at random. If absent, the presence of a temperature implies it.
    pub do_sample: Option<bool>,
    /// See [`Sampling::temperature`].
    pub temperature: Option<f32>,
    /// See [`Sampling::top_p`].
    pub top_p: Option<f32>,
    /// See [`Sampling::top_k`].
    pub top_k: Option<usize>,
    /// See [`Sampling::min_p`].
    pub min_p: Option<f32>,
    /// See [`Sampling::repetition_penalty`].
    pub repetition_penalty: Option<f32>,
    /// Tokens that must not be sampled.
    pub suppress_tokens: Option<Vec<u32>>,
}

impl GenerationDefaults {
    /// Reads `generation_config.json`, or the metadata of a GGUF file. Without them, nothing is set.
    ///
    /// A limit with a special meaning is replaced by the nearest value that [`Sampling`] accepts: `top_k` −1 keeps all,
    /// `top_p` 0 keeps one token, `top_p` above 1 keeps all. Suppressed tokens outside the vocabulary are ignored.
    ///
    /// # Errors
    /// `File`, `Metadata` for any other value out of range.
    pub fn load_files(files: &Files) -> Result<GenerationDefaults> {
        const NAME: &str = "generation_config.json";
        let mut defaults = match (files.as_gguf(), files.read_json_if_there(NAME)?) {
            (Some(gguf), _) => gguf.metadata().generation_defaults()?,
            (None, Some(json)) => in_file(&files.path(NAME), GenerationDefaults::parse(&json))?,
            (None, None) => GenerationDefaults::default(),
        };
        let has_config = files.as_gguf().is_some() || files.has("config.json");
        if let Some(suppressed) = defaults.suppress_tokens.as_mut().filter(|_| has_config) {
            let vocab = Config::load_files(files)?.decoder.vocab_size;
            suppressed.retain(|&id| (id as usize) < vocab);
        }
        Ok(defaults)
    }

    /// Checks a parsed `generation_config.json`.
    fn parse(json: &Value) -> Result<GenerationDefaults> {
        let fields = Fields::new(json)?;
        let number = |key: &str, rule: &Rule| match fields.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => {
                let accepted = value.as_f64().and_then(rule.accept);
                accepted.map(Some).ok_or_else(|| fields.error(key, rule.expected, shown(value)))
            }
        };
        let float = |key: &str, rule: &Rule| Ok::<_, Error>(number(key, rule)?.map(|x| x as f32));
        let has_suppressed = fields.get("suppress_tokens").is_some_and(|ids| !ids.is_null());
        number("typical_p", &TYPICAL_P)?;
        warn_of_unsupported(&fields);
        Ok(GenerationDefaults {
            do_sample: fields.bool_or_null("do_sample")?,
            temperature: float("temperature", &TEMPERATURE)?,
            top_p: float("top_p", &TOP_P)?,
            top_k: number("top_k", &TOP_K)?.map(|k| k as usize),
            min_p: float("min_p", &MIN_P)?,
            repetition_penalty: float("repetition_penalty", &REPETITION_PENALTY)?,
            suppress_tokens: has_suppressed.then(|| fields.token_ids("suppress_tokens")).transpose()?,
        })
    }

    /// The parameters; missing ones are those of `otherwise`.
    pub fn sampling(&self, otherwise: Sampling) -> Sampling {
        let temperature = match self.do_sample {
            Some(false) => Some(0.0),
            Some(true) => self.temperature.or(Some(1.0)),
            None => self.temperature,
        };
        Sampling {
            temperature: temperature.unwrap_or(otherwise.temperature),
            top_p: self.top_p.unwrap_or(otherwise.top_p),
            top_k: self.top_k.unwrap_or(otherwise.top_k),
            min_p: self.min_p.unwrap_or(otherwise.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(otherwise.repetition_penalty),
            suppressed: self.suppress_tokens.clone().unwrap_or_else(|| otherwise.suppressed.clone()),
            ..otherwise
        }
    }
}

/// The accepted values of a sampling parameter.
pub(crate) struct Rule {
    /// The accepted values, in words.
    pub expected: &'static str,
    /// Converts a value for [`Sampling`], if it is accepted.
    pub accept: fn(f64) -> Option<f64>,
}

impl Rule {
    const fn new(expected: &'static str, accept: fn(f64) -> Option<f64>) -> Rule {
        Rule { expected, accept }
    }
}

/// The largest f32 below 1.
const BELOW_ONE: f64 = 1.0 - f32::EPSILON as f64 / 2.0;

pub(crate) const TEMPERATURE: Rule =
    Rule::new("a number of 0 or more", |t| Some(t).filter(|t| (0.0..=f64::from(f32::MAX)).contains(t)));
/// In all programs, 1 or more keeps all tokens, and 0 keeps the most probable one.
pub(crate) const TOP_P: Rule = Rule::new("a number of 0 or more", |p| {
    Some(p).filter(|&p| p >= 0.0).map(|p| p.clamp(f64::from(f32::MIN_POSITIVE), 1.0))
});
/// Some files use −1 for "all"; transformers uses 0.
pub(crate) const TOP_K: Rule = Rule::new("an integer, or -1 for all", |k| {
    Some(k).filter(|k| k.fract() == 0.0 && (-1.0..=f64::from(u32::MAX)).contains(k)).map(|k| k.max(0.0))
});
/// At 1, only the most probable token remains.
pub(crate) const MIN_P: Rule =
    Rule::new("a number from 0 to 1", |p| Some(p).filter(|p| (0.0..=1.0).contains(p)).map(|p| p.min(BELOW_ONE)));
pub(crate) const REPETITION_PENALTY: Rule = Rule::new("a number above 0", |penalty| {
    Some(penalty).filter(|p| (f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX)).contains(p))
});
const TYPICAL_P: Rule = Rule::new("a number above 0", |p| Some(p).filter(|&p| p > 0.0));

/// Parameters of transformers that change texts, and the value that disables each.
const UNSUPPORTED: [(&str, f64); 4] =
    [("typical_p", 1.0), ("epsilon_cutoff", 0.0), ("eta_cutoff", 0.0), ("no_repeat_ngram_size", 0.0)];

fn warn_of_unsupported(fields: &Fields) {
    for (key, off) in UNSUPPORTED {
        if let Some(value) = fields.get(key).and_then(Value::as_f64).filter(|&value| value != off) {
            tracing::warn!("generation_config.json: `{key}` {value} has no effect: it is not supported");
        }
    }
}
