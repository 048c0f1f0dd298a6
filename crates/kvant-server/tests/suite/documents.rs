//! The page, and `/openapi.json` compared with real responses.

use kvant_server::ApiKeys;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn the_page_needs_nothing_else() {
    let page = get(router(), "/").await;
    assert_eq!(page.status, StatusCode::OK);
    assert!(page.headers[header::CONTENT_TYPE].to_str().unwrap().starts_with("text/html"));
    let policy = page.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    for part in ["default-src 'none'", "script-src 'self';", "style-src 'self';", "require-trusted-types-for 'script'"]
    {
        assert!(policy.contains(part), "{part}: {policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    // The HTML contains no scripts, and all files come from the server.
    for inside in ["<style", "style=", "http://", "https://"] {
        assert!(!page.text.contains(inside), "{inside}");
    }
    let handler = page.text.split_whitespace().find(|word| word.starts_with("on") && word.contains('='));
    assert_eq!(handler, None);
    let files = page.text.split(['"']).filter(|text| text.starts_with("page/"));
    assert_eq!(files.clone().count(), 3, "{}", page.text);
    for file in files {
        page_file(file.strip_prefix("page/").unwrap()).await;
    }
}

/// A file of the page, and the files that it imports. No file needs a key.
async fn page_file(name: &str) {
    let keys = ServerOptions::new(NAME).keys(ApiKeys::new(["secret"]));
    let file = get(with(keys), &format!("/page/{name}")).await;
    assert_eq!(file.status, StatusCode::OK, "{name}");
    let kind = if name.ends_with(".css") { "text/css" } else { "text/javascript" };
    assert!(file.headers[header::CONTENT_TYPE].to_str().unwrap().starts_with(kind), "{name}");
    for outside in ["url(", "@import", "innerHTML", "eval("] {
        assert!(name.contains(".min.") || !file.text.contains(outside), "{name}: {outside}");
    }
    for imported in file.text.split("from \"./").skip(1) {
        Box::pin(page_file(imported.split_once('"').unwrap().0)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_has_no_other_files() {
    for path in ["/page/", "/page/none.js", "/page/..%2Fapp.rs", "/page/page.js/x"] {
        assert_eq!(get(router(), path).await.status, StatusCode::NOT_FOUND, "{path}");
    }
}

/// The requests whose responses are compared with the document.
fn examples() -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "user", "content": "Vec"}]);
    vec![
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 3, "logprobs": 2, "echo": true})),
        ("/v1/completions", json!({"prompt": ["a", "b"], "n": 2, "max_tokens": 1})),
        ("/v1/completions", json!({"prompt": 3})),
        ("/v1/completions", json!({"prompt": "a", "model": "other"})),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 3, "logprobs": true, "top_logprobs": 1})),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 3, "reasoning_effort": "low"})),
        ("/v1/responses", json!({"input": "a", "max_output_tokens": 3})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 3})),
        ("/v1/messages", json!({"messages": messages})),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/tokenize", json!({"prompt": "a"})),
        ("/tokenize", json!({"prompt": "a", "return_token_strs": true})),
        ("/tokenize", json!({"content": "a", "with_pieces": true})),
        ("/detokenize", json!({"tokens": [5, 6]})),
        ("/apply-template", json!({"messages": messages})),
        ("/v1/embeddings", json!({"input": ["a", "b"], "dimensions": 8})),
        ("/v1/embeddings", json!({"input": [[5], [6, 7]], "encoding_format": "base64"})),
        ("/v1/embeddings", json!({"input": "a", "model": "other"})),
        ("/api/embed", json!({"input": "a"})),
        ("/api/embeddings", json!({"prompt": "a"})),
        ("/api/show", json!({"model": NAME})),
        ("/api/chat", json!({"messages": messages, "stream": false, "options": {"num_predict": 3}})),
        ("/api/chat", json!({"messages": messages, "format": 3})),
        ("/api/generate", json!({"prompt": "a", "raw": true, "stream": false, "options": {"num_predict": 3}})),
    ]
}

