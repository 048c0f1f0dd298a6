//! `/v1/models`.

use std::sync::Arc;

use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::{app::App, body::Json, error::Result};

fn describe(app: &App, name: &str) -> Value {
    json!({
        "id": name, "object": "model", "created": app.started, "owned_by": "kvant",
        "max_model_len": app.engine.context(), "has_chat_template": app.template.is_some(),
        "cache_type": app.engine.options().codecs.to_string(),
    })
}

pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let names = app.options.names.iter().filter(|name| *name != "*");
    let data: Vec<Value> = names.map(|name| describe(&app, name)).collect();
    Json(json!({"object": "list", "data": data}))
}

pub(crate) async fn get(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>> {
    app.model(Some(&name))?;
    Ok(Json(describe(&app, &name)))
}
