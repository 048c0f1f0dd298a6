//! Unpacks the codes of a panel of outputs to the integers of [`panel_products`](super::panel_products).

use std::arch::x86_64::*;

use super::panel_products::{BYTES, OUTPUTS, PanelLayout, WORDS};
use crate::cpu::simd::{Avx512, Simd, TransposedRows};

/// Codes that are unpacked together: eight codes of n bits fill n bytes.
const EIGHT: usize = 8;
/// Words of a row, and rows, that are transposed together.
const SQUARE: usize = 16;

/// Unpacks the codes of a panel's outputs, of `bits` bits each. The panel already contains their scales and biases.
///
/// Codes become relative to the middle of their range: scale · code + bias = scale · (code − middle) + (bias + middle ·
/// scale). The function changes words and biases accordingly. It does not change bytes: their sums start from a
/// corrected value instead.
///
/// # Safety
/// The level's instructions are enabled, the rows exist, and the panel has the length [`PanelLayout::panel`].
#[inline(always)]
pub unsafe fn unpack<S: Simd, const PER_WORD: usize>(
    layout: PanelLayout,
    bits: usize,
    codes: [*const u8; OUTPUTS],
    panel: &mut [f32],
) {
    let (words, factors) = panel.split_at_mut(OUTPUTS * layout.words());
    let (scales, biases) = factors.split_at_mut(OUTPUTS * layout.rows.groups());
    let middle = layout.rows.middle();
    for (bias, scale) in biases.iter_mut().zip(scales) {
        *bias = f32::from(middle).mul_add(*scale, *bias);
    }
    // SAFETY: passed on to the caller.
    unsafe {
        match bits {
            2 => unpack_bits::<S, PER_WORD, 2>(middle, codes, words),
            3 => unpack_bits::<S, PER_WORD, 3>(middle, codes, words),
            4 => unpack_bits::<S, PER_WORD, 4>(middle, codes, words),
            5 => unpack_bits::<S, PER_WORD, 5>(middle, codes, words),
            6 => unpack_bits::<S, PER_WORD, 6>(middle, codes, words),
            _ => unpack_bits::<S, PER_WORD, 8>(middle, codes, words),
        }
    }
}

/// # Safety
/// As for [`unpack`]; `words` has all words of the rows.
#[inline(always)]
unsafe fn unpack_bits<S: Simd, const PER_WORD: usize, const BITS: usize>(
    middle: i16,
    codes: [*const u8; OUTPUTS],
    words: &mut [f32],
) {
    // SAFETY: passed on to the caller: only AVX-512's levels have 16 lanes.
    unsafe {
        match (PER_WORD, S::LANES) {
            (WORDS, 16) => words_by_sixteen::<BITS>(middle, codes, words),
            (WORDS, _) => words_by_one::<BITS>(middle, codes, words),
            (_, 16) if BITS == 4 || BITS == 8 => bytes_by_sixteen::<BITS>(codes, words),
            _ => bytes_by_one::<BITS>(codes, words),
        }
    }
}

/// Unpacks to bytes, sixteen outputs at a time.
///
/// # Safety
/// The instructions of `Avx512Vnni` are enabled; the rows have codes for all words.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn bytes_by_sixteen<const BITS: usize>(codes: [*const u8; OUTPUTS], words: &mut [f32]) {
    // One byte of each word, then zero, twice.
    let byte = |first: i32| {
        let of_word = |word: i32| (4 * word + first) | 0x80 << 8 | (4 * word + first + 1) << 16 | 0x80 << 24;
        _mm512_broadcast_i32x4(_mm_setr_epi32(of_word(0), of_word(1), of_word(2), of_word(3)))
    };
    let (bytes, mask) = ([byte(0), byte(2)], _mm512_set1_epi8(15));
    // Words of the panel for one word of a row.
    let each = 8 / BITS;
    for (square, to) in words.chunks_mut(SQUARE * each * OUTPUTS).enumerate() {
        let count = to.len() / (each * OUTPUTS);
        for (half, codes) in codes.as_chunks().0.iter().enumerate() {
            // SAFETY: the caller's promise; a group is a whole number of words.
            unsafe {
                let words = TransposedRows::new(codes, square * SQUARE * 4, 4 * count);
                for (word, codes) in words.0.chunks_exact(SQUARE).take(count).enumerate() {
                    let codes = _mm512_load_si512(codes.as_ptr().cast());
                    let to = to.as_mut_ptr().add(word * each * OUTPUTS + half * SQUARE);
                    if BITS == 8 {
                        _mm512_storeu_si512(to.cast(), codes);
                        continue;
                    }
                    for (i, byte) in bytes.into_iter().enumerate() {
                        // The second code of a byte moves to the next byte.
                        let codes = _mm512_shuffle_epi8(codes, byte);
                        let codes = _mm512_or_si512(codes, _mm512_slli_epi16::<4>(codes));
                        _mm512_storeu_si512(to.add(i * OUTPUTS).cast(), _mm512_and_si512(codes, mask));
                    }
                }
            }
        }
    }
}

