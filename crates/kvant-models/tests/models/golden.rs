//! Compares whole models with logits computed by transformers and MLX in f32.

use crate::common::{
    FAMILIES, GGUF_MODELS, MLX_FAMILIES, Parts, VARIANTS, exact, floats, golden, ids, max_difference, model_dir,
    with_header,
};
use half::{bf16, f16};
use kvant::{DType, Device, Sequence, device::DeviceKind, ops::DeltaRuleShape};
use kvant_models::{
    Files, Inspection, LoadOptions, Logits, Model, PoolOptions,
    safetensors::{Checkpoint, SafetensorsFile},
    spec::OutputMatrix,
};

/// Maximum difference of logits with an f32 cache.
const TOLERANCE: f32 = 2e-3;
/// Maximum difference in passes of many tokens with quantised weights, in which the CPU rounds activations to 16 bits.
const ROUNDED: f32 = 5e-3;

/// Feeds tokens `step` at a time and returns all logits.
fn stepwise(model: &Model, sequence: &mut Sequence, tokens: &[u32], step: usize) -> Vec<f32> {
    let pieces = tokens.chunks(step);
    pieces.flat_map(|piece| model.feed(sequence, piece, Logits::All).unwrap().to_f32().unwrap()).collect()
}

fn check(model: &Model, variant: &str) {
    check_within(model, variant, TOLERANCE);
}

/// `many`: maximum difference in passes of many tokens.
fn check_within(model: &Model, variant: &str, many: f32) {
    let file = golden(variant).join("logits.safetensors");
    let (tokens, expected) = (ids(&file, "tokens"), floats(&file, "logits"));
    for (step, page_tokens) in [(tokens.len(), 64), (tokens.len(), 16), (1, 16), (7, 16), (7, 64)] {
        let mut sequence = model.new_pool(&PoolOptions { page_tokens, ..exact(1024) }).unwrap().sequence();
        let got = stepwise(model, &mut sequence, &tokens, step);
        let worst = max_difference(&got, &expected);
        println!("{variant}: {step} at a time, pages of {page_tokens}: {worst:.1e}");
        let bound = if step > 7 { many } else { TOLERANCE };
        assert!(worst < bound, "{variant}: {step} at a time, pages of {page_tokens}: off by {worst}");
        assert_eq!(sequence.len(), tokens.len());
    }
    // Only the last token's logits: layers that write no keys then run only for it.
    let vocab = model.vocab_size();
    let last = &expected[expected.len() - vocab..];
    let mut sequence = model.new_pool(&exact(1024)).unwrap().sequence();
    let got = model.feed(&mut sequence, &tokens, Logits::Last).unwrap();
    assert_eq!(got.shape(), [1, vocab]);
    let worst = max_difference(&got.to_f32().unwrap(), last);
    assert!(worst < many, "{variant}: last row: off by {worst}");
    check_batches(model, variant, &tokens, &expected, many);
}

/// Three sequences in various batches: one alone, prompts together, a prompt and single tokens; logits for selected
/// rows, in any order.
fn check_batches(model: &Model, variant: &str, tokens: &[u32], expected: &[f32], bound: f32) {
    // A step runs once: recurrent states advance with each pass.
    let some = |count: usize| vec![count - 1, 0];
    let rows: [&dyn Fn(usize) -> Vec<usize>; 3] = [&|count| (0..count).collect(), &some, &|_| Vec::new()];
    for rows in rows {
        check_batches_with(model, variant, (tokens, expected), bound, rows);
    }
}

/// `rows` returns the rows with logits of a pass, from its number of tokens.
fn check_batches_with(
    model: &Model,
    variant: &str,
    (tokens, expected): (&[u32], &[f32]),
    bound: f32,
    rows: &dyn Fn(usize) -> Vec<usize>,
) {
    let vocab = model.vocab_size();
    let pool = model.new_pool(&PoolOptions { sequences: 3, page_tokens: 16, ..exact(64) }).unwrap();
    let mut sequences = [pool.sequence(), pool.sequence(), pool.sequence()];
    let n = tokens.len();
    for counts in [[n - 6, 0, 0], [1, 5, 0], [1, n - 12, 7], [2, 1, 1], [1, 1, n - 9], [0, 3, 0]] {
        let starts = sequences.each_ref().map(|sequence| sequence.len());
        let mut batch: Vec<_> = sequences.iter_mut().zip(counts).filter(|(_, count)| *count > 0).collect();
        let step = pool.step(&mut batch).unwrap();
        let places: Vec<usize> = starts.iter().zip(counts).flat_map(|(&start, count)| start..start + count).collect();
        let ids: Vec<u32> = places.iter().map(|&place| tokens[place]).collect();
        let rows = rows(ids.len());
        let got = model.forward(&pool, &step, &ids, &rows).unwrap().to_f32().unwrap();
        let of_row = |&row: &usize| &expected[places[row] * vocab..(places[row] + 1) * vocab];
        let want: Vec<f32> = rows.iter().flat_map(of_row).copied().collect();
        let worst = max_difference(&got, &want);
        assert!(worst < bound, "{variant}: {counts:?} tokens, rows {rows:?}: off by {worst}");
    }
}

