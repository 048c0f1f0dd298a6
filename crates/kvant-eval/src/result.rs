//! The result of every measurement.

/// The result of a measurement. The message of an error is for the user of the command.
pub type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;
