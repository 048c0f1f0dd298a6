//! Products with few rows on tensor cores, by weights that no other kernel for few rows supports: blocks, small floats
//! with separate scales, affine codes of 2, 3 and 5 bits.

use super::{
    LinearArgs, LinearKernel, LinearParams, aligned16,
    gemm_affine::{MAX_EXPERTS, max_tiles, sort},
    warp_tiling::{TILE, WarpTiling},
};
use crate::cuda::{WARP, affine::Parts, headers};
use crate::{
    DType, Result, Tensor,
    gpu::{Builder, Limits, Params, Source, Use},
    ops::linear::{Call, OwnedWeight},
};

static SOURCE: Source = Source {
    name: "linear_skinny_blocks_mma.cu",
    text: include_str!("linear_skinny_blocks_mma.cu"),
    headers: headers::ALL,
    layouts: &[LinearParams::layout],
};

/// Inputs of a span, and of the units of a row, as `block_codes.h` has them.
const SPAN: usize = 256;
const UNIT: usize = 32;
/// Maximum rows of one matrix, and maximum mean of rows per expert.
pub(super) const FEW: usize = 40;
pub(super) const FEW_PER_EXPERT: usize = 48;
/// Minimum rows of experts that are sorted, so that several rows share one read of an expert.
const SORTED: usize = 16;
/// Columns of a product.
const COLUMNS: usize = 8;
/// Maximum warps of a block.
const WARPS: usize = 8;
/// Warps that keep a multiprocessor busy: with one or two rows; with more rows, whose warps need more memory.
const BUSY: [usize; 2] = [24, 10];
/// Maximum spans of inputs that a warp has in flight.
const STAGES: usize = 6;

/// How the work is divided.
pub(super) struct SkinnyBlocksMma(WarpTiling);

/// Bytes of a row of a weight, in its codes and in each buffer of scales; 0 for a missing buffer.
fn row_bytes(weight: &OwnedWeight, inputs: usize) -> [usize; 2] {
    match weight {
        OwnedWeight::Dense(dense) => [inputs * dense.dtype().size(), 0],
        OwnedWeight::Affine { scales, bits, group, .. } => {
            [inputs / 8 * *bits as usize, inputs / group * scales.dtype().size()]
        }
        OwnedWeight::Blocks { format, .. } => [inputs / format.block_inputs() * format.block_bytes(), 0],
        OwnedWeight::Floats { format, .. } => [inputs / 8 * format.bits(), inputs / format.group()],
    }
}

/// The alignment in bytes of a tensor's rows and of the spans of a row, at most 16.
fn alignment(tensor: &Tensor, row: usize, span: usize) -> usize {
    1 << (tensor.byte_offset() | row | span | 16).trailing_zeros()
}

/// Alignments of codes and of scales: of their rows, and of the spans within a row.
fn alignments(call: &Call, weight: &Parts) -> [usize; 2] {
    let (row, span) = (row_bytes(&call.weight, call.dims.inputs), row_bytes(&call.weight, SPAN));
    let of_factors = [weight.scales, weight.biases].into_iter().flatten().map(|t| alignment(t, row[1], span[1])).min();
    [alignment(weight.weight, row[0], span[0]), of_factors.unwrap_or(16)]
}

/// Whether the kernel takes these rows.
fn suits(call: &Call, weight: &Parts) -> bool {
    let takes = weight.format != 0 || matches!(weight.bits, 2 | 3 | 5);
    let row = row_bytes(&call.weight, call.dims.inputs)[0];
    // Offsets within a tile are 32 bits.
    takes && aligned16(&call.x, call.dims.inputs) && call.dims.inputs.is_multiple_of(UNIT) && row < 1 << 26
}

/// Maximum rows for which the kernel is faster than a kernel of many rows. It reads W again for every eight rows.
fn max_rows(call: &Call) -> usize {
    match call.experts {
        Some(_) => call.dims.experts.saturating_mul(FEW_PER_EXPERT),
        None => FEW,
    }
}

/// Whether rows are sorted by expert: if several rows are likely to share an expert.
fn is_sorted(call: &Call) -> bool {
    let experts = call.dims.experts;
    call.experts.is_some() && call.rows >= SORTED.max(experts / 2) && experts <= MAX_EXPERTS
}

/// The best tiling, or a smaller one if shared memory is too small for it.
fn tiling(call: &Call, weight: &Parts, limits: &Limits) -> WarpTiling {
    let smaller = [(2, WARPS), (1, WARPS), (1, WARPS / 2), (1, WARPS / 4)];
    let mut tilings = smaller.into_iter().map(|most| tiling_of(call, weight, limits, most));
    let fits = tilings.find(|tiling| tiling.bytes <= limits.threadgroup_bytes);
    fits.unwrap_or_else(|| tiling_of(call, weight, limits, (1, 1)))
}

