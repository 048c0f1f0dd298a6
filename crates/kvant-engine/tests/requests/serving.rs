//! The engine with the shipped model: concurrent requests get the results that each gets alone.

use std::{collections::HashMap, sync::Arc, time::Duration};

use crate::common::{batch_invariant_engine, collect, engine, model, options, request, shipped};
use kvant::{Codec, Device};
use kvant_engine::{CacheScope, Engine, EngineRequest, Event, Failure, FinishReason, NoEvent, Responses, SubmitError};
use kvant_models::{Model, PoolOptions, Request, Sampling, Tokenizer, generate};

const PROMPTS: [&str; 6] =
    ["# Fearless Concurrency", "fn main", "# Examples", "Returns the", "Creates a new `Vec<T>`", "The iterator"];

/// The result of `generate` for an equal request.
fn alone(model: &Model, tokenizer: &Tokenizer, prompt: &str, sampling: &Sampling) -> Vec<u32> {
    let pool = model.new_pool(&PoolOptions { codecs: Codec::F32.into(), longest: 256, ..PoolOptions::default() });
    let mut sequence = pool.unwrap().sequence();
    let prompt = tokenizer.encode_prompt(prompt).unwrap();
    let request =
        Request { max_tokens: 30, sampling: sampling.clone(), stop: tokenizer.eos(), ..Request::new(&prompt) };
    let mut ids = Vec::new();
    generate(model, &mut sequence, &request, |id| {
        ids.push(id);
        std::ops::ControlFlow::Continue(())
    })
    .unwrap();
    ids
}

#[test]
fn concurrent_requests_get_the_results_of_single_ones() {
    let engine = engine(options().sequences(5).step_tokens(24));
    let (model, tokenizer) = (model(), Tokenizer::load(shipped()).unwrap());
    let samplings = [
        Sampling::default(),
        Sampling::default().temperature(0.8).seed(7),
        Sampling::default().temperature(1.0).top_k(20).top_p(0.9).seed(3).repetition_penalty(1.1),
    ];
    let mut all = Vec::new();
    for prompt in PROMPTS {
        for sampling in &samplings {
            all.push((prompt, sampling, engine.submit(request(&engine, prompt).sampling(sampling.clone())).unwrap()));
        }
    }
    for (prompt, sampling, responses) in all {
        let (ids, text, finished) = collect(responses);
        let want = alone(&model, &tokenizer, prompt, sampling);
        assert_eq!(ids, want, "{prompt} {sampling:?}");
        assert_eq!(text, tokenizer.decode(&want).unwrap());
        assert_eq!(finished.usage.generated_tokens, want.len());
        assert!(matches!(finished.reason, FinishReason::Length | FinishReason::StopId(_)));
    }
    let stats = engine.stats();
    assert_eq!(engine.live(), 0);
    assert!(stats.steps > 0 && stats.time_to_first_token.count() == 18 && stats.inter_token.count() > 100);
    assert_eq!((stats.running, stats.waiting), (0, 0));
}

/// Steps with one token of each request replay a recorded pass, which also samples if all requests are greedy.
#[test]
fn recorded_steps_give_the_same_texts() {
    let (model, tokenizer) = (model(), Tokenizer::load(shipped()).unwrap());
    let warm = Sampling::default().temperature(0.9).seed(5);
    for sampling in [Sampling::default(), warm] {
        let engine = engine(options());
        let submit = |(index, prompt): (usize, &&str)| {
            // Some have log probabilities, and lengths differ so that batches shrink.
            let request = request(&engine, prompt).sampling(sampling.clone()).max_tokens(30 - 3 * index);
            let request = if index % 2 == 0 { request.logprobs(2).prompt_logprobs(2) } else { request };
            engine.submit(request).unwrap()
        };
        let all: Vec<_> = PROMPTS.iter().enumerate().map(submit).collect();
        for (index, (prompt, responses)) in PROMPTS.iter().zip(all).enumerate() {
            let want = alone(&model, &tokenizer, prompt, &sampling);
            let (ids, scores) = ids_and_ranks(responses);
            assert_eq!(ids, want[..want.len().min(30 - 3 * index)], "{prompt} {sampling:?}");
            if sampling.temperature == 0.0 && index % 2 == 0 {
                assert_eq!(scores, vec![0; ids.len()], "the most probable tokens are drawn");
            }
        }
        let stats = engine.stats();
        assert!(stats.recorded_steps >= 20 && stats.recorded_steps < stats.steps, "{stats:?}");
    }
}

