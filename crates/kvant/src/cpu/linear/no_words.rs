//! Where no instruction multiplies words: what `words` has, never used.

use super::bytes::Layout;

pub(super) const OUTPUTS: usize = 1;
pub(super) const ROWS: usize = 1;

pub(super) fn stride(_: Layout) -> usize {
    0
}

pub(super) fn panel(_: Layout) -> usize {
    0
}

pub(super) unsafe fn prepare(_: Layout, _: &[f32], _: &mut [f32]) -> bool {
    false
}

pub(super) unsafe fn unpack<const BITS: usize>(_: Layout, _: [*const u8; OUTPUTS], _: &mut [f32]) {
    unreachable!("nothing is prepared here")
}

#[allow(dead_code, reason = "nothing is prepared here")]
pub(super) struct To {
    pub rows: [*mut f32; ROWS],
    pub outputs: usize,
    pub alpha: f32,
}

pub(super) unsafe fn products(_: Layout, _: &[f32], _: [*const f32; ROWS], _: &To) {
    unreachable!("nothing is prepared here")
}
