//! Models in the cache that Hugging Face's libraries keep on disk.

use std::{
    env,
    path::{Component, Path, PathBuf},
};

use crate::Result;

/// Whether a path that does not exist looks like `organisation/model`. If its first part is a directory, it is a
/// mistyped path.
pub fn is_name(path: &Path) -> bool {
    let parts: Vec<Component> = path.components().collect();
    let &[Component::Normal(organisation), Component::Normal(_)] = &parts[..] else { return false };
    !Path::new(organisation).exists()
}

/// The directory of `organisation/model` in the cache: the snapshot of its main branch. `None` if it is not there.
///
/// # Errors
/// A cache that is damaged: a branch without its snapshot, or that is no commit.
pub fn find(name: &Path) -> Result<Option<PathBuf>> {
    match directory(|variable| env::var_os(variable).map(PathBuf::from)) {
        Some(cache) => find_in(&cache, name),
        None => Ok(None),
    }
}

/// The cache, as `huggingface_hub` finds it.
fn directory(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
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

fn find_in(cache: &Path, name: &Path) -> Result<Option<PathBuf>> {
    let Some(name) = name.to_str() else { return Ok(None) };
    let repository = cache.join(format!("models--{}", name.replace(['/', '\\'], "--")));
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
        return Ok(Some(snapshot));
    }
    Err(format!("{}: there is no such directory, but {} names it", snapshot.display(), branch.display()).into())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn names_of_the_hub() {
        assert!(is_name(Path::new("google/gemma-3-1b-it")));
        for path in ["gemma", "/google/gemma", "./google", "../google/gemma", "a/b/c", "src/gemma"] {
            assert!(!is_name(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn the_cache_is_where_python_looks() {
        let of = |pairs: &[(&str, &str)]| {
            let pairs: Vec<_> = pairs.iter().map(|(name, value)| (name.to_string(), PathBuf::from(value))).collect();
            directory(|name| pairs.iter().find(|(given, _)| given == name).map(|(_, value)| value.clone()))
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
        let name = Path::new("org/name");
        assert_eq!(find_in(&cache, name).unwrap(), None);
        fs::create_dir_all(repository.join("refs")).unwrap();
        let commit = "0123456789abcdef0123456789abcdef01234567";
        fs::write(repository.join("refs/main"), commit).unwrap();
        let error = find_in(&cache, name).unwrap_err().to_string();
        assert!(error.contains(commit) && error.contains("refs"), "{error}");
        let snapshot = repository.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        assert_eq!(find_in(&cache, name).unwrap(), Some(snapshot));
        for bad in ["", "../../..", "a/b"] {
            fs::write(repository.join("refs/main"), bad).unwrap();
            assert!(find_in(&cache, name).unwrap_err().to_string().contains("commit"), "{bad:?}");
        }
        fs::remove_dir_all(cache).unwrap();
    }
}
