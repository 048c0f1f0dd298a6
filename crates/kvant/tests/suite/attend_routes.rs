//! The attention launches that CUDA would run, checked on any machine.

use crate::common::without_gpu::{self, Launches, Model};
use kvant::{
    Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor,
    codec::BITS,
    gpu,
    ops::{self, Affine, Attend, Explanation, Linear, Weight},
};

struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    capacity: usize,
    window: Option<usize>,
    tokens: usize,
    codec: Codec,
}

/// The layers of small and large models, in decode and in prompts, over short and long caches.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads, kv_heads, head_dim) in
        [(4, 2, 256), (4, 1, 512), (16, 2, 512), (16, 8, 256), (32, 8, 128), (8, 8, 64), (64, 4, 128), (96, 8, 128)]
    {
        for (capacity, window) in [(383, Some(128)), (1024, None), (4096, None), (131_072, None)] {
            for codec in [Codec::F32, Codec::F16, Codec::BF16, Codec::tq(3), Codec::tq(4), Codec::tq(5), Codec::tq(8)] {
                for tokens in [1, 5, 300] {
                    cases.push(Case { heads, kv_heads, head_dim, capacity, window, tokens, codec });
                }
            }
        }
    }
    cases
}

fn launched(device: &Device, launches: &Launches, case: &Case) -> Result<(Explanation, Vec<String>)> {
    let &Case { heads, kv_heads, head_dim, capacity, window, tokens, codec } = case;
    let (ring, order) = (window.is_some(), HeadOrder::HeadMajor);
    let spec = LayerSpec::new(kv_heads, head_dim, capacity, codec).ring(ring).order(order);
    let layer = KvLayer::new(device, spec)?;
    let positions: Vec<_> = (0..tokens as u32).map(|p| (0, p)).collect();
    let (q, step, out) = (
        Tensor::zeros(device, DType::BF16, &[tokens, heads, head_dim])?,
        Step::new(device, 1, &positions)?,
        Tensor::zeros(device, DType::BF16, &[tokens, heads, head_dim])?,
    );
    let args = Attend::new(&q, &layer, &step, &out).scale(1.0).window(window);
    let explanation = ops::explain(&args, device)?;
    launches.all.lock().unwrap().clear();
    let mut enc = device.encoder()?;
    ops::attend(&mut enc, &args)?;
    enc.commit()?.wait()?;
    let all = launches.all.lock().unwrap().clone();
    Ok((explanation, all))
}

#[test]
fn explained_kernel_is_launched() -> Result<()> {
    let launches = Launches::default();
    let device = gpu::cuda_device(launches.clone());
    let mut clusters = 0;
    for case in cases() {
        let (explanation, launched) = launched(&device, &launches, &case)?;
        let [launch] = &launched[..] else { panic!("{launched:?}") };
        assert!(launch.contains(explanation.kernel), "{explanation:?}: {launch}");
        assert!(!explanation.reason.is_empty());
        clusters += usize::from(launch.contains("(\"CLUSTER\", UInt(8))"));
    }
    assert!(clusters > 10, "{clusters} launches in clusters");
    Ok(())
}

