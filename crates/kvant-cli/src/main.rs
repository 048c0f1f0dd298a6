//! The `kvant` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    if kvant_cli::run(std::env::args_os()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
