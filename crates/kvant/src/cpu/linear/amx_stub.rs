//! Replaces `amx` on processors other than x86-64, where [`select`](super::route::select) never returns it.

use super::{few_rows::PrepareAs, many_rows::ManyRowsBy};
use crate::{
    DType,
    cpu::simd::{Simd, SimdKernel},
};

pub(super) const ROWS: usize = 1;
pub(super) const PANEL: usize = 1;

const WHY: &str = "no activations are prepared as tiles";

#[derive(Clone, Copy)]
pub(super) struct AmxLayout;

impl AmxLayout {
    pub(super) fn new(_: usize, _: DType, _: bool) -> AmxLayout {
        unreachable!("{WHY}")
    }

    pub(super) fn tile(&self) -> usize {
        unreachable!("{WHY}")
    }
}

impl SimdKernel for PrepareAs<'_, AmxLayout> {
    type Output = ();
    fn run<S: Simd>(self) {
        unreachable!("{WHY}")
    }
}

impl SimdKernel for ManyRowsBy<'_, AmxLayout> {
    type Output = ();
    fn run<S: Simd>(self) {
        unreachable!("{WHY}")
    }
}