/// The ids of a text, and the ranks of the tokens that have log probabilities.
fn ids_and_ranks(responses: Responses) -> (Vec<u32>, Vec<usize>) {
    let (mut ids, mut ranks) = (Vec::new(), Vec::new());
    for event in responses {
        match event {
            Event::Token(token) => {
                ids.push(token.id);
                ranks.extend(token.logprobs.map(|scores| scores.rank));
            }
            Event::Failed(failure) => panic!("{failure}"),
            _ => {}
        }
    }
    (ids, ranks)
}

#[test]
fn prefixes_are_computed_once() {
    let engine = engine(options().page_tokens(16));
    let prompt = PROMPTS.join(" and so on, ").repeat(2);
    let first = collect(engine.submit(request(&engine, &prompt)).unwrap());
    let second = collect(engine.submit(request(&engine, &prompt)).unwrap());
    assert_eq!(first.0, second.0);
    assert_eq!(first.2.usage.cached_tokens, 0);
    assert!(second.2.usage.cached_tokens >= 16, "{:?}", second.2.usage);
    let salted = request(&engine, &prompt).cache(CacheScope::Salted(b"mine".to_vec()));
    assert_eq!(collect(engine.submit(salted).unwrap()).2.usage.cached_tokens, 0, "another salt shares nothing");
    let private = request(&engine, &prompt).cache(CacheScope::Private);
    assert_eq!(collect(engine.submit(private).unwrap()).2.usage.cached_tokens, 0);
}

/// On a batch-invariant device, one seed always gives one text: without cached tokens, after a cached prefix, in a
/// batch with others, with small steps and with drafts.
#[test]
fn a_seed_gives_one_text_on_a_batch_invariant_device() {
    // Longer than pages and steps, and not a multiple of either.
    let prompts: Vec<String> = PROMPTS.iter().map(|prompt| format!("{prompt} and so on, ").repeat(9)).collect();
    let sampling = |seed| Sampling::default().temperature(1.0).seed(seed);
    for codec in [Codec::F16, Codec::tq_centred(4)] {
        let options = || options().codecs(codec).page_tokens(16);
        let engine = batch_invariant_engine(options());
        let seeded = |engine: &Engine, index: usize| {
            engine.submit(request(engine, &prompts[index]).sampling(sampling(index as u64))).unwrap()
        };
        let cold: Vec<_> = (0..prompts.len()).map(|index| collect(seeded(&engine, index))).collect();
        let check = |index: usize, (ids, _, finished): (Vec<u32>, String, kvant_engine::Finished), what: &str| {
            assert_eq!(ids, cold[index].0, "{codec}, {what}: {}", PROMPTS[index]);
            finished.usage.cached_tokens
        };
        for (index, (.., finished)) in cold.iter().enumerate() {
            assert_eq!(finished.usage.cached_tokens, 0);
            let cached = check(index, collect(seeded(&engine, index)), "warm");
            assert!(cached >= 32, "{cached} tokens of the prompt were cached");
        }
        // Some prompts are partly cached: others share their beginning.
        let crowded = batch_invariant_engine(options().sequences(5).step_tokens(24));
        let others = prompts
            .iter()
            .map(|prompt| &prompt[..prompt.len() / 2])
            .map(|prompt| crowded.submit(request(&crowded, prompt).sampling(sampling(99))).unwrap());
        let others: Vec<_> = others.collect();
        let all: Vec<_> = (0..2 * prompts.len()).map(|i| seeded(&crowded, i % prompts.len())).collect();
        for (i, responses) in all.into_iter().enumerate() {
            check(i % prompts.len(), collect(responses), "in a crowd");
        }
        drop(others);
        let drafting = batch_invariant_engine(options().drafts(4).adaptive_drafts(false));
        for index in 0..prompts.len() {
            check(index, collect(seeded(&drafting, index)), "with drafts");
        }
    }
}

