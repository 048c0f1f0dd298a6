//! Several models, which are loaded when requests name them.

use std::sync::atomic::{AtomicUsize, Ordering};

use kvant_server::{ModelError, ModelFacts, Models, ServedModel};

use super::*;

/// The size of each model, and of two.
const BYTES: usize = 10;
const ROOM_FOR_TWO: usize = 2 * BYTES;

fn load(context: usize) -> Result<ServedModel, String> {
    let options = EngineOptions::default().context(context).sequences(2);
    let template = ChatTemplate::new(TEMPLATE, [("bos_token", "<bos>")].into_iter().collect()).unwrap();
    Ok(ServedModel::new(engine(options)).template(Some(template)))
}

/// Models a, b and c with contexts of 256, 320 and 384 tokens, and one that cannot be loaded.
fn models(limit: usize) -> Models {
    let mut models = Models::new(limit);
    for (names, context) in [(&["a", "first"][..], 256), (&["b"], 320), (&["org/c"], 384)] {
        let facts = ModelFacts::new(BYTES, context).has_template(true);
        models.add(names.iter().copied(), facts, move || load(context)).unwrap();
    }
    models.add(["bad"], ModelFacts::new(BYTES, 64), || Err::<ServedModel, _>("secret/path: no such file")).unwrap();
    models
}

fn server(limit: usize) -> Server {
    Server::of_models(models(limit), ServerOptions::new("unused")).unwrap()
}

/// The loaded models according to `/v1/models`.
async fn loaded(router: &Router) -> Vec<String> {
    let list = get(router.clone(), "/v1/models").await.ok();
    let loaded = list["data"].as_array().unwrap().iter().filter(|model| model["loaded"] == true);
    loaded.map(|model| model["id"].as_str().unwrap().to_string()).collect()
}

