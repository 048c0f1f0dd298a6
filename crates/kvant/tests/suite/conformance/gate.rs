//! gate against the reference.

use super::SIZES;
use crate::common::{Bound, FLOATS, Out, Output, Rng, conform, encode, input, run};
use kvant::{
    DType,
    ops::{self, Activation, Columns, Gate},
};

#[test]
fn gate() {
    let mut rng = Rng::of("gate");
    for activation in
        [Activation::GeluTanh, Activation::Silu, Activation::ClampedSwish, Activation::Sigmoid, Activation::Identity]
    {
        for (rows, dim) in SIZES {
            for x in FLOATS {
                for out_type in FLOATS {
                    let up_type = rng.pick(&FLOATS);
                    // One fused tensor (gate first, or up first), or two; with columns before and after.
                    let (fused, before, behind) = (rng.below(3), rng.pick(&[0, 3]), rng.pick(&[0, 2]));
                    let case = format!(
                        "gate {activation:?} [{rows}, {dim}] {x} {up_type} -> {out_type}, fused {fused} +{before} +{behind}"
                    );
                    conform(&case, |device| {
                        let mut rng = Rng::of(&case);
                        let width = before + dim + behind;
                        let mut upload = |dtype, width: usize| {
                            let values: Vec<f32> = rng.normals(rows * width).iter().map(|x| x * 4.0).collect();
                            input(device, dtype, &values, &[rows, width])
                        };
                        let (one, two) = (upload(x, width)?, upload(up_type, width)?);
                        let both = upload(x, 2 * dim + before)?;
                        let (gate, up) = match fused {
                            0 => (Columns { tensor: &one, start: before }, Columns { tensor: &two, start: behind }),
                            1 => (
                                Columns { tensor: &both, start: before },
                                Columns { tensor: &both, start: before + dim },
                            ),
                            _ => (Columns { tensor: &both, start: dim }, Columns::from(&both)),
                        };
                        let out = Out::new(device, out_type, &[rows, dim])?;
                        run(device, |enc| ops::gate(enc, &Gate::new(gate, up, activation, &out.tensor)))?;
                        // GELU's tail is a difference of nearly equal numbers.
                        Ok(vec![out.close_within("out", Bound::of(out_type).times(8.0))?])
                    });
                }
            }
        }
    }
}

/// Inputs where the functions saturate, and where they are small.
#[test]
fn gate_far_out() {
    let x = vec![-1e30, -1e4, -100.0, -20.0, -10.0, -5.0, -1e-3, -1e-20, 0.0, 1e-20, 1e-3, 5.0, 10.0, 100.0, 1e4, 1e30];
    for activation in
        [Activation::GeluTanh, Activation::Silu, Activation::ClampedSwish, Activation::Sigmoid, Activation::Identity]
    {
        for out_type in FLOATS {
            conform(format!("gate {activation:?} far out -> {out_type}"), |device| {
                let n = x.len();
                // Element by element, so that large ones do not hide small ones.
                let mut outputs = Vec::new();
                let (g, up) =
                    (input(device, DType::F32, &x, &[n, 1])?, input(device, DType::F32, &vec![1.0; n], &[n, 1])?);
                let out = Out::new(device, out_type, &[n, 1])?;
                let (gate, up) = (Columns::from(&g), Columns::from(&up));
                run(device, |enc| ops::gate(enc, &Gate::new(gate, up, activation, &out.tensor)))?;
                for (x, y) in x.iter().zip(out.tensor.to_f32()?) {
                    // Below 1e-6 of the input, the tails are rounding noise of 1 + tanh.
                    let y = if *x < 0.0 && y.abs() < -1e-6 * x { 0.0 } else { y };
                    outputs.push(Output::Close(format!("f({x})"), vec![y], Bound::of(out_type).times(100.0)));
                }
                Ok(outputs)
            });
        }
    }
}

/// Inputs that are not finite follow the formula, not a large finite number: −∞ / (1 + ∞) is NaN, 1 / (1 + ∞) is 0.
#[test]
fn gate_of_inputs_that_are_not_finite() {
    let x = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -f32::NAN, f32::MIN, f32::MAX, -1e30, -65504.0, 1.0];
    let n = x.len();
    for activation in
        [Activation::GeluTanh, Activation::Silu, Activation::ClampedSwish, Activation::Sigmoid, Activation::Identity]
    {
        for dtype in FLOATS {
            conform(format!("{activation:?} of what is not finite, {dtype}"), |device| {
                let (g, up) = (input(device, dtype, &x, &[n, 1])?, input(device, dtype, &vec![1.0; n], &[n, 1])?);
                let out = Out::new(device, DType::F32, &[n, 1])?;
                let (gate, up) = (Columns::from(&g), Columns::from(&up));
                run(device, |enc| ops::gate(enc, &Gate::new(gate, up, activation, &out.tensor)))?;
                let y = out.tensor.to_f32()?;
                let bound = Bound::of(DType::F32).times(100.0);
                let each = x.iter().zip(y).map(|(x, y)| {
                    // This far out, the tails are zero.
                    let is_tail = *x < 0.0 && y.abs() < 1e-6 * x.abs().min(f32::MAX);
                    let y = if is_tail { 0.0 } else { y };
                    Output::Close(format!("f({x})"), vec![y], bound)
                });
                Ok(each.collect())
            });
        }
    }
}

#[test]
fn gate_in_place() {
    for dtype in FLOATS {
        conform(format!("gate in place, {dtype}"), |device| {
            let mut rng = Rng::of(dtype);
            let out = Out::new(device, dtype, &[5, 67])?;
            out.tensor.write_bytes(&encode(dtype, &rng.normals(5 * 67)))?;
            let up = input(device, dtype, &rng.normals(5 * 67), &[5, 67])?;
            let (gate, up) = (Columns::from(&out.tensor), Columns::from(&up));
            run(device, |enc| ops::gate(enc, &Gate::new(gate, up, Activation::GeluTanh, &out.tensor)))?;
            Ok(vec![out.close("out")?])
        });
    }
}
