//! `kvant completions` and `kvant man`: shell completions and manual pages.

use std::path::PathBuf;

use clap::Command;

use crate::{output, result::Result};

/// Print the completions of a shell
#[derive(clap::Args)]
pub struct CompletionArgs {
    /// The shell
    shell: clap_complete::Shell,
}

/// Write the manual pages to a directory
#[derive(clap::Args)]
pub struct ManArgs {
    /// The directory, which must exist
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Prints the completions of `command`.
pub fn completions(args: &CompletionArgs, mut command: Command) -> Result {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "kvant", &mut text);
    output::text(&String::from_utf8(text)?)
}

/// Writes the manual pages of `command`.
pub fn man(args: &ManArgs, command: Command) -> Result {
    clap_mangen::generate_to(command, &args.directory)
        .map_err(|error| format!("{}: {error}", args.directory.display()).into())
}
