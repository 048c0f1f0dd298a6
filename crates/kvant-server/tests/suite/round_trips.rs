//! Answers that clients send back: from this server, OpenAI and Anthropic.

use super::*;

const CHAT: &str = "/v1/chat/completions";

/// A template that concatenates texts, as many do: null content fails.
const JOINED: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}\
    {% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name + call.function.arguments|tojson }}\
    {% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

fn joined_router() -> Router {
    let template = ChatTemplate::new(JOINED, [("bos_token", "<bos>")].into_iter().collect()).unwrap();
    Server::new(shared_engine(), Some(template), ServerOptions::new(NAME)).router()
}

async fn prompt(body: Value) -> String {
    let answer = post(joined_router(), "/apply-template", body).await.ok();
    answer["prompt"].as_str().unwrap().to_string()
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

#[tokio::test(flavor = "multi_thread")]
async fn our_chat_answers() {
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"x": {"enum": [3]}}, "required": ["x"], "additionalProperties": false,
    }}});
    let ask = json!({"messages": [user("Vec")], "max_tokens": 200, "seed": 1, "reasoning_effort": "none"});
    for more in [json!({}), json!({"tools": [tool], "tool_choice": "required"}), json!({"reasoning_effort": "low"})] {
        for router in [joined_router, chat_router] {
            let answer = post(router(), CHAT, and(ask.clone(), more.clone())).await.ok();
            let message = &answer["choices"][0]["message"];
            let mut messages = vec![user("Vec"), message.clone()];
            let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
            assert_eq!(message["content"].is_null(), !calls.is_empty(), "{message}");
            messages
                .extend(calls.iter().map(|call| json!({"role": "tool", "tool_call_id": call["id"], "content": "4"})));
            messages.push(user("And?"));
            let again = and(ask.clone(), json!({"messages": messages}));
            let again = and(again, json!({"tools": more["tools"], "max_tokens": 3}));
            post(router(), CHAT, again).await.ok();
        }
    }
    let answer = post(joined_router(), CHAT, and(ask, json!({"tools": [tool], "tool_choice": "required"}))).await.ok();
    let text = prompt(json!({"messages": [user("Vec"), answer["choices"][0]["message"], user("And?")]})).await;
    let expected = "<|im_start|>user\nVec<|im_end|>\n<|im_start|>assistant\n<tool_call>f{\"x\": 3}<|im_end|>\n\
                    <|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(text, expected);
}

