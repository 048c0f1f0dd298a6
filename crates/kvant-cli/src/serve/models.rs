//! A server for several models, named in the command or found in a directory.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use kvant::Device;
use kvant_engine::{Engine, EngineOptions};
use kvant_models::{
    LoadOptions, Model, PoolOptions, Pooling, Tokenizer,
    chat::{ChatTemplate, SpecialTokens},
};
use kvant_server::{ModelFacts, Models, ServedModel, Server, ServerOptions};

use super::{
    args::{ServeArgs, name_of},
    checkpoint,
};
use crate::{
    Result,
    memory::{self, Demand},
    output, shipped,
};

/// Maximum depth of the search for models, as in ORGANISATION/MODEL/FILE.gguf.
const DEPTH: usize = 3;

/// The files and options to load a model.
struct OnDemand {
    path: PathBuf,
    device: Device,
    load: LoadOptions,
    engine: EngineOptions,
    pooling: Option<Pooling>,
    /// The template of the command.
    template: Option<PathBuf>,
}

/// Creates a server for several models. Models named in the command are loaded immediately.
pub fn server(args: &ServeArgs, device: &Device, options: ServerOptions) -> Result<Server> {
    let free = memory::free(device).map_or(usize::MAX, |free| free / 10 * 9);
    let limit = args.memory.map_or(free, |bytes| bytes.0);
    let templates = templates(args)?;
    let mut models = Models::new(limit);
    for (index, path) in args.models.iter().enumerate() {
        let names = match index {
            0 if !args.name.is_empty() => args.name.clone(),
            _ => vec![name_of(path)],
        };
        let template = templates.get(&names[0]).cloned();
        let (source, facts) = source(args, path, template, device, limit)?;
        let added = models.add(names, facts, move || source.load());
        added.map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if let Some(directory) = &args.models_dir {
        // Later searches only warn.
        found(directory)?;
        let directory = ModelsDir {
            path: directory.clone(),
            args: args.clone(),
            templates: templates.clone(),
            device: device.clone(),
            limit,
            left_out: Mutex::default(),
        };
        models.search(move |models| directory.add_new(models));
    }
    if models.names().next().is_none() {
        return Err("--models-dir: no model found".into());
    }
    if let Some(name) = templates.keys().find(|name| models.names().all(|other| other != *name)) {
        return Err(format!("--chat-template: there is no model {name:?}").into());
    }
    let names = models.names().collect::<Vec<_>>().join(", ");
    let _ = output::note(&format!("models: {names}\n"));
    let together = models.bytes().take(args.models.len()).fold(0, usize::saturating_add);
    if together > limit {
        let (together, limit) = (output::bytes(together), output::bytes(limit));
        return Err(format!(
            "--memory: the models take {together} together, and have {limit}: shorten --context, use fewer \
             --max-sequences, or put some of them in a --models-dir, which loads them on demand"
        )
        .into());
    }
    let server = Server::of_models(models, options)?;
    (0..args.models.len()).try_for_each(|index| server.load(index))?;
    Ok(server)
}

/// The files of `--chat-template` by the names of their models.
fn templates(args: &ServeArgs) -> Result<BTreeMap<String, PathBuf>> {
    let mut templates = BTreeMap::new();
    for option in &args.chat_template {
        let Some((name, path)) = option.to_str().and_then(|option| option.split_once('=')) else {
            let got = option.display();
            return Err(format!("--chat-template: expected NAME=FILE with several models, got {got}").into());
        };
        // Errors in a template show at the start. Its tokens are known when the model is loaded.
        checkpoint::template_of_file(Path::new(path), SpecialTokens::default())?;
        if templates.insert(name.to_string(), PathBuf::from(path)).is_some() {
            return Err(format!("--chat-template: {name} has two templates").into());
        }
    }
    Ok(templates)
}

/// The directory of `--models-dir`.
struct ModelsDir {
    path: PathBuf,
    args: ServeArgs,
    templates: BTreeMap<String, PathBuf>,
    device: Device,
    limit: usize,
    /// Models that cannot be served, with the reasons, so that each is reported once.
    left_out: Mutex<BTreeMap<String, String>>,
}

impl ModelsDir {
    /// Adds the models of the directory that are not among those of the server.
    fn add_new(&self, models: &mut Models) {
        let found = found(&self.path).unwrap_or_else(|error| {
            self.warn(&self.path.display().to_string(), &error.to_string());
            Vec::new()
        });
        for (name, path) in found {
            if models.names().any(|known| known == name) {
                continue;
            }
            let added = source(&self.args, &path, self.templates.get(&name).cloned(), &self.device, self.limit)
                .and_then(|(source, facts)| {
                    models.add([name.as_str()], facts, move || source.load()).map_err(Into::into)
                });
            if let Err(error) = added {
                // A bad checkpoint does not prevent the other models from being served.
                self.warn(&name, &error.to_string());
            }
        }
    }

    fn warn(&self, name: &str, reason: &str) {
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        if left_out.insert(name.to_string(), reason.to_string()).as_deref() != Some(reason) {
            tracing::warn!(model = name, reason, "left out");
        }
    }
}

/// Returns a model's loader, and the facts known before it is loaded.
fn source(
    args: &ServeArgs,
    path: &Path,
    template: Option<PathBuf>,
    device: &Device,
    limit: usize,
) -> Result<(OnDemand, ModelFacts)> {
    let files = shipped::files(Some(path))?;
    let kv = args.activations.kv(device, args.kv.as_ref());
    let context = args.context(&files)?;
    let load = args.load_options(device, context);
    let (codecs, sequences) = (kv.codecs.clone(), args.max_sequences);
    let pool = PoolOptions {
        codecs: codecs.clone(),
        sequences,
        longest: context,
        drafts: args.drafts.count(),
        ..PoolOptions::default()
    };
    let demand = Demand { ranks: device.ranks(), pool, load, bytes: None, drafter: None, shorter: "--context" };
    // The pages of one model leave memory for the others.
    let max = limit / (2 * args.models.len().max(2));
    let share = memory::share(&files, &demand, limit, max)?;
    let has_template = template.is_some() || ChatTemplate::load_files(&files)?.is_some();
    let engine = args.engine_options(&files, kv, &load, Some(share.pages))?;
    let facts = ModelFacts::new(share.total, context).has_template(has_template).cache(codecs);
    let pooling = args.pooling(&files);
    Ok((OnDemand { path: path.to_path_buf(), device: device.clone(), load, engine, pooling, template }, facts))
}

impl OnDemand {
    fn load(&self) -> std::result::Result<ServedModel, String> {
        self.try_load().map_err(|error| error.to_string())
    }

    fn try_load(&self) -> Result<ServedModel> {
        let files = shipped::files(Some(&self.path))?;
        let tokenizer = Arc::new(Tokenizer::load_files(&files)?);
        let template = checkpoint::template(self.template.as_deref(), &files, &tokenizer)?;
        let sampling = checkpoint::sampling(&files)?;
        let model = Model::load_files(&files, &self.device, &self.load)?;
        let engine = Engine::start(model, tokenizer, self.engine.clone())?;
        Ok(ServedModel::new(engine).template(template).sampling(sampling).pooling(self.pooling))
    }
}

/// The models of a directory, sorted by name. Names are paths within the directory.
fn found(directory: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut models = Vec::new();
    search(directory, "", DEPTH, &mut models)?;
    models.sort();
    Ok(models)
}

fn search(directory: &Path, prefix: &str, depth: usize, models: &mut Vec<(String, PathBuf)>) -> Result {
    let unreadable = |error| format!("{}: {error}", directory.display());
    for entry in fs::read_dir(directory).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if name.starts_with('.') {
            continue;
        }
        let name = format!("{prefix}{name}");
        if path.join("config.json").is_file() {
            models.push((name, path));
        } else if path.is_dir() && depth > 1 {
            search(&path, &format!("{name}/"), depth - 1, models)?;
        } else if let Some(name) = gguf_name(&name) {
            models.push((name.to_string(), path));
        }
    }
    Ok(())
}

