//! Every CUDA kernel compiles for an H200, and kernels that differ compile for GPUs before Hopper. This needs libnvrtc
//! and no GPU: operations build their launches, whose kernels are compiled. The conformance tests check the kernels'
//! results on a GPU.

use std::{collections::HashSet, path::Path};

use crate::common::without_gpu::{Launches, Model};
use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, HeadOrder, KvLayer, KvPool, LayerSpec, PoolSpec, Result, Step, StepSize,
    Tensor,
    codec::BITS,
    gpu,
    ops::{
        self, Activation, Add, AddBias, Affine, AllGather, AllReduce, Angles, Argmax, Attend, BlockFormat, Blocks,
        CausalConv, Columns, DeltaRule, Embed, ExpertGroups, ExpertScores, Experts, FloatFormat, Gate, Hadamard,
        HeadNorm, KvRead, KvSide, KvWrite, Linear, MergeAttention, MoeCombine, MoeRoute, NextNorm, NormRope,
        NormRopeWrite, PairLayout, Residual, RmsNorm, Rope, Sample, ScaledFloats, Softcap, StateRuns, StateSlots,
        Weight,
    },
};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn device(model: Model) -> Option<(Device, Launches)> {
    if !gpu::has_cuda_compiler() {
        eprintln!("libnvrtc cannot be loaded: the CUDA kernels are not compiled on this machine");
        return None;
    }
    let launches = Launches { model, compiles: true, ..Launches::default() };
    Some((gpu::cuda_device(launches.clone()), launches))
}

#[test]
fn every_kernel_compiles() -> Result<()> {
    let Some((device, launches)) = device(Model::H200) else { return Ok(()) };
    let mut enc = device.encoder()?;
    for dtype in FLOATS {
        elements(&device, &mut enc, dtype)?;
        products(&device, &mut enc, dtype)?;
    }
    experts_of_blocks(&device, &mut enc)?;
    for codec in [Codec::F32, Codec::F16, Codec::BF16].into_iter().chain(BITS.map(Codec::tq)) {
        caches(&device, &mut enc, codec)?;
    }
    caches_over_pages(&device, &mut enc, 64, 128, Codec::tq_centred(4), DType::BF16)?;
    attention(&device, &mut enc, true)?;
    // A prompt whose keys and values are decoded first.
    let prompt = (64, Codec::tq(4), Codec::tq(4), DType::BF16, DType::BF16, 4, 99);
    attend_over_pages(&device, &mut enc, ("attend_prefill", 9999, None, prompt), 64, None)?;
    enc.commit()?.wait()?;
    forks(&device)?;
    gated_products(&device)?;
    collectives(&launches)?;
    let seen = launches.kernels.lock().unwrap();
    for gating in [1, 2] {
        let part = format!("(\"GATING\", UInt({gating}))");
        for file in ["linear_gemv_affine_int8.cu/", "linear_skinny_dense_tma.cu/"] {
            assert!(seen.iter().any(|key| key.starts_with(file) && key.contains(&part)), "{file}: {part}");
        }
    }
    let compiled: HashSet<&str> = seen.iter().filter_map(|key| key.split('/').next()).collect();
    println!("{} kernels of {} files", seen.len(), compiled.len());
    for name in kernel_files(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda"))) {
        assert!(compiled.contains(name.as_str()), "{name}: no kernel of it was compiled");
    }
    Ok(())
}

#[test]
fn collectives_compile() -> Result<()> {
    let Some((_, launches)) = device(Model::A100) else { return Ok(()) };
    collectives(&launches)
}

/// Messages of all kinds between two, and between more ranks.
fn collectives(launches: &Launches) -> Result<()> {
    for ranks in [2, 4, 8] {
        let devices: Vec<Device> = (0..ranks).map(|_| gpu::cuda_device(launches.clone())).collect();
        let group = Device::group(&devices)?;
        let mut enc = group.encoder()?;
        for dtype in FLOATS {
            // Small and large, aligned and not.
            for elements in [5376, 5377, 1 << 20, (1 << 20) + 1] {
                let x = zeros(&group, dtype, &[elements])?;
                let out = zeros(&group, DType::BF16, &[elements])?;
                ops::all_reduce(&mut enc, &AllReduce::new(&x, &out))?;
                ops::all_reduce(&mut enc, &AllReduce::new(&x, &x))?;
            }
        }
        for (dtype, columns) in [(DType::F32, 64), (DType::F32, 6), (DType::U32, 1), (DType::F16, 1), (DType::U8, 3)] {
            let (x, out) = (zeros(&group, dtype, &[3, columns])?, zeros(&group, dtype, &[3, columns * ranks])?);
            ops::all_gather(&mut enc, &AllGather::new(&x, &out))?;
        }
        merges(&group, &mut enc)?;
        summed_norms(&group, &mut enc)?;
        for codec in [Codec::BF16, Codec::tq(4), Codec::tq_centred(4)] {
            divided_positions(&group, &mut enc, codec)?;
        }
        enc.commit()?.wait()?;
    }
    Ok(())
}

/// Norms of sums over ranks: rows of a warp and of a block, and those that two kernels compute.
fn summed_norms(group: &Device, enc: &mut Encoder) -> Result<()> {
    for (dtype, rows, dim) in [
        (DType::BF16, 1, 5376),
        (DType::F16, 2, 64),
        (DType::BF16, 3, 2880),
        (DType::BF16, 64, 5376),
        (DType::BF16, 1, 20000),
        (DType::F16, 1, 65),
        (DType::F32, 1, 256),
    ] {
        let [x, h, out, next_out] = [(); 4].map(|()| zeros(group, dtype, &[rows, dim]));
        let (x, h, out, next_out) = (x?, h?, out?, next_out?);
        let args = RmsNorm::new(&x, 1e-6, &out).sum_ranks(true);
        ops::rms_norm(enc, &args.residual(Residual::Before { residual: &h, sum: &h }))?;
        let next = [NextNorm::new(&next_out)];
        ops::rms_norm(enc, &args.residual(Residual::After(&h)).next(&next))?;
    }
    Ok(())
}

/// Results of all ranks, in rows that are aligned and rows that are not.
fn merges(group: &Device, enc: &mut Encoder) -> Result<()> {
    let heads = 2 * group.ranks();
    for (dim, dtype, has_sinks) in [(64, DType::F32, false), (128, DType::BF16, true), (65, DType::F16, true)] {
        let (x, ends) = (zeros(group, DType::F32, &[3, heads, dim])?, zeros(group, DType::F32, &[3, heads])?);
        let (sinks, out) = (zeros(group, DType::F32, &[2])?, zeros(group, dtype, &[3, 2, dim])?);
        ops::merge_attention(enc, &MergeAttention::new(&x, &ends, &out).sinks(has_sinks.then_some(&sinks)))?;
    }
    Ok(())
}

