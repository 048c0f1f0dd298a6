//! Products of affine rows with many rows of activations, in 16-bit integers.
//!
//! Activations become multiples of a unit per group: an error of at most 2⁻¹⁶ of the largest of the group. Codes become
//! signed words, relative to the middle of their range. An instruction multiplies 32 of each and adds the products in
//! pairs, twice as many as in f32. The sum of a group is exact, then scaled.
//!
//! A panel holds the codes of [`OUTPUTS`] outputs, unpacked once for all rows of activations. A lane is an output, and
//! a vector holds two neighbouring inputs of 8 or 16 outputs, so no sum runs across lanes. The innermost loop does one
//! such step for two vectors of outputs and up to [`ROWS`] rows of activations: 12 sums and their operands, and with
//! AVX-512 also 12 totals, are in registers. AVX-VNNI's vectors have half of a panel's outputs.

use std::arch::x86_64::*;

use super::{IntegerLayout, measure};
use crate::cpu::simd::{Avx512, Simd};

/// Outputs of a panel: two of the longest vectors.
pub const OUTPUTS: usize = 32;
/// Vectors of outputs that are processed together.
const VECTORS: usize = 2;
/// The most rows of activations that are processed together.
pub const ROWS: usize = 6;
/// Codes of an output in a word of 32 bits, at four bits each, and words that are transposed at a time.
const EIGHT: usize = 8;
const WORDS: usize = 16;
/// What 16 bits reach, less what rounding the quotient may add.
const LARGEST: f32 = 32766.0;
/// Words between two prepared rows, lest rows fall into the same few sets of the caches.
const APART: usize = 16;

/// Words of a prepared row: its integers, then for each group its unit, then its sum.
pub fn stride(layout: IntegerLayout) -> usize {
    (layout.inputs() / 2 + 2 * layout.groups()).next_multiple_of(16) + APART
}

/// Floats of a panel: for each pair of inputs its outputs' codes, then for each group their scales, then their biases.
pub fn panel(layout: IntegerLayout) -> usize {
    OUTPUTS * (layout.inputs() / 2 + 2 * layout.groups())
}

/// Prepares a row of activations. False if it cannot be: where one is not finite, or all of a group are tiny.
///
/// # Safety
/// The level's instructions are enabled; `x` is as long as a row of the matrix, `to` as [`stride`] says.
#[inline(always)]
pub unsafe fn prepare<S: Simd>(layout: IntegerLayout, x: &[f32], to: &mut [f32]) -> bool {
    let (words, rest) = to.split_at_mut(layout.inputs() / 2);
    let (units, sums) = rest.split_at_mut(layout.groups());
    let group = layout.inputs() / layout.groups().max(1);
    for (g, x) in x.chunks_exact(group).enumerate() {
        // SAFETY: a group is a whole number of vectors, and two of its numbers take a word.
        unsafe {
            let Some((largest, sum)) = measure::<S>(x) else { return false };
            (units[g], sums[g]) = (largest / LARGEST, sum);
            let inverse = S::splat(if largest == 0.0 { 0.0 } else { LARGEST / largest });
            let to = words.as_mut_ptr().add(g * group / 2).cast::<i16>();
            for i in (0..group).step_by(S::LANES) {
                S::store_words(to.add(i), S::mul(S::load(x.as_ptr().add(i)), inverse));
            }
        }
    }
    true
}

/// Unpacks the codes of a panel's outputs, the scales and biases of which are there, and counts them from `middle`,
/// that of their range: scale · code + bias = scale · (code − middle) + (bias + middle · scale).
///
/// # Safety
/// The level's instructions are enabled, the rows exist, and the panel is as long as [`panel`] says.
#[inline(always)]
pub unsafe fn unpack<S: Simd, const BITS: usize>(
    layout: IntegerLayout,
    middle: i16,
    codes: [*const u8; OUTPUTS],
    panel: &mut [f32],
) {
    let (words, factors) = panel.split_at_mut(OUTPUTS * layout.inputs() / 2);
    let (scales, biases) = factors.split_at_mut(OUTPUTS * layout.groups());
    for (bias, scale) in biases.iter_mut().zip(scales) {
        *bias = f32::from(middle).mul_add(*scale, *bias);
    }
    // SAFETY: passed on to the caller: of the levels, AVX-512's have 16 lanes.
    unsafe {
        if S::LANES == 16 {
            unpack_by_words::<BITS>(layout, middle, codes, words);
        } else {
            unpack_by_bytes::<BITS>(middle, codes, words);
        }
    }
}

