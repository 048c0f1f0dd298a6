//! Decode attention over quantised caches.

use crate::{
    Result,
    codec::{BLOCK, plane_bits},
    cuda::{
        attend::{
            AttendParams, HeadShares, MAX_CLUSTER, MAX_GROUP, MAX_SHARED_ITEMS, MAX_SPLITS, PartialStates, bind_result,
            has_clusters, longest_context, pairs, params, reads_ahead,
        },
        headers, planes, shared_bytes_of_each,
    },
    gpu::{Builder, Launch, Limits, Params, Source, Use},
    ops::attend::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "attend_quantised.cu",
    text: include_str!("attend_quantised.cu"),
    headers: headers::ALL,
    layouts: &[AttendParams::layout],
};

/// Keys that a warp processes at a time.
const GROUP_KEYS: usize = 16;
/// Lanes that share a row of keys, and a row of values.
pub(super) const K_LANES: usize = 4;
const V_LANES: usize = 8;
/// Keys of a tile, the unit in which keys are divided among clusters.
const TILE: usize = 64;
/// The cost of beginning and ending a part of a work item, in tiles.
const END_TILES: usize = 10;
/// Maximum tiles of a context for one cluster.
const CLUSTER_TILES: usize = 2048 / TILE + 1;
/// Start address of wide tables. Everything else is stored before them, after the first kilobyte, which the hardware
/// may reserve.
const WIDE_TABLES_AT: usize = 64 << 10;
const RESERVED_BYTES: usize = 1 << 10;
/// Copies of an entry of a compact table.
const COPIES: [usize; 3] = [32, 16, 8];
/// Pages whose means a warp holds at a time.
const LOT: usize = 8;
/// `MAX_MERGE` of `work.h`.
const MAX_MERGE: usize = 24;
/// Maximum parts of a work item with `gather`.
const MAX_GATHERED: usize = MAX_MERGE * MAX_GROUP;

/// Use of registers: the fastest measured values for a head size and a codec.
#[derive(Clone, Copy)]
struct QuantisedTuning {
    /// Maximum warps; less shared memory allows fewer.
    warps: usize,
    /// Pairs of products whose operands stay in registers.
    queries_held: u32,
}

impl QuantisedTuning {
    /// `short`: few keys per warp.
    fn new(head_dim: usize, [k, v]: [u32; 2], short: bool) -> QuantisedTuning {
        let (warps, queries_held) = match (head_dim, k.max(v)) {
            _ if short => (8, 8),
            // Ten warps fit, but are slower.
            (512, 5) => (8, 8),
            (256.., 2..=4) => (12, 4),
            _ => (12, 0),
        };
        QuantisedTuning { warps, queries_held }
    }
}

/// Layout of tables of centroids in shared memory, see `codes.h`.
#[derive(Clone, Copy)]
enum TableLayout {
    /// An address takes one instruction.
    Wide { fives_in_pairs: bool },
    /// Every entry is stored once, with `copies` copies: 2 to 64 KiB a table. An address takes two instructions.
    Compact { copies: usize },
}

impl TableLayout {
    /// Wide layouts, the faster one first.
    const WIDE: [TableLayout; 2] =
        [TableLayout::Wide { fives_in_pairs: true }, TableLayout::Wide { fives_in_pairs: false }];

    /// Bytes of both tables, and their start address, in `shared_bytes` bytes of shared memory.
    fn place(self, bits: [u32; 2], shared_bytes: usize) -> Option<(usize, usize)> {
        match self {
            TableLayout::Wide { fives_in_pairs } => Some((table_bytes(bits, fives_in_pairs), WIDE_TABLES_AT)),
            TableLayout::Compact { copies } => {
                let [k, v] = bits.map(|bits| compact_table_bytes(bits, copies));
                let bytes = if bits[0] == bits[1] { k } else { k + v };
                // A table begins at a multiple of its size, so both end at a multiple of the larger size.
                let larger = k.max(v);
                Some((bytes, (shared_bytes / larger * larger).checked_sub(bytes)?))
            }
        }
    }
}

