//! Replaces `fixed_point` on processors other than x86-64, where [`select`](super::route::select) never returns it.

use super::{kv_rows::KvRows, prefetch::Prefetcher, tile::FixedPart};
use crate::cpu::seal::StoredMean;

const WHY: &str = "no side is in fixed point";

pub(super) fn round_query(_: &KvRows, _: &[f32], _: &mut [i16], _: &mut [f32]) {
    unreachable!("{WHY}")
}

pub(super) fn order_sum(_: &KvRows, _: &mut [f32]) {
    unreachable!("{WHY}")
}

/// # Safety
/// Never called.
pub(super) unsafe fn load_mean(_: &KvRows, _: StoredMean, _: bool, _: &mut [f32]) {
    unreachable!("{WHY}")
}

/// # Safety
/// Never called.
pub(super) unsafe fn score(_: &KvRows, _: FixedPart, _: *mut f32, _: &mut Prefetcher) {
    unreachable!("{WHY}")
}

/// # Safety
/// Never called.
pub(super) unsafe fn add_values(_: &KvRows, _: FixedPart, _: *const f32, _: *mut i16, _: &mut Prefetcher) {
    unreachable!("{WHY}")
}
