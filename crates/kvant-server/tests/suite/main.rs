//! Tests of the routes with the shipped model: in process, and over TCP if connections matter.

mod anthropic;
mod chat;
mod completions;
mod documents;
mod embeddings;
mod errors;
mod fields;
mod lifecycle;
mod models;
mod ollama;
mod own_calls;
mod responses;
mod round_trips;
mod structured;
mod tokens;
mod transfer;
mod untrusted;
#[path = "../../../kvant-engine/tests/words/mod.rs"]
mod words;
mod workers;

use std::{
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderMap, Request, StatusCode, header},
};
use kvant::{CpuOptions, Device};
use kvant_engine::{Engine, EngineOptions, EngineStats};
use kvant_models::{Model, Pooling, Tokenizer, chat::ChatTemplate};
use kvant_server::{Server, ServerOptions};
use serde_json::{Value, json};
use tower::ServiceExt;
use words::{words, words_with};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvant-cli/model");
const NAME: &str = "rustdoc-11m";

/// An engine of the shipped model.
fn engine(options: EngineOptions) -> Engine {
    let device = Device::cpu_with(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let model = Model::load(Path::new(MODEL), &device).unwrap();
    let tokenizer = Tokenizer::load(Path::new(MODEL)).unwrap();
    Engine::start(model, Arc::new(tokenizer), options).unwrap()
}

/// An engine for tests that need no engine of their own. It runs one request at a time without the prefix cache,
/// because the composition of a batch affects the rounding of its texts.
fn shared_engine() -> Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| engine(EngineOptions::default().context(1024).sequences(1).prefix_cache(false))).clone()
}

fn router() -> Router {
    with(ServerOptions::new(NAME))
}

fn with(options: ServerOptions) -> Router {
    Server::new(shared_engine(), None, options).router()
}

/// The routes with the vocabulary of [`words`].
fn words_router() -> Router {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    let start = || {
        let device = Device::cpu_with(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
        let model = Model::load(Path::new(MODEL), &device).unwrap();
        Engine::start(model, Arc::new(words()), EngineOptions::default().context(256).sequences(2)).unwrap()
    };
    Server::new(ENGINE.get_or_init(start).clone(), None, ServerOptions::new(NAME)).router()
}

/// A template for the shipped model, which was not trained for conversations.
const TEMPLATE: &str = "{{ bos_token }}{% for tool in tools or [] %}{{ '# ' + tool.function.name + '\\n' }}{% endfor %}\
    {% for message in messages %}# {{ message.role }}\n\n{{ message.content or '' }}\
    {% for call in message.tool_calls or [] %}{{ call.function.name }}={{ call.function.arguments.x }}{% endfor %}\
    {{ '\\n\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '# assistant\\n\\n' }}{% endif %}\
    {% if enable_thinking %}{{ '<think>\\n' }}{% endif %}";

/// The routes with a chat template and embeddings.
fn chat_router() -> Router {
    let template = ChatTemplate::new(TEMPLATE, [("bos_token", "<bos>")].into_iter().collect()).unwrap();
    let options = ServerOptions::new(NAME).pooling(Some(Pooling::Mean));
    Server::new(shared_engine(), Some(template), options).router()
}

/// A response.
#[derive(Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    text: String,
}

impl Answer {
    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    #[track_caller]
    fn ok(self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        self.json()
    }

    /// The field named by a 400.
    #[track_caller]
    fn refused(self) -> String {
        assert_eq!(self.status, StatusCode::BAD_REQUEST, "{}", self.text);
        self.json()["error"]["param"].as_str().unwrap_or_default().to_string()
    }

