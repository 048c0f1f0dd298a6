//! Errors, as clients see them.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use kvant_engine::{Failure, SubmitError};
use kvant_models::untrusted;
use serde_json::{Value, json};

pub(crate) type Result<T, E = ApiError> = std::result::Result<T, E>;

/// An error that is an answer. The outermost layer writes its body in the form of the route: OpenAI's or Anthropic's.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The field of the request that is at fault.
    pub param: Option<String>,
    pub code: Option<&'static str>,
    /// Seconds after which a client can try again.
    pub retry_after: Option<u32>,
}

impl ApiError {
    /// The message can have text of requests and templates: it is escaped and shortened.
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        let message = untrusted::message(&message.into()).into_owned();
        ApiError { status, message, param: None, code: None, retry_after: None }
    }

    /// 400 about one field of the request.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        let param = untrusted::line(&param.into()).into_owned();
        ApiError { param: Some(param), ..ApiError::new(StatusCode::BAD_REQUEST, message) }
    }

    /// 400 for a field, or a value of a field, that this server does not support.
    pub fn unsupported(param: impl Into<String>, what: &str) -> ApiError {
        let param = param.into();
        let message = format!("`{param}` is not supported: {what}");
        ApiError { code: Some("unsupported_parameter"), ..ApiError::field(param, message) }
    }

    /// The error of a request that the engine refuses.
    pub fn of_submit(error: SubmitError, context: usize) -> ApiError {
        match error {
            // OpenAI's words, which clients look for.
            SubmitError::ContextLength { .. } => {
                ApiError::context_length(format!("this model's maximum context length is {context} tokens: {error}"))
            }
            other => other.into(),
        }
    }

    fn context_length(message: String) -> ApiError {
        ApiError { code: Some("context_length_exceeded"), ..ApiError::field("prompt", message) }
    }

    /// The same error where the prompt comes from another field.
    pub fn of_prompt(self, field: &str) -> ApiError {
        if self.param.as_deref() != Some("prompt") {
            return self;
        }
        ApiError {
            message: self.message.replace("`prompt`", &format!("`{field}`")),
            param: Some(field.to_string()),
            ..self
        }
    }

    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 503: the server drains.
    pub fn draining() -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down");
        ApiError { code: Some("draining"), retry_after: Some(5), ..error }
    }

    /// OpenAI's word for the kind of error.
    pub fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// Anthropic's word for the kind of error.
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

    /// The body in OpenAI's form, which is also that of an error in a stream.
    pub fn openai_body(&self) -> Value {
        let (kind, code) = (self.kind(), self.code);
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": code}})
    }

    /// The body in Anthropic's form.
    pub fn anthropic_body(&self, request_id: &str) -> Value {
        let error = json!({"type": self.anthropic_kind(), "message": self.message});
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
            SubmitError::ContextLength { .. } => ApiError::context_length(message),
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
