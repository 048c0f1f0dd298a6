//! Products of a dense 16-bit weight with few rows, by bulk copies and on tensor cores.

use super::{
    LinearArgs, LinearKernel, LinearParams, aligned16,
    gating::Gating,
    out_parts::{MAX_PARTS, OutParts},
    splits::{SPLITS, Splits},
    warp_tiling::TILE,
};
use crate::cuda::{affine::Parts, headers};
use crate::{
    DType, Result,
    cuda::WARP,
    gpu::{Builder, Launch, Limits, Params, Source, params},
    ops::{
        gate,
        linear::{Call, NAME},
    },
};

params! {
    pub(crate) struct SkinnyDenseTmaParams {
        pub rows: u32,
        pub outputs: u32,
        pub alpha: f32,
        pub max_tiles: u32,
        pub up_width: u32,
        pub parts: OutParts,
    }
}

static SOURCE: Source = Source {
    name: "linear_skinny_dense_tma.cu",
    text: include_str!("linear_skinny_dense_tma.cu"),
    headers: headers::ALL,
    layouts: &[OutParts::layout, SkinnyDenseTmaParams::layout],
};

/// Rows of x for which kernels are compiled; x is padded to the next of these numbers.
const ROWS: [usize; 3] = [8, 16, 32];
/// Rows of x that are multiplied together.
const EIGHT: usize = 8;
/// Warps of a block that multiply: the first number by which the inputs are whole steps.
const WARPS: [usize; 3] = [8, 4, 2];
/// Inputs of a warp in a step.
const STEP: usize = 32;
/// Maximum registers of a lane for x. With eight warps and more than `FEW_REGISTERS`, the warps that copy and add give
/// registers to the others. The instruction for this exists on one architecture only, like products of warpgroups.
const MAX_REGISTERS: usize = 176;
const FEW_REGISTERS: usize = 80;
/// Maximum bytes of the partial sums of all blocks. Larger sums do not stay in the level-2 cache.
const MAX_PARTIALS: usize = 24 << 20;
/// Maximum bytes of a stage, and the padding of an output in it.
const STAGE: usize = 42 << 10;
const PADDING: usize = 64;
/// Maximum stages in flight, and the minimum for a block with more items than stages.
const STAGES: usize = 6;
const FEWEST_STAGES: usize = 2;
/// Maximum tiles whose sums are in shared memory.
const SLOTS: usize = 2;

/// How the work is divided.
#[derive(Clone, Copy)]
pub(super) struct SkinnyDenseTma {
    /// Rows of x, including the padding.
    rows: usize,
    division: Splits,
    warps: usize,
    /// Inputs of a block, and of a stage.
    inputs: usize,
    segment: usize,
    stages: usize,
    /// Shared memory of a block.
    bytes: usize,
}

impl SkinnyDenseTma {
    /// `None` if the kernel does not support the product on this device. With `halves`, half of a tile's outputs belong
    /// to each half of the results.
    pub(super) fn new(call: &Call, weight: &Parts, halves: bool, limits: &Limits) -> Option<SkinnyDenseTma> {
        let (all_inputs, outputs) = (call.dims.inputs, call.dims.outputs);
        let takes = limits.clusters
            && call.rows >= 1
            && call.experts.is_none()
            && weight.is_dense()
            && matches!(weight.dtype, DType::F16 | DType::BF16)
            && call.x.dtype() == weight.dtype
            && weight.aligned
            && aligned16(&call.x, all_inputs)
            && all_inputs > 0
            && outputs > 0
            && call.parts.len() <= MAX_PARTS;
        if !takes {
            return None;
        }
        let rows = ROWS.into_iter().find(|&rows| call.rows <= rows)?;
        let warps = WARPS.into_iter().find(|warps| all_inputs.is_multiple_of(warps * STEP))?;
        let step = warps * STEP;
        let can_have_many = limits.warpgroup_products || warps < WARPS[0];
        let most = if can_have_many { MAX_REGISTERS } else { FEW_REGISTERS };
        let splits = (1..=SPLITS).find(|splits| {
            all_inputs.is_multiple_of(splits * step) && registers_of_x(rows, all_inputs / splits / warps) <= most
        })?;
        let inputs = all_inputs / splits;
        let sides = if halves { 2 } else { 1 };
        let stretches = (outputs / sides).min(limits.busy_groups / splits).max(1);
        let tiles = (outputs / sides).div_ceil(stretches).div_ceil(TILE / sides);
        let division = Splits { splits, stretches, tiles };
        if splits > 1 && division.partial_bytes(rows) > MAX_PARTIALS {
            return None;
        }
        // The minimum segments of whole steps whose stages fit in size and in shared memory.
        let steps = inputs / step;
        let max_steps = (STAGE / TILE - PADDING) / (step * 2);
        let (segment, stages, bytes) = (steps.div_ceil(max_steps)..=steps).find_map(|segments| {
            let segment = steps.div_ceil(segments) * step;
            let items = tiles * inputs.div_ceil(segment);
            let bytes = |stages: usize| {
                let sums = SLOTS * warps * TILE * rows * size_of::<f32>();
                stages * TILE * (segment * 2 + PADDING) + sums + (stages + SLOTS) * 16 + 16
            };
            let mut stages = (FEWEST_STAGES.min(items)..=STAGES.min(items)).rev();
            let stages = stages.find(|&stages| bytes(stages) <= limits.threadgroup_bytes)?;
            Some((segment, stages, bytes(stages)))
        })?;
        Some(SkinnyDenseTma { rows, division, warps, inputs, segment, stages, bytes })
    }

