//! A model's configuration: its decoder, and facts about its tokens.

pub(crate) mod fields;

use std::{collections::HashSet, path::Path};

use serde_json::Value;

use crate::{DecoderSpec, Error, Files, Result, families, gguf};
use fields::{Fields, in_file};

/// The configuration of a model, from any format.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The name of the family, e.g. `gemma4`.
    pub family: &'static str,
    /// The decoder.
    pub decoder: DecoderSpec,
    /// The context that the model was made for, in tokens.
    pub max_position_embeddings: Option<usize>,
    /// The beginning-of-text id, if the file has one.
    pub bos_token_id: Option<u32>,
    /// The end-of-text ids, in the file's order.
    pub eos_token_ids: Vec<u32>,
}

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

    /// Checks that token ids are in the vocabulary. Otherwise, a text would fail at its first token, or never end.
    fn check_token_ids(&self) -> Result<()> {
        let vocab = self.decoder.vocab_size;
        let ids = self.eos_token_ids.iter().map(|&id| ("eos_token_id", id));
        let mut all = ids.chain(self.bos_token_id.map(|id| ("bos_token_id", id)));
        match all.find(|&(_, id)| id as usize >= vocab) {
            Some((key, id)) => Err(Error::Config {
                key: key.to_string(),
                expected: format!("below the vocabulary's {vocab}"),
                got: id.to_string(),
            }),
            None => Ok(()),
        }
    }

    /// Checks a parsed `config.json`, of Hugging Face or MLX.
    ///
    /// # Errors
    /// `Config` with the key, the accepted and the actual value; `Unsupported` for another architecture.
    pub fn parse(json: &Value) -> Result<Config> {
        families::parse(json)
    }
}

/// Removes duplicate ids.
pub(crate) fn once_each(mut ids: Vec<u32>) -> Vec<u32> {
    let mut seen = HashSet::new();
    ids.retain(|&id| seen.insert(id));
    ids
}
