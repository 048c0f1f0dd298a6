//! Selects the kernel of a matrix product.

use super::matrix::{Matrix, MatrixKind};
use crate::{DType, cpu::SimdLevel};

/// From as many rows of activations on, weights are widened to f32 once for all of them: there both ways were measured
/// to be equally fast.
pub(super) const MANY_ROWS: usize = 64;
/// From as many rows on, products of words are faster than products of bytes.
pub(super) const MANY_ROWS_BY_VNNI: usize = 16;

/// From as many rows on, tiles are faster than both: making bfloats takes longer than making words.
pub(super) const MANY_ROWS_BY_AMX: usize = 32;
/// The same with activations of 8 bits, which save tiles more work than panels, but no unpacking.
pub(super) const MANY_EIGHT_BITS_BY_AMX: usize = 48;
/// The same where weights of 16 bits would be widened.
pub(super) const MANY_HALVES_BY_AMX: usize = 16;

/// Weights, by the kernels that take them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightClass {
    /// Affine, or blocks.
    Codes,
    /// f16 or bf16.
    Halves,
    /// f32, and MXFP8.
    Floats,
}

impl WeightClass {
    pub(super) fn of(matrix: &Matrix) -> WeightClass {
        match matrix.kind {
            MatrixKind::Affine(_) | MatrixKind::Blocks(_) => WeightClass::Codes,
            MatrixKind::Dense(weights) if weights.dtype != DType::F32 => WeightClass::Halves,
            MatrixKind::Dense(_) | MatrixKind::Mxfp8(_) => WeightClass::Floats,
        }
    }
}

/// A kernel of [`linear`](super).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinearKernel {
    /// Reads weights as they are stored, in f32: [`few_rows`](super::few_rows). Bound by memory.
    FewRows,
    /// The same in integers of three bytes: [`byte_products`](super::integers::byte_products).
    ByteProducts,
    /// Widens weights to f32, then `gemm`: [`many_rows`](super::many_rows). Bound by arithmetic.
    ManyRows,
    /// Unpacks codes to integers of one or two bytes: [`panel_products`](super::integers::panel_products).
    PanelProducts,
    /// Weights and activations as sums of two bfloats, or as bfloats, by tiles: [`amx`](super::amx).
    AmxProducts,
}

/// The kernel for weights of which one matrix has as many as `rows` rows of activations, and all that have any have
/// `mean` on average. `eight_bits`: many rows of activations have 8 bits.
pub(super) fn select(
    level: SimdLevel,
    weights: WeightClass,
    rows: usize,
    mean: usize,
    eight_bits: bool,
) -> LinearKernel {
    let affine = weights == WeightClass::Codes;
    let by_tiles = if eight_bits { MANY_EIGHT_BITS_BY_AMX } else { MANY_ROWS_BY_AMX };
    match rows {
        _ if level.has_amx() && affine && mean >= by_tiles => LinearKernel::AmxProducts,
        MANY_HALVES_BY_AMX.. if level.has_amx() && weights == WeightClass::Halves => LinearKernel::AmxProducts,
        MANY_ROWS_BY_VNNI.. if affine && level.has_vnni() => LinearKernel::PanelProducts,
        ..MANY_ROWS_BY_VNNI if affine && level.has_vbmi() => LinearKernel::ByteProducts,
        _ => select_f32(rows),
    }
}

/// The same for activations in f32: where integers do not serve, or cannot represent a row.
pub(super) fn select_f32(rows: usize) -> LinearKernel {
    if rows < MANY_ROWS { LinearKernel::FewRows } else { LinearKernel::ManyRows }
}

#[cfg(test)]
mod tests {
    use super::{LinearKernel::*, WeightClass::*, *};

    /// Of one matrix.
    fn select(level: SimdLevel, weights: WeightClass, rows: usize) -> LinearKernel {
        super::select(level, weights, rows, rows, false)
    }

    #[test]
    fn integers_serve_codes_on_vnni() {
        for level in [SimdLevel::Avx512Vbmi, SimdLevel::Avx512Amx] {
            assert_eq!(select(level, Codes, 1), ByteProducts);
            assert_eq!(select(level, Codes, 15), ByteProducts);
        }
        for level in SimdLevel::ALL.into_iter().filter(|level| level.has_vnni()) {
            assert_eq!(select(level, Codes, 16), PanelProducts);
            if !level.has_amx() {
                assert_eq!(select(level, Codes, 1000), PanelProducts);
                assert_eq!(select(level, Halves, 16), FewRows);
            }
        }
        for level in [SimdLevel::Avx2Vnni, SimdLevel::Avx512Vnni] {
            assert_eq!(select(level, Codes, 15), FewRows);
        }
    }

    #[test]
    fn tiles_serve_many_rows_of_all_but_f32() {
        assert_eq!(select(SimdLevel::Avx512Amx, Codes, MANY_ROWS_BY_AMX), AmxProducts);
        assert_eq!(select(SimdLevel::Avx512Amx, Halves, MANY_HALVES_BY_AMX), AmxProducts);
        assert_eq!(super::select(SimdLevel::Avx512Amx, Codes, 1000, MANY_ROWS_BY_AMX - 1, false), PanelProducts);
        assert_eq!(select(SimdLevel::Avx512Amx, Floats, 1000), ManyRows);
        assert_eq!(select(SimdLevel::Avx512Amx, Halves, 1), FewRows);
    }

    #[test]
    fn eight_bits_reach_tiles_later() {
        let select = |rows| super::select(SimdLevel::Avx512Amx, Codes, rows, rows, true);
        assert_eq!(select(15), ByteProducts);
        assert_eq!([16, MANY_EIGHT_BITS_BY_AMX - 1].map(select), [PanelProducts; 2]);
        assert_eq!(select(MANY_EIGHT_BITS_BY_AMX), AmxProducts);
    }

    #[test]
    fn rows_decide_in_f32() {
        for level in SimdLevel::ALL {
            for weights in [Codes, Halves, Floats] {
                let is_f32 = match weights {
                    Codes => !level.has_vnni(),
                    Halves => !level.has_amx(),
                    Floats => true,
                };
                if is_f32 {
                    assert_eq!(select(level, weights, 63), FewRows);
                    assert_eq!(select(level, weights, 64), ManyRows);
                }
            }
        }
    }
}
