//! Products of a batch of rows, or of rows of experts, with an affine weight, on GPUs with warpgroup products.

use super::{
    LinearArgs, LinearKernel, LinearParams,
    gemm_affine::{MAX_EXPERTS, max_tiles, sort},
    out_parts::{MAX_PARTS, OutParts},
};
use crate::cuda::{MAX_CLUSTER, affine::Parts, clusters_at_once, headers};
use crate::{
    DType, Result, Tensor,
    gpu::{Builder, Launch, Limits, Params, Source, Use, params},
    ops::linear::{Call, NAME},
};

params! {
    pub(crate) struct GemmAffineWgmmaParams {
        pub linear: LinearParams,
        pub row_tiles: u32,
        pub output_tiles: u32,
        pub parts: OutParts,
    }
}

static SOURCE: Source = source("linear_gemm_affine_wgmma.cu", include_str!("linear_gemm_affine_wgmma.cu"));
static ARRANGE: Source =
    source("linear_gemm_affine_wgmma_arrange.cu", include_str!("linear_gemm_affine_wgmma_arrange.cu"));

const fn source(name: &'static str, text: &'static str) -> Source {
    let layouts = &[LinearParams::layout, OutParts::layout, GemmAffineWgmmaParams::layout];
    Source { name, text, headers: headers::ALL, layouts }
}

/// Inputs of a block; outputs of a tile, which are half as many if chunks have halves.
const BLOCK: usize = 64;
const OUTPUTS: usize = 256;
/// Blocks of a chunk, and the minimum chunks in shared memory.
const DEPTHS: [(usize, usize); 2] = [(4, 3), (2, 2)];
/// As `DEPTHS`, if each warpgroup multiplies half of a chunk's inputs.
const DEPTHS_OF_HALVES: [(usize, usize); 2] = [(8, 3), (6, 3)];
/// Maximum rows with which halves are faster, for codes of 4 bits. Halves read longer pieces of rows of W, but read x
/// for half as many outputs at a time. For small matrices, of at most `SMALL` weights, halves are faster with more
/// rows, too: smaller tiles are shared by fewer blocks.
const MAX_HALVES: usize = 16;
const SMALL: usize = 1 << 24;
/// Maximum spans of inputs whose scales are in shared memory.
const SLOTS: usize = 2;
/// Maximum rows of a tile, and of one matrix.
pub(super) const MAX_ROWS: usize = 128;
/// Rows of a tile.
const ROWS: [usize; 5] = [8, 16, 32, 64, MAX_ROWS];
/// Threads of a warpgroup.
const WARPGROUP: usize = 128;
/// Maximum rows of products of codes. With more rows, codes become weights, rounded to bf16.
pub(super) const MAX_CODES: usize = 32;
/// Maximum rows with four warpgroups that multiply. With more rows, two warpgroups multiply twice as much each.
const FOUR_WARPGROUPS: usize = 64;
/// Maximum chunks in shared memory.
const MAX_STAGES: usize = 8;
/// Rows of a block of `linear_gemm_affine_wgmma_arrange`, over all its blocks of inputs.
const ARRANGED_ROWS: usize = 32;
/// Maximum chunks by which a block's work in clusters may exceed an even division among all multiprocessors.
const MAX_LONGER: usize = 8;

/// How the work is divided.
pub(super) struct GemmAffineWgmma {
    /// Rows of a tile, and tiles of rows.
    rows: usize,
    row_tiles: usize,
    output_tiles: usize,
    /// Blocks of inputs of a chunk, and chunks.
    depth: usize,
    chunks: usize,
    /// Outputs of a tile. Parts of a chunk's inputs that different warpgroups multiply: 1 or 2.
    outputs: usize,
    halves: usize,
    stages: usize,
    shared_bytes: usize,
    /// Whether scales and biases of an output begin at multiples of 8 bytes.
    factors_aligned: bool,
    /// Blocks of a cluster, which divide a tile; 1 if all blocks divide all tiles.
    cluster: usize,
    /// Blocks of the product.
    blocks: usize,
}