#[test]
fn stop_strings_minimum_lengths_and_scores() {
    let engine = engine(options());
    let (ids, text, _) = collect(engine.submit(request(&engine, PROMPTS[0])).unwrap());
    // The text up to the stop string, which is part of it.
    let word = text.split_whitespace().nth(2).unwrap().to_string();
    let (_, short, finished) = collect(engine.submit(request(&engine, PROMPTS[0]).stop([word.clone()])).unwrap());
    assert_eq!(finished.reason, FinishReason::StopString(0));
    assert!(text.starts_with(&short) && !short.contains(&word) && short.len() < text.len(), "{short:?} of {text:?}");
    // Stop ids are not sampled before the minimum.
    let stopped = request(&engine, PROMPTS[0]).stop_ids(vec![ids[2]]);
    let (got, _, finished) = collect(engine.submit(stopped.clone()).unwrap());
    assert_eq!((got, finished.reason), (ids[..2].to_vec(), FinishReason::StopId(ids[2])));
    let (got, ..) = collect(engine.submit(stopped.min_tokens(10)).unwrap());
    assert!(got.len() >= 10 && !got[..10].contains(&ids[2]));
    // Log probabilities of prompt and text.
    let mut prompts = 0;
    let mut best = Vec::new();
    for event in engine.submit(request(&engine, PROMPTS[1]).logprobs(3).prompt_logprobs(2).max_tokens(4)).unwrap() {
        match event {
            Event::Prompt(scores) => prompts += scores.len(),
            Event::Token(token) => {
                let scores = token.logprobs.unwrap();
                assert_eq!((scores.id, scores.top.len(), scores.top[0].0), (token.id, 3, token.id));
                best.push(scores.logprob);
            }
            _ => {}
        }
    }
    assert_eq!(prompts, engine.tokenizer().encode_prompt(PROMPTS[1]).unwrap().len() - 1);
    assert!(best.len() == 4 && best.iter().all(|p| *p <= 0.0));
}