    fn push(&self, args: &LinearArgs, gating: Gating, b: &mut Builder) -> Result<()> {
        let LinearArgs { call, weight, params } = *args;
        let &LinearParams { rows, outputs, alpha, .. } = params;
        let max_tiles = Launch::uint(NAME, "out", self.division.tiles)?;
        let up_width = Launch::uint(gate::NAME, "up", gating.up_width())?;
        let params = SkinnyDenseTmaParams { rows, outputs, alpha, max_tiles, up_width, parts: OutParts::of(call)? };
        let has_many = self.warps == WARPS[0] && registers_of_x(self.rows, self.inputs / self.warps) > FEW_REGISTERS;
        // A warpgroup if it gives registers to others; otherwise one warp copies, and one or two add.
        let others = match (has_many, self.rows) {
            (true, _) => 4,
            (false, EIGHT) => 2,
            (false, _) => 3,
        };
        let launch = gating
            .bind(Launch::new(NAME, &SOURCE, self.name()), 6)
            .constant("DTYPE", weight.dtype)
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("ROWS", self.rows as u32)
            .constant("INPUTS", self.inputs as u32)
            .constant("SPLITS", self.division.splits as u32)
            .constant("SEGMENT", self.segment as u32)
            .constant("WARPS", self.warps as u32)
            .constant("MANY", has_many)
            .constant("STAGES", self.stages as u32)
            .constant("SHARED_BYTES", self.bytes as u32)
            .read(0, &call.x)
            .read(1, weight.weight)
            .write(2, &call.out)
            .params(3, &params)
            .threadgroup_memory(self.bytes)
            .grid([self.division.blocks(), 1, 1], [(self.warps + others) * WARP, 1, 1])
            .reads_ahead(&[1]);
        self.division.push(launch, 4, self.rows, b)
    }
}

impl LinearKernel for SkinnyDenseTma {
    fn name(&self) -> &'static str {
        "linear_skinny_dense_tma"
    }

    fn writes_parts(&self) -> bool {
        true
    }

    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()> {
        self.push(args, Gating::None, b)
    }

    /// Every gate, if a tiling has both halves in a tile.
    fn build_gated(&self, args: &LinearArgs, gating: Gating, b: &mut Builder) -> Result<bool> {
        let tiling = SkinnyDenseTma::new(args.call, args.weight, gating.is_halves(), &b.limits);
        let Some(tiling) = tiling else { return Ok(false) };
        tiling.push(args, gating, b)?;
        Ok(true)
    }
}

