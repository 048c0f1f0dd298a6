//! Decodes ids one by one.

use std::ops::Deref;

use super::Tokenizer;
use crate::Result;

/// Number of ids at the end of a prompt that [`TextStream::after`] decodes to find an incomplete character. A character
/// has at most four bytes.
const TAIL: usize = 64;

/// Decodes ids one by one into pieces of whole characters. If the ids are valid text, the concatenated pieces equal
/// [`Tokenizer::decode`] of all ids. A stream that continues a prompt ([`TextStream::after`]) returns the text that
/// follows the prompt's.
///
/// A character can span several tokens. Its text is returned with its last byte.
///
/// If bytes are not valid text, some decoders (`ByteFallback`) replace every adjacent byte by U+FFFD, including the
/// bytes of complete characters. The stream keeps complete characters. It then differs from [`Tokenizer::decode`] only
/// in these characters and in the number of U+FFFD.
#[derive(Clone)]
pub struct TextStream<T> {
    tokenizer: T,
    /// Whether the text includes the names of special tokens.
    special: bool,
    /// The previous token of the text.
    last: Option<u32>,
    /// Number of characters that may still be removed from the start of the text.
    strip: usize,
    /// The first bytes of a character.
    pending: Vec<u8>,
}

impl<T: Deref<Target = Tokenizer>> TextStream<T> {
    /// A stream from the start of a text, without special tokens.
    pub fn new(tokenizer: T) -> TextStream<T> {
        let strip = tokenizer.decoder.strip().max;
        TextStream { tokenizer, special: false, last: None, strip, pending: Vec::new() }
    }

    /// Sets whether the text includes the names of special tokens, for the following ids.
    #[must_use]
    pub fn special(mut self, special: bool) -> TextStream<T> {
        self.special = special;
        self
    }

    /// Like [`TextStream::special`], in place.
    pub fn set_special(&mut self, special: bool) {
        self.special = special;
    }

    /// Continues a prompt. A following word keeps the space before it, and a character that begins at the end of the
    /// prompt is part of the stream's text.
    ///
    /// # Errors
    /// As [`TextStream::push`].
    pub fn after(mut self, prompt: &[u32]) -> Result<TextStream<T>> {
        let tail = prompt.len().saturating_sub(TAIL);
        for (index, &id) in prompt.iter().enumerate() {
            if index >= tail || self.is_at_start() {
                self.push(id)?;
            }
        }
        Ok(self)
    }

    /// Receives an id and returns the text that is now complete: usually the text of this id, sometimes nothing.
    ///
    /// # Errors
    /// `Tokenizer` if the decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let bytes = self.bytes(id)?;
        self.pending.extend(bytes);
        let (text, whole) = self.decode(false);
        self.pending.drain(..whole);
        Ok(text)
    }

    /// Returns the text of held-back bytes that do not complete a character.
    ///
    /// # Errors
    /// None at present.
    pub fn finish(self) -> Result<String> {
        self.rest()
    }

    /// Like [`TextStream::finish`], in place.
    ///
    /// # Errors
    /// None at present.
    pub fn rest(&self) -> Result<String> {
        Ok(self.decode(true).0)
    }

    /// Whether characters can be removed from the next token because it starts the text.
    fn is_at_start(&self) -> bool {
        self.last.is_none() || self.strip > 0
    }

    /// The bytes that an id adds to the text.
    fn bytes(&mut self, id: u32) -> Result<Vec<u8>> {
        let tokenizer = &*self.tokenizer;
        if !tokenizer.has_token(id) || !self.special && tokenizer.is_special(id) {
            return Ok(Vec::new());
        }
        let last = self.last.replace(id);
        let mut bytes = tokenizer.bytes_after(last, id)?;
        let mut content = [0; 4];
        let content = tokenizer.decoder.strip().content.encode_utf8(&mut content).as_bytes();
        while self.strip > 0 && !bytes.is_empty() {
            match bytes.strip_prefix(content) {
                Some(rest) => (self.strip, bytes) = (self.strip - 1, rest.to_vec()),
                None => self.strip = 0,
            }
        }
        Ok(bytes)
    }

    /// The text of the pending bytes, and the number of bytes consumed. Unless it `is_end`, bytes at the end that can
    /// begin a character are not consumed.
    fn decode(&self, is_end: bool) -> (String, usize) {
        let (mut text, mut whole) = (String::new(), 0);
        for chunk in self.pending.utf8_chunks() {
            let (valid, invalid) = (chunk.valid(), chunk.invalid());
            text.push_str(valid);
            whole += valid.len();
            let is_last = whole + invalid.len() == self.pending.len();
            if is_last && !is_end && begins_character(invalid) {
                break;
            }
            let per_byte = self.tokenizer.decoder.replaces_bytes();
            let replaced = if per_byte { invalid.len() } else { usize::from(!invalid.is_empty()) };
            text.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, replaced));
            whole += invalid.len();
        }
        (text, whole)
    }
}

/// Whether more bytes can complete these bytes to a character.
fn begins_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