/// With AVX-VNNI's level: eight codes become bytes by one instruction, then words.
///
/// # Safety
/// The instructions of `Avx2Vnni` are enabled; the rows have codes for all words.
#[target_feature(enable = "avx2,bmi2")]
unsafe fn unpack_by_bytes<const BITS: usize>(middle: i16, codes: [*const u8; OUTPUTS], words: &mut [f32]) {
    let bytes = u64::from_ne_bytes([((1u32 << BITS) - 1) as u8; 8]);
    let middles = _mm_set1_epi16(middle);
    for (step, to) in words.chunks_exact_mut(4 * OUTPUTS).enumerate() {
        for (n, codes) in codes.iter().enumerate() {
            // SAFETY: eight codes are as many bytes as one has bits; `to` holds four pairs of each output.
            unsafe {
                let mut eight = 0u64;
                std::ptr::copy_nonoverlapping(codes.add(step * BITS), (&raw mut eight).cast(), BITS);
                let codes = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(_pdep_u64(eight, bytes) as i64));
                let pairs = _mm_sub_epi16(codes, middles);
                let to = to.as_mut_ptr().add(n).cast::<i32>();
                to.write(_mm_extract_epi32::<0>(pairs));
                to.add(OUTPUTS).write(_mm_extract_epi32::<1>(pairs));
                to.add(2 * OUTPUTS).write(_mm_extract_epi32::<2>(pairs));
                to.add(3 * OUTPUTS).write(_mm_extract_epi32::<3>(pairs));
            }
        }
    }
}

/// With AVX-512: sixteen outputs at a time.
///
/// # Safety
/// The instructions of `Avx512Vnni` are enabled; the rows have codes for all words.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn unpack_by_words<const BITS: usize>(
    layout: IntegerLayout,
    middle: i16,
    codes: [*const u8; OUTPUTS],
    words: &mut [f32],
) {
    let mut done = 0;
    if let (4, 8, Some(apart)) = (BITS, middle, words_apart(&codes)) {
        done = layout.inputs() / EIGHT / WORDS * WORDS;
        // SAFETY: the caller's promise; rows of four bits have so many whole words.
        unsafe { unpack_four_bits(codes[0], apart, &mut words[..done * 4 * OUTPUTS]) };
    }
    let mask = _mm512_set1_epi32((1 << BITS) - 1);
    let middles = _mm512_set1_epi16(middle);
    // Eight codes are as many bytes as one has bits.
    for (step, to) in words.chunks_exact_mut(4 * OUTPUTS).enumerate().skip(done) {
        for (half, codes) in codes.chunks_exact(16).enumerate() {
            // SAFETY: a row is a whole number of groups, and they of eights; `to` holds four pairs of each output.
            unsafe {
                let mut eights = [0u64; 16];
                for (eight, codes) in eights.iter_mut().zip(codes) {
                    let from = codes.add(step * BITS);
                    std::ptr::copy_nonoverlapping(from, std::ptr::from_mut(eight).cast::<u8>(), BITS);
                }
                let low = _mm512_loadu_si512(eights.as_ptr().cast());
                let high = _mm512_loadu_si512(eights.as_ptr().add(8).cast());
                for pair in 0..4 {
                    let by = _mm_cvtsi32_si128((2 * BITS * pair) as i32);
                    let low = _mm512_cvtepi64_epi32(_mm512_srl_epi64(low, by));
                    let high = _mm512_cvtepi64_epi32(_mm512_srl_epi64(high, by));
                    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                    let first = _mm512_and_si512(both, mask);
                    let by = _mm_cvtsi32_si128(16 - BITS as i32);
                    let second = _mm512_andnot_si512(_mm512_set1_epi32(0xFFFF), _mm512_sll_epi32(both, by));
                    let second = _mm512_and_si512(second, _mm512_slli_epi32::<16>(mask));
                    let pairs = _mm512_sub_epi16(_mm512_or_si512(first, second), middles);
                    _mm512_storeu_si512(to.as_mut_ptr().add(pair * OUTPUTS + half * 16).cast(), pairs);
                }
            }
        }
    }
}

/// Whole lines of the cache.
#[repr(align(64))]
struct Lines([f32; WORDS * 16]);

