//! `/v1/embeddings` and Ollama's forms of it.

use super::*;

fn embedding_router(pooling: Pooling) -> Router {
    with(ServerOptions::new(NAME).pooling(Some(pooling)))
}

async fn embed(pooling: Pooling, body: Value) -> Answer {
    post(embedding_router(pooling), "/v1/embeddings", body).await
}

fn vectors(answer: &Value) -> Vec<Vec<f64>> {
    let data = answer["data"].as_array().unwrap();
    assert!(data.iter().enumerate().all(|(index, item)| item["index"] == index && item["object"] == "embedding"));
    data.iter().map(|item| serde_json::from_value(item["embedding"].clone()).unwrap()).collect()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_and_ids() {
    for pooling in [Pooling::Last, Pooling::Mean] {
        let texts = json!(["# Vec", "fn main() {}", "# Vec"]);
        let answer = embed(pooling, json!({"input": texts, "model": NAME})).await.ok();
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!(NAME)));
        let all = vectors(&answer);
        assert_eq!(all.len(), 3);
        for vector in &all {
            assert_eq!(vector.len(), shared_engine().embedding_len());
            assert!((cosine(vector, vector) - 1.0).abs() < 1e-5);
        }
        assert!(cosine(&all[0], &all[2]) > 0.99999 && cosine(&all[0], &all[1]) < 0.999);

        let tokenizer = Tokenizer::load(Path::new(MODEL)).unwrap();
        let ids = ["# Vec", "fn main() {}"].map(|text| tokenizer.encode_whole(text).unwrap());
        let tokens = 2 * ids[0].len() + ids[1].len();
        assert_eq!(answer["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
        let of_ids = vectors(&embed(pooling, json!({"input": ids})).await.ok());
        assert!(cosine(&of_ids[0], &all[0]) > 0.99999 && cosine(&of_ids[1], &all[1]) > 0.99999);
        for one in [json!("# Vec"), json!(ids[0])] {
            let of_one = vectors(&embed(pooling, json!({"input": one})).await.ok());
            assert!(of_one.len() == 1 && cosine(&of_one[0], &all[0]) > 0.99999);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn base64_and_dimensions() {
    let ask = |more: Value| embed(Pooling::Mean, and(json!({"input": "# Vec"}), more));
    let floats = vectors(&ask(json!({"encoding_format": "float"})).await.ok()).remove(0);
    let text =
        ask(json!({"encoding_format": "base64"})).await.ok()["data"][0]["embedding"].as_str().unwrap().to_string();
    let decoded: Vec<f64> =
        bytes_of(&text).chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()).into()).collect();
    assert_eq!(decoded.len(), floats.len());
    assert!(decoded.iter().zip(&floats).all(|(a, b)| (a - b).abs() < 1e-6));
    let short = vectors(&ask(json!({"dimensions": 16})).await.ok()).remove(0);
    assert!(short.len() == 16 && (cosine(&short, &short) - 1.0).abs() < 1e-5);
    assert!((short[0] / short[1] - floats[0] / floats[1]).abs() < 1e-3);
}

/// A direct implementation of base64 decoding.
fn bytes_of(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let bits: Vec<u8> =
        text.bytes().filter(|&c| c != b'=').flat_map(|c| (0..6).rev().map(move |bit| value(c) >> bit & 1)).collect();
    bits.chunks_exact(8).map(|bits| bits.iter().fold(0, |byte, bit| byte << 1 | bit)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_fields_are_refused() {
    for (body, field) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [[]]}), "input"),
        (json!({"input": [999999999]}), "input"),
        (json!({"input": 3}), "input"),
        (json!({"input": "a", "dimensions": 0}), "dimensions"),
        (json!({"input": "a", "dimensions": 100000}), "dimensions"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
        (json!({"input": vec!["a"; 2049]}), "input"),
    ] {
        assert_eq!(embed(Pooling::Last, body.clone()).await.refused(), field, "{body}");
    }
    for input in [json!("# Vec ".repeat(2000)), json!(vec![5; 1025])] {
        let long = embed(Pooling::Last, json!({"input": input})).await;
        assert_eq!(long.json()["error"]["code"], "context_length_exceeded");
        assert_eq!(long.refused(), "input");
    }
    assert_eq!(embed(Pooling::Last, json!({"input": "a", "model": "other"})).await.status, StatusCode::NOT_FOUND);
    // A model that was not trained for embeddings.
    let refused = post(router(), "/v1/embeddings", json!({"input": "a"})).await;
    assert_eq!(
        (refused.status, &refused.json()["error"]["code"]),
        (StatusCode::NOT_FOUND, &json!("model_not_supported"))
    );
    assert!(refused.text.contains("--pooling"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_forms_of_ollama() {
    let post = |path: &'static str, body: Value| post(embedding_router(Pooling::Mean), path, body);
    let expected = vectors(&post("/v1/embeddings", json!({"input": "# Vec"})).await.ok()).remove(0);
    let answer = post("/api/embed", json!({"model": "rustdoc-11m:latest", "input": ["# Vec", "b"]})).await.ok();
    let got: Vec<Vec<f64>> = serde_json::from_value(answer["embeddings"].clone()).unwrap();
    assert!(got.len() == 2 && cosine(&got[0], &expected) > 0.99999, "{answer}");
    assert!(answer["prompt_eval_count"].as_u64().unwrap() > 2 && answer["total_duration"].is_u64());
    let one = post("/api/embeddings", json!({"model": NAME, "prompt": "# Vec"})).await.ok();
    let got: Vec<f64> = serde_json::from_value(one["embedding"].clone()).unwrap();
    assert!(cosine(&got, &expected) > 0.99999);
    let refused = post("/api/embed", json!({"input": "a", "truncate": true})).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
}
