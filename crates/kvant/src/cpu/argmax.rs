//! The index of the largest element of each row: the lowest index among equals, never that of a NaN.
//!
//! Threads share the rows, and parts of long rows. Each part returns its largest element; among parts with equal
//! elements, the first one wins.

use super::{
    Cpu,
    elements::{Elements, PIECE, Padded, SliceParts},
    scratch,
    simd::{Simd, SimdKernel},
};
use crate::ops::argmax::Call;

/// Elements of a task.
const TASK: usize = 32 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    // SAFETY: calls run under the device's lock, and the output overlaps no other argument.
    let out = unsafe { call.out.host_slice_mut::<u32>() };
    rows(cpu, Elements::of(&call.x), call.dim, out);
}

/// Writes the index for each row of `dim` elements.
pub(super) fn rows(cpu: &Cpu, x: Elements, dim: usize, out: &mut [u32]) {
    if dim < TASK / 2 {
        let per_task = TASK / dim;
        let parts = SliceParts::new(out, per_task);
        return cpu.threads.run(parts.count(), |task| {
            // SAFETY: each task takes its own part.
            let out = unsafe { parts.part(task) };
            for (i, out) in out.iter_mut().enumerate() {
                let start = (task * per_task + i) * dim;
                *out = cpu.level.dispatch(Largest { x, start, len: dim }).map_or(u32::MAX, |(_, at)| at as u32);
            }
        });
    }
    let pieces = dim.div_ceil(TASK);
    let found = &mut *scratch::take(2 * pieces);
    for (row, out) in out.iter_mut().enumerate() {
        let parts = SliceParts::new(found, 2);
        cpu.threads.run(pieces, |task| {
            // SAFETY: each task takes its own part.
            let found = unsafe { parts.part(task) };
            let len = TASK.min(dim - task * TASK);
            let largest = cpu.level.dispatch(Largest { x, start: row * dim + task * TASK, len });
            // An index below 2¹⁵ is exact as f32; NaN marks a part without numbers.
            found.copy_from_slice(&largest.map_or([f32::NAN, 0.0], |(value, at)| [value, at as f32]));
        });
        let mut best: Option<(f32, usize)> = None;
        for (piece, found) in found.chunks_exact(2).enumerate() {
            if !found[0].is_nan() && best.is_none_or(|(value, _)| found[0] > value) {
                best = Some((found[0], piece * TASK + found[1] as usize));
            }
        }
        *out = best.map_or(u32::MAX, |(_, at)| at as u32);
    }
}

/// The largest of `len` elements from `start` on, and its first index; `None` if all are NaN.
struct Largest {
    x: Elements,
    start: usize,
    len: usize,
}

impl SimdKernel for Largest {
    type Output = Option<(f32, usize)>;
    #[inline(always)]
    fn run<S: Simd>(self) -> Self::Output {
        let mut piece = Padded::new(PIECE);
        let mut best: Option<(f32, usize)> = None;
        for start in (0..self.len).step_by(PIECE) {
            let len = PIECE.min(self.len - start);
            piece.fill(f32::NEG_INFINITY);
            // SAFETY: `dispatch` enables the instructions; the elements are within the tensor.
            let largest = unsafe {
                self.x.load::<S>(self.start + start, &mut piece[..len]);
                largest::<S>(&piece)
            };
            if best.is_none_or(|(value, _)| largest > value)
                && let Some(at) = piece[..len].iter().position(|&x| x == largest)
            {
                best = Some((largest, start + at));
            }
        }
        best
    }
}

/// The largest element of a whole number of vectors; −∞ if all are NaN.
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
pub(super) unsafe fn largest<S: Simd>(x: &[f32]) -> f32 {
    // SAFETY: each load is a whole vector of the slice. `max` returns its second operand if one is NaN.
    unsafe {
        let none = S::splat(f32::NEG_INFINITY);
        let mut best = [none; 4];
        for (i, x) in x.chunks_exact(S::LANES).enumerate() {
            best[i % 4] = S::max(S::load(x.as_ptr()), best[i % 4]);
        }
        S::max_lane(S::max(S::max(best[0], best[1]), S::max(best[2], best[3])))
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        DType, Device, Tensor,
        cpu::testing::{Numbers, devices, tensor},
        ops::{self, Argmax},
    };

    fn run(device: &Device, dtype: DType, data: &[f32], rows: usize) -> Vec<u32> {
        let x = tensor(device, dtype, data, &[rows, data.len() / rows]);
        let out = Tensor::from_slice(device, &vec![77u32; rows], &[rows]).unwrap();
        let mut enc = device.encoder().unwrap();
        ops::argmax(&mut enc, &Argmax::new(&x, &out)).unwrap();
        enc.commit().unwrap().wait().unwrap();
        out.to_vec().unwrap()
    }

    #[test]
    fn agrees_with_the_reference() {
        let devices = devices();
        let mut numbers = Numbers(6);
        for (rows, dim) in [(1, 1), (3, 5), (500, 300), (2, 4096), (2, 100_003), (1, 262_144)] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let mut data = numbers.floats(rows * dim);
                // Many equal elements, some of them the largest, and NaN.
                for _ in 0..data.len() / 3 {
                    let at = numbers.below(data.len());
                    data[at] = [0.5, 0.999, f32::NAN][numbers.below(3)];
                }
                let want = run(&Device::reference(), dtype, &data, rows);
                for device in &devices {
                    assert_eq!(run(device, dtype, &data, rows), want, "{device} {dtype} {rows} × {dim}");
                }
            }
        }
    }

    #[test]
    fn infinities_and_nan() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for n in [7, 40_000] {
            let mut rows = [vec![nan; n], vec![-inf; n], vec![nan; n], vec![1.0; n], vec![-0.0; n]];
            rows[2][n - 1] = -inf;
            (rows[3][n - 2], rows[3][n - 1]) = (inf, inf);
            rows[4][n - 1] = 0.0;
            for device in devices() {
                let got = run(&device, DType::F32, &rows.concat(), 5);
                assert_eq!(got, [u32::MAX, 0, n as u32 - 1, n as u32 - 2, 0], "{device}");
            }
        }
    }
}
