//! Conversion of rows between f32 and f32, f16 or bf16: kernels load activations and store results with it.
//!
//! Widening is exact. Narrowing rounds to nearest even and overflows to infinity, as in IEEE 754.

use half::{bf16, f16};

use super::simd::Simd;
use crate::DType;

/// Widens `out.len()` elements of `dtype` to f32.
///
/// # Safety
/// The level's instructions are enabled; `from` is valid for `out.len()` elements, of any alignment; `dtype` is one of
/// the three floating-point types.
#[inline(always)]
pub(super) unsafe fn load_row<S: Simd>(from: *const u8, dtype: DType, out: &mut [f32]) {
    let n = out.len();
    let whole = n - n % S::LANES;
    let to = out.as_mut_ptr();
    // SAFETY: every index below is less than `n`; the caller guarantees `from` and the instructions.
    unsafe {
        match dtype {
            DType::F32 => std::ptr::copy_nonoverlapping(from, to.cast::<u8>(), 4 * n),
            DType::F16 => {
                let from = from.cast::<u16>();
                for i in (0..whole).step_by(S::LANES) {
                    S::store(to.add(i), S::load_f16(from.add(i)));
                }
                for i in whole..n {
                    *to.add(i) = f16::from_bits(from.add(i).read_unaligned()).to_f32();
                }
            }
            DType::BF16 => {
                let from = from.cast::<u16>();
                for i in (0..whole).step_by(S::LANES) {
                    S::store(to.add(i), S::load_bf16(from.add(i)));
                }
                for i in whole..n {
                    *to.add(i) = bf16::from_bits(from.add(i).read_unaligned()).to_f32();
                }
            }
            DType::U32 | DType::U8 => unreachable!("operations check that activations are floats"),
        }
    }
}

/// Rounds a row of f32 to `dtype` and stores it.
///
/// # Safety
/// The level's instructions are enabled; `to` is valid for `row.len()` elements, of any alignment; `dtype` is one of
/// the three floating-point types.
#[inline(always)]
pub(super) unsafe fn store_row<S: Simd>(row: &[f32], to: *mut u8, dtype: DType) {
    let n = row.len();
    let whole = n - n % S::LANES;
    let from = row.as_ptr();
    // SAFETY: every index below is less than `n`; the caller guarantees `to` and the instructions.
    unsafe {
        match dtype {
            DType::F32 => std::ptr::copy_nonoverlapping(from.cast::<u8>(), to, 4 * n),
            DType::F16 => {
                let to = to.cast::<u16>();
                for i in (0..whole).step_by(S::LANES) {
                    S::store_f16(to.add(i), S::load(from.add(i)));
                }
                for i in whole..n {
                    to.add(i).write_unaligned(f16::from_f32(*from.add(i)).to_bits());
                }
            }
            DType::BF16 => {
                let to = to.cast::<u16>();
                for i in (0..whole).step_by(S::LANES) {
                    S::store_bf16(to.add(i), S::load(from.add(i)));
                }
                for i in whole..n {
                    to.add(i).write_unaligned(bf16::from_f32(*from.add(i)).to_bits());
                }
            }
            DType::U32 | DType::U8 => unreachable!("operations check that activations are floats"),
        }
    }
}

