//! `/tokenize` and `/detokenize`.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn tokens_round_trip() {
    let text = "fn main() { println!(\"größer\"); }";
    let with = post(router(), "/tokenize", json!({"prompt": text})).await.ok();
    let without = post(router(), "/tokenize", json!({"content": text})).await.ok();
    let ids = with["tokens"].as_array().unwrap();
    assert_eq!(ids[1..], without["tokens"].as_array().unwrap()[..]);
    assert_eq!((&with["count"], &with["max_model_len"]), (&json!(ids.len()), &json!(1024)));
    let back = post(router(), "/detokenize", json!({"tokens": without["tokens"]})).await.ok();
    assert_eq!((&back["prompt"], &back["content"]), (&json!(text), &json!(text)));
    let named = json!({"prompt": "a", "return_token_strs": true});
    assert_eq!(post(router(), "/tokenize", named).await.ok()["token_strs"], json!(["<bos>", "a"]));
    let pieces = post(router(), "/tokenize", json!({"content": "a b", "with_pieces": true})).await.ok();
    assert_eq!(pieces["tokens"][1]["piece"], " b");
    let info = get(router(), "/tokenizer_info").await.ok();
    assert_eq!((&info["bos_token"], &info["model_max_length"]), (&json!("<bos>"), &json!(1024)));
    let named =
        post(router(), "/tokenize", json!({"prompt": info["bos_token"], "add_special_tokens": false})).await.ok();
    assert_eq!(named["tokens"], json!([with["tokens"][0]]));
}

/// A word keeps its space, and a part of a character is shown as bytes, as in llama.cpp. A text starts with its first
/// word.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_within_a_text() {
    let body = json!({"content": "Hello world", "with_pieces": true, "return_token_strs": true});
    let answer = post(words_router(), "/tokenize", body).await.ok();
    assert_eq!(answer["tokens"], json!([{"id": 3, "piece": " Hello"}, {"id": 4, "piece": " world"}]));
    assert_eq!(answer["token_strs"], json!([" Hello", " world"]));
    let back = post(words_router(), "/detokenize", json!({"tokens": [3, 4]})).await.ok();
    assert_eq!(back["content"], "Hello world");

    let answer = post(router(), "/tokenize", json!({"content": "😀", "with_pieces": true})).await.ok();
    let mut bytes = Vec::new();
    for token in answer["tokens"].as_array().unwrap() {
        bytes.extend(token["piece"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8));
    }
    assert_eq!(bytes, "😀".as_bytes());
    let answer = post(router(), "/tokenize", json!({"content": "😀", "return_token_strs": true})).await.ok();
    assert_eq!(answer["token_strs"][0], r"bytes:\xf0");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_refused() {
    for (body, field) in [
        (json!({}), "prompt"),
        (json!({"prompt": "a", "content": "b"}), "content"),
        (json!({"prompt": 3}), "prompt"),
        (json!({"prompt": "a", "messages": []}), "messages"),
    ] {
        assert_eq!(post(router(), "/tokenize", body).await.refused(), field);
    }
    assert_eq!(post(router(), "/detokenize", json!({"tokens": [-1]})).await.refused(), "tokens[0]");
    for id in [4096, u32::MAX] {
        let answer = post(router(), "/detokenize", json!({"tokens": [5, id, 6]})).await;
        let expected = format!("`tokens[1]` must be the id of a token, below the vocabulary's 4096, got {id}");
        assert_eq!(answer.json()["error"]["message"], expected);
        assert_eq!(answer.refused(), "tokens[1]");
    }
    post(router(), "/detokenize", json!({"tokens": [4095]})).await.ok();
}
