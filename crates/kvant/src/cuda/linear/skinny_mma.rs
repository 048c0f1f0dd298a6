//! Products with few rows, on tensor cores.

use super::{
    LinearArgs, LinearKernel, LinearParams, aligned16,
    out_parts::{MAX_PARTS, OutParts},
    warp_tiling::{TILE, WarpTiling, vector},
};
use crate::cuda::{affine::Parts, headers};
use crate::{
    DType, Result,
    cuda::WARP,
    gpu::{Builder, Limits, Params, Source, params},
    ops::linear::Call,
};

params! {
    pub(crate) struct SkinnyMmaParams {
        pub linear: LinearParams,
        pub parts: OutParts,
    }
}

static SOURCE: Source = Source {
    name: "linear_skinny_mma.cu",
    text: include_str!("linear_skinny_mma.cu"),
    headers: headers::ALL,
    layouts: &[LinearParams::layout, OutParts::layout, SkinnyMmaParams::layout],
};

/// Maximum columns of a block's tokens. More columns would need more registers, which costs more than reading W again.
const COLUMNS: usize = 16;
/// Maximum warps of a block.
const WARPS: usize = 8;
/// Approximate bytes that a warp prefetches.
const PREFETCHED: usize = 7 << 10;
/// Inputs of a lane and of a warp in a span, as `linear_skinny_mma.cu` has them.
const LANE: usize = 32;
const SPAN: usize = 4 * LANE;

/// How the work is divided.
pub(super) struct SkinnyMma(WarpTiling);

/// Whether the kernel takes these rows: 16-bit numbers, or f32 numbers as sums of bf16 numbers.
pub(super) fn suits(call: &Call, weight: &Parts) -> bool {
    let x = call.x.dtype();
    let aligned = aligned16(&call.x, call.dims.inputs)
        && if weight.bits == 6 { weight.weight.byte_offset().is_multiple_of(8) } else { weight.aligned };
    let dtypes =
        weight.bits != 0 || (weight.dtype == x && x != DType::F32) || (weight.dtype, x) == (DType::BF16, DType::F32);
    aligned && dtypes && call.dims.inputs > 0 && call.parts.len() <= MAX_PARTS
}

/// The best tiling, or a smaller one if shared memory is too small for it.
fn tiling(call: &Call, weight: &Parts, limits: &Limits) -> WarpTiling {
    let smaller = [(2, WARPS), (1, WARPS), (1, WARPS / 2), (1, WARPS / 4)];
    let mut tilings = smaller.into_iter().map(|most| tiling_of(call, weight, limits.busy_groups, most));
    let fits = tilings.find(|tiling| tiling.bytes <= limits.threadgroup_bytes);
    fits.unwrap_or_else(|| tiling_of(call, weight, limits.busy_groups, (1, 1)))
}

/// The tiling with at most `tiles` tiles and `warps` warps.
fn tiling_of(call: &Call, weight: &Parts, busy_groups: usize, (max_tiles, max_warps): (usize, usize)) -> WarpTiling {
    let bits = if weight.bits == 0 { 16 } else { weight.bits as usize };
    let lane_bytes = LANE * bits / 8;
    let groups = if weight.bits == 0 { 1 } else { (SPAN / weight.group as usize).max(1) };
    let terms = if call.x.dtype() == DType::F32 { 3 } else { 1 };
    let wanted = if call.experts.is_some() { 1 } else { call.rows.clamp(1, 8).next_power_of_two() };
    let most = (COLUMNS / (groups * terms)).max(1);
    let tokens = wanted.min(1 << most.ilog2());
    let wide = (tokens * terms * groups).div_ceil(8);
    // A second tile uses the same x, if enough blocks remain. One row, whose x is short, needs more blocks.
    let pairs = call.dims.outputs / (2 * TILE);
    let enough = if call.rows > 1 { pairs * 8 >= busy_groups * 7 } else { pairs >= 2 * busy_groups };
    let tiles = if enough && call.experts.is_none() { max_tiles } else { 1 };
    let blocks = call.dims.outputs.div_ceil(tiles * TILE) * call.rows.div_ceil(tokens);
    // Many blocks keep the device busy with fewer warps, and each warp has more to do.
    let warps = if blocks >= 6 * busy_groups { WARPS / 2 } else { WARPS }.min(max_warps);
    let warps = call.dims.inputs.div_ceil(SPAN).clamp(1, warps);
    let stage = 2 * tiles * lane_bytes * WARP + tokens * SPAN * call.x.dtype().size();
    let stages = (PREFETCHED / stage).clamp(2, 4);
    let each = call.dims.inputs.div_ceil(SPAN).div_ceil(warps) * groups;
    let vector = vector(weight, call.dims.inputs, |n| SPAN >= weight.group as usize && each.is_multiple_of(n));
    let factors = if weight.bits == 0 { 0 } else { tiles * 2 * TILE * groups.max(vector) * weight.dtype.size() };
    let sums = TILE * tiles * wide * 8 * size_of::<f32>();
    WarpTiling { tokens, tiles, stages, warps, vector, bytes: warps * (stages * stage + factors + sums) }
}

