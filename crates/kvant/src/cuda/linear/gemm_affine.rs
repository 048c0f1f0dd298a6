//! Products of many rows with an affine weight, or with a bf16 weight that no library multiplies.
//!
//! Rows of experts are sorted by expert first, on the device: a tile of rows has one expert.

use std::ops::Range;

use super::{LinearArgs, LinearKernel, LinearParams};
use crate::cuda::{THREADS, affine::Parts, headers};
use crate::{
    DType, Result,
    gpu::{Builder, Launch, Limits, Params, Scratch, Source, Use, params},
    ops::linear::{Call, NAME},
};

params! {
    /// Parameters of `linear_gemm_affine`.
    pub(crate) struct GemmAffineParams {
        pub rows: u32,
        pub outputs: u32,
        pub inputs: u32,
        pub experts: u32,
        pub alpha: f32,
        /// The expert of the launch's first matrix of W, and the number of its matrices.
        pub first_expert: u32,
        pub present: u32,
    }
}

params! {
    /// Parameters of `linear_gemm_affine_sort`.
    pub(crate) struct GemmAffineSortParams {
        pub rows: u32,
        pub experts: u32,
        /// Tiles for which memory is allocated.
        pub tiles: u32,
    }
}

static SOURCE: Source = Source {
    name: "linear_gemm_affine.cu",
    text: include_str!("linear_gemm_affine.cu"),
    headers: headers::ALL,
    layouts: &[LinearParams::layout, GemmAffineParams::layout, GemmAffineSortParams::layout],
};

/// Inputs of a chunk, and outputs of a block.
const BLOCK: usize = 64;
const OUTPUTS: usize = 128;
/// The number of blocks of inputs is padded to a multiple of this.
const DEPTH: usize = 4;
/// Threads that multiply. With products of warpgroups, a block has 128 more threads, and one of these copies.
const CONSUMERS: usize = 256;
const COPIERS: usize = 128;
/// Floats of a row of results. Results are stored in the memory of the chunks.
const RESULTS: usize = OUTPUTS + 4;
/// Chunks in shared memory. More than the maximum are not faster.
const STAGES: std::ops::RangeInclusive<usize> = 3..=6;
/// Rows of a chunk: 128 if that leaves enough chunks to keep the device busy, otherwise 64.
const ROWS: [usize; 2] = [128, 64];
/// Maximum rows: the second dimension of the grid of `linear_gemm_affine_arrange` counts rows of whole chunks, 32 at a
/// time.
const MAX_ROWS: usize = 65_535 * 32 / ROWS[0] * ROWS[0];

/// Threads that sort rows by expert. Maximum experts: shared memory has room for their counts.
const SORTERS: usize = 1024;
pub(super) const MAX_EXPERTS: usize = 8192;

/// How x is divided into chunks.
pub(super) struct GemmAffine {
    pub(super) rows: usize,
    /// Tiles of rows.
    tiles: usize,
    /// bf16 numbers whose sum is an element of x (`parts`), or a bias (`terms`).
    parts: usize,
    terms: usize,
    stages: usize,
    /// Whether warpgroups compute the products; otherwise warps do.
    warpgroups: bool,
    /// Sums over the inputs of a chunk; each has a scale.
    sums: usize,
    /// Whether the product of codes by warpgroups is faster than a product of dense weights, for up to 1023 rows of
    /// bf16.
    pub(super) replaces_dense: bool,
}

/// Adds the launch that sorts rows by expert into `tiles` tiles of `rows` rows. Returns the expert of every tile, and
/// the row at each of its places; `None` without experts.
pub(super) fn sort(
    call: &Call,
    params: &LinearParams,
    [tiles, rows]: [usize; 2],
    b: &mut Builder,
) -> Result<Option<[Scratch; 2]>> {
    let Some(ids) = &call.experts else { return Ok(None) };
    let (experts, order) = (b.scratch(tiles * 4)?, b.scratch(tiles * rows * 4)?);
    let counts = (call.dims.experts + 1) * 4;
    let tiles = Launch::uint(NAME, "experts.ids", tiles)?;
    let params = GemmAffineSortParams { rows: params.rows, experts: params.experts, tiles };
    b.push(
        Launch::new(NAME, &SOURCE, "linear_gemm_affine_sort")
            .constant("ROWS", rows as u32)
            .read(0, ids)
            .scratch(1, &experts, Use::Write)
            .scratch(2, &order, Use::Write)
            .params(3, &params)
            .threadgroup_memory((2 * counts).next_multiple_of(16))
            .grid([1, 1, 1], [SORTERS, 1, 1]),
    )?;
    Ok(Some([experts, order]))
}

