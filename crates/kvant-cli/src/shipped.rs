//! The model that ships with the project.

use std::path::{Path, PathBuf};

use crate::Result;

const NAME: &str = "rustdoc-11m-4bit";

/// A start in the manner of what the model was trained on.
pub const PROMPT: &str = "# Fearless Concurrency\n\n";

/// The directory of a model: the one asked for, or the shipped one.
pub fn directory(asked: Option<&Path>) -> Result<PathBuf> {
    if let Some(directory) = asked {
        if !directory.is_dir() {
            return Err(format!("{}: no such directory", directory.display()).into());
        }
        if !directory.join("config.json").exists() {
            return Err(format!("{}: not a checkpoint, for it has no config.json", directory.display()).into());
        }
        return Ok(directory.to_path_buf());
    }
    let places = places();
    let found = places.iter().find(|place| place.join("config.json").is_file());
    found.cloned().ok_or_else(|| {
        let places: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
        format!("the model {NAME} is not where it should be ({}): name one with --model", places.join(", ")).into()
    })
}

/// Beside the executable, in the working directory, and in the workspace that this was built from.
fn places() -> Vec<PathBuf> {
    let executable = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.to_path_buf()));
    let here = std::env::current_dir().ok();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map(Path::to_path_buf);
    [executable, here, workspace].into_iter().flatten().map(|place| place.join("models").join(NAME)).collect()
}
