use super::io;
use crate::ops::{Activation, gate::Call};

/// The activation function at x; for [`Activation::ClampedSwish`], the factor that depends on the gate.
pub fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::ClampedSwish => {
            let x = if x > 7.0 { 7.0 } else { x };
            x / (1.0 + (-1.702 * x).exp())
        }
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Identity => x,
    }
}

/// activation(gate) · up. For [`Activation::ClampedSwish`], the second factor is the clamped value of `up` plus one.
pub fn gate(activation: Activation, gate: f64, up: f64) -> f64 {
    activate(activation, gate) * if activation == Activation::ClampedSwish { up.clamp(-7.0, 7.0) + 1.0 } else { up }
}

pub(crate) fn run(call: &Call) {
    let (gates, ups) = (io::load(&call.gate.tensor), io::load(&call.up.tensor));
    let mut out = Vec::with_capacity(call.rows * call.dim);
    for row in 0..call.rows {
        for column in 0..call.dim {
            let g = gates[row * call.gate.width + call.gate.start + column];
            let u = ups[row * call.up.width + call.up.start + column];
            out.push(gate(call.activation, g, u));
        }
    }
    io::store(&call.out, &out);
}
