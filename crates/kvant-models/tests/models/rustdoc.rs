//! The shipped model: golden logits, its tokenizer, and long generation.

use std::{ops::ControlFlow, path::Path};

use crate::common::{exact, floats, golden, ids, max_difference, nats, shipped};
use kvant::{Codec, CpuOptions, DType, Device, KvPool, SimdLevel, Step, Tensor, ops};
use kvant_models::{
    CacheCodecs, Decoder, Error, Finish, KvCodec, LoadOptions, Logits, Model, PoolOptions, Request, Sampling,
    Tokenizer, generate,
};
use serde_json::Value;

fn model() -> Model {
    Model::load(&shipped(), &Device::cpu()).unwrap()
}

/// Maximum difference of logits in f32, with an f32 cache.
const TOLERANCE: f32 = 2e-3;
/// Maximum difference on levels with VNNI, which may round the activations of 16 and more tokens to 16 bits
/// (`ops::Linear`): each product is off by 2e-5 of its size, logits of up to 30 by at most 1.5e-3 to 2.5e-3.
const TOLERANCE_OF_WORDS: f32 = 5e-3;

/// Checks a form of the model against golden data, and returns nats per token. `prompt`: the tolerance if all tokens
/// are fed at once.
fn check_golden(model: &Model, name: &str, prompt: f32) -> f64 {
    let file = golden("rustdoc-11m").join(name);
    let (tokens, rows) = (ids(&file, "tokens"), ids(&file, "rows"));
    let (expected, expected_nll) = (floats(&file, "logits"), floats(&file, "nll"));
    let vocab = model.vocab_size();
    let mut mean = 0.0;
    for step in [tokens.len(), 1, 7] {
        let mut sequence = model.new_pool(&exact(256)).unwrap().sequence();
        let logits: Vec<f32> = tokens
            .chunks(step)
            .flat_map(|piece| model.feed(&mut sequence, piece, Logits::All).unwrap().to_f32().unwrap())
            .collect();
        let row = |&row: &u32| logits[row as usize * vocab..(row as usize + 1) * vocab].to_vec();
        let got: Vec<f32> = rows.iter().flat_map(row).collect();
        let worst = max_difference(&got, &expected);
        let nll = nats(&logits, vocab, &tokens);
        mean = nll.iter().sum::<f64>() / nll.len() as f64;
        println!("{name}: {step} at a time: logits off by {worst:.1e}, {mean:.6} nats per token");
        let tolerance = if step >= 16 { prompt } else { TOLERANCE };
        assert!(worst < tolerance, "{name}, {step} at a time: off by {worst}");
        let nll: Vec<f32> = nll.iter().map(|&x| x as f32).collect();
        assert!(max_difference(&nll, &expected_nll) < TOLERANCE, "{name}, {step} at a time");
    }
    mean
}

#[test]
fn four_bit_form_matches() {
    let mean = check_golden(&model(), "4bit.safetensors", TOLERANCE_OF_WORDS);
    assert!((mean - 1.629343).abs() < 1e-4, "{mean}");
}

/// At the best level that does not round activations.
#[test]
fn four_bit_form_matches_in_f32() {
    let in_f32 = |level: &SimdLevel| !level.has_vnni() && level.is_supported();
    let level = SimdLevel::ALL.into_iter().rfind(in_f32);
    let device = Device::cpu_with(CpuOptions { simd: level, ..CpuOptions::default() }).unwrap();
    let mean = check_golden(&Model::load(&shipped(), &device).unwrap(), "4bit.safetensors", TOLERANCE);
    assert!((mean - 1.629343).abs() < 1e-4, "{mean}");
}

/// Needs the bf16 form, which does not ship: `KVANT_BF16_MODEL=DIR cargo test -p kvant-models -- --ignored`.
#[test]
#[ignore = "needs KVANT_BF16_MODEL, the directory of the model's bf16 form"]
fn bf16_form_matches() {
    let dir = std::env::var("KVANT_BF16_MODEL").expect("KVANT_BF16_MODEL names a directory");
    let mean = check_golden(&Model::load(Path::new(&dir), &Device::cpu()).unwrap(), "bf16.safetensors", TOLERANCE);
    assert!((mean - 1.612).abs() < 0.002, "{mean}");
}

