//! Creates tokenizers from a GGUF file's metadata, equal to those that the `tokenizers` crate creates from
//! `tokenizer.json`.

use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    decoders::{byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders, strip::Strip},
    models::bpe::{BPE, BpeBuilder},
    normalizers::{NFC, Prepend, Replace, Sequence as Normalizers},
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence as PreTokenizers,
        split::{Split, SplitPattern},
    },
};

use super::{
    Metadata, merges,
    metadata::error,
    pre_tokenizer::PreTokenizer,
    vocabulary::{TokenKind, Vocabulary},
};
use crate::{
    Error, Result, Tokenizer,
    tokenizer::{SpecialIds, guarded::guarded},
};

/// SentencePiece's symbol for a space.
const SPACE: &str = "▁";

impl Tokenizer {
    /// Creates the tokenizer that a GGUF file's metadata describes: `tokenizer.ggml.model` `gpt2`, `llama` or `gemma4`.
    ///
    /// # Errors
    /// `Metadata` for a missing or invalid key; `Unsupported` for another model or an unknown `tokenizer.ggml.pre`;
    /// `Tokenizer` if the parts are inconsistent.
    pub fn from_gguf(metadata: &Metadata) -> Result<Tokenizer> {
        let key = "tokenizer.ggml.model";
        let model = metadata.text(key)?.ok_or_else(|| error(key, "a string", "nothing"))?;
        let mut vocabulary = Vocabulary::read(metadata)?;
        let (mut inner, adds_bos) = match model {
            "gpt2" => {
                let rule = PreTokenizer::named(metadata.text("tokenizer.ggml.pre")?.unwrap_or("default"))?;
                (byte_level(&mut vocabulary, &rule)?, rule.adds_bos)
            }
            "llama" => {
                let merges = merges::from_scores(&vocabulary, &vocabulary.scores()?);
                let prefix = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
                (sentence_piece(&mut vocabulary, merges, prefix)?, true)
            }
            "gemma4" => {
                let prefix = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(false);
                let merges = vocabulary.merges()?;
                (sentence_piece(&mut vocabulary, merges, prefix)?, true)
            }
            other => {
                let shown: String = other.chars().take(80).collect();
                return Err(Error::Unsupported {
                    what: format!("{key} {shown:?}"),
                    reason: "the supported ones are \"gpt2\", \"llama\" and \"gemma4\"".to_string(),
                });
            }
        };
        add_tokens(&mut inner, &vocabulary)?;
        let ids = SpecialIds {
            bos: vocabulary.special("bos_token_id")?,
            adds_bos: metadata.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos),
            adds_eos: metadata.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false),
            eos_token: vocabulary.special("eos_token_id")?,
            eos: vocabulary.ends,
        };
        Ok(Tokenizer::from_parts(inner, ids))
    }
}

/// A tokenizer like GPT-2's: bytes are written as letters, and regular expressions divide the text.
fn byte_level(vocabulary: &mut Vocabulary, rule: &PreTokenizer) -> Result<tokenizers::Tokenizer> {
    let merges = vocabulary.merges()?;
    guarded(|| {
        let model = model(vocabulary, merges).ignore_merges(rule.whole_parts).build()?;
        let mut inner = tokenizers::Tokenizer::new(model);
        if rule.nfc {
            inner.with_normalizer(Some(NFC))?;
        }
        let mut parts: Vec<PreTokenizerWrapper> = Vec::new();
        for expression in rule.expressions {
            let pattern = SplitPattern::Regex(expression.to_string());
            parts.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
        }
        parts.push(ByteLevel::new(false, true, false).into());
        inner.with_pre_tokenizer(Some(PreTokenizers::new(parts)));
        inner.with_decoder(Some(ByteLevel::new(false, true, false)));
        Ok(inner)
    })
}

/// A tokenizer like SentencePiece's: spaces become ▁, and characters without a token become bytes.
fn sentence_piece(
    vocabulary: &mut Vocabulary,
    merges: Vec<(String, String)>,
    prefix: bool,
) -> Result<tokenizers::Tokenizer> {
    let unknown = vocabulary.special("unknown_token_id")?;
    guarded(|| {
        let mut model = model(vocabulary, merges).byte_fallback(true).fuse_unk(true);
        if let Some(unknown) = unknown.and_then(|id| vocabulary.tokens.get(id as usize)) {
            model = model.unk_token(unknown.to_string());
        }
        let mut inner = tokenizers::Tokenizer::new(model.build()?);
        let mut normalizers: Vec<NormalizerWrapper> = vec![Replace::new(" ", SPACE)?.into()];
        let mut decoders: Vec<DecoderWrapper> =
            vec![Replace::new(SPACE, " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
        if prefix {
            normalizers.insert(0, Prepend::new(SPACE.to_string()).into());
            decoders.push(Strip::new(' ', 1, 0).into());
        }
        inner.with_normalizer(Some(Normalizers::new(normalizers)))?;
        inner.with_decoder(Some(Decoders::new(decoders)));
        Ok(inner)
    })
}

/// Moves the ids out of the vocabulary, because they are large.
fn model(vocabulary: &mut Vocabulary, merges: Vec<(String, String)>) -> BpeBuilder {
    BPE::builder().vocab_and_merges(std::mem::take(&mut vocabulary.ids), merges)
}

/// Adds tokens that are matched before a text is divided.
fn add_tokens(inner: &mut tokenizers::Tokenizer, vocabulary: &Vocabulary) -> Result<()> {
    let special = [TokenKind::Control, TokenKind::Unknown].into_iter().flat_map(|kind| vocabulary.of_kind(kind));
    let special = special.map(|token| AddedToken::from(token, true));
    let user = vocabulary.of_kind(TokenKind::UserDefined);
    let user = user.map(|token| AddedToken::from(token, false).normalized(false));
    let all: Vec<AddedToken> = special.chain(user).collect();
    guarded(|| inner.add_tokens(all).map(drop))
}
