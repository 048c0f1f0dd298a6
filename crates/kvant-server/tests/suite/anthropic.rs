//! `/v1/messages`.

use super::*;

const PATH: &str = "/v1/messages";

fn hello() -> Value {
    let messages = json!([{"role": "user", "content": "Vec"}]);
    json!({"model": NAME, "system": "Be brief.", "messages": messages, "max_tokens": 12, "temperature": 0})
}

#[tokio::test(flavor = "multi_thread")]
async fn one_answer_and_its_stream() {
    for more in
        [json!({}), json!({"thinking": {"type": "enabled", "budget_tokens": 5}}), json!({"stop_sequences": ["e"]})]
    {
        let body = and(hello(), more);
        let whole = post(chat_router(), PATH, body.clone()).await.ok();
        assert_eq!((&whole["type"], &whole["role"]), (&json!("message"), &json!("assistant")));
        let events = post(chat_router(), PATH, and(body, json!({"stream": true}))).await.events();
        let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        let first = &events[0]["message"];
        assert_eq!((&events[0]["type"], &first["content"]), (&json!("message_start"), &json!([])));
        let texts =
            |kind: &str| -> String { events.iter().filter_map(|event| event["delta"][kind].as_str()).collect() };
        for block in whole["content"].as_array().unwrap() {
            let kind = block["type"].as_str().unwrap();
            assert_eq!(block[kind].as_str().unwrap(), texts(kind));
        }
        let count = |kind: &str| events.iter().filter(|event| event["type"] == kind).count();
        let blocks = whole["content"].as_array().unwrap().len();
        assert_eq!((count("content_block_start"), count("content_block_stop")), (blocks, blocks));
        let end = &events[events.len() - 2];
        assert_eq!(end["delta"]["stop_reason"], whole["stop_reason"]);
        assert_eq!(end["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        assert_eq!(events.last().unwrap()["type"], "message_stop");
    }
    let stopped = post(chat_router(), PATH, and(hello(), json!({"stop_sequences": ["zz", "e"]}))).await.ok();
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!("e")));
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_become_messages() {
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "A"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "T", "signature": ""},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 3}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "R"}]},
            {"type": "text", "text": "B"},
        ]},
    ]);
    let count = |body: Value| post(chat_router(), "/v1/messages/count_tokens", body);
    let tokens = count(json!({"messages": messages})).await.ok()["input_tokens"].as_u64().unwrap();
    let text = "# user\n\nA\n\n# assistant\n\nf=3\n\n# tool\n\nR\n\n# user\n\nB\n\n# assistant\n\n";
    let same = post(router(), "/tokenize", json!({"prompt": text})).await.ok()["count"].as_u64().unwrap();
    assert_eq!(tokens, same);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_anthropics_form() {
    let message = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    for (more, field) in [
        (json!({"unknown": 1}), "unknown"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        (json!({"thinking": {"type": "x"}}), "thinking.type"),
        (json!({"system": 3}), "system"),
        (message(json!([{"type": "image"}])), "messages[0].content[0]"),
        (message(json!([{"type": "tool_use", "id": "1", "name": "f", "input": {}}])), "messages[0].content[0]"),
        (json!({"messages": [{"role": "system", "content": "a"}]}), "messages[0].role"),
    ] {
        let answer = post(chat_router(), PATH, and(hello(), more.clone())).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let body = answer.json();
        assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
        assert_eq!(body["request_id"], answer.headers["x-request-id"].to_str().unwrap());
        assert!(body["error"]["message"].as_str().unwrap().contains(&format!("`{field}`")), "{more}: {body}");
    }
    let missing = json!({"messages": [{"role": "user", "content": "a"}]});
    let answer = post(chat_router(), PATH, missing).await;
    assert!(answer.text.contains("`max_tokens`"), "{}", answer.text);
    let unknown = post(chat_router(), PATH, and(hello(), json!({"model": "other"}))).await;
    assert_eq!(unknown.json()["error"]["type"], "not_found_error");
}

/// After this error, clients that rely on the server's threads send the complete conversation.
#[tokio::test(flavor = "multi_thread")]
async fn threads_are_refused_in_words_that_clients_know() {
    for thread in [json!({"type": "create"}), json!({"type": "continue", "previous_message_id": "msg_1"})] {
        let answer = post(chat_router(), PATH, and(hello(), json!({"thread": thread}))).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let details = &answer.json()["error"]["details"];
        assert_eq!(*details, json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]}));
    }
    post(chat_router(), PATH, and(hello(), json!({"thread": null}))).await.ok();
}
