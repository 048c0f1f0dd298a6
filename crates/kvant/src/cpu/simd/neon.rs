//! NEON: 4 lanes.

use std::arch::{aarch64::*, asm};

use super::{Simd, SimdKernel, SimdLevel};

#[derive(Clone, Copy)]
pub(crate) struct Neon;

/// Runs a kernel with the instructions enabled.
///
/// # Safety
/// The machine has NEON.
#[inline(never)]
#[target_feature(enable = "neon")]
pub(super) unsafe fn call<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run::<Neon>()
}

/// Widens four bytes.
#[inline(always)]
unsafe fn widen(from: *const u8) -> uint32x4_t {
    // SAFETY: NEON is enabled; `from` is valid for four bytes.
    unsafe {
        let bytes = vreinterpret_u8_u32(vdup_n_u32(from.cast::<u32>().read_unaligned()));
        vmovl_u16(vget_low_u16(vmovl_u8(bytes)))
    }
}

/// Looks up four indices, whose higher bits are zero, in a table of 16 entries; indices from 16 to 63 give 0.
#[inline(always)]
unsafe fn table16(table: *const f32, index: uint32x4_t) -> uint8x16_t {
    // SAFETY: NEON is enabled; the caller's table has 16 entries.
    unsafe {
        // Entry i is the bytes 4i to 4i + 3.
        let bytes = vmlaq_n_u32(vdupq_n_u32(0x0302_0100), index, 0x0404_0404);
        vqtbl4q_u8(vld1q_u8_x4(table.cast()), vreinterpretq_u8_u32(bytes))
    }
}

/// Looks up indices in a table of 16·`N` entries, N at most 4.
#[inline(always)]
unsafe fn lookup<const N: usize>(table: *const f32, index: uint32x4_t) -> float32x4_t {
    // SAFETY: NEON is enabled; the caller's table has 16·N entries.
    unsafe {
        let index = vandq_u32(index, vdupq_n_u32(16 * N as u32 - 1));
        let mut found = table16(table, index);
        for i in 1..N {
            // An index below this part wraps to a large value, for which the lookup gives 0.
            let part = vandq_u32(vsubq_u32(index, vdupq_n_u32(16 * i as u32)), vdupq_n_u32(63));
            found = vorrq_u8(found, table16(table.add(16 * i), part));
        }
        vreinterpretq_f32_u8(found)
    }
}

