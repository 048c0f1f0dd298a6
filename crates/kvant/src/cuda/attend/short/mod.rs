//! Decode attention over dense 16-bit caches with short contexts.

use crate::{
    DType, HeadOrder, Result,
    cuda::{
        attend::{
            AttendParams, HeadShares, MAX_CLUSTER,
            decode::{UNIT, bind_dense},
            pairs, params,
        },
        headers,
    },
    gpu::{Launch, Limits, Params, Source},
    ops::attend::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "attend_short.cu",
    text: include_str!("attend_short.cu"),
    headers: headers::ALL,
    layouts: &[AttendParams::layout],
};

/// One warp for each block of a cluster: warp w sends its result to block w.
pub(super) const WARPS: usize = MAX_CLUSTER;
/// Keys of a warp.
pub(super) const WARP_KEYS: usize = UNIT;
/// Maximum keys in the shared memory of a cluster.
pub(super) const MAX_KEYS: usize = MAX_CLUSTER * WARPS * WARP_KEYS;

/// A cluster of blocks for every token and KV head.
pub(super) struct AttendShort {
    dtype: DType,
    heads: HeadShares,
    blocks: usize,
    shared_bytes: usize,
}

impl AttendShort {
    /// `None` if a block has too little shared memory.
    pub(super) fn new(call: &Call, limits: &Limits) -> Option<AttendShort> {
        let heads = HeadShares::of_decode(call);
        let shared_bytes = shared_bytes(call.head_dim, heads.group);
        let blocks = pairs(call) * MAX_CLUSTER;
        let fits = shared_bytes <= limits.threadgroup_bytes;
        fits.then_some(AttendShort { dtype: call.q.dtype(), heads, blocks, shared_bytes })
    }

    pub(super) fn reason(&self) -> String {
        reason(self.heads.group, self.blocks)
    }

    /// The launch.
    pub(super) fn launch(&self, name: &'static str, call: &Call) -> Result<Launch> {
        let spec = call.layer.spec();
        let launch = Launch::new(NAME, &SOURCE, name)
            .constant("WARPS", WARPS as u32)
            .constant("CLUSTER", MAX_CLUSTER as u32)
            .constant("IN_ORDER", spec.order == HeadOrder::HeadMajor || spec.kv_heads == 1)
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .params(14, &params(call, self.heads, self.heads.group, call.tokens, 1)?)
            .grid([self.blocks, 1, 1], [32 * WARPS, 1, 1])
            .threadgroup_memory(self.shared_bytes);
        Ok(bind_dense(launch, call, self.dtype, self.heads))
    }
}

/// The reason of both kernels of short contexts.
pub(super) fn reason(group: usize, blocks: usize) -> String {
    format!(
        "{group} query heads of a token per KV head; {blocks} blocks of {WARPS} warps, a cluster of {MAX_CLUSTER} per token and \
         KV head; {WARP_KEYS} keys a warp"
    )
}

/// Bytes of shared memory: the size of `Shared` in `attend_short.cu`.
fn shared_bytes(head_dim: usize, group: usize) -> usize {
    let rows = 2 * WARPS * (WARP_KEYS * head_dim * 2 + 16);
    let weights = WARPS * 512 + 8 * WARPS * 4;
    let sent = MAX_CLUSTER * group * (head_dim / WARPS + 2) * 4;
    (rows + weights + sent + 4 * 8).next_multiple_of(16)
}
