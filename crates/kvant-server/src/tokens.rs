//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    app::{App, tokenized},
    body::Json,
    error::{ApiError, Result},
};

#[derive(Debug, Deserialize)]
pub(crate) struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<String>,
    /// llama.cpp's name of the same.
    content: Option<String>,
    /// Whether the ids begin with that of the beginning of a text. Default: true.
    add_special_tokens: Option<bool>,
    /// llama.cpp's name of the same.
    add_special: Option<bool>,
    return_token_strs: Option<bool>,
}

pub(crate) async fn tokenize(State(app): State<Arc<App>>, Json(request): Json<TokenizeRequest>) -> Result<Json<Value>> {
    app.model(request.model.as_deref())?;
    let text = match (request.prompt, request.content) {
        (Some(text), None) | (None, Some(text)) => text,
        (None, None) => return Err(ApiError::field("prompt", "`prompt` or `content` is needed")),
        (Some(_), Some(_)) => return Err(ApiError::field("content", "`prompt` and `content` exclude each other")),
    };
    let adds_bos = request.add_special_tokens.or(request.add_special).unwrap_or(true);
    let strings = request.return_token_strs.unwrap_or(false);
    let encoded = app.blocking(move |app| -> Result<_> {
        let tokenizer = app.engine.tokenizer();
        let ids = if adds_bos { tokenizer.encode_prompt(&text) } else { tokenizer.encode(&text, false) };
        let ids = tokenized("prompt", ids)?;
        let strings = strings.then(|| ids.iter().map(|&id| app.token_text(id)).collect::<Vec<_>>());
        Ok((ids, strings))
    });
    let (tokens, token_strs) = encoded.await??;
    let (count, max_model_len) = (tokens.len(), app.engine.context());
    Ok(Json(json!({"count": count, "max_model_len": max_model_len, "tokens": tokens, "token_strs": token_strs})))
}

#[derive(Debug, Deserialize)]
pub(crate) struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

/// The answer has the text under both vLLM's and llama.cpp's name.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    Json(request): Json<DetokenizeRequest>,
) -> Result<Json<Value>> {
    app.model(request.model.as_deref())?;
    let decoded = app.blocking(move |app| app.engine.tokenizer().decode_with_special(&request.tokens));
    let text = tokenized("tokens", decoded.await?)?;
    Ok(Json(json!({"prompt": text, "content": text})))
}
