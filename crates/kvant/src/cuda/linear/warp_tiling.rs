//! The launches of `linear_skinny_mma.cu`, `linear_gemv_affine_int8.cu` and `linear_skinny_blocks_mma.cu`, whose warps
//! divide the inputs of a row among them.

use crate::cuda::affine::Parts;
use crate::{
    Tensor,
    cuda::WARP,
    gpu::{Launch, Params, Source},
    ops::linear::{Call, NAME},
};

/// Outputs of a tile.
pub(super) const TILE: usize = 16;

/// How the work is divided: a block's rows (`tokens`) and tiles of outputs; its warps divide the inputs.
pub(super) struct WarpTiling {
    pub tokens: usize,
    pub tiles: usize,
    /// Spans of inputs that a warp has in flight.
    pub stages: usize,
    pub warps: usize,
    /// Scales (or biases) that one load reads.
    pub vector: usize,
    /// Shared memory of a block.
    pub bytes: usize,
}

impl WarpTiling {
    /// The launch, without the constants of a single kernel.
    pub fn launch<P: Params>(
        &self,
        source: &'static Source,
        kernel: &'static str,
        call: &Call,
        weight: &Parts,
        params: &P,
    ) -> Launch {
        let Call { dims, experts: ids, rows, .. } = call;
        let launch = weight
            .bind(Launch::new(NAME, source, kernel), call)
            .constant("TOKENS", self.tokens as u32)
            .constant("TILES", self.tiles as u32)
            .constant("STAGES", self.stages as u32)
            .constant("WARPS", self.warps as u32)
            .constant("VECTOR", self.vector as u32)
            .constant("SHARED_BYTES", self.bytes as u32)
            .params(6, params)
            .threadgroup_memory(self.bytes)
            .grid([dims.outputs.div_ceil(TILE * self.tiles), rows.div_ceil(self.tokens), 1], [self.warps * WARP, 1, 1]);
        // The previous kernel may write the ids that choose the matrix.
        if ids.is_some() { launch } else { launch.reads_ahead(&[1, 2, 3]) }
    }
}

/// Maximum scales (or biases) of a row of `inputs` that one load of at most 16 bytes reads, among the numbers that
/// `suit` the kernel.
pub(super) fn vector(weight: &Parts, inputs: usize, suit: impl Fn(usize) -> bool) -> usize {
    let Some(scales) = weight.scales else { return 1 };
    let each_row = inputs / weight.group as usize;
    let size = scales.dtype().size();
    let aligned = |n| {
        [Some(scales), weight.biases].into_iter().flatten().all(|t: &Tensor| t.byte_offset().is_multiple_of(n * size))
    };
    let fits = |&n: &usize| n * size <= 16 && each_row.is_multiple_of(n) && aligned(n) && suit(n);
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}
