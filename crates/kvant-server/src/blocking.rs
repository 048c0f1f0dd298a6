//! Work that takes long.

use crate::error::{ApiError, Result};

/// Runs long work on a thread of its own. The runtime's pool of blocking threads would let the work wait forever if the
/// system refuses new threads.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (sender, result) = tokio::sync::oneshot::channel();
    let thread = std::thread::Builder::new().name("kvant-request".to_string());
    // Sending fails if the client has disconnected.
    let started = thread.spawn(move || drop(sender.send(work())));
    started
        .map_err(|error| ApiError::short_of(format!("the system cannot start a thread for the request: {error}")))?;
    result.await.map_err(|_| ApiError::internal("a thread of the server panicked"))
}
