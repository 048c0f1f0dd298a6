//! AVX-512: 16 lanes.

use std::arch::x86_64::*;

use super::{Simd, SimdKernel, SimdLevel, ThresholdCells, Thresholds};

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && super::avx2::is_supported()
}

pub(super) fn has_vnni() -> bool {
    is_supported() && is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("bmi2")
}

pub(super) fn has_vbmi() -> bool {
    is_x86_feature_detected!("avx512vbmi")
}

/// For each lane, the two bytes of a stream of 6-bit codes that hold bits 6i to 6i + 5; 0x80 gives zero.
const SIXES: [[u8; 4]; 16] = {
    let mut lanes = [[0, 0, 0x80, 0x80]; 16];
    let mut i = 0;
    while i < 16 {
        lanes[i][0] = (i * 3 / 4) as u8;
        lanes[i][1] = lanes[i][0] + 1;
        i += 1;
    }
    lanes
};

/// Runs a kernel with the instructions enabled.
///
/// # Safety
/// `is_supported` holds.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn call<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

/// As [`call`], with VNNI.
///
/// # Safety
/// `has_vnni` holds.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn call_vnni<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

/// As [`call`], with VNNI and VBMI.
///
/// # Safety
/// `has_vnni` and `has_vbmi` hold.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn call_vbmi<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

