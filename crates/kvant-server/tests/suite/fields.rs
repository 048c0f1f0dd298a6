//! Fields that clients send by default: accepted if they have no effect, otherwise honoured or rejected.

use super::*;

const CHAT: &str = "/v1/chat/completions";

fn strict_router() -> Router {
    let template = ChatTemplate::new(TEMPLATE, [("bos_token", "<bos>")].into_iter().collect()).unwrap();
    Server::new(shared_engine(), Some(template), ServerOptions::new(NAME).strict_fields(true)).router()
}

fn messages() -> Value {
    json!([{"role": "user", "content": "Vec"}])
}

/// A minimal request of a route.
fn minimal(path: &str) -> Value {
    match path {
        "/v1/responses" => json!({"input": "Vec", "max_output_tokens": 2}),
        "/v1/completions" => json!({"prompt": "Vec", "max_tokens": 2}),
        _ => json!({"messages": messages(), "max_tokens": 2}),
    }
}

/// Hints are accepted, and rejected by a strict server.
#[tokio::test(flavor = "multi_thread")]
async fn hints_change_nothing() {
    let messages_path = "/v1/messages";
    let function = json!({"name": "f", "input_schema": {"type": "object"}});
    let eager = |more: Value| json!({"tools": [and(function.clone(), more)]});
    for (path, more, field) in [
        (CHAT, json!({"store": true}), "store"),
        (CHAT, json!({"service_tier": "flex"}), "service_tier"),
        (CHAT, json!({"verbosity": "low"}), "verbosity"),
        (CHAT, json!({"prediction": {"type": "content", "content": "x"}}), "prediction"),
        (CHAT, json!({"prompt_cache_retention": "24h"}), "prompt_cache_retention"),
        (
            CHAT,
            json!({"stream": true, "stream_options": {"include_obfuscation": true}}),
            "stream_options.include_obfuscation",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "Vec", "cache_control": {"type": "ephemeral"}}]}),
            "messages[0].cache_control",
        ),
        ("/v1/responses", json!({"include": ["reasoning.encrypted_content"]}), "include"),
        ("/v1/responses", json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        ("/v1/responses", json!({"service_tier": "priority"}), "service_tier"),
        ("/v1/responses", json!({"prompt_cache_retention": "24h"}), "prompt_cache_retention"),
        ("/v1/responses", json!({"max_tool_calls": 3}), "max_tool_calls"),
        (messages_path, json!({"context_management": {"edits": []}}), "context_management"),
        (messages_path, json!({"cache_control": {"type": "ephemeral", "ttl": "1h"}}), "cache_control"),
        (messages_path, json!({"service_tier": "priority"}), "service_tier"),
        (messages_path, eager(json!({"eager_input_streaming": true})), "tools[0].eager_input_streaming"),
        (messages_path, eager(json!({"input_examples": [{}]})), "tools[0].input_examples"),
    ] {
        let body = and(minimal(path), more.clone());
        let answer = post(chat_router(), path, body.clone()).await;
        assert_eq!(answer.status, StatusCode::OK, "{more}: {}", answer.text);
        let refused = post(strict_router(), path, body).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{more}");
        let name = refused.json()["error"]["message"].as_str().unwrap().to_string();
        assert!(name.contains(&format!("`{field}`")), "{field}: {name}");
    }
}

/// A field that would change the answer and is not supported is rejected by every server.
#[tokio::test(flavor = "multi_thread")]
async fn unsupported_fields_that_change_the_answer_are_refused() {
    for (path, more, field) in [
        (CHAT, json!({"temprature": 0}), "temprature"),
        (CHAT, json!({"modalities": ["text", "audio"]}), "modalities"),
        (CHAT, json!({"web_search_options": {}}), "web_search_options"),
        (CHAT, json!({"functions": [{"name": "f"}]}), "functions"),
        ("/v1/responses", json!({"include": ["message.output_text.logprobs"]}), "include"),
        ("/v1/responses", json!({"background": true}), "background"),
        ("/v1/responses", json!({"previous_response_id": "resp_1"}), "previous_response_id"),
    ] {
        assert_eq!(post(chat_router(), path, and(minimal(path), more.clone())).await.refused(), field, "{more}");
    }
}

