//! Attention on CUDA.
//!
//! [`route`] selects the kernel that runs a call and that `explain` reports. Each kernel has a folder: `mod.rs` divides
//! the work among blocks and builds the launch, `attend_NAME.cu` is the kernel, and headers that only it needs are next
//! to it.
//!
//! | folder | serves | on |
//! |---|---|---|
//! | `short` | decode over dense 16-bit caches of at most 1024 keys | GPUs with clusters |
//! | `decode` | decode over dense 16-bit caches | all |
//! | `short_quantised` | decode over quantised caches of at most 1024 keys | GPUs with clusters |
//! | `quantised` | decode over quantised caches | all |
//! | `prefill` | many tokens over dense 16-bit caches | all |
//! | `unpack` | many tokens over quantised caches in pages, before `prefill` | all |
//! | `generic` | everything else | all |
//!
//! Each kernel accepts a call over a part of the positions (`PageSpan`), merges an earlier result, and can write the
//! ends of its rows for a later call to merge.
//!
//! Headers that several kernels share:
//!
//! | header | contents |
//! |---|---|
//! | `work.h` | parameters, visible keys, how work items are divided among blocks, and the end of a row |
//! | `state.h` | the state of a softmax (m, l, o) and its merge |
//! | `softmax.h` | numbers of the softmax: exponentials, factors, powers of two |
//! | `dense.h` | queries, scores and weights over dense 16-bit keys |
//! | `codes.h` | lookup of quantised coordinates |
//! | `merge_rows.h`, `merge_quads.h` | merging of the states that several blocks have of one work item |

use super::{MAX_CLUSTER, clusters_at_once};
use crate::{
    DType, HeadOrder, Planes, Result, Tensor,
    gpu::{Builder, Launch, Limits, Use, attend, params, planes::page_shift},
    ops::attend::{Call, Explanation, NAME, PageSpan, Results},
};

#[cfg(test)]
pub(super) mod accuracy;
mod decode;
mod generic;
mod prefill;
mod quantised;
mod route;
mod short;
mod short_quantised;
mod unpack;

params! {
    pub(crate) struct AttendParams {
        pub row_sequence: u64,
        pub row_head: u64,
        pub row_slot: u32,
        pub tokens: u32,
        pub sequences: u32,
        pub kv_heads: u32,
        pub group: u32,
        pub capacity: u32,
        pub window: u32,
        pub item_rows: u32,
        pub items: u32,
        pub splits: u32,
        pub scale: f32,
        pub softcap: f32,
        pub page_width: u32,
        pub page_entries: u32,
    }
}

/// Maximum work items for an even division of tiles among blocks: `MAX_SHARED_ITEMS` of `work.h`.
const MAX_SHARED_ITEMS: usize = 256;
/// Maximum parts of a work item.
const MAX_SPLITS: usize = 512;
/// Maximum query heads of a block of a decode kernel: the columns of a tensor-core product.
const MAX_GROUP: usize = 8;
/// Maximum shares into which decode kernels divide the query heads of a KV head. Each share reads all keys and values.
/// The generic kernel reads them once for up to 64 query heads. With two shares, LACKING in the kernels is at most 1.
const MAX_SHARES: usize = 2;

/// The selected kernel, and the reason.
pub(crate) fn explain(call: &Call, limits: &Limits) -> Explanation {
    attend::explain(call, |part| {
        let (kernel, reason) = match route::select(part, limits) {
            Ok(kernel) => (kernel.name(), kernel.reason()),
            Err(error) => ("none", error.to_string()),
        };
        Explanation { kernel, reason: reason.into() }
    })
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    if call.tokens == 0 {
        return Ok(());
    }
    let mut push = |part: &Call| {
        let launches = route::select(part, &b.limits)?.launches(part, b)?;
        launches.into_iter().try_for_each(|launch| b.push(launch))
    };
    match attend::parts(call)? {
        Some(parts) => parts.iter().try_for_each(push),
        None => push(call),
    }
}

/// Addresses of rows of keys or values: strides in rows between sequences, KV heads and slots, and the number of slots.
/// With pages, strides within a page, and the shape of the page table.
struct RowStrides {
    sequence: u64,
    head: u64,
    slot: u64,
    capacity: u64,
    page_width: u64,
    page_entries: u32,
}