// SAFETY of every block below: the trait's contract, the instructions are enabled and the pointers valid; all loads
// and stores are the unaligned kind.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Neon {
    type F = float32x4_t;
    type I = uint32x4_t;
    const LANES: usize = 4;
    const LEVEL: SimdLevel = SimdLevel::Neon;

    #[inline(always)]
    unsafe fn call<K: SimdKernel>(kernel: K) -> K::Output {
        unsafe { call(kernel) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: float32x4_t) {
        unsafe { vst1q_f32(to, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> float32x4_t {
        unsafe {
            let (half, x): (uint16x4_t, float32x4_t) = (vld1_u16(from), vdupq_n_f32(0.0));
            let mut x = x;
            // The intrinsic needs a half type that is not stable.
            asm!("fcvtl {x:v}.4s, {half:v}.4h", x = inout(vreg) x, half = in(vreg) half,
                 options(pure, nomem, nostack, preserves_flags));
            x
        }
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: float32x4_t) {
        unsafe {
            let half: uint16x4_t;
            asm!("fcvtn {half:v}.4h, {x:v}.4s", half = out(vreg) half, x = in(vreg) x,
                 options(pure, nomem, nostack, preserves_flags));
            vst1_u16(to, half)
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))) }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, x: float32x4_t) {
        unsafe {
            let bits = vreinterpretq_u32_f32(x);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            // Rounding could turn a NaN into infinity by a carry: truncate it and set a payload bit instead.
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let chosen = vbslq_u32(vceqq_f32(x, x), rounded, quiet);
            vst1_u16(to, vshrn_n_u32::<16>(chosen))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> float32x4_t {
        unsafe { vcvtq_f32_u32(widen(from)) }
    }
    #[inline(always)]
    unsafe fn map16(table: &[u8; 16], bytes: *mut u8) {
        unsafe {
            let table = vld1q_u8(table.as_ptr());
            for half in [bytes, bytes.add(16)] {
                vst1q_u8(half, vqtbl1q_u8(table, vld1q_u8(half)));
            }
        }
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // NEON's own maximum returns NaN if either operand is NaN.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn round(x: float32x4_t) -> float32x4_t {
        unsafe { vrndnq_f32(x) }
    }
    #[inline(always)]
    unsafe fn pow2i(n: float32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)))) }
    }
    #[inline(always)]
    unsafe fn sum(x: float32x4_t) -> f32 {
        unsafe { vaddvq_f32(x) }
    }
    #[inline(always)]
    unsafe fn max_lane(x: float32x4_t) -> f32 {
        unsafe { vmaxvq_f32(x) }
    }
    #[inline(always)]
    unsafe fn store_sums(to: *mut f32, x: [float32x4_t; 4]) {
        unsafe { vst1q_f32(to, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]))) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn lookup16_low(table: &[f32; 16], codes: *const u8) -> float32x4_t {
        unsafe { lookup::<1>(table.as_ptr(), widen(codes)) }
    }
    #[inline(always)]
    unsafe fn lookup16_high(table: &[f32; 16], codes: *const u8) -> float32x4_t {
        unsafe { lookup::<1>(table.as_ptr(), vshrq_n_u32::<4>(widen(codes))) }
    }
    #[inline(always)]
    unsafe fn codes2(low: *const u8) -> (uint32x4_t, uint32x4_t) {
        unsafe {
            let bits = vdupq_n_u32(u32::from(low.cast::<u16>().read_unaligned()));
            let even = vshlq_u32(bits, vld1q_s32([0, -4, -8, -12].as_ptr()));
            (even, vshrq_n_u32::<2>(even))
        }
    }
    #[inline(always)]
    unsafe fn codes3(low: *const u8, high: *const u8) -> (uint32x4_t, uint32x4_t) {
        unsafe {
            let (even, odd) = Self::codes2(low);
            // Bit 2·lane (+ 1) moves to bit 2.
            let bits = vdupq_n_u32(u32::from(*high) << 2);
            let bits = vshlq_u32(bits, vld1q_s32([0, -2, -4, -6].as_ptr()));
            let third = vdupq_n_u32(4);
            (vbslq_u32(third, bits, even), vbslq_u32(third, vshrq_n_u32::<1>(bits), odd))
        }
    }
    #[inline(always)]
    unsafe fn codes4(low: *const u8) -> (uint32x4_t, uint32x4_t) {
        unsafe {
            let low = widen(low);
            (low, vshrq_n_u32::<4>(low))
        }
    }
    #[inline(always)]
    unsafe fn codes5(low: *const u8, high: *const u8) -> (uint32x4_t, uint32x4_t) {
        unsafe {
            let (even, odd) = Self::codes4(low);
            // Bit 2·lane (+ 1) moves to bit 4.
            let bits = vdupq_n_u32(u32::from(*high) << 4);
            let bits = vshlq_u32(bits, vld1q_s32([0, -2, -4, -6].as_ptr()));
            let fifth = vdupq_n_u32(16);
            (vbslq_u32(fifth, bits, even), vbslq_u32(fifth, vshrq_n_u32::<1>(bits), odd))
        }
    }
    #[inline(always)]
    unsafe fn codes6(low: *const u8, high: *const u8) -> (uint32x4_t, uint32x4_t) {
        unsafe {
            let (even, odd) = Self::codes4(low);
            // Bits 4·lane (+ 2) and the next move to bits 4 and 5.
            let bits = vdupq_n_u32(u32::from(high.cast::<u16>().read_unaligned()) << 4);
            let bits = vshlq_u32(bits, vld1q_s32([0, -4, -8, -12].as_ptr()));
            let upper = vdupq_n_u32(0x30);
            (vbslq_u32(upper, bits, even), vbslq_u32(upper, vshrq_n_u32::<2>(bits), odd))
        }
    }
    #[inline(always)]
    unsafe fn codes8(low: *const u8) -> uint32x4_t {
        unsafe { widen(low) }
    }
    #[inline(always)]
    unsafe fn lookup16(table: &[f32; 16], index: uint32x4_t) -> float32x4_t {
        unsafe { lookup::<1>(table.as_ptr(), index) }
    }
    #[inline(always)]
    unsafe fn lookup32(table: &[f32; 32], index: uint32x4_t) -> float32x4_t {
        unsafe { lookup::<2>(table.as_ptr(), index) }
    }
    #[inline(always)]
    unsafe fn lookup64(table: &[f32; 64], index: uint32x4_t) -> float32x4_t {
        unsafe { lookup::<4>(table.as_ptr(), index) }
    }
    #[inline(always)]
    unsafe fn lookup256(table: &[f32; 256], index: uint32x4_t) -> float32x4_t {
        unsafe {
            let mut at = [0u32; 4];
            vst1q_u32(at.as_mut_ptr(), vandq_u32(index, vdupq_n_u32(255)));
            vld1q_f32(at.map(|i| table[i as usize]).as_ptr())
        }
    }
}
