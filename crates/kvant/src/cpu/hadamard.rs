//! The randomised Hadamard rotation: y = H_D·(s ⊙ x)/√D and x = s ⊙ (H_D·y)/√D, for rows of D = 2 … 4096.
//!
//! A fast Walsh–Hadamard transform in place, with butterflies of distance D/2, …, 2, 1. Butterflies of a vector or more
//! combine whole vectors, two distances in one pass over the row; shorter ones work within a vector. Every level does
//! the same additions in the same order, so that all levels give the same bits. Threads share the rows.

use super::{
    Cpu, convert, scratch,
    simd::{Simd, SimdKernel},
};
use crate::{DType, codec, ops::hadamard::Call};

/// Minimum elements of a task.
const TASK: usize = 16 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let rows_per_task = (TASK / call.dim).max(1);
    let signs = signs(call.dim);
    let (x, out) = (TensorRows::new(&call.x), TensorRows::new(&call.out));
    cpu.threads.run(call.rows.div_ceil(rows_per_task), |task| {
        let first = task * rows_per_task;
        let rows = first..(first + rows_per_task).min(call.rows);
        cpu.level.dispatch(HadamardTask { x, out, rows, signs, inverse: call.inverse });
    });
}

/// A tensor's rows, shared by the tasks.
#[derive(Clone, Copy)]
struct TensorRows {
    start: *mut u8,
    dtype: DType,
}

// SAFETY: tasks touch disjoint rows, and the device's lock excludes everyone else.
unsafe impl Sync for TensorRows {}

impl TensorRows {
    fn new(tensor: &crate::Tensor) -> TensorRows {
        TensorRows { start: tensor.host_ptr(), dtype: tensor.dtype() }
    }

    /// # Safety
    /// `row` is a row of `dim` elements within the tensor.
    unsafe fn row(&self, row: usize, dim: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.start.add(row * dim * self.dtype.size()) }
    }
}

struct HadamardTask<'a> {
    x: TensorRows,
    out: TensorRows,
    rows: std::ops::Range<usize>,
    signs: &'a [f32],
    inverse: bool,
}

impl SimdKernel for HadamardTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let dim = self.signs.len();
        let row = &mut *scratch::take(dim);
        for r in self.rows {
            // SAFETY: `dispatch` enables the instructions; `r` is a row of the tensors. A whole row is read before it
            // is written, so `out` may be `x`.
            unsafe {
                convert::load_row::<S>(self.x.row(r, dim), self.x.dtype, row);
                if self.inverse {
                    // As `unrotate`, but scaled before the transform, to avoid overflow as in `rotate`.
                    let factor = (1.0 / (dim as f64).sqrt()) as f32;
                    row.iter_mut().for_each(|x| *x *= factor);
                    transform::<S>(row);
                    row.iter_mut().zip(self.signs).for_each(|(x, s)| *x *= s);
                } else {
                    rotate::<S>(row, self.signs);
                }
                convert::store_row::<S>(row, self.out.row(r, dim), self.out.dtype);
            }
        }
    }
}

/// The fixed signs of dimension `dim`, which must be a validated power of two from 2 to 4096.
pub(super) fn signs(dim: usize) -> &'static [f32] {
    codec::signs(dim).expect("operations check the dimension")
}

/// row ← H·(signs ⊙ row)/√D; the row's length is that of `signs`, a power of two of at least 2.
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
pub(super) unsafe fn rotate<S: Simd>(row: &mut [f32], signs: &[f32]) {
    // SAFETY: passed on to the caller.
    unsafe {
        // Scaled before the transform, so that a sum overflows only if the result is close to overflow.
        multiply::<S>(row, signs);
        transform::<S>(row);
    }
}

/// row ← signs ⊙ (H·row)/√D: the inverse of [`rotate`], for rows whose length times √D is a finite f32.
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
pub(super) unsafe fn unrotate<S: Simd>(row: &mut [f32], signs: &[f32]) {
    // SAFETY: passed on to the caller.
    unsafe {
        transform::<S>(row);
        multiply::<S>(row, signs);
    }
}

/// row ← row ⊙ signs/√D.
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
unsafe fn multiply<S: Simd>(row: &mut [f32], signs: &[f32]) {
    let n = row.len();
    assert_eq!(signs.len(), n);
    let factor = (1.0 / (n as f64).sqrt()) as f32;
    if n < S::LANES {
        row.iter_mut().zip(signs).for_each(|(x, s)| *x *= s * factor);
        return;
    }
    let row = row.as_mut_ptr();
    // SAFETY: n is a multiple of LANES, because both are powers of two; the caller guarantees the instructions.
    unsafe {
        let factor = S::splat(factor);
        for i in (0..n).step_by(S::LANES) {
            let s = S::mul(S::load(signs.as_ptr().add(i)), factor);
            S::store(row.add(i), S::mul(S::load(row.add(i)), s));
        }
    }
}

