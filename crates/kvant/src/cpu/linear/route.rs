//! Selects the kernel of a matrix product.

use super::matrix::{Matrix, MatrixKind};
use crate::{DType, cpu::SimdLevel};

/// Minimum rows of activations for widening weights to f32 once for all rows. Measured: with this number, both ways are
/// equally fast.
pub(super) const MANY_ROWS: usize = 64;
/// Minimum rows for products of words, which are then faster than byte products.
pub(super) const MANY_ROWS_BY_VNNI: usize = 16;

/// Minimum mean rows for AMX, which is then faster than both: converting to hi + lo bf16 takes longer than to words.
pub(super) const MANY_ROWS_BY_AMX: usize = 32;
/// Minimum mean rows for AMX with 8-bit activations. They reduce the products of AMX and of panels, but not AMX's
/// unpacking of weights.
pub(super) const MANY_EIGHT_BITS_BY_AMX: usize = 48;
/// Minimum rows for AMX with 16-bit weights, which would otherwise be widened.
pub(super) const MANY_HALVES_BY_AMX: usize = 16;

/// Weights, classified by the kernels that accept them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightClass {
    /// Affine or block formats.
    Codes,
    /// f16 or bf16.
    Halves,
    /// f32 or MXFP8.
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
    /// Reads weights as stored and multiplies in f32: [`few_rows`](super::few_rows). Bound by memory.
    FewRows,
    /// As `FewRows`, with activations as integers of three bytes: [`byte_products`](super::integers::byte_products).
    ByteProducts,
    /// Widens weights to f32, then `gemm`: [`many_rows`](super::many_rows). Bound by arithmetic.
    ManyRows,
    /// Unpacks codes to integers of one or two bytes: [`panel_products`](super::integers::panel_products).
    PanelProducts,
    /// AMX matmul of weights and activations as hi + lo bf16, or as bf16: [`amx`](super::amx).
    AmxProducts,
}

/// Selects the kernel. `rows`: maximum rows of activations of a matrix; `mean`: average rows of the matrices that have
/// any. `eight_bits`: many rows of activations have 8 bits.
pub(super) fn select(
    level: SimdLevel,
    weights: WeightClass,
    rows: usize,
    mean: usize,
    eight_bits: bool,
) -> LinearKernel {
    let affine = weights == WeightClass::Codes;
    let min_mean = if eight_bits { MANY_EIGHT_BITS_BY_AMX } else { MANY_ROWS_BY_AMX };
    match rows {
        _ if level.has_amx() && affine && mean >= min_mean => LinearKernel::AmxProducts,
        MANY_HALVES_BY_AMX.. if level.has_amx() && weights == WeightClass::Halves => LinearKernel::AmxProducts,
        MANY_ROWS_BY_VNNI.. if affine && level.has_vnni() => LinearKernel::PanelProducts,
        ..MANY_ROWS_BY_VNNI if affine && level.has_vbmi() => LinearKernel::ByteProducts,
        _ => select_f32(rows),
    }
}

/// Selects the kernel for activations in f32: without an integer kernel, or for rows that integers cannot represent.
pub(super) fn select_f32(rows: usize) -> LinearKernel {
    if rows < MANY_ROWS { LinearKernel::FewRows } else { LinearKernel::ManyRows }
}

#[cfg(test)]
mod tests {
    use super::{LinearKernel::*, WeightClass::*, *};

    /// Selects the kernel for one matrix.
    fn select(level: SimdLevel, weights: WeightClass, rows: usize) -> LinearKernel {
        super::select(level, weights, rows, rows, false)
    }

    #[test]
    fn codes_use_integers_with_vnni() {
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
    fn many_rows_use_amx_except_for_f32() {
        assert_eq!(select(SimdLevel::Avx512Amx, Codes, MANY_ROWS_BY_AMX), AmxProducts);
        assert_eq!(select(SimdLevel::Avx512Amx, Halves, MANY_HALVES_BY_AMX), AmxProducts);
        assert_eq!(super::select(SimdLevel::Avx512Amx, Codes, 1000, MANY_ROWS_BY_AMX - 1, false), PanelProducts);
        assert_eq!(select(SimdLevel::Avx512Amx, Floats, 1000), ManyRows);
        assert_eq!(select(SimdLevel::Avx512Amx, Halves, 1), FewRows);
    }

    #[test]
    fn eight_bits_use_amx_from_more_rows() {
        let select = |rows| super::select(SimdLevel::Avx512Amx, Codes, rows, rows, true);
        assert_eq!(select(15), ByteProducts);
        assert_eq!([16, MANY_EIGHT_BITS_BY_AMX - 1].map(select), [PanelProducts; 2]);
        assert_eq!(select(MANY_EIGHT_BITS_BY_AMX), AmxProducts);
    }

    #[test]
    fn in_f32_the_number_of_rows_decides() {
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
