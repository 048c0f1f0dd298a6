//! The device headers. A file's inclusions are read from its `#include` lines.

use super::codec::threshold_cells;
#[cfg(any(feature = "cuda", test))]
use crate::gpu::Source;
use crate::gpu::{Header, headers, tables};

/// All of them, by their paths below `cuda/`.
pub(super) static ALL: &[Header] = headers![
    "attend/codes.h",
    "attend/decode/ring.h",
    "attend/dense.h",
    "attend/division.h",
    "attend/generic/key_bias.h",
    "attend/generic/layout.h",
    "attend/generic/means.h",
    "attend/generic/operands.h",
    "attend/generic/queries.h",
    "attend/generic/scores.h",
    "attend/generic/tiles.h",
    "attend/generic/values.h",
    "attend/merge_quads.h",
    "attend/merge_rows.h",
    "attend/prefill/copies.h",
    "attend/prefill/layout.h",
    "attend/prefill/nonfinite.h",
    "attend/prefill/products.h",
    "attend/prefill/split.h",
    "attend/quantised/copies.h",
    "attend/quantised/gather.h",
    "attend/quantised/key_loop.h",
    "attend/quantised/layout.h",
    "attend/quantised/means.h",
    "attend/quantised/queries.h",
    "attend/quantised/scores.h",
    "attend/short_quantised/copies.h",
    "attend/short_quantised/means.h",
    "attend/short_quantised/queries.h",
    "attend/short_quantised/values.h",
    "attend/softmax.h",
    "attend/state.h",
    "attend/work.h",
    "codec/butterflies.h",
    "codec/encode_rows.h",
    "codec/encode_tiles.h",
    "codec/nearest_centroid.h",
    "codec/planes.h",
    "codec/rotate_block.h",
    "codec/rotate_warp.h",
    "delta_rule/chunks.h",
    "delta_rule/gates.h",
    "device/activation.h",
    "device/affine.h",
    "device/arrivals.h",
    "device/blocks.h",
    "device/cache_slots.h",
    "device/cluster.h",
    "device/convert.h",
    "device/dependent_launch.h",
    "device/elements.h",
    "device/float_order.h",
    "device/fragments.h",
    "device/key_bias.h",
    "device/mbarrier.h",
    "device/pages.h",
    "device/peers.h",
    "device/products.h",
    "device/reduce.h",
    "device/ring_cursor.h",
    "device/uniform.h",
    "device/vectors.h",
    "device/warp_products.h",
    "device/wgmma.h",
    "linear/gemm_affine_wgmma/chunk.h",
    "linear/gemm_affine_wgmma/codes.h",
    "linear/gemm_affine_wgmma/layout.h",
    "linear/block_codes.h",
    "linear/chunks.h",
    "linear/gating.h",
    "linear/integer_products.h",
    "linear/out_parts.h",
    "linear/params.h",
    "linear/tile_sums.h",
    "norm_rope/head.h",
    "seal/page_mean.h";
    // Lanes read different entries at a time; constant memory would serialise these reads.
    "codec/codebooks.h" => || tables::codebooks("__device__ __align__(8) const float"),
    "codec/signs.h" => || tables::signs("__device__ const unsigned"),
    "codec/threshold_cells.h" => threshold_cells::header,
];

/// Whether the kernels of a file wait for the previous kernel themselves, so that they may begin before it has ended.
#[cfg(any(feature = "cuda", test))]
pub(super) fn waits_itself(source: &Source) -> bool {
    source.text.lines().any(|line| line == "#include \"device/dependent_launch.h\"")
}

/// Whether a kernel of a file lets the next kernel begin before it has waited for the previous one.
#[cfg(feature = "cuda")]
pub(super) fn lets_next_begin_first(source: &Source) -> bool {
    source.text.contains("take_turn_early();")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_exact() {
        crate::gpu::assert_table_is_exact("cuda", "cu", ALL);
    }

    #[test]
    fn only_prompts_do_not_wait_for_the_previous_kernel() {
        let source = |text| Source { name: "test.cu", text, headers: ALL, layouts: &[] };
        let waits = |text| waits_itself(&source(text));
        assert!(waits(include_str!("softcap.cu")));
        assert!(waits(include_str!("attend/decode/attend_decode.cu")));
        assert!(waits(include_str!("linear/linear_gemv_affine_tma.cu")));
        assert!(!waits(include_str!("attend/prefill/attend_prefill.cu")));
    }
}
