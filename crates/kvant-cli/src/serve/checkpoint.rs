//! Defaults of requests that a checkpoint has: sampling parameters and the chat template.

use std::path::Path;

use kvant_models::{
    Files, Sampling, Tokenizer,
    chat::{ChatTemplate, GenerationDefaults, SpecialTokens},
};

use crate::result::Result;

/// The default sampling parameters of requests: the checkpoint's, or the ones of `kvant chat`.
pub fn sampling(files: &Files) -> Result<Sampling> {
    Ok(GenerationDefaults::load_files(files)?.sampling(Sampling::usual()))
}

/// The template in a file, or else the checkpoint's.
pub fn template(path: Option<&Path>, files: &Files, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
    let Some(path) = path else { return Ok(ChatTemplate::load_files(files)?) };
    let name = |id: Option<u32>| tokenizer.decode_with_special(id.as_slice());
    let tokens = [("bos_token", name(tokenizer.bos())?), ("eos_token", name(tokenizer.eos_token())?)];
    template_of_file(path, tokens.into_iter().collect()).map(Some)
}

pub fn template_of_file(path: &Path, tokens: SpecialTokens) -> Result<ChatTemplate> {
    let source = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    ChatTemplate::new(&source, tokens).map_err(|error| format!("{}: {error}", path.display()).into())
}
