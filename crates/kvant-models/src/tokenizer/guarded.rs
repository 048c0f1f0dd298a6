//! Calls of the `tokenizers` crate.

use crate::{Error, Result, panics};

/// Calls the `tokenizers` crate and converts its panics to errors.
pub(crate) fn guarded<T>(call: impl FnOnce() -> std::result::Result<T, tokenizers::Error>) -> Result<T> {
    let reason = match panics::catch(call) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(message) => format!("the file's contents are inconsistent ({message})"),
    };
    Err(Error::Tokenizer { reason })
}
