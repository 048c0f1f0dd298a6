//! Accuracy of products on the CPU: the rounding of each kernel.

use super::route::{MANY_EIGHT_BITS_BY_AMX, MANY_HALVES_BY_AMX, MANY_ROWS_BY_AMX, MANY_ROWS_BY_VNNI};

/// The rows of the table in `ops/mod.rs`, in its order.
pub(crate) fn rows() -> Vec<String> {
    vec![
        format!(
            "| | affine or blocks, up to {} rows for one matrix (with experts: for each); CPU at `Avx512Vbmi` and \
             above | integers per group (8-bit and IQ4 codes: f32), then f32 | activations are rounded to steps \
             of about 2⁻²³ of the largest of their group | activations below half a step count as zero |",
            MANY_ROWS_BY_VNNI - 1
        ),
        format!(
            "| | with [`eight_bit_activations`](crate::CpuOptions::eight_bit_activations), dense f16 or bf16, \
             {MANY_HALVES_BY_AMX} rows or more for one matrix, affine or blocks, {MANY_EIGHT_BITS_BY_AMX} rows or \
             more for a matrix (with experts: on average); CPU at `Avx512Amx` | f32 | activations and weights \
             are rounded to bf16 | r = 2⁻⁷: each factor has a relative error of at most 2⁻⁸. Measured with normal \
             activations: 2.4·10⁻³ of the RMS of a result, 1.6·10⁻³ if one factor is already bf16. Products \
             below 2⁻¹²⁶ count as zero |"
        ),
        format!(
            "| | with `eight_bit_activations`, affine or blocks, {MANY_ROWS_BY_VNNI} rows or more for one matrix \
             (with experts: all rows, once one expert has {MANY_ROWS_BY_VNNI}), unless above; CPU at `Avx2Vnni`, \
             `Avx512Vnni` and above | integers per group, then f32 | activations are rounded to 8 bits, to steps \
             of 1/127 of the largest of their group | r = 2⁻⁷ with normal activations, up to √N/440 if one of the \
             N inputs of a group is far larger than the others. Measured with normal activations: 4·10⁻³ to \
             6·10⁻³ of the RMS of a result |"
        ),
        format!(
            "| | dense f16 or bf16, {MANY_HALVES_BY_AMX} rows or more for one matrix, affine or blocks, \
             {MANY_ROWS_BY_AMX} rows or more for a matrix (with experts: on average), unless above; CPU at \
             `Avx512Amx` (default where available) | f32 | activations and weights are split into hi + lo bf16; \
             products lo · lo are omitted | r = 2⁻¹⁵. Measured: 3·10⁻⁶ of the RMS of a result. Products below \
             2⁻¹¹⁷ keep 8 bits, below 2⁻¹²⁶ none |"
        ),
        format!(
            "| | affine or blocks, {MANY_ROWS_BY_VNNI} rows or more for one matrix (with experts: all rows, once \
             one expert has {MANY_ROWS_BY_VNNI}), unless above; CPU at `Avx2Vnni`, `Avx512Vnni` and above | \
             integers per group, then f32 | activations are rounded to 16 bits, relative to the largest of their \
             group | r = 2⁻¹⁵. Measured: about 2·10⁻⁵ of the RMS of a result (f32: 10⁻⁷, bf16: about 10⁻³) |"
        ),
    ]
}
