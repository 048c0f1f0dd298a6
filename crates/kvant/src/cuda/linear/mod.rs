//! Products with a weight on CUDA.
//!
//! [`route`] selects a kernel for a call. Each kernel has a file of its name: `NAME.rs` divides the work among blocks
//! and builds the launches, `linear_NAME.cu` is the kernel. `batch` has a folder.
//!
//! | kernel | serves | limit |
//! |---|---|---|
//! | `bulk` | one row, affine weight, GPUs with bulk copies | reading W |
//! | `bulk_rows` | 2 to 8 rows, or few rows of experts, affine codes of 4 bits, GPUs with bulk copies | reading W |
//! | `codes` | one or two rows, or few rows of experts, affine weight | reading W |
//! | `stream_rows` | 1 to 32 rows, dense 16-bit weight of the same dtype, GPUs with bulk copies | reading W |
//! | `rows` | few rows | reading W |
//! | `blocks` | few rows by blocks, small floats, affine codes of 2, 3 and 5 bits | reading W |
//! | `batch` | 4 to 128 rows of bf16, or few rows of each expert, affine weight, Hopper | reading W |
//! | `many` | many rows, also of experts, affine or bf16 weight | tensor cores |
//! | `dequantise` | very many rows of bf16, any quantised weight: makes it bf16 for cuBLASLt, or for `many` | tensor cores |
//! | `generic` | everything else: odd alignments, f32 weights, mixed dtypes, many rows by blocks that do not become bf16 | |
//!
//! `out_parts` says where the results of several matrices are; `integer_products.h` has the exact integer products of
//! `codes` and `bulk`; `warp_tiling.rs` what the launches of `rows`, `codes` and `blocks` have in common;
//! `block_codes.h` unpacks what `blocks` reads.

mod batch;
mod blocks;
mod bulk;
mod bulk_rows;
mod codes;
mod dequantise;
mod gating;
mod generic;
mod many;
mod out_parts;
mod route;
mod rows;
mod splits;
mod stream_rows;
mod warp_tiling;

use super::affine::parts;
use crate::{
    Result, Tensor,
    gpu::{Builder, Launch, linear::LinearParams},
    ops::{
        gate,
        linear::{Call, NAME},
    },
};
use gating::Gating;

/// Launches the product.
pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (matrix, params) = (parts(&call.weight, call.dims.inputs), params_of(call)?);
    let kernel = route::select(call, &matrix, &b.limits);
    if !call.parts.is_empty() && !kernel.writes_parts() {
        return call.each_part(|call| build(call, b));
    }
    kernel.build(call, &matrix, &params, b)
}

/// Launches a product and the gate behind it as one kernel, if there is one for both.
pub(crate) fn build_gated(call: &Call, gate: &gate::Call, b: &mut Builder) -> Result<bool> {
    let Some(gating) = Gating::of(call, gate) else { return Ok(false) };
    let (matrix, params) = (parts(&call.weight, call.dims.inputs), params_of(call)?);
    let kernel = route::select(call, &matrix, &b.limits);
    if !call.parts.is_empty() && !kernel.writes_parts() {
        return Ok(false);
    }
    kernel.build_gated(call, &matrix, &params, gating, b)
}

fn params_of(call: &Call) -> Result<LinearParams> {
    let Call { dims, rows_per_input, alpha, rows, .. } = call;
    let uint = |arg, value| Launch::uint(NAME, arg, value);
    Ok(LinearParams {
        rows: uint("out", *rows)?,
        outputs: uint("weight", dims.outputs)?,
        inputs: uint("weight", dims.inputs)?,
        experts: uint("weight", dims.experts)?,
        rows_per_input: uint("experts.ids", *rows_per_input)?,
        alpha: *alpha,
    })
}

/// Whether all rows of `row` elements begin at multiples of 16 bytes.
fn aligned16(tensor: &Tensor, row: usize) -> bool {
    tensor.byte_offset().is_multiple_of(16) && (row * tensor.dtype().size()).is_multiple_of(16)
}
