//! Tests every method of every supported level against scalar code.

use half::{bf16, f16};

use super::{Simd, SimdKernel, SimdLevel, Thresholds};
use crate::codec;

/// Finite numbers, ties of both half types, overflow to infinity, subnormals, zeros, infinities, NaN.
fn numbers() -> Vec<f32> {
    let mut x = vec![
        0.0,
        -0.0,
        1.0,
        -2.5,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0xffff_ffff),
        f32::MAX,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        65504.0,
        65519.99,
        65520.0,
        -65520.0,
        1.0 + 1.0 / 2048.0,
        1.0 + 3.0 / 2048.0,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        2f32.powi(-24),
        2f32.powi(-25),
        2f32.powi(-25) * 1.0001,
        -3.0 * 2f32.powi(-25),
        2f32.powi(-15) * 1.23,
        3.389_6e38,
        f32::from_bits(0x7f7f_8000),
    ];
    let mut state = 1u64;
    x.extend((0..229).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / 8_388_608.0 - 1.0) * 2f32.powi((state >> 20 & 31) as i32 - 16)
    }));
    x
}

/// Asserts equal bits; any NaN equals any other.
#[track_caller]
fn same(got: f32, want: f32, what: &str) {
    assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{what}: {got:e}, expected {want:e}");
}

struct Check;

fn lanes<S: Simd>(x: S::F) -> Vec<f32> {
    let mut out = vec![0.0; S::LANES];
    // SAFETY: called by a kernel; `out` has room for a vector.
    unsafe { S::store(out.as_mut_ptr(), x) };
    out
}

// SAFETY of every block below: `dispatch` enables the instructions, and every slice is at least a vector long.
#[allow(clippy::undocumented_unsafe_blocks)]
impl SimdKernel for Check {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let n = S::LANES;
        let x = numbers();
        let level = S::LEVEL;
        assert_eq!(unsafe { lanes::<S>(S::splat(1.5)) }, vec![1.5; n]);
        assert_eq!(unsafe { lanes::<S>(S::zero()) }, vec![0.0; n]);
        // Every offset, so that no alignment is assumed.
        for at in 0..=x.len() - n {
            let a = &x[at..at + n];
            let b: Vec<f32> = (0..n).map(|i| x[(at * 7 + i * 13) % x.len()]).collect();
            let c: Vec<f32> = (0..n).map(|i| x[(at * 3 + i * 5 + 100) % x.len()]).collect();
            unsafe { halves::<S>(a) };
            let (va, vb, vc) = unsafe { (S::load(a.as_ptr()), S::load(b.as_ptr()), S::load(c.as_ptr())) };
            let got = unsafe {
                [S::add(va, vb), S::sub(va, vb), S::mul(va, vb), S::div(va, vb), S::max(va, vb), S::min(va, vb)]
            };
            let (rounded, fused) = unsafe { (S::round(va), S::fma(va, vb, vc)) };
            for i in 0..n {
                let (a, b, c) = (a[i], b[i], c[i]);
                let pick = |first| if first { a } else { b };
                let want = [a + b, a - b, a * b, a / b, pick(a > b), pick(a < b)];
                for (op, (got, want)) in got.iter().zip(want).enumerate() {
                    same(lanes::<S>(*got)[i], want, &format!("{level}, operation {op} of {a:e}, {b:e}"));
                }
                same(lanes::<S>(rounded)[i], a.round_ties_even(), &format!("{level}, round {a:e}"));
                let got = lanes::<S>(fused)[i];
                let (once, twice) = (a.mul_add(b, c), a * b + c);
                let is = |want: f32| got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(is(once) || is(twice), "{level}: fma({a:e}, {b:e}, {c:e}) = {got:e}");
            }
        }
        unsafe { reductions::<S>() };
        unsafe { tables::<S>() };
    }
}

#[inline(always)]
unsafe fn halves<S: Simd>(x: &[f32]) {
    let n = S::LANES;
    let (mut h, mut b) = (vec![0u16; n], vec![0u16; n]);
    // SAFETY: the caller's kernel enables the instructions; all slices are a vector long.
    let (hx, bx) = unsafe {
        S::store_f16(h.as_mut_ptr(), S::load(x.as_ptr()));
        S::store_bf16(b.as_mut_ptr(), S::load(x.as_ptr()));
        (lanes::<S>(S::load_f16(h.as_ptr())), lanes::<S>(S::load_bf16(b.as_ptr())))
    };
    for i in 0..n {
        let what = format!("{}, half of {:e}", S::LEVEL, x[i]);
        same(hx[i], f16::from_f32(x[i]).to_f32(), &what);
        same(bx[i], bf16::from_f32(x[i]).to_f32(), &what);
        if !x[i].is_nan() {
            assert_eq!((h[i], b[i]), (f16::from_f32(x[i]).to_bits(), bf16::from_f32(x[i]).to_bits()), "{what}");
        }
    }
}

