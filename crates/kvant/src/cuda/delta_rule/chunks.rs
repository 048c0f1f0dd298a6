//! Runs of many tokens in chunks, on GPUs with warpgroup products.

use crate::{
    DType, Result,
    cuda::headers,
    gpu::{
        Builder, Launch, Limits, Source, Use,
        delta_rule::{CHUNK_LAYOUTS, DeltaRuleChunksParams, max_chunks, read_inputs},
    },
    ops::delta_rule::{Call, DeltaRuleShape, NAME},
};

static CHUNKS: Source = source("delta_rule_chunks.cu", include_str!("delta_rule_chunks.cu"));
static WGMMA: Source = source("delta_rule_wgmma.cu", include_str!("delta_rule_wgmma.cu"));

const fn source(name: &'static str, text: &'static str) -> Source {
    Source { name, text, headers: headers::ALL, layouts: CHUNK_LAYOUTS }
}

/// Tokens of a chunk: the kernels' CHUNK.
const CHUNK: usize = 64;
/// Bytes of a matrix of 64 by 64 elements.
const BLOCK: usize = CHUNK * 128;
/// Bytes of a head's data of a chunk: the kernels' CHUNK_HEAD.
const CHUNK_HEAD: usize = 2 * BLOCK + 4 * CHUNK * 4;
/// Chunks of a pass: limits the memory between the kernels.
const MAX_SLOTS: usize = 64;
/// Columns of the state that a block has.
const COLUMNS: usize = 64;
/// Threads of a warpgroup.
const WARPGROUP: usize = 128;
/// Buffers of chunks in shared memory.
const STAGES: usize = 3;

/// How the work is divided.
pub(super) struct Chunks {
    /// The maximum chunks that the rows can have.
    chunks: usize,
    shared_bytes: usize,
}

impl Chunks {
    /// None if the kernels do not take the call.
    pub(super) fn new(call: &Call, limits: &Limits) -> Option<Chunks> {
        let Call { key_dim, value_dim, .. } = *call;
        let takes = limits.warpgroup_products
            && [&call.qkv, &call.out]
                .into_iter()
                .all(|x| is_supported(x.dtype(), key_dim, value_dim) && x.byte_offset().is_multiple_of(16));
        let shared_bytes = STAGES * (stage(key_dim) + 16);
        let chunks = max_chunks(call, CHUNK);
        (takes && shared_bytes <= limits.threadgroup_bytes).then_some(Chunks { chunks, shared_bytes })
    }

    /// Adds the launches. Runs of at most `max_rows` rows are skipped. Returns false if a kernel is unavailable.
    pub(super) fn push(&self, call: &Call, max_rows: u32, b: &mut Builder) -> Result<bool> {
        let slots = self.chunks.min(MAX_SLOTS);
        let [keys, of_heads] = scratch_bytes(slots, [call.key_heads, call.heads], call.key_dim);
        let (keys, of_heads) = (b.scratch(keys)?, b.scratch(of_heads)?);
        for first in (0..self.chunks).step_by(slots.max(1)) {
            let params = DeltaRuleChunksParams::of(call, max_rows, [first, slots])?;
            let chunks = read_inputs(call, Launch::new(NAME, &CHUNKS, "delta_rule_chunks"))?
                .scratch(7, &keys, Use::Write)
                .scratch(8, &of_heads, Use::Write)
                .params(9, &params)
                .threadgroup_memory(keys_bytes(call.key_dim).max(CHUNK_HEAD + CHUNK * (CHUNK + 8) * 4))
                .grid([call.key_heads, slots, 1], [WARPGROUP, 1, 1]);
            let products = Launch::new(NAME, &WGMMA, "delta_rule_wgmma")
                .constant("KEY_DIM", Launch::uint(NAME, "state", call.key_dim)?)
                .constant("STAGES", STAGES as u32)
                .read(0, &call.qkv)
                .read(1, call.runs.starts())
                .read(2, call.runs.slots())
                .read(3, call.runs.past())
                .read(4, call.runs.after())
                .scratch(5, &keys, Use::Read)
                .scratch(6, &of_heads, Use::Read)
                .tensor(7, call.state.memory(), Use::ReadWrite)
                .write(8, &call.out)
                .params(9, &params)
                .threadgroup_memory(self.shared_bytes)
                .grid([call.value_dim / COLUMNS, call.heads, call.runs.count()], [2 * WARPGROUP, 1, 1]);
            if b.refuses(&chunks) || b.refuses(&products) {
                return Ok(false);
            }
            b.push(chunks)?;
            b.push(products)?;
        }
        Ok(true)
    }
}

/// Bytes of the keys and queries, and of the heads' matrices, of a number of chunks.
fn scratch_bytes(slots: usize, [key_heads, heads]: [usize; 2], key_dim: usize) -> [usize; 2] {
    [slots * key_heads * keys_bytes(key_dim), slots * heads * CHUNK_HEAD]
}

/// Maximum scratch memory of calls of up to `rows` rows, on GPUs with warpgroup products.
pub(super) fn max_scratch_bytes(shape: &DeltaRuleShape, rows: usize) -> usize {
    let DeltaRuleShape { key_heads, heads, key_dim, value_dim, dtype } = *shape;
    // Each row may be a run.
    let slots = if is_supported(dtype, key_dim, value_dim) { rows.min(MAX_SLOTS) } else { 0 };
    scratch_bytes(slots, [key_heads, heads], key_dim).iter().sum()
}

fn is_supported(dtype: DType, key_dim: usize, value_dim: usize) -> bool {
    dtype == DType::BF16 && matches!(key_dim, 64 | 128) && value_dim.is_multiple_of(COLUMNS)
}

/// Bytes of the keys and queries of a chunk.
fn keys_bytes(key_dim: usize) -> usize {
    2 * CHUNK * key_dim * 2
}

/// Bytes of a buffer: the kernel's STAGE.
fn stage(key_dim: usize) -> usize {
    let values = CHUNK * (COLUMNS * 2 + 16);
    (keys_bytes(key_dim) + CHUNK_HEAD + values).next_multiple_of(1024)
}
