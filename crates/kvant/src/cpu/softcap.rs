//! out = cap · tanh(x / cap), element by element. Threads share the elements.

use super::{
    Cpu,
    elements::{Elements, PIECE, Padded},
    simd::{Simd, SimdKernel},
};
use crate::ops::softcap::Call;

/// Minimum elements of a task.
const TASK: usize = 4 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let (x, out) = (Elements::of(&call.x), Elements::of(&call.out));
    cpu.threads.run(call.elements.div_ceil(TASK), |task| {
        let range = task * TASK..call.elements.min((task + 1) * TASK);
        cpu.level.dispatch(Range { x, out, range, cap: call.cap });
    });
}

struct Range {
    x: Elements,
    out: Elements,
    range: std::ops::Range<usize>,
    cap: f32,
}

impl SimdKernel for Range {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let mut piece = Padded::new(PIECE);
        for start in self.range.clone().step_by(PIECE) {
            piece.set_len(PIECE.min(self.range.end - start));
            // SAFETY: `dispatch` enables the instructions; the elements are within the tensors and belong to this task.
            // They are read before any is written, so `out` may be `x`.
            unsafe {
                self.x.load::<S>(start, &mut piece);
                for x in piece.vectors::<S>() {
                    let t = S::tanh(S::div(S::load(x), S::splat(self.cap)));
                    S::store(x, S::mul(t, S::splat(self.cap)));
                }
                self.out.store::<S>(start, &piece);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        DType, Device,
        cpu::testing::{Numbers, devices, rounding, tensor},
        ops::{self, Softcap},
    };

    #[test]
    fn agrees_with_the_reference() {
        let devices = devices();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for n in [0, 1, 33, 5000] {
                let mut data = Numbers(4).floats(n);
                data.iter_mut().enumerate().for_each(|(i, x)| *x *= [1e-4, 1.0, 40.0, 5e4][i % 4]);
                if n > 9 {
                    data[..3].copy_from_slice(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
                }
                for in_place in [false, true] {
                    let go = |device: &Device| {
                        let x = tensor(device, dtype, &data, &[n]);
                        let other = tensor(device, dtype, &vec![7.0; n], &[n]);
                        let out = if in_place { &x } else { &other };
                        let mut enc = device.encoder().unwrap();
                        ops::softcap(&mut enc, &Softcap::new(&x, 30.0, out)).unwrap();
                        enc.commit().unwrap().wait().unwrap();
                        out.to_f32().unwrap()
                    };
                    let want = go(&Device::reference());
                    for device in &devices {
                        for (&got, &want) in go(device).iter().zip(&want) {
                            let close = (got - want).abs() <= (1e-6 + 2.0 * rounding(dtype)) * want.abs() + 1e-7;
                            assert!(close || got.is_nan() && want.is_nan(), "{device} {dtype}: {got}, not {want}");
                        }
                    }
                }
            }
        }
    }
}