async fn document() -> Value {
    get(router(), "/openapi.json").await.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_as_the_document_says() {
    let document = document().await;
    for (path, body) in examples() {
        let schema = format!("{path}: {body}");
        let request = request_schema(&document, path);
        let answer = post(chat_router(), path, body.clone()).await;
        if answer.status == StatusCode::OK {
            check(&document, request, &body, &schema);
        }
        let responses = &document["paths"][path]["post"]["responses"];
        let response = &responses[answer.status.as_str()];
        check(&document, &response["content"]["application/json"]["schema"], &answer.json(), &schema);
    }
    for path in [
        "/v1/loads",
        "/server_info",
        "/model_info",
        "/v1/models",
        "/health",
        "/ping",
        "/tokenizer_info",
        "/version",
        "/api/version",
        "/api/tags",
        "/api/ps",
    ] {
        let schema = &document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"];
        check(&document, schema, &get(router(), path).await.ok(), path);
    }
    // Every route with a body has an example.
    for (path, methods) in document["paths"].as_object().unwrap() {
        assert!(
            methods["post"].get("requestBody").is_none() || examples().iter().any(|(example, _)| example == path),
            "{path}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_knows_every_field_of_the_document() {
    let document = document().await;
    for (path, methods) in document["paths"].as_object().unwrap().iter() {
        if methods["post"].get("requestBody").is_none() {
            continue;
        }
        assert!(methods["post"]["summary"].is_string());
        let schema = request_schema(&document, path);
        assert_eq!(schema["additionalProperties"], false);
        for field in schema["properties"].as_object().unwrap().keys() {
            // A value that no field accepts.
            let answer = post(chat_router(), path, json!({field: [[[[]]]]})).await;
            assert!(!answer.text.contains("does not know"), "{path}: {field}: {}", answer.text);
        }
    }
}

fn request_schema<'d>(document: &'d Value, path: &str) -> &'d Value {
    resolve(document, &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
}

fn resolve<'d>(document: &'d Value, schema: &'d Value) -> &'d Value {
    match schema["$ref"].as_str() {
        Some(reference) => document.pointer(&reference[1..]).unwrap(),
        None => schema,
    }
}

/// Checks a value against the subset of JSON schema that the document uses.
#[track_caller]
fn check(document: &Value, schema: &Value, value: &Value, place: &str) {
    if let Err(error) = validate(document, schema, value) {
        panic!("{place}: {error}: {value}");
    }
}

fn validate(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let schema = resolve(document, schema);
    let wrong = |what: &str| Err(format!("{value} is not {what} of {schema}"));
    if let Some(any) = schema["anyOf"].as_array() {
        return match any.iter().any(|schema| validate(document, schema, value).is_ok()) {
            true => Ok(()),
            false => wrong("any"),
        };
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => return Err(format!("no type: {schema}")),
    };
    let is_type = |name: &&str| match *name {
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        _ => value.is_object(),
    };
    if !types.iter().any(is_type) {
        return wrong("of the type");
    }
    if schema["enum"].as_array().is_some_and(|values| !values.contains(value)) {
        return wrong("one");
    }
    let number = |key: &str| schema[key].as_f64().zip(value.as_f64());
    if number("minimum").is_some_and(|(min, value)| value < min)
        || number("maximum").is_some_and(|(max, value)| value > max)
    {
        return wrong("in the range");
    }
    for item in value.as_array().into_iter().flatten() {
        validate(document, &schema["items"], item)?;
    }
    let Some(fields) = value.as_object() else { return Ok(()) };
    for required in schema["required"].as_array().into_iter().flatten() {
        if !fields.contains_key(required.as_str().unwrap()) {
            return wrong(&format!("complete: {required}"));
        }
    }
    for (key, value) in fields {
        match (schema["properties"].get(key), &schema["additionalProperties"]) {
            (Some(schema), _) => validate(document, schema, value)?,
            (None, Value::Bool(false)) => return Err(format!("{key} is not in {schema}")),
            (None, schema @ Value::Object(_)) => validate(document, schema, value)?,
            _ => {}
        }
    }
    Ok(())
}