/// Registers of a lane for x, with `rows` rows and `inputs` inputs of a warp.
fn registers_of_x(rows: usize, inputs: usize) -> usize {
    rows / EIGHT * (inputs / STEP) * 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{
        affine::parts,
        linear::skinny_mma::tests::{H200, call},
    };

    #[test]
    fn a_block_fits_into_what_devices_have() {
        let sizes =
            [64, 256, 512, 576, 768, 896, 1152, 2048, 2560, 2816, 4096, 4864, 5120, 5376, 10_240, 14_336, 18_944];
        for (bytes, warpgroup_products) in [(48 << 10, false), (99 << 10, false), (227 << 10, false), (227 << 10, true)]
        {
            let limits = Limits { threadgroup_bytes: bytes, warpgroup_products, ..H200 };
            for (inputs, rows) in
                sizes.into_iter().flat_map(|inputs| [1, 2, 8, 9, 16, 17, 32].map(|rows| (inputs, rows)))
            {
                for (outputs, halves) in [1, 16, 100, 2560, 20_480, 262_144]
                    .into_iter()
                    .flat_map(|outputs| [(outputs, false), (outputs + outputs % 2, true)])
                {
                    let call = call(0, DType::BF16, [rows, 8, inputs], false);
                    let call = Call { dims: crate::ops::linear::WeightDims { outputs, ..call.dims }, ..call };
                    let case =
                        format!("{rows} rows, {outputs} x {inputs}, {bytes} bytes, {warpgroup_products}, {halves}");
                    let shape = SkinnyDenseTma::new(&call, &parts(&call.weight, inputs), halves, &limits);
                    let Some(shape) = shape else {
                        // Shapes that need too many registers for a block, or have an odd number of steps that blocks
                        // cannot divide.
                        let is_long = rows > 16 && inputs > 10_240;
                        let is_odd = rows > 8 && inputs == 18_944 || rows > 16 && inputs == 4864;
                        let has_many_sums = rows > 8 && outputs == 262_144;
                        assert!(!warpgroup_products || is_long || is_odd || has_many_sums, "{case}: not taken");
                        assert!(bytes < 99 << 10 || inputs != 2560 || has_many_sums, "{case}: not taken");
                        continue;
                    };
                    assert!(shape.bytes <= bytes && shape.stages > 0, "{case}: {}", shape.bytes);
                    let Splits { splits, stretches, tiles } = shape.division;
                    assert_eq!(splits * shape.inputs, inputs, "{case}");
                    let registers = registers_of_x(shape.rows, shape.inputs / shape.warps);
                    let can_have_many = warpgroup_products || shape.warps < WARPS[0];
                    assert!(registers <= if can_have_many { MAX_REGISTERS } else { FEW_REGISTERS }, "{case}");
                    assert!(shape.rows >= rows, "{case}: {}", shape.rows);
                    assert!(TILE * (shape.segment * 2 + PADDING) <= STAGE, "{case}: {}", shape.segment);
                    assert!(shape.segment.is_multiple_of(shape.warps * STEP), "{case}: {}", shape.segment);
                    let all = if halves { outputs / 2 } else { outputs };
                    assert!(stretches <= all && stretches * splits <= 132, "{case}");
                    assert!(stretches * tiles * if halves { TILE / 2 } else { TILE } >= all, "{case}: {tiles}");
                }
            }
        }
    }

    /// Rows that registers do not hold are divided among blocks.
    #[test]
    fn long_rows_are_divided() {
        let splits = |rows, inputs, limits: &Limits| {
            let call = call(0, DType::BF16, [rows, 128, inputs], false);
            SkinnyDenseTma::new(&call, &parts(&call.weight, inputs), false, limits).map(|shape| shape.division.splits)
        };
        for (inputs, want) in [
            (256, [1, 1, 1]),
            (2048, [1, 1, 1]),
            (2560, [1, 1, 1]),
            (2816, [1, 1, 1]),
            (4096, [1, 1, 2]),
            (5376, [1, 1, 3]),
            (10_240, [1, 2, 4]),
        ] {
            assert_eq!([8, 16, 32].map(|rows| splits(rows, inputs, &H200)), want.map(Some), "{inputs} inputs");
        }
        let other = Limits { warpgroup_products: false, ..H200 };
        assert_eq!([8, 16, 32].map(|rows| splits(rows, 2560, &other)), [1, 1, 2].map(Some));
        assert_eq!([8, 16, 32].map(|rows| splits(rows, 10_240, &other)), [Some(2), Some(4), None]);
    }

    #[test]
    fn other_products_are_not_taken() {
        let is_taken = |rows, inputs, limits: &Limits| {
            let call = call(0, DType::BF16, [rows, 128, inputs], false);
            SkinnyDenseTma::new(&call, &parts(&call.weight, inputs), false, limits).is_some()
        };
        assert!(is_taken(1, 4096, &H200) && is_taken(32, 4096, &H200) && !is_taken(33, 4096, &H200));
        assert!(!is_taken(8, 4128, &H200) && !is_taken(32, 14_336, &H200) && !is_taken(8, 65_536, &H200));
        assert!(!is_taken(8, 4096, &Limits { clusters: false, ..H200 }));
    }
}
