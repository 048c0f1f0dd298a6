//! Replaces `amx_rows` on processors other than x86-64, where [`select`](super::route::select) never returns it.

use super::{
    kv_rows::KvSource,
    tile::{AbsorbTiles, KeyTile, MAX_TILE, Queries},
};
use crate::cpu::simd::SimdLevel;

pub(super) enum AmxRows {}

impl AmxRows {
    pub fn len(_: usize, _: usize) -> usize {
        0
    }

    /// # Safety Never called.
    pub unsafe fn new(_: Queries, _: &mut [f32]) -> Option<AmxRows> {
        None
    }
}

impl AbsorbTiles for AmxRows {
    const TILE: usize = MAX_TILE;

    unsafe fn load_states(&self) {
        match *self {}
    }

    unsafe fn store_states(&self) {
        match *self {}
    }

    unsafe fn absorb(&self, _: SimdLevel, _: &KvSource, _: &KeyTile) -> bool {
        match *self {}
    }
}
