//! Rejected requests, and valid ones close to them.

use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use kvant_server::ApiKeys;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn every_field_that_is_wrong_or_unknown_is_named() {
    for (more, field) in [
        (json!({"unknown": 1}), "unknown"),
        (json!({"suffix": "end"}), "suffix"),
        (json!({"best_of": 3}), "best_of"),
        (json!({"n": 0}), "n"),
        (json!({"n": 129}), "n"),
        (json!({"n": -1}), "n"),
        (json!({"max_tokens": "x"}), "max_tokens"),
        (json!({"max_tokens": -2}), "max_tokens"),
        (json!({"max_tokens": 0.5}), "max_tokens"),
        (json!({"min_tokens": 99}), "min_tokens"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": 1e300}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"min_p": 1.5}), "min_p"),
        (json!({"presence_penalty": 1e39}), "presence_penalty"),
        (json!({"frequency_penalty": "a"}), "frequency_penalty"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"logit_bias": {"4096": 1}}), "logit_bias"),
        (json!({"logprobs": 101}), "logprobs"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": 3}), "stop"),
        (json!({"seed": 0.5}), "seed"),
        (json!({"seed": "1"}), "seed"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"stream": true, "stream_options": {"other": true}}), "stream_options.other"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": {}}), "prompt"),
        (json!({"prompt": [4096]}), "prompt"),
        (json!({"prompt": [[1], []]}), "prompt"),
        (json!({"priority": 300}), "priority"),
    ] {
        let body = and(json!({"prompt": "a", "max_tokens": 4}), more.clone());
        let answer = post(router(), "/v1/completions", body).await;
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
        assert_eq!(answer.refused(), field, "{more}");
    }
    let long = json!({"prompt": vec![5; 1024], "max_tokens": 1});
    let answer = post(router(), "/v1/completions", long).await;
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
    assert_eq!(answer.refused(), "prompt");
    assert_eq!(post(router(), "/v1/completions", json!({})).await.refused(), "prompt");
    // Null counts as absent, also for unknown fields.
    post(router(), "/v1/completions", json!({"prompt": "a", "max_tokens": 1, "other": null, "n": null})).await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_without_json_are_refused() {
    let raw = |content_type: &'static str, body: &str| {
        let request = Request::post("/v1/completions").header(header::CONTENT_TYPE, content_type);
        send(router(), request.body(Body::from(body.to_string())).unwrap())
    };
    let deep = "[".repeat(100_000);
    for body in ["", "{", "[]", "null", "\u{0}", "{\"prompt\": \"\\ud800\"}", &deep] {
        assert_eq!(raw("application/json", body).await.status, StatusCode::BAD_REQUEST);
    }
    let fine = "{\"prompt\": \"a\", \"max_tokens\": 1}";
    assert_eq!(raw("application/json; charset=utf-8", fine).await.status, StatusCode::OK);
    assert_eq!(raw("text/plain", fine).await.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let long = json!({"prompt": "a".repeat(2000)});
    let answer = post(with(ServerOptions::new(NAME).body_limit(1000)), "/v1/completions", long).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("1000"));
}

