//! The one error type of the crate.

use std::path::Path;

use kvant::DType;

/// What every fallible function of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong between a directory of files and a token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation, the cache or the device refused.
    #[error(transparent)]
    Kvant(#[from] kvant::Error),
    /// A file is not there, cannot be read, or is not what it claims to be.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A key of `config.json` is missing, out of range or of the wrong type.
    #[error("config.json: `{key}` must be {expected}, got {got}")]
    Config {
        /// The key, with those of the objects around it.
        key: String,
        /// The accepted values in words.
        expected: String,
        /// What the file says.
        got: String,
    },
    /// The file asks for something that this crate does not do.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// What was asked for, e.g. `model_type "llama"`.
        what: String,
        /// What would be.
        reason: String,
    },
    /// The checkpoint lacks a tensor that the configuration calls for.
    #[error("the checkpoint has no tensor `{name}`")]
    MissingTensor {
        /// Its full name.
        name: String,
    },
    /// A tensor of the checkpoint has other dimensions than the configuration implies.
    #[error("tensor `{name}` must have shape {expected:?}, got {got:?}")]
    TensorShape {
        /// Its full name.
        name: String,
        /// What the configuration implies.
        expected: Vec<usize>,
        /// What the file says.
        got: Vec<usize>,
    },
    /// A tensor of the checkpoint has a dtype that cannot be used in its place.
    #[error("tensor `{name}` must be {expected}, got {got}")]
    TensorDType {
        /// Its full name.
        name: String,
        /// The accepted dtypes.
        expected: &'static str,
        /// The dtype in the file's words.
        got: String,
    },
    /// A tensor of the checkpoint holds a value that makes no sense in its place.
    #[error("tensor `{name}` must hold {expected}, got {got}")]
    TensorValue {
        /// Its full name.
        name: String,
        /// The accepted values.
        expected: &'static str,
        /// The value found.
        got: String,
    },
    /// An argument does not fit the model.
    #[error("`{arg}` must be {expected}, got {got}")]
    Argument {
        /// The argument.
        arg: &'static str,
        /// The accepted values in words.
        expected: String,
        /// What came.
        got: String,
    },
    /// No token can be drawn: all logits are NaN. Activations that leave the range of their dtype end like that.
    #[error("the logits of position {position} are NaN: the model's activations have left the range of {activations}")]
    NotANumber {
        /// The position of the token whose logits they are.
        position: usize,
        /// The dtype of activations ([`LoadOptions`](crate::LoadOptions)).
        activations: DType,
    },
    /// The tokenizer refused.
    #[error("tokenizer: {reason}")]
    Tokenizer {
        /// Its message.
        reason: String,
    },
}

impl Error {
    pub(crate) fn file(path: &Path, reason: impl std::fmt::Display) -> Error {
        Error::File { path: path.display().to_string(), reason: reason.to_string() }
    }

    pub(crate) fn argument(arg: &'static str, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> Error {
        Error::Argument { arg, expected: expected.to_string(), got: got.to_string() }
    }

    pub(crate) fn dtype(name: &str, expected: &'static str, got: DType) -> Error {
        Error::TensorDType { name: name.to_string(), expected, got: got.to_string() }
    }
}
