//! Text to token ids and back, by the model's own `tokenizer.json`.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use serde_json::Value;

use crate::{Config, Error, Result, files};

/// Several times the largest vocabulary there is.
const TOKENIZER_LIMIT: u64 = 256 << 20;

/// A model's tokenizer.
///
/// The `tokenizers` crate, which does the work, panics on some files that are well formed but make no sense. Here that is an error;
/// only where panics abort (`panic = "abort"`) such a file ends the process. A panic hook can keep quiet about these panics
/// by [`Tokenizer::catches_panics`].
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bos: Option<u32>,
    eos: Vec<u32>,
    eos_token: Option<u32>,
}

impl Tokenizer {
    /// Loads `tokenizer.json`; which ids start and end a text comes from `tokenizer_config.json`, `config.json` and
    /// `generation_config.json`, as far as they are there.
    pub fn load(dir: &Path) -> Result<Tokenizer> {
        let path = dir.join("tokenizer.json");
        let mut tokenizer =
            Tokenizer::parse(&files::read(&path, TOKENIZER_LIMIT)?).map_err(|e| Error::file(&path, e))?;
        if let Some(json) = files::read_json_if_there(&dir.join("tokenizer_config.json"))? {
            tokenizer.bos = tokenizer.named(&json["bos_token"]);
            tokenizer.eos_token = tokenizer.named(&json["eos_token"]);
            tokenizer.eos.extend(tokenizer.eos_token);
        }
        if files::is_there(&dir.join("config.json")) {
            let config = Config::load(dir)?;
            tokenizer.bos = tokenizer.bos.or(config.bos_token_id);
            tokenizer.eos_token = tokenizer.eos_token.or(config.eos_token_ids.first().copied());
            tokenizer.eos.extend(config.eos_token_ids);
        }
        tokenizer.eos.sort_unstable();
        tokenizer.eos.dedup();
        Ok(tokenizer)
    }

    /// Parses the contents of a `tokenizer.json`, which does not say which ids start and end a text.
    pub fn parse(json: &[u8]) -> Result<Tokenizer> {
        check_sections(json)?;
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(json))?;
        // A prompt must never be cut or padded behind the caller's back.
        guarded(|| inner.with_truncation(None).map(|_| ()))?;
        inner.with_padding(None);
        Ok(Tokenizer { inner, bos: None, eos: Vec::new(), eos_token: None })
    }

    /// The ids of a text, with the id that starts a text in front if asked (and if there is one).
    ///
    /// Where the text contains the name of a special token, it gets that token, whoever wrote it: take them out of text that you do
    /// not trust.
    pub fn encode(&self, text: &str, add_bos: bool) -> Result<Vec<u32>> {
        let encoding = guarded(|| self.inner.encode_fast(text, false))?;
        let bos = self.bos.filter(|_| add_bos);
        Ok(bos.into_iter().chain(encoding.get_ids().iter().copied()).collect())
    }

    /// The text of ids, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(ids, true))
    }

    /// The text of ids, special tokens by their names.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(ids, false))
    }

    /// The id that starts a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The id that stands behind a whole text, as in training: the tokenizer's `eos_token`.
    pub fn eos_token(&self) -> Option<u32> {
        self.eos_token
    }

    /// The ids at which generation ends: [`Tokenizer::eos_token`], and for instance those that end a turn.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Whether this thread is in a call whose panic becomes an error.
    pub fn catches_panics() -> bool {
        GUARDED.get()
    }

    /// How many ids there are, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Decodes ids as they come.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, ids: Vec::new(), known: 0, text: String::new() }
    }

    /// The id of a token given by its text, or by an object that holds it as `content`.
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

/// Parses the parts whose readers in the `tokenizers` crate panic on broken JSON: here it is an error.
fn check_sections(json: &[u8]) -> Result<()> {
    #[derive(serde::Deserialize)]
    #[expect(dead_code, reason = "parsed to see that it can be")]
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

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls the `tokenizers` crate, which panics on some files whose JSON is well formed: an error as well.
fn guarded<T>(call: impl FnOnce() -> std::result::Result<T, tokenizers::Error>) -> Result<T> {
    GUARDED.set(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(false);
    let reason = match result {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => {
            let message = panic.downcast_ref::<&str>().map(|s| s.to_string());
            let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
            format!("the file makes no sense ({})", message.unwrap_or_default())
        }
    };
    Err(Error::Tokenizer { reason })
}

/// How many ids the stream lets wait for a character before it takes them for bytes that are no text.
const LONGEST: usize = 64;

/// Decodes ids one by one into pieces of whole characters. Where the ids are text, the pieces together are what
/// [`Tokenizer::decode`] gives for all of them at once.
///
/// A character may be spread over several tokens, and what a token's text is can depend on those before: so the stream
/// decodes new ids together with those of the piece before, and hands out what ends with a whole character.
///
/// Where bytes are no text, some decoders (`ByteFallback`) make U+FFFD of every byte beside them, also of characters that
/// were whole. The stream has given these out then, and does not take them back: it differs from
/// [`Tokenizer::decode`] in them and in the number of U+FFFD, and in nothing else.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The ids of the last piece, and those whose text waits.
    ids: Vec<u32>,
    /// How many the former are.
    known: usize,
    /// Their text when they stand alone.
    text: String,
}

impl TextStream<'_> {
    /// Takes an id and returns the text that has become certain, often that of this id, sometimes nothing.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let piece = self.waiting()?;
        let patient = self.ids.len() - self.known < LONGEST;
        if piece.is_empty() {
            // Ids without a text of their own can matter for the next, but not in any number.
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
        self.text = self.tokenizer.decode(&self.ids)?;
        Ok(piece)
    }

    /// The rest: what was waiting for bytes that did not come.
    pub fn finish(self) -> Result<String> {
        self.waiting()
    }

    /// The text of the ids behind the last piece.
    fn waiting(&self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids)?;
        match text.strip_prefix(&self.text) {
            Some(rest) => Ok(rest.to_string()),
            // What they do to the text of the last piece comes too late for it.
            None => self.tokenizer.decode(&self.ids[self.known..]),
        }
    }
}
