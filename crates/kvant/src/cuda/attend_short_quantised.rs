//! The launch of decode attention over quantised caches whose contexts are short: when it is taken.

use super::{
    attend::{self, AttendParams, MAX_CLUSTER, Rows},
    attend_quantised::{self, K_LANES},
    attend_short::{self, WARPS},
    headers, planes,
};
use crate::{
    Result, SlotOrder,
    codec::BLOCK,
    gpu::{Launch, Limits, Params, Scratch, Source, Use},
    ops::attend::{Call, NAME, Plan},
};

static SOURCE: Source = Source {
    name: "attend_short_quantised.cu",
    text: include_str!("attend_short_quantised.cu"),
    headers: headers::ATTEND_SHORT_QUANTISED,
    layouts: &[AttendParams::layout],
};

/// Tables begin here: the hardware may have what comes before for itself.
const TABLES_AT: usize = 1 << 10;
/// Coordinates of a warp.
const SLICE: usize = 64;

/// A cluster of blocks for every token and KV head.
pub(super) struct ShortQuantised {
    group: usize,
    blocks: usize,
    /// Faster, and twice as long a table for 5 bits.
    fives_in_pairs: bool,
    shared_bytes: usize,
    /// More, so that no two blocks share a multiprocessor: lookups take all of its shared memory's time.
    asked_bytes: usize,
}

impl ShortQuantised {
    /// None where contexts may be longer, there are no clusters or not enough of them, or memory is short; where rows of a plane
    /// cannot be copied 16 bytes at a time; and where `attend_quantised` would not do it, either, but for heads of 64.
    pub(super) fn new(call: &Call, limits: &Limits) -> Option<ShortQuantised> {
        let (k, v, group) = attend_quantised::served(call)?;
        let fits = |fives_in_pairs: &bool| {
            shared_bytes(call.head_dim, (k, v), *fives_in_pairs, group) <= limits.threadgroup_bytes
        };
        let fives_in_pairs = [true, false].into_iter().find(fits)?;
        let shared_bytes = shared_bytes(call.head_dim, (k, v), fives_in_pairs, group);
        let in_sixteens = |bits: u32| high_bits(bits) == 0 || (call.head_dim * high_bits(bits) / 8).is_multiple_of(16);
        let takes = attend_short::is_short(call, limits)
            && in_sixteens(k)
            && in_sixteens(v)
            && call.q.byte_offset().is_multiple_of(16)
            && call.out.byte_offset().is_multiple_of(8);
        let blocks = call.tokens * call.layer.spec().kv_heads * MAX_CLUSTER;
        let asked_bytes = shared_bytes.max(limits.threadgroup_bytes / 2 + TABLES_AT);
        takes.then_some(ShortQuantised { group, blocks, fives_in_pairs, shared_bytes, asked_bytes })
    }

    pub(super) fn plan(&self) -> Plan {
        attend_short::plan("attend_short_quantised", self.group, self.blocks)
    }

    /// The launch; where `state` is, it gets the state of the cached keys, and there is no output.
    pub(super) fn launch(&self, call: &Call, rows: &Rows, state: Option<&Scratch>) -> Result<Launch> {
        let spec = call.layer.spec();
        let launch = Launch::new(NAME, &SOURCE, "attend")
            .constant("HEAD_DIM", call.head_dim as u32)
            .constant("Q_DTYPE", call.q.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("K_CODEC", planes::codec_code(spec.k))
            .constant("V_CODEC", planes::codec_code(spec.v))
            .constant("FIVES_IN_PAIRS", self.fives_in_pairs)
            .constant("GROUP", self.group as u32)
            .constant("TILE", attend_short::UNIT as u32)
            .constant("WARPS", WARPS as u32)
            .constant("CLUSTER", MAX_CLUSTER as u32)
            .constant("IN_ORDER", spec.order == SlotOrder::HeadMajor || spec.kv_heads == 1)
            .constant("RING", spec.ring)
            .constant("FRESH", false)
            .constant("SOFTCAP", call.softcap.is_some())
            .constant("ROTATE_Q", !call.q_rotated)
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .read(0, &call.q)
            .read(8, &call.step.positions)
            .read(9, &call.step.sequence)
            .read(10, call.cached_lens())
            .params(14, &attend::params(call, rows, self.group, call.tokens, 1)?)
            .grid([self.blocks, 1, 1], [32 * WARPS, 1, 1])
            .threadgroup_memory(self.asked_bytes)
            // Where tokens stand.
            .reads_ahead(&[8, 9, 10]);
        let launch = planes::bind(planes::bind(launch, 2, &call.layer.k, Use::Read), 5, &call.layer.v, Use::Read);
        Ok(attend::write(launch, call, state))
    }
}

/// Bits of a code in the plane `high`.
fn high_bits(bits: u32) -> usize {
    if bits == 8 { 0 } else { bits as usize - 4 }
}

/// Bytes of shared memory: the tables, and what `Shared` of `attend_short_quantised.cu` takes.
fn shared_bytes(head_dim: usize, (k, v): (u32, u32), fives_in_pairs: bool, group: usize) -> usize {
    let tables = attend_quantised::tables_bytes(k, v, fives_in_pairs);
    let low_bits = |bits: u32| if bits == 8 { 8 } else { 4 };
    // A lane's share of a key that it reads at a time.
    let run = (head_dim.min(BLOCK) / K_LANES).min(32 * 8 / low_bits(k));
    let gap = |run: usize| if (5..32).contains(&run) { K_LANES * run } else { 16 };
    let rows = |bits: usize, gap: usize| {
        if bits == 0 { 16 } else { WARPS * (attend_short::UNIT * head_dim * bits / 8 + gap) }
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
