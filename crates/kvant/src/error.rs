//! The one error type of the library.

use crate::{DType, device::DeviceKind};

/// What every fallible function of kvant returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong, with the operation, the argument, what was expected and what came.
///
/// Validation happens before any write: when an operation returns one of these, its outputs are as they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has the wrong number of elements or the wrong dimensions.
    #[error("{op}: `{arg}` must have shape {expected}, got {got:?}")]
    Shape {
        /// The operation that refused.
        op: &'static str,
        /// The argument it refused.
        arg: &'static str,
        /// The shape in the words of the contract, e.g. `[tokens 4, heads 8, head_dim 64]`.
        expected: String,
        /// The shape that came.
        got: Vec<usize>,
    },
    /// A tensor has a dtype that the argument does not accept.
    #[error("{op}: `{arg}` must be {expected}, got {got}")]
    DType {
        /// The operation that refused.
        op: &'static str,
        /// The argument it refused.
        arg: &'static str,
        /// The accepted dtypes.
        expected: &'static str,
        /// The dtype that came.
        got: DType,
    },
    /// A number is outside the range that the argument accepts.
    #[error("{op}: `{arg}` must be {expected}, got {got}")]
    Value {
        /// The operation that refused.
        op: &'static str,
        /// The argument it refused.
        arg: &'static str,
        /// The accepted range in words.
        expected: String,
        /// The value that came.
        got: String,
    },
    /// An index read from a device buffer (position, sequence, token id) is out of range.
    #[error("{op}: `{arg}[{index}]` is {got}, must be below {limit}")]
    OutOfRange {
        /// The operation that refused.
        op: &'static str,
        /// The buffer that holds the index.
        arg: &'static str,
        /// Which element of the buffer.
        index: usize,
        /// The value found there.
        got: u64,
        /// The first value that is too large.
        limit: u64,
    },
    /// A tensor lives on another device than the encoder.
    #[error("{op}: `{arg}` lives on {got}, the encoder is for {expected}")]
    WrongDevice {
        /// The operation that refused.
        op: &'static str,
        /// The argument it refused.
        arg: &'static str,
        /// The encoder's device.
        expected: String,
        /// The tensor's device.
        got: String,
    },
    /// An output overlaps another argument in a way the operation does not allow.
    #[error("{op}: output `{output}` overlaps `{other}` in memory")]
    Overlap {
        /// The operation that refused.
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
        /// The device asked.
        device: &'static str,
        /// Why.
        reason: String,
    },
    /// The device is not available on this machine.
    #[error("device {kind} is not available: {reason}")]
    NoDevice {
        /// The kind of device asked for.
        kind: DeviceKind,
        /// Why it is not there.
        reason: String,
    },
    /// The device's compiler refused a kernel: on Metal and CUDA, when an operation is recorded or captured.
    #[error("{device} does not compile {kernel}: {message}")]
    Compile {
        /// The device.
        device: String,
        /// The kernel file, and the kernel in it where one was asked for.
        kernel: String,
        /// What the compiler said.
        message: String,
    },
    /// The device could not provide the memory; nothing that existed before is lost.
    #[error("out of memory on {device}: {bytes} bytes asked for")]
    OutOfMemory {
        /// The device asked.
        device: String,
        /// The size of the one allocation that failed.
        bytes: usize,
    },
    /// A size does not fit the machine's `usize`.
    #[error("{op}: the size of `{arg}` overflows")]
    Overflow {
        /// The operation that refused.
        op: &'static str,
        /// The argument whose size overflows.
        arg: &'static str,
    },
    /// A sequence has no room for the tokens: its linear layers are full.
    #[error("sequence {sequence}: {tokens} tokens more than its {len} exceed the capacity of {capacity}")]
    CacheFull {
        /// The sequence.
        sequence: usize,
        /// Its length before the call.
        len: usize,
        /// The tokens that were to be appended.
        tokens: usize,
        /// Slots of a linear layer.
        capacity: usize,
    },
    /// The ring no longer holds what the request would need.
    #[error("sequence {sequence}: layer {layer} no longer holds position {needed} (oldest kept: {oldest})")]
    RingOverwritten {
        /// The sequence.
        sequence: usize,
        /// The first layer that lost what is needed.
        layer: usize,
        /// The oldest position that would be needed.
        needed: usize,
        /// The oldest position still held.
        oldest: usize,
    },
    /// A file is not what it claims to be.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Reading or writing a file failed.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The system's answer.
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
