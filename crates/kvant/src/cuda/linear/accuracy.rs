//! Accuracy of products on CUDA: the rounding of each kernel.

use super::{
    dequantise::MANY,
    gemm_affine_wgmma::{MAX_CODES, MAX_ROWS},
    route::FEW_PER_EXPERT,
    skinny_blocks_mma,
};

/// The rows of the table in `ops/mod.rs`, in its order.
pub(crate) fn rows() -> Vec<String> {
    let ([by_codes, dense], blocks) = (MANY, skinny_blocks_mma::FEW + 1);
    let (affine_per_expert, blocks_per_expert) = (FEW_PER_EXPERT, skinny_blocks_mma::FEW_PER_EXPERT);
    let (first, last, codes_per_expert) = (MAX_CODES + 1, MAX_ROWS, MAX_CODES / 2);
    vec![
        String::from(
            "| | affine, one or two rows for one matrix, or few rows of experts; CUDA | integers per group, then \
             f32 | activations are rounded to steps of 2⁻²² of the largest of 128 consecutive inputs | \
             activations below one step count as zero |",
        ),
        format!(
            "| | affine or blocks, bf16 `x` and `out`, {by_codes} rows or more (on GPUs other than Hopper and for \
             groups of 32: {dense}; for codes of 2, 3 and 5 bits and blocks: {blocks}), no experts; CUDA with \
             cuBLASLt | f32 | weights are rounded to bf16 | r = 2⁻¹⁰ |"
        ),
        format!(
            "| | bf16 `x` and `out`, experts: affine in groups of 32, more than {affine_per_expert} rows for each; \
             codes of 2, 3 and 5 bits and blocks, more than {blocks_per_expert}; CUDA on Hopper | f32 | weights are rounded to \
             bf16 | r = 2⁻¹⁰ |"
        ),
        format!(
            "| | affine codes of 4, 6 or 8 bits in groups of 64 or 128 with bf16 scales, bf16 `x` and `out`, {first} \
             to {last} rows (with experts: more than {codes_per_expert} for each); CUDA on Hopper | f32 | weights are rounded to bf16 \
             | r = 3·2⁻¹¹ |"
        ),
    ]
}
