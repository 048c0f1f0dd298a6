//! Products of affine codes with one or two rows, or with few rows of experts, on integer tensor cores.

use super::{
    LinearArgs, LinearKernel, LinearParams,
    gating::Gating,
    warp_tiling::{TILE, WarpTiling, vector},
};
use crate::cuda::{affine::Parts, headers};
use crate::{
    Result,
    cuda::{WARP, blocks_per_multiprocessor},
    gpu::{Builder, Launch, Limits, Params, Source},
    ops::linear::Call,
};

static SOURCE: Source = Source {
    name: "linear_gemv_affine_int8.cu",
    text: include_str!("linear_gemv_affine_int8.cu"),
    headers: headers::ALL,
    layouts: &[LinearParams::layout],
};

/// Maximum rows of a block. Every block converts x to bytes again.
const TOKENS: usize = 2;
/// Warps of a block.
const WARPS: usize = 8;
/// Minimum inputs of rows that twice the warps divide.
const LONG: usize = 8192;
/// Maximum tiles of a block.
const TILES: usize = 7;
/// Tiles of a block of experts: the first number that leaves a block for each multiprocessor, otherwise one.
const EXPERT_TILES: [usize; 2] = [4, 2];
/// Tiles and warps of a block if there are very many tiles: five warps if these have equal parts and two blocks fit,
/// otherwise four.
const SMALL: usize = 4;
const SMALL_WARPS: [usize; 2] = [5, 4];
/// Inputs of a span, as `linear_gemv_affine_int8.cu` has them.
const SPAN: usize = 128;
/// Maximum spans of x that a warp converts to integers together.
const DEPTH: usize = 8;

/// How the work is divided.
pub(super) struct GemvAffineInt8(WarpTiling);

/// Whether the kernel is faster than `linear_skinny_mma`, whose alignments it requires.
fn suits(call: &Call, weight: &Parts) -> bool {
    weight.bits != 0 && (call.rows <= TOKENS || call.experts.is_some())
}

/// The tiling that gives every multiprocessor one block, so that all have equal work; a smaller tiling if shared memory
/// is too small for it.
fn tiling(call: &Call, weight: &Parts, limits: &Limits) -> WarpTiling {
    let tiles = if call.experts.is_some() {
        let enough = |tiles: &usize| call.dims.outputs.div_ceil(TILE * tiles) * call.rows >= limits.busy_groups;
        EXPERT_TILES.into_iter().find(enough).unwrap_or(1)
    } else {
        call.dims.outputs.div_ceil(TILE).div_ceil(limits.busy_groups)
    };
    let with = |tiles, warps, stages| tiling_of(call, weight, [tiles, warps, stages]);
    let fits = |tiling: &WarpTiling| tiling.bytes <= limits.threadgroup_bytes;
    // If every multiprocessor runs many blocks, small blocks overlap: some begin or end while others run.
    let [more, small] = SMALL_WARPS.map(|warps| with(SMALL, warps, if weight.bits == 4 { 4 } else { 2 }));
    let even = call.dims.inputs.div_ceil(SPAN).is_multiple_of(SMALL_WARPS[0]);
    let small = if even && blocks_per_multiprocessor(more.bytes, limits) >= 2 { more } else { small };
    if tiles > 4 * TILES && fits(&small) {
        return small;
    }
    let mut tiles = tiles.clamp(1, TILES);
    if weight.bits == 6 && tiles > 3 {
        // Codes of 6 bits need more instructions: two blocks at a time, with half the tiles each.
        tiles = tiles.div_ceil(2);
        let two = [WARPS, WARPS / 2].map(|warps| with(tiles, warps, 2));
        if let Some(shape) = two.into_iter().find(|shape| blocks_per_multiprocessor(shape.bytes, limits) >= 2) {
            return shape;
        }
    }
    // Long rows need more warps, so that a warp's part is short.
    let warps = if call.dims.inputs >= LONG { 2 * WARPS } else { WARPS };
    // Few tiles leave room for more stages.
    let stages = if tiles <= 2 { 3 } else { 2 };
    let wanted = [(warps, stages), (warps, 2), (WARPS, stages), (WARPS, 2), (4, 2)];
    let wanted = wanted.into_iter().map(|(warps, stages)| with(tiles, warps, stages));
    let smaller = [(tiles.min(2), 4), (1, 4), (1, 2)].into_iter().map(|(t, w)| with(t, w, 2));
    wanted.chain(smaller).find(fits).unwrap_or_else(|| with(1, 1, 2))
}

