//! Runs the built command as a user would.

mod bench;
mod chat;
mod devices;
mod doctor;
mod errors;
mod eval;
mod generate;
mod gguf;
mod groups;
mod hub;
mod inspect;
mod logits;
#[cfg(feature = "serve")]
mod serve;
mod untrusted;

use std::{
    io::Write,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

/// A run of the command.
struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Run {
    fn new(output: Output) -> Run {
        let text = |bytes| String::from_utf8(bytes).expect("the command prints UTF-8");
        Run {
            code: output.status.code().expect("no signal ended it"),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    /// Standard output of a successful run.
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}", self.stderr);
        self.stdout
    }

    /// The message of a failed run: exit code 1, a message on standard error, and no other output.
    #[track_caller]
    fn error(self) -> String {
        assert_eq!(self.code, 1, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        assert_eq!(self.stdout, "");
        assert!(self.stderr.starts_with("error: "), "{}", self.stderr);
        for word in ["panicked", "RUST_BACKTRACE", "stack backtrace"] {
            assert!(!self.stderr.contains(word), "{}", self.stderr);
        }
        self.stderr
    }

    /// The JSON objects on standard output, one per line.
    #[track_caller]
    fn json(self) -> Vec<Value> {
        let lines = self.ok();
        assert!(lines.ends_with('\n'));
        lines.lines().map(|line| serde_json::from_str(line).expect("every line is JSON")).collect()
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
    command.args(args).env("RUST_BACKTRACE", "1");
    // The user's cache of models must not affect tests.
    command.env("HF_HUB_CACHE", "no such directory").env("HF_HUB_OFFLINE", "1");
    command
}

fn kvant(args: &[&str]) -> Run {
    Run::new(command(args).stdin(Stdio::null()).output().expect("the command starts"))
}

fn kvant_with_input(args: &[&str], input: &[u8]) -> Run {
    let mut command = command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the command starts");
    // A command that fails early closes its standard input.
    let _ = child.stdin.take().expect("piped").write_all(input);
    Run::new(child.wait_with_output().expect("the command ends"))
}

/// The keys of an object, sorted.
fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[track_caller]
fn assert_keys(value: &Value, expected: &str) {
    let mut expected: Vec<&str> = expected.split_whitespace().collect();
    expected.sort_unstable();
    let mut found = keys(value);
    found.sort_unstable();
    assert_eq!(found, expected);
}

/// The shipped model.
fn shipped() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("model")
}

/// A new directory for one test.
fn scratch(name: &str) -> PathBuf {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).expect("the target directory can be written");
    directory
}

/// A copy of the shipped model that a test may modify.
fn copy_of_the_model(name: &str) -> PathBuf {
    let directory = scratch(name);
    for file in std::fs::read_dir(shipped()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), directory.join(file.file_name())).unwrap();
    }
    directory
}

fn str(path: &std::path::Path) -> &str {
    path.to_str().expect("the path is UTF-8")
}
