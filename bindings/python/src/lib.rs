//! The extension module `kvant._kvant`: the Rust part of the Python package. `py_src/kvant` has the public interface.

mod codec;
mod dlpack;
mod engine;
mod error;
mod store;

use std::{ffi::OsString, io::Write, path::PathBuf};

use pyo3::prelude::*;

/// Runs the command `kvant` with these arguments, and returns its exit code.
#[pyfunction]
fn run_command(py: Python<'_>, args: Vec<OsString>) -> PyResult<u8> {
    error::run(py, || {
        let is_done = kvant_cli::run(args);
        // Rust flushes at the end of its own `main` only. A closed standard output is not an error.
        let _ = std::io::stdout().flush();
        Ok(u8::from(!is_done))
    })
}

/// Searches these folders for NVIDIA's libraries.
#[pyfunction]
fn search_cuda_libraries(folders: Vec<PathBuf>) {
    kvant::Device::search_cuda_libraries(folders);
}

#[pymodule]
fn _kvant(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("PAGE_TOKENS", codec::DEFAULT_PAGE)?;
    module.add_class::<codec::PyCodec>()?;
    module.add_class::<store::Store>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<engine::Request>()?;
    module.add_class::<engine::RequestEvent>()?;
    module.add_function(wrap_pyfunction!(codec::attend, module)?)?;
    module.add_function(wrap_pyfunction!(run_command, module)?)?;
    module.add_function(wrap_pyfunction!(search_cuda_libraries, module)?)
}
