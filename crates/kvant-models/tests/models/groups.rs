//! Models that are divided among the ranks of a group: CPU groups against transformers, and against one device.

use kvant::{Codec, CpuOptions, DType, Device};
use kvant_models::{
    BatchDecoder, CacheDivision, Decoder, Error, Files, Inspection, LoadOptions, Logits, Model, PoolOptions, Sampling,
};

use crate::common::{FAMILIES, GGUF_MODELS, MLX_FAMILIES, VARIANTS, exact, floats, golden, ids, max_difference};

/// The bound on the difference of a logit. Many tokens may be rounded to 16 bits, if weights are quantised.
const TOLERANCE: f32 = 2e-3;
const ROUNDED: f32 = 5e-3;

fn group(ranks: usize) -> Device {
    let rank = |_| Device::cpu_with(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
    Device::group(&(0..ranks).map(rank).collect::<Vec<_>>()).unwrap()
}

fn divided_by(cache_division: CacheDivision) -> LoadOptions {
    LoadOptions { cache_division, ..LoadOptions::default() }
}

/// The model on a group; `None` if it does not divide.
fn divided(variant: &str, device: &Device, division: CacheDivision) -> Option<Model> {
    match Model::load_with(&golden(variant), device, &divided_by(division)) {
        Ok(model) => Some(model),
        Err(Error::Indivisible { ranks, fits, .. }) => {
            assert!(ranks == device.ranks() && !fits.contains(&ranks), "{variant}");
            None
        }
        Err(error) => panic!("{variant}: {error}"),
    }
}

/// Logits of the golden tokens, fed in pieces, and of batches.
fn check(model: &Model, variant: &str) {
    let file = golden(variant).join("logits.safetensors");
    let (tokens, expected) = (ids(&file, "tokens"), floats(&file, "logits"));
    let ranks = model.device().ranks();
    let attention = model.rank_decoder().blocks.iter().filter_map(|block| block.attention());
    // Each rank has at least 16 positions of a page.
    let page_tokens = 16 * attention.map(|attention| attention.position_ranks).max().unwrap_or(1);
    for step in [tokens.len(), 7] {
        let mut sequence = model.new_pool(&PoolOptions { page_tokens, ..exact(64) }).unwrap().sequence();
        let feed = |piece: &[u32]| model.feed(&mut sequence, piece, Logits::All).unwrap().to_f32().unwrap();
        let got: Vec<f32> = tokens.chunks(step).flat_map(feed).collect();
        let worst = max_difference(&got, &expected);
        let bound = if step > 7 { ROUNDED } else { TOLERANCE };
        println!("{variant} on {ranks}, {step} at a time: {worst:.1e}");
        assert!(worst < bound, "{variant} on {ranks}, {step} at a time: off by {worst}");
    }
    // Chosen rows of two sequences: layers that write no keys run for these alone.
    let pool = model.new_pool(&PoolOptions { sequences: 2, ..exact(64) }).unwrap();
    let (mut a, mut b) = (pool.sequence(), pool.sequence());
    let step = pool.step(&mut [(&mut a, 9), (&mut b, 5)]).unwrap();
    let fed: Vec<u32> = tokens[..9].iter().chain(&tokens[..5]).copied().collect();
    let got = model.forward(&pool, &step, &fed, &[13, 8]).unwrap().to_f32().unwrap();
    let vocab = model.vocab_size();
    let wanted = [&expected[4 * vocab..5 * vocab], &expected[8 * vocab..9 * vocab]].concat();
    assert!(max_difference(&got, &wanted) < TOLERANCE, "{variant} on {ranks}: a batch");
}

/// The tokens that a model chooses after a prompt, by recorded passes.
fn chosen(model: &Model, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut sequence = model.new_pool(&exact(prompt.len() + count)).unwrap().sequence();
    let mut decoder = Decoder::new(model, &mut sequence, Sampling::default()).unwrap();
    let mut tokens = vec![decoder.next(prompt).unwrap()];
    while tokens.len() < count {
        tokens.push(decoder.next(&tokens[tokens.len() - 1..]).unwrap());
    }
    tokens
}

/// Checks all models that divide, and returns their names.
fn check_all(ranks: usize, division: CacheDivision, variants: impl Iterator<Item = &'static str>) -> Vec<&'static str> {
    let device = group(ranks);
    let mut divide = Vec::new();
    for variant in variants {
        let Some(model) = divided(variant, &device, division) else { continue };
        check(&model, variant);
        let prompt = &ids(&golden(variant).join("logits.safetensors"), "tokens")[..12];
        let alone = Model::load(&golden(variant), &Device::cpu()).unwrap();
        assert_eq!(chosen(&model, prompt, 10), chosen(&alone, prompt, 10), "{variant} on {ranks}");
        divide.push(variant);
    }
    divide
}

/// A rank that fails ends the pass of all ranks with its error. The next one runs.
#[test]
fn a_rank_that_fails_ends_the_pass() {
    let model = Model::load_with(&golden("llama"), &group(2), &divided_by(CacheDivision::Heads)).unwrap();
    let pool = model.new_pool(&exact(64)).unwrap();
    let mut sequence = pool.sequence();
    for fails in [true, false] {
        let step = pool.step(&mut [(&mut sequence, 3)]).unwrap();
        if fails {
            step.positions().on_rank(1).unwrap().write(&[u32::MAX; 3]).unwrap();
        }
        let result = model.forward(&pool, &step, &[1, 2, 3], &[2]);
        assert_eq!(result.is_err(), fails, "{result:?}");
        if let Err(error) = result {
            assert!(matches!(error, Error::Kvant(kvant::Error::OutOfRange { .. })), "{error}");
        }
        sequence.truncate(0).unwrap();
    }
}

/// The bytes that each device needs are known before a model is loaded.
#[test]
fn inspections_count_the_bytes_of_a_rank() {
    let hybrids = ["qwen3_5", "lfm2"];
    for variant in
        ["llama", "gpt_oss_mxfp4", "ple_shared", "qwen3_moe_mlx", "llama_gguf", "moe"].into_iter().chain(hybrids)
    {
        let files = Files::at(&golden(variant)).unwrap();
        let divisions = [CacheDivision::Heads, CacheDivision::Positions, CacheDivision::Auto];
        for (ranks, division) in [(1, CacheDivision::Auto)].into_iter().chain(divisions.map(|division| (2, division))) {
            let found = Inspection::open_for(&files, ranks, division).unwrap();
            let model = Model::load_files(&files, &group(ranks), &divided_by(division)).unwrap();
            assert_eq!(found.weight_bytes, model.weight_bytes(), "{variant} on {ranks}");
            let (pool, load) = (exact(777), LoadOptions::default());
            assert_eq!(found.cache_bytes(&pool, &load).unwrap(), model.pool_spec(&pool).unwrap().bytes, "{variant}");
        }
        let [one, two] = [1, 2].map(|ranks| Inspection::open_for(&files, ranks, CacheDivision::Auto).unwrap());
        assert!(one.parameters == two.parameters && one.weight_bytes > two.weight_bytes, "{variant}");
    }
}

/// Batches of recorded passes choose the tokens that single sequences get.
#[test]
fn batches_are_recorded_on_all_ranks() {
    let device = group(2);
    let model = Model::load(&golden("gpt_oss"), &device).unwrap();
    let pool = model.new_pool(&PoolOptions { sequences: 2, ..exact(64) }).unwrap();
    let prompts = [[3, 5, 7, 9], [20, 4, 60, 8]];
    let wanted = prompts.each_ref().map(|prompt| chosen(&model, prompt, 6));
    let (mut a, mut b) = (pool.sequence(), pool.sequence());
    let mut decoder = BatchDecoder::new(&model, &pool, 2).unwrap();
    for (sequence, prompt) in [&mut a, &mut b].into_iter().zip(&prompts) {
        model.feed(sequence, &prompt[..3], Logits::Last).unwrap();
    }
    let mut tokens = prompts.map(|prompt| prompt[3]).to_vec();
    let mut got = [Vec::new(), Vec::new()];
    for _ in 0..6 {
        decoder.append(&mut [(&mut a, 1), (&mut b, 1)]).unwrap();
        decoder.run(&tokens, &[&Sampling::default(), &Sampling::default()]).unwrap().wait().unwrap();
        tokens = decoder.drawn().unwrap().to_vec().unwrap();
        got.iter_mut().zip(&tokens).for_each(|(all, token)| all.push(*token));
        let other = decoder.drawn().unwrap().on_rank(1).unwrap().to_vec::<u32>().unwrap();
        assert_eq!(other, tokens, "all ranks draw the same token");
    }
    assert_eq!(got, wanted);
}

fn all() -> impl Iterator<Item = &'static str> {
    FAMILIES.into_iter().chain(MLX_FAMILIES).chain(VARIANTS).chain(GGUF_MODELS)
}

/// Models with one head, and those with one group of inputs.
const NOT_ON_TWO: [&str; 29] = [
    "qwen3_next_mlx",
    "lfm2_mlx",
    "llama_w4a16",
    "qwen2_moe_mlx",
    "glm4_moe_mlx",
    "ernie4_5_moe_mlx",
    "minimax_m2_mlx",
    "phi3",
    "qwen2_mlx",
    "smollm3_mlx",
    "granite_mlx",
    "granite_hybrid_mlx",
    "phi3_mlx",
    "muse_glimmer_mlx",
    "dense_mlx",
    "ple_shared_mlx",
    "moe_mlx",
    "qwen2_moe_gguf",
    "glm4_moe_gguf",
    "ernie4_5_moe_gguf",
    "minimax_m2_gguf",
    "gemma4_shared_gguf",
    "gemma4_moe_gguf",
    "phi3_gguf",
    "k_quants_gguf",
    "qwen3_next_gguf",
    "qwen3_5_moe_gguf",
    "lfm2_gguf",
    "lfm2_moe_gguf",
];

#[test]
fn models_match_on_two_ranks() {
    let divide = check_all(2, CacheDivision::Auto, all());
    let refused: Vec<&str> = all().filter(|variant| !divide.contains(variant)).collect();
    let sorted = |mut names: Vec<&'static str>| {
        names.sort_unstable();
        names
    };
    assert_eq!(sorted(refused), sorted(NOT_ON_TWO.to_vec()));
}