/// A layer whose positions the ranks divide: single tokens and a prompt.
fn divided_positions(group: &Device, enc: &mut Encoder, codec: Codec) -> Result<()> {
    let layer = CacheLayer::new(1, 128, codec).position_ranks(group.ranks());
    let spec = PoolSpec::new(vec![layer], 0).page_tokens(16 * group.ranks()).room_for(2, 512, 512)?;
    let pool = KvPool::new(group, &spec)?;
    for (size, tokens) in [(StepSize::decode(2, 512), 2), (StepSize::decode(1, 512).tokens(64, 64), 64)] {
        let (step, layer) = (pool.reserve_step(size)?, pool.layer(0)?);
        let new = |heads| zeros(group, DType::BF16, &[tokens, heads, 128]);
        let (q, k, v) = (new(8)?, new(1)?, new(1)?);
        let write = NormRopeWrite::new(&q, &k, &v, &step, layer, &q).rope(Some(Rope::new(1e4, 64)));
        let q = ops::norm_rope_write(enc, &write)?;
        let (out, ends) = (zeros(group, DType::F32, &[tokens, 8, 128])?, zeros(group, DType::F32, &[tokens, 8])?);
        ops::attend(enc, &Attend::new(q, layer, &step, &out).ends(Some(&ends)))?;
        let own = zeros(group, DType::BF16, &[tokens, 8 / group.ranks(), 128])?;
        ops::merge_attention(enc, &MergeAttention::new(&out, &ends, &own))?;
    }
    Ok(())
}

/// The names of the kernel files below a folder.
fn kernel_files(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            names.extend(kernel_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "cu") {
            names.push(path.file_name().expect("a name").to_str().expect("an ASCII name").to_string());
        }
    }
    names
}

/// Kernels that few tokens and small matrices do not select: encoding by eights, two attention blocks per
/// multiprocessor, and the tilings of products of codes.
#[test]
fn kernels_of_large_shapes_compile() -> Result<()> {
    let Some((device, launches)) = device(Model::H200) else { return Ok(()) };
    let mut enc = device.encoder()?;
    for (head_dim, k, v) in [
        (128, Codec::tq(4), Codec::tq(8)),
        (256, Codec::tq(5), Codec::tq(5)),
        (512, Codec::tq(6), Codec::BF16),
        (128, Codec::tq(3), Codec::tq(2)),
        (512, Codec::tq(2), Codec::tq(3)),
    ] {
        for dtype in [DType::F16, DType::BF16] {
            write_many(&device, &mut enc, dtype, head_dim, k, v)?;
        }
    }
    for head_dim in [128, 256] {
        attend_many(&device, &mut enc, head_dim)?;
    }
    for (bits, group, inputs) in
        [(4, 32, 96), (4, 128, 256), (6, 64, 192), (6, 32, 96), (8, 32, 96), (8, 64, 192), (4, 64, 4096), (4, 64, 5376)]
    {
        affine_products(&device, &mut enc, bits, group, inputs)?;
    }
    for format in BlockFormat::ALL {
        block_products(&device, &mut enc, format)?;
    }
    for format in FloatFormat::ALL {
        float_products(&device, &mut enc, format)?;
    }
    for bits in [2, 3, 5] {
        let codes = zeros(&device, DType::U32, &[OUTPUTS, INPUTS * bits / 32])?;
        let scales = zeros(&device, DType::BF16, &[OUTPUTS, INPUTS / 64])?;
        let affine = Affine { codes: &codes, scales: &scales, biases: &scales, bits: bits as u32, group: 64 };
        products_of(&device, &mut enc, affine.into())?;
    }
    experts_of_blocks(&device, &mut enc)?;
    enc.commit()?.wait()?;
    let seen = launches.kernels.lock().unwrap();
    println!("{} kernels", seen.len());
    for part in [
        "kv_write.cu/",
        "linear_gemv_affine_int8.cu/",
        "linear_gemv_affine_tma.cu/",
        "linear_skinny_affine4_tma.cu/",
        "linear_skinny_blocks_mma.cu/",
    ] {
        assert!(seen.iter().any(|key| key.starts_with(part)), "no kernel of {part} among {seen:?}");
    }
    assert!(seen.iter().any(|key| key.contains("\"TILES\", Bool(true)")), "nothing is encoded by eights: {seen:?}");
    for constant in ["\"BLOCKS_PER_MULTIPROCESSOR\", UInt(2)", "\"CLUSTER\", UInt(3)"] {
        assert!(seen.iter().any(|key| key.contains(constant)), "no kernel with {constant}: {seen:?}");
    }
    Ok(())
}

/// No clusters, no bulk copies, other waits, no warpgroup products, less shared memory.
#[test]
fn kernels_compile_for_gpus_before_hopper() -> Result<()> {
    let Some((device, launches)) = device(Model::A100) else { return Ok(()) };
    let mut enc = device.encoder()?;
    attention(&device, &mut enc, false)?;
    for bits in [4, 6, 8] {
        affine_products(&device, &mut enc, bits, 64, 4096)?;
    }
    block_products(&device, &mut enc, BlockFormat::Q6_K)?;
    float_products(&device, &mut enc, FloatFormat::Mxfp8)?;
    FLOATS.into_iter().try_for_each(|dtype| products(&device, &mut enc, dtype))?;
    write_many(&device, &mut enc, DType::BF16, 256, Codec::tq(4), Codec::tq(8))?;
    enc.commit()?.wait()?;
    let seen = launches.kernels.lock().unwrap();
    println!("{} kernels", seen.len());
    for part in [
        "attend_generic.cu/",
        "attend_decode.cu/",
        "attend_quantised.cu/",
        "attend_prefill.cu/",
        "linear_gemv_affine_int8.cu/",
        "linear_gemm_affine.cu/linear_gemm_affine [",
        "kv_write.cu/",
    ] {
        assert!(seen.iter().any(|key| key.starts_with(part)), "no kernel of {part} among {seen:?}");
    }
    let later = [
        "linear_gemv_affine_tma.cu/",
        "linear_skinny_affine4_tma.cu/",
        "linear_skinny_dense_tma.cu/",
        "(\"CLUSTER\", UInt(8))",
        "(\"BULK\", Bool(true))",
        "(\"WARPGROUP_PRODUCTS\", Bool(true))",
    ];
    assert!(!seen.iter().any(|key| later.iter().any(|part| key.contains(part))), "{seen:?}");
    Ok(())
}

/// Products of many rows by codes and by experts' bf16 weights, without wgmma and with 99 KiB of shared memory.
#[test]
fn products_of_many_rows_compile_for_gpus_of_little_shared_memory() -> Result<()> {
    for model in [Model::Rtx4090, Model::Rtx5090] {
        let Some((device, launches)) = device(model) else { return Ok(()) };
        let mut enc = device.encoder()?;
        let dtypes = if model == Model::Rtx4090 { &FLOATS[..] } else { &FLOATS[2..] };
        // Enough tiles for the kernels with 128 rows.
        let (n, k, rows) = (4096, 128, 999);
        let codes = zeros(&device, DType::U32, &[n, k / 8])?;
        let scales = zeros(&device, DType::BF16, &[n, k / 64])?;
        for &dtype in dtypes {
            products(&device, &mut enc, dtype)?;
            let (x, out) = (zeros(&device, dtype, &[rows, k])?, zeros(&device, DType::F32, &[rows, n])?);
            let weight = Affine { codes: &codes, scales: &scales, biases: &scales, bits: 4, group: 64 };
            ops::linear(&mut enc, &Linear::new(&x, weight, &out))?;
        }
        enc.commit()?.wait()?;
        let seen = launches.kernels.lock().unwrap();
        println!("{model:?}: {} kernels", seen.len());
        for rows in [64, 128] {
            let part = format!("(\"ROWS\", UInt({rows}))");
            assert!(
                seen.iter()
                    .any(|key| key.starts_with("linear_gemm_affine.cu/linear_gemm_affine [") && key.contains(&part))
            );
        }
    }
    Ok(())
}

