//! Attention of many tokens over dense 16-bit keys, with Hopper's warpgroup products.

use crate::{
    DType, Result,
    cuda::{
        attend::{AttendParams, HeadShares, bind_result, params},
        headers,
    },
    gpu::{Launch, Limits, Params, Source},
    ops::attend::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "attend_prefill.cu",
    text: include_str!("attend_prefill.cu"),
    headers: headers::ALL,
    layouts: &[AttendParams::layout],
};

/// Two warpgroups that compute, and one that copies.
const WARPS: usize = 12;
/// More buffers are of no use.
const MAX_STAGES: usize = 12;
/// 16-bit numbers whose sum is a weight: one would leave 8 bits of it in bf16.
const P_TERMS: u32 = 2;

/// How the work is divided among blocks.
pub(super) struct AttendPrefill {
    dtype: DType,
    /// Query rows of a work item; a block has one item.
    rows: usize,
    items: usize,
    blocks: usize,
    tile: usize,
    stages: usize,
    shared_bytes: usize,
}

/// Query rows of a work item.
fn item_rows(head_dim: usize) -> usize {
    // 64 rows of 512 coordinates fill the registers of both warpgroups.
    if head_dim == 512 { 64 } else { 128 }
}

/// Work items of a KV head.
fn items(call: &Call) -> usize {
    let group = call.heads / call.layer.spec().kv_heads;
    call.tokens.saturating_mul(group).div_ceil(item_rows(call.head_dim))
}

impl AttendPrefill {
    /// Whether the largest number of tokens of a sequence fills at least half a work item, and the work items at least
    /// a tenth of the device.
    pub(super) fn has_enough_rows(call: &Call, limits: &Limits) -> bool {
        let spec = call.layer.spec();
        let rows_of_sequence = call.step.batch().most_new.saturating_mul(call.heads / spec.kv_heads);
        let blocks = items(call).saturating_mul(spec.kv_heads);
        // On an H200, 8 blocks over 4096 keys took a tenth longer than attend_generic, which divides the keys among all
        // blocks; 16 blocks were faster.
        let fills_device = call.splits != 0 || blocks.saturating_mul(10) >= limits.busy_groups;
        call.tokens > 0 && rows_of_sequence >= item_rows(call.head_dim) / 2 && fills_device
    }

    /// None if a block has too little shared memory.
    pub(super) fn new(call: &Call, limits: &Limits) -> Option<AttendPrefill> {
        let (rows, items) = (item_rows(call.head_dim), items(call));
        let blocks = items.saturating_mul(call.layer.spec().kv_heads);
        let tile = if call.head_dim <= 128 { 128 } else { 64 };
        let shared = |stages| shared_bytes(call.head_dim, rows, tile, stages);
        // Rows of 512 coordinates are copied in four chunks, and there must be more buffers than those.
        let least = if call.head_dim < 512 { 4 } else { 5 };
        let stages = (least..=MAX_STAGES).rev().find(|&stages| shared(stages) <= limits.threadgroup_bytes)?;
        let shared_bytes = shared(stages);
        Some(AttendPrefill { dtype: call.q.dtype(), rows, items, blocks, tile, stages, shared_bytes })
    }

    pub(super) fn reason(&self) -> String {
        let AttendPrefill { rows, items, blocks, tile, .. } = *self;
        format!(
            "{items} work items of up to {rows} query rows per KV head; {blocks} blocks take one each; {tile} keys a tile"
        )
    }

    /// The launch.
    pub(super) fn launch(&self, name: &'static str, call: &Call) -> Result<Launch> {
        Launch::uint(NAME, "q", self.items.saturating_mul(self.rows))?;
        let launch = Launch::new(NAME, &SOURCE, name)
            .constant("HEAD_DIM", call.head_dim as u32)
            .constant("DTYPE", self.dtype)
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("WARPS", WARPS as u32)
            .constant("TILE", self.tile as u32)
            .constant("STAGES", self.stages as u32)
            .constant("P_TERMS", P_TERMS)
            .constant("SOFTCAP", call.softcap.is_some())
            .constant("RING", call.layer.spec().ring)
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .read(0, &call.q)
            .read(8, &call.step.positions)
            .read(9, &call.step.sequence)
            .read(10, &call.step.lens)
            .read(2, &call.layer.k.low)
            .read(5, &call.layer.v.low)
            .params(14, &params(call, HeadShares::whole(call), self.rows, self.items, 1)?)
            .grid([self.blocks, 1, 1], [32 * WARPS, 1, 1])
            .threadgroup_memory(self.shared_bytes);
        Ok(bind_result(launch, call, HeadShares::whole(call)))
    }
}

/// Bytes of shared memory: the sum that `layout.h` computes.
fn shared_bytes(head_dim: usize, rows: usize, tile: usize, stages: usize) -> usize {
    let chunk = tile * if head_dim == 512 { 128 } else { head_dim } * 2;
    rows * head_dim * 2 + (stages * (chunk + 16)).next_multiple_of(16) + rows * 20 + 32
}