/// Spans of x that each of `warps` warps converts to integers together.
fn depth(call: &Call, warps: usize) -> usize {
    call.dims.inputs.div_ceil(SPAN).div_ceil(warps).clamp(1, DEPTH)
}

/// The tiling with `tiles` tiles, at most `warps` warps, and `stages` stages.
fn tiling_of(call: &Call, weight: &Parts, [tiles, max_warps, stages]: [usize; 3]) -> WarpTiling {
    let groups = (SPAN / weight.group as usize).max(1);
    let tokens = if call.experts.is_some() { 1 } else { call.rows.clamp(1, TOKENS) };
    let spans = call.dims.inputs.div_ceil(SPAN);
    let vector = vector(weight, call.dims.inputs, |_| true);
    let kept = vector.max(groups);
    // The number of rounds is that of all warps, and no warp is without a part. Parts become whole periods of scales if
    // that makes them at most a quarter longer, so that no scale is fetched twice. Codes of 6 bits are faster with all
    // warps.
    let part = spans.div_ceil(max_warps);
    let whole = part.next_multiple_of(kept / groups);
    let better = weight.bits != 6 && whole <= part + part / 4 && spans.is_multiple_of(whole);
    let warps = spans.div_ceil(if better { whole } else { part });
    let stages = stages.min(spans.div_ceil(warps)).max(2);
    let stage = 2 * tiles * 4 * weight.bits as usize * WARP;
    let periods = 1 + stages.div_ceil(kept / groups);
    let factors = periods * tiles * WARP * kept * weight.dtype.size();
    let digits = depth(call, warps) * (tokens * 3 * 36 + 12) * 4;
    let sums = TILE * tiles * tokens * size_of::<f32>();
    let room = (stages * stage + factors + digits).next_multiple_of(16);
    WarpTiling { tokens, tiles, stages, warps, vector, bytes: warps * (room + sums) }
}

impl GemvAffineInt8 {
    /// `None` if the kernel does not support the product. `linear_skinny_mma` supports every product that this kernel
    /// supports.
    pub(super) fn new(call: &Call, weight: &Parts, limits: &Limits) -> Option<GemvAffineInt8> {
        suits(call, weight).then(|| GemvAffineInt8(tiling(call, weight, limits)))
    }

    fn launch(&self, args: &LinearArgs, gating: Gating) -> Launch {
        let LinearArgs { call, weight, params } = *args;
        gating
            .bind(self.0.launch(&SOURCE, self.name(), call, weight, params), 7)
            .constant("DEPTH", depth(call, self.0.warps) as u32)
            .constant("W_ALIGNED", weight.aligned && (call.dims.inputs / 32 * weight.bits as usize).is_multiple_of(4))
            .constant("WHOLE", call.dims.inputs.is_multiple_of(SPAN))
    }
}

impl LinearKernel for GemvAffineInt8 {
    fn name(&self) -> &'static str {
        "linear_gemv_affine_int8"
    }

    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()> {
        b.push(self.launch(args, Gating::None))
    }

    /// Every gate with one row; with more rows, gates whose factors are results of the product.
    fn build_gated(&self, args: &LinearArgs, gating: Gating, b: &mut Builder) -> Result<bool> {
        let takes = args.call.rows == 1 || gating.is_halves();
        if takes {
            b.push(self.launch(args, gating))?;
        }
        Ok(takes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{
        affine::parts,
        linear::skinny_mma::tests::{H200, calls},
    };

    #[test]
    fn a_block_fits_into_what_devices_have() {
        for bytes in [48 << 10, 99 << 10, 163 << 10, 227 << 10] {
            let limits = Limits { threadgroup_bytes: bytes, ..H200 };
            let mut tiles = 0;
            for call in calls() {
                let weight = parts(&call.weight, call.dims.inputs);
                if !suits(&call, &weight) {
                    continue;
                }
                let shape = tiling(&call, &weight, &limits);
                let case = format!("{} bits, {:?}, {}, {bytes} bytes", weight.bits, call.x.shape(), call.x.dtype());
                assert!(shape.bytes <= bytes, "{case}: {}", shape.bytes);
                // Every warp has spans.
                let spans = call.dims.inputs.div_ceil(SPAN);
                assert!((shape.warps - 1) * spans.div_ceil(shape.warps) < spans, "{case}: {} warps", shape.warps);
                tiles = tiles.max(shape.tiles);
            }
            assert!(bytes != H200.threadgroup_bytes || tiles > 1);
        }
    }
}
