//! Models in the on-disk cache of Hugging Face's libraries.

use std::{
    env, fmt,
    path::{Component, Path, PathBuf},
};

use crate::result::Result;

/// A model of the hub: `organisation/model`, or `organisation/model/FILE.gguf`.
#[derive(Clone, Debug, PartialEq)]
pub struct HubName {
    organisation: String,
    model: String,
    file: Option<String>,
}

impl HubName {
    /// Parses a path that does not exist as a name. If its first component is a directory, it is treated as a mistyped
    /// path.
    pub fn parse(path: &Path) -> Option<HubName> {
        let text = |part: Component| match part {
            Component::Normal(part) => part.to_str().filter(|part| is_plain(part)).map(String::from),
            _ => None,
        };
        let parts: Vec<String> = path.components().map(text).collect::<Option<_>>()?;
        let (organisation, model, file) = match &parts[..] {
            [organisation, model] => (organisation, model, None),
            [organisation, model, file] if file.ends_with(".gguf") => (organisation, model, Some(file.clone())),
            _ => return None,
        };
        let name = HubName { organisation: organisation.clone(), model: model.clone(), file };
        (!Path::new(&name.organisation).exists()).then_some(name)
    }

    pub fn repository(&self) -> String {
        format!("{}/{}", self.organisation, self.model)
    }

    #[cfg(feature = "download")]
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }
}

/// Whether a part has only characters that names on the hub can contain.
fn is_plain(part: &str) -> bool {
    part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository())?;
        self.file.iter().try_for_each(|file| write!(f, "/{file}"))
    }
}

/// Returns the cached model: the snapshot of its main branch, or a file in it. `None` if it is not cached.
///
/// # Errors
/// The cache is damaged: a branch has no snapshot, or does not name a commit.
pub fn find(name: &HubName) -> Result<Option<PathBuf>> {
    match directory() {
        Some(cache) => find_in(&cache, name),
        None => Ok(None),
    }
}

/// The cache directory, located as by `huggingface_hub`.
pub fn directory() -> Option<PathBuf> {
    directory_of(|variable| env::var_os(variable).map(PathBuf::from))
}

fn directory_of(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let home = || variable("HOME").or_else(|| variable("USERPROFILE"));
    let set = |name| variable(name).filter(|path| !path.as_os_str().is_empty());
    let expanded = |path: PathBuf| match path.strip_prefix("~") {
        Ok(rest) => home().map(|home| home.join(rest)),
        Err(_) => Some(path),
    };
    if let Some(cache) = set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE")) {
        return expanded(cache);
    }
    let hf_home = match (set("HF_HOME"), set("XDG_CACHE_HOME")) {
        (Some(path), _) => expanded(path),
        (None, Some(path)) => expanded(path).map(|path| path.join("huggingface")),
        (None, None) => home().map(|home| home.join(".cache").join("huggingface")),
    };
    Some(hf_home?.join("hub"))
}

fn find_in(cache: &Path, name: &HubName) -> Result<Option<PathBuf>> {
    let repository = cache.join(format!("models--{}--{}", name.organisation, name.model));
    let branch = repository.join("refs").join("main");
    let commit = match std::fs::read_to_string(&branch) {
        Ok(commit) => commit,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("{}: {error}", branch.display()).into()),
    };
    let commit = commit.trim();
    if commit.is_empty() || !commit.chars().all(|c| c.is_ascii_alphanumeric()) {
        return Err(format!("{}: expected the name of a commit", branch.display()).into());
    }
    let snapshot = repository.join("snapshots").join(commit);
    if snapshot.is_dir() {
        let place = name.file.as_ref().map_or(snapshot.clone(), |file| snapshot.join(file));
        return Ok(place.exists().then_some(place));
    }
    Err(format!("{}: there is no such directory, but {} names it", snapshot.display(), branch.display()).into())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn names_of_the_hub() {
        for name in ["google/gemma-3-1b-it", "ggml-org/gpt-oss-20b-GGUF/gpt-oss-20b-mxfp4.gguf"] {
            assert_eq!(HubName::parse(Path::new(name)).unwrap().to_string(), name);
        }
        for path in ["gemma", "/google/gemma", "./google", "../google/gemma", "a/b/c", "src/gemma", "a/b?c", "a/b c"] {
            assert_eq!(HubName::parse(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn the_cache_is_where_python_looks() {
        let of = |pairs: &[(&str, &str)]| {
            let pairs: Vec<_> = pairs.iter().map(|(name, value)| (name.to_string(), PathBuf::from(value))).collect();
            directory_of(|name| pairs.iter().find(|(given, _)| given == name).map(|(_, value)| value.clone()))
        };
        let home = ("HOME", "/home/u");
        assert_eq!(of(&[]), None);
        for (variables, expected) in [
            (&[home][..], "/home/u/.cache/huggingface/hub"),
            (&[home, ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[home, ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "~/hf")], "/home/u/hf/hub"),
            (&[home, ("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[home, ("HF_HOME", "")], "/home/u/.cache/huggingface/hub"),
        ] {
            assert_eq!(of(variables), Some(expected.into()), "{variables:?}");
        }
    }

    #[test]
    fn the_main_branch_names_the_snapshot() {
        let cache = env::temp_dir().join(format!("kvant-hub-{}", std::process::id()));
        let repository = cache.join("models--org--name");
        let name = &HubName::parse(Path::new("org/name")).unwrap();
        assert_eq!(find_in(&cache, name).unwrap(), None);
        fs::create_dir_all(repository.join("refs")).unwrap();
        let commit = "0123456789abcdef0123456789abcdef01234567";
        fs::write(repository.join("refs/main"), commit).unwrap();
        let error = find_in(&cache, name).unwrap_err().to_string();
        assert!(error.contains(commit) && error.contains("refs"), "{error}");
        let snapshot = repository.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        assert_eq!(find_in(&cache, name).unwrap(), Some(snapshot.clone()));
        let file = HubName::parse(Path::new("org/name/a.gguf")).unwrap();
        assert_eq!(find_in(&cache, &file).unwrap(), None);
        fs::write(snapshot.join("a.gguf"), "").unwrap();
        assert_eq!(find_in(&cache, &file).unwrap(), Some(snapshot.join("a.gguf")));
        for bad in ["", "../../..", "a/b"] {
            fs::write(repository.join("refs/main"), bad).unwrap();
            assert!(find_in(&cache, name).unwrap_err().to_string().contains("commit"), "{bad:?}");
        }
        fs::remove_dir_all(cache).unwrap();
    }
}
