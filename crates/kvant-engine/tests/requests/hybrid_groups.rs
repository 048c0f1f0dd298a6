//! Models with recurrent states on groups: each rank has the states of its heads or channels, and a part of the cache.

use std::sync::Arc;

use crate::{
    common::{collect, options, shipped},
    hybrid::{FAMILIES, PAGE, alone, golden, text},
};
use kvant::{CpuOptions, Device};
use kvant_engine::{Engine, EngineOptions, EngineRequest, Event, Failure, Responses};
use kvant_models::{CacheDivision, LoadOptions, Model, Tokenizer};

fn model(family: &str, cache_division: CacheDivision) -> Model {
    let rank =
        |_| Device::cpu_with(CpuOptions { threads: Some(1), batch_invariant: true, ..CpuOptions::default() }).unwrap();
    let group = Device::group(&(0..2).map(rank).collect::<Vec<_>>()).unwrap();
    Model::load_with(&golden(family), &group, &LoadOptions { cache_division, ..LoadOptions::default() }).unwrap()
}

fn start(model: &Model, options: EngineOptions) -> Engine {
    // Any tokenizer. Each rank has a page of the tests of one device.
    let tokenizer = Arc::new(Tokenizer::load(shipped()).unwrap());
    Engine::start(model.clone(), tokenizer, options.page_tokens(2 * PAGE)).unwrap()
}

/// Every family with both divisions, its model, and an engine of it.
fn for_each(options: impl Fn() -> EngineOptions, check: impl Fn(&str, &Model, Engine)) {
    for (family, division) in FAMILIES
        .into_iter()
        .flat_map(|family| [CacheDivision::Heads, CacheDivision::Positions].map(|division| (family, division)))
    {
        let model = model(family, division);
        let attention = model.rank_decoder().blocks.iter().filter_map(|block| block.attention());
        let ranks = attention.map(|attention| attention.position_ranks).max();
        assert_eq!(ranks, Some(if division == CacheDivision::Positions { 2 } else { 1 }));
        check(&format!("{family}, {division:?}"), &model, start(&model, options()));
    }
}

fn submit(engine: &Engine, prompt: &[u32], max_tokens: usize) -> Responses {
    engine.submit(EngineRequest::new(prompt.to_vec()).max_tokens(max_tokens).stop_ids(Vec::new())).unwrap()
}

#[test]
fn concurrent_requests_get_the_results_of_single_ones() {
    for overlap in [false, true] {
        for_each(
            || options().sequences(5).step_tokens(24).overlap(overlap),
            |case, model, engine| {
                let prompts: Vec<Vec<u32>> = (0..7).map(|seed| text(seed, 5 + 13 * seed as usize)).collect();
                let all: Vec<_> = prompts.iter().map(|prompt| submit(&engine, prompt, 20)).collect();
                for (prompt, responses) in prompts.iter().zip(all) {
                    assert_eq!(collect(responses).0, alone(model, prompt, 20), "{case}: {} tokens", prompt.len());
                }
                assert!(engine.stats().recorded_steps > 0);
            },
        );
    }
}

/// Turns continue with the states that every rank has kept, and branches of a text share them.
#[test]
fn turns_and_branches_continue_on_every_rank() {
    for_each(options, |case, model, engine| {
        let mut history = text(1, 30);
        for turn in 0..6 {
            let known = history.len().saturating_sub(1);
            history.extend(text(2 + turn, 9));
            let (ids, _, finished) = collect(submit(&engine, &history, 7));
            assert_eq!(ids, alone(model, &history, 7), "{case}: turn {turn}");
            let expected = if turn == 0 { 0 } else { known / (2 * PAGE) * 2 * PAGE };
            assert_eq!(finished.usage.cached_tokens, expected, "{case}: turn {turn}");
            history.extend(ids);
        }
        let common = text(5, 75);
        for (seed, expected) in [0, 0, 64, 64].into_iter().enumerate() {
            let prompt = [common.clone(), text(20 + seed as u32, 30)].concat();
            let (ids, _, finished) = collect(submit(&engine, &prompt, 5));
            assert_eq!(finished.usage.cached_tokens, expected, "{case}: branch {seed}");
            assert_eq!(ids, alone(model, &prompt, 5), "{case}: branch {seed}");
        }
    });
}

/// Too little memory for all requests: each rank computes their pages and states again, or fetches them from the host.
#[test]
fn preempted_requests_go_on() {
    for host in [0, 64 << 20] {
        for_each(
            || options().sequences(6),
            |case, model, engine| {
                let memory = engine.stats().pages_bytes / 4;
                drop(engine);
                let few = start(model, options().sequences(6).memory(memory).host_memory(host));
                let prompts: Vec<Vec<u32>> = (0..6).map(|seed| text(seed, 40)).collect();
                let all: Vec<_> = prompts.iter().map(|prompt| submit(&few, prompt, 60)).collect();
                for (prompt, responses) in prompts.iter().zip(all) {
                    assert_eq!(collect(responses).0, alone(model, prompt, 60), "{case}, host {host}");
                }
                let stats = few.stats();
                println!("{case}, host {host}: {} preemptions, {} bytes there", stats.preemptions, stats.host_used);
                assert!(stats.preemptions > 0, "{case}, host {host}: {stats:?}");
            },
        );
    }
}

/// All requests end with the error of a rank that fails while others have its states.
#[test]
fn a_rank_that_fails_ends_all_requests() {
    for_each(
        || options().overlap(false).unread(4),
        |case, model, engine| {
            // The failure is an invalid position, which only layers with all positions read.
            let mut attention = model.rank_decoder().blocks.iter().filter_map(|block| block.attention());
            if attention.any(|attention| attention.position_ranks > 1) {
                return;
            }
            let mut all: Vec<_> = (0..2).map(|seed| submit(&engine, &text(seed, 20), 150)).collect();
            for responses in &mut all {
                assert!(responses.any(|event| matches!(event, Event::Token(_))));
            }
            kvant_engine::internals::fail_rank(&engine, 1);
            all.push(submit(&engine, &text(9, 20), 150));
            let ends: Vec<_> = all.into_iter().map(|responses| responses.into_iter().last()).collect();
            let is_error = |reason: &str| reason.contains("position");
            for (index, last) in ends.iter().enumerate() {
                let failed = matches!(last, Some(Event::Failed(Failure::Engine(reason))) if is_error(reason));
                // The first ones may have been complete before.
                let is_complete = index < 2 && matches!(last, Some(Event::Finished(_)));
                assert!(failed || is_complete, "{case}: {last:?}");
            }
            assert!(engine.submit(EngineRequest::new(text(1, 5))).is_err(), "{case}");
        },
    );
}