/// Unpacks to bytes, eight codes per instruction.
///
/// # Safety
/// BMI2 is enabled; the rows have codes for all words.
#[target_feature(enable = "bmi2")]
unsafe fn bytes_by_one<const BITS: usize>(codes: [*const u8; OUTPUTS], words: &mut [f32]) {
    let bytes = u64::from_ne_bytes([((1u32 << BITS) - 1) as u8; 8]);
    for (step, to) in words.chunks_exact_mut(EIGHT / BYTES * OUTPUTS).enumerate() {
        let (first, second) = to.split_at_mut(OUTPUTS);
        for ((codes, first), second) in codes.iter().zip(first).zip(second) {
            let mut eight = 0u64;
            // SAFETY: eight codes of BITS bits fill BITS bytes.
            unsafe { std::ptr::copy_nonoverlapping(codes.add(step * BITS), (&raw mut eight).cast(), BITS) };
            let codes = _pdep_u64(eight, bytes);
            (*first, *second) = (f32::from_bits(codes as u32), f32::from_bits((codes >> 32) as u32));
        }
    }
}

/// Unpacks to words, for AVX-VNNI: one instruction turns eight codes into bytes, which are widened to words.
///
/// # Safety
/// The instructions of `Avx2Vnni` are enabled; the rows have codes for all words.
#[target_feature(enable = "avx2,bmi2")]
unsafe fn words_by_one<const BITS: usize>(middle: i16, codes: [*const u8; OUTPUTS], words: &mut [f32]) {
    let bytes = u64::from_ne_bytes([((1u32 << BITS) - 1) as u8; 8]);
    let middles = _mm_set1_epi16(middle);
    for (step, to) in words.chunks_exact_mut(4 * OUTPUTS).enumerate() {
        for (n, codes) in codes.iter().enumerate() {
            // SAFETY: eight codes of BITS bits fill BITS bytes; `to` holds four pairs of each output.
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

/// Unpacks to words, sixteen outputs at a time.
///
/// # Safety
/// The instructions of `Avx512Vnni` are enabled; the rows have codes for all words.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn words_by_sixteen<const BITS: usize>(middle: i16, codes: [*const u8; OUTPUTS], words: &mut [f32]) {
    let mut done = 0;
    if let (4, 8, Some(apart)) = (BITS, middle, words_apart(&codes)) {
        done = words.len() / (4 * OUTPUTS) / SQUARE * SQUARE;
        // SAFETY: the caller's promise; rows of 4-bit codes have `done` whole words.
        unsafe { unpack_four_bits(codes[0], apart, &mut words[..done * 4 * OUTPUTS]) };
    }
    let mask = _mm512_set1_epi32((1 << BITS) - 1);
    let middles = _mm512_set1_epi16(middle);
    // Eight codes of BITS bits fill BITS bytes.
    for (step, to) in words.chunks_exact_mut(4 * OUTPUTS).enumerate().skip(done) {
        for (half, codes) in codes.chunks_exact(16).enumerate() {
            // SAFETY: a row is a whole number of groups, which are whole numbers of eights; `to` holds four pairs of
            // each output.
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

/// Words aligned to cache lines.
#[repr(align(64))]
struct Lines([f32; SQUARE * 16]);

/// The distance between rows in words, if the rows are equally far apart.
fn words_apart(rows: &[*const u8; OUTPUTS]) -> Option<usize> {
    let apart = rows[1].addr().checked_sub(rows[0].addr())?;
    let is_equal = rows.windows(2).all(|pair| pair[0].addr().wrapping_add(apart) == pair[1].addr());
    (is_equal && apart > 0 && apart.is_multiple_of(size_of::<f32>())).then_some(apart / size_of::<f32>())
}

/// Unpacks 4-bit codes, relative to 8, of outputs whose rows are `apart` words apart. Words are transposed, so that a
/// vector has eight codes of each of 16 outputs.
///
/// # Safety
/// The instructions of `Avx512Vnni` are enabled. `to` has a word for each pair of inputs of [`OUTPUTS`] outputs, and
/// the rows have codes for all of it. Its length is a multiple of `SQUARE * 4 * OUTPUTS`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn unpack_four_bits(codes: *const u8, apart: usize, to: &mut [f32]) {
    // With its highest bit inverted, a code is its distance from 8 as a signed number.
    let invert = _mm512_set1_epi8(0x88_u8 as i8);
    // The first code of a byte moves to the top bits of a lane's low half, the second to those of the high half.
    let shifts = _mm512_set1_epi32(8 << 16 | 12);
    // One byte of each word, twice.
    let byte = |pair: i32| {
        let of_word = |word: i32| (4 * word + pair) | 0x80 << 8 | (4 * word + pair) << 16 | 0x80 << 24;
        _mm512_broadcast_i32x4(_mm_setr_epi32(of_word(0), of_word(1), of_word(2), of_word(3)))
    };
    let bytes = [byte(0), byte(1), byte(2), byte(3)];
    let mut words = Lines([0.0; SQUARE * 16]);
    for (block, to) in to.chunks_exact_mut(SQUARE * 4 * OUTPUTS).enumerate() {
        for half in 0..2 {
            // SAFETY: 16 rows of 16 words, and room for four pairs of each of these words of 32 outputs.
            unsafe {
                let from = codes.cast::<f32>().add(half * 16 * apart + block * SQUARE);
                Avx512::transpose16(from, apart, words.0.as_mut_ptr());
                for word in 0..SQUARE {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{SimdLevel, linear::integers::IntegerLayout, simd::Avx2, testing::Numbers};

    /// Tests every width as bytes, with AVX-512 and with AVX-VNNI.
    #[test]
    fn bytes_are_the_codes() {
        let mut numbers = Numbers(4);
        for (bits, inputs) in [2, 3, 4, 5, 6, 8].into_iter().flat_map(|bits| [32, 96, 160, 512].map(|k| (bits, k))) {
            let layout = PanelLayout { rows: IntegerLayout::new(inputs, 0, 32, 1), per_word: BYTES };
            let bytes = inputs * bits / 8;
            let rows: Vec<u8> = (0..OUTPUTS * bytes).map(|_| numbers.below(256) as u8).collect();
            let codes: [*const u8; OUTPUTS] = std::array::from_fn(|n| rows[n * bytes..].as_ptr());
            let code = |n: usize, k: usize| {
                let bit = |i: usize| rows[n * bytes + i / 8] >> (i % 8) & 1;
                (0..bits).map(|i| bit(k * bits + i) << i).sum::<u8>()
            };
            let check = |panel: Vec<f32>| {
                let panel: &[u8] = bytemuck::cast_slice(&panel);
                for (n, k) in (0..OUTPUTS).flat_map(|n| (0..inputs).map(move |k| (n, k))) {
                    let at = (k / BYTES * OUTPUTS + n) * BYTES + k % BYTES;
                    assert_eq!(panel[at], code(n, k), "{bits} bits, output {n}, input {k} of {inputs}");
                }
            };
            let mut panel = vec![1f32; layout.panel()];
            if SimdLevel::Avx512Vnni.is_supported() {
                // SAFETY: the instructions are enabled, the rows have codes for the layout, and the panel has its
                // length.
                unsafe { unpack::<Avx512, BYTES>(layout, bits, codes, &mut panel) };
                check(panel.clone());
            }
            if SimdLevel::Avx2Vnni.is_supported() {
                panel.fill(1.0);
                // SAFETY: as above.
                unsafe { unpack::<Avx2, BYTES>(layout, bits, codes, &mut panel) };
                check(panel);
            }
        }
    }

    /// Rows at equal distances are unpacked differently from other rows, in whole blocks and the rest.
    #[test]
    fn all_ways_to_unpack_four_bits_agree() {
        if !SimdLevel::Avx512Vnni.is_supported() {
            return;
        }
        let mut numbers = Numbers(3);
        for inputs in [32, 128, 160, 256, 1024] {
            let layout = PanelLayout { rows: IntegerLayout::new(inputs, 0, 32, 8), per_word: WORDS };
            let bytes = inputs / 2;
            let rows: Vec<u8> = (0..OUTPUTS * bytes).map(|_| numbers.below(256) as u8).collect();
            let mut panels = Vec::new();
            for gap in [0, 4, 3] {
                // Moves the last row away.
                let mut memory = rows[..(OUTPUTS - 1) * bytes].to_vec();
                memory.extend(vec![0; gap]);
                memory.extend_from_slice(&rows[(OUTPUTS - 1) * bytes..]);
                let start = |n: usize| n * bytes + if n + 1 == OUTPUTS { gap } else { 0 };
                let codes: [*const u8; OUTPUTS] = std::array::from_fn(|n| memory[start(n)..].as_ptr());
                assert_eq!(words_apart(&codes), (gap == 0).then_some(bytes / 4));
                let mut panel = vec![1f32; layout.panel()];
                // SAFETY: the instructions are enabled, the rows have codes for the layout, and the panel has its
                // length.
                unsafe { unpack::<Avx512, WORDS>(layout, 4, codes, &mut panel) };
                panels.push(panel.into_iter().map(f32::to_bits).collect::<Vec<u32>>());
                if SimdLevel::Avx2Vnni.is_supported() {
                    let mut panel = vec![1f32; layout.panel()];
                    // SAFETY: as above.
                    unsafe { unpack::<Avx2, WORDS>(layout, 4, codes, &mut panel) };
                    panels.push(panel.into_iter().map(f32::to_bits).collect());
                }
            }
            assert!(panels.iter().all(|panel| *panel == panels[0]));
            // Inputs 0 and 1 of output 0.
            let [first, second] = [panels[0][0] as u16 as i16, (panels[0][0] >> 16) as i16];
            assert_eq!([first, second], [i16::from(rows[0] & 15) - 8, i16::from(rows[0] >> 4) - 8]);
        }
    }
}
