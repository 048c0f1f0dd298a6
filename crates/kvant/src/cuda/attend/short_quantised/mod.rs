//! Decode attention over quantised caches with short contexts.

use crate::{
    HeadOrder, Result,
    codec::BLOCK,
    cuda::{
        attend::{
            AttendParams, HeadShares, MAX_CLUSTER, bind_result, pairs, params,
            quantised::{K_LANES, high_bits, low_bits, table_bytes},
            reads_ahead,
            short::{self, WARP_KEYS, WARPS},
        },
        headers, planes,
    },
    gpu::{Launch, Limits, Params, Source, Use},
    ops::attend::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "attend_short_quantised.cu",
    text: include_str!("attend_short_quantised.cu"),
    headers: headers::ALL,
    layouts: &[AttendParams::layout],
};

/// Start address of the tables: the hardware may reserve the memory before it.
const TABLES_AT: usize = 1 << 10;
/// Coordinates of a warp.
const SLICE: usize = 64;
/// Minimum positions of a page with means, and maximum pages of a block's keys.
const MIN_PAGE: usize = 32;
const MAX_PAGES: usize = 8;

/// A cluster of blocks for every token and KV head.
pub(super) struct AttendShortQuantised {
    heads: HeadShares,
    blocks: usize,
    /// Codes of 5 bits have a table of twice the length, which is faster.
    fives_in_pairs: bool,
    shared_bytes: usize,
    /// Shared memory of a block: at least half of a multiprocessor's, so that no two blocks share a multiprocessor. The
    /// lookups of one block take the whole bandwidth of its shared memory.
    requested_bytes: usize,
}

impl AttendShortQuantised {
    /// The kernel for keys and values of `bits` bits. `None` if a block has too little shared memory, if rows of a
    /// plane cannot be copied 16 bytes at a time, or if pages with means are too small.
    pub(super) fn new(call: &Call, bits: [u32; 2], limits: &Limits) -> Option<AttendShortQuantised> {
        let heads = HeadShares::of_decode(call);
        if !bits.into_iter().all(|bits| (call.head_dim * high_bits(bits) / 8).is_multiple_of(16)) {
            return None;
        }
        let means = [&call.layer.k, &call.layer.v].map(|planes| planes.means.is_some());
        let small_pages = call.layer.pages().is_none_or(|pages| pages.page_tokens < MIN_PAGE);
        if means != [false; 2] && small_pages {
            return None;
        }
        let size =
            |in_pairs| shared_bytes(call.head_dim, bits, in_pairs, heads.group) + means_bytes(call.head_dim, means);
        let sizes = [true, false].map(|in_pairs| (in_pairs, size(in_pairs)));
        let (fives_in_pairs, shared_bytes) = sizes.into_iter().find(|&(_, bytes)| bytes <= limits.threadgroup_bytes)?;
        let requested_bytes = shared_bytes.max(limits.threadgroup_bytes / 2 + TABLES_AT);
        let blocks = pairs(call) * MAX_CLUSTER;
        Some(AttendShortQuantised { heads, blocks, fives_in_pairs, shared_bytes, requested_bytes })
    }

    pub(super) fn reason(&self) -> String {
        short::reason(self.heads.group, self.blocks)
    }

    /// The launch.
    pub(super) fn launch(&self, name: &'static str, call: &Call) -> Result<Launch> {
        let spec = call.layer.spec();
        let launch = Launch::new(NAME, &SOURCE, name)
            .constant("HEAD_DIM", call.head_dim as u32)
            .constant("Q_DTYPE", call.q.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("K_CODEC", planes::plain_code(spec.k))
            .constant("V_CODEC", planes::plain_code(spec.v))
            .constant("K_CENTRED", spec.k.is_centred())
            .constant("V_CENTRED", spec.v.is_centred())
            .constant("FIVES_IN_PAIRS", self.fives_in_pairs)
            .constant("COMPACT_COPIES", 0)
            .constant("GROUP", self.heads.group as u32)
            .constant("TILE", WARP_KEYS as u32)
            .constant("WARPS", WARPS as u32)
            .constant("CLUSTER", MAX_CLUSTER as u32)
            .constant("IN_ORDER", spec.order == HeadOrder::HeadMajor || spec.kv_heads == 1)
            .constant("RING", spec.ring)
            .constant("SOFTCAP", call.softcap.is_some())
            .constant("ROTATE_Q", !call.q_rotated)
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .read(0, &call.q)
            .read(8, &call.step.positions)
            .read(9, &call.step.sequence)
            .read(10, &call.step.lens)
            .params(14, &params(call, self.heads, self.heads.group, call.tokens, 1)?)
            .grid([self.blocks, 1, 1], [32 * WARPS, 1, 1])
            .threadgroup_memory(self.requested_bytes)
            // Positions, sequences, lengths and page tables.
            .reads_ahead(reads_ahead(call, &[8, 9, 10, 15]))
            .waits_late(call.earlier.is_some());
        let launch = planes::bind(planes::bind(launch, 2, &call.layer.k, Use::Read), 5, &call.layer.v, Use::Read);
        let launch = planes::bind_means(launch, [16, 17], &call.layer, Use::Read);
        Ok(bind_result(launch, call, self.heads))
    }
}

/// Bytes of `Shared` for the means of keys and values, and for the sums of the weights of each page. A multiple of 16.
fn means_bytes(head_dim: usize, [of_keys, of_values]: [bool; 2]) -> usize {
    let side = |means| if means { MAX_PAGES * (head_dim + 16) } else { 16 };
    side(of_keys) + side(of_values) + if of_values { WARPS } else { 1 } * MAX_PAGES * 8 * 4
}

/// Bytes of shared memory without means: the tables, and `Shared` in `attend_short_quantised.cu`.
fn shared_bytes(head_dim: usize, [k, v]: [u32; 2], fives_in_pairs: bool, group: usize) -> usize {
    let tables = table_bytes([k, v], fives_in_pairs);
    // Coordinates of a key that a lane reads at a time.
    let run = (head_dim.min(BLOCK) / K_LANES).min(32 * 8 / low_bits(k));
    let gap = |run: usize| if (5..32).contains(&run) { K_LANES * run } else { 16 };
    let rows = |bits: usize, gap: usize| {
        if bits == 0 { 16 } else { WARPS * (WARP_KEYS * head_dim * bits / 8 + gap) }
    };
    let parts = if head_dim < WARPS * SLICE { group * (WARPS * SLICE * 4 + 32) } else { 0 };
    let keys =
        rows(low_bits(k), gap(run * low_bits(k) / 8)).max(parts) + rows(high_bits(k), gap(run * high_bits(k) / 8));
    let values = rows(low_bits(v), 16) + rows(high_bits(v), 16);
    let blocks = head_dim.div_ceil(BLOCK);
    let operands = 8 * head_dim * 2 + blocks * WARPS * 32 * 8;
    let sent = MAX_CLUSTER * (head_dim * 4 + WARPS * 8);
    let of_warps = (8 + blocks) * WARPS * 4 + 8 * 4;
    TABLES_AT + tables + (keys + values + operands + sent + of_warps + 4 * 8).next_multiple_of(16)
}