/// With the fields that OpenAI documents, and the ones that its Python package and streams add.
#[tokio::test(flavor = "multi_thread")]
async fn openais_chat_answers() {
    let url =
        json!({"type": "url_citation", "url_citation": {"end_index": 1, "start_index": 0, "title": "t", "url": "u"}});
    let function = json!({"name": "f", "arguments": "{\"x\": 1}", "parsed_arguments": {"x": 1}});
    for (message, text) in [
        (
            json!({"content": "Hello", "refusal": null, "annotations": [], "audio": null, "function_call": null, "tool_calls": null}),
            "Hello",
        ),
        (json!({"content": "Hello", "annotations": [url], "parsed": {"a": 1}, "tool_calls": []}), "Hello"),
        (json!({"content": null, "refusal": "No."}), "No."),
        (json!({"content": [{"type": "refusal", "refusal": "No."}]}), "No."),
        (json!({"content": [{"type": "text", "text": "Yes", "annotations": []}]}), "Yes"),
        (json!({"content": null, "reasoning_content": "Hm", "tool_calls": null}), ""),
        (json!({"content": "", "reasoning": "Hm"}), ""),
        (
            json!({"content": null, "refusal": null, "tool_calls": [{"id": "call_1", "type": "function", "index": 0, "function": function}]}),
            "<tool_call>f{\"x\": 1}",
        ),
        (
            json!({"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]}),
            "<tool_call>f{}",
        ),
        (json!({"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}), "<tool_call>f{\"x\": 1}"),
    ] {
        let message = and(json!({"role": "assistant"}), message);
        let found = prompt(json!({"messages": [user("a"), message, user("b")]})).await;
        assert!(found.contains(&format!("assistant\n{text}<|im_end|>")), "{message}: {found}");
    }
    let custom = json!({"id": "c", "type": "custom", "function": {"name": "f", "arguments": "x"}});
    for (message, field) in [
        (json!({"content": "a", "audio": {"id": "audio_1"}}), "messages[0].audio"),
        (json!({"content": "a", "function_call": {"name": "f", "arguments": "{}"}}), "messages[0].function_call"),
        (json!({"content": "a", "tool_calls": [custom]}), "messages[0].tool_calls[0].type"),
        (json!({"content": [{"type": "text", "text": "a", "extra": 1}]}), "messages[0].content[0].extra"),
        (json!({"content": null}), "messages[0].content"),
    ] {
        let body = json!({"messages": [and(json!({"role": "assistant"}), message.clone()), user("b")]});
        assert_eq!(post(joined_router(), CHAT, body).await.refused(), field, "{message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn our_messages_and_responses() {
    let schema =
        json!({"type": "object", "properties": {"x": {"enum": [3]}}, "required": ["x"], "additionalProperties": false});
    let path = "/v1/messages";
    let tools = json!([{"name": "f", "input_schema": schema}]);
    for more in [
        json!({"thinking": {"type": "disabled"}}),
        json!({"tools": tools, "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}}),
        json!({"thinking": {"type": "enabled", "budget_tokens": 5}}),
    ] {
        let ask = and(json!({"messages": [user("Vec")], "max_tokens": 60}), more);
        let answer = post(chat_router(), path, ask.clone()).await.ok();
        let mut messages = vec![user("Vec"), json!({"role": "assistant", "content": answer["content"]})];
        let result = |id: &Value| json!({"type": "tool_result", "tool_use_id": id, "content": "4", "is_error": false});
        let calls = answer["content"].as_array().unwrap().iter().filter(|block| block["type"] == "tool_use");
        let results: Vec<Value> = calls.map(|call| result(&call["id"])).collect();
        messages.push(if results.is_empty() { user("And?") } else { json!({"role": "user", "content": results}) });
        post(chat_router(), path, and(ask, json!({"messages": messages, "max_tokens": 2}))).await.ok();
    }
    let path = "/v1/responses";
    let tools = json!([{"type": "function", "name": "f", "parameters": schema}]);
    for more in [
        json!({"reasoning": {"effort": "none"}}),
        json!({"tools": tools, "tool_choice": "required", "reasoning": {"effort": "none"}}),
        json!({"reasoning": {"effort": "low"}}),
    ] {
        let ask = and(json!({"input": [user("Vec")], "max_output_tokens": 60}), more);
        let answer = post(chat_router(), path, ask.clone()).await.ok();
        let mut input = vec![user("Vec")];
        for item in answer["output"].as_array().unwrap() {
            input.push(item.clone());
            if item["type"] == "function_call" {
                input.push(json!({"type": "function_call_output", "call_id": item["call_id"], "output": "4"}));
            }
        }
        input.push(user("And?"));
        post(chat_router(), path, and(ask, json!({"input": input, "max_output_tokens": 2}))).await.ok();
    }
}

/// With the fields that Anthropic documents.
#[tokio::test(flavor = "multi_thread")]
async fn anthropics_answers() {
    let answer = json!([
        {"type": "thinking", "thinking": "Hm", "signature": "EqQB"},
        {"type": "redacted_thinking", "data": "EmwK"},
        {"type": "text", "text": "Look.", "citations": null},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 123456789012345678901u128.to_string()}, "caller": {"type": "direct"}},
    ]);
    let result = json!([
        {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": false, "cache_control": {"type": "ephemeral"},
         "content": [{"type": "text", "text": "R", "citations": null}]},
    ]);
    let messages = json!([user("A"), {"role": "assistant", "content": answer}, {"role": "user", "content": result}]);
    post(joined_router(), "/v1/messages", json!({"messages": messages, "max_tokens": 1})).await.ok();
    for (block, field) in [
        (json!({"type": "text", "text": "a", "extra": 1}), "messages[0].content[0].extra"),
        (json!({"type": "tool_use", "id": "1", "name": "f", "input": {}, "extra": 1}), "messages[0].content[0].extra"),
    ] {
        let body = json!({"messages": [{"role": "assistant", "content": [block]}, user("b")], "max_tokens": 1});
        let answer = post(joined_router(), "/v1/messages", body).await;
        assert!(answer.text.contains(&format!("`{field}`")), "{}", answer.text);
    }
}

/// With the fields that OpenAI documents.
#[tokio::test(flavor = "multi_thread")]
async fn openais_responses() {
    let input = json!([
        user("A"),
        {"id": "rs_1", "type": "reasoning", "status": null, "summary": [{"type": "summary_text", "text": "S"}], "content": null, "encrypted_content": null},
        {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "phase": null, "content": [
            {"type": "output_text", "text": "B", "annotations": [], "logprobs": []},
        ]},
        {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1", "name": "f", "arguments": "{\"x\": 3}"},
        {"id": "fco_1", "type": "function_call_output", "status": "completed", "call_id": "call_1", "output": "R"},
        {"id": "msg_2", "type": "message", "role": "assistant", "status": "completed", "content": [{"type": "refusal", "refusal": "No."}]},
        user("C"),
    ]);
    let answer = post(chat_router(), "/v1/responses", json!({"input": input, "max_output_tokens": 1})).await.ok();
    let text =
        "# user\n\nA\n\n# assistant\n\nBf=3\n\n# tool\n\nR\n\n# assistant\n\nNo.\n\n# user\n\nC\n\n# assistant\n\n";
    let same = post(router(), "/tokenize", json!({"prompt": text})).await.ok();
    assert_eq!(answer["usage"]["input_tokens"], same["count"]);
    let extra = json!({"input": [{"type": "message", "role": "user", "content": "a", "extra": 1}]});
    assert_eq!(post(chat_router(), "/v1/responses", extra).await.refused(), "input[0].extra");
}

/// Numbers in the history reach the template with all their digits, in every format.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_history_keep_their_digits() {
    let arguments = r#"{"id": 123456789012345678901, "long": 1234567890123456789012345678901234567890123, "share": 0.12345678901234567890}"#;
    let expected = format!("<tool_call>f{arguments}<|im_end|>");
    let text = serde_json::to_string(arguments).unwrap();
    let raw = |path: &'static str, body: String| {
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
        send(joined_router(), request.body(Body::from(body)).unwrap())
    };
    for arguments in [text.as_str(), arguments] {
        let call =
            format!(r#"{{"id": "c", "type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}"#);
        let body = format!(
            r#"{{"messages": [{{"role": "assistant", "content": null, "tool_calls": [{call}]}}, {{"role": "user", "content": "b"}}]}}"#
        );
        let prompt = raw("/apply-template", body).await.ok();
        assert!(prompt["prompt"].as_str().unwrap().contains(&expected), "{prompt}");
    }
    // Anthropic's API has no route that shows the prompt. Its length reveals the digits.
    let block = format!(r#"{{"type": "tool_use", "id": "c", "name": "f", "input": {arguments}}}"#);
    let body = format!(
        r#"{{"messages": [{{"role": "assistant", "content": [{block}]}}, {{"role": "user", "content": "b"}}]}}"#
    );
    let count = raw("/v1/messages/count_tokens", body).await.ok()["input_tokens"].clone();
    let text = format!("<|im_start|>assistant\n{expected}\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n");
    let same = post(router(), "/tokenize", json!({"content": text})).await.ok();
    assert_eq!(count, same["count"]);
}

/// Numbers in template variables keep their digits too.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_variables_keep_their_digits() {
    let numbers = r#"[9007199254740993, 123456789012345678901, 0.12345678901234567890, -1e400]"#;
    let source = "{{ id }} {{ all|tojson }}";
    let template = ChatTemplate::new(source, [("bos_token", "<bos>")].into_iter().collect()).unwrap();
    let router = Server::new(shared_engine(), Some(template), ServerOptions::new(NAME)).router();
    let body = format!(
        r#"{{"messages": [{{"role": "user", "content": "a"}}],
        "chat_template_kwargs": {{"id": 18446744073709551617, "all": {numbers}}}}}"#
    );
    let request = Request::post("/apply-template").header(header::CONTENT_TYPE, "application/json");
    let answer = send(router, request.body(Body::from(body)).unwrap()).await.ok();
    assert_eq!(answer["prompt"], format!("18446744073709551617 {numbers}"));
}

/// Variables do not replace what the server checks, or special tokens.
#[tokio::test(flavor = "multi_thread")]
async fn variables_do_not_replace_other_fields() {
    let template = ChatTemplate::new("{{ bos_token }}", [("bos_token", "<bos>")].into_iter().collect()).unwrap();
    let router = Server::new(shared_engine(), Some(template), ServerOptions::new(NAME)).router();
    for path in ["/apply-template", "/v1/chat/completions"] {
        for name in ["messages", "tools", "bos_token"] {
            let body = json!({"messages": [user("a")], "chat_template_kwargs": {name: "<eos>"}}).to_string();
            let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
            let answer = send(router.clone(), request.body(Body::from(body)).unwrap()).await;
            assert_eq!(answer.refused(), "chat_template_kwargs", "{path}: {name}");
        }
    }
}

/// An answer at the end of a conversation is continued.
#[tokio::test(flavor = "multi_thread")]
async fn a_last_answer_is_continued() {
    let messages = json!([user("A"), {"role": "assistant", "content": "One, two"}]);
    let begun = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nOne, two";
    let whole = format!("{begun}<|im_end|>\n");
    for (more, expected) in [
        (json!({}), begun.to_string()),
        (json!({"continue_final_message": true}), begun.to_string()),
        (json!({"continue_final_message": true, "add_generation_prompt": false}), begun.to_string()),
        (json!({"continue_final_message": false}), format!("{whole}<|im_start|>assistant\n")),
        (json!({"add_generation_prompt": true}), format!("{whole}<|im_start|>assistant\n")),
        (json!({"add_generation_prompt": false}), whole.clone()),
    ] {
        assert_eq!(prompt(and(json!({"messages": messages}), more.clone())).await, expected, "{more}");
        // The answer equals the text that continues this prompt.
        let greedy = json!({"max_tokens": 8, "temperature": 0, "ignore_eos": true});
        let chat =
            post(joined_router(), CHAT, and(and(greedy.clone(), json!({"messages": messages})), more)).await.ok();
        let ids = post(router(), "/tokenize", json!({"content": expected})).await.ok()["tokens"].clone();
        let text = post(router(), "/v1/completions", and(greedy, json!({"prompt": ids}))).await.ok();
        assert_eq!(chat["choices"][0]["message"]["content"], text["choices"][0]["text"]);
        assert_eq!(chat["usage"]["prompt_tokens"], text["usage"]["prompt_tokens"]);
    }
    let body = json!({"messages": messages, "max_tokens": 8, "temperature": 0});
    let anthropic = post(joined_router(), "/v1/messages", body.clone()).await.ok();
    let chat = post(joined_router(), CHAT, body).await.ok();
    assert_eq!(anthropic["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    assert_eq!(anthropic["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);

    let call = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]});
    for (more, field) in [
        (json!({"continue_final_message": true, "add_generation_prompt": true}), "continue_final_message"),
        (json!({"continue_final_message": true, "messages": [user("A")]}), "continue_final_message"),
        (json!({"continue_final_message": true, "messages": [user("A"), call]}), "continue_final_message"),
    ] {
        let body = and(json!({"messages": messages}), more.clone());
        assert_eq!(post(joined_router(), CHAT, body).await.refused(), field, "{more}");
    }
    // After a call, the answer is a new message.
    let text = prompt(json!({"messages": [user("A"), call]})).await;
    assert!(text.ends_with("<tool_call>f{}<|im_end|>\n<|im_start|>assistant\n"), "{text}");
}

/// The beginning of an answer can end within reasoning. The parser starts in that state.
#[tokio::test(flavor = "multi_thread")]
async fn a_begun_answer_has_a_state() {
    let ask = |begun: &str| {
        let messages = json!([user("A"), {"role": "assistant", "content": begun}]);
        json!({"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": true})
    };
    let answer = post(chat_router(), CHAT, ask("<think>\nSo the type is")).await.ok();
    let message = &answer["choices"][0]["message"];
    assert!(message["content"] == "" && message["reasoning_content"].is_string(), "{message}");
    let answer = post(chat_router(), CHAT, ask("<think>\nSo</think>\n\nThe type is")).await.ok();
    assert!(answer["choices"][0]["message"]["reasoning_content"].is_null(), "{answer}");
    let body = and(ask("The answer: "), json!({"structured_outputs": {"choice": ["yes", "no"]}}));
    let answer = post(chat_router(), CHAT, body).await.ok();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text == "yes" || text == "no", "{text}");
}
