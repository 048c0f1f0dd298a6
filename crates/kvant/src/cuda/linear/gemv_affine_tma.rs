//! Products of affine codes with one row, by bulk copies.

use super::{LinearArgs, LinearKernel, LinearParams, warp_tiling::TILE};
use crate::cuda::{affine::Parts, headers};
use crate::{
    Result,
    cuda::{WARP, blocks_per_multiprocessor},
    gpu::{Builder, Launch, Limits, Params, Source},
    ops::linear::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "linear_gemv_affine_tma.cu",
    text: include_str!("linear_gemv_affine_tma.cu"),
    headers: headers::ALL,
    layouts: &[LinearParams::layout],
};

/// Maximum warps of a block that multiply.
const WARPS: usize = 8;
/// Inputs of a span: `SPAN` of `integer_products.h`.
const SPAN: usize = 128;
/// Maximum and minimum stages of W in flight for a block that has a multiprocessor to itself. With codes of 4 and 6
/// bits the maximum is one less if a warp has several parts of x.
const STAGES: usize = 5;
const FEWEST_STAGES: usize = 3;
/// Maximum bytes of W per block if the multiprocessor also has a block of the next launch. While a block computes, half
/// of the next one's W is fetched to shared memory, and half to L2. Fetching all of it to shared memory would delay the
/// end of the previous kernel.
const SHORT: usize = 100 << 10;
/// With codes of 8 bits a block has at most SHORT or at least LONG bytes of W: between the two,
/// `linear_gemv_affine_int8` is as fast and runs instead. It also runs for codes of 6 bits above SHORT if a quarter of
/// the multiprocessors would be idle.
const LONG: usize = 160 << 10;

/// How the work is divided: a block's tiles of outputs, and a warp's spans of inputs at a time.
#[derive(Clone, Copy)]
pub(super) struct GemvAffineTma {
    tiles: usize,
    spans: usize,
    warps: usize,
    stages: usize,
    /// Stages that are copied before the previous kernel has ended, and further ones that are prefetched to L2.
    ahead: [usize; 2],
    /// Blocks that run on a multiprocessor at the same time.
    resident_blocks: usize,
    /// Shared memory of a block.
    bytes: usize,
}

impl GemvAffineTma {
    /// `None` if the kernel does not support the product on this device. `linear_gemv_affine_int8` supports every
    /// product that this kernel supports.
    pub(super) fn new(call: &Call, weight: &Parts, limits: &Limits) -> Option<GemvAffineTma> {
        let (Some(scales), Some(biases)) = (weight.scales, weight.biases) else { return None };
        let (inputs, outputs) = (call.dims.inputs, call.dims.outputs);
        // The unit in which a row's scales are copied.
        let factors = if (inputs / weight.group as usize * weight.dtype.size()).is_multiple_of(16) { 16 } else { 8 };
        let aligned = weight.weight.byte_offset().is_multiple_of(16)
            && [scales, biases].into_iter().all(|tensor| tensor.byte_offset().is_multiple_of(factors));
        let whole = outputs > 0 && outputs.is_multiple_of(TILE);
        if !limits.clusters || call.rows != 1 || call.experts.is_some() || !aligned || !whole {
            return None;
        }
        let tiles = (outputs / TILE).div_ceil(limits.busy_groups);
        let bytes = tiles * TILE * inputs / 8 * weight.bits as usize;
        let short = bytes <= SHORT;
        let idle = outputs / TILE * 4 <= limits.busy_groups * tiles * 3;
        if !short && (weight.bits == 8 && bytes < LONG || weight.bits == 6 && tiles > 1 && idle) {
            return None;
        }
        // A warp has four spans at a time if its registers can hold their scales. With codes of 6 bits, all warps must
        // also have work.
        let few = weight.group >= 64 && weight.dtype.size() == 2;
        // If a stage holds whole rows of W, it holds their scales, too, and scales need no memory of their own: there
        // is room for more stages.
        let whole_rows: &[usize] = if weight.bits == 4 && few && !short { &[4, 5, 6, 7] } else { &[] };
        let is_whole = |&&spans: &&usize| chunks(inputs, spans).is_some_and(|(chunks, _)| chunks == 1);
        let spans: &[usize] = match weight.bits {
            4 if few && !short => &[4, 3],
            4 if few => &[4, 2],
            6 if few && !short && chunks(inputs, 4) == Some((1, WARPS)) => &[4, 2],
            8 if few && !short => &[2, 4],
            _ => &[2],
        };
        let shape = |&spans: &usize| {
            let (chunks, _) = chunks(inputs, spans)?;
            if !takes_factors(weight, inputs, spans) {
                return None;
            }
            let items = tiles * chunks;
            let of = |stages| tiling_of(weight, inputs, [tiles, spans, stages]);
            if short {
                let two = |shape: &GemvAffineTma| blocks_per_multiprocessor(shape.bytes, limits) >= 2;
                let shape = (1..=items).rev().filter_map(of).find(two)?;
                let ahead = items.div_ceil(2).min(shape.stages);
                return Some(GemvAffineTma { ahead: [ahead, items - ahead], resident_blocks: 2, ..shape });
            }
            let most = if chunks == 1 || weight.bits == 8 { STAGES } else { STAGES - 1 };
            let fits = |shape: &GemvAffineTma| shape.bytes <= limits.threadgroup_bytes;
            (FEWEST_STAGES.min(items)..=most.min(items)).rev().filter_map(of).find(fits)
        };
        whole_rows.iter().filter(is_whole).chain(spans).find_map(shape)
    }
}