/// Honoured fields with their default values do not change the model's answer.
#[tokio::test(flavor = "multi_thread")]
async fn tools_with_the_defaults_of_clients() {
    let parameters = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
        "additionalProperties": false});
    let function = json!({"name": "f", "description": "", "parameters": parameters, "strict": true});
    let tool = json!({"type": "function", "function": function});
    let body = json!({"tools": [tool], "tool_choice": "auto", "parallel_tool_calls": false});
    post(chat_router(), CHAT, and(minimal(CHAT), body)).await.ok();
    let mut tool = function.clone();
    tool["type"] = json!("function");
    let body = json!({"tools": [tool], "tool_choice": "auto", "parallel_tool_calls": false, "store": false});
    let answer = post(chat_router(), "/v1/responses", and(minimal("/v1/responses"), body)).await.ok();
    assert_eq!(answer["parallel_tool_calls"], false);
    let tool = json!({"name": "f", "input_schema": parameters, "strict": true});
    let body = json!({"tools": [tool], "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}});
    post(chat_router(), "/v1/messages", and(minimal("/v1/messages"), body)).await.ok();
}

/// The request that Claude Code sends, according to its public documentation.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_claude_code() {
    let cached = json!({"type": "ephemeral", "ttl": "1h"});
    let body = json!({
        "model": NAME, "max_tokens": 3, "stream": true, "temperature": 1,
        "metadata": {"user_id": "user_1"},
        "system": [
            {"type": "text", "text": "You are a tool."},
            {"type": "text", "text": "More.", "cache_control": cached},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Vec", "cache_control": cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "abc"},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "is_error": false,
                "content": [{"type": "text", "text": "fn"}], "cache_control": cached}]},
        ],
        "tools": [{"name": "Read", "description": "Reads", "eager_input_streaming": true,
            "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
                "properties": {"path": {"type": "string"}}, "required": ["path"], "additionalProperties": false}}],
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    });
    let events = post(chat_router(), "/v1/messages?beta=true", body.clone()).await.events();
    assert!(events.last().unwrap().contains("message_stop"), "{events:?}");
    let mut count = body;
    for field in ["max_tokens", "stream", "temperature", "metadata", "context_management"] {
        count.as_object_mut().unwrap().remove(field);
    }
    let counted = post(chat_router(), "/v1/messages/count_tokens?beta=true", count).await.ok();
    assert!(counted["input_tokens"].as_u64().unwrap() > 10);
}

/// The request that Codex sends, according to its public source.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_codex() {
    let body = json!({
        "model": NAME, "instructions": "You are a tool.", "max_output_tokens": 3,
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Vec"}]}],
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs", "strict": false,
                "parameters": {"type": "object", "properties": {"command": {"type": "string"}},
                    "required": ["command"], "additionalProperties": false}},
            {"type": "web_search", "external_web_access": false},
        ],
        "tool_choice": "auto", "parallel_tool_calls": false, "reasoning": {"summary": "auto"},
        "store": false, "stream": true, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "key", "text": {"verbosity": "low"},
    });
    let events = post(chat_router(), "/v1/responses", body.clone()).await.events();
    assert!(events.last().unwrap().contains("response."), "{events:?}");
    assert_eq!(post(strict_router(), "/v1/responses", body).await.refused(), "text.verbosity");
}

