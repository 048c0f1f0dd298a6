//! `/v1/chat/completions` and `/apply-template`.

use super::*;

const PATH: &str = "/v1/chat/completions";

fn hello() -> Value {
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Vec"}]);
    json!({"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": true})
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
}

async fn chat(body: Value) -> Value {
    post(chat_router(), PATH, body).await.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_template_makes_the_prompt() {
    let messages = json!([
        {"role": "developer", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{\"x\": 3}"}},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "D"},
    ]);
    let body = json!({"messages": messages, "tools": [tool("f")]});
    let prompt = post(chat_router(), "/apply-template", body).await.ok();
    let expected = "<bos># f\n# system\n\nAB\n\n# user\n\nC\n\n# assistant\n\nf=3\n\n# tool\n\nD\n\n# assistant\n\n";
    assert_eq!(prompt["prompt"], expected);

    // An equal prompt as a completion gives equal text.
    let prompt = post(chat_router(), "/apply-template", json!({"messages": hello()["messages"]})).await.ok();
    let answer = chat(hello()).await;
    let mut body = and(hello(), json!({"prompt": prompt["prompt"]}));
    body.as_object_mut().unwrap().remove("messages");
    let text = post(router(), "/v1/completions", body).await.ok();
    assert_eq!(answer["choices"][0]["message"]["content"], text["choices"][0]["text"]);
    assert_eq!(answer["usage"]["prompt_tokens"], text["usage"]["prompt_tokens"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_answer() {
    let answer = chat(hello()).await;
    assert_eq!(
        (&answer["object"], &answer["choices"][0]["finish_reason"]),
        (&json!("chat.completion"), &json!("length"))
    );
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["role"], &message["refusal"]), (&json!("assistant"), &Value::Null));
    assert!(!message["content"].as_str().unwrap().is_empty());
    assert!(message.get("reasoning_content").is_none() && message.get("tool_calls").is_none());
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    assert!(answer["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());
    let same = and(hello(), json!({"max_tokens": null, "max_completion_tokens": 12}));
    assert_eq!(chat(same).await["choices"], answer["choices"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_the_same_parts() {
    for more in [
        json!({}),
        json!({"n": 2, "temperature": 1.0, "seed": 3, "logprobs": true, "top_logprobs": 2}),
        json!({"reasoning_effort": "low"}),
        json!({"tools": [tool("f")], "stop": "e"}),
    ] {
        let body = and(hello(), more);
        let whole = chat(body.clone()).await;
        let options = json!({"stream": true, "stream_options": {"include_usage": true}});
        let mut chunks = post(chat_router(), PATH, and(body.clone(), options)).await.chunks();
        assert_eq!(chunks.pop().unwrap()["usage"], whole["usage"]);
        for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let of_choice = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
            let of_choice: Vec<&Value> = of_choice.collect();
            assert_eq!(of_choice[0]["delta"]["role"], "assistant");
            let joined =
                |key: &str| of_choice.iter().filter_map(|part| part["delta"][key].as_str()).collect::<String>();
            assert_eq!(joined("content"), choice["message"]["content"].as_str().unwrap());
            assert_eq!(
                joined("reasoning_content"),
                choice["message"]["reasoning_content"].as_str().unwrap_or_default()
            );
            let logprobs = of_choice.iter().filter_map(|part| part["logprobs"]["content"].as_array()).flatten();
            let expected = choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
            assert_eq!(logprobs.cloned().collect::<Vec<_>>(), expected);
            assert_eq!(of_choice.last().unwrap()["finish_reason"], choice["finish_reason"]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_is_separate() {
    let answer = chat(and(hello(), json!({"reasoning_effort": "high"}))).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], "");
    assert!(!message["reasoning_content"].as_str().unwrap().is_empty());
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 12);
    let none = chat(and(hello(), json!({"reasoning_effort": "none"}))).await;
    assert_eq!(none["choices"], chat(hello()).await["choices"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities() {
    let answer = chat(and(hello(), json!({"logprobs": true, "top_logprobs": 3}))).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 12);
    let mut text = Vec::new();
    for token in content {
        text.extend(token["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8));
        assert_eq!(token["top_logprobs"][0]["logprob"], token["logprob"], "greedy");
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 3);
    }
    assert_eq!(String::from_utf8(text).unwrap(), answer["choices"][0]["message"]["content"].as_str().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_of_split_characters() {
    let body = json!({"logprobs": true, "top_logprobs": 5, "max_tokens": 20, "reasoning_effort": "none",
        "structured_outputs": {"regex": "é😀한"}});
    let answer = chat(and(hello(), body)).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let bytes = |entry: &Value| -> Vec<u8> {
        let bytes = entry["bytes"].as_array().unwrap_or_else(|| panic!("{entry}"));
        bytes.iter().map(|byte| byte.as_u64().unwrap() as u8).collect()
    };
    let text: Vec<u8> = content.iter().flat_map(bytes).collect();
    assert_eq!(String::from_utf8(text).unwrap(), "é😀한");
    assert!(content.len() > 3, "{content:?}");
    let mut split = 0;
    for entry in content.iter().chain(content.iter().flat_map(|token| token["top_logprobs"].as_array().unwrap())) {
        let token = entry["token"].as_str().unwrap();
        match String::from_utf8(bytes(entry)) {
            Ok(text) => assert_eq!(token, text),
            Err(error) => {
                split += 1;
                assert_eq!(token, format!("bytes:{}", error.as_bytes().escape_ascii()));
            }
        }
    }
    assert!(split > 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_field_that_is_wrong_or_unknown_is_named() {
    let message = |message: Value| json!({"messages": [message]});
    for (more, field) in [
        (json!({"functions": []}), "functions"),
        (json!({"audio": {}}), "audio"),
        (json!({"modalities": ["text", "audio"]}), "modalities"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}), "tool_choice"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [tool("f"), tool("a b")]}), "tools[1].function.name"),
        (json!({"reasoning_effort": "enormous"}), "reasoning_effort"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"max_completion_tokens": 5}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hello"}), "messages"),
        (message(json!({"role": "user"})), "messages[0].content"),
        (message(json!({"role": "alien", "content": "a"})), "messages[0].role"),
        (message(json!({"role": "user", "content": 3})), "messages[0].content"),
        (message(json!({"role": "user", "content": [{"type": "image_url"}]})), "messages[0].content[0]"),
        (message(json!({"role": "user", "content": [{"type": "text"}]})), "messages[0].content[0].text"),
        (message(json!({"role": "user", "content": "a", "extra": 1})), "messages[0].extra"),
        (message(json!({"role": "user", "content": "a", "tool_call_id": "x"})), "messages[0].tool_call_id"),
    ] {
        let answer = post(chat_router(), PATH, and(hello(), more.clone())).await;
        assert_eq!(answer.refused(), field, "{more}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_without_a_template_refuses() {
    for path in [PATH, "/apply-template"] {
        let answer = post(router(), path, json!({"messages": hello()["messages"]})).await;
        assert_eq!(answer.json()["error"]["code"], "no_chat_template");
        assert!(answer.json()["error"]["message"].as_str().unwrap().contains("--chat-template"));
        assert_eq!(answer.refused(), "messages");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_refuses_is_a_message() {
    let template =
        ChatTemplate::new("{{ raise_exception('no systems') }}", [("", ""); 0].into_iter().collect()).unwrap();
    let router = Server::new(shared_engine(), Some(template), ServerOptions::new(NAME)).router();
    let answer = post(router, PATH, hello()).await;
    assert!(answer.text.contains("no systems"), "{}", answer.text);
    assert_eq!(answer.refused(), "messages");
}
