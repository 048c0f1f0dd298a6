//! Chat templates and sampling parameters in a GGUF file's metadata.

use super::{
    Metadata,
    metadata::{Scalar, error},
};
use crate::{
    Error, Result,
    chat::defaults::{GenerationDefaults, MIN_P, REPETITION_PENALTY, Rule, TEMPERATURE, TOP_K, TOP_P},
};

impl Metadata {
    /// The default Jinja chat template, or a named one (`tool_use`, `rag`).
    ///
    /// # Errors
    /// `Metadata` for a value that is not a string.
    pub fn chat_template(&self, name: Option<&str>) -> Result<Option<&str>> {
        match name {
            None => self.text("tokenizer.chat_template"),
            Some(name) => self.text(&format!("tokenizer.chat_template.{name}")),
        }
    }

    /// The sampling parameters that the file recommends (`general.sampling.*`), and the tokens that must not be sampled
    /// (`tokenizer.ggml.suppress_tokens`).
    ///
    /// Ignored: the order of samplers, XTC, Mirostat, and `penalty_last_n`, as penalties count the whole text.
    ///
    /// # Errors
    /// `Metadata` for a value of the wrong type or out of range.
    pub fn generation_defaults(&self) -> Result<GenerationDefaults> {
        let number = |name: &str, rule: &Rule| {
            let key = format!("general.sampling.{name}");
            match self.number(&key)? {
                None => Ok(None),
                Some(x) => (rule.accept)(x).map(Some).ok_or_else(|| error(&key, rule.expected, x)),
            }
        };
        let float = |name: &str, rule: &Rule| Ok::<_, Error>(number(name, rule)?.map(|x| x as f32));
        Ok(GenerationDefaults {
            do_sample: None,
            temperature: float("temp", &TEMPERATURE)?,
            top_k: number("top_k", &TOP_K)?.map(|k| k as usize),
            top_p: float("top_p", &TOP_P)?,
            min_p: float("min_p", &MIN_P)?,
            repetition_penalty: float("penalty_repeat", &REPETITION_PENALTY)?,
            suppress_tokens: self.suppressed_tokens()?,
        })
    }

    fn suppressed_tokens(&self) -> Result<Option<Vec<u32>>> {
        let key = "tokenizer.ggml.suppress_tokens";
        let Some(ids) = self.scalars(key)? else { return Ok(None) };
        let id = |scalar| match scalar {
            Scalar::Integer(id) => u32::try_from(id).map_err(|_| error(key, "an array of ids", id)),
            other => Err(error(key, "an array of ids", other)),
        };
        ids.iter().map(id).collect::<Result<_>>().map(Some)
    }
}