// SAFETY of every block below: the trait's contract, the instructions are enabled and the pointers valid; all loads
// and stores are the unaligned kind.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    const LANES: usize = 16;
    const LEVEL: SimdLevel = SimdLevel::Avx512;

    #[inline(always)]
    unsafe fn call<K: SimdKernel>(kernel: K) -> K::Output {
        unsafe { call(kernel) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(to, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: __m512) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, x: __m512) {
        unsafe {
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            // Rounding could turn a NaN into infinity by a carry: truncate it and set a payload bit instead.
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let chosen = _mm512_mask_blend_epi32(nan, rounded, quiet);
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(chosen)))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
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
    unsafe fn load_u6(from: *const u8) -> [__m512; 4] {
        unsafe {
            let bytes = _mm512_broadcast_i32x4(_mm_maskz_loadu_epi32(0b111, from.cast()));
            let order = _mm512_loadu_si512(SIXES.as_ptr().cast());
            // 6i mod 8.
            let shifts = _mm512_broadcast_i32x4(_mm_set_epi32(2, 4, 6, 0));
            let codes = _mm512_srlv_epi32(_mm512_shuffle_epi8(bytes, order), shifts);
            let codes = _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(63)));
            [codes, codes, codes, codes]
        }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(x: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
    }
    #[inline(always)]
    unsafe fn pow2i(n: __m512) -> __m512 {
        unsafe { _mm512_scalef_ps(_mm512_set1_ps(1.0), n) }
    }
    #[inline(always)]
    unsafe fn sum(x: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(x) }
    }
    #[inline(always)]
    unsafe fn max_lane(x: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(x) }
    }
    #[inline(always)]
    unsafe fn lookup16_low(table: &[f32; 16], codes: *const u8) -> __m512 {
        // The permute uses only the low four bits of each index.
        unsafe {
            let index = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.cast()));
            _mm512_permutexvar_ps(index, _mm512_loadu_ps(table.as_ptr()))
        }
    }
    #[inline(always)]
    unsafe fn lookup16_high(table: &[f32; 16], codes: *const u8) -> __m512 {
        unsafe {
            let index = _mm512_srli_epi32::<4>(_mm512_cvtepu8_epi32(_mm_loadu_si128(codes.cast())));
            _mm512_permutexvar_ps(index, _mm512_loadu_ps(table.as_ptr()))
        }
    }
    #[inline(always)]
    unsafe fn hadamard_lanes(x: __m512) -> __m512 {
        // Each stage: the partner lane, plus or minus the lane itself.
        unsafe {
            let (p, m) = (1.0, -1.0);
            let signs = _mm512_setr_ps(p, p, p, p, p, p, p, p, m, m, m, m, m, m, m, m);
            let x = _mm512_fmadd_ps(x, signs, _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x));
            let signs = _mm512_setr_ps(p, p, p, p, m, m, m, m, p, p, p, p, m, m, m, m);
            let x = _mm512_fmadd_ps(x, signs, _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x));
            let signs = _mm512_setr_ps(p, p, m, m, p, p, m, m, p, p, m, m, p, p, m, m);
            let x = _mm512_fmadd_ps(x, signs, _mm512_permute_ps::<0b01_00_11_10>(x));
            let signs = _mm512_setr_ps(p, m, p, m, p, m, p, m, p, m, p, m, p, m, p, m);
            _mm512_fmadd_ps(x, signs, _mm512_permute_ps::<0b10_11_00_01>(x))
        }
    }
    #[inline(always)]
    unsafe fn store_sums(to: *mut f32, x: [__m512; 4]) {
        unsafe {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            // Each quarter holds a part of all four sums.
            let quarters = _mm512_add_ps(
                _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
            );
            let halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps::<1>(quarters));
            _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves)))
        }
    }
    #[inline(always)]
    unsafe fn transpose16(from: *const f32, stride: usize, to: *mut f32) {
        unsafe {
            let mut rows = [_mm512_setzero_ps(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_ps(from.add(i * stride));
            }
            // Within quarters: four columns of four rows each.
            let mut quarters = [_mm512_setzero_ps(); 16];
            for (rows, to) in rows.as_chunks::<4>().0.iter().zip(quarters.as_chunks_mut::<4>().0) {
                let low = [_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpacklo_ps(rows[2], rows[3])];
                let high = [_mm512_unpackhi_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[2], rows[3])];
                for (i, [a, b]) in [low, high].into_iter().enumerate() {
                    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                    to[2 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                    to[2 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                }
            }
            // Quarter j of these is column 4j + i of four rows. Exchange the quarters of four of them.
            for i in 0..4 {
                let [a, b, c, d] = [quarters[i], quarters[4 + i], quarters[8 + i], quarters[12 + i]];
                let even = [_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d)];
                let odd = [_mm512_shuffle_f32x4::<0xDD>(a, b), _mm512_shuffle_f32x4::<0xDD>(c, d)];
                _mm512_storeu_ps(to.add(16 * i), _mm512_shuffle_f32x4::<0x88>(even[0], even[1]));
                _mm512_storeu_ps(to.add(16 * (8 + i)), _mm512_shuffle_f32x4::<0xDD>(even[0], even[1]));
                _mm512_storeu_ps(to.add(16 * (4 + i)), _mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]));
                _mm512_storeu_ps(to.add(16 * (12 + i)), _mm512_shuffle_f32x4::<0xDD>(odd[0], odd[1]));
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch_to_write(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const f32) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn splat_words(pair: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(pair) }
    }
    #[inline(always)]
    unsafe fn store_words(to: *mut i16, x: __m512) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x))) }
    }
    #[inline(always)]
    unsafe fn dot_words(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
        unsafe { dot_pairs(sum, a, b) }
    }
    #[inline(always)]
    unsafe fn store_bytes(to: *mut i8, x: __m512) {
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))) }
    }
    #[inline(always)]
    unsafe fn dot_bytes(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
        unsafe { dot_fours(sum, a, b) }
    }
    #[inline(always)]
    unsafe fn widen_sums(sums: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(sums) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn codes2(low: *const u8) -> (__m512i, __m512i) {
        unsafe {
            let low = _mm512_castsi128_si512(_mm_loadl_epi64(low.cast()));
            // The first eight lanes use the first 32 bits.
            let word = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            let shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            let even = _mm512_srlv_epi32(_mm512_permutexvar_epi32(word, low), shift);
            (even, _mm512_srli_epi32::<2>(even))
        }
    }
    #[inline(always)]
    unsafe fn codes3(low: *const u8, high: *const u8) -> (__m512i, __m512i) {
        unsafe {
            let (even, odd) = Self::codes2(low);
            let bits = _mm512_set1_epi32(high.cast::<i32>().read_unaligned());
            // Rotated right by 2·lane − 2, bit 2·lane is at bit 2.
            let turn = _mm512_setr_epi32(30, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28);
            let bits = _mm512_rorv_epi32(bits, turn);
            let third = _mm512_set1_epi32(4);
            // 0xCA selects the second operand's bit if the first's is one, otherwise the third's.
            (
                _mm512_ternarylogic_epi32::<0xCA>(third, bits, even),
                _mm512_ternarylogic_epi32::<0xCA>(third, _mm512_srli_epi32::<1>(bits), odd),
            )
        }
    }
    #[inline(always)]
    unsafe fn codes4(low: *const u8) -> (__m512i, __m512i) {
        unsafe {
            let low = _mm512_cvtepu8_epi32(_mm_loadu_si128(low.cast()));
            (low, _mm512_srli_epi32::<4>(low))
        }
    }
    #[inline(always)]
    unsafe fn codes5(low: *const u8, high: *const u8) -> (__m512i, __m512i) {
        unsafe {
            let (even, odd) = Self::codes4(low);
            let bits = _mm512_set1_epi32(high.cast::<i32>().read_unaligned());
            // Rotated right by 2·lane − 4, bit 2·lane is at bit 4.
            let turn = _mm512_setr_epi32(28, 30, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26);
            let bits = _mm512_rorv_epi32(bits, turn);
            let fifth = _mm512_set1_epi32(16);
            // 0xCA selects the second operand's bit if the first's is one, otherwise the third's.
            (
                _mm512_ternarylogic_epi32::<0xCA>(fifth, bits, even),
                _mm512_ternarylogic_epi32::<0xCA>(fifth, _mm512_srli_epi32::<1>(bits), odd),
            )
        }
    }
    #[inline(always)]
    unsafe fn codes6(low: *const u8, high: *const u8) -> (__m512i, __m512i) {
        unsafe {
            let (even, odd) = Self::codes4(low);
            let high = _mm512_castsi128_si512(_mm_loadl_epi64(high.cast()));
            // The first eight lanes use the first 32 bits.
            let word = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            let bits = _mm512_permutexvar_epi32(word, high);
            // Rotated right by 4·lane − 4, bits 4·lane and the next are at bits 4 and 5.
            let turn = _mm512_setr_epi32(28, 0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24);
            let bits = _mm512_rorv_epi32(bits, turn);
            let upper = _mm512_set1_epi32(0x30);
            (
                _mm512_ternarylogic_epi32::<0xCA>(upper, bits, even),
                _mm512_ternarylogic_epi32::<0xCA>(upper, _mm512_srli_epi32::<2>(bits), odd),
            )
        }
    }
    #[inline(always)]
    unsafe fn codes8(low: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(low.cast())) }
    }
    #[inline(always)]
    unsafe fn lookup16(table: &[f32; 16], index: __m512i) -> __m512 {
        unsafe { _mm512_permutexvar_ps(index, _mm512_loadu_ps(table.as_ptr())) }
    }
    #[inline(always)]
    unsafe fn lookup32(table: &[f32; 32], index: __m512i) -> __m512 {
        unsafe { permute32(table.as_ptr(), index) }
    }
    #[inline(always)]
    unsafe fn lookup64(table: &[f32; 64], index: __m512i) -> __m512 {
        unsafe {
            let second = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
            let table = table.as_ptr();
            _mm512_mask_blend_ps(second, permute32(table, index), permute32(table.add(32), index))
        }
    }
    #[inline(always)]
    unsafe fn lookup256(table: &[f32; 256], index: __m512i) -> __m512 {
        unsafe {
            // Only the upper half of the table is looked up: entry i below 128 is minus entry 128 + (i ^ 127).
            let below = _mm512_xor_si512(_mm512_slli_epi32::<24>(index), _mm512_set1_epi32(i32::MIN));
            let sign = _mm512_and_si512(below, _mm512_set1_epi32(i32::MIN));
            let index = _mm512_xor_si512(index, _mm512_srai_epi32::<31>(below));
            let bit5 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
            let bit6 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(64));
            let upper = table.as_ptr().add(128);
            let first = _mm512_mask_blend_ps(bit5, permute32(upper, index), permute32(upper.add(32), index));
            let second = _mm512_mask_blend_ps(bit5, permute32(upper.add(64), index), permute32(upper.add(96), index));
            _mm512_xor_ps(_mm512_mask_blend_ps(bit6, first, second), _mm512_castsi512_ps(sign))
        }
    }
    #[inline(always)]
    unsafe fn search<const BITS: usize>(x: __m512, thresholds: &Thresholds, to: *mut u8) -> __m512i {
        unsafe {
            // If the compiler knows this constant, it turns a masked addition into three instructions.
            let one = _mm512_set1_epi32(thresholds.one);
            let codes = if BITS <= 5 {
                search_cells::<BITS>(x, &thresholds.cells, one)
            } else {
                search_tree::<BITS>(x, &thresholds.tree, one)
            };
            _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(codes));
            codes
        }
    }
}

