//! Limits the bytes to which a `tokenizer.json` can expand a text.
//!
//! Thirty normalisers that each double a text expand one letter to gigabytes, and the failed allocation aborts the
//! process. The bound is computed from the file's parts before the library gets the file.

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper};

use super::guarded::guarded;
use crate::{Error, Result};

/// Maximum bytes to which normalisers may expand one byte. The maximum of real tokenizers is 750 (ALBERT).
const MAX_FACTOR: f64 = 1024.0;
/// Up to this factor, texts of any length are accepted. Tokenizers of language models have at most 22.
const USUAL: f64 = 32.0;
/// Maximum bytes of a normalised text for tokenizers above [`USUAL`]. The library needs 16 more per byte.
const MAX_BYTES: f64 = (64 << 20) as f64;
/// Maximum factor of decoders. Real ones have 1: they replace a symbol by a space.
const MAX_DECODER_FACTOR: f64 = 16.0;

/// A bound on bytes: `factor` per byte of a text, and `added` for each part between special tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Growth {
    factor: f64,
    added: f64,
}

impl Growth {
    pub const NONE: Growth = Growth { factor: 1.0, added: 0.0 };

    fn times(factor: f64) -> Growth {
        Growth { factor, added: 0.0 }
    }

    fn then(self, next: Growth) -> Growth {
        Growth { factor: self.factor * next.factor, added: self.added * next.factor + next.added }
    }

    fn of_all(parts: impl IntoIterator<Item = Growth>) -> Growth {
        parts.into_iter().fold(Growth::NONE, Growth::then)
    }

    /// Bytes for one byte, which can be a part of its own.
    fn of_byte(self) -> f64 {
        self.factor + self.added
    }

    /// Computes the bound of a file's normaliser and pre-tokenizer.
    ///
    /// # Errors
    /// `Tokenizer` if this bound or the decoder's exceeds the ones of real tokenizers.
    pub fn check(normalizer: &Value, pre_tokenizer: &Value, decoder: &Value) -> Result<Growth> {
        check_charsmaps(normalizer)?;
        let normalizer = typed(normalizer)?.map_or(Ok(Growth::NONE), |part| of_normalizer(&part))?;
        let pre_tokenizer = typed(pre_tokenizer)?.map_or(Growth::NONE, |part| of_pre_tokenizer(&part));
        let decoder = typed(decoder)?.map_or(Ok(Growth::NONE), |part| of_decoder(&part))?;
        let growth = normalizer.then(pre_tokenizer);
        let parts = [("normalizer", growth, MAX_FACTOR), ("decoder", decoder, MAX_DECODER_FACTOR)];
        // NaN is never within a limit.
        let is_within = |growth: &Growth, max: f64| growth.of_byte() <= max;
        match parts.into_iter().find(|(_, growth, max)| !is_within(growth, *max)) {
            None => Ok(growth),
            Some((name, growth, max)) => {
                let bytes = growth.of_byte();
                Err(error(format!("`{name}` can make {bytes:.0} bytes from one, the limit is {max}")))
            }
        }
    }

    /// Rejects a text that could expand too much.
    pub fn admit(self, text: &str) -> Result<()> {
        let max = (MAX_BYTES / self.of_byte()) as usize;
        if self.of_byte() <= USUAL || text.len() <= max {
            return Ok(());
        }
        let bytes = self.of_byte();
        let reason = format!("it can make {bytes:.0} bytes from one: a text must have at most {max} bytes, got");
        Err(error(format!("{reason} {}", text.len())))
    }
}

fn error(reason: String) -> Error {
    Error::Tokenizer { reason }
}

/// Parses a section of the file, if it exists.
fn typed<T: DeserializeOwned>(section: &Value) -> Result<Option<T>> {
    guarded(|| if section.is_null() { Ok(None) } else { Ok(serde_json::from_value(section.clone()).map(Some)?) })
}

