//! The `kvant` command: generates text, serves models, measures cache types, and times operations.
//!
//! Results go to standard output (with `--json`, one JSON object per line), everything else to standard error. An error
//! is one message on standard error and exit code 1.
//!
//! The command is this library's [`run`]; `main.rs` and the Python package call it.

mod args;
mod bench;
mod chat;
mod devices;
mod doctor;
#[cfg(feature = "download")]
mod download;
#[cfg(feature = "serve")]
mod drafts;
mod eval;
mod generate;
#[cfg(feature = "serve")]
mod heap;
mod hub;
mod inspect;
#[cfg(feature = "serve")]
pub mod library;
mod log;
mod logits;
mod memory;
mod output;
mod reply;
mod result;
#[cfg(feature = "serve")]
mod serve;
mod shell;
mod shipped;
mod suggest;
mod terminal;
mod tokens;

use std::{ffi::OsString, io::IsTerminal};

use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;

use result::Result;

/// LLM inference on kvant: a KV cache in f32, f16, bf16 or TurboQuant, and attention over it.
#[derive(Parser)]
#[command(name = "kvant", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Generate(generate::GenerateArgs),
    Chat(chat::ChatArgs),
    Eval(eval::EvalArgs),
    Logits(logits::LogitsArgs),
    #[cfg(feature = "serve")]
    Serve(Box<serve::ServeArgs>),
    Inspect(inspect::InspectArgs),
    Devices(devices::DevicesArgs),
    Doctor(doctor::DoctorArgs),
    #[command(subcommand)]
    Bench(bench::Bench),
    Completions(shell::CompletionArgs),
    Man(shell::ManArgs),
}

/// Runs the command with these arguments, its name first, and returns whether it succeeded. Call it once in a process:
/// it installs a panic hook, a logger and signal handlers.
#[must_use]
pub fn run(args: impl IntoIterator<Item = OsString>) -> bool {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        // Panics that are converted to errors are reported as errors.
        if !kvant_models::Tokenizer::catches_panics() {
            hook(panic);
        }
    }));
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(message) => {
            // Help and version are not errors. If standard output or error is closed, nothing can be reported.
            let _ = message.print();
            return !message.use_stderr();
        }
    };
    let log = log(&cli.command);
    let result = match cli.command {
        Command::Chat(args) => chat::run(&args),
        Command::Completions(args) => shell::completions(&args, Cli::command()),
        Command::Man(args) => shell::man(&args, Cli::command()),
        Command::Generate(args) => generate::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Logits(args) => logits::run(&args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Bench(bench) => bench::run(&bench),
    };
    log.flush();
    match result {
        Ok(()) => true,
        Err(error) if output::is_closed(&*error) => true,
        Err(error) => {
            output::report(&*error);
            false
        }
    }
}

/// Shows warnings of the libraries, such as an unusable GPU or a cache longer than the model's context. A server also
/// logs its requests with times. Returns the writer of the lines.
fn log(command: &Command) -> log::LogWriter {
    let writer = log::LogWriter::new(std::io::stderr());
    let lines = writer.clone();
    let log = tracing_subscriber::fmt()
        .with_writer(move || lines.clone())
        // Errors of the subscriber would go to standard error, and panic if that is closed.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    match command {
        #[cfg(feature = "serve")]
        Command::Serve(args) => {
            let log = log.with_max_level(LevelFilter::from(args.log_level));
            match args.log_format {
                log::LogFormat::Text => log.init(),
                log::LogFormat::Json => log.json().flatten_event(true).init(),
            }
        }
        _ => log.with_max_level(LevelFilter::WARN).without_time().init(),
    }
    writer
}
