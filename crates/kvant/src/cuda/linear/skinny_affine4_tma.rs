//! Products of affine codes of 4 bits with few rows, or few rows of each expert, by bulk copies and on tensor cores.

use super::{
    LinearArgs, LinearKernel, LinearParams, aligned16,
    gating::Gating,
    gemm_affine::{MAX_EXPERTS, max_tiles, sort},
    out_parts::{MAX_PARTS, OutParts},
    splits::{SPLITS, Splits},
    warp_tiling::TILE,
};
use crate::cuda::{affine::Parts, headers};
use crate::{
    DType, Result,
    cuda::WARP,
    gpu::{Builder, Launch, Limits, Params, Source, Use, params},
    ops::linear::{Call, NAME},
};

params! {
    pub(crate) struct SkinnyAffine4TmaParams {
        pub linear: LinearParams,
        pub row_tiles: u32,
        pub max_tiles: u32,
        pub parts: OutParts,
    }
}

static SOURCE: Source = Source {
    name: "linear_skinny_affine4_tma.cu",
    text: include_str!("linear_skinny_affine4_tma.cu"),
    headers: headers::ALL,
    layouts: &[LinearParams::layout, OutParts::layout, SkinnyAffine4TmaParams::layout],
};

/// Maximum rows of x, or of a tile of an expert.
const ROWS: usize = 8;
/// Maximum rows of experts that are not sorted: each row is a tile. With few rows, an expert rarely has several; if it
/// has, its weights are read again from the level-2 cache. The maximum is a quarter of the experts if that is more.
const ALONE: usize = 8;
const EXPERTS_PER_ROW: usize = 4;
/// Inputs that a warp multiplies in a step.
const BLOCK: usize = 64;
/// Maximum warps of a block that multiply. `STEPS`: pairs of a number of warps and the maximum steps of a warp. A lane
/// needs eight registers for x per step, and has more registers if the block has fewer warps. Two more warps copy and
/// add.
const WARPS: usize = 16;
const STEPS: [(usize, usize); 2] = [(10, 14), (WARPS, 8)];
/// Maximum `BLOCK`s of inputs of a short row. A single warp multiplies a tile of short rows.
const SHORT: usize = 12;
/// Warps that take tiles of short rows in turn.
const TEAMS: usize = 8;
/// Maximum and minimum tiles of W in flight.
const STAGES: usize = 24;
const FEWEST_STAGES: usize = 2;
/// Maximum tiles whose sums are in shared memory.
const SLOTS: usize = 2;

/// How the work is divided.
#[derive(Clone, Copy)]
pub(super) struct SkinnyAffine4Tma {
    division: Splits,
    /// Tiles of rows, and whether they have one row each.
    row_tiles: usize,
    alone: bool,
    teams: usize,
    warps: usize,
    /// Blocks of inputs of a warp.
    steps: usize,
    stages: usize,
    /// Shared memory of a block.
    bytes: usize,
}

