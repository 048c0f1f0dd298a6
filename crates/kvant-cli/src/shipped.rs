//! Finds a model: the directory or GGUF file that `--model` names, or the files that are part of the command.

use std::path::{Component, Path};

use kvant_models::Files;

use crate::Result;

/// A beginning in the style of the shipped model's training data.
pub const PROMPT: &str = "# Fearless Concurrency\n\n";

/// The files of the requested model, or of the shipped one.
pub fn files(asked: Option<&Path>) -> Result<Files> {
    let Some(path) = asked else { return shipped() };
    let name = path.display();
    if path.exists() {
        let files = Files::at(path)?;
        if files.as_gguf().is_some() || path.join("config.json").exists() {
            Ok(files)
        } else if path.is_dir() {
            Err(format!("{name}: not a checkpoint: it has no config.json and no GGUF model").into())
        } else {
            Err(format!("{name}: expected the directory of a checkpoint or a .gguf file, got another file").into())
        }
    } else if is_hub_name(path) {
        let hint = "kvant does not download models yet: download this one and give its directory";
        Err(format!("{name}: no such directory. If this is a name on the Hugging Face Hub: {hint}").into())
    } else {
        Err(format!("{name}: no such directory").into())
    }
}

/// Whether a path that does not exist looks like `organisation/model`. If its first part is a directory, it is a
/// mistyped path.
fn is_hub_name(path: &Path) -> bool {
    let parts: Vec<Component> = path.components().collect();
    let &[Component::Normal(organisation), Component::Normal(_)] = &parts[..] else { return false };
    !Path::new(organisation).exists()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub() {
        assert!(is_hub_name(Path::new("google/gemma-3-1b-it")));
        for path in ["gemma", "/google/gemma", "./google", "../google/gemma", "a/b/c", "src/gemma"] {
            assert!(!is_hub_name(Path::new(path)), "{path}");
        }
    }
}
