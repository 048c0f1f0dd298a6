//! The launch of attention for many tokens over dense 16-bit caches: when it is taken, and how it is cut into blocks.

use super::{
    attend::{self, Rows},
    headers,
};
use crate::{
    Codec, DType, Result,
    gpu::{Launch, Limits, Params, Scratch, Source, Use},
    ops::attend::{Call, FreshCall, NAME, Plan},
};

static SOURCE: Source = Source {
    name: "attend_prefill.cu",
    text: include_str!("attend_prefill.cu"),
    headers: headers::ATTEND_PREFILL,
    layouts: &[attend::AttendParams::layout],
};

/// Two warpgroups that compute, and one that copies.
const WARPS: usize = 12;
/// Buffers: as many as there is memory for, but no more than are of use.
const MAX_STAGES: usize = 12;
/// 16-bit numbers that make a weight: one would leave 8 bits of it in bf16.
const P_TERMS: u32 = 2;

/// How a call is cut into blocks.
pub(super) struct Prefill {
    dtype: DType,
    /// Query rows of an item; a block has one.
    rows: usize,
    items: usize,
    blocks: usize,
    tile: usize,
    stages: usize,
    shared_bytes: usize,
}

impl Prefill {
    /// None where another kernel is needed or better: without a GPU that multiplies with whole warpgroups, for other dtypes,
    /// outputs in f32, views that begin at odd addresses, scales that turn the order of scores around, contexts that are to be
    /// split, sequences of fewer rows than half an item, or items for less than a tenth of the device.
    ///
    /// For the cached keys, or those of the step itself, which are `fresh`.
    pub(super) fn new(call: &Call, fresh: Option<&FreshCall>, limits: &Limits) -> Option<Prefill> {
        let spec = call.layer.spec();
        let dtype = call.q.dtype();
        let fits = limits.warpgroup_products
            && dtype != DType::F32
            && call.out.dtype() != DType::F32
            && call.scale > 0.0
            && call.splits <= 1
            && [&call.q, &call.out].into_iter().all(|tensor| tensor.byte_offset().is_multiple_of(16))
            && match fresh {
                Some(FreshCall { k, v, .. }) => {
                    [k, v].into_iter().all(|side| side.dtype() == dtype && side.byte_offset().is_multiple_of(16))
                }
                None => {
                    [spec.k, spec.v] == [Codec::Dense(dtype); 2]
                        && [&call.layer.k, &call.layer.v].into_iter().all(attend::is_aligned)
                }
            };
        if !fits {
            return None;
        }
        let group = call.heads / spec.kv_heads;
        // 64 rows of 512 coordinates fill the registers of both warpgroups.
        let rows = if call.head_dim == 512 { 64 } else { 128 };
        let items = call.tokens.saturating_mul(group).div_ceil(rows);
        let blocks = items.saturating_mul(spec.kv_heads);
        let of_sequence = call.tokens.div_ceil(spec.sequences).saturating_mul(group);
        // On an H200, 8 blocks over 4096 keys took a tenth longer than attend.cu, which shares the keys among all; 16 were faster.
        let is_few = call.splits == 0 && blocks.saturating_mul(10) < limits.busy_groups;
        if call.tokens == 0 || of_sequence < rows / 2 || is_few {
            return None;
        }
        let tile = if call.head_dim <= 128 { 128 } else { 64 };
        let shared = |stages| shared_bytes(call.head_dim, rows, tile, stages);
        // Rows of 512 coordinates come in four parts, and there must be more buffers than those.
        let least = if call.head_dim < 512 { 4 } else { 5 };
        let stages = (least..=MAX_STAGES).rev().find(|&stages| shared(stages) <= limits.threadgroup_bytes)?;
        Some(Prefill { dtype, rows, items, blocks, tile, stages, shared_bytes: shared(stages) })
    }

    pub(super) fn plan(&self) -> Plan {
        let Prefill { rows, items, blocks, tile, .. } = *self;
        let reason = format!(
            "{items} items of up to {rows} query rows for each KV head; {blocks} blocks take one each, {tile} keys at a time"
        );
        Plan { kernel: "attend_prefill", reason: reason.into(), splits: 1 }
    }

    /// The launch over cached keys; where `state` is, it gets the state of them, and there is no output.
    pub(super) fn launch(&self, call: &Call, rows: &Rows, state: Option<&Scratch>) -> Result<Launch> {
        let launch = self
            .over(call, rows)?
            .constant("RING", call.layer.spec().ring)
            .constant("FRESH", false)
            .read(2, &call.layer.k.low)
            .read(5, &call.layer.v.low);
        Ok(attend::write(launch, call, state))
    }

    /// The launch over the step's own keys, which adds them to the state of the cached ones.
    pub(super) fn launch_own(&self, call: &Call, rows: &Rows, fresh: &FreshCall, state: &Scratch) -> Result<Launch> {
        Ok(self
            .over(call, rows)?
            .constant("RING", false)
            .constant("FRESH", true)
            .write(1, &call.out)
            .read(2, &fresh.k)
            .read(5, &fresh.v)
            .scratch(13, state, Use::Read))
    }

    /// What both have in common.
    fn over(&self, call: &Call, rows: &Rows) -> Result<Launch> {
        Launch::uint(NAME, "q", self.items.saturating_mul(self.rows))?;
        Ok(Launch::new(NAME, &SOURCE, "attend")
            .constant("HEAD_DIM", call.head_dim as u32)
            .constant("DTYPE", self.dtype)
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("WARPS", WARPS as u32)
            .constant("TILE", self.tile as u32)
            .constant("STAGES", self.stages as u32)
            .constant("P_TERMS", P_TERMS)
            .constant("SOFTCAP", call.softcap.is_some())
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .read(0, &call.q)
            .read(8, &call.step.positions)
            .read(9, &call.step.sequence)
            .read(10, call.cached_lens())
            .params(14, &attend::params(call, rows, self.rows, self.items, 1)?)
            .grid([self.blocks, 1, 1], [32 * WARPS, 1, 1])
            .threadgroup_memory(self.shared_bytes))
    }
}

/// Bytes of shared memory: the sum that `attend_prefill.cu` computes.
fn shared_bytes(head_dim: usize, rows: usize, tile: usize, stages: usize) -> usize {
    let chunk = tile * if head_dim == 512 { 128 } else { head_dim } * 2;
    rows * head_dim * 2 + (stages * (chunk + 16)).next_multiple_of(16) + rows * 20 + 32
}
