//! The one error type of the crate.

use std::fmt;
use std::path::PathBuf;

use crate::report::Findings;

/// What every fallible function of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong between a `.metal` source and its results.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This machine cannot run kernels.
    #[error("msl-host runs kernels on x86-64 Linux with AVX2, FMA and F16C only; this is {0}")]
    Unsupported(String),
    /// No usable compiler.
    #[error(
        "msl-host needs clang++ 19 and found none (tried {tried}). Install it with `apt-get install clang-19`, \
         or name one in the environment variable MSL_HOST_CLANG"
    )]
    NoClang {
        /// The programs that were tried.
        tried: String,
    },
    /// A file or a process of the tool chain failed.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was attempted.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The source was refused: by the front end, by the lint, or by clang in either pass.
    #[error("{name} does not compile:\n{}", list(.diagnostics))]
    Compile {
        /// The source's name.
        name: String,
        /// What is wrong, in order; never empty.
        diagnostics: Vec<Diagnostic>,
    },
    /// A compiled library could not be loaded.
    #[error("cannot load {path}: {source}")]
    Load {
        /// The library.
        path: PathBuf,
        /// What the loader said.
        source: libloading::Error,
    },
    /// A launch does not fit its kernel or the limits of Metal.
    #[error("kernel {kernel}: {reason}")]
    Launch {
        /// The kernel that was asked for.
        kernel: String,
        /// What does not fit.
        reason: String,
    },
    /// The system had no memory for a guarded buffer or for the fibers.
    #[error("no memory for {0}")]
    NoMemory(&'static str),
    /// The kernel ran and did something wrong.
    #[error("{0}")]
    Findings(Box<Findings>),
}

impl Error {
    /// The findings of a run, if that is what this error is.
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

/// One complaint about a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The source or header.
    pub file: String,
    /// Counted from 1.
    pub line: u32,
    /// The complaint itself.
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
