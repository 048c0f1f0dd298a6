//! Ollama's routes, and routes of other servers.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn versions_pings_and_names() {
    let version = env!("CARGO_PKG_VERSION");
    for path in ["/version", "/api/version"] {
        assert_eq!(get(router(), path).await.ok()["version"], version);
    }
    assert_eq!(get(router(), "/ping").await.status, StatusCode::OK);
    assert_eq!(post(router(), "/ping", json!({})).await.status, StatusCode::OK);
    let tags = get(router(), "/api/tags").await.ok();
    assert_eq!(tags["models"][0]["name"], NAME);
    let shown = post(chat_router(), "/api/show", json!({"model": format!("{NAME}:latest")})).await.ok();
    assert_eq!(shown["model_info"]["kvant.context_length"], 1024);
    assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
    for path in ["/v1/rerank", "/rerank", "/score"] {
        let refused = post(router(), path, json!({"query": "a"})).await;
        assert_eq!(refused.status, StatusCode::NOT_FOUND);
        let message = refused.json()["error"]["message"].as_str().unwrap().to_string();
        assert!(message.contains("was not trained to"), "{message}");
    }
}

/// The lines of a stream.
fn lines(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    assert_eq!(answer.headers[header::CONTENT_TYPE], "application/x-ndjson");
    answer.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_and_whole_answers_are_equal() {
    let options = json!({"temperature": 0, "num_predict": 8, "num_ctx": 512, "stop": ["~"]});
    let messages = json!([{"role": "system", "content": "A"}, {"role": "user", "content": "Vec"}]);
    for (path, body, field) in [
        ("/api/chat", json!({"messages": messages}), "/message/content"),
        ("/api/generate", json!({"prompt": "# Vec", "raw": true}), "/response"),
        ("/api/generate", json!({"prompt": "Vec", "system": "A"}), "/response"),
    ] {
        let body = and(body, json!({"model": NAME, "options": options, "keep_alive": "5m"}));
        let whole = post(chat_router(), path, and(body.clone(), json!({"stream": false}))).await.ok();
        let streamed = lines(&post(chat_router(), path, body).await);
        let text: String = streamed.iter().map(|line| line.pointer(field).unwrap().as_str().unwrap()).collect();
        assert_eq!(whole.pointer(field).unwrap(), &json!(text), "{path}");
        assert!(!text.is_empty(), "{path}");
        let last = streamed.last().unwrap();
        for answer in [&whole, last] {
            assert_eq!(answer["done"], true);
            assert_eq!((&answer["done_reason"], &answer["eval_count"]), (&whole["done_reason"], &whole["eval_count"]));
            assert!(answer["total_duration"].as_u64() >= answer["eval_duration"].as_u64());
        }
        assert!(streamed[..streamed.len() - 1].iter().all(|line| line["done"] == false));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forms_and_errors() {
    let schema =
        json!({"type": "object", "properties": {"x": {"enum": [7]}}, "required": ["x"], "additionalProperties": false});
    let body =
        json!({"messages": [{"role": "user", "content": "Vec"}], "format": schema, "stream": false, "think": false});
    let answer = post(chat_router(), "/api/chat", body).await.ok();
    let text = answer["message"]["content"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), json!({"x": 7}));
    let loaded = post(chat_router(), "/api/chat", json!({"model": NAME})).await.ok();
    assert_eq!((&loaded["done"], &loaded["done_reason"]), (&json!(true), &json!("load")));
    for (path, body, part) in [
        ("/api/chat", json!({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}), "images"),
        ("/api/chat", json!({"messages": [{"role": "user", "content": "a"}], "format": 3}), "format"),
        ("/api/chat", json!({"messages": [{"role": "user", "content": "a"}], "options": {"mirostat": 1}}), "mirostat"),
        ("/api/generate", json!({"prompt": "a", "suffix": "b"}), "suffix"),
        ("/api/generate", json!({"prompt": "a", "options": {"num_predict": -3}}), "num_predict"),
        ("/api/generate", json!({"prompt": "a", "raw": true, "options": {"top_p": 0}}), "top_p"),
    ] {
        let refused = post(chat_router(), path, body).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        let message = refused.json()["error"].as_str().unwrap().to_string();
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(post(router(), "/api/chat", json!({"model": "llama3"})).await.status, StatusCode::NOT_FOUND);
}

/// The format that the package ollama-ai-provider-v2 sends: a limit of its own, and OpenAI's choice of tools.
#[tokio::test(flavor = "multi_thread")]
async fn choices_of_tools_and_limits() {
    let parameters = json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
        "properties": {"x": {"enum": [7]}}, "required": ["x"], "additionalProperties": false});
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "F.", "parameters": parameters}}]);
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": 7}}});
    let messages = json!([
        {"role": "user", "content": "Vec"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]);
    let body = json!({"messages": messages, "tools": tools, "think": false, "stream": false, "max_output_tokens": 3,
        "options": {"temperature": 1}});
    let ask = |more: Value| post(chat_router(), "/api/chat", and(body.clone(), more));
    let free = ask(json!({"tool_choice": "auto"})).await.ok();
    assert!(free["eval_count"].as_u64().unwrap() <= 3, "{free}");
    let forced = ask(json!({"tool_choice": "required", "max_output_tokens": 200})).await.ok();
    assert_eq!(forced["message"]["tool_calls"][0]["function"], json!({"name": "f", "arguments": {"x": 7}}), "{forced}");
    let refused = ask(json!({"tool_choice": "some"})).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert!(refused.text.contains("tool_choice"), "{}", refused.text);
}
