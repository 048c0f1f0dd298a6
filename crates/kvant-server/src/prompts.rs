//! Prompts without roles, as texts or ids.

use serde::Deserialize;

use crate::{
    app::App,
    error::{ApiError, Result},
    serving::{Serving, tokenized},
};

/// One or more prompts, as texts or ids.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, a list of strings, a list of token ids, or a list of such lists")]
pub(crate) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}

/// The ids of a prompt, and its text for `echo`.
pub(crate) struct PromptText {
    pub ids: Vec<u32>,
    pub text: String,
    pub shown: SpecialNames,
}

/// Which special tokens of a prompt are named in its text.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum SpecialNames {
    All,
    /// All except the first token, which the tokenizer has added.
    AllButFirst,
    None,
}

impl Prompts {
    pub fn len(&self) -> usize {
        match self {
            Prompts::Text(_) | Prompts::Ids(_) => 1,
            Prompts::Texts(texts) => texts.len(),
            Prompts::IdLists(lists) => lists.len(),
        }
    }

    /// Bytes of text to tokenise.
    pub fn bytes(&self) -> usize {
        match self {
            Prompts::Text(text) => text.len(),
            Prompts::Texts(texts) => texts.iter().map(String::len).sum(),
            Prompts::Ids(_) | Prompts::IdLists(_) => 0,
        }
    }

    /// Tokenises texts for embeddings.
    pub fn into_ids(self, app: &Serving) -> Result<Vec<Vec<u32>>> {
        match self {
            Prompts::Text(text) => Ok(vec![app.encode_whole(&text)?]),
            Prompts::Texts(texts) => texts.iter().map(|text| app.encode_whole(text)).collect(),
            Prompts::Ids(ids) => Ok(vec![ids]),
            Prompts::IdLists(lists) => Ok(lists),
        }
    }

    pub fn encode(self, app: &Serving) -> Result<Vec<PromptText>> {
        let of_text = |text: String| {
            let ids = app.encode_prompt(&text)?;
            let bos = ids.first().filter(|&&id| app.model.engine.tokenizer().bos() == Some(id));
            let is_added = bos.is_some_and(|&bos| !text.as_bytes().starts_with(&app.token_bytes(bos)));
            let shown = if is_added { SpecialNames::AllButFirst } else { SpecialNames::All };
            Ok(PromptText { ids, text, shown })
        };
        let of_ids = |ids: Vec<u32>| {
            let mut stream = app.model.engine.tokenizer().stream();
            // The generated text can complete the character.
            let text = tokenized("prompt", ids.iter().map(|&id| stream.push(id)).collect())?;
            Ok(PromptText { ids, text, shown: SpecialNames::None })
        };
        match self {
            Prompts::Text(text) => Ok(vec![of_text(text)?]),
            Prompts::Texts(texts) => texts.into_iter().map(of_text).collect(),
            Prompts::Ids(ids) => Ok(vec![of_ids(ids)?]),
            Prompts::IdLists(lists) => lists.into_iter().map(of_ids).collect(),
        }
    }
}

/// Checks `n` and the total number of choices.
pub(crate) fn check_choices(app: &App, n: Option<usize>, prompts: usize) -> Result<usize> {
    let (n, max) = (n.unwrap_or(1), app.options.choices);
    if prompts == 0 {
        return Err(ApiError::field("prompt", "`prompt` must have at least one element, got none"));
    }
    if n == 0 || n.saturating_mul(prompts) > max {
        let message = format!("`n` times the number of prompts must be 1 to {max}, got {n} times {prompts}");
        return Err(ApiError::field("n", message));
    }
    Ok(n)
}
