//! Selects the attention kernel, both for running and for explaining a call.

use super::plan::block_tokens;
use crate::{
    cpu::{Cpu, SimdLevel},
    ops::attend::{Call, Explanation},
};

/// Minimum query rows for widening keys and values once for all of them.
pub(super) const MANY_ROWS: usize = 16;

/// Minimum query rows for the AMX kernel, which takes as long for fewer.
pub(super) const MANY_ROWS_BY_AMX: usize = 32;

/// A kernel of attention. The rows of a block are its query tokens × the query heads of one KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttendKernel {
    /// Tiles of keys that all rows see, in f32: [`few_rows`](super::few_rows).
    FewRows,
    /// As `FewRows`, with quantised keys or values as 16-bit integers: [`fixed_point`](super::fixed_point).
    FixedPoint,
    /// Matrix products over masked tiles, with a query row in each lane: [`many_rows`](super::many_rows).
    ManyRows,
    /// As `ManyRows`, with AMX and hi + lo bf16: [`amx_rows`](super::amx_rows).
    AmxRows,
}

/// Selects the kernel for `rows` query rows over one source; `quantised`: its keys or its values are. In the kernels
/// for few rows, the result of a row does not depend on other rows.
pub(super) fn select(level: SimdLevel, quantised: bool, rows: usize) -> AttendKernel {
    if rows >= MANY_ROWS_BY_AMX && level.has_amx() {
        return AttendKernel::AmxRows;
    }
    // For any number of rows: vectors hold twice as many keys as integers than as f32.
    if quantised && level.has_vbmi() {
        return AttendKernel::FixedPoint;
    }
    if rows >= MANY_ROWS {
        return AttendKernel::ManyRows;
    }
    AttendKernel::FewRows
}

/// The level for a head size: the device's, or AVX2 if the device's chunks of two vectors do not divide the head size.
/// Chunks of 32 coordinates do not divide 80 and 112; AVX2's chunks of 16 do.
pub(super) fn level_of(level: SimdLevel, head_dim: usize) -> SimdLevel {
    match level {
        // A machine that supports AVX-512 also supports AVX2.
        SimdLevel::Portable | SimdLevel::Avx2 | SimdLevel::Avx2Vnni | SimdLevel::Neon => level,
        _ if head_dim.is_multiple_of(32) => level,
        _ => SimdLevel::Avx2,
    }
}

/// Whether any vector of the call's cache layer is quantised.
pub(super) fn is_quantised(call: &Call) -> bool {
    let spec = call.layer.spec();
    spec.k.is_quantised() || spec.v.is_quantised()
}

/// Explains the kernel for the longest run of tokens of a sequence in the step. A sequence with fewer tokens may get
/// another kernel.
pub(in crate::cpu) fn explain(cpu: &Cpu, call: &Call) -> Explanation {
    let (spec, quantised) = (call.layer.spec(), is_quantised(call));
    let group = call.heads / spec.kv_heads;
    let tokens = call.step.batch().max_new.max(1);
    let level = level_of(cpu.level, call.head_dim);
    let max_tokens = block_tokens(level, quantised, cpu.selecting_rows(usize::MAX), call.head_dim, group);
    let (kernel, reason) = match select(level, quantised, cpu.selecting_rows(group * tokens.min(max_tokens))) {
        AttendKernel::FewRows => ("few_rows", "few query rows per KV head: each key is read once, in tiles of 64"),
        AttendKernel::FixedPoint => ("fixed_point", "quantised cache and AVX-512 VBMI: integer products"),
        AttendKernel::ManyRows => ("many_rows", "many query rows per KV head: matrix products over tiles of 64 keys"),
        AttendKernel::AmxRows => {
            ("amx_rows", "many query rows per KV head and AMX: matrix products over tiles, as hi + lo bf16")
        }
    };
    Explanation { kernel, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::{AttendKernel::*, *};

    #[test]
    fn rows_decide_between_the_f32_kernels() {
        for level in SimdLevel::ALL.into_iter().filter(|level| !level.has_vbmi()) {
            for quantised in [false, true] {
                assert_eq!(select(level, quantised, 1), FewRows);
                assert_eq!(select(level, quantised, MANY_ROWS - 1), FewRows);
                assert_eq!(select(level, quantised, MANY_ROWS), ManyRows);
            }
        }
    }

    #[test]
    fn amx_serves_many_rows_over_any_cache() {
        for quantised in [false, true] {
            assert_eq!(select(SimdLevel::Avx512Amx, quantised, MANY_ROWS_BY_AMX), AmxRows);
            for rows in [1, MANY_ROWS_BY_AMX - 1] {
                let without = select(SimdLevel::Avx512Vbmi, quantised, rows);
                assert_eq!(select(SimdLevel::Avx512Amx, quantised, rows), without);
            }
        }
    }

    #[test]
    fn chunks_divide_every_head_size() {
        for head_dim in crate::ops::attend::HEAD_DIMS {
            for level in SimdLevel::ALL {
                let used = level_of(level, head_dim);
                let wide = used.to_string().starts_with("AVX-512");
                assert!(head_dim.is_multiple_of(if wide { 32 } else { 16 }), "{head_dim}, {level}");
            }
            assert_eq!(level_of(SimdLevel::Avx2, head_dim), SimdLevel::Avx2);
        }
        assert_eq!(level_of(SimdLevel::Avx512, 96), SimdLevel::Avx512);
    }

    #[test]
    fn fixed_point_serves_every_number_of_rows_over_a_quantised_cache() {
        for rows in [1, MANY_ROWS, 64] {
            assert_eq!(select(SimdLevel::Avx512Vbmi, true, rows), FixedPoint);
        }
        assert_eq!(select(SimdLevel::Avx512Vbmi, false, 1), FewRows);
        assert_eq!(select(SimdLevel::Avx512Vbmi, false, MANY_ROWS), ManyRows);
    }
}