fn complete(router: &Router, model: Option<&str>) -> impl Future<Output = Answer> + use<> {
    let body = json!({"prompt": "# A", "max_tokens": 2, "ignore_eos": true, "model": model});
    post(router.clone(), "/v1/completions", body)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_name_their_model() {
    let router = server(ROOM_FOR_TWO).router();
    assert_eq!(loaded(&router).await, Vec::<String>::new());
    assert_eq!(complete(&router, None).await.ok()["model"], "a");
    assert_eq!(complete(&router, Some("b")).await.ok()["model"], "b");
    assert_eq!(complete(&router, Some("first")).await.ok()["model"], "a");
    assert_eq!(loaded(&router).await, ["a", "first", "b"]);
    // b was requested less recently than a.
    assert_eq!(complete(&router, Some("org/c")).await.ok()["model"], "org/c");
    assert_eq!(loaded(&router).await, ["a", "first", "org/c"]);
    assert_eq!(complete(&router, Some("b")).await.ok()["model"], "b");
    assert_eq!(loaded(&router).await, ["b", "org/c"]);

    let metrics = get(router.clone(), "/metrics").await.text;
    for line in [
        "kvant:model_loaded{model_name=\"a\"} 0\n",
        "kvant:model_loaded{model_name=\"b\"} 1\n",
        "kvant:model_loads_total{model_name=\"b\"} 2\n",
        "kvant:models_bytes 20\n",
        "vllm:generation_tokens_total{model_name=\"b\"} 2\n",
        "vllm:generation_tokens_total{model_name=\"org/c\"} 2\n",
        "http_requests_total{status=\"200\"}",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    assert!(!metrics.contains("vllm:generation_tokens_total{model_name=\"a\"}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_knows_all_models() {
    let router = server(ROOM_FOR_TWO).router();
    let get = |path: &'static str| get(router.clone(), path);
    let post = |path: &'static str, body: Value| post(router.clone(), path, body);
    let models = get("/v1/models").await.ok();
    let described: Vec<_> =
        models["data"].as_array().unwrap().iter().map(|m| (&m["id"], &m["max_model_len"])).collect();
    assert_eq!(described[2..4], [(&json!("b"), &json!(320)), (&json!("org/c"), &json!(384))]);
    assert_eq!(get("/v1/models/org/c").await.ok()["max_model_len"], 384);
    let tags = get("/api/tags").await.ok();
    let names: Vec<_> = tags["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
    assert_eq!(names, ["a", "first", "b", "org/c", "bad"]);
    assert_eq!(post("/api/show", json!({"model": "b:latest"})).await.ok()["model_info"]["kvant.context_length"], 320);
    assert_eq!(get("/api/ps").await.ok()["models"], json!([]));

    assert_eq!(post("/tokenize", json!({"model": "b", "prompt": "x"})).await.ok()["max_model_len"], 320);
    assert_eq!(get("/tokenizer_info?model=org%2Fc").await.ok()["model_max_length"], 384);
    assert_eq!(get("/tokenizer_info").await.ok()["model_max_length"], 256);
    assert_eq!(get("/api/ps").await.ok()["models"][0]["name"], "a");
    let messages = json!([{"role": "user", "content": "x"}]);
    assert!(post("/apply-template", json!({"model": "b", "messages": messages})).await.ok()["prompt"].is_string());
    for (path, more) in [
        ("/v1/chat/completions", json!({})),
        ("/v1/messages", json!({})),
        ("/api/chat", json!({"stream": false, "options": {"num_predict": 1}})),
    ] {
        let asked = and(json!({"model": "b", "messages": messages, "max_tokens": 1}), more);
        let asked = if path.starts_with("/api") { without(asked, "max_tokens") } else { asked };
        assert_eq!(post(path, asked).await.ok()["model"], "b", "{path}");
    }
    let asked = json!({"model": "b", "input": "x", "max_output_tokens": 1});
    assert_eq!(post("/v1/responses", asked).await.ok()["model"], "b");
    for (path, body) in [
        ("/v1/completions", json!({"model": "gpt-4o", "prompt": "x"})),
        ("/tokenize", json!({"model": "gpt-4o", "prompt": "x"})),
        ("/api/show", json!({"model": "gpt-4o"})),
    ] {
        assert_eq!(post(path, body).await.status, StatusCode::NOT_FOUND, "{path}");
    }
    assert_eq!(get("/v1/models/gpt-4o").await.status, StatusCode::NOT_FOUND);
    let unknown = complete(&router, Some("gpt-4o")).await.json();
    assert_eq!(unknown["error"]["code"], "model_not_found");
    assert_eq!(unknown["error"]["type"], "invalid_request_error");
    assert!(unknown["error"]["message"].as_str().unwrap().starts_with("The model `gpt-4o` does not exist"));
}

fn without(mut value: Value, field: &str) -> Value {
    value.as_object_mut().unwrap().remove(field);
    value
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_cannot_be_loaded() {
    let router = server(ROOM_FOR_TWO).router();
    for _ in 0..2 {
        let failed = complete(&router, Some("bad")).await;
        assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(failed.json()["error"]["code"], "model_load_failed");
        // Paths of the machine appear only in the log.
        assert!(!failed.text.contains("secret"), "{}", failed.text);
        assert_eq!(complete(&router, Some("a")).await.ok()["model"], "a");
    }
    assert_eq!(get(router, "/health").await.status, StatusCode::OK);
    let server = server(ROOM_FOR_TWO);
    let results = tokio::task::spawn_blocking(move || [0, 3, 4].map(|index| server.load(index))).await.unwrap();
    assert_eq!(results[0], Ok(()));
    assert!(matches!(&results[1], Err(ModelError::Load { name, .. }) if name == "bad"), "{results:?}");
    assert!(matches!(&results[2], Err(ModelError::Name(_))), "{results:?}");
}

/// A streaming request keeps its model loaded, and a request for another model waits for its end.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_in_use_is_not_put_out() {
    let router = server(BYTES).router();
    let body = json!({"model": "a", "prompt": "# A", "max_tokens": 100, "ignore_eos": true, "stream": true});
    let request = Request::post("/v1/completions").header(header::CONTENT_TYPE, "application/json");
    let stream = router.clone().oneshot(request.body(Body::from(body.to_string())).unwrap()).await.unwrap();
    let other = tokio::spawn(complete(&router, Some("b")));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!other.is_finished());
    let bytes = to_bytes(stream.into_body(), usize::MAX).await.unwrap();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    assert!(text.contains("\"finish_reason\":\"length\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(other.await.unwrap().ok()["model"], "b");

    // A client that disconnects while streaming releases the model.
    let request = Request::post("/v1/completions").header(header::CONTENT_TYPE, "application/json");
    let body = and(body, json!({"model": "b", "max_tokens": 300}));
    let stream = router.clone().oneshot(request.body(Body::from(body.to_string())).unwrap()).await.unwrap();
    drop(stream);
    assert_eq!(complete(&router, Some("a")).await.ok()["model"], "a");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_for_a_bounded_time() {
    let options = ServerOptions::new("unused").load_time(Duration::from_millis(100));
    let mut models = Models::new(BYTES);
    let (loads, count) = (Arc::new(AtomicUsize::new(0)), 5);
    let counted = Arc::clone(&loads);
    let slow = move || {
        counted.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(600));
        load(256)
    };
    models.add(["slow"], ModelFacts::new(BYTES, 256), slow).unwrap();
    let router = Server::of_models(models, options).unwrap().router();
    let late: Vec<_> = (0..count).map(|_| tokio::spawn(complete(&router, None))).collect();
    for late in late {
        let late = late.await.unwrap();
        assert_eq!(late.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(late.json()["error"]["code"], "model_loading");
        assert!(late.headers.contains_key(header::RETRY_AFTER));
    }
    // All clients have disconnected, and the load continues.
    while loaded(&router).await.is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(complete(&router, None).await.ok()["model"], "slow");
    assert_eq!(loads.load(Ordering::SeqCst), 1);
}

/// A failing engine affects only its own requests, and is restarted.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_fails_is_started_again() {
    let (first, engines) = (Arc::new(std::sync::Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
    let (kept, counted) = (Arc::clone(&first), Arc::clone(&engines));
    let mut models = Models::new(ROOM_FOR_TWO);
    let with_handle = move || {
        counted.fetch_add(1, Ordering::SeqCst);
        let model = load(256)?;
        *kept.lock().unwrap() = Some(model.engine.clone());
        Ok::<_, String>(model)
    };
    models.add(["fails"], ModelFacts::new(BYTES, 256), with_handle).unwrap();
    models.add(["b"], ModelFacts::new(BYTES, 320), || load(320)).unwrap();
    let server = Server::of_models(models, ServerOptions::new("unused")).unwrap();
    let router = server.router();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let served = tokio::spawn(server.serve(listener, async move { drop(stopped.await) }));
    complete(&router, None).await.ok();
    kvant_engine::internals::panic(&first.lock().unwrap().take().unwrap());
    while engines.load(Ordering::SeqCst) < 2 {
        let _ = complete(&router, None).await;
        complete(&router, Some("b")).await.ok();
        assert_eq!(get(router.clone(), "/health").await.status, StatusCode::OK);
    }
    complete(&router, None).await.ok();
    // Draining ends all requests.
    stop.send(()).unwrap();
    served.await.unwrap().unwrap();
    for model in ["fails", "b"] {
        assert_eq!(complete(&router, Some(model)).await.status, StatusCode::SERVICE_UNAVAILABLE);
    }
    assert_eq!(get(router, "/health").await.status, StatusCode::SERVICE_UNAVAILABLE);
}

/// Models that appear are found when they are asked for by name or in a list, by one search a second.
#[tokio::test(flavor = "multi_thread")]
async fn models_appear() {
    let (searches, known) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(1)));
    let (counted, count) = (Arc::clone(&searches), Arc::clone(&known));
    let mut models = Models::new(ROOM_FOR_TWO);
    models.search(move |models| {
        counted.fetch_add(1, Ordering::SeqCst);
        for name in &["a", "b", "c"][..count.load(Ordering::SeqCst)] {
            // Names that are taken stay as they are.
            let _ = models.add([*name], ModelFacts::new(BYTES, 256), || load(256));
        }
    });
    let router = Server::of_models(models, ServerOptions::new("unused")).unwrap().router();
    assert_eq!(searches.load(Ordering::SeqCst), 1);
    complete(&router, Some("a")).await.ok();
    complete(&router, None).await.ok();
    assert_eq!(searches.load(Ordering::SeqCst), 1, "a known name needs no search");
    known.store(2, Ordering::SeqCst);
    // Requests at the same time wait for one search.
    let asked: Vec<_> = (0..8).map(|_| tokio::spawn(complete(&router, Some("b")))).collect();
    for answer in asked {
        assert_eq!(answer.await.unwrap().ok()["model"], "b");
    }
    assert_eq!(searches.load(Ordering::SeqCst), 2);
    known.store(3, Ordering::SeqCst);
    let listed = async |name: &str| {
        let list = get(router.clone(), "/v1/models").await.ok();
        list["data"].as_array().unwrap().iter().any(|model| model["id"] == name)
    };
    while !listed("c").await {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(searches.load(Ordering::SeqCst), 3);
    assert_eq!(complete(&router, Some("c")).await.ok()["model"], "c");
    assert_eq!(loaded(&router).await.len(), 2);
    assert_eq!(complete(&router, Some("d")).await.status, StatusCode::NOT_FOUND);
    assert!(get(router, "/metrics").await.text.contains("model_name=\"c\""));
}

#[tokio::test]
async fn names_and_sizes_are_checked() {
    let mut models = Models::new(BYTES);
    let add = |models: &mut Models, names: &[&str], bytes| {
        models.add(names.iter().copied(), ModelFacts::new(bytes, 64), || load(64))
    };
    assert_eq!(add(&mut models, &["a", "*"], BYTES), Ok(()));
    assert_eq!(add(&mut models, &["b", "a"], BYTES), Err(ModelError::Name("a".to_string())));
    assert_eq!(add(&mut models, &[], BYTES), Err(ModelError::Name(String::new())));
    let size = ModelError::Size { bytes: BYTES + 1, limit: BYTES };
    assert_eq!(add(&mut models, &["b"], BYTES + 1), Err(size));
    let router = Server::of_models(models, ServerOptions::new("unused")).unwrap().router();
    assert_eq!(get(router.clone(), "/v1/models").await.ok()["data"].as_array().unwrap().len(), 1);
    // `*` accepts any name.
    assert_eq!(get(router, "/v1/models/gpt-4o").await.status, StatusCode::OK);
    assert!(Server::of_models(Models::new(1), ServerOptions::new("unused")).is_err());
}
