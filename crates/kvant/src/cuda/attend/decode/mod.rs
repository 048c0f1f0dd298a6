//! Decode attention over dense 16-bit caches.

use crate::{
    DType, HeadOrder, Result,
    cuda::{
        attend::{
            AttendParams, HeadShares, MAX_CLUSTER, MAX_SHARED_ITEMS, MAX_SPLITS, PartialStates, bind_result,
            clusters_per_pair, longest_context, pairs, params, reads_ahead,
        },
        clusters_at_once, headers,
    },
    gpu::{Builder, Launch, Limits, Params, Source},
    ops::attend::{Call, NAME, PageSpan},
};

static SOURCE: Source = Source {
    name: "attend_decode.cu",
    text: include_str!("attend_decode.cu"),
    headers: headers::ALL,
    layouts: &[AttendParams::layout],
};

/// Keys of a unit, which one product takes.
pub(super) const UNIT: usize = 16;
/// Minimum units of a block.
const MIN_UNITS: usize = 4;
/// The cost of beginning and ending a part of a work item, in units.
const END_UNITS: usize = 6;
/// Minimum coordinates of keys for another cluster of [`MAX_CLUSTER`] blocks.
const MIN_IN_CLUSTER: usize = 512 * 512;
/// Maximum keys at which clusters of [`MAX_CLUSTER`] blocks are faster without bulk copies.
const MANY_KEYS: usize = 8192;
/// Maximum buffers per warp; more were never faster.
const MAX_BUFFERS: usize = 6;
/// Maximum bytes in flight by bulk copies; more were not faster.
const MAX_BULK_BYTES: usize = 64 << 10;

/// Division of the work among blocks.
pub(super) struct AttendDecode {
    dtype: DType,
    heads: HeadShares,
    warps: usize,
    buffers: usize,
    /// Whether one copy fetches a whole unit.
    bulk: bool,
    /// Blocks of a cluster, and minimum units for another cluster.
    cluster: usize,
    least: usize,
    shared_bytes: usize,
    /// 0: the blocks share all units evenly.
    splits: usize,
    blocks: usize,
}

impl AttendDecode {
    /// None if a block has too little shared memory.
    pub(super) fn new(call: &Call, limits: &Limits) -> Option<AttendDecode> {
        let spec = call.layer.spec();
        let heads = HeadShares::of_decode(call);
        let group = heads.group;
        // Accumulators and queries of 512 coordinates fill the registers of four warps.
        let max_warps = if call.head_dim == 512 { 4 } else { 8 };
        let pairs = pairs(call);
        let keys = longest_context(call);
        let units = keys.div_ceil(UNIT) + 1;
        let clusters = clusters_per_pair(call, limits);
        let cluster = match call.head_dim {
            _ if keys <= max_keys_in_clusters(call.head_dim, clusters, pairs, limits) => MAX_CLUSTER,
            // States are long: 4 KiB for each query head.
            512 if limits.clusters && call.tokens == 1 => 2,
            _ => 1,
        };
        // On Hopper and later. Bulk copies slow down loads from shared memory, which matters if few multiprocessors
        // work.
        let bulk = limits.clusters
            && (cluster < MAX_CLUSTER || keys > MANY_KEYS)
            && (spec.order == HeadOrder::HeadMajor || spec.kv_heads == 1);
        // Prefer the larger number of warps with at least two buffers each, then the maximum number of buffers.
        let (warps, buffers, shared_bytes) = [max_warps, max_warps / 2].into_iter().find_map(|warps| {
            let most = if bulk { MAX_BULK_BYTES / (warps * UNIT * call.head_dim * 2) } else { MAX_BUFFERS };
            (2..=most.clamp(2, MAX_BUFFERS)).rev().find_map(|buffers| {
                // The size of `Item`; with `Exact` it has a gap.
                let items = MAX_SHARED_ITEMS * if call.span == PageSpan::Exact { 20 } else { 16 };
                let bytes = items + shared_bytes(call.head_dim, group, warps, buffers, bulk);
                (bytes <= limits.threadgroup_bytes).then_some((warps, buffers, bytes))
            })
        })?;
        let workers = (limits.busy_groups / cluster).max(1);
        let splits = match call.splits {
            0 if cluster == MAX_CLUSTER => clusters.min(units * UNIT * call.head_dim / MIN_IN_CLUSTER).max(1),
            0 if call.tokens > MAX_SHARED_ITEMS || pairs >= 4 * limits.busy_groups => 1,
            // The heads of one token have equally many keys. Equal parts avoid blocks with parts of two heads, which
            // would cost more time than a few idle blocks.
            0 if call.tokens == 1 && pairs <= workers && workers % pairs <= workers / 8 => {
                (workers / pairs).min(units.div_ceil(MIN_UNITS * cluster))
            }
            splits => splits.min(MAX_SPLITS),
        };
        // Requested splits have no minimum.
        let least = match cluster {
            _ if call.splits > 0 => 1,
            MAX_CLUSTER => MIN_IN_CLUSTER / UNIT / call.head_dim,
            _ => MIN_UNITS * cluster,
        };
        let workers = if splits == 0 {
            workers.min(pairs.saturating_mul(units + END_UNITS).div_ceil(least))
        } else {
            pairs.saturating_mul(splits)
        };
        Some(AttendDecode {
            dtype: call.q.dtype(),
            heads,
            warps,
            buffers,
            bulk,
            cluster,
            least,
            shared_bytes,
            splits,
            blocks: workers * cluster,
        })
    }