impl RowStrides {
    fn of_cache(call: &Call) -> RowStrides {
        let spec = call.layer.spec();
        if let (Some(pages), Some(table)) = (call.layer.pages(), call.step.table_of(&call.layer)) {
            let (head, page_width) = (pages.page_tokens as u64, table.shape()[1] as u64);
            // Positions without an entry in the table are not held.
            let capacity = page_width.saturating_mul(head).min(u32::MAX.into());
            return RowStrides { sequence: 0, head, slot: 1, capacity, page_width, page_entries: pages.entries };
        }
        debug_assert!(spec.sequences > 0);
        let (kv_heads, capacity) = (spec.kv_heads as u64, spec.capacity as u64);
        let (head, slot) = match spec.order {
            HeadOrder::HeadMajor => (capacity, 1),
            HeadOrder::TokenMajor => (1, kv_heads),
        };
        RowStrides { sequence: kv_heads * capacity, head, slot, capacity, page_width: 0, page_entries: 0 }
    }
}

/// The division of the query heads of each KV head into shares. A kernel treats a share as a KV head; the shares of a
/// KV head read equal keys and values. If the number of heads is odd, the last share has one head less.
#[derive(Clone, Copy)]
struct HeadShares {
    /// Shares of a KV head.
    shares: usize,
    /// Shares of all KV heads.
    kv_heads: usize,
    /// Query heads of a share.
    group: usize,
    /// Query heads that the last share of a KV head lacks.
    lacking: usize,
}

impl HeadShares {
    fn new(call: &Call, shares: usize) -> HeadShares {
        let kv_heads = call.layer.spec().kv_heads;
        let heads = call.heads / kv_heads;
        let group = heads.div_ceil(shares);
        HeadShares { shares, kv_heads: kv_heads * shares, group, lacking: group * shares - heads }
    }

    /// One share per KV head.
    fn whole(call: &Call) -> HeadShares {
        HeadShares::new(call, 1)
    }

    /// The minimum number of shares with at most [`MAX_GROUP`] query heads each; one share if that exceeds
    /// [`MAX_SHARES`].
    fn of_decode(call: &Call) -> HeadShares {
        let shares = HeadShares::whole(call).group.div_ceil(MAX_GROUP);
        HeadShares::new(call, if shares <= MAX_SHARES { shares } else { 1 })
    }
}

fn params(call: &Call, heads: HeadShares, item_rows: usize, items: usize, splits: usize) -> Result<AttendParams> {
    let rows = RowStrides::of_cache(call);
    let uint = |arg, value: usize| Launch::uint(NAME, arg, value);
    Ok(AttendParams {
        row_sequence: rows.sequence,
        row_head: rows.head,
        row_slot: uint("layer.kv_heads", rows.slot as usize)?,
        tokens: uint("q", call.tokens)?,
        sequences: uint("layer.sequences", call.step.sequences())?,
        kv_heads: uint("layer.kv_heads", heads.kv_heads)?,
        group: uint("q", heads.group)?,
        capacity: uint("layer.capacity", rows.capacity as usize)?,
        window: u32::try_from(call.window).unwrap_or(u32::MAX),
        item_rows: uint("q", item_rows)?,
        items: uint("q", items)?,
        splits: splits as u32,
        scale: call.scale,
        softcap: call.softcap.unwrap_or(0.0),
        page_width: uint("step.page_tables", rows.page_width as usize)?,
        page_entries: rows.page_entries,
    })
}

/// Binds the output, the sinks, and the page table of a layer with pages, which every kernel has.
fn bind_result(launch: Launch, call: &Call, heads: HeadShares) -> Launch {
    bind_output(launch, call, heads).read_if(15, call.step.table_of(&call.layer))
}

/// As [`bind_result`], without the page table.
fn bind_output(launch: Launch, call: &Call, heads: HeadShares) -> Launch {
    let launch = with_span(launch, call)
        .constant("SHARES", heads.shares as u32)
        .constant("LACKING", heads.lacking as u32)
        .write(1, &call.out)
        .constant("SINKS", call.sinks.is_some())
        .read_if(13, call.sinks.as_ref())
        .constant("EARLIER", call.earlier.is_some())
        .constant("ENDS", call.ends.is_some())
        .write_if(20, call.ends.as_ref());
    match &call.earlier {
        Some(Results { out, ends }) => launch.read(18, out).read(19, ends),
        None => launch,
    }
}

/// Sets the constants of the visible positions.
fn with_span(launch: Launch, call: &Call) -> Launch {
    launch.constant("PAGE_SHIFT", page_shift(&call.layer)).constant("SPAN", call.span.code())
}

