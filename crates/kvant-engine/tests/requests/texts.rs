//! Neither drafts nor overlapping steps change texts.

use std::{sync::Arc, time::Instant};

use crate::{
    common::{collect, engine, model, options, request, shipped},
    words::words,
};
use kvant_engine::{Engine, EngineOptions, EngineRequest, Event, Grammar};
use kvant_models::Sampling;

/// A repetitive text.
const REPEATS: &str = "# Numbers\n\n- `u8`: an unsigned integer of 8 bits\n- `u16`: an unsigned integer of 16 bits\n\
                       - `u32`: an unsigned integer of 32 bits\n- `u64`: an unsigned integer of 64 bits\n- `u8`: an";

/// Requests of every kind.
fn requests(engine: &Engine) -> Vec<EngineRequest> {
    let warm = Sampling::default().temperature(0.7);
    let mut all = Vec::new();
    for prompt in [REPEATS, "# Examples\n\n```\nlet x = 1;\nlet x = 1;\nlet", "fn main"] {
        let base = request(engine, prompt).max_tokens(60);
        let eos = engine.tokenizer().eos()[0];
        all.extend([
            base.clone(),
            base.clone().sampling(warm.clone().seed(1)),
            base.clone().sampling(warm.clone().seed(2).top_k(5).top_p(0.9)),
            base.clone().sampling(warm.clone().repetition_penalty(1.2).frequency_penalty(0.1)),
            base.clone().sampling(Sampling::default().presence_penalty(0.5).logit_bias(vec![(300, 2.0)])),
            base.clone().logprobs(2),
            base.clone().stop(["32"]),
            base.clone().stop_ids(vec![eos, 300]).min_tokens(20),
            base.clone().max_tokens(1),
            base.clone().prompt_logprobs(1).max_tokens(9),
            base.clone().grammar(engine.compile(&Grammar::Regex("(ab ?){1,20}".to_string())).unwrap()),
        ]);
    }
    all
}

/// The result of a request: ids, text, finish reason, and most probable tokens.
type Given = (Vec<u32>, String, String, Vec<u32>);

fn given(engine: &Engine) -> Vec<Given> {
    let all: Vec<_> = requests(engine).into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let of = |responses: kvant_engine::Responses| {
        let (mut ids, mut text, mut end, mut top) = (Vec::new(), String::new(), String::new(), Vec::new());
        for event in responses {
            match event {
                Event::Token(token) => {
                    ids.push(token.id);
                    text += &token.text;
                    top.extend(token.logprobs.iter().map(|logprobs| logprobs.top[0].0));
                }
                Event::Prompt(scores) => top.extend(scores.iter().map(|score| score.id)),
                Event::Finished(finished) => {
                    text += &finished.text;
                    end = format!("{:?} {}", finished.reason, finished.usage.generated_tokens);
                }
                other => panic!("{other:?}"),
            }
        }
        (ids, text, end, top)
    };
    all.into_iter().map(of).collect()
}

fn start(options: EngineOptions) -> Engine {
    engine(options.sequences(6).step_tokens(60))
}

#[test]
fn texts_are_the_same_with_drafts() {
    let without = given(&start(options()));
    for (drafts, options) in [
        (1, options()),
        (8, options()),
        // Preempted while they run.
        (4, options().memory(6 << 20).page_tokens(16)),
        (32, options().unread(3)),
    ] {
        let engine = start(options.drafts(drafts).adaptive_drafts(false));
        for (index, (got, want)) in given(&engine).iter().zip(&without).enumerate() {
            assert_eq!(got, want, "request {index} with {drafts} drafts");
        }
        let stats = engine.stats();
        println!(
            "{drafts} drafts: {} of {} accepted, {} preemptions",
            stats.drafts.accepted, stats.drafts.tokens, stats.preemptions
        );
        assert!(stats.drafts.accepted > 20 && stats.drafts.accepted <= stats.drafts.tokens, "{:?}", stats.drafts);
    }
    assert!(kvant_engine::Engine::start(model(), tokenizer(), options().drafts(33)).is_err());
}

