use crate::{
    Result,
    gpu::{Builder, Launch, Params, Source, aligned4, params},
    metal::{SIMD, affine::parts, headers},
    ops::linear::{Call, NAME},
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
    name: "linear.metal",
    text: include_str!("linear.metal"),
    headers: headers::AFFINE,
    layouts: &[LinearParams::layout],
};

/// Rows up to which the weight is read once per four of them rather than multiplied by tiles.
const FEW: usize = 8;
/// As many rows per expert are few.
const FEW_PER_EXPERT: usize = 2;
/// SIMD-groups of a threadgroup of `linear_few`, and outputs of each.
const SIMDGROUPS: usize = 4;
const ROWS: usize = 4;
/// Rows, outputs and threads of a tile.
const TILE: [usize; 2] = [32, 64];
const TILE_THREADS: usize = 128;

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
    let few = *rows <= if ids.is_some() { FEW.max(FEW_PER_EXPERT * dims.experts) } else { FEW };
    let (kernel, groups, threads) = if few {
        let (kernel, tokens) = match rows {
            _ if ids.is_some() => ("linear_few_1", 1),
            0 | 1 => ("linear_few_1", 1),
            2 => ("linear_few_2", 2),
            _ => ("linear_few_4", 4),
        };
        (kernel, [dims.outputs.div_ceil(ROWS * SIMDGROUPS), rows.div_ceil(tokens)], SIMDGROUPS * SIMD)
    } else {
        let down = if ids.is_some() { dims.experts } else { rows.div_ceil(TILE[0]) };
        ("linear_tiles", [dims.outputs.div_ceil(TILE[1]), down], TILE_THREADS)
    };
    b.push(
        weight
            .bind(Launch::new(NAME, &SOURCE, kernel), call)
            .constant("X_ALIGNED", dims.inputs.is_multiple_of(4) && aligned4(x))
            .constant("W_ALIGNED", weight.aligned)
            .params(6, &params)
            .grid([groups[0], groups[1], 1], [threads, 1, 1]),
    )
}