impl GemmAffineWgmma {
    /// None if the kernels do not take the product.
    pub(super) fn new(call: &Call, weight: &Parts, limits: &Limits) -> Option<GemmAffineWgmma> {
        let (Some(scales), Some(biases)) = (weight.scales, weight.biases) else { return None };
        let Call { x, out, dims, .. } = call;
        let group = weight.group as usize;
        let groups = dims.inputs / group;
        let takes = limits.warpgroup_products
            && matches!(weight.bits, 4 | 6 | 8)
            && matches!(group, 64 | 128)
            && weight.dtype.size() == 2
            && weight.aligned
            && x.dtype() == DType::BF16
            && matches!(out.dtype(), DType::BF16 | DType::F32)
            && dims.inputs > 0
            && dims.inputs.is_multiple_of(BLOCK)
            && dims.experts <= MAX_EXPERTS
            && call.parts.len() <= MAX_PARTS;
        if !takes {
            return None;
        }
        // With experts: twice the mean number of rows of an expert, so that most experts need one tile.
        let rows_of_tile = match call.experts {
            Some(_) => 2 * call.rows.div_ceil(dims.experts),
            None => call.rows,
        };
        let rows = ROWS.into_iter().find(|&rows| rows_of_tile <= rows)?;
        if rows > MAX_CODES && (weight.dtype != DType::BF16 || out.dtype() != DType::BF16) {
            return None;
        }
        let factors_aligned = groups.is_multiple_of(4)
            && [scales, biases].into_iter().all(|tensor| tensor.byte_offset().is_multiple_of(8));
        let stage_bytes = |halves: usize, depth: usize| {
            (chunk_bytes(rows, depth) + OUTPUTS / halves * pitch(weight.bits, depth)).next_multiple_of(1024)
        };
        let shared = |halves: usize, depth: usize, stages: usize| {
            let (outputs, stage) = (OUTPUTS / halves, stage_bytes(halves, depth));
            let slots = SLOTS * 2 * outputs * (span(depth) / group * 2 + 8);
            let sums = if halves > 1 { 2 * outputs * rows * 4 } else { 0 };
            2048 + stages * stage + slots + sums
        };
        // The padding is at most an eighth of the inputs, and half a chunk has whole groups.
        let suits_halves = |&(depth, _): &(usize, usize)| {
            let inputs = depth * BLOCK;
            weight.bits == 4
                && (rows <= MAX_HALVES || rows <= MAX_CODES && dims.experts * dims.outputs * dims.inputs <= SMALL)
                && dims.inputs.next_multiple_of(inputs) - dims.inputs <= dims.inputs / 8
                && (inputs / 2).is_multiple_of(group)
        };
        let of_halves = DEPTHS_OF_HALVES.into_iter().filter(suits_halves).map(|depth| (2, depth));
        let mut all = of_halves.chain(DEPTHS.map(|depth| (1, depth)));
        let (halves, depth, stages, shared_bytes) = all.find_map(|(halves, (depth, fewest))| {
            let fits = |&stages: &usize| shared(halves, depth, stages) <= limits.threadgroup_bytes;
            let stages = (fewest..=MAX_STAGES).rev().find(fits)?;
            Some((halves, depth, stages, shared(halves, depth, stages)))
        })?;
        let outputs = OUTPUTS / halves;
        let row_tiles = max_tiles(call, rows);
        let output_tiles = dims.outputs.div_ceil(outputs);
        let chunks = dims.inputs.div_ceil(depth * BLOCK);
        let units = row_tiles.checked_mul(output_tiles)?.checked_mul(chunks).filter(|&n| n <= u32::MAX as usize)?;
        // The sums of a tile take the place of the ring.
        let sums_fit = stages * stage_bytes(halves, depth) >= outputs * rows * 4;
        let may_have_clusters = limits.clusters && call.experts.is_none() && sums_fit;
        let cluster = if may_have_clusters { cluster_of(row_tiles * output_tiles, chunks, limits) } else { 1 };
        let blocks = if cluster > 1 { row_tiles * output_tiles * cluster } else { units.min(limits.busy_groups) };
        Some(GemmAffineWgmma {
            rows,
            row_tiles,
            output_tiles,
            depth,
            chunks,
            outputs,
            halves,
            stages,
            shared_bytes,
            factors_aligned,
            cluster,
            blocks,
        })
    }

