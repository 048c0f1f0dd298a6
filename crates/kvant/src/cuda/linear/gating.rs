//! A gate that follows a product, in the same kernel.

use crate::{
    DType,
    encoder::overlap,
    gpu::{Launch, gate::activation_code},
    ops::{Activation, gate, linear::Call},
};

/// What becomes of a product's results.
#[derive(Clone, Copy)]
pub(super) enum Gating<'a> {
    None,
    /// They are the input of a gate, of one row.
    Input(&'a gate::Call),
    /// The first half of a row is the input of a gate, the second half its factors.
    Halves(&'a gate::Call),
}

impl<'a> Gating<'a> {
    /// How a gate depends on the product before it, if a kernel may compute both.
    pub fn of(product: &Call, gate: &'a gate::Call) -> Option<Gating<'a>> {
        let (out, outputs) = (&product.out, product.dims.outputs);
        let size = out.dtype().size();
        // Whether columns are those of the result from `first` on.
        let are = |columns: &gate::OwnedColumns, first: usize| {
            let is_there = columns.tensor.byte_offset() + columns.start * size == out.byte_offset() + first * size;
            let apart = gate.rows == 1 || columns.width == outputs;
            overlap(&columns.tensor, out) && columns.tensor.dtype() == out.dtype() && is_there && apart
        };
        // Other blocks still read what the product reads.
        let mut is_free = gate.rows == product.rows && product.parts.is_empty();
        product.touches(&mut |touch| {
            is_free &= touch.arg == "out" || !overlap(touch.tensor, &gate.out);
        });
        if !is_free || !are(&gate.gate, 0) {
            return None;
        }
        if outputs == 2 * gate.dim && are(&gate.up, gate.dim) {
            return Some(Gating::Halves(gate));
        }
        let apart = !overlap(&gate.up.tensor, out) && !overlap(&gate.up.tensor, &gate.out);
        (outputs == gate.dim && gate.rows == 1 && apart).then_some(Gating::Input(gate))
    }

    pub fn is_halves(self) -> bool {
        matches!(self, Gating::Halves(_))
    }

    /// Adds what `linear/gating.h` needs.
    pub fn bind(self, launch: Launch) -> Launch {
        let with = |launch: Launch, kind: u32, activation, up, gated| {
            launch
                .constant("GATING", kind)
                .constant("ACTIVATION", activation_code(activation))
                .constant("UP_DTYPE", up)
                .constant("GATED_DTYPE", gated)
        };
        match self {
            Gating::None => with(launch, 0, Activation::Silu, DType::F32, DType::F32),
            Gating::Input(gate) => {
                let launch = with(launch, 1, gate.activation, gate.up.tensor.dtype(), gate.out.dtype());
                launch.read_from(7, &gate.up.tensor, gate.up.start).write(8, &gate.out)
            }
            Gating::Halves(gate) => with(launch, 2, gate.activation, DType::F32, gate.out.dtype()).write(8, &gate.out),
        }
    }
}
