//! Facts about chats and sampling in a GGUF file's metadata.

use super::{
    Metadata,
    metadata::{Scalar, error},
};
use crate::{Result, chat::GenerationDefaults};

impl Metadata {
    /// The Jinja template of chats, or a further one by its name (`tool_use`, `rag`).
    ///
    /// # Errors
    /// `Metadata` for a value that is not a string.
    pub fn chat_template(&self, name: Option<&str>) -> Result<Option<&str>> {
        match name {
            None => self.text("tokenizer.chat_template"),
            Some(name) => self.text(&format!("tokenizer.chat_template.{name}")),
        }
    }

    /// The sampling parameters that the file recommends (`general.sampling.*`), and the tokens that are never sampled
    /// (`tokenizer.ggml.suppress_tokens`).
    ///
    /// Ignored are the order of samplers, XTC, Mirostat, and `penalty_last_n`: penalties count the whole text.
    ///
    /// # Errors
    /// `Metadata` for a value of another type or out of range.
    pub fn generation_defaults(&self) -> Result<GenerationDefaults> {
        let key = |name: &str| format!("general.sampling.{name}");
        let float = |name: &str, most: f64| {
            let (key, expected) = (key(name), format!("a number from 0 to {most}"));
            match self.number(&key)? {
                Some(x) if !(0.0..=most).contains(&x) => Err(error(&key, expected, x)),
                number => Ok(number.map(|x| x as f32)),
            }
        };
        Ok(GenerationDefaults {
            do_sample: None,
            temperature: float("temp", 100.0)?,
            top_k: self.top_k(&key("top_k"))?,
            top_p: float("top_p", 1.0)?,
            min_p: float("min_p", 1.0)?,
            repetition_penalty: float("penalty_repeat", 100.0)?,
            suppress_tokens: self.suppressed_tokens()?,
        })
    }

    /// Some files mark "all" with −1.
    fn top_k(&self, key: &str) -> Result<Option<usize>> {
        match self.number(key)? {
            None => Ok(None),
            Some(-1.0) => Ok(Some(0)),
            Some(n) if n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&n) => Ok(Some(n as usize)),
            Some(other) => Err(error(key, "a whole number, or -1 for all", other)),
        }
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