/// The buffers that a kernel reads before the previous kernel has ended. If the kernel merges earlier results, it reads
/// all other buffers ahead.
fn reads_ahead(call: &Call, usual: &'static [u32]) -> &'static [u32] {
    const ALL: &[u32] = &[0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 21, 22, 23, 24];
    if call.earlier.is_some() { ALL } else { usual }
}

/// The dtype that sets the precision of a result: the output's, or the queries' if a later call merges the result.
fn precision(call: &Call) -> DType {
    if call.ends.is_some() { call.q.dtype() } else { call.out.dtype() }
}

/// Maximum keys of a sequence on the device.
fn max_keys(call: &Call) -> usize {
    match call.step.table_of(&call.layer) {
        // The bound is the table's number of entries, not the host's lengths: a kernel for short contexts must never
        // run on a longer one.
        Some(_) => RowStrides::of_cache(call).capacity as usize,
        None => call.layer.spec().capacity,
    }
}

/// Maximum keys that a token can see on the device.
fn longest_context(call: &Call) -> usize {
    keys_of_tokens(call, 1)
}

/// Maximum keys that `tokens` successive tokens of a sequence see together.
fn keys_of_tokens(call: &Call, tokens: usize) -> usize {
    let page_tokens = call.layer.page_tokens();
    let of_span = match call.span {
        PageSpan::All | PageSpan::Sealed => usize::MAX,
        PageSpan::First => page_tokens,
        PageSpan::Recent => page_tokens.saturating_mul(2).saturating_add(tokens - 1),
        PageSpan::Exact => page_tokens.saturating_mul(3),
    };
    call.window.saturating_add(tokens - 1).min(max_keys(call)).min(of_span)
}

/// The (token, KV head) pairs of a decode call, or (token, share of a KV head).
fn pairs(call: &Call) -> usize {
    call.tokens * HeadShares::of_decode(call).kv_heads
}

/// Whether the GPU has a cluster of [`MAX_CLUSTER`] blocks for every (token, KV head) pair of a decode call. Blocks of
/// a cluster merge their states through distributed shared memory. A call that requests splits gets splits instead.
fn has_clusters(call: &Call, limits: &Limits) -> bool {
    // Not every multiprocessor belongs to a group of eight that can form a cluster.
    limits.clusters && call.splits == 0 && pairs(call) * MAX_CLUSTER <= limits.busy_groups / 4 * 3
}

/// Clusters for each (token, KV head) pair; 0 if the GPU has too few.
fn clusters_per_pair(call: &Call, limits: &Limits) -> usize {
    if !has_clusters(call, limits) {
        return 0;
    }
    // An empty batch has a plan as well.
    (clusters_at_once(MAX_CLUSTER, limits) / pairs(call).max(1)).max(1)
}

/// Scratch memory for the partial softmax states of work items that several blocks share.
struct PartialStates {
    blocks: usize,
    heads: HeadShares,
    /// Query rows of a work item, and work items of a KV head.
    rows: usize,
    items: usize,
    /// Blocks of a cluster. Each has a share of the cluster's state.
    cluster: usize,
}

impl PartialStates {
    /// Allocates and binds the memory.
    fn bind(self, launch: Launch, call: &Call, b: &Builder) -> Result<Launch> {
        // A part of a work item begins at the first key of a cluster's share, or at the first key of an item and head.
        // Each part has a slot for its state. Each slot, and each item and head, has a counter for every block of a
        // cluster.
        let pairs = self.items * self.heads.kv_heads;
        let slots = self.blocks / self.cluster + pairs;
        // The blocks of a cluster divide the rows among them, or the coordinates of rows.
        let rows = self.rows.next_multiple_of(self.cluster);
        let state = rows * call.head_dim + self.cluster * (2 * self.rows).next_multiple_of(4);
        let partials = b.scratch(slots * state * 4)?;
        let counters = b.counters((slots + pairs) * self.cluster * 4)?;
        Ok(launch.scratch(11, &partials, Use::ReadWrite).scratch(12, &counters, Use::ReadWrite))
    }
}

/// Whether rows can be read 16 bytes at a time.
fn is_aligned(planes: &Planes) -> bool {
    planes.tensors().all(|(_, tensor)| is_aligned16(tensor))
}

fn is_aligned16(tensor: &Tensor) -> bool {
    tensor.byte_offset().is_multiple_of(16)
}