impl LinearKernel for GemvAffineTma {
    fn name(&self) -> &'static str {
        "linear_gemv_affine_tma"
    }

    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()> {
        let LinearArgs { call, weight, params } = *args;
        let launch = weight
            .bind(Launch::new(NAME, &SOURCE, self.name()), call)
            .constant("INPUTS", params.inputs)
            .constant("TILES", self.tiles as u32)
            .constant("SPANS", self.spans as u32)
            .constant("WARPS", self.warps as u32)
            .constant("STAGES", self.stages as u32)
            .constant("AHEAD", self.ahead[0] as u32)
            .constant("AHEAD_L2", self.ahead[1] as u32)
            .constant("RESIDENT_BLOCKS", self.resident_blocks as u32)
            .constant("SHARED_BYTES", self.bytes as u32)
            .params(6, params)
            .threadgroup_memory(self.bytes)
            .grid([call.dims.outputs.div_ceil(TILE * self.tiles), 1, 1], [(self.warps + 1) * WARP, 1, 1])
            .reads_ahead(&[1, 2, 3]);
        b.push(launch)
    }
}

/// Whether rows of scales can be copied 8 or 16 bytes at a time. Lanes read scales in words, or in 16 bytes if a part
/// is a multiple of 16 bytes.
fn takes_factors(weight: &Parts, inputs: usize, spans: usize) -> bool {
    let row = inputs / weight.group as usize * weight.dtype.size();
    let of_part = spans * (SPAN / weight.group as usize).max(1) * weight.dtype.size();
    of_part.is_multiple_of(4) && row.is_multiple_of(if of_part.is_multiple_of(16) { 16 } else { 8 })
}

/// The parts of a row, of `spans` spans, that a warp has, and the number of warps. None if the row is not a whole
/// number of parts.
fn chunks(inputs: usize, spans: usize) -> Option<(usize, usize)> {
    let parts = inputs / (spans * SPAN);
    if parts == 0 || !inputs.is_multiple_of(spans * SPAN) {
        return None;
    }
    let chunks = parts.div_ceil(WARPS);
    Some((chunks, parts.div_ceil(chunks)))
}

/// The tiling with `tiles` tiles, `spans` spans and `stages` stages.
fn tiling_of(weight: &Parts, inputs: usize, [tiles, spans, stages]: [usize; 3]) -> Option<GemvAffineTma> {
    let bits = weight.bits as usize;
    let (chunks, warps) = chunks(inputs, spans)?;
    let pitch = (warps * spans * SPAN / 8 * bits).next_multiple_of(128) + if bits == 6 { 32 } else { 16 };
    let row = inputs / weight.group as usize * weight.dtype.size();
    let factors = TILE * (row + if (row / 16).is_multiple_of(2) { 16 } else { 0 });
    let slots = if chunks == 1 { stages } else { tiles };
    let digits = spans * if bits == 4 { 128 } else { 3 * 36 + 4 } * 4;
    let sums = tiles * TILE * size_of::<f32>();
    let bytes = stages * TILE * pitch + slots * 2 * factors + warps * (digits + sums) + stages * 16;
    Some(GemvAffineTma { tiles, spans, warps, stages, ahead: [stages, 0], resident_blocks: 1, bytes })
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
        let mut taken = 0;
        for bytes in [48 << 10, 99 << 10, 227 << 10] {
            let limits = Limits { threadgroup_bytes: bytes, ..H200 };
            for call in calls() {
                let weight = parts(&call.weight, call.dims.inputs);
                if weight.bits == 0 {
                    continue;
                }
                let case = format!("{} bits, {:?}, {}, {bytes} bytes", weight.bits, call.x.shape(), call.x.dtype());
                let Some(shape) = GemvAffineTma::new(&call, &weight, &limits) else { continue };
                taken += 1;
                assert!(shape.bytes * shape.resident_blocks <= bytes, "{case}: {}", shape.bytes);
                assert!(shape.ahead[0] <= shape.stages && shape.stages > 0, "{case}");
                // Every warp has spans.
                let parts = call.dims.inputs / (shape.spans * SPAN);
                assert!(
                    shape.warps <= WARPS.min(parts) && parts.div_ceil(shape.warps) == parts.div_ceil(WARPS),
                    "{case}"
                );
            }
        }
        assert!(taken > 0);
    }

    #[test]
    fn devices_before_hopper_have_no_bulk_copies() {
        let limits = Limits { clusters: false, ..H200 };
        let none = |call: &Call| GemvAffineTma::new(call, &parts(&call.weight, call.dims.inputs), &limits).is_none();
        assert!(calls().all(|call| none(&call)));
    }
}
