//! Products of a dense 16-bit weight with few rows, by bulk copies and on tensor cores.

use super::{
    LinearParams, aligned16,
    out_parts::{MOST_PARTS, OutParts},
    stream::most_stages,
};
use crate::cuda::{affine::Parts, headers};
use crate::{
    DType, Result,
    cuda::WARP,
    gpu::{Launch, Limits, Params, Source, params},
    ops::linear::{Call, NAME},
};

params! {
    pub(crate) struct LinearStreamRowsParams {
        pub rows: u32,
        pub outputs: u32,
        pub alpha: f32,
        pub parts: OutParts,
    }
}

static SOURCE: Source = Source {
    name: "linear_stream_rows.cu",
    text: include_str!("linear_stream_rows.cu"),
    headers: headers::ALL,
    layouts: &[OutParts::layout, LinearStreamRowsParams::layout],
};

/// The most rows of x, and the outputs that are multiplied together.
const ROWS: usize = 8;
const TILE: usize = 16;
/// Warps of a block that multiply, and inputs of theirs in a step.
const WARPS: usize = 8;
const STEP: usize = 32 * WARPS;
/// The most inputs: for so many, x takes 160 registers of a lane. For more than `FEW_INPUTS`, the warp that copies
/// gives registers to the others. That needs an architecture's own instructions, as products of warpgroups do.
const MOST_INPUTS: usize = 40 * STEP;
const FEW_INPUTS: usize = 20 * STEP;
/// Bytes of a stage, at most, and the padding of an output in it.
const STAGE: usize = 42 << 10;
const PADDING: usize = 64;

/// How the work is divided.
#[derive(Clone, Copy)]
pub(super) struct StreamRowsTiling {
    /// Inputs of a stage.
    segment: usize,
    stages: usize,
    blocks: usize,
    /// Shared memory of a block.
    bytes: usize,
}

impl StreamRowsTiling {
    /// None if the kernel does not take the product on this device.
    pub(super) fn new(call: &Call, weight: &Parts, limits: &Limits) -> Option<StreamRowsTiling> {
        let (inputs, outputs) = (call.dims.inputs, call.dims.outputs);
        let most = if limits.warpgroup_products { MOST_INPUTS } else { FEW_INPUTS };
        let takes = limits.clusters
            && (2..=ROWS).contains(&call.rows)
            && call.experts.is_none()
            && weight.is_dense()
            && matches!(weight.dtype, DType::F16 | DType::BF16)
            && call.x.dtype() == weight.dtype
            && weight.aligned
            && aligned16(&call.x, inputs)
            && inputs.is_multiple_of(STEP)
            && (1..=most).contains(&inputs)
            && outputs > 0
            && call.parts.len() <= MOST_PARTS;
        if !takes {
            return None;
        }
        let stage = |segments: usize| TILE * (inputs / segments * 2 + PADDING);
        let divides = |segments: &usize| inputs.is_multiple_of(segments * STEP) && stage(*segments) <= STAGE;
        let segments = (1..=inputs / STEP).find(divides)?;
        let blocks = outputs.min(limits.busy_groups);
        let items = outputs.div_ceil(blocks).div_ceil(TILE) * segments;
        let (stages, bytes) = most_stages(items, limits, |stages| {
            stages * (stage(segments) + 16) + 2 * WARPS * TILE * ROWS * size_of::<f32>()
        })?;
        Some(StreamRowsTiling { segment: inputs / segments, stages, blocks, bytes })
    }

    /// The launch.
    pub(super) fn launch(
        &self,
        name: &'static str,
        call: &Call,
        weight: &Parts,
        params: &LinearParams,
    ) -> Result<Launch> {
        let &LinearParams { rows, outputs, inputs, alpha, .. } = params;
        let params = LinearStreamRowsParams { rows, outputs, alpha, parts: OutParts::of(call)? };
        let has_many = call.dims.inputs > FEW_INPUTS;
        // A warpgroup where it gives registers to others.
        let producers = if has_many { 4 } else { 1 };
        Ok(Launch::new(NAME, &SOURCE, name)
            .constant("DTYPE", weight.dtype)
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("INPUTS", inputs)
            .constant("SEGMENT", self.segment as u32)
            .constant("WARPS", WARPS as u32)
            .constant("MANY", has_many)
            .constant("STAGES", self.stages as u32)
            .constant("SHARED_BYTES", self.bytes as u32)
            .read(0, &call.x)
            .read(1, weight.weight)
            .write(2, &call.out)
            .params(3, &params)
            .threadgroup_memory(self.bytes)
            .grid([self.blocks, 1, 1], [(WARPS + producers) * WARP, 1, 1])
            .reads_ahead(&[1]))
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
            for inputs in [256, 512, 768, 2048, 2560, 4096, 5120, 5376, 10_240] {
                for outputs in [1, 16, 100, 2560, 20_480, 262_144] {
                    let call = call(0, DType::BF16, [8, 8, inputs], false);
                    let call = Call { dims: crate::ops::linear::WeightDims { outputs, ..call.dims }, ..call };
                    let case = format!("{outputs} x {inputs}, {bytes} bytes");
                    let Some(shape) = StreamRowsTiling::new(&call, &parts(&call.weight, inputs), &limits) else {
                        assert!(bytes < 227 << 10, "{case}: not taken");
                        continue;
                    };
                    assert!(shape.bytes <= bytes && shape.stages > 0, "{case}: {}", shape.bytes);
                    assert!(inputs.is_multiple_of(shape.segment), "{case}: {}", shape.segment);
                    assert!(shape.segment.is_multiple_of(STEP), "{case}: {}", shape.segment);
                    assert!((1..=outputs).contains(&shape.blocks), "{case}: {}", shape.blocks);
                }
            }
        }
    }

    #[test]
    fn other_products_are_not_taken() {
        let is_taken = |rows, inputs, limits: &Limits| {
            let call = call(0, DType::BF16, [rows, 4096, inputs], false);
            StreamRowsTiling::new(&call, &parts(&call.weight, inputs), limits).is_some()
        };
        assert!(is_taken(2, 4096, &H200) && is_taken(8, 4096, &H200));
        assert!(!is_taken(1, 4096, &H200) && !is_taken(9, 4096, &H200));
        assert!(!is_taken(8, 4104, &H200) && !is_taken(8, 14_336, &H200));
        assert!(!is_taken(8, 4096, &Limits { clusters: false, ..H200 }));
        let other = Limits { warpgroup_products: false, ..H200 };
        assert!(is_taken(8, 4096, &other) && !is_taken(8, 10_240, &other));
    }
}
