//! A lower bound on the tokens of a text, computed without tokenising it.
//!
//! A token covers at most as many bytes of a text as its own text has, times the factor by which normalisers can shrink
//! a text. A text much longer than a model's context can therefore be rejected without tokenising it.

use tokenizers::{
    ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer,
    pre_tokenizers::byte_level::ByteLevel,
};

/// Maximum bytes of a text per token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TokenBytes {
    max_bytes: usize,
    /// Whether white space next to special tokens can be dropped, and therefore does not count.
    strips: bool,
}

impl TokenBytes {
    /// Returns `None` if parts of a text can be dropped, or become one token regardless of length.
    pub fn of(inner: &Tokenizer) -> Option<TokenBytes> {
        let shrinks = inner.get_normalizer().map_or(Some(1), shrinks)?;
        let pre_tokenizer = inner.get_pre_tokenizer();
        if !pre_tokenizer.is_none_or(keeps_text) {
            return None;
        }
        let vocabulary = inner.get_vocab(true);
        let is_byte_level =
            pre_tokenizer.is_some_and(makes_bytes) || inner.get_normalizer().is_some_and(normalises_to_bytes);
        let knows_every_text = match inner.get_model() {
            ModelWrapper::BPE(_) if is_byte_level => {
                ByteLevel::alphabet().iter().all(|byte| vocabulary.contains_key(&byte.to_string()))
            }
            ModelWrapper::BPE(bpe) if bpe.byte_fallback => {
                (0..=255).all(|byte| vocabulary.contains_key(&format!("<0x{byte:02X}>")))
            }
            _ => false,
        };
        let longest = vocabulary.keys().map(String::len).max()?;
        let strips = inner.get_added_tokens_decoder().values().any(|token| token.lstrip || token.rstrip);
        knows_every_text.then(|| TokenBytes { max_bytes: longest.saturating_mul(shrinks).max(1), strips })
    }

    /// The lower bound on the tokens of a text.
    pub fn min_tokens(self, text: &str) -> usize {
        let bytes = match self.strips {
            true => text.chars().filter(|c| !c.is_whitespace()).map(char::len_utf8).sum(),
            false => text.len(),
        };
        bytes / self.max_bytes
    }
}

/// Maximum bytes of a text that can become one byte; `None` if unbounded.
fn shrinks(part: &NormalizerWrapper) -> Option<usize> {
    match part {
        NormalizerWrapper::Sequence(all) => {
            all.as_ref().iter().try_fold(1usize, |all, part| Some(all.saturating_mul(shrinks(part)?)))
        }
        NormalizerWrapper::Prepend(_) | NormalizerWrapper::ByteLevel(_) => Some(1),
        NormalizerWrapper::Replace(replace) => {
            let json = serde_json::to_value(replace).ok()?;
            let (text, content) = (json["pattern"]["String"].as_str()?, json["content"].as_str()?);
            (content.len() >= text.len()).then_some(1)
        }
        // Nine bytes of a syllable in three parts become three, and so does a letter with three marks.
        NormalizerWrapper::NFC(_) => Some(4),
        // Letters of four bytes become letters of one byte, and are then composed as above.
        NormalizerWrapper::NFKC(_) => Some(16),
        NormalizerWrapper::NFD(_) => Some(1),
        _ => None,
    }
}

/// Whether a pre-tokenizer drops nothing.
fn keeps_text(part: &PreTokenizerWrapper) -> bool {
    match part {
        PreTokenizerWrapper::Sequence(all) => all.as_ref().iter().all(keeps_text),
        PreTokenizerWrapper::Split(split) => split.behavior != SplitDelimiterBehavior::Removed,
        PreTokenizerWrapper::ByteLevel(_) | PreTokenizerWrapper::Metaspace(_) | PreTokenizerWrapper::Digits(_) => true,
        _ => false,
    }
}

/// Whether a pre-tokenizer converts each byte to a character.
fn makes_bytes(part: &PreTokenizerWrapper) -> bool {
    match part {
        PreTokenizerWrapper::Sequence(all) => all.as_ref().iter().any(makes_bytes),
        PreTokenizerWrapper::ByteLevel(_) => true,
        _ => false,
    }
}

/// Like [`makes_bytes`], for a normaliser.
fn normalises_to_bytes(part: &NormalizerWrapper) -> bool {
    match part {
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().any(normalises_to_bytes),
        NormalizerWrapper::ByteLevel(_) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::Tokenizer;

    const SHIPPED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvant-cli/model");

    /// The bound holds for all texts.
    #[test]
    fn texts_have_at_least_as_many_tokens() {
        let tokenizer = Tokenizer::load(Path::new(SHIPPED)).unwrap();
        let texts =
            ["a".repeat(5000), " ".repeat(5000), "\n".repeat(999), "Zürich 漢字 🙂 <eos> ".repeat(300), "-".repeat(7)];
        for text in texts {
            let (min, tokens) = (tokenizer.min_tokens(&text), tokenizer.encode(&text, false).unwrap().len());
            assert!(min <= tokens, "{min} > {tokens} of {:?}", &text[..7]);
        }
        let min = tokenizer.min_tokens(&"The quick brown fox. ".repeat(390_000));
        assert!(min > 8192, "{min} tokens of 8 MB");
    }

    #[test]
    fn tokenizers_that_leave_out_text_have_no_bound() {
        let json = |normalizer: &str, pre_tokenizer: &str, model: &str| {
            format!(r#"{{"normalizer": {normalizer}, "pre_tokenizer": {pre_tokenizer}, "model": {model}}}"#)
        };
        let words = r#"{"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}"#;
        for json in [
            json("null", r#"{"type": "WhitespaceSplit"}"#, words),
            json("null", "null", words),
            json(r#"{"type": "Strip", "strip_left": true, "strip_right": true}"#, "null", words),
        ] {
            let tokenizer = Tokenizer::parse(json.as_bytes()).unwrap();
            assert_eq!(tokenizer.min_tokens(&"a".repeat(100_000)), 0, "{json}");
        }
    }
}
