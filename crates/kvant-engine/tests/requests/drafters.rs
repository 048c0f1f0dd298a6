//! Models with drafters: texts are those without drafts, and the planted share of drafts is accepted.

#[path = "../../../kvant-models/tests/common/drafters.rs"]
mod checkpoints;

use std::{path::Path, sync::Arc};

use crate::{
    common::{collect, options, shipped},
    hybrid::{PAGE, golden, text},
};
use checkpoints::{Mtp, pairs, with_mtp};
use kvant::{Codec, CpuOptions, DType, Device, Tensor};
use kvant_engine::{DraftCounts, Engine, EngineOptions, EngineRequest, Event, Failure, internals};
use kvant_models::{CacheDivision, Draft, DraftDecoder, Files, LoadOptions, Model, PoolOptions, Sampling, Tokenizer};

fn plain(path: &Path) -> Model {
    let cpu = CpuOptions { threads: Some(2), batch_invariant: true, ..CpuOptions::default() };
    Model::load(path, &Device::cpu_with(cpu).unwrap()).unwrap()
}

fn with_drafter(path: &Path) -> Model {
    pair(path, path)
}

fn pair(target: &Path, drafter: &Path) -> Model {
    plain(target).with_drafter(&Files::at(drafter).unwrap(), None).unwrap()
}

/// An engine in which each step has all drafts of the drafter.
fn engine(model: &Model, options: EngineOptions) -> Engine {
    start(model, options.adaptive_drafts(false).prompt_lookup(false))
}

fn start(model: &Model, options: EngineOptions) -> Engine {
    Engine::start(model.clone(), tokenizer(), options.page_tokens(PAGE)).unwrap()
}

/// Any tokenizer: the tests look at ids.
fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::load(shipped()).unwrap())
}

fn request(prompt: &[u32], max_tokens: usize, sampling: &Sampling) -> EngineRequest {
    EngineRequest::new(prompt.to_vec()).max_tokens(max_tokens).stop_ids(Vec::new()).sampling(sampling.clone())
}

/// The texts of all requests at once. Every other one is sampled.
fn texts(engine: &Engine, prompts: &[Vec<u32>], max_tokens: usize) -> Vec<Vec<u32>> {
    let submit = |(seed, prompt): (usize, &Vec<u32>)| {
        let temperature = if seed % 2 == 0 { 0.0 } else { 0.8 };
        let sampling = Sampling::default().temperature(temperature).seed(seed as u64);
        engine.submit(request(prompt, max_tokens, &sampling)).unwrap()
    };
    let running: Vec<_> = prompts.iter().enumerate().map(submit).collect();
    running.into_iter().map(|responses| collect(responses).0).collect()
}

fn prompts() -> Vec<Vec<u32>> {
    // Some texts begin alike.
    let prompt = |seed: u32| text(seed % 3, 30 + 3 * seed as usize).into_iter().map(|token| token % 4).collect();
    (0..6).map(prompt).collect()
}

/// Texts of a model with a drafter are those without, in engines with these options.
/// Returns the preemptions, and the drafts of the last engine.
fn check(
    name: &str,
    [target, drafter]: [&Path; 2],
    codec: Codec,
    all: &[(usize, EngineOptions)],
) -> (u64, DraftCounts) {
    let (model, prompts) = (pair(target, drafter), prompts());
    let with = |options: EngineOptions| options.codecs(codec).sequences(6);
    let want = texts(&engine(&plain(target), with(options())), &prompts, 60);
    let bytes = engine(&model, with(options())).stats().pages_bytes;
    let (mut preemptions, mut counts) = (0, DraftCounts::default());
    for (drafts, options) in all {
        // Memory in percent of the room for all texts.
        let memory = options.memory.map(|percent| bytes * percent / 100);
        let options = EngineOptions::memory(with(options.clone()), memory.unwrap_or(bytes));
        let engine = engine(&model, options.drafts(*drafts));
        for round in 0..2 {
            assert_eq!(texts(&engine, &prompts, 60), want, "{name}, {codec}, round {round}, {drafts} drafts");
        }
        let stats = engine.stats();
        counts = stats.drafts;
        println!("{name}, {codec}: {} of {} drafts, {} preempted", counts.accepted, counts.tokens, stats.preemptions);
        preemptions += stats.preemptions;
    }
    (preemptions, counts)
}

/// Texts do not depend on a drafter whose states are rolled back: with few pages, found prefixes and small steps.
#[test]
fn drafters_of_hybrids_change_nothing() {
    let path = with_mtp(&golden(""), Mtp::Random);
    let all = [
        (3, options()),
        (5, options().step_tokens(40).overlap(true)),
        (4, options().memory(17).step_tokens(24)),
        (5, options().memory(17).host_memory(64 << 20).overlap(true)),
    ];
    let (preemptions, counts) = check("mtp", [&path, &path], Codec::F32, &all);
    assert!(preemptions > 0 && counts.accepted > 50 && counts.accepted < counts.tokens, "{counts:?}");
    std::fs::remove_dir_all(path).unwrap();
}