fn of_normalizer(normalizer: &NormalizerWrapper) -> Result<Growth> {
    Ok(match normalizer {
        NormalizerWrapper::Sequence(all) => {
            let all: Result<Vec<Growth>> = all.as_ref().iter().map(of_normalizer).collect();
            Growth::of_all(all?)
        }
        NormalizerWrapper::Replace(replace) => of_replace(replace)?,
        NormalizerWrapper::Prepend(prefix) => Growth { factor: 1.0, added: prefix.prepend.len() as f64 },
        // The Unicode standard's bounds for UTF-8.
        NormalizerWrapper::NFC(_) | NormalizerWrapper::NFD(_) => Growth::times(3.0),
        NormalizerWrapper::NFKC(_) | NormalizerWrapper::NFKD(_) => Growth::times(11.0),
        // İ becomes i and a dot.
        NormalizerWrapper::Lowercase(_) => Growth::times(1.5),
        // Decomposed and lower-cased, with spaces around ideographs.
        NormalizerWrapper::BertNormalizer(_) => Growth::times(3.0 * 1.5 * 2.0),
        NormalizerWrapper::Precompiled(map) => {
            let json = serde_json::to_value(map).map_err(|e| error(e.to_string()))?;
            Growth::times(longest_replacement(&json["precompiled_charsmap"])?)
        }
        NormalizerWrapper::ByteLevel(_) => Growth::times(2.0),
        NormalizerWrapper::StripNormalizer(_) | NormalizerWrapper::StripAccents(_) | NormalizerWrapper::Nmt(_) => {
            Growth::NONE
        }
    })
}

fn of_pre_tokenizer(part: &PreTokenizerWrapper) -> Growth {
    match part {
        PreTokenizerWrapper::Sequence(all) => Growth::of_all(all.as_ref().iter().map(of_pre_tokenizer)),
        // A space before each part.
        PreTokenizerWrapper::ByteLevel(_) => Growth { factor: 2.0, added: 2.0 },
        PreTokenizerWrapper::Metaspace(mark) => {
            let mark = mark.get_replacement().len_utf8() as f64;
            Growth { factor: mark, added: mark }
        }
        _ => Growth::NONE,
    }
}

fn of_decoder(decoder: &DecoderWrapper) -> Result<Growth> {
    Ok(match decoder {
        DecoderWrapper::Sequence(all) => {
            let all: Result<Vec<Growth>> = all.get_decoders().iter().map(of_decoder).collect();
            Growth::of_all(all?)
        }
        DecoderWrapper::Replace(replace) => of_replace(replace)?,
        // They replace a text, which can be empty, by a space.
        DecoderWrapper::BPE(_) | DecoderWrapper::WordPiece(_) | DecoderWrapper::CTC(_) => Growth::times(2.0),
        DecoderWrapper::Metaspace(_)
        | DecoderWrapper::ByteLevel(_)
        | DecoderWrapper::ByteFallback(_)
        | DecoderWrapper::Fuse(_)
        | DecoderWrapper::Strip(_) => Growth::NONE,
    })
}

/// The growth by replacing a text or the matches of a regular expression, which can match everywhere.
fn of_replace(replace: &tokenizers::normalizers::Replace) -> Result<Growth> {
    let json = serde_json::to_value(replace).map_err(|e| error(e.to_string()))?;
    let content = replace.content.len() as f64;
    Ok(match json["pattern"]["String"].as_str().map(str::len) {
        Some(pattern @ 1..) => Growth::times((content / pattern as f64).max(1.0)),
        _ => Growth { factor: 1.0 + content, added: content },
    })
}

/// Checks every SentencePiece map before the library allocates the size in its header.
fn check_charsmaps(section: &Value) -> Result<()> {
    match section {
        Value::Object(fields) => fields.iter().try_for_each(|(name, value)| match name.as_str() {
            "precompiled_charsmap" => longest_replacement(value).map(drop),
            _ => check_charsmaps(value),
        }),
        Value::Array(all) => all.iter().try_for_each(check_charsmaps),
        _ => Ok(()),
    }
}

/// Length of the longest replacement in a SentencePiece map. The map, in base64, contains the size of an index, the
/// index, and zero-terminated texts.
fn longest_replacement(map: &Value) -> Result<f64> {
    let wrong = |what: &str| error(format!("`precompiled_charsmap` must be {what}"));
    let bytes = map.as_str().and_then(base64).ok_or_else(|| wrong("a text in base64"))?;
    let (size, rest) = bytes.split_first_chunk().ok_or_else(|| wrong("at least four bytes"))?;
    let texts = usize::try_from(u32::from_le_bytes(*size)).ok().and_then(|size| rest.get(size..));
    let texts = texts.ok_or_else(|| wrong("longer than the index in it"))?;
    Ok(texts.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0).max(1) as f64)
}

