//! Parts of the command as functions, for the Python package.

use std::ffi::OsString;

use clap::Parser;
pub use kvant_eval::Kv;

use crate::{Cli, Command, serve};
pub use crate::{result::Result, serve::Loaded};

/// Loads a model and starts its engine: `options` are those of `kvant serve`.
///
/// # Errors
/// Invalid options; a model that cannot be loaded, or does not fit.
pub fn engine(options: impl IntoIterator<Item = OsString>) -> Result<Loaded> {
    let args = ["kvant", "serve"].map(OsString::from).into_iter().chain(options);
    let cli = Cli::try_parse_from(args).map_err(|error| {
        // The first paragraph, without the usage of the command.
        let text = error.to_string();
        text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ").to_string()
    })?;
    match cli.command {
        Command::Serve(args) => serve::engine(&args),
        _ => unreachable!("the name of the command is given"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_those_of_the_command() {
        let error = engine(["--max-sequences", "0"].map(OsString::from)).err().unwrap().to_string();
        assert!(error.starts_with("invalid value '0' for '--max-sequences <N>'"), "{error}");
        assert!(!error.contains("Usage"), "{error}");
    }
}
