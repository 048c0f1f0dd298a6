//! `/v1/completions`.

use kvant_models::Sampling;

use super::*;

/// The server's defaults apply to fields that a request does not set.
#[tokio::test(flavor = "multi_thread")]
async fn defaults_of_the_server() {
    let greedy = || with(ServerOptions::new(NAME).sampling(Sampling::default()));
    let text = |answer: Value| answer["choices"][0]["text"].as_str().unwrap().to_string();
    let body = json!({"prompt": "# Vec", "max_tokens": 12});
    let plain = text(post(greedy(), "/v1/completions", body.clone()).await.ok());
    let asked = post(router(), "/v1/completions", and(body.clone(), json!({"temperature": 0}))).await.ok();
    assert_eq!(plain, text(asked));
    let hot = and(body, json!({"temperature": 5, "seed": 3}));
    assert_ne!(plain, text(post(greedy(), "/v1/completions", hot).await.ok()));
}

const PATH: &str = "/v1/completions";

fn greedy() -> Value {
    json!({"prompt": "# Fearless Concurrency\n", "max_tokens": 24, "temperature": 0})
}

async fn complete(body: Value) -> Value {
    post(router(), PATH, body).await.ok()
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_text() {
    let answer = complete(greedy()).await;
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!(NAME)));
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(answer["usage"]["total_tokens"], prompt + 24);
    assert!(text(&answer).len() > 24);
    // OpenAI's default.
    assert_eq!(complete(json!({"prompt": "# A", "ignore_eos": true})).await["usage"]["completion_tokens"], 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_the_same_parts() {
    for more in [
        json!({}),
        json!({"logprobs": 3}),
        json!({"echo": true, "logprobs": 0}),
        json!({"echo": true, "max_tokens": 0}),
        json!({"echo": true, "max_tokens": 0, "logprobs": 2}),
        json!({"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 1}),
        json!({"stop": ["e", "zzz"]}),
        json!({"prompt": ["# A", "# B"], "n": 2, "temperature": 0.8, "seed": 1, "echo": true}),
    ] {
        let body = and(greedy(), more);
        let whole = complete(body.clone()).await;
        let options = json!({"stream": true, "stream_options": {"include_usage": true}});
        let mut chunks = post(router(), PATH, and(body.clone(), options)).await.chunks();
        assert_eq!(chunks.pop().unwrap()["usage"], whole["usage"], "{body}");
        let choices = whole["choices"].as_array().unwrap();
        let mut built: Vec<Value> = (0..choices.len())
            .map(|index| json!({"index": index, "text": "", "logprobs": null, "finish_reason": null}))
            .collect();
        for chunk in chunks {
            assert!(chunk["usage"].is_null());
            let [choice] = chunk["choices"].as_array().unwrap().as_slice() else { panic!("{chunk}") };
            let built = &mut built[choice["index"].as_u64().unwrap() as usize];
            assert!(built["finish_reason"].is_null(), "nothing follows the end");
            built["text"] = json!(format!("{}{}", built["text"].as_str().unwrap(), choice["text"].as_str().unwrap()));
            built["finish_reason"] = choice["finish_reason"].clone();
            if let Some(more) = choice["logprobs"].as_object() {
                for (key, list) in more {
                    let mut all = built["logprobs"][key].as_array().cloned().unwrap_or_default();
                    all.extend(list.as_array().unwrap().iter().cloned());
                    built["logprobs"][key] = json!(all);
                }
            }
        }
        assert_eq!(built, *choices, "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn seeds_decide() {
    let ask = |seed: i64| async move {
        text(&complete(and(greedy(), json!({"temperature": 1.2, "seed": seed}))).await).to_string()
    };
    assert_eq!(ask(3).await, ask(3).await);
    assert_ne!(ask(3).await, ask(-3).await);
    // Choice i of seed s equals the only choice of seed s + i.
    let all = complete(and(greedy(), json!({"temperature": 1.2, "seed": 2, "n": 2}))).await;
    assert_eq!(all["choices"][1]["text"], ask(3).await);
    assert_ne!(all["choices"][0]["text"], all["choices"][1]["text"]);
    // Without a seed, each request gets a random one.
    let free = json!({"temperature": 1.5});
    assert_ne!(complete(and(greedy(), free.clone())).await["choices"], complete(and(greedy(), free)).await["choices"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_of_every_form() {
    let ids = post(router(), "/tokenize", json!({"prompt": "# Fearless Concurrency\n"})).await.ok()["tokens"].clone();
    let expected = complete(greedy()).await["choices"][0]["text"].clone();
    for prompt in [json!(["# Fearless Concurrency\n"]), ids.clone(), json!([ids])] {
        assert_eq!(complete(and(greedy(), json!({"prompt": prompt}))).await["choices"][0]["text"], expected);
    }
    let two = complete(and(greedy(), json!({"prompt": ["# A", "# Fearless Concurrency\n"]}))).await;
    assert_eq!(two["choices"][1]["text"], expected);
    assert_eq!(two["usage"]["completion_tokens"], 48);
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_strings_end_the_text() {
    let full = complete(greedy()).await;
    let stop: String = text(&full).chars().skip(12).take(3).collect();
    let before = text(&full).split(&stop).next().unwrap();
    for form in [json!(stop), json!(["never found", stop])] {
        let answer = complete(and(greedy(), json!({"stop": form}))).await;
        assert_eq!((text(&answer), &answer["choices"][0]["finish_reason"]), (before, &json!("stop")));
    }
    let with = complete(and(greedy(), json!({"stop": stop, "include_stop_str_in_output": true}))).await;
    assert_eq!(text(&with), format!("{before}{stop}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn biases_and_stop_ids() {
    let full = complete(and(greedy(), json!({"logprobs": 1}))).await;
    let first = &full["choices"][0]["logprobs"]["tokens"][0];
    let ids = post(router(), "/tokenize", json!({"prompt": first, "add_special_tokens": false})).await.ok();
    let id = ids["tokens"][0].as_u64().unwrap();
    let banned = complete(and(greedy(), json!({"logprobs": 1, "logit_bias": {id.to_string(): -100}}))).await;
    assert_ne!(banned["choices"][0]["logprobs"]["tokens"][0], *first);
    let stopped = complete(and(greedy(), json!({"stop_token_ids": [id]}))).await;
    assert_eq!((text(&stopped), &stopped["usage"]["completion_tokens"]), ("", &json!(0)));
    let forced = complete(and(greedy(), json!({"max_tokens": 4, "logit_bias": {"300": 100}, "logprobs": 0}))).await;
    let tokens = forced["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    assert!(tokens.len() == 4 && tokens.iter().all(|token| *token == tokens[0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_of_prompt_and_text() {
    let answer = complete(and(greedy(), json!({"max_tokens": 2, "logprobs": 4, "echo": true}))).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    let list = |key: &str| logprobs[key].as_array().unwrap().clone();
    let (tokens, chosen, top, offsets) =
        (list("tokens"), list("token_logprobs"), list("top_logprobs"), list("text_offset"));
    let count = answer["usage"]["total_tokens"].as_u64().unwrap() as usize;
    assert_eq!([tokens.len(), chosen.len(), top.len(), offsets.len()], [count; 4]);
    assert!(chosen[0].is_null() && top[0].is_null());
    let text: Vec<char> = text(&answer).chars().collect();
    for index in 1..count {
        let token = tokens[index].as_str().unwrap();
        let at = offsets[index].as_u64().unwrap() as usize;
        assert_eq!(text[at..at + token.chars().count()].iter().collect::<String>(), token);
        let logprob = chosen[index].as_f64().unwrap();
        assert!(logprob <= 0.0);
        let top = top[index].as_object().unwrap();
        assert_eq!(top[token].as_f64(), Some(logprob));
        assert!((4..=5).contains(&top.len()));
    }
    // Greedy decoding generates the most probable tokens.
    for index in count - 2..count {
        let best = top[index].as_object().unwrap().values().filter_map(Value::as_f64).fold(f64::MIN, f64::max);
        assert_eq!(chosen[index].as_f64(), Some(best));
    }
    // Only the prompt, without generated tokens.
    let scored = complete(and(greedy(), json!({"max_tokens": 0, "logprobs": 4, "echo": true}))).await;
    assert_eq!(scored["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), count - 2);
    assert_eq!(scored["usage"]["completion_tokens"], 0);
}

/// Clients that score a prompt request one additional token, and expect its log probability even if it ends the text.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_text_has_log_probabilities() {
    let eos = post(router(), "/tokenize", json!({"content": "<eos>"})).await.ok()["tokens"][0].to_string();
    let body = json!({"prompt": "a", "max_tokens": 1, "logprobs": 1, "logit_bias": {eos: 100}});
    let choice = &post(router(), "/v1/completions", body).await.ok()["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(""), &json!("stop")));
    assert_eq!(choice["logprobs"]["tokens"], json!(["<eos>"]));
    assert!(choice["logprobs"]["token_logprobs"][0].as_f64().unwrap() < 0.0);
}

/// The ids of words and bytes in [`words`].
const HELLO: u32 = 3;
const WORLD: u32 = 4;

fn byte(byte: u8) -> u32 {
    259 + u32::from(byte)
}

/// A completion of two tokens, both `forced`.
async fn words_after(prompt: Value, forced: u32, more: Value) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": 2, "temperature": 0, "logit_bias": {forced.to_string(): 100}});
    post(words_router(), PATH, and(body, more)).await.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_word_after_the_prompt_keeps_its_space() {
    assert_eq!(text(&words_after(json!("Hello"), WORLD, json!({})).await), " world world");
    assert_eq!(text(&words_after(json!([2]), WORLD, json!({})).await), "world world");
    for prompt in [json!("Hello"), json!([HELLO])] {
        let answer = words_after(prompt, WORLD, json!({"echo": true, "logprobs": 1})).await;
        assert_eq!(text(&answer), "Hello world world");
        let logprobs = &answer["choices"][0]["logprobs"];
        assert_eq!(logprobs["tokens"], json!([" Hello", " world", " world"]));
        assert_eq!(logprobs["text_offset"], json!([0, 5, 11]));
    }
    let answer = words_after(json!("Hello"), WORLD, json!({"logprobs": 0})).await;
    assert_eq!(answer["choices"][0]["logprobs"]["text_offset"], json!([0, 6]));
    assert_eq!(text(&words_after(json!("Hello"), WORLD, json!({"stop": [" world"]})).await), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_special_tokens_count_where_the_text_has_them() {
    let more = json!({"echo": true, "logprobs": 0, "skip_special_tokens": false});
    // In the text of the prompt and in the generated text.
    let answer = words_after(json!("Hello<bos>"), 2, more.clone()).await;
    assert_eq!(text(&answer), "Hello<bos><bos><bos>");
    assert_eq!(answer["choices"][0]["logprobs"]["text_offset"], json!([0, 5, 10, 15]));
    // A prompt of ids is decoded without the names.
    let answer = words_after(json!([HELLO, 2]), 2, more).await;
    assert_eq!(text(&answer), "Hello<bos><bos>");
    assert_eq!(answer["choices"][0]["logprobs"]["text_offset"], json!([0, 5, 5, 10]));
    let answer = words_after(json!([HELLO, 2]), 2, json!({"echo": true, "logprobs": 0})).await;
    assert_eq!((text(&answer), &answer["choices"][0]["logprobs"]["text_offset"]), ("Hello", &json!([0, 5, 5, 5])));
}

#[tokio::test(flavor = "multi_thread")]
async fn characters_of_several_tokens_have_one_place() {
    let prompt = json!([HELLO, byte(0xF0), byte(0x9F), byte(0x98)]);
    let answer = words_after(prompt.clone(), byte(0x80), json!({"echo": true, "logprobs": 2})).await;
    // The second byte, 0x80, does not begin a character.
    assert_eq!(text(&answer), "Hello😀\u{fffd}");
    let logprobs = &answer["choices"][0]["logprobs"];
    let tokens = [" Hello", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80", r"bytes:\x80"];
    assert_eq!(logprobs["tokens"], json!(tokens));
    assert_eq!(logprobs["text_offset"], json!([0, 5, 5, 5, 5, 6]));
    assert!(logprobs["top_logprobs"][4].get(r"bytes:\x80").is_some(), "{logprobs}");
    // Without the prompt.
    let answer = words_after(prompt, byte(0x80), json!({"logprobs": 0})).await;
    assert_eq!(text(&answer), "😀\u{fffd}");
    assert_eq!(answer["choices"][0]["logprobs"]["text_offset"], json!([0, 1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn alternatives_have_keys_of_their_own() {
    let body = json!({"prompt": "Hello", "max_tokens": 8, "temperature": 0, "logprobs": 100});
    let answer = post(words_router(), PATH, body).await.ok();
    let logprobs = &answer["choices"][0]["logprobs"];
    let mut parts = 0;
    for (token, top) in logprobs["tokens"].as_array().unwrap().iter().zip(logprobs["top_logprobs"].as_array().unwrap())
    {
        let top = top.as_object().unwrap();
        assert_eq!(top.len(), 100, "{top:?}");
        assert!(top.contains_key(token.as_str().unwrap()));
        assert!(top.keys().all(|key| !key.contains('\u{fffd}')), "{top:?}");
        parts += top.keys().filter(|key| key.starts_with("bytes:")).count();
    }
    assert!(parts > 8, "{parts}");
}
