//! A model that is divided among the ranks of a group gives the texts that it gives on one device, whatever the engine
//! does meanwhile.

use std::time::Duration;

use kvant::Codec;
use kvant_engine::{Engine, EngineOptions, EngineRequest, Event, Failure};
use kvant_models::{CacheDivision, Sampling};

use crate::common::{collect, divided_engine, engine, group_engine, invariant_divided_engine, options, request};

const PROMPTS: [&str; 4] = ["# Fearless Concurrency", "fn main", "# Examples", "Creates a new `Vec<T>`"];
/// A text that drafts predict.
const REPEATS: &str = "let a = 1; let b = 2; let a = 1; let b = 2; let a = 1; let b = 2; let";

fn texts(engine: &Engine, requests: Vec<EngineRequest>) -> Vec<Vec<u32>> {
    let all: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    all.into_iter().map(|responses| collect(responses).0).collect()
}

/// Greedy and drawn texts of several lengths.
fn crowd(engine: &Engine) -> Vec<EngineRequest> {
    let sampling = |index: usize| match index % 2 {
        0 => Sampling::default(),
        _ => Sampling::default().temperature(0.8).seed(index as u64),
    };
    let prompts = PROMPTS.iter().chain([&REPEATS]).enumerate();
    prompts.map(|(index, prompt)| request(engine, prompt).sampling(sampling(index)).max_tokens(24 + index)).collect()
}

fn check(ranks: usize, options: EngineOptions) -> Engine {
    let group = group_engine(ranks, options);
    let plain = engine(self::options());
    assert_eq!((group.ranks(), plain.ranks()), (ranks, 1));
    assert_eq!(texts(&group, crowd(&group)), texts(&plain, crowd(&plain)));
    group
}

#[test]
fn a_crowd_gets_the_texts_of_one_device() {
    for ranks in [2, 4] {
        let stats = check(ranks, options().sequences(4).step_tokens(24)).stats();
        assert!(stats.recorded_steps > 0, "{stats:?}");
    }
}

#[test]
fn prefixes_are_found_on_every_rank() {
    let group = group_engine(2, options().page_tokens(16));
    let prompt = PROMPTS.join(" and so on, ").repeat(2);
    let first = collect(group.submit(request(&group, &prompt)).unwrap());
    let second = collect(group.submit(request(&group, &prompt)).unwrap());
    assert_eq!(first.0, second.0);
    assert!(second.2.usage.cached_tokens >= 16, "{:?}", second.2.usage);
}

/// Drafts that are rejected are truncated on every rank, and a step starts before the last one is known.
#[test]
fn drafts_and_overlapping_steps_change_nothing() {
    check(2, options().drafts(3).adaptive_drafts(false));
    check(2, options().overlap(true));
}

#[test]
fn a_panic_fails_all_requests_of_a_group() {
    let engine = group_engine(2, options());
    let responses = engine.submit(request(&engine, PROMPTS[0]).max_tokens(200)).unwrap();
    kvant_engine::internals::panic(&engine);
    let last = responses.into_iter().last().unwrap();
    assert!(matches!(&last, Event::Failed(Failure::Engine(reason)) if reason.contains("panic")), "{last:?}");
}

/// Ranks do not wait for one that fails within a step: all requests end with its error, also later ones.
#[test]
fn a_rank_that_fails_in_a_step_ends_all_requests() {
    for failing in [0, 1] {
        let engine = group_engine(2, options().overlap(false).unread(4));
        let long = |prompt| engine.submit(request(&engine, prompt).max_tokens(200)).unwrap();
        let mut all: Vec<_> = PROMPTS[..2].iter().map(|prompt| long(prompt)).collect();
        for responses in &mut all {
            // They have begun, and pause at four unread events.
            assert!(responses.any(|event| matches!(event, Event::Token(_))));
        }
        kvant_engine::internals::fail_rank(&engine, failing);
        all.push(long(REPEATS));
        let (sender, ends) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for responses in all {
                sender.send(responses.into_iter().last()).unwrap();
            }
        });
        for _ in 0..3 {
            let last = ends.recv_timeout(Duration::from_secs(120)).expect("the requests end");
            let is_its_error = |reason: &str| reason.contains("position") && !reason.contains("another rank");
            assert!(matches!(&last, Some(Event::Failed(Failure::Engine(reason))) if is_its_error(reason)), "{last:?}");
        }
        assert!(engine.submit(request(&engine, PROMPTS[3])).is_err());
    }
}

