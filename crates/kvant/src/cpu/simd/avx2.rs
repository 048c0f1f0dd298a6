//! AVX2 with FMA and F16C: 8 lanes.

use std::arch::x86_64::*;

use super::{Simd, SimdKernel, SimdLevel, Thresholds};

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

pub(super) fn has_vnni() -> bool {
    is_supported() && is_x86_feature_detected!("avxvnni") && is_x86_feature_detected!("bmi2")
}

/// Runs a kernel with the instructions enabled.
///
/// # Safety
/// `is_supported` holds.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn call<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

/// As [`call`], with AVX-VNNI and BMI2.
///
/// # Safety
/// `has_vnni` holds.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,avxvnni,bmi2")]
pub(super) unsafe fn call_vnni<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

/// Adds the products of pairs of signed words to each sum. In assembly, for the reason given in AVX-512's `dot_pairs`.
///
/// # Safety
/// The instructions of `Avx2Vnni` are enabled.
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
unsafe fn dot_pairs(mut sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: it accesses only registers.
    unsafe {
        std::arch::asm!("{{vex}} vpdpwssd {0}, {1}, {2}", inout(ymm_reg) sum, in(ymm_reg) a, in(ymm_reg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// As [`dot_pairs`], for groups of four bytes; the bytes of `a` are unsigned.
///
/// # Safety
/// The instructions of `Avx2Vnni` are enabled.
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
unsafe fn dot_fours(mut sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: it accesses only registers.
    unsafe {
        std::arch::asm!("{{vex}} vpdpbusd {0}, {1}, {2}", inout(ymm_reg) sum, in(ymm_reg) a, in(ymm_reg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// Looks up eight indices in a table of 16 entries. Only the low four bits of an index count.
#[inline(always)]
unsafe fn lookup16(table: &[f32; 16], index: __m256i) -> __m256 {
    // SAFETY: AVX2 is enabled; the table has 16 entries.
    unsafe {
        let first = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr()), index);
        let second = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr().add(8)), index);
        // Bit 3 of the index becomes the sign bit, which selects the half of the table.
        _mm256_blendv_ps(first, second, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
    }
}

/// The bits of `a` where `mask` is one, otherwise the bits of `b`.
#[inline(always)]
unsafe fn select(mask: __m256i, a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: AVX2 is enabled.
    unsafe { _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b)) }
}

// SAFETY of every block below: the trait's contract, the instructions are enabled and the pointers valid; all loads
// and stores are the unaligned kind.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx2 {
    type F = __m256;
    type I = __m256i;
    const LANES: usize = 8;
    const LEVEL: SimdLevel = SimdLevel::Avx2;

    #[inline(always)]
    unsafe fn call<K: SimdKernel>(kernel: K) -> K::Output {
        unsafe { call(kernel) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m256) {
        unsafe { _mm256_storeu_ps(to, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: __m256) {
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m256 {
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, x: __m256) {
        unsafe {
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            // Rounding could turn a NaN into infinity by a carry: truncate it and set a payload bit instead.
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let chosen = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm256_packus_epi32(chosen, chosen);
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(packed)))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u4(from: *const u8) -> (__m256, __m256) {
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
            let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
            (_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(bytes)))
        }
    }
    #[inline(always)]
    unsafe fn map16(table: &[u8; 16], bytes: *mut u8) {
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            let entries = _mm256_shuffle_epi8(table, _mm256_loadu_si256(bytes.cast()));
            _mm256_storeu_si256(bytes.cast(), entries);
        }
    }
    #[inline(always)]
    unsafe fn load_u6(from: *const u8) -> [__m256; 4] {
        unsafe {
            let last = from.add(8).cast::<i32>().read_unaligned();
            let bytes = _mm256_broadcastsi128_si256(_mm_insert_epi32::<2>(_mm_loadl_epi64(from.cast()), last));
            // Lane i takes the two bytes that hold bits 6i to 6i + 5; its shift is 6i mod 8.
            let z = -128i8;
            let first = _mm256_set_epi8(
                z, z, 6, 5, z, z, 5, 4, z, z, 4, 3, z, z, 4, 3, z, z, 3, 2, z, z, 2, 1, z, z, 1, 0, z, z, 1, 0,
            );
            let second = _mm256_set_epi8(
                z, z, 12, 11, z, z, 11, 10, z, z, 10, 9, z, z, 10, 9, z, z, 9, 8, z, z, 8, 7, z, z, 7, 6, z, z, 7, 6,
            );
            let shifts = _mm256_set_epi32(2, 4, 6, 0, 2, 4, 6, 0);
            let first = _mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, first), shifts);
            let second = _mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, second), shifts);
            let first = _mm256_cvtepi32_ps(_mm256_and_si256(first, _mm256_set1_epi32(63)));
            let second = _mm256_cvtepi32_ps(_mm256_and_si256(second, _mm256_set1_epi32(63)));
            [first, second, first, second]
        }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(x: __m256) -> __m256 {
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
    }
    #[inline(always)]
    unsafe fn pow2i(n: __m256) -> __m256 {
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn sum(x: __m256) -> f32 {
        unsafe {
            let half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
    #[inline(always)]
    unsafe fn max_lane(x: __m256) -> f32 {
        unsafe {
            let half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
    #[inline(always)]
    unsafe fn lookup16_low(table: &[f32; 16], codes: *const u8) -> __m256 {
        unsafe { lookup16(table, _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.cast()))) }
    }
    #[inline(always)]
    unsafe fn lookup16_high(table: &[f32; 16], codes: *const u8) -> __m256 {
        unsafe { lookup16(table, _mm256_srli_epi32::<4>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.cast())))) }
    }
    #[inline(always)]
    unsafe fn hadamard_lanes(x: __m256) -> __m256 {
        // Each stage: the partner lane, plus or minus the lane itself.
        unsafe {
            let (p, m) = (1.0, -1.0);
            let x = _mm256_fmadd_ps(x, _mm256_setr_ps(p, p, p, p, m, m, m, m), _mm256_permute2f128_ps::<1>(x, x));
            let swapped = _mm256_permute_ps::<0b01_00_11_10>(x);
            let x = _mm256_fmadd_ps(x, _mm256_setr_ps(p, p, m, m, p, p, m, m), swapped);
            let swapped = _mm256_permute_ps::<0b10_11_00_01>(x);
            _mm256_fmadd_ps(x, _mm256_setr_ps(p, m, p, m, p, m, p, m), swapped)
        }
    }
    #[inline(always)]
    unsafe fn store_sums(to: *mut f32, x: [__m256; 4]) {
        unsafe {
            let pairs = [_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3])];
            let halves = _mm256_hadd_ps(pairs[0], pairs[1]);
            let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
            _mm_storeu_ps(to, sums)
        }
    }
    #[inline(always)]
    unsafe fn prefetch_to_write(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const f32) -> __m256i {
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    #[inline(always)]
    unsafe fn splat_words(pair: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(pair) }
    }
    #[inline(always)]
    unsafe fn store_words(to: *mut i16, x: __m256) {
        unsafe {
            let x = _mm256_cvtps_epi32(x);
            let words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            _mm_storeu_si128(to.cast(), words);
        }
    }
    #[inline(always)]
    unsafe fn dot_words(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { dot_pairs(sum, a, b) }
    }
    #[inline(always)]
    unsafe fn store_bytes(to: *mut i8, x: __m256) {
        unsafe {
            let x = _mm256_cvtps_epi32(x);
            let words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            _mm_storel_epi64(to.cast(), _mm_packs_epi16(words, words));
        }
    }
    #[inline(always)]
    unsafe fn dot_bytes(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { dot_fours(sum, a, b) }
    }
    #[inline(always)]
    unsafe fn widen_sums(sums: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(sums) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn codes2(low: *const u8) -> (__m256i, __m256i) {
        unsafe {
            let bits = _mm256_set1_epi32(low.cast::<i32>().read_unaligned());
            let even = _mm256_srlv_epi32(bits, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            (even, _mm256_srli_epi32::<2>(even))
        }
    }
    #[inline(always)]
    unsafe fn codes3(low: *const u8, high: *const u8) -> (__m256i, __m256i) {
        unsafe {
            let (even, odd) = Self::codes2(low);
            // Bit 2·lane (+ 1) moves to bit 2.
            let bits = _mm256_set1_epi32(i32::from(high.cast::<u16>().read_unaligned()) << 2);
            let even_bits = _mm256_srlv_epi32(bits, _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
            let odd_bits = _mm256_srli_epi32::<1>(even_bits);
            let third = _mm256_set1_epi32(4);
            (select(third, even_bits, even), select(third, odd_bits, odd))
        }
    }
    #[inline(always)]
    unsafe fn codes4(low: *const u8) -> (__m256i, __m256i) {
        unsafe {
            let low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(low.cast()));
            (low, _mm256_srli_epi32::<4>(low))
        }
    }
    #[inline(always)]
    unsafe fn codes5(low: *const u8, high: *const u8) -> (__m256i, __m256i) {
        unsafe {
            let (even, odd) = Self::codes4(low);
            // Bit 2·lane (+ 1) moves to bit 4.
            let bits = _mm256_set1_epi32(i32::from(high.cast::<u16>().read_unaligned()) << 4);
            let shift = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
            let even_bits = _mm256_srlv_epi32(bits, shift);
            let odd_bits = _mm256_srli_epi32::<1>(even_bits);
            let fifth = _mm256_set1_epi32(16);
            (select(fifth, even_bits, even), select(fifth, odd_bits, odd))
        }
    }
    #[inline(always)]
    unsafe fn codes6(low: *const u8, high: *const u8) -> (__m256i, __m256i) {
        unsafe {
            let (even, odd) = Self::codes4(low);
            // Bits 4·lane (+ 2) and the next move to bits 4 and 5.
            let bits = _mm256_set1_epi32(high.cast::<i32>().read_unaligned());
            let even_bits = _mm256_srlv_epi32(bits, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            let upper = _mm256_set1_epi32(0x30);
            (
                select(upper, _mm256_slli_epi32::<4>(even_bits), even),
                select(upper, _mm256_slli_epi32::<2>(even_bits), odd),
            )
        }
    }
    #[inline(always)]
    unsafe fn codes8(low: *const u8) -> __m256i {
        unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(low.cast())) }
    }
    #[inline(always)]
    unsafe fn lookup16(table: &[f32; 16], index: __m256i) -> __m256 {
        unsafe { lookup16(table, index) }
    }
    #[inline(always)]
    unsafe fn lookup32(table: &[f32; 32], index: __m256i) -> __m256 {
        unsafe {
            let first = lookup16(&*table.as_ptr().cast(), index);
            let second = lookup16(&*table.as_ptr().add(16).cast(), index);
            _mm256_blendv_ps(first, second, _mm256_castsi256_ps(_mm256_slli_epi32::<27>(index)))
        }
    }
    #[inline(always)]
    unsafe fn lookup64(table: &[f32; 64], index: __m256i) -> __m256 {
        unsafe { _mm256_i32gather_ps::<4>(table.as_ptr(), _mm256_and_si256(index, _mm256_set1_epi32(63))) }
    }
    #[inline(always)]
    unsafe fn lookup256(table: &[f32; 256], index: __m256i) -> __m256 {
        unsafe { _mm256_i32gather_ps::<4>(table.as_ptr(), _mm256_and_si256(index, _mm256_set1_epi32(255))) }
    }
    #[inline(always)]
    unsafe fn search<const BITS: usize>(x: __m256, thresholds: &Thresholds, to: *mut u8) -> __m256i {
        unsafe {
            // The path so far: the number of the node within its level.
            let mut path = _mm256_setzero_si256();
            for level in 0..BITS {
                let nodes = thresholds.tree.as_ptr().add(1 << level);
                let threshold = match level {
                    0 => _mm256_set1_ps(*nodes),
                    1..=3 => _mm256_permutevar8x32_ps(_mm256_loadu_ps(nodes), path),
                    4 => lookup16(&*nodes.cast(), path),
                    _ => _mm256_i32gather_ps::<4>(nodes, path),
                };
                let above = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(x, threshold));
                path = _mm256_sub_epi32(_mm256_add_epi32(path, path), above);
            }
            let words = _mm_packus_epi32(_mm256_castsi256_si128(path), _mm256_extracti128_si256::<1>(path));
            _mm_storel_epi64(to.cast(), _mm_packus_epi16(words, words));
            path
        }
    }
}
