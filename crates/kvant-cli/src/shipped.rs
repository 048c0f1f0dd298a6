//! Finds a model: the directory or GGUF file that `--model` names, a name on the Hugging Face Hub that is in the cache
//! on disk, or the files that are part of the command.

use std::path::Path;

use kvant_models::Files;

use crate::{Result, hub};

/// A beginning in the style of the shipped model's training data.
pub const PROMPT: &str = "# Fearless Concurrency\n\n";

/// The files of the requested model, or of the shipped one.
pub fn files(asked: Option<&Path>) -> Result<Files> {
    let Some(path) = asked else { return shipped() };
    let name = path.display();
    if path.exists() {
        of_path(path)
    } else if hub::is_name(path) {
        match hub::find(path)? {
            Some(snapshot) => of_path(&snapshot).map_err(|error| format!("{name}: {error}").into()),
            None => {
                let hint = "`hf download` of the package huggingface_hub fetches it; kvant downloads no models yet";
                Err(format!("{name}: neither a path nor in the cache of Hugging Face's models. {hint}").into())
            }
        }
    } else {
        Err(format!("{name}: no such directory").into())
    }
}

/// The checkpoint of a directory, or a GGUF file.
fn of_path(path: &Path) -> Result<Files> {
    let name = path.display();
    let files = Files::at(path)?;
    if files.as_gguf().is_some() || path.join("config.json").exists() {
        Ok(files)
    } else if path.is_dir() {
        Err(format!("{name}: not a checkpoint: it has no config.json and no GGUF model").into())
    } else {
        Err(format!("{name}: expected the directory of a checkpoint or a .gguf file, got another file").into())
    }
}

#[cfg(feature = "shipped-model")]
fn shipped() -> Result<Files> {
    macro_rules! embedded {
        ($($name:literal)*) => { [$(($name, include_bytes!(concat!("../model/", $name)) as &[u8])),*] };
    }
    static FILES: [(&str, &[u8]); 4] =
        embedded!["config.json" "model.safetensors" "tokenizer.json" "tokenizer_config.json"];
    Ok(Files::embedded(&FILES))
}

#[cfg(not(feature = "shipped-model"))]
fn shipped() -> Result<Files> {
    Err("this kvant was built without a model (feature shipped-model): give the directory of one with --model".into())
}
