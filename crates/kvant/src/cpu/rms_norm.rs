//! out = x · weight / √(mean x² + eps) of each row, with a residual added before or after, a gate, and norms of out.
//! Threads share the rows.

use super::{
    Cpu, all_reduce,
    elements::Elements,
    gate::silu,
    scratch,
    simd::{Simd, SimdKernel},
};
use crate::{
    Result, Tensor,
    ops::rms_norm::{Addition, Call, MAX_NEXT, NextCall},
};

/// Minimum elements of a task.
const TASK: usize = 8 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) -> Result<()> {
    if let Some(sum) = call.all_reduce() {
        all_reduce::run(cpu, &sum)?;
    }
    norm_rows(cpu, call);
    Ok(())
}

fn norm_rows(cpu: &Cpu, call: &Call) {
    let optional = |tensor: Option<&Tensor>| tensor.map(Elements::of);
    let next = |next: &NextCall| NextElements {
        weight: optional(next.weight.as_ref()),
        scale: next.scale,
        out: Elements::of(&next.out),
    };
    let norm = RmsNormTensors {
        x: Elements::of(&call.x),
        // SAFETY: calls run under the device's lock, and the factors are an input only.
        combine: call.combine.as_ref().map(|combine| unsafe { combine.host_slice::<f32>() }),
        terms: call.terms(),
        weight: optional(call.weight.as_ref()),
        residual: optional(call.residual.as_ref()),
        residual_norm: matches!(call.add, Addition::Normed { .. }),
        residual_weight: optional(call.residual_weight()),
        sum: optional(call.sum()),
        gate: optional(call.gate.as_ref()),
        out: Elements::of(&call.out),
        next: call.next.each_ref().map(|of| of.as_ref().map(next)),
        dim: call.dim,
        eps: call.eps,
        next_eps: call.next_eps,
        scale: call.scale,
    };
    let rows = (TASK / call.dim).max(1);
    cpu.threads.run(call.rows.div_ceil(rows), |task| {
        let rows = task * rows..call.rows.min((task + 1) * rows);
        cpu.level.dispatch(RmsNormRows { norm, rows });
    });
}

#[derive(Clone, Copy)]
struct RmsNormTensors<'a> {
    x: Elements,
    /// Factors of the rows that are summed into a row of x.
    combine: Option<&'a [f32]>,
    terms: usize,
    weight: Option<Elements>,
    residual: Option<Elements>,
    /// Whether the norm of the residual is added.
    residual_norm: bool,
    residual_weight: Option<Elements>,
    /// If present, the residual is added first and this receives the sum.
    sum: Option<Elements>,
    /// If present, its SiLU multiplies the result.
    gate: Option<Elements>,
    out: Elements,
    next: [Option<NextElements>; MAX_NEXT],
    dim: usize,
    eps: f32,
    next_eps: f32,
    scale: f32,
}

#[derive(Clone, Copy)]
struct NextElements {
    weight: Option<Elements>,
    scale: f32,
    out: Elements,
}

struct RmsNormRows<'a> {
    norm: RmsNormTensors<'a>,
    rows: std::ops::Range<usize>,
}

impl SimdKernel for RmsNormRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let RmsNormTensors { x, residual, sum, gate, out, dim, eps, next_eps, scale, .. } = self.norm;
        let padded = dim.next_multiple_of(S::LANES);
        let buffer = &mut *scratch::take(3 * padded);
        let (row, buffer) = buffer.split_at_mut(padded);
        let (weights, added) = buffer.split_at_mut(padded);
        // SAFETY: `dispatch` enables the instructions; the rows are within the tensors and belong to this task. A whole
        // row is read before it is written, so outputs may be inputs.
        unsafe {
            for r in self.rows {
                let start = r * dim;
                match self.norm.combine {
                    None => load_row::<S>(x, start, row, dim),
                    Some(combine) => {
                        let terms = r * self.norm.terms..(r + 1) * self.norm.terms;
                        row.fill(0.0);
                        for (term, &factor) in terms.clone().zip(&combine[terms]) {
                            load_row::<S>(x, term * dim, weights, dim);
                            add_times::<S>(row, weights, factor);
                        }
                    }
                }
                if let Some(residual) = residual {
                    load_row::<S>(residual, start, added, dim);
                }
                if let Some(sum) = sum {
                    add::<S>(row, added);
                    sum.store::<S>(start, &row[..dim]);
                }
                norm::<S>(row, self.norm.weight, weights, dim, eps);
                if self.norm.residual_norm {
                    norm::<S>(added, self.norm.residual_weight, weights, dim, eps);
                }
                if residual.is_some() && sum.is_none() {
                    add::<S>(row, added);
                }
                multiply::<S>(row, scale);
                if let Some(gate) = gate {
                    load_row::<S>(gate, start, weights, dim);
                    multiply_by_silu::<S>(row, weights);
                }
                out.store::<S>(start, &row[..dim]);
                for next in self.norm.next.iter().flatten() {
                    // The previous norm has overwritten the row.
                    load_row::<S>(out, start, row, dim);
                    norm::<S>(row, next.weight, weights, dim, next_eps);
                    multiply::<S>(row, next.scale);
                    next.out.store::<S>(start, &row[..dim]);
                }
            }
        }
    }
}

