//! Determines the bytes that each id adds to a text.

use std::collections::HashMap;

use super::{Tokenizer, token_decoder::TokenDecoder};
use crate::{Error, Result};

/// The contribution of an id to a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenPiece {
    /// Bytes of the text, which can begin or end within a character.
    Text(Vec<u8>),
    /// A special token with this name. It adds nothing to a text.
    Special(String),
    /// The tokenizer has no such id.
    Unused,
}

impl Tokenizer {
    /// The contribution of each id, in the order of ids. If the ids of a text have valid UTF-8 bytes, the concatenated
    /// bytes equal [`Tokenizer::decode`], except for a space that some tokenizers remove before the first word.
    ///
    /// # Errors
    /// `Tokenizer` if the decoder is neither byte-level nor one that replaces word symbols by spaces and decodes bytes
    /// such as `<0x0A>`.
    pub fn pieces(&self) -> Result<Vec<TokenPiece>> {
        if matches!(self.decoder, TokenDecoder::Library) {
            let reason = "the bytes of its tokens are unknown: its decoder is not supported".to_string();
            return Err(Error::Tokenizer { reason });
        }
        let special: HashMap<u32, String> = self
            .inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, t)| t.special)
            .map(|(id, t)| (id, t.content))
            .collect();
        let ids = self.inner.get_vocab(true).into_values().max().map_or(0, |id| id.saturating_add(1));
        let piece = |id: u32| match (special.get(&id), self.inner.id_to_token(id)) {
            (Some(name), _) => Ok(TokenPiece::Special(name.clone())),
            (None, Some(token)) => self.decoder.bytes(token, false).map(TokenPiece::Text),
            (None, None) => Ok(TokenPiece::Unused),
        };
        (0..ids.min(MAX_IDS)).map(piece).collect()
    }

    /// The bytes that an id adds to a text after other tokens. They can begin or end within a character, and a word
    /// keeps the space before it. A special token is shown by name. An id without a token has no bytes.
    ///
    /// # Errors
    /// `Tokenizer` if the decoder fails.
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>> {
        self.bytes_after(Some(id), id)
    }

    /// The bytes that an id adds to a text after the token `last`, or at its start.
    pub(super) fn bytes_after(&self, last: Option<u32>, id: u32) -> Result<Vec<u8>> {
        let Some(token) = self.inner.id_to_token(id) else { return Ok(Vec::new()) };
        if !matches!(self.decoder, TokenDecoder::Library) {
            return self.decoder.bytes(token, last.is_none());
        }
        let alone = self.decode_with_special(&[id])?;
        let Some(last) = last else { return Ok(alone.into_bytes()) };
        let (before, both) = (self.decode_with_special(&[last])?, self.decode_with_special(&[last, id])?);
        Ok(both.strip_prefix(&before).unwrap_or(&alone).as_bytes().to_vec())
    }
}

/// Maximum ids: several times the largest existing vocabulary. An added token can have any id.
const MAX_IDS: u32 = 1 << 22;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn tokenizer(decoder: serde_json::Value, tokens: &[&str]) -> Tokenizer {
        let vocab: serde_json::Map<String, serde_json::Value> =
            tokens.iter().enumerate().map(|(id, token)| (token.to_string(), json!(id))).collect();
        let added = |id: usize, special: bool| {
            json!({"id": id, "content": tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": special})
        };
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": decoder,
            "added_tokens": [added(0, true), added(1, false)],
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "vocab": vocab, "merges": []},
        });
        Tokenizer::parse(json.to_string().as_bytes()).unwrap()
    }

    /// Tokens like those of Llama 2 and Gemma.
    const WORDS: [&str; 10] = ["<s>", "<tool call>", "▁a", "b", "▁", "▁▁", "<0xC3>", "<0xB6>", "ö", "<0x0A>"];

    fn sentencepiece(strips: bool) -> Tokenizer {
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if strips {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        tokenizer(json!({"type": "Sequence", "decoders": decoders}), &WORDS)
    }

    fn byte_level() -> Tokenizer {
        tokenizer(
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}),
            &["<s>", "<tool call>", "Ġa", "b", "Ġ", "ĊĊ", "Ã", "¶", "Ã¶", "Ċ"],
        )
    }

    fn joined(pieces: &[TokenPiece], ids: &[u32]) -> Vec<u8> {
        let bytes = ids.iter().filter_map(|&id| match &pieces[id as usize] {
            TokenPiece::Text(bytes) => Some(bytes.clone()),
            _ => None,
        });
        bytes.flatten().collect()
    }

    #[test]
    fn pieces_of_both_kinds() {
        for tokenizer in [sentencepiece(false), byte_level()] {
            let pieces = tokenizer.pieces().unwrap();
            assert_eq!(pieces[0], TokenPiece::Special("<s>".to_string()));
            assert_eq!(pieces[1], TokenPiece::Text(b"<tool call>".to_vec()));
            assert_eq!(pieces[6], TokenPiece::Text(vec![0xC3]));
            assert_eq!(joined(&pieces, &[2, 3, 6, 7, 9]), " abö\n".as_bytes());
        }
        let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true});
        assert_eq!(joined(&tokenizer(metaspace, &WORDS).pieces().unwrap(), &[2, 5, 3]), b" a  b");
        for decoder in [json!(null), json!({"type": "WordPiece", "prefix": "##", "cleanup": true})] {
            assert!(tokenizer(decoder, &WORDS).pieces().is_err());
        }
    }

    proptest! {
        #[test]
        fn pieces_equal_the_decoded_text(ids in prop::collection::vec(0u32..10, 0..12)) {
            for (tokenizer, strips) in [(sentencepiece(false), false), (sentencepiece(true), true), (byte_level(), false)] {
                if let Ok(text) = String::from_utf8(joined(&tokenizer.pieces().unwrap(), &ids)) {
                    let decoded = tokenizer.decode(&ids).unwrap();
                    let stripped = text.strip_prefix(' ').filter(|_| strips).unwrap_or(&text);
                    prop_assert_eq!(stripped, decoded);
                }
            }
        }
    }
}