/// row ← H·row, not normalised; the length is a power of two.
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
pub(super) unsafe fn transform<S: Simd>(row: &mut [f32]) {
    let n = row.len();
    debug_assert!(n.is_power_of_two());
    if n < S::LANES {
        return transform_short(row);
    }
    let row = row.as_mut_ptr();
    // SAFETY: n is a multiple of LANES, and every index below is less than n.
    unsafe {
        // `span`: the butterflies so far have made spans of this length independent of each other.
        let mut span = n;
        while span >= 4 * S::LANES {
            let quarter = span / 4;
            for start in (0..n).step_by(span) {
                for i in (start..start + quarter).step_by(S::LANES) {
                    let at = |k: usize| row.add(i + k * quarter);
                    let (a, b, c, d) = (S::load(at(0)), S::load(at(1)), S::load(at(2)), S::load(at(3)));
                    let (a, c) = (S::add(a, c), S::sub(a, c));
                    let (b, d) = (S::add(b, d), S::sub(b, d));
                    S::store(at(0), S::add(a, b));
                    S::store(at(1), S::sub(a, b));
                    S::store(at(2), S::add(c, d));
                    S::store(at(3), S::sub(c, d));
                }
            }
            span = quarter;
        }
        if span == 2 * S::LANES {
            for i in (0..n).step_by(span) {
                let (a, b) = (S::load(row.add(i)), S::load(row.add(i + S::LANES)));
                S::store(row.add(i), S::hadamard_lanes(S::add(a, b)));
                S::store(row.add(i + S::LANES), S::hadamard_lanes(S::sub(a, b)));
            }
        } else {
            for i in (0..n).step_by(S::LANES) {
                S::store(row.add(i), S::hadamard_lanes(S::load(row.add(i))));
            }
        }
    }
}

/// As [`transform`], for a row shorter than a vector.
fn transform_short(row: &mut [f32]) {
    let mut distance = row.len() / 2;
    while distance > 0 {
        for pair in row.chunks_exact_mut(2 * distance) {
            let (low, high) = pair.split_at_mut(distance);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        distance /= 2;
    }
}

#[cfg(test)]
mod tests {
    use crate::{Device, Result, Tensor, codec, cpu::testing, ops};

    fn hadamard(device: &Device, x: &Tensor, inverse: bool) -> Result<Tensor> {
        let out = Tensor::zeros(device, x.dtype(), x.shape())?;
        let mut enc = device.encoder()?;
        ops::hadamard(&mut enc, &ops::Hadamard::new(x, &out).inverse(inverse))?;
        enc.commit()?.wait()?;
        Ok(out)
    }

    fn devices() -> Vec<Device> {
        testing::levels().map(|level| testing::device(level, 2)).collect()
    }

    fn numbers(n: usize) -> Vec<f32> {
        (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    /// The definition: entry (i, j) of Sylvester's matrix is (−1)^n, with n the number of ones in i & j.
    fn oracle(x: &[f32], inverse: bool) -> Vec<f64> {
        let n = x.len();
        let s = codec::signs(n).unwrap();
        let row = |i: usize| {
            let term = |j: usize| {
                let sign = if (i & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
                f64::from(x[j]) * sign * if inverse { 1.0 } else { f64::from(s[j]) }
            };
            let sum: f64 = (0..n).map(term).sum();
            sum / (n as f64).sqrt() * if inverse { f64::from(s[i]) } else { 1.0 }
        };
        (0..n).map(row).collect()
    }

    #[test]
    fn every_size_equals_the_definition_on_every_level() {
        for device in devices() {
            for dim in (1..=12).map(|log2| 1usize << log2) {
                let data = numbers(3 * dim);
                let x = Tensor::from_slice(&device, &data, &[3, dim]).unwrap();
                for inverse in [false, true] {
                    let got = hadamard(&device, &x, inverse).unwrap().to_f32().unwrap();
                    for (got, x) in got.chunks(dim).zip(data.chunks(dim)).take(if dim > 1024 { 1 } else { 3 }) {
                        for (got, want) in got.iter().zip(oracle(x, inverse)) {
                            assert!((f64::from(*got) - want).abs() < 2e-6, "{device} D={dim}: {got}, not {want}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn levels_agree_bit_for_bit() {
        for dim in [64, 128, 2048] {
            let data = numbers(dim);
            let results: Vec<Vec<u32>> = devices()
                .iter()
                .map(|device| {
                    let x = Tensor::from_slice(device, &data, &[dim]).unwrap();
                    hadamard(device, &x, false).unwrap().to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
                })
                .collect();
            assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{dim}");
        }
    }

    #[test]
    fn in_place_and_back_over_many_rows() {
        for device in devices() {
            // Several tasks.
            let data = numbers(300 * 128);
            let x = Tensor::from_slice(&device, &data, &[300, 128]).unwrap();
            let mut enc = device.encoder().unwrap();
            ops::hadamard(&mut enc, &ops::Hadamard::new(&x, &x)).unwrap();
            ops::hadamard(&mut enc, &ops::Hadamard::new(&x, &x).inverse(true)).unwrap();
            enc.commit().unwrap().wait().unwrap();
            for (got, want) in x.to_f32().unwrap().iter().zip(&data) {
                assert!((got - want).abs() < 2e-6);
            }
        }
    }
}
