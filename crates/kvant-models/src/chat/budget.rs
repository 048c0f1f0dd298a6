//! The budget of bytes of one rendering.

use std::cell::Cell;

use minijinja::{Error, ErrorKind};

/// Maximum bytes that one rendering prints, captures and produces in filters and methods.
pub const MAX_BYTES: usize = 256 << 20;

thread_local! {
    static BYTES_LEFT: Cell<usize> = const { Cell::new(0) };
}

/// Starts the budget of a rendering on this thread.
pub fn start_budget() {
    BYTES_LEFT.set(MAX_BYTES);
}

/// Takes bytes from the budget before they are allocated.
pub fn spend(bytes: usize) -> Result<(), Error> {
    match BYTES_LEFT.get().checked_sub(bytes) {
        Some(rest) => {
            BYTES_LEFT.set(rest);
            Ok(())
        }
        None => Err(Error::new(ErrorKind::InvalidOperation, format!("the template makes more than {MAX_BYTES} bytes"))),
    }
}

/// Takes the bytes of a text from the budget.
pub fn made(text: String) -> Result<String, Error> {
    spend(text.len())?;
    Ok(text)
}