impl SkinnyAffine4Tma {
    /// `None` if the kernel does not support the product on this device.
    pub(super) fn new(call: &Call, weight: &Parts, limits: &Limits) -> Option<SkinnyAffine4Tma> {
        let (Some(scales), Some(biases)) = (weight.scales, weight.biases) else { return None };
        let (inputs, outputs) = (call.dims.inputs, call.dims.outputs);
        let group = weight.group as usize;
        let max_alone = ALONE.max(call.dims.experts / EXPERTS_PER_ROW);
        let alone = call.experts.is_some() && (1..=max_alone).contains(&call.rows);
        let has_few_rows = match call.experts {
            // Twice the mean number of rows of an expert, so that most experts need one tile.
            Some(_) => {
                let rows = 2 * call.rows.div_ceil(call.dims.experts.max(1));
                (alone || call.rows > 0 && rows <= ROWS) && outputs.is_multiple_of(TILE)
            }
            None => (2..=ROWS).contains(&call.rows),
        };
        let takes = limits.clusters
            && has_few_rows
            && call.dims.experts <= MAX_EXPERTS
            && weight.bits == 4
            && matches!(group, 64 | 128)
            && weight.dtype.size() == 2
            && call.x.dtype() == DType::BF16
            && [weight.weight, scales, biases].iter().all(|tensor| tensor.byte_offset().is_multiple_of(16))
            && aligned16(&call.x, inputs)
            && inputs.is_multiple_of(BLOCK)
            && inputs > 0
            && outputs > 0
            && call.parts.len() <= MAX_PARTS;
        if !takes {
            return None;
        }
        (1..=SPLITS).find_map(|splits| {
            let blocks = inputs / BLOCK / splits;
            let factors = blocks * BLOCK / group * 2;
            // Bulk copies are multiples of 16 bytes. If the scales of a row are not, those of 2, 4 or 8 whole rows,
            // which are contiguous, are copied together.
            let aligned_rows = [1, 2, 4, 8].into_iter().find(|rows| (rows * factors).is_multiple_of(16))?;
            let whole = inputs.is_multiple_of(splits * BLOCK) && (blocks * BLOCK).is_multiple_of(group);
            let codes = blocks * BLOCK / 2;
            let odd = codes % 64 == 32;
            let can_split = aligned_rows == 1 && !odd && call.experts.is_none();
            if !whole || splits > 1 && !can_split || !outputs.is_multiple_of(aligned_rows) {
                return None;
            }
            let max_steps =
                |warps: usize| STEPS.iter().find(|&&(most, _)| warps <= most).map_or(0, |&(_, steps)| steps);
            let divides = |&warps: &usize| blocks.is_multiple_of(warps) && blocks / warps <= max_steps(warps);
            let teams = if blocks <= SHORT && splits == 1 { TEAMS } else { 1 };
            let warps = if teams > 1 { 1 } else { (1..=WARPS).rev().find(divides)? };
            let row_tiles = if alone { call.rows } else { max_tiles(call, ROWS) };
            let (units, of_unit) = match call.experts {
                Some(_) => (row_tiles.checked_mul(outputs / TILE)?, TILE),
                None => (outputs / aligned_rows, aligned_rows),
            };
            let stretches = units.min(limits.busy_groups / splits).max(1);
            let tiles = (units.div_ceil(stretches) * of_unit).div_ceil(TILE);
            let factor_pitch = factors + if aligned_rows == 1 { 16 } else { 0 };
            let pitch = if odd { codes } else { codes.next_multiple_of(128) + 32 };
            let stage = TILE * (pitch + 2 * factor_pitch);
            let bytes = |stages: usize| {
                let sums = teams * blocks * ROWS * 4 + SLOTS * warps * TILE * ROWS * 4;
                stages * stage.next_multiple_of(128) + sums + (stages + SLOTS) * 16 + 16
            };
            let fits = |&stages: &usize| bytes(stages) <= limits.threadgroup_bytes;
            // Teams have their own stages.
            let most = tiles.min(STAGES).next_multiple_of(teams);
            let stages =
                (FEWEST_STAGES.min(most)..=most).rev().filter(|stages| stages.is_multiple_of(teams)).find(fits)?;
            let (steps, bytes) = (blocks / warps, bytes(stages));
            let division = Splits { splits, stretches, tiles };
            Some(SkinnyAffine4Tma { division, row_tiles, alone, teams, warps, steps, stages, bytes })
        })
    }

