//! The error type of the library.

use crate::{DType, device::DeviceKind};

/// The result of every fallible function of kvant.
pub type Result<T> = std::result::Result<T, Error>;

/// The length at which states are kept, for a message.
fn kept_states(kept: &Option<usize>) -> String {
    kept.map_or("none are kept".to_string(), |kept| format!("they are kept at {kept}"))
}

/// An error, with the operation, the argument, the expected and the actual value.
///
/// Arguments are checked before any write: when an operation returns an error, its outputs are unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has the wrong number of elements or the wrong dimensions.
    #[error("{op}: `{arg}` must have shape {expected}, got {got:?}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// The expected shape, e.g. `[tokens 4, heads 8, head_dim 64]`.
        expected: String,
        /// The actual shape.
        got: Vec<usize>,
    },
    /// A tensor has a dtype that the argument does not accept.
    #[error("{op}: `{arg}` must be {expected}, got {got}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// The accepted dtypes.
        expected: &'static str,
        /// The actual dtype.
        got: DType,
    },
    /// A number is outside the range that the argument accepts.
    #[error("{op}: `{arg}` must be {expected}, got {got}")]
    Value {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// The accepted range, in words.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// An index read from a device buffer (position, sequence, token id) is out of range.
    #[error("{op}: `{arg}[{index}]` is {got}, must be below {limit}")]
    OutOfRange {
        /// The operation.
        op: &'static str,
        /// The buffer that holds the index.
        arg: &'static str,
        /// The element of the buffer.
        index: usize,
        /// The value of the element.
        got: u64,
        /// The smallest value that is too large.
        limit: u64,
    },
    /// A tensor is on another device than the encoder.
    #[error("{op}: `{arg}` must be on {expected}, got {got}")]
    WrongDevice {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// The encoder's device.
        expected: String,
        /// The tensor's device.
        got: String,
    },
    /// An output overlaps another argument in a way that the operation does not allow.
    #[error("{op}: output `{output}` overlaps `{other}` in memory")]
    Overlap {
        /// The operation.
        op: &'static str,
        /// The written argument.
        output: &'static str,
        /// The argument that it overlaps.
        other: &'static str,
    },
    /// The operation exists, but not on this device or not for these parameters.
    #[error("{op} is not supported on {device}: {reason}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// The device.
        device: &'static str,
        /// Why it is not supported.
        reason: String,
    },
    /// The device is not available on this machine.
    #[error("device {kind} is not available: {reason}")]
    NoDevice {
        /// The requested kind of device.
        kind: DeviceKind,
        /// Why it is not available.
        reason: String,
    },
    /// The device's compiler rejected a kernel. Metal and CUDA return this when an operation is recorded or captured.
    #[error("{device} cannot compile {kernel}: {message}")]
    Compile {
        /// The device.
        device: String,
        /// The kernel file, and the name of the kernel in it if one was requested.
        kernel: String,
        /// The compiler's message.
        message: String,
    },
    /// A memory allocation failed. Existing data is unaffected.
    #[error("out of memory on {device}: an allocation of {bytes} bytes failed")]
    OutOfMemory {
        /// The device.
        device: String,
        /// The size of the allocation that failed.
        bytes: usize,
    },
    /// A size does not fit the machine's `usize`.
    #[error("{op}: the size of `{arg}` overflows")]
    Overflow {
        /// The operation.
        op: &'static str,
        /// The argument whose size overflows.
        arg: &'static str,
    },
    /// A step needs more pages than the pool has. Ending or truncating sequences gives pages back.
    #[error("out of pages: {missing} more are needed")]
    OutOfPages {
        /// Missing pages, counted as if all prefixes were evicted.
        missing: usize,
    },
    /// A layer no longer holds a position that the next token would see.
    #[error("position {needed} is no longer held; the oldest is {oldest}")]
    NotHeld {
        /// The oldest position that is needed.
        needed: usize,
        /// The oldest position that is held.
        oldest: usize,
    },
    /// The states of recurrent layers at a length are not kept.
    #[error("no states are kept at {at} tokens; {}", kept_states(.kept))]
    NoStates {
        /// The length at which they are needed.
        at: usize,
        /// The length at which states are kept.
        kept: Option<usize>,
    },
    /// The contents of a file are invalid.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// The defect.
        reason: String,
    },
    /// Reading or writing a file failed.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A device reported a fault.
    #[error("{device}: {reason}")]
    DeviceFault {
        /// The device.
        device: String,
        /// Its message.
        reason: String,
    },
}
