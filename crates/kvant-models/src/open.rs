//! Opens checkpoints of any format: their configuration, and their tensors.

use std::path::Path;

use serde_json::Value;

use crate::{
    Config, Files, Result,
    config::{
        fields::{Fields, in_file},
        once_each,
    },
    families,
    gguf::{self, source::GgufSource},
    safetensors::Checkpoint,
    source::{Source, hf::HfSource, quantization::Quantization},
};

impl Config {
    /// Reads `config.json`, and the end-of-text ids of `generation_config.json` if that file exists; or the metadata of
    /// a GGUF file. [`Files::at`] describes paths.
    ///
    /// # Errors
    /// As [`Config::parse`]; `File` if a file cannot be read; `Config` for a token id outside the vocabulary.
    pub fn load(dir: &Path) -> Result<Config> {
        Config::load_files(&Files::at(dir)?)
    }

    /// Like [`Config::load`], from any [`Files`].
    pub fn load_files(files: &Files) -> Result<Config> {
        if let Some(gguf) = files.as_gguf() {
            return gguf::describe::config(gguf);
        }
        Config::with_files(&files.read_json("config.json")?, files)
    }

    /// Like [`Config::load`], with a parsed `config.json`.
    pub(crate) fn with_files(json: &Value, files: &Files) -> Result<Config> {
        let mut config = Config::parse(json)?;
        if let Some(generation) = files.read_json_if_there("generation_config.json")? {
            let path = files.path("generation_config.json");
            let ids = Fields::new(&generation)?.token_ids("eos_token_id");
            config.eos_token_ids.extend(in_file(&path, ids)?);
            config.eos_token_ids = once_each(config.eos_token_ids);
        }
        config.check_token_ids()?;
        Ok(config)
    }

    /// Checks a parsed `config.json`, of Hugging Face or MLX.
    ///
    /// # Errors
    /// `Config` with the key, the accepted and the actual value; `Unsupported` for another architecture.
    pub fn parse(json: &Value) -> Result<Config> {
        families::parse(json)
    }
}

/// Opens a checkpoint of any format, and calls `then` with its configuration and tensors.
pub(crate) fn with_source<T>(files: &Files, then: impl FnOnce(Config, &dyn Source) -> Result<T>) -> Result<T> {
    if let Some(gguf) = files.as_gguf() {
        return then(gguf::describe::config(gguf)?, &GgufSource::new(gguf));
    }
    files.check()?;
    let json = files.read_json("config.json")?;
    let mut config = Config::with_files(&json, files)?;
    let checkpoint = Checkpoint::open_files(files)?;
    let family = families::named(config.family)?;
    let source = HfSource::new(&checkpoint, Quantization::parse(&json)?, family, config.decoder.blocks.len())?;
    if source.has_mlx_taps() {
        // MLX's files of models with convolutions have the 1 of 1 + w in their norms.
        (config.decoder.norm_offset, config.decoder.final_norm_offset) = (0.0, 0.0);
    }
    then(config, &source)
}
