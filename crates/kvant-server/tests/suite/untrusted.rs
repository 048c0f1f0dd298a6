//! Errors quote requests and templates without control characters, and shorten them.

use super::*;

/// A text with terminal colours, a right-to-left override, and enough length to fill a log.
fn hostile() -> String {
    format!("\x1b[31m\u{9b}2J\u{202e}{}", "x".repeat(1_000_000))
}

#[track_caller]
fn assert_safe(answer: &Answer, status: StatusCode, expected: &str) {
    assert_eq!(answer.status, status);
    let error = answer.json()["error"].clone();
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(expected), "{message}");
    for text in [message, error["param"].as_str().unwrap_or_default()] {
        assert!(text.len() < 4000, "{} bytes", text.len());
        assert!(!text.contains(|c: char| c.is_control() || c == '\u{202e}'), "{text:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_of_requests() {
    let body = |more: Value| and(json!({"prompt": "a", "max_tokens": 1}), more);
    for (more, expected) in [
        (json!({hostile(): 1}), ""),
        (json!({"temperature": hostile()}), "temperature"),
        (json!({"response_format": {"type": hostile()}}), "response_format"),
        (json!({"structured_outputs": {"regex": format!("({}", hostile())}}), ""),
        (json!({"logit_bias": {hostile(): 1}}), "logit_bias"),
    ] {
        assert_safe(&post(router(), "/v1/completions", body(more)).await, StatusCode::BAD_REQUEST, expected);
    }
    let answer = post(router(), "/v1/completions", body(json!({"model": hostile()}))).await;
    assert_safe(&answer, StatusCode::NOT_FOUND, "The model `");
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_templates() {
    let template = "{{ raise_exception('refused: ' ~ messages[0].content) }}";
    let template = ChatTemplate::new(template, Default::default()).unwrap();
    let router = Server::new(shared_engine(), Some(template), ServerOptions::new(NAME)).router();
    let body = json!({"messages": [{"role": "user", "content": hostile()}]});
    let answer = post(router, "/v1/chat/completions", body).await;
    assert_safe(&answer, StatusCode::BAD_REQUEST, r"refused: \u{1b}[31m\u{9b}2J\u{202e}xxx");
}