/// Reads a row of `dim` elements; padding zeros do not change its sum of squares.
#[inline(always)]
unsafe fn load_row<S: Simd>(from: Elements, start: usize, row: &mut [f32], dim: usize) {
    // SAFETY: the caller's promise.
    unsafe { from.load::<S>(start, &mut row[..dim]) };
    row[dim..].fill(0.0);
}

/// Divides a row by its root mean square and multiplies it by the weight, which is read into `weights`.
#[inline(always)]
unsafe fn norm<S: Simd>(row: &mut [f32], weight: Option<Elements>, weights: &mut [f32], dim: usize, eps: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match weight {
            Some(weight) => load_row::<S>(weight, 0, weights, dim),
            None => weights.fill(1.0),
        }
        let factor = S::splat(factor::<S>(row, dim, eps));
        for i in (0..row.len()).step_by(S::LANES) {
            let normed = S::mul(S::mul(load::<S>(row, i), factor), load::<S>(weights, i));
            S::store(row.as_mut_ptr().add(i), normed);
        }
    }
}

#[inline(always)]
unsafe fn add_times<S: Simd>(row: &mut [f32], added: &[f32], factor: f32) {
    for i in (0..row.len()).step_by(S::LANES) {
        // SAFETY: both are the same whole number of vectors long; the instructions are the caller's promise.
        unsafe {
            let sum = S::fma(load::<S>(added, i), S::splat(factor), load::<S>(row, i));
            S::store(row.as_mut_ptr().add(i), sum);
        }
    }
}

#[inline(always)]
unsafe fn multiply<S: Simd>(row: &mut [f32], scale: f32) {
    if scale == 1.0 {
        return;
    }
    for i in (0..row.len()).step_by(S::LANES) {
        // SAFETY: the row is a whole number of vectors long; the instructions are the caller's promise.
        unsafe { S::store(row.as_mut_ptr().add(i), S::mul(load::<S>(row, i), S::splat(scale))) }
    }
}

#[inline(always)]
unsafe fn multiply_by_silu<S: Simd>(row: &mut [f32], gate: &[f32]) {
    for i in (0..row.len()).step_by(S::LANES) {
        // SAFETY: both are the same whole number of vectors long; the instructions are the caller's promise.
        unsafe { S::store(row.as_mut_ptr().add(i), S::mul(load::<S>(row, i), silu::<S>(load::<S>(gate, i)))) }
    }
}

#[inline(always)]
unsafe fn load<S: Simd>(row: &[f32], i: usize) -> S::F {
    // SAFETY: the caller's promise: the row has a whole vector from `i` on.
    unsafe { S::load(row.as_ptr().add(i)) }
}

#[inline(always)]
unsafe fn add<S: Simd>(row: &mut [f32], added: &[f32]) {
    for i in (0..row.len()).step_by(S::LANES) {
        // SAFETY: both are the same whole number of vectors long; the instructions are the caller's promise.
        unsafe { S::store(row.as_mut_ptr().add(i), S::add(load::<S>(row, i), load::<S>(added, i))) }
    }
}

/// 1/√(mean x² + eps) of a row of `dim`, padded with zeros to whole vectors. If f32 cannot represent the result, the
/// row is multiplied by a power of two instead.
#[inline(always)]
unsafe fn factor<S: Simd>(row: &mut [f32], dim: usize, eps: f32) -> f32 {
    // SAFETY: the caller's promise.
    let sum = unsafe {
        let mut sums = [S::zero(); 4];
        for (v, i) in (0..row.len()).step_by(S::LANES).enumerate() {
            let x = load::<S>(row, i);
            sums[v % 4] = S::fma(x, x, sums[v % 4]);
        }
        S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
    };
    if (1e-25..f32::INFINITY).contains(&sum) {
        return (sum / dim as f32 + eps).sqrt().recip();
    }
    // The squares of very large or very small numbers overflow or underflow f32.
    let sum: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let factor = (sum / dim as f64 + f64::from(eps)).sqrt().recip();
    let unit = match factor {
        1e30.. => 2f64.powi(64),
        ..1e-30 => 2f64.powi(-64),
        _ => 1.0,
    };
    row.iter_mut().for_each(|x| *x *= unit as f32);
    (factor / unit) as f32
}