/// Maximum tiles of `rows` rows of the call. Every expert, and the rows without an expert, may have one incomplete
/// tile.
pub(super) fn max_tiles(call: &Call, rows: usize) -> usize {
    match call.experts {
        Some(_) => (call.rows + (call.dims.experts + 1) * (rows - 1)).div_euclid(rows).min(call.rows),
        None => call.rows.div_ceil(rows),
    }
}

impl GemmAffine {
    /// Returns None if unsupported. Supported: matrices of codes; bf16 matrices of experts; bf16 matrices with x of
    /// another dtype, or without a library.
    pub(super) fn new(call: &Call, weight: &Parts, limits: &Limits) -> Option<GemmAffine> {
        if weight.bits != 0 {
            let sums = BLOCK.div_ceil(weight.group as usize);
            let replaces_dense = sums == 1 && matches!(weight.bits, 4 | 6 | 8);
            return Some(GemmAffine { replaces_dense, ..GemmAffine::of(call, sums, limits)? });
        }
        let by_library = limits.library_products && call.experts.is_none() && call.x.dtype() == DType::BF16;
        let takes = weight.is_dense() && weight.dtype == DType::BF16 && weight.aligned && !by_library;
        if takes { GemmAffine::of_dense(call, limits) } else { None }
    }

    /// As `new`, for a weight of bf16.
    pub(super) fn of_dense(call: &Call, limits: &Limits) -> Option<GemmAffine> {
        GemmAffine::of(call, 1, limits)
    }

    fn of(call: &Call, sums: usize, limits: &Limits) -> Option<GemmAffine> {
        let inputs = call.dims.inputs;
        let suits = call.dims.experts <= MAX_EXPERTS && inputs > 0 && inputs.is_multiple_of(BLOCK / sums);
        if !suits {
            return None;
        }
        let parts = match call.x.dtype() {
            DType::F32 => 3,
            DType::F16 => 2,
            _ => 1,
        };
        let terms = if call.out.dtype() == DType::F32 { 3 } else { 2 };
        let small = if call.experts.is_some() {
            // The last tile of an expert is half empty on average.
            call.rows < call.dims.experts * ROWS[0]
        } else {
            call.rows.div_ceil(ROWS[1]) * call.dims.outputs.div_ceil(OUTPUTS) <= limits.busy_groups
        };
        let chunks = |rows, stages| {
            let warpgroups = limits.warpgroup_products;
            let (tiles, replaces_dense) = (max_tiles(call, rows), false);
            GemmAffine { rows, tiles, parts, terms, stages, warpgroups, sums, replaces_dense }
        };
        let fits = |chunks: &GemmAffine| {
            let has_room = chunks.rows * RESULTS * 4 <= chunks.stages * chunks.bytes();
            has_room && chunks.shared_bytes() <= limits.threadgroup_bytes
        };
        let mut sizes = ROWS[usize::from(small)..].iter();
        let largest = |&rows| STAGES.rev().map(|stages| chunks(rows, stages)).find(fits);
        sizes.find_map(largest).filter(|chunks| chunks.tiles * chunks.rows <= MAX_ROWS)
    }

    /// Bytes of a chunk.
    fn bytes(&self) -> usize {
        self.parts * self.rows * BLOCK * 2
    }

    /// Bytes of shared memory: chunks, their barriers, and the padding to a multiple of 1024.
    fn shared_bytes(&self) -> usize {
        self.stages * self.bytes() + 2048
    }

    /// The launch of the product with the matrices of these experts, of bf16.
    pub(super) fn dense_product(
        &self,
        call: &Call,
        dense: &Scratch,
        arranged: &Arranged,
        params: &LinearParams,
        experts: Range<usize>,
    ) -> Result<Launch> {
        let launch = self.product(call, 0, arranged, params, experts)?;
        let launch = launch.constant("W_DTYPE", DType::BF16).constant("GROUP", 1).constant("W_ALIGNED", true);
        Ok(launch.scratch(1, dense, Use::Read))
    }