/// Overlapping steps, alone and mixed with steps that cannot overlap, as requests with penalties, log probabilities and
/// grammars come and go.
#[test]
fn texts_are_the_same_with_overlapping_steps() {
    let without = given(&start(options()));
    for (options, steps) in [
        (options(), 20),
        // Preempted while they run.
        (options().memory(6 << 20).page_tokens(16), 20),
        (options().unread(3), 5),
        (options().host_memory(1 << 20).memory(6 << 20), 20),
        (options().drafts(4), 0),
        // In repetitive texts nearly every step has drafts, and the next one waits for its result.
        (options().drafts(4).adaptive_drafts(false), 0),
        (options().drafts(8).adaptive_drafts(false).memory(6 << 20).page_tokens(16), 0),
    ] {
        let engine = start(options.clone().overlap(true));
        for (index, (got, want)) in given(&engine).iter().zip(&without).enumerate() {
            assert_eq!(got, want, "request {index} with {options:?}");
        }
        let stats = engine.stats();
        let counts = (stats.steps, stats.recorded_steps, stats.overlapped_steps);
        println!("{counts:?} steps, recorded, overlapped; drafts {:?}", stats.drafts.accepted);
        assert!(stats.overlapped_steps >= steps, "{counts:?}");
        assert!(options.drafts == 0 || options.adaptive_drafts || stats.drafts.accepted > 20, "{:?}", stats.drafts);
    }
}

/// If the device samples for all requests, all steps overlap, whatever their batches.
#[test]
fn plain_requests_overlap_all_the_time() {
    let plain = |engine: &Engine| -> Vec<EngineRequest> {
        let prompts = [REPEATS, "# Examples\n\n", "fn main", "Returns the", "# Vec"];
        let sampling = |index: usize| match index % 3 {
            0 => Sampling::default(),
            of => Sampling::default().temperature(0.8).top_k(40 * of).seed(index as u64),
        };
        let all = prompts.iter().cycle().take(20).enumerate();
        all.map(|(index, prompt)| request(engine, prompt).max_tokens(1 + 7 * index % 60).sampling(sampling(index)))
            .collect()
    };
    let (one, two) = (start(options()), start(options().overlap(true)));
    let run = |engine: &Engine| {
        let all: Vec<_> = plain(engine).into_iter().map(|request| engine.submit(request).unwrap()).collect();
        all.into_iter().map(collect).map(|(ids, text, finished)| (ids, text, finished.reason)).collect::<Vec<_>>()
    };
    assert_eq!(run(&two), run(&one));
    // The last superfluous token is still being computed when the last text ends.
    let started = Instant::now();
    while two.live() > 0 || two.stats().requests_used > 0 {
        assert!(started.elapsed().as_secs() < 60, "{:?}", two.stats());
        std::thread::yield_now();
    }
    let stats = two.stats();
    assert!(stats.overlapped_steps + 3 > stats.steps && stats.recorded_steps > 10, "{stats:?}");
    // The pages of ended requests are free, including the pages of dropped tokens.
    assert_eq!((stats.running, stats.waiting), (0, 0));
    assert_eq!(stats.generated_tokens, one.stats().generated_tokens);
    // Steps with drafts also start before the previous result is known. They have rows of recorded passes.
    let drafts = start(options().overlap(true).drafts(3).adaptive_drafts(false));
    assert_eq!(run(&drafts), run(&one));
    let stats = drafts.stats();
    println!("{} steps, {} overlapped; drafts {:?}", stats.steps, stats.overlapped_steps, stats.drafts);
    assert!(stats.overlapped_steps > 10 && stats.drafts.accepted > 20, "{stats:?}");
    assert!(stats.recorded_steps > two.stats().recorded_steps / 3, "{stats:?}");
}

fn tokenizer() -> std::sync::Arc<kvant_models::Tokenizer> {
    std::sync::Arc::new(kvant_models::Tokenizer::load(shipped()).unwrap())
}

