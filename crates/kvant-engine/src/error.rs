//! Errors of requests that are not admitted.

/// The reason why a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The engine already has its maximum number of running and waiting requests. Try again later.
    #[error("the queue is full: {limit} requests run or wait")]
    Busy {
        /// Maximum requests that run or wait.
        limit: usize,
    },
    /// The engine is draining and accepts no requests.
    #[error("the engine is shutting down")]
    Draining,
    /// The engine has failed.
    #[error("the engine has failed: {reason}")]
    Unhealthy {
        /// The reason.
        reason: String,
    },
    /// The system cannot start a thread for the request. Try again later.
    #[error("the system cannot start a thread for the request: {reason}")]
    NoThread {
        /// The system's reason.
        reason: String,
    },
    /// The prompt exceeds the context.
    #[error("`prompt` must be at most {limit} tokens, got {got} tokens")]
    ContextLength {
        /// Maximum tokens of this request's prompt.
        limit: usize,
        /// The tokens of the prompt.
        got: usize,
    },
    /// A field of the request is invalid.
    #[error("`{field}` must be {expected}, got {got}")]
    Invalid {
        /// The field of [`EngineRequest`](crate::EngineRequest) or [`Sampling`](kvant_models::Sampling).
        field: &'static str,
        /// The accepted values, in words.
        expected: String,
        /// The actual value.
        got: String,
    },
}

impl SubmitError {
    pub(crate) fn invalid(field: &'static str, expected: impl ToString, got: impl ToString) -> SubmitError {
        SubmitError::Invalid { field, expected: expected.to_string(), got: got.to_string() }
    }
}
