//! Selection of the kernel of a product.
//!
//! [`select`] is a decision tree. This table follows it: the first line that fits a call names its kernel. A kernel
//! also has conditions on alignment and size, which its `new` checks; if one fails, the next line that fits takes the
//! call.
//!
//! | rows, one matrix | rows, matrices of experts | weight | x | GPU | kernel |
//! |---|---|---|---|---|---|
//! | 2–8 | ≤ max(8, experts / 4), or ≤ 4 per expert | affine, 4 bits, wide | bf16 | clusters | `skinny_affine4_tma` |
//! | 9–128 (4–128 if W is large) | 9 or more, ≤ 64 per expert | affine, 4, 6, 8 bits, wide | bf16 | Hopper | `gemm_affine_wgmma` |
//! | ≤ 40 | ≤ 48 per expert | blocks, small floats, affine of 2, 3, 5 bits | any | any | `skinny_blocks_mma` |
//! | 1–32 | none | f16, bf16 | as W | clusters | `skinny_dense_tma` |
//! | ≥ 1024 | none | affine, 4, 6, 8 bits, groups ≥ 64 | bf16 | Hopper with cuBLASLt | `dequantise` |
//! | ≥ 33 | none | every other quantised weight | bf16 | cuBLASLt | `dequantise` |
//! | ≥ 33 | none | affine, 4, 6, 8 bits, groups ≥ 64 | bf16 | others, with cuBLASLt | `dequantise` |
//! | none | many | quantised, except affine of 4, 6, 8 bits in groups ≥ 64 | bf16 | Hopper | `dequantise` |
//! | ≥ 33 | many | affine | any | any | `gemm_affine` |
//! | ≥ 9 | many | bf16, unless cuBLASLt takes it | any | any | `gemm_affine` |
//! | 1 | none | affine, 4, 6, 8 bits | any | clusters | `gemv_affine_tma` |
//! | 1–2 | few | affine, 4, 6, 8 bits | any | any | `gemv_affine_int8` |
//! | 3–32 | none | affine, 4, 6, 8 bits | any | any | `skinny_mma` |
//! | 1–8 | few | f16, bf16 | as W, or f32 by bf16 | any | `skinny_mma` |
//! | ≤ 8 | few | any | any | any | `generic` (`linear_few`) |
//! | ≥ 9 | many | affine, or bf16 as above | any | any | `gemm_affine` |
//! | ≥ 9 | many | any | any | any | `generic` (`linear_tiles`, or cuBLASLt) |
//!
//! - rows per expert: the mean, rounded up; few: at most max(8, 2 · experts) rows, many: more
//! - wide: groups of 64 or 128 with scales of 16 bits
//! - large: at least 32 MiB of codes
//! - clusters: GPUs from Hopper on (`Limits::clusters`); Hopper: sm_90a (`Limits::warpgroup_products`)
//! - cuBLASLt takes bf16 by bf16 of one matrix if it is installed (`Limits::library_products`)

use super::{
    LinearKernel, dequantise::Dequantise, gemm_affine::GemmAffine, gemm_affine_wgmma::GemmAffineWgmma,
    gemv_affine_int8::GemvAffineInt8, gemv_affine_tma::GemvAffineTma, generic::Generic,
    skinny_affine4_tma::SkinnyAffine4Tma, skinny_blocks_mma::SkinnyBlocksMma, skinny_dense_tma::SkinnyDenseTma,
    skinny_mma::SkinnyMma,
};
use crate::{cuda::affine::Parts, gpu::Limits, ops::linear::Call};

/// Maximum rows for which the time to read the weight is the limit, for dense weights.
const FEW: usize = 8;
/// As `FEW`, for affine weights.
const FEW_AFFINE: usize = 32;
/// As `FEW`, for the rows per expert.
pub(super) const FEW_PER_EXPERT: usize = 2;
/// Minimum bytes of codes for which `linear_gemm_affine_wgmma`, two launches, is faster with fewer than 9 rows.
const LARGE: usize = 32 << 20;
/// Minimum rows of that kernel for a matrix of at least `LARGE` bytes.
const MIN_ROWS_OF_LARGE: usize = 4;

/// The kernel that takes a product, with its division of the work.
pub(super) fn select(call: &Call, weight: &Parts, limits: &Limits) -> Box<dyn LinearKernel> {
    let is_of_experts = call.experts.is_some();
    let few_of_experts = FEW.max(FEW_PER_EXPERT * call.dims.experts);
    // Maximum rows of `linear_few`, and of the kernels that multiply aligned rows on tensor cores.
    let max_few = if is_of_experts { few_of_experts } else { FEW };
    let max_skinny = if is_of_experts || weight.is_dense() { max_few } else { FEW_AFFINE };
    if let Some(kernel) = SkinnyAffine4Tma::new(call, weight, limits) {
        return Box::new(kernel);
    }
    if let Some(kernel) = gemm_affine_wgmma(call, weight, limits) {
        return Box::new(kernel);
    }
    if let Some(kernel) = SkinnyBlocksMma::new(call, weight, limits) {
        return Box::new(kernel);
    }
    if let Some(kernel) = SkinnyDenseTma::new(call, weight, false, limits) {
        return Box::new(kernel);
    }
    let gemm_affine = GemmAffine::new(call, weight, limits);
    let is_faster_by_codes = gemm_affine.as_ref().is_some_and(|kernel| kernel.replaces_dense);
    if let Some(kernel) = Dequantise::new(call, weight, limits, is_faster_by_codes, max_few) {
        return Box::new(kernel);
    }
    let gemm_affine = match gemm_affine {
        Some(kernel) if call.rows > max_skinny => return Box::new(kernel),
        gemm_affine => gemm_affine,
    };
    let is_dense_or_4_6_8_bits = weight.format == 0 && matches!(weight.bits, 0 | 4 | 6 | 8);
    if is_dense_or_4_6_8_bits
        && (1..=max_skinny).contains(&call.rows)
        && let Some(skinny_mma) = SkinnyMma::new(call, weight, limits)
    {
        if let Some(kernel) = GemvAffineTma::new(call, weight, limits) {
            return Box::new(kernel);
        }
        if let Some(kernel) = GemvAffineInt8::new(call, weight, limits) {
            return Box::new(kernel);
        }
        return Box::new(skinny_mma);
    }
    match gemm_affine {
        _ if call.rows <= max_few => Box::new(Generic::Few),
        Some(kernel) => Box::new(kernel),
        None => Box::new(Generic::Tiles),
    }
}