#[test]
fn models_match_on_three_ranks() {
    assert_eq!(check_all(3, CacheDivision::Auto, all()), ["olmo2_three"]);
}

#[test]
fn models_match_on_four_ranks() {
    assert_eq!(check_all(4, CacheDivision::Auto, all()), ["mistral", "ministral3", "qwen2_window", "gpt_oss", "olmo2"]);
}

/// Whether ranks divide the positions of a layer's cache.
fn divides_positions(model: &Model) -> bool {
    let mut attention = model.rank_decoder().blocks.iter().filter_map(|block| block.attention());
    attention.any(|attention| attention.position_ranks > 1)
}

#[test]
fn caches_by_heads_match() {
    // Ranks with copies of a KV head.
    assert_eq!(check_all(2, CacheDivision::Heads, ["llama", "olmo2_three"].into_iter()), ["llama"]);
    let variants = ["mistral", "ministral3", "qwen2_window", "gpt_oss", "olmo2"];
    assert_eq!(check_all(4, CacheDivision::Heads, variants.into_iter()), variants);
}

#[test]
fn caches_by_positions_match_on_two_ranks() {
    let divide = check_all(2, CacheDivision::Positions, all());
    let refused: Vec<&str> = all().filter(|variant| !divide.contains(variant)).collect();
    assert_eq!(refused.len(), NOT_ON_TWO.len(), "{refused:?}");
    assert!(refused.iter().all(|variant| NOT_ON_TWO.contains(variant)), "{refused:?}");
}

