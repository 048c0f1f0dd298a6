//! The checked vocabulary in a GGUF file's metadata, and the kinds of its tokens.

use tokenizers::models::bpe::Vocab;

use super::{
    Metadata, Texts,
    metadata::{Scalar, error},
};
use crate::Result;

/// The kind of a token, from `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TokenKind {
    Normal,
    Unknown,
    /// A special token, which is never part of a text.
    Control,
    /// Matched in a text before anything else.
    UserDefined,
    Unused,
    /// `<0x41>`: a byte of a character that has no token.
    Byte,
}

pub(super) struct Vocabulary<'a> {
    metadata: &'a Metadata,
    pub tokens: &'a Texts,
    kinds: Vec<TokenKind>,
    /// The id of each token.
    pub ids: Vocab,
    /// The ids that end generation, ascending: ids named in the file, and tokens with well-known texts.
    pub ends: Vec<u32>,
}

/// Keys of the ids that end generation. Models of code have tokens between files, which also end an answer.
const END_KEYS: [&str; 6] =
    ["eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"];

/// Texts of tokens that end a turn or an answer, as in llama.cpp, for files that name no such ids.
#[rustfmt::skip]
const ENDS: [&str; 30] = [
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>",
    "<|calls|>", "<|flush|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<EOT>", "_<EOT>",
    "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>",
    // Between and after files of code.
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
];

impl<'a> Vocabulary<'a> {
    pub fn read(metadata: &'a Metadata) -> Result<Vocabulary<'a>> {
        let key = "tokenizer.ggml.tokens";
        let tokens = metadata.texts(key)?.ok_or_else(|| error(key, "an array of strings", "nothing"))?;
        if tokens.is_empty() || tokens.len() > 1 << 24 {
            return Err(error(key, "an array of 1 to 16777216 strings", tokens.len()));
        }
        let mut ids = Vocab::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            // Some vocabularies are padded with empty tokens.
            let name = if token.is_empty() { format!("[EMPTY_{id}]") } else { token.to_string() };
            if ids.insert(name, id as u32).is_some() {
                let shown: String = token.chars().take(80).collect();
                return Err(error(key, "an array without duplicates", format_args!("{shown:?} twice")));
            }
        }
        let kinds = match metadata.scalars("tokenizer.ggml.token_type")? {
            None => vec![TokenKind::Normal; tokens.len()],
            Some(kinds) if kinds.len() == tokens.len() => kinds.iter().map(kind).collect(),
            Some(kinds) => {
                let expected = format!("an array of {} numbers, one per token", tokens.len());
                return Err(error("tokenizer.ggml.token_type", expected, kinds.len()));
            }
        };
        let mut vocabulary = Vocabulary { metadata, tokens, kinds, ids, ends: Vec::new() };
        vocabulary.ends = vocabulary.find_ends()?;
        // Exporters give them any kind; as plain text they would not end an answer.
        for &id in &vocabulary.ends {
            vocabulary.kinds[id as usize] = TokenKind::Control;
        }
        Ok(vocabulary)
    }

    pub fn kind(&self, id: usize) -> TokenKind {
        self.kinds[id]
    }

    /// The tokens of a kind, by id.
    pub fn of_kind(&self, kind: TokenKind) -> impl Iterator<Item = &'a str> {
        let tokens = self.tokens;
        let found = self.kinds.iter().enumerate().filter(move |(_, other)| **other == kind);
        found.filter_map(move |(id, _)| tokens.get(id)).filter(|token| !token.is_empty())
    }

    /// The id in `tokenizer.ggml.NAME`, if it is in the vocabulary.
    pub fn special(&self, name: &str) -> Result<Option<u32>> {
        let key = format!("tokenizer.ggml.{name}");
        let Some(id) = self.metadata.whole(&key)? else { return Ok(None) };
        // Some files represent an absent token by an id outside the vocabulary.
        Ok(u32::try_from(id).ok().filter(|&id| (id as usize) < self.tokens.len()))
    }

    fn find_ends(&self) -> Result<Vec<u32>> {
        let mut ends = Vec::new();
        for key in END_KEYS {
            ends.extend(self.special(key)?);
        }
        ends.extend(ENDS.iter().filter_map(|name| self.ids.get(*name)));
        // In OpenAI's harmony format, <|end|> ends a message, but not the answer.
        if ["<|return|>", "<|call|>"].iter().all(|name| self.ids.contains_key(*name)) {
            ends.retain(|id| self.tokens.get(*id as usize) != Some("<|end|>"));
        }
        ends.sort_unstable();
        ends.dedup();
        Ok(ends)
    }

    /// The merges in the file, best first. Merges with tokens outside the vocabulary have no effect and are omitted.
    pub fn merges(&self) -> Result<Vec<(String, String)>> {
        let key = "tokenizer.ggml.merges";
        let merges = self.metadata.texts(key)?.ok_or_else(|| error(key, "an array of strings", "nothing"))?;
        let mut pairs = Vec::with_capacity(merges.len());
        let mut union = String::new();
        for merge in merges.iter() {
            // The first token may itself start with a space.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let Some(space) = merge[first..].find(' ').map(|at| at + first) else {
                let shown: String = merge.chars().take(80).collect();
                return Err(error(key, "pairs of tokens with a space between them", format_args!("{shown:?}")));
            };
            let (left, right) = (&merge[..space], &merge[space + 1..]);
            union.clear();
            union.extend([left, right]);
            if [left, right, &union].iter().all(|token| self.ids.contains_key(*token)) {
                pairs.push((left.to_string(), right.to_string()));
            }
        }
        Ok(pairs)
    }

    /// The scores, one per token.
    pub fn scores(&self) -> Result<Vec<f32>> {
        let key = "tokenizer.ggml.scores";
        let scores = self.metadata.scalars(key)?.ok_or_else(|| error(key, "an array of numbers", "nothing"))?;
        if scores.len() != self.tokens.len() {
            let expected = format!("an array of {} numbers, one per token", self.tokens.len());
            return Err(error(key, expected, scores.len()));
        }
        let number = |scalar| match scalar {
            Scalar::Float(x) if x.is_finite() => Ok(x as f32),
            Scalar::Integer(n) => Ok(n as f32),
            other => Err(error(key, "an array of finite numbers", other)),
        };
        scores.iter().map(number).collect()
    }
}

/// llama.cpp treats unknown kinds as undefined, which behaves like normal.
fn kind(scalar: Scalar) -> TokenKind {
    match scalar {
        Scalar::Integer(2) => TokenKind::Unknown,
        Scalar::Integer(3) => TokenKind::Control,
        Scalar::Integer(4) => TokenKind::UserDefined,
        Scalar::Integer(5) => TokenKind::Unused,
        Scalar::Integer(6) => TokenKind::Byte,
        _ => TokenKind::Normal,
    }
}