#[test]
fn every_family_matches_on_the_cpu() {
    for variant in FAMILIES.into_iter().chain(MLX_FAMILIES) {
        check(&Model::load(&golden(variant), &Device::cpu()).unwrap(), variant);
    }
}

#[test]
fn every_family_matches_on_the_reference_device() {
    for variant in FAMILIES.into_iter().chain(MLX_FAMILIES) {
        check(&Model::load(&golden(variant), &Device::reference()).unwrap(), variant);
    }
}

#[test]
fn every_gguf_file_matches_on_the_cpu() {
    for variant in GGUF_MODELS {
        check_within(&Model::load(&golden(variant), &Device::cpu()).unwrap(), variant, ROUNDED);
    }
}

#[test]
fn every_gguf_file_matches_on_the_reference_device() {
    for variant in GGUF_MODELS {
        check(&Model::load(&golden(variant), &Device::reference()).unwrap(), variant);
    }
}

#[test]
fn every_variant_matches_on_the_cpu() {
    for variant in VARIANTS {
        check(&Model::load(&golden(variant), &Device::cpu()).unwrap(), variant);
    }
}

#[test]
fn every_variant_matches_on_the_reference_device() {
    for variant in VARIANTS {
        check(&Model::load(&golden(variant), &Device::reference()).unwrap(), variant);
    }
}

/// LongRoPE: the context that a model is loaded for selects the factors and limits the length of texts.
#[test]
fn long_contexts_have_factors_of_their_own() {
    for variant in ["phi3_long", "phi3_partial_long"] {
        for device in [Device::cpu(), Device::reference()] {
            let options = LoadOptions { context: Some(64), ..LoadOptions::default() };
            check(&Model::load_with(&golden(variant), &device, &options).unwrap(), variant);
        }
        let model = Model::load(&golden(variant), &Device::cpu()).unwrap();
        let file = golden(variant).join("logits.safetensors");
        let (tokens, expected) = (ids(&file, "tokens"), floats(&file, "logits"));
        let mut sequence = model.new_pool(&exact(64)).unwrap().sequence();
        let got = model.feed(&mut sequence, &tokens[..32], Logits::All).unwrap().to_f32().unwrap();
        assert!(max_difference(&got, &expected[..got.len()]) > 1e-2, "{variant}: short factors");
        let error = model.feed(&mut sequence, &tokens[32..33], Logits::Last).unwrap_err().to_string();
        assert!(error.contains("`tokens` must be at most 32 of a sequence"), "{error}");
        assert_eq!(sequence.len(), 32);
    }
    // Contexts up to the original one change nothing.
    let options = LoadOptions { context: Some(10), ..LoadOptions::default() };
    check(&Model::load_with(&golden("phi3"), &Device::cpu(), &options).unwrap(), "phi3");
    let options = LoadOptions { context: Some(0), ..LoadOptions::default() };
    let error = Model::load_with(&golden("phi3"), &Device::cpu(), &options).unwrap_err().to_string();
    assert!(error.contains("`context` must be at least 1"), "{error}");
    let options = LoadOptions { context: Some(usize::MAX), ..LoadOptions::default() };
    let error = Model::load_with(&golden("phi3"), &Device::cpu(), &options).unwrap_err().to_string();
    assert!(error.contains("`context` must be at most 349525"), "{error}");
}

