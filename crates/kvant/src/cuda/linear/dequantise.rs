//! Products of many rows of bf16 with a quantised weight: the weight becomes bf16, and cuBLASLt multiplies.

use super::{LinearParams, generic};
use crate::cuda::{THREADS, affine::Parts, headers};
use crate::{
    DType, Result, Tensor,
    gpu::{Builder, Launch, Limits, Params, Source, Use, params},
    ops::linear::{Call, NAME},
};

params! {
    pub(crate) struct DequantiseParams {
        pub inputs: u32,
    }
}

static SOURCE: Source = Source {
    name: "linear_dequantise.cu",
    text: include_str!("linear_dequantise.cu"),
    headers: headers::ALL,
    layouts: &[DequantiseParams::layout],
};

/// Rows from which on it pays: where `linear_many` multiplies codes, and elsewhere.
const MANY: [usize; 2] = [1024, 48];
/// The most bytes of the dense matrix.
const MOST: usize = 1 << 30;
/// Codes of a thread.
const CHUNK: usize = 16;

/// Whether the product is computed this way: x and out are bf16, and so can W be.
pub(super) fn suits(call: &Call, weight: &Parts, limits: &Limits, takes_codes: bool) -> bool {
    let Call { x, dims, out, rows, experts, .. } = call;
    let aligned = |tensor: &Tensor| tensor.byte_offset().is_multiple_of(16);
    !weight.is_dense()
        && limits.library_products
        && experts.is_none()
        && *rows >= MANY[usize::from(!takes_codes)]
        && x.dtype() == DType::BF16
        && out.dtype() == DType::BF16
        && aligned(x)
        && aligned(out)
        && dims.outputs.is_multiple_of(8)
        && dims.outputs.checked_mul(dims.inputs).is_some_and(|n| n <= MOST / 2)
}

/// Adds the launch that makes W dense, and that of the product.
pub(super) fn build(
    name: &'static str,
    call: &Call,
    weight: &Parts,
    params: &LinearParams,
    b: &mut Builder,
) -> Result<()> {
    let (outputs, inputs) = (call.dims.outputs, call.dims.inputs);
    let dense = b.scratch(outputs * inputs * 2)?;
    b.push(
        Launch::new(NAME, &SOURCE, name)
            .constant("W_DTYPE", weight.dtype)
            .constant("BITS", weight.bits)
            .constant("GROUP", weight.group)
            .constant("FORMAT", weight.format)
            .constant("BLOCK_ALIGNMENT", weight.block_alignment)
            .constant("W_ALIGNED", weight.aligned)
            .read(0, weight.weight)
            .read_if(1, weight.scales)
            .read_if(2, weight.biases)
            .scratch(3, &dense, Use::Write)
            .params(4, &DequantiseParams { inputs: params.inputs })
            .grid([outputs, (inputs / CHUNK).div_ceil(THREADS), 1], [THREADS, 1, 1]),
    )?;
    b.push(generic::launch_dense(call, &dense, params))
}