/// Attention on GPUs with 99 KiB of shared memory per block: two buffers, tiles of 16 keys, few copies of tables; small
/// tiles of prompts.
#[test]
fn attention_compiles_for_gpus_of_little_shared_memory() -> Result<()> {
    let (tq, f16, bf16) = (Codec::tq, DType::F16, DType::BF16);
    let cases: [Attention; 6] = [
        (128, tq(8), Codec::F32, bf16, bf16, 2, 1),
        (256, Codec::F32, Codec::F32, bf16, bf16, 8, 40),
        (256, tq(8), Codec::F16, f16, f16, 1, 1),
        (256, tq(8), tq(4), bf16, bf16, 1, 9),
        (512, Codec::F32, Codec::F32, DType::F32, DType::F32, 8, 1),
        (512, Codec::F32, tq(8), DType::F32, DType::F32, 1, 1),
    ];
    for model in [Model::Rtx4090, Model::Rtx5090] {
        let Some((device, launches)) = device(model) else { return Ok(()) };
        let mut enc = device.encoder()?;
        for (i, case) in cases.into_iter().enumerate() {
            if model == Model::Rtx4090 || i == 1 {
                attend(&device, &mut enc, Some("attend_generic"), 99, case, i % 2 == 1)?;
            }
        }
        let mut pairs = [3, 2, 5, 4, 8, 6].map(|k| (k, k)).to_vec();
        pairs.extend([(8, 4), (2, 8), (3, 5), (4, 6), (6, 3)]);
        for (i, (k, v)) in pairs.into_iter().enumerate() {
            for head_dim in [128, 256, 512] {
                let case = (head_dim, tq(k), tq(v), bf16, bf16, 1 + i % 8, 1);
                attend(&device, &mut enc, Some("attend_quantised"), 9999, case, i % 3 == 1)?;
            }
        }
        for head_dim in [128, 512] {
            let case = (head_dim, Codec::tq_centred(8), Codec::tq_centred(4), bf16, bf16, 4, 1);
            attend_over_pages(&device, &mut enc, ("attend_quantised", 9999, None, case), 64, None)?;
        }
        for (i, case) in PROMPTS.into_iter().enumerate() {
            attend(&device, &mut enc, Some("attend_prefill"), 99, case, i % 2 == 1)?;
        }
        if model == Model::Rtx5090 {
            // In clusters.
            for capacity in [99, 1500] {
                let case = (128, tq(8), tq(4), bf16, bf16, 4, 1);
                attend(&device, &mut enc, Some("attend_quantised"), capacity, case, false)?;
            }
            attend(&device, &mut enc, None, 9999, (128, Codec::BF16, Codec::BF16, bf16, bf16, 4, 1), false)?;
            attend(&device, &mut enc, None, 99, (128, tq(4), tq(4), bf16, bf16, 4, 1), false)?;
        }
        enc.commit()?.wait()?;
        let seen = launches.kernels.lock().unwrap();
        println!("{model:?}: {} kernels", seen.len());
        assert!(seen.iter().any(|key| key.contains("(\"BUFFERS\", UInt(2))")), "{seen:?}");
    }
    Ok(())
}

/// Head sizes that only attend_generic supports, in decode and in prompts, and the kernels that store their keys.
#[test]
fn kernels_of_other_head_sizes_compile() -> Result<()> {
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::BF16);
    let cases: [Attention; 8] = [
        (80, Codec::BF16, Codec::BF16, bf16, bf16, 1, 1),
        (80, Codec::F32, Codec::F32, f32, f32, 1, 40),
        (96, Codec::F16, Codec::F16, f16, f16, 1, 1),
        (96, Codec::BF16, Codec::F32, bf16, bf16, 4, 99),
        (112, Codec::F32, Codec::F16, f32, bf16, 2, 1),
        (112, Codec::BF16, Codec::BF16, bf16, bf16, 8, 99),
        (192, Codec::F32, Codec::F32, f32, f32, 3, 99),
        (192, Codec::BF16, Codec::BF16, bf16, bf16, 16, 9),
    ];
    for model in [Model::H200, Model::Rtx4090] {
        let Some((device, launches)) = device(model) else { return Ok(()) };
        let mut enc = device.encoder()?;
        for (i, case) in cases.into_iter().enumerate() {
            if model == Model::H200 || i % 4 > 1 {
                attend(&device, &mut enc, Some("attend_generic"), 9999, case, i % 3 == 1)?;
            }
        }
        if model == Model::H200 {
            caches_over_pages(&device, &mut enc, 16, 80, Codec::F32, DType::F16)?;
        }
        enc.commit()?.wait()?;
        println!("{model:?}: {} kernels", launches.kernels.lock().unwrap().len());
    }
    Ok(())
}

/// All kernels that use page tables, with pages of several sizes.
#[test]
fn kernels_over_pages_compile() -> Result<()> {
    for model in [Model::H200, Model::A100] {
        let Some((device, launches)) = device(model) else { return Ok(()) };
        let mut enc = device.encoder()?;
        attention_over_pages(&device, &mut enc, model)?;
        if model == Model::H200 {
            for (i, codec) in [Codec::F32, Codec::BF16, Codec::tq(4), Codec::tq(5)].into_iter().enumerate() {
                caches_over_pages(&device, &mut enc, 16 << i, 128, codec, DType::F16)?;
            }
            // Pages are sealed in tiles, and by rows.
            let shapes = [
                (64, DType::F16),
                (128, DType::BF16),
                (256, DType::F16),
                (512, DType::BF16),
                (8, DType::F32),
                (4096, DType::F16),
            ];
            for (i, (bits, (head_dim, dense))) in BITS.into_iter().zip(shapes).enumerate() {
                caches_over_pages(&device, &mut enc, 16 << (i % 5), head_dim, Codec::tq_centred(bits), dense)?;
            }
            for head_dim in [128, 512] {
                caches_over_pages(&device, &mut enc, 256, head_dim, Codec::tq_centred(4), DType::BF16)?;
            }
        }
        enc.commit()?.wait()?;
        let seen = launches.kernels.lock().unwrap();
        println!("{model:?}: {} kernels", seen.len());
        assert!(!seen.iter().any(|key| key.contains("(\"PAGE_SHIFT\", UInt(0))")), "{seen:?}");
    }
    Ok(())
}

