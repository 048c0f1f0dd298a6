//! Plain Rust over arrays; the compiler vectorises it for the target's baseline.

use half::{bf16, f16};

use super::{Simd, SimdKernel, SimdLevel};

const N: usize = 8;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// Runs a kernel as a separate function, as the other levels do.
#[inline(never)]
pub(super) fn call<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run::<Portable>()
}

#[inline(always)]
fn map(a: [f32; N], f: impl Fn(f32) -> f32) -> [f32; N] {
    std::array::from_fn(|i| f(a[i]))
}

#[inline(always)]
fn zip(a: [f32; N], b: [f32; N], f: impl Fn(f32, f32) -> f32) -> [f32; N] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type F = [f32; N];
    type I = [u8; N];
    const LANES: usize = N;
    const LEVEL: SimdLevel = SimdLevel::Portable;

    #[inline(always)]
    unsafe fn call<K: SimdKernel>(kernel: K) -> K::Output {
        call(kernel)
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: valid for N elements, of any alignment.
        unsafe { from.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::F) {
        // SAFETY: as in `load`.
        unsafe { to.cast::<[f32; N]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        // SAFETY: as in `load`.
        let bits = unsafe { from.cast::<[u16; N]>().read_unaligned() };
        bits.map(|b| f16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: Self::F) {
        // SAFETY: as in `load`.
        unsafe { to.cast::<[u16; N]>().write_unaligned(x.map(|v| f16::from_f32(v).to_bits())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        // SAFETY: as in `load`.
        let bits = unsafe { from.cast::<[u16; N]>().read_unaligned() };
        bits.map(|b| f32::from_bits(u32::from(b) << 16))
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, x: Self::F) {
        // SAFETY: as in `load`.
        unsafe { to.cast::<[u16; N]>().write_unaligned(x.map(|v| bf16::from_f32(v).to_bits())) }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self::F {
        // SAFETY: as in `load`.
        unsafe { from.cast::<[u8; N]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // Two roundings: without FMA in the baseline, `mul_add` would be a library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn round(x: Self::F) -> Self::F {
        map(x, f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn pow2i(n: Self::F) -> Self::F {
        map(n, |n| f32::from_bits(((n as i32 + 127) << 23) as u32))
    }
    #[inline(always)]
    unsafe fn sum(x: Self::F) -> f32 {
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }
    #[inline(always)]
    unsafe fn max_lane(x: Self::F) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn lookup16_low(table: &[f32; 16], codes: *const u8) -> Self::F {
        // SAFETY: as in `load`.
        unsafe { codes.cast::<[u8; N]>().read_unaligned() }.map(|c| table[usize::from(c & 15)])
    }
    #[inline(always)]
    unsafe fn lookup16_high(table: &[f32; 16], codes: *const u8) -> Self::F {
        // SAFETY: as in `load`.
        unsafe { codes.cast::<[u8; N]>().read_unaligned() }.map(|c| table[usize::from(c >> 4)])
    }
    #[inline(always)]
    unsafe fn store_sums(to: *mut f32, x: [Self::F; 4]) {
        // SAFETY: the caller's promise; `to` is valid for four elements.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(x.map(|x| Self::sum(x))) }
    }
    #[inline(always)]
    unsafe fn codes2(low: *const u8) -> (Self::I, Self::I) {
        // SAFETY: valid for N/2 bytes.
        let bits = u32::from_le_bytes(unsafe { low.cast::<[u8; N / 2]>().read_unaligned() });
        let code = |at: usize| (bits >> (2 * at) & 3) as u8;
        (std::array::from_fn(|i| code(2 * i)), std::array::from_fn(|i| code(2 * i + 1)))
    }
    #[inline(always)]
    unsafe fn codes3(low: *const u8, high: *const u8) -> (Self::I, Self::I) {
        // SAFETY: valid for N/2 bytes of `low` and N/4 of `high`.
        let ((even, odd), high) = unsafe { (Self::codes2(low), high.cast::<[u8; N / 4]>().read_unaligned()) };
        let bits = u16::from_le_bytes(high);
        let with = |code: u8, at: usize| code | ((bits >> at & 1) << 2) as u8;
        (std::array::from_fn(|i| with(even[i], 2 * i)), std::array::from_fn(|i| with(odd[i], 2 * i + 1)))
    }
    #[inline(always)]
    unsafe fn codes4(low: *const u8) -> (Self::I, Self::I) {
        // SAFETY: valid for N bytes.
        let low = unsafe { low.cast::<[u8; N]>().read_unaligned() };
        (low.map(|b| b & 15), low.map(|b| b >> 4))
    }
    #[inline(always)]
    unsafe fn codes5(low: *const u8, high: *const u8) -> (Self::I, Self::I) {
        // SAFETY: valid for N bytes of `low` and N/4 of `high`.
        let ((even, odd), high) = unsafe { (Self::codes4(low), high.cast::<[u8; N / 4]>().read_unaligned()) };
        let bits = u16::from_le_bytes(high);
        let with = |i: usize, code: u8, at: usize| code | (((bits >> (2 * i + at)) & 1) << 4) as u8;
        (std::array::from_fn(|i| with(i, even[i], 0)), std::array::from_fn(|i| with(i, odd[i], 1)))
    }
    #[inline(always)]
    unsafe fn codes6(low: *const u8, high: *const u8) -> (Self::I, Self::I) {
        // SAFETY: valid for N bytes of `low` and N/2 of `high`.
        let ((even, odd), high) = unsafe { (Self::codes4(low), high.cast::<[u8; N / 2]>().read_unaligned()) };
        let bits = u32::from_le_bytes(high);
        let with = |i: usize, code: u8, at: usize| code | (((bits >> (4 * i + at)) & 3) << 4) as u8;
        (std::array::from_fn(|i| with(i, even[i], 0)), std::array::from_fn(|i| with(i, odd[i], 2)))
    }
    #[inline(always)]
    unsafe fn codes8(low: *const u8) -> Self::I {
        // SAFETY: valid for N bytes.
        unsafe { low.cast::<[u8; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn lookup16(table: &[f32; 16], index: Self::I) -> Self::F {
        index.map(|i| table[usize::from(i & 15)])
    }
    #[inline(always)]
    unsafe fn lookup32(table: &[f32; 32], index: Self::I) -> Self::F {
        index.map(|i| table[usize::from(i & 31)])
    }
    #[inline(always)]
    unsafe fn lookup64(table: &[f32; 64], index: Self::I) -> Self::F {
        index.map(|i| table[usize::from(i & 63)])
    }
    #[inline(always)]
    unsafe fn lookup256(table: &[f32; 256], index: Self::I) -> Self::F {
        index.map(|i| table[usize::from(i)])
    }
}
