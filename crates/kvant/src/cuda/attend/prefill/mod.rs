//! Attention of many tokens over dense 16-bit keys, with products of warpgroups on Hopper and of warps elsewhere.
//!
//! Keys and values are those of the layer, or decoded pages ([`AttendUnpack`](super::unpack::AttendUnpack)).

use crate::{
    DType, Result,
    cuda::{
        attend::{
            AttendParams, HeadShares, MAX_SPLITS, bind_output, bind_result, keys_of_tokens, params,
            unpack::UnpackedPages,
        },
        headers,
    },
    gpu::{Builder, Launch, Limits, Params, Source, Use},
    ops::attend::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "attend_prefill.cu",
    text: include_str!("attend_prefill.cu"),
    headers: headers::ALL,
    layouts: &[AttendParams::layout],
};

/// Warps that compute and, with products of warpgroups, warps that copy.
const CONSUMERS: usize = 8;
const COPIERS: usize = 4;
/// Maximum buffers; more are not faster.
const MAX_STAGES: usize = 12;
/// Minimum keys of a block: dividing an item writes and reads the state of every block.
const MIN_KEYS: usize = 512;

/// The kernel's name.
pub(super) const PREFILL: &str = "attend_prefill";

/// Division of the work among blocks.
pub(super) struct AttendPrefill {
    dtype: DType,
    /// Query rows of a work item.
    rows: usize,
    items: usize,
    /// Maximum tokens of a work item.
    item_tokens: usize,
    /// Work items that a block has in shared memory, 1 or 2. With 2, copies of the next item begin before the current
    /// one is finished.
    known_items: usize,
    /// Blocks that share the keys of an item and KV head.
    splits: usize,
    /// Shares of items and KV heads, and the blocks that process them in turn.
    shares: usize,
    blocks: usize,
    warpgroup_products: bool,
    tile: usize,
    stages: usize,
    shared_bytes: usize,
}

/// Query rows of a work item.
fn item_rows(head_dim: usize) -> usize {
    // 64 rows of 512 coordinates fill the registers of both warpgroups.
    if head_dim == 512 { 64 } else { 128 }
}

/// Sizes of tiles, the preferred one first, with the minimum buffers of each.
fn tiles(head_dim: usize, warpgroup_products: bool) -> &'static [(usize, usize)] {
    match (warpgroup_products, head_dim) {
        (true, ..=128) => &[(128, 4)],
        (true, ..=256) => &[(64, 4)],
        // Rows of 512 coordinates are copied in four chunks, and buffers must outnumber them.
        (true, _) => &[(64, 5)],
        (false, ..=64) => &[(128, 3)],
        (false, ..=128) => &[(64, 3)],
        (false, ..=256) => &[(64, 3), (32, 2)],
        // A warp copies two chunks ahead of the buffers that are in use.
        (false, _) => &[(64, 6), (32, 6), (16, 6)],
    }
}

/// Work items of a KV head.
fn items(call: &Call) -> usize {
    let group = call.heads / call.layer.spec().kv_heads;
    call.tokens.saturating_mul(group).div_ceil(item_rows(call.head_dim))
}

impl AttendPrefill {
    /// Whether the largest number of tokens of a sequence fills at least half a work item.
    pub(super) fn has_enough_rows(call: &Call) -> bool {
        let group = call.heads / call.layer.spec().kv_heads;
        let rows_of_sequence = call.step.batch().max_new.saturating_mul(group);
        call.tokens > 0 && rows_of_sequence >= item_rows(call.head_dim) / 2
    }

    /// None if a block has too little shared memory.
    pub(super) fn new(call: &Call, limits: &Limits) -> Option<AttendPrefill> {
        let (rows, items) = (item_rows(call.head_dim), items(call));
        let item_tokens = item_tokens(rows, call.heads / call.layer.spec().kv_heads);
        let pairs = items.saturating_mul(call.layer.spec().kv_heads);
        let batch = call.step.batch();
        let seen = keys_of_tokens(call, batch.max_new.max(1)).min(batch.longest);
        let splits = match call.splits {
            0 => (limits.busy_groups / pairs.max(1)).min(seen / MIN_KEYS).clamp(1, MAX_SPLITS),
            splits => splits.min(MAX_SPLITS),
        };
        let shares = pairs.saturating_mul(splits);
        let warpgroup_products = limits.warpgroup_products;
        let blocks = if warpgroup_products { shares.min(limits.busy_groups) } else { shares };
        let shared = |known, tile, stages| shared_bytes(call.head_dim, rows, [known, item_tokens], tile, stages);
        let (tile, stages) = tiles(call.head_dim, warpgroup_products).iter().find_map(|&(tile, least)| {
            let fits = |&stages: &usize| shared(1, tile, stages) <= limits.threadgroup_bytes;
            Some((tile, (least..=MAX_STAGES).rev().find(fits)?))
        })?;
        // A second item never costs a buffer.
        let two_fit = shared(2, tile, stages) <= limits.threadgroup_bytes;
        let known_items = if warpgroup_products && two_fit { 2 } else { 1 };
        let (dtype, shared_bytes) = (call.q.dtype(), shared(known_items, tile, stages));
        Some(AttendPrefill {
            dtype,
            rows,
            items,
            item_tokens,
            known_items,
            splits,
            shares,
            blocks,
            warpgroup_products,
            tile,
            stages,
            shared_bytes,
        })
    }