fn base64(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut bytes, mut bits, mut count) = (Vec::with_capacity(text.len() / 4 * 3), 0u32, 0);
    for c in text.trim_end_matches('=').bytes() {
        (bits, count) = (bits << 6 | u32::from(digit(c)?), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn replace(pattern: &str, content: &str) -> Value {
        json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
    }

    fn sequence(parts: Vec<Value>) -> Value {
        json!({"type": "Sequence", "normalizers": parts})
    }

    fn of(normalizer: Value) -> Result<Growth> {
        Growth::check(&normalizer, &Value::Null, &Value::Null)
    }

    fn refused(growth: Result<Growth>) -> String {
        growth.unwrap_err().to_string()
    }

    #[test]
    fn real_normalisers_pass() {
        let llama = sequence(vec![json!({"type": "Prepend", "prepend": "▁"}), replace(" ", "▁")]);
        let map = json!({"type": "Precompiled", "precompiled_charsmap": charsmap(4, &["a", &"x".repeat(33)])});
        let t5 = sequence(vec![
            json!({"type": "Strip", "strip_left": false, "strip_right": true}),
            map.clone(),
            json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}),
        ]);
        let albert = sequence(vec![
            replace("``", "\""),
            replace("''", "\""),
            json!({"type": "NFKD"}),
            json!({"type": "StripAccents"}),
            json!({"type": "Lowercase"}),
            map,
        ]);
        for (normalizer, bytes) in [
            (json!(null), 1.0),
            (replace(" ", "▁"), 3.0),
            (llama, 12.0),
            (json!({"type": "NFC"}), 3.0),
            (t5, 135.0),
            (albert, 544.5),
        ] {
            assert_eq!(of(normalizer.clone()).unwrap().of_byte(), bytes, "{normalizer}");
        }
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let qwen = Growth::check(&json!({"type": "NFC"}), &byte_level, &byte_level).unwrap();
        assert!(qwen.of_byte() <= USUAL);
        qwen.admit(&"a".repeat(1 << 20)).unwrap();
    }

    #[test]
    fn chains_that_grow_are_refused() {
        let doubling = || vec![replace("a", "aa"); 40];
        assert_eq!(
            refused(of(sequence(doubling()))),
            "tokenizer: `normalizer` can make 1099511627776 bytes from one, the limit is 1024"
        );
        let nested = (0..60).fold(replace("a", "aa"), |inner, _| sequence(vec![inner, replace("b", "bb")]));
        refused(of(nested));
        refused(of(json!({"type": "Prepend", "prepend": "a".repeat(1 << 20)})));
        refused(of(sequence(vec![json!({"type": "Prepend", "prepend": "a"}); 2000])));
        refused(of(json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "a".repeat(5000)})));
        refused(of(replace("", &"a".repeat(5000))));
        // The library also accepts parts without a type.
        refused(of(json!({"normalizers": doubling()})));
        // Each pass doubles every byte that is not ASCII.
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let many = json!({"type": "Sequence", "pretokenizers": vec![byte_level; 30]});
        refused(Growth::check(&Value::Null, &many, &Value::Null));
        let decoders = json!({"type": "Sequence", "decoders": doubling()});
        assert!(refused(Growth::check(&Value::Null, &Value::Null, &decoders)).contains("`decoder` can make"));
    }

    #[test]
    fn maps_of_sentencepiece_are_checked_first() {
        let map = |map: Value| of(json!({"type": "Precompiled", "precompiled_charsmap": map}));
        refused(map(json!(charsmap(4, &[&"x".repeat(2000)]))));
        assert!(refused(map(json!("AAAA"))).contains("at least four bytes"));
        assert!(refused(map(json!("////fw=="))).contains("longer than the index in it"), "two gigabytes");
        assert!(refused(map(json!("?"))).contains("base64"));
    }

    #[test]
    fn long_texts_of_unusual_growth_are_refused() {
        let growth = of(replace("a", &"a".repeat(1000))).unwrap();
        growth.admit(&"a".repeat(60_000)).unwrap();
        let message = growth.admit(&"a".repeat(70_000)).unwrap_err().to_string();
        assert_eq!(
            message,
            "tokenizer: it can make 1000 bytes from one: a text must have at most 67108 bytes, got 70000"
        );
    }

    /// A map with an empty index.
    fn charsmap(index: u32, texts: &[&str]) -> String {
        let mut bytes = index.to_le_bytes().to_vec();
        bytes.extend(vec![0; index as usize]);
        for text in texts {
            bytes.extend(text.bytes().chain([0]));
        }
        const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for chunk in bytes.chunks(3) {
            let bits = chunk.iter().chain([&0; 2]).take(3).fold(0u32, |bits, &byte| bits << 8 | u32::from(byte));
            let digits = (0..4).map(|i| char::from(DIGITS[(bits >> (18 - 6 * i)) as usize & 63]));
            text.extend(digits.take(chunk.len() + 1));
            text.extend(std::iter::repeat_n('=', 3 - chunk.len()));
        }
        text
    }
}
