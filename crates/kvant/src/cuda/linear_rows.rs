//! Products with few rows, on tensor cores: see `linear_rows.cu`.

use super::{affine::Parts, headers, linear::LinearParams};
use crate::{
    DType, Result, Tensor,
    cuda::WARP,
    gpu::{Builder, Launch, Limits, Params, Source},
    ops::linear::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "linear_rows.cu",
    text: include_str!("linear_rows.cu"),
    headers: headers::LINEAR_ROWS,
    layouts: &[LinearParams::layout],
};

/// The most columns that the tokens of a block take: what more would cost in registers, reading W again does not.
const COLUMNS: usize = 16;
/// Warps of a block, at most.
const WARPS: usize = 8;
/// Bytes that a warp asks for ahead of their use, about.
const AHEAD: usize = 7 << 10;
/// Outputs of a tile.
const TILE: usize = 16;

/// How a launch shares its work.
struct Shape {
    tokens: usize,
    tiles: usize,
    stages: usize,
    warps: usize,
    vector: usize,
    bytes: usize,
}

/// Whether the kernel takes these rows: of 16-bit numbers, or of f32 that become a sum of some.
pub(super) fn suits(call: &Call, weight: &Parts, x_aligned: bool) -> bool {
    let x = call.x.dtype();
    let aligned =
        x_aligned && if weight.bits == 6 { weight.weight.byte_offset().is_multiple_of(8) } else { weight.aligned };
    let dtypes =
        weight.bits != 0 || (weight.dtype == x && x != DType::F32) || (weight.dtype, x) == (DType::BF16, DType::F32);
    aligned && dtypes && call.dims.inputs > 0
}

impl Shape {
    /// The best, or what needs less shared memory where the device has little.
    fn new(call: &Call, weight: &Parts, limits: &Limits) -> Shape {
        let smaller = [(2, WARPS), (1, WARPS), (1, WARPS / 2), (1, WARPS / 4)];
        let mut shapes = smaller.into_iter().map(|most| Shape::within(call, weight, limits.busy_groups, most));
        let fits = shapes.find(|shape| shape.bytes <= limits.threadgroup_bytes);
        fits.unwrap_or_else(|| Shape::within(call, weight, limits.busy_groups, (1, 1)))
    }

    /// With so many tiles and warps at most.
    fn within(call: &Call, weight: &Parts, busy_groups: usize, (most_tiles, most_warps): (usize, usize)) -> Shape {
        // As linear_rows.cu has them.
        let (lane, lane_bytes) = match weight.bits {
            0 => (32, 64),
            4 => (32, 16),
            6 => (32, 24),
            _ => (32, 32),
        };
        let span = 4 * lane;
        let groups = if weight.bits == 0 { 1 } else { (span / weight.group as usize).max(1) };
        let terms = if call.x.dtype() == DType::F32 { 3 } else { 1 };
        let wanted = if call.experts.is_some() { 1 } else { call.rows.clamp(1, 8).next_power_of_two() };
        let most = (COLUMNS / (groups * terms)).max(1);
        let tokens = wanted.min(1 << most.ilog2());
        let wide = (tokens * terms * groups).div_ceil(8);
        // A second tile shares what is read of x, if enough blocks are left: for one row, whose x is short, more of them.
        let pairs = call.dims.outputs / (2 * TILE);
        let enough = if call.rows > 1 { pairs * 8 >= busy_groups * 7 } else { pairs >= 2 * busy_groups };
        let tiles = if enough && call.experts.is_none() { most_tiles } else { 1 };
        let blocks = call.dims.outputs.div_ceil(tiles * TILE) * call.rows.div_ceil(tokens);
        // Many blocks keep the device busy with fewer warps, each of which has more to do.
        let warps = if blocks >= 6 * busy_groups { WARPS / 2 } else { WARPS }.min(most_warps);
        let warps = call.dims.inputs.div_ceil(span).clamp(1, warps);
        let stage = 2 * tiles * lane_bytes * WARP + tokens * span * call.x.dtype().size();
        let stages = (AHEAD / stage).clamp(2, 4);
        let vector = weight.scales.map_or(1, |scales| {
            let each = call.dims.inputs.div_ceil(span).div_ceil(warps) * groups;
            let rows = call.dims.inputs / weight.group as usize;
            let offsets = [Some(scales), weight.biases].into_iter().flatten().map(Tensor::byte_offset);
            let size = scales.dtype().size();
            let fits = |n: usize| {
                (n == 1 || span >= weight.group as usize)
                    && each.is_multiple_of(n)
                    && rows.is_multiple_of(n)
                    && offsets.clone().all(|o| o.is_multiple_of(n * size))
            };
            [8, 4, 2, 1].into_iter().find(|&n| n * size <= 16 && fits(n)).unwrap_or(1)
        });
        let factors = if weight.bits == 0 { 0 } else { tiles * 2 * TILE * groups.max(vector) * weight.dtype.size() };
        let sums = TILE * tiles * wide * 8 * size_of::<f32>();
        Shape { tokens, tiles, stages, warps, vector, bytes: warps * (stages * stage + factors + sums) }
    }
}

