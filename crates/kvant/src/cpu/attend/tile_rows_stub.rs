//! Replaces `tile_rows` on processors other than x86-64, where [`select`](super::route::select) never chooses it.

use super::{
    kv_rows::KvSource,
    tile::{KeyTile, Queries},
};

pub(super) enum TileRows {}

impl TileRows {
    pub fn len(_: usize, _: usize) -> usize {
        0
    }

    /// # Safety
    /// None is needed.
    pub unsafe fn new(_: Queries, _: &mut [f32]) -> Option<TileRows> {
        None
    }

    /// # Safety
    /// Of all functions: never called.
    pub unsafe fn load_states(&self) {
        match *self {}
    }

    pub unsafe fn store_states(&self) {
        match *self {}
    }

    pub unsafe fn absorb(&self, _: &KvSource, _: &KeyTile) -> bool {
        match *self {}
    }
}