/// Division of the work among blocks.
pub(super) struct AttendQuantised {
    heads: HeadShares,
    warps: usize,
    blocks_per_multiprocessor: usize,
    queries_held: u32,
    tables: TableLayout,
    tables_at: usize,
    shared_bytes: usize,
    /// All blocks run at once, with one part of a work item each, and wait for the other parts.
    gather: bool,
    /// Blocks of a cluster.
    cluster: usize,
    /// 0: the clusters share all tiles evenly.
    splits: usize,
    blocks: usize,
}

impl AttendQuantised {
    /// The kernel for keys and values of `bits` bits; `None` if shared memory cannot hold the tables.
    pub(super) fn new(call: &Call, bits: [u32; 2], limits: &Limits) -> Option<AttendQuantised> {
        let heads = HeadShares::of_decode(call);
        let pairs = pairs(call);
        // The merge limits the parts of a work item.
        let busy = limits.busy_groups.min(MAX_SPLITS);
        let tiles = longest_context(call).div_ceil(TILE) + 1;
        let short = tiles <= CLUSTER_TILES && has_clusters(call, limits);
        let cluster = if short { MAX_CLUSTER } else { 1 };
        let QuantisedTuning { warps, queries_held } = QuantisedTuning::new(call.head_dim, bits, short);
        let means_bytes = if has_means(call) { LOT * (call.head_dim.min(BLOCK) + 16 + MAX_GROUP * 4) } else { 0 };
        let fits_in = |shared_bytes: usize, tables: TableLayout, warps: usize| {
            fits(call.head_dim, bits, tables, means_bytes, warps, shared_bytes)
        };
        let one_part_each = call.splits == 0 && (call.tokens > MAX_SHARED_ITEMS || pairs >= 2 * busy);
        // Two blocks per multiprocessor: one reads while the other begins or ends an item. Wide tables leave no room
        // for two. Codes other than 4 bits, and page means, get one block: their compact tables are larger, or two
        // blocks were not measured.
        let of_two = || {
            let (shared_bytes, warps) = (shared_bytes_of_each(2, limits), warps / 2);
            let tables = TableLayout::Compact { copies: COPIES[0] };
            let takes = one_part_each && cluster == 1 && call.head_dim <= BLOCK && bits == [4, 4] && means_bytes == 0;
            (takes && fits_in(shared_bytes, tables, warps)).then_some((2, shared_bytes, tables, warps))
        };
        // One block gets all shared memory: more memory merges more sums at a time.
        let shared_bytes = limits.threadgroup_bytes;
        let fits = |&(tables, warps): &(TableLayout, usize)| fits_in(shared_bytes, tables, warps);
        let at_least = |least: usize| (least / 2..=warps / 2).rev().map(|half| 2 * half);
        let wide = TableLayout::WIDE.into_iter().flat_map(|tables| at_least(2).map(move |warps| (tables, warps)));
        // Prefer fewer copies to few warps.
        let compact = [8, 4, 2].into_iter().flat_map(|least| {
            let all = COPIES.map(|copies| TableLayout::Compact { copies });
            all.into_iter().flat_map(move |tables| at_least(least).map(move |warps| (tables, warps)))
        });
        let of_one = wide.chain(compact).find(fits).map(|(tables, warps)| (1, shared_bytes, tables, warps));
        let (blocks_per_multiprocessor, shared_bytes, tables, warps) = of_two().or(of_one)?;
        let (_, tables_at) = tables.place(bits, shared_bytes)?;
        let workers = (busy / cluster).max(1);
        let splits = match call.splits {
            0 if one_part_each || cluster == MAX_CLUSTER => 1,
            // The heads of one token have equally many keys. Equal parts avoid blocks with parts of two heads, which
            // would cost more time than a few idle blocks.
            0 if call.tokens == 1 && pairs <= workers && workers % pairs <= workers / 8 => workers / pairs,
            splits => splits.min(MAX_SPLITS),
        };
        let workers = if splits == 0 {
            workers.min(pairs.saturating_mul(tiles + END_TILES))
        } else {
            pairs.saturating_mul(splits)
        };
        // Faster for long states. All blocks must fit on the device at once, because they wait for each other. A thread
        // has four coordinates of a row.
        let gather = call.head_dim > 256
            && cluster == 1
            && (2..=MAX_GATHERED).contains(&splits)
            && 32 * warps >= call.head_dim / 4
            && workers <= limits.busy_groups;
        let blocks = workers * cluster;
        Some(AttendQuantised {
            heads,
            warps,
            blocks_per_multiprocessor,
            queries_held,
            tables,
            tables_at,
            shared_bytes,
            gather,
            cluster,
            splits,
            blocks,
        })
    }

