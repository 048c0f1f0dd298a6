//! `generation_config.json`, or metadata of a GGUF file: how a model's authors sample it.

use serde::Deserialize;

use crate::{Error, Files, Result, Sampling};

/// The sampling parameters that a checkpoint recommends.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct GenerationDefaults {
    /// Whether to draw at random. Without it, a temperature implies it.
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
    /// Tokens that must not be generated.
    pub suppress_tokens: Option<Vec<u32>>,
}

impl GenerationDefaults {
    /// Reads `generation_config.json`, or the metadata of a GGUF file. Without them, nothing is set.
    ///
    /// # Errors
    /// `File`, `Metadata`.
    pub fn load_files(files: &Files) -> Result<GenerationDefaults> {
        const NAME: &str = "generation_config.json";
        if let Some(gguf) = files.as_gguf() {
            return gguf.metadata().generation_defaults();
        }
        let Some(json) = files.read_json_if_there(NAME)? else { return Ok(GenerationDefaults::default()) };
        serde_json::from_value(json).map_err(|error| Error::file(&files.path(NAME), error))
    }

    /// The parameters, with those of `otherwise` where the file has none.
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