/// Texts do not depend on drafters of any kind, with windows that are passed, and exact and sealed pages.
#[test]
fn drafters_change_nothing() {
    let all = [(4, options().memory(17).step_tokens(24)), (5, options().overlap(true))];
    // The first assistant only: they have the same path.
    for (name, target, drafter) in pairs(&golden("")).into_iter().take(3) {
        for codec in [Codec::F32, Codec::tq_centred(4)] {
            let (_, counts) = check(name, [&target, &drafter], codec, &all);
            assert!(counts.tokens > 200 && counts.accepted < counts.tokens, "{name}: {counts:?}");
            assert!(counts.accepted > 20 || name.starts_with("assistant"), "{name}: {counts:?}");
        }
    }
}

/// A drafter whose logits are not numbers drafts nothing.
#[test]
fn a_drafter_without_numbers_changes_nothing() {
    let path = with_mtp(&golden(""), Mtp::NotANumber);
    let (_, counts) = check("not a number", [&path, &path], Codec::F32, &[(4, options())]);
    assert_eq!(counts.tokens, 0);
    std::fs::remove_dir_all(path).unwrap();
}

/// Lookup and a drafter together change nothing either.
#[test]
fn lookup_beside_a_drafter() {
    let path = with_mtp(&golden(""), Mtp::Random);
    let (model, prompts) = (with_drafter(&path), prompts());
    let options = options().sequences(6);
    let want = texts(&engine(&plain(&path), options.clone()), &prompts, 60);
    for (is_adaptive, overlap) in [(false, false), (false, true), (true, true)] {
        let options = options.clone().drafts(4).adaptive_drafts(is_adaptive).overlap(overlap);
        let engine = start(&model, options);
        assert_eq!(texts(&engine, &prompts, 60), want, "{is_adaptive} {overlap}");
        let drafts = engine.stats().drafts;
        println!("{} of {} drafts in {} rows", drafts.accepted, drafts.tokens, drafts.rows);
        assert!(is_adaptive || drafts.accepted > 50, "{drafts:?}");
    }
    std::fs::remove_dir_all(path).unwrap();
}

/// The drafts of a request are the same if its prefix was found, if it was computed in small steps, and after others.
#[test]
fn drafts_continue_found_prefixes() {
    let (_, target, head) = pairs(&golden("")).swap_remove(1);
    let (model, prompt) = (pair(&target, &head), text(2, 75));
    let ask = |engine: &Engine| {
        let before = engine.stats().drafts;
        let (ids, _, finished) = collect(engine.submit(request(&prompt, 50, &Sampling::default())).unwrap());
        let after = engine.stats().drafts;
        (ids, finished.usage.cached_tokens, after.tokens - before.tokens, after.accepted - before.accepted)
    };
    let one = engine(&model, options().drafts(4));
    let (ids, cached, tokens, accepted) = ask(&one);
    assert!(cached == 0 && accepted > 0, "{accepted} of {tokens}");
    assert_eq!(ask(&one), (ids.clone(), 64, tokens, accepted));
    let small = engine(&model, options().drafts(4).sequences(2).step_tokens(12));
    assert_eq!(ask(&small), (ids, 0, tokens, accepted));
}

/// A drafter that agrees with its model has nearly all drafts accepted, also if they are sampled.
#[test]
fn agreeing_drafts_are_accepted() {
    let path = with_mtp(&golden(""), Mtp::Agrees);
    let (model, prompts) = (with_drafter(&path), (0..4).map(|seed| text(seed, 20)).collect::<Vec<_>>());
    let want = texts(&engine(&plain(&path), options()), &prompts, 100);
    // An adaptive engine has steps without drafts, which overlap: the drafter catches up when they start.
    for is_adaptive in [false, true] {
        let options = options().drafts(5).overlap(true);
        let engine = start(&model, options.adaptive_drafts(is_adaptive).prompt_lookup(false));
        assert_eq!(texts(&engine, &prompts, 100), want);
        let DraftCounts { tokens, accepted, .. } = engine.stats().drafts;
        println!("adaptive {is_adaptive}: {accepted} of {tokens}, {} steps", engine.stats().steps);
        assert!(accepted * 100 >= tokens * 95, "{accepted} of {tokens}");
        assert!(is_adaptive || tokens > 200 && engine.stats().steps < 50, "{:?}", engine.stats());
    }
}