/// `per_layer_config` is equivalent to `global_head_dim` and `num_global_key_value_heads`.
#[test]
fn both_forms_of_head_sizes_are_the_same_model() {
    for variant in ["dense", "ple_shared", "moe"] {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(golden(variant)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        std::fs::copy(golden(variant).join("config.per_layer.json"), dir.path().join("config.json")).unwrap();
        let (old, new) =
            (Model::load(&golden(variant), &Device::cpu()).unwrap(), Model::load(dir.path(), &Device::cpu()).unwrap());
        assert_eq!(old.decoder(), new.decoder());
        check(&new, variant);
    }
}

/// Inspecting headers gives the bytes of the loaded model, and the number of its parameters.
#[test]
fn inspections_equal_the_loaded_model() {
    for variant in VARIANTS.into_iter().chain(FAMILIES).chain(MLX_FAMILIES) {
        let files = Files::directory(golden(variant));
        let (found, model) =
            (Inspection::open(&files).unwrap(), Model::load(&golden(variant), &Device::cpu()).unwrap());
        assert_eq!((&found.config, found.weight_bytes), (model.config(), model.weight_bytes()), "{variant}");
        let formats = found.formats.iter();
        assert_eq!(formats.map(|format| format.bytes).sum::<usize>(), found.weight_bytes, "{variant}");
        let options = PoolOptions { longest: 777, ..exact(777) };
        assert_eq!(
            found.cache_bytes(&options, &LoadOptions::default()).unwrap(),
            model.pool_spec(&options).unwrap().bytes,
            "{variant}"
        );
    }
    // All tensors of this file belong to the text model.
    for variant in ["llama", "gpt_oss", "moe"] {
        let header = SafetensorsFile::open(&golden(variant).join("model.safetensors")).unwrap();
        let in_file =
            header.header().tensors().values().map(|info| info.shape.iter().product::<usize>()).sum::<usize>();
        let found = Inspection::open(&Files::directory(golden(variant))).unwrap();
        assert_eq!(found.parameters, in_file, "{variant}");
    }
}

/// Estimates count the memory between the kernels of a delta rule in chunks, on devices that have them.
#[test]
fn estimates_count_chunks() {
    let model = Inspection::open(&Files::directory(golden("qwen3_5_moe"))).unwrap();
    let scratch = |device, activations, pass_tokens| {
        let load = LoadOptions { device, activations, pass_tokens, ..LoadOptions::default() };
        model.memory(&exact(1024), &load).unwrap().scratch
    };
    for (device, dtype) in
        [(DeviceKind::Cuda, DType::BF16), (DeviceKind::Cuda, DType::F32), (DeviceKind::Metal, DType::F32)]
    {
        for rows in [1, 10, 1000] {
            let more = scratch(device, dtype, rows) - scratch(DeviceKind::Cpu, dtype, rows);
            let shape = DeltaRuleShape { key_heads: 2, heads: 2, key_dim: 64, value_dim: 64, dtype };
            assert_eq!(more, shape.max_scratch_bytes(device, rows), "{device:?} {dtype} {rows}");
            assert_eq!(more > 0, (device, dtype) != (DeviceKind::Cuda, DType::F32));
        }
    }
}

/// Chunks of Qwen 3.5 27B: 64 are computed at once.
#[test]
fn chunks_of_a_large_model_take_as_much_as_documented() {
    let dtype = DType::BF16;
    let shape = DeltaRuleShape { key_heads: 16, heads: 48, key_dim: 128, value_dim: 128, dtype };
    assert_eq!(shape.max_scratch_bytes(DeviceKind::Cuda, 4096), 64 * (16 * 32_768 + 48 * 17_408));
    assert_eq!(shape.max_scratch_bytes(DeviceKind::Metal, 4096), 64 * (16 * 32_768 + 48 * 8448));
}

#[test]
fn the_longest_sequence_that_fits_is_found() {
    let model = Inspection::open(&Files::directory(golden("gpt_oss"))).unwrap();
    let (pool, load) = (PoolOptions { longest: 10_000, ..exact(10_000) }, LoadOptions::default());
    let all = model.memory(&pool, &load).unwrap();
    assert_eq!(all.total(), all.weights + all.cache + all.scratch);
    assert_eq!(model.longest_in(all.total(), &pool, &load).unwrap(), Some(10_000));
    let less = model.longest_in(all.total() - all.cache / 2, &pool, &load).unwrap().unwrap();
    assert!((4_000..6_000).contains(&less) && less.is_multiple_of(pool.page_tokens), "{less}");
    let fit = |longest| model.memory(&PoolOptions { longest, ..pool.clone() }, &load).unwrap().total();
    assert!(fit(less) <= all.total() - all.cache / 2 && fit(less + 64) > all.total() - all.cache / 2);
    assert_eq!(model.longest_in(all.weights, &pool, &load).unwrap(), None);
}

/// One token reads one row of a table, and only the experts that it is routed to.
#[test]
fn a_token_reads_a_part_of_the_weights() {
    for variant in VARIANTS {
        let model = Model::load(&golden(variant), &Device::cpu()).unwrap();
        let checkpoint = Checkpoint::open(&golden(variant)).unwrap();
        let bytes_of = |part: &str| -> usize {
            let index = golden(variant).join("model.safetensors.index.json");
            let files = if index.exists() {
                ["model-00001-of-00002", "model-00002-of-00002"].as_slice()
            } else {
                ["model"].as_slice()
            };
            let files = files.iter().map(|name| golden(variant).join(format!("{name}.safetensors")));
            let names = files.flat_map(|file| {
                let file = SafetensorsFile::open(&file).unwrap();
                file.header().tensors().keys().cloned().collect::<Vec<_>>()
            });
            let infos = names.filter(|name| name.contains(part)).map(|name| checkpoint.info(&name).unwrap().clone());
            infos.map(|info| (info.end - info.start) as usize).sum()
        };
        let mut expected = model.weight_bytes();
        let decoder = model.decoder();
        if let Some(moe) = decoder.blocks[0].feed_forward.moe() {
            let experts = bytes_of("experts.");
            assert!(experts > 0 && moe.top_k < moe.experts);
            expected -= experts / moe.experts * (moe.experts - moe.top_k);
        }
        if let Some(table) = decoder.per_layer_input {
            let bytes = bytes_of("embed_tokens_per_layer");
            assert!(bytes > 0);
            expected -= bytes / table.vocab_size * (table.vocab_size - 1);
        }
        if decoder.output == OutputMatrix::Own {
            expected -= bytes_of("embed_tokens.") / model.vocab_size() * (model.vocab_size() - 1);
        }
        assert_eq!(model.weight_bytes_per_token(), expected, "{variant}");
    }
}

/// Sequences of one pool are independent.
#[test]
fn sequences_are_independent() {
    let model = Model::load(&golden("ple_shared"), &Device::cpu()).unwrap();
    let file = golden("ple_shared").join("logits.safetensors");
    let (tokens, expected) = (ids(&file, "tokens"), floats(&file, "logits"));
    let vocab = model.vocab_size();
    let pool = model.new_pool(&PoolOptions { sequences: 3, ..exact(64) }).unwrap();
    let [mut ours, mut theirs] = [pool.sequence(), pool.sequence()];
    let other: Vec<u32> = tokens.iter().rev().copied().collect();
    for (t, &token) in tokens.iter().enumerate() {
        model.feed(&mut theirs, &other[t..t + 1], Logits::Last).unwrap();
        let got = model.feed(&mut ours, &[token], Logits::Last).unwrap().to_f32().unwrap();
        assert!(max_difference(&got, &expected[t * vocab..(t + 1) * vocab]) < TOLERANCE, "token {t}");
    }
}

/// A factor so large that nothing rotates is equivalent to no rotated pairs.
#[test]
fn a_rope_factor_divides_the_frequencies() {
    let with = |key: &str, value: f64| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(golden("moe").join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let text = std::fs::read(golden("moe").join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
        config["rope_parameters"]["full_attention"][key] = value.into();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let model = Model::load(dir.path(), &Device::cpu()).unwrap();
        let mut sequence = model.new_pool(&exact(64)).unwrap().sequence();
        let tokens = ids(&golden("moe").join("logits.safetensors"), "tokens");
        model.feed(&mut sequence, &tokens, Logits::All).unwrap().to_f32().unwrap()
    };
    let still = with("factor", 1e6);
    assert!(max_difference(&still, &with("partial_rotary_factor", 1e-3)) < 1e-3);
    assert!(max_difference(&still, &with("factor", 1.0)) > 1e-2, "the factor matters");
}

/// Threads can share a model, each with its own cache.
#[test]
fn threads_share_a_model() {
    let model = Model::load(&golden("dense_mlx"), &Device::cpu()).unwrap();
    let file = golden("dense_mlx").join("logits.safetensors");
    let (tokens, expected) = (ids(&file, "tokens"), floats(&file, "logits"));
    std::thread::scope(|scope| {
        for step in [1, 5, 48] {
            let (model, tokens, expected) = (&model, &tokens, &expected);
            scope.spawn(move || {
                let mut sequence = model.new_pool(&exact(64)).unwrap().sequence();
                assert!(max_difference(&stepwise(model, &mut sequence, tokens, step), expected) < TOLERANCE);
            });
        }
    });
}

/// Gate and up matrices of experts are joined unless their formats differ: here, layer 0 has dense up matrices.
#[test]
fn experts_of_two_formats_match() {
    let variant = "moe_mlx";
    let mut parts = Parts::read(&golden(variant).join("model.safetensors"));
    let file = SafetensorsFile::open(&golden(variant).join("model.safetensors")).unwrap();
    let name = |part| format!("model.layers.0.experts.switch_glu.up_proj.{part}");
    let read = |part| file.read(&name(part), &Device::cpu()).unwrap();
    let words: Vec<u32> = read("weight").to_vec().unwrap();
    let [scales, biases] = ["scales", "biases"].map(|part| read(part).to_f32().unwrap());
    // 4 bits, in groups of 64.
    let codes = words.iter().flat_map(|word| (0..8).map(move |i| (word >> (4 * i) & 15) as f32));
    let weights = codes.enumerate().map(|(i, code)| scales[i / 64] * code + biases[i / 64]);
    let bytes: Vec<u8> = weights.flat_map(f32::to_le_bytes).collect();
    for part in ["weight", "scales", "biases"] {
        parts.remove(&name(part));
    }
    let offsets = [parts.data.len(), parts.data.len() + bytes.len()];
    let shape = [6, 64, 64];
    parts.data.extend(bytes);
    let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets });
    parts.header.insert(name("weight"), entry);
    let config = std::fs::read(golden(variant).join("config.json")).unwrap();
    let dir = model_dir(&config, &parts.bytes());
    for device in [Device::cpu(), Device::reference()] {
        let model = Model::load(dir.path(), &device).unwrap();
        check_within(&model, variant, ROUNDED);
    }
}

