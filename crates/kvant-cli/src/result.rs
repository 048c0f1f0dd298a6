//! The result of every subcommand.

/// The result of every subcommand. Users see only the message, so it must name the remedy.
pub type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;