#[test]
fn caches_by_positions_match_on_four_ranks() {
    let divide = check_all(4, CacheDivision::Positions, all());
    assert_eq!(divide, ["mistral", "ministral3", "qwen2_window", "gpt_oss", "olmo2"]);
}

/// If the ranks do not divide the KV heads, they divide the positions of layers without windows.
#[test]
fn positions_are_divided_where_heads_are_not() {
    for (variant, ranks, expected) in [("llama", 2, true), ("gpt_oss", 2, false), ("gpt_oss", 4, true)] {
        let model = Model::load(&golden(variant), &group(ranks)).unwrap();
        assert_eq!(divides_positions(&model), expected, "{variant} on {ranks}");
        for block in &model.rank_decoder().blocks {
            let attention = block.attention().unwrap();
            assert!(attention.position_ranks == 1 || attention.window.is_none(), "{variant} on {ranks}");
        }
    }
}

/// Quantised caches and 16-bit activations give, up to rounding, equal logits with either division.
#[test]
fn divisions_of_other_types_agree() {
    for (activations, codec, bound) in [
        (DType::F32, Codec::F16, 1e-3),
        (DType::F32, Codec::tq(4), 2e-2),
        (DType::BF16, Codec::BF16, 0.15),
        (DType::BF16, Codec::tq(8), 0.15),
    ] {
        for variant in ["llama", "gpt_oss"] {
            let device = group(2);
            let logits = |cache_division| {
                let load = LoadOptions { activations, ..divided_by(cache_division) };
                let model = Model::load_with(&golden(variant), &device, &load).unwrap();
                assert_eq!(divides_positions(&model), cache_division == CacheDivision::Positions);
                let tokens = ids(&golden(variant).join("logits.safetensors"), "tokens");
                let pool = PoolOptions { codecs: codec.into(), ..exact(64) };
                let mut sequence = model.new_pool(&pool).unwrap().sequence();
                model.feed(&mut sequence, &tokens, Logits::All).unwrap().to_f32().unwrap()
            };
            let worst = max_difference(&logits(CacheDivision::Heads), &logits(CacheDivision::Positions));
            println!("{variant}, {activations}, {codec}: {worst:.1e}");
            assert!(worst < bound, "{variant}, {activations}, {codec}: {worst}");
        }
    }
}

