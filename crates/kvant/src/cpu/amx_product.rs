//! AMX matmul of f32 operands, for attention and matrices; each operand is split into hi + lo bf16.
//!
//! hi is the nearest bf16, lo the bf16 nearest to the remainder. An operand that is exact in bf16 has hi only. The
//! product is hi·lo + hi·hi + lo·hi. lo·lo, at most 2⁻¹⁶ of the product, is omitted, which costs about as much accuracy
//! as rounding lo.

use std::arch::{asm, x86_64::*};

use super::simd::amx::{AMX_ROW_BYTES, AMX_ROWS};

/// Bytes of an AMX tile.
pub(super) const AMX_TILE: usize = AMX_ROWS * AMX_ROW_BYTES;
/// Bytes of a hi tile and of the lo tile that follows it.
pub(super) const PAIR: usize = 2 * AMX_TILE;
/// Rows and columns of a block of sums: two tiles each.
pub(super) const BLOCK: usize = 32;

/// A product of two matrices in AMX tiles: 16 or 32 rows times 32 columns.
pub(super) struct AmxProduct {
    /// Sums `[16 or 32, BLOCK]`; rows are `apart` bytes apart.
    pub sums: *mut f32,
    pub apart: usize,
    /// Whether the sums start from zero.
    pub clears: bool,
    /// The first steps of rows 0 to 15 and of rows 16 to 31. A step is one tile for each of hi and lo, `[16, 16]` words
    /// of two numbers. The steps of 16 rows follow each other.
    pub a: [*const u8; 2],
    /// Whether rows 16 to 31 exist.
    pub both: bool,
    /// As `a`, for columns; a word has numbers of two consecutive rows.
    pub b: [*const u8; 2],
    /// The number of terms (hi, lo) of `a` and `b`, 1 or 2, and the bytes of a step.
    pub digits: [usize; 2],
    pub step_bytes: [usize; 2],
    /// The number of steps, at least one. A step adds 32 products to each sum.
    pub steps: usize,
}

/// Flags: rows 16 to 31 exist, `a` has lo tiles, `b` has lo tiles, sums start from zero.
const BOTH: u32 = 1;
const LO_A: u32 = 2;
const LO_B: u32 = 4;
const CLEARS: u32 = 8;

impl AmxProduct {
    /// Adds the products to the sums.
    ///
    /// # Safety
    /// This thread has `AmxRegisters`; the tiles exist, and nobody else accesses the sums.
    #[inline(always)]
    pub(super) unsafe fn add(self) {
        let AmxProduct { sums, apart, clears, a: [a0, a1], both, b: [b0, b1], digits, step_bytes, steps } = self;
        debug_assert!(steps > 0);
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let flags = flag(both, BOTH) | flag(digits[0] == 2, LO_A) | flag(digits[1] == 2, LO_B) | flag(clears, CLEARS);
        // SAFETY: the caller's promise. Independent sums hide each other's latency, and share the loaded tiles.
        unsafe {
            asm!(
                "test {flags:e}, 8",
                "jnz 2f",
                "tileloadd tmm0, [{sums} + {apart}]",
                "tileloadd tmm1, [{sums} + {apart} + 64]",
                "test {flags:e}, 1",
                "jz 3f",
                "tileloadd tmm2, [{more} + {apart}]",
                "tileloadd tmm3, [{more} + {apart} + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                // A step: first lo of the columns.
                "3:",
                "tileloadd tmm4, [{a0} + {row}]",
                "tileloadd tmm5, [{a1} + {row}]",
                "test {flags:e}, 4",
                "jz 4f",
                "tileloadd tmm6, [{b0} + {row} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b1} + {row} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "test {flags:e}, 1",
                "jz 4f",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                // hi of the columns.
                "4:",
                "tileloadd tmm6, [{b0} + {row}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b1} + {row}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "test {flags:e}, 1",
                "jz 5f",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                // lo of the rows.
                "5:",
                "test {flags:e}, 2",
                "jz 6f",
                "tileloadd tmm4, [{a0} + {row} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "test {flags:e}, 1",
                "jz 6f",
                "tileloadd tmm5, [{a1} + {row} + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "6:",
                "add {a0}, {a_step}",
                "add {a1}, {a_step}",
                "add {b0}, {b_step}",
                "add {b1}, {b_step}",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{sums} + {apart}], tmm0",
                "tilestored [{sums} + {apart} + 64], tmm1",
                "test {flags:e}, 1",
                "jz 7f",
                "tilestored [{more} + {apart}], tmm2",
                "tilestored [{more} + {apart} + 64], tmm3",
                "7:",
                sums = in(reg) sums,
                more = in(reg) sums.wrapping_byte_add(AMX_ROWS * apart),
                apart = in(reg) apart,
                row = in(reg) AMX_ROW_BYTES,
                flags = in(reg) flags,
                a0 = inout(reg) a0 => _,
                a1 = inout(reg) a1 => _,
                b0 = inout(reg) b0 => _,
                b1 = inout(reg) b1 => _,
                a_step = in(reg) step_bytes[0],
                b_step = in(reg) step_bytes[1],
                steps = inout(reg) steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

/// Splits the numbers of two vectors into hi and lo, in words with a number of each vector. Infinities, and numbers
/// that round to them, are not preserved.
///
/// # Safety
/// The instructions of `Avx512` are enabled.
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
        // The upper halves of both numbers.
        let word = |[a, b]: [__m512i; 2]| _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(a), b);
        [word(upper), word(lower)]
    }
}
