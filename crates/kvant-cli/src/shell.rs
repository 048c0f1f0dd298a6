//! `kvant completions` and `kvant man`: shell completions and manual pages.

use std::path::PathBuf;

use clap::CommandFactory;

use crate::{Cli, Result, output};

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

pub fn completions(args: &CompletionArgs) -> Result {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "kvant", &mut text);
    output::text(&String::from_utf8(text)?)
}

pub fn man(args: &ManArgs) -> Result {
    clap_mangen::generate_to(Cli::command(), &args.directory)
        .map_err(|error| format!("{}: {error}", args.directory.display()).into())
}