/// Branches of a prompt share pages: their texts are those of one device.
fn check_branches(prompt: &str, group: &Engine, plain: &Engine) {
    let branches = |engine: &Engine| -> Vec<EngineRequest> {
        let branch = |seed| Sampling::default().temperature(1.0).seed(seed);
        (0..4).map(|seed| request(engine, prompt).sampling(branch(seed))).collect()
    };
    // The first request leaves the prefix.
    texts(group, branches(group)[..1].to_vec());
    assert_eq!(texts(group, branches(group)), texts(plain, branches(plain)));
    assert!(group.stats().prefix_hits >= 3, "{:?}", group.stats());
}

/// Requests for more memory than `few` options give are preempted, with and without host memory.
fn check_preemption(few: impl Fn() -> EngineOptions, group_engine: impl Fn(EngineOptions) -> Engine) {
    let long = |engine: &Engine| -> Vec<EngineRequest> {
        PROMPTS.iter().chain(&PROMPTS).map(|prompt| request(engine, prompt).max_tokens(150)).collect()
    };
    let plain = engine(options());
    let expected = texts(&plain, long(&plain));
    for options in [few(), few().host_memory(64 << 20)] {
        let keeps = options.host_memory > 0;
        let group = group_engine(options);
        assert_eq!(texts(&group, long(&group)), expected);
        let stats = group.stats();
        println!("{} preemptions, {} bytes in host memory", stats.preemptions, stats.host_used);
        assert!(stats.preemptions > 0 && (!keeps || stats.host_used > 0), "{stats:?}");
    }
}

/// Branches of a prompt share the pages of all ranks, and each writes its own copy of the last one.
#[test]
fn equal_prompts_at_once_branch_on_every_rank() {
    let options = || options().page_tokens(16).sequences(4);
    check_branches(&PROMPTS.join(" and so on, "), &group_engine(2, options()), &engine(options()));
}

/// The pages of preempted requests move to host memory and back, on all ranks.
#[test]
fn preempted_requests_go_on() {
    check_preemption(|| options().memory(3 << 20).page_tokens(16).sequences(6), |options| group_engine(2, options));
}

/// A group whose ranks divide the positions of a page. Each rank has all heads of its positions.
fn by_position(ranks: usize, options: EngineOptions) -> Engine {
    divided_engine(ranks, CacheDivision::Positions, options.page_tokens(16 * ranks))
}

#[test]
fn texts_do_not_depend_on_the_division_of_the_cache() {
    let plain = engine(options());
    let expected = texts(&plain, crowd(&plain));
    for (ranks, options) in [
        (2, options().sequences(4).step_tokens(24)),
        (4, options().sequences(4).step_tokens(24)),
        (2, options().drafts(3).adaptive_drafts(false)),
        (2, options().overlap(true)),
    ] {
        let group = by_position(ranks, options);
        assert_eq!(texts(&group, crowd(&group)), expected, "{ranks} ranks");
        assert!(group.stats().recorded_steps > 0);
    }
}

/// Sealed pages of divided positions: branches, prefixes, preemption and host memory do not change texts.
#[test]
fn sealed_pages_of_divided_positions() {
    let sealing = || options().codecs(Codec::tq_centred(6)).page_tokens(32).sequences(6);
    let long = |engine: &Engine| -> Vec<EngineRequest> {
        PROMPTS.iter().chain(&PROMPTS).map(|prompt| request(engine, &prompt.repeat(12)).max_tokens(100)).collect()
    };
    let sealed = |options| invariant_divided_engine(2, CacheDivision::Positions, options);
    let plain = sealed(sealing().prefix_cache(false));
    let expected = texts(&plain, long(&plain));
    drop(plain);
    for options in [sealing(), sealing().memory(2 << 20), sealing().memory(2 << 20).host_memory(64 << 20)] {
        let is_short = options.memory.is_some();
        let group = sealed(options);
        for _ in 0..2 {
            assert_eq!(texts(&group, long(&group)), expected);
        }
        let stats = group.stats();
        println!("{} preemptions, {} tokens found", stats.preemptions, stats.prefix_hits);
        assert!(if is_short { stats.preemptions > 0 } else { stats.prefix_hits > 0 }, "{stats:?}");
    }
}

#[test]
fn prefixes_and_branches_of_divided_positions() {
    let prompt = PROMPTS.join(" and so on, ").repeat(2);
    check_branches(&prompt, &by_position(2, options().sequences(4)), &engine(options()));
}

#[test]
fn preempted_requests_of_divided_positions_go_on() {
    check_preemption(|| options().memory(3 << 20).sequences(6), |options| by_position(2, options));
}
