//! Without instructions for products in fixed point, no side is taken so.

use super::{ahead::Ahead, rows::Side, tile::FixedPart as Part};

const WHY: &str = "no side is in fixed point";

pub(super) fn round_query(_: &Side, _: &[f32], _: &mut [i16], _: &mut [f32]) {
    unreachable!("{WHY}")
}

pub(super) fn order_sum(_: &Side, _: &mut [f32]) {
    unreachable!("{WHY}")
}

/// # Safety
/// Never called.
pub(super) unsafe fn score(_: &Side, _: Part, _: *mut f32, _: &mut Ahead) {
    unreachable!("{WHY}")
}

/// # Safety
/// Never called.
pub(super) unsafe fn add_values(_: &Side, _: Part, _: *const f32, _: *mut i16, _: &mut Ahead) {
    unreachable!("{WHY}")
}
