//! Routes by which routers learn the state of a worker, with SGLang's names: `/v1/loads`, `/server_info`,
//! `/model_info`, `/flush_cache`.

use std::sync::Arc;

use axum::extract::State;
use kvant_engine::EngineStats;
use serde_json::{Value, json};

use crate::{
    app::App,
    blocking::blocking,
    body::Json,
    error::Result,
    ids::now,
    models::{Known, Seen},
};

/// The current load of the loaded models together, as the load of one data-parallel rank.
pub(crate) async fn loads(State(app): State<Arc<App>>) -> Json<Value> {
    let stats: Vec<EngineStats> = app.models.seen().into_iter().filter_map(|(_, seen)| seen.stats).collect();
    let sum = |value: fn(&EngineStats) -> usize| stats.iter().map(value).fold(0, usize::saturating_add);
    let share = |part: usize, whole: usize| part as f64 / (whole as f64).max(1.0);
    let (running, waiting) = (sum(|stats| stats.running), sum(|stats| stats.waiting));
    let (tokens, used) = (sum(max_tokens), sum(used_tokens));
    let (queries, hits) = (sum(|stats| stats.prefix_queries as usize), sum(|stats| stats.prefix_hits as usize));
    let max_running = sum(|stats| stats.max_running);
    let load = json!({
        "dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting, "num_total_reqs": running + waiting,
        "num_used_tokens": used, "max_total_num_tokens": tokens, "token_usage": share(used, tokens),
        "cache_hit_rate": share(hits, queries), "utilization": share(running, max_running),
        "max_running_requests": max_running,
    });
    let timestamp = jiff::Timestamp::from_second(now() as i64).map(|time| time.to_string()).unwrap_or_default();
    let version = env!("CARGO_PKG_VERSION");
    Json(json!({"timestamp": timestamp, "version": version, "dp_rank_count": 1, "loads": [load]}))
}

/// Tokens of one text that fill all pages.
fn max_tokens(stats: &EngineStats) -> usize {
    stats.pages.saturating_mul(stats.page_tokens)
}

/// Tokens that requests use, estimated from the bytes of their pages.
fn used_tokens(stats: &EngineStats) -> usize {
    (max_tokens(stats) as f64 * stats.requests_used as f64 / (stats.pages_bytes as f64).max(1.0)) as usize
}

/// Facts about the server and its first model.
pub(crate) async fn server_info(State(app): State<Arc<App>>) -> Json<Value> {
    let (known, Seen { stats, .. }) = first(&app);
    let stats = stats.unwrap_or_default();
    Json(json!({
        "model_path": known.name(), "served_model_name": known.name(), "version": env!("CARGO_PKG_VERSION"),
        "tp_size": 1, "dp_size": 1, "pp_size": 1, "is_embedding": false, "disaggregation_mode": "null",
        "context_length": known.facts.context, "page_size": stats.page_tokens,
        "max_total_num_tokens": max_tokens(&stats), "max_running_requests": stats.max_running,
    }))
}

/// Facts about the first model.
pub(crate) async fn model_info(State(app): State<Arc<App>>) -> Json<Value> {
    let (known, _) = first(&app);
    Json(json!({
        "model_path": known.name(), "tokenizer_path": known.name(), "is_generation": true,
        "has_image_understanding": false, "has_audio_understanding": false,
    }))
}

/// The first model. A catalog is never empty.
fn first(app: &App) -> (Arc<Known>, Seen) {
    app.models.seen().swap_remove(0)
}

/// Removes the cached prefixes of all loaded models. Running requests keep their pages.
pub(crate) async fn flush_cache(State(app): State<Arc<App>>) -> Result<Json<Value>> {
    let models = Arc::clone(&app.models);
    blocking(move || models.clear_prefixes()).await?;
    Ok(Json(json!({"status": "ok"})))
}
