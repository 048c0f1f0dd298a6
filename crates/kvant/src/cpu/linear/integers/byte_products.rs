//! Byte products of affine rows with a few rows of activations.
//!
//! Codes are unsigned bytes. Activations become 24-bit integers, multiples of a unit per group, in three signed bytes:
//! the error is about 2⁻²⁴ of the group's largest activation, as for f32 numbers with one exponent. An instruction
//! multiplies 64 codes by 64 of these bytes and adds the products in groups of four. The sums of the three bytes are
//! combined in integers (for 8-bit codes in f32), then scaled by group.
//!
//! Codes are processed 64 at a time in natural order, or 128 at a time in two vectors of alternating runs; 4-bit codes
//! have runs of 1. In both cases, a lane of the sums holds neighbouring inputs, which share a scale.

use std::arch::x86_64::*;

use super::{
    super::block::{RowFactors, WeightPrefetch},
    IntegerLayout, measure,
};
use crate::cpu::simd::{Avx512, Simd};

/// Bytes of an activation.
const DIGITS: usize = 3;
/// Floats that may be read beyond the scales of a row.
const PAD: usize = 16;
/// Groups whose scales a vector holds.
const GROUPS: usize = 16;
/// Bytes of a vector.
pub const VECTOR: usize = 64;
/// The maximum of three signed bytes is 8 355 711; slightly less, because the quotient is rounded.
const LARGEST: f32 = 8_355_000.0;

/// The codes of rows that are multiplied together.
pub trait RowCodes: Copy {
    /// Vectors of codes that are processed at a time: 2 if the layout has runs.
    const PARTS: usize;
    /// Whether sums of products with three bytes may overflow 32 bits: codes have more than 6 bits, or with two vectors
    /// more than 5.
    const WIDE: bool;

    /// The prefetches, and the bytes of a row that are processed at a time.
    fn prefetch(&self) -> (WeightPrefetch, usize);

    /// Loads vectors `index` of a row, which has `inputs` codes there; bytes beyond are arbitrary.
    ///
    /// # Safety
    /// The row exists, and the instructions of `Avx512Vbmi` are enabled.
    unsafe fn load(&self, row: usize, index: usize, inputs: usize) -> [__m512i; 2];
}

/// Vectors of codes that are processed at a time.
fn parts(layout: IntegerLayout) -> usize {
    if layout.run > 0 { 2 } else { 1 }
}

/// Inputs that are processed at a time.
fn block_inputs(layout: IntegerLayout) -> usize {
    parts(layout) * VECTOR
}

fn blocks(layout: IntegerLayout) -> usize {
    layout.inputs.div_ceil(block_inputs(layout))
}

/// Floats of a prepared row: its bytes, then for each group its unit, then its sum.
pub fn stride(layout: IntegerLayout) -> usize {
    (blocks(layout) * parts(layout) * DIGITS * VECTOR / 4 + 2 * (layout.groups() + PAD)).next_multiple_of(VECTOR / 4)
}

/// Splits a prepared row into its bytes, units and sums.
fn split(layout: IntegerLayout, row: *const f32) -> (*const u8, *const f32, *const f32) {
    let bytes = blocks(layout) * parts(layout) * DIGITS * VECTOR;
    let units = row.wrapping_add(bytes / 4);
    (row.cast(), units, units.wrapping_add(layout.groups() + PAD))
}

