//! Products of many rows with an affine weight, or with one of bf16 where x is not bf16, on GPUs with warpgroup
//! products.

use super::LinearParams;
use crate::cuda::{THREADS, affine::Parts, headers};
use crate::{
    DType, Result,
    gpu::{Builder, Launch, Limits, Params, Source, Use},
    ops::linear::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "linear_many.cu",
    text: include_str!("linear_many.cu"),
    headers: headers::ALL,
    layouts: &[LinearParams::layout],
};

/// Inputs of a chunk, and outputs of a block.
const BLOCK: usize = 64;
const OUTPUTS: usize = 128;
/// The number of blocks of inputs is padded to a multiple of this.
const DEPTH: usize = 4;
/// Two warpgroups that multiply, and one that copies.
const WARPGROUPS: usize = 3;
/// Chunks in shared memory. More are of no use; the results need the room of the fewest.
const STAGES: std::ops::RangeInclusive<usize> = 3..=6;
/// Rows of a chunk: where there are enough of them to keep the device busy, and otherwise.
const ROWS: [usize; 2] = [128, 64];
/// The most rows: the second dimension of the grid of `linear_many_arrange` counts rows of whole chunks, 32 at a time.
const MOST_ROWS: usize = 65_535 * 32 / ROWS[0] * ROWS[0];

/// How x is divided into chunks.
pub(super) struct ManyChunks {
    rows: usize,
    /// bf16 numbers whose sum is an element of x, and a bias.
    parts: usize,
    terms: usize,
    stages: usize,
}

impl ManyChunks {
    /// None if the kernels do not take the product: they take one matrix, of codes whose scales are each for whole
    /// blocks of inputs, or of bf16 where a library would require x to be of that dtype.
    pub(super) fn new(call: &Call, weight: &Parts, limits: &Limits) -> Option<ManyChunks> {
        let takes = if weight.bits != 0 {
            (weight.group as usize).is_multiple_of(BLOCK)
        } else {
            weight.dtype == DType::BF16 && weight.aligned && call.x.dtype() != DType::BF16
        };
        let suits = limits.warpgroup_products
            && takes
            && call.experts.is_none()
            && call.dims.inputs > 0
            && call.dims.inputs.is_multiple_of(BLOCK)
            && call.rows <= MOST_ROWS;
        if !suits {
            return None;
        }
        let parts = match call.x.dtype() {
            DType::F32 => 3,
            DType::F16 => 2,
            _ => 1,
        };
        let terms = if call.out.dtype() == DType::F32 { 3 } else { 2 };
        let blocks = |rows: usize| call.rows.div_ceil(rows) * call.dims.outputs.div_ceil(OUTPUTS);
        let rows = if blocks(ROWS[1]) <= limits.busy_groups { ROWS[1] } else { ROWS[0] };
        let chunks = |stages| ManyChunks { rows, parts, terms, stages };
        STAGES.rev().map(chunks).find(|chunks| chunks.shared_bytes() <= limits.threadgroup_bytes)
    }

    /// Bytes of a chunk.
    fn bytes(&self) -> usize {
        self.parts * self.rows * BLOCK * 2
    }

    /// Bytes of shared memory: chunks, their barriers, and the padding to a multiple of 1024.
    fn shared_bytes(&self) -> usize {
        self.stages * self.bytes() + 2048
    }

    /// Adds the launches of the kernel that arranges x, and of the product.
    pub(super) fn build(
        &self,
        name: &'static str,
        call: &Call,
        weight: &Parts,
        params: &LinearParams,
        b: &mut Builder,
    ) -> Result<()> {
        let Call { dims, out, rows, .. } = call;
        let tiles = rows.div_ceil(self.rows);
        let blocks = (dims.inputs / BLOCK).next_multiple_of(DEPTH);
        let blocks_of_sums = if weight.bits == 0 { 0 } else { blocks.div_ceil(BLOCK) };
        let of_tile = blocks + blocks_of_sums * self.terms;
        let arranged = b.scratch(tiles * of_tile * self.bytes())?;
        let common = |launch: Launch| {
            launch
                .constant("X_DTYPE", call.x.dtype())
                .constant("OUT_DTYPE", out.dtype())
                .constant("BITS", weight.bits)
                .constant("ROWS", self.rows as u32)
        };
        b.push(
            common(Launch::new(NAME, &SOURCE, "linear_many_arrange"))
                .read(0, &call.x)
                .scratch(1, &arranged, Use::Write)
                .params(2, params)
                .grid([blocks.max(blocks_of_sums * BLOCK), tiles * self.rows / 32, 1], [THREADS, 1, 1]),
        )?;
        let size = out.dtype().size();
        let out_aligned = out.byte_offset().is_multiple_of(4 * size) && dims.outputs.is_multiple_of(4);
        b.push(
            common(Launch::new(NAME, &SOURCE, name))
                .constant("W_DTYPE", weight.dtype)
                .constant("GROUP", weight.group)
                .constant("W_ALIGNED", weight.aligned)
                .constant("OUT_ALIGNED", out_aligned)
                .constant("STAGES", self.stages as u32)
                .constant("SHARED_BYTES", self.shared_bytes() as u32)
                .scratch(0, &arranged, Use::Read)
                .read(1, weight.weight)
                .read_if(2, weight.scales)
                .read_if(3, weight.biases)
                .write(4, out)
                .params(5, params)
                .threadgroup_memory(self.shared_bytes())
                .grid([dims.outputs.div_ceil(OUTPUTS), tiles, 1], [128 * WARPGROUPS, 1, 1]),
        )
    }
}
