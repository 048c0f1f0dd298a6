//! Products that no other kernel supports; and many dense rows, which cuBLASLt multiplies if it is installed.

use super::{LinearArgs, LinearKernel, LinearParams, aligned16};
use crate::{
    DType, Result,
    cuda::{WARP, headers},
    gpu::{Builder, Launch, Params, Product, Scratch, Source, Use},
    ops::linear::{Call, NAME, OwnedWeight},
};

static SOURCE: Source = Source {
    name: "linear_generic.cu",
    text: include_str!("linear_generic.cu"),
    headers: headers::ALL,
    layouts: &[LinearParams::layout],
};

/// Warps of a block of `linear_few`, and outputs of each.
const WARPS: usize = 4;
const ROWS: usize = 2;
/// Rows, outputs and threads of a tile.
const TILE: [usize; 2] = [64, 64];
const TILE_THREADS: usize = 256;

/// The kernels of the file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Generic {
    /// A warp for each two outputs.
    Few,
    /// Tiles of rows and outputs.
    Tiles,
}

impl LinearKernel for Generic {
    fn name(&self) -> &'static str {
        match self {
            Generic::Few => "linear_few",
            Generic::Tiles => "linear_tiles",
        }
    }

    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()> {
        let LinearArgs { call, weight, params } = *args;
        let Call { dims, experts: ids, rows, .. } = call;
        let few = *self == Generic::Few;
        let tokens = match rows {
            _ if !few || ids.is_some() => 1,
            0 | 1 => 1,
            2 => 2,
            _ => 4,
        };
        let (groups, threads) = if few {
            ([dims.outputs.div_ceil(ROWS * WARPS), rows.div_ceil(tokens)], WARPS * WARP)
        } else {
            let down = if ids.is_some() { dims.experts } else { rows.div_ceil(TILE[0]) };
            ([dims.outputs.div_ceil(TILE[1]), down], TILE_THREADS)
        };
        let product = (!few).then(|| product(call)).flatten();
        let launch = weight
            .bind(Launch::new(NAME, &SOURCE, self.name()), call)
            .constant("TOKENS", tokens as u32)
            .constant("X_ALIGNED", aligned16(&call.x, dims.inputs))
            .constant("W_ALIGNED", weight.aligned)
            .params(6, params)
            .grid([groups[0], groups[1], 1], [threads, 1, 1]);
        b.push(Launch { product, ..launch })
    }
}

/// The launch over x and a dense W of bf16, which begin at multiples of 16 bytes.
pub(super) fn launch_dense(call: &Call, w: &Scratch, params: &LinearParams) -> Launch {
    let Call { x, dims, alpha, out, rows, .. } = call;
    let product = Product {
        rows: *rows,
        outputs: dims.outputs,
        inputs: dims.inputs,
        alpha: *alpha,
        dtype: DType::BF16,
        out_dtype: out.dtype(),
        bindings: [0, 1, 5],
    };
    let launch = Launch::new(NAME, &SOURCE, "linear_tiles")
        .constant("TOKENS", 1)
        .constant("X_DTYPE", DType::BF16)
        .constant("OUT_DTYPE", out.dtype())
        .constant("W_DTYPE", DType::BF16)
        .constant("BITS", 0)
        .constant("GROUP", 1)
        .constant("FORMAT", 0)
        .constant("BLOCK_ALIGNMENT", 1)
        .constant("EXPERTS", false)
        .constant("X_ALIGNED", true)
        .constant("W_ALIGNED", true)
        .read(0, x)
        .scratch(1, w, Use::Read)
        .write(5, out)
        .params(6, params)
        .grid([dims.outputs.div_ceil(TILE[1]), rows.div_ceil(TILE[0]), 1], [TILE_THREADS, 1, 1]);
    Launch { product: Some(product), ..launch }
}

/// The product, if a library may compute it instead: dense, of one dtype, and with at least equal precision.
fn product(call: &Call) -> Option<Product> {
    let OwnedWeight::Dense(weight) = &call.weight else { return None };
    let Call { x, dims, alpha, out, rows, .. } = call;
    let dtypes = x.dtype() == weight.dtype() && (out.dtype() == x.dtype() || out.dtype() == DType::F32);
    let aligned = aligned16(x, dims.inputs) && aligned16(weight, dims.inputs) && aligned16(out, dims.outputs);
    (call.experts.is_none() && dims.inputs > 0 && dtypes && aligned).then(|| Product {
        rows: *rows,
        outputs: dims.outputs,
        inputs: dims.inputs,
        alpha: *alpha,
        dtype: x.dtype(),
        out_dtype: out.dtype(),
        bindings: [0, 1, 5],
    })
}