/// Prints tokens per second with and without drafts, of a text with repeats and of another one, alternately. The model:
/// a GGUF file in `KVANT_MODEL`, or the shipped one.
/// `cargo test --release -p kvant-engine --test requests -- --ignored --nocapture speed`.
#[test]
#[ignore = "measures"]
fn speed() {
    let place = std::env::var("KVANT_MODEL").map_or(shipped().to_path_buf(), Into::into);
    let files = kvant_models::Files::at(&place).unwrap();
    let tokenizer = std::sync::Arc::new(kvant_models::Tokenizer::load_files(&files).unwrap());
    let model = kvant_models::Model::load_files(&files, &kvant::Device::cpu(), &Default::default()).unwrap();
    let code = include_str!("common.rs");
    for (name, prompt, temperature) in [
        ("list", REPEATS.to_string(), 0.0),
        ("code", format!("{code}\nThe same file once more:\n\n{}", &code[..400]), 0.0),
        ("prose", "Once upon a time, in a village by the sea, there lived".to_string(), 0.9),
    ] {
        for sequences in [1, 4] {
            let engines = [0, 8].map(|drafts| {
                let options = EngineOptions::default().context(2048).sequences(sequences).drafts(drafts);
                Engine::start(model.clone(), Arc::clone(&tokenizer), options).unwrap()
            });
            let run = |engine: &Engine, round: u64| {
                let prompt = tokenizer.encode_prompt(&prompt).unwrap();
                let mut sampling = Sampling::default().temperature(temperature);
                let started = Instant::now();
                let mut first = None;
                let all: Vec<_> = (0..sequences as u64)
                    .map(|index| {
                        sampling.seed = round * 100 + index;
                        let request = EngineRequest::new(prompt.clone()).max_tokens(300).stop_ids(Vec::new());
                        engine.submit(request.sampling(sampling.clone())).unwrap()
                    })
                    .collect();
                let mut tokens = 0;
                for responses in all {
                    for event in responses {
                        if matches!(event, Event::Token(_)) {
                            first.get_or_insert_with(Instant::now);
                            tokens += 1;
                        }
                    }
                }
                let seconds = first.unwrap_or(started).elapsed().as_secs_f64();
                tokens as f64 / seconds
            };
            for engine in &engines {
                run(engine, 0);
            }
            let mut ratios: Vec<(f64, [f64; 2])> = (1..=5)
                .map(|round| {
                    let rates = [0, 1].map(|index| run(&engines[index], round));
                    (rates[1] / rates[0], rates)
                })
                .collect();
            ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (ratio, [without, with]) = ratios[2];
            let drafts = engines[1].stats().drafts;
            println!(
                "{name}, {sequences} sequences: {without:.0} -> {with:.0} tokens/s, {ratio:.2} × ({:.2} to {:.2}), {} of {} accepted",
                ratios[0].0, ratios[4].0, drafts.accepted, drafts.tokens
            );
        }
    }
}

/// Ids of [`words`]: `▁Hello`, `▁world`, and the first byte.
const HELLO: u32 = 3;
const WORLD: u32 = 4;
const BYTES: u32 = 259;

/// The text of two tokens `forced` after a prompt.
fn after(engine: &Engine, prompt: &[u32], forced: u32, stop: &[&str]) -> String {
    let sampling = Sampling::default().logit_bias(vec![(forced, 1000.0)]);
    let request = EngineRequest::new(prompt.to_vec()).max_tokens(2).sampling(sampling).stop(stop.iter().copied());
    collect(engine.submit(request).unwrap()).1
}

#[test]
fn a_text_continues_its_prompt() {
    let engine = Engine::start(model(), Arc::new(words()), options()).unwrap();
    assert_eq!(after(&engine, &[2, HELLO], WORLD, &[]), " world world");
    // The first word of a whole text.
    assert_eq!(after(&engine, &[2], WORLD, &[]), "world world");
    // Stop strings match the space.
    assert_eq!(after(&engine, &[2, HELLO], WORLD, &[" world"]), "");
    assert_eq!(after(&engine, &[2], WORLD, &[" world"]), "world");
    // A character whose first three bytes are in the prompt.
    assert_eq!(after(&engine, &[2, BYTES + 0xF0, BYTES + 0x9F, BYTES + 0x98], BYTES + 0x80, &[]), "😀\u{fffd}");
}