    fn push(&self, args: &LinearArgs, gating: Gating, b: &mut Builder) -> Result<()> {
        let LinearArgs { call, weight, params } = *args;
        let uint = |value| Launch::uint(NAME, "out", value);
        let sorted = if self.alone { None } else { sort(call, params, [self.row_tiles, ROWS], b)? };
        let inputs = params.inputs;
        let params = SkinnyAffine4TmaParams {
            linear: *params,
            row_tiles: uint(self.row_tiles)?,
            max_tiles: uint(self.division.tiles)?,
            parts: OutParts::of(call)?,
        };
        let launch = gating
            .bind(Launch::new(NAME, &SOURCE, self.name()), 7)
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("W_DTYPE", weight.dtype)
            .constant("GROUP", weight.group)
            .constant("INPUTS", inputs / self.division.splits as u32)
            .constant("SPLITS", self.division.splits as u32)
            .constant("EXPERTS", call.experts.is_some())
            .constant("ALONE", self.alone)
            .constant("TEAMS", self.teams as u32)
            .constant("WARPS", self.warps as u32)
            .constant("STEPS", self.steps as u32)
            .constant("STAGES", self.stages as u32)
            .constant("SHARED_BYTES", self.bytes as u32)
            .read(0, &call.x)
            .read(1, weight.weight)
            .read_if(2, weight.scales)
            .read_if(3, weight.biases)
            .write(4, &call.out)
            .params(5, &params)
            .threadgroup_memory(self.bytes)
            .grid(
                [self.division.blocks(), 1, 1],
                [(self.teams * self.warps + if self.warps > 1 { 2 } else { 1 }) * WARP, 1, 1],
            );
        // Experts are written by a kernel before this one.
        if let Some([experts, order]) = &sorted {
            return b.push(launch.scratch(9, experts, Use::Read).scratch(10, order, Use::Read));
        }
        if let Some(ids) = &call.experts {
            return b.push(launch.read(9, ids));
        }
        self.division.push(launch.reads_ahead(&[1, 2, 3]), 6, ROWS, b)
    }
}

impl LinearKernel for SkinnyAffine4Tma {
    fn name(&self) -> &'static str {
        "linear_skinny_affine4_tma"
    }

    fn writes_parts(&self) -> bool {
        true
    }

    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()> {
        self.push(args, Gating::None, b)
    }

    /// With experts, gates whose factors are results of the product.
    fn build_gated(&self, args: &LinearArgs, gating: Gating, b: &mut Builder) -> Result<bool> {
        let takes = args.call.experts.is_some() && gating.is_halves();
        if takes {
            self.push(args, gating, b)?;
        }
        Ok(takes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{
        affine::parts,
        linear::skinny_mma::tests::{H200, affine, call},
    };

    fn tiling(rows: usize, outputs: usize, inputs: usize, limits: &Limits) -> Option<SkinnyAffine4Tma> {
        let mut call = call(4, DType::BF16, [rows, outputs, inputs], false);
        call.weight = affine([outputs, inputs], 4, 64, DType::BF16);
        SkinnyAffine4Tma::new(&call, &parts(&call.weight, inputs), limits)
    }

    #[test]
    fn a_block_fits_into_what_devices_have() {
        for bytes in [48 << 10, 99 << 10, 227 << 10] {
            let limits = Limits { threadgroup_bytes: bytes, ..H200 };
            for inputs in [64, 704, 2112, 2816, 4096, 5376, 8192, 16_384, 21_504] {
                for outputs in [8, 128, 4224, 8192, 262_144] {
                    let case = format!("{outputs} x {inputs}, {bytes} bytes");
                    let Some(shape) = tiling(8, outputs, inputs, &limits) else {
                        assert!(bytes < 227 << 10, "{case}: not taken");
                        continue;
                    };
                    assert!(shape.bytes <= bytes && shape.stages > 0, "{case}: {}", shape.bytes);
                    let Splits { splits, stretches, tiles } = shape.division;
                    assert_eq!(splits * shape.warps * shape.steps * BLOCK, inputs, "{case}");
                    assert!(shape.stages.is_multiple_of(shape.teams), "{case}: {}", shape.stages);
                    assert!(stretches <= outputs && stretches * splits <= 132, "{case}");
                    assert!(stretches * tiles * TILE >= outputs, "{case}: {tiles}");
                }
            }
        }
    }

    #[test]
    fn other_products_are_not_taken() {
        let is_taken = |rows, outputs, inputs, limits: &Limits| tiling(rows, outputs, inputs, limits).is_some();
        assert!(is_taken(2, 4096, 4096, &H200) && is_taken(8, 4096, 4096, &H200));
        assert!(!is_taken(1, 4096, 4096, &H200) && !is_taken(9, 4096, 4096, &H200));
        // 66 bytes of scales a row; more inputs than registers hold.
        assert!(is_taken(8, 4096, 2112, &H200) && !is_taken(8, 4100, 2112, &H200));
        assert!(!is_taken(8, 4096, 65_536, &H200));
        assert!(!is_taken(8, 4096, 4096, &Limits { clusters: false, ..H200 }));
    }
}
