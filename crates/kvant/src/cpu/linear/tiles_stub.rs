//! Replaces `tiles` on processors other than x86-64, where [`select`](super::route::select) never chooses it.

use super::{few_rows::PrepareAs, many_rows::ManyRowsBy};
use crate::{
    DType,
    cpu::simd::{Simd, SimdKernel},
};

pub(super) const ROWS: usize = 1;
pub(super) const PANEL: usize = 1;

const WHY: &str = "no activations are prepared as tiles";

#[derive(Clone, Copy)]
pub(super) struct TileLayout;

impl TileLayout {
    pub(super) fn new(_: usize, _: DType, _: bool) -> TileLayout {
        unreachable!("{WHY}")
    }

    pub(super) fn tile(&self) -> usize {
        unreachable!("{WHY}")
    }
}

impl SimdKernel for PrepareAs<'_, TileLayout> {
    type Output = ();
    fn run<S: Simd>(self) {
        unreachable!("{WHY}")
    }
}

impl SimdKernel for ManyRowsBy<'_, TileLayout> {
    type Output = ();
    fn run<S: Simd>(self) {
        unreachable!("{WHY}")
    }
}