/// The number of thresholds that each lane exceeds: the thresholds of cells before its own, plus its own cell's if
/// exceeded.
#[inline(always)]
unsafe fn search_cells<const BITS: usize>(x: __m512, cells: &ThresholdCells, one: __m512i) -> __m512i {
    // SAFETY: AVX-512 is enabled; tables have 64 entries.
    unsafe {
        let cell = _mm512_fmadd_ps(x, _mm512_set1_ps(cells.factor), _mm512_set1_ps(cells.offset));
        let cell = _mm512_min_ps(_mm512_max_ps(cell, _mm512_setzero_ps()), _mm512_set1_ps(cells.last));
        let cell = _mm512_cvtps_epi32(cell);
        let [threshold, below] = [cells.threshold.as_ptr(), cells.below.as_ptr().cast()]
            .map(|table| if BITS <= 4 { permute32(table, cell) } else { Avx512::lookup64(&*table.cast(), cell) });
        let (above, below) = (_mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, threshold), _mm512_castps_si512(below));
        _mm512_mask_add_epi32(below, above, below, one)
    }
}

/// As [`search_cells`], by a tree of thresholds.
#[inline(always)]
unsafe fn search_tree<const BITS: usize>(x: __m512, tree: &[f32; 256 + 16], one: __m512i) -> __m512i {
    // SAFETY: AVX-512 is enabled; the nodes of a level, and their children, are within the tree.
    unsafe {
        // The path so far: the number of the node within its level.
        let mut path = _mm512_setzero_si512();
        for level in 0..BITS {
            let nodes = tree.as_ptr().add(1 << level);
            let threshold = match level {
                0 => _mm512_set1_ps(*nodes),
                1..=4 => _mm512_permutexvar_ps(path, _mm512_loadu_ps(nodes)),
                5 => permute32(nodes, path),
                6 => Avx512::lookup64(&*nodes.cast(), path),
                _ => {
                    let upper = _mm512_test_epi32_mask(path, _mm512_set1_epi32(64));
                    let first = Avx512::lookup64(&*nodes.cast(), path);
                    let second = Avx512::lookup64(&*nodes.add(64).cast(), path);
                    _mm512_mask_blend_ps(upper, first, second)
                }
            };
            let above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, threshold);
            path = _mm512_add_epi32(path, path);
            path = _mm512_mask_add_epi32(path, above, path, one);
        }
        path
    }
}

