//! The launch of decode attention over quantised caches: when it is taken, and how it is cut into blocks.

use super::{
    attend::{self, MAX_CLUSTER, MAX_SHARED_ITEMS, MAX_SPLITS, Rows, Shares},
    headers, planes,
};
use crate::{
    Codec, DType, Result,
    gpu::{Builder, Launch, Limits, Params, Scratch, Source, Use},
    ops::attend::{Call, NAME, Plan},
};

static SOURCE: Source = Source {
    name: "attend_quantised.cu",
    text: include_str!("attend_quantised.cu"),
    headers: headers::ATTEND_QUANTISED,
    layouts: &[attend::AttendParams::layout],
};

/// Query heads of a KV head, at most: the columns of a product.
const MAX_GROUP: usize = 8;
/// Keys that are shared out among clusters at a time.
const TILE: usize = 64;
/// To begin and end a piece takes as long as so many of them.
const END_TILES: usize = 10;
/// Contexts that one cluster reads fast enough.
const CLUSTER_TILES: usize = 2048 / TILE + 1;
/// Tables begin here, at the latest; what comes before must fit below, the hardware's own first kilobyte included.
const TABLES_AT: usize = 64 << 10;
const RESERVED_BYTES: usize = 1 << 10;
/// As `attend_plan.h` has it.
const MAX_MERGE: usize = 24;

/// How a kernel uses registers: what was fastest for a head size and a codec.
#[derive(Clone, Copy)]
struct Tuning {
    warps: usize,
    /// Codes of two groups of keys in registers, not of half a group.
    whole_ahead: bool,
    queries_held: bool,
}

impl Tuning {
    fn new(head_dim: usize, k: u32, v: u32) -> Tuning {
        let tuning = |warps, whole_ahead, queries_held| Tuning { warps, whole_ahead, queries_held };
        match (head_dim, if k == v { k } else { 0 }) {
            (256.., 4) => tuning(8, true, true),
            (256, 5) => tuning(8, true, false),
            (256.., _) => tuning(8, false, true),
            (_, 4) => tuning(12, true, true),
            (_, 6) => tuning(12, true, false),
            _ => tuning(16, false, false),
        }
    }
}

/// How a call is cut into blocks.
pub(super) struct Quantised {
    group: usize,
    tuning: Tuning,
    /// Products of all warps that are merged at a time.
    merged: usize,
    shared_bytes: usize,
    /// Blocks of a cluster.
    cluster: usize,
    /// 0: the clusters share all tiles evenly.
    splits: usize,
    blocks: usize,
}

impl Quantised {
    /// None where `attend.cu` is needed: rows of several tokens that may share keys, a dense side, heads of 64, more than 8
    /// heads a group, outputs in f32, or tables that do not fit.
    pub(super) fn new(call: &Call, limits: &Limits) -> Option<Quantised> {
        let spec = call.layer.spec();
        let group = call.heads / spec.kv_heads;
        let (Codec::TurboQuant(k), Codec::TurboQuant(v)) = (spec.k, spec.v) else { return None };
        let fits = matches!(call.head_dim, 128 | 256 | 512)
            && call.out.dtype() != DType::F32
            && call.tokens <= spec.sequences
            && group <= MAX_GROUP
            && [&call.layer.k, &call.layer.v].into_iter().all(attend::is_aligned);
        if !fits {
            return None;
        }
        let tables = table_bytes(k.bits) + if k.bits == v.bits { 0 } else { table_bytes(v.bits) };
        let shared_bytes = TABLES_AT + tables;
        if shared_bytes > limits.threadgroup_bytes {
            return None;
        }
        let tuning = Tuning::new(call.head_dim, k.bits, v.bits);
        let room = TABLES_AT - RESERVED_BYTES;
        let merged = [8, 4, 2].into_iter().find(|&merged| small_bytes(call.head_dim, tuning.warps, merged) <= room)?;

        let pairs = call.tokens * spec.kv_heads;
        // No more parts of an item than are merged.
        let busy = limits.busy_groups.min(MAX_SPLITS);
        // Of the longest context that the device may turn out to hold.
        let tiles = call.window.min(spec.capacity).div_ceil(TILE) + 1;
        // Lookups of 5 bits do not work in clusters.
        let few = tiles <= CLUSTER_TILES && k.bits != 5 && v.bits != 5;
        let cluster = if few && attend::in_clusters(call, limits) { MAX_CLUSTER } else { 1 };
        let workers = (busy / cluster).max(1);
        let splits = match call.splits {
            0 if call.tokens > MAX_SHARED_ITEMS || pairs >= 2 * busy || cluster == MAX_CLUSTER => 1,
            // One token's heads are equally long. No block then has parts of two heads, which costs it more time than a few
            // blocks less.
            0 if call.tokens == 1 && pairs <= workers && workers % pairs <= workers / 8 => workers / pairs,
            splits => splits.min(MAX_SPLITS),
        };
        let workers = if splits == 0 {
            workers.min(pairs.saturating_mul(tiles + END_TILES))
        } else {
            pairs.saturating_mul(splits)
        };
        Some(Quantised { group, tuning, merged, shared_bytes, cluster, splits, blocks: workers * cluster })
    }