/// The tiling with at most `tiles` tiles and `warps` warps.
fn tiling_of(call: &Call, weight: &Parts, limits: &Limits, (max_tiles, max_warps): (usize, usize)) -> WarpTiling {
    let Call { x, dims, experts, rows, .. } = call;
    let busy = limits.busy_groups;
    let terms = if x.dtype() == DType::F32 { 3 } else { 1 };
    let wanted = match experts {
        Some(_) if is_sorted(call) => COLUMNS,
        Some(_) => 1,
        None => (*rows).clamp(1, COLUMNS).next_power_of_two(),
    };
    let tokens = wanted.min(1 << (COLUMNS / terms).ilog2());
    let down =
        if is_sorted(call) { rows.div_ceil(tokens).max(*rows.min(&dims.experts)) } else { rows.div_ceil(tokens) };
    // A second tile uses the same x, if enough blocks remain.
    let enough = down * (dims.outputs / (2 * TILE)) * 8 >= busy * 7;
    let tiles = if tokens > 2 && enough { max_tiles } else { 1 };
    // The minimum number of warps that keeps the device busy, because every warp has the cost of its beginning and end.
    // Warps have even shares of the spans.
    let blocks = (down * dims.outputs.div_ceil(tiles * TILE)).max(1);
    let wanted = if tokens > 2 { BUSY[1] * busy / blocks } else { (BUSY[0] * busy + blocks / 2) / blocks };
    let warps = wanted.clamp(1, max_warps);
    let spans = dims.inputs.div_ceil(SPAN);
    let each = spans.div_ceil(warps).max(1);
    let warps = spans.div_ceil(each).max(1);
    let [codes, factors] = row_bytes(&call.weight, SPAN);
    let of_codes = alignments(call, weight);
    // As `Pieces` of the kernel.
    let room = |bytes: usize, alignment: usize| (((31 - alignment + bytes) / 16) | 1) * 16;
    let factor_rows = usize::from(weight.scales.is_some()) + usize::from(weight.biases.is_some());
    let row = room(codes, of_codes[0]) + if factor_rows > 0 { factor_rows * room(factors, of_codes[1]) } else { 0 };
    let stage = tiles * TILE * row + tokens * (SPAN * x.dtype().size() + 32);
    // The warps of a multiprocessor together use most of its shared memory.
    let resident = (blocks * warps).div_ceil(busy).clamp(warps, BUSY[0].max(warps));
    let stages = (limits.threadgroup_bytes / 8 * 7 / (resident * stage)).clamp(2, STAGES).min(each);
    let sums = tiles * TILE * COLUMNS * size_of::<f32>();
    WarpTiling { tokens, tiles, stages, warps, vector: 1, bytes: warps * (stages * stage + sums) }
}

impl SkinnyBlocksMma {
    /// `None` if the kernel does not support the product, or is slower than a kernel for many rows.
    pub(super) fn new(call: &Call, weight: &Parts, limits: &Limits) -> Option<SkinnyBlocksMma> {
        let takes = call.rows <= max_rows(call) && suits(call, weight);
        takes.then(|| SkinnyBlocksMma(tiling(call, weight, limits)))
    }
}

impl LinearKernel for SkinnyBlocksMma {
    fn name(&self) -> &'static str {
        "linear_skinny_blocks_mma"
    }

    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()> {
        let LinearArgs { call, weight, params } = *args;
        let tiling = &self.0;
        let [of_codes, of_factors] = alignments(call, weight);
        let tiles = max_tiles(call, tiling.tokens);
        let sorted = if is_sorted(call) { sort(call, params, [tiles, tiling.tokens], b)? } else { None };
        let launch = tiling
            .launch(&SOURCE, self.name(), call, weight, params)
            .constant("W_ALIGNMENT", of_codes as u32)
            .constant("FACTOR_ALIGNMENT", of_factors as u32)
            .constant("INPUTS_OF_SPANS", call.dims.inputs.is_multiple_of(SPAN))
            .constant("SORTED", sorted.is_some());
        b.push(match &sorted {
            None => launch,
            Some([experts, order]) => {
                let [outputs, _, _] = launch.grid.groups;
                launch
                    .scratch(7, experts, Use::Read)
                    .scratch(8, order, Use::Read)
                    .grid([outputs as usize, tiles, 1], [tiling.warps * WARP, 1, 1])
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Device,
        cuda::{
            affine::parts,
            linear::skinny_mma::tests::{H200, call},
        },
        ops::BlockFormat,
    };

    /// Rows, outputs, and inputs in spans; of experts or not.
    const SIZES: [(usize, usize, usize, bool); 6] = [
        (1, 14_336, 16, false),
        (1, 4096, 56, false),
        (8, 14_336, 16, false),
        (8, 40, 1, false),
        (4, 1536, 8, true),
        (64, 1536, 11, true),
    ];

    fn each(mut check: impl FnMut(&Call, &Parts)) {
        for format in BlockFormat::ALL {
            for dtype in [DType::F32, DType::BF16] {
                for (rows, outputs, spans, experts) in SIZES {
                    let inputs = spans * SPAN;
                    let bytes = format.row_bytes(inputs).expect("whole blocks");
                    let data = Tensor::zeros(&Device::reference(), DType::U8, &[outputs, bytes]).unwrap();
                    let mut call = call(0, dtype, [rows, outputs, inputs], experts);
                    call.weight = OwnedWeight::Blocks { data, format };
                    check(&call, &parts(&call.weight, inputs));
                }
            }
        }
    }

    #[test]
    fn a_block_fits_into_what_devices_have() {
        for bytes in [48 << 10, 99 << 10, 163 << 10, 227 << 10] {
            let limits = Limits { threadgroup_bytes: bytes, ..H200 };
            each(|call, weight| {
                let tiling = tiling(call, weight, &limits);
                assert!(tiling.bytes <= bytes, "{:?}, {:?}: {}", call.weight, call.x.shape(), tiling.bytes);
            });
        }
    }

    /// Every warp has spans, and with fewer warps the longest part would be longer.
    #[test]
    fn warps_share_the_spans() {
        each(|call, weight| {
            let tiling = tiling(call, weight, &H200);
            let spans = call.dims.inputs.div_ceil(SPAN);
            let each = spans.div_ceil(tiling.warps);
            assert!(
                (tiling.warps - 1) * each < spans && tiling.stages <= each,
                "{spans} spans, {} warps",
                tiling.warps
            );
        });
    }
}
