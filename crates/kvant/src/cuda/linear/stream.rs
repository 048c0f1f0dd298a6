//! Products of a dense 16-bit weight with one row, by bulk copies.

use super::{LinearParams, aligned16, gating::Gating};
use crate::cuda::{affine::Parts, headers};
use crate::{
    DType,
    cuda::{WARP, blocks_per_multiprocessor},
    gpu::{Launch, Limits, Params, Source},
    ops::linear::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "linear_stream.cu",
    text: include_str!("linear_stream.cu"),
    headers: headers::ALL,
    layouts: &[LinearParams::layout],
};

/// Warps of a block that multiply.
const WARPS: usize = 8;
/// Inputs that a warp reads at a time.
const PIECE: usize = 256;
/// Bytes of a stage, at most, and about as many where rows are short.
const STAGE: usize = 40 << 10;
/// The most rows of a warp in a stage.
const PER_WARP: usize = 4;
/// The most stages in flight, and the fewest of a block that has more to do.
const STAGES: usize = 6;
const FEWEST_STAGES: usize = 2;

/// The most stages for which there is room, for a block of so many stages in all, and the shared memory that it then
/// has. None if there is too little.
pub(super) fn most_stages(items: usize, limits: &Limits, bytes: impl Fn(usize) -> usize) -> Option<(usize, usize)> {
    let stages = FEWEST_STAGES.min(items)..=STAGES.min(items);
    stages.rev().map(|stages| (stages, bytes(stages))).find(|&(_, bytes)| bytes <= limits.threadgroup_bytes)
}

/// How the work is divided.
#[derive(Clone, Copy)]
pub(super) struct StreamTiling {
    /// Rows of a warp in a stage.
    per_warp: usize,
    /// Inputs of a stage.
    segment: usize,
    stages: usize,
    blocks: usize,
    /// Blocks of a multiprocessor.
    beside: usize,
    /// Shared memory of a block.
    bytes: usize,
}

impl StreamTiling {
    /// None if the kernel does not take the product on this device. `halves` says that a warp takes as many outputs of
    /// the second half as of the first.
    pub(super) fn new(call: &Call, weight: &Parts, halves: bool, limits: &Limits) -> Option<StreamTiling> {
        let (inputs, outputs) = (call.dims.inputs, call.dims.outputs);
        let suits = weight.is_dense() && matches!(weight.dtype, DType::F16 | DType::BF16);
        let aligned = weight.aligned && aligned16(&call.x, inputs) && inputs.is_multiple_of(8) && inputs > 0;
        if !limits.clusters || call.rows != 1 || call.experts.is_some() || !suits || !aligned || outputs == 0 {
            return None;
        }
        // Rows of a warp, at least.
        let least = if halves { 2 } else { 1 };
        let segments = (WARPS * least * inputs * 2).div_ceil(STAGE);
        let segment = if segments == 1 { inputs } else { inputs.div_ceil(segments).next_multiple_of(PIECE) };
        let row = segment * 2;
        let blocks = (outputs / least).min(limits.busy_groups);
        let per_block = outputs.div_ceil(blocks);
        let fits = |&per_warp: &usize| WARPS * per_warp * row <= STAGE && WARPS * per_warp <= per_block;
        let per_warp = [PER_WARP, 2].into_iter().find(fits).unwrap_or(least);
        let items = per_block.div_ceil(WARPS * per_warp) * inputs.div_ceil(segment);
        let (stages, bytes) = most_stages(items, limits, |stages| {
            stages * (WARPS * per_warp * row + 16) + inputs.next_multiple_of(PIECE) * 4
        })?;
        let beside = blocks_per_multiprocessor(bytes, limits).clamp(1, 2);
        Some(StreamTiling { per_warp, segment, stages, blocks, beside, bytes })
    }

    /// The launch.
    pub(super) fn launch(
        &self,
        name: &'static str,
        call: &Call,
        weight: &Parts,
        params: &LinearParams,
        gating: Gating,
    ) -> Launch {
        gating
            .bind(weight.bind(Launch::new(NAME, &SOURCE, name), call))
            .constant("INPUTS", params.inputs)
            .constant("WARPS", WARPS as u32)
            .constant("PER_WARP", self.per_warp as u32)
            .constant("SEGMENT", self.segment as u32)
            .constant("STAGES", self.stages as u32)
            .constant("BESIDE", self.beside as u32)
            .constant("SHARED_BYTES", self.bytes as u32)
            .params(6, params)
            .threadgroup_memory(self.bytes)
            .grid([self.blocks, 1, 1], [(WARPS + 1) * WARP, 1, 1])
            .reads_ahead(&[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{
        affine::parts,
        linear::rows::tests::{H200, call},
    };

    #[test]
    fn a_block_fits_into_what_devices_have() {
        for bytes in [48 << 10, 99 << 10, 227 << 10] {
            let limits = Limits { threadgroup_bytes: bytes, ..H200 };
            for inputs in [8, 256, 264, 2048, 2560, 2568, 10_240, 14_336, 21_504, 28_672, 49_152] {
                for outputs in [1, 16, 100, 2560, 20_480, 262_144] {
                    let call = call(0, DType::BF16, [1, 8, inputs], false);
                    let call = Call { dims: crate::ops::linear::WeightDims { outputs, ..call.dims }, ..call };
                    let weight = parts(&call.weight, inputs);
                    let case = format!("{outputs} x {inputs}, {bytes} bytes");
                    for halves in [false, true] {
                        if halves && outputs % 2 == 1 {
                            continue;
                        }
                        let Some(shape) = StreamTiling::new(&call, &weight, halves, &limits) else {
                            assert!(bytes < 227 << 10 || inputs > 28_672, "{case}: not taken");
                            continue;
                        };
                        assert!(shape.bytes * shape.beside <= bytes, "{case}: {}", shape.bytes);
                        assert!(shape.stages > 0 && (1..=outputs).contains(&shape.blocks), "{case}");
                        assert!(shape.segment == inputs || shape.segment.is_multiple_of(PIECE), "{case}");
                        assert!(!halves || shape.per_warp.is_multiple_of(2), "{case}");
                        assert!(
                            WARPS * shape.per_warp * (shape.segment - PIECE.min(shape.segment)) * 2 < STAGE,
                            "{case}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn devices_before_hopper_have_no_bulk_copies() {
        let call = call(0, DType::BF16, [1, 4096, 4096], false);
        let weight = parts(&call.weight, 4096);
        assert!(StreamTiling::new(&call, &weight, false, &H200).is_some());
        assert!(StreamTiling::new(&call, &weight, false, &Limits { clusters: false, ..H200 }).is_none());
    }
}