#[inline(always)]
unsafe fn reductions<S: Simd>() {
    let n = S::LANES;
    // Small integers: sums are exact in any order.
    let x: Vec<f32> = (0..4 * n).map(|i| ((i * i * 37 + i * 11) % 1024) as f32 - 512.0).collect();
    // SAFETY: the caller's kernel enables the instructions; every pointer is valid for a vector.
    unsafe {
        let v = [0, 1, 2, 3].map(|i| S::load(x.as_ptr().add(i * n)));
        let mut sums = [0.0; 4];
        S::store_sums(sums.as_mut_ptr(), v);
        for i in 0..4 {
            let part = &x[i * n..][..n];
            assert_eq!(sums[i], part.iter().sum::<f32>());
            assert_eq!(S::sum(v[i]), part.iter().sum::<f32>());
            assert_eq!(S::max_lane(v[i]), part.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
        assert_eq!(S::max_lane(S::splat(f32::NEG_INFINITY)), f32::NEG_INFINITY);
        for exponent in -126..=127 {
            assert_eq!(lanes::<S>(S::pow2i(S::splat(exponent as f32))), vec![2f32.powi(exponent); n]);
        }
        S::prefetch(std::ptr::null());
    }
}

/// Packs indices of `bits` bits into planes.
fn pack(codes: &[u8], bits: u32) -> (Vec<u8>, Vec<u8>) {
    let (low, high) = codec::plane_bytes(bits, codes.len()).unwrap();
    let (mut low, mut high) = (vec![0; low], vec![0; high]);
    codec::pack(bits, codes, &mut low, &mut high).unwrap();
    (low, high)
}

#[inline(always)]
unsafe fn tables<S: Simd>() {
    let n = S::LANES;
    let table: [f32; 256] = std::array::from_fn(|i| if i < 128 { -(127.5 - i as f32) } else { i as f32 - 127.5 });
    let bytes: Vec<u8> = (0..256 + 2 * n).map(|i| (i * 73 + i / 256 * 5) as u8).collect();
    for codes in bytes.windows(2 * n) {
        let even = |bits: u32| (0..n).map(move |i| table[usize::from(codes[2 * i]) % (1 << bits)]).collect::<Vec<_>>();
        let odd =
            |bits: u32| (0..n).map(move |i| table[usize::from(codes[2 * i + 1]) % (1 << bits)]).collect::<Vec<_>>();
        // SAFETY: the caller's kernel enables the instructions; the planes hold 2·LANES indices, and the tables have
        // the entries that their types give.
        unsafe {
            let (t16, t32, t64) = (&*table.as_ptr().cast(), &*table.as_ptr().cast(), &*table.as_ptr().cast());
            for bits in [2, 3] {
                let repeated: [f32; 16] = std::array::from_fn(|i| table[i % (1 << bits)]);
                let (low, high) = pack(codes, bits);
                let (a, b) = if bits == 2 { S::codes2(low.as_ptr()) } else { S::codes3(low.as_ptr(), high.as_ptr()) };
                let found = (lanes::<S>(S::lookup16(&repeated, a)), lanes::<S>(S::lookup16(&repeated, b)));
                assert_eq!(found, (even(bits), odd(bits)), "{bits} bits");
            }
            let (low, _) = pack(codes, 4);
            let (a, b) = S::codes4(low.as_ptr());
            assert_eq!((lanes::<S>(S::lookup16(t16, a)), lanes::<S>(S::lookup16(t16, b))), (even(4), odd(4)));
            assert_eq!(lanes::<S>(S::lookup16_low(t16, low.as_ptr())), even(4));
            assert_eq!(lanes::<S>(S::lookup16_high(t16, low.as_ptr())), odd(4));
            let (low, high) = pack(codes, 5);
            let (a, b) = S::codes5(low.as_ptr(), high.as_ptr());
            assert_eq!((lanes::<S>(S::lookup32(t32, a)), lanes::<S>(S::lookup32(t32, b))), (even(5), odd(5)));
            let (low, high) = pack(codes, 6);
            let (a, b) = S::codes6(low.as_ptr(), high.as_ptr());
            assert_eq!((lanes::<S>(S::lookup64(t64, a)), lanes::<S>(S::lookup64(t64, b))), (even(6), odd(6)));
            let want: Vec<f32> = codes[..n].iter().map(|&c| table[usize::from(c)]).collect();
            assert_eq!(lanes::<S>(S::lookup256(&table, S::codes8(codes.as_ptr()))), want);
            let want: Vec<f32> = codes[..n].iter().map(|&c| f32::from(c)).collect();
            assert_eq!(lanes::<S>(S::load_u8(codes.as_ptr())), want);
        }
    }
}

struct Functions<'a> {
    x: &'a [f32],
    /// exp2, exp and tanh of each number.
    out: [&'a mut Vec<f32>; 3],
}

impl SimdKernel for Functions<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let [exp2, exp, tanh] = self.out;
        for x in self.x.chunks_exact(S::LANES) {
            // SAFETY: `dispatch` enables the instructions; `x` is a vector long.
            let y = unsafe {
                let x = S::load(x.as_ptr());
                [S::exp2(x), S::exp(x), S::tanh(x)]
            };
            exp2.extend(lanes::<S>(y[0]));
            exp.extend(lanes::<S>(y[1]));
            tanh.extend(lanes::<S>(y[2]));
        }
    }
}

