//! Finds clang, and selects options for the processor.

use std::path::PathBuf;
use std::process::Command;

use crate::error::{Error, Result};

/// The versions of clang that the tests have run with, the preferred one first.
const VERSIONS: [&str; 5] = ["19", "18", "20", "21", "22"];

/// Options of every compilation for the processor.
pub(crate) const PROCESSOR: &[&str] = if cfg!(target_arch = "aarch64") {
    // `char` is signed in MSL. Return addresses must not be signed, because they identify places.
    &["-march=armv8.2-a+fp16", "-fsigned-char", "-mbranch-protection=none"]
} else {
    &["-march=x86-64-v3"]
};

/// Options of the plain build for the processor: division by zero does not fault on 64-bit ARM.
pub(crate) const PLAIN: &[&str] =
    if cfg!(target_arch = "aarch64") { &["-fsanitize=integer-divide-by-zero"] } else { &[] };

/// clang, with the arguments of `MSL_HOST_CLANG`.
#[derive(Debug)]
pub(crate) struct Compiler {
    pub program: PathBuf,
    arguments: Vec<String>,
    /// The version with the arguments, which is part of every name in the cache.
    pub version: String,
}

impl Compiler {
    pub fn find() -> Result<Compiler> {
        let mut tried = Vec::new();
        for words in candidates() {
            let Some((program, arguments)) = words.split_first() else { continue };
            if let Some(version) = version(program, arguments) {
                let version = std::iter::once(&version).chain(arguments).cloned().collect::<Vec<_>>().join(" ");
                return Ok(Compiler { program: program.into(), arguments: arguments.to_vec(), version });
            }
            tried.push(words.join(" "));
        }
        Err(Error::NoClang { tried: tried.join(", ") })
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command
    }
}

/// Commands that may be clang: a program and its arguments.
fn candidates() -> Vec<Vec<String>> {
    if let Ok(named) = std::env::var("MSL_HOST_CLANG") {
        return vec![named.split_whitespace().map(String::from).collect()];
    }
    let versioned = VERSIONS.iter().flat_map(|v| [format!("clang++-{v}"), format!("/usr/lib/llvm-{v}/bin/clang++")]);
    versioned.chain(["clang++".into()]).map(|program| vec![program]).collect()
}

/// The first line of `--version`, if it names a known version.
fn version(program: &str, arguments: &[String]) -> Option<String> {
    let output = Command::new(program).args(arguments).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).lines().next()?.to_string();
    let (_, number) = text.split_once("clang version ")?;
    VERSIONS.contains(&number.split('.').next()?).then_some(text)
}
