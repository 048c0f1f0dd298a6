//! Pools hidden states to embeddings.

use serde_json::Value;

use crate::{Error, Files, Result, gguf::Metadata};

/// How the hidden states of a text are pooled to its embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The hidden state of the last token.
    Last,
    /// The mean of the hidden states of all tokens.
    Mean,
}

/// The configuration file of sentence-transformers.
const CONFIG: &str = "1_Pooling/config.json";
/// The list of modules after the decoder.
const MODULES: &str = "modules.json";
/// Maximum bytes of these files.
const LIMIT: u64 = 1 << 20;
/// The prefix of its keys for modes.
const MODE: &str = "pooling_mode_";

impl Pooling {
    /// Reads the pooling of a checkpoint that was trained to embed: `1_Pooling/config.json` of sentence-transformers,
    /// or `pooling_type` of a GGUF file. Returns `None` without these.
    ///
    /// # Errors
    /// `File`; `Metadata`; `Unsupported` for an unsupported mode, or for further modules without which embeddings would
    /// be wrong.
    pub fn load_files(files: &Files) -> Result<Option<Pooling>> {
        if let Some(gguf) = files.as_gguf() {
            return Pooling::of_gguf(gguf.metadata());
        }
        let Some(config) = files.read_json_if_there(CONFIG)? else { return Ok(None) };
        if files.has(MODULES) {
            let bytes = files.read(MODULES, LIMIT)?;
            let modules = serde_json::from_slice(&bytes).map_err(|error| Error::file(&files.path(MODULES), error))?;
            if let Some(module) = other_module(&modules) {
                let reason = "the supported modules are Transformer, Pooling and Normalize".to_string();
                return Err(Error::Unsupported { what: format!("{MODULES}: {module}"), reason });
            }
        }
        Pooling::parse(&config).map(Some)
    }

    /// Converts llama.cpp's numbers of the modes.
    fn of_gguf(metadata: &Metadata) -> Result<Option<Pooling>> {
        let Some(architecture) = metadata.text("general.architecture")? else { return Ok(None) };
        let key = format!("{architecture}.pooling_type");
        match metadata.whole(&key)? {
            None | Some(0) => Ok(None),
            Some(1) => Ok(Some(Pooling::Mean)),
            Some(3) => Ok(Some(Pooling::Last)),
            Some(other) => {
                let reason = "the supported ones are 1 (mean) and 3 (last)".to_string();
                Err(Error::Unsupported { what: format!("{key} {other}"), reason })
            }
        }
    }

    fn parse(config: &Value) -> Result<Pooling> {
        let modes = config.as_object().into_iter().flatten();
        let modes: Vec<&str> = modes
            .filter(|(key, value)| key.starts_with(MODE) && **value == Value::Bool(true))
            .map(|(key, _)| key.as_str())
            .collect();
        match modes[..] {
            ["pooling_mode_lasttoken"] => Ok(Pooling::Last),
            ["pooling_mode_mean_tokens"] => Ok(Pooling::Mean),
            _ => {
                let got = if modes.is_empty() { "no pooling_mode".to_string() } else { modes.join(", ") };
                let reason = "the supported ones are pooling_mode_lasttoken and pooling_mode_mean_tokens".to_string();
                Err(Error::Unsupported { what: format!("{CONFIG}: {got}"), reason })
            }
        }
    }
}

/// Returns a module that changes embeddings in an unsupported way.
fn other_module(modules: &Value) -> Option<String> {
    let kinds = modules.as_array()?.iter().map(|module| module["type"].as_str().unwrap_or("without a type"));
    let kind = |name: &str| name.rsplit('.').next().unwrap_or_default().to_string();
    kinds.map(kind).find(|kind| !matches!(kind.as_str(), "Transformer" | "Pooling" | "Normalize"))
}