impl SkinnyMma {
    /// `None` if the kernel does not support the product.
    pub(super) fn new(call: &Call, weight: &Parts, limits: &Limits) -> Option<SkinnyMma> {
        suits(call, weight).then(|| SkinnyMma(tiling(call, weight, limits)))
    }
}

impl LinearKernel for SkinnyMma {
    fn name(&self) -> &'static str {
        "linear_skinny_mma"
    }

    fn writes_parts(&self) -> bool {
        true
    }

    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()> {
        let LinearArgs { call, weight, params } = *args;
        let params = SkinnyMmaParams { linear: *params, parts: OutParts::of(call)? };
        b.push(self.0.launch(&SOURCE, self.name(), call, weight, &params))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        Device, Tensor,
        cuda::affine::parts,
        ops::linear::{OwnedWeight, WeightDims},
    };

    pub(in crate::cuda) const H200: Limits = Limits {
        threads: 1024,
        threadgroup_bytes: 227 << 10,
        busy_groups: 132,
        warpgroup_products: true,
        library_products: true,
        clusters: true,
    };

    /// Affine weights `[outputs, inputs]`, all zeros.
    pub(in crate::cuda) fn affine(
        [outputs, inputs]: [usize; 2],
        bits: u32,
        group: usize,
        factors: DType,
    ) -> OwnedWeight {
        let zeros = |dtype, columns| Tensor::zeros(&Device::reference(), dtype, &[outputs, columns]).unwrap();
        let codes = zeros(DType::U32, inputs * bits as usize / 32);
        let factors = || zeros(factors, inputs / group);
        OwnedWeight::Affine { codes, scales: factors(), biases: factors(), bits, group }
    }

    /// A product of x `[rows, inputs]` with `[outputs, inputs]` weights, of 32 elements a group when they are affine.
    pub(in crate::cuda) fn call(bits: u32, dtype: DType, [rows, outputs, inputs]: [usize; 3], experts: bool) -> Call {
        let device = Device::reference();
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&device, dtype, shape).unwrap();
        let weight = match bits {
            0 => OwnedWeight::Dense(zeros(DType::BF16, &[outputs, inputs])),
            _ => affine([outputs, inputs], bits, 32, DType::F32),
        };
        Call {
            x: zeros(dtype, &[rows, inputs]),
            weight,
            dims: WeightDims { experts: 1, outputs, inputs },
            experts: experts.then(|| zeros(DType::U32, &[rows])),
            rows_per_input: 1,
            alpha: 1.0,
            out: zeros(dtype, &[rows, outputs]),
            rows,
            parts: Vec::new(),
        }
    }

    pub(in crate::cuda) fn calls() -> impl Iterator<Item = Call> {
        let dtypes = [DType::F32, DType::BF16];
        let sizes = [[1, 8448, 512], [1, 64, 1024], [2, 4096, 1024], [5, 64, 128], [8, 4096, 1024], [30, 13000, 512]];
        [0, 4, 6, 8].into_iter().flat_map(move |bits| {
            dtypes.into_iter().flat_map(move |dtype| {
                sizes.into_iter().flat_map(move |size| [false, true].map(|experts| call(bits, dtype, size, experts)))
            })
        })
    }

    #[test]
    fn a_block_fits_into_what_devices_have() {
        for bytes in [48 << 10, 99 << 10, 163 << 10, 227 << 10] {
            let limits = Limits { threadgroup_bytes: bytes, ..H200 };
            let mut smaller = 0;
            for call in calls() {
                let weight = parts(&call.weight, call.dims.inputs);
                let (shape, best) = (tiling(&call, &weight, &limits), tiling(&call, &weight, &H200));
                let case = format!("{} bits, {:?}, {}, {bytes} bytes", weight.bits, call.x.shape(), call.x.dtype());
                assert!(shape.bytes <= bytes, "{case}: {}", shape.bytes);
                // The tiling is reduced only if shared memory is too small.
                assert_eq!(shape.bytes == best.bytes, best.bytes <= bytes, "{case}");
                smaller += usize::from(shape.bytes < best.bytes);
            }
            assert_eq!(smaller == 0, bytes == H200.threadgroup_bytes, "{bytes} bytes: {smaller} shapes are smaller");
        }
    }

    /// The H200 gets the tiling that was measured.
    #[test]
    fn an_h200_has_the_best_shapes() {
        for call in calls() {
            let weight = parts(&call.weight, call.dims.inputs);
            let best = tiling_of(&call, &weight, H200.busy_groups, (2, WARPS));
            assert_eq!(tiling(&call, &weight, &H200).bytes, best.bytes);
        }
    }
}