/// Sealed pages of both divisions agree up to the codec's error; each rank has a mean of its rows. Decoding and prompts
/// store equal pages.
#[test]
fn sealed_pages_of_both_divisions_agree() {
    // Two of the models have biases of keys, which turn by positions of the text.
    for (variant, ranks) in [("llama", 2), ("gpt_oss", 4), ("llama_bias", 2)] {
        let tokens: Vec<u32> = (0..300).map(|at| at * 7 % 60).collect();
        let device = group(ranks);
        let logits = |codec: Codec, cache_division, piece: usize| {
            let model = Model::load_with(&golden(variant), &device, &divided_by(cache_division)).unwrap();
            let pool = PoolOptions { codecs: codec.into(), page_tokens: 16 * ranks, ..exact(300) };
            let mut sequence = model.new_pool(&pool).unwrap().sequence();
            let feed = |piece: &[u32]| model.feed(&mut sequence, piece, Logits::All).unwrap().to_f32().unwrap();
            tokens.chunks(piece).flat_map(feed).collect::<Vec<f32>>()
        };
        let codec = Codec::tq_centred(8);
        let exact = logits(Codec::F32, CacheDivision::Positions, 300);
        let by_heads = logits(codec, CacheDivision::Heads, 300);
        let [at_once, in_pieces] = [300, 23].map(|piece| logits(codec, CacheDivision::Positions, piece));
        let [of_heads, of_positions] = [&by_heads, &at_once].map(|logits| distance(logits, &exact));
        let of_pieces = distance(&in_pieces, &at_once);
        println!("{variant} on {ranks}: {of_heads:.1e} by heads, {of_positions:.1e} by positions, {of_pieces:.1e}");
        assert!(of_positions > 0.0 && of_positions < 1.3 * of_heads, "{variant} on {ranks}");
        assert!(of_pieces < of_positions / 4.0, "{variant} on {ranks}");
    }
}

