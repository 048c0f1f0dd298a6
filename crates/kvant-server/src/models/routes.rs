//! `/v1/models`.

use std::sync::Arc;

use axum::extract::{Path, State};
use serde_json::{Value, json};

use super::{Known, Seen};
use crate::{app::App, body::Json, error::Result};

fn describe(app: &App, name: &str, known: &Known, seen: &Seen) -> Value {
    json!({
        "id": name, "object": "model", "created": app.started, "owned_by": "kvant",
        "max_model_len": known.facts.context, "has_chat_template": known.facts.has_template,
        "cache_type": known.facts.cache.as_ref().map(ToString::to_string), "loaded": seen.stats.is_some(),
    })
}

pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    // If the search fails, the list has only the models that are known.
    let _ = app.models.search().await;
    let seen = app.models.seen();
    let data = seen.iter().flat_map(|(known, seen)| known.listed().map(|name| describe(&app, name, known, seen)));
    Json(json!({"object": "list", "data": data.collect::<Vec<_>>()}))
}

pub(crate) async fn get(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>> {
    let (index, known) = app.models.find(Some(&name)).await?;
    let (_, seen) = &app.models.seen()[index];
    Ok(Json(describe(&app, &name, &known, seen)))
}
