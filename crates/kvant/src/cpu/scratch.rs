//! Scratch memory per thread, kept between calls: after warm-up a step allocates nothing.

use std::{
    cell::RefCell,
    ops::{Deref, DerefMut},
};

thread_local! {
    static FREE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of floats, returned to its thread when dropped.
///
/// A value, not a function that takes a closure: the closure would be compiled as a separate function, without the
/// instructions that the kernel's caller enables.
pub(super) struct ScratchFloats {
    buffer: Vec<f32>,
    start: usize,
    len: usize,
}

/// Floats of a cache line.
pub(super) const LINE: usize = 16;

/// Takes `len` floats of unspecified content.
#[inline]
pub(super) fn take(len: usize) -> ScratchFloats {
    let mut buffer = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    ScratchFloats { buffer, start: 0, len }
}

/// As [`take`], aligned to a cache line: a vector across two lines takes two accesses.
#[inline]
pub(super) fn take_lines(len: usize) -> ScratchFloats {
    let mut floats = take(len + LINE);
    (floats.start, floats.len) = (floats.buffer.as_ptr().align_offset(size_of::<f32>() * LINE).min(LINE), len);
    floats
}

impl Drop for ScratchFloats {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        // A thread that is ending has no list any more.
        let _ = FREE.try_with(|free| free.borrow_mut().push(buffer));
    }
}

impl Deref for ScratchFloats {
    type Target = [f32];
    #[inline(always)]
    fn deref(&self) -> &[f32] {
        &self.buffer[self.start..][..self.len]
    }
}

impl DerefMut for ScratchFloats {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.buffer[self.start..][..self.len]
    }
}