/// The root mean square of the differences.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2));
    (squares.sum::<f64>() / a.len() as f64).sqrt()
}

#[test]
fn divisions_that_do_not_fit_are_refused() {
    let error = Model::load_with(&golden("olmo2_three"), &group(3), &divided_by(CacheDivision::Positions)).unwrap_err();
    let text = "256 positions of a page of layer 0 do not divide among 3 devices: the model divides among 2";
    assert!(error.to_string().starts_with(text), "{error}");
    let model = Model::load(&golden("llama"), &group(2)).unwrap();
    let error = model.new_pool(&PoolOptions { page_tokens: 16, ..exact(64) }).unwrap_err();
    assert!(error.to_string().contains("at least 32"), "{error}");
}

/// One matrix of queries, keys and values, and one of gate and up.
#[test]
fn fused_matrices_are_divided_by_parts() {
    let options = LoadOptions { context: Some(64), ..LoadOptions::default() };
    let model = Model::load_with(&golden("phi3_long"), &group(2), &options).unwrap();
    assert_eq!(
        (
            model.decoder().blocks[0].attention().unwrap().heads,
            model.rank_decoder().blocks[0].attention().unwrap().heads
        ),
        (2, 1)
    );
    check(&model, "phi3_long");
}

/// 16-bit activations, and dense matrices of another dtype than the file's.
#[test]
fn converted_matrices_are_divided() {
    let options = LoadOptions { activations: DType::BF16, dense_weights: Some(DType::F16), ..LoadOptions::default() };
    for variant in ["llama", "gpt_oss", "dense"] {
        let [one, two] = [Device::cpu(), group(2)].map(|device| {
            let model = Model::load_with(&golden(variant), &device, &options).unwrap();
            let tokens = ids(&golden(variant).join("logits.safetensors"), "tokens");
            let mut sequence = model.new_pool(&exact(64)).unwrap().sequence();
            model.feed(&mut sequence, &tokens, Logits::All).unwrap().to_f32().unwrap()
        });
        let worst = max_difference(&one, &two);
        println!("{variant}: {worst:.1e}");
        assert!(worst < 0.15, "{variant}: {worst}");
    }
}

/// The message names the part that does not divide, and the possible numbers of devices.
#[test]
fn a_model_that_does_not_divide_is_refused() {
    let error = Model::load(&golden("gpt_oss"), &group(3)).unwrap_err();
    let text = "4 heads of layer 0 do not divide among 3 devices: the model divides among 2, 4";
    assert_eq!(error.to_string(), text);
    let error = Inspection::open_for(&Files::at(&golden("phi3")).unwrap(), 2, CacheDivision::Auto).unwrap_err();
    assert_eq!(error.to_string(), "1 heads of layer 0 do not divide among 2 devices: the model runs on one");
    let error = Model::load(&golden("qwen3_5"), &group(4)).unwrap_err();
    let text = "2 key heads of the delta net of layer 0 do not divide among 4 devices: the model divides among 2";
    assert_eq!(error.to_string(), text);
    let error = Inspection::open_for(&Files::at(&golden("llama")).unwrap(), 0, CacheDivision::Auto).unwrap_err();
    assert!(error.to_string().contains("`ranks` must be at least 1"), "{error}");
}
