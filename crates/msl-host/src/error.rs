//! The error type of the crate.

use std::fmt;
use std::path::PathBuf;

use crate::report::Findings;

/// The result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error between a `.metal` source and its results.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This machine cannot run kernels.
    #[error("msl-host requires Linux on x86-64 with AVX2, FMA and F16C, or on 64-bit ARM with FP16, got {0}")]
    Unsupported(String),
    /// No usable compiler was found.
    #[error(
        "msl-host requires clang++ 18 to 22 and found none (tried {tried}). Install it with `apt-get install clang-19`, \
         or set the environment variable MSL_HOST_CLANG to the command of a clang++ of these versions"
    )]
    NoClang {
        /// The programs that were tried.
        tried: String,
    },
    /// A file operation or a process of the toolchain failed.
    #[error("{what} {path}: {source}")]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The front end, the lint, or clang in either pass rejected the source.
    #[error("{name} does not compile:\n{}", list(.diagnostics))]
    Compile {
        /// The source's name.
        name: String,
        /// The errors, in order; never empty.
        diagnostics: Vec<Diagnostic>,
    },
    /// A compiled library could not be loaded.
    #[error("cannot load {path}: {source}")]
    Load {
        /// The library.
        path: PathBuf,
        /// The loader's error.
        source: libloading::Error,
    },
    /// A launch does not fit its kernel or the limits of Metal.
    #[error("kernel {kernel}: {reason}")]
    Launch {
        /// The requested kernel.
        kernel: String,
        /// The mismatch.
        reason: String,
    },
    /// The system had no memory for a guarded buffer or for the fibers.
    #[error("out of memory for {0}")]
    NoMemory(&'static str),
    /// The kernel ran and had errors.
    #[error("{0}")]
    Findings(Box<Findings>),
}

impl Error {
    /// The findings, if this is [`Error::Findings`].
    pub fn findings(&self) -> Option<&Findings> {
        match self {
            Error::Findings(findings) => Some(findings),
            _ => None,
        }
    }

    pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { what, path, source }
    }
}

/// One error in a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The source or header.
    pub file: String,
    /// The line, counted from 1.
    pub line: u32,
    /// The message.
    pub message: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.message)
    }
}

fn list(diagnostics: &[Diagnostic]) -> String {
    diagnostics.iter().map(|d| format!("  {d}")).collect::<Vec<_>>().join("\n")
}
