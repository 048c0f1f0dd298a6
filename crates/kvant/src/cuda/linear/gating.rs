//! A gate after a product, in one kernel.

use crate::{
    DType,
    encoder::overlap,
    gpu::{Launch, gate::activation_code},
    ops::{Activation, gate, linear::Call},
};

/// The gate of a product's results.
#[derive(Clone, Copy)]
pub(super) enum Gating<'a> {
    None,
    /// The results are the input of a gate.
    Input(&'a gate::Call),
    /// The first half of a row, or the first of two parts, is the input of a gate, the second its factors.
    Halves(&'a gate::Call),
}

impl<'a> Gating<'a> {
    /// How a gate depends on the preceding product, if one kernel may compute both.
    pub fn of(product: &Call, gate: &'a gate::Call) -> Option<Gating<'a>> {
        let (out, outputs, rows) = (&product.out, product.dims.outputs, product.rows);
        let size = out.dtype().size();
        // The columns of each part; whether the parts are consecutive tensors (otherwise they are columns of one row).
        let (width, has_parts) = match product.parts[..] {
            [] => (outputs, false),
            [first, second] if first == second => (first, true),
            _ => return None,
        };
        // Whether `columns` are the columns of the result from `first` on.
        let are = |columns: &gate::OwnedColumns, first: usize| {
            let before = if has_parts { first * rows } else { first };
            let is_there = columns.tensor.byte_offset() + columns.start * size == out.byte_offset() + before * size;
            let apart = rows == 1 || columns.width == width;
            overlap(&columns.tensor, out) && columns.tensor.dtype() == out.dtype() && is_there && apart
        };
        // The gate must not overwrite the inputs of the product, which other blocks still read.
        let mut is_free = gate.rows == rows;
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
        (outputs == gate.dim && apart).then_some(Gating::Input(gate))
    }

    pub fn is_halves(self) -> bool {
        matches!(self, Gating::Halves(_))
    }

    /// Columns of the tensor of factors; 0 if the factors are results of the product.
    pub fn up_width(self) -> usize {
        match self {
            Gating::Input(gate) => gate.up.width,
            _ => 0,
        }
    }

    /// Adds the constants of `linear/gating.h`, `up` as argument `index`, and `gated` as the next one.
    pub fn bind(self, launch: Launch, index: u32) -> Launch {
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
                launch.read_from(index, &gate.up.tensor, gate.up.start).write(index + 1, &gate.out)
            }
            Gating::Halves(gate) => {
                with(launch, 2, gate.activation, DType::F32, gate.out.dtype()).write(index + 1, &gate.out)
            }
        }
    }
}
