use crate::{
    DType, Result, Tensor,
    cuda::{
        WARP,
        affine::{Parts, parts},
        dequantise, headers, linear_bulk, linear_codes, linear_many, linear_rows,
    },
    gpu::{Builder, Launch, Params, Product, Source, Use, params},
    ops::linear::{Call, NAME, OwnedWeight},
};

params! {
    pub(crate) struct LinearParams {
        pub rows: u32,
        pub outputs: u32,
        pub inputs: u32,
        pub experts: u32,
        pub rows_per_input: u32,
        pub alpha: f32,
    }
}

static SOURCE: Source = Source {
    name: "linear.cu",
    text: include_str!("linear.cu"),
    headers: headers::LINEAR,
    layouts: &[LinearParams::layout],
};

/// Rows up to which the weight is read once per four of them rather than multiplied by tiles.
const FEW: usize = 8;
/// As many rows of affine weights: no library takes them.
const FEW_AFFINE: usize = 32;
/// As many rows per expert are few.
const FEW_PER_EXPERT: usize = 2;
/// Warps of a block of `linear_few`, and outputs of each.
const WARPS: usize = 4;
const ROWS: usize = 2;
/// Rows, outputs and threads of a tile.
const TILE: [usize; 2] = [64, 64];
const TILE_THREADS: usize = 256;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let Call { x, weight, dims, experts: ids, rows_per_input, alpha, rows, .. } = call;
    let uint = |arg, value| Launch::uint(NAME, arg, value);
    let params = LinearParams {
        rows: uint("out", *rows)?,
        outputs: uint("weight", dims.outputs)?,
        inputs: uint("weight", dims.inputs)?,
        experts: uint("weight", dims.experts)?,
        rows_per_input: uint("experts.ids", *rows_per_input)?,
        alpha: *alpha,
    };
    let weight = parts(weight, dims.inputs);
    let many = if weight.bits != 0 { FEW_AFFINE } else { FEW };
    if *rows > many && linear_many::suits(call, &weight, &b.limits) {
        return linear_many::build(call, &weight, &params, b);
    }
    if dequantise::suits(call, &weight) {
        return by_dense(call, &weight, params, b);
    }
    let x_aligned = aligned16(x, dims.inputs);
    let few_rows = if ids.is_some() {
        FEW.max(FEW_PER_EXPERT * dims.experts)
    } else if weight.bits != 0 {
        FEW_AFFINE
    } else {
        FEW
    };
    if *rows > 0 && *rows <= few_rows && linear_rows::suits(call, &weight, x_aligned) {
        if let Some(built) = linear_bulk::build(call, &weight, &params, b) {
            return built;
        }
        let codes = linear_codes::suits(call, &weight);
        let build = if codes { linear_codes::build } else { linear_rows::build };
        return build(call, &weight, &params, b);
    }
    let few = *rows <= if ids.is_some() { FEW.max(FEW_PER_EXPERT * dims.experts) } else { FEW };
    let mut tokens = 1;
    let (kernel, groups, threads) = if few {
        tokens = match rows {
            _ if ids.is_some() => 1,
            0 | 1 => 1,
            2 => 2,
            _ => 4,
        };
        ("linear_few", [dims.outputs.div_ceil(ROWS * WARPS), rows.div_ceil(tokens)], WARPS * WARP)
    } else {
        let down = if ids.is_some() { dims.experts } else { rows.div_ceil(TILE[0]) };
        ("linear_tiles", [dims.outputs.div_ceil(TILE[1]), down], TILE_THREADS)
    };
    let product = (!few).then(|| product(call)).flatten();
    let launch = weight
        .bind(Launch::new(NAME, &SOURCE, kernel), call)
        .constant("TOKENS", tokens as u32)
        .constant("X_ALIGNED", x_aligned)
        .constant("W_ALIGNED", weight.aligned)
        .params(6, &params)
        .grid([groups[0], groups[1], 1], [threads, 1, 1]);
    b.push(Launch { product, ..launch })
}

/// Whether all rows of `row` elements begin at multiples of 16 bytes.
fn aligned16(tensor: &Tensor, row: usize) -> bool {
    tensor.byte_offset().is_multiple_of(16) && (row * tensor.dtype().size()).is_multiple_of(16)
}

/// A product with an affine weight as one of dense matrices, of twice as many inputs.
fn by_dense(call: &Call, weight: &Parts, params: LinearParams, b: &mut Builder) -> Result<()> {
    let Call { dims, alpha, out, rows, .. } = call;
    let inputs = 2 * dims.inputs;
    let [x, w] = dequantise::dense(call, weight, b)?;
    let product = Product {
        rows: *rows,
        outputs: dims.outputs,
        inputs,
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
        .constant("EXPERTS", false)
        .constant("X_ALIGNED", true)
        .constant("W_ALIGNED", true)
        .scratch(0, &x, Use::Read)
        .scratch(1, &w, Use::Read)
        .write(5, out)
        .params(6, &LinearParams { inputs: Launch::uint(NAME, "x", inputs)?, ..params })
        .grid([dims.outputs.div_ceil(TILE[1]), rows.div_ceil(TILE[0]), 1], [TILE_THREADS, 1, 1]);
    b.push(Launch { product: Some(product), ..launch })
}

/// The product that a library may compute instead: dense, of one dtype, in which it accumulates no less exactly.
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
