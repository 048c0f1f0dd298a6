//! Structured outputs: JSON, tool calls, regular expressions and grammars.

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

/// Routes with a template whose family has no delimiters for reasoning or calls.
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
    // Many choices, and characters that are operators in grammars.
    let more = (0..6000).map(|n| format!("{n}?("));
    let many: Vec<String> = more.chain(["? (*[+{~&/\n\\é".to_string()]).collect();
    let (text, _) = complete(json!({"structured_outputs": {"choice": many}})).await;
    assert!(many.contains(&text), "{text}");
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
async fn required_calls_follow_their_schema() {
    for router in [chat_router, plain_router] {
        let body = and(ask(), json!({"tools": tools(), "tool_choice": "required", "parallel_tool_calls": false}));
        let mut complete = 0;
        for seed in 0..8 {
            let answer = post(router(), CHAT, and(body.clone(), json!({"seed": seed}))).await.ok();
            let choice = &answer["choices"][0];
            // The model can write white space up to the limit.
            if choice["finish_reason"] == "length" {
                continue;
            }
            complete += 1;
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
        assert!(complete >= 3, "{complete} calls are complete");
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
        let body = json!({"messages": ask()["messages"], "max_tokens": 2000, "tools": [tool], "tool_choice": choice});
        // At low temperatures this model repeats itself, and arguments never end.
        let body = and(body, json!({"thinking": {"type": "disabled"}, "temperature": 1}));
        let answer = post(chat_router(), "/v1/messages", body).await.ok();
        assert_eq!((&answer["stop_reason"], &answer["content"][0]["type"]), (&json!("tool_use"), &json!("tool_use")));
        check(&answer["content"][0]["input"].to_string());
    }
}

/// Reasoning precedes the answer. The model can end it, or not begin it.
#[tokio::test(flavor = "multi_thread")]
async fn reasoning_come_first() {
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

/// Routes with a template of a family whose calls are JSON without a delimiter.
fn llama_router() -> Router {
    let source = "{% for message in messages %}<|start_header_id|>{{ message.role }}\n\n{{ message.content }}\n\n\
                  {% endfor %}{% if tools %}name and parameters{% endif %}# assistant\n\n";
    let template = ChatTemplate::new(source, [("bos_token", "<bos>")].into_iter().collect()).unwrap();
    Server::new(shared_engine(), Some(template), ServerOptions::new(NAME)).router()
}

/// The content of an answer, unstreamed and streamed.
async fn contents(router: fn() -> Router, body: Value) -> [String; 2] {
    let whole = post(router(), CHAT, body.clone()).await.ok();
    let chunks = post(router(), CHAT, and(body, json!({"stream": true}))).await.chunks();
    let deltas = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    [whole["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_string(), deltas.collect()]
}

/// JSON that looks like a call is content if no such call was offered.
#[tokio::test(flavor = "multi_thread")]
async fn json_is_a_call_only_if_it_was_offered() {
    let person = json!({
        "type": "object", "properties": {"name": {"enum": ["Ada"]}, "age": {"enum": [36]}}, "required": ["name", "age"],
        "additionalProperties": false,
    });
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": person}}});
    let is_person = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert_eq!(value, json!({"name": "Ada", "age": 36}));
    };
    contents(llama_router, and(ask(), format.clone())).await.iter().for_each(|text| is_person(text));
    let none = json!({"tools": tools(), "tool_choice": "none"});
    contents(llama_router, and(and(ask(), format.clone()), none)).await.iter().for_each(|text| is_person(text));
    for seed in 0..4 {
        let body = and(and(ask(), format.clone()), json!({"tools": tools(), "seed": seed}));
        let message = post(llama_router(), CHAT, body).await.ok()["choices"][0]["message"].clone();
        match message["tool_calls"][0]["function"]["name"].as_str() {
            Some(name) => assert!(["count", "find"].contains(&name), "{message}"),
            None => is_person(message["content"].as_str().unwrap()),
        }
    }
    let body = json!({"input": "Vec", "text": {"format": {"type": "json_schema", "name": "p", "schema": person}}});
    let answer = post(llama_router(), "/v1/responses", body).await.ok();
    is_person(answer["output"][0]["content"][0]["text"].as_str().unwrap());
    // If calls have delimiters, they stay in the content too.
    let marked = "<tool_call>\n{\"name\": \"find\", \"arguments\": {}}\n</tool_call>";
    let choice = json!({"structured_outputs": {"choice": [marked]}});
    assert_eq!(contents(chat_router, and(ask(), choice.clone())).await, [marked, marked]);
    let offered = and(and(ask(), choice), json!({"tools": tools()}));
    assert_eq!(contents(chat_router, offered).await, ["", ""]);
}

/// The first answer without reasoning from a model that may reason.
async fn without_reasoning(more: Value) -> String {
    for seed in 0..100 {
        let body = and(and(ask(), more.clone()), json!({"reasoning_effort": null, "max_tokens": 12, "seed": seed}));
        let body = and(body, json!({"temperature": 1, "top_p": 1, "min_p": 0}));
        let message = post(chat_router(), CHAT, body).await.ok()["choices"][0]["message"].clone();
        if message["reasoning_content"].is_null() {
            return message["content"].as_str().unwrap().to_string();
        }
    }
    panic!("the model always thinks: {more}")
}

/// Every constraint leaves reasoning free that the prompt has opened.
#[tokio::test(flavor = "multi_thread")]
async fn open_reasoning_is_free() {
    for outputs in [
        json!({"choice": ["zq", "zx"]}),
        json!({"grammar": "start: \"z\" (\"q\" | \"x\") // end"}),
        json!({"regex": "z[qx]"}),
        json!({"json": {"enum": ["zq"]}}),
    ] {
        let body = and(ask(), json!({"reasoning_effort": "low", "max_tokens": 40, "structured_outputs": outputs}));
        let choice = post(chat_router(), CHAT, body).await.ok()["choices"][0].clone();
        let reasoning = choice["message"]["reasoning_content"].as_str().unwrap();
        assert!(reasoning.len() > 4 && !reasoning.starts_with("z"), "{choice}");
        let content = choice["message"]["content"].as_str().unwrap();
        assert!(["", "zq", "zx", "\"zq\""].contains(&content), "{choice}");
        assert!(!content.is_empty() || choice["finish_reason"] == "length", "{choice}");
        let content = without_reasoning(json!({"structured_outputs": outputs})).await;
        assert!(["zq", "zx", "\"zq\""].contains(&content.as_str()), "{outputs}: {content}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn regular_expressions_with_slashes() {
    for regex in ["a/b", "a\\/b", "a[/]b", "a[\\/]b"] {
        let outputs = json!({"structured_outputs": {"regex": regex}});
        assert_eq!(without_reasoning(outputs.clone()).await, "a/b", "{regex}");
        let text = post(router(), TEXT, and(json!({"prompt": "x"}), outputs)).await.ok();
        assert_eq!(text["choices"][0]["text"], "a/b", "{regex}");
    }
    for (outputs, field) in [
        (json!({"regex": "("}), "regex"),
        (json!({"regex": "(?=a)b"}), "regex"),
        (json!({"grammar": "start: \"a\nother"}), "grammar"),
        (json!({"json": {"pattern": "(?=a)b", "type": "string"}}), "json"),
    ] {
        for effort in [json!("none"), Value::Null] {
            let body = and(ask(), json!({"structured_outputs": outputs, "reasoning_effort": effort}));
            let answer = post(chat_router(), CHAT, body).await;
            let message = answer.json()["error"]["message"].as_str().unwrap().to_string();
            assert_eq!(answer.refused(), format!("structured_outputs.{field}"));
            for inner in [" | ", "start", "%lark", "GAP", "reasoning"] {
                assert!(!message.contains(inner), "{message}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_of_a_schema() {
    let body = and(ask(), json!({"response_format": {"type": "json_object", "schema": schema()}}));
    contents(plain_router, body).await.iter().for_each(|text| check(text));
}

/// A function without parameters has no arguments, and arguments are always an object.
#[tokio::test(flavor = "multi_thread")]
async fn functions_without_parameters() {
    for (parameters, is_empty) in [(Value::Null, true), (json!({"maxProperties": 0}), true), (json!({}), false)] {
        let function = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        for router in [chat_router, plain_router] {
            let body = and(ask(), json!({"tools": [function], "tool_choice": "required", "max_tokens": 60}));
            let choice = post(router(), CHAT, body).await.ok()["choices"][0].clone();
            if choice["finish_reason"] == "length" {
                assert!(!is_empty, "{choice}");
                continue;
            }
            let arguments = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
            match is_empty {
                true => assert_eq!(arguments, "{}"),
                false => assert!(serde_json::from_str::<Value>(arguments).unwrap().is_object()),
            }
        }
    }
    let body = json!({"messages": ask()["messages"], "max_tokens": 200, "thinking": {"type": "disabled"}});
    let body = and(body, json!({"tools": [{"name": "f"}], "tool_choice": {"type": "any"}}));
    for _ in 0..20 {
        let answer = post(chat_router(), "/v1/messages", body.clone()).await.ok();
        // This API has no seed, and the model can write white space up to the limit.
        if answer["stop_reason"] == "tool_use" {
            assert_eq!(answer["content"][0]["input"], json!({}));
            return;
        }
    }
    panic!("no call is complete");
}

/// The arguments of a call keep the digits that the model wrote.
#[tokio::test(flavor = "multi_thread")]
async fn arguments_keep_their_digits() {
    let arguments = r#"{"id":123456789012345678901,"share":0.12345678901234567890}"#;
    let call = format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>");
    let function = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let more = json!({"tools": [function], "structured_outputs": {"choice": [call]}});
    let written = |message: &Value| message["tool_calls"][0]["function"]["arguments"].as_str().map(str::to_string);
    let mut found = None;
    for seed in 0..40 {
        let body = and(and(ask(), more.clone()), json!({"seed": seed, "max_tokens": 120}));
        let answer = post(chat_router(), CHAT, body).await.ok();
        found = written(&answer["choices"][0]["message"]).filter(|text| text.contains("\"share\""));
        if found.is_some() {
            break;
        }
    }
    assert_eq!(found.as_deref(), Some(arguments));
}

/// Formats and references that schema generators write.
#[tokio::test(flavor = "multi_thread")]
async fn schemas_of_generators() {
    for (schema, text) in [
        (json!({"type": "string", "format": "password", "pattern": "^a$"}), "\"a\""),
        (json!({"type": "string", "format": "binary", "maxLength": 0}), "\"\""),
        (json!({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"const": 1}}}), "1"),
        (json!({"$ref": "#/definitions/Partial%3CT%3E", "definitions": {"Partial<T>": {"const": 2}}}), "2"),
        (json!({"$id": "https://a.b/c", "$ref": "https://a.b/c#/$defs/x", "$defs": {"x": {"const": 3}}}), "3"),
        (json!({"$ref": "#x", "$defs": {"y": {"$anchor": "x", "const": 4}}}), "4"),
    ] {
        let format =
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}});
        for router in [chat_router, plain_router] {
            assert_eq!(contents(router, and(ask(), format.clone())).await, [text, text], "{schema}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_that_cannot_be_exact_are_refused() {
    let raw = |path: &'static str, body: String| {
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
        send(chat_router(), request.body(Body::from(body)).unwrap())
    };
    let messages = r#""messages": [{"role": "user", "content": "a"}], "max_tokens": 9"#;
    for (keyword, place) in [
        (r#""maximum": 9007199254740993"#, "maximum"),
        (r#""minimum": 123456789012345678901"#, "minimum"),
        (r#""multipleOf": 0.12345678901234567890"#, "multipleOf"),
        (r#""enum": [1, 18446744073709551615]"#, "enum[1]"),
        (r#""const": {"a": 1e400}"#, "const.a"),
    ] {
        let schema = format!(r#"{{"type": "object", "properties": {{"a": {{{keyword}}}}}}}"#);
        let place = format!("`properties.a.{place}`");
        for (path, body, field) in [
            (
                CHAT,
                format!(
                    r#"{{{messages}, "response_format": {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {schema}}}}}}}"#
                ),
                "response_format.json_schema.schema",
            ),
            (CHAT, format!(r#"{{{messages}, "structured_outputs": {{"json": {schema}}}}}"#), "structured_outputs.json"),
            (
                CHAT,
                format!(
                    r#"{{{messages}, "tool_choice": "required", "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]}}"#
                ),
                "tools",
            ),
            (
                "/v1/responses",
                format!(
                    r#"{{"input": "a", "text": {{"format": {{"type": "json_schema", "name": "a", "schema": {schema}}}}}}}"#
                ),
                "text.format.schema",
            ),
        ] {
            let answer = raw(path, body).await;
            assert!(answer.text.contains(&place), "{}", answer.text);
            assert_eq!(answer.refused(), field);
        }
        // Optional tools are not enforced.
        let tool = format!(r#"{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}"#);
        let answer = raw(CHAT, format!(r#"{{{messages}, "tools": [{tool}]}}"#)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    }
    // Without enforcement, any number is valid.
    let tool = r#"{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": {"a": 123456789012345678901}}}}"#;
    let answer = raw("/v1/responses", r#"{"input": "a", "max_output_tokens": 1, "tools": [{"type": "function", "name": "f", "parameters": {"default": 123456789012345678901}}]}"#.to_string()).await;
    assert!(answer.status == StatusCode::OK && answer.text.contains(":123456789012345678901"), "{}", answer.text);
    assert_eq!(
        raw(CHAT, format!(r#"{{{messages}, "tools": [{tool}], "tool_choice": "required"}}"#)).await.status,
        StatusCode::OK
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_error_names_a_constraint_that_cannot_be_enforced() {
    let format = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}});
    let deep = (0..100).fold(json!({}), |inner, _| json!({"items": inner}));
    for (more, field) in [
        (format(Value::Null), "response_format.json_schema.schema"),
        (format(json!({"type": "strin"})), "response_format.json_schema.schema"),
        (format(json!({"not": {"type": "null"}})), "response_format.json_schema.schema"),
        (format(json!([1])), "response_format.json_schema.schema"),
        (format(deep), "response_format.json_schema.schema"),
        (format(json!({"description": "x".repeat(300 << 10)})), "response_format.json_schema.schema"),
        (json!({"response_format": {"type": "json_object", "schema": {"type": "strin"}}}), "response_format.schema"),
        (json!({"response_format": {"type": "json_object", "json_schema": {}}}), "response_format.json_schema"),
        (json!({"response_format": {"type": "text", "schema": {}}}), "response_format.schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "mode": 1}}}),
            "response_format.json_schema.mode",
        ),
        (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
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
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "other"}}}), "tool_choice"),
        (json!({"tools": tools(), "tool_choice": {"type": "allowed_tools"}}), "tool_choice"),
        (json!({"tools": wrong, "tool_choice": "required"}), "tools"),
    ] {
        assert_eq!(post(chat_router(), CHAT, and(ask(), more.clone())).await.refused(), field, "{more}");
    }
    post(chat_router(), CHAT, and(ask(), json!({"tools": strict, "tool_choice": "required"}))).await.ok();
}

/// Without a required tool, text is free, and a call of a strict function follows its schema once it has begun.
#[tokio::test(flavor = "multi_thread")]
async fn optional_strict_calls_follow_their_schema() {
    let ids = post(router(), "/tokenize", json!({"content": "{"})).await.ok()["tokens"].clone();
    let brace = ids[0].to_string();
    assert_eq!(ids.as_array().unwrap().len(), 1);
    let parameters = json!({"type": "object", "properties": {"x": {"enum": [7, 8]}}, "required": ["x"],
        "additionalProperties": false});
    let function = |strict: bool| {
        let function = json!({"name": "f", "parameters": parameters, "strict": strict});
        json!({"tools": [{"type": "function", "function": function}], "tool_choice": "auto"})
    };
    let ask = |bias: i32, strict: bool| and(and(ask(), function(strict)), json!({"logit_bias": {brace.clone(): bias}}));
    let answer = post(llama_router(), CHAT, ask(100, true)).await.ok()["choices"][0].clone();
    let call = &answer["message"]["tool_calls"][0]["function"];
    assert_eq!((&call["name"], &answer["finish_reason"]), (&json!("f"), &json!("tool_calls")), "{answer}");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!([json!({"x": 7}), json!({"x": 8})].contains(&arguments), "{arguments}");
    let free = post(llama_router(), CHAT, and(ask(-100, true), json!({"max_tokens": 20}))).await.ok();
    let message = &free["choices"][0]["message"];
    assert!(message["tool_calls"].is_null() && !message["content"].as_str().unwrap().is_empty(), "{message}");
    // A function that is not strict is not constrained.
    let loose = post(llama_router(), CHAT, and(ask(100, false), json!({"max_tokens": 20}))).await.ok();
    assert!(loose["choices"][0]["message"]["tool_calls"].is_null(), "{loose}");
}