    pub(super) fn plan(&self) -> Plan {
        let Quantised { group, tuning: Tuning { warps, .. }, cluster, splits, blocks, .. } = *self;
        let how = if splits == 0 { "share the keys of all tokens evenly" } else { "take one each" };
        let reason = format!(
            "{group} query heads of a token for each KV head; {blocks} blocks of {warps} warps, in clusters of {cluster}, {how}, \
             16 keys a warp at a time"
        );
        Plan { kernel: "attend_quantised", reason: reason.into(), splits }
    }

    /// The launch; where `state` is, it gets the state of the cached keys, and there is no output.
    pub(super) fn launch(&self, call: &Call, b: &Builder, rows: &Rows, state: Option<&Scratch>) -> Result<Launch> {
        let spec = call.layer.spec();
        let Tuning { warps, whole_ahead, queries_held } = self.tuning;
        let params = attend::params(call, rows, self.group, call.tokens, self.splits)?;
        let launch = Launch::new(NAME, &SOURCE, "attend_quantised")
            .constant("HEAD_DIM", call.head_dim as u32)
            .constant("Q_DTYPE", call.q.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("K_CODEC", planes::codec_code(spec.k))
            .constant("V_CODEC", planes::codec_code(spec.v))
            .constant("WARPS", warps as u32)
            .constant("WHOLE_AHEAD", whole_ahead)
            .constant("QUERIES_HELD", queries_held)
            .constant("MERGED", self.merged as u32)
            .constant("TILE", TILE as u32)
            .constant("END_TILES", END_TILES as u32)
            .constant("CLUSTER", self.cluster as u32)
            .constant("RING", spec.ring)
            .constant("FRESH", false)
            .constant("SOFTCAP", call.softcap.is_some())
            .constant("ROTATE_Q", !call.q_rotated)
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .read(0, &call.q)
            .read(8, &call.step.positions)
            .read(9, &call.step.sequence)
            .read(10, call.cached_lens())
            .params(14, &params)
            .grid([self.blocks, 1, 1], [32 * warps, 1, 1])
            .threadgroup_memory(self.shared_bytes)
            // Where tokens stand.
            .reads_ahead(&[8, 9, 10]);
        let launch = planes::bind(planes::bind(launch, 2, &call.layer.k, Use::Read), 5, &call.layer.v, Use::Read);
        let launch = attend::write(launch, call, state);
        if self.splits == 1 {
            return Ok(launch);
        }
        Shares { blocks: self.blocks, rows: self.group, items: call.tokens, cluster: self.cluster }
            .bind(launch, call, b)
    }
}

/// Bytes of a codec's table: `Table` of `attend_codes.h`.
fn table_bytes(bits: u32) -> usize {
    if bits == 5 { 128 << 10 } else { 64 << 10 }
}

/// Bytes of shared memory before the tables: the sum that `attend_quantised.cu` computes.
fn small_bytes(head_dim: usize, warps: usize, merged: usize) -> usize {
    let rows = MAX_GROUP;
    warps * merged * 512
        + rows * head_dim * 6
        + MAX_MERGE * rows * 8
        + warps * rows * 8
        + rows * 20
        + 64
        + (MAX_SHARED_ITEMS + 8) * 4
}
