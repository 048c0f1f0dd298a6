//! Converts panics of libraries to errors.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
};

thread_local! {
    static CAUGHT_HERE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in a call that catches panics.
pub fn are_caught() -> bool {
    CAUGHT_HERE.get()
}

/// Calls a library that panics on some inputs. Returns the message of a panic as an error.
pub fn catch<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    let outer = CAUGHT_HERE.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    CAUGHT_HERE.set(outer);
    result.map_err(|panic| {
        let message = panic.downcast_ref::<&str>().map(|s| s.to_string());
        message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
    })
}