    fn threads(&self) -> usize {
        WARPGROUP * if self.rows <= FOUR_WARPGROUPS { 5 } else { 3 }
    }
}

impl LinearKernel for GemmAffineWgmma {
    fn name(&self) -> &'static str {
        "linear_gemm_affine_wgmma"
    }

    fn writes_parts(&self) -> bool {
        true
    }

    /// Adds the launches of the kernels that sort rows and arrange x, and of the product.
    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()> {
        let LinearArgs { call, weight, params } = *args;
        let uint = |value| Launch::uint(NAME, "out", value);
        let sorted = sort(call, params, [self.row_tiles, self.rows], b)?;
        let sorted = sorted.as_ref();
        let arranged = b.scratch(self.row_tiles * self.chunks * chunk_bytes(self.rows, self.depth))?;
        let counters = b.scratch(self.row_tiles * self.output_tiles * 4)?;
        // Blocks of a cluster add up without device memory.
        let partials = match self.cluster {
            1 => Some(b.scratch(2 * self.blocks * self.outputs * self.rows * 4)?),
            _ => None,
        };
        let params = GemmAffineWgmmaParams {
            linear: *params,
            row_tiles: uint(self.row_tiles)?,
            output_tiles: uint(self.output_tiles)?,
            parts: OutParts::of(call)?,
        };
        let even = |part: &usize| part.is_multiple_of(2);
        let out_aligned = call.out.byte_offset().is_multiple_of(2 * call.out.dtype().size())
            && even(&call.dims.outputs)
            && call.parts.iter().all(even);
        let odd = |tensor: Option<&Tensor>| tensor.map_or(0, |tensor| (tensor.byte_offset() / 2 % 2) as u32);
        let common = |launch: Launch, index| {
            let launch = launch
                .constant("BITS", weight.bits)
                .constant("ROWS", self.rows as u32)
                .constant("DEPTH", self.depth as u32)
                .constant("EXPERTS", sorted.is_some());
            match sorted {
                Some([experts, order]) => {
                    launch.scratch(index, experts, Use::Read).scratch(index + 1, order, Use::Read)
                }
                None => launch,
            }
        };
        let together = ARRANGED_ROWS.min(self.rows);
        let blocks = (self.chunks * self.depth).div_ceil(ARRANGED_ROWS / together);
        b.push(
            common(Launch::new(NAME, &ARRANGE, "linear_gemm_affine_wgmma_arrange"), 4)
                .read(0, &call.x)
                .scratch(1, &arranged, Use::Write)
                .scratch(2, &counters, Use::Write)
                .params(3, &params)
                .grid([blocks, self.row_tiles * self.rows / together, 1], [8 * ARRANGED_ROWS, 1, 1]),
        )?;
        let launch = common(Launch::new(NAME, &SOURCE, self.name()), 8)
            .constant("X_DTYPE", call.x.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("W_DTYPE", weight.dtype)
            .constant("GROUP", weight.group)
            .constant("FACTORS_ALIGNED", self.factors_aligned)
            .constant("SCALES_ODD", odd(weight.scales))
            .constant("BIASES_ODD", odd(weight.biases))
            .constant("OUT_ALIGNED", out_aligned)
            .constant("WHOLE", call.dims.inputs.is_multiple_of(self.depth * BLOCK))
            .constant("STAGES", self.stages as u32)
            .constant("HALVES", self.halves as u32)
            .constant("CLUSTER", self.cluster as u32)
            .constant("SPAN", span(self.depth) as u32)
            .constant("SHARED_BYTES", self.shared_bytes as u32)
            .scratch(0, &arranged, Use::Read)
            .read(1, weight.weight)
            .read_if(2, weight.scales)
            .read_if(3, weight.biases)
            .write(4, &call.out)
            .scratch(6, &counters, Use::ReadWrite)
            .params(7, &params)
            .threadgroup_memory(self.shared_bytes)
            .grid([self.blocks, 1, 1], [self.threads(), 1, 1]);
        let launch = match &partials {
            Some(partials) => launch.scratch(5, partials, Use::ReadWrite),
            None => launch,
        };
        // The experts are written by a kernel before this one.
        b.push(if sorted.is_some() { launch } else { launch.reads_ahead(&[1, 2, 3]) })
    }
}

