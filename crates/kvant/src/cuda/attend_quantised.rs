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
/// Keys that a warp works on at a time, and how many lanes share a row of keys, or of values.
const GROUP_KEYS: usize = 16;
pub(super) const K_LANES: usize = 4;
const V_LANES: usize = 8;
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
/// The most parts that blocks wait for.
const MAX_GATHERED: usize = MAX_MERGE * MAX_GROUP;

/// How a kernel uses registers: what was fastest for a head size and a codec.
#[derive(Clone, Copy)]
struct Tuning {
    /// Or fewer, where shared memory has no room for so many.
    warps: usize,
    /// Operands of so many pairs of products stay in registers.
    queries_held: u32,
}

impl Tuning {
    /// `short`: few keys, of which no warp gets many.
    fn new(head_dim: usize, k: u32, v: u32, short: bool) -> Tuning {
        let (warps, queries_held) = match (head_dim, k.max(v)) {
            _ if short => (8, 8),
            // There is room for ten warps, which are slower.
            (512, 5) => (8, 8),
            (256.., 4) => (12, 4),
            _ => (12, 0),
        };
        Tuning { warps, queries_held }
    }
}

/// How a call is cut into blocks.
pub(super) struct Quantised {
    group: usize,
    queries_held: u32,
    room: Room,
    /// All blocks run at once, with a piece each, and wait for each other's.
    gather: bool,
    /// Blocks of a cluster.
    cluster: usize,
    /// 0: the clusters share all tiles evenly.
    splits: usize,
    blocks: usize,
}

impl Quantised {
    /// None where `attend.cu` is needed: heads of 64, or tables that do not fit.
    pub(super) fn new(call: &Call, limits: &Limits) -> Option<Quantised> {
        let spec = call.layer.spec();
        let (k, v, group) = served(call)?;
        if call.head_dim < 128 {
            return None;
        }
        let pairs = call.tokens * spec.kv_heads;
        // No more parts of an item than are merged.
        let busy = limits.busy_groups.min(MAX_SPLITS);
        // Of the longest context that the device may turn out to hold.
        let tiles = call.window.min(spec.capacity).div_ceil(TILE) + 1;
        let short = tiles <= CLUSTER_TILES && attend::in_clusters(call, limits);
        let cluster = if short { MAX_CLUSTER } else { 1 };
        let Tuning { warps, queries_held } = Tuning::new(call.head_dim, k, v, short);
        let most = limits.threadgroup_bytes;
        let room = (1..=warps / 2).rev().find_map(|half| Room::new(call.head_dim, k, v, 2 * half, most))?;
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
        // Worth it where states are long, and blocks that wait for each other fit on the device at once.
        let gather = call.head_dim > 256
            && cluster == 1
            && (2..=MAX_GATHERED).contains(&splits)
            && workers <= limits.busy_groups;
        Some(Quantised { group, queries_held, room, gather, cluster, splits, blocks: workers * cluster })
    }