#[cfg(test)]
mod tests {
    use crate::{
        DType, Device, Tensor,
        cpu::testing::{Numbers, assert_close, devices, tensor},
        ops::{self, NextNorm, Residual, RmsNorm},
    };

    #[derive(Clone, Copy, Debug)]
    enum ResidualUse {
        None,
        After,
        Normed,
        Before,
        /// The sum is written over the residual, and the output over x.
        BeforeInPlace,
    }

    #[derive(Clone, Copy, Debug)]
    struct RmsNormCase {
        rows: usize,
        dim: usize,
        /// The dtypes of x, the weight, the residual, the outputs.
        dtypes: [DType; 4],
        weight: bool,
        add: ResidualUse,
        magnitude: f32,
    }

    impl RmsNormCase {
        fn run(&self, device: &Device) -> [Tensor; 2] {
            let mut numbers = Numbers(5);
            let mut make = |dtype, rows, magnitude| {
                let data: Vec<f32> = numbers.floats(rows * self.dim).into_iter().map(|x| x * magnitude).collect();
                tensor(device, dtype, &data, &[rows, self.dim])
            };
            let x = make(self.dtypes[0], self.rows, self.magnitude);
            let residual = make(self.dtypes[2], self.rows, self.magnitude);
            let weight = make(self.dtypes[1], 1, 1.0).reshape(&[self.dim]).unwrap();
            let zeros = |dtype| Tensor::zeros(device, dtype, &[self.rows, self.dim]).unwrap();
            let [sum, out] = [0, 1].map(|_| zeros(self.dtypes[3]));
            let next = [zeros(DType::F32), zeros(self.dtypes[3])];
            let (sum, out) = match self.add {
                ResidualUse::BeforeInPlace => (residual.clone(), x.clone()),
                _ => (sum, out),
            };
            let mut enc = device.encoder().unwrap();
            let norm = RmsNorm::new(&x, 1e-6, &out)
                .weight(self.weight.then_some(&weight))
                .residual(match self.add {
                    ResidualUse::None => Residual::None,
                    ResidualUse::After => Residual::After(&residual),
                    ResidualUse::Normed => Residual::Normed { residual: &residual, weight: Some(&weight) },
                    _ => Residual::Before { residual: &residual, sum: &sum },
                })
                .scale(0.75);
            let [first, second] = [0, 1].map(|i| NextNorm::new(&next[i]));
            let next_norms = [first.weight(self.weight.then_some(&weight)), second.scale(1.5)];
            ops::rms_norm(&mut enc, &norm.next(&next_norms)).unwrap();
            // Separate calls must give the same bits.
            let separate = [zeros(DType::F32), zeros(self.dtypes[3])];
            for (next, separate) in next_norms.iter().zip(&separate) {
                let args = RmsNorm::new(&out, 1e-6, separate).weight(next.weight).scale(next.scale);
                ops::rms_norm(&mut enc, &args).unwrap();
            }
            enc.commit().unwrap().wait().unwrap();
            let bits = |t: &Tensor| t.to_f32().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
            for (next, separate) in next.iter().zip(&separate) {
                assert!(bits(next) == bits(separate), "{device}, {self:?}: a next norm differs from a separate one");
            }
            [sum, out]
        }

        fn check(&self, devices: &[Device]) {
            let [want_sum, want] = self.run(&Device::reference());
            for device in devices {
                let [sum, out] = self.run(device);
                assert_close(&sum, &want_sum, 2e-7 * self.magnitude, &(device, self));
                let added = if matches!(self.add, ResidualUse::After) { self.magnitude } else { 0.0 };
                assert_close(&out, &want, 2e-6 + 2e-7 * added, &(device, self));
            }
        }
    }

    const USES: [ResidualUse; 5] =
        [ResidualUse::None, ResidualUse::After, ResidualUse::Normed, ResidualUse::Before, ResidualUse::BeforeInPlace];
    const F: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    #[test]
    fn agrees_with_the_reference() {
        let devices = devices();
        for (rows, dim) in [(0, 3), (1, 1), (3, 17), (2, 256), (1, 20_001), (150, 130)] {
            for dtypes in [[F[0]; 4], [F[1]; 4], [F[2]; 4], [F[0], F[1], F[2], F[1]], [F[2], F[0], F[1], F[0]]] {
                for add in USES {
                    for weight in [false, true] {
                        RmsNormCase { rows, dim, dtypes, weight, add, magnitude: 3.0 }.check(&devices);
                    }
                }
            }
        }
    }

    #[test]
    fn squares_beyond_the_range_of_f32() {
        let devices = devices();
        for magnitude in [1e-30, 1e25, 1e38] {
            for add in [ResidualUse::None, ResidualUse::After] {
                RmsNormCase { rows: 2, dim: 77, dtypes: [F[0]; 4], weight: true, add, magnitude }.check(&devices);
            }
        }
    }
}