/// The distance between equally distant rows, in words.
fn words_apart(rows: &[*const u8; OUTPUTS]) -> Option<usize> {
    let apart = rows[1].addr().checked_sub(rows[0].addr())?;
    let is_equal = rows.windows(2).all(|pair| pair[0].addr().wrapping_add(apart) == pair[1].addr());
    (is_equal && apart > 0 && apart.is_multiple_of(size_of::<f32>())).then_some(apart / size_of::<f32>())
}

/// Unpacks codes of four bits, counted from 8, of outputs whose rows are `apart` words from each other: words are
/// transposed, so that a vector has eight codes of each of 16 outputs.
///
/// # Safety
/// The instructions of `Avx512Vnni` are enabled. `to` has a word for each pair of inputs of [`OUTPUTS`] outputs, and
/// the rows have codes for all of it. Its length is a multiple of `WORDS * 4 * OUTPUTS`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn unpack_four_bits(codes: *const u8, apart: usize, to: &mut [f32]) {
    // With its highest bit inverted, a code is its distance from 8 as a signed number.
    let invert = _mm512_set1_epi8(0x88_u8 as i8);
    // The first code of a byte goes to the low half of a lane, the second one to the high half, each to the top bits.
    let shifts = _mm512_set1_epi32(8 << 16 | 12);
    // A byte of each word, twice.
    let byte = |pair: i32| {
        let of_word = |word: i32| (4 * word + pair) | 0x80 << 8 | (4 * word + pair) << 16 | 0x80 << 24;
        _mm512_broadcast_i32x4(_mm_setr_epi32(of_word(0), of_word(1), of_word(2), of_word(3)))
    };
    let bytes = [byte(0), byte(1), byte(2), byte(3)];
    let mut words = Lines([0.0; WORDS * 16]);
    for (block, to) in to.chunks_exact_mut(WORDS * 4 * OUTPUTS).enumerate() {
        for half in 0..2 {
            // SAFETY: 16 rows of 16 words, and room for four pairs of each of these words of 32 outputs.
            unsafe {
                let from = codes.cast::<f32>().add(half * 16 * apart + block * WORDS);
                Avx512::transpose16(from, apart, words.0.as_mut_ptr());
                for word in 0..WORDS {
                    let eights = _mm512_loadu_si512(words.0.as_ptr().add(16 * word).cast());
                    let eights = _mm512_xor_si512(eights, invert);
                    for (pair, &byte) in bytes.iter().enumerate() {
                        let top = _mm512_sllv_epi16(_mm512_shuffle_epi8(eights, byte), shifts);
                        let to = to.as_mut_ptr().add((word * 4 + pair) * OUTPUTS + half * 16);
                        _mm512_storeu_si512(to.cast(), _mm512_srai_epi16::<12>(top));
                    }
                }
            }
        }
    }
}

/// Where the products of a panel go.
pub struct PanelOutputs<const R: usize> {
    /// The first output of each row; rows may be the same.
    pub rows: [*mut f32; R],
    /// How many outputs there are.
    pub outputs: usize,
    /// What they are multiplied by.
    pub alpha: f32,
}

/// The products of a panel's outputs with prepared rows of activations.
///
/// # Safety
/// The level's instructions are enabled; the rows and the panel were prepared for the layout; `to` has these places.
#[inline(always)]
pub unsafe fn products<S: Simd, const R: usize>(
    layout: IntegerLayout,
    panel: &[f32],
    x: [*const f32; R],
    to: &PanelOutputs<R>,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        // The output lines are far apart and mostly in no near cache: they are prefetched first.
        for to in to.rows {
            S::prefetch_to_write(to.cast());
            S::prefetch_to_write(to.wrapping_add(16).cast());
        }
        for first in (0..to.outputs).step_by(VECTORS * S::LANES) {
            products_from::<S, R>(layout, panel, x, to, first);
        }
    }
}

