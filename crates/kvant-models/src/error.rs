//! The error type of the crate.

use std::path::Path;

use kvant::DType;

use crate::untrusted::line;

/// The result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error while loading or running a model.
///
/// Fields can contain text from files, such as tensor names. The message escapes and shortens them with
/// [`untrusted::line`](crate::untrusted::line).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of an operation, the cache or the device.
    #[error(transparent)]
    Kvant(#[from] kvant::Error),
    /// A file does not exist, cannot be read, or has invalid contents.
    #[error("{}: {}", line(path), line(reason))]
    File {
        /// The file.
        path: String,
        /// The reason.
        reason: String,
    },
    /// A key of `config.json` is missing, out of range or of the wrong type.
    #[error("config.json: `{}` must be {}, got {}", line(key), line(expected), line(got))]
    Config {
        /// The key, with the keys of the enclosing objects.
        key: String,
        /// The accepted values, in words.
        expected: String,
        /// The value in the file.
        got: String,
    },
    /// A key of a GGUF file's metadata is missing, out of range or of the wrong type.
    #[error("metadata: `{}` must be {}, got {}", line(key), line(expected), line(got))]
    Metadata {
        /// The key.
        key: String,
        /// The accepted values, in words.
        expected: String,
        /// The value in the file.
        got: String,
    },
    /// The file requires a feature that this crate does not support.
    #[error("{} is not supported: {}", line(what), line(reason))]
    Unsupported {
        /// The feature, e.g. `model_type "llama"`.
        what: String,
        /// The supported values.
        reason: String,
    },
    /// The files contain no drafter.
    #[error("not a drafter: {}", line(reason))]
    NotADrafter {
        /// The reason.
        reason: String,
    },
    /// A drafter was made for another model.
    #[error("the drafter is for another model: its {what} is {}, the model's is {}", line(drafter), line(target))]
    OtherTarget {
        /// The property that differs.
        what: &'static str,
        /// The drafter's.
        drafter: String,
        /// The model's.
        target: String,
    },
    /// A model does not divide among the devices of a group.
    #[error("{count} {what} of layer {layer} do not divide among {ranks} devices: {}", proposal(fits))]
    Indivisible {
        /// The part that does not divide, e.g. `KV heads`.
        what: &'static str,
        /// Their number.
        count: usize,
        /// The first layer with this number.
        layer: usize,
        /// Devices of the group.
        ranks: usize,
        /// Numbers of devices among which the model divides, up to 16.
        fits: Vec<usize>,
    },
    /// The checkpoint lacks a tensor that the configuration requires.
    #[error("the checkpoint has no tensor `{}`", line(name))]
    MissingTensor {
        /// Its full name.
        name: String,
    },
    /// The shape of a tensor does not match the configuration.
    #[error("tensor `{}` must have shape {expected:?}, got {}", line(name), line(&format!("{got:?}")))]
    TensorShape {
        /// Its full name.
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// A tensor has a dtype that cannot be used for its purpose.
    #[error("tensor `{}` must be {expected}, got {}", line(name), line(got))]
    TensorDType {
        /// Its full name.
        name: String,
        /// The accepted dtypes.
        expected: &'static str,
        /// The dtype, as named in the file.
        got: String,
    },
    /// A tensor has an invalid value.
    #[error("tensor `{}` must hold {expected}, got {}", line(name), line(got))]
    TensorValue {
        /// Its full name.
        name: String,
        /// The accepted values.
        expected: &'static str,
        /// The actual value.
        got: String,
    },
    /// An argument is invalid for the model.
    #[error("`{arg}` must be {}, got {}", line(expected), line(got))]
    Argument {
        /// The argument.
        arg: &'static str,
        /// The accepted values, in words.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// No token can be sampled because all logits are NaN. The usual cause is activations that overflow their dtype.
    #[error("the logits of position {position} are NaN: the model's activations overflow {activations}")]
    NotANumber {
        /// The position of the token whose logits are NaN.
        position: usize,
        /// The dtype of activations ([`LoadOptions`](crate::LoadOptions)).
        activations: DType,
    },
    /// No token can be sampled because bias, suppressed tokens or a mask forbid all.
    #[error("no token is allowed at position {position}")]
    NothingAllowed {
        /// The position of the token.
        position: usize,
    },
    /// A chat template is invalid, or rejects a conversation.
    #[error("chat template: {}", line(reason))]
    Template {
        /// The line and the reason, or the template's message.
        reason: String,
    },
    /// The system cannot start a thread for a chat template: it has too many, or too little memory.
    #[error("chat template: no thread: {}", line(reason))]
    NoThread {
        /// The system's message.
        reason: String,
    },
    /// A text exceeds the token limit. It was not tokenised.
    #[error("the text has at least {min_tokens} tokens, the limit is {limit}")]
    TooLong {
        /// Minimum number of tokens that its length implies.
        min_tokens: usize,
        /// Maximum number of tokens.
        limit: usize,
    },
    /// The tokenizer failed.
    #[error("tokenizer: {}", line(reason))]
    Tokenizer {
        /// Its message.
        reason: String,
    },
}

/// The numbers of devices to use instead.
fn proposal(fits: &[usize]) -> String {
    let numbers: Vec<String> = fits.iter().map(usize::to_string).collect();
    match numbers.is_empty() {
        true => "the model runs on one".to_string(),
        false => format!("the model divides among {}", numbers.join(", ")),
    }
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
