//! Vectors of f32, implemented once per instruction set; kernels are written over the trait.
//!
//! A kernel is a type that implements [`SimdKernel`]; [`SimdLevel::dispatch`] runs it with the instructions of a level.
//! Every function that a kernel calls must be `#[inline(always)]`: only then is it compiled inside the function that
//! enables the instructions. Closures must not call [`Simd`] methods: a closure may be compiled without the
//! instructions, and each method becomes a call.

use std::fmt;

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(test, target_arch = "x86_64"))]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::{Avx512, TransposedRows, dot_pairs};
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
mod tests;

/// An instruction set that the CPU kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SimdLevel {
    /// Plain Rust, for every machine.
    Portable,
    /// AVX2 with FMA and F16C (x86-64).
    Avx2,
    /// AVX2 with AVX-VNNI (integer dot products) and BMI2 (x86-64: Alder Lake and later without AVX-512).
    Avx2Vnni,
    /// AVX-512 F, BW, VL, DQ, with AVX2, FMA and F16C (x86-64).
    Avx512,
    /// AVX-512 with VNNI, integer dot products (x86-64: Cascade Lake and later).
    Avx512Vnni,
    /// AVX-512 with VNNI and VBMI, byte permutes (x86-64: Ice Lake, Zen 4 and later).
    Avx512Vbmi,
    /// AVX-512 with VNNI, VBMI and AMX for bf16 (x86-64: Sapphire Rapids and later; Linux). [`SimdLevel::is_supported`]
    /// requests permission from Linux to use tiles. From then on, alternate signal stacks need room for them
    /// (`AT_MINSIGSTKSZ`).
    Avx512Amx,
    /// NEON (AArch64).
    Neon,
}

impl SimdLevel {
    /// Every level, slowest first.
    pub const ALL: [SimdLevel; 8] = [
        SimdLevel::Portable,
        SimdLevel::Avx2,
        SimdLevel::Avx2Vnni,
        SimdLevel::Avx512,
        SimdLevel::Avx512Vnni,
        SimdLevel::Avx512Vbmi,
        SimdLevel::Avx512Amx,
        SimdLevel::Neon,
    ];

    /// Whether this machine has the instructions.
    pub fn is_supported(self) -> bool {
        match self {
            SimdLevel::Portable => true,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => avx2::is_supported(),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2Vnni => avx2::has_vnni(),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => avx512::is_supported(),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512Vnni => avx512::has_vnni(),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512Vbmi => avx512::has_vnni() && avx512::has_vbmi(),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512Amx => SimdLevel::Avx512Vbmi.is_supported() && amx::is_supported(),
            #[cfg(target_arch = "aarch64")]
            SimdLevel::Neon => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The fastest level of this machine.
    pub fn best() -> SimdLevel {
        SimdLevel::ALL.into_iter().rfind(|level| level.is_supported()).unwrap_or(SimdLevel::Portable)
    }

    /// Runs a kernel with this level's instructions.
    #[inline]
    pub(crate) fn dispatch<K: SimdKernel>(self, kernel: K) -> K::Output {
        match self {
            // SAFETY: a device is made only with a level that `is_supported` (`Cpu::new`).
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 | SimdLevel::Avx2Vnni => unsafe { avx2::call(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 | SimdLevel::Avx512Vnni | SimdLevel::Avx512Vbmi | SimdLevel::Avx512Amx => unsafe {
                avx512::call(kernel)
            },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: every AArch64 target that Rust has a standard library for includes NEON.
            SimdLevel::Neon => unsafe { neon::call(kernel) },
            _ => portable::call(kernel),
        }
    }

    /// Whether the level has VNNI. For quantised weights, [`ops::linear`](crate::ops::linear()) then rounds the
    /// activations of many rows to 16 bits, or to hi + lo bf16 if the level has AMX. With
    /// [`CpuOptions::eight_bit_activations`](crate::CpuOptions::eight_bit_activations) it rounds them to 8 bits.
    pub fn has_vnni(self) -> bool {
        matches!(self, SimdLevel::Avx2Vnni | SimdLevel::Avx512Vnni) || self.has_vbmi()
    }

    /// Whether the level has AVX-512's VNNI and VBMI: byte products and byte permutes.
    pub(crate) fn has_vbmi(self) -> bool {
        matches!(self, SimdLevel::Avx512Vbmi | SimdLevel::Avx512Amx)
    }

    /// Whether the level has AMX: products of bf16 tiles.
    pub(crate) fn has_amx(self) -> bool {
        self == SimdLevel::Avx512Amx
    }

    /// Runs a kernel on a level that [has VNNI](SimdLevel::has_vnni). The kernel is compiled only for these levels.
    #[inline]
    pub(crate) fn dispatch_vnni<K: SimdKernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        match self {
            // SAFETY: as above.
            SimdLevel::Avx2Vnni => return unsafe { avx2::call_vnni(kernel) },
            // SAFETY: as above.
            _ if self.has_vnni() => return unsafe { avx512::call_vnni(kernel) },
            _ => {}
        }
        let _ = kernel;
        unreachable!("{self} has no VNNI")
    }

    /// Runs a kernel on a level that [has VBMI](SimdLevel::has_vbmi), which includes AMX. The kernel is compiled only
    /// for these levels.
    #[inline]
    pub(crate) fn dispatch_vbmi<K: SimdKernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        if self.has_vbmi() {
            // SAFETY: as above.
            return unsafe { avx512::call_vbmi(kernel) };
        }
        let _ = kernel;
        unreachable!("{self} has no VBMI")
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SimdLevel::Portable => "portable",
            SimdLevel::Avx2 => "AVX2",
            SimdLevel::Avx2Vnni => "AVX-VNNI",
            SimdLevel::Avx512 => "AVX-512",
            SimdLevel::Avx512Vnni => "AVX-512 VNNI",
            SimdLevel::Avx512Vbmi => "AVX-512 VBMI",
            SimdLevel::Avx512Amx => "AVX-512 AMX",
            SimdLevel::Neon => "NEON",
        })
    }
}

