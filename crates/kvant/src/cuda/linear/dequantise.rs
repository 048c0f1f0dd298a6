//! Products of many rows of bf16 with a quantised weight. A kernel converts the weight to bf16. cuBLASLt multiplies it;
//! with experts, `linear_gemm_affine` does.

use std::ops::Range;

use super::{LinearArgs, LinearKernel, LinearParams, gemm_affine::GemmAffine, generic};
use crate::cuda::{THREADS, affine::Parts, headers};
use crate::{
    DType, Result, Tensor,
    gpu::{Builder, Launch, Limits, Params, Scratch, Source, Use, params},
    ops::linear::{Call, NAME},
};

params! {
    pub(crate) struct DequantiseParams {
        pub inputs: u32,
        /// The first row that becomes dense.
        pub first_row: u32,
    }
}

static SOURCE: Source = Source {
    name: "linear_dequantise.cu",
    text: include_str!("linear_dequantise.cu"),
    headers: headers::ALL,
    layouts: &[DequantiseParams::layout],
};

/// Minimum rows: first if `linear_gemm_affine` can multiply the codes by warpgroups, then otherwise.
pub(super) const MANY: [usize; 2] = [1024, 33];
/// Maximum bytes of dense matrices at a time.
const MAX_BYTES: usize = 1 << 30;
/// Codes of a thread.
const CHUNK: usize = 16;

/// How the dense matrices are multiplied.
pub(super) enum Dequantise {
    /// One matrix, by cuBLASLt.
    Matrix,
    /// Matrices of experts, `at_once` at a time.
    Experts { chunks: GemmAffine, at_once: usize },
}

impl Dequantise {
    /// Returns None if another kernel is faster, or if x or out is not bf16. `is_faster_by_codes`: `linear_gemm_affine`
    /// multiplies these codes and is faster for up to 1023 rows. `max_few`: maximum rows of experts of the kernels for
    /// few rows.
    pub(super) fn new(
        call: &Call,
        weight: &Parts,
        limits: &Limits,
        is_faster_by_codes: bool,
        max_few: usize,
    ) -> Option<Dequantise> {
        let Call { x, dims, out, rows, .. } = call;
        let bytes = dims.outputs.checked_mul(dims.inputs)?.checked_mul(2)?;
        let types = !weight.is_dense() && x.dtype() == DType::BF16 && out.dtype() == DType::BF16;
        if !types || bytes == 0 || bytes > MAX_BYTES {
            return None;
        }
        if call.experts.is_some() {
            // The contract allows rounding the weights of experts on GPUs with products of warpgroups.
            let is_faster = limits.warpgroup_products && !is_faster_by_codes && *rows > max_few;
            let chunks = GemmAffine::of_dense(call, limits).filter(|_| is_faster)?;
            return Some(Dequantise::Experts { chunks, at_once: (MAX_BYTES / bytes).min(dims.experts) });
        }
        let aligned = |tensor: &Tensor| tensor.byte_offset().is_multiple_of(16);
        let by_warpgroups = is_faster_by_codes && limits.warpgroup_products;
        let suits = limits.library_products
            && *rows >= MANY[usize::from(!by_warpgroups)]
            && aligned(x)
            && aligned(out)
            && dims.outputs.is_multiple_of(8);
        suits.then_some(Dequantise::Matrix)
    }
}

impl LinearKernel for Dequantise {
    fn name(&self) -> &'static str {
        "linear_dequantise"
    }

    /// Adds the launches that make W dense, and those of the products.
    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()> {
        let LinearArgs { call, weight, params } = *args;
        let (outputs, inputs) = (call.dims.outputs, call.dims.inputs);
        let Dequantise::Experts { chunks, at_once } = self else {
            let dense = b.scratch(outputs * inputs * 2)?;
            b.push(dequantise(self.name(), weight, &dense, params, 0..outputs)?)?;
            return b.push(generic::launch_dense(call, &dense, params));
        };
        let dense = b.scratch(at_once * outputs * inputs * 2)?;
        let arranged = chunks.arrange(call, 0, params, b)?;
        for first in (0..call.dims.experts).step_by(*at_once) {
            let experts = first..(first + at_once).min(call.dims.experts);
            b.push(dequantise(self.name(), weight, &dense, params, experts.start * outputs..experts.end * outputs)?)?;
            b.push(chunks.dense_product(call, &dense, &arranged, params, experts)?)?;
        }
        Ok(())
    }
}

/// The launch that makes some rows of W dense.
fn dequantise(
    name: &'static str,
    weight: &Parts,
    dense: &Scratch,
    params: &LinearParams,
    rows: Range<usize>,
) -> Result<Launch> {
    let params = DequantiseParams { inputs: params.inputs, first_row: Launch::uint(NAME, "weight", rows.start)? };
    let chunks = params.inputs as usize / CHUNK;
    Ok(Launch::new(NAME, &SOURCE, name)
        .constant("W_DTYPE", weight.dtype)
        .constant("BITS", weight.bits)
        .constant("GROUP", weight.group)
        .constant("FORMAT", weight.format)
        .constant("BLOCK_ALIGNMENT", weight.block_alignment)
        .constant("W_ALIGNED", weight.aligned)
        .read(0, weight.weight)
        .read_if(1, weight.scales)
        .read_if(2, weight.biases)
        .scratch(3, dense, Use::Write)
        .params(4, &params)
        .grid([rows.len(), chunks.div_ceil(THREADS), 1], [THREADS, 1, 1]))
}
