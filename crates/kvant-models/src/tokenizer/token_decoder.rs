//! The decoders of tokenizers, which convert tokens to bytes.

use std::{collections::HashMap, sync::LazyLock};

use tokenizers::{Decoder, DecoderWrapper, pre_tokenizers::metaspace::PrependScheme};

use super::guarded::guarded;
use crate::Result;

/// How tokens are converted to bytes.
pub(super) enum TokenDecoder {
    /// Each character represents a byte.
    ByteLevel,
    /// Tokens are text in which single characters or strings are replaced.
    Words { steps: Vec<Step>, has_bytes: bool, strip: Strip },
    /// The bytes of a token depend on the previous one, by rules of the library.
    Library,
}

/// A step of a decoder of words.
pub(super) enum Step {
    Replace(DecoderWrapper),
    /// The symbol of a space, and whether the first token of a text loses it.
    Mark {
        mark: char,
        first_loses: bool,
    },
}

/// Characters that are removed from the start of a text.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub content: char,
    pub max: usize,
}

impl TokenDecoder {
    pub fn of(decoder: Option<&DecoderWrapper>) -> TokenDecoder {
        let decoders = match decoder {
            Some(DecoderWrapper::Sequence(sequence)) => sequence.get_decoders(),
            Some(decoder) => std::slice::from_ref(decoder),
            None => return TokenDecoder::Library,
        };
        let (mut steps, mut has_bytes, mut is_fused) = (Vec::new(), false, false);
        let mut strip = Strip { content: ' ', max: 0 };
        for decoder in decoders {
            match decoder {
                DecoderWrapper::ByteLevel(_) if decoders.len() == 1 => return TokenDecoder::ByteLevel,
                DecoderWrapper::Replace(_) if !is_fused => steps.push(Step::Replace(decoder.clone())),
                DecoderWrapper::Metaspace(mark) if !is_fused => steps.push(Step::Mark {
                    mark: mark.get_replacement(),
                    first_loses: mark.prepend_scheme != PrependScheme::Never,
                }),
                DecoderWrapper::ByteFallback(_) => has_bytes = true,
                DecoderWrapper::Fuse(_) => is_fused = true,
                DecoderWrapper::Strip(ends) if is_fused && ends.stop == 0 && strip.max == 0 => {
                    strip = Strip { content: ends.content, max: ends.start };
                }
                _ => return TokenDecoder::Library,
            }
        }
        TokenDecoder::Words { steps, has_bytes, strip }
    }

    /// The characters that are removed from the start of a text.
    pub fn strip(&self) -> Strip {
        match self {
            TokenDecoder::Words { strip, .. } => *strip,
            _ => Strip { content: ' ', max: 0 },
        }
    }

    /// Whether each invalid byte becomes one U+FFFD. Otherwise, each incomplete character does.
    pub fn replaces_bytes(&self) -> bool {
        matches!(self, TokenDecoder::Words { .. })
    }

    /// The bytes of a token. `is_first`: it is the first token of a text.
    pub fn bytes(&self, token: String, is_first: bool) -> Result<Vec<u8>> {
        let TokenDecoder::Words { steps, has_bytes, .. } = self else {
            let bytes: Option<Vec<u8>> = token.chars().map(|c| BYTE_CHARACTERS.get(&c).copied()).collect();
            // Added tokens are plain text.
            return Ok(bytes.unwrap_or_else(|| token.into_bytes()));
        };
        if *has_bytes && let Some(byte) = byte(&token) {
            return Ok(vec![byte]);
        }
        let text = steps.iter().try_fold(token, |token, step| match step {
            Step::Replace(replace) => guarded(|| replace.decode_chain(vec![token])).map(|texts| texts.concat()),
            Step::Mark { mark, first_loses } if *first_loses && is_first => Ok(token.replace(*mark, "")),
            Step::Mark { mark, .. } => Ok(token.replace(*mark, " ")),
        })?;
        Ok(text.into_bytes())
    }
}

/// The byte of a token such as `<0x0A>`.
fn byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The byte of each character of byte-level vocabularies.
static BYTE_CHARACTERS: LazyLock<HashMap<char, u8>> = LazyLock::new(byte_characters);

/// The character that represents each byte in byte-level vocabularies: itself if it is visible, otherwise one from
/// U+0100 upwards, in the order of bytes.
fn byte_characters() -> HashMap<char, u8> {
    let is_visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let hidden = (0..=u8::MAX).filter(|&byte| !is_visible(byte)).zip('\u{100}'..);
    let visible = (0..=u8::MAX).filter(|&byte| is_visible(byte)).map(|byte| (char::from(byte), byte));
    visible.chain(hidden.map(|(byte, character)| (character, byte))).collect()
}
