//! Models with recurrent states: the results of single requests, for prefixes, turns, branches and preemptions.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::common::{collect, options, shipped};
use kvant::{Codec, CpuOptions, Device, PrefixCache, Sequence};
use kvant_engine::{
    Engine, EngineOptions, EngineRequest, Finished,
    scheduler::{EndReason, NewTask, PlanRow, PoolStorage, RowResult, Scheduler, SchedulerOptions},
};
use kvant_models::{Logits, Model, PoolOptions, Request, Tokenizer, generate};

pub(super) const PAGE: usize = 16;
/// One family for each kind of recurrent layer.
pub(super) const FAMILIES: [&str; 2] = ["qwen3_5", "lfm2"];

pub(super) fn golden(family: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../kvant-models/tests/golden").join(family)
}

fn model(family: &str) -> Model {
    model_at(&golden(family))
}

fn model_at(path: &Path) -> Model {
    let cpu = CpuOptions { threads: Some(2), batch_invariant: true, ..CpuOptions::default() };
    Model::load(path, &Device::cpu_with(cpu).unwrap()).unwrap()
}

fn engine(family: &str, options: EngineOptions) -> Engine {
    engine_of(model(family), options)
}

fn engine_of(model: Model, options: EngineOptions) -> Engine {
    // Any tokenizer: the tests look at ids.
    let tokenizer = Arc::new(Tokenizer::load(shipped()).unwrap());
    Engine::start(model, tokenizer, options.page_tokens(PAGE)).unwrap()
}

/// A copy of a golden model that only writes its first tokens, so that n-grams repeat. Others have logits of zero.
fn writes_few_tokens(family: &str) -> PathBuf {
    let to = std::env::temp_dir().join(format!("kvant-few-tokens-{family}-{}", std::process::id()));
    std::fs::create_dir_all(&to).unwrap();
    std::fs::copy(golden(family).join("config.json"), to.join("config.json")).unwrap();
    let mut bytes = std::fs::read(golden(family).join("model.safetensors")).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let output = ["lm_head.weight", "model.embed_tokens.weight"].into_iter().find_map(|name| header.get(name)).unwrap();
    let [start, end] = [0, 1].map(|at| output["data_offsets"][at].as_u64().unwrap() as usize);
    let rows = output["shape"][0].as_u64().unwrap() as usize;
    bytes[data + start + (end - start) / rows * FEW as usize..data + end].fill(0);
    std::fs::write(to.join("model.safetensors"), bytes).unwrap();
    to
}

const FEW: u32 = 4;

/// Tokens of a text.
pub(super) fn text(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| 3 + (at * 7 + seed * 31 + at * at * (seed + 1)) % 90).collect()
}

