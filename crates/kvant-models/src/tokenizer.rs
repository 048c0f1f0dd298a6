//! Converts text to token ids and back, with the model's `tokenizer.json` or the metadata of its GGUF file.

mod bound;
mod growth;
pub(crate) mod guarded;
mod pieces;
mod stream;
mod token_decoder;

use std::{path::Path, sync::OnceLock};

use serde_json::Value;
use tokenizers::{AddedToken, Encoding, PostProcessor, PostProcessorWrapper};

use crate::{Config, Error, Files, Result, panics};
use bound::TokenBytes;
use growth::Growth;
use guarded::guarded;
pub use pieces::TokenPiece;
pub use stream::TextStream;
use token_decoder::TokenDecoder;

/// Maximum bytes of a file: several times the largest existing vocabulary.
const TOKENIZER_LIMIT: u64 = 256 << 20;

/// A model's tokenizer.
///
/// The `tokenizers` crate panics on some well-formed files with inconsistent contents. This type returns an error
/// instead, except with `panic = "abort"`, where a panic ends the process. A panic hook can check
/// [`Tokenizer::catches_panics`] to stay silent.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    decoder: TokenDecoder,
    growth: Growth,
    /// The bytes of tokens, computed on demand.
    token_bytes: OnceLock<Option<TokenBytes>>,
    /// Upper bound of the model's ids: the rows of its embedding.
    ids: usize,
    bos: Option<u32>,
    eos: Vec<u32>,
    eos_token: Option<u32>,
    /// The tokens that are added before every text: none, or in nearly all models `bos`.
    start: Vec<u32>,
    /// The tokens that are added after whole texts.
    end: Vec<u32>,
}

/// The ids that begin and end texts, for [`Tokenizer::from_parts`].
pub(crate) struct SpecialIds {
    pub bos: Option<u32>,
    /// Whether texts start with `bos`.
    pub adds_bos: bool,
    /// Whether whole texts end with `eos_token`.
    pub adds_eos: bool,
    pub eos_token: Option<u32>,
    /// Ascending, without duplicates.
    pub eos: Vec<u32>,
}

impl Tokenizer {
    /// Loads `tokenizer.json`, or the tokenizer of a GGUF file ([`Tokenizer::from_gguf`]). With `tokenizer.json`, the
    /// beginning-of-text and end-of-text ids come from `tokenizer_config.json`, `config.json` and
    /// `generation_config.json`, if these exist.
    ///
    /// # Errors
    /// `File`, `Config` or `Tokenizer`.
    pub fn load(dir: &Path) -> Result<Tokenizer> {
        Tokenizer::load_files(&Files::at(dir)?)
    }

    /// Like [`Tokenizer::load`], from any [`Files`].
    pub fn load_files(files: &Files) -> Result<Tokenizer> {
        if let Some(gguf) = files.as_gguf() {
            let mut tokenizer = Tokenizer::from_gguf(gguf.metadata())?;
            let rows = gguf.tensor("token_embd.weight").and_then(|table| table.shape.first().copied());
            tokenizer.limit_ids(rows.unwrap_or(usize::MAX)).map_err(|e| Error::file(gguf.path(), e))?;
            return Ok(tokenizer);
        }
        check_kind(files)?;
        let json = files.read("tokenizer.json", TOKENIZER_LIMIT)?;
        let mut tokenizer = Tokenizer::parse(&json).map_err(|e| Error::file(&files.path("tokenizer.json"), e))?;
        if let Some(json) = files.read_json_if_there("tokenizer_config.json")? {
            let [bos, eos] = ["bos_token", "eos_token"].map(|key| tokenizer.named(&json[key]));
            tokenizer.make_special(&[bos, eos])?;
            tokenizer.bos = tokenizer.bos.or(bos);
            tokenizer.eos_token = eos;
            tokenizer.eos.extend(eos);
        }
        if files.has("config.json") {
            let config = Config::load_files(files)?;
            tokenizer.bos = tokenizer.bos.or(config.bos_token_id);
            tokenizer.eos_token = tokenizer.eos_token.or(config.eos_token_ids.first().copied());
            tokenizer.eos.extend(config.eos_token_ids);
            let limited = tokenizer.limit_ids(config.decoder.vocab_size);
            limited.map_err(|e| Error::file(&files.path("tokenizer.json"), e))?;
        }
        tokenizer.eos.sort_unstable();
        tokenizer.eos.dedup();
        Ok(tokenizer)
    }

