//! Log probabilities as JSON.

use kvant_models::TokenLogprobs;
use serde_json::{Value, json};

use crate::serving::{Serving, bytes_text};

/// Minimum log probability in responses: JSON has no infinity.
const MIN_LOGPROB: f32 = -9999.0;

/// A log probability as a number.
pub(crate) fn number(logprob: f32) -> Value {
    // NaN becomes the minimum: `max` returns the other operand.
    Value::from(f64::from(logprob.max(MIN_LOGPROB)))
}

/// The log probabilities of a token in the format of chat completions.
pub(crate) fn of_token(app: &Serving, token: &TokenLogprobs) -> Value {
    let mut value = entry(app, token.id, token.logprob);
    value["top_logprobs"] = token.top.iter().map(|&(id, logprob)| entry(app, id, logprob)).collect();
    value
}

fn entry(app: &Serving, id: u32, logprob: f32) -> Value {
    let bytes = app.token_bytes(id);
    json!({"token": bytes_text(&bytes), "logprob": number(logprob), "bytes": bytes})
}
