//! Accuracy of the delta rule on CUDA: the rounding of chunks.

use super::MAX_STEP_ROWS;

/// The rows of the table in `ops/mod.rs`.
pub(crate) fn rows() -> Vec<String> {
    vec![format!(
        "| | bf16 `qkv` and `out`, runs of more than {MAX_STEP_ROWS} rows, D of 64 or 128, Dv a multiple of 64; CUDA on \
         Hopper | f32 | factors of products are rounded to bf16 | r = 2⁻⁷, for the state as well |"
    )]
}