/// A kernel, the longest context, the window, and a call that must select the kernel.
type AttentionOverPages = (&'static str, usize, Option<usize>, Attention);

fn attention_over_pages(device: &Device, enc: &mut Encoder, model: Model) -> Result<()> {
    let (tq, centred, bf16, f16) = (Codec::tq, Codec::tq_centred, DType::BF16, DType::F16);
    let [dense_bf16, dense_f16] = [Codec::BF16, Codec::F16];
    let cases: [AttentionOverPages; 42] = [
        ("attend_generic", 9999, None, (128, tq(2), tq(3), bf16, DType::F32, 4, 1)),
        // Around page means: decode and prompts.
        ("attend_generic", 9999, None, (128, centred(4), centred(3), DType::F32, DType::F32, 4, 1)),
        ("attend_generic", 9999, Some(300), (512, centred(2), centred(8), DType::F32, DType::F32, 2, 9)),
        ("attend_generic", 9999, None, (64, centred(3), dense_f16, f16, f16, 1, 99)),
        ("attend_generic", 9999, None, (256, dense_bf16, centred(6), bf16, bf16, 3, 1)),
        ("attend_generic", 999, None, (128, centred(5), centred(4), f16, bf16, 8, 999)),
        ("attend_generic", 9999, None, (64, Codec::F32, dense_f16, DType::F32, DType::F32, 1, 1)),
        ("attend_generic", 99, Some(40), (256, tq(5), dense_bf16, f16, f16, 2, 9)),
        ("attend_generic", 9999, None, (512, tq(8), tq(6), f16, DType::F32, 3, 9)),
        ("attend_decode", 9999, None, (128, dense_bf16, dense_bf16, bf16, bf16, 4, 1)),
        ("attend_decode", 3000, Some(2000), (256, dense_f16, dense_f16, f16, bf16, 8, 1)),
        ("attend_decode", 9999, None, (512, dense_bf16, dense_bf16, bf16, bf16, 8, 1)),
        ("attend_short", 9999, Some(1024), (128, dense_bf16, dense_bf16, bf16, bf16, 4, 1)),
        ("attend_short", 99, None, (256, dense_f16, dense_f16, f16, f16, 2, 1)),
        ("attend_quantised", 9999, None, (128, tq(4), tq(4), bf16, bf16, 4, 1)),
        ("attend_quantised", 1500, None, (256, tq(5), tq(5), bf16, bf16, 2, 1)),
        ("attend_quantised", 9999, None, (512, tq(8), tq(8), f16, bf16, 8, 1)),
        ("attend_short_quantised", 9999, Some(512), (128, tq(8), tq(6), DType::F32, f16, 3, 1)),
        ("attend_short_quantised", 99, None, (512, tq(5), tq(5), bf16, bf16, 8, 1)),
        ("attend_prefill", 9999, None, (128, dense_bf16, dense_bf16, bf16, bf16, 4, 9999)),
        ("attend_prefill", 9999, Some(99), (256, dense_bf16, dense_bf16, bf16, f16, 3, 9999)),
        ("attend_prefill", 9999, None, (512, dense_f16, dense_f16, f16, f16, 8, 9999)),
        // Decoded first.
        ("attend_prefill", 9999, None, (64, tq(2), centred(3), bf16, bf16, 4, 99)),
        ("attend_prefill", 9999, None, (256, tq(8), dense_bf16, bf16, f16, 4, 99)),
        ("attend_prefill", 9999, Some(99), (512, tq(6), tq(5), bf16, bf16, 8, 9999)),
        // Decode around page means, on both sides or one.
        ("attend_quantised", 9999, None, (128, centred(4), centred(4), bf16, bf16, 9, 1)),
        ("attend_quantised", 1500, None, (256, centred(5), centred(5), f16, bf16, 4, 1)),
        ("attend_quantised", 9999, Some(500), (512, centred(8), centred(8), bf16, f16, 8, 1)),
        ("attend_quantised", 999, None, (512, tq(8), centred(4), bf16, bf16, 8, 1)),
        ("attend_quantised", 9999, None, (256, centred(6), tq(6), f16, bf16, 2, 1)),
        ("attend_quantised", 99, Some(40), (128, centred(8), centred(6), bf16, bf16, 15, 1)),
        ("attend_short_quantised", 999, None, (128, centred(4), centred(4), bf16, bf16, 4, 1)),
        ("attend_short_quantised", 999, Some(500), (128, centred(8), centred(6), bf16, bf16, 8, 1)),
        ("attend_short_quantised", 9999, Some(40), (512, centred(5), centred(5), f16, bf16, 8, 1)),
        ("attend_short_quantised", 99, None, (256, tq(8), centred(6), bf16, f16, 2, 1)),
        // With 2 and 3 bits.
        ("attend_quantised", 9999, None, (128, centred(2), centred(3), bf16, bf16, 4, 1)),
        ("attend_quantised", 9999, None, (256, tq(3), centred(2), bf16, bf16, 8, 1)),
        ("attend_quantised", 9999, None, (512, centred(3), centred(3), f16, bf16, 8, 1)),
        ("attend_short_quantised", 999, None, (64, centred(2), centred(4), bf16, bf16, 4, 1)),
        ("attend_short_quantised", 999, Some(40), (256, centred(2), tq(3), bf16, bf16, 8, 1)),
        ("attend_quantised", 999, None, (128, centred(2), tq(2), bf16, bf16, 1, 1)),
        // The part over sealed pages has the precision of the queries.
        ("attend_generic", 9999, None, (256, centred(6), tq(6), DType::F32, bf16, 2, 1)),
    ];
    for (i, case) in cases.into_iter().enumerate() {
        // Before Hopper: decode without clusters and bulk copies, prompts without warpgroup products.
        if model != Model::H200 && ![1, 6, 9, 14, 19, 20, 21, 23, 25].contains(&i) {
            continue;
        }
        attend_over_pages(device, enc, case, 16 << (i % 5), (i % 2 == 1).then_some(30.0))?;
    }
    Ok(())
}

fn attend_over_pages(
    device: &Device,
    enc: &mut Encoder,
    case: AttentionOverPages,
    page_tokens: usize,
    softcap: Option<f32>,
) -> Result<()> {
    let (kernel, longest, window, (head_dim, k, v, q, out, group, tokens)) = case;
    let kv_heads = 2;
    let layer = CacheLayer::new(kv_heads, head_dim, k).v(v).window(window);
    let layer = layer.dense(if q == DType::F32 { DType::BF16 } else { q });
    let has_sealed_pages = |page_tokens: usize| !layer.seals() || longest > 3 * page_tokens;
    let page_tokens = (0..5).map(|i| page_tokens >> i).find(|&tokens| has_sealed_pages(tokens)).unwrap_or(16);
    let pool = KvPool::new(device, &PoolSpec::new(vec![layer], 64 << 20).page_tokens(page_tokens))?;
    let step = pool.reserve_step(StepSize::decode(1, longest).tokens(tokens, tokens))?;
    let shape = [tokens, kv_heads * group, head_dim];
    let (q, out) = (zeros(device, q, &shape)?, zeros(device, out, &shape)?);
    let args = Attend::new(&q, pool.layer(0)?, &step, &out).scale(1.0).softcap(softcap);
    let explained = ops::explain(&args, device)?;
    if layer.seals() {
        // The kernel for sealed pages. The kernels for dense pages do not depend on the codec.
        let part = format!("sealed pages: {kernel} (");
        assert!(explained.reason.contains(&part), "{case:?}: {explained:?}");
    } else {
        assert_eq!(explained.kernel, kernel, "{case:?}: {explained:?}");
    }
    ops::attend(enc, &args)
}

fn caches_over_pages(
    device: &Device,
    enc: &mut Encoder,
    page_tokens: usize,
    head_dim: usize,
    codec: Codec,
    dense: DType,
) -> Result<()> {
    let (kv_heads, order) = (8, HeadOrder::TokenMajor);
    let v = if head_dim == 256 { codec } else { Codec::BF16 };
    let layer = CacheLayer::new(kv_heads, head_dim, codec).v(v).dense(dense);
    let seals = layer.seals();
    let pool = KvPool::new(device, &PoolSpec::new(vec![layer], 64 << 20).page_tokens(page_tokens))?;
    let layer = pool.layer(0)?;
    for (dtype, tokens) in [(DType::F16, 1), (DType::F32, 2), (DType::BF16, 600)] {
        let step = pool.reserve_step(StepSize::decode(1, 999).tokens(tokens, tokens))?;
        let kv = zeros(device, dtype, &[tokens, kv_heads, head_dim])?;
        ops::kv_write(enc, &KvWrite::new(&kv, &kv, &step, layer).order(order))?;
        for (side, keep_rotated) in [(KvSide::K, !seals), (KvSide::K, false), (KvSide::V, false)] {
            let (sequence, start, step) = (0, 5, Some(&step));
            ops::kv_read(
                enc,
                &KvRead::new(layer, side, &kv)
                    .sequence(sequence)
                    .step(step)
                    .start(start)
                    .keep_rotated(keep_rotated)
                    .order(order),
            )?;
        }
        let q = zeros(device, dtype, &[tokens, 2 * kv_heads, head_dim])?;
        let norm = Some(HeadNorm::new(1e-6));
        let args = NormRopeWrite::new(&q, &kv, &kv, &step, layer, &q).q_norm(norm).k_norm(norm).v_norm(norm);
        ops::norm_rope_write(enc, &args)?;
    }
    Ok(())
}

fn write_many(device: &Device, enc: &mut Encoder, dtype: DType, head_dim: usize, k: Codec, v: Codec) -> Result<()> {
    let (tokens, kv_heads, order) = (600, 8, HeadOrder::HeadMajor);
    let spec = LayerSpec::new(kv_heads, head_dim, tokens, k).v(v).order(order);
    let layer = KvLayer::new(device, spec)?;
    let step = Step::new(device, 1, &(0..tokens as u32).map(|p| (0, p)).collect::<Vec<_>>())?;
    let new = zeros(device, dtype, &[tokens, kv_heads, head_dim])?;
    let order = HeadOrder::TokenMajor;
    ops::kv_write(enc, &KvWrite::new(&new, &new, &step, &layer).order(order))
}

/// One token of each of 34 sequences.
fn attend_many(device: &Device, enc: &mut Encoder, head_dim: usize) -> Result<()> {
    let (sequences, kv_heads) = (34, 8);
    let layer = KvLayer::new(device, LayerSpec::new(kv_heads, head_dim, 64, Codec::tq(4)).sequences(sequences))?;
    let step = Step::new(device, sequences, &(0..sequences as u32).map(|s| (s, 0)).collect::<Vec<_>>())?;
    let [q, out] = [0; 2].map(|_| zeros(device, DType::BF16, &[sequences, 2 * kv_heads, head_dim]));
    ops::attend(enc, &Attend::new(&q?, &layer, &step, &out?))
}

/// One row and two, by few outputs and many, and by experts.
fn affine_products(device: &Device, enc: &mut Encoder, bits: usize, group: usize, inputs: usize) -> Result<()> {
    let dtype = DType::BF16;
    for outputs in [40, 2128, 9001, 43_008] {
        let codes = zeros(device, DType::U32, &[outputs, inputs * bits / 32])?;
        let scales = zeros(device, dtype, &[outputs, inputs / group])?;
        let weight =
            Weight::Affine(Affine { codes: &codes, scales: &scales, biases: &scales, bits: bits as u32, group });
        for rows in [1, 2, 12, 20, 50, 100] {
            let (x, out) = (zeros(device, dtype, &[rows, inputs])?, zeros(device, dtype, &[rows, outputs])?);
            ops::linear(enc, &Linear::new(&x, weight, &out))?;
        }
    }
    let codes = zeros(device, DType::U32, &[4, 64, inputs * bits / 32])?;
    let scales = zeros(device, dtype, &[4, 64, inputs / group])?;
    let weight = Weight::Affine(Affine { codes: &codes, scales: &scales, biases: &scales, bits: bits as u32, group });
    for tokens in [1, 8] {
        let (x, ids) = (zeros(device, dtype, &[tokens, inputs])?, zeros(device, DType::U32, &[tokens, 2])?);
        let out = zeros(device, dtype, &[2 * tokens, 64])?;
        let experts = Some(Experts::new(&ids));
        ops::linear(enc, &Linear::new(&x, weight, &out).experts(experts))?;
    }
    Ok(())
}

/// One row and many, and rows of a table.
fn block_products(device: &Device, enc: &mut Encoder, format: BlockFormat) -> Result<()> {
    let row = format.row_bytes(INPUTS).expect("whole blocks");
    let data = zeros(device, DType::U8, &[OUTPUTS, row])?;
    products_of(device, enc, Blocks::new(&data, format).into())
}

fn float_products(device: &Device, enc: &mut Encoder, format: FloatFormat) -> Result<()> {
    let codes = zeros(device, DType::U8, &[OUTPUTS, INPUTS * format.bits() / 8])?;
    let scales = zeros(device, DType::U8, &[OUTPUTS, INPUTS / format.group()])?;
    products_of(device, enc, ScaledFloats::new(&codes, &scales, format).into())
}

/// Few rows of experts, and many.
fn experts_of_blocks(device: &Device, enc: &mut Encoder) -> Result<()> {
    let data = zeros(device, DType::U8, &[2, OUTPUTS, BlockFormat::Q4_K.row_bytes(INPUTS).expect("whole blocks")])?;
    for tokens in [1, 9, 60] {
        let (x, out) =
            (zeros(device, DType::BF16, &[tokens, INPUTS])?, zeros(device, DType::BF16, &[2 * tokens, OUTPUTS])?);
        let ids = zeros(device, DType::U32, &[tokens, 2])?;
        let args = Linear::new(&x, Blocks::new(&data, BlockFormat::Q4_K), &out);
        ops::linear(enc, &args.experts(Some(Experts::new(&ids))))?;
    }
    Ok(())
}

const INPUTS: usize = 512;
const OUTPUTS: usize = 40;

fn products_of(device: &Device, enc: &mut Encoder, weight: Weight) -> Result<()> {
    let (dtype, inputs, outputs) = (DType::BF16, INPUTS, OUTPUTS);
    for rows in [1, 50] {
        let (x, out) = (zeros(device, dtype, &[rows, inputs])?, zeros(device, dtype, &[rows, outputs])?);
        ops::linear(enc, &Linear::new(&x, weight, &out))?;
    }
    let (ids, out) = (zeros(device, DType::U32, &[3])?, zeros(device, dtype, &[3, inputs])?);
    ops::embed(enc, &Embed::new(weight, &ids, &out))
}

fn zeros(device: &Device, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    Tensor::zeros(device, dtype, shape)
}

/// The operations with a state per sequence.
fn recurrent(device: &Device, enc: &mut Encoder, dtype: DType) -> Result<()> {
    let runs = StateRuns::new(device, &[(0, 0, 3)])?;
    for (taps, state, has_bias) in [(3, dtype, true), (4, DType::F32, false)] {
        let (x, out) = (zeros(device, dtype, &[3, 64])?, zeros(device, dtype, &[3, 64])?);
        let (weight, bias) = (zeros(device, dtype, &[64, taps])?, zeros(device, dtype, &[64])?);
        let state = StateSlots::new(&zeros(device, state, &[1, taps - 1, 64])?)?;
        let args = CausalConv::new(&x, &weight, &state, &runs, &out).bias(has_bias.then_some(&bias));
        ops::causal_conv(enc, &args.silu(!has_bias))?;
    }
    for dim in [32, 64, 128, 256] {
        let (qkv, gate) = (zeros(device, dtype, &[3, 4 * dim])?, zeros(device, dtype, &[3, 2])?);
        let rate = zeros(device, DType::F32, &[2])?;
        let state = StateSlots::new(&zeros(device, DType::F32, &[1, 2, dim, dim])?)?;
        let out = zeros(device, dtype, &[3, 2, dim])?;
        let args = DeltaRule::new(&qkv, [&gate, &gate], [&rate, &rate], &state, &runs, &out);
        ops::delta_rule(enc, &args)?;
        // Long runs have another kernel.
        let (starts, slots, past) = (runs.starts().clone(), runs.slots().clone(), runs.past().clone());
        let runs = StateRuns::from_tensors(starts, slots, past, runs.after().clone(), 100);
        let args = DeltaRule::new(&qkv, [&gate, &gate], [&rate, &rate], &state, &runs, &out);
        ops::delta_rule(enc, &args)?;
    }
    Ok(())
}

/// Rows that a block shares: a norm with the maximum of next norms.
fn norms_of_long_rows(device: &Device, enc: &mut Encoder, dtype: DType, dim: usize) -> Result<()> {
    let new = || zeros(device, dtype, &[3, dim]);
    let weight = zeros(device, dtype, &[dim])?;
    let (x, other, out, next_outs) = (new()?, new()?, new()?, [new()?, new()?, new()?]);
    let next = next_outs.each_ref().map(|out| NextNorm::new(out).weight(Some(&weight)));
    let residual = Residual::Normed { residual: &other, weight: Some(&weight) };
    for residual in [residual, Residual::After(&other)] {
        let args = RmsNorm::new(&x, 1e-6, &out).weight(Some(&weight)).residual(residual);
        ops::rms_norm(enc, &args.next(&next))?;
    }
    let (terms, combine) = (zeros(device, dtype, &[12, dim])?, zeros(device, DType::F32, &[3, 4])?);
    let args = RmsNorm::new(&terms, 1e-6, &out).combine(Some(&combine)).weight(Some(&weight));
    ops::rms_norm(enc, &args.residual(residual).gate(Some(&other)))?;
    Ok(())
}

fn elements(device: &Device, enc: &mut Encoder, dtype: DType) -> Result<()> {
    // Aligned rows, and rows that are not.
    for dim in [64, 67] {
        let x = zeros(device, dtype, &[3, dim])?;
        let (out, other) = (zeros(device, DType::BF16, &[3, dim])?, zeros(device, dtype, &[3, dim])?);
        ops::softcap(enc, &Softcap::new(&x, 30.0, &out))?;
        let (groups, places) = (zeros(device, DType::U32, &[1, 3])?, zeros(device, DType::U32, &[70])?);
        for (groups, tokens) in [(None, 3), (Some(&groups), 1)] {
            let spread = zeros(device, DType::F32, &[tokens, 70])?;
            ops::spread(enc, &ops::Spread::new(&x, &places, f32::NEG_INFINITY, &spread).groups(groups))?;
        }
        let weight = zeros(device, dtype, &[dim])?;
        let residuals = [
            Residual::None,
            Residual::After(&other),
            Residual::Normed { residual: &other, weight: Some(&weight) },
            Residual::Before { residual: &other, sum: &other },
        ];
        let next_outs = [zeros(device, dtype, &[3, dim])?, zeros(device, DType::F32, &[3, dim])?];
        let next = [NextNorm::new(&next_outs[0]).weight(Some(&weight)), NextNorm::new(&next_outs[1])];
        for (count, residual) in [0, 2, 1, 0].into_iter().zip(residuals) {
            let args = RmsNorm::new(&x, 1e-6, &out).weight(Some(&weight)).residual(residual);
            ops::rms_norm(enc, &args.next(&next[..count]))?;
        }
        ops::rms_norm(enc, &RmsNorm::new(&x, 1e-6, &out).weight(Some(&weight)).gate(Some(&other)))?;
        norms_of_long_rows(device, enc, dtype, 16 * dim)?;
        for activation in [
            Activation::GeluTanh,
            Activation::Silu,
            Activation::ClampedSwish,
            Activation::Sigmoid,
            Activation::Identity,
        ] {
            let (gate, up) = (Columns::from(&x), Columns::from(&other));
            ops::gate(enc, &Gate::new(gate, up, activation, &out))?;
        }
        let ids = zeros(device, DType::U32, &[3])?;
        ops::add(enc, &Add::new(&x, &other, &out))?;
        ops::add_bias(enc, &AddBias::new(&x, &weight, &out))?;
        let biases = zeros(device, dtype, &[2, dim])?;
        ops::add_bias(enc, &AddBias::new(&x, &biases, &out).experts(Some(&ids.reshape(&[3, 1])?)))?;
        recurrent(device, enc, dtype)?;
        ops::argmax(enc, &Argmax::new(&x, &ids))?;
        for (top_k, top_p) in [(0, 1.0), (5, 1.0), (5, 0.5)] {
            let (counter, seed) = (&ids.reshape(&[3])?, 1);
            let drawn = zeros(device, DType::U32, &[3])?;
            let args =
                Sample::new(&x, counter, &drawn).temperature(1.0).top_k(top_k).top_p(top_p).min_p(0.1).seed(seed);
            ops::sample(enc, &args)?;
        }
        let (counter, rows) = (zeros(device, DType::U32, &[3])?, zeros(device, DType::U32, &[3, 8])?);
        ops::sample(enc, &Sample::new(&x, &counter, &ids).rows(Some(&rows)))?;
        let weights = zeros(device, DType::F32, &[3, 2])?;
        let chosen = zeros(device, DType::U32, &[3, 2])?;
        ops::moe_route(enc, &MoeRoute::new(&x, &chosen, &weights))?;
        ops::moe_route(enc, &MoeRoute::new(&x, &chosen, &weights).normalise(false))?;
        // More choices than lanes of a warp.
        let (all, weights_of_all) = (zeros(device, DType::U32, &[3, 40])?, zeros(device, DType::F32, &[3, 40])?);
        let args = MoeRoute::new(&x, &all, &weights_of_all).normalise(dim % 2 == 0);
        ops::moe_route(enc, &args)?;
        let factors = zeros(device, DType::F32, &[dim])?;
        ops::moe_route(enc, &MoeRoute::new(&x, &chosen, &weights).expert_scale(Some(&factors)))?;
        for scores in [ExpertScores::Softmax, ExpertScores::Sigmoid] {
            let groups = (dim % 4 == 0).then_some(ExpertGroups { count: 4, chosen: 3 });
            for args in [MoeRoute::new(&x, &chosen, &weights), MoeRoute::new(&x, &all, &weights_of_all)] {
                let args = args.scores(scores).groups(groups).bias(Some(&factors));
                ops::moe_route(enc, &args.scale(2.0))?;
                ops::moe_route(enc, &args.bias(None).normalise(false).expert_scale(Some(&factors)))?;
            }
        }
        let rows = zeros(device, dtype, &[6, dim])?;
        ops::moe_combine(enc, &MoeCombine::new(&rows, &weights, &out))?;
        let (added, factors) = (zeros(device, dtype, &[3, dim])?, zeros(device, DType::F32, &[3, 1])?);
        for factors in [None, Some(&factors)] {
            let args = MoeCombine::new(&rows, &weights, &out).added(Some(&added)).added_weights(factors);
            ops::moe_combine(enc, &args)?;
        }
    }
    let rows = zeros(device, dtype, &[3, 512])?;
    let out = zeros(device, DType::F32, &[3, 512])?;
    for inverse in [false, true] {
        ops::hadamard(enc, &Hadamard::new(&rows, &out).inverse(inverse))?;
    }
    Ok(())
}

/// Products in a graph, followed by a gate: of another tensor, or of their halves.
fn gated_products(device: &Device) -> Result<()> {
    let (n, k, dtype) = (64, 320, DType::BF16);
    let (dense, codes) = (zeros(device, dtype, &[n, k])?, zeros(device, DType::U32, &[n, k / 8])?);
    let scales = zeros(device, dtype, &[n, k / 64])?;
    let affine = Affine { codes: &codes, scales: &scales, biases: &scales, bits: 4, group: 64 };
    let (x, product, other) =
        (zeros(device, dtype, &[1, k])?, zeros(device, dtype, &[1, n])?, zeros(device, dtype, &[1, n])?);
    let half = zeros(device, dtype, &[1, n / 2])?;
    for weight in [Weight::Dense(&dense), Weight::Affine(affine)] {
        for halves in [false, true] {
            Encoder::capture(device, |enc| {
                ops::linear(enc, &Linear::new(&x, weight, &product))?;
                let second = Columns { tensor: &product, start: n / 2 };
                let gate = if halves {
                    Gate::new(&product, second, Activation::Silu, &half)
                } else {
                    Gate::new(&product, &other, Activation::GeluTanh, &product)
                };
                ops::gate(enc, &gate)
            })?;
        }
    }
    Ok(())
}

fn products(device: &Device, enc: &mut Encoder, dtype: DType) -> Result<()> {
    let (n, k) = (64, 256);
    let dense = zeros(device, dtype, &[n, k])?;
    let ids = zeros(device, DType::U32, &[3])?;
    let embedded = zeros(device, DType::BF16, &[3, k])?;
    for bits in [0usize, 4, 6, 8] {
        let codes = zeros(device, DType::U32, &[n, k * bits.max(1) / 32])?;
        let scales = zeros(device, dtype, &[n, k / 64])?;
        let affine = Affine { codes: &codes, scales: &scales, biases: &scales, bits: bits as u32, group: 64 };
        let weight = if bits == 0 { Weight::Dense(&dense) } else { Weight::Affine(affine) };
        ops::embed(enc, &Embed::new(weight, &ids, &embedded))?;
        // Few rows, and many.
        for rows in [1, 2, 5, 20, 60] {
            let (x, out) = (zeros(device, dtype, &[rows, k])?, zeros(device, dtype, &[rows, n])?);
            ops::linear(enc, &Linear::new(&x, weight, &out))?;
        }
    }
    // Groups of 32 and codes of few bits. Each route accepts some of them, with results in the dtype of x and in f32.
    let kinds = match dtype {
        DType::F32 => [(4, 32), (5, 64)],
        DType::F16 => [(6, 32), (3, 64)],
        _ => [(8, 32), (2, 32)],
    };
    for (bits, group) in kinds {
        let codes = zeros(device, DType::U32, &[n, k * bits / 32])?;
        let scales = zeros(device, dtype, &[n, k / group])?;
        let affine = Affine { codes: &codes, scales: &scales, biases: &scales, bits: bits as u32, group };
        for out in [dtype, DType::F32] {
            let (x, out) = (zeros(device, dtype, &[60, k])?, zeros(device, out, &[60, n])?);
            ops::linear(enc, &Linear::new(&x, Weight::Affine(affine), &out))?;
        }
    }
    let experts = zeros(device, dtype, &[2, n, k])?;
    for tokens in [1, 30] {
        let (x, ids) = (zeros(device, dtype, &[tokens, k])?, zeros(device, DType::U32, &[tokens, 2])?);
        let out = zeros(device, dtype, &[2 * tokens, n])?;
        let choice = Some(Experts::new(&ids));
        let weight = Weight::Dense(&experts);
        ops::linear(enc, &Linear::new(&x, weight, &out).experts(choice))?;
    }
    Ok(())
}

fn caches(device: &Device, enc: &mut Encoder, codec: Codec) -> Result<()> {
    let (sequences, kv_heads, capacity, head_dim) = (1, 2, 8, 64);
    let order = HeadOrder::HeadMajor;
    let spec = LayerSpec::new(kv_heads, head_dim, capacity, codec).sequences(sequences).ring(true).order(order);
    let layer = KvLayer::new(device, spec)?;
    let step = Step::new(device, 1, &[(0, 0), (0, 1)])?;
    let order = HeadOrder::TokenMajor;
    let tables = zeros(device, DType::F32, &[16, 32])?;
    let factors = zeros(device, DType::F32, &[32])?;
    for dtype in FLOATS {
        let (kv, q) = (zeros(device, dtype, &[2, 2, 64])?, zeros(device, dtype, &[2, 4, 64])?);
        let (back, q_out) = (zeros(device, dtype, &[2, 2, 64])?, zeros(device, DType::BF16, &[2, 4, 64])?);
        ops::kv_write(enc, &KvWrite::new(&kv, &kv, &step, &layer).order(order))?;
        for keep_rotated in [false, true] {
            let (side, sequence, start) = (KvSide::K, 0, 0);
            let args = KvRead::new(&layer, side, &back)
                .sequence(sequence)
                .start(start)
                .keep_rotated(keep_rotated)
                .order(order);
            ops::kv_read(enc, &args)?;
        }
        let weight = zeros(device, dtype, &[64])?;
        let norm = Some(HeadNorm::new(1e-6).weight(Some(&weight)));
        let angles = [
            (Angles::Theta(1e4), None),
            (Angles::Theta(1e4), Some(&factors)),
            (Angles::Tables { cos: &tables, sin: &tables }, None),
        ];
        for (angles, freq_factors) in angles {
            for layout in [PairLayout::Halves, PairLayout::Interleaved] {
                let rope = Some(Rope::new(angles, 32).layout(layout).freq_factors(freq_factors));
                let rotate_q = codec.is_quantised();
                let args = NormRopeWrite::new(&q, &kv, &kv, &step, &layer, &q_out).q_norm(norm).k_norm(norm).rope(rope);
                ops::norm_rope_write(enc, &args)?;
                let positions = step.positions();
                let args = NormRope::new(&q, positions, &q_out).norm(norm).rope(rope).rotate(rotate_q).out_order(order);
                ops::norm_rope(enc, &args)?;
            }
        }
    }
    Ok(())
}

/// (head size, K, V, q, out, query heads of a KV head, tokens).
type Attention = (usize, Codec, Codec, DType, DType, usize, usize);

/// Prompts of every head size.
const PROMPTS: [Attention; 8] = [
    (64, Codec::F16, Codec::F16, DType::F16, DType::BF16, 1, 9999),
    (64, Codec::BF16, Codec::BF16, DType::BF16, DType::BF16, 2, 9999),
    (128, Codec::BF16, Codec::BF16, DType::BF16, DType::BF16, 4, 9999),
    (128, Codec::F16, Codec::F16, DType::F16, DType::F16, 1, 9999),
    (256, Codec::BF16, Codec::BF16, DType::BF16, DType::F16, 3, 9999),
    (256, Codec::F16, Codec::F16, DType::F16, DType::F16, 2, 9999),
    (512, Codec::F16, Codec::F16, DType::F16, DType::F16, 8, 9999),
    (512, Codec::BF16, Codec::BF16, DType::BF16, DType::BF16, 8, 9999),
];

/// On an H200, each case selects its intended kernel.
fn attention(device: &Device, enc: &mut Encoder, h200: bool) -> Result<()> {
    let tq = Codec::tq;
    let (f16, bf16) = (Codec::F16, Codec::BF16);
    // Many rows, f32 outputs, different codecs for keys and values: attend_generic.
    let any: [Attention; 11] = [
        (64, tq(2), tq(2), DType::BF16, DType::F32, 4, 1),
        (64, tq(3), tq(3), DType::BF16, DType::F32, 1, 40),
        (128, tq(3), tq(2), DType::BF16, DType::F32, 4, 1),
        (256, tq(2), tq(4), DType::F16, DType::F16, 2, 40),
        (512, bf16, tq(3), DType::BF16, DType::BF16, 8, 1),
        (64, Codec::F32, f16, DType::F32, DType::F32, 1, 1),
        (128, bf16, bf16, DType::BF16, DType::BF16, 2, 9),
        (256, tq(4), tq(4), DType::BF16, DType::BF16, 8, 40),
        (256, tq(5), bf16, DType::F16, DType::F16, 2, 1),
        (512, tq(8), tq(6), DType::F16, DType::F32, 3, 9),
        (512, f16, f16, DType::F16, DType::F16, 2, 9),
    ];
    // Contexts that may be long.
    let dense: [Attention; 5] = [
        (64, f16, f16, DType::F16, DType::BF16, 1, 1),
        (128, bf16, bf16, DType::BF16, DType::BF16, 4, 1),
        (256, f16, f16, DType::F16, DType::F16, 2, 1),
        (256, bf16, bf16, DType::BF16, DType::F16, 8, 1),
        (512, bf16, bf16, DType::BF16, DType::BF16, 8, 1),
    ];
    let short: [Attention; 5] = [
        (64, bf16, bf16, DType::BF16, DType::F16, 3, 1),
        (128, f16, f16, DType::F16, DType::F16, 8, 1),
        (128, bf16, bf16, DType::BF16, DType::BF16, 4, 1),
        (256, bf16, bf16, DType::BF16, DType::BF16, 2, 1),
        (256, f16, f16, DType::F16, DType::BF16, 8, 1),
    ];
    let quantised: [Attention; 10] = [
        (128, tq(4), tq(4), DType::BF16, DType::BF16, 4, 1),
        (128, tq(8), tq(6), DType::F32, DType::F16, 3, 1),
        (256, tq(5), tq(5), DType::BF16, DType::BF16, 2, 1),
        (256, tq(6), tq(6), DType::F16, DType::F16, 1, 1),
        (512, tq(4), tq(4), DType::BF16, DType::BF16, 8, 1),
        (512, tq(8), tq(8), DType::F16, DType::BF16, 8, 1),
        (128, tq(2), tq(2), DType::BF16, DType::BF16, 4, 1),
        (256, tq(3), tq(3), DType::BF16, DType::BF16, 2, 1),
        (512, tq(2), tq(3), DType::BF16, DType::BF16, 8, 1),
        // Shared memory has no room for pairs of 5-bit codes.
        (256, tq(3), tq(5), DType::BF16, DType::BF16, 4, 1),
    ];
    let short_quantised: [Attention; 13] = [
        (64, tq(2), tq(2), DType::BF16, DType::BF16, 4, 1),
        (128, tq(3), tq(2), DType::BF16, DType::BF16, 4, 1),
        (512, tq(3), tq(3), DType::BF16, DType::BF16, 8, 1),
        (64, tq(4), tq(8), DType::BF16, DType::BF16, 4, 1),
        (64, tq(6), tq(6), DType::F16, DType::F16, 1, 1),
        (128, tq(5), tq(5), DType::BF16, DType::BF16, 4, 1),
        (128, tq(8), tq(6), DType::F32, DType::F16, 3, 1),
        (256, tq(8), tq(8), DType::BF16, DType::BF16, 2, 1),
        (256, tq(6), tq(4), DType::F16, DType::F16, 8, 1),
        (512, tq(4), tq(4), DType::BF16, DType::BF16, 8, 1),
        // Shared memory has no room for pairs of 5-bit codes.
        (128, tq(8), tq(5), DType::BF16, DType::BF16, 8, 1),
        (256, tq(5), tq(6), DType::BF16, DType::BF16, 8, 1),
        (512, tq(5), tq(5), DType::BF16, DType::BF16, 8, 1),
    ];
    // Two halves of a group, in each decode kernel.
    let halved: [Attention; 2] =
        [(128, bf16, bf16, DType::BF16, DType::BF16, 16, 1), (128, tq(4), tq(4), DType::BF16, DType::BF16, 12, 1)];
    let kernels: [(&str, usize, &[Attention]); 11] = [
        ("attend_generic", 99, &any),
        ("attend_decode", 9999, &dense),
        ("attend_short", 99, &short),
        ("attend_quantised", 1500, &quantised),
        ("attend_quantised", 9999, &quantised[..3]),
        ("attend_short_quantised", 99, &short_quantised),
        ("attend_decode", 9999, &halved[..1]),
        ("attend_short", 99, &halved[..1]),
        ("attend_quantised", 9999, &halved[1..]),
        ("attend_short_quantised", 99, &halved[1..]),
        ("attend_prefill", 99, &PROMPTS),
    ];
    for (kernel, capacity, cases) in kernels {
        for (i, case) in cases.iter().enumerate() {
            let expected = h200 || kernel == "attend_prefill";
            attend(device, enc, expected.then_some(kernel), capacity, *case, i % 2 == 1)?;
        }
    }
    Ok(())
}

/// The cases with a ring have a softcap and sinks, too.
fn attend(
    device: &Device,
    enc: &mut Encoder,
    kernel: Option<&str>,
    capacity: usize,
    case: Attention,
    ring: bool,
) -> Result<()> {
    let (head_dim, k, v, q, out, group, tokens) = case;
    let (kv_heads, order) = (2, HeadOrder::HeadMajor);
    let spec = LayerSpec::new(kv_heads, head_dim, capacity, k).v(v).ring(ring).order(order);
    let layer = KvLayer::new(device, spec)?;
    let step = Step::new(device, 1, &(0..tokens as u32).map(|p| (0, p)).collect::<Vec<_>>())?;
    let shape = [tokens, kv_heads * group, head_dim];
    let sinks = zeros(device, DType::F32, &[shape[1]])?;
    let (q, out) = (zeros(device, q, &shape)?, zeros(device, out, &shape)?);
    let args = Attend::new(&q, &layer, &step, &out)
        .scale(1.0)
        .softcap(ring.then_some(30.0))
        .window(ring.then_some(capacity - 35))
        .sinks(ring.then_some(&sinks));
    let explained = ops::explain(&args, device)?;
    assert!(kernel.is_none_or(|kernel| explained.kernel == kernel), "{case:?}: {explained:?}");
    ops::attend(enc, &args)
}

/// Rows of 4 and 16 bytes, and of one.
fn forks(device: &Device) -> Result<()> {
    let layer = |head_dim, codec| CacheLayer::new(1, head_dim, codec);
    let layers = vec![layer(64, Codec::F16), layer(8, Codec::tq(5))];
    let pool = KvPool::new(device, &PoolSpec::new(layers, 1 << 20).page_tokens(16))?;
    let mut from = pool.sequence();
    pool.step(&mut [(&mut from, 3)])?;
    // The fork copies the page that both would write to.
    let mut fork = from.fork();
    pool.step(&mut [(&mut fork, 1)]).map(drop)
}