    /// Adds the launches of the kernels that sort rows and arrange x, for codes of `bits` bits (0: bf16).
    pub(super) fn arrange(&self, call: &Call, bits: u32, params: &LinearParams, b: &mut Builder) -> Result<Arranged> {
        let sorted = sort(call, params, [self.tiles, self.rows], b)?;
        let blocks = call.dims.inputs.div_ceil(BLOCK).next_multiple_of(DEPTH);
        let blocks_of_sums = if bits == 0 { 0 } else { (call.dims.inputs * self.sums / BLOCK).div_ceil(BLOCK) };
        let of_tile = blocks + blocks_of_sums * self.terms;
        let arranged = Arranged { chunks: b.scratch(self.tiles * of_tile * self.bytes())?, sorted };
        let launch = self.common(Launch::new(NAME, &SOURCE, "linear_gemm_affine_arrange"), call, bits);
        b.push(
            arranged
                .bind_order(launch, 3)
                .read(0, &call.x)
                .scratch(1, &arranged.chunks, Use::Write)
                .params(2, params)
                .grid(
                    [blocks.max(blocks_of_sums * BLOCK / self.sums), self.tiles * self.rows / 32, 1],
                    [THREADS, 1, 1],
                ),
        )?;
        Ok(arranged)
    }

    fn common(&self, launch: Launch, call: &Call, bits: u32) -> Launch {
        launch
            .constant("X_DTYPE", call.x.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
            .constant("BITS", bits)
            .constant("SUMS", self.sums as u32)
            .constant("ROWS", self.rows as u32)
            .constant("EXPERTS", call.experts.is_some())
    }

    /// The launch of the product with the matrices of these experts, without the arguments that depend on their dtype.
    fn product(
        &self,
        call: &Call,
        bits: u32,
        arranged: &Arranged,
        params: &LinearParams,
        experts: Range<usize>,
    ) -> Result<Launch> {
        let Call { dims, out, .. } = call;
        let size = out.dtype().size();
        let out_aligned = out.byte_offset().is_multiple_of(4 * size) && dims.outputs.is_multiple_of(4);
        let params = GemmAffineParams {
            rows: params.rows,
            outputs: params.outputs,
            inputs: params.inputs,
            experts: params.experts,
            alpha: params.alpha,
            first_expert: Launch::uint(NAME, "weight", experts.start)?,
            present: Launch::uint(NAME, "weight", experts.len())?,
        };
        let launch = self.common(Launch::new(NAME, &SOURCE, self.name()), call, bits);
        let threads = CONSUMERS + if self.warpgroups { COPIERS } else { 0 };
        Ok(arranged
            .bind_order(launch, 6)
            .constant("OUT_ALIGNED", out_aligned)
            .constant("STAGES", self.stages as u32)
            .constant("SHARED_BYTES", self.shared_bytes() as u32)
            .constant("WARPGROUP_PRODUCTS", self.warpgroups)
            .scratch(0, &arranged.chunks, Use::Read)
            .write(4, out)
            .params(5, &params)
            .threadgroup_memory(self.shared_bytes())
            .grid([dims.outputs.div_ceil(OUTPUTS), self.tiles, 1], [threads, 1, 1]))
    }
}

impl LinearKernel for GemmAffine {
    fn name(&self) -> &'static str {
        "linear_gemm_affine"
    }

    /// Adds the launches of the kernels that sort rows and arrange x, and of the product.
    fn build(&self, args: &LinearArgs, b: &mut Builder) -> Result<()> {
        let LinearArgs { call, weight, params } = *args;
        let arranged = self.arrange(call, weight.bits, params, b)?;
        let launch = self.product(call, weight.bits, &arranged, params, 0..call.dims.experts)?;
        b.push(
            launch
                .constant("W_DTYPE", weight.dtype)
                .constant("GROUP", weight.group)
                .constant("W_ALIGNED", weight.aligned)
                .read(1, weight.weight)
                .read_if(2, weight.scales)
                .read_if(3, weight.biases),
        )
    }
}

/// x in chunks. With experts: the expert of each tile, and the row at each place of a tile.
pub(super) struct Arranged {
    chunks: Scratch,
    sorted: Option<[Scratch; 2]>,
}

impl Arranged {
    fn bind_order(&self, launch: Launch, index: u32) -> Launch {
        match &self.sorted {
            Some([experts, order]) => launch.scratch(index, experts, Use::Read).scratch(index + 1, order, Use::Read),
            None => launch,
        }
    }
}
