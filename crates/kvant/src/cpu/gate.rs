//! out = activation(gate) · up, element by element. Threads share the rows, or parts of them.
//!
//! All activations are x/(1 + e⁻ᶻ), except the sigmoid, 1/(1 + e⁻ˣ), and the identity. SiLU: z = x; clamped swish: z =
//! 1.702·x. GELU-tanh: z = 2√(2/π)(x + 0.044715x³), because ½(1 + tanh u) = 1/(1 + e⁻²ᵘ).

use super::{
    Cpu,
    elements::{Elements, PIECE, Padded},
    simd::{Simd, SimdKernel},
};
use crate::ops::{
    Activation,
    gate::{Call, OwnedColumns},
};

/// Minimum elements of a task.
const TASK: usize = 8 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let (gate, up, out) = (GateColumns::new(&call.gate), GateColumns::new(&call.up), Elements::of(&call.out));
    if call.dim == 0 {
        return;
    }
    // A task is whole pieces of one row, or several rows.
    let columns = call.dim.min(TASK);
    let rows = (TASK / columns).max(1);
    let across = call.dim.div_ceil(columns);
    cpu.threads.run(call.rows.div_ceil(rows) * across, |task| {
        let (first, start) = (task / across * rows, task % across * columns);
        for row in first..call.rows.min(first + rows) {
            for start in (start..call.dim.min(start + columns)).step_by(PIECE) {
                let len = PIECE.min(call.dim.min(start - start % columns + columns) - start);
                let at = row * call.dim + start;
                let (gate, up) = ((gate.elements, gate.at(row, start)), (up.elements, up.at(row, start)));
                cpu.level.dispatch(GatePiece { gate, up, out: (out, at), len, activation: call.activation });
            }
        }
    });
}

/// Columns of a tensor: the offset of the first row's, and the distance between rows.
#[derive(Clone, Copy)]
struct GateColumns {
    elements: Elements,
    start: usize,
    width: usize,
}

impl GateColumns {
    fn new(columns: &OwnedColumns) -> Self {
        GateColumns { elements: Elements::of(&columns.tensor), start: columns.start, width: columns.width }
    }

    fn at(&self, row: usize, column: usize) -> usize {
        row * self.width + self.start + column
    }
}

/// `len` elements, at most [`PIECE`], from an index on.
struct GatePiece {
    gate: (Elements, usize),
    up: (Elements, usize),
    out: (Elements, usize),
    len: usize,
    activation: Activation,
}

impl SimdKernel for GatePiece {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let (mut gate, mut up) = (Padded::new(self.len), Padded::new(self.len));
        // SAFETY: `dispatch` enables the instructions; the elements are within the tensors and belong to this task.
        // They are read before any is written, so `out` may be an input.
        unsafe {
            self.gate.0.load::<S>(self.gate.1, &mut gate);
            self.up.0.load::<S>(self.up.1, &mut up);
            for (g, u) in gate.vectors::<S>().zip(up.vectors::<S>()) {
                let (mut x, mut y) = (S::load(g), S::load(u));
                if self.activation == Activation::ClampedSwish {
                    // `min` and `max` return their second operand if one is NaN.
                    x = S::min(S::splat(7.0), x);
                    y = S::add(S::max(S::splat(-7.0), S::min(S::splat(7.0), y)), S::splat(1.0));
                }
                if self.activation == Activation::Identity {
                    S::store(g, S::mul(x, y));
                    continue;
                }
                let z = match self.activation {
                    Activation::Silu | Activation::Sigmoid | Activation::Identity => x,
                    Activation::ClampedSwish => S::mul(x, S::splat(1.702)),
                    Activation::GeluTanh => {
                        // The coefficients are 2√(2/π) and 0.044715 times that.
                        let cubic = S::fma(S::mul(x, x), S::splat(0.071_354_814), S::splat(1.595_769));
                        S::mul(x, cubic)
                    }
                };
                let e = S::exp(S::sub(S::zero(), z));
                let x = match self.activation {
                    Activation::Sigmoid => S::splat(1.0),
                    _ => cut::<S>(x),
                };
                S::store(g, S::mul(S::div(x, S::add(S::splat(1.0), e)), y));
            }
            self.out.0.store::<S>(self.out.1, &gate);
        }
    }
}

