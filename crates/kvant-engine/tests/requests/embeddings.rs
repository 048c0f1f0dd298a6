//! Embeddings compared with the hidden states of the model, alone and together with text generation.

use kvant_engine::{Engine, EngineOptions, EngineRequest, Event, FinishReason, Responses, SubmitError};
use kvant_models::{Model, PoolOptions, Pooling};

use crate::common::{collect, engine, model, options, request};

/// The embedding of a prompt that is computed in one pass.
fn expected(model: &Model, tokens: &[u32], pooling: Pooling) -> Vec<f32> {
    let longest = PoolOptions { codecs: kvant::Codec::F32.into(), longest: 256, ..PoolOptions::default() };
    let pool = model.new_pool(&longest).unwrap();
    let mut sequence = pool.sequence();
    let step = pool.step(&mut [(&mut sequence, tokens.len())]).unwrap();
    let rows: Vec<usize> = match pooling {
        Pooling::Last => vec![tokens.len() - 1],
        Pooling::Mean => (0..tokens.len()).collect(),
    };
    let hidden = model.hidden(&pool, &step, tokens, &rows).unwrap();
    let (numbers, width) = (hidden.to_f32().unwrap(), hidden.shape()[1]);
    (0..width).map(|at| numbers.iter().skip(at).step_by(width).sum::<f32>() / rows.len() as f32).collect()
}

fn embedding(responses: Responses) -> Vec<f32> {
    let mut events: Vec<Event> = responses.collect();
    let Some(Event::Finished(finished)) = events.pop() else { panic!("no end: {events:?}") };
    assert_eq!((finished.reason, finished.usage.generated_tokens), (FinishReason::Length, 0));
    let [Event::Embedding(numbers)] = &events[..] else { panic!("{events:?}") };
    numbers.clone()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f32::max)
}

fn prompt(engine: &Engine, length: usize) -> Vec<u32> {
    let text = "Creates a new `Vec<T>` with at least the specified capacity. ".repeat(20);
    engine.tokenizer().encode_prompt(&text).unwrap()[..length].to_vec()
}

const LENGTHS: [usize; 5] = [1, 2, 40, 130, 200];

#[test]
fn chunks_of_prompts_give_the_whole() {
    let model = model();
    // Small steps split prompts into chunks; steps of one token replay recorded passes.
    for step_tokens in [512, 33, 3] {
        let engine = engine(options().sequences(2).step_tokens(step_tokens));
        for pooling in [Pooling::Last, Pooling::Mean] {
            for length in LENGTHS {
                let tokens = prompt(&engine, length);
                let got = embedding(engine.submit(EngineRequest::new(tokens.clone()).embed(pooling)).unwrap());
                assert_eq!(got.len(), engine.embedding_len());
                let worst = distance(&got, &expected(&model, &tokens, pooling));
                assert!(worst < 2e-3, "{pooling:?} of {length} tokens, {step_tokens} a step: off by {worst}");
            }
        }
    }
}

#[test]
fn texts_are_written_at_the_same_time() {
    let options = options().sequences(4).step_tokens(48);
    let texts = |engine: &Engine| ["fn main", "# Examples"].map(|text| request(engine, text).max_tokens(60));
    let alone = engine(options.clone());
    let alone: Vec<_> = texts(&alone).map(|request| collect(alone.submit(request).unwrap())).into();
    let (model, engine) = (model(), engine(options));
    let written = texts(&engine).map(|request| engine.submit(request).unwrap());
    for pooling in [Pooling::Mean, Pooling::Last, Pooling::Mean] {
        let submit = |length| {
            let tokens = prompt(&engine, length);
            (tokens.clone(), engine.submit(EngineRequest::new(tokens).embed(pooling)).unwrap())
        };
        for (tokens, responses) in LENGTHS.map(submit) {
            let worst = distance(&embedding(responses), &expected(&model, &tokens, pooling));
            assert!(worst < 2e-3, "{pooling:?} of {} tokens: off by {worst}", tokens.len());
        }
    }
    for (responses, (ids, text, _)) in written.into_iter().zip(alone) {
        let got = collect(responses);
        assert_eq!((got.0, got.1), (ids, text));
    }
    assert_eq!(engine.stats().requests_used, 0);
}

/// The embedding of the last token can start from a cached prefix; a mean needs all tokens.
#[test]
fn prefixes_are_found() {
    let (model, engine) = (model(), engine(options().sequences(1)));
    let tokens = prompt(&engine, 200);
    for pooling in [Pooling::Last, Pooling::Last, Pooling::Mean] {
        let got = embedding(engine.submit(EngineRequest::new(tokens.clone()).embed(pooling)).unwrap());
        assert!(distance(&got, &expected(&model, &tokens, pooling)) < 2e-3, "{pooling:?}");
    }
    let computed = engine.stats().prompt_tokens;
    assert!((400..500).contains(&computed), "{computed}");
}

#[test]
fn embeddings_refuse_fields_of_texts() {
    let engine = engine(EngineOptions::default().context(64).sequences(1));
    let embed = || EngineRequest::new(vec![5, 6]).embed(Pooling::Mean);
    let field = |request| match engine.submit(request).map(drop) {
        Err(SubmitError::Invalid { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(embed().max_tokens(1)), "max_tokens");
    assert_eq!(field(embed().prompt_logprobs(0)), "prompt_logprobs");
    let long = EngineRequest::new(vec![5; 65]).embed(Pooling::Mean);
    assert!(matches!(engine.submit(long), Err(SubmitError::ContextLength { limit: 64, .. })));
    let full = EngineRequest::new(vec![5; 64]).embed(Pooling::Mean);
    assert_eq!(embedding(engine.submit(full).unwrap()).len(), engine.embedding_len());
}
