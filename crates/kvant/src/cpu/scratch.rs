//! Per-thread scratch memory that is kept, so that a step allocates nothing once it has warmed up.

use std::cell::RefCell;

thread_local! {
    static FREE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with `len` floats of unspecified content. Calls may nest.
//
// Inlined, so that a kernel which calls it has a chance to get `f` compiled with its instructions.
#[inline(always)]
pub(super) fn with<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    let result = f(&mut buffer[..len]);
    FREE.with_borrow_mut(|free| free.push(buffer));
    result
}