/// x / (1 + e⁻ˣ).
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
pub(super) unsafe fn silu<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        let e = S::exp(S::sub(S::zero(), x));
        S::div(cut::<S>(x), S::add(S::splat(1.0), e))
    }
}

/// `exp` saturates at 2¹²⁷, so a very negative x would leave a visible quotient. Therefore x is clamped to −10⁴, by a
/// subtraction that makes −∞ a NaN.
///
/// # Safety
/// The level's instructions are enabled.
#[inline(always)]
unsafe fn cut<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's promise.
    unsafe { S::sub(x, S::min(S::add(x, S::splat(1e4)), S::zero())) }
}

#[cfg(test)]
mod tests {
    use crate::{
        DType, Device, Tensor,
        cpu::testing::{Numbers, assert_close, devices, tensor},
        ops::{self, Activation, Columns, Gate},
    };

    const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    #[derive(Clone, Copy, Debug)]
    struct GateCase {
        rows: usize,
        dim: usize,
        dtypes: [DType; 3],
        activation: Activation,
        in_place: bool,
    }

    impl GateCase {
        fn run(&self, device: &Device) -> Tensor {
            let (t, n) = (self.rows, self.dim);
            let mut data = Numbers(3).floats(t * (2 * n + 5));
            data.iter_mut().enumerate().for_each(|(i, x)| *x *= [0.01, 1.0, 5.0, 30.0][i % 4]);
            // One tensor with both operands, and one with the gate only.
            let both = tensor(device, self.dtypes[0], &data, &[t, 2 * n + 5]);
            let alone = tensor(device, self.dtypes[1], &data[..t * n], &[t, n]);
            let out = tensor(device, self.dtypes[2], &vec![7.0; t * n], &[t, n]);
            let up = Columns { tensor: &both, start: n + 3 };
            let (gate, out) = if self.in_place {
                (Columns::from(&alone), &alone)
            } else {
                (Columns { tensor: &both, start: 1 }, &out)
            };
            let mut enc = device.encoder().unwrap();
            ops::gate(&mut enc, &Gate::new(gate, up, self.activation, out)).unwrap();
            enc.commit().unwrap().wait().unwrap();
            out.clone()
        }
    }

    #[test]
    fn agrees_with_the_reference() {
        let devices = devices();
        for (rows, dim) in [(1, 1), (3, 17), (2, 1024), (1, 20_000), (70, 300), (0, 5), (3, 0)] {
            for activation in [
                Activation::GeluTanh,
                Activation::Silu,
                Activation::ClampedSwish,
                Activation::Sigmoid,
                Activation::Identity,
            ] {
                for dtypes in [FLOATS, [DType::F16; 3], [DType::BF16, DType::F32, DType::F32]] {
                    for in_place in [false, true] {
                        let case = GateCase { rows, dim, dtypes, activation, in_place };
                        let want = case.run(&Device::reference());
                        devices.iter().for_each(|d| assert_close(&case.run(d), &want, 3e-4, &(d, case)));
                    }
                }
            }
        }
    }

    #[test]
    fn large_inputs() {
        let data = [-3e38, -1e5, -200.0, -87.5, -20.0, -1e-30, 0.0, 1e-30, 50.0, 1e5, 3e38, f32::NAN];
        for activation in [
            Activation::GeluTanh,
            Activation::Silu,
            Activation::ClampedSwish,
            Activation::Sigmoid,
            Activation::Identity,
        ] {
            let go = |device: &Device| {
                let x = tensor(device, DType::F32, &data, &[1, data.len()]);
                let up = tensor(device, DType::F32, &[1.0; 12], &[1, data.len()]);
                let (gate, up) = (Columns::from(&x), Columns::from(&up));
                let mut enc = device.encoder().unwrap();
                ops::gate(&mut enc, &Gate::new(gate, up, activation, &x)).unwrap();
                enc.commit().unwrap().wait().unwrap();
                x.to_vec::<f32>().unwrap()
            };
            let want = go(&Device::reference());
            for device in devices() {
                for (i, (got, want)) in go(&device).into_iter().zip(&want).enumerate() {
                    let close = (got - want).abs() <= 2e-6 * want.abs() + 1e-30;
                    assert!(close || got.is_nan() && want.is_nan(), "{device} {activation:?} {}: {got}", data[i]);
                }
            }
        }
    }
}