/// Looks up the low five bits of each index in a table of 32 entries.
#[inline(always)]
unsafe fn permute32(table: *const f32, index: __m512i) -> __m512 {
    // SAFETY: AVX-512 is enabled; the caller's table has 32 entries.
    unsafe { _mm512_permutex2var_ps(_mm512_loadu_ps(table), index, _mm512_loadu_ps(table.add(16))) }
}

/// Adds the products of pairs of signed words to each sum.
///
/// In assembly: if two intrinsics in a row add to one sum, the compiler splits the second one into two instructions.
///
/// # Safety
/// The instructions of `Avx512Vnni` are enabled.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(in crate::cpu) unsafe fn dot_pairs(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: it accesses only registers.
    unsafe {
        std::arch::asm!("vpdpwssd {0}, {1}, {2}", inout(zmm_reg) sum, in(zmm_reg) a, in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// As [`dot_pairs`], for groups of four bytes; the bytes of `a` are unsigned.
///
/// # Safety
/// As for [`dot_pairs`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dot_fours(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: it accesses only registers.
    unsafe {
        std::arch::asm!("vpdpbusd {0}, {1}, {2}", inout(zmm_reg) sum, in(zmm_reg) a, in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// Sixteen words of each of sixteen rows, transposed: a vector has one word of each row.
#[repr(align(64))]
pub(in crate::cpu) struct TransposedRows(pub [f32; 256]);

impl TransposedRows {
    /// Loads and transposes the words from byte `at` of the rows on. The rows have `bytes` bytes from there; words
    /// beyond are zero.
    ///
    /// # Safety
    /// The instructions of `Avx512` are enabled; the rows have these bytes.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(in crate::cpu) unsafe fn new(rows: &[*const u8; 16], at: usize, bytes: usize) -> TransposedRows {
        let mask = if bytes < 64 { (1u64 << bytes) - 1 } else { u64::MAX };
        let mut square = TransposedRows([0.0; 256]);
        for (to, row) in square.0.chunks_exact_mut(16).zip(rows) {
            // SAFETY: the caller's promise.
            unsafe { _mm512_store_si512(to.as_mut_ptr().cast(), _mm512_maskz_loadu_epi8(mask, row.add(at).cast())) };
        }
        let mut to = TransposedRows([0.0; 256]);
        // SAFETY: a square has 16 rows of 16 words.
        unsafe { Avx512::transpose16(square.0.as_ptr(), 16, to.0.as_mut_ptr()) };
        to
    }
}
