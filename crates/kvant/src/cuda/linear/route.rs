//! Selection of the kernel of a product.
//!
//! [`select`] is a decision tree, read from the top: the first kernel whose conditions hold takes the call.

use super::{
    LinearParams, aligned16,
    batch::BatchTiling,
    blocks,
    bulk::BulkTiling,
    bulk_rows::BulkRowsTiling,
    codes,
    dequantise::Dense,
    gating::Gating,
    generic::{self, GenericKernel},
    many::ManyChunks,
    rows,
    stream_rows::StreamRowsTiling,
    warp_tiling::WarpTiling,
};
use crate::{
    Result,
    cuda::affine::Parts,
    gpu::{Builder, Limits},
    ops::linear::Call,
};

/// The kernel of a product, with its division of the work.
pub(super) enum CudaLinearKernel {
    Many(ManyChunks),
    Dequantise(Dense),
    Batch(BatchTiling),
    Bulk(BulkTiling),
    BulkRows(BulkRowsTiling),
    Codes(WarpTiling),
    Rows(WarpTiling),
    StreamRows(StreamRowsTiling),
    Blocks(WarpTiling),
    Few,
    Tiles,
}

/// Dense rows up to which reading the weight is the limit, where `linear_stream_rows` does not take them.
const FEW: usize = 8;
/// The same for affine weights, which no library multiplies.
const FEW_AFFINE: usize = 32;
/// The same per expert.
const FEW_PER_EXPERT: usize = 2;
/// Bytes of a matrix for which a batch of so few rows repays a second launch.
const LARGE: usize = 32 << 20;
const FEW_OF_LARGE: usize = 4;

/// The kernel that takes a product.
pub(super) fn select(call: &Call, weight: &Parts, limits: &Limits) -> CudaLinearKernel {
    let is_of_experts = call.experts.is_some();
    let few_of_experts = FEW.max(FEW_PER_EXPERT * call.dims.experts);
    // Rows that read W at once where other kernels do not take it, and where they do.
    let few = if is_of_experts { few_of_experts } else { FEW };
    let few_aligned = if is_of_experts || weight.is_dense() { few } else { FEW_AFFINE };
    if let Some(tiling) = BulkRowsTiling::new(call, weight, limits) {
        return CudaLinearKernel::BulkRows(tiling);
    }
    if let Some(tiling) = batch(call, weight, limits) {
        return CudaLinearKernel::Batch(tiling);
    }
    if call.rows <= blocks::most_rows(call) && blocks::suits(call, weight) {
        return CudaLinearKernel::Blocks(blocks::tiling(call, weight, limits));
    }
    if let Some(tiling) = StreamRowsTiling::new(call, weight, false, limits) {
        return CudaLinearKernel::StreamRows(tiling);
    }
    let many = ManyChunks::new(call, weight, limits);
    let takes_codes = many.as_ref().is_some_and(|chunks| chunks.replaces_dense);
    if let Some(dense) = Dense::new(call, weight, limits, takes_codes, few) {
        return CudaLinearKernel::Dequantise(dense);
    }
    if call.rows > few_aligned
        && let Some(chunks) = many
    {
        return CudaLinearKernel::Many(chunks);
    }
    let has_others = weight.format == 0 && matches!(weight.bits, 0 | 4 | 6 | 8);
    if has_others && (1..=few_aligned).contains(&call.rows) && rows::suits(call, weight) {
        if let Some(tiling) = BulkTiling::new(call, weight, limits) {
            return CudaLinearKernel::Bulk(tiling);
        }
        if codes::suits(call, weight) {
            return CudaLinearKernel::Codes(codes::tiling(call, weight, limits));
        }
        return CudaLinearKernel::Rows(rows::tiling(call, weight, limits));
    }
    match many {
        _ if call.rows <= few => CudaLinearKernel::Few,
        Some(chunks) => CudaLinearKernel::Many(chunks),
        None => CudaLinearKernel::Tiles,
    }
}

/// The tiling of a batch: of more rows than other kernels read W once for or, for a matrix so large that a second
/// launch is repaid, of a few. Measured on an H200 (docs/notes/cuda-linear.md).
fn batch(call: &Call, weight: &Parts, limits: &Limits) -> Option<BatchTiling> {
    let bytes = call.dims.outputs * (call.dims.inputs / 8) * weight.bits as usize;
    let least = if bytes >= LARGE { FEW_OF_LARGE } else { FEW + 1 };
    if call.rows < least { None } else { BatchTiling::new(call, weight, limits) }
}

