//! Products with an affine weight as products of dense matrices, which cuBLASLt multiplies where it is installed.

use super::{LinearParams, generic};
use crate::cuda::{THREADS, affine::Parts, headers};
use crate::{
    DType, Result, Tensor,
    gpu::{Builder, Launch, Params, Scratch, Source, Use, params},
    ops::linear::{Call, NAME},
};

params! {
    pub(crate) struct DequantiseParams {
        pub rows: u32,
        pub inputs: u32,
    }
}

static SOURCE: Source = Source {
    name: "linear_dequantise.cu",
    text: include_str!("linear_dequantise.cu"),
    headers: headers::ALL,
    layouts: &[DequantiseParams::layout],
};

/// Dequantising pays for so many rows and more.
const MANY: usize = 48;
/// The most bytes of both dense matrices.
const MOST: usize = 1 << 30;

/// Whether the product can be computed this way: x is bf16, whose range is that of f32, and the output too coarse to
/// show that weights keep 16 bits.
pub(super) fn suits(call: &Call, weight: &Parts) -> bool {
    let Call { x, dims, out, rows, experts, .. } = call;
    let aligned = |tensor: &Tensor| tensor.byte_offset().is_multiple_of(16);
    weight.bits != 0
        && experts.is_none()
        && *rows >= MANY
        && x.dtype() == DType::BF16
        && out.dtype() == DType::BF16
        && aligned(x)
        && aligned(out)
        && dims.outputs.is_multiple_of(8)
        && (dims.outputs + rows).checked_mul(dims.inputs).is_some_and(|n| n <= MOST / 4)
}

/// Adds the launches that make x and W dense, and that of the product.
pub(super) fn build(
    name: &'static str,
    call: &Call,
    weight: &Parts,
    params: &LinearParams,
    b: &mut Builder,
) -> Result<()> {
    let dense = make_dense(name, call, weight, b)?;
    b.push(generic::launch_dense(call, &dense, params)?)
}

/// Adds the launches that write x as `[rows, 2 · inputs]` and W as `[outputs, 2 · inputs]` of bf16.
fn make_dense(name: &'static str, call: &Call, weight: &Parts, b: &mut Builder) -> Result<[Scratch; 2]> {
    let (outputs, inputs, rows) = (call.dims.outputs, call.dims.inputs, call.rows);
    let params = |rows| -> Result<DequantiseParams> {
        Ok(DequantiseParams { rows: Launch::uint(NAME, "x", rows)?, inputs: Launch::uint(NAME, "x", inputs)? })
    };
    let (x, w) = (b.scratch(rows * inputs * 4)?, b.scratch(outputs * inputs * 4)?);
    let grid = |rows: usize, each: usize| [rows, (inputs / each).div_ceil(THREADS), 1];
    b.push(
        Launch::new(NAME, &SOURCE, "linear_repeat_inputs")
            .read(0, &call.x)
            .scratch(1, &x, Use::Write)
            .params(2, &params(rows)?)
            .grid(grid(rows, 8), [THREADS, 1, 1]),
    )?;
    b.push(
        Launch::new(NAME, &SOURCE, name)
            .constant("BITS", weight.bits)
            .constant("GROUP", weight.group)
            .constant("W_DTYPE", weight.dtype)
            .constant("ALIGNED", weight.aligned)
            .read(0, weight.weight)
            .read_if(1, weight.scales)
            .read_if(2, weight.biases)
            .scratch(3, &w, Use::Write)
            .params(4, &params(outputs)?)
            .grid(grid(outputs, 16), [THREADS, 1, 1]),
    )?;
    Ok([x, w])
}
