//! Codes of rows in blocks, unpacked in registers: 128 inputs at a time, half a block of 256 or four blocks of 32.
//!
//! The first vector has the even runs of inputs, the second the odd ones, so that a lane of their sums holds inputs of
//! one group. [`BlockMatrix::run`] is the run length that the format makes cheap.

use std::arch::x86_64::*;

use super::{
    super::{
        block::WeightPrefetch,
        blocks::{BlockMatrix, E2M1, IQ4, packing},
    },
    byte_products::RowCodes,
};
/// Rows in blocks of one [`Packing`] at equal distances.
#[derive(Clone, Copy)]
pub struct BlockCodes<const PACKING: usize> {
    start: *const u8,
    apart: usize,
    prefetch: WeightPrefetch,
    /// Bytes of 128 inputs.
    bytes: usize,
}

impl<const PACKING: usize> BlockCodes<PACKING> {
    /// Rows of `blocks`. The first one begins at `start`; rows are `apart` bytes apart.
    pub fn new(blocks: &BlockMatrix, start: *const u8, apart: usize, prefetch: WeightPrefetch) -> Self {
        BlockCodes { start, apart, prefetch, bytes: blocks.row_bytes(256) / 2 }
    }
}

impl<const PACKING: usize> RowCodes for BlockCodes<PACKING> {
    const PARTS: usize = 2;
    const WIDE: bool = matches!(PACKING, packing::IQ4_NL | packing::IQ4_XS | packing::Q6_K);

    #[inline(always)]
    fn prefetch(&self) -> (WeightPrefetch, usize) {
        (self.prefetch, self.bytes)
    }

    #[inline(always)]
    unsafe fn load(&self, row: usize, index: usize, inputs: usize) -> [__m512i; 2] {
        // SAFETY: the caller's promise: the row has these inputs.
        unsafe {
            let row = self.start.wrapping_add(row * self.apart);
            // Half a block of 256, or four blocks of 32.
            let (block, half) = (row.wrapping_add(index / 2 * 2 * self.bytes), index % 2);
            let four = row.wrapping_add(index * self.bytes);
            match PACKING {
                packing::Q4_K => alternate_runs_of_16(nibbles(load(block.add(16 + half * 64)))),
                packing::Q5_K => {
                    let [low, high] = nibbles(load(block.add(48 + half * 64)));
                    let bits = twice(block.add(16));
                    let low = with_bits::<0x10>(low, bits, [4, 2], half);
                    alternate_runs_of_16([low, with_bits::<0x10>(high, bits, [3, 1], half)])
                }
                packing::Q6_K => {
                    let [low, high] = nibbles(load(block.add(half * 64)));
                    let bits = twice(block.add(128 + half * 32));
                    let low = with_bits::<0x30>(low, bits, [4, 2], 0);
                    alternate_runs_of_8([low, with_bits::<0x30>(high, bits, [0, -2], 0)])
                }
                packing::Q2_K => alternate_runs_of_8(pairs(twice(block.add(16 + half * 32)))),
                packing::Q3_K => {
                    let [first, second] = pairs(twice(block.add(32 + half * 32)));
                    let bits = twice(block);
                    let first = with_bits::<4>(first, bits, [2, 1], half);
                    alternate_runs_of_8([first, with_bits::<4>(second, bits, [0, -1], half)])
                }
                packing::IQ4_XS => entries(&IQ4, nibbles(load(block.add(8 + half * 64)))),
                packing::IQ4_NL => entries(&IQ4, nibbles(sixteens::<18>(four, 2, inputs))),
                packing::MXFP4 => entries(&E2M1, nibbles(sixteens::<17>(four, 1, inputs))),
                packing::Q5_0 => with_fifths::<22>(four, 2, inputs),
                packing::Q5_1 => with_fifths::<24>(four, 4, inputs),
                _ => {
                    let words = ((1u32 << (inputs / 8)) - 1) as __mmask16;
                    entries(&E2M1, nibbles(_mm512_maskz_loadu_epi32(words, four.cast())))
                }
            }
        }
    }
}

// SAFETY of every block below: AVX-512 is enabled, and the caller's pointers are valid.

#[inline(always)]
unsafe fn load(from: *const u8) -> __m512i {
    // SAFETY: as above.
    unsafe { _mm512_loadu_si512(from.cast()) }
}

/// Loads 32 bytes into both halves.
#[inline(always)]
unsafe fn twice(from: *const u8) -> __m512i {
    // SAFETY: as above.
    unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(from.cast())) }
}

/// The low and the high halves of bytes.
#[inline(always)]
unsafe fn nibbles(packed: __m512i) -> [__m512i; 2] {
    // SAFETY: as above.
    unsafe {
        let nibble = _mm512_set1_epi8(15);
        [_mm512_and_si512(packed, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(packed), nibble)]
    }
}