/// `linear_gemm_affine_wgmma`, if there are enough rows for it to be the fastest kernel: its second launch pays if rows
/// are many or the matrix is large. Measured on an H200 (docs/notes/cuda-linear.md).
fn gemm_affine_wgmma(call: &Call, weight: &Parts, limits: &Limits) -> Option<GemmAffineWgmma> {
    let bytes = call.dims.outputs * (call.dims.inputs / 8) * weight.bits as usize;
    let min_rows = if bytes >= LARGE { MIN_ROWS_OF_LARGE } else { FEW + 1 };
    if call.rows < min_rows { None } else { GemmAffineWgmma::new(call, weight, limits) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType, Device, Tensor,
        cuda::{
            affine::parts,
            linear::skinny_mma::tests::{H200, affine, call},
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
        assert_eq!(select(&large, &parts(&large.weight, 4096), &H200).name(), "linear_gemm_affine_wgmma");
        for (rows, outputs, experts, want) in [
            (2, 4096, false, "linear_skinny_affine4_tma"),
            (4, 32_768, false, "linear_skinny_affine4_tma"),
            (8, 4096, false, "linear_skinny_affine4_tma"),
            (9, 4096, false, "linear_gemm_affine_wgmma"),
            (64, 4096, false, "linear_gemm_affine_wgmma"),
            (128, 4096, false, "linear_gemm_affine_wgmma"),
            (129, 4096, false, "linear_gemm_affine"),
            (8, 1024, true, "linear_skinny_affine4_tma"),
            (9, 1024, true, "linear_gemm_affine_wgmma"),
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
            (4,     1,   4096, false, ["linear_gemv_affine_tma",  "linear_gemv_affine_int8",      "linear_gemv_affine_int8"]),
            (4,     2,   4096, false, ["linear_gemv_affine_int8", "linear_gemv_affine_int8",      "linear_gemv_affine_int8"]),
            (4,     8,   4096, false, ["linear_skinny_mma",  "linear_skinny_mma",       "linear_skinny_mma"]),
            (4,     512, 4096, false, ["linear_dequantise", "linear_dequantise", "linear_dequantise"]),
            (4,     1,   1024, true,  ["linear_gemv_affine_int8", "linear_gemv_affine_int8",      "linear_gemv_affine_int8"]),
            (DENSE, 1,   4096, false, ["linear_skinny_dense_tma", "linear_skinny_mma", "linear_skinny_mma"]),
            (DENSE, 2,   4096, false, ["linear_skinny_dense_tma", "linear_skinny_mma", "linear_skinny_mma"]),
            (DENSE, 8,   4096, false, ["linear_skinny_dense_tma", "linear_skinny_mma", "linear_skinny_mma"]),
            // cuBLASLt takes the place of tiles.
            (DENSE, 9,   4096, false, ["linear_skinny_dense_tma", "linear_tiles", "linear_tiles"]),
            (DENSE, 32,  4096, false, ["linear_skinny_dense_tma", "linear_tiles", "linear_tiles"]),
            (DENSE, 33,  4096, false, ["linear_tiles", "linear_tiles",      "linear_tiles"]),
            (DENSE, 512, 4096, false, ["linear_tiles", "linear_tiles",      "linear_tiles"]),
            (DENSE, 512, 1024, true,  ["linear_gemm_affine",  "linear_gemm_affine",       "linear_gemm_affine"]),
        ];
        for (bits, rows, outputs, experts, want) in cases {
            let call = call(bits, DType::BF16, [rows, outputs, 4096], experts);
            let weight = parts(&call.weight, 4096);
            let got = [H200, A100, RTX_4090].map(|limits| select(&call, &weight, &limits).name());
            assert_eq!(got, want, "{bits} bits, {rows} rows, {outputs} outputs, experts: {experts}");
        }
    }

    /// More than a few rows by affine weights, for all GPUs and dtypes, with and without cuBLASLt. Kernels for few rows
    /// do not support an x that does not begin at a multiple of 16 bytes.
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
        assert_eq!(
            names,
            ["linear_gemm_affine", "linear_dequantise", "linear_gemm_affine_wgmma", "linear_skinny_blocks_mma"].into()
        );
    }

    /// Chunks of rows of f32 are three times as large: less shared memory has room for fewer rows.
    #[test]
    fn chunks_fit_into_what_devices_have() {
        for (dtype, want) in [(DType::F32, [128, 128, 64]), (DType::F16, [128, 128, 128])] {
            let call = call(0, dtype, [4096, 4096, 4096], false);
            let weight = parts(&call.weight, 4096);
            let rows = [H200, A100, RTX_4090].map(|limits| GemmAffine::new(&call, &weight, &limits).unwrap().rows);
            assert_eq!(rows, want, "{dtype}");
        }
    }
}
