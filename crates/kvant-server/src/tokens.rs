//! `/tokenize`, `/detokenize` and `/tokenizer_info`.

use std::sync::Arc;

use axum::extract::{RawQuery, State};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    app::App,
    body::Json,
    error::{ApiError, Result},
    serving::{Serving, bytes_text, tokenized},
};

#[derive(Debug, Deserialize)]
pub(crate) struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<String>,
    /// llama.cpp's name of `prompt`.
    content: Option<String>,
    /// Whether the ids begin with the beginning-of-text token. Default: true for `prompt`, false for `content`, as in
    /// vLLM and llama.cpp.
    add_special_tokens: Option<bool>,
    /// llama.cpp's name of `add_special_tokens`.
    add_special: Option<bool>,
    return_token_strs: Option<bool>,
    /// Whether each token is an object with `id` and `piece`, as in llama.cpp.
    with_pieces: Option<bool>,
}

pub(crate) async fn tokenize(State(app): State<Arc<App>>, Json(request): Json<TokenizeRequest>) -> Result<Json<Value>> {
    let app = Serving::of(&app, request.model.as_deref()).await?;
    let (text, adds_bos) = match (request.prompt, request.content) {
        (Some(text), None) => (text, true),
        (None, Some(text)) => (text, false),
        (None, None) => return Err(ApiError::field("prompt", "`prompt` or `content` is needed")),
        (Some(_), Some(_)) => return Err(ApiError::field("content", "`prompt` and `content` exclude each other")),
    };
    let adds_bos = request.add_special_tokens.or(request.add_special).unwrap_or(adds_bos);
    let strings = request.return_token_strs.unwrap_or(false);
    let pieces = request.with_pieces.unwrap_or(false);
    let encoded = app.encoding(text.len(), move |app| -> Result<_> {
        let tokenizer = app.model.engine.tokenizer();
        let ids = if adds_bos { tokenizer.encode_prompt(&text) } else { tokenizer.encode(&text, false) };
        let ids = tokenized("prompt", ids)?;
        let bytes = |ids: &[u32]| ids.iter().map(|&id| app.token_bytes(id)).collect::<Vec<_>>();
        let bytes = (strings || pieces).then(|| bytes(&ids));
        Ok((ids, bytes))
    });
    let (tokens, bytes) = encoded.await??;
    let (count, max_model_len) = (tokens.len(), app.model.engine.context());
    let tokens: Vec<Value> = match &bytes {
        Some(bytes) if pieces => {
            tokens.iter().zip(bytes).map(|(id, bytes)| json!({"id": id, "piece": piece(bytes)})).collect()
        }
        _ => tokens.into_iter().map(Value::from).collect(),
    };
    let token_strs = bytes.filter(|_| strings);
    let token_strs: Option<Vec<String>> = token_strs.map(|bytes| bytes.iter().map(|bytes| bytes_text(bytes)).collect());
    Ok(Json(json!({"count": count, "max_model_len": max_model_len, "tokens": tokens, "token_strs": token_strs})))
}

/// A token in llama.cpp's format: its text, or its bytes if they are not UTF-8.
fn piece(bytes: &[u8]) -> Value {
    std::str::from_utf8(bytes).map_or_else(|_| json!(bytes), Value::from)
}

#[derive(Debug, Deserialize)]
pub(crate) struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

/// Returns the text under both vLLM's and llama.cpp's name.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    Json(request): Json<DetokenizeRequest>,
) -> Result<Json<Value>> {
    let app = Serving::of(&app, request.model.as_deref()).await?;
    let decoded = app.blocking(move |app| {
        let tokenizer = app.model.engine.tokenizer();
        // If invalid ids were skipped, the client would not notice that text is missing.
        if let Some((index, &id)) = request.tokens.iter().enumerate().find(|&(_, &id)| !tokenizer.has_token(id)) {
            return Err(unknown(index, id, tokenizer.vocab_size()));
        }
        tokenized("tokens", tokenizer.decode_with_special(&request.tokens))
    });
    let text = decoded.await??;
    Ok(Json(json!({"prompt": text, "content": text})))
}

/// 400 for an id that is not in the vocabulary.
fn unknown(index: usize, id: u32, vocabulary: usize) -> ApiError {
    let field = format!("tokens[{index}]");
    let message = format!("`{field}` must be the id of a token, below the vocabulary's {vocabulary}, got {id}");
    ApiError::field(field, message)
}

/// Facts for clients that make prompts of ids. The query can name the model, as in `?model=NAME`.
pub(crate) async fn info(State(app): State<Arc<App>>, RawQuery(query): RawQuery) -> Result<Json<Value>> {
    let query = query.unwrap_or_default();
    let asked = form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "model").map(|(_, value)| value);
    let app = Serving::of(&app, asked.as_deref()).await?;
    let tokenizer = app.model.engine.tokenizer();
    let name = |id: Option<u32>| id.map(|id| app.token_text(id));
    Ok(Json(json!({
        "bos_token": name(tokenizer.bos()), "eos_token": name(tokenizer.eos_token()),
        "vocab_size": tokenizer.vocab_size(), "model_max_length": app.model.engine.context(),
    })))
}