/// Three vectors of 2-bit codes: bits 0 and 1 of the lower 32 bytes with bits 2 and 3 of the upper ones; then bits 4
/// and 5; then bits 6 and 7.
#[inline(always)]
unsafe fn pairs(bytes: __m512i) -> [__m512i; 2] {
    // SAFETY: as above.
    unsafe {
        let zero = _mm512_setzero_si512();
        [with_bits::<3>(zero, bytes, [0, -2], 0), with_bits::<3>(zero, bytes, [-4, -6], 0)]
    }
}

/// Codes whose bits in MASK come from rotated bytes: rotated left by `left` bits for the lower and upper 32, and by 4
/// less in the second `half` of a block.
#[inline(always)]
unsafe fn with_bits<const MASK: i8>(codes: __m512i, bits: __m512i, left: [i64; 2], half: usize) -> __m512i {
    // SAFETY: as above.
    unsafe {
        let [lower, upper] = left;
        let left = _mm512_setr_epi64(lower, lower, lower, lower, upper, upper, upper, upper);
        let left = _mm512_sub_epi64(left, _mm512_set1_epi64(4 * half as i64));
        // 0xCA selects the second operand's bit if the first's is one, otherwise the third's.
        _mm512_ternarylogic_epi32::<0xCA>(_mm512_set1_epi8(MASK), _mm512_rolv_epi64(bits, left), codes)
    }
}

/// Converts planes of 32 inputs, even ones in one vector and odd ones in the other, to alternating runs of 16.
#[inline(always)]
unsafe fn alternate_runs_of_16([even, odd]: [__m512i; 2]) -> [__m512i; 2] {
    // SAFETY: as above.
    unsafe {
        let first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
        let second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
        [_mm512_permutex2var_epi64(even, first, odd), _mm512_permutex2var_epi64(even, second, odd)]
    }
}

/// Converts natural order to alternating runs of 8.
#[inline(always)]
unsafe fn alternate_runs_of_8([lower, upper]: [__m512i; 2]) -> [__m512i; 2] {
    // SAFETY: as above.
    unsafe {
        let first = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
        let second = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
        [_mm512_permutex2var_epi64(lower, first, upper), _mm512_permutex2var_epi64(lower, second, upper)]
    }
}

/// Looks codes up in a table.
#[inline(always)]
unsafe fn entries(table: &[u8; 16], [low, high]: [__m512i; 2]) -> [__m512i; 2] {
    // SAFETY: as above.
    unsafe {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        [_mm512_shuffle_epi8(table, low), _mm512_shuffle_epi8(table, high)]
    }
}

/// The index of the `i`th of four blocks, or of the last block if `inputs` end before.
#[inline(always)]
fn number(i: usize, inputs: usize) -> usize {
    i.min(inputs / 32 - 1)
}

/// Loads 16 bytes of each of four blocks, `offset` bytes from their start.
#[inline(always)]
unsafe fn sixteens<const BYTES: usize>(blocks: *const u8, offset: usize, inputs: usize) -> __m512i {
    // SAFETY: as above.
    unsafe {
        let from = |i| blocks.add(number(i, inputs) * BYTES + offset).cast::<__m128i>();
        let packed = _mm512_castsi128_si512(_mm_loadu_si128(from(0)));
        let packed = _mm512_inserti32x4::<1>(packed, _mm_loadu_si128(from(1)));
        let packed = _mm512_inserti32x4::<2>(packed, _mm_loadu_si128(from(2)));
        _mm512_inserti32x4::<3>(packed, _mm_loadu_si128(from(3)))
    }
}

/// The codes of four blocks whose fifth bits are in the word at byte `offset`, before the other bits.
#[inline(always)]
unsafe fn with_fifths<const BYTES: usize>(blocks: *const u8, offset: usize, inputs: usize) -> [__m512i; 2] {
    // SAFETY: as above.
    unsafe {
        let [low, high] = nibbles(sixteens::<BYTES>(blocks, offset + 4, inputs));
        let mut fifths = [0; 2];
        for i in 0..4 {
            let word = blocks.add(number(i, inputs) * BYTES + offset).cast::<u32>().read_unaligned();
            fifths[0] |= u64::from(word & 0xFFFF) << (16 * i);
            fifths[1] |= u64::from(word >> 16) << (16 * i);
        }
        let fifth = _mm512_set1_epi8(16);
        [_mm512_mask_add_epi8(low, fifths[0], low, fifth), _mm512_mask_add_epi8(high, fifths[1], high, fifth)]
    }
}