/// The text after a prompt, computed alone.
pub(super) fn alone(model: &Model, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
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

/// With an interval, a text can be continued at each of its multiples.
#[test]
fn states_are_kept_at_intervals() {
    for family in FAMILIES {
        let model = model(family);
        let prompt = text(5, 130);
        for (interval, expected) in
            [(None, [0, 0, 0]), (Some(1), [32, 64, 96]), (Some(20), [32, 64, 96]), (Some(48), [0, 48, 96])]
        {
            let options = interval.map_or(options(), |tokens| options().state_interval(tokens));
            for (end, expected) in [40, 70, 100].into_iter().zip(expected) {
                let engine = engine(family, options.clone());
                ask(&engine, &prompt, 3);
                let other = [&prompt[..end], &text(20 + end as u32, 9)].concat();
                let (ids, finished) = ask(&engine, &other, 5);
                assert_eq!(finished.usage.cached_tokens, expected, "{family}, {interval:?}: {end} tokens");
                assert_eq!(ids, alone(&model, &other, 5), "{family}, {interval:?}: {end} tokens");
            }
        }
    }
}

/// Logits after a hit equal those of a miss to the bit, at every kept boundary. By default, the steps of both
/// must end alike; on a batch-invariant device, the miss may be one step.
#[test]
fn hits_equal_misses_to_the_bit() {
    for (family, is_invariant) in FAMILIES.into_iter().flat_map(|family| [(family, false), (family, true)]) {
        let cpu = CpuOptions { threads: Some(2), batch_invariant: is_invariant, ..CpuOptions::default() };
        let model = Model::load(&golden(family), &Device::cpu_with(cpu).unwrap()).unwrap();
        let pool = PoolOptions { codecs: Codec::F32.into(), sequences: 12, longest: 160, page_tokens: PAGE, drafts: 0 };
        let pool = model.new_pool(&pool).unwrap();
        let cache = PrefixCache::new(&pool, b"bits");
        let tokens = text(3, 130);
        let feed = |sequence: &mut Sequence, end: usize| {
            let logits = model.feed(sequence, &tokens[sequence.len()..end], Logits::All).unwrap();
            logits.to_f32().unwrap().into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        let ends = [16, 48, 80, 112, 120, 130];
        let mut miss = pool.sequence();
        let mut logits = Vec::new();
        for end in ends {
            logits.push(feed(&mut miss, end));
            cache.keep(&miss, &tokens[..end]).unwrap();
        }
        for (index, &boundary) in ends[..4].iter().enumerate() {
            let mut hit = cache.find(&tokens[..boundary + 1]).unwrap();
            assert_eq!(hit.len(), boundary);
            for (&end, logits) in ends.iter().zip(&logits).skip(index + 1) {
                assert!(feed(&mut hit, end) == *logits, "{family}: from {boundary} to {end}");
            }
        }
        if is_invariant {
            assert!(feed(&mut pool.sequence(), 130) == logits.concat(), "{family}: one step");
        }
    }
}

/// Too little memory for all requests: they are preempted, and their states computed again or fetched from the host.
#[test]
fn preempted_requests_go_on() {
    for family in FAMILIES {
        let all = engine(family, options()).stats().pages_bytes;
        for host in [0, 64 << 20] {
            let few = options().memory(all / 8).sequences(6).host_memory(host);
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

/// After wrong drafts, the next step begins after the accepted ones. States for drafts take no pages that others need:
/// a step then has fewer drafts.
#[test]
fn accepted_drafts_are_computed_once() {
    for (family, sequences) in FAMILIES.into_iter().flat_map(|family| [(family, 1), (family, 3)]) {
        for drafts in [0, 5] {
            let options = PoolOptions { codecs: Codec::F32.into(), sequences, longest: 256, page_tokens: PAGE, drafts };
            let pool = model(family).new_pool(&options).unwrap();
            let mut scheduler = Scheduler::new(PoolStorage::new(pool, 64, true), SchedulerOptions::new(sequences, 64));
            let ids = 0..sequences as u64;
            ids.clone().for_each(|id| scheduler.add(NewTask::new(id, text(id as u32, 20), 200)));
            let (mut round, mut tried) = (0, 0);
            while let Some(plan) = scheduler.schedule().unwrap() {
                let take = |row: &PlanRow| {
                    let known = scheduler.tokens(row.id).unwrap().len();
                    assert!(row.draws == 0 || row.position + row.tokens.len() + 1 == known + row.draws, "{row:?}");
                    assert!(row.draws <= 6 && (row.draws <= 1 || row.tokens.len() == row.draws), "{row:?}");
                    // Any number of the drafts is accepted.
                    let accepted = (round + row.id as usize) % row.draws.max(1);
                    let right = &plan.tokens[row.drawn()].get(1..1 + accepted).unwrap_or(&[]);
                    let tokens = if row.draws > 0 { [right, &[90][..]].concat() } else { Vec::new() };
                    RowResult { id: row.id, tokens, is_last: false }
                };
                let results = plan.rows.iter().map(take).collect();
                tried += plan.rows.iter().map(|row| row.draws.saturating_sub(1)).sum::<usize>();
                scheduler.apply(results).unwrap();
                ids.clone().for_each(|id| scheduler.propose(id, &[1, 2, 3, 4, 5]));
                round += 1;
            }
            let ended = scheduler.take_ended();
            assert!(ended.len() == sequences && ended.iter().all(|ended| ended.reason == EndReason::Length));
            assert_eq!(scheduler.counts().preemptions, 0);
            assert!(tried > 100 * sequences || drafts == 0, "{family}: {tried} drafts");
        }
    }
}

/// Drafts do not change texts. States go back to the accepted ones, wherever the drafts are wrong.
#[test]
fn drafts_change_nothing() {
    for family in FAMILIES {
        let path = writes_few_tokens(family);
        let model = model_at(&path);
        let all = engine_of(model.clone(), options()).stats().pages_bytes;
        // Some texts begin alike.
        let prompt = |seed: u32| text(seed % 3, 30 + 3 * seed as usize).into_iter().map(|token| token % FEW).collect();
        let prompts: Vec<Vec<u32>> = (0..6).map(prompt).collect();
        let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| alone(&model, prompt, 70)).collect();
        for (drafts, options) in [
            (3, options()),
            (8, options().overlap(true)),
            (4, options().prefix_cache(false)),
            (4, options().memory(all / 10)),
            (5, options().memory(all / 10).host_memory(64 << 20).overlap(true)),
        ] {
            let is_short = options.memory.is_some();
            let engine =
                engine_of(model.clone(), options.sequences(6).step_tokens(40).drafts(drafts).adaptive_drafts(false));
            for round in 0..2 {
                let submit = |prompt: &Vec<u32>| {
                    let request = EngineRequest::new(prompt.clone()).max_tokens(70).stop_ids(Vec::new());
                    engine.submit(request).unwrap()
                };
                let running: Vec<_> = prompts.iter().map(submit).collect();
                for (index, responses) in running.into_iter().enumerate() {
                    let ids = collect(responses).0;
                    assert_eq!(ids, expected[index], "{family}, round {round}: text {index} with {drafts} drafts");
                }
            }
            let stats = engine.stats();
            let (tried, right) = (stats.drafts.tokens, stats.drafts.accepted);
            println!(
                "{family}: {right} of {tried} drafts in {} steps, {} recorded, {} preemptions, {} tokens found",
                stats.steps, stats.recorded_steps, stats.preemptions, stats.prefix_hits
            );
            assert!(right > 50 && right < tried, "{family}: {right} of {tried}");
            assert!(stats.preemptions > 0 || !is_short, "{family}: {stats:?}");
        }
        std::fs::remove_dir_all(path).unwrap();
    }
}