    pub(super) fn reason(&self) -> String {
        let AttendPrefill { rows, items, shares, blocks, tile, warpgroup_products, .. } = *self;
        let products = if warpgroup_products { "warpgroups" } else { "warps" };
        format!(
            "{items} work items of up to {rows} query rows per KV head, {shares} shares of them by {blocks} blocks; {tile} keys \
             a tile; products of {products}"
        )
    }

    /// The launch.
    pub(super) fn launch(&self, call: &Call, unpacked: Option<&UnpackedPages>, b: &Builder) -> Result<Launch> {
        Launch::uint(NAME, "q", self.items.saturating_mul(self.rows).max(self.shares))?;
        let mut params = params(call, HeadShares::whole(call), self.rows, self.items, self.splits)?;
        let warps = if self.warpgroup_products { CONSUMERS + COPIERS } else { CONSUMERS };
        let launch = Launch::new(NAME, &SOURCE, PREFILL)
            .constant("WARPGROUP_PRODUCTS", self.warpgroup_products)
            .constant("HEAD_DIM", call.head_dim as u32)
            .constant("DTYPE", self.dtype)
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("WARPS", warps as u32)
            .constant("TOKENS", self.item_tokens as u32)
            .constant("ITEMS", self.known_items as u32)
            .constant("TILE", self.tile as u32)
            .constant("STAGES", self.stages as u32)
            .constant("SPLIT", self.splits > 1)
            .constant("SOFTCAP", call.softcap.is_some())
            .constant("RING", call.layer.spec().ring)
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .read(0, &call.q)
            .read(8, &call.step.positions)
            .read(9, &call.step.sequence)
            .read(10, &call.step.lens)
            .grid([self.blocks, 1, 1], [32 * warps, 1, 1])
            .threadgroup_memory(self.shared_bytes);
        let heads = HeadShares::whole(call);
        let launch = match unpacked {
            None => bind_result(launch, call, heads).read(2, &call.layer.k.low).read(5, &call.layer.v.low),
            Some(pages) => {
                params.page_entries = pages.entries;
                let read = |launch: Launch, index, scratch| launch.scratch(index, scratch, Use::Read);
                read(read(read(bind_output(launch, call, heads), 2, &pages.k), 5, &pages.v), 15, &pages.table)
            }
        };
        let launch = launch.params(14, &params);
        // Counters: arrived shares of each item with several shares, and shares that blocks have taken.
        let arrivals = if self.splits > 1 { self.shares / self.splits } else { 0 };
        let launch = match arrivals + usize::from(self.shares > self.blocks) {
            0 => launch,
            counters => launch.scratch(12, &b.counters(counters * 4)?, Use::ReadWrite),
        };
        if self.splits == 1 {
            return Ok(launch);
        }
        // A state: the sums of the item's rows, and four numbers of each thread that computes.
        let state = self.rows * call.head_dim + 32 * CONSUMERS * 4;
        let states = b.scratch(self.shares.saturating_mul(state * 4))?;
        Ok(launch.scratch(11, &states, Use::ReadWrite))
    }
}

/// Maximum tokens of a work item, rounded up to a multiple of four. An item may begin and end in the middle of a
/// token's rows.
fn item_tokens(rows: usize, group: usize) -> usize {
    let most = if rows.is_multiple_of(group) { rows / group } else { rows.div_ceil(group) + 1 };
    most.min(rows).next_multiple_of(4)
}

/// Bytes of shared memory, computed as in `layout.h`.
fn shared_bytes(head_dim: usize, rows: usize, [items, tokens]: [usize; 2], tile: usize, stages: usize) -> usize {
    let chunk = tile * if head_dim == 512 { 128 } else { head_dim } * 2;
    // The two warpgroups exchange weights, at least 16 bytes per thread, and a number per row.
    let exchanged = if head_dim == 512 { 32 * CONSUMERS * tile.max(32) / 2 + rows * 8 } else { 0 };
    rows * head_dim * 2 + stages * (chunk + 16) + items * (16 + tokens * 20 + 32) + exchanged
}
