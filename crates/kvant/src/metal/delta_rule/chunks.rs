//! Runs of many tokens in chunks.

use super::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, LANES, Launch, Source, Use,
        delta_rule::{CHUNK_LAYOUTS, DeltaRuleChunksParams, max_chunks, read_inputs},
    },
    ops::delta_rule::{Call, DeltaRuleShape, NAME},
};

static SOURCE: Source = Source {
    name: "delta_rule/chunks.metal",
    text: include_str!("chunks.metal"),
    headers: HEADERS,
    layouts: CHUNK_LAYOUTS,
};

/// Tokens of a chunk: the kernels' CHUNK.
const CHUNK: usize = 32;
/// Bytes of the matrices and vectors of a head and chunk: the kernels' CHUNK_HEAD.
const CHUNK_HEAD: usize = (2 * CHUNK * CHUNK + 2 * CHUNK) * 4;
/// Chunks of a pass: limits the memory between the kernels.
const MAX_SLOTS: usize = 64;
/// Columns of the state that a threadgroup has.
const COLUMNS: usize = 64;
const THREADS: usize = 4 * LANES;

/// Maximum head dimension of keys: a state stays in registers.
const MAX_KEY_DIM: usize = 128;

/// Bytes of the keys and queries, and of the heads' matrices, of a number of chunks.
fn scratch_bytes(slots: usize, [key_heads, heads]: [usize; 2], key_dim: usize) -> [usize; 2] {
    [slots * key_heads * 2 * CHUNK * key_dim * 4, slots * heads * CHUNK_HEAD]
}

/// Maximum scratch memory of calls of up to `rows` rows.
pub(super) fn max_scratch_bytes(shape: &DeltaRuleShape, rows: usize) -> usize {
    let is_supported = shape.key_dim <= MAX_KEY_DIM;
    // Each row may be a run.
    let slots = if is_supported { rows.min(MAX_SLOTS) } else { 0 };
    scratch_bytes(slots, [shape.key_heads, shape.heads], shape.key_dim).iter().sum()
}

/// Adds the launches. Runs of at most `max_rows` rows are skipped. Returns false if the kernels do not support the
/// call.
pub(super) fn push(call: &Call, max_rows: u32, b: &mut Builder) -> Result<bool> {
    if call.key_dim > MAX_KEY_DIM {
        return Ok(false);
    }
    let chunks = max_chunks(call, CHUNK);
    let slots = chunks.min(MAX_SLOTS);
    let [keys, of_heads] = scratch_bytes(slots, [call.key_heads, call.heads], call.key_dim);
    let (keys, of_heads) = (b.scratch(keys)?, b.scratch(of_heads)?);
    for first in (0..chunks).step_by(slots.max(1)) {
        let params = DeltaRuleChunksParams::of(call, max_rows, [first, slots])?;
        let chunks = read_inputs(call, Launch::new(NAME, &SOURCE, "delta_rule_chunks"))?
            .constant("QKV_DTYPE", call.qkv.dtype())
            .scratch(7, &keys, Use::Write)
            .scratch(8, &of_heads, Use::Write)
            .params(9, &params)
            .grid([call.key_heads, slots, 1], [THREADS, 1, 1]);
        let products = Launch::new(NAME, &SOURCE, "delta_rule_products")
            .constant("KEY_DIM", Launch::uint(NAME, "state", call.key_dim)?)
            .constant("QKV_DTYPE", call.qkv.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
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
            .grid([call.value_dim.div_ceil(COLUMNS), call.heads, call.runs.count()], [THREADS, 1, 1]);
        if b.refuses(&chunks) || b.refuses(&products) {
            return Ok(false);
        }
        b.push(chunks)?;
        b.push(products)?;
    }
    Ok(true)
}