/// A batch of decode rows and a chunk of a prompt runs two kernels, which together cover all rows.
#[test]
fn mixed_batches_run_two_kernels() -> Result<()> {
    let launches = Launches::default();
    let cuda = gpu::cuda_device(launches.clone());
    let kernels = |device: &Device, tokens: &[(u32, u32)], codec| -> Result<Vec<String>> {
        let layer = KvLayer::new(device, LayerSpec::new(8, 128, 4096, codec).sequences(8))?;
        let step = Step::new(device, 8, tokens)?;
        let q = Tensor::zeros(device, DType::BF16, &[tokens.len(), 32, 128])?;
        let out = Tensor::zeros(device, DType::BF16, q.shape())?;
        let args = Attend::new(&q, &layer, &step, &out);
        launches.all.lock().unwrap().clear();
        let mut enc = device.encoder()?;
        ops::attend(&mut enc, &args)?;
        enc.commit()?.wait()?;
        let explained = ops::explain(&args, device)?;
        let all = launches.all.lock().unwrap().clone();
        assert!(all.last().is_some_and(|launch| launch.contains(explained.kernel)), "{explained:?}: {all:?}");
        Ok(all)
    };
    let decode: Vec<(u32, u32)> = (0..5).map(|s| (s, 900 + s)).collect();
    let chunk = (0..300).map(|p| (6, p));
    let mixed: Vec<_> = decode.iter().copied().chain(chunk.clone()).collect();
    for (codec, of_decode) in [(Codec::BF16, "attend_decode"), (Codec::tq(4), "attend_quantised")] {
        let of_prompt = if codec == Codec::BF16 { "attend_prefill" } else { "attend_generic" };
        let [first, second] = &kernels(&cuda, &mixed, codec)?[..] else { panic!("two launches") };
        assert!(first.contains(of_decode) && second.contains(of_prompt), "{first}, {second}");
        // Decode rows at the end belong to the prompt's launch.
        let behind: Vec<_> = chunk.clone().chain(decode.iter().copied()).collect();
        assert_eq!(kernels(&cuda, &behind, codec)?.len(), 1);
        assert_eq!(kernels(&cuda, &decode, codec)?.len(), 1);
    }
    // Eight drafts of four tokens are not decode rows.
    let drafts: Vec<(u32, u32)> = (0..8).flat_map(|s| (0..4).map(move |p| (s, 100 + p))).collect();
    let [launch] = &kernels(&cuda, &drafts, Codec::BF16)?[..] else { panic!("one launch") };
    assert!(launch.contains("attend_generic"), "{launch}");
    Ok(())
}

