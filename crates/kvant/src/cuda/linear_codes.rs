//! Products of affine codes with one row or two, on integer tensor cores: see `linear_codes.cu`.

use super::{affine::Parts, headers, linear::LinearParams};
use crate::{
    Result, Tensor,
    cuda::WARP,
    gpu::{Builder, Launch, Limits, Params, Source},
    ops::linear::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "linear_codes.cu",
    text: include_str!("linear_codes.cu"),
    headers: headers::LINEAR_ROWS,
    layouts: &[LinearParams::layout],
};

/// The most rows that a block takes: x becomes bytes again in every block.
const TOKENS: usize = 2;
/// Warps of a block.
const WARPS: usize = 8;
/// Inputs of a row from which on twice as many warps share it.
const LONG: usize = 8192;
/// Tiles of a block, at most.
const TILES: usize = 7;
/// Outputs of a tile, and inputs of a span, as `linear_codes.cu` has them.
const TILE: usize = 16;
const SPAN: usize = 128;

/// How a launch shares its work.
struct Shape {
    tokens: usize,
    tiles: usize,
    stages: usize,
    warps: usize,
    vector: usize,
    bytes: usize,
}

/// Whether the kernel takes these rows, which `linear_rows` would.
pub(super) fn suits(call: &Call, weight: &Parts) -> bool {
    weight.bits != 0 && (call.rows <= TOKENS || call.experts.is_some())
}

impl Shape {
    /// As many outputs for a block as leave one to each multiprocessor, so that all have as much to do; or what needs less
    /// shared memory, where there is little.
    fn new(call: &Call, weight: &Parts, limits: &Limits) -> Shape {
        let tiles =
            if call.experts.is_some() { 1 } else { call.dims.outputs.div_ceil(TILE).div_ceil(limits.busy_groups) };
        let tiles = tiles.clamp(1, TILES);
        let with = |tiles, warps, stages| Shape::with(call, weight, [tiles, warps, stages]);
        let fits = |shape: &Shape| shape.bytes <= limits.threadgroup_bytes;
        // Long rows need more warps, so that a warp's part is soon done.
        let warps = if call.dims.inputs >= LONG { 2 * WARPS } else { WARPS };
        // Few tiles leave room for more of them on their way.
        let stages = if tiles <= 2 { 3 } else { 2 };
        let wanted = [(warps, stages), (warps, 2), (WARPS, stages), (WARPS, 2), (6, 2), (4, 2)];
        let wanted = wanted.into_iter().map(|(warps, stages)| with(tiles, warps, stages));
        let smaller = [(tiles.min(2), 4), (1, 4), (1, 2)].into_iter().map(|(t, w)| with(t, w, 2));
        wanted.chain(smaller).find(fits).unwrap_or_else(|| with(1, 1, 2))
    }

    /// With so many tiles, warps at most, and stages.
    fn with(call: &Call, weight: &Parts, [tiles, most_warps, stages]: [usize; 3]) -> Shape {
        let groups = (SPAN / weight.group as usize).max(1);
        // With codes of 8 bits it is the kernel of two rows that keeps up with the memory, also for one.
        let least = if weight.bits == 8 { TOKENS } else { 1 };
        let tokens = if call.experts.is_some() { 1 } else { call.rows.clamp(least, TOKENS) };
        let spans = call.dims.inputs.div_ceil(SPAN);
        // No more rounds than with all of them, and no warp without a part.
        let warps = spans.div_ceil(spans.div_ceil(most_warps));
        let stages = stages.min(spans.div_ceil(warps)).max(2);
        let stage = 2 * tiles * 4 * weight.bits as usize * WARP + tokens * SPAN * call.x.dtype().size();
        let vector = weight.scales.map_or(1, |scales| {
            let rows = call.dims.inputs / weight.group as usize;
            let offsets = [Some(scales), weight.biases].into_iter().flatten().map(Tensor::byte_offset);
            let size = scales.dtype().size();
            let fits = |n: usize| rows.is_multiple_of(n) && offsets.clone().all(|o| o.is_multiple_of(n * size));
            [8, 4, 2, 1].into_iter().find(|&n| n * size <= 16 && fits(n)).unwrap_or(1)
        });
        let kept = vector.max(groups);
        let periods = 1 + stages.div_ceil(kept / groups);
        let factors = periods * tiles * WARP * kept * weight.dtype.size();
        let digits = (tokens * 3 * 36 + 8) * 4;
        let sums = TILE * tiles * tokens * size_of::<f32>();
        let room = (stages * stage + factors + digits).next_multiple_of(16);
        Shape { tokens, tiles, stages, warps, vector, bytes: warps * (room + sums) }
    }
}

pub(super) fn build(call: &Call, weight: &Parts, params: &LinearParams, b: &mut Builder) -> Result<()> {
    let Call { x, dims, experts: ids, out, rows, .. } = call;
    let shape = Shape::new(call, weight, &b.limits);
    let launch = Launch::new(NAME, &SOURCE, "linear_codes")
        .constant("TOKENS", shape.tokens as u32)
        .constant("TILES", shape.tiles as u32)
        .constant("STAGES", shape.stages as u32)
        .constant("WARPS", shape.warps as u32)
        .constant("VECTOR", shape.vector as u32)
        .constant("W_ALIGNED", weight.aligned && (dims.inputs / 32 * weight.bits as usize).is_multiple_of(4))
        .constant("WHOLE", dims.inputs.is_multiple_of(SPAN))
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
mod tests {
    use super::*;
    use crate::cuda::{
        affine::parts,
        linear_rows::tests::{H200, calls},
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
                let shape = Shape::new(&call, &weight, &limits);
                let case = format!("{} bits, {:?}, {}, {bytes} bytes", weight.bits, call.x.shape(), call.x.dtype());
                assert!(shape.bytes <= bytes, "{case}: {}", shape.bytes);
                // Every warp has a part, of all that there is.
                let spans = call.dims.inputs.div_ceil(SPAN);
                assert!((shape.warps - 1) * spans.div_ceil(shape.warps) < spans, "{case}: {} warps", shape.warps);
                tiles = tiles.max(shape.tiles);
            }
            assert!(bytes != H200.threadgroup_bytes || tiles > 1);
        }
    }
}