pub(super) fn build(call: &Call, weight: &Parts, params: &LinearParams, b: &mut Builder) -> Result<()> {
    let Call { x, dims, experts: ids, out, rows, .. } = call;
    let shape = Shape::new(call, weight, &b.limits);
    let launch = Launch::new(NAME, &SOURCE, "linear_rows")
        .constant("TOKENS", shape.tokens as u32)
        .constant("TILES", shape.tiles as u32)
        .constant("STAGES", shape.stages as u32)
        .constant("WARPS", shape.warps as u32)
        .constant("VECTOR", shape.vector as u32)
        .constant("X_DTYPE", x.dtype())
        .constant("OUT_DTYPE", out.dtype())
        .constant("W_DTYPE", weight.dtype)
        .constant("BITS", weight.bits)
        .constant("GROUP", weight.group)
        .constant("EXPERTS", ids.is_some())
        .read(0, x)
        .read(1, weight.weight)
        .read_if(2, weight.scales)
        .read_if(3, weight.biases)
        .read_if(4, ids.as_ref())
        .write(5, out)
        .params(6, params)
        .threadgroup_memory(shape.bytes)
        .grid([dims.outputs.div_ceil(TILE * shape.tiles), rows.div_ceil(shape.tokens), 1], [shape.warps * WARP, 1, 1]);
    // Whose matrix it is, the launch in front may have to say.
    b.push(if ids.is_some() { launch } else { launch.reads_ahead(&[1, 2, 3]) })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        Device,
        cuda::affine::parts,
        ops::linear::{OwnedWeight, WeightDims},
    };

    pub(in crate::cuda) const H200: Limits = Limits {
        threads: 1024,
        threadgroup_bytes: 227 << 10,
        busy_groups: 132,
        warpgroup_products: true,
        clusters: true,
    };

    /// A product of x `[rows, inputs]` with `[outputs, inputs]` weights, of 32 elements a group when they are affine.
    fn call(bits: u32, dtype: DType, [rows, outputs, inputs]: [usize; 3], experts: bool) -> Call {
        let device = Device::reference();
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&device, dtype, shape).unwrap();
        let group = 32;
        let weight = if bits == 0 {
            OwnedWeight::Dense(zeros(DType::BF16, &[outputs, inputs]))
        } else {
            let codes = zeros(DType::U32, &[outputs, inputs * bits as usize / 32]);
            let factors = || zeros(DType::F32, &[outputs, inputs / group]);
            OwnedWeight::Affine { codes, scales: factors(), biases: factors(), bits, group }
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
                let (shape, best) = (Shape::new(&call, &weight, &limits), Shape::new(&call, &weight, &H200));
                let case = format!("{} bits, {:?}, {}, {bytes} bytes", weight.bits, call.x.shape(), call.x.dtype());
                assert!(shape.bytes <= bytes, "{case}: {}", shape.bytes);
                // No smaller than need be.
                assert_eq!(shape.bytes == best.bytes, best.bytes <= bytes, "{case}");
                smaller += usize::from(shape.bytes < best.bytes);
            }
            assert_eq!(smaller == 0, bytes == H200.threadgroup_bytes, "{bytes} bytes: {smaller} shapes are smaller");
        }
    }

    /// What was measured is what the H200 gets.
    #[test]
    fn an_h200_has_the_best_shapes() {
        for call in calls() {
            let weight = parts(&call.weight, call.dims.inputs);
            let best = Shape::within(&call, &weight, H200.busy_groups, (2, WARPS));
            assert_eq!(Shape::new(&call, &weight, &H200).bytes, best.bytes);
        }
    }
}
