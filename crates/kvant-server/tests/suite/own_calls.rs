//! Constrained calls in families that do not write them as JSON objects: Gemma 4, gpt-oss, Qwen 3.5, LFM2.

use super::*;

const CHAT: &str = "/v1/chat/completions";
const GEMMA_MARKS: [&str; 5] = ["<|tool_call>", "<tool_call|>", "<|\"|>", "<|channel>", "<channel|>"];
const XML_MARKS: [&str; 4] = ["<tool_call>", "</tool_call>", "<think>", "</think>"];
const LFM2_MARKS: [&str; 4] = ["<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"];
const HARMONY_MARKS: [&str; 6] = ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"];
/// The token id of a header that begins a call.
const HEADER: usize = 5 + HARMONY_MARKS.len();

/// Routes with a vocabulary of [`words_with`] delimiters, and a template of their family.
fn marked_router(marks: &[&str], texts: &[&str], hint: &str) -> Router {
    let device = Device::cpu_with(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let model = Model::load(Path::new(MODEL), &device).unwrap();
    let tokenizer = Arc::new(words_with(marks, texts));
    let engine = Engine::start(model, tokenizer, EngineOptions::default().context(1024).sequences(2)).unwrap();
    let source = format!(
        "{{# {} {hint} #}}{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}",
        marks.concat()
    );
    let template = ChatTemplate::new(&source, [("bos_token", "<bos>")].into_iter().collect()).unwrap();
    Server::new(engine, Some(template), ServerOptions::new(NAME)).router()
}

fn gemma_router() -> Router {
    static ROUTER: OnceLock<Router> = OnceLock::new();
    ROUTER.get_or_init(|| marked_router(&GEMMA_MARKS, &[], "")).clone()
}

fn harmony_router() -> Router {
    static ROUTER: OnceLock<Router> = OnceLock::new();
    ROUTER.get_or_init(|| marked_router(&HARMONY_MARKS, &["commentary to=functions.f"], "")).clone()
}

fn xml_router() -> Router {
    static ROUTER: OnceLock<Router> = OnceLock::new();
    ROUTER.get_or_init(|| marked_router(&XML_MARKS, &[], "<function=")).clone()
}

fn lfm2_router() -> Router {
    static ROUTER: OnceLock<Router> = OnceLock::new();
    ROUTER.get_or_init(|| marked_router(&LFM2_MARKS, &[], "")).clone()
}

/// A request that offers a function, and biases sampling towards some tokens.
fn ask(parameters: Value, strict: bool, preferred: &[usize]) -> Value {
    let function = json!({"name": "f", "parameters": parameters, "strict": strict});
    let bias: serde_json::Map<String, Value> = preferred.iter().map(|id| (id.to_string(), json!(100))).collect();
    let tools = json!([{"type": "function", "function": function}]);
    json!({"messages": [{"role": "user", "content": "Hello world"}], "tools": tools, "logit_bias": bias, "seed": 5,
        "max_tokens": 400, "temperature": 1, "top_p": 1, "min_p": 0})
}

fn seven_or_eight() -> Value {
    json!({"type": "object", "properties": {"x": {"enum": [7, "eight"]}}, "required": ["x"], "additionalProperties": false})
}

/// The arguments of the only call of an answer without text.
#[track_caller]
fn arguments(choice: &Value) -> Value {
    let message = &choice["message"];
    assert_eq!((&choice["finish_reason"], &message["content"]), (&json!("tool_calls"), &Value::Null), "{choice}");
    let [call] = message["tool_calls"].as_array().unwrap().as_slice() else { panic!("{choice}") };
    assert_eq!(call["function"]["name"], "f");
    serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap()
}

/// If calls are optional, a call follows its schema after the family's opening delimiter.
#[tokio::test(flavor = "multi_thread")]
async fn optional_strict_calls_follow_their_schema() {
    for (router, mark) in [(gemma_router(), 5), (harmony_router(), HEADER), (xml_router(), 5), (lfm2_router(), 5)] {
        for seed in 0..4 {
            let body = and(ask(seven_or_eight(), true, &[mark]), json!({"seed": seed, "parallel_tool_calls": false}));
            let body = and(body, json!({"stop_token_ids": if mark == 5 { vec![6] } else { vec![10] }}));
            let answer = post(router.clone(), CHAT, body).await.ok();
            let found = arguments(&answer["choices"][0]);
            assert!([json!({"x": 7}), json!({"x": "eight"})].contains(&found), "{found}");
        }
        let never = json!({"logit_bias": {mark.to_string(): -100}, "max_tokens": 20});
        let free = post(router.clone(), CHAT, and(ask(seven_or_eight(), true, &[]), never)).await.ok();
        let choice = &free["choices"][0];
        assert!(choice["message"]["tool_calls"].is_null() && choice["finish_reason"] == "length", "{choice}");
    }
}

/// A required call has the family's own format and follows its schema.
#[tokio::test(flavor = "multi_thread")]
async fn required_calls_follow_their_schema() {
    let schema = json!({
        "type": "object",
        "properties": {
            "kind": {"enum": ["struct", "enum", 3, null]},
            "name": {"type": "string", "maxLength": 4},
            "Lines": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "minItems": 1, "maxItems": 3},
            "a b": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/point"}]},
        },
        "required": ["kind", "Lines"],
        "additionalProperties": false,
        "$defs": {"point": {"type": "object", "properties": {"y": {"type": ["null", "boolean"]}}, "additionalProperties": false}},
    });
    let check = |found: &Value| {
        assert!([json!("struct"), json!("enum"), json!(3), Value::Null].contains(&found["kind"]), "{found}");
        let lines = found["Lines"].as_array().unwrap();
        assert!((1..=3).contains(&lines.len()), "{found}");
        assert!(lines.iter().all(|line| (1..100).contains(&line.as_i64().unwrap())), "{found}");
        assert!(found["name"].is_null() || found["name"].as_str().unwrap().chars().count() <= 4, "{found}");
        let point = &found["a b"];
        assert!(
            point.is_null() || point.is_boolean() || point.as_object().unwrap().keys().all(|key| key == "y"),
            "{found}"
        );
        found.as_object().unwrap().len()
    };
    for router in [gemma_router(), harmony_router(), xml_router(), lfm2_router()] {
        let (mut complete, mut fields) = (0, 0);
        for seed in 0..8 {
            let body = and(ask(schema.clone(), false, &[]), json!({"tool_choice": "required", "seed": seed}));
            let body = and(body, json!({"reasoning_effort": "none"}));
            let answer = post(router.clone(), CHAT, body.clone()).await.ok();
            let choice = &answer["choices"][0];
            if choice["finish_reason"] == "length" {
                continue;
            }
            complete += 1;
            fields += check(&arguments(choice));
            let chunks = post(router.clone(), CHAT, and(body, json!({"stream": true}))).await.chunks();
            let calls =
                chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array()).flatten();
            let text: String = calls.filter_map(|call| call["function"]["arguments"].as_str()).collect();
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), arguments(choice));
        }
        assert!(complete >= 3 && fields > 2 * complete, "{complete} calls with {fields} fields");
    }
}