/// Converts `n` elements of one float dtype to another, vector by vector, without a buffer in between.
///
/// # Safety
/// The level's instructions are enabled; both are valid for `n` elements, of any alignment, and do not overlap; the
/// dtypes are floating-point types.
#[inline(always)]
pub(super) unsafe fn convert_row<S: Simd>(from: *const u8, from_dtype: DType, to: *mut u8, to_dtype: DType, n: usize) {
    let whole = n - n % S::LANES;
    // SAFETY: the caller's promise.
    unsafe {
        match (from_dtype, to_dtype) {
            (DType::F32, DType::F16) => vectors::<S, 0, 1>(from, to, whole),
            (DType::F32, DType::BF16) => vectors::<S, 0, 2>(from, to, whole),
            (DType::F16, DType::F32) => vectors::<S, 1, 0>(from, to, whole),
            (DType::F16, DType::BF16) => vectors::<S, 1, 2>(from, to, whole),
            (DType::BF16, DType::F32) => vectors::<S, 2, 0>(from, to, whole),
            (DType::BF16, DType::F16) => vectors::<S, 2, 1>(from, to, whole),
            _ => return std::ptr::copy_nonoverlapping(from, to, n * to_dtype.size()),
        }
        let mut rest = [0f32; 16];
        let rest = &mut rest[..n - whole];
        load_row::<S>(from.add(whole * from_dtype.size()), from_dtype, rest);
        store_row::<S>(rest, to.add(whole * to_dtype.size()), to_dtype);
    }
}

/// Converts the whole vectors of [`convert_row`]. `FROM` and `TO` are dtypes: 0 is f32, 1 is f16, 2 is bf16.
#[inline(always)]
unsafe fn vectors<S: Simd, const FROM: usize, const TO: usize>(from: *const u8, to: *mut u8, n: usize) {
    for i in (0..n).step_by(S::LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let x = match FROM {
                0 => S::load(from.cast::<f32>().add(i)),
                1 => S::load_f16(from.cast::<u16>().add(i)),
                _ => S::load_bf16(from.cast::<u16>().add(i)),
            };
            match TO {
                0 => S::store(to.cast::<f32>().add(i), x),
                1 => S::store_f16(to.cast::<u16>().add(i), x),
                _ => S::store_bf16(to.cast::<u16>().add(i), x),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{SimdKernel, SimdLevel};

    struct RoundTrip<'a> {
        dtype: DType,
        row: &'a [f32],
        stored: &'a mut [u8],
        loaded: &'a mut [f32],
    }

    impl SimdKernel for RoundTrip<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self) {
            // SAFETY: `dispatch` enables the instructions; the buffers have room for the row.
            unsafe {
                store_row::<S>(self.row, self.stored.as_mut_ptr(), self.dtype);
                load_row::<S>(self.stored.as_ptr(), self.dtype, self.loaded);
            }
        }
    }

    /// One number, rounded by the `half` crate.
    fn rounded(x: f32, dtype: DType) -> f32 {
        match dtype {
            DType::F16 => f16::from_f32(x).to_f32(),
            DType::BF16 => bf16::from_f32(x).to_f32(),
            _ => x,
        }
    }

    #[test]
    fn rows_of_any_length_round_to_nearest_even_on_every_level() {
        // Ties, overflow, subnormals, zeros, infinities and NaN.
        let special =
            [1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 65519.9, 65520.0, -7e4, 3e-8, 6e-8, -0.0, f32::INFINITY, f32::NAN];
        let special = special.into_iter().chain([1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 3.4e38, 1e-40]);
        let row: Vec<f32> = special.chain((0..60).map(|i| (i as f32 - 31.3) * 1.37)).collect();
        for level in SimdLevel::ALL.into_iter().filter(|level| level.is_supported()) {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for n in 0..=row.len() {
                    // The rest of the buffers must not change; the odd byte makes the row unaligned.
                    let mut stored = vec![0xa5u8; 4 * n + 5];
                    let mut loaded = vec![7f32; n];
                    let row = &row[row.len() - n..];
                    level.dispatch(RoundTrip { dtype, row, stored: &mut stored[1..], loaded: &mut loaded });
                    let used = 1 + n * dtype.size();
                    assert!(stored[0] == 0xa5 && stored[used..].iter().all(|&b| b == 0xa5));
                    for (&x, &y) in row.iter().zip(&loaded) {
                        let want = rounded(x, dtype);
                        assert!(
                            want.to_bits() == y.to_bits() || want.is_nan() && y.is_nan(),
                            "{level} {dtype} {x}: {y}"
                        );
                    }
                }
            }
        }
    }
}
