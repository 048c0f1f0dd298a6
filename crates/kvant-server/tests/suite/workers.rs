//! Routes, fields and metrics by which routers use a server as a worker.

use super::*;

/// The value of a metric, whose labels must be exactly these.
fn metric(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name}: {text}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn load_and_facts() {
    let engine = engine(EngineOptions::default().context(512).sequences(3));
    let router = Server::new(engine.clone(), None, ServerOptions::new(NAME)).router();
    post(router.clone(), "/v1/completions", json!({"prompt": "# Vec\n".repeat(60), "max_tokens": 2})).await.ok();
    until(&engine, "an idle engine", |stats| stats.running == 0).await;

    let EngineStats { pages, page_tokens, pages_used, .. } = engine.stats();
    assert!(pages_used > 0, "the prompt's pages are cached");
    // Room for three texts of 512 tokens, in pages of 64, and for the windows of their layers.
    assert!(page_tokens == 64 && (24..400).contains(&pages), "{pages} pages of {page_tokens}");
    let loads = get(router.clone(), "/v1/loads").await.ok();
    assert_eq!(loads["dp_rank_count"], 1);
    let load = &loads["loads"][0];
    assert_eq!((&load["num_running_reqs"], &load["num_waiting_reqs"]), (&json!(0), &json!(0)));
    assert_eq!(load["max_total_num_tokens"], pages * page_tokens);
    assert_eq!((&load["token_usage"], &load["max_running_requests"]), (&json!(0.0), &json!(3)));
    let info = get(router.clone(), "/server_info").await.ok();
    assert_eq!((&info["served_model_name"], &info["context_length"]), (&json!(NAME), &json!(512)));
    assert_eq!((&info["page_size"], &info["dp_size"]), (&json!(64), &json!(1)));
    assert_eq!(get(router.clone(), "/model_info").await.ok()["is_generation"], true);

    // Cached prefixes do not count as use.
    let metrics = get(router, "/metrics").await.text;
    let label = format!("model_name=\"{NAME}\"");
    assert_eq!(metric(&metrics, &format!("vllm:kv_cache_usage_perc{{{label}}}")), 0.0);
    assert!(metric(&metrics, &format!("kvant:kv_cache_used_bytes{{{label}}}")) > 0.0);
    let info = format!("vllm:cache_config_info{{{label},block_size=\"64\",num_gpu_blocks=\"{pages}\"}}");
    assert_eq!(metric(&metrics, &info), 1.0);
}

/// Verified drafts are counted per request, in whole and streamed answers, and for the server.
#[tokio::test(flavor = "multi_thread")]
async fn accepted_drafts() {
    let options = EngineOptions::default().context(512).sequences(2).drafts(3).adaptive_drafts(false);
    let router = Server::new(engine(options), None, ServerOptions::new(NAME)).router();
    let list: String = (0..9).map(|bits| format!("- `u{bits}`: an unsigned integer of {bits} bits\n")).collect();
    let body = json!({"prompt": list + "- `u", "max_tokens": 40, "temperature": 0});
    let usage = post(router.clone(), "/v1/completions", body.clone()).await.ok()["usage"].clone();
    let mut streamed = body;
    (streamed["stream"], streamed["stream_options"]) = (json!(true), json!({"include_usage": true}));
    let chunks = post(router.clone(), "/v1/completions", streamed).await.chunks();
    let details = &usage["completion_tokens_details"];
    assert_eq!(&chunks.last().unwrap()["usage"]["completion_tokens_details"], details);
    let [accepted, rejected] = ["accepted", "rejected"]
        .map(|kind| details[format!("{kind}_prediction_tokens")].as_u64().unwrap_or_else(|| panic!("{usage}")) as f64);
    assert!(accepted >= 3.0 && usage["completion_tokens"] == 40, "{usage}");

    let metrics = get(router, "/metrics").await.text;
    let of = |name: &str, labels: &str| {
        metric(&metrics, &format!("vllm:spec_decode_num_{name}_total{{model_name=\"{NAME}\"{labels}}}"))
    };
    assert_eq!(of("draft_tokens", ""), 2.0 * (accepted + rejected));
    assert_eq!(of("accepted_tokens", ""), 2.0 * accepted);
    let at: Vec<f64> = (0..3).map(|index| of("accepted_tokens_per_pos", &format!(",position=\"{index}\""))).collect();
    assert_eq!(at.iter().sum::<f64>(), 2.0 * accepted);
    assert!(of("drafts", "") >= at[0] && at[0] >= at[1] && at[1] >= at[2], "{at:?}");
    assert!(!metrics.contains("position=\"3\""));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flushed_cache_computes_the_prompt_again() {
    let engine = engine(EngineOptions::default().context(512).sequences(2));
    let router = Server::new(engine.clone(), None, ServerOptions::new(NAME)).router();
    let prompt = json!({"prompt": "# Vec\n".repeat(60), "max_tokens": 1});
    let cached = async || {
        let answer = post(router.clone(), "/v1/completions", prompt.clone()).await.ok();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
    };
    assert_eq!(cached().await, 0);
    assert!(cached().await > 0);
    assert_eq!(post(router.clone(), "/flush_cache", json!({})).await.ok(), json!({"status": "ok"}));
    until(&engine, "no pages of requests", |stats| stats.requests_used == 0).await;
    assert_eq!(cached().await, 0);
    assert!(cached().await > 0);
}

/// Bodies as SMG sends them on, and headers of routers.
#[tokio::test(flavor = "multi_thread")]
async fn fields_and_headers_that_routers_add() {
    let added = json!({
        "store": true, "stream": false, "priority": 0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "temperature": 1.0,
    });
    let body = and(json!({"model": NAME, "input": "Vec", "max_output_tokens": 2}), added);
    let request = Request::post("/v1/responses")
        .header(header::CONTENT_TYPE, "application/json")
        .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .header("x-data-parallel-rank", "0");
    let answer = send(chat_router(), request.body(Body::from(body.to_string())).unwrap()).await.ok();
    assert_eq!(answer["temperature"], 1.0);
    // The fields have the meaning of chat completions: a text without choice does not depend on the seed.
    let greedy = and(body, json!({"top_k": 1, "max_output_tokens": 8}));
    let text = async |seed: u64| {
        let answer = post(chat_router(), "/v1/responses", and(greedy.clone(), json!({"seed": seed}))).await.ok();
        answer["output"].clone()[0]["content"][0]["text"].clone()
    };
    assert_eq!(text(1).await, text(2).await);
    for (field, value) in [("top_k", json!(-2)), ("min_p", json!(2.0)), ("repetition_penalty", json!(-1.0))] {
        let wrong = and(greedy.clone(), json!({field: value}));
        let answer = post(chat_router(), "/v1/responses", wrong).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(field)));
    }
}