/// Prepares a row of activations. Returns false if integers cannot represent it: an activation is not finite, or all
/// activations of a group are tiny.
///
/// # Safety
/// The instructions of `Avx512Vbmi` are enabled; `x` has the length of a row of the matrix, `to` the length [`stride`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni")]
pub unsafe fn prepare(layout: IntegerLayout, x: &[f32], to: &mut [f32]) -> bool {
    let (bytes, units, sums) = split(layout, to.as_mut_ptr());
    let (bytes, units, sums) = (bytes.cast_mut(), units.cast_mut(), sums.cast_mut());
    let (groups, parts) = (layout.groups(), parts(layout));
    // SAFETY: groups are within the row, and their units and sums within the prepared row. Blocks are, too; for the
    // last one, only vectors of the row are read.
    unsafe {
        for (g, group) in x.chunks_exact(1 << layout.group).enumerate() {
            let Some((largest, sum)) = measure::<Avx512>(group) else { return false };
            units.add(g).write(largest / LARGEST);
            sums.add(g).write(sum);
        }
        for i in 0..PAD {
            units.add(groups + i).write(0.0);
            sums.add(groups + i).write(0.0);
        }
        // The bytes of the even runs of 128 inputs, then of the odd runs.
        let run = layout.run.max(1);
        let numbers: [u8; VECTOR] = std::array::from_fn(|i| (i / run * 2 * run + i % run) as u8);
        let even = _mm512_loadu_si512(numbers.as_ptr().cast());
        let odd = _mm512_add_epi8(even, _mm512_set1_epi8(run as i8));
        for block in 0..blocks(layout) {
            let start = block * block_inputs(layout);
            let mut digits = [[0u8; 2 * VECTOR]; DIGITS];
            for at in (start..layout.inputs.min(start + block_inputs(layout))).step_by(16) {
                let unit = *units.add(at >> layout.group);
                let inverse = if unit == 0.0 { 0.0 } else { 1.0 / unit };
                let x = _mm512_loadu_ps(x.as_ptr().add(at));
                let mut n = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
                for digit in digits.iter_mut().rev() {
                    _mm_storeu_si128(digit.as_mut_ptr().add(at - start).cast(), _mm512_cvtepi32_epi8(n));
                    // Round up if the byte just stored is negative.
                    n = _mm512_srai_epi32::<8>(_mm512_add_epi32(n, _mm512_set1_epi32(128)));
                }
            }
            let to = bytes.add(block * parts * DIGITS * VECTOR);
            for (d, digit) in digits.iter().enumerate() {
                let first = _mm512_loadu_si512(digit.as_ptr().cast());
                let to = to.add(d * parts * VECTOR);
                if parts == 1 {
                    _mm512_storeu_si512(to.cast(), first);
                } else {
                    let second = _mm512_loadu_si512(digit.as_ptr().add(VECTOR).cast());
                    _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi8(first, even, second));
                    _mm512_storeu_si512(to.add(VECTOR).cast(), _mm512_permutex2var_epi8(first, odd, second));
                }
            }
        }
    }
    true
}

/// Multiplies R rows of the matrix, which have these codes, by T prepared rows of activations.
///
/// # Safety
/// The instructions of `Avx512Vbmi` are enabled; the rows have the layout, the activations were prepared for it, and
/// R·T is a multiple of 4.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni")]
#[allow(clippy::needless_range_loop, reason = "a number counts through several arrays at once")]
pub unsafe fn dots<C: RowCodes, const R: usize, const T: usize>(
    layout: IntegerLayout,
    codes: C,
    factors_of: &RowFactors,
    x: [*const f32; T],
) -> [[f32; T]; R] {
    // Without `map`: its closure would be compiled without these instructions, and remain a call.
    let mut parts = [split(layout, x[0]); T];
    for t in 1..T {
        parts[t] = split(layout, x[t]);
    }
    let x = parts;
    let mut total = [[_mm512_setzero_ps(); T]; R];
    let (whole, rest) = (layout.inputs / block_inputs(layout), layout.inputs % block_inputs(layout));
    // SAFETY: the caller's promise; for the last block, only codes of the row are read.
    unsafe {
        let inputs = block_inputs(layout);
        for first in (0..layout.groups()).step_by(GROUPS) {
            let used = (1u32 << (layout.groups() - first).min(GROUPS)).wrapping_sub(1) as __mmask16;
            let mut factors = [[_mm512_setzero_ps(); T]; R];
            for r in 0..R {
                let scales = _mm512_maskz_loadu_ps(used, factors_of.scales.add(r * factors_of.apart + first));
                let biases = _mm512_maskz_loadu_ps(used, factors_of.biases.add(r * factors_of.apart + first));
                for t in 0..T {
                    factors[r][t] = _mm512_mul_ps(scales, _mm512_loadu_ps(x[t].1.add(first)));
                    total[r][t] = _mm512_fmadd_ps(biases, _mm512_loadu_ps(x[t].2.add(first)), total[r][t]);
                }
            }
            // A whole number of blocks.
            let blocks = (GROUPS << layout.group) / block_inputs(layout);
            let start = first / GROUPS * blocks;
            for index in start..whole.min(start + blocks) {
                InputBlock { layout, index, inputs, lanes: !0 }.add(codes, &x, &factors, &mut total);
            }
            if rest > 0 && whole < start + blocks {
                let lanes = (1 << (rest * VECTOR / 4 / inputs)) - 1;
                InputBlock { layout, index: whole, inputs: rest, lanes }.add(codes, &x, &factors, &mut total);
            }
        }
        let mut sums = [[0.0; T]; R];
        for i in (0..R * T).step_by(4) {
            let mut four = [_mm512_setzero_ps(); 4];
            for (j, four) in four.iter_mut().enumerate() {
                *four = total[(i + j) / T][(i + j) % T];
            }
            Avx512::store_sums(sums.as_mut_ptr().cast::<f32>().add(i), four);
        }
        sums
    }
}