/// Half-precision activations and compressed caches stay close to the exact run.
#[test]
fn other_dtypes_stay_close() {
    let tokens = ids(&golden("rustdoc-11m").join("4bit.safetensors"), "tokens");
    let run = |model: &Model, codec: Codec| {
        let options = PoolOptions { codecs: codec.into(), ..exact(256) };
        let mut sequence = model.new_pool(&options).unwrap().sequence();
        model.feed(&mut sequence, &tokens, Logits::All).unwrap().to_f32().unwrap()
    };
    let f32_model = model();
    let vocab = f32_model.vocab_size();
    let exact = run(&f32_model, Codec::F32);
    let mean = |logits: &[f32]| {
        let nll = nats(logits, vocab, &tokens);
        nll.iter().sum::<f64>() / nll.len() as f64
    };
    for (codec, limit) in [(Codec::F16, 1e-3), (Codec::BF16, 1e-2), (Codec::tq(8), 1e-2), (Codec::tq(4), 0.1)] {
        let kl = mean_kl(&exact, &run(&f32_model, codec), vocab);
        println!("cache {codec}: KL {kl:.2e}");
        assert!(kl < limit, "cache {codec}: KL {kl}");
    }
    for activations in [DType::F16, DType::BF16] {
        let low = Model::load_with(&shipped(), &Device::cpu(), &LoadOptions { activations, ..LoadOptions::default() })
            .unwrap();
        let logits = run(&low, Codec::F16);
        let (kl, nats) = (mean_kl(&exact, &logits, vocab), mean(&logits));
        println!("activations {activations}: KL {kl:.2e}, {nats:.4} nats");
        assert!(kl < 0.02, "activations {activations}: KL {kl}");
    }
}

/// Prompts with 8-bit activations also stay close, on levels that round them.
#[test]
fn eight_bit_activations_stay_close() {
    let tokens = ids(&golden("rustdoc-11m").join("4bit.safetensors"), "tokens");
    let run = |level: SimdLevel, eight_bit_activations: bool| {
        let options = CpuOptions { simd: Some(level), eight_bit_activations, ..CpuOptions::default() };
        let model = Model::load(&shipped(), &Device::cpu_with(options).unwrap()).unwrap();
        let mut sequence = model.new_pool(&exact(256)).unwrap().sequence();
        (model.feed(&mut sequence, &tokens, Logits::All).unwrap().to_f32().unwrap(), model.vocab_size())
    };
    for level in SimdLevel::ALL.into_iter().filter(|level| level.is_supported()) {
        let (exact, vocab) = run(level, false);
        let kl = mean_kl(&exact, &run(level, true).0, vocab);
        println!("{level}: KL {kl:.2e}");
        let range = if level.has_vnni() { 1e-6..5e-3 } else { 0.0..f64::MIN_POSITIVE };
        assert!(range.contains(&kl), "{level}: KL {kl}");
    }
}

