//! Whole models on GPU kernels: on every GPU present, and the Metal kernels in msl-host. Recorded batches also run on
//! the CPU.

mod common;

use common::{FAMILIES, VARIANTS, drafters, exact, floats, golden, ids, max_difference, shipped};
use kvant::{Codec, DType, Device, DeviceKind, Sequence, Tensor};
use kvant_models::{
    BatchDecoder, CacheDivision, Decoder, DeviceSampler, DeviceTokens, Draft, DraftDecoder, Error, Files, LoadOptions,
    Logits, Model, PoolOptions, Sampling,
};

/// Maximum difference of logits with an f32 cache.
const TOLERANCE: f32 = 2e-3;

/// The logits of `tokens`: the first `prompt` tokens at once, the rest one by one, half of them with a recorded pass.
fn logits(model: &Model, options: &PoolOptions, tokens: &[u32], prompt: usize) -> Vec<f32> {
    let mut sequence = model.new_pool(options).unwrap().sequence();
    let recorded = prompt + (tokens.len() - prompt) / 2;
    let pieces = std::iter::once(&tokens[..prompt]).chain(tokens[prompt..recorded].chunks(1));
    let forward = |piece| model.feed(&mut sequence, piece, Logits::All).unwrap().to_f32().unwrap();
    let mut logits: Vec<f32> = pieces.flat_map(forward).collect();
    let mut decoder = Decoder::new(model, &mut sequence, Sampling::default()).unwrap();
    for token in tokens[recorded..].chunks(1) {
        decoder.feed(token).unwrap();
        logits.extend(decoder.logits().to_f32().unwrap());
    }
    logits
}

