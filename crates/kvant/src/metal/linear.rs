use crate::{
    Result,
    gpu::{Builder, Launch, Params, Source, aligned4, linear::LinearParams},
    metal::{SIMD, affine::parts, headers::HEADERS},
    ops::linear::{Call, NAME},
};

static SOURCE: Source = Source {
    name: "linear.metal",
    text: include_str!("linear.metal"),
    headers: HEADERS,
    layouts: &[LinearParams::layout],
};

/// Maximum rows for `linear_few`, which reads the weight once per four rows; more rows are multiplied in tiles.
const FEW_ROWS: usize = 8;
/// Maximum rows per expert for `linear_few`.
const FEW_ROWS_PER_EXPERT: usize = 2;
/// SIMD-groups of a threadgroup of `linear_few`, and outputs of each.
const SIMDGROUPS: usize = 4;
const ROWS: usize = 4;
/// Rows, outputs and threads of a tile.
const TILE: [usize; 2] = [32, 64];
const TILE_THREADS: usize = 128;

/// A kernel of `linear.metal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinearKernel {
    /// `linear_few_N`: reads the weight once for `together` rows. Bound by memory.
    FewRows { together: usize },
    /// `linear_tiles`: matrix products. Bound by arithmetic.
    Tiles,
}

/// Selects the kernel for `rows` output rows; `experts`: the number of experts, if rows choose one. `tiles`: whether
/// the device accepts the kernel of tiles.
fn select(rows: usize, experts: Option<usize>, tiles: bool) -> LinearKernel {
    let few = experts.map_or(FEW_ROWS, |experts| FEW_ROWS.max(FEW_ROWS_PER_EXPERT * experts));
    if rows > few && tiles {
        return LinearKernel::Tiles;
    }
    let together = match rows {
        // Rows with different experts share no weight.
        _ if experts.is_some() => 1,
        0 | 1 => 1,
        2 => 2,
        _ => 4,
    };
    LinearKernel::FewRows { together }
}

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
    let experts = ids.is_some().then_some(dims.experts);
    let kernel = |entry, threads| {
        weight
            .bind(Launch::new(NAME, &SOURCE, entry), call)
            .constant("X_ALIGNED", dims.inputs.is_multiple_of(4) && aligned4(x))
            .constant("W_ALIGNED", weight.aligned)
            .grid([1, 1, 1], [threads, 1, 1])
    };
    let mut chosen = select(*rows, experts, true);
    if chosen == LinearKernel::Tiles && b.refuses(&kernel("linear_tiles", TILE_THREADS)) {
        chosen = select(*rows, experts, false);
    }
    let (entry, groups, threads) = match chosen {
        LinearKernel::FewRows { together } => {
            let entry = match together {
                1 => "linear_few_1",
                2 => "linear_few_2",
                _ => "linear_few_4",
            };
            (entry, [dims.outputs.div_ceil(ROWS * SIMDGROUPS), rows.div_ceil(together)], SIMDGROUPS * SIMD)
        }
        LinearKernel::Tiles => {
            let down = if ids.is_some() { dims.experts } else { rows.div_ceil(TILE[0]) };
            ("linear_tiles", [dims.outputs.div_ceil(TILE[1]), down], TILE_THREADS)
        }
    };
    b.push(kernel(entry, threads).params(6, &params).grid([groups[0], groups[1], 1], [threads, 1, 1]))
}

#[cfg(test)]
mod tests {
    use super::{LinearKernel::*, *};

    #[test]
    fn few_rows_read_the_weight_together_and_many_use_tiles() {
        let few = |together| FewRows { together };
        assert_eq!([1, 2, 3, 8].map(|rows| select(rows, None, true)), [few(1), few(2), few(4), few(4)]);
        assert_eq!(select(9, None, true), Tiles);
        assert_eq!([1, 8].map(|rows| select(rows, Some(2), true)), [few(1); 2]);
        assert_eq!(select(9, Some(4), true), Tiles);
        assert_eq!([256, 257].map(|rows| select(rows, Some(128), true)), [few(1), Tiles]);
        assert_eq!([select(9, None, false), select(300, Some(4), false)], [few(4), few(1)]);
    }
}
