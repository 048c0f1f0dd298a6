//! Selects the kernel of a matrix product.

use crate::cpu::SimdLevel;

/// From as many rows of activations on, weights are widened to f32 once for all of them: there both ways were measured
/// to be equally fast.
pub(super) const MANY_ROWS: usize = 64;
/// From as many rows on, products of words are faster than products of bytes.
pub(super) const MANY_ROWS_BY_WORDS: usize = 16;

/// A kernel of [`linear`](super).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinearKernel {
    /// Reads weights as they are stored, in f32: [`few_rows`](super::few_rows). Bound by memory.
    FewRows,
    /// The same in integers of three bytes: [`byte_products`](super::integers::byte_products).
    ByteProducts,
    /// Widens weights to f32, then `gemm`: [`many_rows`](super::many_rows). Bound by arithmetic.
    ManyRows,
    /// Unpacks codes to integers of two bytes: [`word_products`](super::integers::word_products).
    WordProducts,
}

/// The kernel for a weight that is `affine` or dense, of which one matrix has as many as `rows` rows of activations.
pub(super) fn select(level: SimdLevel, affine: bool, rows: usize) -> LinearKernel {
    match rows {
        MANY_ROWS_BY_WORDS.. if affine && level.multiplies_words() => LinearKernel::WordProducts,
        ..MANY_ROWS_BY_WORDS if affine && level.multiplies_bytes() => LinearKernel::ByteProducts,
        _ => select_f32(rows),
    }
}

/// The same for activations in f32: where integers do not serve, or cannot represent a row.
pub(super) fn select_f32(rows: usize) -> LinearKernel {
    if rows < MANY_ROWS { LinearKernel::FewRows } else { LinearKernel::ManyRows }
}

#[cfg(test)]
mod tests {
    use super::{LinearKernel::*, *};

    #[test]
    fn integers_serve_affine_weights_on_vnni() {
        assert_eq!(select(SimdLevel::Avx512Vbmi, true, 1), ByteProducts);
        assert_eq!(select(SimdLevel::Avx512Vbmi, true, 15), ByteProducts);
        for level in SimdLevel::ALL.into_iter().filter(|level| level.multiplies_words()) {
            assert_eq!(select(level, true, 16), WordProducts);
            assert_eq!(select(level, true, 1000), WordProducts);
            assert_eq!(select(level, false, 16), FewRows);
        }
        for level in [SimdLevel::Avx2Vnni, SimdLevel::Avx512Vnni] {
            assert_eq!(select(level, true, 15), FewRows);
        }
    }

    #[test]
    fn rows_decide_in_f32() {
        for level in SimdLevel::ALL {
            for affine in [false, true].into_iter().filter(|&affine| !(affine && level.multiplies_words())) {
                assert_eq!(select(level, affine, 63), FewRows);
                assert_eq!(select(level, affine, 64), ManyRows);
            }
        }
    }
}
