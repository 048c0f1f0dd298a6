//! Products of many rows with an affine weight, or one of bf16 where x is not, for GPUs whose warpgroups multiply: see
//! `linear_many.cu`.

use super::{THREADS, affine::Parts, headers, linear::LinearParams};
use crate::{
    DType, Result,
    gpu::{Builder, Launch, Limits, Params, Source, Use},
    ops::linear::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "linear_many.cu",
    text: include_str!("linear_many.cu"),
    headers: headers::LINEAR_MANY,
    layouts: &[LinearParams::layout],
};

/// Inputs of a chunk, and outputs of a block.
const BLOCK: usize = 64;
const OUTPUTS: usize = 128;
/// Blocks of inputs, of which there are always whole numbers of so many.
const DEPTH: usize = 4;
/// Two warpgroups that multiply, and one that copies.
const WARPGROUPS: usize = 3;
/// Chunks in shared memory: more are of no use, and the results take as much as fewer would leave.
const STAGES: std::ops::RangeInclusive<usize> = 3..=6;
/// Rows of a chunk, where there are enough of them to keep the device busy, and else.
const ROWS: [usize; 2] = [128, 64];
/// The most rows: those of whole chunks are counted by the grid's second dimension of `arrange`, 32 together.
const MOST_ROWS: usize = 65_535 * 32 / ROWS[0] * ROWS[0];

/// How x is cut into chunks.
struct Chunks {
    rows: usize,
    /// Sums of so many bf16 numbers make x, and biases.
    parts: usize,
    terms: usize,
    stages: usize,
}

impl Chunks {
    fn new(call: &Call, limits: &Limits) -> Option<Chunks> {
        let parts = match call.x.dtype() {
            DType::F32 => 3,
            DType::F16 => 2,
            _ => 1,
        };
        let terms = if call.out.dtype() == DType::F32 { 3 } else { 2 };
        let blocks = |rows: usize| call.rows.div_ceil(rows) * call.dims.outputs.div_ceil(OUTPUTS);
        let rows = if blocks(ROWS[1]) <= limits.busy_groups { ROWS[1] } else { ROWS[0] };
        let chunks = |stages| Chunks { rows, parts, terms, stages };
        STAGES.rev().map(chunks).find(|chunks| chunks.shared_bytes() <= limits.threadgroup_bytes)
    }

    /// Bytes of a chunk.
    fn bytes(&self) -> usize {
        self.parts * self.rows * BLOCK * 2
    }

    /// Bytes of shared memory: chunks, their barriers, and what it takes to begin at a multiple of 1024.
    fn shared_bytes(&self) -> usize {
        self.stages * self.bytes() + 2048
    }
}

/// Whether these kernels take the product: one matrix, of codes whose scales are each for a whole number of blocks of inputs, or of
/// bf16 where a library would want x to be of that type.
pub(super) fn suits(call: &Call, weight: &Parts, limits: &Limits) -> bool {
    let takes = if weight.bits != 0 {
        (weight.group as usize).is_multiple_of(BLOCK)
    } else {
        weight.dtype == DType::BF16 && weight.aligned && call.x.dtype() != DType::BF16
    };
    limits.warpgroup_products
        && takes
        && call.experts.is_none()
        && call.dims.inputs > 0
        && call.dims.inputs.is_multiple_of(BLOCK)
        && call.rows <= MOST_ROWS
        && Chunks::new(call, limits).is_some()
}

/// Launches what arranges x, and the product.
pub(super) fn build(call: &Call, weight: &Parts, params: &LinearParams, b: &mut Builder) -> Result<()> {
    let Call { dims, out, rows, .. } = call;
    let chunks = Chunks::new(call, &b.limits).expect("`suits` has made sure of that");
    let tiles = rows.div_ceil(chunks.rows);
    let blocks = (dims.inputs / BLOCK).next_multiple_of(DEPTH);
    let blocks_of_sums = if weight.bits == 0 { 0 } else { blocks.div_ceil(BLOCK) };
    let of_tile = blocks + blocks_of_sums * chunks.terms;
    let arranged = b.scratch(tiles * of_tile * chunks.bytes())?;
    let common = |launch: Launch| {
        launch
            .constant("X_DTYPE", call.x.dtype())
            .constant("OUT_DTYPE", out.dtype())
            .constant("BITS", weight.bits)
            .constant("ROWS", chunks.rows as u32)
    };
    b.push(
        common(Launch::new(NAME, &SOURCE, "arrange"))
            .read(0, &call.x)
            .scratch(1, &arranged, Use::Write)
            .params(2, params)
            .grid([blocks.max(blocks_of_sums * BLOCK), tiles * chunks.rows / 32, 1], [THREADS, 1, 1]),
    )?;
    let size = out.dtype().size();
    let out_aligned = out.byte_offset().is_multiple_of(4 * size) && dims.outputs.is_multiple_of(4);
    b.push(
        common(Launch::new(NAME, &SOURCE, "linear_many"))
            .constant("W_DTYPE", weight.dtype)
            .constant("GROUP", weight.group)
            .constant("W_ALIGNED", weight.aligned)
            .constant("OUT_ALIGNED", out_aligned)
            .constant("STAGES", chunks.stages as u32)
            .constant("SHARED_BYTES", chunks.shared_bytes() as u32)
            .scratch(0, &arranged, Use::Read)
            .read(1, weight.weight)
            .read_if(2, weight.scales)
            .read_if(3, weight.biases)
            .write(4, out)
            .params(5, params)
            .threadgroup_memory(chunks.shared_bytes())
            .grid([dims.outputs.div_ceil(OUTPUTS), tiles, 1], [128 * WARPGROUPS, 1, 1]),
    )
}
