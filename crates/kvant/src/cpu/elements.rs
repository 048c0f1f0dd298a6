//! The elements of a float tensor, shared by the tasks of one operation.

use super::{convert, simd::Simd};
use crate::{DType, Tensor};

/// The start and dtype of a tensor of f32, f16 or bf16. Tasks read it anywhere and write disjoint parts. Inputs and
/// outputs may share memory, so slices would be unsound.
#[derive(Clone, Copy)]
pub(super) struct Elements {
    start: *mut u8,
    pub dtype: DType,
}

// SAFETY: access goes through `load` and `store`, whose contract excludes conflicts between threads.
unsafe impl Send for Elements {}
// SAFETY: as above.
unsafe impl Sync for Elements {}

impl Elements {
    /// The device's lock is held while the result is used: calls run under it.
    pub(super) fn of(tensor: &Tensor) -> Elements {
        Elements { start: tensor.host_ptr(), dtype: tensor.dtype() }
    }

    /// The address of an element.
    ///
    /// # Safety
    /// `index` is at most the number of elements.
    #[inline(always)]
    pub(super) unsafe fn at(self, index: usize) -> *mut u8 {
        // SAFETY: within the tensor, or one past it.
        unsafe { self.start.add(index * self.dtype.size()) }
    }

    /// The elements from `index` on.
    ///
    /// # Safety
    /// As [`Elements::at`].
    pub(super) unsafe fn skip(self, index: usize) -> Elements {
        // SAFETY: the caller's promise.
        Elements { start: unsafe { self.at(index) }, ..self }
    }

    /// Widens the elements from `index` on.
    ///
    /// # Safety
    /// They are within the tensor, no other task writes them, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(self, index: usize, out: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { convert::load_row::<S>(self.at(index), self.dtype, out) }
    }

    /// Rounds a row into the elements from `index` on.
    ///
    /// # Safety
    /// They are within the tensor, no other task reads or writes them, and the level's instructions are enabled.
    #[inline(always)]
    pub(super) unsafe fn store<S: Simd>(self, index: usize, row: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe { convert::store_row::<S>(row, self.at(index), self.dtype) }
    }
}

/// A slice in parts of equal length (the last may be shorter), one for each task.
pub(super) struct SliceParts<'a, T> {
    start: *mut T,
    len: usize,
    part: usize,
    life: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out disjoint parts of a slice that it borrows exclusively.
unsafe impl<T: Send> Sync for SliceParts<'_, T> {}

impl<'a, T> SliceParts<'a, T> {
    pub(super) fn new(slice: &'a mut [T], part: usize) -> Self {
        SliceParts { start: slice.as_mut_ptr(), len: slice.len(), part: part.max(1), life: std::marker::PhantomData }
    }

    pub(super) fn count(&self) -> usize {
        self.len.div_ceil(self.part)
    }

    /// The part of a task, below `count`.
    ///
    /// # Safety
    /// No part is taken twice.
    #[allow(clippy::mut_from_ref, reason = "each part goes to one task")]
    pub(super) unsafe fn part(&self, index: usize) -> &mut [T] {
        let start = (index * self.part).min(self.len);
        let len = self.part.min(self.len - start);
        // SAFETY: within the slice, which is borrowed exclusively; the caller takes each part once.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

/// Maximum elements that an element-wise kernel buffers at a time.
pub(super) const PIECE: usize = 512;

/// A buffer of up to [`PIECE`] floats that can be read in whole vectors: elements beyond the floats are zero or stale.
pub(super) struct Padded {
    floats: [f32; PIECE],
    len: usize,
}

impl Padded {
    #[inline(always)]
    pub(super) fn new(len: usize) -> Self {
        assert!(len <= PIECE);
        Padded { floats: [0.0; PIECE], len }
    }

    #[inline(always)]
    pub(super) fn set_len(&mut self, len: usize) {
        assert!(len <= PIECE);
        self.len = len;
    }

    /// The addresses of the vectors that hold the floats.
    #[inline(always)]
    pub(super) fn vectors<S: Simd>(&mut self) -> impl Iterator<Item = *mut f32> + use<S> {
        let start = self.floats.as_mut_ptr();
        // LANES divides PIECE, so each vector is within the array.
        (0..self.len).step_by(S::LANES).map(move |i| start.wrapping_add(i))
    }
}

impl std::ops::Deref for Padded {
    type Target = [f32];
    #[inline(always)]
    fn deref(&self) -> &[f32] {
        &self.floats[..self.len]
    }
}

impl std::ops::DerefMut for Padded {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.floats[..self.len]
    }
}
