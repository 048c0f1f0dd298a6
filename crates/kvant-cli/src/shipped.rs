//! Locates a model: a directory or GGUF file, a cached model of the Hugging Face Hub, or the model that ships with
//! kvant.

use std::path::{Path, PathBuf};

use kvant_models::{Files, untrusted::line};

use crate::{
    Result,
    hub::{self, HubName},
};

/// A prompt in the style of the shipped model's training data.
pub const PROMPT: &str = "# Fearless Concurrency\n\n";

/// The files of the requested model, or of the shipped one.
pub fn files(asked: Option<&Path>) -> Result<Files> {
    let Some(path) = asked else { return shipped() };
    let name = line(&path.to_string_lossy()).into_owned();
    if path.try_exists().map_err(|error| format!("{name}: cannot be read: {error}"))? {
        of_path(path)
    } else if let Some(hub_name) = HubName::parse(path) {
        match hub::find(&hub_name)? {
            Some(place) if is_complete(&place) => of_path(&place).map_err(|error| format!("{name}: {error}").into()),
            found => of_path(&download(&hub_name, found)?).map_err(|error| format!("{name}: {error}").into()),
        }
    } else {
        Err(format!("{name}: no such directory or file").into())
    }
}

/// Whether a cached snapshot is complete: an interrupted download has no `config.json` yet.
fn is_complete(place: &Path) -> bool {
    place.is_file()
        || Files::at(place).is_ok_and(|files| files.as_gguf().is_some())
        || place.join("config.json").try_exists().unwrap_or(true)
}

/// Downloads a model that is missing from the cache or incomplete.
#[cfg(feature = "download")]
fn download(name: &HubName, _: Option<PathBuf>) -> Result<PathBuf> {
    let cache = hub::directory().ok_or("no directory for the cache of Hugging Face's models: set HF_HOME")?;
    crate::download::model(name, cache)
}

#[cfg(not(feature = "download"))]
fn download(name: &HubName, found: Option<PathBuf>) -> Result<PathBuf> {
    let hint =
        "`hf download` of the package huggingface_hub fetches it, or a kvant that is built with the feature download";
    found.ok_or_else(|| format!("{name}: neither a path nor in the cache of Hugging Face's models. {hint}").into())
}

/// A checkpoint directory, or a GGUF file.
fn of_path(path: &Path) -> Result<Files> {
    let name = line(&path.to_string_lossy()).into_owned();
    let files = Files::at(path)?;
    let config = path.join("config.json");
    let has_config = || config.try_exists().map_err(|error| format!("{name}/config.json: cannot be read: {error}"));
    if files.as_gguf().is_some() || (path.is_dir() && has_config()?) {
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
