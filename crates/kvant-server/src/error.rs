//! Errors as clients receive them.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use kvant_engine::{Failure, SubmitError};
use kvant_models::{Error as ModelError, untrusted};
use serde_json::{Value, json};

/// Anthropic's error code for a thread that the server does not keep.
const NO_THREADS: &str = "thread_unsupported_request";
/// OpenAI's error code for a text that exceeds the context.
const CONTEXT_LENGTH: &str = "context_length_exceeded";

pub(crate) type Result<T, E = ApiError> = std::result::Result<T, E>;

/// An error response. The outermost layer writes its body in the format of the route: OpenAI's or Anthropic's.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The invalid field of the request.
    pub param: Option<String>,
    pub code: Option<&'static str>,
    /// Seconds after which a client can retry.
    pub retry_after: Option<u32>,
}

impl ApiError {
    /// Creates an error. The message is escaped and shortened, as it can contain text of requests and templates.
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        let message = untrusted::message(&message.into()).into_owned();
        ApiError { status, message, param: None, code: None, retry_after: None }
    }

    /// 400 for an invalid field.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        let param = untrusted::line(&param.into()).into_owned();
        ApiError { param: Some(param), ..ApiError::new(StatusCode::BAD_REQUEST, message) }
    }

    /// 400 for a field, or the value of a field, that this server does not support.
    pub fn unsupported(param: impl Into<String>, what: &str) -> ApiError {
        let param = param.into();
        let message = format!("`{param}` is not supported: {what}");
        ApiError { code: Some("unsupported_parameter"), ..ApiError::field(param, message) }
    }

    /// 400 for a thread that the server does not keep. Anthropic's clients then send the complete conversation.
    pub fn no_threads() -> ApiError {
        let error = ApiError::unsupported("thread", "the server keeps no messages: send all of them");
        ApiError { code: Some(NO_THREADS), ..error }
    }

    /// The error for a request that the engine rejects.
    pub fn of_submit(error: SubmitError, context: usize) -> ApiError {
        match error {
            SubmitError::ContextLength { got, .. } => ApiError::context_length("prompt", context, &got.to_string()),
            other => other.into(),
        }
    }

    /// 400 for a field with too many tokens, in OpenAI's wording, which clients recognise.
    pub fn context_length(field: &str, context: usize, tokens: &str) -> ApiError {
        let message = format!(
            "This model's maximum context length is {context} tokens. However, your {field} resulted in {tokens} \
             tokens. Please reduce the length of the {field}."
        );
        ApiError { code: Some(CONTEXT_LENGTH), ..ApiError::field(field, message) }
    }

    /// 400 for a prompt that does not fit into the KV pages of the server.
    pub fn out_of_pages(tokens: usize) -> ApiError {
        let message = format!(
            "a prompt of {tokens} tokens does not fit into the server's KV pages: start the server with more --memory, \
             or send a shorter prompt"
        );
        ApiError { code: Some(CONTEXT_LENGTH), ..ApiError::field("prompt", message) }
    }

    /// 503 if the machine lacks a resource.
    pub fn short_of(message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message);
        ApiError { code: Some("overloaded"), retry_after: Some(1), ..error }
    }

    /// The error for a text that cannot be tokenised.
    pub fn of_text(field: &str, error: &ModelError) -> ApiError {
        match error {
            ModelError::TooLong { min_tokens, limit } => {
                ApiError::context_length(field, *limit, &format!("at least {min_tokens}"))
            }
            ModelError::NoThread { .. } => ApiError::short_of(error.to_string()),
            error => ApiError::field(field, format!("`{field}`: {error}")),
        }
    }

    /// Names `field` in an error about the prompt.
    pub fn of_prompt(self, field: &str) -> ApiError {
        self.renamed("prompt", field)
    }

    /// Renames the field of an error to the name that the client uses.
    pub fn renamed(self, from: &str, to: &str) -> ApiError {
        if self.param.as_deref() != Some(from) {
            return self;
        }
        let message = self.message.replace(&format!("`{from}`"), &format!("`{to}`"));
        let message = message.replace(&format!("your {from} "), &format!("your {to} "));
        let message = message.replace(&format!("of the {from}."), &format!("of the {to}."));
        ApiError { message, param: Some(to.to_string()), ..self }
    }

    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 503 during shutdown.
    pub fn draining() -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down");
        ApiError { code: Some("draining"), retry_after: Some(5), ..error }
    }

    /// OpenAI's type of the error.
    pub fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// Anthropic's type of the error.
    fn anthropic_kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// The body in OpenAI's format, also used for an error within a stream.
    pub fn openai_body(&self) -> Value {
        let (kind, code) = (self.kind(), self.code);
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": code}})
    }

    /// The body in Ollama's format.
    pub fn ollama_body(&self) -> Value {
        json!({"error": self.message})
    }

    /// The body in Anthropic's format.
    pub fn anthropic_body(&self, request_id: &str) -> Value {
        // Anthropic's wording, which makes its clients shorten the conversation.
        let is_too_long = self.code == Some(CONTEXT_LENGTH);
        let begin = if is_too_long { "prompt is too long: " } else { "" };
        let mut error = json!({"type": self.anthropic_kind(), "message": format!("{begin}{}", self.message)});
        if self.code == Some(NO_THREADS) {
            error["details"] = json!({"error_code": NO_THREADS, "unsupported": ["thread"]});
        }
        json!({"type": "error", "error": error, "request_id": request_id})
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        let message = error.to_string();
        match error {
            SubmitError::Busy { .. } => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, message);
                ApiError { code: Some("queue_full"), retry_after: Some(1), ..error }
            }
            SubmitError::Draining => ApiError::draining(),
            SubmitError::NoThread { .. } => ApiError::short_of(message),
            SubmitError::ContextLength { limit, got } => ApiError::context_length("prompt", limit, &got.to_string()),
            SubmitError::Invalid { field, .. } => ApiError::field(field, message),
            _ => ApiError { code: Some("unhealthy"), ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message) },
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> ApiError {
        match failure {
            Failure::Grammar(_) => ApiError::new(StatusCode::BAD_REQUEST, failure.to_string()),
            _ => ApiError::internal(failure.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_texts() {
        let short = ApiError::of_text("messages", &ModelError::NoThread { reason: "EAGAIN".to_string() });
        assert_eq!((short.status.as_u16(), short.retry_after, short.param), (503, Some(1), None));
        let long = ApiError::of_text("messages", &ModelError::TooLong { min_tokens: 900, limit: 512 });
        assert_eq!((long.status.as_u16(), long.code), (400, Some("context_length_exceeded")));
        assert_eq!(long.param.as_deref(), Some("messages"));
        let prompt = ApiError::of_submit(SubmitError::ContextLength { limit: 511, got: 600 }, 512);
        let input = prompt.clone().of_prompt("input");
        assert_eq!(
            input.message,
            "This model's maximum context length is 512 tokens. However, your input resulted in 600 tokens. Please \
             reduce the length of the input."
        );
        let body = prompt.anthropic_body("req_1");
        assert!(body["error"]["message"].as_str().unwrap().starts_with("prompt is too long: "));
    }
}