    /// Parses the contents of a `tokenizer.json`. The end-of-text ids are then unknown, and the beginning-of-text id is
    /// known only if the post-processor adds it.
    ///
    /// # Errors
    /// `Tokenizer`.
    pub fn parse(json: &[u8]) -> Result<Tokenizer> {
        let growth = check_sections(json)?;
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(json))?;
        // A prompt must never be truncated or padded implicitly.
        guarded(|| inner.with_truncation(None).map(|_| ()))?;
        inner.with_padding(None);
        let [start, end] = added_around(&inner)?;
        // A post-processor would only add special tokens; a hostile one could repeat the text.
        inner.with_post_processor(None::<PostProcessorWrapper>);
        let decoder = TokenDecoder::of(inner.get_decoder());
        Ok(Tokenizer {
            inner,
            decoder,
            growth,
            token_bytes: OnceLock::new(),
            ids: usize::MAX,
            bos: start.first().copied(),
            start,
            end,
            eos: Vec::new(),
            eos_token: None,
        })
    }

    /// Marks tokens as special that the vocabulary has as text, as transformers does for tokens in
    /// `tokenizer_config.json`: they are recognised in texts, and answers do not show them.
    fn make_special(&mut self, ids: &[Option<u32>]) -> Result<()> {
        let added = self.inner.get_added_tokens_decoder();
        let text = |id: &u32| self.inner.id_to_token(*id).filter(|_| !added.contains_key(id));
        let tokens: Vec<AddedToken> =
            ids.iter().flatten().filter_map(text).map(|text| AddedToken::from(text, true)).collect();
        guarded(|| self.inner.add_special_tokens(tokens).map(drop))
    }

    pub(crate) fn from_parts(inner: tokenizers::Tokenizer, ids: SpecialIds) -> Tokenizer {
        let SpecialIds { bos, adds_bos, adds_eos, eos_token, eos } = ids;
        let decoder = TokenDecoder::of(inner.get_decoder());
        let start = bos.into_iter().filter(|_| adds_bos).collect();
        let end = eos_token.into_iter().filter(|_| adds_eos).collect();
        let (growth, token_bytes) = (Growth::NONE, OnceLock::new());
        Tokenizer { inner, decoder, growth, token_bytes, ids: usize::MAX, bos, start, end, eos, eos_token }
    }

    /// Converts a text to ids. With `add_bos`, begins with the tokens that the model's texts begin with
    /// ([`Tokenizer::adds_bos`]), as in transformers, even if the text starts with the name of such a token.
    ///
    /// Names of special tokens in the text become these tokens, whoever wrote them. Remove the names from untrusted
    /// text.
    pub fn encode(&self, text: &str, add_bos: bool) -> Result<Vec<u32>> {
        self.growth.admit(text)?;
        let encoding = guarded(|| self.inner.encode_fast(text, false))?;
        if let Some(&id) = encoding.get_ids().iter().find(|&&id| id as usize >= self.ids) {
            return Err(self.beyond_embedding(id));
        }
        let start: &[u32] = if add_bos { &self.start } else { &[] };
        Ok([start, encoding.get_ids()].concat())
    }

    /// Converts a prompt to ids, like [`Tokenizer::encode`] with `add_bos`. If the prompt starts with the names of
    /// these tokens, they are not duplicated.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.encode(text, false)?;
        Ok(if ids.starts_with(&self.start) { ids } else { [&self.start[..], &ids].concat() })
    }

    /// Converts a whole text to ids, for an embedding: like [`Tokenizer::encode_prompt`], followed by the tokens that
    /// end a text. Models with last-token pooling were trained with them.
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode_prompt(text)?;
        if !ids.ends_with(&self.end) {
            ids.extend_from_slice(&self.end);
        }
        Ok(ids)
    }

    /// A lower bound on the tokens of a text, computed from its length, which allows rejecting a text of many megabytes
    /// without tokenising it. 0 if the tokenizer can drop parts of a text.
    pub fn min_tokens(&self, text: &str) -> usize {
        let bytes = self.token_bytes.get_or_init(|| TokenBytes::of(&self.inner));
        bytes.map_or(0, |bytes| bytes.min_tokens(text))
    }

    /// Converts ids to text, without special tokens. Invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(ids, true))
    }

    /// Converts ids to text, including the names of special tokens.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(ids, false))
    }

    /// The beginning-of-text id.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether texts begin with [`Tokenizer::bos`]. A model can have the id without using it.
    pub fn adds_bos(&self) -> bool {
        !self.start.is_empty()
    }

    /// The end-of-text id in training: the tokenizer's `eos_token`.
    pub fn eos_token(&self) -> Option<u32> {
        self.eos_token
    }

    /// The ids that end generation: [`Tokenizer::eos_token`] and others, such as the end of a turn.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Whether this thread is in a call that converts panics to errors.
    pub fn catches_panics() -> bool {
        panics::are_caught()
    }

    /// The number of ids, including added ones.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Whether an id has a token. [`Tokenizer::decode`] skips ids without one.
    pub fn has_token(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_some()
    }

    /// Whether an id is a special token, which is not part of a text.
    pub fn is_special(&self, id: u32) -> bool {
        let token = self.inner.id_to_token(id);
        token.is_some_and(|token| self.inner.get_added_vocabulary().is_special_token(&token))
    }

    /// The names of special tokens.
    pub(crate) fn special_names(&self) -> Vec<String> {
        let tokens = self.inner.get_added_tokens_decoder();
        tokens
            .into_values()
            .filter(|token| token.special && !token.content.is_empty())
            .map(|token| token.content)
            .collect()
    }

    /// Decodes the ids of a text one by one, without special tokens. [`TextStream::after`] continues a prompt.
    pub fn stream(&self) -> TextStream<&Tokenizer> {
        TextStream::new(self)
    }

    /// Like [`Tokenizer::stream`], including the names of special tokens.
    pub fn stream_with_special(&self) -> TextStream<&Tokenizer> {
        self.stream().special(true)
    }

    /// Sets the number of rows of the model's embedding. Special tokens can have larger ids, for example the image
    /// token of Gemma 3 models without images: a text with its name is an error.
    fn limit_ids(&mut self, rows: usize) -> Result<()> {
        self.ids = rows;
        let ids = self.inner.get_vocab(true).into_values();
        match ids.filter(|&id| id as usize >= rows && !self.is_special(id)).min() {
            Some(id) => Err(self.beyond_embedding(id)),
            None => Ok(()),
        }
    }

    fn beyond_embedding(&self, id: u32) -> Error {
        let token = self.inner.id_to_token(id).unwrap_or_default();
        let reason = format!("ids must be below the {} rows of the model's embedding, got {id} of {token:?}", self.ids);
        Error::Tokenizer { reason }
    }

    /// The id of a token, given as its text or as an object with the text in `content`.
    fn named(&self, token: &Value) -> Option<u32> {
        let text = token.as_str().or_else(|| token["content"].as_str())?;
        self.inner.token_to_id(text)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} ids)", self.vocab_size())
    }
}

