//! Models with recurrent states: the results of single requests, for prefixes, turns, branches and preemptions.

use std::{ops::ControlFlow, path::PathBuf, sync::Arc};

use crate::common::{collect, options, shipped};
use kvant::{Codec, CpuOptions, Device};
use kvant_engine::{Engine, EngineOptions, EngineRequest, Finished};
use kvant_models::{Model, PoolOptions, Request, Tokenizer, generate};

const PAGE: usize = 16;
/// One family for each kind of recurrent layer.
const FAMILIES: [&str; 2] = ["qwen3_5", "lfm2"];

fn model(family: &str) -> Model {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../kvant-models/tests/golden").join(family);
    let cpu = CpuOptions { threads: Some(2), batch_invariant: true, ..CpuOptions::default() };
    Model::load(&golden, &Device::cpu_with(cpu).unwrap()).unwrap()
}

fn engine(family: &str, options: EngineOptions) -> Engine {
    // Any tokenizer: the tests look at ids.
    let tokenizer = Arc::new(Tokenizer::load(shipped()).unwrap());
    Engine::start(model(family), tokenizer, options.page_tokens(PAGE)).unwrap()
}

/// Tokens of a text.
fn text(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| 3 + (at * 7 + seed * 31 + at * at * (seed + 1)) % 90).collect()
}

/// The text after a prompt, computed alone.
fn alone(model: &Model, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let pool = model.new_pool(&PoolOptions { codecs: Codec::F32.into(), longest: 256, ..PoolOptions::default() });
    let (mut sequence, mut ids) = (pool.unwrap().sequence(), Vec::new());
    let request = Request { max_tokens, ..Request::new(prompt) };
    generate(model, &mut sequence, &request, |id| {
        ids.push(id);
        ControlFlow::Continue(())
    })
    .unwrap();
    ids
}

fn ask(engine: &Engine, prompt: &[u32], max_tokens: usize) -> (Vec<u32>, Finished) {
    let request = EngineRequest::new(prompt.to_vec()).max_tokens(max_tokens).stop_ids(Vec::new());
    let (ids, _, finished) = collect(engine.submit(request).unwrap());
    (ids, finished)
}

#[test]
fn concurrent_requests_get_the_results_of_single_ones() {
    for family in FAMILIES {
        for overlap in [false, true] {
            let engine = engine(family, options().sequences(5).step_tokens(24).overlap(overlap));
            let model = model(family);
            let prompts: Vec<Vec<u32>> = (0..9).map(|seed| text(seed, 5 + 13 * seed as usize)).collect();
            let submit = |prompt: &Vec<u32>| {
                let request = EngineRequest::new(prompt.clone()).max_tokens(20).stop_ids(Vec::new());
                engine.submit(request).unwrap()
            };
            let all: Vec<_> = prompts.iter().map(submit).collect();
            for (prompt, responses) in prompts.iter().zip(all) {
                assert_eq!(collect(responses).0, alone(&model, prompt, 20), "{family}: {} tokens", prompt.len());
            }
            assert!(engine.stats().recorded_steps > 0);
        }
    }
}

/// Each turn of a chat computes its new tokens, and at most a page of the turns before.
#[test]
fn turns_continue_where_the_last_one_ended() {
    for family in FAMILIES {
        for overlap in [false, true] {
            let (engine, model) = (engine(family, options().overlap(overlap)), model(family));
            let mut history = text(1, 30);
            for turn in 0..10 {
                let known = history.len().saturating_sub(1);
                history.extend(text(2 + turn, 9));
                let (ids, finished) = ask(&engine, &history, 7);
                assert_eq!(ids, alone(&model, &history, 7), "{family}: turn {turn}");
                let cached = finished.usage.cached_tokens;
                // The last token of a turn was sampled, not computed.
                let expected = if turn == 0 { 0 } else { known / PAGE * PAGE };
                assert_eq!(cached, expected, "{family}: turn {turn} of {} tokens", history.len());
                history.extend(ids);
            }
        }
    }
}

/// The second text that begins alike computes the states where it leaves the first one; the third continues there.
#[test]
fn texts_share_what_they_begin_with() {
    for family in FAMILIES {
        let (engine, model) = (engine(family, options()), model(family));
        let common = text(5, 75);
        let expected = [0, 0, 64, 64];
        for (seed, expected) in expected.into_iter().enumerate() {
            let prompt = [common.clone(), text(20 + seed as u32, 30)].concat();
            let (ids, finished) = ask(&engine, &prompt, 5);
            assert_eq!(finished.usage.cached_tokens, expected, "{family}: text {seed}");
            assert_eq!(ids, alone(&model, &prompt, 5), "{family}: text {seed}");
        }
    }
}

/// Too little memory for all requests: they are preempted, and their states computed again or fetched from the host.
#[test]
fn preempted_requests_go_on() {
    for family in FAMILIES {
        let all = engine(family, options()).stats().pages_bytes;
        for host in [0, 64 << 20] {
            let few = options().memory(all / 6).sequences(6).host_memory(host);
            let (few, model) = (engine(family, few), model(family));
            let prompts: Vec<Vec<u32>> = (0..6).map(|seed| text(seed, 40)).collect();
            let submit = |prompt: &Vec<u32>| {
                let request = EngineRequest::new(prompt.clone()).max_tokens(60).stop_ids(Vec::new());
                few.submit(request).unwrap()
            };
            let running: Vec<_> = prompts.iter().map(submit).collect();
            for (prompt, responses) in prompts.iter().zip(running) {
                assert_eq!(collect(responses).0, alone(&model, prompt, 60), "{family}, host {host}");
            }
            let stats = few.stats();
            println!(
                "{family}: {} preemptions, {} of {} bytes",
                stats.preemptions, stats.pages_used, stats.pages_bytes
            );
            assert!(stats.preemptions > 0, "{family}: {stats:?}");
        }
    }
}