    pub(super) fn plan(&self) -> Plan {
        let Quantised { group, room: Room { warps, .. }, cluster, splits, blocks, .. } = *self;
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
        let Room { warps, shared_bytes } = self.room;
        let params = attend::params(call, rows, self.group, call.tokens, self.splits)?;
        let launch = Launch::new(NAME, &SOURCE, "attend_quantised")
            .constant("HEAD_DIM", call.head_dim as u32)
            .constant("Q_DTYPE", call.q.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("K_CODEC", planes::codec_code(spec.k))
            .constant("V_CODEC", planes::codec_code(spec.v))
            .constant("WARPS", warps as u32)
            .constant("QUERIES_HELD", self.queries_held)
            .constant("FIVES_IN_PAIRS", true)
            .constant("GATHER", self.gather)
            .constant("TILE", TILE as u32)
            .constant("END_TILES", END_TILES as u32)
            .constant("CLUSTER", self.cluster as u32)
            .constant("RING", spec.ring)
            .constant("FRESH", false)
            .constant("SOFTCAP", call.softcap.is_some())
            .constant("ROTATE_Q", !call.q_rotated)
            .constant("SHARED_BYTES", shared_bytes as u32)
            .read(0, &call.q)
            .read(8, &call.step.positions)
            .read(9, &call.step.sequence)
            .read(10, call.cached_lens())
            .params(14, &params)
            .grid([self.blocks, 1, 1], [32 * warps, 1, 1])
            .threadgroup_memory(shared_bytes)
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

/// The bits of keys and values, and the query heads of a KV head, if this kernel and that of short contexts can do it: not rows of
/// several tokens that may share keys, a dense side, other head sizes, more than 8 heads a group, views that begin at odd addresses,
/// outputs in f32.
pub(super) fn served(call: &Call) -> Option<(u32, u32, usize)> {
    let spec = call.layer.spec();
    let group = call.heads / spec.kv_heads;
    let (Codec::TurboQuant(k), Codec::TurboQuant(v)) = (spec.k, spec.v) else { return None };
    let fits = matches!(call.head_dim, 64 | 128 | 256 | 512)
        && call.out.dtype() != DType::F32
        && call.tokens <= spec.sequences
        && group <= MAX_GROUP
        && [&call.layer.k, &call.layer.v].into_iter().all(attend::is_aligned);
    fits.then_some((k.bits, v.bits, group))
}

/// Shared memory: the sums that `attend_quantised_shared.h` computes.
#[derive(Clone, Copy)]
struct Room {
    warps: usize,
    shared_bytes: usize,
}

impl Room {
    /// All of the `most` bytes that there are: sums are merged together as many as there fit. None where that is too little.
    fn new(head_dim: usize, k: u32, v: u32, warps: usize, most: usize) -> Option<Room> {
        let tables = tables_bytes(k, v, true);
        let before = (TABLES_AT - RESERVED_BYTES).checked_sub(small_bytes(head_dim, warps))?;
        let after = most.checked_sub(TABLES_AT + tables)?;
        // Codes and norms of a group of keys for each warp: before the tables as many as there fit.
        let box_bytes = 2 * GROUP_KEYS * 4 + codes_bytes(head_dim, k, K_LANES) + codes_bytes(head_dim, v, V_LANES);
        let boxes_fit = warps.saturating_sub(before / box_bytes) * box_bytes <= after;
        let for_sums = after.max(before.checked_sub(MAX_GROUP * head_dim * 4)?);
        let sums_fit = warps * (head_dim.min(256) / 16 / 8) * 512 <= for_sums;
        (boxes_fit && sums_fit).then_some(Room { warps, shared_bytes: most })
    }
}

/// Bytes of the codecs' tables, or of their only one: `Table` of `attend_codes.h`.
pub(super) fn tables_bytes(k: u32, v: u32, fives_in_pairs: bool) -> usize {
    let table = |bits| if bits == 5 && fives_in_pairs { 128 << 10 } else { 64 << 10 };
    table(k) + if k == v { 0 } else { table(v) }
}

/// Bytes of the codes of a group of keys, or values, which a warp has, and of what keeps rows apart: `Codes` of
/// `attend_codes.h`.
fn codes_bytes(head_dim: usize, bits: u32, lanes: usize) -> usize {
    let coordinates = head_dim.min(256);
    let low = coordinates * if bits == 8 { 8 } else { 4 } / 8;
    let high = coordinates * if bits == 8 { 0 } else { bits as usize - 4 } / 8;
    let low_gap = if lanes == K_LANES && low == 64 { 0 } else { 16 };
    let high_gap = if lanes == V_LANES && high > 16 { 16 } else { 0 };
    GROUP_KEYS * (low + low_gap + high + high_gap)
}

/// Bytes of shared memory before a piece's output and sums.
fn small_bytes(head_dim: usize, warps: usize) -> usize {
    let rows = MAX_GROUP;
    let small =
        rows * head_dim * 2 + MAX_MERGE * rows * 8 + warps * rows * 8 + rows * 20 + 64 + (MAX_SHARED_ITEMS + 8) * 4;
    small.next_multiple_of(128) + if head_dim > 256 { 2 * warps * 512 } else { 0 }
}