fn functions(level: SimdLevel, x: &[f32]) -> [Vec<f32>; 3] {
    let [mut a, mut b, mut c] = [const { Vec::new() }; 3];
    level.dispatch(Functions { x, out: [&mut a, &mut b, &mut c] });
    [a, b, c]
}

fn levels() -> impl Iterator<Item = SimdLevel> {
    SimdLevel::ALL.into_iter().filter(|level| level.is_supported())
}

#[test]
fn methods_agree_with_scalar_code() {
    levels().for_each(|level| level.dispatch(Check));
}

#[test]
fn functions_are_accurate() {
    let mut x: Vec<f32> = (0..1 << 16).map(|i| (i as f32 - 32768.0) / 256.0).collect();
    x.extend((0..1 << 10).map(|i| 2f32.powi(i / 32 - 33) * if i % 2 == 0 { 1.3 } else { -1.7 }));
    for level in levels() {
        let [exp2, exp, tanh] = functions(level, &x);
        for (i, &x) in x.iter().enumerate() {
            let wide = f64::from(x);
            if (-125.9..=126.9).contains(&x) {
                let error = f64::from(exp2[i]) / wide.exp2() - 1.0;
                assert!(error.abs() < 2.5e-7, "{level}: exp2({x}) is off by {error:e}");
            }
            if (-87.0..=87.0).contains(&x) {
                // The argument's additional rounding grows with it.
                let error = f64::from(exp[i]) / wide.exp() - 1.0;
                assert!(error.abs() < 2.5e-7 + 1.2e-7 * wide.abs(), "{level}: exp({x}) is off by {error:e}");
            }
            let error = f64::from(tanh[i]) - wide.tanh();
            assert!(error.abs() <= 7e-7 * wide.tanh().abs(), "{level}: tanh({x}) is off by {error:e}");
        }
    }
}

#[test]
fn functions_at_the_edges() {
    let mut x = [0.0, -126.0, -1e4, f32::NEG_INFINITY, 127.0, 1e9, f32::INFINITY, f32::NAN].to_vec();
    x.extend([0.0; 8]);
    for level in levels() {
        let [exp2, exp, tanh] = functions(level, &x);
        let tiny = 2f32.powi(-126);
        assert_eq!(exp2[..7], [1.0, tiny, tiny, tiny, 2f32.powi(127), 2f32.powi(127), 2f32.powi(127)], "{level}");
        assert_eq!(tanh[..7], [0.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0], "{level}");
        assert!(exp2[7].is_nan() && exp[7].is_nan() && tanh[7].is_nan(), "{level}: NaN is lost");
    }
}

struct Search<'a, const BITS: usize> {
    x: &'a [f32],
    thresholds: &'a Thresholds,
}

impl<const BITS: usize> SimdKernel for Search<'_, BITS> {
    /// The indices as stored bytes, and as lookups in a table with entries i − 127.5.
    type Output = (Vec<u8>, Vec<f32>);
    #[inline(always)]
    fn run<S: Simd>(self) -> Self::Output {
        let table: [f32; 256] = std::array::from_fn(|i| i as f32 - 127.5);
        let (mut bytes, mut found) = (vec![0; self.x.len()], Vec::new());
        for (x, to) in self.x.chunks(S::LANES).zip(bytes.chunks_mut(S::LANES)) {
            // SAFETY: `dispatch` enables the instructions; both slices have a vector, and the table has all entries.
            unsafe {
                let index = S::search::<BITS>(S::load(x.as_ptr()), self.thresholds, to.as_mut_ptr());
                found.extend(lanes::<S>(S::lookup256(&table, index)));
            }
        }
        (bytes, found)
    }
}

fn searches<const BITS: usize>() {
    let thresholds = codec::thresholds(BITS as u32).unwrap();
    let mut x: Vec<f32> = thresholds.iter().flat_map(|t| [t.next_down(), *t, t.next_up()]).collect();
    x.extend([0.0, -0.0, 1e-40, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN]);
    // Numbers everywhere, including beyond both ends.
    x.extend((-10_000..10_000).map(|i| i as f32 * 5e-4));
    x.resize(x.len().next_multiple_of(16), 0.0);
    let want: Vec<u8> = x.iter().map(|&x| codec::nearest(x, thresholds)).collect();
    for level in levels() {
        let (bytes, found) = level.dispatch(Search::<BITS> { x: &x, thresholds: &Thresholds::new(thresholds) });
        for (i, &want) in want.iter().enumerate() {
            let got = (bytes[i], found[i]);
            assert_eq!(got, (want, f32::from(want) - 127.5), "{level:?}, {BITS} bits: {}", x[i]);
        }
    }
}

/// Tests numbers at the thresholds, next to them, between them, and not finite.
#[test]
fn searches_find_the_nearest() {
    searches::<2>();
    searches::<3>();
    searches::<4>();
    searches::<5>();
    searches::<6>();
    searches::<8>();
}
