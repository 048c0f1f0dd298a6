//! Answers of a prescribed form: JSON, tool calls, regular expressions and grammars.

use super::*;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "kind": {"enum": ["struct", "enum"]},
            "name": {"$ref": "#/$defs/name"},
            "lines": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "required": ["kind", "name", "lines"],
        "additionalProperties": false,
        "$defs": {"name": {"type": "string", "maxLength": 8}},
    })
}

#[track_caller]
fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["kind", "name", "lines"]);
    assert!(value["kind"] == "struct" || value["kind"] == "enum", "{text}");
    assert!(value["name"].as_str().unwrap().chars().count() <= 8, "{text}");
    assert!((1..100).contains(&value["lines"].as_i64().unwrap()), "{text}");
}

fn ask() -> Value {
    json!({"messages": [{"role": "user", "content": "Vec"}], "max_tokens": 200, "seed": 5, "reasoning_effort": "none"})
}

fn tools() -> Value {
    let function = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    json!([
        function("count", schema()),
        function(
            "find",
            json!({"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": false})
        )
    ])
}

/// Routes with a template whose family marks neither thoughts nor calls.
fn plain_router() -> Router {
    let source =
        "{% for message in messages %}# {{ message.role }}\n\n{{ message.content }}\n\n{% endfor %}# assistant\n\n";
    let template = ChatTemplate::new(source, [("bos_token", "<bos>")].into_iter().collect()).unwrap();
    Server::new(shared_engine(), Some(template), ServerOptions::new(NAME)).router()
}