/// The inputs that are processed at a time: their number, and their lanes of sums.
#[derive(Clone, Copy)]
struct InputBlock {
    layout: IntegerLayout,
    index: usize,
    inputs: usize,
    lanes: __mmask16,
}

impl InputBlock {
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "a number counts through several arrays at once")]
    unsafe fn add<C: RowCodes, const R: usize, const T: usize>(
        self,
        rows: C,
        x: &[(*const u8, *const f32, *const f32); T],
        factors: &[[__m512; T]; R],
        total: &mut [[__m512; T]; R],
    ) {
        let at = self.index * C::PARTS * VECTOR;
        // SAFETY: the caller's promise.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            // The group of each lane; the instruction uses the lowest four bits.
            let group = _mm_cvtsi32_si128((self.layout.group - (4 * C::PARTS as u32).ilog2()) as i32);
            let first = _mm512_set1_epi32((at >> self.layout.group) as i32);
            let group_of = _mm512_add_epi32(_mm512_srl_epi32(lanes, group), first);
            let (prefetch, bytes) = rows.prefetch();
            let (mut prefetch, apart) = prefetch.at::<R>(self.index, bytes);
            for r in 0..R {
                _mm_prefetch::<_MM_HINT_T1>(prefetch.cast());
                prefetch = prefetch.wrapping_add(apart);
                let codes = rows.load(r, self.index, self.inputs);
                for t in 0..T {
                    let mut sum = _mm512_setzero_si512();
                    let mut high = _mm512_setzero_ps();
                    for d in 0..DIGITS {
                        for part in 0..C::PARTS {
                            let vector = (self.index * DIGITS + d) * C::PARTS + part;
                            let x = _mm512_loadu_si512(x[t].0.add(vector * VECTOR).cast());
                            sum = _mm512_dpbusd_epi32(sum, codes[part], x);
                        }
                        if C::WIDE && d == 0 {
                            high = _mm512_cvtepi32_ps(sum);
                            sum = _mm512_setzero_si512();
                        } else if d + 1 < DIGITS {
                            sum = _mm512_slli_epi32::<8>(sum);
                        }
                    }
                    let mut sum = _mm512_cvtepi32_ps(sum);
                    if C::WIDE {
                        sum = _mm512_fmadd_ps(high, _mm512_set1_ps(65536.0), sum);
                    }
                    let factors = _mm512_maskz_permutexvar_ps(self.lanes, group_of, factors[r][t]);
                    total[r][t] = _mm512_fmadd_ps(sum, factors, total[r][t]);
                }
            }
        }
    }
}

/// The codes of affine rows of BITS bits, in MLX's packing.
#[derive(Clone, Copy)]
pub struct PackedCodes<const BITS: usize> {
    /// The codes of the first row, and the bytes between rows.
    pub codes: *const u8,
    pub apart: usize,
    pub prefetch: WeightPrefetch,
}

impl<const BITS: usize> RowCodes for PackedCodes<BITS> {
    const PARTS: usize = if BITS == 4 { 2 } else { 1 };
    const WIDE: bool = BITS == 8;

    fn prefetch(&self) -> (WeightPrefetch, usize) {
        (self.prefetch, Self::PARTS * 8 * BITS)
    }

    #[inline(always)]
    unsafe fn load(&self, row: usize, index: usize, inputs: usize) -> [__m512i; 2] {
        // SAFETY: the caller's promise: the row has these words.
        unsafe {
            let words = ((1u32 << (inputs * BITS / 32)) - 1) as __mmask16;
            let from = self.codes.add(row * self.apart + index * Self::PARTS * 8 * BITS);
            unpack::<BITS>(_mm512_maskz_loadu_epi32(words, from.cast()))
        }
    }
}

/// The codes of a vector as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni")]
fn unpack<const BITS: usize>(packed: __m512i) -> [__m512i; 2] {
    match BITS {
        4 => {
            let nibble = _mm512_set1_epi8(15);
            [_mm512_and_si512(packed, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(packed), nibble)]
        }
        8 => [packed, packed],
        _ => {
            // Each eight bytes get the bytes that hold their codes; byte i then gets the bits from BITS · i on.
            let order = const {
                let mut order = [0; VECTOR];
                let mut i = 0;
                while i < VECTOR {
                    order[i] = if i % 8 < BITS { i / 8 * BITS + i % 8 } else { 63 } as u8;
                    i += 1;
                }
                order
            };
            // SAFETY: a vector of 64 bytes.
            let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
            let shifts = _mm512_set1_epi64(0x07_06_05_04_03_02_01_00 * BITS as i64);
            let bytes = _mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(order, packed));
            [_mm512_and_si512(bytes, _mm512_set1_epi8(((1 << BITS) - 1) as i8)), bytes]
        }
    }
}