/// The first draft after each prefix of a text.
fn first_drafts(model: &Model, tokens: &[u32], how: &Sampling) -> Vec<Option<u32>> {
    let pool = model.new_pool(&PoolOptions { codecs: Codec::F32.into(), longest: 256, ..PoolOptions::default() });
    let mut drafter = DraftDecoder::new(model, pool.as_ref().unwrap(), 1, 1, 8).unwrap();
    let pool = pool.unwrap();
    let (mut sequence, mut drafts) = (pool.sequence(), vec![None]);
    for (position, pair) in tokens.windows(2).enumerate() {
        let step = pool.step(&mut [(&mut sequence, 1)]).unwrap();
        let logits = Tensor::zeros(model.device(), DType::F32, &[1, model.vocab_size()]).unwrap();
        let states = Some(drafter.states());
        model.start_with(&pool, &step, &pair[..1], None, (&[0], &logits), states).unwrap().wait().unwrap();
        let (sequence, next) = (&mut sequence, &pair[1..]);
        let draft = Draft { sequence, position, rows: 0..1, next, fed: None, drafts: 1, sampling: how };
        drafts.push(drafter.propose(&mut [draft], None).unwrap()[0].first().copied());
    }
    drafts
}

/// The engine verifies and accepts exactly the drafts that a replay of its steps accepts.
#[test]
fn the_planted_share_is_accepted() {
    const PROMPT: usize = 20;
    const GENERATED: usize = 150;
    let mut shares = Vec::new();
    for size in [0.05, 0.15, 0.4] {
        let path = with_mtp(&golden(""), Mtp::Differs(size));
        let model = with_drafter(&path);
        let how = Sampling::default().temperature(1.0).seed(3);
        let engine = engine(&model, options().drafts(1));
        let prompt = text(1, PROMPT);
        let (ids, ..) = collect(engine.submit(request(&prompt, GENERATED, &how)).unwrap());
        let tokens = [prompt, ids].concat();
        assert_eq!(tokens.len(), PROMPT + GENERATED);
        let drafts = first_drafts(&model, &tokens, &how);
        // The first token is sampled without a draft. The last one has none: it would be the end of the text.
        let (mut known, mut tried, mut accepted) = (PROMPT + 1, 0, 0);
        while known < tokens.len() {
            // After a wrong draft, states go back to the token before it: the next step has a draft, too.
            let has_draft = known + 1 < tokens.len();
            let is_right = has_draft && drafts[known - 1] == Some(tokens[known]);
            tried += u64::from(has_draft);
            accepted += u64::from(is_right);
            known += 1 + usize::from(is_right);
        }
        let stats = engine.stats().drafts;
        assert_eq!((stats.tokens, stats.accepted), (tried, accepted), "noise of {size}");
        shares.push(accepted as f64 / tried as f64);
        std::fs::remove_dir_all(path).unwrap();
    }
    println!("shares {shares:?}");
    assert!(shares.is_sorted_by(|a, b| a > b) && shares[0] > 0.7 && shares[2] < 0.6, "{shares:?}");
}

/// A failure of the drafter ends the requests of the step with an error. Later requests are served.
#[test]
fn a_failing_drafter_ends_its_requests() {
    let path = with_mtp(&golden(""), Mtp::Random);
    let (model, prompts) = (with_drafter(&path), prompts());
    let want = texts(&engine(&plain(&path), options()), &prompts, 20);
    for overlap in [false, true] {
        let engine = engine(&model, options().drafts(3).overlap(overlap));
        for _ in 0..2 {
            internals::fail_drafter(&engine);
            let responses = engine.submit(request(&prompts[0], 20, &Sampling::default())).unwrap();
            let failure = responses.into_iter().find_map(|event| match event {
                Event::Failed(failure) => Some(failure),
                _ => None,
            });
            let is_of_drafter = |reason: &String| reason.starts_with("the drafter has failed: ");
            assert!(matches!(&failure, Some(Failure::Request(reason)) if is_of_drafter(reason)), "{failure:?}");
            assert_eq!(texts(&engine, &prompts, 20), want);
        }
        assert_eq!(engine.stats().finished_failed, 2);
    }
}

/// Models with drafters that are divided among devices, with caches divided by heads and by positions.
#[test]
fn drafters_of_groups_change_nothing() {
    for (name, target, drafter) in pairs(&golden("")).into_iter().take(3) {
        for (division, page) in [(CacheDivision::Heads, PAGE), (CacheDivision::Positions, 2 * PAGE)] {
            let cpu = CpuOptions { threads: Some(1), batch_invariant: true, ..CpuOptions::default() };
            let ranks: Vec<Device> = (0..2).map(|_| Device::cpu_with(cpu).unwrap()).collect();
            let load = LoadOptions { cache_division: division, ..LoadOptions::default() };
            let plain = Model::load_with(&target, &Device::group(&ranks).unwrap(), &load).unwrap();
            let model = plain.clone().with_drafter(&Files::at(&drafter).unwrap(), None).unwrap();
            let run = |model: &Model, drafts| {
                let options = options().drafts(drafts).adaptive_drafts(false).prompt_lookup(false).page_tokens(page);
                let engine = Engine::start(model.clone(), tokenizer(), options).unwrap();
                (texts(&engine, &prompts()[..3], 30), engine.stats().drafts.tokens)
            };
            let (got, drafts) = run(&model, 3);
            assert_eq!(got, run(&plain, 0).0, "{name}, {division:?}");
            assert!(drafts > 50, "{name}, {division:?}: {drafts}");
        }
    }
}