#[tokio::test(flavor = "multi_thread")]
async fn json_of_a_schema() {
    let format = json!({"type": "json_schema", "json_schema": {"name": "item", "strict": true, "schema": schema()}});
    for router in [chat_router, plain_router] {
        let body = and(ask(), json!({"response_format": format, "n": 3, "logprobs": true}));
        let whole = post(router(), CHAT, body.clone()).await.ok();
        for choice in whole["choices"].as_array().unwrap() {
            assert_eq!(choice["finish_reason"], "stop");
            check(choice["message"]["content"].as_str().unwrap());
        }
        let chunks = post(router(), CHAT, and(body, json!({"stream": true}))).await.chunks();
        for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let deltas = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
            let text: String = deltas.filter_map(|choice| choice["delta"]["content"].as_str()).collect();
            assert_eq!(choice["message"]["content"], text);
        }
    }
    let body = json!({"prompt": "# JSON\n\n", "max_tokens": 200, "seed": 1, "response_format": format, "echo": true});
    let text = post(router(), TEXT, body).await.ok();
    check(text["choices"][0]["text"].as_str().unwrap().strip_prefix("# JSON\n\n").unwrap());
    let body = json!({"input": "Vec", "reasoning": {"effort": "none"}, "text": {"format": {"type": "json_schema", "name": "item", "schema": schema()}}});
    let answer = post(chat_router(), "/v1/responses", body).await.ok();
    check(answer["output"][0]["content"][0]["text"].as_str().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn any_json_and_other_languages() {
    let complete = |more: Value| {
        let body = and(json!({"prompt": "# A\n\n", "max_tokens": 120, "seed": 2, "ignore_eos": true}), more);
        async move {
            let answer = post(router(), TEXT, body).await.ok();
            let reason = answer["choices"][0]["finish_reason"].as_str().unwrap().to_string();
            (answer["choices"][0]["text"].as_str().unwrap().to_string(), reason)
        }
    };
    for seed in 0..4 {
        let (text, reason) = complete(json!({"response_format": {"type": "json_object"}, "seed": seed})).await;
        assert!(text.starts_with('{'));
        assert!(reason == "length" || serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
    }
    let (text, reason) = complete(json!({"structured_outputs": {"regex": "v[0-9]\\.[0-9]"}})).await;
    assert!(text.starts_with('v') && text.len() == 4 && reason == "stop", "{text}");
    let (text, _) = complete(json!({"structured_outputs": {"choice": ["yes", "no \"never\""]}})).await;
    assert!(["yes", "no \"never\""].contains(&text.as_str()), "{text}");
    let (text, _) =
        complete(json!({"structured_outputs": {"grammar": "start: \"(\" start \")\" | \"x\""}, "max_tokens": 30}))
            .await;
    assert!(text.chars().all(|c| "(x)".contains(c)), "{text}");
    let (text, _) = complete(json!({"structured_outputs": {"json": schema()}})).await;
    check(&text);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_must_be() {
    for router in [chat_router, plain_router] {
        let body = and(ask(), json!({"tools": tools(), "tool_choice": "required", "parallel_tool_calls": false}));
        for seed in 0..6 {
            let answer = post(router(), CHAT, and(body.clone(), json!({"seed": seed}))).await.ok();
            let choice = &answer["choices"][0];
            assert_eq!(
                (&choice["finish_reason"], &choice["message"]["content"]),
                (&json!("tool_calls"), &Value::Null),
                "{answer}"
            );
            let [call] = choice["message"]["tool_calls"].as_array().unwrap().as_slice() else { panic!("{answer}") };
            let arguments = call["function"]["arguments"].as_str().unwrap();
            match call["function"]["name"].as_str().unwrap() {
                "count" => check(arguments),
                "find" => assert!(serde_json::from_str::<Value>(arguments).unwrap().is_object()),
                other => panic!("{other}"),
            }
        }
        let named = json!({"tool_choice": {"type": "function", "function": {"name": "find"}}});
        let answer = post(router(), CHAT, and(body.clone(), named)).await.ok();
        assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "find");
        let named = json!({"tool_choice": {"type": "function", "function": {"name": "count"}}, "stream": true});
        let chunks = post(router(), CHAT, and(body, named)).await.chunks();
        let calls = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array()).flatten();
        let calls: Vec<&Value> = calls.collect();
        assert_eq!(calls[0]["function"]["name"], "count");
        check(&calls.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect::<String>());
    }
    let tool = json!({"type": "function", "name": "count", "parameters": schema()});
    let body = json!({"input": "Vec", "reasoning": {"effort": "none"}, "tools": [tool], "tool_choice": "required"});
    let answer = post(chat_router(), "/v1/responses", body).await.ok();
    assert_eq!(
        (&answer["output"][0]["type"], &answer["output"][0]["name"]),
        (&json!("function_call"), &json!("count"))
    );
    check(answer["output"][0]["arguments"].as_str().unwrap());
    let tool = json!({"name": "count", "input_schema": schema()});
    for choice in [json!({"type": "any", "disable_parallel_tool_use": true}), json!({"type": "tool", "name": "count"})]
    {
        let body = json!({"messages": ask()["messages"], "max_tokens": 200, "tools": [tool], "tool_choice": choice});
        let body = and(body, json!({"thinking": {"type": "disabled"}}));
        let answer = post(chat_router(), "/v1/messages", body).await.ok();
        assert_eq!((&answer["stop_reason"], &answer["content"][0]["type"]), (&json!("tool_use"), &json!("tool_use")));
        check(&answer["content"][0]["input"].to_string());
    }
}

/// Thoughts come before the answer; the model can end them or not begin them.
#[tokio::test(flavor = "multi_thread")]
async fn thoughts_come_first() {
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema()}}});
    let answer = post(chat_router(), CHAT, and(and(ask(), format), json!({"reasoning_effort": "low"}))).await.ok();
    let message = &answer["choices"][0]["message"];
    assert!(!message["reasoning_content"].as_str().unwrap().is_empty());
    let content = message["content"].as_str().unwrap();
    assert!(
        content.is_empty() && answer["choices"][0]["finish_reason"] == "length"
            || serde_json::from_str::<Value>(content).is_ok()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_enforced_is_named() {
    let format = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}});
    let deep = (0..100).fold(json!({}), |inner, _| json!({"items": inner}));
    for (more, field) in [
        (format(Value::Null), "response_format.json_schema.schema"),
        (format(json!({"type": "strin"})), "response_format.json_schema.schema"),
        (format(json!({"not": {"type": "null"}})), "response_format.json_schema.schema"),
        (format(json!([1])), "response_format.json_schema.schema"),
        (format(deep), "response_format.json_schema.schema"),
        (format(json!({"description": "x".repeat(300 << 10)})), "response_format.json_schema.schema"),
        (json!({"structured_outputs": {"regex": "("}}), "structured_outputs.regex"),
        (json!({"structured_outputs": {"grammar": "begin: \"a\""}}), "structured_outputs.grammar"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs"),
        (json!({"structured_outputs": {"backend": "xgrammar"}}), "structured_outputs.backend"),
        (
            json!({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
            "structured_outputs",
        ),
    ] {
        assert_eq!(post(chat_router(), CHAT, and(ask(), more.clone())).await.refused(), field, "{more}");
        let body = and(json!({"prompt": "a"}), more.clone());
        assert_eq!(post(router(), TEXT, body).await.refused(), field, "{more}");
    }
    let mut strict = tools();
    strict[1]["function"]["strict"] = json!(true);
    let mut wrong = tools();
    wrong[0]["function"]["parameters"] = json!({"type": "strin"});
    for (more, field) in [
        (json!({"tools": strict}), "tools[1].function.strict"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "other"}}}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": {"type": "allowed_tools"}}), "tool_choice"),
        (json!({"tools": wrong, "tool_choice": "required"}), "tools"),
    ] {
        assert_eq!(post(chat_router(), CHAT, and(ask(), more.clone())).await.refused(), field, "{more}");
    }
    post(chat_router(), CHAT, and(ask(), json!({"tools": strict, "tool_choice": "required"}))).await.ok();
}