#[test]
fn invalid_requests_name_the_field() {
    let engine = engine(options());
    let ok = request(&engine, PROMPTS[0]);
    let field = |request: EngineRequest| match engine.submit(request) {
        Err(SubmitError::Invalid { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(EngineRequest::new(Vec::new())), "prompt");
    assert_eq!(field(EngineRequest::new(vec![u32::MAX])), "prompt");
    let long = engine.submit(EngineRequest::new(vec![1; 300]));
    assert!(matches!(long, Err(SubmitError::ContextLength { limit: 255, got: 300 })));
    assert_eq!(field(ok.clone().sampling(Sampling::default().temperature(-1.0))), "temperature");
    assert_eq!(field(ok.clone().stop([""])), "stop");
    assert_eq!(engine.live(), 0);
}

/// Clients that disconnect, even while they wait or while their prompt is computed, release all pages.
#[test]
fn clients_that_vanish_free_their_pages() {
    let engine = engine(options().sequences(4).step_tokens(16).prefix_cache(false));
    let mut kept = HashMap::new();
    for i in 0..200 {
        let prompt = PROMPTS[i % PROMPTS.len()].repeat(1 + i % 4);
        let mut responses = engine.submit(request(&engine, &prompt)).unwrap();
        match i % 5 {
            0 => drop(responses),
            1 => drop(responses.recv()),
            2 => {
                let _: Result<_, NoEvent> = responses.recv_timeout(Duration::from_millis(1));
            }
            _ => drop(kept.insert(i % 40, responses)),
        }
    }
    for (_, responses) in kept {
        collect(responses);
    }
    while engine.live() > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    // One more step updates the counts.
    collect(engine.submit(request(&engine, PROMPTS[0])).unwrap());
    while engine.stats().pages_used > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(engine.stats().finished_cancelled > 0);
}

#[test]
fn a_reader_that_stops_pauses_only_itself() {
    let engine = engine(options().unread(4));
    let mut slow = engine.submit(request(&engine, PROMPTS[0]).max_tokens(100)).unwrap();
    let first = slow.recv().unwrap();
    assert!(matches!(first, Event::Token(_)), "{first:?}");
    for prompt in PROMPTS {
        collect(engine.submit(request(&engine, prompt)).unwrap());
    }
    assert!(engine.stats().generated_tokens < 100 + 6 * 30, "the slow one waits");
    let (ids, ..) = collect(slow);
    assert_eq!(ids.len(), 99);
}

#[test]
fn too_few_pages_preempt_and_do_not_change_texts() {
    let few = engine(options().memory(6 << 20).page_tokens(16).sequences(6));
    let many = engine(options());
    let texts = |engine: &Engine| -> Vec<Vec<u32>> {
        let all: Vec<_> =
            PROMPTS.iter().map(|prompt| engine.submit(request(engine, prompt).max_tokens(200)).unwrap()).collect();
        all.into_iter().map(|responses| collect(responses).0).collect()
    };
    assert_eq!(texts(&few), texts(&many));
    let stats = few.stats();
    println!("{} preemptions, {} of {} bytes", stats.preemptions, stats.pages_used, stats.pages_bytes);
}

/// The pages of preempted requests move to host memory and back, and are not recomputed.
#[test]
fn host_memory_keeps_preempted_requests() {
    let few = || options().memory(5 << 20).page_tokens(16).sequences(6);
    let run = |engine: &Engine| -> Vec<Vec<u32>> {
        let ask = |prompt: &&str| engine.submit(request(engine, prompt).max_tokens(200)).unwrap();
        let all: Vec<_> = PROMPTS.iter().map(ask).collect();
        all.into_iter().map(|responses| collect(responses).0).collect()
    };
    let (roomy, recomputes, moves) = (engine(options()), engine(few()), engine(few().host_memory(64 << 20)));
    let expected = run(&roomy);
    assert_eq!(run(&recomputes), expected);
    assert_eq!(run(&moves), expected);
    let (prompts, again, moved) = (roomy.stats(), recomputes.stats(), moves.stats());
    println!("{} and {} preemptions, {} bytes in host memory", again.preemptions, moved.preemptions, moved.host_used);
    assert!(again.preemptions > 0 && moved.preemptions > 0);
    assert!(again.prompt_tokens > prompts.prompt_tokens, "{again:?}");
    assert!(moved.prompt_tokens < again.prompt_tokens && moved.host_used > 0, "{moved:?}");
}

#[test]
fn the_queue_is_limited_and_drains() {
    let engine = engine(options().sequences(1).queue(2));
    let long = || request(&engine, PROMPTS[0]).max_tokens(200);
    let responses: Vec<_> = (0..3).map(|_| engine.submit(long()).unwrap()).collect();
    assert!(matches!(engine.submit(long()), Err(SubmitError::Busy { limit: 3 })));
    assert!(!engine.drain(Duration::from_millis(50)), "they take longer");
    assert!(matches!(engine.submit(long()), Err(SubmitError::Draining)));
    let ends: Vec<_> = responses.into_iter().map(|responses| collect(responses).2.reason).collect();
    assert!(ends.contains(&FinishReason::Drained), "{ends:?}");
}

#[test]
fn a_panic_fails_all_requests() {
    let engine = engine(options());
    let responses = engine.submit(request(&engine, PROMPTS[0]).max_tokens(200)).unwrap();
    kvant_engine::internals::panic(&engine);
    let last = responses.into_iter().last().unwrap();
    assert!(matches!(&last, Event::Failed(Failure::Engine(reason)) if reason.contains("panic")), "{last:?}");
    while engine.is_healthy() {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(matches!(engine.submit(request(&engine, PROMPTS[0])), Err(SubmitError::Unhealthy { .. })));
}

#[test]
fn a_closed_engine_leaves_nothing() {
    let tokenizer = Arc::new(Tokenizer::load(shipped()).unwrap());
    let engine = Engine::start(model(), Arc::clone(&tokenizer), options()).unwrap();
    collect(engine.submit(request(&engine, PROMPTS[0]).max_tokens(2)).unwrap());
    let other = engine.clone();
    let engine = engine.close().unwrap_err();
    assert!(engine.submit(request(&engine, PROMPTS[0])).is_ok(), "another handle keeps it");
    drop(other);
    engine.close().unwrap();
    // The threads owned the tokenizer too.
    assert_eq!(Arc::strong_count(&tokenizer), 1);
}

/// The pages of a model with windows are counted as they were allocated: all requests run at once.
#[test]
fn all_requests_fit_the_pages_that_are_made_for_them() {
    const SEQUENCES: usize = 8;
    let golden = shipped().join("../../kvant-models/tests/golden/gemma3");
    let model = Model::load(&golden, &Device::cpu()).unwrap();
    let options = options().sequences(SEQUENCES).step_tokens(512).page_tokens(16);
    let engine = Engine::start(model, Arc::new(Tokenizer::load(shipped()).unwrap()), options).unwrap();
    let submit = |seed| {
        let prompt = (0..180).map(|index| 3 + (index * 7 + seed) % 50).collect::<Vec<u32>>();
        engine.submit(EngineRequest::new(prompt).max_tokens(70).stop_ids(Vec::new())).unwrap()
    };
    let running: Vec<Responses> = (0..SEQUENCES as u32).map(submit).collect();
    let mut most = 0;
    while engine.stats().finished_length == 0 {
        most = most.max(engine.stats().running);
        std::thread::sleep(Duration::from_micros(200));
    }
    running.into_iter().for_each(|responses| assert_eq!(collect(responses).0.len(), 70));
    assert_eq!((most, engine.stats().preemptions), (SEQUENCES, 0));
}