/// Sorted thresholds, for [`Simd::search`].
pub(crate) struct Thresholds {
    /// A binary search tree of up to 8 levels: node 1 is the root, and the children of node n are 2n and 2n + 1. Node 0
    /// and the entries after the last level are padding.
    pub(crate) tree: [f32; 256 + 16],
    /// Cells for up to 31 thresholds; unused for more.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "AVX-512 has permutes for it"))]
    pub(crate) cells: ThresholdCells,
    /// The number 1, hidden from the compiler.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for AVX-512"))]
    pub(crate) one: i32,
}

/// Divides the number line into equal cells with at most one threshold each. x is in cell x · factor + offset, rounded
/// and clamped to the first and last cell.
pub(crate) struct ThresholdCells {
    pub(crate) factor: f32,
    pub(crate) offset: f32,
    pub(crate) last: f32,
    /// The threshold of each cell; infinity if it has none.
    pub(crate) threshold: [f32; 64],
    /// The number of thresholds in earlier cells.
    pub(crate) below: [u32; 64],
}

impl Thresholds {
    /// Makes the tree and cells of 2ⁿ − 1 ascending thresholds, n at most 8.
    pub(crate) fn new(thresholds: &[f32]) -> Thresholds {
        let leaves = thresholds.len() + 1;
        assert!(leaves.is_power_of_two() && leaves <= 256);
        let mut tree = [0.0; 256 + 16];
        for (node, value) in tree.iter_mut().enumerate().take(leaves).skip(1) {
            let level = 1usize << node.ilog2();
            // Node `level + j` splits the j-th of `level` equal parts of the leaves.
            *value = thresholds[(2 * (node - level) + 1) * (leaves / level / 2) - 1];
        }
        let cells = ThresholdCells::new(if leaves <= 32 { thresholds } else { &[] }, 2 * leaves);
        Thresholds { tree, cells, one: std::hint::black_box(1) }
    }
}

impl ThresholdCells {
    fn new(thresholds: &[f32], count: usize) -> ThresholdCells {
        let last = (count - 1) as f32;
        // The outermost thresholds are in the second and the second to last cell.
        let (first, end) = (thresholds.first().unwrap_or(&-1.0), thresholds.last().unwrap_or(&1.0));
        let factor = (last - 2.0) / (end - first);
        let offset = 1.0 - first * factor;
        let mut cells = ThresholdCells { factor, offset, last, threshold: [f32::INFINITY; 64], below: [0; 64] };
        for &x in thresholds {
            let cell = cells.of(x);
            assert!(cells.threshold[cell] == f32::INFINITY, "a cell has one threshold");
            cells.threshold[cell] = x;
            cells.below[cell + 1..].iter_mut().for_each(|below| *below += 1);
        }
        cells
    }

