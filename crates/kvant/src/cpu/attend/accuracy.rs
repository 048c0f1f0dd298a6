//! Accuracy of attention on the CPU: the rounding of each kernel.

use super::route::MANY_ROWS_BY_AMX;

/// The rows of the table in `ops/mod.rs`, in its order.
pub(crate) fn rows() -> Vec<String> {
    vec![
        String::from(
            "| | quantised keys or values; CPU at [`Avx512Vbmi`](crate::SimdLevel::Avx512Vbmi) and above (default \
             where available) | integers | centroids and their factors are rounded to fixed point | r = 2⁻¹² + \
             g/2¹⁴. RMS error with normal keys and queries, measured: 1.5·10⁻⁴ of a result at scale 1/√D; at \
             scale 1 up to 4.4·10⁻⁴ (D = 256) and 6.1·10⁻⁴ (D = 512) |",
        ),
        format!(
            "| | {MANY_ROWS_BY_AMX} query rows or more of a KV head, in prompts or groups of heads; CPU at \
             [`Avx512Amx`](crate::SimdLevel::Avx512Amx) (default where available), D a multiple of 32 | f32 | \
             queries, keys, values and softmax weights are split into hi + lo bf16; products lo · lo are omitted \
             | r = (1 + g)/2¹⁷: each factor keeps 16 bits or more (below 2⁻¹¹⁰ fewer). RMS error with normal keys \
             and queries, measured at scale 1/√D: 5.1·10⁻⁶ over f16, 3.3·10⁻⁶ over bf16, 6.4·10⁻⁶ over f32 and \
             quantised caches |"
        ),
    ]
}
