//! Errors of the crates as Python's exceptions, with their messages.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

use kvant_engine::{Failure, SubmitError};
use pyo3::{
    PyErr, PyResult, Python,
    exceptions::{PyMemoryError, PyNotImplementedError, PyRuntimeError, PyValueError},
};

/// Runs code of the crates without the interpreter's lock. A panic, which is a bug of kvant, becomes a `RuntimeError`.
pub fn run<T: Send>(py: Python<'_>, work: impl FnOnce() -> PyResult<T> + Send) -> PyResult<T> {
    py.detach(|| catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(&*panic))))
}

fn panicked(panic: &(dyn Any + Send)) -> PyErr {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    PyRuntimeError::new_err(format!("kvant has a bug: {text}"))
}

/// A `ValueError`.
pub fn value(message: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(message.to_string())
}

/// The exception of an error of the library.
pub fn kvant(error: kvant::Error) -> PyErr {
    use kvant::Error::*;
    let message = error.to_string();
    match error {
        OutOfMemory { .. } | OutOfPages { .. } => PyMemoryError::new_err(message),
        Unsupported { .. } => PyNotImplementedError::new_err(message),
        NoDevice { .. } | Compile { .. } | DeviceFault { .. } | NotHeld { .. } => PyRuntimeError::new_err(message),
        _ => PyValueError::new_err(message),
    }
}

/// The exception of an error of a model or its files.
pub fn models(error: kvant_models::Error) -> PyErr {
    match error {
        kvant_models::Error::Kvant(error) => kvant(error),
        error => value(error),
    }
}

/// The exception of an error of the command.
pub fn command(error: Box<dyn std::error::Error>) -> PyErr {
    let error = match error.downcast::<kvant::Error>() {
        Ok(error) => return kvant(*error),
        Err(other) => other,
    };
    match error.downcast::<kvant_models::Error>() {
        Ok(error) => models(*error),
        Err(error) => value(error),
    }
}

/// The exception of a request that is not admitted.
pub fn submit(error: SubmitError) -> PyErr {
    match error {
        SubmitError::ContextLength { .. } | SubmitError::Invalid { .. } => value(error),
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

/// The exception of a request that has failed.
pub fn failure(failure: &Failure) -> PyErr {
    PyRuntimeError::new_err(failure.to_string())
}