/// If the checkpoint's tokenizer is in another file, the error names the required file.
fn check_kind(files: &Files) -> Result<()> {
    const OTHERS: [&str; 4] = ["tokenizer.model", "tekken.json", "vocab.json", "spiece.model"];
    let other = OTHERS.into_iter().find(|name| files.has(name));
    let Some(other) = other.filter(|_| !files.has("tokenizer.json")) else { return Ok(()) };
    let reason = format!(
        "has no tokenizer.json, and its {other} is not supported: get tokenizer.json from the model's repository, or \
         write it with AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers"
    );
    Err(files.error(&reason))
}

/// Parses the sections whose invalid JSON makes the `tokenizers` crate panic, to return an error instead, and checks
/// that they cannot expand a text too much.
fn check_sections(json: &[u8]) -> Result<Growth> {
    #[derive(serde::Deserialize)]
    struct Sections {
        #[serde(default)]
        normalizer: Value,
        #[serde(default)]
        pre_tokenizer: Value,
        #[serde(default)]
        #[expect(dead_code, reason = "parsed only to check that it is valid")]
        post_processor: Value,
        #[serde(default)]
        decoder: Value,
    }
    match serde_json::from_slice::<Sections>(json) {
        Ok(sections) => Growth::check(&sections.normalizer, &sections.pre_tokenizer, &sections.decoder),
        Err(error) => Err(Error::Tokenizer { reason: error.to_string() }),
    }
}

/// The tokens that the post-processor adds before and after a text. Transformers adds these regardless of
/// `add_bos_token` in `tokenizer_config.json`, which applies only without a `tokenizer.json`.
fn added_around(inner: &tokenizers::Tokenizer) -> Result<[Vec<u32>; 2]> {
    /// Placeholder for the tokens of a text.
    const TEXT: u32 = u32::MAX;
    let Some(processor) = inner.get_post_processor() else { return Ok([Vec::new(), Vec::new()]) };
    let text = Encoding::from_tokens(vec![tokenizers::Token::new(TEXT, "text".to_string(), (0, 4))], 0);
    let processed = guarded(|| processor.process(text, None, true)).map_err(|_| Error::Tokenizer {
        reason: "`post_processor` must be one that the library can run".to_string(),
    })?;
    let mut parts = processed.get_ids().split(|&id| id == TEXT).map(<[u32]>::to_vec);
    // A hostile post-processor repeats the text: only the first and the last part count.
    Ok([parts.next().unwrap_or_default(), parts.next_back().unwrap_or_default()])
}