/// The name of a model in a GGUF file. `None` for other files, later parts of a split model, and image encoders.
fn gguf_name(file: &str) -> Option<&str> {
    let name = file.strip_suffix(".gguf")?;
    if file.rsplit('/').next().is_some_and(|name| name.starts_with("mmproj")) {
        return None;
    }
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let split = name.rsplit_once("-of-").filter(|(_, count)| digits(count));
    match split.and_then(|(rest, _)| rest.rsplit_once('-')).filter(|(_, part)| digits(part)) {
        Some((name, "00001")) => Some(name),
        Some(_) => None,
        None => Some(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_a_directory() {
        let root = std::env::temp_dir().join(format!("kvant-models-dir-{}", std::process::id()));
        for file in [
            "b/config.json",
            "b/model.safetensors",
            "org/a/config.json",
            "org/gguf/x-Q4.gguf",
            "org/gguf/mmproj-x.gguf",
            "split-00001-of-00002.gguf",
            "split-00002-of-00002.gguf",
            ".hidden/config.json",
            "notes.txt",
            "too/deep/in/here/config.json",
        ] {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "{}").unwrap();
        }
        let names: Vec<String> = found(&root).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["b", "org/a", "org/gguf/x-Q4", "split"]);
        fs::remove_dir_all(&root).unwrap();
        assert!(found(&root).is_err());
    }
}
