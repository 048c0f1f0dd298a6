//! Tiles, which all kernels share: up to 64 keys and values, and the query rows that attend to them.

use std::ops::Range;

use super::kv_rows::{KvRun, KvSource};
use crate::{codec::BLOCK, cpu::SimdLevel};

/// Keys of a tile.
pub(super) const TILE: usize = 64;
/// Keys of a tile of [`amx_rows`](super::amx_rows), the maximum of all kernels: it loads and stores sums once per tile.
pub(super) const MAX_TILE: usize = 128;

/// Query rows and their states.
#[derive(Clone, Copy)]
pub(super) struct Queries {
    /// `[rows, head_dim]`, times scale · log2 e, coordinates in the order of the keys' chunks.
    pub q: *const f32,
    /// `[rows, head_dim]`, coordinates in the order of the values' chunks.
    pub o: *mut f32,
    /// `[rows]` each.
    pub m: *mut f32,
    pub l: *mut f32,
    /// `q` in fixed point, `[rows, head_dim]`, and its units, `[rows, blocks]`, if keys are in fixed point.
    pub rounded: *const i16,
    pub units: *const f32,
    /// `HeadBias::product` of each query, `[rows, head_dim]`, if keys are stored without a bias.
    pub biased: *const f32,
    pub rows: usize,
    pub head_dim: usize,
    /// The softcap, in base 2.
    pub softcap: Option<f32>,
}

impl Queries {
    /// # Safety
    /// `rows` are within these rows.
    pub unsafe fn rows(&self, rows: Range<usize>) -> Queries {
        // SAFETY: passed on to the caller.
        unsafe {
            Queries {
                q: self.q.add(rows.start * self.head_dim),
                o: self.o.add(rows.start * self.head_dim),
                m: self.m.add(rows.start),
                l: self.l.add(rows.start),
                rounded: self.rounded.wrapping_add(rows.start * self.head_dim),
                units: self.units.wrapping_add(rows.start * self.head_dim.div_ceil(BLOCK)),
                biased: self.biased.wrapping_add(rows.start * self.head_dim),
                rows: rows.len(),
                ..*self
            }
        }
    }
}

/// Some keys of a source, and the query rows that see each.
pub(super) struct KeyTile<'a> {
    /// The position of the first key, and its row.
    pub position: usize,
    pub row: usize,
    pub keys: usize,
    /// The keys that come next, counted from the start of `next_from`.
    pub next: KvRun,
    pub next_from: &'a KvSource<'a>,
    /// The rows that see each key; `None` if all rows see all keys.
    pub seen: Option<&'a [Range<usize>]>,
}

/// Many query rows, which keep their states while keys are added.
pub(super) trait AbsorbTiles {
    /// Maximum keys of a tile.
    const TILE: usize;

    /// Copies the queries' states into these.
    ///
    /// # Safety
    /// Nobody else accesses them.
    unsafe fn load_states(&self);

    /// Copies the states back to the queries.
    ///
    /// # Safety
    /// As for [`AbsorbTiles::load_states`].
    unsafe fn store_states(&self);

    /// Adds the keys and values of a tile. Returns false, and does nothing, if the kernel cannot process numbers in it
    /// that are not finite.
    ///
    /// # Safety
    /// The level is supported; the source has the keys, and no side of it is in fixed point.
    unsafe fn absorb(&self, level: SimdLevel, source: &KvSource, tile: &KeyTile) -> bool;
}

/// The tiles of `positions`, in order: runs of at most `max_keys` keys, which end at its multiples. The tiles that a
/// token sees therefore do not depend on neighbouring tokens.
pub(super) fn tiles<'a>(
    source: &KvSource<'a>,
    positions: Range<usize>,
    max_keys: usize,
) -> impl Iterator<Item = KvRun> + use<'a> {
    source.runs(positions).flat_map(move |run| {
        let mut next = 0;
        std::iter::from_fn(move || {
            let (position, row) = (run.position + next, run.row + next);
            let keys = (max_keys - position % max_keys).min(run.keys - next);
            next += keys;
            (keys > 0).then_some(KvRun { position, row, keys, ..run })
        })
    })
}

/// Work of a fixed-point kernel: keys of a tile, and the coordinates that share a norm.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no side is in fixed point"))]
pub(super) struct FixedPart {
    pub row: usize,
    pub keys: usize,
    pub block: usize,
    pub queries: Queries,
    /// Cache lines to prefetch during the work.
    pub lines: usize,
}
