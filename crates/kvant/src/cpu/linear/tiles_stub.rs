//! Replaces `tiles` on processors other than x86-64, where [`select`](super::route::select) never chooses it.

use std::{ops::Range, sync::Mutex};

use super::matrix::Matrix;
use crate::{
    DType,
    cpu::{
        elements::Elements,
        simd::{Simd, SimdKernel},
    },
};

pub(super) const ROWS: usize = 1;
pub(super) const PANEL: usize = 1;

const WHY: &str = "no activations are prepared as tiles";

#[derive(Clone, Copy)]
pub(super) struct TileLayout;

impl TileLayout {
    pub(super) fn new(_: usize, _: DType) -> TileLayout {
        unreachable!("{WHY}")
    }

    pub(super) fn tile(&self) -> usize {
        unreachable!("{WHY}")
    }
}

#[allow(dead_code, reason = "nothing reads it here")]
pub(super) struct PrepareTiles<'a> {
    pub layout: TileLayout,
    pub x: Elements,
    pub first: usize,
    pub rows: usize,
    pub to: &'a mut [f32],
    pub odd: &'a Mutex<Vec<u32>>,
    pub number: usize,
}

impl SimdKernel for PrepareTiles<'_> {
    type Output = ();
    fn run<S: Simd>(self) {
        unreachable!("{WHY}")
    }
}

#[allow(dead_code, reason = "nothing reads it here")]
pub(super) struct ManyRowsByTiles<'a> {
    pub matrix: Matrix,
    pub layout: TileLayout,
    pub base: usize,
    pub outputs: Range<usize>,
    pub x: &'a [f32],
    pub rows: &'a [[u32; 2]],
    pub alpha: f32,
    pub out: Elements,
    pub width: usize,
}

impl SimdKernel for ManyRowsByTiles<'_> {
    type Output = ();
    fn run<S: Simd>(self) {
        unreachable!("{WHY}")
    }
}