/// `feed_with` calls back once in each layer, before any token attends to the stored data.
#[test]
fn stored_keys_and_values_can_be_replaced() {
    let model = model();
    let layers = model.decoder().cache_layers();
    let feed = |tokens: &[u32], stored: &mut dyn FnMut(&KvPool, usize, &Step) -> kvant::Result<()>| {
        let pool = model.new_pool(&exact(64)).unwrap();
        let mut called = Vec::new();
        let logits = model
            .feed_with(&mut pool.sequence(), tokens, Logits::All, &mut |layer, step| {
                called.push(layer);
                Ok(stored(&pool, layer, step)?)
            })
            .unwrap();
        assert_eq!(called, (0..layers).collect::<Vec<_>>());
        logits.to_f32().unwrap()
    };
    let tokens = [2, 17, 301, 5, 90];
    let plain = model.feed(&mut model.new_pool(&exact(64)).unwrap().sequence(), &tokens, Logits::All).unwrap();
    assert_eq!(feed(&tokens, &mut |_, _, _| Ok(())), plain.to_f32().unwrap());
    // Without values, a token receives no information from other tokens.
    let without_values = |tokens: &[u32]| {
        feed(tokens, &mut |pool, layer, step| {
            let layer = pool.layer(layer)?;
            let shape = [step.tokens(), layer.spec().kv_heads, layer.spec().head_dim];
            let zeros = Tensor::zeros(pool.device(), DType::F32, &shape)?;
            let mut enc = pool.device().encoder()?;
            ops::kv_write(&mut enc, &ops::KvWrite::new(&zeros, &zeros, step, layer))?;
            enc.commit()?.wait()
        })
    };
    let (a, b) = (without_values(&tokens), without_values(&[2, 800, 801, 802, 90]));
    let last = 4 * model.vocab_size();
    assert_eq!(a[last..], b[last..]);
    assert_ne!(a[last..], plain.to_f32().unwrap()[last..]);
    let refused = || kvant::Error::NotHeld { needed: 0, oldest: 1 };
    let pool = model.new_pool(&exact(64)).unwrap();
    let mut sequence = pool.sequence();
    let failed = model.feed_with(&mut sequence, &tokens, Logits::Last, &mut |_, _| Err(refused().into()));
    assert!(failed.is_err() && sequence.is_empty());
}

/// Each layer of a cache has the codecs of its entry.
#[test]
fn layers_have_their_own_codecs() {
    let tokens = ids(&golden("rustdoc-11m").join("4bit.safetensors"), "tokens");
    let model = model();
    let run = |codecs: CacheCodecs| {
        let mut sequence = model.new_pool(&PoolOptions { codecs, ..exact(256) }).unwrap().sequence();
        model.feed(&mut sequence, &tokens, Logits::All).unwrap().to_f32().unwrap()
    };
    let (exact_layer, narrow) = (KvCodec::from(Codec::F32), KvCodec { k: Codec::tq(2), v: Codec::F32 });
    let layers = |narrow_ones: usize| -> Vec<KvCodec> {
        (0..6).map(|layer| if layer < narrow_ones { narrow } else { exact_layer }).collect()
    };
    let pool = model.new_pool(&PoolOptions { codecs: CacheCodecs::PerLayer(layers(2).into()), ..exact(64) }).unwrap();
    let codecs: Vec<KvCodec> = pool.spec().layers.iter().map(|layer| KvCodec { k: layer.k, v: layer.v }).collect();
    assert_eq!(codecs, layers(2));
    let exact_logits = run(exact_layer.into());
    let kl = |narrow_ones: usize| {
        let logits = run(CacheCodecs::PerLayer(layers(narrow_ones).into()));
        mean_kl(&exact_logits, &logits, model.vocab_size())
    };
    let kls = [0, 1, 6].map(kl);
    assert!(kls[0] == 0.0 && 0.0 < kls[1] && kls[1] < kls[2], "{kls:?}");

    for count in [0, 5, 7] {
        let codecs = CacheCodecs::PerLayer(vec![narrow; count].into());
        let error = model.new_pool(&PoolOptions { codecs, ..exact(64) }).err().unwrap();
        assert!(matches!(error, Error::Argument { arg: "codecs", .. }), "{error}");
    }
}

/// Mean KL divergence of the second's distributions from the first's over rows.
fn mean_kl(p: &[f32], q: &[f32], vocab: usize) -> f64 {
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from(x - top).exp()).sum();
        row.iter().map(|&x| f64::from(x - top) - sum.ln()).collect()
    };
    let rows = p.chunks(vocab).zip(q.chunks(vocab)).map(|(p, q)| {
        let (p, q) = (log_softmax(p), log_softmax(q));
        p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>()
    });
    rows.sum::<f64>() / (p.len() / vocab) as f64
}