    pub(super) fn reason(&self) -> String {
        let AttendDecode { heads: HeadShares { group, .. }, warps, cluster, splits, blocks, .. } = *self;
        let how = if splits == 0 { "share the keys of all tokens evenly" } else { "take one part each" };
        format!(
            "{group} query heads of a token per KV head; {blocks} blocks of {warps} warps, in clusters of {cluster}, {how}; \
             {UNIT} keys a warp at a time"
        )
    }

    /// The launch.
    pub(super) fn launch(&self, name: &'static str, call: &Call, b: &Builder) -> Result<Launch> {
        let params = params(call, self.heads, self.heads.group, call.tokens, self.splits)?;
        let launch = Launch::new(NAME, &SOURCE, name)
            .constant("WARPS", self.warps as u32)
            .constant("BUFFERS", self.buffers as u32)
            .constant("BULK", self.bulk)
            .constant("MIN_UNITS", self.least as u32)
            .constant("END_UNITS", END_UNITS as u32)
            .constant("CLUSTER", self.cluster as u32)
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .params(14, &params)
            .grid([self.blocks, 1, 1], [32 * self.warps, 1, 1])
            .threadgroup_memory(self.shared_bytes);
        let launch = bind_dense(launch, call, self.dtype, self.heads);
        if self.splits == 1 {
            return Ok(launch);
        }
        let AttendDecode { blocks, heads, cluster, .. } = *self;
        PartialStates { blocks, heads, rows: heads.group, items: call.tokens, cluster }.bind(launch, call, b)
    }
}

/// Maximum keys for which a (token, KV head) pair gets `clusters` clusters of [`MAX_CLUSTER`] blocks.
fn max_keys_in_clusters(head_dim: usize, clusters: usize, pairs: usize, limits: &Limits) -> usize {
    match (head_dim, clusters) {
        (_, 0) => 0,
        // Merging long states in clusters is faster, even if some multiprocessors belong to none.
        (512, _) if clusters * pairs == clusters_at_once(MAX_CLUSTER, limits) => 32768,
        (512, _) => (1024 * clusters).max(2048),
        _ => 4096,
    }
}

/// Binds the constants and buffers that this kernel and `attend_short` share.
pub(super) fn bind_dense(launch: Launch, call: &Call, dtype: DType, heads: HeadShares) -> Launch {
    let launch = launch
        .constant("HEAD_DIM", call.head_dim as u32)
        .constant("DTYPE", dtype)
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("GROUP", heads.group as u32)
        .constant("TILE", UNIT as u32)
        .constant("RING", call.layer.spec().ring)
        .constant("SOFTCAP", call.softcap.is_some())
        .read(0, &call.q)
        .read(2, &call.layer.k.low)
        .read(5, &call.layer.v.low)
        .read(8, &call.step.positions)
        .read(9, &call.step.sequence)
        .read(10, &call.step.lens)
        // Positions, sequences, lengths and page tables.
        .reads_ahead(reads_ahead(call, &[8, 9, 10, 15]))
        .waits_late(call.earlier.is_some());
    bind_result(launch, call, heads)
}

/// Bytes of shared memory without the items; `attend_decode.cu` computes the sum with them.
fn shared_bytes(head_dim: usize, group: usize, warps: usize, buffers: usize, bulk: bool) -> usize {
    let pitch = head_dim * 2 + if bulk { 0 } else { 16 };
    warps * buffers * (UNIT * pitch + 8) + warps * (group * (head_dim + 4) * 4 + 64) + 64 + 16
}
