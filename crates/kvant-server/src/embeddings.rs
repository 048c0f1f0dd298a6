//! `/v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`.

use std::{sync::Arc, time::Instant};

use axum::{Extension, extract::State, http::HeaderMap, http::StatusCode};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use futures_util::{StreamExt, TryStreamExt, stream};
use kvant_engine::{CacheScope, EngineRequest, Event, FinishReason};
use kvant_models::Pooling;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    app::{App, RequestId},
    body::Json,
    error::{ApiError, Result},
    ollama,
    prompts::Prompts,
    serving::Serving,
};

/// Maximum texts of a request, as in OpenAI's API.
const MAX_TEXTS: usize = 2048;
/// Texts of a request that are submitted to the engine at the same time. More would fill its queue.
const AT_ONCE: usize = 16;

#[derive(Debug, Deserialize)]
pub(crate) struct EmbeddingsRequest {
    model: Option<String>,
    input: Prompts,
    encoding_format: Option<Encoding>,
    dimensions: Option<usize>,
    #[expect(dead_code, reason = "has no effect")]
    user: Option<String>,
}

/// The encoding of vectors.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    Float,
    /// f32 numbers, little-endian, in base64.
    Base64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct OllamaEmbed {
    model: Option<String>,
    input: Prompts,
    dimensions: Option<usize>,
    truncate: Option<bool>,
    #[expect(dead_code, reason = "none of them concerns embeddings")]
    options: Option<Value>,
    #[expect(dead_code, reason = "the server decides which models stay")]
    keep_alive: Option<Value>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct OllamaEmbedding {
    model: Option<String>,
    prompt: String,
    #[expect(dead_code, reason = "none of them concerns embeddings")]
    options: Option<Value>,
    #[expect(dead_code, reason = "the server decides which models stay")]
    keep_alive: Option<Value>,
}

pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    Json(request): Json<EmbeddingsRequest>,
) -> Result<Json<Value>> {
    let app = Serving::of(&app, request.model.as_deref()).await?;
    let embedded = embed(&app, &id, &headers, request.input, request.dimensions, "input").await?;
    let encoding = request.encoding_format.unwrap_or(Encoding::Float);
    let data =
        embedded.vectors.iter().enumerate().map(
            |(index, vector)| json!({"object": "embedding", "index": index, "embedding": encoded(vector, encoding)}),
        );
    let (data, tokens) = (data.collect::<Vec<_>>(), embedded.tokens);
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(Json(json!({"object": "list", "data": data, "model": app.name, "usage": usage})))
}

pub(crate) async fn ollama(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    Json(request): Json<OllamaEmbed>,
) -> Result<Json<Value>> {
    let started = Instant::now();
    let app = ollama::serving(&app, request.model.as_deref()).await?;
    let loaded = started.elapsed();
    if request.truncate == Some(true) {
        return Err(ApiError::unsupported("truncate", "a text that is too long is an error"));
    }
    let embedded = embed(&app, &id, &headers, request.input, request.dimensions, "input").await?;
    Ok(Json(json!({
        "model": app.name, "embeddings": embedded.vectors, "prompt_eval_count": embedded.tokens,
        "total_duration": started.elapsed().as_nanos() as u64, "load_duration": loaded.as_nanos() as u64,
    })))
}

/// `/api/embeddings`, the older route: one text.
pub(crate) async fn ollama_one(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    Json(request): Json<OllamaEmbedding>,
) -> Result<Json<Value>> {
    let app = ollama::serving(&app, request.model.as_deref()).await?;
    let embedded = embed(&app, &id, &headers, Prompts::Text(request.prompt), None, "prompt").await?;
    Ok(Json(json!({"embedding": embedded.vectors.first()})))
}

/// The embeddings of one request.
struct Embedded {
    vectors: Vec<Vec<f32>>,
    /// Tokens of all texts.
    tokens: usize,
}

async fn embed(
    app: &Arc<Serving>,
    id: &RequestId,
    headers: &HeaderMap,
    texts: Prompts,
    dimensions: Option<usize>,
    field: &str,
) -> Result<Embedded> {
    let pooling = app.model.pooling.ok_or_else(not_trained)?;
    if !(1..=MAX_TEXTS).contains(&texts.len()) {
        let message = format!("`{field}` must have 1 to {MAX_TEXTS} texts, got {}", texts.len());
        return Err(ApiError::field(field, message));
    }
    let max = app.model.engine.embedding_len();
    let dimensions = dimensions.unwrap_or(max);
    if !(1..=max).contains(&dimensions) {
        let message = format!("`dimensions` must be 1 to {max}, got {dimensions}");
        return Err(ApiError::field("dimensions", message));
    }
    let named = |error: ApiError| error.of_prompt(field);
    let ids = app.encoding(texts.bytes(), move |app| texts.into_ids(app)).await?.map_err(named)?;
    let (tokens, count) = (ids.iter().map(Vec::len).sum(), ids.len());
    let scope = app.scope(headers, None);
    let vectors = stream::iter(ids).map(|ids| one(app, ids, pooling, scope.clone()));
    let vectors: Vec<Vec<f32>> = vectors.buffered(AT_ONCE).try_collect().await.map_err(named)?;
    tracing::info!(request_id = &*id.0, texts = count, prompt_tokens = tokens, "embedded");
    Ok(Embedded { vectors: vectors.into_iter().map(|vector| normalised(vector, dimensions)).collect(), tokens })
}

/// Computes the embedding of one text.
async fn one(app: &Serving, ids: Vec<u32>, pooling: Pooling, scope: CacheScope) -> Result<Vec<f32>> {
    let (engine, tokens) = (&app.model.engine, ids.len());
    let request = EngineRequest::new(ids).embed(pooling).cache(scope);
    let mut responses = engine.submit(request).map_err(|error| ApiError::of_submit(error, engine.context()))?;
    let mut vector = None;
    while let Some(event) = responses.recv_async().await {
        match event {
            Event::Embedding(numbers) => vector = Some(numbers),
            Event::Finished(finished) if finished.reason == FinishReason::Drained => return Err(ApiError::draining()),
            Event::Finished(_) => break,
            Event::Failed(failure) => return Err(failure.into()),
            _ => {}
        }
    }
    vector.ok_or_else(|| ApiError::out_of_pages(tokens))
}

/// Truncates a vector and scales it to length 1.
fn normalised(mut vector: Vec<f32>, dimensions: usize) -> Vec<f32> {
    vector.truncate(dimensions);
    let length = vector.iter().map(|&number| f64::from(number).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|number| *number = (f64::from(*number) / length) as f32);
    }
    vector
}

fn encoded(vector: &[f32], encoding: Encoding) -> Value {
    match encoding {
        Encoding::Float => json!(vector),
        Encoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|number| number.to_le_bytes()).collect();
            json!(BASE64_STANDARD.encode(bytes))
        }
    }
}

fn not_trained() -> ApiError {
    let message = "this model was not trained to embed texts: start the server with --pooling last or mean to use it \
                   anyway";
    ApiError { code: Some("model_not_supported"), ..ApiError::new(StatusCode::NOT_FOUND, message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_have_length_one() {
        assert_eq!(normalised(vec![3.0, 4.0], 2), [0.6, 0.8]);
        assert_eq!(normalised(vec![3.0, 4.0], 1), [1.0]);
        assert_eq!(normalised(vec![0.0, 0.0], 2), [0.0, 0.0]);
        // In f32, the squares overflow.
        let long = normalised(vec![3e30, 4e30], 2);
        assert!((long[0] - 0.6).abs() < 1e-6 && (long[1] - 0.8).abs() < 1e-6, "{long:?}");
    }
}