/// A call that `max_tokens` truncates is incomplete.
#[tokio::test(flavor = "multi_thread")]
async fn truncated_calls_are_incomplete() {
    let schema = json!({"type": "object", "properties": {"text": {"type": "string", "minLength": 200}},
        "required": ["text"], "additionalProperties": false});
    for router in [gemma_router(), harmony_router(), xml_router(), lfm2_router()] {
        for limit in [1, 3, 8, 60] {
            let more = json!({"tool_choice": "required", "max_tokens": limit, "reasoning_effort": "none"});
            let body = and(ask(schema.clone(), false, &[]), more);
            let choice = post(router.clone(), CHAT, body).await.ok()["choices"][0].clone();
            assert_eq!(choice["finish_reason"], "length", "{choice}");
            assert_eq!(choice["message"]["content"].as_str().unwrap_or_default(), "", "{choice}");
            if limit == 60 {
                let arguments = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
                assert!(arguments.starts_with('{') && arguments.contains("text"), "{choice}");
            }
        }
    }
}

/// Constrained text is in the channel of answers.
#[tokio::test(flavor = "multi_thread")]
async fn json_in_the_channel_of_answers() {
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": seven_or_eight()}});
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "response_format": format, "max_tokens": 200,
        "reasoning_effort": "none", "logprobs": true});
    let answer = post(harmony_router(), CHAT, body).await.ok();
    let choice = &answer["choices"][0];
    let content: Value = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
    assert!([json!({"x": 7}), json!({"x": "eight"})].contains(&content), "{content}");
    assert_eq!(choice["logprobs"]["content"][0]["token"], "<|channel|>");
}

/// Gemma's form enforces patterns, whether a call must be made or not.
#[tokio::test(flavor = "multi_thread")]
async fn patterns_in_the_form() {
    let of_field = |field: Value| json!({"type": "object", "properties": {"x": field}, "required": ["x"], "additionalProperties": false});
    let is_number = |x: &str| x.len() == 6 && x.split('-').all(|part| part.parse::<u16>().is_ok());
    for (pattern, is_it) in [
        (r"^[0-9]{3}-\d{2}$", &is_number as &dyn Fn(&str) -> bool),
        ("^(ab|cd)/$", &|x| ["ab/", "cd/"].contains(&x)),
        ("qz+$", &|x| x.ends_with('z') && x.trim_end_matches('z').ends_with('q')),
    ] {
        for whole in [false, true] {
            let field = json!({"type": "string", "pattern": pattern, "maxLength": 8});
            let field = if whole { json!({"allOf": [field], "description": "of one"}) } else { field };
            let parameters = of_field(field);
            let must =
                and(ask(parameters.clone(), true, &[]), json!({"tool_choice": "required", "reasoning_effort": "none"}));
            let may = and(ask(parameters, true, &[5]), json!({"parallel_tool_calls": false, "stop_token_ids": [6]}));
            for body in [must, may] {
                let found = arguments(&post(gemma_router(), CHAT, body).await.ok()["choices"][0]);
                let x = found["x"].as_str().unwrap();
                assert!(is_it(x) && x.chars().count() <= 8, "{pattern}: {found}");
            }
        }
    }
}

