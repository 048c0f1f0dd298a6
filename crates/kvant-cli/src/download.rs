//! Downloads a model from the Hugging Face Hub to the cache of Hugging Face's libraries.
//!
//! Files in the cache are kept, and interrupted downloads are resumed. `config.json` is downloaded last: a snapshot
//! that has it is complete.

use std::{env, io::IsTerminal, path::PathBuf};

use hf_hub::{Cache, api::sync::ApiBuilder};

use crate::{hub::HubName, output, result::Result};

/// Maximum attempts per file.
const RETRIES: usize = 5;

/// Downloads the model. Returns the path of its snapshot or GGUF file.
pub fn model(name: &HubName, cache: PathBuf) -> Result<PathBuf> {
    let set = |variable| env::var(variable).ok().filter(|value| !value.is_empty());
    if set("HF_HUB_OFFLINE").is_some_and(|value| !matches!(value.as_str(), "0" | "false" | "no" | "off")) {
        return Err(
            format!("{name}: not in the cache of Hugging Face's models, and HF_HUB_OFFLINE forbids downloads").into()
        );
    }
    let mut builder = ApiBuilder::from_cache(Cache::new(cache))
        .with_retries(RETRIES)
        .with_progress(std::io::stderr().is_terminal())
        .with_user_agent("kvant", env!("CARGO_PKG_VERSION"));
    if let Some(endpoint) = set("HF_ENDPOINT") {
        builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_string());
    }
    if let Some(token) = set("HF_TOKEN") {
        builder = builder.with_token(Some(token));
    }
    let failed = |error: hf_hub::api::sync::ApiError| {
        let hint =
            "Is the name right? Some models require access to be requested on their page, and a token in HF_TOKEN";
        format!("{name}: cannot download: {error}. There is no such path either. {hint}")
    };
    let repository = builder.build().map_err(failed)?.model(name.repository());
    let info = repository.info().map_err(failed)?;
    let files: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
    let chosen = chosen(&files, name.file()).map_err(|reason| format!("{name}: {reason}"))?;
    output::note(&format!("downloading {name}: {} files\n", chosen.len()))?;
    let mut last = PathBuf::new();
    for file in &chosen {
        last = repository.get(file).map_err(failed)?;
    }
    // The first part of a split model names the other parts.
    let is_gguf = last.extension().is_some_and(|kind| kind == "gguf");
    if is_gguf { Ok(last.with_file_name(&chosen[0])) } else { Ok(last.parent().unwrap_or(&last).to_path_buf()) }
}

/// Selects the files that a model needs: a checkpoint, or a GGUF file with its other parts.
fn chosen(files: &[String], asked: Option<&str>) -> std::result::Result<Vec<String>, String> {
    // Subdirectories are skipped: they contain other formats of the model, and their names are untrusted.
    let is_plain = |file: &&String| !file.contains(['/', '\\', ':']) && !file.starts_with('.') && !file.is_empty();
    let mut files: Vec<&str> = files.iter().filter(is_plain).map(String::as_str).collect();
    files.sort_unstable();
    let with = |end: &str| files.iter().copied().filter(|file| file.ends_with(end)).collect::<Vec<_>>();
    let weights = with(".safetensors");
    if asked.is_none() && files.contains(&"config.json") && !weights.is_empty() {
        // Some repositories contain the weights twice, the second time as `consolidated.safetensors`.
        let named: Vec<_> = weights.iter().copied().filter(|file| file.starts_with("model")).collect();
        let mut chosen = if named.is_empty() { weights } else { named };
        chosen.extend(with(".json").into_iter().filter(|&file| file != "config.json"));
        chosen.extend(with(".jinja"));
        chosen.push("config.json");
        return Ok(chosen.into_iter().map(String::from).collect());
    }
    let models = with(".gguf").into_iter().filter(|file| !file.starts_with("mmproj"));
    let first = |file: &&str| part(file).is_none_or(|(_, number)| number == "00001");
    let firsts: Vec<&str> = models.clone().filter(first).collect();
    let model = match (asked, &firsts[..]) {
        (Some(asked), _) if files.contains(&asked) => asked,
        (Some(asked), _) => return Err(format!("has no {asked}; its GGUF models are {}", firsts.join(", "))),
        (None, []) => return Err("has neither a checkpoint in safetensors nor a GGUF model".to_string()),
        (None, [model]) => model,
        (None, many) => {
            return Err(format!("has several GGUF models; add one of them after a slash: {}", many.join(", ")));
        }
    };
    let stem = part(model).map(|(stem, _)| stem);
    let of_model = |file: &&str| *file == model || (stem.is_some() && part(file).map(|(stem, _)| stem) == stem);
    Ok(models.filter(of_model).map(String::from).collect())
}

/// Splits the name of a part, `NAME-00001-of-00003.gguf`, into the model's name and the part.
fn part(file: &str) -> Option<(&str, &str)> {
    let (rest, _) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    rest.rsplit_once('-').filter(|(_, number)| number.len() == 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: &[&str], asked: Option<&str>) -> std::result::Result<Vec<String>, String> {
        chosen(&files.iter().map(|file| file.to_string()).collect::<Vec<_>>(), asked)
    }

    #[test]
    fn checkpoints_end_with_their_configuration() {
        let files = [
            ".gitattributes",
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "original/model.safetensors",
            "../model.safetensors",
            "chat_template.jinja",
            "tokenizer.json",
        ];
        assert_eq!(
            of(&files, None).unwrap(),
            [
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
                "chat_template.jinja",
                "config.json",
            ]
        );
        assert_eq!(of(&["config.json", "weights.safetensors"], None).unwrap(), ["weights.safetensors", "config.json"]);
        assert!(of(&["config.json", "pytorch_model.bin"], None).unwrap_err().contains("neither"));
    }

    #[test]
    fn one_gguf_model_with_all_its_parts() {
        let files = ["a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "mmproj-f16.gguf", "config.json"];
        assert_eq!(of(&files, None).unwrap(), ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]);
        let files = [&files[..], &["b-Q4_K_M.gguf"]].concat();
        let error = of(&files, None).unwrap_err();
        assert!(error.contains("a-00001-of-00002.gguf, b-Q4_K_M.gguf"), "{error}");
        assert_eq!(of(&files, Some("b-Q4_K_M.gguf")).unwrap(), ["b-Q4_K_M.gguf"]);
        assert_eq!(of(&files, Some("a-00002-of-00002.gguf")).unwrap().len(), 2);
        assert!(of(&files, Some("c.gguf")).unwrap_err().contains("b-Q4_K_M.gguf"));
    }
}