    /// The cell of x, computed as vectors compute it.
    fn of(&self, x: f32) -> usize {
        x.mul_add(self.factor, self.offset).clamp(0.0, self.last).round_ties_even() as usize
    }
}

/// The panic message of word products at levels without them.
#[cfg(target_arch = "x86_64")]
const WITHOUT_WORDS: &str = "the level does not multiply words";

/// A computation over vectors of any level.
pub(crate) trait SimdKernel {
    type Output;
    /// Runs the computation. Must be `#[inline(always)]`.
    fn run<S: Simd>(self) -> Self::Output;
}

/// Vectors of [`Simd::LANES`] f32.
///
/// # Safety
/// Every function may be called only where the level's instructions are enabled (inside a [`SimdKernel`]); those that
/// take a pointer need it valid for `LANES` elements of the named type, of any alignment.
#[allow(clippy::missing_safety_doc, reason = "said once, above")]
pub(crate) trait Simd: Copy + 'static {
    /// A vector; plain data.
    type F: Copy;
    /// `LANES` indices into a table; bits that the table's size does not need are ignored.
    type I: Copy;
    const LANES: usize;
    /// The level, for specialised code.
    const LEVEL: SimdLevel;
    /// Whether the registers hold 16 sums and their operands, instead of 8. A constant, so that the compiler drops the
    /// other branch.
    const MANY_REGISTERS: bool = matches!(Self::LEVEL, SimdLevel::Avx512 | SimdLevel::Neon);

    /// Whether this is [`SimdLevel::Portable`], where small code matters more than speed.
    const PORTABLE: bool = matches!(Self::LEVEL, SimdLevel::Portable);
    /// Whether attention has kernels that read every type of key and value in place; otherwise it widens them first.
    const READS_DIRECTLY: bool = !Self::PORTABLE;

    /// Runs a kernel with this level's instructions, as a function of its own. Unlike [`SimdLevel::dispatch`], it is
    /// compiled for this level only.
    unsafe fn call<K: SimdKernel>(kernel: K) -> K::Output;

    unsafe fn splat(x: f32) -> Self::F;
    #[inline(always)]
    unsafe fn zero() -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { Self::splat(0.0) }
    }
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, x: Self::F);
    /// Widens half floats.
    unsafe fn load_f16(from: *const u16) -> Self::F;
    /// Rounds to nearest even; overflow gives infinity.
    unsafe fn store_f16(to: *mut u16, x: Self::F);
    /// Widens bfloats.
    unsafe fn load_bf16(from: *const u16) -> Self::F;
    /// Rounds to nearest even; NaN stays NaN.
    unsafe fn store_bf16(to: *mut u16, x: Self::F);
    /// Widens bytes, 0 to 255.
    unsafe fn load_u8(from: *const u8) -> Self::F;

    /// Widens `2 · LANES` codes of 4 bits from `LANES` bytes: those in the low halves, those in the high halves.
    #[inline(always)]
    unsafe fn load_u4(from: *const u8) -> (Self::F, Self::F) {
        const NUMBERS: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
        // SAFETY: the caller's promise.
        unsafe { (Self::lookup16_low(&NUMBERS, from), Self::lookup16_high(&NUMBERS, from)) }
    }
    /// Replaces 32 bytes below 16 by the entries of a table.
    #[inline(always)]
    unsafe fn map16(table: &[u8; 16], bytes: *mut u8) {
        // SAFETY: the caller's promise: 32 bytes.
        let bytes = unsafe { &mut *bytes.cast::<[u8; 32]>() };
        bytes.iter_mut().for_each(|byte| *byte = table[usize::from(*byte & 15)]);
    }
    /// Widens 16 codes of 6 bits from 12 bytes, a little-endian bit stream, into the first `16 / LANES` vectors.
    #[inline(always)]
    unsafe fn load_u6(from: *const u8) -> [Self::F; 4] {
        // SAFETY: the caller's promise: 12 bytes are readable; LANES divides 16.
        unsafe {
            let bytes = from.cast::<[[u8; 3]; 4]>().read();
            let codes: [f32; 16] = std::array::from_fn(|i| {
                let [a, b, c] = bytes[i / 4];
                (u32::from_le_bytes([a, b, c, 0]) >> (i % 4 * 6) & 63) as f32
            });
            let mut vectors = [Self::zero(); 4];
            for (i, vector) in vectors[..16 / Self::LANES].iter_mut().enumerate() {
                *vector = Self::load(codes.as_ptr().add(i * Self::LANES));
            }
            vectors
        }
    }

    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// a·b + c, with one rounding if the hardware supports it.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger one; `b` if either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller one; `b` if either is NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Rounds to the nearest integer, ties to even.
    unsafe fn round(x: Self::F) -> Self::F;
    /// 2ⁿ for integral n from −126 to 127.
    unsafe fn pow2i(n: Self::F) -> Self::F;
    unsafe fn sum(x: Self::F) -> f32;
    unsafe fn max_lane(x: Self::F) -> f32;
    /// Stores the sum of the lanes of each vector.
    unsafe fn store_sums(to: *mut f32, x: [Self::F; 4]);

    /// A vector of signed words, two per lane, or of bytes, four per lane. This and the six functions below need
    /// [`SimdLevel::has_vnni`].
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_words(from: *const f32) -> Self::I {
        let _ = from;
        unreachable!("{WITHOUT_WORDS}")
    }
    /// The two words, or four bytes, in every lane.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn splat_words(pair: i32) -> Self::I {
        let _ = pair;
        unreachable!("{WITHOUT_WORDS}")
    }
    /// Rounds to the nearest integers, which must fit signed words.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn store_words(to: *mut i16, x: Self::F) {
        let _ = (to, x);
        unreachable!("{WITHOUT_WORDS}")
    }
    /// Adds the products of pairs of words to the sum in each lane.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn dot_words(sum: Self::I, a: Self::I, b: Self::I) -> Self::I {
        let _ = (sum, a, b);
        unreachable!("{WITHOUT_WORDS}")
    }
    /// Rounds to the nearest integers, which must fit signed bytes.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn store_bytes(to: *mut i8, x: Self::F) {
        let _ = (to, x);
        unreachable!("{WITHOUT_WORDS}")
    }
    /// Adds the products of groups of four bytes to the sum in each lane; the bytes of `a` are unsigned.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn dot_bytes(sum: Self::I, a: Self::I, b: Self::I) -> Self::I {
        let _ = (sum, a, b);
        unreachable!("{WITHOUT_WORDS}")
    }
    /// Converts sums of [`Simd::dot_words`] and [`Simd::dot_bytes`] to f32.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn widen_sums(sums: Self::I) -> Self::F {
        let _ = sums;
        unreachable!("{WITHOUT_WORDS}")
    }

    /// Transposes 16 rows of 16 floats, `stride` apart: element i of row j goes to `to[16 i + j]`.
    #[inline(always)]
    unsafe fn transpose16(from: *const f32, stride: usize, to: *mut f32) {
        for row in 0..16 {
            for i in 0..16 {
                // SAFETY: the caller's promise.
                unsafe { *to.add(16 * i + row) = *from.add(row * stride + i) };
            }
        }
    }

    /// Prefetches the cache line of an address into the second-level cache. The address need not be valid.
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        let _ = at;
    }

    /// Prefetches the cache line of an address into the first-level cache for writing. The address need not be valid.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn prefetch_to_write(at: *const u8) {
        let _ = at;
    }

    /// The Walsh–Hadamard transform of the lanes, not normalised, by butterflies of distance LANES/2, …, 2, 1: of two
    /// lanes whose numbers differ in one bit, the lower gets the sum, the upper the difference lower − upper.
    #[inline(always)]
    unsafe fn hadamard_lanes(x: Self::F) -> Self::F {
        let mut lanes = [0f32; 16];
        // SAFETY: no level has more than 16 lanes; the rest is the caller's promise.
        unsafe { Self::store(lanes.as_mut_ptr(), x) };
        let mut distance = Self::LANES / 2;
        while distance > 0 {
            for i in (0..Self::LANES).filter(|i| i & distance == 0) {
                let (a, b) = (lanes[i], lanes[i + distance]);
                (lanes[i], lanes[i + distance]) = (a + b, a - b);
            }
            distance /= 2;
        }
        // SAFETY: as above.
        unsafe { Self::load(lanes.as_ptr()) }
    }

    /// The number of the 2^BITS − 1 thresholds that each lane exceeds (0 for NaN), also stored as `LANES` bytes.
    #[inline(always)]
    unsafe fn search<const BITS: usize>(x: Self::F, thresholds: &Thresholds, to: *mut u8) -> Self::I {
        let mut lanes = [0f32; 16];
        // SAFETY: no level has more than 16 lanes; the rest is the caller's promise.
        unsafe { Self::store(lanes.as_mut_ptr(), x) };
        for (i, &x) in lanes.iter().enumerate().take(Self::LANES) {
            let node = (0..BITS).fold(1, |node, _| 2 * node + usize::from(x > thresholds.tree[node]));
            // SAFETY: `to` is valid for LANES bytes.
            unsafe { *to.add(i) = (node - (1 << BITS)) as u8 };
        }
        // SAFETY: as above.
        unsafe { Self::codes8(to) }
    }

    /// Entries `codes[lane] & 15` of a table of 16, for the low halves of `LANES` bytes.
    unsafe fn lookup16_low(table: &[f32; 16], codes: *const u8) -> Self::F;
    /// As [`Simd::lookup16_low`], for the high halves.
    unsafe fn lookup16_high(table: &[f32; 16], codes: *const u8) -> Self::F;

    /// The 2·`LANES` packed 2-bit indices from `low` on: the even ones, the odd ones. Higher bits are arbitrary.
    unsafe fn codes2(low: *const u8) -> (Self::I, Self::I);
    /// As [`Simd::codes2`], with a third bit each from `high`, a little-endian bit string.
    unsafe fn codes3(low: *const u8, high: *const u8) -> (Self::I, Self::I);
    /// The 2·`LANES` packed 4-bit indices from `low` on: the even ones, the odd ones.
    unsafe fn codes4(low: *const u8) -> (Self::I, Self::I);
    /// As [`Simd::codes4`], with a fifth bit each from `high`, a little-endian bit string.
    unsafe fn codes5(low: *const u8, high: *const u8) -> (Self::I, Self::I);
    /// As [`Simd::codes4`], with two more bits each from `high`.
    unsafe fn codes6(low: *const u8, high: *const u8) -> (Self::I, Self::I);
    /// `LANES` one-byte indices.
    unsafe fn codes8(low: *const u8) -> Self::I;
    unsafe fn lookup16(table: &[f32; 16], index: Self::I) -> Self::F;
    unsafe fn lookup32(table: &[f32; 32], index: Self::I) -> Self::F;
    unsafe fn lookup64(table: &[f32; 64], index: Self::I) -> Self::F;
    /// Looks up indices in a table that must be antisymmetric: entry 255 − i is minus entry i.
    unsafe fn lookup256(table: &[f32; 256], index: Self::I) -> Self::F;

    /// 2ˣ with a relative error of about 1e-7. Inputs below −126 give 2⁻¹²⁶, above 127 2¹²⁷; NaN gives NaN.
    #[inline(always)]
    unsafe fn exp2(x: Self::F) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe {
            let (power, rest) = Self::exp2_parts(x);
            Self::fma(power, rest, power)
        }
    }

    /// (2ⁿ, 2ᶠ − 1) with x = n + f, n integral and |f| ≤ ½; x is clamped to −126 … 127.
    #[inline(always)]
    unsafe fn exp2_parts(x: Self::F) -> (Self::F, Self::F) {
        // SAFETY: the caller's promise.
        unsafe {
            // In this order, because `min` and `max` return their second operand if one is NaN.
            let x = Self::min(Self::splat(127.0), Self::max(Self::splat(-126.0), x));
            let n = Self::round(x);
            let f = Self::sub(x, n);
            // Taylor coefficients ln2ᵏ/k!: on |f| ≤ ½ the seventh term is below 1e-8.
            let mut p = Self::splat(1.540_353e-4);
            for c in [1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 0.240_226_5, std::f32::consts::LN_2] {
                p = Self::fma(p, f, Self::splat(c));
            }
            (Self::pow2i(n), Self::mul(p, f))
        }
    }

    /// eˣ, with the range of [`Simd::exp2`]; the relative error grows as |x|·6e-8.
    #[inline(always)]
    unsafe fn exp(x: Self::F) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { Self::exp2(Self::mul(x, Self::splat(std::f32::consts::LOG2_E))) }
    }

    /// tanh x = (e²ˣ − 1)/(e²ˣ + 1), with a relative error of a few 1e-7, also for small x.
    #[inline(always)]
    unsafe fn tanh(x: Self::F) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe {
            let (power, rest) = Self::exp2_parts(Self::mul(x, Self::splat(2.0 * std::f32::consts::LOG2_E)));
            let e_minus_1 = Self::fma(power, rest, Self::sub(power, Self::splat(1.0)));
            Self::div(e_minus_1, Self::add(e_minus_1, Self::splat(2.0)))
        }
    }
}