/// Every GPU has enough shared memory for attention, for any cache and number of tokens.
#[test]
fn attention_runs_on_every_gpu() -> Result<()> {
    let codecs: Vec<Codec> = [Codec::F32, Codec::F16, Codec::BF16].into_iter().chain(BITS.map(Codec::tq)).collect();
    let floats = [DType::F32, DType::F16, DType::BF16];
    for model in [Model::H200, Model::A100, Model::Rtx4090, Model::Rtx5090] {
        let device = gpu::cuda_device(Launches { model, ..Launches::default() });
        for head_dim in ops::attend::HEAD_DIMS {
            // Quantised caches need powers of two.
            let codecs = if head_dim.is_power_of_two() { &codecs[..] } else { &codecs[..3] };
            for (&k, &v) in codecs.iter().flat_map(|k| codecs.iter().map(move |v| (k, v))) {
                let (kv_heads, capacity, order) = (1, 99, HeadOrder::HeadMajor);
                let spec = LayerSpec::new(kv_heads, head_dim, capacity, k).v(v).order(order);
                let layer = KvLayer::new(&device, spec)?;
                for (q, out) in floats.into_iter().flat_map(|q| floats.map(|out| (q, out))) {
                    for tokens in [1, 3, 5, 30] {
                        attend(&device, &layer, tokens, q, out).map_err(|e| {
                            panic!("{model:?}, D {head_dim}, k {k}, v {v}, q {q}, out {out}, {tokens} tokens: {e}")
                        })?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn attend(device: &Device, layer: &KvLayer, tokens: usize, q: DType, out: DType) -> Result<()> {
    let head_dim = layer.spec().head_dim;
    let positions: Vec<_> = (0..tokens as u32).map(|p| (0, p)).collect();
    let q = Tensor::zeros(device, q, &[tokens, 2, head_dim])?;
    let out = Tensor::zeros(device, out, &[tokens, 2, head_dim])?;
    let step = Step::new(device, 1, &positions)?;
    ops::attend(&mut device.encoder()?, &Attend::new(&q, layer, &step, &out))
}

/// Contexts that fit into the shared memory of a cluster's blocks: up to 1024 keys, of up to 256 coordinates if dense.
#[test]
fn short_contexts_have_kernels_of_their_own() -> Result<()> {
    let launches = Launches::default();
    let device = gpu::cuda_device(launches.clone());
    let kernel = |codec, heads, kv_heads, head_dim, capacity, window| {
        let case = Case { heads, kv_heads, head_dim, capacity, window, tokens: 1, codec };
        Ok::<_, kvant::Error>(launched(&device, &launches, &case)?.0.kernel)
    };
    let dense = (Codec::BF16, "attend_short", "attend_decode");
    let quantised = BITS.map(|bits| (Codec::tq(bits), "attend_short_quantised", "attend_quantised"));
    for (codec, short, long) in [dense].into_iter().chain(quantised) {
        for (heads, kv_heads, head_dim) in [(32, 8, 128), (16, 8, 256), (4, 1, 256), (12, 12, 128)] {
            assert_eq!(kernel(codec, heads, kv_heads, head_dim, 1024, None)?, short);
            assert_eq!(kernel(codec, heads, kv_heads, head_dim, 1, None)?, short);
            assert_eq!(kernel(codec, heads, kv_heads, head_dim, 9999, Some(1024))?, short);
            assert_eq!(kernel(codec, heads, kv_heads, head_dim, 1025, None)?, long);
            assert_eq!(kernel(codec, heads, kv_heads, head_dim, 9999, Some(1025))?, long);
        }
        // More clusters than fit on a GPU.
        assert_eq!(kernel(codec, 13, 13, 128, 1024, None)?, long);
    }
    assert_eq!(kernel(Codec::BF16, 8, 8, 64, 1024, None)?, "attend_short");
    assert_eq!(kernel(Codec::BF16, 16, 2, 512, 1024, None)?, "attend_decode");
    for (k, v) in [(4, 3), (2, 8), (5, 2), (3, 5)] {
        let spec = LayerSpec::new(8, 128, 1024, Codec::tq(k)).v(Codec::tq(v));
        let layer = KvLayer::new(&device, spec)?;
        let (q, step) = (Tensor::zeros(&device, DType::BF16, &[1, 32, 128])?, Step::new(&device, 1, &[(0, 0)])?);
        let out = Tensor::zeros(&device, DType::BF16, q.shape())?;
        let explained = ops::explain(&Attend::new(&q, &layer, &step, &out), &device)?;
        assert_eq!(explained.kernel, "attend_short_quantised", "tq{k}:tq{v}");
    }
    // Rows of 8 bytes cannot be copied 16 bytes at a time.
    for (head_dim, bits, want) in [
        (64, 2, "attend_short_quantised"),
        (64, 3, "attend_generic"),
        (64, 4, "attend_short_quantised"),
        (64, 5, "attend_generic"),
        (64, 6, "attend_short_quantised"),
        (64, 8, "attend_short_quantised"),
        (512, 2, "attend_short_quantised"),
        (512, 3, "attend_short_quantised"),
        (512, 4, "attend_short_quantised"),
        (512, 5, "attend_short_quantised"),
        (512, 6, "attend_short_quantised"),
        (512, 8, "attend_short_quantised"),
    ] {
        assert_eq!(kernel(Codec::tq(bits), 16, 2, head_dim, 1024, None)?, want, "{head_dim}, {bits} bits");
    }
    Ok(())
}

/// Head sizes that are not powers of two have one kernel, for every call.
#[test]
fn other_head_sizes_have_one_kernel() -> Result<()> {
    let launches = Launches::default();
    let device = gpu::cuda_device(launches.clone());
    for head_dim in ops::attend::HEAD_DIMS.into_iter().filter(|dim| !dim.is_power_of_two()) {
        for codec in [Codec::F32, Codec::F16, Codec::BF16] {
            for (capacity, window, tokens) in [(1024, None, 1), (131_072, Some(128), 1), (4096, None, 300)] {
                let case = Case { heads: 32, kv_heads: 8, head_dim, capacity, window, tokens, codec };
                let (explanation, launched) = launched(&device, &launches, &case)?;
                assert_eq!(explanation.kernel, "attend_generic", "{head_dim}");
                assert!(launched[0].contains("attend_generic"), "{}", launched[0]);
            }
        }
    }
    Ok(())
}

/// Groups with more query heads than a product's columns are halved. For an odd number, one half has one head fewer.
#[test]
fn large_groups_are_halved() -> Result<()> {
    let launches = Launches::default();
    let device = gpu::cuda_device(launches.clone());
    let dense = (Codec::BF16, "attend_short", "attend_decode");
    let quantised = (Codec::tq(4), "attend_short_quantised", "attend_quantised");
    for (codec, short, long) in [dense, quantised] {
        for (group, halved) in [(8, false), (9, true), (10, true), (12, true), (15, true), (16, true)] {
            for (capacity, want) in [(1024, short), (9999, long)] {
                let (heads, kv_heads) = (4 * group, 4);
                let case = Case { heads, kv_heads, head_dim: 128, capacity, window: None, tokens: 1, codec };
                let (explanation, launched) = launched(&device, &launches, &case)?;
                assert_eq!(explanation.kernel, want, "{group} query heads per KV head, {capacity} keys");
                let shares = format!("(\"SHARES\", UInt({}))", 1 + u32::from(halved));
                assert!(launched[0].contains(&shares), "{shares}: {}", launched[0]);
                let lacking = format!("(\"LACKING\", UInt({}))", group % 2 * usize::from(halved));
                assert!(launched[0].contains(&lacking), "{lacking}: {}", launched[0]);
            }
        }
        for group in [17, 24] {
            let case =
                Case { heads: 2 * group, kv_heads: 2, head_dim: 128, capacity: 1024, window: None, tokens: 1, codec };
            assert_eq!(launched(&device, &launches, &case)?.0.kernel, "attend_generic", "{group}");
        }
    }
    Ok(())
}

/// A KV head has one cluster for every 2^18 coordinates of its keys, while multiprocessors are free.
#[test]
fn a_kv_head_has_several_clusters() -> Result<()> {
    let launches = Launches::default();
    let device = gpu::cuda_device(launches.clone());
    for (heads, kv_heads, head_dim, capacity, clusters, blocks) in [
        (16, 2, 512, 512, 1, 8),
        (16, 2, 512, 1024, 2, 8),
        (16, 2, 512, 32768, 7, 8),
        (16, 2, 512, 32769, 33, 2),
        (8, 4, 512, 3072, 3, 8),
        (8, 4, 512, 4096, 16, 2),
        (16, 4, 256, 1280, 1, 8),
        (16, 4, 256, 4096, 3, 8),
        (16, 8, 256, 4096, 1, 8),
        (16, 2, 128, 4096, 2, 8),
        (16, 4, 256, 4097, 33, 1),
    ] {
        let case = Case { heads, kv_heads, head_dim, capacity, window: None, tokens: 1, codec: Codec::BF16 };
        let (_, all) = launched(&device, &launches, &case)?;
        let what = format!("{head_dim}, {kv_heads}, {capacity}: {}", all[0]);
        assert!(all[0].contains(&format!("(\"CLUSTER\", UInt({blocks}))")), "{what}");
        assert!(all[0].contains(&format!("groups: [{}, 1, 1]", clusters * kv_heads * blocks)), "{what}");
    }
    Ok(())
}

/// The second dimension of a grid counts rows, up to a limit: beyond it, other kernels are used.
#[test]
fn millions_of_rows_fit_into_a_grid() -> Result<()> {
    let device = without_gpu::device();
    let (outputs, inputs, group) = (8, 64, 64);
    let codes = Tensor::zeros(&device, DType::U32, &[outputs, inputs / 8])?;
    let scales = Tensor::zeros(&device, DType::BF16, &[outputs, inputs / group])?;
    let weight = Weight::Affine(Affine { codes: &codes, scales: &scales, biases: &scales, bits: 4, group });
    for rows in [2_096_992, 2_097_024, 2_097_025, 2_097_120, 2_097_121] {
        let x = Tensor::zeros(&device, DType::BF16, &[rows, inputs])?;
        let out = Tensor::zeros(&device, DType::BF16, &[rows, outputs])?;
        let mut enc = device.encoder()?;
        ops::linear(&mut enc, &Linear::new(&x, weight, &out))?;
        enc.commit()?.wait()?;
    }
    Ok(())
}
