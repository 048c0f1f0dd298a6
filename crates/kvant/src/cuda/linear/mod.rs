//! Products with a weight on CUDA.
//!
//! [`route`] selects a kernel for a call. A kernel's name states rows, weight and mechanism. Rows: `gemv` is for one or
//! two, `skinny` for few, `gemm` for many. Mechanism: `tma` copies in bulk; `int8`, `mma` and `wgmma` are products of
//! tensor cores. `NAME.rs` divides the work among blocks and builds the launches, `linear_NAME.cu` is the kernel.
//! `gemm_affine_wgmma` has a folder.
//!
//! | kernel | serves | limit |
//! |---|---|---|
//! | `gemv_affine_tma` | one row, affine weight, GPUs with bulk copies | reading W |
//! | `gemv_affine_int8` | one or two rows, or few rows of experts, affine weight | reading W |
//! | `skinny_affine4_tma` | 2 to 8 rows, or few rows of experts, affine codes of 4 bits, GPUs with bulk copies | reading W |
//! | `skinny_dense_tma` | 1 to 32 rows, dense 16-bit weight of the same dtype, GPUs with bulk copies | reading W |
//! | `skinny_mma` | few rows, affine or dense weight | reading W |
//! | `skinny_blocks_mma` | few rows by blocks, small floats, affine codes of 2, 3 and 5 bits | reading W |
//! | `gemm_affine_wgmma` | 4 to 128 rows of bf16, or few rows of each expert, affine weight, Hopper | reading W |
//! | `gemm_affine` | many rows, also of experts, affine or bf16 weight | tensor cores |
//! | `dequantise` | very many rows of bf16, any quantised weight: makes it bf16 for cuBLASLt, or for `gemm_affine` | tensor cores |
//! | `generic` | everything else: odd alignments, f32 weights, mixed dtypes, many rows by blocks that do not become bf16 | |
//!
//! `out_parts` places the results of several matrices. `integer_products.h` has the exact integer products of both
//! `gemv` kernels. `warp_tiling.rs` has the common parts of the launches of `skinny_mma`, `gemv_affine_int8` and
//! `skinny_blocks_mma`. `block_codes.h` unpacks weights for `skinny_blocks_mma`.

#[cfg(test)]
pub(super) mod accuracy;
mod dequantise;
mod gating;
mod gemm_affine;
mod gemm_affine_wgmma;
mod gemv_affine_int8;
mod gemv_affine_tma;
mod generic;
mod out_parts;
mod route;
mod skinny_affine4_tma;
mod skinny_blocks_mma;
mod skinny_dense_tma;
mod skinny_mma;
mod splits;
mod warp_tiling;

use super::affine::{Parts, parts};
use crate::{
    Result, Tensor,
    gpu::{Builder, Launch, linear::LinearParams},
    ops::{
        gate,
        linear::{Call, NAME},
    },
};
use gating::Gating;

/// A product: the call, the buffers of its weight, and the parameters of all kernels.
#[derive(Clone, Copy)]
struct LinearArgs<'a> {
    call: &'a Call,
    weight: &'a Parts<'a>,
    params: &'a LinearParams,
}

/// A kernel of products, with its division of the work of one product.
trait LinearKernel {
    /// The kernel's name, which begins the name that a profiler shows.
    fn name(&self) -> &'static str;

    /// Whether the kernel writes the results of several matrices (`parts`) to `out`.
    fn writes_parts(&self) -> bool {
        false
    }

    /// Adds the launches.
    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()>;

    /// Adds the launches of the product and of the gate after it, if one kernel can compute both. Returns whether it
    /// can.
    fn build_gated(&self, _args: &LinearArgs, _gating: Gating, _b: &mut Builder) -> Result<bool> {
        Ok(false)
    }
}

/// Launches the product.
pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (weight, params) = (&parts(&call.weight, call.dims.inputs), &params_of(call)?);
    let kernel = route::select(call, weight, &b.limits);
    if !call.parts.is_empty() && !kernel.writes_parts() {
        return call.each_part(|call| build(call, b));
    }
    kernel.build(&LinearArgs { call, weight, params }, b)
}

/// Launches a product and the gate after it as one kernel. Returns false if there is none for both.
pub(crate) fn build_gated(call: &Call, gate: &gate::Call, b: &mut Builder) -> Result<bool> {
    let Some(gating) = Gating::of(call, gate) else { return Ok(false) };
    let (weight, params) = (&parts(&call.weight, call.dims.inputs), &params_of(call)?);
    let kernel = route::select(call, weight, &b.limits);
    if !call.parts.is_empty() && !kernel.writes_parts() {
        return Ok(false);
    }
    kernel.build_gated(&LinearArgs { call, weight, params }, gating, b)
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
