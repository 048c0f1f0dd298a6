//! Products of tiles of bf16 in two digits.

use std::arch::{asm, x86_64::*};

use crate::cpu::simd::amx::{TILE_BYTES, TILE_ROWS, TileShapes};

/// Bytes of a tile.
const TILE: usize = TILE_ROWS * TILE_BYTES;
/// Bytes of a tile of upper digits and of the tile of lower digits that follows it.
pub(super) const PAIR: usize = 2 * TILE;
/// Rows and columns of a block of sums: two tiles.
pub(super) const BLOCK: usize = 32;

/// All eight registers are as large as they can be.
pub(super) fn shapes() -> TileShapes {
    TileShapes::new(&[(TILE_ROWS, TILE_BYTES); 8])
}

/// A product of two matrices, in tiles: 32 rows times 32 columns.
pub(super) struct TileProduct {
    /// `[BLOCK, BLOCK]`.
    pub sums: *mut f32,
    /// Whether the sums start from zero.
    pub clears: bool,
    /// The first pairs of tiles of rows 0 to 15 and of rows 16 to 31, `[16, 16]` words of two numbers. The pairs of a
    /// tile row follow each other.
    pub a: [*const u8; 2],
    /// The same of columns; a word has numbers of two rows.
    pub b: [*const u8; 2],
    /// Pairs of tiles, each 32 products of a sum; at least one.
    pub pairs: usize,
    /// Whether the lower digits of `a` are zero; they are then not read.
    pub is_exact: bool,
}

impl TileProduct {
    /// Computes the sums of upper·upper, upper·lower and lower·upper digits.
    ///
    /// # Safety
    /// This thread has `Tiles` of [`shapes`]; the tiles exist, and nobody else holds the sums.
    #[inline(always)]
    pub unsafe fn add(self) {
        let TileProduct { sums, clears, a: [a0, a1], b: [b0, b1], pairs, is_exact } = self;
        debug_assert!(pairs > 0);
        // SAFETY: the caller's promise. Four independent sums hide the latency of each, and share the tiles loaded.
        unsafe {
            asm!(
                "test {clears:e}, {clears:e}",
                "jnz 2f",
                "tileloadd tmm0, [{sums} + 2*{row}]",
                "tileloadd tmm1, [{sums} + 2*{row} + 64]",
                "tileloadd tmm2, [{sums} + 2*{row} + 2048]",
                "tileloadd tmm3, [{sums} + 2*{row} + 2112]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "tileloadd tmm4, [{a0} + {row}]",
                "tileloadd tmm6, [{b0} + {row} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b1} + {row} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {row}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm6, [{b0} + {row}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b1} + {row}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "test {exact:e}, {exact:e}",
                "jnz 4f",
                "tileloadd tmm4, [{a0} + {row} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {row} + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "4:",
                "add {a0}, 2048",
                "add {a1}, 2048",
                "add {b0}, 2048",
                "add {b1}, 2048",
                "dec {pairs}",
                "jnz 3b",
                "tilestored [{sums} + 2*{row}], tmm0",
                "tilestored [{sums} + 2*{row} + 64], tmm1",
                "tilestored [{sums} + 2*{row} + 2048], tmm2",
                "tilestored [{sums} + 2*{row} + 2112], tmm3",
                sums = in(reg) sums,
                row = in(reg) TILE_BYTES,
                clears = in(reg) u32::from(clears),
                exact = in(reg) u32::from(is_exact),
                a0 = inout(reg) a0 => _,
                a1 = inout(reg) a1 => _,
                b0 = inout(reg) b0 => _,
                b1 = inout(reg) b1 => _,
                pairs = inout(reg) pairs => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

/// Numbers as two digits, in words of a number of each vector: the bf16 nearest to it, and the bf16 nearest to the
/// rest. Infinities, and numbers that round to them, are not kept: see [`LargestMagnitude`].
///
/// # Safety
/// The instructions of `Avx512` are there.
#[inline(always)]
pub(super) unsafe fn digits(numbers: [__m512; 2]) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let half = _mm512_set1_epi32(0x8000);
        let upper_bits = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let mut digits = [[_mm512_setzero_si512(); 2]; 2];
        for (i, x) in numbers.into_iter().enumerate() {
            let upper = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half), upper_bits);
            let rest = _mm512_sub_ps(x, _mm512_castsi512_ps(upper));
            digits[0][i] = upper;
            digits[1][i] = _mm512_add_epi32(_mm512_castps_si512(rest), half);
        }
        let [upper, lower] = digits;
        // The upper halves of both.
        let word = |[a, b]: [__m512i; 2]| _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(a), b);
        [word(upper), word(lower)]
    }
}

/// The largest magnitude of some numbers.
#[derive(Clone, Copy)]
pub(super) struct LargestMagnitude(__m512i);

impl LargestMagnitude {
    /// # Safety
    /// Of all functions: as for [`digits`].
    #[inline(always)]
    pub unsafe fn new() -> LargestMagnitude {
        // SAFETY: the caller's promise.
        LargestMagnitude(unsafe { _mm512_setzero_si512() })
    }

    #[inline(always)]
    pub unsafe fn add(&mut self, numbers: [__m512; 2]) {
        for x in numbers {
            // SAFETY: the caller's promise.
            unsafe {
                let magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX));
                self.0 = _mm512_max_epu32(self.0, magnitude);
            }
        }
    }

    /// Whether all digits are finite.
    #[inline(always)]
    pub unsafe fn is_finite(self) -> bool {
        // Larger magnitudes round to infinity; NaN are larger still.
        const LARGEST: u32 = 0x7f7f_7fff;
        // SAFETY: the caller's promise.
        unsafe { _mm512_reduce_max_epu32(self.0) <= LARGEST }
    }
}
