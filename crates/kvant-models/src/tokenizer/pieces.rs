//! The bytes that each id adds to a text.

use std::collections::HashMap;

use tokenizers::{Decoder, DecoderWrapper};

use super::{Tokenizer, guarded};
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
    /// The contribution of each id, in the order of ids. For ids of a text whose bytes are valid UTF-8, the
    /// concatenated bytes equal [`Tokenizer::decode`] of them, except for a space that some tokenizers remove before
    /// the first word.
    ///
    /// # Errors
    /// `Tokenizer` if the decoder joins tokens by other rules than these: byte-level, or a word mark in place of spaces
    /// and single bytes as `<0x0A>`.
    pub fn pieces(&self) -> Result<Vec<TokenPiece>> {
        let decoder = ByteDecoder::of(self.inner.get_decoder())?;
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
            (None, Some(token)) => decoder.bytes(token).map(TokenPiece::Text),
            (None, None) => Ok(TokenPiece::Unused),
        };
        (0..ids.min(MOST_IDS)).map(piece).collect()
    }
}

/// Several times the size of the largest existing vocabulary: an added token can have any id.
const MOST_IDS: u32 = 1 << 22;

/// How tokens become bytes.
enum ByteDecoder<'a> {
    /// Each character stands for a byte.
    ByteLevel(HashMap<char, u8>),
    /// Tokens are text, in which single characters or strings are replaced.
    Words { steps: Vec<Step<'a>>, has_bytes: bool },
}

/// A step of a decoder of words.
enum Step<'a> {
    Replace(&'a DecoderWrapper),
    /// The mark of a space.
    Mark(char),
}

impl<'a> ByteDecoder<'a> {
    fn of(decoder: Option<&'a DecoderWrapper>) -> Result<ByteDecoder<'a>> {
        let decoders = match decoder {
            Some(DecoderWrapper::Sequence(sequence)) => sequence.get_decoders(),
            Some(decoder) => std::slice::from_ref(decoder),
            None => &[],
        };
        let (mut steps, mut has_bytes) = (Vec::new(), false);
        for decoder in decoders {
            match decoder {
                DecoderWrapper::ByteLevel(_) => return Ok(ByteDecoder::ByteLevel(byte_characters())),
                DecoderWrapper::Replace(_) => steps.push(Step::Replace(decoder)),
                DecoderWrapper::Metaspace(mark) => steps.push(Step::Mark(mark.get_replacement())),
                DecoderWrapper::ByteFallback(_) => has_bytes = true,
                // They join tokens, and remove a space before the first one.
                DecoderWrapper::Fuse(_) | DecoderWrapper::Strip(_) => {}
                _ => return Err(unknown_decoder()),
            }
        }
        if steps.is_empty() { Err(unknown_decoder()) } else { Ok(ByteDecoder::Words { steps, has_bytes }) }
    }

    fn bytes(&self, token: String) -> Result<Vec<u8>> {
        match self {
            ByteDecoder::ByteLevel(characters) => {
                let bytes: Option<Vec<u8>> = token.chars().map(|c| characters.get(&c).copied()).collect();
                // Added tokens have their text.
                Ok(bytes.unwrap_or_else(|| token.into_bytes()))
            }
            ByteDecoder::Words { has_bytes: true, .. } if byte(&token).is_some() => {
                Ok(byte(&token).into_iter().collect())
            }
            ByteDecoder::Words { steps, .. } => {
                let text = steps.iter().try_fold(token, |token, step| match step {
                    Step::Replace(replace) => guarded(|| replace.decode_chain(vec![token])).map(|texts| texts.concat()),
                    Step::Mark(mark) => Ok(token.replace(*mark, " ")),
                })?;
                Ok(text.into_bytes())
            }
        }
    }
}

fn unknown_decoder() -> Error {
    Error::Tokenizer { reason: "the bytes of its tokens are unknown: its decoder is not supported".to_string() }
}

/// The byte of a token such as `<0x0A>`.
fn byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The character that stands for each byte in byte-level vocabularies: itself if it is visible, or else one from U+0100
/// on, in the order of bytes.
fn byte_characters() -> HashMap<char, u8> {
    let is_visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let hidden = (0..=u8::MAX).filter(|&byte| !is_visible(byte)).zip('\u{100}'..);
    let visible = (0..=u8::MAX).filter(|&byte| is_visible(byte)).map(|byte| (char::from(byte), byte));
    visible.chain(hidden.map(|(byte, character)| (character, byte))).collect()
}

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

    /// Tokens as those of Llama 2 and Gemma.
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
        fn pieces_are_what_is_decoded(ids in prop::collection::vec(0u32..10, 0..12)) {
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