impl CudaLinearKernel {
    /// The kernel's name, which begins the name that a profiler shows.
    pub(super) fn name(&self) -> &'static str {
        match self {
            CudaLinearKernel::Many(_) => "linear_many",
            CudaLinearKernel::Dequantise(_) => "linear_dequantise",
            CudaLinearKernel::Batch(_) => "linear_batch",
            CudaLinearKernel::Bulk(_) => "linear_bulk",
            CudaLinearKernel::BulkRows(_) => "linear_bulk_rows",
            CudaLinearKernel::Codes(_) => "linear_codes",
            CudaLinearKernel::Rows(_) => "linear_rows",
            CudaLinearKernel::StreamRows(_) => "linear_stream_rows",
            CudaLinearKernel::Blocks(_) => "linear_blocks",
            CudaLinearKernel::Few => "linear_few",
            CudaLinearKernel::Tiles => "linear_tiles",
        }
    }

    /// Whether the kernel writes the parts of `out` one after the other.
    pub(super) fn writes_parts(&self) -> bool {
        matches!(
            self,
            CudaLinearKernel::Batch(_)
                | CudaLinearKernel::BulkRows(_)
                | CudaLinearKernel::StreamRows(_)
                | CudaLinearKernel::Rows(_)
        )
    }

    /// Adds the launches of the kernel with a gate behind it, if it can have one.
    pub(super) fn build_gated(
        &self,
        call: &Call,
        weight: &Parts,
        params: &LinearParams,
        gating: Gating,
        b: &mut Builder,
    ) -> Result<bool> {
        match self {
            CudaLinearKernel::BulkRows(tiling) if call.experts.is_some() && gating.is_halves() => {
                tiling.build(self.name(), call, weight, params, gating, b)?;
            }
            CudaLinearKernel::Codes(tiling) if call.rows == 1 || gating.is_halves() => {
                b.push(codes::launch(self.name(), tiling, call, weight, params, gating))?;
            }
            CudaLinearKernel::StreamRows(_) => {
                let Some(tiling) = StreamRowsTiling::new(call, weight, gating.is_halves(), &b.limits) else {
                    return Ok(false);
                };
                tiling.build(self.name(), call, weight, params, gating, b)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Adds the launches.
    pub(super) fn build(&self, call: &Call, weight: &Parts, params: &LinearParams, b: &mut Builder) -> Result<()> {
        let x_aligned = aligned16(&call.x, call.dims.inputs);
        match self {
            CudaLinearKernel::Many(chunks) => chunks.build(self.name(), call, weight, params, b),
            CudaLinearKernel::Dequantise(dense) => dense.build(self.name(), call, weight, params, b),
            CudaLinearKernel::Batch(tiling) => tiling.build(self.name(), call, weight, params, b),
            CudaLinearKernel::Bulk(tiling) => b.push(tiling.launch(self.name(), call, weight, params)),
            CudaLinearKernel::BulkRows(tiling) => tiling.build(self.name(), call, weight, params, Gating::None, b),
            CudaLinearKernel::Codes(tiling) => {
                b.push(codes::launch(self.name(), tiling, call, weight, params, Gating::None))
            }
            CudaLinearKernel::Rows(tiling) => b.push(rows::launch(self.name(), tiling, call, weight, params)?),
            CudaLinearKernel::StreamRows(tiling) => tiling.build(self.name(), call, weight, params, Gating::None, b),
            CudaLinearKernel::Blocks(tiling) => blocks::build(self.name(), tiling, call, weight, params, b),
            CudaLinearKernel::Few => {
                b.push(generic::launch(GenericKernel::Few, self.name(), call, weight, params, x_aligned))
            }
            CudaLinearKernel::Tiles => {
                b.push(generic::launch(GenericKernel::Tiles, self.name(), call, weight, params, x_aligned))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType, Device, Tensor,
        cuda::{
            affine::parts,
            linear::rows::tests::{H200, affine, call},
        },
    };

    const A100: Limits =
        Limits { threadgroup_bytes: 163 << 10, busy_groups: 108, warpgroup_products: false, clusters: false, ..H200 };
    const RTX_4090: Limits = Limits { threadgroup_bytes: 99 << 10, busy_groups: 128, ..A100 };

    /// Batches by affine weights with scales of bf16, in groups of 64, as models have them, on an H200.
    #[test]
    fn kernels_of_batches() {
        let mut large = call(8, DType::BF16, [4, 32_768, 4096], false);
        large.weight = affine([32_768, 4096], 8, 64, DType::BF16);
        assert_eq!(select(&large, &parts(&large.weight, 4096), &H200).name(), "linear_batch");
        for (rows, outputs, experts, want) in [
            (2, 4096, false, "linear_bulk_rows"),
            (4, 32_768, false, "linear_bulk_rows"),
            (8, 4096, false, "linear_bulk_rows"),
            (9, 4096, false, "linear_batch"),
            (64, 4096, false, "linear_batch"),
            (128, 4096, false, "linear_batch"),
            (129, 4096, false, "linear_many"),
            (8, 1024, true, "linear_bulk_rows"),
            (9, 1024, true, "linear_batch"),
        ] {
            let mut call = call(4, DType::BF16, [rows, outputs, 4096], experts);
            call.weight = affine([outputs, 4096], 4, 64, DType::BF16);
            let weight = parts(&call.weight, 4096);
            let got = select(&call, &weight, &H200).name();
            assert_eq!(got, want, "{rows} rows, {outputs} outputs, experts: {experts}");
        }
    }

    /// bf16 rows, matrices of 4096 inputs. Columns: H200, A100, RTX 4090.
    #[test]
    fn kernels_of_typical_products() {
        const DENSE: u32 = 0;
        #[rustfmt::skip]
        let cases = [
            (4,     1,   4096, false, ["linear_bulk",  "linear_codes",      "linear_codes"]),
            (4,     2,   4096, false, ["linear_codes", "linear_codes",      "linear_codes"]),
            (4,     8,   4096, false, ["linear_rows",  "linear_rows",       "linear_rows"]),
            (4,     512, 4096, false, ["linear_dequantise", "linear_dequantise", "linear_dequantise"]),
            (4,     1,   1024, true,  ["linear_codes", "linear_codes",      "linear_codes"]),
            (DENSE, 1,   4096, false, ["linear_stream_rows", "linear_rows", "linear_rows"]),
            (DENSE, 2,   4096, false, ["linear_stream_rows", "linear_rows", "linear_rows"]),
            (DENSE, 8,   4096, false, ["linear_stream_rows", "linear_rows", "linear_rows"]),
            // cuBLASLt takes the place of tiles.
            (DENSE, 9,   4096, false, ["linear_stream_rows", "linear_tiles", "linear_tiles"]),
            (DENSE, 32,  4096, false, ["linear_stream_rows", "linear_tiles", "linear_tiles"]),
            (DENSE, 33,  4096, false, ["linear_tiles", "linear_tiles",      "linear_tiles"]),
            (DENSE, 512, 4096, false, ["linear_tiles", "linear_tiles",      "linear_tiles"]),
            (DENSE, 512, 1024, true,  ["linear_many",  "linear_many",       "linear_many"]),
        ];
        for (bits, rows, outputs, experts, want) in cases {
            let call = call(bits, DType::BF16, [rows, outputs, 4096], experts);
            let weight = parts(&call.weight, 4096);
            let got = [H200, A100, RTX_4090].map(|limits| select(&call, &weight, &limits).name());
            assert_eq!(got, want, "{bits} bits, {rows} rows, {outputs} outputs, experts: {experts}");
        }
    }

    /// More than a few rows by affine weights, whatever the GPU and the dtypes, with cuBLASLt and without. Kernels of
    /// few rows refuse an x that does not begin at a multiple of 16 bytes.
    #[test]
    fn no_many_rows_of_affine_weights_go_to_scalar_tiles() {
        let device = Device::reference();
        let mut names = std::collections::HashSet::new();
        let dtypes = [DType::F32, DType::F16, DType::BF16];
        for (bits, group, x, scales, experts) in [2, 3, 4, 5, 6, 8].into_iter().flat_map(|bits| {
            [32, 64, 128].into_iter().flat_map(move |group| {
                dtypes.into_iter().flat_map(move |x| {
                    dtypes
                        .into_iter()
                        .flat_map(move |scales| [false, true].map(|experts| (bits, group, x, scales, experts)))
                })
            })
        }) {
            let inputs = if group == 32 { 352 } else { 384 };
            for (rows, shifted) in [(9, true), (32, true), (33, false), (128, false), (512, false), (4096, false)] {
                let mut call = call(bits, x, [rows, 1000, inputs], experts);
                call.weight = affine([1000, inputs], bits, group, scales);
                if shifted {
                    let longer = Tensor::zeros(&device, x, &[rows * inputs + 2]).unwrap();
                    call.x = longer.rows(2..rows * inputs + 2).unwrap().reshape(&[rows, inputs]).unwrap();
                }
                let weight = parts(&call.weight, inputs);
                for gpu in [H200, A100, RTX_4090] {
                    for library_products in [false, true] {
                        let name = select(&call, &weight, &Limits { library_products, ..gpu }).name();
                        let case = format!(
                            "{bits} bits, {group}, {x}, {scales}, {rows} rows (shifted: {shifted}), experts: {experts}"
                        );
                        assert_ne!(name, "linear_tiles", "{case}, cuBLASLt: {library_products}");
                        names.insert(name);
                    }
                }
            }
        }
        assert_eq!(names, ["linear_many", "linear_dequantise", "linear_batch", "linear_blocks"].into());
    }

    /// Chunks of rows of f32 are three times as large: less shared memory has room for fewer rows.
    #[test]
    fn chunks_fit_into_what_devices_have() {
        for (dtype, want) in [(DType::F32, [128, 128, 64]), (DType::F16, [128, 128, 128])] {
            let call = call(0, dtype, [4096, 4096, 4096], false);
            let weight = parts(&call.weight, 4096);
            let rows = [H200, A100, RTX_4090].map(|limits| ManyChunks::new(&call, &weight, &limits).unwrap().rows);
            assert_eq!(rows, want, "{dtype}");
        }
    }
}