    /// The data of the events of a stream.
    #[track_caller]
    fn events(self) -> Vec<String> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        assert_eq!(self.headers[header::CONTENT_TYPE], "text/event-stream");
        let events = self.text.split("\n\n").filter_map(|event| {
            // Simple clients expect the name of an event before its data.
            assert!(!event.lines().skip(1).any(|line| line.starts_with("event: ")), "{event}");
            let line = event.lines().find_map(|line| line.strip_prefix("data: "))?;
            Some(line.to_string())
        });
        events.collect()
    }

    /// The chunks of a stream that ends with `[DONE]`.
    #[track_caller]
    fn chunks(self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"));
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

async fn send(router: Router, request: Request<Body>) -> Answer {
    let response = router.oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.unwrap();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    Answer { status: parts.status, headers: parts.headers, text }
}

async fn get(router: Router, path: &str) -> Answer {
    send(router, Request::get(path).body(Body::empty()).unwrap()).await
}

async fn post(router: Router, path: &str, body: Value) -> Answer {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    send(router, request.body(Body::from(body.to_string())).unwrap()).await
}

/// Merges the fields of `more` into `value`.
fn and(mut value: Value, more: Value) -> Value {
    let fields = value.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    value
}

/// Waits until the engine's stats satisfy a condition.
async fn until(engine: &Engine, what: &str, is_met: impl Fn(&EngineStats) -> bool) {
    for _ in 0..1000 {
        if is_met(&engine.stats()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: {:?}", engine.stats());
}

#[tokio::test(flavor = "multi_thread")]
async fn health_models_and_metrics() {
    assert_eq!(get(router(), "/health").await.ok(), json!({"status": "ok"}));
    let models = get(router(), "/v1/models").await.ok();
    assert_eq!(models["data"][0]["id"], NAME);
    assert_eq!(models["data"][0]["max_model_len"], 1024);
    assert_eq!(get(router(), "/v1/models/rustdoc-11m").await.ok()["id"], NAME);
    assert_eq!(get(router(), "/v1/models/org/other").await.status, StatusCode::NOT_FOUND);

    let before = shared_engine().stats().generated_tokens;
    post(router(), "/v1/completions", json!({"prompt": "# A", "max_tokens": 3, "ignore_eos": true})).await.ok();
    let metrics = get(router(), "/metrics").await;
    assert!(metrics.headers[header::CONTENT_TYPE].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
    let value = |name: &str| -> f64 {
        let line = metrics.text.lines().find(|line| line.starts_with(name) && !line.starts_with('#'));
        line.unwrap_or_else(|| panic!("{name}")).rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(value("vllm:generation_tokens_total") >= before as f64 + 3.0);
    for name in [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:request_success_total",
        "vllm:inter_token_latency_seconds_sum",
    ] {
        assert!(value(name) >= 0.0);
    }
    for name in [
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "vllm:request_prompt_tokens_count",
        "vllm:request_generation_tokens_sum",
        "process_start_time_seconds",
    ] {
        assert!(value(name) >= 1.0, "{name}");
    }
    #[cfg(target_os = "linux")]
    for name in ["process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"] {
        assert!(value(name) > 0.0, "{name}");
    }
    let own = router();
    assert_eq!(get(own.clone(), "/v1/models").await.status, StatusCode::OK);
    assert_eq!(get(own.clone(), "/nothing").await.status, StatusCode::NOT_FOUND);
    let metrics = get(own, "/metrics").await.text;
    for status in ["200", "404"] {
        assert!(metrics.contains(&format!("http_requests_total{{model_name=\"{NAME}\",status=\"{status}\"}} 1\n")));
    }
    // Before the first request.
    let fresh = engine(EngineOptions::default().context(256).sequences(1));
    assert!(fresh.stats().pages_bytes > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_the_model() {
    let ask = |options: ServerOptions, model: &str| {
        let body = json!({"model": model, "prompt": "a", "max_tokens": 1});
        post(with(options), "/v1/completions", body)
    };
    let options = ServerOptions::new(NAME).alias("other");
    assert_eq!(ask(options.clone(), "other").await.ok()["model"], NAME);
    let refused = ask(options.clone(), "gpt-4o").await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
    assert_eq!(ask(options.alias("*"), "gpt-4o").await.ok()["model"], NAME);
}
