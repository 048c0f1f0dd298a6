//! A model's configuration: its decoder, and facts about its tokens.

pub(crate) mod fields;

use std::collections::HashSet;

use crate::{DecoderSpec, Error, Result};

/// The configuration of a model, from any format.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The name of the family, e.g. `gemma4`.
    pub family: &'static str,
    /// The decoder.
    pub decoder: DecoderSpec,
    /// The context for which the model was made, in tokens.
    pub max_position_embeddings: Option<usize>,
    /// The beginning-of-text id, if the file has one.
    pub bos_token_id: Option<u32>,
    /// The end-of-text ids, in the file's order.
    pub eos_token_ids: Vec<u32>,
}

impl Config {
    /// Checks that token ids are in the vocabulary. Otherwise, a text would fail at its first token, or never end.
    pub(crate) fn check_token_ids(&self) -> Result<()> {
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
}

/// Removes duplicate ids.
pub(crate) fn once_each(mut ids: Vec<u32>) -> Vec<u32> {
    let mut seen = HashSet::new();
    ids.retain(|&id| seen.insert(id));
    ids
}
