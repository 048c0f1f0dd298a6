//! Converting text to token ids and back with the model's `tokenizer.json` or the metadata of its GGUF file.

mod pieces;

use std::path::Path;

use serde_json::Value;

use crate::{Config, Error, Files, Result, panics};
pub use pieces::TokenPiece;

/// Several times the size of the largest existing vocabulary.
const TOKENIZER_LIMIT: u64 = 256 << 20;

/// A model's tokenizer.
///
/// The underlying `tokenizers` crate panics on some well-formed files with inconsistent contents. This type returns
/// an error instead, except with `panic = "abort"`, where such a file ends the process. A panic hook can use
/// [`Tokenizer::catches_panics`] to stay silent for these panics.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bos: Option<u32>,
    eos: Vec<u32>,
    eos_token: Option<u32>,
    adds_bos: bool,
}

/// The ids that start and end texts, for [`Tokenizer::from_parts`].
pub(crate) struct SpecialIds {
    pub bos: Option<u32>,
    /// Whether texts start with `bos`.
    pub adds_bos: bool,
    pub eos_token: Option<u32>,
    /// Ascending, each once.
    pub eos: Vec<u32>,
}

impl Tokenizer {
    /// Loads `tokenizer.json`, or the tokenizer of a GGUF file ([`Tokenizer::from_gguf`]). For `tokenizer.json`, the
    /// ids that start and end a text come from `tokenizer_config.json`, `config.json` and `generation_config.json`, as
    /// far as these exist.
    ///
    /// # Errors
    /// `File`, `Config` or `Tokenizer`.
    pub fn load(dir: &Path) -> Result<Tokenizer> {
        Tokenizer::load_files(&Files::at(dir)?)
    }

    /// As [`Tokenizer::load`], from any [`Files`].
    pub fn load_files(files: &Files) -> Result<Tokenizer> {
        if let Some(gguf) = files.as_gguf() {
            return Tokenizer::from_gguf(gguf.metadata());
        }
        let json = files.read("tokenizer.json", TOKENIZER_LIMIT)?;
        let mut tokenizer = Tokenizer::parse(&json).map_err(|e| Error::file(&files.path("tokenizer.json"), e))?;
        if let Some(json) = files.read_json_if_there("tokenizer_config.json")? {
            tokenizer.bos = tokenizer.named(&json["bos_token"]);
            tokenizer.eos_token = tokenizer.named(&json["eos_token"]);
            tokenizer.eos.extend(tokenizer.eos_token);
            // Qwen has an id for the start of a text, and does not use it.
            tokenizer.adds_bos = json["add_bos_token"].as_bool().unwrap_or(true);
        }
        if files.has("config.json") {
            let config = Config::load_files(files)?;
            tokenizer.bos = tokenizer.bos.or(config.bos_token_id);
            tokenizer.eos_token = tokenizer.eos_token.or(config.eos_token_ids.first().copied());
            tokenizer.eos.extend(config.eos_token_ids);
        }
        tokenizer.eos.sort_unstable();
        tokenizer.eos.dedup();
        Ok(tokenizer)
    }

    /// Parses the contents of a `tokenizer.json`. The ids that start and end a text are unknown in this case.
    ///
    /// # Errors
    /// `Tokenizer`.
    pub fn parse(json: &[u8]) -> Result<Tokenizer> {
        check_sections(json)?;
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(json))?;
        // A prompt must never be truncated or padded implicitly.
        guarded(|| inner.with_truncation(None).map(|_| ()))?;
        inner.with_padding(None);
        Ok(Tokenizer { inner, bos: None, eos: Vec::new(), eos_token: None, adds_bos: true })
    }

    pub(crate) fn from_parts(inner: tokenizers::Tokenizer, ids: SpecialIds) -> Tokenizer {
        let SpecialIds { bos, adds_bos, eos_token, eos } = ids;
        Tokenizer { inner, bos, eos, eos_token, adds_bos }
    }

    /// Converts a text to ids. With `add_bos`, [`Tokenizer::bos`] comes first, if the model has such an id and its
    /// texts start with it ([`Tokenizer::adds_bos`]), as in transformers: also where the text starts with the name of
    /// this token.
    ///
    /// The name of a special token in the text becomes that token, whoever wrote it. Remove such names from untrusted
    /// text.
    pub fn encode(&self, text: &str, add_bos: bool) -> Result<Vec<u32>> {
        let encoding = guarded(|| self.inner.encode_fast(text, false))?;
        let bos = self.bos.filter(|_| add_bos && self.adds_bos);
        Ok(bos.into_iter().chain(encoding.get_ids().iter().copied()).collect())
    }

    /// Converts a prompt to ids. They start with [`Tokenizer::bos`], if the model has such an id and its texts start
    /// with it. A prompt that starts with its name gets it only once.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text, false)?;
        if let Some(bos) = self.bos.filter(|bos| self.adds_bos && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Converts ids to text, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(ids, true))
    }

    /// Converts ids to text, with the names of special tokens.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(ids, false))
    }

    /// The id that starts a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether texts start with [`Tokenizer::bos`]. A model can have the id and not use it so.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// The id that ends a text in training: the tokenizer's `eos_token`.
    pub fn eos_token(&self) -> Option<u32> {
        self.eos_token
    }

    /// The ids that end generation: [`Tokenizer::eos_token`] and others, such as those that end a turn.
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

    /// Whether an id has a token. [`Tokenizer::decode`] leaves out ids without one.
    pub fn has_token(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_some()
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

    /// Decodes ids one by one, without special tokens.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, ids: Vec::new(), known: 0, text: String::new(), special: false }
    }

    /// Decodes ids one by one, with the names of special tokens.
    pub fn stream_with_special(&self) -> TextStream<'_> {
        TextStream { special: true, ..self.stream() }
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