    pub(super) fn reason(&self) -> String {
        let AttendQuantised { heads: HeadShares { group, .. }, warps, cluster, splits, blocks, .. } = *self;
        let how = if splits == 0 { "share the keys of all tokens evenly" } else { "take one part each" };
        format!(
            "{group} query heads of a token per KV head; {blocks} blocks of {warps} warps, {} a multiprocessor, in \
             clusters of {cluster}, {how}; {GROUP_KEYS} keys a warp at a time",
            self.blocks_per_multiprocessor
        )
    }

    /// The launch.
    pub(super) fn launch(&self, name: &'static str, call: &Call, b: &Builder) -> Result<Launch> {
        let spec = call.layer.spec();
        let params = params(call, self.heads, self.heads.group, call.tokens, self.splits)?;
        let (fives_in_pairs, copies) = match self.tables {
            TableLayout::Wide { fives_in_pairs } => (fives_in_pairs, 0),
            TableLayout::Compact { copies } => (false, copies),
        };
        let launch = Launch::new(NAME, &SOURCE, name)
            .constant("HEAD_DIM", call.head_dim as u32)
            .constant("Q_DTYPE", call.q.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("K_CODEC", planes::plain_code(spec.k))
            .constant("V_CODEC", planes::plain_code(spec.v))
            .constant("K_CENTRED", spec.k.is_centred())
            .constant("V_CENTRED", spec.v.is_centred())
            .constant("WARPS", self.warps as u32)
            .constant("BLOCKS_PER_MULTIPROCESSOR", self.blocks_per_multiprocessor as u32)
            .constant("QUERIES_HELD", self.queries_held)
            .constant("FIVES_IN_PAIRS", fives_in_pairs)
            .constant("COMPACT_COPIES", copies as u32)
            .constant("TABLES_AT", self.tables_at as u32)
            .constant("GATHER", self.gather)
            .constant("TILE", TILE as u32)
            .constant("END_TILES", END_TILES as u32)
            .constant("CLUSTER", self.cluster as u32)
            .constant("RING", spec.ring)
            .constant("SOFTCAP", call.softcap.is_some())
            .constant("ROTATE_Q", !call.q_rotated)
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .read(0, &call.q)
            .read(8, &call.step.positions)
            .read(9, &call.step.sequence)
            .read(10, &call.step.lens)
            .params(14, &params)
            .grid([self.blocks, 1, 1], [32 * self.warps, 1, 1])
            .threadgroup_memory(self.shared_bytes)
            // Positions, sequences and lengths.
            .reads_ahead(reads_ahead(call, &[8, 9, 10]))
            .waits_late(call.earlier.is_some());
        let launch = planes::bind(planes::bind(launch, 2, &call.layer.k, Use::Read), 5, &call.layer.v, Use::Read);
        let launch = planes::bind_means(launch, [16, 17], &call.layer, Use::Read);
        let launch = bind_result(launch, call, self.heads);
        if self.splits == 1 {
            return Ok(launch);
        }
        let AttendQuantised { blocks, heads, cluster, .. } = *self;
        PartialStates { blocks, heads, rows: heads.group, items: call.tokens, cluster }.bind(launch, call, b)
    }
}

/// Whether keys or values are stored around the means of their pages.
fn has_means(call: &Call) -> bool {
    let spec = call.layer.spec();
    spec.k.is_centred() || spec.v.is_centred()
}

/// Whether shared memory holds everything, with tables in this layout and `means_bytes` for each warp; computed as in
/// `layout.h`.
fn fits(
    head_dim: usize,
    bits: [u32; 2],
    tables: TableLayout,
    means_bytes: usize,
    warps: usize,
    shared_bytes: usize,
) -> bool {
    let Some((table_bytes, tables_at)) = tables.place(bits, shared_bytes) else { return false };
    let before = tables_at.checked_sub(RESERVED_BYTES + small_bytes(head_dim, warps));
    let after = shared_bytes.checked_sub(tables_at + table_bytes);
    let (Some(before), Some(after)) = (before, after) else { return false };
    let Some(sums_before) = before.checked_sub(MAX_GROUP * head_dim * 4) else { return false };
    // Each warp has a box with the codes and norms of a group of keys, and means. Boxes are stored before the tables,
    // and after them if that space is full.
    let [k, v] = bits;
    let codes = codes_bytes(head_dim, k, K_LANES) + codes_bytes(head_dim, v, V_LANES);
    let box_bytes = 2 * GROUP_KEYS * 4 + codes + means_bytes;
    let boxes_fit = warps.saturating_sub(before / box_bytes) * box_bytes <= after;
    let sums_fit = warps * (head_dim.min(256) / 16 / 8) * 512 <= after.max(sums_before);
    boxes_fit && sums_fit
}

/// Bytes of the tables of both codecs (`Table` of `codes.h`). Equal codecs share a table.
pub(super) fn table_bytes([k, v]: [u32; 2], fives_in_pairs: bool) -> usize {
    let table = |bits| if bits == 5 && fives_in_pairs { 128 << 10 } else { 64 << 10 };
    table(k) + if k == v { 0 } else { table(v) }
}

/// Bytes of a compact table: `Table` of `codes.h`.
fn compact_table_bytes(bits: u32, copies: usize) -> usize {
    let words = if bits == 4 { 1 } else { 2 };
    let entries = if matches!(bits, 5 | 6) { 1 << bits } else { 256 };
    entries * words * copies * 4
}

/// Bits of a code in the plane `low`.
pub(super) fn low_bits(bits: u32) -> usize {
    plane_bits(bits).map_or(8, |(low, _)| low as usize)
}

/// Bits of a code in the plane `high`.
pub(super) fn high_bits(bits: u32) -> usize {
    bits as usize - low_bits(bits)
}

/// Bytes of the codes of a group of keys or values, with the padding between rows: `Codes` of `codes.h`.
fn codes_bytes(head_dim: usize, bits: u32, lanes: usize) -> usize {
    let coordinates = head_dim.min(256);
    let (low, high) = (coordinates * low_bits(bits) / 8, coordinates * high_bits(bits) / 8);
    let low_gap = if lanes == K_LANES && low <= 64 { 0 } else { 16 };
    let high_gap = if lanes == V_LANES && high > 16 { 16 } else { 0 };
    GROUP_KEYS * (low + low_gap + high + high_gap)
}

/// Bytes of shared memory before the output and the sums of a part.
fn small_bytes(head_dim: usize, warps: usize) -> usize {
    let rows = MAX_GROUP;
    let small =
        rows * head_dim * 2 + MAX_MERGE * rows * 8 + warps * rows * 8 + rows * 20 + 64 + (MAX_SHARED_ITEMS + 8) * 4;
    small.next_multiple_of(128) + if head_dim > 256 { 2 * warps * 512 } else { 0 }
}