/// The devices with their own kernels, and the maximum number of tokens to test: msl-host is slow.
fn gpus() -> Vec<(Device, usize)> {
    let present = Device::list().into_iter().filter_map(|entry| entry.device.ok());
    let mut gpus: Vec<(Device, usize)> = present
        .filter(|device| matches!(device.kind(), DeviceKind::Metal | DeviceKind::Cuda))
        .map(|device| (device, usize::MAX))
        .collect();
    let only = std::env::var("KVANT_TEST_DEVICE").ok();
    let wanted = |kind: DeviceKind| only.as_deref().is_none_or(|only| only == kind.name());
    gpus.retain(|(device, _)| wanted(device.kind()));
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    if wanted(DeviceKind::Metal) {
        gpus.push((msl(kvant_msl::Build::Plain, kvant_msl::Schedule::Random(1)), 20));
        gpus.push((msl(kvant_msl::Build::Checker, kvant_msl::Schedule::Reverse), 5));
    }
    gpus
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn msl(build: kvant_msl::Build, schedule: kvant_msl::Schedule) -> Device {
    kvant_msl::device(kvant_msl::Runs::once(build, schedule)).unwrap_or_else(|e| panic!("{e}"))
}

/// Compared with transformers and MLX.
#[test]
fn every_variant_matches() {
    for (device, max_tokens) in gpus() {
        for variant in VARIANTS.into_iter().chain(FAMILIES) {
            let file = golden(variant).join("logits.safetensors");
            let (mut tokens, expected) = (ids(&file, "tokens"), floats(&file, "logits"));
            tokens.truncate(max_tokens);
            let model = Model::load(&golden(variant), &device).unwrap();
            let got = logits(&model, &exact(1024), &tokens, tokens.len() * 3 / 4);
            let worst = max_difference(&got, &expected[..got.len()]);
            println!("{device}, {variant}: {worst:.1e}");
            assert!(worst < TOLERANCE, "{device}, {variant}: off by {worst}");
        }
    }
}

/// Groups of GPUs, if the machine has several.
fn groups() -> Vec<Device> {
    let gpus: Vec<Device> = (0..8).map_while(|number| Device::cuda(number).ok()).collect();
    [2, 4].into_iter().filter_map(|ranks| gpus.get(..ranks)).map(|gpus| Device::group(gpus).unwrap()).collect()
}

/// Models that are divided among GPUs: logits, and batches of the shipped model by recorded passes.
#[test]
fn divided_models_match() {
    for device in groups() {
        for cache_division in [CacheDivision::Auto, CacheDivision::Positions] {
            let load = LoadOptions { cache_division, ..LoadOptions::default() };
            let mut divided = 0;
            for variant in VARIANTS.into_iter().chain(FAMILIES) {
                let file = golden(variant).join("logits.safetensors");
                let (tokens, expected) = (ids(&file, "tokens"), floats(&file, "logits"));
                let model = match Model::load_with(&golden(variant), &device, &load) {
                    Ok(model) => model,
                    // The second one is for recurrent states.
                    Err(Error::Indivisible { .. } | Error::Unsupported { .. }) => continue,
                    Err(error) => panic!("{device}, {variant}: {error}"),
                };
                let got = logits(&model, &exact(1024), &tokens, tokens.len() * 3 / 4);
                let worst = max_difference(&got, &expected);
                println!("{device}, {variant}, {cache_division:?}: {worst:.1e}");
                assert!(worst < TOLERANCE, "{device}, {variant}, {cache_division:?}: off by {worst}");
                divided += 1;
            }
            assert!(divided > 4, "{divided} models");
            let model = Model::load_with(&shipped(), &device, &load).unwrap();
            let prompts: Vec<Vec<u32>> =
                [30, 3, 17].map(|length| (0..length).map(|i| i * 29 % 90 + 3).collect()).into();
            check_batches(&model, Codec::F32, &prompts, 12, true);
        }
    }
}

/// The shipped model compared with the CPU: exact and compressed caches, a prompt and single tokens after it.
#[test]
fn the_shipped_model_matches_the_cpu() {
    let cpu = Model::load(&shipped(), &Device::cpu()).unwrap();
    let all = ids(&golden("rustdoc-11m").join("4bit.safetensors"), "tokens");
    for (device, max_tokens) in gpus() {
        let model = Model::load(&shipped(), &device).unwrap();
        let tokens = &all[..max_tokens.min(all.len())];
        for (codec, tolerance) in [(Codec::F32, TOLERANCE), (Codec::BF16, 0.1), (Codec::tq(8), 0.1)] {
            let options = PoolOptions { codecs: codec.into(), ..exact(256) };
            let prompt = tokens.len() * 3 / 4;
            // Pieces short enough that the CPU multiplies in f32: from 16 tokens on it rounds activations to 16 bits.
            let mut sequence = cpu.new_pool(&options).unwrap().sequence();
            let exact = |piece| cpu.feed(&mut sequence, piece, Logits::All).unwrap().to_f32().unwrap();
            let want: Vec<f32> = tokens.chunks(7).flat_map(exact).collect();
            let got = logits(&model, &options, tokens, prompt);
            let worst = max_difference(&got, &want);
            println!("{device}, {codec}: {worst:.1e}");
            assert!(worst < tolerance, "{device}, {codec} cache: off by {worst}");
        }
    }
}

/// Compares recorded batches with unrecorded ones: logits and samples of batches that shrink and grow, so that rows are
/// inactive, and of a sequence that exceeds the maximum length of its pass. In every second step some tokens come from
/// device memory; in others a sequence gets up to three tokens, and one of them is rolled back. `ahead`: passes are
/// recorded in advance.
fn check_batches(model: &Model, codec: Codec, prompts: &[Vec<u32>], steps: usize, ahead: bool) {
    let (vocab, device) = (model.vocab_size() as u32, model.device());
    // In a recording, several tokens of a sequence are separate rows, and sums have another order: logits differ by
    // 2e-5 on a CPU. Close to a threshold, a vector of a quantised cache then gets another code.
    let tolerance = if codec != Codec::F32 { 0.02 } else { TOLERANCE };
    let longest = prompts.iter().map(Vec::len).max().unwrap() + 3 * steps;
    let options = PoolOptions { codecs: codec.into(), sequences: 2 * prompts.len(), ..exact(longest) };
    let pool = model.new_pool(&options).unwrap();
    let mut recorded: Vec<Sequence> = prompts.iter().map(|_| pool.sequence()).collect();
    for (sequence, prompt) in recorded.iter_mut().zip(prompts) {
        model.feed(sequence, prompt, Logits::Last).unwrap();
    }
    let mut plain: Vec<Sequence> = recorded.iter().map(Sequence::fork).collect();
    let mut decoder = BatchDecoder::new(model, &pool, prompts.len() + 2).unwrap();
    let (sizes, mixed) = (decoder.sizes(longest), model.mixed_sizes(prompts.len(), 9, longest));
    // 1, 2, 4 and 8 rows; a CPU compiles nothing.
    let is_host = device.kind() == DeviceKind::Cpu;
    assert!(sizes.len() >= if is_host { 0 } else { 2 } && sizes.is_empty() == is_host && mixed.is_empty() == is_host);
    if ahead {
        sizes.into_iter().for_each(|size| decoder.record_size(size).unwrap());
        mixed.into_iter().for_each(|size| model.prepare(&pool, size).unwrap());
    }
    let sampler = DeviceSampler::new(device, prompts.len() + 2).unwrap();
    let (greedy, warm) = (Sampling::default(), Sampling::default().temperature(0.8).top_k(20).seed(3));
    // The parameters of each row, in three kinds of steps.
    let sampling = |index: usize, row: usize| match index % 3 {
        0 => None,
        1 => Some(greedy.clone()),
        _ => Some(if (index + row).is_multiple_of(3) { greedy.clone() } else { warm.clone().seed(row as u64) }),
    };
    for index in 0..steps {
        let live = prompts.len() - index % prompts.len();
        // Drafts of one sequence.
        let drafts = index % 3;
        let counts: Vec<usize> = (0..live).map(|of| if of == index % live { 1 + drafts } else { 1 }).collect();
        let rows = live + drafts;
        let ids: Vec<u32> = (0..rows as u32).map(|row| (index as u32 * 7 + row * 31 + 1) % vocab.min(90)).collect();
        let draws: Vec<Sampling> = (0..rows).filter_map(|row| sampling(index, row)).collect();
        let draws: Vec<&Sampling> = draws.iter().collect();
        let mut batch: Vec<(&mut Sequence, usize)> = recorded.iter_mut().zip(counts.iter().copied()).collect();
        decoder.append(&mut batch).unwrap();
        // The tokens of some rows are in device memory, in another order.
        let drawn: Vec<u32> = ids.iter().rev().copied().collect();
        let drawn = Tensor::from_slice(device, &drawn, &[rows]).unwrap();
        let places: Vec<_> = (0..rows).filter(|row| row % 3 != 1).map(|row| (row, rows - 1 - row)).collect();
        let fed = (index % 2 == 1).then_some(DeviceTokens { drawn: &drawn, places: &places });
        let mut known = ids.clone();
        places.iter().filter(|_| fed.is_some()).for_each(|&(row, _)| known[row] = u32::MAX);
        decoder.run_fed(&known, fed, &draws).unwrap().wait().unwrap();
        let got = decoder.logits().unwrap();
        let mut batch: Vec<(&mut Sequence, usize)> = plain.iter_mut().zip(counts.iter().copied()).collect();
        let step = pool.step(&mut batch).unwrap();
        let want = Tensor::zeros(device, DType::F32, &[rows, model.vocab_size()]).unwrap();
        let all: Vec<usize> = (0..rows).collect();
        model.start(&pool, &step, &known, fed, &all, &want).unwrap().wait().unwrap();
        let worst = max_difference(&got.to_f32().unwrap(), &want.to_f32().unwrap());
        println!("{device}, {codec}, step {index}: {worst:.1e}");
        assert!(worst < tolerance, "{device}, {codec}, step {index}: off by {worst}");
        if !draws.is_empty() {
            let ends = plain.iter().zip(&counts).flat_map(|(s, count)| s.len() + 1 - count..s.len() + 1);
            let how: Vec<_> = draws.iter().zip(ends).map(|(&draw, end)| (draw, end as u32)).collect();
            let want: Vec<u32> = sampler.draw(&got, &how).unwrap().into_iter().map(Option::unwrap).collect();
            assert_eq!(decoder.drawn().unwrap().to_vec::<u32>().unwrap(), want, "{device}, step {index}");
        }
        for sequences in [&mut recorded, &mut plain] {
            let with_drafts = &mut sequences[index % live];
            let right = with_drafts.len() - drafts.min(1);
            if pool.spec().states.is_empty() {
                with_drafts.truncate(right).unwrap();
            }
        }
    }
}

#[test]
fn recorded_batches_match() {
    let all = [(Device::cpu(), usize::MAX)].into_iter().chain(gpus());
    for (device, max_tokens) in all {
        let prompt = |len: usize| (0..len as u32).map(|i| i * 13 % 90 + 1).collect::<Vec<u32>>();
        let (variants, steps) = if max_tokens < usize::MAX { (&VARIANTS[2..4], 4) } else { (&VARIANTS[..], 12) };
        for variant in variants.iter().chain(if max_tokens < usize::MAX { [].iter() } else { FAMILIES.iter() }) {
            let model = Model::load(&golden(variant), &device).unwrap();
            check_batches(
                &model,
                Codec::F32,
                &[prompt(30), prompt(3), prompt(17), prompt(9), prompt(22)],
                steps,
                variant.len() % 2 == 0,
            );
        }
        if max_tokens == usize::MAX {
            let model = Model::load(&shipped(), &device).unwrap();
            for codec in [Codec::F32, Codec::tq(8)] {
                check_batches(&model, codec, &[prompt(1016), prompt(60)], 16, true);
            }
        }
    }
}

#[test]
fn batches_that_do_not_fit_are_rejected() {
    let model = Model::load(&golden("dense"), &Device::cpu()).unwrap();
    let pool = model.new_pool(&PoolOptions { sequences: 3, ..exact(100) }).unwrap();
    let mut sequences = [pool.sequence(), pool.sequence(), pool.sequence()];
    let rejected = |result: kvant_models::Result<()>, name: &str| {
        assert!(matches!(result, Err(kvant_models::Error::Argument { arg, .. }) if arg == name), "{name}");
    };
    rejected(BatchDecoder::new(&model, &pool, 0).map(drop), "rows");
    let other = Model::load(&golden("llama"), &Device::cpu()).unwrap();
    rejected(BatchDecoder::new(&other, &pool, 1).map(drop), "pool");
    let mut decoder = BatchDecoder::new(&model, &pool, 2).unwrap();
    rejected(decoder.run(&[], &[]).map(drop), "tokens");
    rejected(decoder.append(&mut []), "batch");
    let [a, b, c] = &mut sequences;
    rejected(decoder.append(&mut [(a, 0), (b, 1)]), "batch");
    rejected(decoder.append(&mut [(a, 2), (b, 1)]), "batch");
    rejected(decoder.append(&mut [(a, usize::MAX), (b, 1)]), "batch");
    rejected(decoder.append(&mut [(a, 1), (b, 1), (c, 1)]), "batch");
    let mut foreign = model.new_pool(&exact(100)).unwrap().sequence();
    assert!(matches!(decoder.append(&mut [(&mut foreign, 1)]), Err(kvant_models::Error::Kvant(_))));
    rejected(decoder.run(&[1], &[]).map(drop), "tokens");
    assert!(sequences.iter().all(Sequence::is_empty));
    decoder.append(&mut [(&mut sequences[0], 1)]).unwrap();
    rejected(decoder.run(&[1, 2], &[]).map(drop), "tokens");
    rejected(decoder.run(&[1], &[&Sampling::default(); 2]).map(drop), "draws");
    rejected(decoder.run(&[u32::MAX], &[]).map(drop), "tokens");
    let drawn = Tensor::from_slice(&Device::cpu(), &[1u32, 2], &[2]).unwrap();
    for places in [&[(1, 0)][..], &[(0, 0), (0, 1)]] {
        let fed = DeviceTokens { drawn: &drawn, places };
        rejected(decoder.run_fed(&[1], Some(fed), &[]).map(drop), "fed");
    }
    let beyond = DeviceTokens { drawn: &drawn, places: &[(0, 2)] };
    assert!(matches!(decoder.run_fed(&[1], Some(beyond), &[]), Err(kvant_models::Error::Kvant(_))));
    decoder.run(&[1], &[]).unwrap().wait().unwrap();
}

/// A greedy text after a prompt, and the drafts in each step. Steps verify the drafts in recorded passes, unless states
/// would have to be rolled back.
fn draft_greedily(model: &Model, prompt: &[u32], steps: usize) -> (Vec<u32>, Vec<Vec<u32>>) {
    const DRAFTS: usize = 4;
    let pool = model.new_pool(&exact(256)).unwrap();
    let mut drafter = DraftDecoder::new(model, &pool, 1, DRAFTS, 32).unwrap();
    let mut decoder = BatchDecoder::new(model, &pool, 1 + DRAFTS).unwrap();
    decoder.leave_states(drafter.states()).unwrap();
    // Half of the kinds record in advance.
    if drafter.states().is_of_every_row() && model.device().kind() == DeviceKind::Cuda {
        drafter.sizes(256).into_iter().for_each(|size| drafter.record_size(size).unwrap());
    }
    let (mut sequence, mut tokens, greedy) = (pool.sequence(), prompt.to_vec(), Sampling::default());
    let (mut drafts, mut all): (Vec<u32>, Vec<Vec<u32>>) = (Vec::new(), Vec::new());
    // The prompt in short pieces, in which the CPU does not round activations.
    let (first, last) = prompt.split_at(prompt.len() - 1);
    for (position, piece) in first.chunks(7).enumerate().map(|(index, piece)| (7 * index, piece)) {
        let step = pool.step(&mut [(&mut sequence, piece.len())]).unwrap();
        let logits = Tensor::zeros(model.device(), DType::F32, &[1, model.vocab_size()]).unwrap();
        let wanted = (&[piece.len() - 1][..], &logits);
        model.start_with(&pool, &step, piece, None, wanted, Some(drafter.states())).unwrap().wait().unwrap();
        let rows = if drafter.states().is_of_every_row() { 0..piece.len() } else { 0..1 };
        let position = position + piece.len() - rows.len();
        let next = &prompt[position + 1..position + 1 + rows.len()];
        let sequence = &mut sequence;
        let draft = Draft { sequence, position, rows, next, fed: None, drafts: 0, sampling: &greedy };
        assert!(drafter.propose(&mut [draft], None).unwrap()[0].is_empty());
    }
    assert_eq!(last.len(), 1);
    for _ in 0..steps {
        let position = sequence.len();
        if !model.state_layers().is_empty() {
            drafts.clear();
        }
        let fed = [&tokens[position..], &drafts].concat();
        decoder.append(&mut [(&mut sequence, fed.len())]).unwrap();
        decoder.run(&fed, &vec![&greedy; fed.len()]).unwrap().wait().unwrap();
        let drawn = decoder.drawn().unwrap().to_vec::<u32>().unwrap();
        let accepted = drawn.iter().zip(&drafts).take_while(|(drawn, draft)| drawn == draft).count();
        tokens.extend(&drawn[..accepted + 1]);
        sequence.truncate(position + accepted + 1).unwrap();
        let (rows, next) = (0..accepted + 1, &tokens[position + 1..]);
        let sequence = &mut sequence;
        let draft = Draft { sequence, position, rows, next, fed: None, drafts: DRAFTS, sampling: &greedy };
        drafts = drafter.propose(&mut [draft], None).unwrap().remove(0);
        all.push(drafts.clone());
    }
    (tokens, all)
}

/// Drafters of each kind: texts and drafts are those of the CPU.
#[test]
fn drafts_match_the_cpu() {
    let prompt: Vec<u32> = (0..22).map(|i| i * 13 % 90 + 1).collect();
    for (name, target, files) in drafters::pairs(&golden("")) {
        let load = |device: &Device| {
            let model = Model::load(&target, device).unwrap();
            model.with_drafter(&Files::at(&files).unwrap(), None).unwrap()
        };
        let mut expected = Vec::new();
        for (device, max_tokens) in [(Device::cpu(), usize::MAX)].into_iter().chain(gpus()) {
            let (steps, prompt) = if max_tokens < usize::MAX { (3, &prompt[..8]) } else { (20, &prompt[..]) };
            let got = draft_greedily(&load(&device), prompt, steps);
            if let Some((.., want)) = expected.iter().find(|(length, _)| *length == prompt.len()) {
                assert_eq!(got, *want, "{name} on {device}");
                continue;
            }
            assert!(got.1.iter().all(|drafts| drafts.len() == 4), "{name} on {device}");
            expected.push((prompt.len(), got));
            if device.kind() == DeviceKind::Cpu {
                expected.push((8, draft_greedily(&load(&device), &prompt[..8], 3)));
            }
        }
    }
}
