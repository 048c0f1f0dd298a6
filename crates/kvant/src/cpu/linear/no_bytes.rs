//! Where no instruction multiplies bytes: what `bytes` has, never used.

use super::block::Rows;

#[derive(Clone, Copy)]
pub(super) struct Layout;

impl Layout {
    pub(super) fn new(_: usize, _: usize, _: usize) -> Layout {
        Layout
    }

    pub(super) fn inputs(&self) -> usize {
        0
    }

    pub(super) fn groups(&self) -> usize {
        0
    }

    pub(super) fn words(&self) -> usize {
        0
    }
}

pub(super) unsafe fn prepare(_: Layout, _: &[f32], _: &mut [f32]) -> bool {
    false
}

pub(super) unsafe fn dots<const BITS: usize, const R: usize, const T: usize>(
    _: Layout,
    _: &Rows,
    _: [*const f32; T],
) -> [[f32; T]; R] {
    unreachable!("nothing is prepared here")
}