/// The requests that Open WebUI sends, according to its public source: chats, titles and other tasks, tools in two
/// steps, and all of them by Ollama's API.
#[tokio::test(flavor = "multi_thread")]
async fn requests_of_open_webui() {
    assert_eq!(get(chat_router(), "/v1/models").await.ok()["data"][0]["id"], NAME);
    let system = json!({"role": "system", "content": "User Context:\n\nVec"});
    let user = json!({"role": "user", "content": [{"type": "text", "text": "Vec"}]});
    let chat = json!({
        "model": NAME, "stream": true, "messages": [system, user], "stream_options": {"include_usage": true},
        "temperature": 0.8, "top_p": 0.9, "max_tokens": 4, "frequency_penalty": 0.1, "presence_penalty": 0.0,
        "seed": 3, "stop": ["###"], "logit_bias": {}, "reasoning_effort": "low", "min_p": 0.05, "top_k": 40,
    });
    let chunks = post(chat_router(), CHAT, chat.clone()).await.chunks();
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 4);
    let task = json!({"model": NAME, "messages": messages(), "stream": false, "max_completion_tokens": 4});
    post(chat_router(), CHAT, task).await.ok();

    let parameters = json!({"type": "object", "properties": {"city": {"type": "string", "description": "City"}},
        "required": ["city"]});
    let tools =
        json!([{"type": "function", "function": {"name": "weather", "description": "W", "parameters": parameters}}]);
    let call = json!({"index": 0, "id": "call_1", "type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}});
    let turns = json!([user, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]);
    let body = and(chat, json!({"messages": turns, "tools": tools}));
    assert!(post(chat_router(), CHAT, body).await.chunks().len() > 2);

    let options = json!({"temperature": 0.8, "top_p": 0.9, "num_predict": 4, "num_ctx": 512, "repeat_penalty": 1.1,
        "seed": 3, "stop": ["###"], "use_mmap": true, "num_thread": 2});
    let call = json!({"function": {"name": "weather", "arguments": {"city": "Rome"}}});
    let turns = json!([{"role": "user", "content": "Vec"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"}]);
    let body = json!({"model": format!("{NAME}:latest"), "messages": turns, "options": options, "stream": true,
        "tools": tools, "keep_alive": "5m", "think": false});
    let answer = post(chat_router(), "/api/chat", body).await;
    assert!(answer.status == StatusCode::OK && answer.text.contains("\"done\":true"), "{}", answer.text);
}

/// Every chunk of a stream has the usage so far, for clients that measure throughput.
#[tokio::test(flavor = "multi_thread")]
async fn usage_in_every_chunk() {
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let more = json!({"stream": true, "stream_options": options, "ignore_eos": true, "max_tokens": 5});
    for path in [CHAT, "/v1/completions"] {
        let chunks = post(chat_router(), path, and(minimal(path), more.clone())).await.chunks();
        let counts: Vec<u64> =
            chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
        assert!(counts.is_sorted() && counts[0] <= 1 && *counts.last().unwrap() == 5, "{path}: {counts:?}");
        let prompts: Vec<&Value> = chunks.iter().map(|chunk| &chunk["usage"]["prompt_tokens"]).collect();
        assert!(prompts.iter().all(|count| *count == prompts[0]), "{path}: {prompts:?}");
    }
}

/// A forced call that `max_tokens` truncates is an incomplete call, also in streams.
#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_call_is_incomplete() {
    let parameters = json!({"type": "object", "properties": {"text": {"type": "string", "minLength": 500}},
        "required": ["text"], "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let ask = json!({"tools": [tool], "tool_choice": "required", "reasoning_effort": "none", "seed": 5});
    for limit in [1, 4, 12, 90] {
        let body = and(and(minimal(CHAT), ask.clone()), json!({"max_tokens": limit}));
        let answer = post(chat_router(), CHAT, body.clone()).await.ok();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "length", "{choice}");
        let content = choice["message"]["content"].as_str().unwrap_or_default();
        assert_eq!(content, "", "{choice}");
        let whole = choice["message"]["tool_calls"][0]["function"].clone();
        if limit == 90 {
            let arguments = whole["arguments"].as_str().unwrap();
            assert!(whole["name"] == "f" && arguments.starts_with('{') && arguments.contains("text"), "{choice}");
        }
        let chunks = post(chat_router(), CHAT, and(body, json!({"stream": true}))).await.chunks();
        let deltas = || chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
        assert!(deltas().all(|delta| delta["content"].as_str().unwrap_or_default().is_empty()), "{chunks:?}");
        let arguments: String =
            deltas().filter_map(|delta| delta["tool_calls"][0]["function"]["arguments"].as_str()).collect();
        assert_eq!(arguments, whole["arguments"].as_str().unwrap_or_default());
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
    }
}
