//! Derives merges from scores: SentencePiece merges the adjacent tokens whose union has the highest score.

use std::cmp::Ordering;

use super::vocabulary::{TokenKind, Vocabulary};

/// Maximum length of a merged token in bytes. The work per token is quadratic in its length; vocabularies have tokens
/// of up to some 100 bytes.
const MAX_TOKEN_BYTES: usize = 512;

/// Every split of a token into two others, best first: by score, then the longer first token first, as in transformers'
/// conversion of SentencePiece models.
pub(super) fn from_scores(vocabulary: &Vocabulary, scores: &[f32]) -> Vec<(String, String)> {
    let mut pairs: Vec<(f32, &str, usize)> = Vec::new();
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        let whole = matches!(vocabulary.kind(id), TokenKind::Control | TokenKind::Unknown | TokenKind::Byte);
        if whole || token.len() > MAX_TOKEN_BYTES {
            continue;
        }
        let cuts = token.char_indices().skip(1).map(|(at, _)| at);
        let known =
            cuts.filter(|&at| [&token[..at], &token[at..]].iter().all(|part| vocabulary.ids.contains_key(*part)));
        pairs.extend(known.map(|at| (scores[id], token, at)));
    }
    // The sort is stable: of equal pairs, the lower id comes first.
    pairs.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(b.2.cmp(&a.2)));
    pairs.into_iter().map(|(_, token, at)| (token[..at].to_string(), token[at..].to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{Metadata, MetadataValue, Scalars, Texts, ValueType};

    /// Merging a user's text must never produce a special token.
    #[test]
    fn control_tokens_and_bytes_are_not_made() {
        let tokens = [("a", 1), ("b", 1), ("ab", 1), ("ba", 3), ("bb", 6), ("aa", 4), ("aab", 1)];
        let mut texts = Texts::default();
        tokens.iter().for_each(|token| texts.push(token.0));
        let kinds = tokens.iter().map(|token| token.1 as u8).collect();
        let mut metadata = Metadata::default();
        metadata.insert("tokenizer.ggml.tokens".into(), MetadataValue::Texts(texts));
        let kinds = Scalars::new(ValueType::U8, kinds).unwrap();
        metadata.insert("tokenizer.ggml.token_type".into(), MetadataValue::Scalars(kinds));
        let vocabulary = Vocabulary::read(&metadata).unwrap();
        let merges = from_scores(&vocabulary, &[0., 0., 2., 9., 9., 1., 2.]);
        let merges: Vec<_> = merges.iter().map(|(a, b)| [a.as_str(), b.as_str()]).collect();
        assert_eq!(merges, [["aa", "b"], ["a", "b"], ["a", "ab"], ["a", "a"]]);
    }
}
