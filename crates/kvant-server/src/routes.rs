//! The routes, and what happens to every request: id, key, CORS, errors as bodies, logs.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};

use crate::{
    anthropic,
    app::{App, RequestId},
    body::Json,
    chat, completions, conversation, documents, embeddings,
    error::{ApiError, Result},
    ids::random_id,
    metrics, models, ollama, responses, tokens, workers,
};

/// Maximum length of an id that a client chooses.
const MAX_ID_LENGTH: usize = 128;

/// All routes.
pub(crate) fn router(app: &Arc<App>) -> Router {
    Router::new()
        .route("/", get(documents::page))
        .route("/page/{file}", get(documents::page_file))
        .route("/openapi.json", get(documents::openapi))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/version", get(version))
        .route("/api/version", get(version))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running))
        .route("/api/show", post(ollama::show))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/metrics", get(metrics::get))
        .route("/v1/loads", get(workers::loads))
        .route("/server_info", get(workers::server_info))
        .route("/model_info", get(workers::model_info))
        .route("/flush_cache", post(workers::flush_cache))
        .route("/v1/models", get(models::routes::list))
        .route("/v1/models/{*name}", get(models::routes::get))
        .route("/v1/embeddings", post(embeddings::create))
        .route("/api/embed", post(embeddings::ollama))
        .route("/api/embeddings", post(embeddings::ollama_one))
        .route("/v1/completions", post(completions::create))
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count))
        .route("/apply-template", post(conversation::apply_template))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/tokenizer_info", get(tokens::info))
        .merge(other_models())
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "there is no such route"))
        .method_not_allowed_fallback(async || {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "the route does not have this method")
        })
        .layer(middleware::from_fn_with_state(Arc::clone(app), observe))
        .with_state(Arc::clone(app))
}

/// Routes for models that are trained for tasks other than text generation.
fn other_models() -> Router<Arc<App>> {
    let answer = |what: &'static str| {
        post(async move || {
            let message = format!("this model generates text and was not trained to {what}: it has no such route");
            let error = ApiError::new(StatusCode::NOT_FOUND, message);
            ApiError { code: Some("model_not_supported"), ..error }
        })
    };
    let mut router = Router::new();
    for path in ["/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"] {
        router = router.route(path, answer("score or rank texts"));
    }
    router
}

async fn version() -> Json<serde_json::Value> {
    Json(serde_json::json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn health(State(app): State<Arc<App>>) -> Result<Json<serde_json::Value>> {
    if app.models.has_failed() {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the engine has failed");
        return Err(ApiError { code: Some("unhealthy"), ..error });
    }
    if app.is_draining.load(Ordering::Acquire) {
        return Err(ApiError::draining());
    }
    Ok(Json(serde_json::json!({"status": "ok"})))
}

/// Wraps every request: id, admission, CORS, error body, log.
async fn observe(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = request_id(request.headers());
    request.extensions_mut().insert(id.clone());
    let trace_id = trace_id(request.headers());
    let (method, path) = (request.method().clone(), request.uri().path().to_string());
    let is_preflight = method == Method::OPTIONS && app.options.cors.is_some();
    let is_public = documents::is_page(&path) || matches!(path.as_str(), "/health" | "/ping");

    let mut response = if is_preflight {
        StatusCode::NO_CONTENT.into_response()
    } else {
        match app.admit(request.headers(), is_public) {
            Ok(()) => next.run(request).await,
            Err(error) => error.into_response(),
        }
    };
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let body = match path.as_str() {
            path if path.starts_with("/v1/messages") => error.anthropic_body(&id.0),
            path if path.starts_with("/api/") => error.ollama_body(),
            _ => error.openai_body(),
        };
        *response.body_mut() = body.to_string().into();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id.0) {
        headers.insert("x-request-id", value);
    }
    if let Some(origin) = &app.options.cors {
        allow(headers, origin);
    }
    app.statuses.add(response.status().as_u16());
    let (status, ms) = (response.status().as_u16(), started.elapsed().as_millis() as u64);
    // An unknown path can contain a user's text, for example after a typing error. Known routes cannot.
    let path = if status == 404 { "-" } else { path.as_str() };
    match path {
        // Monitors request these routes every few seconds.
        "/health" | "/ping" | "/metrics" | "/v1/loads" => {
            tracing::debug!(request_id = &*id.0, %method, path, status, ms, "request");
        }
        _ => tracing::info!(request_id = &*id.0, trace_id, %method, path, status, ms, "request"),
    }
    response
}

/// Returns the client's id if it is a plain word, or else a new one.
fn request_id(headers: &HeaderMap) -> RequestId {
    let asked = headers.get("x-request-id").and_then(|id| id.to_str().ok()).filter(|id| {
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
        (1..=MAX_ID_LENGTH).contains(&id.len()) && id.bytes().all(is_plain)
    });
    RequestId(asked.map_or_else(|| random_id("req_").into(), Arc::from))
}

/// The trace to which a request belongs, from W3C's header `traceparent`: version, trace, parent and flags in
/// hexadecimal.
fn trace_id(headers: &HeaderMap) -> Option<String> {
    let parent = headers.get("traceparent")?.to_str().ok()?;
    let trace = parent.split('-').nth(1)?;
    let is_hex = trace.len() == 32 && trace.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    is_hex.then(|| trace.to_string())
}

/// Allows pages of an origin to use the server.
fn allow(headers: &mut HeaderMap, origin: &str) {
    let entries = [
        ("access-control-allow-origin", origin),
        ("access-control-allow-methods", "GET, POST, OPTIONS"),
        (
            "access-control-allow-headers",
            "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta",
        ),
        ("access-control-expose-headers", "x-request-id, retry-after"),
        ("access-control-max-age", "600"),
        ("vary", "origin"),
    ];
    for (name, value) in entries {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(name, value);
        }
    }
}