/// Dense matrices are converted to the requested dtype, as if the file had it; routers and vectors are not.
#[test]
fn dense_matrices_are_converted() {
    for (variant, dtype) in [("llama", DType::F32), ("moe", DType::F16), ("ple_shared", DType::F32)] {
        let dir = golden(variant);
        let config = std::fs::read(dir.join("config.json")).unwrap();
        let parts = Parts::read(&dir.join("model.safetensors"));
        // Numbers that bf16 cannot represent, and their bf16 roundings.
        let written = |is_rounded: bool| {
            let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
            for name in parts.names() {
                let entry = &parts.header[&name];
                let offset = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
                let dims = entry["shape"].as_array().unwrap().len();
                let to = if is_rounded && dims > 1 && !name.contains("router") { DType::BF16 } else { dtype };
                let begin = data.len();
                for bytes in parts.data[offset(0)..offset(1)].chunks_exact(2) {
                    let value = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32() * (1.0 + 1.0 / 512.0);
                    match (dtype, to) {
                        (DType::F32, DType::F32) => data.extend(value.to_le_bytes()),
                        (DType::F32, _) => data.extend(bf16::from_f32(value).to_le_bytes()),
                        (_, DType::F16) => data.extend(f16::from_f32(value).to_le_bytes()),
                        _ => data.extend(bf16::from_f32(f16::from_f32(value).to_f32()).to_le_bytes()),
                    }
                }
                let name_of_dtype = to.name().to_uppercase();
                let offsets = [begin, data.len()];
                header.insert(
                    name,
                    serde_json::json!({ "dtype": name_of_dtype, "shape": entry["shape"], "data_offsets": offsets }),
                );
            }
            with_header(serde_json::to_string(&header).unwrap().as_bytes(), &data)
        };
        let run = |is_rounded, dense_weights| {
            let dir = model_dir(&config, &written(is_rounded));
            let options = LoadOptions { dense_weights, ..LoadOptions::default() };
            let model = Model::load_with(dir.path(), &Device::cpu(), &options).unwrap();
            let estimate = Inspection::open(&Files::directory(dir.path())).unwrap();
            let estimate = estimate.memory(&PoolOptions::default(), &options).unwrap();
            assert_eq!(estimate.weights, model.weight_bytes(), "{variant}");
            let tokens = ids(&golden(variant).join("logits.safetensors"), "tokens");
            let mut sequence = model.new_pool(&exact(1024)).unwrap().sequence();
            (stepwise(&model, &mut sequence, &tokens[..8], 1), model.weight_bytes())
        };
        let [kept, converted, want] = [run(false, None), run(false, Some(DType::BF16)), run(true, None)];
        assert!(kept.0 != want.0, "{variant}: rounding shows");
        assert!(converted == want, "{variant}: {} and {} bytes", converted.1, want.1);
    }
    let options = LoadOptions { dense_weights: Some(DType::U8), ..LoadOptions::default() };
    let error = Model::load_with(&golden("llama"), &Device::cpu(), &options).unwrap_err();
    assert!(error.to_string().contains("dense_weights"), "{error}");
}