/// An error about a long conversation names a field that the client has sent.
#[tokio::test(flavor = "multi_thread")]
async fn conversations_beyond_the_context() {
    let messages = json!([{"role": "user", "content": "a b c d ".repeat(400)}]);
    for (path, body, field) in [
        ("/v1/chat/completions", json!({"messages": messages}), "messages"),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 5}), "messages"),
        ("/v1/responses", json!({"input": messages}), "input"),
        ("/v1/completions", json!({"prompt": "a b c d ".repeat(400)}), "prompt"),
    ] {
        let answer = post(chat_router(), path, body).await;
        let error = answer.json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("maximum context length is 1024 tokens"), "{message}");
        assert!(message.contains(&format!("your {field} resulted in ")), "{message}");
        if path != "/v1/messages" {
            assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!(field)));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_limit_of_tokens() {
    let long = json!({"prompt": vec![5; 1000], "max_tokens": -1, "ignore_eos": true});
    assert_eq!(post(router(), "/v1/completions", long).await.ok()["usage"]["completion_tokens"], 24);
    let messages = json!([{"role": "user", "content": "a b c d ".repeat(240)}]);
    for (path, body, reason) in [
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": -1, "ignore_eos": true}), "length"),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_completion_tokens": -1, "ignore_eos": true}),
            "length",
        ),
        ("/v1/responses", json!({"input": messages, "max_output_tokens": -1}), ""),
    ] {
        let answer = post(chat_router(), path, body).await.ok();
        let usage = &answer["usage"];
        let total = usage["total_tokens"].as_u64().unwrap();
        assert!(total <= 1024, "{usage}");
        if reason == "length" {
            assert_eq!((total, &answer["choices"][0]["finish_reason"]), (1024, &json!("length")));
        } else {
            assert!(answer["max_output_tokens"].is_null());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_seed_of_64_bits() {
    let text = |seed: &str| {
        let body = format!(r#"{{"prompt": "Vec", "max_tokens": 12, "seed": {seed}}}"#);
        let request = Request::post("/v1/completions").header(header::CONTENT_TYPE, "application/json");
        send(router(), request.body(Body::from(body)).unwrap())
    };
    let unsigned = text("18446744073709551615").await.ok()["choices"][0]["text"].clone();
    assert_eq!(text("18446744073709551615").await.ok()["choices"][0]["text"], unsigned);
    // The signed and the unsigned form of one seed.
    assert_eq!(text("-1").await.ok()["choices"][0]["text"], unsigned);
    assert_ne!(text("-9223372036854775808").await.ok()["choices"][0]["text"], unsigned);
    assert_eq!(text("18446744073709551616").await.refused(), "seed");
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_bodies() {
    let packed = |text: &str| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let ask = |encoding: &'static str, body: Vec<u8>| {
        let request = Request::post("/v1/completions").header(header::CONTENT_TYPE, "application/json");
        let request = request.header(header::CONTENT_ENCODING, encoding).body(Body::from(body)).unwrap();
        send(with(ServerOptions::new(NAME).body_limit(1000)), request)
    };
    let fine = r#"{"prompt": "a", "max_tokens": 1}"#;
    assert_eq!(ask("gzip", packed(fine)).await.status, StatusCode::OK);
    assert_eq!(ask("X-GZIP", packed(fine)).await.status, StatusCode::OK);
    assert_eq!(ask("identity", fine.into()).await.status, StatusCode::OK);
    // Two gzip members form one body.
    let (first, second) = fine.split_at(9);
    assert_eq!(ask("gzip", [packed(first), packed(second)].concat()).await.status, StatusCode::OK);
    let bomb = ask("gzip", packed(&" ".repeat(1 << 20))).await;
    assert_eq!(bomb.status, StatusCode::PAYLOAD_TOO_LARGE, "{}", bomb.text);
    for body in [fine.into(), packed(fine)[..20].to_vec(), Vec::new()] {
        let answer = ask("gzip", body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert!(answer.text.contains("gzip"), "{}", answer.text);
    }
    let other = ask("br", packed(fine)).await;
    assert_eq!(other.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert!(other.text.contains("Content-Encoding") && other.text.contains("br"), "{}", other.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_and_methods() {
    let missing = get(router(), "/v1/nothing").await;
    assert_eq!(missing.status, StatusCode::NOT_FOUND);
    assert!(missing.json()["error"]["message"].is_string());
    let wrong = get(router(), "/v1/completions").await;
    assert_eq!(
        (wrong.status, &wrong.headers[header::ALLOW]),
        (StatusCode::METHOD_NOT_ALLOWED, &"POST".parse().unwrap())
    );
    assert_eq!(post(router(), "/health", json!({})).await.status, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys() {
    let router = || with(ServerOptions::new(NAME).keys(ApiKeys::new(["secret", "other"])));
    let ask = |header: &'static str, key: &'static str| {
        send(router(), Request::get("/v1/models").header(header, key).body(Body::empty()).unwrap())
    };
    for (header, key, status) in [
        ("authorization", "Bearer secret", 200),
        ("authorization", "Bearer other", 200),
        ("x-api-key", "secret", 200),
        ("authorization", "Bearer secre", 401),
        ("authorization", "secret", 401),
        ("x-other", "secret", 401),
    ] {
        assert_eq!(ask(header, key).await.status.as_u16(), status, "{header}: {key}");
    }
    let refused = get(router(), "/metrics").await;
    assert_eq!(refused.headers[header::WWW_AUTHENTICATE], "Bearer");
    assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
    // Unknown routes are also protected by the key.
    assert_eq!(get(router(), "/v1/nothing").await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(get(router(), "/health").await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts() {
    let router = || with(ServerOptions::new(NAME).hosts(["box"]));
    let ask = |path: &'static str, host: &'static str| {
        send(router(), Request::get(path).header(header::HOST, host).body(Body::empty()).unwrap())
    };
    for host in ["localhost:8080", "127.0.0.1", "[::1]:80", "box:1"] {
        assert_eq!(ask("/v1/models", host).await.status, StatusCode::OK, "{host}");
    }
    // The page is public, but not to other sites.
    for path in ["/v1/models", "/", "/health"] {
        let refused = ask(path, "evil.example").await;
        assert_eq!(refused.status, StatusCode::FORBIDDEN);
        assert_eq!(refused.json()["error"]["code"], "host_not_allowed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn request_ids() {
    let ask = |id: &'static str| {
        send(router(), Request::get("/health").header("x-request-id", id).body(Body::empty()).unwrap())
    };
    assert_eq!(ask("my-id_1.2:3").await.headers["x-request-id"], "my-id_1.2:3");
    let long = "x".repeat(129).leak();
    for bad in ["", "two words", "{}", long] {
        let answer = ask(bad).await;
        assert!(answer.headers["x-request-id"].to_str().unwrap().starts_with("req_"), "{bad}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cors_if_asked() {
    let ask = |router: Router| {
        let request = Request::options("/v1/completions").header(header::ORIGIN, "http://page");
        send(router, request.body(Body::empty()).unwrap())
    };
    let none = ask(router()).await;
    assert!(!none.status.is_success() && none.headers.get("access-control-allow-origin").is_none());
    let allowed = ask(with(ServerOptions::new(NAME).cors("http://page").keys(ApiKeys::new(["k"])))).await;
    assert_eq!(allowed.status, StatusCode::NO_CONTENT);
    assert_eq!(allowed.headers["access-control-allow-origin"], "http://page");
}
