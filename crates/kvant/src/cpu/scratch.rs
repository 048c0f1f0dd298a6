//! Scratch memory per thread, kept between calls: after warm-up a step allocates nothing.

use std::{
    cell::RefCell,
    ops::{Deref, DerefMut},
};

thread_local! {
    static FREE: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Some floats, given back to their thread at the end.
///
/// A value and not a function that takes a closure: kernels hold one, and a closure would be compiled as a function of
/// its own, without the instructions that the kernel's caller enables.
pub(super) struct ScratchFloats {
    buffer: Vec<f32>,
    start: usize,
    len: usize,
}

/// Floats of a line of the cache.
pub(super) const LINE: usize = 16;

/// `len` floats of unspecified content.
#[inline]
pub(super) fn take(len: usize) -> ScratchFloats {
    let mut buffer = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    ScratchFloats { buffer, start: 0, len }
}

/// The same from the start of a line of the cache on: a vector that straddles two lines takes two accesses.
#[inline]
pub(super) fn take_lines(len: usize) -> ScratchFloats {
    let mut floats = take(len + LINE);
    (floats.start, floats.len) = (floats.buffer.as_ptr().align_offset(size_of::<f32>() * LINE).min(LINE), len);
    floats
}

impl Drop for ScratchFloats {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        // While a thread ends there is no list left to give it back to.
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
