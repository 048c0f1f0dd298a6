//! AVX-512: 16 lanes.

use std::arch::x86_64::*;

use super::{Kernel, Simd, SimdLevel};

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && super::avx2::is_supported()
}

/// Runs a kernel with the instructions enabled.
///
/// # Safety
/// `is_supported` holds.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

// SAFETY of every block below: the trait's contract, the instructions are enabled and the pointers valid; all loads
// and stores are the unaligned kind.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    type F = __m512;
    const LANES: usize = 16;
    const LEVEL: SimdLevel = SimdLevel::Avx512;

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
            // Rounding could carry a NaN to infinity: truncate it and set a payload bit instead.
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
    unsafe fn sqrt(x: __m512) -> __m512 {
        unsafe { _mm512_sqrt_ps(x) }
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
        // The permute looks only at the low four bits of each index.
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
}