/// The same for two vectors of outputs, from output `first` on.
///
/// # Safety
/// As for [`products`].
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "a number counts through several arrays at once")]
unsafe fn products_from<S: Simd, const R: usize>(
    layout: IntegerLayout,
    panel: &[f32],
    x: [*const f32; R],
    to: &PanelOutputs<R>,
    first: usize,
) {
    let groups = layout.groups();
    let pairs = layout.inputs() / 2 / groups.max(1);
    let (codes, factors) = panel.split_at(OUTPUTS * layout.inputs() / 2);
    // SAFETY: the caller's promise; two vectors from the first output on are within the panel's.
    unsafe {
        let (codes_from, scales) = (codes.as_ptr().add(first), factors.as_ptr().add(first));
        let mut total = [[S::zero(); VECTORS]; R];
        for g in 0..groups {
            let mut sum = [[S::splat_words(0); VECTORS]; R];
            for pair in g * pairs..(g + 1) * pairs {
                let codes = codes_from.add(pair * OUTPUTS);
                let codes = [S::load_words(codes), S::load_words(codes.add(S::LANES))];
                for t in 0..R {
                    let x = S::splat_words(x[t].add(pair).cast::<i32>().read());
                    for v in 0..VECTORS {
                        sum[t][v] = S::dot_words(sum[t][v], codes[v], x);
                    }
                }
            }
            for v in 0..VECTORS {
                let scale = S::load(scales.add(g * OUTPUTS + v * S::LANES));
                let bias = S::load(scales.add((groups + g) * OUTPUTS + v * S::LANES));
                for t in 0..R {
                    let unit = S::splat(x[t].add(layout.inputs() / 2 + g).read());
                    let all = S::splat(x[t].add(layout.inputs() / 2 + groups + g).read());
                    let dot = S::mul(S::widen_sums(sum[t][v]), unit);
                    total[t][v] = S::fma(dot, scale, S::fma(bias, all, total[t][v]));
                }
            }
        }
        let alpha = S::splat(to.alpha);
        let count = (to.outputs - first).min(VECTORS * S::LANES);
        for t in 0..R {
            let (mut row, place) = ([0f32; OUTPUTS], to.rows[t].wrapping_add(first));
            let whole = count == VECTORS * S::LANES;
            let products = if whole { place } else { row.as_mut_ptr() };
            for v in 0..VECTORS {
                S::store(products.add(v * S::LANES), S::mul(total[t][v], alpha));
            }
            if !whole {
                std::ptr::copy_nonoverlapping(row.as_ptr(), place, count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{SimdLevel, simd::Avx2, testing::Numbers};

    /// Rows that are equally far apart are unpacked in another way than others, whole blocks of them and the rest.
    #[test]
    fn all_ways_to_unpack_four_bits_agree() {
        if !SimdLevel::Avx512Vnni.is_supported() {
            return;
        }
        let mut numbers = Numbers(3);
        for inputs in [32, 128, 160, 256, 1024] {
            let layout = IntegerLayout::new(inputs, 0, 32);
            let bytes = inputs / 2;
            let rows: Vec<u8> = (0..OUTPUTS * bytes).map(|_| numbers.below(256) as u8).collect();
            let mut panels = Vec::new();
            for gap in [0, 4, 3] {
                // The last row moves away.
                let mut memory = rows[..(OUTPUTS - 1) * bytes].to_vec();
                memory.extend(vec![0; gap]);
                memory.extend_from_slice(&rows[(OUTPUTS - 1) * bytes..]);
                let start = |n: usize| n * bytes + if n + 1 == OUTPUTS { gap } else { 0 };
                let codes: [*const u8; OUTPUTS] = std::array::from_fn(|n| memory[start(n)..].as_ptr());
                assert_eq!(words_apart(&codes), (gap == 0).then_some(bytes / 4));
                let mut panel = vec![1f32; super::panel(layout)];
                // SAFETY: the instructions are there, the rows have so many codes, and the panel is as long.
                unsafe { unpack::<Avx512, 4>(layout, 8, codes, &mut panel) };
                panels.push(panel.into_iter().map(f32::to_bits).collect::<Vec<u32>>());
                if SimdLevel::Avx2Vnni.is_supported() {
                    let mut panel = vec![1f32; super::panel(layout)];
                    // SAFETY: as above.
                    unsafe { unpack::<Avx2, 4>(layout, 8, codes, &mut panel) };
                    panels.push(panel.into_iter().map(f32::to_bits).collect());
                }
            }
            assert!(panels.iter().all(|panel| *panel == panels[0]));
            // Input 0 and 1 of output 0.
            let [first, second] = [panels[0][0] as u16 as i16, (panels[0][0] >> 16) as i16];
            assert_eq!([first, second], [i16::from(rows[0] & 15) - 8, i16::from(rows[0] >> 4) - 8]);
        }
    }
}