/// Blocks of a cluster that has a tile, if tiles are few; otherwise 1.
fn cluster_of(tiles: usize, chunks: usize, limits: &Limits) -> usize {
    let fits = |&cluster: &usize| cluster <= chunks && tiles <= clusters_at_once(cluster, limits);
    let cluster = (2..=MAX_CLUSTER).rev().find(fits).unwrap_or(1);
    let longer = chunks.div_ceil(cluster).saturating_sub(tiles * chunks / limits.busy_groups);
    if longer <= MAX_LONGER { cluster } else { 1 }
}

/// Inputs whose scales are copied together: whole chunks.
fn span(depth: usize) -> usize {
    if depth == 6 { 1536 } else { 1024 }
}

/// Bytes of a chunk: x, and the sums of its blocks.
fn chunk_bytes(rows: usize, depth: usize) -> usize {
    rows * depth * (BLOCK * 2 + if rows <= MAX_CODES { 4 } else { 0 })
}

/// Bytes from one output's codes in a chunk to the next one's.
fn pitch(bits: u32, depth: usize) -> usize {
    let codes = depth * BLOCK / 8 * bits as usize;
    match bits {
        4 => codes,
        6 => codes + 16,
        _ => codes + 64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{
        affine::parts,
        linear::skinny_mma::tests::{H200, affine, call},
    };

    /// With fewer tiles than multiprocessors, each tile has a cluster; the clusters have the maximum size for which all
    /// run at once.
    #[test]
    fn few_tiles_are_divided_among_clusters() {
        for (rows, outputs, inputs, want) in [
            // 26B-A4B: router, output, q with k and v.
            (128, 128, 2816, 8),
            (128, 2816, 4096, 8),
            (128, 8192, 2816, 3),
            // 31B: down, q with k and v, gate with up.
            (64, 5376, 21504, 5),
            (128, 16384, 5376, 2),
            (128, 43008, 5376, 1),
            // Many chunks for each block, where 52 multiprocessors would be idle.
            (128, 10240, 8192, 1),
            // Tiles of half as many outputs.
            (16, 2816, 4096, 5),
            // No more blocks than chunks.
            (128, 256, 256, 2),
            (128, 256, 128, 1),
        ] {
            let mut call = call(4, DType::BF16, [rows, outputs, inputs], false);
            call.weight = affine([outputs, inputs], 4, 64, DType::BF16);
            let weight = parts(&call.weight, inputs);
            let tiling = GemmAffineWgmma::new(&call, &weight, &H200).unwrap();
            assert_eq!(tiling.cluster, want, "{rows} rows, {outputs} x {inputs}");
            let without = GemmAffineWgmma::new(&call, &weight, &Limits { clusters: false, ..H200 }).unwrap();
            assert_eq!(without.cluster, 1, "{rows} rows, {outputs} x {inputs}");
        }
    }

    /// Halves: if the inputs nearly fill the chunks, with few rows or small matrices, by codes of 4 bits.
    #[test]
    fn chunks_of_few_rows_have_halves() {
        for (bits, rows, inputs, group, want) in [
            (4, 8, 4096, 64, (2, 8)),
            (4, 16, 2816, 128, (2, 8)),
            (4, 16, 704, 64, (2, 6)),
            (4, 16, 640, 128, (1, 4)),
            (4, 16, 320, 64, (1, 4)),
            (4, 17, 4096, 64, (2, 6)),
            (4, 17, 8192, 64, (1, 4)),
            (6, 16, 4096, 64, (1, 4)),
        ] {
            let mut call = call(bits, DType::BF16, [rows, 4096, inputs], false);
            call.weight = affine([4096, inputs], bits, group, DType::BF16);
            let weight = parts(&call.weight, inputs);
            let tiling = GemmAffineWgmma::new(&call, &weight, &H200).unwrap();
            assert_eq!((tiling.halves, tiling.depth), want, "{bits} bits, {rows} rows, {inputs} inputs, group {group}");
        }
    }
}