/// The beginning-of-text token is not duplicated if the prompt contains it.
#[test]
fn a_prompt_begins_once() {
    let tokenizer = Tokenizer::load(&shipped()).unwrap();
    let bos = tokenizer.bos().unwrap();
    let plain = tokenizer.encode_prompt("a").unwrap();
    assert_eq!(plain[0], bos);
    assert_eq!(tokenizer.encode_prompt("<bos>a").unwrap(), plain);
    assert_eq!(tokenizer.encode("<bos>a", false).unwrap(), plain);
    assert_eq!(tokenizer.encode_prompt("<bos><bos>a").unwrap()[..2], [bos; 2], "two that were written stay two");
    assert_eq!(tokenizer.encode_prompt("").unwrap(), [bos]);
}

/// 4096 tokens, whose windows pass many pages, compared with prompts computed from scratch.
#[test]
fn long_generation_equals_recomputation() {
    let model = model();
    let tokenizer = Tokenizer::load(&shipped()).unwrap();
    let mut tokens = tokenizer.encode("# Fearless Concurrency", true).unwrap();
    let mut sequence = model.new_pool(&exact(4200)).unwrap().sequence();
    let sampling = Sampling::default().temperature(0.8).top_p(0.95).seed(7);
    let mut fed = 0;
    for until in [100, 129, 700, 2050, 4096] {
        // Generation continues where it stopped, then feeds its last token to obtain its logits.
        let prompt = tokens[fed..].to_vec();
        let request = Request { max_tokens: until - tokens.len(), sampling: sampling.clone(), ..Request::new(&prompt) };
        let stats = generate(&model, &mut sequence, &request, |token| {
            tokens.push(token);
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!((stats.finish, tokens.len()), (Finish::Length, until));
        let last = tokens[until - 1];
        let went_on = model.feed(&mut sequence, &[last], Logits::Last).unwrap().to_f32().unwrap();
        fed = until;
        // The next part starts with the most probable token.
        tokens.push(argmax(&went_on));

        let mut fresh = model.new_pool(&exact(4200)).unwrap().sequence();
        let at_once = model.feed(&mut fresh, &tokens[..until], Logits::Last).unwrap().to_f32().unwrap();
        let worst = max_difference(&went_on, &at_once);
        println!("after {until} tokens: off by {worst:.1e}");
        // Recomputed as a prompt.
        assert!(worst < TOLERANCE, "after {until} tokens: off by {worst}");
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
    best.0 as u32
}

#[test]
fn generation_is_reproducible_and_seeded() {
    let model = model();
    let tokenizer = Tokenizer::load(&shipped()).unwrap();
    let prompt = tokenizer.encode("A `Vec<T>` is", true).unwrap();
    let run = |sampling: Sampling| {
        let mut sequence = model.new_pool(&PoolOptions::default()).unwrap().sequence();
        let request = Request { max_tokens: 40, sampling, ..Request::new(&prompt) };
        let mut tokens = Vec::new();
        let stats = generate(&model, &mut sequence, &request, |token| {
            tokens.push(token);
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!((stats.prompt_tokens, stats.generated_tokens), (prompt.len(), 40));
        assert_eq!(sequence.len(), prompt.len() + 39);
        tokens
    };
    let greedy = run(Sampling::default());
    assert_eq!(greedy, run(Sampling::default().temperature(1.0).top_k(1)));
    let seeded = |seed| Sampling::default().temperature(1.0).seed(seed);
    assert_eq!(run(seeded(1)), run(seeded(1)));
    assert_ne!(run(seeded(1)), run(seeded(2)));
    // Adjustments of logits on the host: a bias of 0 changes nothing; forbidden and penalised tokens do not occur.
    assert_eq!(run(seeded(1)), run(seeded(1).logit_bias(vec![(5, 0.0)])));
    let without: Vec<u32> = greedy[..3].to_vec();
    let changed = run(Sampling::default().suppressed(without.clone()));
    assert!(changed.iter().all(|token| !without.contains(token)));
    let mut once = run(Sampling::default().presence_penalty(1e6));
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), 40);
    let fresh = run(Sampling::default().repetition_penalty(1e6));
    assert!(fresh.iter().all(|token| !prompt.contains(token)));

    // Greedy decoding is the argmax of the logits that forward returns.
    let mut sequence = model.new_pool(&PoolOptions::default()).unwrap().sequence();
    let logits = model.feed(&mut sequence, &prompt, Logits::Last).unwrap().to_f32().unwrap();
    assert_eq!(greedy[0], argmax(&logits));
}

#[test]
fn generation_ends_for_the_reason_it_gives() {
    let model = model();
    let prompt = [2, 100, 200];
    let run = |longest: usize, stop: &[u32], cancel_after: usize| {
        let mut sequence =
            model.new_pool(&PoolOptions { longest, page_tokens: 16, ..PoolOptions::default() }).unwrap().sequence();
        let mut tokens = Vec::new();
        let request = Request { max_tokens: 16, stop, ..Request::new(&prompt) };
        let stats = generate(&model, &mut sequence, &request, |token| {
            tokens.push(token);
            if tokens.len() == cancel_after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
        (stats.finish, tokens)
    };
    let (finish, tokens) = run(64, &[], 100);
    assert_eq!((finish, tokens.len()), (Finish::Length, 16));
    assert_eq!(run(64, &[], 2), (Finish::Cancelled, tokens[..2].to_vec()));
    // Three prompt tokens and 13 fed ones fill a page.
    assert_eq!(run(16, &[], 100), (Finish::OutOfPages, tokens[..14].to_vec()));
    let first = tokens.iter().position(|&t| t == tokens[3]).unwrap();
    assert_eq!(run(64, &[tokens[3]], 100), (Finish::Stop, tokens[..first].to_vec()));
}

/// Token by token, recorded or not: equal logits and samples, in any order of calls.
#[test]
fn a_decoder_equals_forward() {
    let model = model();
    let sampling = Sampling::default().temperature(0.9).top_p(0.9).seed(3);
    let [mut fed, mut straight] = [(); 2].map(|()| model.new_pool(&exact(300)).unwrap().sequence());
    let mut decoder = Decoder::new(&model, &mut fed, sampling).unwrap();
    let mut drawn = decoder.next(&[2, 17, 300]).unwrap();
    let mut want = model.feed(&mut straight, &[2, 17, 300], Logits::Last).unwrap().to_f32().unwrap();
    for i in 0..200 {
        assert_eq!(decoder.logits().to_f32().unwrap(), want, "token {i}");
        want = model.feed(&mut straight, &[drawn], Logits::Last).unwrap().to_f32().unwrap();
        if i % 7 == 3 {
            decoder.feed(&[drawn]).unwrap();
            drawn = argmax(&want);
        } else {
            drawn = decoder.next(&[drawn]).unwrap();
        }
        if i % 50 == 49 {
            decoder.truncate(3 + i - 2).unwrap();
            straight.truncate(3 + i - 2).unwrap();
            want = model.feed(&mut straight, &[5, 6, 7], Logits::Last).unwrap().to_f32().unwrap();
            drawn = decoder.next(&[5, 6, 7]).unwrap();
        }
    }
    // Recorded and unrecorded passes sample equally: the random number depends on the position.
    let len = decoder.sequence().len();
    let at_once = decoder.next(&[40, 50, 60]).unwrap();
    decoder.truncate(len).unwrap();
    decoder.feed(&[40, 50]).unwrap();
    assert_eq!(decoder.next(&[60]).unwrap(), at_once);
    // Rejected calls change nothing.
    let len = decoder.sequence().len();
    assert!(matches!(decoder.next(&[1 << 20]).unwrap_err(), Error::Argument { arg: "tokens", .. }));
    assert!(decoder.feed(&[]).is_err());
    assert_eq!(decoder.sequence().len(), len);
    while decoder.feed(&[4]).is_ok() {}
    let len = decoder.sequence().len();
    assert!(len >= 320, "five pages of 64 have room for 300 tokens");
    assert!(matches!(decoder.feed(&[4]).unwrap_err(), Error::Kvant(kvant::Error::OutOfPages { .. })));
    assert_eq!(decoder.sequence().len(), len);
}

/// Errors are returned before anything changes, and the sequence can continue.
#[test]
fn refused_calls_do_not_change_the_sequence() {
    let model = model();
    let tokens: Vec<u32> = (10..40).collect();
    let mut sequence = model.new_pool(&exact(40)).unwrap().sequence();
    model.feed(&mut sequence, &tokens, Logits::Last).unwrap();
    let full = model.feed(&mut sequence, &[7; 600], Logits::Last).unwrap_err();
    assert!(matches!(full, Error::Kvant(kvant::Error::OutOfPages { .. })), "{full}");
    let empty = model.feed(&mut sequence, &[], Logits::Last).unwrap_err();
    assert!(matches!(empty, Error::Argument { arg: "tokens", .. }), "{empty}");
    let outside = model.feed(&mut sequence, &[1, 4096], Logits::Last).unwrap_err();
    assert!(matches!(outside, Error::Argument { arg: "tokens", .. }), "{outside}");
    assert!(outside.to_string().contains("4096 at 1"), "{outside}");
    let out = Tensor::zeros(&Device::cpu(), DType::F32, &[2, 4096]).unwrap();
    let rows = model.feed_into(&mut sequence, &[1], &out).unwrap_err();
    assert!(matches!(rows, Error::Argument { arg: "out", .. }), "{rows}");
    let request = Request { sampling: Sampling::default().top_p(0.0), ..Request::new(&[1]) };
    let sampling = generate(&model, &mut sequence, &request, |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(sampling, Error::Argument { arg: "top_p", .. }), "{sampling}");
    let other = Model::load(&golden("dense"), &Device::cpu()).unwrap();
    let foreign = other.feed(&mut sequence, &[1], Logits::Last).unwrap_err();
    assert!(matches!(foreign, Error::Argument { arg: "pool", .. }), "{foreign}");
    assert_eq!(sequence.len(), 30);

    let mut untouched = model.new_pool(&exact(40)).unwrap().sequence();
    model.feed(&mut untouched, &tokens, Logits::Last).unwrap();
    let next = |sequence: &mut _| model.feed(sequence, &[5], Logits::Last).unwrap().to_f32().unwrap();
    assert_eq!(next(&mut sequence), next(&mut untouched));
}

/// Truncating and feeding again gives equal results, even after windows have passed pages.
#[test]
fn truncated_sequences_continue_exactly() {
    let model = model();
    let tokens: Vec<u32> = (0..300).map(|i| (i * 37 + 11) % 4096).collect();
    let mut sequence = model.new_pool(&exact(400)).unwrap().sequence();
    model.feed(&mut sequence, &tokens, Logits::Last).unwrap();
    model.feed(&mut sequence, &[7, 8, 9], Logits::All).unwrap();
    sequence.truncate(300).unwrap();
    let again = model.feed(&mut sequence, &[20, 21], Logits::Last).unwrap().to_f32().unwrap();
    let mut straight = model.new_pool(&exact(400)).unwrap().sequence();
    let all = [&tokens[..], &[20, 21]].concat();
    let expected = model.feed(&mut straight, &all, Logits::Last).unwrap().to_f32().unwrap();
    // Prompts may be rounded to 16 bits, a few tokens to 24 (`ops::Linear`).
    assert!(max_difference(&again, &expected) < 5e-3);
}

#[test]
fn tokenizer_matches() {
    let tokenizer = Tokenizer::load(&shipped()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(2), &[1][..]));
    let file = golden("rustdoc-11m").join("tokenizer_cases.json");
    let cases: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let cases = cases.as_array().or_else(|| cases["cases"].as_array()).unwrap();
    assert!(cases.len() >= 5);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let numbers = |key: &str| -> Vec<u32> {
            case[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        assert_eq!(tokenizer.encode(text, false).unwrap(), numbers("ids"), "{text:?}");
        assert_eq!(tokenizer.encode(text, true).unwrap(), numbers("ids_special"), "{text:?}");
        let ids = numbers("ids");
        assert_eq!(tokenizer.decode(&ids).unwrap(), case["decoded_skip_special"].as_str().unwrap());
        assert_eq!(tokenizer.decode_with_special(&ids).unwrap(), case["decoded"].as_str().unwrap());
    }
}

/// The pieces of a stream are whole characters, and concatenate to the text.
#[test]
fn streamed_text_is_the_decoded_text() {
    let tokenizer = Tokenizer::load(&shipped()).unwrap();
    let long = "fn main() { println!(\"{}\", 1); } ".repeat(20);
    for text in ["", "plain", "naïve café — “quotes” 中文字符 🦀🦀 \u{fffd} end", "🦀", "\u{fffd}", &long]
    {
        let ids = tokenizer.encode(text, true).unwrap();
        let mut stream = tokenizer.stream();
        let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        pieces.push(stream.finish().unwrap());
        assert_eq!(pieces.concat(), text);
        // Text is returned with the last byte of a character: a crab appears with its last token.
        if text == "🦀" {
            assert_eq!(pieces[pieces.len() - 2], "🦀");
        }
    }
}

/// Arbitrary ids, including invalid text: nothing is lost, and the stream does not stall.
#[test]
fn streams_survive_bytes_that_are_no_text() {
    let tokenizer = Tokenizer::load(&shipped()).unwrap();
    let crab = tokenizer.encode("🦀", false).unwrap();
    assert!(crab.len() > 1, "a crab takes several tokens");
    let halves: Vec<u32> = std::iter::repeat_n(crab[0], 300).collect();
    let mut stream = tokenizer.stream();
    let mut text = String::new();
    for &id in &halves {
        text += &stream.push(id).unwrap();
    }
    text += &stream.finish().unwrap();
    assert_eq!(text.trim_matches('\u{fffd}'), "");
    assert!(text.chars().count() >= 200);

    let odd: Vec<u32> = (0..600).map(|i| (i * i * 31 + 7 * i) % 5000).collect();
    let mut stream = tokenizer.stream();
    let streamed: String = odd.iter().map(|&id| stream.push(id).unwrap()).collect();
    let rest = stream.finish().unwrap();
    assert_eq!(streamed + &rest, tokenizer.decode(&odd).unwrap());
}

/// A device buffer of logits can be reused; it contains the result of forward.
#[test]
fn forward_into_takes_the_last_rows() {
    let model = model();
    let tokens: Vec<u32> = (100..150).collect();
    let mut sequence = model.new_pool(&exact(64)).unwrap().sequence();
    let all = model.feed(&mut sequence, &tokens, Logits::All).unwrap().to_f32().unwrap();
    for rows in [1, 9, 20, 50] {
        sequence.truncate(0).unwrap();
        let out = Tensor::zeros(&Device::cpu(), DType::F32, &[rows, 4096]).unwrap();
        model.feed_into(&mut sequence, &tokens, &out).unwrap();
        // A few rows may be computed more precisely than many (`ops::Linear`).
        let bound = if rows < 32 { 5e-3 } else { 1e-4 };
        assert!(max_difference(&out.to_f32().unwrap(), &all[(50 - rows) * 4096..]) < bound, "{rows} rows");
    }
    // The results of the model are valid inputs of the library's operations.
    let best = Tensor::zeros(&Device::cpu(), DType::U32, &[50]).unwrap();
    let x = Tensor::from_slice(&Device::cpu(), &all, &[50, 4096]).unwrap();
    let mut enc = Device::cpu().encoder().unwrap();
    ops::argmax(&mut enc, &ops::Argmax::new(&x, &best)).unwrap();
    enc.commit().unwrap().wait().unwrap();
    let expected: Vec<u32> = all.chunks(4096).map(argmax).collect();
    assert_eq!(best.to_vec::<u32>().unwrap(), expected);
}
