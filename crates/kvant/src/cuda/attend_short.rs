//! The launch of decode attention over dense 16-bit caches whose contexts are short: when it is taken.

use super::{
    attend::{self, AttendParams, MAX_CLUSTER, Rows},
    attend_decode, headers,
};
use crate::{
    DType, Result, SlotOrder,
    gpu::{Launch, Limits, Params, Scratch, Source},
    ops::attend::{Call, NAME, Plan},
};

static SOURCE: Source = Source {
    name: "attend_short.cu",
    text: include_str!("attend_short.cu"),
    headers: headers::ATTEND_DECODE,
    layouts: &[AttendParams::layout],
};

pub(super) use attend_decode::UNIT;

/// A warp for each block of a cluster, whose coordinates it has.
pub(super) const WARPS: usize = MAX_CLUSTER;
/// Keys that the blocks of a cluster have room for together: 16 for each warp.
const MAX_KEYS: usize = MAX_CLUSTER * WARPS * UNIT;

/// A cluster of blocks for every token and KV head.
pub(super) struct Short {
    dtype: DType,
    group: usize,
    blocks: usize,
    shared_bytes: usize,
}

impl Short {
    /// None where contexts may be longer, there are no clusters or not enough of them, or memory is short; and where
    /// `attend_decode` would not do it, either.
    pub(super) fn new(call: &Call, limits: &Limits) -> Option<Short> {
        let (dtype, group) = attend_decode::served(call)?;
        let spec = call.layer.spec();
        let shared_bytes = shared_bytes(call.head_dim, group);
        let fits = is_short(call, limits) && shared_bytes <= limits.threadgroup_bytes;
        let blocks = call.tokens * spec.kv_heads * MAX_CLUSTER;
        fits.then_some(Short { dtype, group, blocks, shared_bytes })
    }

    pub(super) fn plan(&self) -> Plan {
        plan("attend_short", self.group, self.blocks)
    }

    /// The launch; where `state` is, it gets the state of the cached keys, and there is no output.
    pub(super) fn launch(&self, call: &Call, rows: &Rows, state: Option<&Scratch>) -> Result<Launch> {
        let spec = call.layer.spec();
        let launch = Launch::new(NAME, &SOURCE, "attend")
            .constant("WARPS", WARPS as u32)
            .constant("CLUSTER", MAX_CLUSTER as u32)
            .constant("IN_ORDER", spec.order == SlotOrder::HeadMajor || spec.kv_heads == 1)
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .params(14, &attend::params(call, rows, self.group, call.tokens, 1)?)
            .grid([self.blocks, 1, 1], [32 * WARPS, 1, 1])
            .threadgroup_memory(self.shared_bytes);
        Ok(attend_decode::bind(launch, call, self.dtype, self.group, state))
    }
}

/// Whether the longest context that the device may turn out to hold fits into a cluster, and every token and KV head gets one.
pub(super) fn is_short(call: &Call, limits: &Limits) -> bool {
    attend::in_clusters(call, limits) && call.window.min(call.layer.spec().capacity) <= MAX_KEYS
}

pub(super) fn plan(kernel: &'static str, group: usize, blocks: usize) -> Plan {
    let reason = format!(
        "{group} query heads of a token for each KV head; {blocks} blocks of {WARPS} warps, in clusters of {MAX_CLUSTER} that \
         take one each, {UNIT} keys a warp"
    );
    Plan { kernel, reason: reason.into(), splits: 1 }
}

/// Bytes of shared memory: what `Shared` of `attend_short.cu` takes.
fn shared_bytes(head_dim: usize, group: usize) -> usize {
    let rows = 2 * WARPS * (UNIT * head_dim * 2 + 16);
    let weights = WARPS * 512 + 8 * WARPS * 4;
    let sent = MAX_CLUSTER * group * (head_dim / WARPS + 2) * 4;
    (rows + weights + sent + 4 * 8).next_multiple_of(16)
}