/// Parses the sections on whose broken JSON the `tokenizers` crate panics, to return an error instead.
fn check_sections(json: &[u8]) -> Result<()> {
    #[derive(serde::Deserialize)]
    #[expect(dead_code, reason = "parsed only to check that it is valid")]
    struct Sections {
        #[serde(default)]
        normalizer: Value,
        #[serde(default)]
        pre_tokenizer: Value,
        #[serde(default)]
        post_processor: Value,
        #[serde(default)]
        decoder: Value,
    }
    match serde_json::from_slice::<Sections>(json) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::Tokenizer { reason: error.to_string() }),
    }
}

/// Calls the `tokenizers` crate and converts its panics to errors.
pub(crate) fn guarded<T>(call: impl FnOnce() -> std::result::Result<T, tokenizers::Error>) -> Result<T> {
    let reason = match panics::catch(call) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(message) => format!("the file's contents are inconsistent ({message})"),
    };
    Err(Error::Tokenizer { reason })
}

/// The number of ids that the stream holds back for an incomplete character, before it treats them as invalid bytes.
const LONGEST: usize = 64;

/// Decodes ids one by one into pieces of whole characters. If the ids are valid text, the concatenated pieces equal
/// [`Tokenizer::decode`] of all ids.
///
/// A character may span several tokens, and the text of a token can depend on the previous tokens. The stream
/// therefore decodes new ids together with those of the previous piece, and returns text that ends with a whole
/// character.
///
/// If bytes are not valid text, some decoders (`ByteFallback`) replace every neighbouring byte by U+FFFD, including
/// those of complete characters. The stream has already returned these characters. In this case it differs from
/// [`Tokenizer::decode`] in these characters and in the number of U+FFFD, and in nothing else.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The ids of the last piece, and those whose text is held back.
    ids: Vec<u32>,
    /// The number of ids of the last piece.
    known: usize,
    /// The text of the last piece's ids alone.
    text: String,
    /// Whether the text has the names of special tokens.
    special: bool,
}

impl TextStream<'_> {
    /// Takes an id and returns the text that is now complete: usually that of this id, sometimes nothing.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let piece = self.waiting()?;
        let patient = self.ids.len() - self.known < LONGEST;
        if piece.is_empty() {
            // Ids without text can affect the next ones, but only a limited number is kept.
            if !patient {
                self.ids.truncate(self.known);
            }
            return Ok(piece);
        }
        // The end may be the first bytes of a character.
        if patient && piece.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        self.ids.drain(..self.known);
        self.known = self.ids.len();
        self.text = self.decode(&self.ids)?;
        Ok(piece)
    }

    /// Returns the text that was held back for bytes that did not follow.
    pub fn finish(self) -> Result<String> {
        self.waiting()
    }

    /// As [`TextStream::finish`], of a stream that stays where it is.
    pub fn rest(&self) -> Result<String> {
        self.waiting()
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        if self.special { self.tokenizer.decode_with_special(ids) } else { self.tokenizer.decode(ids) }
    }

    /// The text of the ids after the last piece.
    fn waiting(&self) -> Result<String> {
        let text = self.decode(&self.ids)?;
        match text.strip_prefix(&self.text) {
            Some(rest) => Ok(rest.to_string()),
            // The new ids change the text of the last piece, which has already been returned.
            None => self.decode(&self.ids[self.known..]),
        }
    }
}