/// A schema that Gemma's format cannot enforce is enforced as JSON if a call is required.
#[tokio::test(flavor = "multi_thread")]
async fn schemas_beyond_the_form() {
    for (keyword, field) in [
        ("pattern", json!({"type": "string", "pattern": "^a|b$"})),
        ("format", json!({"type": "string", "format": "date"})),
        ("uniqueItems", json!({"type": "array", "uniqueItems": true})),
        ("allOf", json!({"allOf": [{"type": "null"}, {}]})),
    ] {
        let parameters = json!({"type": "object", "properties": {"x": field}, "required": ["x"],
            "additionalProperties": false});
        let refused = post(gemma_router(), CHAT, ask(parameters.clone(), true, &[])).await;
        assert!(refused.text.contains(&format!("`{keyword}`")), "{}", refused.text);
        assert_eq!(refused.refused(), "tools[0].function.strict");
        // The schema of a function that is not strict is not enforced.
        post(gemma_router(), CHAT, and(ask(parameters.clone(), false, &[]), json!({"max_tokens": 2}))).await.ok();
        if keyword == "format" {
            let body = and(ask(parameters, true, &[]), json!({"tool_choice": "required"}));
            let answer = post(gemma_router(), CHAT, body).await.ok();
            let found = arguments(&answer["choices"][0]);
            let date = found["x"].as_str().unwrap();
            assert!(date.len() == 10 && date.split('-').all(|part| part.parse::<u16>().is_ok()), "{found}");
        }
    }
}

/// The raw text of a required call, with its arguments.
async fn required(router: Router, parameters: Value, seed: u64) -> (String, Value) {
    let more = json!({"tool_choice": "required", "reasoning_effort": "none", "seed": seed, "logprobs": true});
    let body = and(ask(parameters, false, &[]), more);
    let choice = post(router, CHAT, body).await.ok()["choices"][0].clone();
    let tokens = choice["logprobs"]["content"].as_array().unwrap().iter();
    (tokens.map(|token| token["token"].as_str().unwrap()).collect(), arguments(&choice))
}

/// Calls of Qwen 3.5 and LFM2 are in the families' own forms, whose values need no quotes or are Python literals.
#[tokio::test(flavor = "multi_thread")]
async fn named_arguments_in_their_forms() {
    let parameters = json!({
        "type": "object",
        "properties": {
            "kind": {"enum": ["\"1\"", "two"]},
            "exact": {"type": "boolean"},
            "count": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 5}, {"type": "null"}]},
            "code": {"$ref": "#/$defs/code"},
        },
        "required": ["kind", "exact", "count", "code"],
        "$defs": {"code": {"type": "string", "pattern": "^[a-c]{2}$"}},
    });
    for seed in 0..4 {
        for (router, begins, ends) in [
            (
                xml_router(),
                "<tool_call>\n<function=f>\n<parameter=kind>\n",
                "\n</parameter>\n</function>\n</tool_call>",
            ),
            (lfm2_router(), "<|tool_call_start|>[f(kind=\"", "\")]<|tool_call_end|>"),
        ] {
            let (text, found) = required(router, parameters.clone(), seed).await;
            assert!(text.starts_with(begins) && text.trim_end().ends_with(ends), "{text}");
            assert!([json!("\"1\""), json!("two")].contains(&found["kind"]) && found["exact"].is_boolean(), "{text}");
            assert!(found["count"].is_null() || (3..=5).contains(&found["count"].as_i64().unwrap()), "{text}");
            let code = found["code"].as_str().unwrap();
            assert!(code.len() == 2 && code.chars().all(|c| "abc".contains(c)), "{text}");
        }
    }
}

/// A text that could be read as another value, or that another part of the schema defines, is written as JSON.
#[tokio::test(flavor = "multi_thread")]
async fn schemas_beyond_named_arguments() {
    let of_field = |field: Value| json!({"type": "object", "properties": {"x": field}, "required": ["x"], "additionalProperties": false});
    for (field, is_valid) in [
        (json!({"enum": ["7", 8]}), (|x| *x == "7" || *x == 8) as fn(&Value) -> bool),
        (json!({"type": ["string", "integer"], "maxLength": 3}), |x| x.is_string() || x.is_i64()),
        (json!({"type": "string", "format": "date"}), |x| x.as_str().unwrap().len() == 10),
    ] {
        let (text, found) = required(xml_router(), of_field(field), 3).await;
        assert!(text.starts_with("<tool_call>\n{\"name\": \"f\"") && is_valid(&found["x"]), "{text}");
    }
    let parameters = and(of_field(json!({"type": "null"})), json!({"minProperties": 1}));
    let (text, _) = required(lfm2_router(), parameters, 3).await;
    assert!(text.starts_with("<|tool_call_start|>[{\"name\": \"f\""), "{text}");
}
