//! Accuracy of attention on CUDA: the rounding of each kernel.

/// The rows of the table in `ops/mod.rs`, in its order.
pub(crate) fn rows() -> Vec<String> {
    vec![
        String::from(
            "| | other tokens over quantised keys or values; CUDA, f16 or bf16 `out` | f32 | centroids and their \
             factors are rounded to f16 | r = g/2¹¹: a relative error of at most 2⁻¹² for each rounded factor |",
        ),
        String::from(
            "| | prompts over dense caches of `q`'s 16-bit dtype, f16 or bf16 `out`; CUDA | f32 | softmax weights \
             are rounded to `q`'s dtype | r = half a unit of `q`'s dtype |",
        ),
        String::from(
            "| | prompts over quantised caches of a pool, bf16 `q`, f16 or bf16 `out`; CUDA | f32 | also decoded \
             keys and values | r = (2 + g)·2⁻⁹ |",
        ),
        String::from(
            "| | other caches; CUDA, f16 or bf16 `out` | f32 | softmax weights and f32 queries, keys and values \
             are split into several f16 or bf16 terms | at least 16 bits of each factor |",
        ),
        String::from(
            "| | CUDA, f32 `out` | f32 | as above; centroids are split as well | at least 22 bits of each factor \
             |",
        ),
        String::from(
            "| | quantised values; CUDA | f32 | weights are scaled by the largest norm among the values that a \
             block of neighbouring tokens sees | values with a norm below 2⁻²⁸ of the largest lose bits of their \
             weight; below about 2⁻³⁸ they count as zero |",
        ),
    ]
}
